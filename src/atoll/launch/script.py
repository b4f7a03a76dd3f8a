"""`python -m atoll.launch.script FILE|-m MODULE [ARGS…]`: a training script as a supervisor starts it.

It runs as if it were started by itself; three things are added. A mistake that Atoll can name (torch is not installed)
ends it with one line and exit code 2 instead of a traceback, and so does `sys.exit("a sentence")`: it would only say it
again. A traceback shows
the script's own frames and its libraries', not Atoll's. And it does not outlive its supervisor.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from atoll.extras import EXTRAS, missing
from atoll.protocol.errors import AtollError, ConfigError

SUPERVISOR = "ATOLL_SUPERVISOR"
"""The process that must be our parent; not set: anybody may be."""
USAGE = 64
"""Exit code for a supervisor: the script calls Atoll's API wrongly. Every other learner will, and every restart."""
LOOK_S = 1.0
TERM_S = 10.0
"""How long a script may take to end in its own way once its supervisor is gone."""

PACKAGE = Path(__file__).parents[1]
_API = tuple(
    str(PACKAGE / name) for name in ("__init__.py", "learner/learner.py", "learner/evaluate.py", "integrations/jax.py")
)
"""The modules whose functions a script calls …"""
_CHECKS = (
    "check_dataset",
    "check_keywords",
    "check_kept",
    "check_model",
    "check_options",
    "checked_batch_size",
    "optimizers_by_path",
)
"""… and the functions that check for them what they were given."""
_RETURNED = ("read_figures", "read_figure", "check_figure_name")
"""The functions that check what the script's own functions return."""
_SIGNATURE = re.compile(r"(Learner\.\w+|evaluate)\(\) (got|missing|takes)")
"""How Python complains of a call that does not fit, before the function is entered."""


def main() -> None:
    supervisor = os.environ.pop(SUPERVISOR, None)
    _watch_supervisor(supervisor)
    try:
        _run(sys.argv[1:])
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except SystemExit as end:
        if end.code:
            sys.last_value = end
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr, flush=True)
            sys.exit(ConfigError.exit_code)
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
            print(f"atoll: {missing(error.name, Path(sys.argv[0]).name)}", file=sys.stderr, flush=True)
            sys.exit(ConfigError.exit_code)
        # A learner that was attached leaves as the interpreter ends (attach.py): with this as the reason.
        sys.last_value = error
        usage = is_usage_error(error)
        remove_own_frames(error, usage=usage or is_wrong_return(error))
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(USAGE if usage and supervisor is not None else 1)


def _run(command: list[str]) -> None:
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        if not sys.flags.safe_path:
            sys.path[0] = str(Path(command[0]).absolute().parent)
        runpy.run_path(command[0], run_name="__main__")


# ---- tracebacks ----------------------------------------------------------------------------------------------------


def is_usage_error(error: Exception) -> bool:
    """Whether a call of `atoll.Learner`, `atoll.evaluate` or one of their methods was wrong."""
    if isinstance(error, TypeError) and _SIGNATURE.match(str(error)):
        return True
    if isinstance(error, AttributeError) and type(error.obj).__module__ in (
        "atoll.learner.learner",
        "atoll.integrations.jax",
    ):
        return True
    frames = _frames(error.__traceback__)
    kinds = (TypeError, ValueError, RuntimeError, AttributeError)
    if not frames or not isinstance(error, kinds):
        return False
    file, function = _file(frames[-1]), frames[-1].tb_frame.f_code.co_name
    return file in _API or (_is_own(file) and function in _CHECKS)


def is_wrong_return(error: Exception) -> bool:
    """Whether the script's scorer returned what is no score: its mistake, like an exception in it."""
    frames = _frames(error.__traceback__)
    return bool(frames) and _is_own(_file(frames[-1])) and frames[-1].tb_frame.f_code.co_name in _RETURNED


def remove_own_frames(error: BaseException | None, *, usage: bool = False) -> None:
    """Cut Atoll's frames, and what called the script, out of the error's traceback and of those it came from. Frames
    of Atoll's that it was raised in stay, or a mistake of ours could not be found; `usage`: the mistake is the
    script's."""
    if error is None:
        return
    frames = _frames(error.__traceback__)
    kept, ours = [], False
    for frame in frames:
        ours = _is_own(_file(frame)) or (ours and "/asyncio/" in _file(frame))
        if not ours:
            kept.append(frame)
    if ours and not usage:
        kept += frames[frames.index(kept[-1]) + 1 if kept else len(frames) :]
    for place, frame in enumerate(kept):
        frame.tb_next = kept[place + 1] if place + 1 < len(kept) else None
    error.__traceback__ = kept[0] if kept else None
    remove_own_frames(error.__cause__)
    if error.__cause__ is None:
        remove_own_frames(error.__context__)


def _is_own(file: str) -> bool:
    """The built-in workload is a script like any other."""
    path = Path(file)
    return file == "<frozen runpy>" or (path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "workloads"))


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename


# ---- the supervisor ------------------------------------------------------------------------------------------------


def _watch_supervisor(pid: str | None) -> None:
    if pid is not None:
        threading.Thread(target=_watch, args=(int(pid),), name="atoll-supervisor", daemon=True).start()


def _watch(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(TERM_S)
    os._exit(1)


if __name__ == "__main__":
    main()
