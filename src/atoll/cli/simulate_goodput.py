"""`atoll simulate goodput`: what a cluster gives under failures, by each way of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import tomli_w
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from atoll.cli.lists import counts, words
from atoll.cli.rows import one_form, print_csv, print_json
from atoll.estimate import profile as profiles
from atoll.estimate.goodput import METHODS, Cell, Job, Method, cells, experiments, live
from atoll.estimate.profile import Profile
from atoll.observe import clusters, plots
from atoll.protocol.errors import ConfigError
from atoll.simulate import worker_pool

CLUSTER, RULES, OUTPUT = "The cluster", "The rules", "Output"


def goodput(
    *,
    profile: str,
    learners: str,
    chips: str,
    slices: int | None,
    step_s: float | None,
    set_: list[str],
    show_profile: bool,
    methods: str,
    quorum: int | None,
    grace: bool | None,
    hours: float,
    seeds: int,
    rounds: int,
    json_: bool,
    csv_: bool,
    plot: Path | None,
    timeline: Path | None,
) -> None:
    one_form(json_, csv_)
    for file in (plot, timeline):
        if file is not None:
            plots.check_plot_path(file)  # before the work, not after it
    chosen = profile_of(
        profile, set_, {"slices": slices, "step_s": step_s, "rules.quorum": quorum, "rules.grace": grace}
    )
    if show_profile:
        print(tomli_w.dumps(msgspec.to_builtins(chosen)), end="")
        return
    if seeds < 1 or rounds < 0:
        raise ConfigError(f"--seeds {seeds} --rounds {rounds}: take at least 1 seed, and 0 rounds or more")
    jobs = experiments(
        chosen, _methods(methods), _sizes("--learners", learners), _sizes("--chips", chips), hours=hours, rounds=rounds
    )
    if not jobs:
        raise ConfigError(
            f"--learners {learners} --methods {methods}: nothing is left; M = 1 is data-parallel, M > 1 the rest"
        )
    found = run_all(jobs, seeds)
    if json_:
        print_json(found)
    elif csv_:
        print_csv(clusters.rows(found))
    else:
        _print(found, chosen)
    if plot is not None:
        plots.write_picture(clusters.heat(found, chosen), plot)
    if timeline is not None:
        plots.write_picture(clusters.lanes(jobs[-1], live(jobs[-1])[1]), timeline)


def profile_of(name: str, set_: list[str], values: dict[str, Any]) -> Profile:
    """The profile of that name with what the command line says instead."""
    given = dict(values)
    for text in set_:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: write KEY=VALUE, as in preemption.every_s=43200")
        given[key.strip()] = _value(value.strip())
    found = profiles.with_values(profiles.load(name), given)
    told = ", ".join(f"{key} = {value}" for key, value in given.items() if value is not None)
    return profiles.with_values(found, {"provenance": f"{found.provenance}; here with {told}"}) if told else found


def _value(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _methods(text: str) -> list[Method]:
    chosen = words("--methods", text)
    if unknown := [name for name in chosen if name not in METHODS]:
        raise ConfigError(f"--methods: there is no {unknown[0]!r}; take from {', '.join(METHODS)}")
    return [method for method in METHODS if method in chosen]


def _sizes(option: str, text: str) -> list[int]:
    sizes = counts(option, text)
    if least := [size for size in sizes if size < 1]:
        raise ConfigError(f"{option} {text}: {least[0]} is too small, the least is 1")
    return list(dict.fromkeys(sizes))


def run_all(jobs: list[Job], seeds: int) -> list[Cell]:
    columns = (TextColumn("experiments"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("experiments", total=len(jobs) * seeds)
        return cells(
            jobs, seeds, workers=worker_pool.cores(), progress=lambda done, of: progress.update(task, completed=done)
        )


def _print(found: list[Cell], profile: Profile) -> None:
    console = Console()
    for table in clusters.tables(found):
        console.print(table)
    console.print(f"constants: {profile.provenance}", style="dim", highlight=False)
