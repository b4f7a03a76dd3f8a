"""Child processes: started with a log of their own, watched, started again after a wait, up to a limit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from atoll.launch.script import SUPERVISOR
from atoll.learner.script import is_library
from atoll.store.atomic import mode_in

BACKOFF_S = (0.2, 1.0, 2.0, 5.0, 10.0)
SOON_S = (0.0, 0.1, 0.5, 2.0, 5.0)
"""For the syncer: everybody's steps are dropped while it is away."""
HEALTHY_S = 60.0
"""A child that lived this long starts its waits and its limit anew."""
LAST_S = 30.0
"""How long a script may take to end once its run, or its replay, is over."""
TRAINS_ON_S = 2.0
"""How long a script may still train, once its run is over, before a warning says that its loop does not end."""
LIMIT = 5
"""Restarts in a row, unless the operator names another number: the next death is the last."""
CODE_MISTAKES = frozenset(
    {
        "AttributeError",
        "ImportError",
        "IndentationError",
        "ModuleNotFoundError",
        "NameError",
        "SyntaxError",
        "TypeError",
        "UnboundLocalError",
    }
)
NODE_LOST = -1000
"""The exit code of a process that nobody saw the end of: the node that it was on is gone."""
TAIL_BYTES = 64 * 1024
"""Of a log, for its last traceback."""


@dataclass
class Child:
    name: str
    command: list[str]
    env: dict[str, str]
    log: Path
    obeys: bool = False
    """It takes orders on its standard input, and ends when that closes."""
    waits_s: tuple[float, ...] = BACKOFF_S
    nice: int = 0
    """How far it lets others go first from its start on."""
    folder: Path | None = None
    """Where it starts; None: where we are."""
    limit: int = LIMIT
    """Restarts in a row; at the next death it is given up."""
    restarts: int = 0
    given_up: bool = False
    process: subprocess.Popen[bytes] | None = None
    successor: subprocess.Popen[bytes] | None = None
    """One that waits for its turn, all that takes long behind it."""
    _deaths: int = field(default=0, repr=False)
    _started_at: float = field(default=0.0, repr=False)
    _log_start: int = field(default=0, repr=False)
    """Where its present life begins in the log."""
    _restart_at: float | None = field(default=None, repr=False)
    _gave_way: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        with open_log(self.log) as log:
            self._log_start = log.seek(0, os.SEEK_END)
            self.process = self._start_successor() or self._spawn_process(log)
        if self.nice:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self.process.pid, self.nice)
        self._started_at = time.monotonic()
        self._restart_at = None

    def prepare_successor(self) -> None:
        """Have a successor ready: a process of the same command that waits for a line on its standard input."""
        if self.successor is None or self.successor.poll() is not None:
            with open_log(self.log) as log:
                self.successor = self._spawn_process(log, "--wait")

    def _start_successor(self) -> subprocess.Popen[bytes] | None:
        found, self.successor = self.successor, None
        if found is None or found.poll() is not None or found.stdin is None:
            return None
        try:
            found.stdin.write(b"begin\n")
            found.stdin.flush()
        except OSError:
            return None
        return found

    def _spawn_process(self, log: IO[bytes], *more: str) -> subprocess.Popen[bytes]:
        """In a process group of its own: Ctrl-C is for us, and we end it in good order.

        Not in a session of its own: Linux shares the processor fairly between sessions, and niceness would not count.
        """
        return subprocess.Popen(
            [*self.command, *more],
            env={**os.environ, **self.env, SUPERVISOR: str(os.getpid())},
            stdin=subprocess.PIPE if self.obeys else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self.folder,
            process_group=0,
        )

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def started(self) -> bool:
        """It was started, and nobody has been told yet that it ended."""
        return self.process is not None

    @property
    def pid(self) -> int:
        """Of one that was started."""
        assert self.process is not None
        return self.process.pid

    @property
    def running_s(self) -> float:
        """Since it was started last; 0 if it does not run."""
        return time.monotonic() - self._started_at if self.running else 0.0

    @property
    def ended(self) -> Child:
        """Whose name and log tell of its last end: its own; of a group, those of the rank that ended it."""
        return self

    @property
    def more_pids(self) -> dict[str, int]:
        """Of a group's ranks besides the first, by the names of their logs."""
        return {}

    def poll_exit(self) -> int | None:
        """Its exit code, told once."""
        if self.process is None or (code := self.process.poll()) is None:
            return None
        if self.process.stdin is not None:
            with suppress(OSError):  # an order it did not live to hear is still in the buffer
                self.process.stdin.close()
        self.process = None
        return code

    def restart_later(self) -> bool:
        """Plan the next start; False when it died too often."""
        now = time.monotonic()
        self._deaths = 1 if now - self._started_at > HEALTHY_S else self._deaths + 1
        if self._deaths > self.limit:
            self.given_up = True
            return False
        self._restart_at = now + self.waits_s[min(self._deaths, len(self.waits_s)) - 1]
        return True

    def cancel_restart(self) -> None:
        self._restart_at = None

    def restart_if_due(self) -> bool:
        if self._restart_at is None or time.monotonic() < self._restart_at:
            return False
        self.start()
        self.restarts += 1
        return True

    @property
    def waiting(self) -> bool:
        return self._restart_at is not None

    def send_order(self, line: str) -> None:
        """A word to a child that obeys; one that is dead does not hear it."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.write(f"{line}\n".encode())
                self.process.stdin.flush()

    def give_way(self, nice: int) -> None:
        """Let others go first from now on. What it started before keeps its place."""
        if self.running and self._gave_way != self.process:
            assert self.process is not None
            self._gave_way = self.process
            threads = Path(f"/proc/{self.process.pid}/task")
            for thread in [int(t.name) for t in threads.iterdir()] if threads.is_dir() else [self.process.pid]:
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, thread, nice)

    def signal_all(self, number: signal.Signals) -> None:
        """The child and whatever it started: its whole host, as far as it can tell."""
        if self.running:
            assert self.process is not None
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def signal(self, number: signal.Signals) -> None:
        if self.running:
            assert self.process is not None
            self.process.send_signal(number)

    def reset_restarts(self) -> None:
        """Its deaths so far were no fault of its own."""
        self._deaths = 0

    def kill_all(self) -> None:
        """The child and whatever it started."""
        self.cancel_restart()
        for process in (self.process, self.successor):
            if process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if process.stdin is not None:
                    with suppress(OSError):
                        process.stdin.close()

    def release(self) -> None:
        """It has ended for good: whatever was kept for it is free."""

    def last_words(self) -> str:
        """The last line of its log."""
        lines = [line for line in self.read_log_tail(0).splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""

    def read_log_tail(self, start: int | None = None) -> str:
        """The end of what it printed since it was started last, or since `start`."""
        try:
            with self.log.open("rb") as file:
                since = self._log_start if start is None else start
                file.seek(max(since, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""


def open_log(path: Path) -> IO[bytes]:
    """To append to; as open to others as its folder."""
    return open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, mode_in(path.parent)), "ab")


def join_names(names: Sequence[str]) -> str:
    """The first three of them, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def describe_exit(code: int) -> str:
    if code == NODE_LOST:
        return "its node is lost"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def cores() -> int:
    """Those this process may use; a container or taskset may allow fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- script errors --------------------------------------------------------------------------------------------------

_RANK = re.compile(r"^\[rank\d+\]: ?")
"""What torch.distributed writes before each line of a traceback, once there is a process group."""
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+)')
_EXCEPTION = re.compile(r"(?P<kind>[A-Za-z_][\w.]*)(?::\s(?P<text>.*))?")
WORDS = 300
"""Characters of an exception's message that are shown; the log has the whole of it."""


@dataclass(frozen=True, slots=True)
class ScriptError:
    kind: str
    """The exception's class."""
    text: str
    """The first line of its message: it may differ from learner to learner."""
    file: str
    line: int
    """Where the script was: the innermost frame that is not in a library."""

    @property
    def summary(self) -> str:
        """The last line of the traceback, and where that was."""
        words = f"{self.kind}: {self.text}" if self.text else self.kind
        return f"{words[:WORDS]} ({Path(self.file).name}, line {self.line})"

    @property
    def is_in_code(self) -> bool:
        """A restart repeats it. What comes from outside (a file, memory, a library) may be mended by then."""
        return self.kind in CODE_MISTAKES

    def is_same_mistake(self, other: ScriptError) -> bool:
        return (self.kind, self.file, self.line) == (other.kind, other.file, other.line)


def read_script_error(log: str) -> ScriptError | None:
    """The exception that the last traceback of a log ends with; None: there is no traceback."""
    lines = [_RANK.sub("", line) for line in log.splitlines()]
    frames = [(number, found) for number, line in enumerate(lines) if (found := _FRAME.match(line))]
    if not frames:
        return None
    last = frames[-1][0]
    ending = next((line for line in lines[last + 1 :] if line and not line[0].isspace()), "")
    if (exception := _EXCEPTION.fullmatch(ending)) is None:
        return None
    own = [found for number, found in frames if number >= _start(lines, last) and not is_library(found["file"])]
    place = own[-1] if own else frames[-1][1]
    return ScriptError(exception["kind"], exception["text"] or "", place["file"], int(place["line"]))


def find_shared_error(errors: Iterable[ScriptError | None]) -> ScriptError | None:
    """The mistake that all of them made; None: one made another, or none yet.

    A mistake in a script is the same on every learner, and a restart would only repeat it. So a run in which nobody has
    made a step ends at once when every learner fails with the same exception at the same line; later, when that is a
    mistake in the code and each of them was restarted once.
    """
    first, *others = errors
    if first is None or not all(one is not None and first.is_same_mistake(one) for one in others):
        return None
    return first


def _start(lines: list[str], last: int) -> int:
    """Where the traceback begins that the line `last` is a part of."""
    return next((n for n in range(last, -1, -1) if lines[n].startswith("Traceback (most recent call last)")), last)
