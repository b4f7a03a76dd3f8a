"""A whole run on this machine: a syncer, M learners, an evaluator, and a supervisor that restarts what dies.

The run is over when the syncer says so. Ctrl-C once: the run ends in good order, its last steps are collected and the
model is written; twice: everything is killed.

What becomes of a process that ended:
- a learner with exit code 0 is done; when the last one is, the run ends;
- a learner with exit code 2 found something wrong that a restart cannot mend: it is left out and the others go on; when
  none is left, the run fails with its words;
- a mistake in the script ends the run at once: a wrong call of Atoll's API, the same exception on every learner before
  anybody made a step, an exception of the scorer, or a return that is no score, before the first score;
- any other death is an accident: learner, evaluator or syncer is started again after a wait, up to a limit;
- a new syncer listens where the old one did, reads the journal and goes on; learners find it by themselves.
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
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from atoll.config import Config
from atoll.fabric.transfer import get_json, make_dashboard_link
from atoll.launch.children import (
    LAST_S,
    LIMIT,
    SOON_S,
    Child,
    ScriptError,
    cores,
    describe_exit,
    find_shared_error,
    read_script_error,
)
from atoll.launch.environment import VISIBLE, Assignment, LaunchEnvironment, capture_environment, write_environment
from atoll.launch.resume import EVERYONE_ENDED, Resume, describe_resume
from atoll.launch.script import USAGE
from atoll.protocol.errors import AtollError, ConfigError, PeerError, RunFailed, Unreachable
from atoll.store.atomic import Appender, write_atomic
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import hold_run
from atoll.telemetry.events import EventLog
from atoll.telemetry.status import AWAY, RunStatus

TICK_S = 0.25
SAME_INTERRUPT_S = 0.5
"""Two interrupts so close to each other are one: nobody presses Ctrl-C so fast to have everything killed."""
SAME_MISTAKE_S = 5.0
"""So long the learners have to fail as the evaluator did, before the mistake is taken for the evaluator's own."""
START_S = 60.0
"""How long the syncer may take to listen."""
SYNCER = ["-P", "-m", "atoll.syncer"]
"""-P: no module in the current folder takes the place of one of Python's own."""
RUNNER = ["-m", "atoll.launch.script"]
NEWCOMER_NICE = 4
"""The niceness of a learner that starts, and of its courier: a syncer that starts goes before it, everybody waits."""
TRAINING_NICE = 9
"""Once it trains: on a crowded machine it leaves the processor to couriers and newcomers."""
SUCCESSOR_S = 8.0
"""A syncer that has run for so long has a successor made ready: the start of a run is crowded enough."""
WORKLOAD = ["-m", "atoll.workloads.builtin"]
UNWRITABLE = 4
"""A syncer whose disk failed ends with this code: starting it again would not mend the disk."""


class Killed(RunFailed):
    """The operator did not want to wait for a good end."""

    exit_code = 130


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
    launch: LaunchEnvironment | None = None
    """Where and with which variables the script was started first; None: here and now."""

    async def run(self) -> None:
        """Returns when the run has ended well; RunFailed or ConfigError when not. Nothing is touched before the run is
        ours alone."""
        with hold_run(self.out.path):
            await self._run_held()

    async def _run_held(self) -> None:
        write_atomic(self.out.settings, self.config.toml())
        self.launch = self.launch or capture_environment()
        write_environment(self.out.path, self.launch)
        self.out.address.unlink(missing_ok=True)
        self.out.summary.unlink(missing_ok=True)  # of an earlier end
        with Appender(self.out.events) as sink:
            self._events = EventLog(sink)
            command = [*SYNCER, str(self.out.path), *self._served]
            if self.resume is not None:
                command += [part for change in self.resume.changes for part in ("--set", change)]
                command += ["--reopen"] if self.resume.reopen else []
            self._syncer = self._make_child("syncer", command)
            self._syncer.obeys, self._syncer.waits_s = True, SOON_S
            self._learners: dict[str, Child] = {}
            self._scorer: Child | None = None
            self._done: set[str] = set()
            self._pending = list(self.kills)
            self._interrupts, self._interrupted_at = 0, 0.0
            self._blame_scorer_at = inf
            self._orders: list[str] = []
            self._ending = False
            self._refusal = self._unshown = ""
            self._failure: AtollError | None = None
            self._mended = ""
            """What leads over to the command that goes on with a failed run."""
            self._errors: dict[str, ScriptError] = {}
            """By process, what its script failed with last."""
            self._here: set[str] = set()
            """Learners that joined since they were started last."""
            self._without_step: set[str] = set()
            """Learners that have been here for long and made no step."""
            self._first_tokens: int | None = None
            self._stepped = self._scored = self._joined = False
            """Since this supervisor started."""
            self._failed: dict[str, str] = {}
            """Learners that will not come back, with their last words."""
            try:
                await self._run_to_end()
            finally:
                for child in self._list_children():
                    child.kill_all()

    # ---- the course of a run --------------------------------------------------------------------------------------

    async def _run_to_end(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._handle_interrupt)
        self._start_child(self._syncer)
        self._url = await self._wait_for_address()
        self.listens(await self._make_dashboard_link())
        plain = [sys.executable, *SYNCER, str(self.out.path), *self._served]  # changes are made once
        self._syncer.command = [*plain, "--port", str(urlsplit(self._url).port)]
        self.addresses = await self.route(self._url) if self.route is not None else {}
        self._start_learners()
        beside = asyncio.ensure_future(self.beside()) if self.beside is not None else None
        try:
            await self._supervise_until_over()
        finally:
            if beside is not None:
                beside.cancel()
                await asyncio.wait([beside])
        if self._failure is not None:
            raise self._failure if not self._mended else RunFailed(self._describe_failure())
        if beside is not None and not beside.cancelled() and (error := beside.exception()) is not None:
            raise error
        await self._wait_for_scripts()
        self._show_status(None)

    def _describe_failure(self) -> str:
        """With the command that goes on with the run: what that needs is known at the end."""
        return f"{self._failure}{self._mended}{describe_resume(self.out)}"

    async def _supervise_until_over(self) -> None:
        while (code := self._syncer.poll_exit()) != 0:
            self._restart_syncer(code)
            status = await self._fetch_status()
            self._show_status(status)
            self._let_newcomers_first(status)
            self._prepare_successor(status)
            self._kill_as_planned(status)
            self._restart_dead()
            if self._is_ending:
                self._kill_without_step()
            await asyncio.sleep(TICK_S)

    async def _wait_for_address(self) -> str:
        """The syncer's address, once it has one."""
        deadline = time.monotonic() + START_S
        while not self.out.address.exists():
            code = self._syncer.poll_exit()
            if self._interrupts and code is not None:
                raise Killed("stopped before the run began")
            if code is not None:
                words = self._read_last_words(self._syncer)
                raise (ConfigError if code == 2 else RunFailed)(words or f"the syncer died ({describe_exit(code)})")
            if time.monotonic() > deadline:
                raise RunFailed(f"the syncer did not start within {START_S:g} s; its log is {self._syncer.log}")
            self._show_status(None)
            await asyncio.sleep(0.05)
        return self.out.address.read_text()

    async def _make_dashboard_link(self) -> str:
        try:
            return await make_dashboard_link(self._url, 2.0) if self.pages else f"{self._url}/"
        except (PeerError, Unreachable):  # to look on is no part of the run: `atoll dashboard` asks again
            return f"{self._url}/"

    def _start_learners(self) -> None:
        script = [*RUNNER, *self.script]
        for index in range(self.config.protocol.learners):
            name = f"learner-{index}"
            self._learners[name] = self._make_child(name, script, self._learner_env(name))
        if self.evaluator:
            sees = {VISIBLE: ",".join(self.devices.evaluator)} if self.devices is not None else {}
            self._scorer = self._make_child("evaluator", script, {**self._evaluator_env(), **sees})
        if self.devices is not None:
            self._events.say("devices", self.devices.describe(evaluator=self.evaluator))
        for child in self._list_children()[1:]:
            self._start_child(child)
            for name in ("ATOLL_EXACT", "ATOLL_RUN"):
                child.env.pop(name, None)
            child.env["ATOLL_STATE"] = ""  # a restart continues from no saved part: it takes a peer's state

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
        return {"ATOLL_ROLE": "evaluator", "ATOLL_BEST": str(self.out.best_model)}

    def _start_child(self, child: Child) -> None:
        child.start()
        assert child.process is not None
        self._events.say("started", f"{child.name} started", {"process": child.name, "pid": child.process.pid})

    async def _wait_for_scripts(self) -> None:
        """Scripts may have something to do after the run. The evaluator has not: its last score was waited for.
        Nor has a learner that was restarted and has not joined again."""
        if self._scorer is not None:
            self._scorer.kill_all()
        for name in self._learners.keys() - self._here:
            if self._learners[name].restarts and self._learners[name].running:
                self._learners[name].kill_all()
                self._abandon_restart(self._learners[name])
        if running := [name for name, child in self._learners.items() if child.running]:
            whose = "script has" if len(running) == 1 else "scripts have"
            self._events.say("closing", f"waiting for {', '.join(running)}: the {whose} not ended yet")
            self._show_status(None)
        deadline = time.monotonic() + LAST_S
        while time.monotonic() < deadline:
            self._note_late_failures()
            if not any(child.running for child in self._list_children()):
                break
            await asyncio.sleep(0.05)

    def _kill_without_step(self) -> None:
        """Only learner.step tells a script that the run ends: one that never calls it would hold up the end."""
        for name in self._without_step:
            if name in self._learners and self._learners[name].running:
                self._learners[name].kill_all()
                self._log_warning(self._learners[name], f"{name} was killed: its script never called learner.step()")

    def _note_late_failures(self) -> None:
        """Of scripts that were to be started again when the run ended, or fail in what they do after it."""
        for child in self._learners.values():
            code = child.poll_exit()
            if code is not None and code > 0:
                self._say_exited(child, code)
                self._note_failure(child, code)
            elif code is None and child.waiting:
                self._abandon_restart(child)

    def _note_failure(self, child: Child, code: int) -> None:
        """Its script failed, and the run ends without it. What Atoll itself had to say ended it in good order."""
        if child.name in self._errors or code not in (1, ConfigError.exit_code, Killed.exit_code):
            self._failed[child.name] = self._read_last_words(child) or describe_exit(code)

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
        self._ending = self._ending or status.phase in ("ending", "finished")
        self._note_progress(status)
        return self._tell_absences(status)

    def _tell_absences(self, status: RunStatus) -> RunStatus:
        """Why a learner that this supervisor started is not connected."""
        learners = [
            msgspec.structs.replace(one, state=self._absence(one.learner, status.phase)) if one.state == "gone" else one
            for one in status.learners
        ]
        return msgspec.structs.replace(status, learners=tuple(learners))

    def _absence(self, name: str, phase: str) -> str:
        child = self._learners.get(name)
        if child is None:
            return "gone"
        if name in self._done or (phase == "finished" and child.running):
            return "done"
        restarts = not self._is_ending and (child.waiting or (child.running and child.restarts > 0))
        return "restarting" if restarts else "gone"

    def _note_progress(self, status: RunStatus) -> None:
        if self._first_tokens is None:
            self._first_tokens = status.tokens  # of a run that goes on
        self._stepped = self._stepped or status.tokens > self._first_tokens
        self._scored = self._scored or status.validation_round is not None
        self._joined = self._joined or bool(status.learners)
        self._here |= {one.learner for one in status.learners if one.state not in AWAY}
        self._without_step |= {one.learner for one in status.learners if one.state == "stalled"}
        self._without_step -= {one.learner for one in status.learners if one.step}

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
    def shortfall(self) -> str:
        """What went wrong in a run that came to its end all the same; empty: nothing."""
        if self._failed:
            name, words = next(iter(self._failed.items()))
            others = f" (and {len(self._failed) - 1} more)" if len(self._failed) > 1 else ""
            return f"{name}{others} failed and did not come back: {words}; its log is {self.out.log(name)}"
        if not self._joined and not self._interrupts:
            return (
                "no learner joined the run: the script has to train inside 'with atoll.Learner(model, optimizer) as "
                f"learner:'; what it printed is in {self.out.logs}"
            )
        return ""

    def find_learner(self, name: str) -> Child:
        """One that takes part; a new name joins."""
        if name not in self._learners:
            self._learners[name] = self._make_child(name, [*RUNNER, *self.script], self._learner_env(name))
        return self._learners[name]

    def start_again(self, name: str) -> None:
        """A learner that left, or a new one, is started."""
        child = self.find_learner(name)
        if not child.running:
            self._done.discard(name)
            self._failed.pop(name, None)
            self._start_child(child)

    def request_end(self, reason: str) -> None:
        """In good order."""
        self._send_order(f"end {reason}")

    # ---- accidents --------------------------------------------------------------------------------------------------

    def _restart_syncer(self, code: int | None) -> None:
        if code is None:
            if self._restart_if_due(self._syncer):
                for line in self._orders:
                    self._syncer.send_order(line)
            return
        self._say_exited(self._syncer, code)
        if self._interrupts > 1:
            raise Killed("everything was killed, as asked; the last steps are not in the model")
        if code == UNWRITABLE or not self._syncer.restart_later():
            raise RunFailed(f"the syncer died ({describe_exit(code)}): {self._read_last_words(self._syncer)}")

    def _restart_dead(self) -> None:
        for child in self._list_children()[1:]:
            code = child.poll_exit()
            if code is None:
                if child is self._scorer or not self._is_ending:
                    self._restart_if_due(child)
                elif child.waiting:
                    self._abandon_restart(child)
                continue
            self._say_exited(child, code)
            if child is self._scorer:
                self._handle_exit_of_scorer(child, code)
            else:
                self._handle_exit_of_learner(child, code)
        if self._scorer is not None and (self._interrupts or time.monotonic() >= self._blame_scorer_at):
            self._blame_scorer(self._scorer)
        if not any(child.running or child.waiting for child in self._learners.values()):
            self._end_without_learners()

    @property
    def _is_ending(self) -> bool:
        """Learners that die now are not restarted: a restart takes longer than the run, and the end would wait for
        it."""
        return self._ending or any(order.startswith("end ") for order in self._orders)

    def _abandon_restart(self, child: Child) -> None:
        """It will not be back in time. That is a failure where its script failed before."""
        child.cancel_restart()
        self._note_failure(child, 1)

    def _restart_if_due(self, child: Child) -> bool:
        due = child.restart_if_due()
        if due:
            assert child.process is not None
            self._here.discard(child.name)
            data: dict[str, object] = {"process": child.name, "pid": child.process.pid}
            self._events.say("restarted", f"{child.name} was started again", data)
        return due

    def _send_order(self, line: str) -> None:
        """To the syncer; one that takes over from a dead one hears it again."""
        self._orders.append(line)
        self._syncer.send_order(line)

    def _say_exited(self, child: Child, code: int) -> None:
        """With the cause, where its log ends with one. Where to read on is said once for every mistake."""
        error = read_script_error(child.read_log_tail()) if code in (1, USAGE) else None
        how = "" if code == ConfigError.exit_code else f": {describe_exit(code)}"  # a warning with its words follows
        text = f"failed: {error.summary}" if error is not None else f"ended{how}"
        self._events.say("exited", f"{child.name} {text}", {"process": child.name, "code": code})
        if error is None:
            self._errors.pop(child.name, None)
            return
        if not any(error.is_same_mistake(known) for known in self._errors.values()):
            self._log_warning(child, f"the whole traceback is in {child.log}")
        self._errors[child.name] = error

    def _handle_exit_of_learner(self, child: Child, code: int) -> None:
        if code == 0:
            self._done.add(child.name)
        elif code == USAGE:
            self._fail_with_script(child, "the script calls Atoll wrongly")
        elif code == 2:
            self._log_warning(child, f"{child.name} cannot take part: {self._read_last_words(child)}")
            self._refusal = self._refusal or self._read_last_words(child)
        elif when := self._find_hopeless_error():
            self._fail_with_script(child, f"the script failed on every learner {when}")
        elif self._is_ending:
            if code > 0:
                self._note_failure(child, code)
        elif not child.restart_later():
            self._log_warning(child, f"{child.name} {self._died} and is given up: {self._read_last_words(child)}")
            self._failed[child.name] = self._read_last_words(child)

    def _find_hopeless_error(self) -> str:
        """When every learner failed in the same way, so that restarts would only repeat it; empty: they did not."""
        shared = find_shared_error(self._errors.get(name) for name in self._learners)
        if shared is None:
            return ""
        if not self._stepped:
            return "before its first step"
        again = shared.is_in_code and all(child.restarts for child in self._learners.values())
        return "and again after a restart" if again else ""

    @property
    def _died(self) -> str:
        return "died too often" if self.max_restarts else "died"

    def _fail_with_script(self, child: Child, what: str) -> None:
        """The run ends in good order, with what was merged so far."""
        if self._failure is not None or self._interrupts:
            return
        self._failure = RunFailed(f"{what}: {self._read_last_words(child)}. The whole traceback is in {child.log}")
        self._mended = "; once the script is mended, the run goes on with: "
        self._ending = True
        for one in self._list_children()[1:]:
            one.cancel_restart()
        self._send_order("unscored")
        self._send_order("end its script failed")

    def _handle_exit_of_scorer(self, child: Child, code: int) -> None:
        if child.name in self._errors and (code == USAGE or not self._scored):
            self._blame_scorer_at = time.monotonic() + (0.0 if code == USAGE or self._joined else SAME_MISTAKE_S)
            return
        if self._failure is not None:
            return
        if code not in (0, 2) and child.restart_later():
            return
        if code != 0:
            never = "" if self._scored else "the model is not scored"
            self._log_warning(child, f"{never or 'the model is not scored any more'}: {self._read_last_words(child)}")
        self._send_order("unscored")

    def _blame_scorer(self, child: Child) -> None:
        if self._blame_scorer_at == inf:
            return
        self._blame_scorer_at = inf
        self._fail_with_script(child, "the script failed in the evaluator before its first score")
        if self._failure is None:  # the run was asked to end: it waits for no score
            self._send_order("unscored")

    def _end_without_learners(self) -> None:
        """The syncer writes down what there is; a run that nobody finished has failed."""
        if self._is_ending:
            return
        self._ending = True
        if self._done:
            self._send_order(f"end {EVERYONE_ENDED}")
            return
        words = next((f" ({words})" for words in self._failed.values() if words), "")
        self._failure = (
            ConfigError(self._refusal)
            if self._refusal
            else RunFailed(f"every learner {self._died}{words}; their logs are in {self.out.logs}")
        )
        self._mended = "" if self._refusal else ". Once they are mended, it goes on with: "
        self._send_order("unscored")
        self._send_order("end no learner is left")

    def _let_newcomers_first(self, status: RunStatus | None) -> None:
        """A learner that starts, and every courier, goes before those that train: it is soon done with starting."""
        for one in status.learners if status is not None else ():
            if one.state == "training" and one.learner in self._learners:
                self._learners[one.learner].give_way(TRAINING_NICE)
        if self._scorer is not None and status is not None and status.validation_round is not None:
            self._scorer.give_way(TRAINING_NICE)

    def _prepare_successor(self, status: RunStatus | None) -> None:
        """Once most of them train, for a while: what a syncer takes longest for is done before it is needed."""
        if status is None or self._ending or self._syncer.running_s < SUCCESSOR_S:
            return
        if 2 * sum(one.state == "training" for one in status.learners) > self.config.protocol.learners:
            self._syncer.prepare_successor()

    def _kill_as_planned(self, status: RunStatus | None) -> None:
        for kill in [k for k in self._pending if status is not None and status.progress >= k.at]:
            self._pending.remove(kill)
            child = self._learners.get(kill.learner)
            if child is not None and child.running:
                child.signal(signal.SIGKILL)
                text = f"{child.name} was killed (SIGKILL), as this demonstration does"
                self._events.say("killed", text, {"process": child.name})

    def _handle_interrupt(self) -> None:
        now = time.monotonic()
        if self._interrupts == 1 and now < self._interrupted_at + SAME_INTERRUPT_S:
            return  # `timeout` signals a process and then its group
        self._interrupts, self._interrupted_at = self._interrupts + 1, now
        if self._interrupts == 1:
            self._events.say("warning", "asked to end: the last steps are collected; once more to kill everything")
            self._send_order("end the operator asked for it")
        else:
            for child in self._list_children():
                child.kill_all()

    # ---- small things ---------------------------------------------------------------------------------------------

    @property
    def _served(self) -> list[str]:
        pages = ["--pages", self.pages] if self.pages else []
        return [*(["--evaluated"] if self.evaluator else []), *pages, *self.syncer_words]

    def _log_warning(self, child: Child, text: str) -> None:
        self._events.say("warning", text, {"process": child.name})

    def _read_last_words(self, child: Child) -> str:
        """Why it ended: the exception of its script, else the last line of its log."""
        if (error := self._errors.get(child.name)) is not None:
            return error.summary
        return child.last_words().removeprefix("atoll: ")

    def _list_children(self) -> list[Child]:
        return [self._syncer, *self._learners.values(), *([self._scorer] if self._scorer else [])]

    def _make_child(self, name: str, arguments: list[str], env: dict[str, str] | None = None) -> Child:
        threads = str(max(1, cores() // self.config.protocol.learners))
        common = {
            "ATOLL_RUN_TOML": str(self.out.settings),
            "ATOLL_SEED": str(self.config.seed),
            "ATOLL_THREADS": threads,
            "OMP_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
        }
        if self.config.init:
            common["ATOLL_INIT"] = str(Path(self.config.init).absolute())
        if hasattr(self, "_url"):
            common["ATOLL_SYNCER"] = self._url
        command = [sys.executable, *arguments]
        if name == "syncer":
            return Child(name, command, {**common, **(env or {})}, self.out.log(name))
        assert self.launch is not None
        return Child(
            name,
            command,
            {**self.launch.find_missing(os.environ), **common, **(env or {})},
            self.out.log(name),
            nice=NEWCOMER_NICE,
            folder=self.launch.find_folder(),
            limit=self.max_restarts,
        )


def script_arguments(script: Path, arguments: list[str]) -> list[str]:
    if not script.is_file():
        raise ConfigError(f"there is no script {script}: give the path of a Python file")
    return [str(script), *arguments]
