"""Claims beyond what a learner can have are refused, struck and end in quarantine; honest ones never are."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.protocol.world import TENSORS, World

from atoll.protocol.effects import Note
from atoll.protocol.messages import PROTOCOL, Contribution, FromLearner, Hello, Progress, Recover, Register
from atoll.protocol.records import JoinedRecord, MergedRecord
from atoll.protocol.syncer import effects as fx
from atoll.simulate.oracle import Violation


class Trusting(World):
    """A world that may be lied to: refusals of claims are what is tested here."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        note = self.invariants._watch_note
        self.invariants._watch_note = lambda syncer, said: None if said.kind == "refused" else note(syncer, said)


def at_work(learners: int = 3, **settings: Any) -> Trusting:
    """Past the steps that it takes to know what is usual."""
    world = Trusting(learners, fragments=2, sync_every=4, **settings)
    world.run_until(seconds=60)
    return world


def last_report(world: World, name: str = "learner-0") -> Progress:
    """The next that it makes."""
    learner = world.learners[name]
    said: list[Progress] = []
    say = learner._say

    def listen(message: FromLearner) -> None:
        if isinstance(message, Progress):
            said.append(message)
        say(message)

    learner._say = listen  # type: ignore[method-assign]
    while not said:
        world.run_until(seconds=0.1)
    learner._say = say  # type: ignore[method-assign]
    return said[-1]


def refusals(effects: list[fx.SyncerEffect]) -> list[str]:
    return [str(e.data["reason"]) for e in effects if isinstance(e, Note) and e.kind == "refused"]


def boast(world: World, report: Progress, tokens: int, steps: int = 1) -> list[fx.SyncerEffect]:
    known = world.syncer.members.learners["learner-0"]
    said = msgspec.structs.replace(report, t=known.t + steps, tokens_total=known.tokens_total + tokens)
    return world.inject(fx.Received("learner-0", said))


def test_a_report_of_a_thousand_times_the_tokens_is_refused_and_changes_nothing() -> None:
    world = at_work()
    report = last_report(world)
    known = world.syncer.members.learners["learner-0"]
    before = (known.t, known.tokens_total)
    effects = boast(world, report, 10_000)
    assert "tokens per step, where 10 are usual" in refusals(effects)[0]
    assert (known.t, known.tokens_total) == before and known.strikes == 1


def test_three_of_them_lead_into_quarantine() -> None:
    world = at_work()
    report = last_report(world)
    effects = [effect for _ in range(3) for effect in boast(world, report, 10_000)]
    assert len(refusals(effects)) == 3
    assert [e.message for e in effects if isinstance(e, fx.Send) and isinstance(e.message, Recover)]
    assert world.syncer.members.learners["learner-0"].usual.steps == 0, "another life, judged by itself"


def answer(world: World, **changes: Any) -> tuple[Contribution, list[fx.SyncerEffect]]:
    """Lie in what learner-0 says of its next contribution."""
    said: list[tuple[Contribution, list[fx.SyncerEffect]]] = []
    learner = world.learners["learner-0"]
    say = learner._say

    def lie(message: Any) -> None:
        if isinstance(message, Contribution) and not said:
            given = msgspec.structs.replace(message, **{k: f(message) for k, f in changes.items()})
            said.append((given, world.inject(fx.Delivered("learner-0", given))))
        else:
            say(message)

    learner._say = lie  # type: ignore[method-assign]
    while not said:
        world.run_until(seconds=0.1)
    learner._say = say  # type: ignore[method-assign]
    return said[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": lambda given: given.total}, "were left to give"),
        ({"tokens": lambda given: 10**6, "total": lambda given: 10**7}, "tokens per step, where 10 are usual"),
    ],
)
def test_a_contribution_that_claims_too_much_is_refused(changes: dict[str, Any], says: str) -> None:
    world = at_work()
    given, effects = answer(world, **changes)
    assert says in refusals(effects)[0]
    assert world.syncer.members.learners["learner-0"].strikes == 1
    world.run_until(round=given.round + 1)
    assert "learner-0" not in world.members(given.round)


def joined_late(tokens_per_step: int) -> Trusting:
    """One that joins a run of three that are known, and says that its steps have so many tokens."""
    world = at_work(4, present=3)
    world.join("learner-3").tokens_per_step = tokens_per_step
    world.run_until(seconds=20)
    return world


def test_a_newcomer_is_judged_by_what_the_others_are_like() -> None:
    world = joined_late(100_000)
    [first, *_] = [note.data["reason"] for note in world.said("refused")]
    assert first == "1e+05 tokens per step, where 10 are usual"
    assert all("learner-3" not in world.members(number) for number in range(world.syncer.committed))


def test_one_learner_alone_sets_nobodys_measure() -> None:
    """It made thousands of steps of next to no tokens, and is known; the others are not judged by that."""
    world = Trusting(3, present=1, fragments=2, sync_every=4)
    world.learners["learner-0"].tokens_per_step = 1
    world.run_until(seconds=60)
    for name in ("learner-1", "learner-2"):
        world.join(name).tokens_per_step = 10_000
    world.run_until(seconds=30)
    assert not world.said("refused")
    assert world.members(world.syncer.committed - 1) == {"learner-0", "learner-1", "learner-2"}


@pytest.mark.parametrize("tokens_per_step", [1, 40, 640])
def test_a_newcomer_on_other_hardware_is_believed(tokens_per_step: int) -> None:
    world = joined_late(tokens_per_step)
    assert not world.said("refused") and "learner-3" in world.members(world.syncer.committed - 1)


@pytest.mark.parametrize("learners", [3, 4, 8])
def test_no_newcomer_takes_a_merge(learners: int) -> None:
    world = at_work(learners, present=learners - 1)
    world.join(f"learner-{learners - 1}").tokens_per_step = 640
    world.run_until(seconds=20)
    members = world.round_note(world.syncer.committed - 1)["members"]
    weights = {member["learner"]: member["weight"] for member in members}
    share = weights.pop(f"learner-{learners - 1}") / (sum(weights.values()) or 1.0)
    assert len(weights) < 2 or share <= 8.0 / (len(weights) * 0.5)


def test_an_honest_contribution_is_believed() -> None:
    world = at_work()
    _, effects = answer(world)
    assert refusals(effects) == []


@pytest.mark.parametrize(
    ("position", "says"),
    [(10**6, "it says it took 1000000 samples, "), (99, "its place in its leases went back from 100 to 99")],
)
def test_a_place_beyond_its_leases_is_refused(position: int, says: str) -> None:
    world = at_work(2)
    known = world.syncer.members.learners["learner-0"]
    report = last_report(world)
    world.inject(fx.Received("learner-0", Register(datasets=(("text", 20_000, 1.0),), epochs=0, batch=2)))
    known.position = 100
    said = msgspec.structs.replace(report, t=known.t, tokens_total=known.tokens_total, position=position)
    effects = world.inject(fx.Received("learner-0", said))
    assert says in refusals(effects)[0] and known.strikes == 1


def test_the_simulator_does_not_let_an_honest_claim_be_refused() -> None:
    world = World(3, fragments=2, sync_every=4)
    world.run_until(seconds=60)
    with pytest.raises(Violation, match="an honest claim is believed"):
        boast(world, last_report(world), 10_000)


def test_a_weight_above_the_limit_is_cut_and_the_round_says_so() -> None:
    """One of four has steps of forty times the tokens, honestly: it counts like any other at first, then for two
    fifths, also in the journal."""
    world = World(4, fragments=1, sync_every=4)
    world.learners["learner-3"].tokens_per_step = 400
    world.run_until(round=20)
    assert share_of(world, 3, "learner-3") == pytest.approx(1 / 4)
    note = world.round_note(19)
    assert "weight limited by the median of the others: learner-3 from" in note["reason"]
    weights = {member["learner"]: member["weight"] for member in note["members"]}
    assert weights["learner-3"] == pytest.approx(2 / 5 * sum(weights.values()))
    persisted = [record for _, effect in world.log if isinstance(effect, fx.Persist) for record in effect.records]
    merged = next(record for record in persisted if isinstance(record, MergedRecord) and record.round == 19)
    assert {share.learner: share.weight for share in merged.members} == weights and merged.reason == note["reason"]


def test_the_operator_can_allow_one_learner_more() -> None:
    world = World(4, fragments=1, sync_every=4, weight_limits={"learner-3": 3.0})
    world.learners["learner-3"].tokens_per_step = 400
    world.run_until(round=4)
    assert share_of(world, 3, "learner-3") == pytest.approx(1 / 2)


def share_of(world: World, number: int, learner: str) -> float:
    weights = {member["learner"]: member["weight"] for member in world.round_note(number)["members"]}
    return float(weights[learner] / sum(weights.values()))


# ---- tokens per step that were declared -----------------------------------------------------------------------------


def declared(tokens_per_step: int, **settings: Any) -> Trusting:
    """Three learners of 10 tokens per step; the first has declared how many it has at most."""
    world = at_work(3, **settings)
    world.syncer.members.learners["learner-0"].declared = tokens_per_step
    return world


def test_what_a_learner_declares_when_it_joins_is_journaled_and_told() -> None:
    world = Trusting(2, fragments=2, sync_every=4)
    hello = Hello(protocol=PROTOCOL, learner="large", session="s", tensors=TENSORS, tokens_per_step=4096)
    effects = world.inject(fx.Greeted(hello))
    persisted = [record for effect in effects if isinstance(effect, fx.Persist) for record in effect.records]
    assert [(one.learner, one.declared) for one in persisted if isinstance(one, JoinedRecord)] == [("large", 4096)]
    assert [e.data["declared"] for e in effects if isinstance(e, Note) and e.kind == "joined"] == [4096]


def test_a_hello_with_tokens_below_zero_is_refused() -> None:
    world = Trusting(2, fragments=2, sync_every=4)
    hello = Hello(protocol=PROTOCOL, learner="x", session="s", tensors=TENSORS, tokens_per_step=-1)
    assert "a hello with -1 tokens per step" in refusals(world.inject(fx.Greeted(hello)))[0]
    assert "x" not in world.syncer.members.learners


def test_a_report_of_more_tokens_than_were_declared_is_refused() -> None:
    """Seven times its tokens is within what chance brings (claims.MAX_RATIO), but not what it said it has."""
    world = declared(10)
    report = last_report(world)
    said = refusals(boast(world, report, 71))
    assert said == ["71 tokens in 1 steps, where 10 per step were declared when it joined"]
    known, scrutiny = world.syncer.members.learners["learner-0"], world.syncer.contributions.scrutiny
    three = msgspec.structs.replace(report, t=known.t + 3, tokens_total=known.tokens_total + 30)
    assert scrutiny.check_report(world.queue.now, known, three) is None
    known.declared = 0
    seven = msgspec.structs.replace(report, t=known.t + 1, tokens_total=known.tokens_total + 71)
    assert scrutiny.check_report(world.queue.now, known, seven) is None, "nothing was declared"


def test_a_contribution_of_more_tokens_than_were_declared_is_refused() -> None:
    _, effects = answer(declared(10))
    assert refusals(effects) == []
    fewer = {"steps": lambda given: given.steps - 1}
    _, effects = answer(declared(10), **fewer)
    assert "where 10 per step were declared when it joined" in refusals(effects)[0]
    _, effects = answer(declared(0), **fewer)
    assert refusals(effects) == [], "nothing was declared"


def test_one_with_far_more_tokens_per_step_than_the_others_is_told_of_once() -> None:
    """As 7x claims from the first step on: nothing is refused, its weight is limited, and the events name it."""
    world = World(4, fragments=2, sync_every=4)
    world.learners["learner-3"].tokens_per_step = 70
    world.run_until(seconds=120)
    (told,) = world.said("above")
    assert told.data["learner"] == "learner-3" and "70 tokens per step, 7 times the median of the others" in told.text
    assert share_of(world, world.syncer.committed - 1, "learner-3") <= 2 / 5 + 1e-9


def test_one_that_the_operator_allows_more_is_not_told_of() -> None:
    world = World(4, fragments=2, sync_every=4, weight_limits={"learner-3": 8.0})
    world.learners["learner-3"].tokens_per_step = 70
    world.run_until(seconds=120)
    assert world.said("above") == []
