"""`atoll compare`: several methods side by side, in one table.

A script is trained by each for the same steps or tokens, and its scores are shown over tokens; runs that are over are
only read. A plan of faults is for the built-in GPT: what is left of each method.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from atoll.baselines.compare import (
    METHODS,
    MeasuredMethod,
    MethodOutcome,
    as_synchronous,
    check_not_stopped,
    comparable,
    run_method,
)
from atoll.baselines.curves import (
    LOSS,
    NEEDED,
    ScoreCurve,
    choose_tokens,
    find_reason_not_to_compare,
    read_curves,
)
from atoll.chaos import plan as plans
from atoll.chaos.performance import read_events
from atoll.chaos.plan import FaultPlan
from atoll.cli.lists import names
from atoll.cli.shared import check_workload, compile_kernels, document_of, setting_words, settings_of, short
from atoll.cli.train import LaunchOptions, check_at_home, check_for_script, train_here
from atoll.config import Config, convert
from atoll.launch.data_parallel import as_data_parallel
from atoll.launch.local import script_arguments
from atoll.observe.figures import plain, span, table
from atoll.observe.story import INCOMPARABLE
from atoll.protocol.errors import ConfigError, RunFailed
from atoll.protocol.statistics import format_score
from atoll.store.atomic import write_atomic
from atoll.store.rundir import RunDir, unused_path
from atoll.telemetry.events import Event

SCORE_WAIT_S = 1800.0
"""How long the score of a run's last model is waited for: the table goes no further than the scores."""
NAMES = {
    "decoupled": "Decoupled DiLoCo",
    "synchronous-diloco": "synchronous DiLoCo",
    "elastic-data-parallel": "elastic data-parallel",
    "data-parallel": "data-parallel",
}
OF_SCRIPTS: dict[str, Callable[[Config], Config]] = {
    "decoupled": lambda config: config,
    "synchronous-diloco": as_synchronous,
    "data-parallel": as_data_parallel,
}


def compare(
    what: list[str],
    arguments: list[str],
    out: Path | None,
    methods: str | None,
    learners: int | None,
    steps: int | None,
    tokens: int | None,
    seed: int | None,
    config: Path | None,
    words: list[str],
    checkpoint_every: int,
    force: bool,
    json_: bool,
) -> None:
    paths = [Path(word) for word in what]
    of_scripts: dict[str, object] = {"--learners": learners, "--steps": steps, "--tokens": tokens, "--seed": seed}
    of_scripts |= {"--config": config, "--set": words or None, "--": arguments or None}
    if len(paths) == 1 and paths[0].suffix == ".py":
        chosen = [*dict.fromkeys(names("--methods", methods or "decoupled,data-parallel", tuple(OF_SCRIPTS)))]
        budget = {"learners": learners, "steps": steps, "tokens": tokens, "seed": seed}
        settings = _read_settings(paths[0], arguments, config, setting_words(words, robust=False, **budget))
        _compare_script(paths[0], arguments, settings, chosen, out, force=force, as_json=json_)
        return
    if given := [name for name, value in of_scripts.items() if value is not None]:
        raise ConfigError(f"{given[0]} is for comparing a script: atoll compare SCRIPT.py")
    if all(path.is_dir() for path in paths):
        if methods is not None or out is not None:
            raise ConfigError("runs that are over are only read: leave --methods and --out out")
        _show_curves(read_curves(paths), json_)
    elif len(paths) == 1:
        _compare_plan(paths[0], out, methods or ",".join(METHODS), checkpoint_every, force=force, as_json=json_)
    else:
        raise ConfigError("name a script, a plan of faults, or the folders of runs")


# ---- a script -------------------------------------------------------------------------------------------------------


def _read_settings(script: Path, arguments: list[str], file: Path | None, words: list[str]) -> Config:
    check_for_script(words, script)
    script_arguments(script, arguments)  # it is there
    config = convert(settings_of(document_of(file), words, None), str(file or "the command line"))
    check_at_home(config)
    if not (config.protocol.steps or config.protocol.tokens):
        raise ConfigError("a comparison needs an end that both come to: name --steps or --tokens")
    if config.service.store or config.ranks > 1:
        raise ConfigError("store and ranks are for one run: leave them out of a comparison")
    return msgspec.structs.replace(config, script=(str(script.absolute()), *arguments))


def _compare_script(
    script: Path,
    arguments: list[str],
    config: Config,
    methods: list[str],
    out: Path | None,
    *,
    force: bool,
    as_json: bool,
) -> None:
    """One after another: they would take the processor from each other."""
    folder = (out or unused_path(time.localtime())).absolute()
    places = {method: RunDir.create(folder / method, force=force) for method in methods}
    console = Console(stderr=True)
    for method, place in places.items():
        console.rule(NAMES[method])
        settings = OF_SCRIPTS[method](config)
        command, options = (
            script_arguments(script, arguments),
            LaunchOptions(score_wait_s=SCORE_WAIT_S).assign_devices(settings),
        )
        # A run whose scores cannot be compared is ended at its first score: the others would be trained for nothing.
        check = _find_reason_to_end
        train_here(settings, place, console, command, (), as_json=False, options=options, find_reason_to_end=check)
        events = read_events(place)
        check_not_stopped(events)
        if reason := find_reason_not_to_compare(events):
            raise ConfigError(f"{method} cannot be compared: {reason}. The script has to call {NEEDED}")
        read_curves([place.path])  # refuses a run without scores before the next method begins
    curves = read_curves([place.path for place in places.values()])
    write_atomic(folder / "compare.json", _encode(curves))
    _show_curves(curves, as_json)


def _find_reason_to_end(events: Sequence[Event]) -> str:
    return INCOMPARABLE if find_reason_not_to_compare(events) else ""


def _show_curves(curves: list[ScoreCurve], as_json: bool) -> None:
    tokens = choose_tokens(curves)
    if as_json:
        print(_encode(curves).decode(), end="")
        return
    figure, better = curves[0].figure, {"min": "less", "max": "more"}[curves[0].direction]
    title = "validation loss over tokens" if figure == LOSS else f"{plain(figure)} over tokens ({better} is better)"
    made = table(title, "tokens merged", *(f"{one.run.name}\n({one.algorithm})" for one in curves))
    for place in tokens:
        made.add_row(f"{place:,.0f}", *(_show_score(one, place) for one in curves))
    made.add_section()
    made.add_row("last score", *(format_score(one.scores[-1][1]) for one in curves))
    made.add_row("at tokens", *(f"{one.scores[-1][0]:,}" for one in curves))
    made.add_row("tokens in all", *(f"{one.merged:,}" for one in curves))
    made.add_row("took", *(span(one.wall_s) for one in curves))
    console = Console()
    console.print(made)
    between = "Figures with a * were scored there; the others are on the line between two scores of their run."
    for line in (between, *_describe_missing(curves, tokens[-1])):
        console.print(line, highlight=False, soft_wrap=True)


def _show_score(curve: ScoreCurve, tokens: float) -> str:
    scored = any(at == tokens for at, _ in curve.scores)
    return f"{format_score(curve.score_at(tokens))}{'*' if scored else ' '}"


def _describe_missing(curves: list[ScoreCurve], last: float) -> list[str]:
    """Say which runs lack the score of their last model, and where the table ends for it."""
    found = [
        f"{one.run.name} has no score of its last model: its last is at {one.scores[-1][0]:,} of {one.merged:,} tokens."
        for one in curves
        if one.stale
    ]
    return [*found, f"So the table ends at {last:,.0f} tokens."] if found else []


def _encode(curves: list[ScoreCurve]) -> bytes:
    return msgspec.json.format(msgspec.json.encode({"runs": [one.describe() for one in curves]})) + b"\n"


# ---- a plan of faults -----------------------------------------------------------------------------------------------


def _compare_plan(
    plan: Path, out: Path | None, methods: str, checkpoint_every: int, *, force: bool, as_json: bool
) -> None:
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
    if as_json:
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
