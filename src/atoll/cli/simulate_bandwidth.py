"""`atoll simulate bandwidth`: what the links between data centers must carry."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from atoll.cli.bandwidth_shown import check_plot, draw, print_table
from atoll.cli.lists import count, counts, names, number, numbers, words
from atoll.cli.rows import one_form, print_csv, print_json
from atoll.estimate.bandwidth import BITS, METHODS, BandwidthAnswer, BandwidthCase, Spread, cases, profile
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
