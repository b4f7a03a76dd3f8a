"""A plan for a run over several sites: which H, codecs, relays and learners, and what to expect of them.

Nothing is modelled here: links are judged by `bandwidth`, machines that fail or are taken away by `goodput`, what a
learner fetches when it comes back by `upsizing`. Decided here is what to ask them, in this order:
- learners: the fewest, so the most machines in each, whose goodput is within a point of that of one machine each. More
  learners cost traffic and some loss. What comes over the links does not decide it;
- H and codecs: of the steps below the first that every link carries, each with four fifths of its width (ROOM), and in
  which fragments return while P − 1 rounds are under way. Codecs first, since int4 both ways cost 0.1 to 0.4 % of loss
  where it was measured (docs/measured.md) and a larger H more; never topk, which costs far more unless it is tuned for;
- a relay in every site of several learners whose link carries that only with one, or whose traffic is paid for. It
  changes nothing but where sums are made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import median

import msgspec

from atoll.estimate.bandwidth import (
    BITS,
    ROOM,
    CodecName,
    SpreadRun,
    above_0,
    away_steps,
    effective_h,
    loads_gbit,
    most_away_steps,
)
from atoll.estimate.goodput import Job, cells
from atoll.estimate.profile import Profile, with_values
from atoll.estimate.regions import Link, Regions, Site
from atoll.estimate.upsizing import grow, steps_per_copy
from atoll.protocol.errors import ConfigError

LADDER: tuple[tuple[CodecName, CodecName], ...] = (
    ("bf16", "fp32"),
    ("bf16", "bf16"),
    ("int8", "int8"),
    ("int4", "int4"),
)
"""Up and down, from what costs the least loss to what costs the fewest bytes."""
FIRST_H, DOUBLINGS = 24, 7
FRAGMENTS, OVERLAP = 24, 2
WITHIN = 0.01
"""Of the goodput with one machine a learner: a point."""
HOUR_S, DAY_S = 3600.0, 86_400.0
GIGABYTES = 1 / 8
"""Of a gigabit."""


class SitePlan(msgspec.Struct, frozen=True):
    site: str
    learners: int
    machines_per_learner: int
    relay: bool
    goodput: float
    tokens_per_s: float
    price_per_hour: float
    price_per_billion_tokens: float


class LinkPlan(msgspec.Struct, frozen=True):
    site: str
    """Its link to the syncer's."""
    up_gbit_s: float
    """What it has to carry, on average …"""
    down_gbit_s: float
    share: float
    """… of what is counted on; above 1 it is not carried."""
    gigabytes_per_day: float
    price_per_day: float
    away_steps: float
    """From the reading of a fragment to its return."""
    effective_h: float

    @property
    def carried(self) -> bool:
        return self.share <= 1


class Plan(msgspec.Struct, frozen=True):
    sync_every: int
    fragments: int
    codec: CodecName
    version_codec: CodecName
    learners: int
    step_s: float
    """The median learner's: rounds keep that pace."""
    goodput: float
    tokens_per_s: float
    price_per_hour: float
    """Machines, the syncer's own, and traffic."""
    price_per_billion_tokens: float
    days: float | None
    """For the tokens that the model is to see."""
    sites: list[SitePlan]
    links: list[LinkPlan]


def make_plan(regions: Regions, profile: Profile, *, seeds: int = 5, hours: float = 48.0) -> Plan:
    sizes = choose_learners(regions, profile, seeds, hours)
    step_s = pace_s(regions, sizes)
    run = choose_rules(regions, sizes, step_s)
    remote = {site.name: _judge_direct_or_relayed(regions, site, sizes, run) for site in regions.remote_sites()}
    links = [link for link, _ in remote.values()]
    played = play_sites(regions, profile, sizes, seeds, hours, run.sync_every)
    tokens = {name: share * _most_tokens_per_s(regions, name) for name, share in played.items()}
    sites = [
        SitePlan(
            site=site.name,
            learners=site.machines // sizes[site.name],
            machines_per_learner=sizes[site.name],
            relay=site.name in remote and remote[site.name][1],
            goodput=played[site.name],
            tokens_per_s=tokens[site.name],
            price_per_hour=(price := site.machines * site.price_per_hour),
            price_per_billion_tokens=_per_billion(price, tokens[site.name]),
        )
        for site in regions.sites
    ]
    price = sum(one.price_per_hour for one in sites) + regions.syncer.price_per_hour
    price += sum(link.price_per_day for link in links) / 24
    total = sum(tokens.values())
    return Plan(
        sync_every=run.sync_every,
        fragments=run.fragments,
        codec=run.codec,
        version_codec=run.down or run.codec,
        learners=sum(one.learners for one in sites),
        step_s=step_s,
        goodput=total / sum(_most_tokens_per_s(regions, site.name) for site in regions.sites),
        tokens_per_s=total,
        price_per_hour=price,
        price_per_billion_tokens=_per_billion(price, total),
        days=regions.model.tokens / total / DAY_S if regions.model.tokens else None,
        sites=sites,
        links=links,
    )


def _per_billion(price_per_hour: float, tokens_per_s: float) -> float:
    return price_per_hour / HOUR_S * 1e9 / tokens_per_s


def _most_tokens_per_s(regions: Regions, name: str) -> float:
    """Of a site in which nothing ever fails."""
    site = regions.site(name)
    return site.machines * regions.model.tokens_per_step / site.seconds_of(regions.model)


def pace_s(regions: Regions, sizes: Mapping[str, int]) -> float:
    steps = [(site.seconds_of(regions.model), site.machines // sizes[site.name]) for site in regions.sites]
    return median([step_s for step_s, learners in steps for _ in range(learners)])


# ---- learners: what becomes of their time -------------------------------------------------------------------------


def choose_learners(regions: Regions, profile: Profile, seeds: int, hours: float) -> dict[str, int]:
    """By site, how many machines make a learner."""
    chosen = {site.name: site.machines_per_learner or 1 for site in regions.sites}
    best = play_sites(regions, profile, chosen, seeds, hours)
    for site in regions.sites:
        if site.machines_per_learner:
            continue
        # A run of one learner is none: where there is no other site, two are the fewest.
        fewest = 2 if len(regions.sites) == 1 and site.machines > 1 else 1
        for learners in (count for count in range(fewest, site.machines) if site.machines % count == 0):
            sizes = chosen | {site.name: site.machines // learners}
            if play_sites(regions, profile, sizes, seeds, hours, only=site)[site.name] >= best[site.name] - WITHIN:
                chosen[site.name] = site.machines // learners
                break
    return chosen


def play_sites(
    regions: Regions,
    profile: Profile,
    sizes: Mapping[str, int],
    seeds: int,
    hours: float,
    sync_every: int | None = None,
    only: Site | None = None,
) -> dict[str, float]:
    """The goodput of each site. With H, learners that come back also fetch their state over the link."""
    jobs, sites = [], regions.sites if only is None else (only,)
    for site in sites:
        fetch_s = _fetch_s(regions, site, sync_every) if sync_every is not None else 0.0
        values = {
            "step_s": site.seconds_of(regions.model),
            "slices": site.machines,
            "failures.mtbi_s": HOUR_S * site.mtbf_h,
            "preemption.every_s": HOUR_S * site.preempted_every_h,
            "preemption.for_s": HOUR_S * site.away_h,
            "elasticity.recover_s": site.restart_s + fetch_s,
        }
        learners = site.machines // sizes[site.name]
        jobs.append(Job(with_values(profile, values), "decoupled", learners, site.machines, 0, hours, rounds=0))
    return {site.name: cell.goodput for site, cell in zip(sites, cells(jobs, seeds), strict=True)}


def _fetch_s(regions: Regions, site: Site, sync_every: int) -> float:
    """Until all that a newcomer needs came over its site's link."""
    link = regions.link_of(site)
    if link is None:
        return 0.0
    step_s = site.seconds_of(regions.model)
    copy_steps = steps_per_copy(regions.model.parameters * BITS["fp32"] / 1e9, link.width_down, step_s)
    return step_s * math.fsum(one.steps for one in grow("decoupled", copy_steps, sync_every))


# ---- H, codecs, relays: what the links carry ------------------------------------------------------------------------


def choose_rules(regions: Regions, sizes: Mapping[str, int], step_s: float) -> SpreadRun:
    """Of one learner at one end of a link; its codecs and H are the run's."""
    run = None
    for run in _ladder(regions, step_s):
        judged = [_judge_direct_or_relayed(regions, site, sizes, run)[0] for site in regions.remote_sites()]
        if all(one.carried and one.away_steps <= most_away_steps(run) for one in judged):
            return run
    assert run is not None
    return run  # the smallest of all: what is not carried is said in the plan


def _ladder(regions: Regions, step_s: float) -> Iterator[SpreadRun]:
    for doubling in range(DOUBLINGS):
        for up, down in LADDER:
            yield SpreadRun(
                step_s=step_s,
                datacenters=2,
                learners=2,
                parameters=regions.model.parameters,
                fragments=FRAGMENTS,
                sync_every=FIRST_H << doubling,
                overlap=OVERLAP,
                codec=up,
                down=down,
                topology="star",
            )


def _judge_direct_or_relayed(
    regions: Regions, site: Site, sizes: Mapping[str, int], run: SpreadRun
) -> tuple[LinkPlan, bool]:
    """Its link, and whether a relay stands before the site's learners."""
    link, learners = regions.link_of(site), site.machines // sizes[site.name]
    assert link is not None
    direct = judge_link(link, site, learners, learners, run)
    enough = direct.carried and direct.away_steps <= most_away_steps(run)
    if learners == 1 or (enough and not link.price_per_gb):
        return direct, False
    # Of learners of several ranks a relay makes no sums: it passes contributions on, and serves versions.
    ranks = site.gpus * sizes[site.name]
    return judge_link(link, site, 1 if ranks == 1 else learners, 1, run), True


def judge_link(link: Link, site: Site, copies_up: int, copies_down: int, run: SpreadRun) -> LinkPlan:
    """`copies`: of every fragment, which cross it in H steps."""
    spread = msgspec.structs.replace(run, learners=2 * copies_down, latency_s=link.trip_s / 2)
    more = copies_up / copies_down  # so many times what goes down: as a width that is so much less
    widths = (ROOM * link.width_up / more, ROOM * link.width_down)
    up, down = (gbit / (run.sync_every * run.step_s) for gbit in loads_gbit(spread))
    pace = max(1.0, effective_h(spread, *widths) / run.sync_every)  # rounds come less often where it is not carried
    gigabytes = (more * up + down) / pace * DAY_S * GIGABYTES
    return LinkPlan(
        site=site.name,
        up_gbit_s=more * up,
        down_gbit_s=down,
        share=max(up / widths[0], down / widths[1]),
        gigabytes_per_day=gigabytes,
        price_per_day=gigabytes * link.price_per_gb,
        away_steps=away_steps(spread, *widths),
        effective_h=effective_h(spread, *widths),
    )


def check_question(seeds: int, hours: float) -> None:
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds} is too small: the least is 1")
    above_0("--hours", hours)
