"""Run a plan of faults against a local run and judge it; the verdict may need the same run without faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from atoll.chaos.inject import Injector
from atoll.chaos.plan import FaultPlan
from atoll.chaos.trouble import DISK, NAME
from atoll.chaos.verdict import Finding, judge
from atoll.launch.local import WORKLOAD, LocalRun
from atoll.observe.tail import EventTail
from atoll.store.event_parts import read_lines
from atoll.store.rundir import RunDir
from atoll.store.verify import verify_run
from atoll.telemetry.events import Event, parse
from atoll.telemetry.status import RunStatus

TRACEBACK = b"Traceback (most recent call last)"
WatchRun = Callable[[RunStatus | None, Sequence[Event]], None]


@dataclass
class ChaosRun:
    plan: FaultPlan
    out: RunDir
    script: list[str] = field(default_factory=lambda: list(WORKLOAD))
    watch: WatchRun = lambda status, events: None
    pages: str = ""
    listens: Callable[[str], None] = lambda url: None
    timed: bool = False
    """It ends with its plan, whatever is left of its budget."""

    async def run(self) -> Injector:
        injector = Injector(self.plan, self.out.path / NAME)
        injector.timed = self.timed
        tail = EventTail(self.out.events)

        def look(status: RunStatus | None) -> None:
            events = tail.read_new()
            injector.take_event_kinds({event["kind"] for event in events})
            injector.take_status(status)
            self.watch(status, events)

        injector.run = LocalRun(
            self.plan.config,
            self.out,
            script=self.script,
            evaluator=self.plan.config.service.evaluate_every > 0,
            watch=look,
            route=injector.open_relays,
            beside=injector.run_beside,
            pages=self.pages,
            listens=self.listens,
            syncer_words=("--disk", DISK),
        )
        try:
            await injector.run.run()
        finally:
            await injector.close_relays()
        return injector


def run_plan(performance: ChaosRun) -> Injector:
    return asyncio.run(performance.run())


def without_faults(plan: FaultPlan) -> FaultPlan:
    """The same run, nothing happens to it."""
    return msgspec.structs.replace(plan, fault=(), rates={})


def judge_run(plan: FaultPlan, out: RunDir, calm: Sequence[RunDir]) -> list[Finding]:
    report = verify_run(out.path)
    return judge(
        plan.verdict,
        read_events(out),
        verified="" if report.ok else report.problem,
        logs=find_tracebacks(out),
        calm=[read_events(one) for one in calm],
    )


def read_events(out: RunDir) -> list[Event]:
    return sorted(parse(read_lines(out.events)), key=lambda event: float(event["at"]))


def find_tracebacks(out: RunDir) -> list[str]:
    """Logs in which somebody died of an error; not the extra learner's, whose part it is to misbehave."""
    return [f"a traceback in {path.name}" for path in _logs(out.logs) if TRACEBACK in path.read_bytes()]


def _logs(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.log") if path.stem != "rogue")
