"""`atoll simulate faults` and `atoll simulate tape`: the protocol in virtual time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from atoll.protocol.errors import ConfigError
from atoll.protocol.records import MergedRecord
from atoll.protocol.settings import Settings
from atoll.simulate import campaign, worker_pool
from atoll.simulate.reports import FailureReport, Report, all_of, report
from atoll.simulate.scenario import make_tape, parse_fault
from atoll.store.journal import write_tape


def faults(seeds: int, first: int, learners: int | None, seed: int | None, json_: bool) -> None:
    _check(seeds, first, learners, seed)
    began, console = time.perf_counter(), Console(stderr=True)
    wanted = [seed] if seed is not None else list(range(first, first + seeds))
    events, violations = 0, []
    last: Report | None = None
    for last in _progress(console, _reports(wanted, learners), len(wanted)):
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
            _print_world(last, seed, learners)
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


def _reports(wanted: list[int], learners: int | None) -> Iterable[Report]:
    if len(wanted) == 1:
        return iter([report(wanted[0], learners)])
    return all_of(wanted, learners, worker_pool.cores())


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


def _print_world(one: Report, seed: int, learners: int | None) -> None:
    plan, outcome = campaign.plan(seed, learners), one.outcome
    settings = plan.options.settings
    print(
        f"seed {seed}: {outcome.learners} learners, {settings.fragments} fragments, H = {settings.sync_every}, "
        f"K = {settings.quorum}, {'synchronous' if settings.synchronous else 'asynchronous'}, adopt = {settings.adopt}"
    )
    for fault in plan.faults:
        print(f"  {fault.line()}")
    print(f"  {outcome.rounds} rounds, {outcome.events:,} events, trace {outcome.trace}")


# ---- a scenario as a file that `atoll train --tape` follows ---------------------------------------------------------


def tape(
    *,
    out: Path,
    learners: int,
    steps: int,
    fragments: int,
    sync_every: int,
    overlap: int,
    quorum: int,
    step_s: str,
    latency_s: float,
    fault: list[str],
    seed: int,
) -> None:
    settings = Settings(
        learners=learners,
        steps=steps,
        fragments=fragments,
        sync_every=sync_every,
        overlap=overlap,
        quorum=quorum,
        cut_every=0,
    ).resolved(fragments)
    if steps < 1:
        raise ConfigError(f"--steps {steps}: a tape needs an end; give it 1 or more")
    speeds = _speeds(step_s, learners)
    faults = [parse_fault(text, learners) for text in fault]
    lines = make_tape(settings, step_s=speeds, faults=faults, seed=seed, latency_s=latency_s)
    write_tape(out, lines)
    rounds = sum(isinstance(line, MergedRecord) for line in lines)
    Console(highlight=False).print(f"{out}: {rounds} rounds of {learners} learners, {out.stat().st_size:,} bytes")


def _speeds(text: str, learners: int) -> list[float]:
    try:
        speeds = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--step-s {text}: write seconds, as in 1 or 1,1,2.5") from None
    if len(speeds) not in (1, learners) or not all(0 < seconds < float("inf") for seconds in speeds):
        raise ConfigError(f"--step-s {text}: give one number above 0, or {learners} of them")
    return speeds * learners if len(speeds) == 1 else speeds
