"""links.py: the floor of the overlap, rates and schedules as words, and what is counted of a run's events."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import link_figures as figures
import links
from link_figures import BodySizes, Contribution, Outage, Segment
from shaped_links import Links, Rates, Sample, check_link, hold_bytes, mean_bytes, peak_rate

from atoll.chaos.tcp_relay import TcpRelay

NARROW = Rates.from_mbit(60, 60)
BODIES = BodySizes.of_fragment(20_000_000 // 24, "bf16", "fp32")


def a_round(number: int, at: float, *members: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "round", "round": number, "at": at, "members": list(members), "sync_s": 0.1, "merge_s": 0.02}


def a_member(
    learner: str = "learner-0", t: int = 48, since: int | None = 24, overlap: int | None = 3
) -> dict[str, Any]:
    return {
        "learner": learner,
        "t": t,
        "since": since,
        "overlap": overlap,
        "steps": 24,
        "tokens": 240,
        "weight": 2400.0,
    }


# ---- the floor -------------------------------------------------------------------------------------------------------


def test_the_floor_is_six_crossings_both_bodies_merge_and_disk_rounded_up() -> None:
    floor = figures.compute_floor(Rates(1000.0, 500.0), 0.1, BodySizes(200, 300), 0.25, merge_s=0.05, disk_s=0.15)
    assert floor.seconds == pytest.approx(0.6 + 0.2 + 0.6 + 0.05 + 0.15)
    assert floor.steps == 7  # 6.4
    assert floor.to_dict()["floor_out_of_phase"] == 8


def test_a_floor_of_whole_steps_is_not_rounded_up_by_the_error_of_floats() -> None:
    assert figures.compute_floor(Rates(None, None), 0.1, BodySizes(1, 1), 0.2).steps == 3
    assert figures.compute_floor(Rates(1000.0, 1000.0), 0.0, BodySizes(100, 200), 0.1).steps == 3


@pytest.mark.parametrize(
    ("mbit", "codecs", "steps"), [(60, ("bf16", "fp32"), 5), (40, ("int4", "int4"), 3), (16, ("int4", "int4"), 4)]
)
def test_floors_of_the_issues_rows(mbit: float, codecs: tuple[str, str], steps: int) -> None:
    bodies = BodySizes.of_fragment(20_000_000 // 24, *codecs)
    assert figures.compute_floor(Rates.from_mbit(mbit, mbit), 0.04, bodies, 0.2).steps == steps


def test_loads_of_the_issues_rows() -> None:
    loads = figures.compute_load(NARROW, BODIES, 0.2, 24, 24)
    assert loads["down"] == pytest.approx(2.22, abs=0.01) and loads["up"] == pytest.approx(1.11, abs=0.01)
    int4 = BodySizes.of_fragment(20_000_000 // 24, "int4", "int4")
    assert figures.compute_load(Rates.from_mbit(16, 16), int4, 0.2, 24, 24)["up"] == pytest.approx(1.11, abs=0.01)
    assert figures.compute_load(Rates.from_mbit(40, 40), int4, 0.2, 24, 24)["up"] == pytest.approx(0.44, abs=0.01)
    assert figures.compute_load(Rates(None, None), int4, 0.2, 24, 24) == {"up": None, "down": None}
    # Half as many fragments are twice as large, and come half as often.
    assert figures.compute_load(NARROW, BODIES, 0.2, 24, 12)["up"] == pytest.approx(0.555, abs=0.01)


# ---- words -----------------------------------------------------------------------------------------------------------


def test_one_rate_is_for_all_and_a_direction_may_have_its_own() -> None:
    assert links.spread_rates([60], [], [], 3) == [Rates.from_mbit(60, 60)] * 3
    assert links.spread_rates([60, 15], [], [], 2) == [Rates.from_mbit(60, 60), Rates.from_mbit(15, 15)]
    assert links.spread_rates([60], [10], [100, 50], 2) == [Rates.from_mbit(10, 100), Rates.from_mbit(10, 50)]
    with pytest.raises(ValueError, match="2 rates up for 3 learners"):
        links.spread_rates([60, 15], [], [], 3)


def test_schedules_and_cuts_are_read() -> None:
    options = links.parse_options(["--only", "ours", "--then", "320:600", "--then", "640:60.5", "--cut", "1:240:60"])
    assert options.then == [(320, 600.0), (640, 60.5)]
    assert options.cut == [(1, 240, 60.0)]


@pytest.mark.parametrize("word", ["320", "x:60", "320:", "320:0", "-1:60"])
def test_a_change_of_rates_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        links.parse_then(word)


@pytest.mark.parametrize("word", ["1:240", "a:1:1", "1:240:0", "-1:1:1"])
def test_a_cut_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        links.parse_cut(word)


def test_a_cut_of_a_learner_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        links.parse_options(["--only", "ours", "--learners", "2", "--cut", "2:10:10"])
    assert "they are 0 to 1" in capsys.readouterr().err


def test_options_stand_on_top_of_a_named_row() -> None:
    options = links.parse_options(["--row", "narrow-int4-16", "--mbit", "18", "--adopt", "carry"])
    assert (options.name, options.codec, options.adopt) == ("narrow-int4-16", "int4", "carry")
    assert options.rates == [Rates.from_mbit(18, 18)] * 4
    assert options.out.name == "links-rows.json"
    assert links.parse_options(["--row", "quarter", "--name", "other"]).name == "other"


@pytest.mark.parametrize("name", [*links.ROWS])
def test_every_named_row_can_be_read(name: str) -> None:
    options = links.parse_options(["--row", name])
    assert options.limit_from == ("start" if name.startswith("start") else "joined")
    assert links.make_document(options, steps=options.steps)["protocol"]["quorum"] == options.quorum


def test_the_comparison_is_what_happens_without_a_row() -> None:
    options = links.parse_options([])
    assert options.only is None and options.out.name == "links.json"


def test_any_setting_goes_into_the_run() -> None:
    options = links.parse_options(["--only", "ours", "--set", "overlap=3", "--set", "evaluate_every=50"])
    document = links.make_document(options)
    assert document["protocol"]["overlap"] == 3 and document["service"]["evaluate_every"] == 50


# ---- events ----------------------------------------------------------------------------------------------------------


def test_an_overlap_is_of_the_contribution_before_the_one_that_tells_it() -> None:
    events = [a_round(30, 1.0, a_member(t=48, since=24, overlap=3), a_member("learner-1", since=None))]
    (one,) = figures.list_contributions(events)
    assert (one.read_at_step, one.since, one.overlap) == (24, 24, 3)


def test_settled_is_the_first_contribution_from_which_on_few_are_above() -> None:
    def read_at(step: int, overlap: int) -> Contribution:
        return Contribution("learner-0", step, float(step), step, 24, overlap)

    queued = [read_at(step, 30 - step) for step in range(20)]
    calm = [read_at(step, 5) for step in range(20, 60)]
    settled = figures.find_settled([*queued, *calm], 8)
    assert settled is not None and settled.read_at_step == 20
    assert figures.find_settled(queued, 8) is None


def test_a_segment_counts_what_was_read_in_it() -> None:
    rounds = [a_round(n, float(n), a_member(t=n, since=24, overlap=20 if n < 60 else 4)) for n in range(30, 130)]
    floor = figures.compute_floor(NARROW, 0.04, BODIES, 0.2)
    told = figures.describe_segment(Segment(60.0, 40.0, 120.0, 30), rounds, floor)
    assert told["rounds"] == 80 and told["h"]["median"] == 24
    assert told["settled_after"] == {"steps": 6, "cycles": 0.25, "told_after_rounds": 21}
    assert told["once_settled"]["overlap"]["p95"] == 4


def test_what_of_an_outage_was_merged_after_it() -> None:
    ends = [float(at) for at in range(1, 201)]  # a step a second; the link is cut from step 50 to 100
    outage = Outage("learner-0", 50.5, 100.5)
    after = [{**a_member(t=104), "steps": 54, "tokens": 540, "weight": 2700.0} for _ in range(2)]
    rounds = [a_round(1, 40.0, a_member(t=40)), *(a_round(n, 105.0 + n, one) for n, one in enumerate(after))]
    told = figures.describe_outage(outage, rounds, ends, fragments=2, sync_every=24)
    assert told["steps_made"] == 50 and told["steps_merged"] == 50.0 and told["merged_share"] == 1.0
    assert told["weight_applied_share"] == 0.5 and told["first_round_after_s"] == pytest.approx(4.5)


def test_a_row_is_a_line_of_a_table() -> None:
    spread = {"median": 34.0, "mean": 36.0, "p95": 75.0}
    free = {"overlap": spread, "h": {**spread, "median": 46.0}, "merged_share": 0.375, "members": 4}
    floors = {"learner-0": {"floor": 5}, "learner-1": {"floor": 9}}
    row = {**free, "load": {"up": 1.11, "down": 2.22}, "floors": floors}
    assert figures.format_row("a", row) == "| a | 111 %, 222 % | 34, 75 (5 to 9) | 0.375 | 46 (75) | 4 |"
    assert figures.format_row("b", free) == "| b | -, - | 34, 75 (-) | 0.375 | 46 (75) | 4 |"


def test_rows_are_kept_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for name, value in (("a", 1), ("b", 2), ("a", 3)):
        links.write_row(path, name, {"value": value})
    assert json.loads(path.read_text()) == {"a": {"value": 3}, "b": {"value": 2}}


# ---- links -----------------------------------------------------------------------------------------------------------


def test_bytes_between_two_moments_and_the_peak_over_a_window() -> None:
    carried = [0, 10, 20, 120, 130, 140, 150]
    samples = [Sample(float(at), (up, 0), (0, 0)) for at, up in enumerate(carried)]
    assert mean_bytes(samples, "up", 1.0, 3.0) == 55.0
    assert peak_rate(samples, "up", 0) == 55.0 and peak_rate(samples, "up", 1) == 0.0


def test_a_relay_holds_twice_what_the_delay_takes() -> None:
    assert hold_bytes(Rates(1e6, 2e6), 0.05) == 200_000 + 16384
    assert hold_bytes(Rates(None, None), 0.05) == 16 * 1024 * 1024


async def test_connections_of_a_link_share_one_rate_and_a_message_passes_bodies() -> None:
    check = await check_link(1e6, 0.01, 0.6)
    assert 0 < check.carried_mbit < 1.3 * 8  # a busy machine may be slower, none is faster
    assert max(check.shares) - min(check.shares) < 0.2
    assert check.held_bytes > 100_000 and check.message_ms[0] < 400  # a second's worth of bodies is on the way


async def test_a_limit_begins_when_it_is_set_and_follows_a_change() -> None:
    wide = Links([Rates(1e6, 1e6)], 0.0, limited=False)
    line = await wide.open("127.0.0.1", 1)
    try:
        assert read_rates(line) == [None, None]
        wide.limit()
        held = line.up
        assert wide.limited_at > 0 and read_rates(line) == [1e6, 1e6]
        wide.limit([Rates(5e6, 2e6)])
        assert line.up is held and read_rates(line) == [5e6, 2e6]
    finally:
        await asyncio.wait_for(wide.close(), 5)


def read_rates(line: TcpRelay) -> list[float | None]:
    return [None if way is None else way.bytes_per_s for way in (line.up, line.down)]
