"""`atoll train`: a whole run on this machine; `--resume` goes on with one that was stopped."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from atoll.chaos.standby import Standby
from atoll.chaos.trouble import DISK
from atoll.cli.on_ray import resume_on_ray, start_on_ray
from atoll.cli.shared import (
    check_store,
    check_workload,
    close,
    compile_kernels,
    document_of,
    setting_words,
    settings_of,
    short,
    without_own_shards,
    write_summary,
)
from atoll.cli.store import describe_disk_loss, finish_upload, restore_if_empty
from atoll.config import Config, convert, converted, merged, parse_settings
from atoll.fabric.address import is_loopback
from atoll.launch.begun_here import check_begun_here
from atoll.launch.children import LIMIT, cores
from atoll.launch.data_parallel import as_data_parallel, check_no_merges
from atoll.launch.environment import Assignment, LaunchEnvironment, assign_devices, find_devices, read_environment
from atoll.launch.local import WORKLOAD, Kill, LocalRun, script_arguments
from atoll.launch.replay.play import TapeRun
from atoll.launch.replay.syncer import ReplayOutcome
from atoll.launch.restoring import attach_store
from atoll.launch.resume import Resume, from_cut, plan_resume
from atoll.observe import dashboard
from atoll.observe.screen import EventTail, choose_screen
from atoll.observe.summary import summarise
from atoll.observe.trackers import NO_TARGETS, Targets
from atoll.protocol.errors import ConfigError, RunFailed
from atoll.protocol.records import BegunRecord
from atoll.store.event_parts import read_lines
from atoll.store.journal import read_tape
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import check_not_alive
from atoll.syncer.changes import check_changeable
from atoll.syncer.process import serve
from atoll.telemetry.events import Event, parse
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


def train(
    *,
    script: Path | None,
    arguments: list[str],
    learners: int | None,
    ranks: int | None,
    steps: int | None,
    tokens: int | None,
    out: Path | None,
    force: bool,
    resume: Path | None,
    cut: int | None,
    tape: Path | None,
    algorithm: str,
    demo: bool,
    config: Path | None,
    words: list[str],
    seed: int | None,
    warm_start: float | None,
    share: str | None,
    robust: bool,
    store: str | None,
    max_restarts: int,
    syncer_shards: int | None,
    kill: list[str],
    breakable: bool,
    json_: bool,
    tensorboard: Path | None,
    wandb: str | None,
    on: str | None,
    gpus_per_learner: float | None,
    trust: bool,
    accept_loss: bool,
) -> None:
    budget: dict[str, int | None] = {"learners": learners, "steps": steps, "tokens": tokens}
    named: dict[str, Any] = {"ranks": ranks, "shards": syncer_shards, "seed": seed, "warm_start": warm_start}
    named["gpus_per_learner"] = gpus_per_learner
    words = setting_words(words, **budget, **named, store=store, share=share, robust=robust)
    options = LaunchOptions(breakable, max_restarts, accept_loss=accept_loss)
    if on is not None:
        refused = {"--kill": kill, "--demo": demo, "--tape": tape, "--from-cut": cut, "--breakable": breakable}
        refused |= {"--tensorboard": tensorboard, "--wandb": wandb, "--algorithm": algorithm != "decoupled"}
        if given := [name for name, value in refused.items() if value]:
            raise ConfigError(f"{given[0]} is for a run on this machine: leave it out, or --on")
    targets = Targets(tensorboard, wandb)
    targets.check_packages()
    if targets and tape is not None:
        raise ConfigError("--tensorboard and --wandb follow a run with a syncer: leave --tape out")
    if cut is not None and resume is None:
        raise ConfigError("--from-cut says where to go on, and needs --resume DIR to say with which run")
    if resume is not None:
        if seed is not None or kill or demo or tape or algorithm != "decoupled":
            raise ConfigError(
                "--resume goes on with what was begun: leave --seed, --kill, --demo, --algorithm, --tape out"
            )
        if store is not None and on is None:
            restore_if_empty(resume, store, Console(stderr=json_), accept_loss=accept_loss)
        if config is not None or (script is not None and not _is_by_hand(resume)):
            raise ConfigError("--resume goes on with the run's own script and settings: leave SCRIPT and --config out")
        own = (str(script.absolute()), *script_arguments(script, arguments)[1:]) if script is not None else ()
        if on is not None:
            resume_on_ray(
                on, resume, words, max_restarts, store=store, as_json=json_, trusted=trust, accept_loss=accept_loss
            )
            return
        words = without_own_shards(words, resume)
        _go_on(resume, cut, out, own, words, targets, options, force=force, as_json=json_, trusted=trust)
        return
    workload = WorkloadSettings if script is None else None
    document = merged(document_of(config), DEMO) if demo else document_of(config)
    said = settings_of(document, words, workload)
    settings = _budgeted(convert(said, str(config or "the command line")), script)
    settings.protocol.check_budget()
    check_at_home(settings)
    if algorithm == "data-parallel" and (settings.protocol.phases or settings.protocol.warm_start):
        raise ConfigError(
            "--algorithm data-parallel averages gradients at every step, so it has no phases: "
            "leave --warm-start and phases out"
        )
    if settings.ranks > 1 and (tape is not None or algorithm == "data-parallel"):
        raise ConfigError("--ranks is for learners of a syncer: leave --tape and --algorithm out")
    if settings.service.store and tape is not None:
        raise ConfigError("--store is for runs with a syncer: leave --tape out")
    if settings.service.shards > 1 and tape is not None:
        raise ConfigError("--syncer-shards is for learners of a syncer: leave --tape out")
    if algorithm == "data-parallel" and (tape is not None or kill):
        raise ConfigError("--algorithm data-parallel has no learners: leave --tape and --kill out")
    if settings.ranks > 1 and settings.protocol.shares_moments:
        raise ConfigError("--share moments is for learners of one rank: leave it out, or --ranks")
    if on is None:
        check_workload(script)
        check_store(settings.service.store)
    if script is None:
        converted(settings.workload, WorkloadSettings, f"{config or 'the command line'}, table [workload]")
    if algorithm == "data-parallel" and settings.protocol.shares_moments:
        raise ConfigError("--algorithm data-parallel has one inner optimizer: there are no moments to share")
    if algorithm == "data-parallel":
        check_no_merges(settings)
    command = script_arguments(script, arguments) if script is not None else list(WORKLOAD)
    if script is not None:
        check_for_script(words, script)
        settings = msgspec.structs.replace(settings, script=(str(script.absolute()), *arguments))
    kills = tuple(_kill(text, settings) for text in kill) or ((DEMO_KILL,) if demo and algorithm == "decoupled" else ())
    if tape is not None:
        rules = parse_settings(words, workload).get("protocol", {})
        wanted = said["protocol"].get("learners")
        _follow(tape, settings, rules, wanted, out, force=force, as_json=json_, kills=bool(kills))
        return
    if on is not None:
        start_on_ray(on, settings, out, command, max_restarts, force=force, as_json=json_)
        return
    learners = settings.protocol.learners
    if algorithm == "data-parallel":
        settings = as_data_parallel(settings)
    options = options.assign_devices(settings)
    run_dir = RunDir.create(out, force=force or demo, shared=settings.service.share_files)
    if settings.service.store:
        attach_store(run_dir, settings.service.store)
    console = Console(stderr=json_)
    default = "learners" not in said["protocol"]
    each = settings.ranks if algorithm == "decoupled" else 1
    if text := describe_learners(learners, options.devices, default=default, ranks=each):
        console.print(text, style="dim", soft_wrap=not console.is_terminal, highlight=False)
    train_here(settings, run_dir, console, command, kills, json_, targets=targets, options=options)


def describe_learners(learners: int, devices: Assignment | None, *, default: bool, ranks: int = 1) -> str:
    """How many learners start, where nobody said so, and that they share this machine's cores; empty: neither."""
    many, few = f"{learners} learner{'' if learners == 1 else 's'}{f' of {ranks} ranks' if ranks > 1 else ''}", cores()
    told = [f"{many}, the default: --learners N starts another number."] if default else []
    if devices is None and few < learners * ranks:
        told.append(f"{'They' if default else many} share the {few} core{'' if few == 1 else 's'} of this machine.")
    return " ".join(told)


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How processes are started on this machine; no part of the run's settings."""

    breakable: bool = False
    max_restarts: int = LIMIT
    launch: LaunchEnvironment | None = None
    """Of a run that goes on."""
    accept_loss: bool = False
    """Go on without what is missing of the journal."""
    devices: Assignment | None = None
    score_wait_s: float = 0.0
    """Wait at least so long for the score of the last model, where that is longer than usual."""

    def assign_devices(self, config: Config) -> LaunchOptions:
        """With the GPUs that the script sees dealt out; ConfigError: they are too few."""
        environment = {**(self.launch.variables if self.launch is not None else {}), **os.environ}
        devices = find_devices(environment)
        dealt = assign_devices(devices, config.protocol.learners, config.ranks, strict=config.strict_devices)
        return replace(self, devices=dealt)


def _go_on(
    resume: Path,
    cut: int | None,
    out: Path | None,
    script: tuple[str, ...],
    words: list[str],
    targets: Targets,
    options: LaunchOptions,
    *,
    force: bool,
    as_json: bool,
    trusted: bool,
) -> None:
    """`--resume`: the run's own settings and script, with what may change while a run goes on; with `cut`, in a new
    run. `script`: of a run whose learners were started by hand; `trusted`: what the folder says may be run."""
    if cut is None and out is not None:
        raise ConfigError("--resume goes on in the run's own folder: --out belongs to --from-cut, for a new run")
    rules = tuple(word for word in words if word.partition("=")[0] not in NO_RULES)
    if cut is None:
        check_changeable(rules)
    old = RunDir.open(resume)
    if cut is None:
        check_not_alive(old.path)
    check_begun_here(old, trusted=trusted, runs_script=not script)
    settings = convert(merged(document_of(old.settings), parse_settings(words)), str(old.settings))
    settings = _without_ray_keys(settings, old)
    check_at_home(settings)
    if settings.by_hand and not script:
        raise ConfigError(
            f"the learners of the run in {old.path} were started by hand, so their script is not known: "
            f"atoll train SCRIPT --resume {short(old.path)}, or atoll syncer --resume {short(old.path)}"
        )
    if script:
        settings = msgspec.structs.replace(settings, script=script, by_hand=False)
    if settings.script:
        check_for_script(words, Path(settings.script[0]))
    else:
        converted(settings.workload, WorkloadSettings, f"{old.settings}, table [workload]")
    if settings.service.store and cut is None:
        attach_store(old, settings.service.store)
    launch = read_environment(old.path) if not script else None
    options = replace(options, launch=launch).assign_devices(settings)
    console = Console(stderr=as_json)
    if cut is None:
        run_dir, found = old, plan_resume(old, rules, accept_loss=options.accept_loss)
    else:
        run_dir, found = from_cut(old, cut, out, rules, force=force, shared=settings.service.share_files)
        settings = _with_own_store(settings, run_dir, words)
    told = launch.describe_differences(os.environ, Path.cwd()) if launch is not None else []
    for remark in (*found.remarks, *told):
        console.print(remark, soft_wrap=True, highlight=False)
    if found.only_end:
        _bring_to_its_end(settings, run_dir, console, as_json)
        return
    check_workload(settings.script)
    arguments = list(settings.script) or list(WORKLOAD)
    train_here(settings, run_dir, console, arguments, (), as_json, found, targets, options=options)


def _without_ray_keys(settings: Config, out: RunDir) -> Config:
    """On Ray a run makes keys in its own folder (docs/adr/0034), which come from no bucket: on this machine it needs
    none."""
    keys = Path(settings.service.keys)
    if keys.name != out.secrets.name or (keys != out.secrets and keys.exists()):
        return settings
    return msgspec.structs.replace(settings, service=msgspec.structs.replace(settings.service, keys=""))


def _with_own_store(settings: Config, run_dir: RunDir, words: list[str]) -> Config:
    """A new run from a cut has a bucket only where one is named for it: the old one's is the old run's."""
    store = parse_settings(words).get("service", {}).get("store", "")
    if store:
        attach_store(run_dir, store)
    return msgspec.structs.replace(settings, service=msgspec.structs.replace(settings.service, store=store))


def check_for_script(words: list[str], script: Path) -> None:
    """A script of the user's own reads none of the built-in GPT's settings: to set one would do nothing."""
    for word in words:
        key, _, value = word.partition("=")
        name = key.removeprefix("workload.")
        if name != key and name in WorkloadSettings.__struct_fields__:
            raise ConfigError(
                f"{key} is for the built-in GPT; options of your script go after --: "
                f"atoll train {script} -- --{name.replace('_', '-')} {value}"
            )


def _is_by_hand(folder: Path) -> bool:
    """Whether nobody knows the script of this run."""
    path = folder / "run.toml"
    return path.exists() and bool(document_of(path).get("by_hand"))


def _bring_to_its_end(config: Config, out: RunDir, console: Console, as_json: bool) -> None:
    """A run whose budget is spent and whose end was cut off: a syncer alone writes the end and the model."""
    if config.service.shards > 1:
        asyncio.run(LocalRun(config, out, evaluator=False, only_end=True).run())
    elif code := serve(config, out, evaluated=False):
        raise SystemExit(code)
    close(out, console, as_json)
    finish_upload(out, console)


NO_RULES = (
    "port",
    "evaluate_every",
    "ranks",
    "strict_devices",
    "learner_nice",
    "cpus_per_learner",
    "gpus_per_learner",
    "nodes_per_learner",
    "store",
    "durability",
)
"""What `--resume` takes for this start of the processes alone; the other settings are rules, and their change is
journaled."""


def check_at_home(config: Config) -> None:
    """Everything that `atoll train` starts is on this machine, and comes without a token."""
    service = config.service
    given = [name for name in ("keys", "front", "mutual", "advertise") if getattr(service, name)]
    given += [] if is_loopback(service.host) else [f"host = {service.host}"]
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


def train_here(
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
    find_reason_to_end: Callable[[Sequence[Event]], str] = lambda events: "",
) -> None:
    """`find_reason_to_end` is asked about new events; the run ends in good order with the first reason it gives."""
    compile_kernels(console)
    console.print(describe_disk_loss(config), style="dim", soft_wrap=not console.is_terminal, highlight=False)
    if resume is None and not (config.protocol.steps or config.protocol.tokens):
        text = "No --steps and no --tokens: it trains until its scripts end; Ctrl-C ends it in good order."
        console.print(text, style="dim", soft_wrap=not console.is_terminal, highlight=False)
    tail = EventTail(out.events)
    if resume is not None:
        tail.skip_to_end()  # what happened before was told then
    standby = Standby(config, out) if options.breakable else None
    with targets.open_trackers(out.path.name, msgspec.to_builtins(config)) as tracking, choose_screen(console) as view:

        def watch(status: RunStatus | None) -> None:
            events = tail.read_new()
            if standby is not None:
                standby.take_status(status, {event["kind"] for event in events})
            if (reason := find_reason_to_end(events)) and not run.processes.is_ending:
                run.request_end(reason)
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
            listens=view.show_link,
            route=standby.open_relays if standby is not None else None,
            beside=standby.watch_for_plans if standby is not None else None,
            syncer_words=(
                *(("--disk", DISK) if standby is not None else ()),
                *(("--score-wait", f"{options.score_wait_s:g}") if options.score_wait_s else ()),
            ),
            max_restarts=options.max_restarts,
            devices=options.devices,
            launch=options.launch,
        )
        asyncio.run(standby.run(run) if standby is not None else run.run())
    for words in tracking.trouble:
        console.print(f"note: {words}", soft_wrap=True, highlight=False, markup=False)
    failure = close(out, console, as_json, failure=run.shortfall)
    finish_upload(out, console)
    if failure:
        raise RunFailed(failure)


def _follow(
    tape: Path,
    config: Config,
    rules: dict[str, Any],
    wanted: int | None,
    out: Path | None,
    *,
    force: bool,
    as_json: bool,
    kills: bool,
) -> None:
    """`--tape`: the scenario says how many learners there are, how long it goes and by which rules. `wanted`: learners
    that a settings file asks for."""
    said = sorted(name for name, value in rules.items() if value is not None)
    if said or kills:
        raise ConfigError(f"--tape brings {', '.join(said) or 'its faults'} with it: make another tape for another")
    lines = read_tape(tape)
    assert isinstance(lines[0], BegunRecord)
    if wanted not in (None, on_tape := lines[0].settings.learners):
        raise ConfigError(
            f"{tape} is a tape of {on_tape} learners, the settings ask for {wanted}: "
            f"leave learners out, or make another tape with --learners {wanted}"
        )
    if lines[0].settings.shares_moments:
        raise ConfigError(f"{tape} shares moments, and no tape says which were adopted: make one without share")
    config = msgspec.structs.replace(config, protocol=lines[0].settings)
    run_dir = RunDir.create(out, force=force, shared=config.service.share_files)
    console = Console(stderr=True)
    compile_kernels(console)
    said_so_far = TextColumn("{task.fields[said]}")
    columns = (TextColumn("round"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), said_so_far)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("tape", total=None, said="starting the learners")

        def watch(outcome: ReplayOutcome, rounds: int) -> None:
            bar.update(task, total=rounds, completed=outcome.through + 1, said="")

        told = TapeRun(tape.absolute(), config, run_dir, watch=watch).run()
    summary = {**summarise(parse(read_lines(run_dir.events))), **told}
    write_summary(run_dir, summary, as_json)
    if not as_json:
        Console(highlight=False, soft_wrap=True).print(
            f"{summary['rounds_closed']} rounds as the tape says, {summary['processes']} training processes, "
            f"{summary['wall_s']:.0f} s. The model is in {run_dir.model}; atoll replay repeats it.",
            *([summary["drawn"]] if "drawn" in summary else []),
            sep="\n",
        )
