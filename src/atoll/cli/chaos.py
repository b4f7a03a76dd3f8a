"""`atoll chaos PLAN`: a run under a seeded plan of faults, with a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from atoll.chaos import performance
from atoll.chaos import plan as plans
from atoll.chaos.performance import ChaosRun
from atoll.chaos.plan import KINDS, FaultPlan
from atoll.chaos.standby import follow_attack, hand_over_plan
from atoll.chaos.verdict import Finding
from atoll.cli.shared import check_workload, compile_kernels, document_of, short, write_summary
from atoll.config import Config, convert, parse_settings
from atoll.launch.local import WORKLOAD, script_arguments
from atoll.observe import dashboard
from atoll.observe.figures import table
from atoll.observe.screen import choose_screen
from atoll.observe.summary import summarise
from atoll.observe.tail import EventTail
from atoll.protocol.errors import ConfigError
from atoll.store.atomic import write_atomic
from atoll.store.rundir import RunDir
from atoll.telemetry.events import Event
from atoll.telemetry.status import RunStatus
from atoll.workloads.settings import WorkloadSettings


def chaos(
    *,
    arguments: list[str],
    plan: Path,
    script: Path | None,
    out: Path | None,
    seed: int | None,
    calm: list[Path],
    run: Path | None,
    words: list[str],
    show: bool,
    force: bool,
    json_: bool,
) -> None:
    going = RunDir.open(run) if run is not None else None
    if going is not None and words:
        raise ConfigError("--run attacks a run by its own settings: change them with `atoll set`, and leave --set out")
    changes = parse_settings(words, WorkloadSettings if script is None else None)
    found = plans.load_plan(plan, load_settings(going) if going is not None else None, changes)
    if seed is not None:
        if seed < 0:
            raise ConfigError(f"--seed {seed} is below 0: seeds are 0, 1, 2, …")
        found = msgspec.structs.replace(found, seed=seed)
    if show:
        _print_faults(found)
        return
    if going is not None:
        if script is not None or out is not None or force:
            raise ConfigError("--run attacks a run that goes on already: leave SCRIPT, --out and --force out")
        _attack(found, going, [RunDir.open(one) for one in calm], json_)
        return
    arguments = script_arguments(script, arguments) if script is not None else list(WORKLOAD)
    check_workload(script)
    run_dir = RunDir.create(out, force=force)
    console = Console(stderr=json_)
    compile_kernels(console)
    beside = [RunDir.open(one) for one in calm]
    if not beside and found.verdict.needs_calm:
        peace = RunDir.create(run_dir.path.with_name(f"{run_dir.path.name}-calm"), force=force)
        console.print(f"first in peace: {short(peace.path)}", highlight=False, soft_wrap=True)
        _perform(performance.without_faults(found), peace, arguments, console)
        beside.append(peace)
    console.print(f"now {len(found.list_faults())} faults: {short(run_dir.path)}", highlight=False, soft_wrap=True)
    _perform(found, run_dir, arguments, console)
    findings = performance.judge_run(found, run_dir, beside)
    _close(found, run_dir, findings, console, json_)


def _attack(plan: FaultPlan, out: RunDir, calm: list[RunDir], as_json: bool) -> None:
    if plan.verdict.needs_calm and not calm:
        raise ConfigError(
            "the verdict asks for tokens_per_live_s or loss, which need a calm run: name one by --calm DIR"
        )
    console = Console(stderr=as_json)
    tail = EventTail(out.events)
    tail.read_new()
    hand_over_plan(out, plan)
    console.print(f"{len(plan.list_faults())} faults for {short(out.path)}", highlight=False, soft_wrap=True)
    with console.status("until the run ends; Ctrl-C leaves it alone"):
        for event in follow_attack(out, tail):
            console.print(str(event["text"]), highlight=False, soft_wrap=True, markup=False)
    _close(plan, out, performance.judge_run(plan, out, calm), console, as_json)


def _perform(plan: FaultPlan, out: RunDir, arguments: list[str], console: Console) -> None:
    with choose_screen(console) as view:

        def watch(status: RunStatus | None, events: Sequence[Event]) -> None:
            view.update(status, events)

        performance.run_plan(ChaosRun(plan, out, arguments, watch=watch, pages=dashboard.NAME, listens=view.show_link))
    write_summary(out, summarise(performance.read_events(out)), as_json=False)


def _close(plan: FaultPlan, out: RunDir, findings: list[Finding], console: Console, as_json: bool) -> None:
    ok = all(one.ok for one in findings)
    document: dict[str, Any] = {
        "ok": ok,
        "seed": plan.seed,
        "faults": len(plan.list_faults()),
        "findings": findings,
    }
    write_atomic(out.path / "verdict.json", msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    if as_json:
        print(msgspec.json.encode(document).decode())
    else:
        made = table(f"{len(plan.list_faults())} faults, seed {plan.seed}", "holds", "what", "asked", "found", words=2)
        for column in made.columns[2:]:
            column.justify = "left"
        for one in findings:
            made.add_row("[green]yes[/]" if one.ok else "[bold red]NO[/]", one.name, one.asked, one.found)
        console.print(made)
        console.print(f"see atoll report {short(out.path)}", highlight=False, soft_wrap=True)
    if not ok:
        raise SystemExit(1)


def load_settings(out: RunDir) -> Config:
    return convert(document_of(out.settings), str(out.settings))


def _print_faults(plan: FaultPlan) -> None:
    for fault in plan.list_faults():
        print(f"{fault.describe()}: {KINDS[fault.kind].says}")
    print(f"{len(plan.list_faults())} faults in {plan.seconds:g} s, seed {plan.seed}")
