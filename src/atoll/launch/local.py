"""A whole run on this machine: a syncer, M learners, an evaluator, and a supervisor that restarts what dies.

A syncer of several shards (docs/adr/0031) is several processes: the lead, and the others beside it.

The run is over when the syncer says so. Ctrl-C once: the run ends in good order, its last steps are collected and the
model is written; twice: everything is killed.

What becomes of a process that ended, supervision.py decides.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from atoll.config import Config
from atoll.fabric.transfer import get_json, make_dashboard_link
from atoll.launch.begun_here import remember_run
from atoll.launch.children import (
    LAST_S,
    LIMIT,
    SOON_S,
    TRAINS_ON_S,
    Child,
    cores,
    describe_exit,
    join_names,
)
from atoll.launch.environment import VISIBLE, Assignment, LaunchEnvironment, capture_environment, write_environment
from atoll.launch.ranks import RankProcesses
from atoll.launch.resume import Resume
from atoll.launch.scaling import Scaling
from atoll.launch.supervision import Killed, Supervision, describe_process
from atoll.protocol.errors import ConfigError, PeerError, RunFailed, Unreachable
from atoll.store.atomic import Appender, write_atomic
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import hold_run
from atoll.telemetry.events import AFTER_END, EventLog
from atoll.telemetry.status import RunStatus

TICK_S = 0.25
START_S = 60.0
"""How long the syncer may take to listen."""
SYNCER = ["-P", "-m", "atoll.syncer"]
"""-P: no module in the current folder takes the place of one of Python's own."""
RUNNER = ["-m", "atoll.launch.script"]
NEWCOMER_NICE = 4
"""The niceness of a learner that starts, and of its courier: a syncer that starts goes before it, everybody waits.
Once it trains it has `learner_nice`: on a crowded machine it leaves the processor to couriers and newcomers."""
SUCCESSOR_S = 8.0
"""A syncer that has run for so long has a successor made ready: the start of a run is crowded enough."""
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
    resume: Resume | None = None
    """Set: continue the run that is in the folder."""
    watch: Callable[[RunStatus | None], None] = lambda status: None
    """Called a few times a second with the newest status."""
    pages: str = ""
    """What makes the pages that the syncer serves beside (`--pages`); empty: none."""
    listens: Callable[[str], None] = lambda link: None
    """Called with a link to the dashboard that opens it once, as soon as the syncer listens."""
    route: Callable[[str], Awaitable[dict[str, str]]] | None = None
    """Called with the syncer's address; returns the address that each learner dials instead."""
    beside: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Runs beside the run, from the start of the learners to the end."""
    syncer_words: tuple[str, ...] = ()
    """More arguments for the syncer's command."""
    max_restarts: int = LIMIT
    """How often in a row a learner or the evaluator is started again."""
    devices: Assignment | None = None
    """Which process sees which GPUs; None: all of them see what this one does."""
    only_end: bool = False
    """The run's budget is spent: the syncer, of several shards, brings it to its end without learners."""
    launch: LaunchEnvironment | None = None
    """Where and with which variables the script was started first; None: here and now."""
    heeds_signals: bool = True
    """Ctrl-C and SIGTERM end the run; elsewhere somebody else says so."""
    start_s: float = START_S

    async def run(self) -> None:
        """Returns when the run has ended well; RunFailed or ConfigError when not. Nothing is touched before the run is
        ours alone."""
        with hold_run(self.out.path):
            await self._run_held()

    async def _run_held(self) -> None:
        self._last_port = self._find_last_port()
        self._prepare_folder()
        with Appender(self.out.events) as sink:
            self._events = EventLog(sink)
            command = [*SYNCER, str(self.out.path), *self._served]
            command += ["--port", str(self._last_port), "--or-any-port"] if self._last_port else []
            if self.resume is not None:
                command += [part for change in self.resume.changes for part in ("--set", change)]
                command += ["--reopen"] if self.resume.reopen else []
            self._syncer = self._make_syncer([sys.executable, *command])
            self._processes = Supervision(self.out, self._events, self._syncer, self.max_restarts)
            self._learners = self._processes.learners
            self._pending = list(self.kills)
            self._unshown = ""
            self._scaling = Scaling(self)
            try:
                await self._run_to_end()
            finally:
                for child in self._processes.list_children():
                    child.kill_all()

    def _find_last_port(self) -> int:
        """Where the run listened before: join links that were handed out, and dashboards, know it by that port. 0: it
        is new, or names its port itself."""
        if self.resume is None or self.config.service.port or self.config.service.keys:
            return 0
        return self.out.find_last_port()

    def _say_where(self, url: str) -> None:
        """Only where that is news."""
        if self._last_port in (0, urlsplit(url).port):
            return
        text = (
            f"port {self._last_port}, where the run listened before, is taken: it listens on another one now. Learners "
            f"that joined by a link need a fresh one: atoll tokens link --run {self.out.path}"
        )
        self._events.say("warning", text, {"process": "syncer"})

    def _prepare_folder(self) -> None:
        write_atomic(self.out.settings, self.config.toml())
        self.launch = self.launch or capture_environment()
        write_environment(self.out.path, self.launch)
        remember_run(self.config, self.launch)
        self.out.withdraw_address()
        self.out.summary.unlink(missing_ok=True)  # of an earlier end

    # ---- the course of a run --------------------------------------------------------------------------------------

    async def _run_to_end(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM) if self.heeds_signals else ():
            loop.add_signal_handler(number, self._processes.handle_interrupt)
        await self._start_processes()
        beside = asyncio.ensure_future(self.beside()) if self.beside is not None else None
        try:
            await self._supervise_until_over()
        finally:
            if beside is not None:
                beside.cancel()
                await asyncio.wait([beside])
        if (failure := self._processes.find_failure()) is not None:
            self._show_status(None)  # who failed, and where its traceback is
            raise failure
        if beside is not None and not beside.cancelled() and (error := beside.exception()) is not None:
            raise error
        await self._wait_for_scripts()
        self._show_status(None)

    async def _start_processes(self) -> None:
        self._start_child(self._syncer)
        listens_at = await self._wait_for_address()
        self._say_where(listens_at)  # on Ray the link that it is asked by has two addresses
        self._url = self._open_links(listens_at)
        await self._start_shards()
        self.listens(await self._make_dashboard_link())
        self.addresses = await self.route(self._url) if self.route is not None else {}
        if self.only_end:
            self._processes.ending = True
        else:
            self._start_learners()

    def _open_links(self, url: str) -> str:
        """The syncer listens there. Returns the address by which this supervisor asks it."""
        plain = [sys.executable, *SYNCER, str(self.out.path), *self._served]  # changes are made once
        self._syncer.command = [*plain, "--port", str(urlsplit(url).port)]
        return url

    def _look_at_processes(self) -> None:
        """Processes of this machine need no look before they are asked."""

    async def _supervise_until_over(self) -> None:
        self._look_at_processes()
        while (code := self._syncer.poll_exit()) != 0:
            self._processes.restart_syncer(code)
            self._processes.restart_shards()
            status = await self._fetch_status()
            self._show_status(status)
            self._let_newcomers_first(status)
            self._prepare_successor(status)
            self._kill_as_planned(status)
            self._processes.restart_dead()
            await self._scaling.follow(status)
            if self._processes.is_ending:
                self._processes.kill_without_step()
            await asyncio.sleep(TICK_S)
            self._look_at_processes()

    async def _start_shards(self) -> None:
        """The syncer's other processes; each keeps its address when it is started again, as the syncer does."""
        count = self.config.service.shards
        for number in range(2, count + 1):
            folder = RunDir.open_shard(self.out.shard(number).path, shared=self.config.service.share_files)
            folder.address.unlink(missing_ok=True)
            write_atomic(folder.settings, self.config.toml())
            command = [sys.executable, *SYNCER, str(folder.path), "--shard", f"{number}/{count}", "--join", self._url]
            name = f"shard-{number}"
            child = Child(name, [*command, "--port", "0"], self._common_env, self.out.log(name))
            child.obeys, child.waits_s = True, SOON_S
            self._processes.shards.append(child)
            self._start_child(child)
        for number, child in enumerate(self._processes.shards, start=2):
            url = await self._wait_for_address(child, self.out.shard(number))
            child.command = [*child.command[:-1], str(urlsplit(url).port)]

    async def _wait_for_address(self, child: Child | None = None, out: RunDir | None = None) -> str:
        """Of the syncer, or of a shard of it, once it has one."""
        child, out = child or self._syncer, out or self.out
        called = "the syncer" if child is self._syncer else child.name
        deadline = time.monotonic() + self.start_s
        while not out.address.exists():
            self._look_at_processes()
            code = child.poll_exit()
            if self._processes.interrupts and code is not None:
                raise Killed("stopped before the run began")
            if code is not None:
                words = self._processes.read_last_words(child)
                raise (ConfigError if code == 2 else RunFailed)(words or f"{called} died ({describe_exit(code)})")
            if time.monotonic() > deadline:
                raise RunFailed(f"{called} did not start within {self.start_s:g} s; its log is {child.log}")
            self._show_status(None)
            await asyncio.sleep(0.05)
        return out.address.read_text()

    async def _make_dashboard_link(self) -> str:
        try:
            return await make_dashboard_link(self._url, 2.0) if self.pages else f"{self.out.address.read_text()}/"
        except (PeerError, Unreachable):  # to look on is no part of the run: `atoll dashboard` asks again
            return f"{self.out.address.read_text()}/"

    def _start_learners(self) -> None:
        for index in range(self.config.protocol.learners):
            name = f"learner-{index}"
            self._learners[name] = self._make_learner(name)
        if self.evaluator:
            sees = {VISIBLE: ",".join(self.devices.evaluator)} if self.devices is not None else {}
            self._processes.scorer = self._make_script("evaluator", {**self._evaluator_env(), **sees}, ranks=1)
        if self.devices is not None:
            self._events.say("devices", self.devices.describe(evaluator=self.evaluator))
        for child in self._processes.list_scripts():
            self._start_child(child)
            for name in ("ATOLL_EXACT", "ATOLL_RUN"):
                child.env.pop(name, None)
            if self.config.ranks > 1 or self.config.protocol.learners == 1:
                child.env.pop("ATOLL_STATE", None)  # no peer has its state: a restart takes its own newest part
            else:
                child.env["ATOLL_STATE"] = ""  # a restart takes a peer's state, unless a drain saved its own

    def _learner_env(self, name: str) -> dict[str, str]:
        env = {"ATOLL_LEARNER": name, "ATOLL_ROLE": "learner", "ATOLL_FOLDER": str(self.out.learners / name)}
        env["ATOLL_STATE"] = ""  # nor does a first start, unless the run resumes (below)
        if self.devices is not None:
            found = re.fullmatch(r"learner-(\d+)", name)
            number = int(found[1]) if found else len(self._learners)
            env[VISIBLE] = ",".join(self.devices.devices_of(number))
        if name in self.addresses:
            env["ATOLL_SYNCER"] = self.addresses[name]
        if self.resume is not None and name in self.resume.states:
            env["ATOLL_STATE"] = str(self.resume.states[name])
            env["ATOLL_EXACT"] = "1" if self.resume.exact else "0"
            env["ATOLL_RUN"] = self.resume.run
        return env

    def _evaluator_env(self) -> dict[str, str]:
        return {"ATOLL_ROLE": "evaluator", "ATOLL_MODELS": str(self.out.path)}

    def _start_child(self, child: Child) -> None:
        child.start()
        self._events.say("started", f"{child.name} started", describe_process(child))

    async def _wait_for_scripts(self) -> None:
        """Scripts may have something to do after the run. The evaluator has not: its last score was waited for.
        Nor has a learner that was restarted and has not joined again."""
        if self._processes.scorer is not None:
            self._processes.scorer.kill_all()
        for name in self._learners.keys() - self._processes.here:
            if self._learners[name].restarts and self._learners[name].running:
                self._learners[name].kill_all()
                self._processes.abandon_restart(self._learners[name])
        if running := self._processes.list_running_learners():
            script = "script" if len(running) == 1 else "scripts"
            names = join_names(running)
            self._events.say("closing", f"waiting up to {LAST_S:g} s for the {script} of {names} to end")
            self._show_status(None)
        deadline, said = time.monotonic() + LAST_S, False
        while time.monotonic() < deadline:
            self._look_at_processes()
            self._processes.note_late_failures()
            if not any(child.running for child in self._processes.list_children()):
                return
            # A loop that looks at learner.done every few steps is soon out: only one that goes on is worth a warning.
            if not said and time.monotonic() > deadline - LAST_S + TRAINS_ON_S:
                said = self._processes.warn_of_loops()
                self._show_status(None)
            await asyncio.sleep(0.05)
        if running := self._processes.list_running_learners():
            text = f"{join_names(running)}: killed, as the script had not ended {LAST_S:g} s after the run"
            self._events.say("warning", text, {"process": running[0], "about": AFTER_END})

    def _show_status(self, status: RunStatus | None) -> None:
        """A failing screen is logged once and never ends the run."""
        try:
            self.watch(status)
        except Exception as error:  # of whatever kind: it only shows
            if not self._unshown:
                self._unshown = (
                    f"the run cannot be shown ({type(error).__name__}: {error!s:.200}); it goes on all the same"
                )
                self._events.say("warning", self._unshown)

    async def _fetch_status(self) -> RunStatus | None:
        if not self._syncer.running:
            return None
        try:
            status = msgspec.convert(await get_json(self._url, "/v1/status", 2.0), RunStatus)
        except (PeerError, Unreachable, msgspec.ValidationError):
            return None
        self._processes.ending = self._processes.ending or status.phase in ("ending", "finished")
        self._processes.note_progress(status)
        return self._tell_absences(status)

    def _tell_absences(self, status: RunStatus) -> RunStatus:
        """Why a learner that this supervisor started is not connected."""
        absence = self._processes.describe_absence
        learners = [
            msgspec.structs.replace(one, state=absence(one.learner, status.phase) or one.state)
            if one.state in ("away", "gone")
            else one
            for one in status.learners
        ]
        return msgspec.structs.replace(status, learners=tuple(learners))

    # ---- for those that do things to it ---------------------------------------------------------------------------

    @property
    def events(self) -> EventLog:
        return self._events

    @property
    def syncer(self) -> Child:
        return self._syncer

    @property
    def url(self) -> str:
        return self._url

    @property
    def processes(self) -> Supervision:
        return self._processes

    def find_learner(self, name: str) -> Child:
        """One that takes part; a new name joins."""
        if name not in self._learners:
            self._learners[name] = self._make_learner(name)
        return self._learners[name]

    def start_again(self, name: str) -> None:
        """A learner that left, or a new one, is started."""
        child = self.find_learner(name)
        if not child.running:
            self._processes.done.discard(name)
            self._processes.failed.pop(name, None)
            self._start_child(child)

    @property
    def shortfall(self) -> str:
        """What went wrong in a run that came to its end all the same; empty: nothing."""
        return self._processes.find_shortfall()

    def request_end(self, reason: str) -> None:
        """In good order."""
        self._processes.send_order(f"end {reason}")

    def _let_newcomers_first(self, status: RunStatus | None) -> None:
        """A learner that starts, and every courier, goes before those that train: it is soon done with starting."""
        for one in status.learners if status is not None else ():
            if one.state == "training" and one.learner in self._learners:
                self._learners[one.learner].give_way(self.config.learner_nice)
        if self._processes.scorer is not None and status is not None and status.validation_round is not None:
            self._processes.scorer.give_way(self.config.learner_nice)

    def _prepare_successor(self, status: RunStatus | None) -> None:
        """Once most of them train, for a while: what a syncer takes longest for is done before it is needed."""
        if status is None or self._processes.ending or self._syncer.running_s < SUCCESSOR_S:
            return
        if 2 * sum(one.state == "training" for one in status.learners) > self.config.protocol.learners:
            for child in (self._syncer, *self._processes.shards):
                child.prepare_successor()

    def _kill_as_planned(self, status: RunStatus | None) -> None:
        for kill in [k for k in self._pending if status is not None and status.progress >= k.at]:
            self._pending.remove(kill)
            child = self._learners.get(kill.learner)
            if child is not None and child.running:
                child.signal(signal.SIGKILL)
                text = f"{child.name} is sent SIGKILL, as --kill asked"
                self._events.say("killed", text, {"process": child.name})

    # ---- small things ---------------------------------------------------------------------------------------------

    @property
    def _served(self) -> list[str]:
        pages = ["--pages", self.pages] if self.pages else []
        return [*(["--evaluated"] if self.evaluator else []), *pages, *self.syncer_words]

    def _make_syncer(self, command: list[str]) -> Child:
        return Child("syncer", command, self._common_env, self.out.log("syncer"), obeys=True, waits_s=SOON_S)

    def _make_learner(self, name: str) -> Child:
        return self._make_script(name, self._learner_env(name), ranks=self.config.ranks)

    def _make_script(self, name: str, env: dict[str, str], ranks: int) -> Child:
        """What runs the script. One that expects ranks finds the variables of a group also where it is alone."""
        assert self.launch is not None
        hidden = self.config.algorithm == "data-parallel"
        make = partial(RankProcesses, count=ranks, hidden=hidden) if self.config.ranks > 1 else Child
        return make(
            name,
            [sys.executable, *RUNNER, *self.script],
            {**self.launch.find_missing(os.environ), **self._common_env, **env},
            self.out.log(name),
            nice=min(NEWCOMER_NICE, self.config.learner_nice),
            folder=self.launch.find_folder(),
            limit=self.max_restarts,
        )

    @property
    def _common_env(self) -> dict[str, str]:
        threads = str(max(1, cores() // (self.config.protocol.learners * self.config.ranks)))
        common = {
            "ATOLL_RUN_TOML": str(self.out.settings),
            "ATOLL_SEED": str(self.config.seed),
            "ATOLL_THREADS": threads,
            "OMP_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
        }
        if self.script == WORKLOAD:
            common["WORLD_SIZE"] = "1"  # a job that this supervisor is a rank of is not the learners'
        if self.config.init:
            common["ATOLL_INIT"] = str(Path(self.config.init).absolute())
        if hasattr(self, "_url"):
            common["ATOLL_SYNCER"] = self._url
        return common


def script_arguments(script: Path, arguments: list[str]) -> list[str]:
    if not script.is_file():
        raise ConfigError(f"there is no script {script}: give the path of a Python file")
    return [str(script), *arguments]
