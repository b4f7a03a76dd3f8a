"""The run's step: the pace clock, written down with every round; budgets and progress follow it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.world import World

from atoll.protocol import records, schedule
from atoll.protocol.effects import Tick
from atoll.protocol.history import History
from atoll.protocol.messages import Announce, Heartbeat, Hello, Leave, Progress, Welcome
from atoll.protocol.records import BegunRecord, EndedRecord, PassedRecord, StartedRecord
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import closing
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.budget import LEAST_S, believed_rate
from atoll.protocol.syncer.closing import APART, Pace
from atoll.protocol.syncer.machine import Syncer


def rounds_of(world: World) -> list[records.MergedRecord | records.PassedRecord]:
    return [line for line in world.journal if isinstance(line, records.MergedRecord | records.PassedRecord)]


# ---- a budget of steps ---------------------------------------------------------------------------------------------


def test_a_run_ends_after_its_steps_also_when_rounds_fall_behind() -> None:
    """A fragment is on its way for four steps and one may be: there is a round in about five steps, not in each."""
    slow = {"latency_s": 2.0, "lost_after_s": 30.0, "pull_floor_s": 10.0}
    world = World(3, fragments=6, sync_every=6, overlap=1, steps=60, **slow).run_to_end()
    paced = [line for line in rounds_of(world) if line.progress < 1.0]
    assert len(paced) < 30, "rounds are to fall behind in this test"
    for learner in world.learners.values():
        assert 60 <= learner.t <= 60 + 6, "the budget, and what is trained until the end is heard"
    assert world.syncer.progress == world.syncer.history.progress == 1.0
    [ending] = world.said("ending")
    assert "60 steps are done" in ending.text


def test_a_learner_that_is_ahead_stops_when_the_median_is_there() -> None:
    world = World(3, fragments=2, sync_every=4, steps=40, step_s=[1.0, 0.5, 1.0]).run_to_end()
    slow, fast, other = (learner.t for learner in world.learners.values())
    assert 40 <= slow <= 42 and 40 <= other <= 42 and 78 <= fast <= 84


@pytest.mark.parametrize("synchronous", [False, True])
def test_progress_goes_up_to_one_and_is_what_the_step_makes_of_the_budget(synchronous: bool) -> None:
    world = World(3, fragments=5, sync_every=7, steps=70, latency_s=0.1, synchronous=synchronous).run_to_end()
    lines = rounds_of(world)
    steps, progress = [line.step for line in lines], [line.progress for line in lines]
    assert steps == sorted(steps) and progress == sorted(progress)
    assert progress == [min(1.0, step / 70) for step in steps]
    assert progress[-1] == world.syncer.history.progress == 1.0
    assert sum(isinstance(line, EndedRecord) and line.final for line in world.journal) == 1


def test_learners_are_told_what_the_journal_says_of_the_round() -> None:
    """A replay knows nothing else."""
    world = World(3, fragments=5, sync_every=7, steps=70, latency_s=0.1).run_to_end()
    said = {0: (0.0, 0)} | {line.round + 1: (line.progress, int(line.step)) for line in rounds_of(world)}
    told = [(one.round + 1, one.progress, one.global_step) for _, one in world.sent(Announce)]
    told += [(one.committed, one.progress, one.global_step) for _, one in world.sent(Welcome)]
    assert len(told) > 100
    for committed, progress, step in told:
        assert (progress, step) == said[committed]


def test_a_budget_that_is_spent_does_not_wait_for_a_round_to_be_due() -> None:
    world = World(1, fragments=1, sync_every=100, steps=7).run_to_end()
    assert 7 <= world.learners["learner-0"].t <= 8


# ---- over terms ----------------------------------------------------------------------------------------------------


def test_a_new_term_goes_on_from_the_step_that_is_written_and_makes_no_round_up() -> None:
    world = World(2, fragments=4, sync_every=8, latency_s=0.05).run_until(round=20)
    written = rounds_of(world)[-1].step
    assert written == pytest.approx(40, abs=2)
    world.crash_syncer()
    pace = world.syncer.rounds.closing.pace
    assert (pace.clock, pace.due) == (written, written + 2.0)
    before = world.syncer.committed
    world.run_until(seconds=6.0)
    assert before < world.syncer.committed <= before + 3
    assert rounds_of(world)[-1].step == pytest.approx(written + 2 * (world.syncer.committed - before), abs=1.5)


def test_a_run_that_crashes_often_still_ends_after_its_steps() -> None:
    world = World(3, fragments=3, sync_every=6, steps=60, latency_s=0.05).run_until(round=6)
    for number in (12, 18, 24):
        world.crash_syncer()
        world.run_until(round=number)
    world.run_to_end()
    away_s = 3 * (world.down_s + 2)
    for learner in world.learners.values():
        assert 60 <= learner.t <= 60 + away_s + 4, "steps made while nobody counted them are no part of the budget"


def test_a_term_that_finds_the_run_ending_knows_that_its_budget_is_spent() -> None:
    """The end is written between two rounds: the last round's step is not yet the budget."""
    world = World(2, fragments=1, sync_every=20, steps=50)
    world.crash = lambda effect, when: (
        when == "after"
        and isinstance(effect, fx.Persist)
        and any(isinstance(line, EndedRecord) for line in effect.records)
        and world.syncer.history.term == 1
    )
    world.run_until(round=2)
    world.run_to_end()
    assert world.syncer.history.term == 2 and rounds_of(world)[1].step < 50
    assert world.syncer.progress == world.syncer.history.progress == 1.0
    assert rounds_of(world)[-1].progress == 1.0


def test_what_a_cut_carries_of_the_step_comes_back() -> None:
    world = World(2, fragments=2, sync_every=4).run_until(round=9)
    history = world.syncer.history
    again = History.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(history.state()), type=type(history.state())))
    assert (again.step, again.global_step) == (history.step, history.global_step) and again.step > 10


# ---- synchronous ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fragments", "every"), [(1, 4), (3, 7), (15, 24), (7, 24)])
def test_a_synchronous_run_is_at_the_step_that_its_schedule_says(fragments: int, every: int) -> None:
    settings: dict[str, Any] = {"fragments": fragments, "sync_every": every, "overlap": 1, "steps": 3 * every}
    world = World(3, step_s=[1.0, 0.5, 1.7], synchronous=True, latency_s=0.1, **settings).run_until(round=fragments + 1)
    world.crash_syncer(apart_s=0.3)
    world.run_to_end()
    lines = rounds_of(world)
    assert [line.step for line in lines[: 3 * fragments]] == [
        (number + 1) * every / fragments for number in range(3 * fragments)
    ]
    assert {line.step for line in lines[3 * fragments :]} == {3.0 * every}, "the last cycle takes no steps"
    assert len(lines) == 4 * fragments


@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 10**9), st.integers(1, 1000))
def test_the_schedule_does_not_drift(fragments: int, more: int, behind: int, rounds: int) -> None:
    settings = Settings(fragments=fragments, sync_every=fragments + more - 1, overlap=0)
    step = behind * settings.sync_every / fragments
    at_once = schedule.step_after(step, rounds, settings)
    assert at_once == (behind + rounds) * settings.sync_every / fragments
    for _ in range(min(rounds, 20)):
        step = schedule.step_after(step, 1, settings)
    assert step == schedule.step_after(behind * settings.sync_every / fragments, min(rounds, 20), settings)


# ---- claims --------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 50), min_size=2, max_size=40),
    st.lists(st.integers(0, 2**47), min_size=40, max_size=40),
    st.integers(2, 6),
)
def test_one_that_claims_steps_does_not_move_the_clock_out_of_the_others_reach(
    honest: list[int], claims: list[int], learners: int
) -> None:
    pace, names = Pace(interval=1.0), [f"honest-{n}" for n in range(learners - 1)]
    pace.set_members(dict.fromkeys([*names, "liar"], 0))
    t = claimed = 0
    for more, claim in zip(honest, claims, strict=False):
        t, claimed = t + more, claimed + claim
        pace.move_learner("liar", claimed)
        for name in names:
            pace.move_learner(name, t)
        most = t if learners > 2 else (t + APART * (1 + t)) / 2
        assert pace.clock <= most
        assert pace.clock >= (t if learners > 2 else t / 2) - 1e-9 or claimed < t


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0, 3.0, 15.0])
def test_two_honest_learners_are_paced_by_their_mean(ratio: float) -> None:
    pace = Pace(interval=1.0)
    pace.set_members({"a": 100, "b": 7})
    for t in range(1, 1000):
        pace.move_learner("a", 100 + t)
        pace.move_learner("b", 7 + int(t * ratio))
    assert pace.clock == (999 + int(999 * ratio)) / 2


def _syncer_of(names: str, steps: int) -> Syncer:
    """Of a run that these learners have joined."""
    settings = Settings(learners=len(names), fragments=2, sync_every=4, steps=steps).resolved(4)
    syncer = Syncer.fresh(settings, run="r", fingerprint="")
    for name in names:
        syncer.handle(0.0, fx.Greeted(Hello(protocol=2, learner=name, session=f"s-{name}")))
    syncer.handle(0.0, fx.Initialised("a", "s-a"))
    for name in names:
        syncer.handle(0.1, fx.Received(name, _report(0)))
    return syncer


def _report(t: int, *, stopped: bool = False) -> Progress:
    none = (0, 0)
    return Progress(
        t=t,
        steps=none,
        tokens=none,
        versions=none,
        dropped=none,
        counted=none,
        tokens_total=10 * t,
        incarnation=1,
        stopped=stopped,
    )


@pytest.mark.parametrize("learners", [2, 3])
def test_a_claim_of_many_steps_does_not_end_a_run(learners: int) -> None:
    names = "abc"[:learners]
    syncer = _syncer_of(names, steps=1000)
    for t in range(20):
        for name in names:
            syncer.handle(t + 0.1, fx.Received(name, _report(t if name != "b" else t * 2**40)))
    assert syncer.phase == "running" and 0 < syncer.rounds.step <= (19 if learners == 3 else (19 + APART * 20) / 2)


def test_one_of_two_that_reconnects_again_and_again_does_not_end_a_run() -> None:
    """Each time it comes it claims a hundred steps more; the other is in a long step."""
    syncer = _syncer_of("ab", steps=1000)
    for visit in range(1, 200):
        syncer.handle(1.0, fx.Lost("b", "the line broke"))
        hello = Hello(protocol=2, learner="b", session="s-b", run="r", incarnation=1, versions=(0, 0), t=100 * visit)
        syncer.handle(1.0, fx.Greeted(hello))
        for t in (100 * visit, 100 * visit + 99):
            syncer.handle(1.0, fx.Received("b", _report(t)))
    assert syncer.phase == "running" and syncer.rounds.step <= APART


def _syncer_of_three(steps: int = 1000) -> Syncer:
    """All have made 19 steps in 19 seconds."""
    syncer = _syncer_of("abc", steps=steps)
    for t in range(1, 20):
        for name in "abc":
            syncer.handle(float(t), fx.Received(name, _report(t)))
    return syncer


def _beat(syncer: Syncer, names: str, now: float) -> None:
    for name in names:
        syncer.handle(now, fx.Received(name, Heartbeat()))


def _lines_break(syncer: Syncer) -> None:
    for name in "ac":
        syncer.handle(19.5, fx.Lost(name, "the line broke"))


def _others_restart(syncer: Syncer) -> None:
    _lines_break(syncer)
    for name in "ac":
        syncer.handle(19.5, fx.Greeted(Hello(protocol=2, learner=name, session=f"s-{name}-2")))


@pytest.mark.parametrize("others_go", [_lines_break, _others_restart])
def test_one_report_does_not_end_a_run_whose_other_learners_are_to_be_back(others_go: Callable[[Syncer], None]) -> None:
    syncer = _syncer_of_three()
    others_go(syncer)
    for t in range(5000, 5100):
        syncer.handle(19.501, fx.Received("b", _report(t)))
    assert syncer.phase == "running" and 19 <= syncer.rounds.step < 20


def test_one_report_does_not_end_a_run_whose_other_learner_is_in_a_long_first_step() -> None:
    syncer = _syncer_of("ab", steps=1000)
    for now in range(1, 20):
        _beat(syncer, "ab", float(now))
        syncer.handle(float(now), fx.Received("b", _report(now)))
    assert syncer.members.learners["a"].stalled
    syncer.handle(19.5, fx.Received("b", _report(5000)))
    assert syncer.phase == "running" and syncer.rounds.step <= 19 + 1


def test_a_rate_that_a_second_name_has_shown_is_not_that_of_one_in_its_first_step() -> None:
    syncer = _syncer_of("abc", steps=1000)
    for now in range(1, 20):
        _beat(syncer, "abc", float(now))
        for name in "bc":
            syncer.handle(float(now), fx.Received(name, _report(now if name == "b" else 2**20 * now)))
    step = syncer.rounds.step
    syncer.handle(19.1, fx.Lost("c", "the line broke"))
    syncer.handle(20.0, fx.Received("b", _report(5000)))
    assert syncer.phase == "running" and syncer.rounds.step <= step + 1


def test_one_report_does_not_end_a_run_of_a_new_term_whose_other_learners_are_not_back_yet() -> None:
    before = _syncer_of_three()
    syncer, began = Syncer(before.history), 50_000.0
    syncer.handle(began, Tick())
    hello = Hello(protocol=2, learner="b", session="s-b", run="r", incarnation=1, versions=(0, 0), t=19)
    syncer.handle(began + 1, fx.Greeted(hello))
    syncer.handle(began + 1, fx.Received("b", _report(19)))
    written = syncer.rounds.step
    for second in range(1, 30):
        syncer.handle(began + 1 + second, fx.Received("b", _report(5000 + second)))
    assert syncer.phase == "running" and written < syncer.rounds.step < written + 30 * 1000 / LEAST_S


def test_a_lie_told_alone_is_not_counted_later_while_the_others_train() -> None:
    """It was alone for a second: that is worth 16 of the others' steps, whenever they count."""
    syncer = _syncer_of_three()
    _lines_break(syncer)
    syncer.handle(20.5, fx.Received("b", _report(5000)))
    for name in "ac":
        hello = Hello(protocol=2, learner=name, session=f"s-{name}", run="r", incarnation=1, versions=(0, 0), t=20)
        syncer.handle(20.5, fx.Greeted(hello))
    for t in range(21, 100):
        for name in "abc":
            syncer.handle(float(t), fx.Received(name, _report(t if name != "b" else 5000 + t)))
    assert syncer.phase == "running" and 90 <= syncer.rounds.step <= 99 + 1.01 * APART


def test_one_that_trains_while_the_others_compile_is_counted_when_they_step() -> None:
    syncer = _syncer_of("abc", steps=1000)
    for now in range(1, 61):
        _beat(syncer, "abc", float(now))
        syncer.handle(float(now), fx.Received("b", _report(2 * now)))
    assert syncer.rounds.closing.pace.clock >= 100, "rounds go on at the pace of the one that trains"
    assert syncer.rounds.step < 40
    for now in range(61, 90):
        for name in "abc":
            syncer.handle(float(now), fx.Received(name, _report(2 * now if name == "b" else now - 60)))
    assert syncer.rounds.step == syncer.rounds.closing.pace.clock >= 125


def _others_stop(syncer: Syncer) -> float:
    for name in "ac":
        syncer.handle(19.5, fx.Received(name, _report(19, stopped=True)))
    return 20.0


def _others_leave(syncer: Syncer) -> float:
    for name in "ac":
        syncer.handle(19.5, fx.Received(name, Leave(reason="done")))
    return 20.0


def _others_stay_away(syncer: Syncer) -> float:
    _lines_break(syncer)
    _train_alone(syncer, 19)
    return 20.0 + syncer.settings.assemble_s


def _train_alone(syncer: Syncer, t: int) -> None:
    """One step a second from step `t` on, for as long as the others are to be back."""
    for second in range(int(syncer.settings.assemble_s) - 1):
        syncer.handle(20.0 + second, fx.Received("b", _report(t + second)))


@pytest.mark.parametrize("others_go", [_others_stop, _others_leave, _others_stay_away])
def test_whoever_is_alone_for_good_is_believed_at_once(others_go: Callable[[Syncer], float]) -> None:
    syncer = _syncer_of_three()
    now = others_go(syncer)
    syncer.handle(now, fx.Received("b", _report(519)))
    assert syncer.rounds.step == 519


def test_what_one_said_before_all_others_had_left_counts_then() -> None:
    syncer = _syncer_of_three(steps=20_000)
    _lines_break(syncer)
    syncer.handle(19.501, fx.Received("b", _report(5019)))
    assert syncer.rounds.step < 20
    _train_alone(syncer, 5019)
    assert syncer.rounds.step < 1100
    syncer.handle(20.0 + syncer.settings.assemble_s, fx.Received("b", _report(5100)))
    assert syncer.rounds.step == 5100


def test_a_training_loop_that_has_ended_does_not_begin_again() -> None:
    """Of two learners one says stopped and not stopped in turn, with more steps each time: it is sent away."""
    syncer = _syncer_of("ab", steps=1000)
    syncer.handle(1.0, fx.Received("b", _report(1)))
    step = syncer.rounds.step
    for t in range(1, 1000):
        for stopped in (True, False, False):
            syncer.handle(1.0, fx.Received("b", _report(100 * t, stopped=stopped)))
    assert syncer.phase == "running" and not syncer.members.learners["b"].connected
    assert syncer.rounds.step == step


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=60), st.integers(0, 20), st.booleans())
def test_coming_and_going_brings_no_steps(claims: list[int], honest: int, same_name: bool) -> None:
    pace, t = Pace(interval=1.0), 0
    for number, claim in enumerate(claims):
        pace.set_members({"honest": t})
        liar = "liar" if same_name else f"liar-{number}"
        pace.set_members({"honest": t, liar: 7})
        pace.move_learner(liar, 7 + claim)
        if number < honest:
            t += 1
            pace.move_learner("honest", t)
        assert pace.clock <= (t + APART * (1 + t)) / 2


@pytest.mark.parametrize("changes", [0.02, 0.2, 1.0], ids=lambda share: f"{share:g} changes a step")
@pytest.mark.parametrize("step_s", [[1.0, 1.0], [1.0, 10.0], [1.0, 1.4, 1.7], [1.0, 10.0, 10.0, 10.0]])
def test_honest_learners_that_come_and_go_do_not_slow_the_run(
    step_s: list[float], changes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = _storm(step_s, changes)
    monkeypatch.setattr(closing, "APART", 1e12)  # everybody is believed
    assert limited >= 0.995 * _storm(step_s, changes)


def _storm(step_s: list[float], changes: float) -> float:
    """The run's step after 5,000 reports of honest learners, whom a dice makes come and go."""
    pace, dice, here = Pace(interval=1.0), random.Random(1), set(range(len(step_s)))
    t, next_at = [0] * len(step_s), list(step_s)
    for _ in range(5000):
        one = min(range(len(step_s)), key=lambda number: next_at[number])  # one that is away trains on
        now, t[one], next_at[one] = next_at[one], t[one] + 1, next_at[one] + step_s[one]
        if dice.random() < changes:
            here = (here ^ {dice.randrange(len(step_s))}) or here
        others = [1 / seconds for number, seconds in enumerate(step_s) if number != one]  # all of them train on
        pace.set_members({str(number): t[number] for number in here}, now)
        pace.move_learner(str(one), t[one], now, lambda others=others: believed_rate(others, 0, closing.APART))
    return pace.step


# ---- what is left of a budget --------------------------------------------------------------------------------------


def test_the_end_keeps_the_runs_step_and_what_was_spent() -> None:
    history = History(BegunRecord("run", Settings(learners=1, fragments=2, sync_every=4, steps=5), {}, (), "plan"))
    for record in (StartedRecord("a"), PassedRecord(0, 0, "", 0.9, 4.5)):
        history.apply(record)
    assert (history.step, history.progress, history.global_step) == (4.5, 0.9, 4)
    history.apply(EndedRecord("5 steps are done", step=5.5))
    assert (history.step, history.progress) == (5.5, 0.9), "told with rounds alone"
    history.apply(EndedRecord("5 steps are done", final=True, step=5.5, progress=1.0))
    assert (history.step, history.progress) == (5.5, 1.0)
