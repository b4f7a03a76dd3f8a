"""Which contributions and reports the syncer takes, and what becomes of those it refuses."""

from typing import Any

import msgspec
import pytest
from tests.protocol.world import World

from atoll.protocol.effects import Note
from atoll.protocol.messages import Contribution, Heartbeat, Progress, Pull, Recover, Refused
from atoll.protocol.records import GoneRecord
from atoll.protocol.syncer import contributions
from atoll.protocol.syncer import effects as fx
from atoll.protocol.tape import BeganEntry, InformedEntry


def pulled(**settings: Any) -> tuple[World, Contribution]:
    """A world in which learner-0 has been asked, with the honest answer it has not given yet."""
    world = World(2, fragments=2, sync_every=4, overlap=2, quorum=1, **settings).run_until(round=6)
    world.learners["learner-0"].answers = False
    while not (asked := [p for _, p in world.sent(Pull, "learner-0") if p.round >= 6]):
        world.run_until(seconds=0.01)
    base = world.syncer.versions[asked[0].fragment]
    answer = Contribution(
        round=asked[0].round, attempt=1, fragment=asked[0].fragment, base=base, t=24, steps=4, tokens=40, digest="d"
    )
    return world, signed(world, answer)


def signed(world: World, answer: Contribution) -> Contribution:
    """As learner-0 says it now."""
    machine = world.learners["learner-0"].machine
    own = {"run": machine.run, "learner": machine.name, "incarnation": machine.incarnation, "term": machine.term}
    total = world.syncer.members.learners["learner-0"].tokens_total + 1000
    return msgspec.structs.replace(answer, **own, total=total)


def give(world: World, answer: Contribution, refusal: str | None = None, **changes: Any) -> list[fx.SyncerEffect]:
    world.payloads["learner-0", answer.round, answer.attempt] = 1.0
    return world.inject(fx.Delivered("learner-0", msgspec.structs.replace(answer, **changes), refusal))


def refusals(effects: list[fx.SyncerEffect]) -> list[str]:
    return [str(effect.data["reason"]) for effect in effects if isinstance(effect, Note) and effect.kind == "refused"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fragment": 1}, "it is fragment 1, the round takes 0"),
        ({"base": 99}, "its base is version 99, which this run never committed"),
        ({"base": -1}, "its base is version -1, which this run never committed"),
        ({"base": 0}, "its base is version 0, but version 3 already contains its steps"),
        ({"steps": -1, "total": 99}, "its counters are below zero: -1 steps, 40 tokens of 99, step 24, position -1"),
        ({"tokens": -5, "total": 99}, "its counters are below zero: 4 steps, -5 tokens of 99, step 24, position -1"),
        ({"total": -(2**63)}, f"its counters are below zero: 4 steps, 40 tokens of {-(2**63)}, step 24, position -1"),
        ({"t": -1, "total": 99}, "its counters are below zero: 4 steps, 40 tokens of 99, step -1, position -1"),
        ({"position": -2, "total": 99}, "its counters are below zero: 4 steps, 40 tokens of 99, step 24, position -2"),
        ({"total": 39}, "it names 40 tokens, its process has had 39 in all"),
        ({"total": 2**48}, "its counters are such as no run reaches"),
        ({"position": 2**63 - 1}, "its counters are such as no run reaches"),
    ],
)
def test_a_contribution_against_the_rules_is_refused_with_its_reason(changes: dict[str, int], reason: str) -> None:
    world, answer = pulled()
    assert refusals(give(world, answer, **changes)) == [reason]
    assert world.syncer.members.learners["learner-0"].strikes == 1


@pytest.mark.parametrize("changes", [{"attempt": 2}, {"attempt": 0}, {"round": 3}, {"round": 700}])
def test_an_answer_nobody_waits_for_is_discarded_without_a_strike(changes: dict[str, int]) -> None:
    world, answer = pulled()
    effects = give(world, answer, **changes)
    assert [type(effect) for effect in effects] == [fx.Discard]
    assert world.syncer.members.learners["learner-0"].strikes == 0


def test_a_duplicate_changes_nothing() -> None:
    """Above all it does not throw away the body of the first, which is not merged yet."""
    world = World(2, fragments=2, sync_every=4, quorum=2).run_until(round=6)
    for learner in world.learners.values():
        learner.answers = False
    while not (asked := [p for _, p in world.sent(Pull, "learner-0") if p.round >= 6]):
        world.run_until(seconds=0.01)
    given = {"fragment": asked[0].fragment, "base": world.syncer.versions[asked[0].fragment], "digest": "d"}
    answer = signed(world, Contribution(round=asked[0].round, attempt=1, t=24, steps=4, tokens=40, **given))
    give(world, answer)
    assert give(world, answer) == []
    assert ("learner-0", answer.round, 1) in world.payloads


def test_an_answer_of_an_earlier_incarnation_is_discarded() -> None:
    world, answer = pulled()
    world.join("learner-0")
    assert [type(effect) for effect in give(world, answer)] == [fx.Discard]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"run": "another"}, "learner-0 (incarnation 1) in run another, this channel of learner-0 (incarnation 1)"),
        ({"learner": "learner-1"}, "it is of learner-1 (incarnation 1)"),
        ({"incarnation": 2}, "it is of learner-0 (incarnation 2)"),
        ({"incarnation": 0}, "it is of learner-0 (incarnation 0)"),
        ({"run": "", "learner": ""}, "it is of nobody (incarnation 1) in run none"),
        ({"run": "", "learner": "", "incarnation": 0}, "it is of nobody (incarnation 0) in run none"),
        ({"term": 7}, "it is of term 7, the run is in term"),
    ],
)
def test_what_is_not_its_own_to_give_is_refused_and_told_without_a_strike(changes: dict[str, Any], says: str) -> None:
    world, answer = pulled()
    effects = give(world, answer, **changes)
    assert says in refusals(effects)[0]
    told = [effect.message for effect in effects if isinstance(effect, fx.Send)]
    assert isinstance(told[0], Refused) and says in told[0].reason and not told[0].final
    assert ("learner-0", answer.round, 1) not in world.payloads, "merged into nothing"
    assert world.syncer.members.learners["learner-0"].strikes == 0
    world.run_until(round=answer.round + 1)
    assert world.members(answer.round) == {"learner-1"}


def test_a_probe_that_is_not_its_own_proves_nothing() -> None:
    world, answer = pulled()
    learner = world.syncer.members.learners["learner-0"]
    learner.muted = True
    assert refusals(give(world, answer, probe=True, run="another"))
    assert learner.muted


def test_what_is_not_its_own_does_not_throw_away_what_was_given() -> None:
    world = World(2, fragments=2, sync_every=4, quorum=2).run_until(round=6)
    for learner in world.learners.values():
        learner.answers = False
    while not (asked := [p for _, p in world.sent(Pull, "learner-0") if p.round >= 6]):
        world.run_until(seconds=0.01)
    given = {"fragment": asked[0].fragment, "base": world.syncer.versions[asked[0].fragment], "digest": "d"}
    answer = signed(world, Contribution(round=asked[0].round, attempt=1, t=24, steps=4, tokens=40, **given))
    give(world, answer)
    assert give(world, answer, run="another") == []
    assert ("learner-0", answer.round, 1) in world.payloads


def test_right_after_a_takeover_nobody_is_refused_for_its_term() -> None:
    """Whoever is asked was welcomed by the new term; what was asked by the old one dies with its channel."""
    world = World(3, fragments=2, sync_every=4, latency_s=0.2).run_until(round=6)
    for _ in range(5):
        world.crash_syncer()
        world.run_until(seconds=7.3)
    assert not world.said("refused") and world.syncer.committed > 15


def test_no_steps_is_nothing_to_give_and_no_strike() -> None:
    world, answer = pulled()
    assert refusals(give(world, answer, steps=0, tokens=0)) == []
    assert world.syncer.members.learners["learner-0"].strikes == 0


def test_the_answers_own_counters_are_weighed_not_the_reports() -> None:
    world, answer = pulled()
    give(world, answer, steps=2, tokens=50)
    world.run_until(round=answer.round + 1)
    mine = next(m for m in world.round_note(answer.round)["members"] if m["learner"] == "learner-0")
    assert mine["weight"] == 50 * 50 / 2


def test_three_refusals_in_a_row_lead_through_recovery_back_to_contributing() -> None:
    world = World(3, fragments=4, sync_every=4, latency_s=0.05).run_until(round=6)
    world.learners["learner-1"].broken = True
    world.run_until(seconds=30)
    assert len(world.said("refused")) == 3
    assert [note.data["learner"] for note in world.said("quarantined")] == ["learner-1"]
    assert len(world.sent(Recover)) == 1
    again = [note for note in world.said("recovered") if note.data["learner"] == "learner-1"]
    assert [note.data["incarnation"] for note in again] == [1, 2]
    assert "learner-1" in world.members(world.syncer.committed - 1)


def test_a_name_that_is_quarantined_again_and_again_is_shut_out_for_longer_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contributions, "FORGIVEN_S", 150.0)
    world = World(3, fragments=2, sync_every=2, overlap=1, latency_s=0.05).run_until(round=6)
    for times in range(1, 5):
        world.learners["learner-1"].broken = True
        world.run_until(seconds=1)
        while sum(note.data["learner"] == "learner-1" for note in world.said("recovered")) < times + 1:
            world.run_until(seconds=1)
    quarantines = [(note.data["times"], note.data["wait_s"]) for note in world.said("quarantined")]
    assert quarantines == [(1, 0.0), (2, 10.0), (3, 20.0), (4, 40.0)]
    began = [at for at, note in world.notes if note.kind == "quarantined"]
    back = [at for at, note in world.notes if note.kind == "recovered" and note.data["learner"] == "learner-1"][1:]
    for (_, wait_s), start, end in zip(quarantines, began, back, strict=True):
        assert wait_s <= end - start < wait_s + 10
    text = "after 3 refusals since its last accepted contribution (3 times of late: no round takes from it for 20 s)"
    assert f"learner-1 is in quarantine {text}" in world.said("quarantined")[2].text
    world.run_until(seconds=200)
    world.learners["learner-1"].broken = True
    world.run_until(seconds=30)
    assert world.said("quarantined")[-1].data["wait_s"] == 0.0, "in time it is forgiven"


def test_nobody_is_shut_out_of_a_run_that_would_stand_still() -> None:
    world = World(1, fragments=2, sync_every=2, overlap=1, latency_s=0.05).run_until(round=6)
    for times in range(1, 4):
        world.learners["learner-0"].broken = True
        while len(world.said("quarantined")) < times:
            world.run_until(seconds=1)
    before = world.syncer.committed
    world.run_until(seconds=8)
    assert world.said("quarantined")[-1].data["wait_s"] == 20.0 and world.syncer.committed > before


def test_a_report_from_before_the_recovery_does_not_count_as_recovered() -> None:
    world = World(2, fragments=2, sync_every=2, overlap=1, latency_s=0.3).run_until(round=6)
    world.learners["learner-1"].broken = True
    while not world.said("quarantined"):
        world.run_until(seconds=0.01)
    learner = world.syncer.members.learners["learner-1"]
    old = Progress(t=learner.t, steps=(1, 1), tokens=(10, 10), versions=tuple(world.syncer.versions), incarnation=1)
    world.inject(fx.Received("learner-1", msgspec.structs.replace(old, tokens_total=learner.tokens_total)))
    assert learner.state == "joining"


def test_a_recovery_asked_for_while_the_link_broke_is_made_up_for() -> None:
    world = World(2, fragments=2, sync_every=2, overlap=1, latency_s=0.3).run_until(round=6)
    world.learners["learner-1"].broken = True
    while not world.said("quarantined"):
        world.run_until(seconds=0.01)
    world.unlink("learner-1")
    world.link("learner-1")
    world.run_until(seconds=10)
    assert not world.learners["learner-1"].broken, "its inner optimizer has started afresh"
    assert world.syncer.members.learners["learner-1"].incarnation == 2


def test_a_good_contribution_wipes_out_strikes() -> None:
    world, answer = pulled()
    world.syncer.members.learners["learner-0"].strikes = 2
    give(world, answer)
    assert world.syncer.members.learners["learner-0"].strikes == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"steps": (1,)}, "a report of 1 fragments in a run of 2"),
        ({"tokens": (1, 2, 3)}, "a report of 2 fragments in a run of 2"),
        ({"steps": (-1, 0)}, "a report with counters below zero"),
        ({"offer": -2}, "a report with counters below zero"),
        ({"aims": -(2**63)}, "a report with counters below zero"),
        ({"position": -2}, "a report with counters below zero"),
        ({"versions": (-2, 0)}, "a report with counters below zero"),
        ({"counted": (0, -(2**63))}, "a report with counters below zero"),
        ({"counted": (0, 2**48)}, "a report with counters that no run reaches"),
        ({"offer": 2**62}, "a report with counters that no run reaches"),
        ({"tokens_total": 2**48}, "a report with counters that no run reaches"),
        ({"tokens": (2**63 - 1, 0)}, "a report with counters that no run reaches"),
        ({"t": 1}, "its counters went back: step 1 after step 6"),
        ({"versions": (99, 0)}, "a report of versions that this run never committed"),
        ({"taped": -1}, "its tape goes on at entry -1"),
        ({"taped": 2**63, "tape": (InformedEntry(0, 0),)}, f"its tape goes on at entry {2**63}"),
        ({"tape": (InformedEntry(0, 0),) * 20_000}, "it said more of its tape than a learner keeps"),
        ({"tape": (BeganEntry(0, 1, "x" * 900, "", "", True),) * 400}, "it said more of its tape than a learner keeps"),
        ({"incarnation": 99, "tape": (InformedEntry(0, 0),)}, "a report of incarnation 99, which has not begun"),
    ],
)
def test_a_report_that_cannot_be_closes_the_channel(changes: dict[str, Any], reason: str) -> None:
    world = World(2, fragments=2, sync_every=2, overlap=1).run_until(round=6)
    known = world.syncer.members.learners["learner-0"]
    report = Progress(
        t=known.t,
        steps=(1, 1),
        tokens=(1, 1),
        versions=known.versions,
        tokens_total=known.tokens_total,
        incarnation=1,
        dropped=(0, 0),
        counted=known.versions,
    )
    effects = world.inject(fx.Received("learner-0", msgspec.structs.replace(report, **changes)))
    [expel] = [effect for effect in effects if isinstance(effect, fx.Expel)]
    assert (expel.learner, expel.reason) == ("learner-0", reason)
    world.run_until(round=10)
    assert world.members(9) == {"learner-1"}


def test_what_cannot_be_written_down_is_no_part_of_the_history() -> None:
    world = World(2).run_until(round=2)
    before = msgspec.msgpack.encode(world.syncer.history.state())
    with pytest.raises(OverflowError):
        world.syncer.state.out.persist(GoneRecord("learner-0", 1, 0, 2**64, (0, 0), (0, 0)))
    assert msgspec.msgpack.encode(world.syncer.history.state()) == before


def test_a_clock_holds_the_rounds_of_the_syncer_whatever_a_learner_says() -> None:
    world = World(2).run_until(round=2)
    clock = {"learner-1": 999, "nobody": 5, "syncer": 999, **{str(number): 1 for number in range(100)}}
    world.inject(fx.Received("learner-0", Heartbeat(clock=clock)))
    assert world.syncer.state.out.clock == {"syncer": world.syncer.committed}
