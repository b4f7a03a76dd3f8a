"""`atoll simulate bandwidth`: what the links between data centers must carry."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from atoll.cli.bandwidth_shown import check_plot, draw, print_table
from atoll.cli.lists import count, counts, names, number, numbers, words
from atoll.cli.rows import one_form, print_csv, print_json
from atoll.cli.simulate import simulate
from atoll.estimate.bandwidth import BITS, METHODS, PROFILES, BandwidthAnswer, BandwidthCase, Spread, cases, profile
from atoll.protocol.errors import ConfigError

Changed = str | None
"""A setting of the profile, where the command line has another one."""
USUAL = "0.5,0.75,0.9,0.95,0.99"
"""The columns of the published tables."""


@simulate.command()
def bandwidth(
    profile_: Annotated[str, typer.Option("--profile", help=f"Settings to begin with: {', '.join(PROFILES)}.")] = (
        "paper-table"
    ),
    step_s: Annotated[str, typer.Option(help="Seconds of a learner step.", metavar="LIST")] = "1,5",
    datacenters: Annotated[str, typer.Option(help="n: how many data centers.", metavar="LIST")] = "2,8",
    utilization: Annotated[
        Changed, typer.Option(help=f"To be reached: 0.9, 90 or 90%. Else {USUAL}.", metavar="LIST")
    ] = None,
    gbit_s: Annotated[
        Changed, typer.Option(help="Ask for the utilization at these bandwidths.", metavar="LIST")
    ] = None,
    codec: Annotated[
        Changed, typer.Option(help=f"Of fragments: {', '.join(BITS)}. Atoll: on their way up.", metavar="LIST")
    ] = None,
    methods: Annotated[str, typer.Option(help="What to compare.", metavar="LIST")] = "data-parallel,decoupled",
    parameters: Annotated[Changed, typer.Option(help="Of the model: 5e9, 7B, 350M.", metavar="N")] = None,
    learners: Annotated[Changed, typer.Option(help="M: how many learners.", metavar="N")] = None,
    sync_every: Annotated[Changed, typer.Option(help="H: steps between two syncs of a fragment.", metavar="N")] = None,
    fragments: Annotated[Changed, typer.Option(help="P: at most H.", metavar="N")] = None,
    overlap: Annotated[Changed, typer.Option(help="τ: steps a fragment may be under way.", metavar="N")] = None,
    latency_s: Annotated[Changed, typer.Option(help="Between data centers, one way.", metavar="N")] = None,
    topology: Annotated[Changed, typer.Option(help="Of fragments: ring, star.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    csv_: Annotated[bool, typer.Option("--csv", help="As CSV.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw FILE.html or FILE.png.", metavar="FILE")] = None,
) -> None:
    """Compute the bandwidth between data centers that a utilization takes, or the utilization that a bandwidth gives.

    Utilization is T / (T + exposed): T the time of a step, exposed what of its communication computing does not hide.

    Profiles: paper-table fits the published table (H = 100, P = 18), paper is what the paper's text says (H = P = 24),
    atoll is what this software does (a star through the syncer; up as the codec says, down in fp32).

    A step of Atoll never waits for the network: a slow link costs freshness, not time. So decoupled rows also have
    effective_h, the H that the link keeps up with, and late_steps, by how much a fragment returns later than τ.
    Utilization counts exposed communication as if it were waited for, so that the methods compare.

    Examples:

      atoll simulate bandwidth

      atoll simulate bandwidth --profile atoll --parameters 7B --datacenters 4 --gbit-s 0.5,1,10 --latency-s 0.05

      atoll simulate bandwidth --utilization 90% --codec int8 --json
    """
    one_form(json_, csv_)
    if plot is not None:
        check_plot(plot)
    chosen = profile(profile_)
    run = _changed(
        chosen.run,
        parameters=parameters,
        learners=learners,
        sync_every=sync_every,
        fragments=fragments,
        overlap=overlap,
        latency_s=latency_s,
        topology=topology,
    )
    asked = cases(
        run,
        names("--methods", methods, METHODS),
        names("--codec", codec, tuple(BITS)) if codec is not None else chosen.codecs,
        numbers("--step-s", step_s),
        counts("--datacenters", datacenters),
    )
    answers = _answers(asked, utilization, gbit_s)
    if json_:
        print_json(answers)
    elif csv_:
        print_csv(answers)
    else:
        print_table(answers, by="utilization" if gbit_s is None else "gbit_s")
        print(f"{profile_}: {chosen.provenance}")
    if plot is not None:
        draw(plot, asked, answers, chosen.provenance)


def _changed(run: Spread, **given: Changed) -> Spread:
    """The profile's settings with those of the command line in their place."""
    changes = {name: _value(name, text) for name, text in given.items() if text is not None}
    return msgspec.structs.replace(run, **changes)


def _value(name: str, text: str) -> str | float:
    option = f"--{name.replace('_', '-')}"
    if name == "topology":
        return text
    return number(option, text) if name in ("parameters", "latency_s") else count(option, text)


def _answers(asked: Sequence[BandwidthCase], utilization: Changed, gbit_s: Changed) -> list[BandwidthAnswer]:
    if gbit_s is None:
        wanted = _shares(utilization if utilization is not None else USUAL)
        return [case.needs(share) for case in asked for share in wanted]
    if utilization is not None:
        raise ConfigError("--utilization and --gbit-s exclude each other: one is computed from the other")
    widths = numbers("--gbit-s", gbit_s)
    return [case.at(width) for case in asked for width in widths]


def _shares(text: str) -> list[float]:
    """Fractions, or percent from 2 on: nobody asks for 2 %, and 1.5 is rather a mistake."""
    return [_share(text, word) for word in words("--utilization", text)]


def _share(text: str, word: str) -> float:
    value = number("--utilization", word.removesuffix("%"))
    share = value / 100 if word.endswith("%") or value >= 2 else value
    if not 0 < share < 1:
        raise ConfigError(f"--utilization {text}: {word} cannot be reached; take above 0 and below 1, as 0.9 or 90%")
    return share
