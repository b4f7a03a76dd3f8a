"""`atoll simulate upsizing`: what a newcomer costs, and what compute that comes and goes gains."""

from __future__ import annotations

from itertools import product

import msgspec
from rich.console import Console

from atoll.cli.lists import counts, names, number, numbers, one_form, print_csv, print_json
from atoll.estimate.bandwidth import BITS
from atoll.estimate.upsizing import (
    METHODS,
    DailyHours,
    UpsizingMethod,
    downtime_steps,
    grow,
    scavenge,
    steps_per_copy,
    train_time,
)
from atoll.observe.figures import table
from atoll.protocol.errors import ConfigError

USUAL = "2,6,12,24"


class Upsized(msgspec.Struct, frozen=True):
    method: UpsizingMethod
    copy_steps: float
    sync_every: int
    downtime_steps: float


class Scavenged(msgspec.Struct, frozen=True):
    extra: float
    share: float
    train_time: float


def upsizing(
    *,
    copy_steps: str | None,
    parameters: str | None,
    gbit_s: str | None,
    step_s: str,
    codec: str,
    sync_every: str,
    extra: str,
    share: str | None,
    hours: str | None,
    work_h: str,
    json_: bool,
    csv_: bool,
) -> None:
    one_form(json_, csv_)
    copies = _copies(copy_steps, parameters, gbit_s, step_s, codec)
    upsized = [
        Upsized(method, c, every, downtime_steps(grow(method, c, every)))
        for c, every, method in product(copies, counts("--sync-every", sync_every), METHODS)
    ]
    scavenged = _scavenged(numbers("--extra", extra), share, hours, number("--work-h", work_h))
    if json_:
        print_json({"upsizing": upsized, "scavenging": scavenged})
    elif csv_:
        print_csv([*upsized, *scavenged])
    else:
        _print_tables(upsized, scavenged)


def _copies(given: str | None, parameters: str | None, gbit_s: str | None, step_s: str, codec: str) -> list[float]:
    """c as it is given, or for every link and step time."""
    if gbit_s is None and parameters is None:
        return numbers("--copy-steps", given if given is not None else USUAL)
    if given is not None:
        raise ConfigError("--copy-steps and --gbit-s exclude each other: one is computed from the other")
    if gbit_s is None:
        raise ConfigError("--parameters needs a link: say how wide it is with --gbit-s")
    billions = number("--parameters", parameters if parameters is not None else "5B") / 1e9
    models = [billions * BITS[name] for name in names("--codec", codec, tuple(BITS))]
    return [
        steps_per_copy(gbit, width, step)
        for gbit, width, step in product(models, numbers("--gbit-s", gbit_s), numbers("--step-s", step_s))
    ]


def _scavenged(extras: list[float], share: str | None, hours: str | None, work_h: float) -> list[Scavenged]:
    if hours is None:
        shares = numbers("--share", share if share is not None else "0.5")
        return [Scavenged(extra, part, train_time(extra, part)) for extra, part in product(extras, shares)]
    if share is not None:
        raise ConfigError("--share and --hours exclude each other: one is computed from the other")
    plan = _plan(hours)
    played = [(extra, scavenge(work_h, extra, plan)) for extra in extras]
    return [Scavenged(extra, finish.share, finish.after_h / work_h) for extra, finish in played]


def _plan(hours: str) -> DailyHours:
    begins, dash, ends = hours.partition("-")
    if not dash:
        raise ConfigError(f"--hours {hours}: write when the extra comes and goes, as in 20-8")
    return DailyHours(number("--hours", begins), number("--hours", ends))


def _print_tables(upsized: list[Upsized], scavenged: list[Scavenged]) -> None:
    console = Console(highlight=False)
    growing = table("Steps lost to a newcomer", "method", "copy, steps", "H", "downtime, steps")
    for one in upsized:
        growing.add_row(one.method, f"{one.copy_steps:.3g}", str(one.sync_every), f"{one.downtime_steps:.3g}")
    console.print(growing)
    gaining = table("Time with extra compute", "extra", "share of the FLOPs", "train time", words=0)
    for row in scavenged:
        gaining.add_row(f"+{100 * row.extra:.3g} %", f"{100 * row.share:.3g} %", f"{row.train_time:.2f}")
    console.print(gaining)
    print("Closed forms: 3c and max(0, 4c − H) steps; train time (1 − share) + share / (1 + extra).")
