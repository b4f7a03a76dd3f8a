"""`atoll compare PLAN`: the same model, data and faults under several methods, in one table."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from atoll.baselines.compare import METHODS, MeasuredMethod, MethodOutcome, comparable, run_method
from atoll.chaos import plan as plans
from atoll.chaos.plan import FaultPlan
from atoll.cli.lists import names
from atoll.cli.shared import check_workload, compile_kernels, short
from atoll.observe.figures import table
from atoll.protocol.errors import ConfigError, RunFailed
from atoll.protocol.statistics import format_score
from atoll.store.atomic import write_atomic
from atoll.store.rundir import RunDir, unused_path

NAMES = {
    "decoupled": "Decoupled DiLoCo",
    "synchronous-diloco": "synchronous DiLoCo",
    "elastic-data-parallel": "elastic data-parallel",
    "data-parallel": "data-parallel",
}


def compare(plan: Path, out: Path | None, methods: str, checkpoint_every: int, force: bool, json_: bool) -> None:
    if checkpoint_every < 0:
        raise ConfigError(f"--checkpoint-every {checkpoint_every} is below 0; 0 makes one every 10 s")
    chosen = list(dict.fromkeys(names("--methods", methods, METHODS)))
    asked = comparable(plans.load_plan(plan), str(plan))
    check_workload(None)
    folder = (out or unused_path(time.localtime())).absolute()
    places = {method: RunDir.create(folder / method, force=force) for method in chosen}
    console = Console(stderr=True)
    compile_kernels(console)
    outcomes, failures = _run_all(asked, places, checkpoint_every, console)
    document = {"plan": str(plan), "seed": asked.seed, "seconds": asked.seconds, "methods": outcomes} | (
        {"failed": failures} if failures else {}
    )
    text = msgspec.json.format(msgspec.json.encode(document))
    write_atomic(folder / "compare.json", text + b"\n")
    if json_:
        print(text.decode())
    else:
        _show(asked, outcomes, folder)
    for method, words in failures.items():
        console.print(f"{method} did not run to its end: {words}", highlight=False, soft_wrap=True)
    if failures:
        raise SystemExit(1)


def _run_all(
    plan: FaultPlan, places: dict[MeasuredMethod, RunDir], checkpoint_every: int, console: Console
) -> tuple[list[MethodOutcome], dict[str, str]]:
    """One after another: they would take the processor from each other."""
    outcomes: list[MethodOutcome] = []
    failures: dict[str, str] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        for method, out in places.items():
            task = bar.add_task(NAMES[method], total=plan.seconds, said="starting")

            def watch(seconds: float, task: object = task) -> None:
                bar.update(task, completed=seconds, said=f"{seconds:.0f} of {plan.seconds:g} s")  # type: ignore[arg-type]

            try:
                outcomes.append(run_method(method, plan, out, watch, checkpoint_every))
                bar.update(task, completed=plan.seconds, said="done")
            except RunFailed as error:
                failures[method] = str(error)
                bar.update(task, said="failed")
    return outcomes, failures


def _show(plan: FaultPlan, outcomes: list[MethodOutcome], folder: Path) -> None:
    console = Console()
    title = f"{plan.config.protocol.learners} learners, {plan.seconds:g} s, {len(plan.list_faults())} faults"
    columns = ("good-\nput", "uptime", "tokens", "updates", "re-\nstarts", "stood\nstill", "valid.\nloss")
    made = table(title, "method", *columns)
    made.padding = (0, 1, 0, 0)  # for 80 columns
    for one in outcomes:
        made.add_row(
            NAMES[one.method],
            _percent(one.goodput),
            _percent(one.uptime),
            f"{one.tokens / 1000:,.0f}k",
            f"{one.updates:,}",
            str(one.restarts),
            "–" if one.longest_standstill_s is None else f"{one.longest_standstill_s:.1f} s",
            format_score(one.validation_loss),
        )
    console.print(made)
    for line in _notes(outcomes):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"runs and compare.json are in {short(folder)}", highlight=False, soft_wrap=True)


def _notes(outcomes: list[MethodOutcome]) -> list[str]:
    left = sorted({kind for one in outcomes for kind in one.left_out})
    nothing = "have nothing to happen to in data-parallel training and were left out of it"
    rest = [f"{', '.join(left)}: {nothing}."] if left else []
    updates = "Updates are rounds of DiLoCo and steps of data-parallel training"
    return [f"{updates}; stood still is the longest time between two that were kept.", *rest]


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}%"
