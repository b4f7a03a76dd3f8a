"""`atoll simulate bandwidth`: what the links between data centers must carry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table

from atoll.cli.lists import count, counts, names, number, numbers, one_form, print_csv, print_json, significant, words
from atoll.estimate.bandwidth import (
    BITS,
    LEAST,
    METHODS,
    MOST,
    BandwidthAnswer,
    BandwidthCase,
    SpreadRun,
    cases,
    profile,
)
from atoll.observe.figures import table
from atoll.protocol.errors import ConfigError

Changed = str | None
"""A setting of the profile, where the command line has another one."""
USUAL = "0.5,0.75,0.9,0.95,0.99"
"""The columns of the published tables."""


def bandwidth(
    *,
    profile_: str,
    step_s: str,
    datacenters: str,
    utilization: Changed,
    gbit_s: Changed,
    codec: Changed,
    version_codec: Changed,
    methods: str,
    parameters: Changed,
    learners: Changed,
    sync_every: Changed,
    fragments: Changed,
    overlap: Changed,
    latency_s: Changed,
    topology: Changed,
    json_: bool,
    csv_: bool,
    plot: Path | None,
) -> None:
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
        down=version_codec,
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


def _changed(run: SpreadRun, **given: Changed) -> SpreadRun:
    """The profile's settings with those of the command line in their place."""
    changes = {name: _value(name, text) for name, text in given.items() if text is not None}
    return msgspec.structs.replace(run, **changes)


def _value(name: str, text: str) -> str | float:
    option = f"--{name.replace('_', '-')}"
    if name in ("topology", "down"):
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


# ---- the answers for a person: a table, curves ----------------------------------------------------------------------

AnswerText = Callable[[BandwidthAnswer], str]
POINTS = 160
"""Of a curve."""


def print_table(answers: Sequence[BandwidthAnswer], by: Literal["utilization", "gbit_s"]) -> None:
    """A row for each case and a column for each of what was asked for."""
    console = Console(highlight=False)
    if by == "utilization":
        console.print(_table("Gbit/s that a utilization takes", answers, _percent, _width))
        return
    console.print(_table("Utilization that a bandwidth gives", answers, _link, _percent))
    decoupled = [one for one in answers if one.method == "decoupled"]
    if decoupled:
        title = "Freshness instead of waiting: effective H, steps late"
        console.print(_table(title, decoupled, _link, _freshness))


def _table(title: str, answers: Sequence[BandwidthAnswer], head: AnswerText, cell: AnswerText) -> Table:
    rows = [list(row) for _, row in groupby(answers, _case)]
    found = table(title, "method", "codec", "step", "n", *map(head, rows[0]), words=2)
    for row in rows:
        found.add_row(*_case(row[0]), *map(cell, row))
    return found


def _case(one: BandwidthAnswer) -> tuple[str, str, str, str]:
    codec = one.codec if one.down in (None, one.codec) else f"{one.codec} up, {one.down} down"
    return one.method, codec, f"{one.step_s:g} s", str(one.datacenters)


def _percent(one: BandwidthAnswer) -> str:
    return f"{100 * one.utilization:.3g} %"


def _width(one: BandwidthAnswer) -> str:
    return significant(one.gbit_s)


def _link(one: BandwidthAnswer) -> str:
    return f"{one.gbit_s:g} Gbit/s"


def _freshness(one: BandwidthAnswer) -> str:
    assert one.effective_h is not None and one.late_steps is not None
    return f"{one.effective_h:.3g}, {significant(one.late_steps)}"


def check_plot(path: Path) -> None:
    from atoll.observe import plots

    plots.check_plot_path(path)


def draw(path: Path, asked: Sequence[BandwidthCase], answers: Sequence[BandwidthAnswer], provenance: str) -> None:
    """Utilization over bandwidth, a decade beyond the answers."""
    from atoll.observe import plots

    widths = [one.gbit_s for one in answers if one.gbit_s > 0] or [1.0]
    low, high = max(LEAST, min(widths) / 10), min(MOST / 10, max(widths) * 10)
    grid = [low * (high / low) ** (point / (POINTS - 1)) for point in range(POINTS)]
    picture = plots.CurveChart(
        title="Compute utilization over the bandwidth between data centers",
        note=provenance,
        lines=tuple(
            plots.Curve(
                name=f"{case.method} {case.codec}, {case.run.step_s:g} s, {case.run.datacenters} data centers",
                points=tuple((width, case.at(width).utilization) for width in grid),
                family=f"{case.method} {case.codec}",
            )
            for case in asked
        ),
        x_label="bandwidth in Gbit/s",
        y_label="compute utilization",
    )
    plots.write_picture(picture, path)
    Console(stderr=True, highlight=False).print(f"drawn: {path}", soft_wrap=True, markup=False)
