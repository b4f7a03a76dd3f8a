"""Plans for regions: laws that hold whatever the sites are, choices on figures that can be checked by hand, and the
command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll import cli
from atoll.estimate.bandwidth import ROOM
from atoll.estimate.plan import LADDER, Plan, make_plan
from atoll.estimate.profile import Profile, load
from atoll.estimate.regions import Link, PlannedModel, Regions, Site, SyncerSite, convert_regions, measured_values
from atoll.observe.doctor.link import MeasuredTransfer, RoundTrip, judge_bandwidth, judge_trips
from atoll.protocol.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "regions.toml"
SPOT = load("spot")
NOISE = 0.005
"""Another time of recovery is another draw of failures."""
replace = msgspec.structs.replace


def plan_of(regions: Regions, profile: Profile = SPOT) -> Plan:
    return make_plan(regions, profile, seeds=3, hours=24.0)


def site(name: str, **more: Any) -> Site:
    return Site(**{"name": name, "machines": 4, "tokens_per_s": 1e4, "machines_per_learner": 1, **more})


def two_sites(gbit_s: float = 1.0, parameters: float = 1e9, **away: Any) -> Regions:
    return Regions(
        model=PlannedModel(parameters=parameters, tokens_per_step=1e4),
        sites=(site("home"), site("away", **away)),
        links=(Link(between=("home", "away"), gbit_s=gbit_s),),
    )


def widened(regions: Regions, times: float) -> Regions:
    links = (replace(one, gbit_s=times * one.gbit_s, down_gbit_s=times * one.down_gbit_s) for one in regions.links)
    return replace(regions, links=tuple(links))


@st.composite
def any_regions(draw: st.DrawFn) -> Regions:
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    sites = [
        Site(
            name=name,
            machines=draw(st.integers(1, 12)),
            machines_per_learner=1,
            step_s=draw(st.floats(0.2, 30.0)),
            price_per_hour=draw(st.floats(0.0, 50.0)),
            preempted_every_h=draw(st.sampled_from([0.0, 2.0, 12.0, 100.0])),
            away_h=draw(st.floats(0.05, 2.0)),
            mtbf_h=draw(st.floats(100.0, 1e5)),
        )
        for name in names
    ]
    links = [
        Link(
            between=(name, "a"),
            gbit_s=draw(st.floats(0.05, 100.0)),
            down_gbit_s=draw(st.sampled_from([0.0, 0.5, 50.0])),
            round_trip_ms=draw(st.floats(0.0, 300.0)),
            price_per_gb=draw(st.floats(0.0, 0.1)),
        )
        for name in names[1:]
    ]
    model = PlannedModel(parameters=draw(st.floats(1e6, 2e10)), tokens_per_step=draw(st.floats(1e3, 1e6)), tokens=1e9)
    return Regions(model=model, sites=tuple(sites), links=tuple(links), syncer=SyncerSite(price_per_hour=0.5))


regular = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# ---- laws -----------------------------------------------------------------------------------------------------------


@regular
@given(regions=any_regions(), times=st.floats(1.0, 100.0))
def test_more_bandwidth_never_gives_fewer_tokens_nor_a_larger_h(regions: Regions, times: float) -> None:
    narrow, wide = plan_of(regions), plan_of(widened(regions, times))
    assert wide.tokens_per_s >= (1 - NOISE) * narrow.tokens_per_s
    steps = [(24 << doubling, codecs) for doubling in range(7) for codecs in LADDER]
    rank = {step: number for number, step in enumerate(steps)}
    found = [rank[one.sync_every, (one.codec, one.version_codec)] for one in (narrow, wide)]  # type: ignore[index]
    assert found[1] <= found[0]


@regular
@given(regions=any_regions(), share=st.floats(0.0, 1.0), which=st.integers(0, 2))
def test_a_cheaper_machine_never_raises_the_cost_and_changes_nothing_else(
    regions: Regions, share: float, which: int
) -> None:
    sites = list(regions.sites)
    at = which % len(sites)
    sites[at] = replace(sites[at], price_per_hour=share * sites[at].price_per_hour)
    dear, cheap = plan_of(regions), plan_of(replace(regions, sites=tuple(sites)))
    assert cheap.price_per_billion_tokens <= dear.price_per_billion_tokens
    assert cheap.tokens_per_s == dear.tokens_per_s and cheap.links == dear.links


@regular
@given(regions=any_regions())
def test_the_parts_add_up_and_a_plan_goes_through_json(regions: Regions) -> None:
    plan = plan_of(regions)
    assert plan.learners == sum(one.learners for one in plan.sites) == sum(one.machines for one in regions.sites)
    assert plan.tokens_per_s == pytest.approx(sum(one.tokens_per_s for one in plan.sites))
    assert 0 < plan.goodput <= 1 and all(0 < one.goodput <= 1 for one in plan.sites)
    hourly = sum(one.price_per_hour for one in plan.sites) + 0.5 + sum(link.price_per_day for link in plan.links) / 24
    assert plan.price_per_hour == pytest.approx(hourly)
    assert plan.price_per_billion_tokens == pytest.approx(hourly / plan.tokens_per_s / 3600 * 1e9)
    assert {link.site for link in plan.links} == {one.name for one in regions.remote_sites()}
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


@regular
@given(regions=any_regions(), times=st.floats(1.0, 20.0))
def test_machines_that_are_taken_away_less_often_never_give_fewer_tokens(regions: Regions, times: float) -> None:
    calmer = [replace(one, preempted_every_h=times * one.preempted_every_h) for one in regions.sites]
    rough, calm = plan_of(regions), plan_of(replace(regions, sites=tuple(calmer)))
    assert calm.goodput >= rough.goodput - 0.08, "a day of few machines is a small sample"


# ---- choices --------------------------------------------------------------------------------------------------------


def test_a_wide_link_keeps_the_defaults_and_needs_no_relay() -> None:
    plan = plan_of(two_sites(gbit_s=1000.0))
    assert (plan.sync_every, plan.codec, plan.version_codec) == (24, "bf16", "fp32")
    assert not any(one.relay for one in plan.sites)


def test_the_narrower_the_link_the_further_down_the_ladder_with_relays_before_codecs() -> None:
    """Versions of a 1B model in fp32 once in 24 s are 1.33 Gbit/s for each learner; counted on are four fifths."""
    for gbit_s, relay, expected in (
        (4 * 1.34 / ROOM, False, (24, "bf16", "fp32")),
        (1.34 / ROOM, True, (24, "bf16", "fp32")),
        (0.67 / ROOM, True, (24, "bf16", "bf16")),
        (0.18 / ROOM, True, (24, "int4", "int4")),
        (0.09 / ROOM, True, (48, "int4", "int4")),
    ):
        plan = plan_of(two_sites(gbit_s=gbit_s))
        assert (plan.sync_every, plan.codec, plan.version_codec) == expected, gbit_s
        assert plan.sites[1].relay == relay and plan.links[0].carried


def test_traffic_that_is_paid_for_goes_through_a_relay() -> None:
    regions = two_sites(gbit_s=1000.0)
    paid = replace(regions, links=(replace(regions.links[0], price_per_gb=0.02),))
    free, dear = plan_of(regions), plan_of(paid)
    assert dear.sites[1].relay and dear.links[0].gigabytes_per_day == pytest.approx(free.links[0].gigabytes_per_day / 4)
    assert dear.links[0].price_per_day == pytest.approx(0.02 * dear.links[0].gigabytes_per_day)


def test_a_relay_makes_no_sums_of_learners_of_several_ranks() -> None:
    regions = two_sites(gbit_s=1000.0, gpus=8)
    (link,) = plan_of(replace(regions, links=(replace(regions.links[0], price_per_gb=0.02),))).links
    assert link.up_gbit_s == pytest.approx(4 * 16 / 24), "four contributions in bf16, in 24 steps of a second"
    assert link.down_gbit_s == pytest.approx(32 / 24), "and one version in fp32"


def test_a_link_that_carries_nothing_is_said_and_its_real_h_is_told() -> None:
    (link,) = plan_of(two_sites(gbit_s=1e-4)).links
    assert not link.carried and link.effective_h > 24 << 6


def test_where_nothing_is_taken_away_few_learners_do_and_where_much_is_many_do() -> None:
    calm, rough = (
        plan_of(two_sites(machines=8, machines_per_learner=0, preempted_every_h=hours, away_h=0.1, gbit_s=100.0))
        for hours in (0.0, 0.5)
    )
    assert calm.sites[1].machines_per_learner == 8
    assert rough.sites[1].machines_per_learner < 4


def test_a_lone_site_has_two_learners_at_least() -> None:
    regions = Regions(
        model=PlannedModel(parameters=1e9, tokens_per_step=1e4), sites=(site("a", machines_per_learner=0),)
    )
    assert plan_of(regions).learners == 2


def test_a_slow_link_costs_who_is_taken_away_time_to_fetch_its_state() -> None:
    often = {"preempted_every_h": 1.0, "away_h": 0.1}
    narrow, wide = (plan_of(two_sites(gbit_s=width, **often)).sites[1].goodput for width in (0.5, 500.0))
    assert narrow < wide - 0.05


# ---- bad input ------------------------------------------------------------------------------------------------------


def document() -> dict[str, Any]:
    return {
        "model": {"parameters": 1e9, "tokens_per_step": 1000.0},
        "sites": [{"name": "a", "machines": 2, "step_s": 1.0}, {"name": "b", "machines": 2, "step_s": 1.0}],
        "links": [{"between": ["a", "b"], "gbit_s": 1.0}],
    }


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("sites.0.machines", "two", "sites[0].machines: Expected `int`, got `str`"),
        ("sites.0.machines", 0, "site 'a': machines = 0 must be above 0"),
        ("sites.0.machines", 5000, "site 'a': machines = 5,000 are too many to simulate: 4,096 at most"),
        ("sites.0.machine", 1, "sites[0]: Object contains unknown field `machine`"),
        ("sites.0.price_per_hour", -1.0, "site 'a': price_per_hour = -1 must be a number of 0 or more"),
        ("sites.0.tokens_per_s", 5.0, "site 'a': give step_s or tokens_per_s, one of the two"),
        ("sites.0.machines_per_learner", 3, "machines = 2 cannot be dealt evenly"),
        ("sites.1.name", "a", "two are called 'a'"),
        ("links.0.gbit_s", 0, "link between a and b: gbit_s = 0 must be above 0"),
        ("links.0.between", ["a", "c"], "between names 'c', which is no site: a, b"),
        ("links", [], "there is none between 'b' and 'a', where the syncer is"),
        ("syncer", {"site": "c"}, "site = 'c' is no site: a, b"),
        ("model.parameters", 0, "parameters = 0 must be above 0"),
        ("model.parameters", float("nan"), "parameters = nan must be a number"),
        ("sites", [], "write at least one [[sites]]"),
    ],
)
def test_bad_input_is_refused_by_the_name_of_its_field(path: str, value: Any, told: str) -> None:
    found: Any = (given := document())
    *way, last = path.split(".")
    for step in way:
        found = found[int(step)] if isinstance(found, list) else found[step]
    found[last] = value
    with pytest.raises(ConfigError) as refused:
        convert_regions(given)
    assert told in str(refused.value) and "\n" not in str(refused.value)


# ---- the command ----------------------------------------------------------------------------------------------------


def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["atoll", "plan", *words])
    monkeypatch.setenv("COLUMNS", "120")
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_example_is_planned_on_one_page_with_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = command(capsys, monkeypatch, str(EXAMPLE))
    assert code == 0 and len(out.splitlines()) < 50
    assert "per billion tokens" in out and "atoll relay --join LINK" in out and "--set codec=int4" in out


def test_the_page_shows_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, _ = command(capsys, monkeypatch, str(EXAMPLE))
    shown = (EXAMPLE.parents[1] / "docs" / "plan.md").read_text().split("```\n")
    assert "\n".join(line.rstrip() for line in out.strip().splitlines()) + "\n" in shown


def test_json_has_the_plan_and_its_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = command(capsys, monkeypatch, str(EXAMPLE), "--json", "--seeds", "2")
    found = json.loads(out)
    assert code == 0 and found["learners"] == sum(one["learners"] for one in found["sites"])
    assert any(line.startswith("atoll syncer ") for line in found["commands"])


def test_a_mistake_is_one_line_with_the_file_and_the_field(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[model]\nparameters = "seven"\ntokens_per_step = 1\n')
    code, _, err = command(capsys, monkeypatch, str(file))
    assert code == 2 and "mine.toml: model.parameters" in err and len(err.splitlines()) == 1
    assert command(capsys, monkeypatch, str(tmp_path / "none.toml"))[0] == 2


def test_what_the_doctor_measured_is_a_link(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checks = [
        judge_trips("https://x", [RoundTrip(0.03, None)] * 3),
        judge_bandwidth("bandwidth down", MeasuredTransfer(25_000_000, 2.0)),
        judge_bandwidth("bandwidth up", MeasuredTransfer(12_500_000, 2.0)),
    ]
    told = {"ok": True, "checks": [check.document() for check in checks]}
    assert measured_values(told) == pytest.approx({"gbit_s": 0.05, "down_gbit_s": 0.1, "round_trip_ms": 30.0})
    (tmp_path / "lab.json").write_text(json.dumps(told))
    text = EXAMPLE.read_text().partition("gbit_s = 1.0 # up")[0] + 'measured = "lab.json"\n'
    (tmp_path / "mine.toml").write_text(text)
    code, out, _ = command(capsys, monkeypatch, str(tmp_path / "mine.toml"), "--json", "--seeds", "1")
    assert code == 0 and json.loads(out)["sync_every"] > 24, "0.05 Gbit/s is little for 7B"
    (tmp_path / "lab.json").write_text('{"ok": true, "checks": []}')
    code, _, err = command(capsys, monkeypatch, str(tmp_path / "mine.toml"))
    assert code == 2 and "lab.json: it has no 'bandwidth up'" in err
