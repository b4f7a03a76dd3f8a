"""The command line. Every command says what it does with an example; a user's mistake is one line, not a traceback."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console

from atoll import __version__
from atoll.config import Config, convert, converted, merged
from atoll.fabric.client import checked_url, get_json
from atoll.launch.data_parallel import DataParallelRun
from atoll.launch.local import RUNNER, WORKLOAD, Kill, LocalRun, script_arguments
from atoll.numerics import kernels
from atoll.observe.closing import print_closing
from atoll.observe.screen import EventTail, Screen, choose
from atoll.observe.story import last_sample, story
from atoll.observe.summary import summarise
from atoll.protocol.errors import AtollError, ConfigError, Unreachable
from atoll.store.atomic import write_atomic
from atoll.store.rundir import RunDir, checked_name
from atoll.syncer.process import serve
from atoll.telemetry.events import parse
from atoll.telemetry.status import RunStatus
from atoll.workloads.settings import WorkloadSettings

app = typer.Typer(
    name="atoll",
    help="Train one model on many unreliable islands of compute.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

DEMO: dict[str, dict[str, Any]] = {
    "protocol": {"learners": 4, "steps": 700},
    "service": {"evaluate_every": 75},
}
"""`--demo`: small enough for two cores and two minutes."""
DEMO_KILL = Kill("learner-2", 0.35)
STEPS = 1000
"""The built-in workload's budget when none is named."""


Algorithm = Literal["decoupled", "data-parallel"]
Adopt = Literal["overwrite", "blend", "carry"]
MergeRule = Literal["mean", "rda", "rda-row"]
Codec = Literal["fp32", "bf16"]
PlanKind = Literal["balanced", "layer", "tensor"]

RUN, RULES, OUTER, WORK = "The run", "The rules", "The outer step", "The built-in workload"


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def train(
    context: typer.Context,
    script: Annotated[Path | None, typer.Argument(help="Your training script; without one, a small GPT.")] = None,
    learners: Annotated[int | None, typer.Option(help="M: how many learners.", rich_help_panel=RUN)] = None,
    steps: Annotated[int | None, typer.Option(help="End after this many learner steps.", rich_help_panel=RUN)] = None,
    tokens: Annotated[int | None, typer.Option(help="End after this many tokens in all.", rich_help_panel=RUN)] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder.", rich_help_panel=RUN)] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a run that lies there.", rich_help_panel=RUN)] = False,
    config: Annotated[Path | None, typer.Option(help="Settings from a TOML file.", rich_help_panel=RUN)] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and data order.", rich_help_panel=RUN)] = None,
    init: Annotated[Path | None, typer.Option(help="Weights to begin with (safetensors).", rich_help_panel=RUN)] = None,
    port: Annotated[int | None, typer.Option(help="Of the syncer; 0 for any.", rich_help_panel=RUN)] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Rounds between two scores; 0: never.", rich_help_panel=RUN)
    ] = None,
    algorithm: Annotated[
        Algorithm, typer.Option(help="decoupled, or data-parallel as a baseline.", metavar="NAME", rich_help_panel=RUN)
    ] = "decoupled",
    demo: Annotated[
        bool, typer.Option("--demo", help="A first run: one learner is killed on the way.", rich_help_panel=RUN)
    ] = False,
    kill: Annotated[
        list[str] | None,
        typer.Option(help="Kill a learner on the way: learner-2@0.4.", metavar="NAME@SHARE", rich_help_panel=RUN),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.", rich_help_panel=RUN)] = False,
    sync: Annotated[
        bool | None, typer.Option("--sync", help="Learners wait for each other.", rich_help_panel=RULES)
    ] = None,
    quorum: Annotated[
        int | None, typer.Option(help="K: the fewest learners of a round.", rich_help_panel=RULES)
    ] = None,
    fragments: Annotated[int | None, typer.Option(help="P: parts of the model.", rich_help_panel=RULES)] = None,
    sync_every: Annotated[
        int | None, typer.Option(help="H: steps between two syncs of a fragment.", rich_help_panel=RULES)
    ] = None,
    overlap: Annotated[int | None, typer.Option(help="τ: steps a fragment may be away.", rich_help_panel=RULES)] = None,
    adopt: Annotated[Adopt | None, typer.Option(help="How a new version is taken.", rich_help_panel=RULES)] = None,
    blend: Annotated[float | None, typer.Option(help="α of --adopt blend.", rich_help_panel=RULES)] = None,
    codec: Annotated[Codec | None, typer.Option(help="How contributions travel.", rich_help_panel=RULES)] = None,
    plan: Annotated[PlanKind | None, typer.Option(help="How tensors become fragments.", rich_help_panel=RULES)] = None,
    merge: Annotated[MergeRule | None, typer.Option(help="Many contributions into one.", rich_help_panel=OUTER)] = None,
    outer_lr: Annotated[float | None, typer.Option(help="η.", rich_help_panel=OUTER)] = None,
    outer_momentum: Annotated[float | None, typer.Option(help="μ.", rich_help_panel=OUTER)] = None,
    depth: Annotated[int | None, typer.Option(help="The one dial of the GPT's size.", rich_help_panel=WORK)] = None,
    block: Annotated[int | None, typer.Option(help="Bytes of context.", rich_help_panel=WORK)] = None,
    batch: Annotated[int | None, typer.Option(help="Windows per learner and step.", rich_help_panel=WORK)] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.", rich_help_panel=WORK)] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Files, folders or globs; default: Python's own source.", rich_help_panel=WORK),
    ] = None,
) -> None:
    """Train a model with M learners and a syncer on this machine.

    Examples:

      atoll train --learners 4 --steps 1000

      atoll train my_script.py --learners 2 --steps 500 -- --my-option 3
    """
    changes: dict[str, dict[str, Any]] = {
        "protocol": {
            "learners": learners,
            "steps": steps,
            "tokens": tokens,
            "synchronous": sync,
            "quorum": quorum,
            "fragments": fragments,
            "sync_every": sync_every,
            "overlap": 0 if sync and overlap is None else overlap,
            "adopt": adopt,
            "blend": blend,
            "codec": codec,
            "plan": plan,
        },
        "outer": {"merge": merge, "lr": outer_lr, "momentum": outer_momentum},
        "service": {"port": port, "evaluate_every": evaluate_every},
        "workload": {"depth": depth, "block": block, "batch": batch, "lr": lr, "data": data or None},
    }
    document = _document(config)
    if demo:
        document = merged(document, DEMO)
    if seed is not None:
        document["seed"] = seed
    if init is not None:
        document["init"] = str(init)
    settings = _budgeted(convert(merged(document, changes), str(config or "the command line")), script)
    if script is None:
        converted(settings.workload, WorkloadSettings, f"{config or 'the command line'}, table [workload]")
    elif algorithm == "data-parallel":
        raise ConfigError(f"--algorithm data-parallel trains the built-in workload only: leave {script} out")
    arguments = script_arguments(script, context.args) if script is not None else list(WORKLOAD)
    kills = tuple(_kill(text, settings) for text in kill or ()) or ((DEMO_KILL,) if demo else ())
    run_dir = RunDir.create(out, force=force or demo)
    console = Console(stderr=json_)
    if algorithm == "data-parallel":
        _train_data_parallel(settings, run_dir, console, json_)
        return
    _train(settings, run_dir, console, arguments, kills, json_)


def _document(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _budgeted(config: Config, script: Path | None) -> Config:
    """The built-in workload would go on for ever."""
    if script is not None or config.protocol.steps or config.protocol.tokens:
        return config
    return msgspec.structs.replace(config, protocol=msgspec.structs.replace(config.protocol, steps=STEPS))


def _kill(text: str, config: Config) -> Kill:
    found = re.fullmatch(r"learner-(\d+)@(0?\.\d+|[01])", text)
    if found is None:
        raise ConfigError(
            f"--kill {text} is not understood: write it as learner-2@0.4, the share of the run at its end"
        )
    if int(found.group(1)) >= config.protocol.learners:
        last = config.protocol.learners - 1
        raise ConfigError(f"--kill {text}: there is no such learner; they are learner-0 to learner-{last}")
    return Kill(f"learner-{int(found.group(1))}", float(found.group(2)))


def _train(
    config: Config, out: RunDir, console: Console, arguments: list[str], kills: tuple[Kill, ...], as_json: bool
) -> None:
    with console.status("compiling the kernels (only the first time)"):
        kernels.warm()
    tail = EventTail(out.events)
    with choose(console) as view:
        run = LocalRun(
            config,
            out,
            script=arguments,
            evaluator=config.service.evaluate_every > 0,
            kills=kills,
            watch=lambda status: view.update(status, tail.read_new()),
        )
        asyncio.run(run.run())
    _close(out, console, as_json)


def _close(out: RunDir, console: Console, as_json: bool = False) -> None:
    """The summary, written down and shown."""
    events = list(parse(out.events.read_bytes().splitlines(keepends=True)))
    summary = summarise(events)
    _write_summary(out, summary, as_json)
    if not as_json:
        print_closing(console, summary, story(summary, events), last_sample(events), _short(out.path))


def _write_summary(out: RunDir, summary: dict[str, Any], as_json: bool) -> None:
    text = msgspec.json.format(msgspec.json.encode(summary))
    write_atomic(out.summary, text + b"\n")
    if as_json:
        print(text.decode())


def _train_data_parallel(config: Config, out: RunDir, console: Console, as_json: bool) -> None:
    protocol, work = config.protocol, converted(config.workload, WorkloadSettings, "[workload]")
    per_step = work.batch * work.block * protocol.learners
    budgets = (protocol.steps, -(-protocol.tokens // per_step))
    steps = min(budget for budget in budgets if budget)
    with console.status("starting"):

        def watch(report: dict[str, Any]) -> None:
            if report["kind"] == "validation":
                console.print(f"step {report['step']:,} of {steps:,}: validation loss {report['validation_loss']:.4f}")

        summary = asyncio.run(DataParallelRun(config, out, steps, watch).run())
    _write_summary(out, summary, as_json)
    if not as_json:
        console.print(
            f"data-parallel, {protocol.learners} ranks, {steps:,} steps in {summary['wall_s']:.0f} s: validation loss "
            f"{summary['validation_loss_start']:.3f} → {summary['validation_loss_end']:.3f}"
        )


@app.command()
def syncer(
    out: Annotated[Path | None, typer.Option(help="The run's folder.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings from a TOML file.")] = None,
    learners: Annotated[int | None, typer.Option(help="M: how many learners the run is meant for.")] = None,
    steps: Annotated[int | None, typer.Option(help="End after this many learner steps.")] = None,
    tokens: Annotated[int | None, typer.Option(help="End after this many tokens in all.")] = None,
    quorum: Annotated[int | None, typer.Option(help="K: the fewest learners of a round.")] = None,
    port: Annotated[int, typer.Option(help="Where to listen; 0 for any.")] = 7077,
    force: Annotated[bool, typer.Option("--force", help="Replace a run that lies there.")] = False,
) -> None:
    """Start a syncer by hand; learners join with `atoll learn`. Ctrl-C ends the run in good order.

    Example:

      atoll syncer --learners 2 --steps 500 --port 7077
    """
    changes: dict[str, dict[str, Any]] = {
        "protocol": {"learners": learners, "steps": steps, "tokens": tokens, "quorum": quorum},
        "service": {"port": port},
    }
    settings = convert(merged(_document(config), changes), str(config or "the command line"))
    run_dir = RunDir.create(out, force=force)
    write_atomic(run_dir.settings, settings.toml())
    console = Console()

    def ready(url: str) -> None:
        console.print(f"syncer at [bold]{url}[/], run in {_short(run_dir.path)}", soft_wrap=True)
        console.print(f"join with: atoll learn SCRIPT --syncer {url}", soft_wrap=True)

    code = serve(settings, run_dir, evaluated=False, ready=ready)
    if code:
        raise typer.Exit(code)
    _close(run_dir, console)


@app.command(context_settings={"allow_extra_args": True})
def learn(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Your training script, which uses atoll.Learner.")],
    syncer: Annotated[str, typer.Option(help="Where the syncer listens.", envvar="ATOLL_SYNCER")],
    name: Annotated[
        str | None,
        typer.Option(help="Its own in the run; by default this machine and process.", envvar="ATOLL_LEARNER"),
    ] = None,
    evaluator: Annotated[
        bool, typer.Option("--evaluator", help="Score the global model instead (atoll.evaluate).")
    ] = False,
) -> None:
    """Run a training script as one learner of a run that somebody else started.

    Example:

      atoll learn my_script.py --syncer http://127.0.0.1:7077 --name learner-0
    """
    arguments = script_arguments(script, context.args)
    os.environ["ATOLL_SYNCER"] = checked_url(syncer)
    os.environ["ATOLL_LEARNER"] = checked_name(name or _own_name())
    os.environ["ATOLL_ROLE"] = "evaluator" if evaluator else "learner"
    os.execv(sys.executable, [sys.executable, *RUNNER, *arguments])


def _own_name() -> str:
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")
    return f"{host[:40] or 'learner'}-{os.getpid()}"


@app.command()
def status(
    run: Annotated[str, typer.Argument(help="A run's folder, or the address of its syncer.")],
    watch: Annotated[bool, typer.Option("--watch", help="Stay and follow it.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """See how a run is doing.

    Example:

      atoll status atoll-runs/first --watch
    """
    url = checked_url(run) if run.startswith("http") else _address(RunDir(Path(run).absolute()))
    try:
        now = asyncio.run(_status(url))
    except Unreachable as error:
        hint = "is the run over? Then its figures are in summary.json of its folder"
        raise Unreachable(f"no syncer answers at {url}: {hint}") from error
    if json_:
        print(msgspec.json.encode(now).decode())
    elif watch:
        asyncio.run(_follow(url))
    else:
        with Screen(Console()) as screen:
            screen.update(now)


async def _status(url: str) -> RunStatus:
    return msgspec.convert(await get_json(url, "/v1/status"), RunStatus)


async def _follow(url: str) -> None:
    with Screen(Console()) as screen:
        while True:
            try:
                screen.update(await _status(url))
            except Unreachable:
                return
            await asyncio.sleep(0.5)


def _address(run: RunDir) -> str:
    try:
        return run.address.read_text()
    except OSError as error:
        raise ConfigError(f"{run.path} holds no run with a syncer: name the folder that --out made") from error


def _short(path: Path) -> Path:
    """As a person would write it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"atoll {__version__}")
        raise typer.Exit


def main() -> None:
    try:
        app()
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
