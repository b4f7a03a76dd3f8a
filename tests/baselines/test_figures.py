"""The figures of a data-parallel run, on logs made by hand: two ranks, steps of one second."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.baselines.figures import RankLog, RankPause, RankStep, compute_figures, covered_s, select_kept


def step(
    rank: int, number: int, began: float, generation: int = 1, compute: float = 0.75, wait: float = 0.125
) -> RankStep:
    return RankStep(rank, number, generation, began, compute, wait, 0.125, tokens=10)


def both(number: int, began: float, generation: int = 1) -> list[RankStep]:
    return [step(rank, number, began, generation) for rank in (0, 1)]


def test_steps_without_a_break_are_goodput_and_uptime_of_one() -> None:
    found = compute_figures([*both(1, 5.0), *both(2, 6.0)], {1: 0}, 2, 2, end=7.0)
    assert (found.goodput, found.uptime, found.wall_s) == (1.0, 1.0, 2.0)
    assert (found.steps, found.steps_lost, found.tokens, found.tokens_lost) == (2, 0, 40, 0)
    assert found.longest_standstill_s == 1.0


def test_what_is_rolled_back_is_lost_and_the_standstill_goes_back_to_the_last_step_kept() -> None:
    made = [*both(1, 0.0), *both(2, 1.0), *both(3, 2.0)]
    again = [*both(2, 6.0, 2), *both(3, 7.0, 2)]
    found = compute_figures([*made, *again], {1: 0, 2: 1}, 3, 2, end=8.0)
    assert found.goodput == pytest.approx(3 / 8)
    assert found.uptime == pytest.approx(5 / 8)
    assert (found.steps, found.steps_lost, found.tokens, found.tokens_lost) == (3, 2, 60, 40)
    assert found.longest_standstill_s == 6.0


def test_a_step_of_fewer_ranks_counts_those_that_took_part() -> None:
    found = compute_figures([*both(1, 0.0), step(0, 2, 1.0, 2), *both(3, 2.0, 3)], {1: 0, 2: 1, 3: 2}, 3, 2, end=3.0)
    assert found.goodput == pytest.approx(5 / 6)
    assert (found.steps, found.steps_lost, found.tokens, found.uptime) == (3, 0, 50, 1.0)


def test_waiting_for_a_slower_rank_is_not_stepping() -> None:
    quick = step(0, 1, 0.0, compute=0.25, wait=0.625)
    slow = step(1, 1, 0.0, compute=0.75, wait=0.125)
    assert compute_figures([quick, slow], {1: 0}, 1, 2, end=1.0).goodput == pytest.approx((0.5 + 1.0) / 2)


def test_a_host_that_stands_still_does_not_step_and_holds_up_all() -> None:
    paused = step(1, 1, 0.0, compute=2.75)
    waits = step(0, 1, 0.0, compute=0.75, wait=2.125)
    found = compute_figures([paused, waits], {1: 0}, 1, 2, end=3.0, pauses=[RankPause(1, (0.5, 2.5))])
    assert found.goodput == pytest.approx(2 / 6)
    assert found.uptime == pytest.approx((0.75 + 0.5) / 3)


def test_what_the_final_model_has_not_is_lost_even_where_no_group_came_after() -> None:
    made = [*both(1, 0.0), *both(2, 1.0)]
    assert {one.step for one in select_kept(made, {1: 0}, last=1)} == {1}
    found = compute_figures(made, {1: 0}, 1, 2, end=4.0)
    assert (found.goodput, found.steps, found.steps_lost) == (0.25, 1, 1)
    assert found.longest_standstill_s == 3.0


def test_a_step_under_way_at_the_end_counts_up_to_it() -> None:
    found = compute_figures([*both(1, 0.0), *both(2, 1.0)], {1: 0}, 2, 2, end=1.5)
    assert found.goodput == 1.0


def test_time_in_several_spans_counts_once() -> None:
    assert covered_s([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == 4.0


def test_lines_are_heard_once_and_halves_are_waited_for(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    heard = RankLog(log)
    assert heard.read_new() == []
    log.write_bytes(b'a warning of torch\n{"kind": "ready", "step": 0}\n{"kind": "st')
    assert heard.read_new() == [{"kind": "ready", "step": 0}]
    with log.open("ab") as file:
        file.write(b'ep", "step": 1}\n')
    assert heard.read_new() == [{"kind": "step", "step": 1}] and heard.read_new() == []


def test_a_line_that_a_kill_cut_off_does_not_spoil_the_next(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b'{"kind": "step", "st{"kind": "ready", "step": 4}\n{"kind": "step", \n')
    assert RankLog(log).read_new() == [{"kind": "ready", "step": 4}]
