"""`atoll simulate goodput`: what a cluster gives under failures; `calibrate`: its constants from a table or a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import tomli_w
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from atoll.cli.lists import counts, one_form, print_csv, print_json, words
from atoll.estimate import calibration as fitting
from atoll.estimate import profile as profiles
from atoll.estimate.calibration import Fit
from atoll.estimate.goodput import METHODS, Cell, Job, Method, cells, experiments, live
from atoll.estimate.profile import Profile
from atoll.observe import clusters, plots
from atoll.observe.clusters import MeasuredRun, measure_run
from atoll.protocol.errors import ConfigError
from atoll.simulate import worker_pool
from atoll.store.atomic import write_atomic
from atoll.store.event_parts import read_lines
from atoll.store.rundir import RunDir
from atoll.telemetry.events import parse


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


# ---- calibrate ------------------------------------------------------------------------------------------------------


def calibrate(
    *,
    table: Path | None,
    from_run: Path | None,
    profile: str,
    free: str,
    hours: float,
    seeds: int | None,
    write: Path | None,
    json_: bool,
) -> None:
    if from_run is not None and table is not None:
        raise ConfigError("--table and --from-run: take one of them")
    if hours <= 0 or (seeds is not None and seeds < 1):
        raise ConfigError(f"--hours {hours:g} --seeds {seeds}: both must be above 0")
    if write is not None and not (write.suffix == ".toml" and write.parent.is_dir()):
        raise ConfigError(f"--write {write}: name a file that ends in .toml, in a folder that exists")
    if from_run is not None:
        found = _from_run(from_run, seeds or 100, json_)
    else:
        known = fitting.published() if table is None else fitting.read(table)
        constants = [] if free.strip() == "none" else words("--free", free)
        found = _from_table(profiles.load(profile), known, constants, hours, seeds or 3, json_)
    if write is not None:
        write_atomic(write, tomli_w.dumps(msgspec.to_builtins(found)).encode())


# ---- from a table -------------------------------------------------------------------------------------------------


def _from_table(
    start: Profile, known: list[fitting.Known], free: list[str], hours: float, seeds: int, json_: bool
) -> Profile:
    for key in (key for constant in free for key in constant.split("+")):
        fitting.value_of(start, key)
    columns = (TextColumn("fitting"), BarColumn(), TextColumn("{task.fields[mean]}"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("fitting", total=None, mean="")

        def show(done: int, of: int, mean: float) -> None:
            progress.update(task, completed=done, total=of, mean=f"mean error {mean:.2f} points")

        best = fitting.fit(start, known, free, hours=hours, seeds=seeds, progress=show)
    constants = {key: fitting.value_of(best.profile, key) for constant in free for key in constant.split("+")}
    if free:
        fitted = (
            f"fitted to {len(best.misses)} figures, mean error {best.mean:.2f} points; begun at: {start.provenance}"
        )
        best = Fit(msgspec.structs.replace(best.profile, provenance=fitted), best.misses)
    if json_:
        print_json(_document(best, constants))
    else:
        console = Console()
        console.print(clusters.miss_table(best.misses))
        for key, value in constants.items():
            console.print(f"{key} = {value:.4g}", highlight=False)
        console.print(
            f"mean error {best.mean:.2f} points, worst {best.worst:.1f}; {best.profile.provenance}", highlight=False
        )
    return best.profile


def _document(best: Fit, constants: dict[str, float]) -> dict[str, Any]:
    cells = [msgspec.to_builtins(miss) | {"error_points": round(miss.error, 3)} for miss in best.misses]
    return {
        "mean_error_points": best.mean,
        "worst_error_points": best.worst,
        "constants": constants,
        "provenance": best.profile.provenance,
        "cells": cells,
    }


# ---- from a run ---------------------------------------------------------------------------------------------------


def _from_run(folder: Path, seeds: int, json_: bool) -> Profile:
    events = RunDir(folder).events
    try:
        lines = read_lines(events)
    except OSError as error:
        raise ConfigError(f"{events} cannot be read ({error.strerror})") from error
    if not lines:
        raise ConfigError(f"{folder} holds no run: there is no {events.name}")
    measured = measure_run(parse(lines), str(folder))
    job = Job(measured.profile, "decoupled", measured.learners, measured.learners, 0, measured.wall_s / 3600, rounds=0)
    predicted = run_all([job], seeds)[0]
    if json_:
        print_json(_prediction(measured, predicted))
    else:
        Console().print(clusters.prediction_table(measured, predicted))
    return measured.profile


def _prediction(measured: MeasuredRun, predicted: Cell) -> dict[str, Any]:
    profile = measured.profile
    return {
        "learners": measured.learners,
        "wall_s": measured.wall_s,
        "deaths": measured.deaths,
        "step_s": profile.step_s,
        "mtbi_s": profile.failures.mtbi_s if measured.deaths else None,
        "recoveries_s": profile.failures.observed_s,
        "measured": {"goodput": measured.goodput, "uptime": measured.uptime},
        "predicted": {
            "goodput": predicted.goodput,
            "goodput_interval": predicted.goodput_interval,
            "uptime": predicted.uptime,
        },
        "error_points": 100 * (predicted.goodput - measured.goodput),
        "lost": predicted.lost,
    }
