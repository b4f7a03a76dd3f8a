"""`atoll simulate calibrate`: constants from a table, or from a real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import tomli_w
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from atoll.cli.lists import words
from atoll.cli.rows import print_json
from atoll.cli.simulate_goodput import run_all
from atoll.estimate import calibration as fitting
from atoll.estimate import profile as profiles
from atoll.estimate.calibration import Fit
from atoll.estimate.goodput import Cell, Job
from atoll.estimate.profile import Profile
from atoll.observe import clusters
from atoll.observe.clusters import MeasuredRun, measure_run
from atoll.protocol.errors import ConfigError
from atoll.store.atomic import write_atomic
from atoll.store.rundir import RunDir
from atoll.telemetry.events import parse


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
        lines = events.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(f"{folder} holds no run: {events} cannot be read ({error.strerror})") from error
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
