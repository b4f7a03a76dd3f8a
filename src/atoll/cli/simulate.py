"""`atoll simulate faults`: the protocol in virtual time, under drawn faults."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from atoll.protocol.errors import ConfigError
from atoll.simulate import campaign, worker_pool
from atoll.simulate.reports import FailureReport, Report, all_of, report


def faults(seeds: int, first: int, learners: int | None, seed: int | None, worlds: str, json_: bool) -> None:
    _check(seeds, first, learners, seed)
    kind = _find_kind(worlds)
    began, console = time.perf_counter(), Console(stderr=True)
    wanted = [seed] if seed is not None else list(range(first, first + seeds))
    events, violations = 0, []
    last: Report | None = None
    for last in _progress(console, _reports(wanted, learners, kind), len(wanted)):
        events += last.outcome.events
        if last.told is not None:
            violations.append(last.told)
            _print_violation(console, last.told)
    violations.sort(key=lambda told: told.seed)
    seconds = time.perf_counter() - began
    if json_:
        print(
            msgspec.json.encode(
                _document(wanted, events, seconds, violations, last if seed is not None else None)
            ).decode()
        )
    else:
        if seed is not None and last is not None:
            _print_world(last, campaign.plan(seed, learners, kind))
        verdict = "every promise holds" if not violations else f"{len(violations)} worlds break a promise"
        print(f"{len(wanted):,} worlds, {events:,} events in {seconds:.1f} s: {verdict}")
    if violations:
        raise SystemExit(1)


def _check(seeds: int, first: int, learners: int | None, seed: int | None) -> None:
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds} is too small: the least is 1")
    if first < 0:
        raise ConfigError(f"--first {first} is below 0: seeds are 0, 1, 2, …")
    if first and seed is not None:
        raise ConfigError("--first is for many worlds: with --seed there is one")
    if learners is not None and not 1 <= learners <= 64:
        raise ConfigError(f"--learners {learners} cannot be simulated: take 1 to 64")
    if seed is not None and seed < 0:
        raise ConfigError(f"--seed {seed} is below 0: seeds are 0, 1, 2, …")


def _find_kind(worlds: str) -> campaign.WorldKind:
    for kind in campaign.KINDS:
        if kind == worlds:
            return kind
    raise ConfigError(f"--worlds {worlds} is not known: take {', '.join(campaign.KINDS[:-1])} or {campaign.KINDS[-1]}")


def _reports(wanted: list[int], learners: int | None, kind: campaign.WorldKind) -> Iterable[Report]:
    if len(wanted) == 1:
        return iter([report(wanted[0], learners, kind)])
    return all_of(wanted, learners, worker_pool.cores(), kind)


def _progress(console: Console, reports: Iterable[Report], total: int) -> Iterator[Report]:
    columns = (TextColumn("worlds"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=total == 1, transient=True) as progress:
        task = progress.add_task("worlds", total=total)
        for one in reports:
            yield one
            progress.advance(task)


def _document(
    seeds: list[int], events: int, seconds: float, violations: list[FailureReport], one: Report | None
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "seeds": len(seeds),
        "first": seeds[0],
        "events": events,
        "seconds": round(seconds, 3),
        "violations": violations,
    }
    if one is not None:
        document["trace"] = one.outcome.trace
    return document


def _print_violation(console: Console, told: FailureReport) -> None:
    lines = [f"seed {told.seed}: {told.invariant}", f"  {told.message}", f"  again: {told.command}"]
    lines += [f"  it takes {len(told.faults)} faults:", *(f"    {fault.line()}" for fault in told.faults)]
    lines += ["  story:", *(f"    {line}" for line in told.story)]
    console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)


def _print_world(one: Report, plan: campaign.SeedPlan) -> None:
    outcome, settings = one.outcome, plan.options.settings
    print(
        f"seed {plan.seed}: {outcome.learners} learners, {settings.fragments} fragments, H = {settings.sync_every}, "
        f"K = {settings.quorum}, {'synchronous' if settings.synchronous else 'asynchronous'}, adopt = {settings.adopt}"
    )
    if plan.ranks is not None:
        print(f"  ranks of each learner: {', '.join(map(str, plan.ranks.counts))}")
    if plan.shards is not None:
        print(f"  shards of the syncer: {plan.shards.shards}")
    if plan.relays is not None:
        regions = ", ".join(str(number) if number >= 0 else "none" for number in plan.relays.regions)
        print(f"  relays: {plan.relays.relays}; of each learner: {regions}")
    for fault in plan.faults:
        print(f"  {fault.line()}")
    print(f"  {outcome.rounds} rounds, {outcome.events:,} events, trace {outcome.trace}")
