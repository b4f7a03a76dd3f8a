"""`python -m atoll.launch.script FILE|-m MODULE [ARGS…]`: a training script as a supervisor starts it.

It runs as if it were started by itself; two things are added. A mistake that Atoll can name ends it with one line and
exit code 2 instead of a traceback, and so does `sys.exit("a sentence")`: it would only say it again. And it does not
outlive its supervisor.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

from atoll.protocol.errors import AtollError, ConfigError

SUPERVISOR = "ATOLL_SUPERVISOR"
"""The process that must be our parent; not set: anybody may be."""
LOOK_S = 1.0
TERM_S = 10.0
"""How long a script may take to end in its own way once its supervisor is gone."""


def main() -> None:
    _watch_supervisor(os.environ.pop(SUPERVISOR, None))
    try:
        _run(sys.argv[1:])
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr, flush=True)
            sys.exit(ConfigError.exit_code)
        raise


def _run(command: list[str]) -> None:
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        if not sys.flags.safe_path:
            sys.path[0] = str(Path(command[0]).absolute().parent)
        runpy.run_path(command[0], run_name="__main__")


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
