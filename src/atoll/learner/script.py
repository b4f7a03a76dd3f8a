"""The training script as a process: where it finds its run, what it prints, when and how it leaves.

Environment:
    ATOLL_SYNCER    set by atoll train and atoll learn
    ATOLL_JOIN      for plain `python script.py`: a join link, a file that holds one and that only its owner can read,
                    or the address of a syncer on this machine
Without either the script trains alone.

A learner is asked to leave by SIGTERM (a spot machine is taken away), by Ctrl-C, or by the syncer (a drain). Rules:
- its training loop is told at the next boundary that it is done; the run gets its last steps if that takes no longer
  than `DRAIN_S`; then its state is written to its folder, and the next process of the same name continues from it;
- after a signal the process is gone within `LIMIT_S`; a drain has no such limit and waits two cycles if needed;
- a learner that has not joined yet ends its script there, with one line (`LeftUnjoined`): what follows `with` would
  run on an untrained model;
- signals are handled only in the main thread, and only if the script has no handler of its own;
- the first Ctrl-C asks; the second, or one before training has begun, ends the script at once (KeyboardInterrupt). So
  does SIGTERM before training has begun;
- a learner that was told that the run ends waits up to `END_WAIT_S` for the final parameters; one that leaves before
  waits until its last steps are merged, at most `LEAVE_WAIT_S` or two cycles.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, ParamSpec, TypeVar

from atoll.fabric.wire import one_line
from atoll.protocol.errors import ConfigError
from atoll.store.keys import read_link

INTERRUPTED = 130
TERMINATED = 143
UNJOINED = "ended before it joined the run"
TRAINS_ON = (
    "the script trains on after the run's end: break its loop at learner.done. Its last steps are collected now, and "
    "steps from here on count for nothing"
)


def say(text: str) -> None:
    print(f"atoll: {text}", file=sys.stderr, flush=True)


def end_script(text: str, code: int, cause: BaseException) -> NoReturn:
    """Nobody wants a traceback of what the operator did."""
    say(text)
    raise SystemExit(code) from cause


def find_syncer(environment: Mapping[str, str], given: str | None = None) -> str:
    """A join link or addresses, those that the script gave before the environment's; empty: this script is alone. A
    file that is missing or empty, or that others can read, ends the script."""
    replays = "ATOLL_REPLAY" in environment  # nobody is dialled, and the file may be gone
    if (replays or not given) and (named := environment.get("ATOLL_SYNCER")):
        return named
    said, named_by = (given, "syncer=") if given else (environment.get("ATOLL_JOIN", ""), "ATOLL_JOIN")
    try:
        return read_link(said, named_by) if said else ""
    except ConfigError as error:
        end_script(str(error), error.exit_code, error)


# ---- what the script calls ------------------------------------------------------------------------------------------

P = ParamSpec("P")
T = TypeVar("T")


def explain_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """A keyword that it does not know is told with those that it knows. Its signature stays as it is written."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> T:
        check_keywords(function.__qualname__, known, named)
        return function(*given, **named)

    return call


def check_keywords(function: str, known: Sequence[str], named: Mapping[str, object]) -> None:
    """TypeError, in Python's words, and what to write instead."""
    for name, value in named.items():
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}: {_instead(name, value, known)}")


def _instead(name: str, value: object, known: Sequence[str]) -> str:
    from atoll.config import known_settings  # only a mistake needs it

    if name in known_settings():
        return f"it is a setting of the run, given to the command that starts it: --set {name}={value!s:.40}"
    near = difflib.get_close_matches(name, known, n=1)
    return f"{f'did you mean {near[0]!r}? It' if near else 'it'} knows {', '.join(known)}"


# ---- being asked to leave -------------------------------------------------------------------------------------------

DRAIN_S = 10.0
"""How long the last steps may take to be merged, where a machine is taken away."""
LIMIT_S = 25.0
"""After a signal the process is gone within this time; clouds give 30 s or more."""
FILE = "preempted.safetensors"
AGAIN = b"atoll: leaving in good order: the last steps go to the run; Ctrl-C again ends it at once\n"


class LeftUnjoined(SystemExit):
    """Asked to leave before it had the run's parameters. Like KeyboardInterrupt no Exception: it is raised wherever the
    signal finds the script."""

    def __init__(self, why: str, code: int) -> None:
        super().__init__(code)
        self.why = why

    def __str__(self) -> str:
        return f"{UNJOINED}, which has nothing of it: {self.why}; the same command lets it join"


def tells_unjoined(log: str) -> bool:
    """Whether the last that Atoll itself printed is that. Libraries may print more as they are taken down."""
    own = [line for line in log.splitlines() if line.startswith("atoll: ")]
    return bool(own) and own[-1].startswith(f"atoll: {UNJOINED}")


def tells_trains_on(log: str) -> bool:
    """Whether Atoll printed that the script's loop did not end with the run."""
    return f"atoll: {TRAINS_ON}" in log.splitlines()


class LeaveRequest:
    def __init__(self) -> None:
        self.why = ""
        """Why it is to leave, for the run's events; empty: nobody asked."""
        self._exit_code = 0
        """Of a script that is asked before it joined."""
        self.hurried = False
        """A signal asked: there is a time by which it is to be gone."""
        self.begun = False
        """There are steps, or will be: from here on there is something to leave in good order."""
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    @property
    def asked(self) -> bool:
        return bool(self.why)

    def ask(self, why: str, exit_code: int = 0) -> None:
        """The first to ask is the reason."""
        if not self.why:
            self.why, self._exit_code = why, exit_code

    def make_unjoined(self) -> LeftUnjoined:
        """Somebody asked, and it has not joined."""
        return LeftUnjoined(self.why, self._exit_code)

    def watch(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._terminated)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupted)

    def stop(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) in (self._terminated, self._interrupted):
                signal.signal(number, before)
        self._before.clear()

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        first, self.hurried = not self.asked, True
        self.ask("its machine is taken away (SIGTERM)", TERMINATED)
        # Once: a second one must not break off the way out. And not in a worker that a loader forked off.
        if first and not self.begun and os.getpid() == self._process:
            raise self.make_unjoined()

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a worker of a loader, forked off: it ends when the training process lets it go
        if self.asked or not self.begun:
            raise KeyboardInterrupt
        self.hurried = True
        self.ask("it was interrupted (Ctrl-C)", INTERRUPTED)
        os.write(2, AGAIN)  # print may have been interrupted in the middle of a line


# ---- leaving --------------------------------------------------------------------------------------------------------

LEAVE_WAIT_S = 10.0
"""How long leaving early waits for the last steps to be merged; longer where the others need longer for two cycles."""
END_WAIT_S = 240.0
"""How long a learner waits for the run to end once it was told that it ends."""


def patience_s(cycle_s: float | None, *, hurried: bool) -> float:
    """How long leaving early may take. `cycle_s`: what H steps take here; None: there is nothing to wait for."""
    if cycle_s is None:
        return LEAVE_WAIT_S
    return DRAIN_S if hurried else max(LEAVE_WAIT_S, 2 * cycle_s)


class LeaveWait:
    def __init__(self, now: float, *, ending: bool) -> None:
        """`ending`: the run was told to end."""
        self._early, self._nothing_left, self._since = not ending, False, now

    def look(self, now: float, *, ending: bool, unmerged: bool) -> None:
        """`unmerged`: steps that no version holds yet."""
        if self._early and ending:
            self._early, self._since = False, now
        self._nothing_left = self._early and not unmerged

    def may_go(self, now: float, patience_s: float, *, replay: bool) -> bool:
        """`patience_s`: for leaving early. A replay is slow where it wants to be: no clock of ours ends it."""
        until = self._since + (patience_s if self._early else END_WAIT_S)
        return self._nothing_left or (now > until and not replay)

    def goodbye_reason(self, asked: str, *, saved: bool) -> str:
        """For the run's events. `asked`: why somebody wanted it to go; empty: nobody did."""
        if asked:
            return f"{asked}; its state is {'saved' if saved else 'not saved: it has no folder'}"
        return "it left before the run ended" if self._early else "the end of the run did not come"


def broken_off(error: BaseException) -> str:
    """The goodbye of a learner whose script failed: the exception with its message, and the user's line."""
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    if isinstance(error, LeftUnjoined):
        return f"{error.why}; it had not joined yet"
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"its training script ended with {one_line(words)}{_place(error)}"


_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = ("site-packages", "dist-packages", "/lib/python3")


def is_library(file: str) -> bool:
    return file.startswith("<") or any(part in file for part in _LIBRARIES)


def _place(error: BaseException) -> str:
    """The innermost line that is the user's, by its file's name; empty: there is none."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if not is_library(file) and not _is_atolls(Path(file))]
    return f" ({one_line(Path(own[-1][0]).name)[:80]}, line {own[-1][1]})" if own else ""


def _is_atolls(path: Path) -> bool:
    """The built-in workload is a script like any other."""
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "workloads")
