"""`atoll train`: a whole run on this machine; `--resume` goes on with one that was stopped."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from atoll.baselines.data_parallel import DataParallelRun
from atoll.chaos.standby import Standby
from atoll.chaos.trouble import DISK
from atoll.cli.app import app, close, compile_kernels, document_of, find_run, short, waiting_for_learners, write_summary
from atoll.config import Config, convert, converted, merged
from atoll.launch.children import LIMIT
from atoll.launch.environment import Assignment, LaunchEnvironment, assign_devices, find_devices, read_environment
from atoll.launch.local import WORKLOAD, Kill, LocalRun, script_arguments
from atoll.launch.replay.conductor import Outcome
from atoll.launch.replay.play import Performance
from atoll.launch.resume import Resume, from_cut, plan_resume
from atoll.numerics import kernels
from atoll.observe import dashboard
from atoll.observe.screen import EventTail, choose
from atoll.observe.trackers import NO_TARGETS, Targets
from atoll.protocol.errors import ConfigError, RunFailed
from atoll.protocol.records import Begun
from atoll.store.journal import read_tape
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import check_not_alive
from atoll.syncer.process import serve
from atoll.telemetry.status import RunStatus
from atoll.workloads.settings import WorkloadSettings

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
Guard = Literal["off", "alarm", "rollback"]
MergeRule = Literal["mean", "rda", "rda-row"]
Codec = Literal["fp32", "bf16"]
PlanKind = Literal["balanced", "layer", "tensor"]

RUN, RULES, OUTER, WORK = "The run", "The rules", "The outer step", "The built-in workload"


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def train(
    context: typer.Context,
    script: Annotated[Path | None, typer.Argument(help="Your training script; without one, a small GPT.")] = None,
    learners: Annotated[int | None, typer.Option(help="M: how many learners.", rich_help_panel=RUN)] = None,
    steps: Annotated[
        int | None, typer.Option(help="End when the middle learner has made this many steps.", rich_help_panel=RUN)
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="End after this many tokens in all.", rich_help_panel=RUN)] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder.", rich_help_panel=RUN)] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a run that lies there.", rich_help_panel=RUN)] = False,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with the run in this folder.", metavar="RUN", callback=find_run, rich_help_panel=RUN),
    ] = None,
    cut: Annotated[
        int | None,
        typer.Option("--from-cut", help="With --resume: a new run (--out) from this cut.", rich_help_panel=RUN),
    ] = None,
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
    max_restarts: Annotated[
        int,
        typer.Option(
            help="How often in a row a learner that dies is started again.", min=0, metavar="N", rich_help_panel=RUN
        ),
    ] = LIMIT,
    strict_devices: Annotated[
        bool,
        typer.Option("--strict-devices", help="Refuse more learners than there are GPUs.", rich_help_panel=RUN),
    ] = False,
    kill: Annotated[
        list[str] | None,
        typer.Option(help="Kill a learner on the way: learner-2@0.4.", metavar="NAME@SHARE", rich_help_panel=RUN),
    ] = None,
    tape: Annotated[
        Path | None,
        typer.Option(help="Follow this scenario (atoll simulate tape).", metavar="FILE", rich_help_panel=RUN),
    ] = None,
    breakable: Annotated[
        bool,
        typer.Option("--breakable", help="atoll chaos --run may attack this run.", rich_help_panel=RUN),
    ] = False,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Figures for TensorBoard, as it goes.", metavar="DIR", rich_help_panel=RUN)
    ] = None,
    wandb: Annotated[
        str | None, typer.Option(help="Figures for W&B, as it goes.", metavar="PROJECT", rich_help_panel=RUN)
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.", rich_help_panel=RUN)] = False,
    sync: Annotated[
        bool | None, typer.Option("--sync", help="Learners wait for each other.", rich_help_panel=RULES)
    ] = None,
    quorum: Annotated[
        int | None, typer.Option(help="K: the fewest learners of a round.", rich_help_panel=RULES)
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option("--wait-for-learners", help="Seconds until it begins without all of them.", rich_help_panel=RULES),
    ] = None,
    fragments: Annotated[int | None, typer.Option(help="P: parts of the model.", rich_help_panel=RULES)] = None,
    sync_every: Annotated[
        int | None, typer.Option(help="H: steps between two syncs of a fragment.", rich_help_panel=RULES)
    ] = None,
    overlap: Annotated[int | None, typer.Option(help="τ: steps a fragment may be away.", rich_help_panel=RULES)] = None,
    cut_every: Annotated[
        int | None, typer.Option(help="Rounds between two cuts; 0: none.", rich_help_panel=RULES)
    ] = None,
    guard: Annotated[
        Guard | None, typer.Option(help="When the validation loss becomes much worse.", rich_help_panel=RULES)
    ] = None,
    adopt: Annotated[Adopt | None, typer.Option(help="How a new version is taken.", rich_help_panel=RULES)] = None,
    blend: Annotated[float | None, typer.Option(help="α of --adopt blend.", rich_help_panel=RULES)] = None,
    codec: Annotated[Codec | None, typer.Option(help="How contributions travel.", rich_help_panel=RULES)] = None,
    plan: Annotated[PlanKind | None, typer.Option(help="How tensors become fragments.", rich_help_panel=RULES)] = None,
    merge: Annotated[MergeRule | None, typer.Option(help="Many contributions into one.", rich_help_panel=OUTER)] = None,
    robust: Annotated[
        bool | None, typer.Option("--robust", help="Leave out who points against the others.", rich_help_panel=OUTER)
    ] = None,
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

    What follows -- goes to your script as it is.

    Examples:

      atoll train --learners 4 --steps 1000

      atoll train my_script.py --learners 2 --steps 500 -- --my-option 3

      atoll train --resume atoll-runs/first --steps 2000
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
            "cut_every": cut_every,
            "guard": guard,
            "adopt": adopt,
            "blend": blend,
            "codec": codec,
            "plan": plan,
        },
        "outer": {"merge": merge, "lr": outer_lr, "momentum": outer_momentum, "robust": robust},
        "service": {"port": port, "evaluate_every": evaluate_every},
        "workload": {"depth": depth, "block": block, "batch": batch, "lr": lr, "data": data or None},
    }
    options = LaunchOptions(breakable, max_restarts, strict_devices)
    targets = Targets(tensorboard, wandb)
    targets.check()
    if targets and (tape is not None or algorithm != "decoupled"):
        raise ConfigError("--tensorboard and --wandb follow a run with a syncer: leave --tape and --algorithm out")
    if cut is not None and resume is None:
        raise ConfigError("--from-cut says where to go on, and needs --resume DIR to say with which run")
    if resume is not None:
        if seed is not None or init is not None or kill or demo or tape or algorithm != "decoupled":
            raise ConfigError(
                "--resume goes on with what was begun: leave --seed, --init, --kill, --demo, --algorithm, --tape out"
            )
        if wait is not None:
            raise ConfigError("--resume goes on with a run that has begun: leave --wait-for-learners out")
        if config is not None or (script is not None and not _is_by_hand(resume)):
            raise ConfigError("--resume goes on with the run's own script and settings: leave SCRIPT and --config out")
        own = (str(script.absolute()), *script_arguments(script, context.args)[1:]) if script is not None else ()
        _go_on(resume, cut, out, own, changes, targets, options, force=force, as_json=json_)
        return
    document = waiting_for_learners(document_of(config), wait)
    if demo:
        document = merged(document, DEMO)
    if seed is not None:
        document["seed"] = seed
    if init is not None:
        document["init"] = str(init)
    settings = _budgeted(convert(merged(document, changes), str(config or "the command line")), script)
    _check_at_home(settings)
    if script is None:
        converted(settings.workload, WorkloadSettings, f"{config or 'the command line'}, table [workload]")
    elif algorithm == "data-parallel":
        raise ConfigError(f"--algorithm data-parallel trains the built-in workload only: leave {script} out")
    arguments = script_arguments(script, context.args) if script is not None else list(WORKLOAD)
    if script is not None:
        settings = msgspec.structs.replace(settings, script=(str(script.absolute()), *context.args))
    kills = tuple(_kill(text, settings) for text in kill or ()) or ((DEMO_KILL,) if demo else ())
    if tape is not None:
        _follow(tape, settings, changes["protocol"], out, force=force, as_json=json_, kills=bool(kills))
        return
    options = options.assign_devices(settings)
    run_dir = RunDir.create(out, force=force or demo, shared=settings.service.share_files)
    console = Console(stderr=json_)
    if algorithm == "data-parallel":
        _train_data_parallel(settings, run_dir, console, json_)
        return
    _train(settings, run_dir, console, arguments, kills, json_, targets=targets, options=options)


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How processes are started on this machine; no part of the run's settings."""

    breakable: bool = False
    max_restarts: int = LIMIT
    strict_devices: bool = False
    launch: LaunchEnvironment | None = None
    """Of a run that goes on."""
    devices: Assignment | None = None

    def assign_devices(self, config: Config) -> LaunchOptions:
        """With the GPUs that the script sees dealt out; ConfigError: they are too few."""
        environment = {**(self.launch.variables if self.launch is not None else {}), **os.environ}
        devices = assign_devices(find_devices(environment), config.protocol.learners, strict=self.strict_devices)
        return replace(self, devices=devices)


def _go_on(
    resume: Path,
    cut: int | None,
    out: Path | None,
    script: tuple[str, ...],
    changes: dict[str, dict[str, Any]],
    targets: Targets,
    options: LaunchOptions,
    *,
    force: bool,
    as_json: bool,
) -> None:
    """`--resume`: the run's own settings and script, with what may change while a run goes on. `script`: of a run whose
    learners were started by hand."""
    if cut is None and out is not None:
        raise ConfigError("--resume goes on in the run's own folder: --out belongs to --from-cut, for a new run")
    words = _words(changes)
    old = RunDir.open(resume)
    if cut is None:
        check_not_alive(old.path)
    settings = convert(merged(document_of(old.settings), _kept(changes)), str(old.settings))
    _check_at_home(settings)
    if settings.by_hand and not script:
        raise ConfigError(
            f"the learners of the run in {old.path} were started by hand, so their script is not known: "
            f"atoll train SCRIPT --resume {short(old.path)}, or atoll syncer --resume {short(old.path)}"
        )
    if script:
        settings = msgspec.structs.replace(settings, script=script, by_hand=False)
    launch = read_environment(old.path) if not script else None
    options = replace(options, launch=launch).assign_devices(settings)
    console = Console(stderr=as_json)
    if cut is None:
        run_dir, found = old, plan_resume(old, words)
    else:
        run_dir, found = from_cut(old, cut, out, words, force=force, shared=settings.service.share_files)
    told = launch.describe_differences(os.environ, Path.cwd()) if launch is not None else []
    for remark in (*found.remarks, *told):
        console.print(remark, soft_wrap=True, highlight=False)
    if found.only_end:
        _bring_to_its_end(settings, run_dir, console, as_json)
        return
    arguments = list(settings.script) or list(WORKLOAD)
    _train(settings, run_dir, console, arguments, (), as_json, found, targets, options=options)


def _is_by_hand(folder: Path) -> bool:
    """Whether nobody knows the script of this run."""
    path = folder / "run.toml"
    return path.exists() and bool(document_of(path).get("by_hand"))


def _bring_to_its_end(config: Config, out: RunDir, console: Console, as_json: bool) -> None:
    """A run whose budget is spent and whose end was cut off: a syncer alone writes the end and the model."""
    if code := serve(config, out, evaluated=False):
        raise typer.Exit(code)
    close(out, console, as_json)


CHANGEABLE = {
    "protocol": {key: key for key in ("learners", "steps", "tokens", "quorum", "cut_every", "guard")},
    "outer": {"merge": "merge", "lr": "outer_lr", "momentum": "outer_momentum", "robust": "robust"},
    "service": {"port": "", "evaluate_every": ""},
}
"""What `--resume` takes beside the run's own settings, and its name for `atoll set`; without one it is no rule."""


def _words(changes: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    words = []
    for table, values in changes.items():
        for key, value in values.items():
            if value is None:
                continue
            if key not in CHANGEABLE.get(table, {}):
                raise ConfigError(f"{key} = {value} cannot change when a run goes on: start a new run for it")
            if word := CHANGEABLE[table][key]:
                words.append(f"{word}={value}")
    return tuple(words)


def _kept(changes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same for run.toml: the number of learners is what the launcher starts."""
    return {table: values for table, values in changes.items() if table in CHANGEABLE}


def _check_at_home(config: Config) -> None:
    """Everything that `atoll train` starts is on this machine, and comes without a token."""
    service = config.service
    given = [name for name in ("keys", "front", "mutual", "advertise") if getattr(service, name)]
    if given:
        raise ConfigError(
            f"[service] {given[0]} belongs to atoll syncer, and atoll train starts everything on this machine: "
            "leave it out, or start atoll syncer --keys DIR and learners that join by its link"
        )


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
    config: Config,
    out: RunDir,
    console: Console,
    arguments: list[str],
    kills: tuple[Kill, ...],
    as_json: bool,
    resume: Resume | None = None,
    targets: Targets = NO_TARGETS,
    *,
    options: LaunchOptions,
) -> None:
    compile_kernels(console)
    if resume is None and not (config.protocol.steps or config.protocol.tokens):
        text = "No --steps and no --tokens: it trains until its scripts end; Ctrl-C ends it in good order."
        console.print(text, style="dim", soft_wrap=True, highlight=False)
    tail = EventTail(out.events)
    if resume is not None:
        tail.skip_to_end()  # what happened before was told then
    standby = Standby(config, out) if options.breakable else None
    with targets.open(out.path.name, msgspec.to_builtins(config)) as tracking, choose(console) as view:

        def watch(status: RunStatus | None) -> None:
            events = tail.read_new()
            if standby is not None:
                standby.watch(status, {event["kind"] for event in events})
            tracking.update(status, events)
            view.update(status, events)

        run = LocalRun(
            config,
            out,
            script=arguments,
            evaluator=config.service.evaluate_every > 0,
            kills=kills,
            resume=resume,
            watch=watch,
            pages=dashboard.NAME,
            listens=view.listens,
            route=standby.route if standby is not None else None,
            beside=standby.beside if standby is not None else None,
            syncer_words=("--disk", DISK) if standby is not None else (),
            max_restarts=options.max_restarts,
            devices=options.devices,
            launch=options.launch,
        )
        asyncio.run(standby.run(run) if standby is not None else run.run())
    for words in tracking.trouble:
        console.print(f"note: {words}", soft_wrap=True, highlight=False, markup=False)
    close(out, console, as_json)
    if run.shortfall:
        raise RunFailed(run.shortfall)


def _follow(
    tape: Path,
    config: Config,
    rules: dict[str, Any],
    out: Path | None,
    *,
    force: bool,
    as_json: bool,
    kills: bool,
) -> None:
    """`--tape`: the scenario says how many learners there are, how long it goes and by which rules."""
    said = sorted(name for name, value in rules.items() if value is not None)
    if said or kills:
        raise ConfigError(f"--tape brings {', '.join(said) or 'its faults'} with it: make another tape for another")
    lines = read_tape(tape)
    assert isinstance(lines[0], Begun)
    config = msgspec.structs.replace(config, protocol=lines[0].settings)
    kernels.warm()
    run_dir = RunDir.create(out, force=force, shared=config.service.share_files)
    console = Console(stderr=True)
    said_so_far = TextColumn("{task.fields[said]}")
    columns = (TextColumn("round"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), said_so_far)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("tape", total=None, said="starting the learners")

        def watch(outcome: Outcome, rounds: int) -> None:
            bar.update(task, total=rounds, completed=outcome.through + 1, said="")

        summary = Performance(tape.absolute(), config, run_dir, watch=watch).run()
    write_summary(run_dir, summary, as_json)
    if not as_json:
        Console(highlight=False, soft_wrap=True).print(
            f"{summary['rounds']} rounds as the tape says, {summary['processes']} training processes, "
            f"{summary['wall_s']:.0f} s. The model is in {run_dir.model}; atoll replay repeats it."
        )


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
    write_summary(out, summary, as_json)
    if not as_json:
        console.print(
            f"data-parallel, {protocol.learners} ranks, {steps:,} steps in {summary['wall_s']:.0f} s: validation loss "
            f"{summary['validation_loss_start']:.3f} → {summary['validation_loss_end']:.3f}"
        )
