"""What becomes of a run's processes that ended, as its supervisor (local.py) decides.

- a learner with exit code 0 is done, as is one that SIGTERM ended before it joined and that says so: a script's own
  handler may end with 143 at any time; when the last one is done, the run ends;
- a learner with exit code 2 found something wrong that a restart cannot mend: it is left out and the others go on; when
  none is left, the run fails with its words;
- a mistake in the script ends the run at once: a wrong call of Atoll's API, the same exception on every learner before
  anybody made a step, the same mistake in the code on every learner after each was restarted;
- an evaluator that fails is started again like a learner, but a mistake in its code is not repeated: the run goes on
  without scores, and a warning says so;
- a learner that was asked to leave (`atoll scale`) is gone for good, however it ended;
- a learner of several ranks (ranks.py) is one process in all of this; what is said names the rank;
- a script that has not ended `LAST_S` after its run is killed; one whose loop trains on then is named in a warning;
- any other death is an accident: learner, evaluator or syncer is started again after a wait, up to a limit. Once the
  run is ending, no learner is;
- a new syncer listens where the old one did, reads the journal and goes on; learners find it by themselves. So does
  another shard of a syncer: no round is committed until it is back, and the others go on as they are.
"""

from __future__ import annotations

import signal
import time

from atoll.launch.children import Child, ScriptError, describe_exit, find_shared_error, join_names, read_script_error
from atoll.launch.resume import EVERYONE_ENDED, describe_resume
from atoll.launch.script import USAGE
from atoll.learner.folder import list_parts
from atoll.learner.script import TERMINATED, tells_trains_on, tells_unjoined
from atoll.protocol.errors import AtollError, ConfigError, RunFailed
from atoll.store.rundir import RunDir
from atoll.telemetry.events import AFTER_END, EventLog
from atoll.telemetry.status import AWAY, LearnerStatus, RunStatus

SAME_INTERRUPT_S = 0.5
"""Two interrupts so close to each other are one: nobody presses Ctrl-C so fast to have everything killed."""
LEAVE_S = 120.0
"""A learner that was asked to leave and is still there after this is killed."""
FIRST_STEP_S = 10.0
"""The end of a run does not wait for a learner whose first step takes longer: it has nothing to give."""
UNWRITABLE = 4
"""A syncer whose disk failed ends with this code: starting it again would not mend the disk."""


class Killed(RunFailed):
    """The operator did not want to wait for a good end."""

    exit_code = 130


class Supervision:
    """The processes of one run. Belongs to one event loop."""

    def __init__(self, out: RunDir, events: EventLog, syncer: Child, max_restarts: int) -> None:
        self._out, self._max_restarts = out, max_restarts
        self._events = events
        self.syncer = syncer
        self.shards: list[Child] = []
        """The syncer's others, where it has several."""
        self.learners: dict[str, Child] = {}
        self.scorer: Child | None = None
        self.done: set[str] = set()
        self._leaving: dict[str, float] = {}
        """Learners that were asked to leave, and when they are killed if they have not."""
        self._removed: set[str] = set()
        """Those that have left."""
        self.interrupts, self._interrupted_at = 0, 0.0
        self._orders: list[str] = []
        self.ending = False
        self._refusal = ""
        self._failure: AtollError | None = None
        self._mended = ""
        """The words between the failure and the command that resumes the run; empty: none is named."""
        self._errors: dict[str, ScriptError] = {}
        """By process, what its script failed with last."""
        self.here: set[str] = set()
        """Learners that joined since they were started last."""
        self._without_step: set[str] = set()
        """Learners that have been here for long and made no step."""
        self._first_tokens: int | None = None
        self._stepped = self._scored = self._joined = False
        """Since this supervisor started."""
        self.failed: dict[str, str] = {}
        """Learners that will not come back, with their last words."""

    # ---- the processes, and what is heard of them -------------------------------------------------------------------

    def list_children(self) -> list[Child]:
        return [self.syncer, *self.shards, *self.list_scripts()]

    def list_scripts(self) -> list[Child]:
        """Learners, and the evaluator."""
        return [*self.learners.values(), *([self.scorer] if self.scorer else [])]

    def send_order(self, line: str) -> None:
        """To the syncer; one that takes over from a dead one hears it again."""
        self._orders.append(line)
        self.syncer.send_order(line)

    def note_progress(self, status: RunStatus) -> None:
        if self._first_tokens is None:
            self._first_tokens = status.tokens  # of a run that goes on
        self._stepped = self._stepped or status.tokens > self._first_tokens
        self._scored = self._scored or status.validation_round is not None
        self._joined = self._joined or bool(status.learners)
        self.here |= {one.learner for one in status.learners if one.state not in AWAY}
        self._without_step |= {one.learner for one in status.learners if _makes_no_step(one)}
        self._without_step -= {one.learner for one in status.learners if one.step}

    def describe_absence(self, name: str, phase: str) -> str:
        """Return the state of a learner that is not connected; empty: it is not known here."""
        child = self.learners.get(name)
        if child is None:
            return "done" if name in self._removed else ""
        if name in self.done or (phase == "finished" and child.running):
            return "done"
        restarts = not self.is_ending and (child.waiting or (child.running and child.restarts > 0))
        return "restarting" if restarts else "away" if child.running else "gone"

    def handle_interrupt(self) -> None:
        now = time.monotonic()
        if self.interrupts == 1 and now < self._interrupted_at + SAME_INTERRUPT_S:
            return  # `timeout` signals a process and then its group
        self.interrupts, self._interrupted_at = self.interrupts + 1, now
        if self.interrupts == 1:
            self._events.say("warning", "asked to end: the last steps are collected; once more to kill everything")
            self.send_order("end the operator asked for it")
        else:
            for child in self.list_children():
                child.kill_all()

    @property
    def is_ending(self) -> bool:
        """Learners that die now are not restarted: a restart takes longer than the run, and the end would wait for
        it."""
        return self.ending or any(order.startswith("end ") for order in self._orders)

    # ---- what died is started again ---------------------------------------------------------------------------------

    def restart_syncer(self, code: int | None) -> None:
        if code is None:
            if self._restart_if_due(self.syncer):
                for line in self._orders:
                    self.syncer.send_order(line)
            return
        self._say_exited(self.syncer, code)
        if self.interrupts > 1:
            raise Killed("everything was killed, as asked; the last steps are not in the model")
        if code == UNWRITABLE or not self.syncer.restart_later():
            raise RunFailed(f"the syncer died ({describe_exit(code)}): {self.read_last_words(self.syncer)}")

    def restart_shards(self) -> None:
        for shard in self.shards:
            code = shard.poll_exit()
            if code is None:
                self._restart_if_due(shard)
            elif code == 0 and self.ending:
                continue  # the lead has told it that the run is over
            else:
                self._say_exited(shard, code)
                if self.interrupts > 1:
                    raise Killed("everything was killed, as asked; the last steps are not in the model")
                if code in (ConfigError.exit_code, UNWRITABLE) or not shard.restart_later():
                    raise RunFailed(f"{shard.name} died ({describe_exit(code)}): {self.read_last_words(shard)}")

    def restart_dead(self) -> None:
        for child in self.list_scripts():
            code = child.poll_exit()
            if code is None:
                if child is self.scorer or not self.is_ending:
                    self._restart_if_due(child)
                elif child.waiting:
                    self.abandon_restart(child)
                continue
            self._say_exited(child, code)
            if child is self.scorer:
                self._handle_exit_of_scorer(child, code)
            else:
                self._handle_exit_of_learner(child, code)
        self._kill_late_leavers()
        # One that died since it was looked at above still has its process here: the next look says what becomes of it.
        if not any(child.started or child.waiting for child in self.learners.values()):
            self._end_without_learners()

    def _restart_if_due(self, child: Child) -> bool:
        due = child.restart_if_due()
        if due:
            self.here.discard(child.name)
            text, data = f"{child.name} was started again", describe_process(child)
            if child.more_pids:
                parts = list_parts(self._out.learners / child.name)
                data["fresh"] = not parts
                state = f"what is in {parts[-1].stem}" if parts else "a fresh inner optimizer: no snapshot is there yet"
                text += f", all {len(child.more_pids) + 1} ranks of it, with {state}"
            self._events.say("restarted", text, data)
        return due

    def _say_exited(self, child: Child, code: int) -> None:
        """With the cause, where its log ends with one. Where to read on is said once for every mistake."""
        ended = child.ended
        error = read_script_error(ended.read_log_tail()) if code in (1, USAGE) else None
        how = "" if code == ConfigError.exit_code else f": {describe_exit(code)}"  # a warning with its words follows
        text = f"failed: {error.summary}" if error is not None else f"ended{how}"
        data: dict[str, object] = {"process": child.name, "code": code}
        if _is_unjoined(child, code):
            text, data["unjoined"] = "ended before it joined", True
        self._events.say("exited", f"{ended.name} {text}", data)
        if error is None:
            self._errors.pop(child.name, None)
            return
        if not any(error.is_same_mistake(known) for known in self._errors.values()):
            self._log_warning(child, f"the whole traceback is in {ended.log}")
        self._errors[child.name] = error

    # ---- learners ---------------------------------------------------------------------------------------------------

    def list_staying(self) -> list[str]:
        """Learners that nobody asked to leave."""
        return [name for name in self.learners if name not in self._leaving]

    def ask_to_leave(self, name: str) -> bool:
        """Whether it has to be told. One that does not run, or waits for its restart, is gone at once."""
        child = self.learners[name]
        if child.running:
            self._leaving[name] = time.monotonic() + LEAVE_S
            return True
        child.cancel_restart()
        self._remove_learner(name)
        return False

    def _remove_learner(self, name: str) -> None:
        self.learners.pop(name).release()
        self._leaving.pop(name, None)
        self._errors.pop(name, None)
        self._removed.add(name)

    def _kill_late_leavers(self) -> None:
        for name, kill_at in self._leaving.items():
            if time.monotonic() >= kill_at and self.learners[name].running:
                self._log_warning(self.learners[name], f"{name} did not leave within {LEAVE_S:g} s and is killed")
                self.learners[name].signal_all(signal.SIGKILL)

    def _handle_exit_of_learner(self, child: Child, code: int) -> None:
        if child.name in self._leaving:
            self._remove_learner(child.name)
        elif code == 0 or _is_unjoined(child, code):
            self.done.add(child.name)
        elif code == USAGE:
            self._fail_with_script(child, "the script calls Atoll wrongly")
        elif code == 2:
            self._log_warning(child, f"{child.name} cannot take part: {self.read_last_words(child)}")
            self._refusal = self._refusal or self.read_last_words(child)
        elif when := self._find_hopeless_error():
            self._fail_with_script(child, f"the script failed on every learner {when}")
        elif self.is_ending:
            if code > 0:
                self._note_failure(child, code)
        elif not child.restart_later():
            self._log_warning(child, f"{child.name} {self._died} and is given up: {self.read_last_words(child)}")
            self.failed[child.name] = self.read_last_words(child)

    def _find_hopeless_error(self) -> str:
        """When every learner failed in the same way, so that restarts would only repeat it; empty: they did not."""
        shared = find_shared_error(self._errors.get(name) for name in self.learners)
        if shared is None:
            return ""
        if not self._stepped:
            return "before its first step"
        again = shared.is_in_code and all(child.restarts for child in self.learners.values())
        return "and again after a restart" if again else ""

    @property
    def _died(self) -> str:
        return "died too often" if self._max_restarts else "died"

    def _end_without_learners(self) -> None:
        """The syncer writes down what there is; a run that nobody finished has failed."""
        if self.is_ending:
            return
        self.ending = True
        if self.done:
            self.send_order(f"end {EVERYONE_ENDED}")
            return
        words = next((f" ({words})" for words in self.failed.values() if words), "")
        self._failure = (
            ConfigError(self._refusal)
            if self._refusal
            else RunFailed(f"every learner {self._died}{words}; their logs are in {self._out.logs}")
        )
        self._mended = "" if self._refusal else ". Once they are mended, it goes on with: "
        self.send_order("unscored")
        self.send_order("end no learner is left")

    # ---- the script's mistakes, and its scorer ----------------------------------------------------------------------

    def _fail_with_script(self, child: Child, what: str) -> None:
        """The run ends in good order, with what was merged so far."""
        if self._failure is not None or self.interrupts:
            return
        self._failure = RunFailed(f"{what}: {self.read_last_words(child)}. The whole traceback is in {child.ended.log}")
        self._mended = "; once the script is mended, the run goes on with: "
        self.ending = True
        for one in self.list_scripts():
            one.cancel_restart()
        self.send_order("unscored")
        self.send_order("end its script failed")

    def _handle_exit_of_scorer(self, child: Child, code: int) -> None:
        """Go on without the evaluator. A mistake that every restart would repeat is reported at once."""
        if self._failure is not None:
            return
        error = self._errors.get(child.name)
        hopeless = code in (0, ConfigError.exit_code, USAGE) or (error is not None and error.is_in_code)
        if not hopeless and not self.interrupts and child.restart_later():
            return
        if code != 0:
            lost = "the model is not scored any more" if self._scored else "the model is not scored"
            text = f"{lost}: {self.read_last_words(child)}; the run goes on"
            self._events.say("warning", text, {"process": child.name, "unscored": not self._scored})
        self.send_order("unscored")

    def find_failure(self) -> AtollError | None:
        """Why the run failed, with the command that goes on with it: what that needs is known at the end."""
        if self._failure is None or not self._mended:
            return self._failure
        return RunFailed(f"{self._failure}{self._mended}{describe_resume(self._out)}")

    def find_shortfall(self) -> str:
        """What went wrong in a run that came to its end all the same; empty: nothing."""
        if self.failed:
            name, words = next(iter(self.failed.items()))
            others = f" (and {len(self.failed) - 1} more)" if len(self.failed) > 1 else ""
            log = self.learners[name].ended.log
            return f"{name}{others} failed and did not come back: {words}; its log is {log}"
        if not self._joined and not self.interrupts:
            return (
                "no learner joined the run: the script has to train inside 'with atoll.Learner(model, optimizer) as "
                f"learner:'; what it printed is in {self._out.logs}"
            )
        return ""

    # ---- at the end of the run --------------------------------------------------------------------------------------

    def kill_without_step(self) -> None:
        """Only learner.step tells a script that the run ends: a learner that has made no step would hold up the end."""
        for name in self._without_step:
            if name in self.learners and self.learners[name].running:
                self.learners[name].kill_all()
                text = f"{name} was killed at the end: it had made no step"
                data: dict[str, object] = {"process": name, "code": self.learners[name].poll_exit(), "stepless": True}
                self._events.say("exited", text, data)

    def list_running_learners(self) -> list[str]:
        return [name for name, child in self.learners.items() if child.running]

    def warn_of_loops(self) -> bool:
        """Name the learners whose script trains on though the run is over; returns whether there are any."""
        names = [name for name in self.list_running_learners() if tells_trains_on(self.learners[name].read_log_tail())]
        if names:
            text = f"{join_names(names)}: the script trains on after the run's end: break its loop at learner.done"
            self._events.say("warning", text, {"process": names[0], "about": AFTER_END})
        return bool(names)

    def note_late_failures(self) -> None:
        """Of scripts that were to be started again when the run ended, or fail in what they do after it."""
        for child in self.learners.values():
            code = child.poll_exit()
            if code is not None and code > 0:
                self._say_exited(child, code)
                self._note_failure(child, code)
            elif code is None and child.waiting:
                self.abandon_restart(child)

    def abandon_restart(self, child: Child) -> None:
        """It will not be back in time. That is a failure where its script failed before."""
        child.cancel_restart()
        self._note_failure(child, 1)

    def _note_failure(self, child: Child, code: int) -> None:
        """Its script failed, and the run ends without it. What Atoll itself had to say ended it in good order."""
        if child.name in self._errors or code not in (1, ConfigError.exit_code, Killed.exit_code, TERMINATED):
            self.failed[child.name] = self.read_last_words(child) or describe_exit(code)

    # ---- small things -----------------------------------------------------------------------------------------------

    def _log_warning(self, child: Child, text: str) -> None:
        self._events.say("warning", text, {"process": child.name})

    def read_last_words(self, child: Child) -> str:
        """Why it ended: the exception of its script, else the last line of its log."""
        if (error := self._errors.get(child.name)) is not None:
            return error.summary
        return child.ended.last_words().removeprefix("atoll: ")


def _makes_no_step(one: LearnerStatus) -> bool:
    return one.state == "stalled" or (one.state == "starting" and one.first_step_s >= FIRST_STEP_S)


def _is_unjoined(child: Child, code: int) -> bool:
    """SIGTERM ended it before it joined."""
    return code == TERMINATED and tells_unjoined(child.ended.read_log_tail())


def describe_process(child: Child) -> dict[str, object]:
    """For the events `started` and `restarted`."""
    ranks: dict[str, object] = {"ranks": child.more_pids} if child.more_pids else {}
    return {"process": child.name, "pid": child.pid, **ranks}
