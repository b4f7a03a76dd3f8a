"""A whole run on this machine: a syncer, M learners, an evaluator, and a supervisor that restarts what dies.

The run is over when the syncer says so. Ctrl-C once: the run ends in good order, its last steps are collected and the
model is written; twice: everything is killed. A learner that ends with exit code 2 found something wrong with what the
operator asked for: the run stops and says it. Any other death is an accident, and the learner is started again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from atoll.config import Config
from atoll.fabric.client import get_json
from atoll.launch.children import Child, describe_exit
from atoll.protocol.errors import ConfigError, PeerError, RunFailed, Unreachable
from atoll.store.atomic import Appender, write_atomic
from atoll.store.rundir import RunDir
from atoll.telemetry.events import EventLog
from atoll.telemetry.status import RunStatus

TICK_S = 0.25
START_S = 60.0
"""How long the syncer may take to listen."""
LAST_S = 30.0
"""How long the others may take to end after the syncer."""
WORKLOAD = ["-m", "atoll.workloads.builtin"]


@dataclass(frozen=True, slots=True)
class Kill:
    """A learner to be killed, once the run is so far. For demonstrations."""

    learner: str
    at: float
    """Progress of the run, in [0, 1]."""


@dataclass
class LocalRun:
    config: Config
    out: RunDir
    script: list[str] = field(default_factory=lambda: list(WORKLOAD))
    """What every learner runs: arguments of a Python interpreter."""
    evaluator: bool = True
    kills: tuple[Kill, ...] = ()
    watch: Callable[[RunStatus | None], None] = lambda status: None
    """Called a few times a second with the newest status."""

    async def run(self) -> None:
        """Returns when the run has ended well; RunFailed or ConfigError when not."""
        write_atomic(self.out.settings, self.config.toml())
        with Appender(self.out.events) as sink:
            self._events = EventLog(sink)
            self._syncer = self._child("syncer", ["-m", "atoll.syncer", str(self.out.path), *self._evaluated])
            self._learners: dict[str, Child] = {}
            self._scorer: Child | None = None
            self._pending = list(self.kills)
            self._interrupts = 0
            try:
                await self._through()
            finally:
                for child in self._everyone():
                    child.kill_all()

    # ---- the course of a run --------------------------------------------------------------------------------------

    async def _through(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        self._syncer.start()
        self._url = await self._listening()
        self._start_learners()
        while self._syncer.running:
            status = await self._status()
            self.watch(status)
            self._kill_as_planned(status)
            self._mend()
            await asyncio.sleep(TICK_S)
        code = self._syncer.ended()
        if code:
            raise RunFailed(f"the syncer died ({describe_exit(code)}): {self._syncer.last_words()}")
        await self._leave()
        self.watch(None)

    async def _listening(self) -> str:
        """The syncer's address, once it has one."""
        deadline = time.monotonic() + START_S
        while not self.out.address.exists():
            code = self._syncer.ended()
            if code is not None:
                words = self._syncer.last_words().removeprefix("atoll: ")
                raise (ConfigError if code == 2 else RunFailed)(words or f"the syncer died ({describe_exit(code)})")
            if time.monotonic() > deadline:
                raise RunFailed(f"the syncer did not start within {START_S:g} s; its log is {self._syncer.log}")
            self.watch(None)
            await asyncio.sleep(0.05)
        return self.out.address.read_text()

    def _start_learners(self) -> None:
        for index in range(self.config.protocol.learners):
            name = f"learner-{index}"
            self._learners[name] = self._child(name, self.script, {"ATOLL_LEARNER": name, "ATOLL_ROLE": "learner"})
        if self.evaluator:
            self._scorer = self._child("evaluator", self.script, {"ATOLL_ROLE": "evaluator"}, nice=10)
        for child in self._everyone()[1:]:
            child.start()
            assert child.process is not None
            self._events.say("started", f"{child.name} started", {"process": child.name, "pid": child.process.pid})

    async def _leave(self) -> None:
        deadline = time.monotonic() + LAST_S
        while any(child.running for child in self._everyone()) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def _status(self) -> RunStatus | None:
        try:
            return msgspec.convert(await get_json(self._url, "/v1/status", 2.0), RunStatus)
        except (PeerError, Unreachable):
            return None

    # ---- accidents --------------------------------------------------------------------------------------------------

    def _mend(self) -> None:
        for child in [*self._learners.values(), *([self._scorer] if self._scorer else [])]:
            code = child.ended()
            if code is not None:
                self._bury(child, code)
            elif child.restart_if_due():
                self._events.say("restarted", f"{child.name} was started again", {"process": child.name})
        learners = self._learners.values()
        if all(not child.running and not child.waiting for child in learners) and any(c.given_up for c in learners):
            raise RunFailed(f"every learner died too often; their logs are in {self.out.logs}")

    def _bury(self, child: Child, code: int) -> None:
        data: dict[str, object] = {"process": child.name, "code": code}
        self._events.say("exited", f"{child.name} ended: {describe_exit(code)}", data)
        if code == 0:
            return
        if code == 2:
            raise ConfigError(child.last_words().removeprefix("atoll: "))
        if not child.restart_later():
            self._events.say("warning", f"{child.name} died too often and is given up: {child.last_words()}", data)

    def _kill_as_planned(self, status: RunStatus | None) -> None:
        for kill in [k for k in self._pending if status is not None and status.progress >= k.at]:
            self._pending.remove(kill)
            child = self._learners.get(kill.learner)
            if child is not None and child.running:
                child.signal(signal.SIGKILL)
                text = f"{child.name} was killed (SIGKILL), as this demonstration does"
                self._events.say("killed", text, {"process": child.name})

    def _interrupt(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self._events.say("warning", "asked to end: the last steps are collected; once more to kill everything")
            self._syncer.signal(signal.SIGTERM)
        else:
            for child in self._everyone():
                child.kill_all()

    # ---- small things -------------------------------------------------------------------------------------------------

    @property
    def _evaluated(self) -> list[str]:
        return ["--evaluated"] if self.evaluator else []

    def _everyone(self) -> list[Child]:
        return [self._syncer, *self._learners.values(), *([self._scorer] if self._scorer else [])]

    def _child(self, name: str, arguments: list[str], env: dict[str, str] | None = None, nice: int = 0) -> Child:
        threads = str(max(1, (os.cpu_count() or 1) // self.config.protocol.learners))
        common = {
            "ATOLL_RUN_TOML": str(self.out.settings),
            "ATOLL_SEED": str(self.config.seed),
            "ATOLL_THREADS": threads,
            "OMP_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
        }
        if hasattr(self, "_url"):
            common["ATOLL_SYNCER"] = self._url
        command = [sys.executable, *arguments]
        return Child(name, command, {**common, **(env or {})}, self.out.log(name), nice)


def script_arguments(script: Path, arguments: list[str]) -> list[str]:
    if not script.is_file():
        raise ConfigError(f"there is no script {script}: give the path of a Python file")
    return [str(script), *arguments]
