"""The bandwidth calculator: the published tables, its inverse, and what each setting does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from atoll.choices import CODEC
from atoll.estimate.bandwidth import (
    BITS,
    LEAST,
    PROFILES,
    VERSIONS,
    BandwidthCase,
    BandwidthMethod,
    Bound,
    SpreadRun,
    Topology,
    away_steps,
    bandwidth,
    cases,
    data_parallel,
    decoupled,
    effective_h,
    late_steps,
    loads_gbit,
    profile,
    utilization,
)
from atoll.numerics.codec import make_codec
from atoll.protocol.errors import ConfigError

Bounds: TypeAlias = Callable[[SpreadRun], list[Bound]]
SHARES = (0.5, 0.75, 0.9, 0.95, 0.99)
PUBLISHED = [
    ("data-parallel", "bf16", 1.0, 2, "49 81 104 113 195"),
    ("decoupled", "bf16", 1.0, 2, "0.58 1.2 1.7 1.9 2.2"),
    ("decoupled", "int4", 1.0, 2, "0.15 0.29 0.43 0.49 0.53"),
    ("data-parallel", "bf16", 5.0, 8, "17 28 37 40 49"),
    ("decoupled", "bf16", 5.0, 8, "0.21 0.40 0.59 0.68 0.75"),
]
CELLS = [
    (
        BandwidthCase(
            method, msgspec.structs.replace(PROFILES["paper-table"].run, step_s=s, datacenters=n, codec=codec)
        ),
        u,
        cell,
    )
    for method, codec, s, n, row in PUBLISHED
    for u, cell in zip(SHARES, row.split(), strict=True)
    if not (method == "data-parallel" and u == 0.99)
]
TABLE = PROFILES["paper-table"].run


def named(value: object) -> str | None:
    return f"{value.method}, {value.run.codec}, {value.run.step_s:g} s" if isinstance(value, BandwidthCase) else None


@pytest.mark.parametrize(("case", "share", "cell"), CELLS, ids=named)
def test_a_published_cell_is_met_within_5_percent_or_a_last_digit(case: BandwidthCase, share: float, cell: str) -> None:
    digit = 10.0 ** -len(cell.partition(".")[2])
    assert case.needs(share).gbit_s == pytest.approx(float(cell), abs=max(digit, 0.05 * float(cell)))


def test_the_exact_99_percent_of_data_parallel_is_below_the_published_artefact() -> None:
    assert bandwidth(data_parallel(TABLE), 1.0, 0.99) == pytest.approx(132, rel=1e-3)


spreads = st.builds(
    lambda every, spare, overlap, places, more, **rest: SpreadRun(
        sync_every=every,
        fragments=max(1, every - spare),
        overlap=min(overlap, every - 1),
        datacenters=places,
        learners=places + more,
        **rest,
    ),
    every=st.integers(1, 300),
    spare=st.integers(0, 300),
    overlap=st.integers(0, 30),
    places=st.integers(2, 20),
    more=st.integers(0, 20),
    step_s=st.floats(0.01, 100),
    parameters=st.floats(1e6, 1e13),
    layers=st.integers(1, 200),
    codec=st.sampled_from(["fp32", "bf16", "int8", "int4", "topk"]),
    down=st.sampled_from([None, "fp32", "int8"]),
    topology=st.sampled_from(["ring", "star"]),
    latency_s=st.sampled_from([0.0, 0.001, 0.05, 1.0]),
)
methods = st.sampled_from([data_parallel, decoupled])


@given(run=spreads, method=methods, share=st.floats(0.01, 0.999))
def test_a_bandwidth_gives_the_utilization_it_was_computed_for(run: SpreadRun, method: Bounds, share: float) -> None:
    bounds = method(run)
    try:
        gbit_s = bandwidth(bounds, run.step_s, share)
    except ConfigError:
        assert utilization(bounds, run.step_s, 1e18) <= share * (1 + 1e-9), "not even an endless link reaches it"
        return
    assume(gbit_s >= LEAST)  # less than a bit in a second is asked about by nobody
    assert utilization(bounds, run.step_s, gbit_s) == pytest.approx(share, rel=1e-9)


@given(run=spreads, method=methods, gbit_s=st.floats(1e-3, 1e4), factor=st.floats(1, 100))
def test_more_bandwidth_never_hurts(run: SpreadRun, method: Bounds, gbit_s: float, factor: float) -> None:
    bounds = method(run)
    assert utilization(bounds, run.step_s, gbit_s) <= utilization(bounds, run.step_s, gbit_s * factor)
    assert late_steps(run, gbit_s) >= late_steps(run, gbit_s * factor)
    assert effective_h(run, gbit_s) >= effective_h(run, gbit_s * factor) >= run.sync_every


@given(run=spreads, gbit_s=st.floats(1e-3, 1e4))
def test_a_ring_without_latency_is_the_formula_of_the_paper_with_at_most_everything_hidden(
    run: SpreadRun, gbit_s: float
) -> None:
    run = msgspec.structs.replace(run, topology="ring", latency_s=0.0)
    bits = BITS[run.codec]
    ring = 2 * (run.datacenters - 1) / run.datacenters
    load = run.parameters * bits / 1e9 * ring / (run.sync_every * gbit_s * run.step_s)
    exposed = max(0.0, load - min(1.0, run.fragments * run.overlap / run.sync_every))
    assert utilization(decoupled(run), run.step_s, gbit_s) == pytest.approx(1 / (1 + exposed), rel=1e-9)


def test_bits_are_those_of_the_codecs_there_are() -> None:
    rows = ((64, 1 << 10),)
    assert {name: 8 * make_codec(name).nbytes(rows) / (1 << 16) for name in CODEC.names()} == BITS


def test_an_overlap_longer_than_a_round_hides_no_more_than_everything() -> None:
    paper = profile("paper").run
    longer = msgspec.structs.replace(paper, overlap=20)
    assert bandwidth(decoupled(paper), 1.0, 0.5) == bandwidth(decoupled(longer), 1.0, 0.5)
    assert bandwidth(decoupled(paper), 1.0, 0.5) == pytest.approx(80 / 24 / 2), (
        "a step of two seconds, all of it sending"
    )


STAR = msgspec.structs.replace(profile("atoll").run, down=None)
"""Both ways as the codec says."""


def test_a_star_carries_a_copy_for_every_learner_of_a_data_center() -> None:
    assert bandwidth(decoupled(STAR), 1.0, 0.5) == pytest.approx(4 * 80 / 24 / 2)
    alone = msgspec.structs.replace(STAR, datacenters=8)
    assert bandwidth(decoupled(alone), 1.0, 0.5) == pytest.approx(80 / 24 / 2)
    uneven = msgspec.structs.replace(STAR, datacenters=3)
    assert bandwidth(decoupled(uneven), 1.0, 0.5) == pytest.approx(3 * 80 / 24 / 2), "the fullest holds three"


def test_this_softwares_versions_come_down_in_fp32_whatever_goes_up() -> None:
    """As `courier/body.py` fetches them: float32 as the syncer holds it. The papers' profiles know one codec."""
    star = profile("atoll").run
    assert star.down == VERSIONS == "fp32" and {profile(name).run.down for name in ("paper", "paper-table")} == {None}
    assert loads_gbit(star) == (4 * 80, 4 * 160)
    assert effective_h(star, 4 * 160 / 24) == 24 and effective_h(star, 4 * 80 / 24) == pytest.approx(48)
    int8 = msgspec.structs.replace(star, codec="int8")
    assert bandwidth(decoupled(int8), 1.0, 0.5) == bandwidth(decoupled(star), 1.0, 0.5), "the way down sets the pace"
    assert late_steps(star, 4 * 80 / 24) == pytest.approx(1), "up 1 s, down 2 s, of which τ = 2 are foreseen"
    wider = effective_h(star, 4 * 80 / 24, 4 * 160 / 24), away_steps(star, 4 * 80 / 24, 4 * 160 / 24)
    assert wider == (24, pytest.approx(2)), "a link that is twice as wide down"


def test_a_ring_has_no_way_down_of_its_own() -> None:
    ring = msgspec.structs.replace(TABLE, down="fp32")
    assert decoupled(ring) == decoupled(TABLE) and late_steps(ring, 0.1) == late_steps(TABLE, 0.1)


def test_a_star_that_just_keeps_up_is_fresh_and_at_half_of_it_everything_takes_twice_as_long() -> None:
    star = STAR
    keeps_up = 4 * 80 / 24
    assert (effective_h(star, keeps_up), late_steps(star, keeps_up)) == (24, 0)
    assert utilization(decoupled(star), 1.0, keeps_up) == 1
    assert effective_h(star, keeps_up / 2) == pytest.approx(48)
    assert late_steps(star, keeps_up / 2) == pytest.approx(2), "up 2 s, down 2 s, of which τ = 2 are foreseen"


def test_a_star_without_overlap_is_late_by_its_whole_way() -> None:
    star = msgspec.structs.replace(STAR, overlap=0, latency_s=0.1)
    assert late_steps(star, 4 * 80 / 24) == pytest.approx(2.2)
    assert utilization(decoupled(star), 1.0, 4 * 80 / 24) == pytest.approx(1 / 3.2)


def test_latency_that_fits_into_the_overlap_costs_nothing_but_room() -> None:
    far = msgspec.structs.replace(TABLE, latency_s=0.5)
    assert utilization(decoupled(far), 1.0, 1e9) == 1
    assert bandwidth(decoupled(far), 1.0, 0.5) == pytest.approx(0.8 / (1 + 0.36 - 0.18)), "1 s of each fragment's 2 s"


def test_latency_that_no_bandwidth_makes_up_for_is_refused_with_the_bound() -> None:
    far = msgspec.structs.replace(TABLE, latency_s=6.0)
    with pytest.raises(ConfigError, match=r"of 0\.9: with this latency it stays below 0\.357; ask for less, lower lat"):
        bandwidth(decoupled(far), 1.0, 0.9)
    assert utilization(decoupled(far), 1.0, 1e12) == pytest.approx(1 / (1 + 0.18 * 10))
    near = msgspec.structs.replace(TABLE, latency_s=0.05)
    with pytest.raises(ConfigError, match=r"stays below 0\.909"):
        bandwidth(data_parallel(near), 1.0, 0.95)


@pytest.mark.parametrize("topology", ["ring", "star"])
@pytest.mark.parametrize("method", ["data-parallel", "decoupled"])
def test_one_data_center_needs_no_link_to_another(topology: Topology, method: BandwidthMethod) -> None:
    home = BandwidthCase(method, SpreadRun(datacenters=1, topology=topology, latency_s=3.0))
    assert home.needs(0.99).gbit_s == 0
    assert home.at(0.001).utilization == 1
    assert method == "data-parallel" or (home.needs(0.99).effective_h, home.needs(0.99).late_steps) == (24, 0)


def test_data_parallel_is_asked_about_once_whatever_the_codecs() -> None:
    asked = cases(TABLE, ["data-parallel", "decoupled"], ["int4", "bf16", "int4"], [1.0, 1.0], [2])
    assert [(case.method, case.codec) for case in asked] == [
        ("data-parallel", "bf16"),
        ("decoupled", "int4"),
        ("decoupled", "bf16"),
    ]


@given(run=spreads)
def test_more_data_centers_than_learners_concern_decoupled_alone(run: SpreadRun) -> None:
    assume(run.datacenters > 1)
    run = msgspec.structs.replace(run, learners=run.datacenters - 1)
    assert utilization(data_parallel(run), run.step_s, 1.0) > 0
    with pytest.raises(ConfigError, match="every learner is in one"):
        decoupled(run)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, 1.5, float("nan")])
def test_a_utilization_that_cannot_be_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and below 1"):
        bandwidth(decoupled(TABLE), 1.0, share)
