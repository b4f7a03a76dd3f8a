"""A drain: one learner is asked to leave, and the run goes on."""

from __future__ import annotations

import random

import pytest
from tests.protocol.world import World

from atoll.protocol.effects import Note
from atoll.protocol.history import History
from atoll.protocol.learner import effects as learner_fx
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.messages import Drain, Leave, Progress, Welcome
from atoll.protocol.records import BegunRecord, GoneRecord
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as syncer_fx
from atoll.protocol.syncer.closing import RoundClosing
from atoll.protocol.syncer.state import Round, SyncerState


def test_it_is_told_and_written_down() -> None:
    world = World(2).run_until(round=4)
    effects = world.syncer.handle(world.now, syncer_fx.DrainAsked("learner-0", "this rack goes down"))
    told = [effect for effect in effects if isinstance(effect, syncer_fx.Send)]
    assert [(one.learner, one.message.reason) for one in told] == [("learner-0", "this rack goes down")]
    notes = [effect for effect in effects if isinstance(effect, Note) and effect.kind == "draining"]
    assert notes[0].data["learner"] == "learner-0" and "this rack goes down" in notes[0].text


def test_who_is_not_there_is_not_asked() -> None:
    world = World(2).run_until(round=4)
    world.kill("learner-0")
    assert not world.syncer.handle(world.now, syncer_fx.DrainAsked("learner-0", "x"))
    assert not world.syncer.handle(world.now, syncer_fx.DrainAsked("nobody", "x"))


def test_a_learner_hands_it_to_its_training_process() -> None:
    machine = LearnerMachine("a", "s", ())
    settings = Settings(fragments=1, sync_every=4)
    welcome = Welcome(run="r", incarnation=1, settings=settings, fingerprint="", versions=(0,), gathering=0)
    machine.handle(0.0, learner_fx.Arrived(welcome))
    effects = machine.handle(0.0, learner_fx.Arrived(Drain(reason="this rack goes down")))
    assert learner_fx.AskToLeave("this rack goes down") in effects


def test_one_that_comes_back_is_told_again_another_process_is_not() -> None:
    world = World(2).run_until(round=4)
    world.syncer.handle(world.now, syncer_fx.DrainAsked("learner-0", "x"))
    hello = world.learners["learner-0"].machine.hello()
    world.syncer.handle(world.now, syncer_fx.Lost("learner-0", "a bad line"))
    again = world.syncer.handle(world.now, syncer_fx.Greeted(hello))
    assert any(isinstance(effect, syncer_fx.Send) and isinstance(effect.message, Drain) for effect in again)
    other = LearnerMachine("learner-0", "another session", ()).hello()
    effects = world.syncer.handle(world.now, syncer_fx.Greeted(other))
    assert not any(isinstance(effect, syncer_fx.Send) and isinstance(effect.message, Drain) for effect in effects)


def test_one_that_was_asked_is_told_again_also_where_another_process_had_its_name_meanwhile() -> None:
    world = World(2).run_until(round=4)
    world.syncer.handle(world.now, syncer_fx.DrainAsked("learner-0", "this rack goes down"))
    asked = world.learners["learner-0"].machine.hello()
    world.syncer.handle(world.now, syncer_fx.Greeted(LearnerMachine("learner-0", "another session", ()).hello()))
    again = world.syncer.handle(world.now, syncer_fx.Greeted(asked))
    told = [one.message for one in again if isinstance(one, syncer_fx.Send) and isinstance(one.message, Drain)]
    assert [drain.reason for drain in told] == ["this rack goes down"]


def test_who_has_left_is_not_remembered_as_asked() -> None:
    world = World(2).run_until(round=4)
    world.syncer.handle(world.now, syncer_fx.DrainAsked("learner-0", "x"))
    assert list(world.syncer.members.asked_to_leave) == [world.learners["learner-0"].session]
    world.syncer.handle(world.now, syncer_fx.Received("learner-0", Leave(reason="x")))
    assert not world.syncer.members.asked_to_leave


def test_a_drain_that_was_meant_for_another_process_of_the_name_is_passed_over() -> None:
    """What waits for the disk is sent by name. Two processes that take the name by turns while nothing can be written
    then hear, on one channel, what was meant for both: whatever follows the other's welcome is the other's."""

    def welcome(session: str, incarnation: int) -> learner_fx.Arrived:
        settings = Settings(fragments=1, sync_every=4)
        welcome = Welcome(
            run="r",
            incarnation=incarnation,
            settings=settings,
            fingerprint="",
            versions=(0,),
            gathering=0,
            session=session,
        )
        return learner_fx.Arrived(welcome)

    machine, drain = LearnerMachine("a", "mine", ()), learner_fx.Arrived(Drain(reason="this rack goes down"))
    machine.handle(0.0, welcome("mine", 1))
    machine.handle(0.0, welcome("another", 2))
    assert learner_fx.AskToLeave("this rack goes down") not in machine.handle(0.0, drain)
    machine.handle(0.0, welcome("mine", 3))
    assert learner_fx.AskToLeave("this rack goes down") in machine.handle(0.0, drain)


def test_one_that_leaves_before_its_welcome_says_with_its_goodbye_what_became_of_its_steps() -> None:
    """Seed 22227: it dialled again, adopted and left before the welcome had come; what the adoption had overwritten was
    lost by the books, since nothing is reported before the welcome."""
    world = World(2, fragments=1, sync_every=4, latency_s=0.3).run_until(round=4)
    learner = world.learners["learner-0"]
    world.run_until(seconds=1.0)
    world.unlink("learner-0")
    reported = world.syncer.members.learners["learner-0"].tokens_total
    world.run_until(seconds=3.0)
    world.link("learner-0")
    assert learner.tokens_total > reported
    learner.leaving.ask("this rack goes down", hurried=True)
    learner.leave_now()
    world.run_until(seconds=2.0)
    gone = [line for line in world.journal if isinstance(line, GoneRecord)]
    assert [(one.reason, one.total) for one in gone] == [("this rack goes down", learner.tokens_total)]


def test_it_is_told_once_when_a_learner_stops_in_order_to_leave() -> None:
    world = World(3, fragments=4, sync_every=8).run_until(round=8)
    learner = world.learners["learner-1"]
    learner.leaving.ask("this rack goes down", hurried=False)
    world.run_until(seconds=30.0)
    told = [note for _, note in world.notes if note.kind == "leaving"]
    assert learner.leaving.left
    assert [(note.data["learner"], note.data["t"]) for note in told] == [("learner-1", learner.t)]


def test_what_is_said_with_a_goodbye_counts_for_no_other_life() -> None:
    world = World(2, fragments=1, sync_every=4).run_until(round=4)
    words = world.learners["learner-0"].machine.make_goodbye("x")
    assert [type(word) for word in words] == [Leave], "it has reported all its steps"
    world.unlink("learner-0")
    report, leave = world.learners["learner-0"].machine.make_goodbye("x")
    assert isinstance(report, Progress) and isinstance(leave, Leave)
    world.inject(syncer_fx.Greeted(LearnerMachine("learner-0", "another session", ()).hello()))
    world.inject(syncer_fx.Received("learner-0", report))
    newcomer = world.syncer.members.learners["learner-0"]
    assert newcomer.connected and newcomer.tokens_total == 0 and newcomer.t == 0


def test_the_promises_ask_the_process_to_leave_that_had_the_name_when_the_operator_asked() -> None:
    """Seeds 7619 and 9496: the disk was slow, and when the note of the drain was told another process had the name."""
    world = World(2).run_until(round=4)
    asked = world.learners["learner-0"]
    world.disk.full = True
    world.run_until(seconds=3)  # a round waits for the disk, and all that is decided from here on waits behind it
    world.inject(syncer_fx.DrainAsked("learner-0", "x"))
    world.kill("learner-0")
    world.join("learner-0")
    world.disk.full = False
    world.run_until(seconds=10)
    assert not asked.alive and world.learners["learner-0"].alive
    assert [note for _, note in world.notes if note.kind == "draining"]
    world.invariants.drains.check_all_left()


@pytest.mark.parametrize("synchronous", [False, True])
def test_one_that_has_answered_leaves_without_loss_though_the_syncer_dies(synchronous: bool) -> None:
    world = World(2, fragments=2, sync_every=4, synchronous=synchronous, latency_s=0.1).run_until(round=6)
    asked, session = world.learners["learner-0"], world.learners["learner-0"].session
    world.inject(syncer_fx.DrainAsked("learner-0", "x"))
    while not world.said("leaving"):
        world.step()
    assert asked.alive, "its last steps are still collected"
    world.crash_syncer(down_s=1.0)
    assert session not in world.syncer.members.asked_to_leave, "the new term knows nothing of it"
    world.run_until(seconds=30)
    assert asked.leaving.left and not asked.alive
    assert world.syncer.phase == "running" and not any(world.syncer.history.ledger.totals().lost)


def test_a_syncer_that_dies_before_its_learner_has_answered_forgets_the_drain() -> None:
    """Why an operator's answer waits for the learner's."""
    world = World(2, fragments=2, sync_every=4, latency_s=0.1).run_until(round=6)
    world.inject(syncer_fx.DrainAsked("learner-0", "x"))
    world.crash_syncer(down_s=1.0)
    world.run_until(seconds=30)
    assert world.learners["learner-0"].alive and not world.said("leaving")


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("adopt", ["overwrite", "carry"])
def test_the_last_one_leaves_without_loss_and_the_run_waits_for_the_next(synchronous: bool, adopt: str) -> None:
    """Nobody steps any more, so no step makes a round due; and of the fragment that is next it may have none left."""
    world = World(1, fragments=3, sync_every=6, overlap=1, synchronous=synchronous, adopt=adopt, latency_s=0.05)
    world.run_until(round=7)
    learner, before = world.learners["learner-0"], world.now
    world.inject(syncer_fx.DrainAsked("learner-0", "x"))
    while learner.alive:
        world.run_until(seconds=0.1)
    assert world.now - before < 4.0, "a step, and a cycle that nothing paces"
    world.run_until(seconds=2 * world.settings.assemble_s)
    assert world.syncer.phase == "running" and not world.said("ending")
    assert not any(world.syncer.history.ledger.totals().lost)
    if adopt == "carry":
        assert [world.merged_steps("learner-0", fragment) for fragment in range(3)] == [learner.t] * 3
    world.join("learner-0")
    rounds = world.syncer.committed
    world.run_until(seconds=20)
    assert world.syncer.committed > rounds


def test_one_whose_loop_has_ended_does_not_stand_in_for_one_that_still_steps() -> None:
    settings = Settings(learners=3, fragments=1, sync_every=4, quorum=1)
    state = SyncerState(History(BegunRecord("run", settings, {}, (), "")))
    for name in ("a", "b", "c"):
        one, _ = state.members.find_or_begin_life(0.0, LearnerMachine(name, name, ()).hello(), "run")
        one.state, one.versions, one.steps, one.t = "training", (0,), (0,) if name == "c" else (4,), 4
    state.members.learners["a"].stopped = True
    closing, round_ = RoundClosing(state), Round(0, 0, 0.0, due_at=0.0)
    ready = closing.ready_learners(round_)
    assert [one.name for one in ready] == ["a", "b"]
    verdict = closing.judge_round(1.0, round_, ready, in_turn=True, wakes=[])
    assert not verdict.close and verdict.reason.startswith("grace window open"), "c steps, and is waited for"


def test_where_nobody_steps_a_round_that_would_collect_nothing_is_passed_over_so_that_the_next_collects() -> None:
    settings = Settings(learners=1, fragments=2, sync_every=4)
    state = SyncerState(History(BegunRecord("run", settings, {}, (), "")))
    one, _ = state.members.find_or_begin_life(0.0, LearnerMachine("a", "s", ()).hello(), "run")
    one.state, one.stopped, one.steps = "training", True, (0, 2)
    gathering = RoundClosing(state)
    assert gathering.is_skipped(Round(4, 0, 0.0, frozenset()))
    assert not gathering.is_skipped(Round(5, 1, 0.0, frozenset())), "its last steps are collected here"
    one.steps = (0, 0)
    assert not gathering.is_skipped(Round(4, 0, 0.0, frozenset())), "nothing is left: the round waits for whoever comes"
    one.steps, one.stopped = (0, 2), False
    assert not gathering.is_skipped(Round(4, 0, 0.0, frozenset()))


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.faults) for block in (1, 2, 3))])
def test_whenever_learners_of_a_calm_run_are_drained_nothing_is_lost(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        dice = random.Random(seed)
        fragments, learners = dice.randint(1, 4), dice.randint(1, 3)
        world = World(
            learners,
            fragments=fragments,
            sync_every=fragments * dice.choice([1, 2]),
            overlap=min(fragments - 1, dice.choice([0, 1])),
            quorum=dice.randint(1, learners),
            patience_s=2.0,
            synchronous=dice.random() < 0.3,
            adopt=dice.choice(["overwrite", "blend", "carry"]),
            latency_s=dice.choice([0.0, 0.03, 0.2]),
            step_s=[dice.uniform(0.8, 1.2) for _ in range(learners)],
            seed=seed,
        )
        for number in range(dice.randint(1, learners)):
            world.at(dice.uniform(5, 30), lambda w=world, n=number: w.inject(syncer_fx.DrainAsked(f"learner-{n}", "x")))
        world.run_until(seconds=70)
        assert world.syncer.phase == "running", f"seed {seed}"
        assert not any(world.syncer.history.ledger.totals().lost), f"seed {seed}"


def test_a_synchronous_run_does_not_wait_for_one_that_was_drained_before_it_began() -> None:
    world = World(3, present=2, fragments=2, sync_every=4, synchronous=True).run_until(seconds=1.5)
    world.inject(syncer_fx.DrainAsked("learner-1", "x"))
    world.run_until(seconds=15)
    assert world.learners["learner-1"].leaving.left and world.syncer.committed == 0, "the third is still waited for"
    world.join("learner-2")
    world.run_until(seconds=10)
    assert world.now < world.settings.assemble_s and world.syncer.committed > 2


def test_a_loop_that_ends_by_itself_ends_the_run_also_when_the_other_was_drained() -> None:
    world = World(2, fragments=2, sync_every=4).run_until(round=6)
    world.inject(syncer_fx.DrainAsked("learner-1", "x"))
    world.run_until(seconds=20)
    assert world.learners["learner-1"].leaving.left
    world.learners["learner-0"].done = True
    world.run_until(seconds=5)
    assert world.syncer.phase == "running" and world.learners["learner-0"].steps == [0, 0]
    world.run_to_end(seconds=2 * world.settings.assemble_s)
    assert world.said("ending")[0].text.startswith("the run ends: every learner has stopped")
