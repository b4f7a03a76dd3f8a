"""`atoll simulate upsizing`: what a newcomer costs, and what compute that comes and goes gains."""

from __future__ import annotations

from itertools import product
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from atoll.cli.lists import counts, names, number, numbers
from atoll.cli.rows import one_form, print_csv, print_json
from atoll.cli.simulate import simulate
from atoll.estimate.bandwidth import BITS
from atoll.estimate.upsizing import (
    METHODS,
    DailyHours,
    Method,
    downtime_steps,
    grow,
    scavenge,
    steps_per_copy,
    train_time,
)
from atoll.observe.figures import table
from atoll.protocol.errors import ConfigError

Given = str | None
USUAL = "2,6,12,24"


class Upsized(msgspec.Struct, frozen=True):
    method: Method
    copy_steps: float
    sync_every: int
    downtime_steps: float


class Scavenged(msgspec.Struct, frozen=True):
    extra: float
    share: float
    train_time: float


@simulate.command()
def upsizing(
    copy_steps: Annotated[
        Given,
        typer.Option(help=f"c: steps in which a link carries one copy of the model. Else {USUAL}.", metavar="LIST"),
    ] = None,
    parameters: Annotated[Given, typer.Option(help="To compute c: of the model, as 5e9 or 7B.", metavar="N")] = None,
    gbit_s: Annotated[Given, typer.Option(help="To compute c: the newcomer's link.", metavar="LIST")] = None,
    step_s: Annotated[str, typer.Option(help="To compute c: seconds of a step.", metavar="LIST")] = "1",
    codec: Annotated[str, typer.Option(help=f"To compute c: {', '.join(BITS)}.", metavar="LIST")] = "fp32",
    sync_every: Annotated[str, typer.Option(help="H: steps between two syncs of a fragment.", metavar="LIST")] = "24",
    extra: Annotated[str, typer.Option(help="Compute that comes on top: 0.25 is +25 %.", metavar="LIST")] = "0.25,1.0",
    share: Annotated[Given, typer.Option(help="Of the FLOPs, done with the extra. Else 0.5.", metavar="LIST")] = None,
    hours: Annotated[
        Given, typer.Option(help="Instead of --share: when the extra is there, as 20-8.", metavar="FROM-TO")
    ] = None,
    work_h: Annotated[str, typer.Option(help="With --hours: the run's hours without extra.", metavar="N")] = "240",
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    csv_: Annotated[bool, typer.Option("--csv", help="As CSV.")] = False,
) -> None:
    """Compute what a newcomer costs those who are there, and what compute that comes and goes gains.

    Upsizing: a newcomer needs weights and two moments, 3 copies of the model. Data-parallel stands still for them. In
    Decoupled the others go on, so that it needs a fourth copy, of what changed; H steps of it are hidden, as it may be
    H rounds behind.

    Scavenging: the time of a run, as a fraction of that without extra compute.

    Examples:

      atoll simulate upsizing --copy-steps 5,20 --sync-every 24,100

      atoll simulate upsizing --parameters 5B --gbit-s 1,10 --step-s 5

      atoll simulate upsizing --extra 0.25,1 --hours 20-8 --work-h 500
    """
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


def _copies(given: Given, parameters: Given, gbit_s: Given, step_s: str, codec: str) -> list[float]:
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


def _scavenged(extras: list[float], share: Given, hours: Given, work_h: float) -> list[Scavenged]:
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
