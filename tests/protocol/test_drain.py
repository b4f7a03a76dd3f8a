"""The end of a run: budgets, and one unpaced cycle that brings the last steps in."""

import random
from typing import Any

import pytest
from tests.protocol.world import World

from atoll.protocol.messages import Pull, Refused
from atoll.protocol.syncer.effects import Greeted, Persist, Send
from atoll.protocol.syncer.rounds import SILENT_BEATS


def all_merged(world: World) -> None:
    for name, learner in world.learners.items():
        if learner.alive:
            assert learner.steps == [0] * world.settings.fragments, f"{name} has steps that no version contains"
            assert learner.adopted == world.syncer.versions
            assert learner.over and not learner.failed


@pytest.mark.parametrize("latency_s", [0.0, 0.05, 0.4])
@pytest.mark.parametrize("adopt", ["overwrite", "carry"])
@pytest.mark.parametrize("synchronous", [False, True])
def test_a_budget_in_steps_ends_the_run_with_all_steps_merged(latency_s: float, adopt: str, synchronous: bool) -> None:
    settings: dict[str, Any] = {"fragments": 4, "sync_every": 8, "steps": 40, "overlap": 1}
    world = World(3, latency_s=latency_s, adopt=adopt, synchronous=synchronous, **settings).run_to_end()
    assert world.said("ending")[0].text == "the run ends: 40 steps are done; the last steps are collected"
    assert world.syncer.progress == 1.0
    all_merged(world)


def test_with_carry_every_step_is_merged_exactly_once() -> None:
    world = World(3, fragments=3, sync_every=6, steps=60, adopt="carry", latency_s=0.3, step_s=[1.0, 0.8, 1.3])
    world.run_to_end()
    for name, learner in world.learners.items():
        assert [world.merged_steps(name, fragment) for fragment in range(3)] == [learner.t] * 3


def test_with_carry_a_lost_announcement_does_not_merge_steps_twice() -> None:
    world = World(2, fragments=2, sync_every=4, steps=60, adopt="carry", latency_s=0.2)
    for at in range(5, 50, 3):
        world.at(at + 0.37, lambda: world.unlink("learner-0"))
        world.at(at + 1.1, lambda: world.link("learner-0"))
    world.run_to_end()
    learner = world.learners["learner-0"]
    assert [world.merged_steps("learner-0", fragment) for fragment in range(2)] == [learner.t] * 2


def test_a_budget_in_tokens_ends_the_run() -> None:
    world = World(2, fragments=2, sync_every=4, tokens=400).run_to_end()
    assert world.said("ending")[0].text.startswith("the run ends: the budget of 400 tokens is spent")
    assert sum(learner.tokens_total for learner in world.learners.values()) <= 400 + 2 * 2 * 10
    all_merged(world)


def test_the_operator_may_end_a_run_at_any_time() -> None:
    world = World(2, fragments=2, sync_every=4, latency_s=0.1).run_until(round=7)
    world.end("Ctrl-C")
    world.run_to_end()
    all_merged(world)


@pytest.mark.parametrize("block", [0, *(pytest.param(n, marks=pytest.mark.faults) for n in range(1, 10))])
def test_whenever_a_calm_run_is_ended_no_step_is_lost(block: int) -> None:
    """Also those of a learner whose steps are so slow that it is muted, and those made after its courier knew."""
    for seed in range(20 * block, 20 * block + 20):
        dice = random.Random(seed)
        fragments, learners = dice.randint(1, 4), dice.randint(1, 3)
        world = World(
            learners,
            fragments=fragments,
            sync_every=fragments * dice.choice([1, 2]),
            overlap=min(fragments - 1, dice.choice([0, 1])),
            adopt=dice.choice(["overwrite", "carry"]),
            latency_s=dice.choice([0.0, 0.03, 0.2, 0.4]),
            jitter=dice.choice([0.0, 1.0]),
            courier_s=dice.choice([0.0, 1.0]),
            step_s=[dice.uniform(0.5, 1.5) for _ in range(learners)],
            seed=seed,
        )
        world.at(dice.uniform(20, 30), lambda world=world: world.end())
        world.run_to_end()
        all_merged(world)
        assert not any(world.syncer.history.ledger.totals().lost), f"seed {seed}"


@pytest.mark.parametrize("adopt", ["overwrite", "carry"])
def test_the_last_steps_are_waited_for_when_words_come_unevenly(adopt: str) -> None:
    """In its course a run does without who is silent for a moment; at its end nobody asks a second time."""
    world = World(2, fragments=4, sync_every=8, latency_s=0.4, adopt=adopt, seed=595).run_until(round=12)
    silent_s = (SILENT_BEATS + 0.9) * world.settings.heartbeat_s
    assert silent_s < world.syncer.estimates.pull_deadline_s(world.settings) < world.settings.lost_after_s
    world.end()
    asked = 0
    while not world.finished:
        world.run_until(seconds=0.05)
        pulls = [pull for _, pull in world.sent(Pull, "learner-1") if pull.round >= 12]
        if len(pulls) > asked:
            asked = len(pulls)
            world.hold_up("learner-1", silent_s)
    last = [note for note in world.said("round") if note.text.endswith("the last steps of 2 learners")]
    assert len(last) >= 3
    for note in last:
        assert world.members(int(str(note.data["round"]))) == {"learner-0", "learner-1"}, note.text
    assert not any(world.syncer.history.ledger.totals().lost)
    all_merged(world)


@pytest.mark.parametrize("adopt", ["overwrite", "carry"])
def test_the_last_steps_are_waited_for_over_a_slow_link(adopt: str) -> None:
    """Seed 22295: the word to stop, a step and the report of it took longer than the patience, which was of the steps
    alone; the round that asked for the last steps of a fragment went without them."""
    settings: dict[str, Any] = {"fragments": 2, "sync_every": 40, "patience_s": 3.0, "adopt": adopt}
    world = World(2, latency_s=2.0, step_s=[0.6, 1.3], **settings).run_until(round=4)
    world.run_until(seconds=8.0)
    assert all(round_.stage == "gathering" for round_ in world.syncer.state.open_rounds.values()), "none is under way"
    before = world.now
    world.end()
    stopped_s = 0.0
    while not world.finished:
        world.run_until(seconds=0.05)
        if not stopped_s and all(one.stopped for one in world.syncer.members.learners.values()):
            stopped_s = world.now - before
    assert stopped_s > max(world.settings.patience_s, 4 * (0.6 + 1.3) / 2), "by its steps alone it would be late"
    assert not any(world.syncer.history.ledger.totals().lost)
    all_merged(world)


@pytest.mark.parametrize("later_s", [0.0, 2.0, 5.0, 7.0])
def test_the_last_step_of_a_slow_learner_is_waited_for_longer_than_a_run_assembles(later_s: float) -> None:
    """Seed 710242: its step took 6 s, the run waited for 5."""
    world = World(4, fragments=4, sync_every=8, adopt="carry", step_s=[1.0, 1.0, 1.0, 9.0], assemble_s=5.0)
    world.run_until(round=20).run_until(seconds=later_s)
    world.end("enough")
    world.run_to_end()
    all_merged(world)


def test_one_that_stands_still_holds_up_the_end_until_it_is_given_up_not_once_a_round() -> None:
    world = World(3, fragments=4, sync_every=8, latency_s=0.4).run_until(round=12)
    world.end()
    while not world.said("round")[-1].text.endswith("the last steps of 3 learners"):
        world.run_until(seconds=0.05)
    world.learners["learner-2"].frozen, before = True, world.now
    world.run_to_end(seconds=60)
    assert world.now - before < world.settings.lost_after_s + 4 * 4.0, "four rounds on this link, and one wait"


def test_one_that_reports_and_never_answers_holds_up_the_end_once() -> None:
    """Its last steps are lost, and the ledger says so. The others give theirs."""
    world = World(3, fragments=4, sync_every=8, assemble_s=20.0, adopt="carry").run_until(round=12)
    world.learners["learner-2"].answers = False
    world.end()
    before = world.now
    world.run_to_end(seconds=90)
    assert 20.0 < world.now - before < 25.0
    assert any(world.syncer.history.ledger.totals().lost)
    assert all(world.learners[name].steps == [0] * 4 for name in ("learner-0", "learner-1"))


def test_a_round_that_was_pulled_once_is_not_opened_anew_at_the_end() -> None:
    """Seed 400574: its second pull was attempt 1 again, and a late answer to the first was taken for the last steps."""
    world = World(3, fragments=2, sync_every=4, quorum=3, latency_s=0.1).run_until(round=3)
    while not any(r.number == 3 and r.stage == "pulling" for r in world.syncer.state.open_rounds.values()):
        world.run_until(seconds=0.01)
    world.unlink("learner-1")
    while not world.said("again"):
        world.run_until(seconds=0.01)
    world.end("Ctrl-C")
    world.link("learner-1")
    world.run_to_end()
    pulls = [(name, pull.round, pull.attempt) for name in world.learners for _, pull in world.sent(Pull, name)]
    assert len(set(pulls)) == len(pulls)
    all_merged(world)


def test_a_run_without_parameters_ends_at_once() -> None:
    world = World(2, present=0)
    world.end()
    world.run_to_end()
    world = World(2, latency_s=0.5)
    world.end()
    world.run_to_end()
    assert all(learner.over for learner in world.learners.values())


def test_a_run_whose_learners_are_all_gone_ends() -> None:
    world = World(2, fragments=2, sync_every=2, overlap=1, latency_s=0.1).run_until(round=5)
    world.kill("learner-0")
    world.kill("learner-1")
    world.end()
    world.run_to_end()


def test_a_learner_that_dies_during_the_drain_is_not_waited_for() -> None:
    world = World(3, fragments=4, sync_every=8, latency_s=0.3, steps=40)
    while world.syncer.phase != "ending":
        world.run_until(seconds=0.1)
    world.run_until(seconds=0.7)
    world.kill("learner-2")
    world.run_to_end(seconds=60)
    all_merged(world)


def test_a_learner_that_joins_during_the_drain_takes_the_result_and_ends() -> None:
    world = World(3, present=2, fragments=4, sync_every=8, latency_s=0.3, steps=40)
    while world.syncer.phase != "ending":
        world.run_until(seconds=0.1)
    learner = world.join("learner-2")
    world.run_to_end(seconds=60)
    assert learner.over and not learner.failed


def test_a_learner_that_never_stops_is_not_waited_for_without_end() -> None:
    world = World(2, fragments=2, sync_every=4, steps=20).run_until(round=6)
    world.pause("learner-1")
    world.run_to_end(seconds=100)
    assert world.learners["learner-0"].adopted == world.syncer.versions


def test_the_drain_is_one_cycle() -> None:
    world = World(2, fragments=4, sync_every=8, steps=40).run_to_end()
    last = 40 * 4 // 8
    assert {commit.round for _, commit in world.commits() if commit.round >= last} <= set(range(last, last + 4))


def test_progress_reaches_learners_and_never_goes_back() -> None:
    world = World(2, fragments=4, sync_every=8, steps=40, latency_s=0.1).run_to_end()
    for learner in world.learners.values():
        assert learner.informed == sorted(learner.informed)
        assert learner.informed[-1] == 1.0


def test_one_that_has_left_a_finished_run_begins_no_other_life_in_it() -> None:
    """It lost its connection behind its goodbye, and dialled again."""
    world = World(2, fragments=2, sync_every=4, steps=12).run_to_end()
    hello = world.learners["learner-0"].machine.hello()
    assert world.syncer.phase == "finished" and world.syncer.members.learners["learner-0"].left
    effects = world.syncer.handle(world.now, Greeted(hello))
    refused = Refused(reason="the run is over", over=True)
    told = [(one.learner, one.message.reason, one.message.over) for one in effects if isinstance(one, Send)]
    assert told == [("learner-0", refused.reason, refused.over)]
    assert not any(isinstance(effect, Persist) for effect in effects)
