"""How many rounds are under way: as many as keep H, no more than help, within the memory that is allowed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.world import World

from atoll.protocol import schedule
from atoll.protocol.settings import Settings

USUAL = Settings(fragments=24, sync_every=24, overlap=2)


@pytest.mark.parametrize(
    ("round_s", "step_s", "flights"),
    [(0.0, 0.05, 2), (0.04, 0.05, 2), (0.12, 0.05, 4), (0.45, 0.05, 10), (6.0, 0.5, 13), (60.0, 0.5, 23)],
)
def test_as_many_rounds_are_needed_as_begin_while_one_is_under_way(round_s: float, step_s: float, flights: int) -> None:
    assert schedule.needed_flights(round_s, step_s, USUAL) == flights


def test_one_fragment_has_one_round_under_way_and_a_synchronous_run_what_its_schedule_has() -> None:
    assert schedule.needed_flights(9.0, 0.1, Settings(fragments=1, sync_every=24)) == 1
    assert schedule.needed_flights(9.0, 0.1, Settings(fragments=24, sync_every=24, synchronous=True)) == 2


@given(
    fragments=st.integers(1, 64),
    longer=st.integers(0, 64),
    overlap=st.integers(0, 8),
    times=st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)),
    step_s=st.floats(1e-6, 1e4),
)
def test_the_number_is_bounded_and_grows_with_the_time_of_a_round(
    fragments: int, longer: int, overlap: int, times: tuple[float, float], step_s: float
) -> None:
    settings = Settings(fragments=fragments, sync_every=fragments + longer, overlap=overlap)
    fewer, more = (schedule.needed_flights(round_s, step_s, settings) for round_s in sorted(times))
    least, most = schedule.least_flights(settings), schedule.most_flights(settings)
    assert 1 <= least <= fewer <= more <= most <= max(least, fragments - 1)
    if more < most:
        interval_s = step_s * settings.sync_every / fragments
        assert more * interval_s >= max(times), "the oldest is committed before one more is due"


@given(budget=st.integers(0, 2**40), each=st.integers(0, 2**32), learners=st.integers(0, 64))
def test_memory_lowers_the_number_to_what_the_overlap_asks_for_at_least(budget: int, each: int, learners: int) -> None:
    found = schedule.affordable_flights(budget, each, learners, USUAL)
    assert schedule.least_flights(USUAL) <= found <= schedule.most_flights(USUAL)
    assert found == schedule.least_flights(USUAL) or found * each * max(1, learners) <= budget
    assert schedule.affordable_flights(2 * budget, each, learners, USUAL) >= found


def usual_world(**differs: Any) -> World:
    return World(2, fragments=24, sync_every=24, latency_s=0.01, **differs)


@pytest.mark.parametrize(
    ("step_s", "body_s", "round_s"), [(0.05, 0.42, 0.45), pytest.param(0.5, 5.9, 5.95, marks=pytest.mark.faults)]
)
def test_h_stays_what_was_asked_when_a_round_takes_many_steps(step_s: float, body_s: float, round_s: float) -> None:
    world = usual_world(step_s=step_s, body_s=body_s).run_until(seconds=300 * step_s)
    flights = world.syncer.rounds.flights
    assert flights.round_s.value == pytest.approx(round_s, rel=0.03), "a round takes 9 or 12 steps to its commit"
    assert (world.syncer.steps_between_syncs.median or 99) <= 25
    assert not flights.is_short and flights.allowed < 23
    world.run_until(seconds=350 * step_s)  # the samples of the beginning are gone
    steps = world.syncer.steps_between_syncs
    assert (steps.median or 99) <= 25 and (steps.p95 or 99) <= 25 and (steps.mean or 99) < 25.6


def test_more_rounds_are_not_started_where_they_would_only_wait_for_each_other() -> None:
    """A tenth more work than fits: H gets a tenth longer, and contributions do not get old in a queue."""
    world = usual_world(step_s=0.5, merge_s=0.55).run_until(seconds=200)
    flights = world.syncer.rounds.flights
    assert flights.is_short and flights.gap_s == pytest.approx(0.55, rel=0.02)
    assert flights.wanted <= 7 and (flights.round_s.value or 99) < 3.5
    assert world.syncer.steps_between_syncs.median == pytest.approx(26.4, abs=1)


def test_a_run_that_was_short_of_bandwidth_finds_out_when_it_is_not_any_more() -> None:
    world = usual_world(step_s=0.5, body_s=2.0, merge_s=0.7).run_until(seconds=150)
    assert world.syncer.rounds.flights.is_short
    world.merge_s = 0.0
    world.run_until(seconds=200)
    assert not world.syncer.rounds.flights.is_short
    assert world.syncer.steps_between_syncs.median == pytest.approx(24, abs=1)


def test_memory_that_is_allowed_limits_the_rounds_and_is_named() -> None:
    world = usual_world(step_s=0.05, body_s=0.42)
    flights = world.syncer.rounds.flights
    flights.contribution_bytes, flights.budget_bytes = 10, 80
    most = 0
    for _ in range(150):
        world.run_until(seconds=0.1)
        rounds = world.syncer.state.open_rounds.values()
        most = max(most, sum(one.stage != "gathering" for one in rounds))
    assert most == 4, "two learners of 10 bytes each"
    assert flights.lacks_memory and not flights.is_short and flights.needed == 11


def test_a_step_that_becomes_slower_needs_fewer_rounds_under_way() -> None:
    world = usual_world(step_s=0.05, body_s=0.42).run_until(seconds=15)
    before = world.syncer.rounds.flights.allowed
    for learner in world.learners.values():
        learner.step_s = 1.0
    world.run_until(seconds=350)
    assert world.syncer.rounds.flights.allowed == 2 < before
    assert world.syncer.steps_between_syncs.median == pytest.approx(24, abs=1)


def test_the_overlap_is_measured_from_reading_to_adoption() -> None:
    near = World(2, fragments=4, sync_every=8).run_until(seconds=60)
    assert near.syncer.overlap.median == 1, "read at one boundary, adopted at the next"
    far = usual_world(step_s=0.5, body_s=2.0).run_until(seconds=150)
    assert far.syncer.overlap.median == pytest.approx(9, abs=1), "2 s up and 2 s down are eight steps and one boundary"
    told = [member["overlap"] for _, note in far.notes if note.kind == "round" for member in note.data["members"]]
    assert set(told[-20:]) <= {8, 9, 10} and told[0] is None
