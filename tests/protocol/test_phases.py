"""Phases of training: H, adoption and the outer step follow the run's progress."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any

import msgspec
import pytest
from tests.protocol.world import SimulatedLearner, SimulatedSyncer, World

from atoll.learner.evaluator import ScoreClock
from atoll.protocol import records, schedule
from atoll.protocol.errors import ConfigError
from atoll.protocol.history import History
from atoll.protocol.learner import effects as learner_fx
from atoll.protocol.phases import TrainingPhase, due_phase, warm_start
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as syncer_fx
from atoll.syncer.changes import parse_changes

P, H, STEPS = 4, 8, 80
WARM = TrainingPhase(until=0.25, sync_every=2, overlap=1, adopt="carry", merge="mean", outer_lr=1.0, outer_momentum=0.0)


class PhasedWorld(World):
    def __init__(self, phases: tuple[TrainingPhase, ...] = (WARM,), **settings: Any) -> None:
        self.adoptions: list[learner_fx.Adopt] = []
        usual = {"fragments": P, "sync_every": H, "steps": STEPS, "latency_s": 0.02, "phases": phases}
        usual |= {"adopt": "overwrite"}  # so that the phase's rule and the run's own differ
        super().__init__(3, **{**usual, **settings})

    def _do(self, learner: SimulatedLearner, effect: learner_fx.LearnerEffect) -> None:
        if isinstance(effect, learner_fx.Adopt):
            self.adoptions.append(effect)
        super()._do(learner, effect)

    def changes(self) -> list[tuple[int, records.ChangedRecord]]:
        """With the rounds behind the run at each."""
        found, rounds = [], 0
        for record in self.journal:
            rounds += isinstance(record, records.MergedRecord | records.PassedRecord)
            if isinstance(record, records.ChangedRecord):
                found.append((rounds, record))
        return found

    def merged(self) -> list[records.MergedRecord]:
        return [record for record in self.journal if isinstance(record, records.MergedRecord)]

    def effective_h(self, rounds: list[records.MergedRecord]) -> float:
        by_fragment = [[one.step for one in rounds if one.fragment == f] for f in range(P)]
        return median(later - earlier for steps in by_fragment for earlier, later in pairwise(steps))


def run(**settings: Any) -> PhasedWorld:
    world = PhasedWorld(**settings)
    world.run_until(seconds=3.0 * settings.get("steps", STEPS))
    assert world.syncer.phase == "finished", world.story()
    return world


def test_a_phase_has_its_own_h_and_the_run_goes_on_with_its_own() -> None:
    world = run()
    [(first, begun), (second, own)] = world.changes()
    assert (first, begun.training_phase, begun.settings.sync_every, begun.settings.adopt) == (0, 1, 2, "carry")
    assert (own.training_phase, own.settings.sync_every, own.settings.adopt) == (2, H, "overwrite")
    assert begun.outer | {"merge": "mean", "lr": 1.0, "momentum": 0.0} == begun.outer
    assert own.outer == world.syncer.state.history.begun.outer
    warm, rest = world.merged()[:second], [one for one in world.merged()[second:] if one.step < STEPS]
    assert world.effective_h(warm) == 2, "several rounds belong to each step"
    assert world.effective_h(rest) == H
    assert warm[-1].step <= 0.25 * STEPS + 1 <= rest[0].step + 1


def test_what_is_shown_of_late_is_of_the_present_phase() -> None:
    world = run()
    assert world.syncer.steps_between_syncs.median == H
    assert list(world.syncer.rounds.earlier_h) == [(H, None), (2, 2)], "asked and got, in the phases before"
    [_, note] = world.said("phase")
    told = {"training_phase": 2, "sync_every": H, "overlap": 2, "adopt": "overwrite"}
    assert note.data == {**note.data, **told}


def test_a_round_is_committed_under_the_settings_that_it_was_frozen_under() -> None:
    world = run(latency_s=0.3)
    [_, (second, _)] = world.changes()
    [_, changed_at] = [at for at, effect in world.log if isinstance(effect, syncer_fx.Retune)]
    for at, effect in world.log:
        if isinstance(effect, syncer_fx.ConfirmSent):
            assert (effect.round < second) == (at < changed_at)


def test_versions_of_a_phase_are_adopted_by_its_rule_also_when_they_come_later() -> None:
    world = run(latency_s=0.3)
    [_, (second, _)] = world.changes()
    rules = {(one.round < second, one.rule) for one in world.adoptions if one.round >= 0}
    assert (True, "carry") in rules and (False, "overwrite") in rules
    assert (False, "carry") not in rules
    assert all(one.rule == "carry" for one in world.adoptions[9:] if 0 <= one.round < second)


def test_where_versions_take_longer_than_h_rounds_come_less_often_and_hold_everybody() -> None:
    world = run(latency_s=0.6, steps=160, phases=(WARM,))
    [_, (second, _)] = world.changes()
    warm = world.merged()[second // 2 : second]
    assert 3 <= world.effective_h(warm) <= 6
    assert sum(len(one.members) == 3 for one in warm) >= 0.75 * len(warm)


def test_once_versions_are_faster_again_h_is_as_asked_within_a_few_cycles() -> None:
    world = PhasedWorld(latency_s=0.6, steps=1600)
    world.run_until(seconds=60.0)
    assert world.syncer.rounds.closing.pace.interval > 2 / P
    world.network.latency_s = 0.02
    world.run_until(seconds=24.0)
    assert world.syncer.rounds.closing.pace.interval == 2 / P and world.syncer.history.training_phase == 1


def test_a_phase_of_a_small_h_is_never_synced_less_often_than_the_run_itself() -> None:
    world = PhasedWorld(latency_s=2.0, steps=1600)
    world.run_until(seconds=200.0)
    assert world.syncer.state.history.training_phase == 1 and (world.syncer.overlap.p95 or 0) > H
    assert world.syncer.rounds.closing.pace.interval == H / P


def test_nobody_waits_and_no_token_is_lost() -> None:
    world = run()
    assert all(learner.machine.t >= STEPS for learner in world.learners.values())
    assert world.syncer.state.history.ledger.totals().lost == (0,) * P


def test_a_new_term_goes_on_in_the_phase_that_it_finds() -> None:
    world = PhasedWorld()
    world.run_until(seconds=10.0)
    world.crash_syncer()
    world.run_until(seconds=2.0 * STEPS)
    assert [record.training_phase for _, record in world.changes()] == [1, 2]
    assert world.syncer.phase == "finished"


class DyingWorld(PhasedWorld):
    """The syncer dies whenever it has written a change of phase down, before it tells anybody."""

    crashes = 0

    def carry_out_syncer_effect(self, syncer: SimulatedSyncer, effect: syncer_fx.SyncerEffect) -> None:
        if isinstance(effect, syncer_fx.Retune):
            self.crashes += 1
            self.crash_syncer()
        else:
            super().carry_out_syncer_effect(syncer, effect)


def test_learners_hear_of_a_phase_whose_syncer_died_before_it_told_them() -> None:
    world = DyingWorld()
    world.run_until(seconds=2.0 * STEPS)
    assert world.crashes == 2 and world.syncer.phase == "finished"
    assert [record.training_phase for _, record in world.changes()] == [1, 2]
    assert {learner.machine.settings.sync_every for learner in world.learners.values()} == {H}
    assert {one.rule for one in world.adoptions if one.round >= 0} == {"carry", "overwrite"}


def test_cuts_come_as_often_by_steps() -> None:
    [(_, begun), (_, own)] = run(cut_every=8).changes()
    assert (begun.settings.cut_every, own.settings.cut_every) == (8 * H // 2, 8)


def test_cuts_go_on_in_a_phase_of_a_large_h() -> None:
    rare = TrainingPhase(until=0.5, sync_every=5 * H)
    [(_, begun), (_, own)] = run(cut_every=2, phases=(rare,)).changes()
    assert (begun.settings.cut_every, own.settings.cut_every) == (1, 2)
    [(_, begun), (_, own)] = run(cut_every=0, phases=(rare,)).changes()
    assert (begun.settings.cut_every, own.settings.cut_every) == (0, 0)


def test_what_an_operator_sets_stays_unless_phases_change_it() -> None:
    world = PhasedWorld()
    world.run_until(seconds=5.0)
    assert world.syncer.state.history.training_phase == 1
    outer = {**world.syncer.state.history.outer, "robust": True, "norm_limit": 5.0, "lr": 0.3}
    world.deliver(world.simulated_syncer, syncer_fx.ChangeAsked(world.syncer.settings, outer, "robust=true"))
    world.run_until(seconds=2.0 * STEPS)
    [_, (_, asked), (_, own)] = world.changes()
    assert asked.training_phase == 0 and asked.outer["lr"] == 0.3
    begun = world.syncer.state.history.begun.outer
    assert own.outer == {**begun, "robust": True, "norm_limit": 5.0}, "the outer step alone is as the run began"


def test_cuts_are_as_many_steps_apart_across_a_change_of_phase() -> None:
    """Six steps are spent of the 16 between two cuts when the phase ends: the next comes after ten more."""
    world = run(cut_every=8, phases=(msgspec.structs.replace(WARM, until=22 / STEPS),))
    steps = [one.step for one in world.journal if isinstance(one, records.MergedRecord | records.PassedRecord)]
    taken = [effect.cut for _, effect in world.log if isinstance(effect, syncer_fx.TakeCut) and effect.cut]
    assert [steps[cut - 1] for cut in taken if cut <= len(steps)][:4] == pytest.approx([16, 32, 48, 64], abs=1.0)


def test_the_model_is_scored_as_often_by_steps_in_every_phase() -> None:
    """As the evaluator does, which looks at the run's status from time to time."""
    world, clock, scored = PhasedWorld(), ScoreClock(), []
    while not world.finished and world.syncer.phase != "finished":
        world.run_until(seconds=0.5)
        if clock.is_due(world.syncer.global_step, 0.0):
            scored.append(world.syncer.global_step)
            clock.note_score(world.syncer.global_step, 0.0, every=5 * H / P)  # evaluate_every = 5
    assert scored == list(range(0, STEPS + 1, 5 * H // P)), "in the first quarter there are four times as many rounds"


def test_a_short_run_is_scored_in_each_fifth_of_it() -> None:
    clock, scored = ScoreClock(), []
    for step in range(61):
        if clock.is_due(step, step / 60):
            scored.append(step)
            clock.note_score(step, step / 60, every=100.0)
    assert scored == [0, 12, 24, 36, 48, 60]


def test_an_h_set_by_hand_leaves_cuts_as_many_steps_apart() -> None:
    world = in_a_run_of_its_own()
    ask(world, "sync_every=4")
    assert (world.syncer.next_settings.settings.cut_every, world.settings.cut_every) == (20 * P, 10 * P)


# ---- synchronous ----------------------------------------------------------------------------------------------------

THREE = (
    TrainingPhase(until=0.2, sync_every=2, overlap=1, adopt="carry"),
    TrainingPhase(until=0.5, sync_every=12, overlap=3),
    TrainingPhase(until=0.7, sync_every=3, overlap=0),
)


@pytest.mark.parametrize("latency_s", [0.0, 0.3])
@pytest.mark.parametrize("phases", [(WARM,), THREE], ids=["warm start", "three"])
def test_a_synchronous_run_has_phases_and_every_learner_in_every_round(
    phases: tuple[TrainingPhase, ...], latency_s: float
) -> None:
    world = run(phases=phases, synchronous=True, latency_s=latency_s, step_s=[1.0, 0.5, 1.7], pull_floor_s=2.0)
    begins = [rounds for rounds, _ in world.changes()]
    asked = [record.settings.sync_every for _, record in world.changes()]
    assert asked == [*(one.sync_every for one in phases), H]
    paced = [one for one in world.merged() if one.step < STEPS]
    assert all(len(one.members) == 3 for one in paced) and not world.said("passed")
    for first, last, every in zip(begins, [*begins[1:], len(paced)], asked, strict=True):
        assert world.effective_h([one for one in paced if first <= one.round < last]) == every
    rules = [one.settings.adopt for _, one in world.changes()]
    for one in world.adoptions[9:]:
        if one.round >= 0 and one.rule != "overwrite":
            assert one.rule == rules[sum(first <= one.round for first in begins) - 1]


def test_the_first_reading_of_a_phase_comes_after_the_last_adoption_before_it() -> None:
    settings = Settings(fragments=P, sync_every=H, steps=STEPS, synchronous=True, phases=THREE).resolved(1000)
    rounds = range(100)
    for earlier, later in pairwise(rounds):
        assert schedule.adopt_step(earlier, settings) <= schedule.adopt_step(later, settings)
        assert schedule.read_step(earlier, settings) <= schedule.read_step(later, settings)
    for number in rounds[P:]:  # a learner copies before it adopts at the same step
        assert schedule.read_step(number, settings) > schedule.adopt_step(number - P, settings)


def test_a_synchronous_newcomer_falls_into_step_in_a_later_phase() -> None:
    world = PhasedWorld(phases=THREE, synchronous=True, present=2, assemble_s=1.0)
    world.run_until(seconds=30.0)
    assert world.syncer.history.training_phase == 2
    world.join("learner-2")
    finish(world)
    late = [one for one in world.merged() if 0.6 * STEPS < one.step < STEPS]
    assert late and all(len(one.members) == 3 for one in late)


def test_a_synchronous_run_goes_on_in_its_phase_after_a_crash() -> None:
    world = PhasedWorld(phases=THREE, synchronous=True, latency_s=0.1)
    world.run_until(seconds=20.0)
    world.crash_syncer()
    finish(world)
    assert [record.training_phase for _, record in world.changes()] == [1, 2, 3, 4]


# ---- changed while the run goes on ----------------------------------------------------------------------------------


def ask(world: PhasedWorld, *words: str) -> None:
    """`atoll set`."""
    before = world.syncer.next_settings
    asked = parse_changes(world.syncer.history, words, before=before)
    assert asked is not None
    world.deliver(world.simulated_syncer, asked)


def in_warm_start() -> PhasedWorld:
    """In its first phase, with a round under way."""
    world = PhasedWorld(latency_s=0.3)
    world.run_until(seconds=8.0)
    while not world.syncer.state.has_frozen_rounds():
        world.step()
    assert world.syncer.history.training_phase == 1
    return world


def finish(world: PhasedWorld) -> None:
    world.run_until(seconds=3.0 * STEPS)
    assert world.syncer.phase == "finished", world.story()
    again = History(world.syncer.history.begun)
    for record in world.journal:
        again.apply(record)
    assert (again.settings, again.outer) == (world.syncer.history.settings, world.syncer.history.outer)


def test_an_h_set_by_hand_holds_until_the_next_phase_begins() -> None:
    world = in_warm_start()
    ask(world, "sync_every=4", "outer_lr=0.5")
    assert len(world.changes()) == 1, "rounds under way are committed first"
    finish(world)
    [_, (first, asked), (second, own)] = world.changes()
    assert (asked.training_phase, asked.settings.sync_every, asked.outer["lr"]) == (0, 4, 0.5)
    assert asked.what.endswith("(until phase 2 of 2 begins, at 0.25 of the run)")
    assert (own.training_phase, own.settings.sync_every) == (2, H) and "lr" not in own.outer, "as the run began"
    by_hand = [one for one in world.merged() if first <= one.round < second]
    assert world.effective_h(by_hand) == 4
    assert {learner.machine.settings.sync_every for learner in world.learners.values()} == {H}


def test_the_rule_of_adoption_changes_between_rounds_and_each_version_has_that_of_its_round() -> None:
    world = in_warm_start()
    ask(world, "adopt=blend")
    finish(world)
    [_, (first, _), (second, _)] = world.changes()
    rules = {(one.round >= first) + (one.round >= second): one.rule for one in world.adoptions[9:] if one.round >= 0}
    assert rules == {0: "carry", 1: "blend", 2: "overwrite"}


def test_other_phases_begin_at_once_with_the_one_that_is_due() -> None:
    world = in_warm_start()
    ask(world, "phases=[{until = 0.05, sync_every = 2, overlap = 1}, {until = 0.6, sync_every = 5, overlap = 1}]")
    finish(world)
    [_, (_, asked), (first, begun), (second, own)] = world.changes()
    assert asked.training_phase == 0 and asked.settings.sync_every == 2, "rounds under way stay as they were frozen"
    assert (begun.training_phase, begun.settings.sync_every, begun.settings.adopt) == (2, 5, "overwrite")
    assert (own.training_phase, own.settings.sync_every) == (3, H)
    assert world.effective_h([one for one in world.merged() if first <= one.round < second]) == 5
    assert world.merged()[second].step == pytest.approx(0.6 * STEPS, abs=3)


def test_phases_that_are_taken_away_leave_the_runs_own_settings() -> None:
    world = in_warm_start()
    ask(world, "phases=[]")
    finish(world)
    [_, _, (_, own)] = world.changes()
    assert own.settings.phased_values == {"sync_every": H, "overlap": 2, "adopt": "overwrite"}
    assert "lr" not in own.outer, "as the run began"


def test_a_run_without_phases_may_be_given_some() -> None:
    world = in_a_run_of_its_own()
    ask(world, "phases=[{until = 0.5, sync_every = 4, overlap = 1}]")
    finish(world)
    [_, (_, begun), (_, own)] = world.changes()
    assert (begun.settings.sync_every, own.settings.sync_every) == (4, H)


def in_a_run_of_its_own() -> PhasedWorld:
    world = PhasedWorld(phases=())
    world.run_until(seconds=8.0)
    return world


def test_two_changes_that_wait_for_the_same_rounds_are_both_made() -> None:
    world = in_warm_start()
    ask(world, "sync_every=4")
    ask(world, "quorum=2")
    finish(world)
    [_, (_, asked), _] = world.changes()
    assert (asked.settings.sync_every, asked.settings.quorum) == (4, 2)


def test_a_change_waits_for_a_second_attempt_that_frozen_rounds_wait_for() -> None:
    world = PhasedWorld(latency_s=0.6)
    world.run_until(seconds=8.0)
    while [one.stage for one in world.syncer.state.open_rounds.values()].count("pulling") < 2:
        world.step()
    first = world.syncer.committed
    world.unmergeable = {(first, 1)}
    ask(world, "sync_every=4")
    world.run_until(round=first + 2)
    assert first in [note.data["round"] for note in world.said("again")]
    finish(world)
    [_, (rounds, asked), _] = world.changes()
    assert (rounds, asked.settings.sync_every) == (first + 2, 4), "frozen before it was asked for, committed before it"


def test_a_syncer_that_dies_while_a_change_waits_has_made_none_of_it() -> None:
    world = in_warm_start()
    ask(world, "sync_every=4")
    world.crash_syncer()
    finish(world)
    assert [record.training_phase for _, record in world.changes()] == [1, 2]


def test_a_new_term_goes_on_with_what_was_set() -> None:
    world = in_warm_start()
    ask(world, "sync_every=4")
    while len(world.changes()) < 2:
        world.step()
    world.crash_syncer()
    world.run_until(seconds=2.0)
    assert world.syncer.settings.sync_every == 4 and world.syncer.history.training_phase == 1
    finish(world)


def test_as_many_phases_as_may_be_are_read_again() -> None:
    phases = tuple(TrainingPhase(until=number / 100) for number in range(1, 64))
    whole = Settings(steps=1000, phases=phases).resolved(1000)
    assert msgspec.json.decode(msgspec.json.encode(whole), type=Settings) == whole
    with pytest.raises(ConfigError, match="64 phases and the run's own behind them are more than 64"):
        Settings(steps=1000, phases=(*phases, TrainingPhase(until=0.9)))


def test_which_phase_is_due() -> None:
    asked = (WARM, TrainingPhase(until=0.5, sync_every=12))
    phases = Settings(steps=100, adopt="overwrite", phases=asked).resolved(1000).phases
    assert [due_phase(phases, progress) for progress in (0.0, 0.24, 0.25, 0.49, 0.5, 1.0)] == [1, 1, 2, 2, 3, 3]
    assert [(one.sync_every, one.overlap, one.adopt) for one in phases] == [
        (2, 1, "carry"),
        (12, 2, "overwrite"),
        (24, 2, "overwrite"),
    ]
    again = Settings(steps=100, adopt="overwrite", phases=phases).resolved(1000).phases
    assert again == phases, "resolved once more, it stays"


def test_a_warm_start_is_a_phase() -> None:
    settings = Settings(steps=100, warm_start=0.15).resolved(1000)
    assert settings.phases[0] == warm_start(0.15) and settings.phases[1].sync_every == 24
    by_hand = msgspec.structs.replace(settings, sync_every=7)
    assert [one.sync_every for one in by_hand.in_all_phases] == [2, 24, 7], "the first phase is the first of them"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"phases": (WARM,)}, "needs a budget"),
        ({"steps": 10, "phases": (WARM, WARM)}, "one after the other"),
        ({"tokens": 10, "phases": (WARM,), "synchronous": True}, "phases of a synchronous run follow its steps"),
        ({"steps": 10, "phases": (TrainingPhase(until=0.5, sync_every=2),)}, "overlap = 2 is not below sync_every = 2"),
        ({"steps": 10, "warm_start": 1.5}, "no share of the run"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Settings(**settings).resolved(1000)


@pytest.mark.parametrize("wrong", [{"until": 0.0}, {"until": 1.5}, {"sync_every": 0}, {"outer_momentum": 1.0}])
def test_a_phase_is_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TrainingPhase(**{"until": 0.5, **wrong})
