"""Many jobs on all cores: every worker is a process that is handed jobs one after another, a line each, and is done
when its input ends. Results come in the order in which they are ready; what is made of them does not depend on it.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from atoll.protocol.errors import RunFailed

AHEAD = 2
"""Jobs that a worker has before it, so that it never waits for the next."""

Worker = subprocess.Popen[bytes]


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(module: str, jobs: Sequence[str], workers: int, *arguments: str) -> Iterator[bytes]:
    """`python -m module arguments`, as many as there are workers: a line of its output for every line of its input."""
    waiting = iter(jobs)
    with _started(min(workers, len(jobs)), module, *arguments) as started, selectors.DefaultSelector() as selector:
        for worker in started:
            assert worker.stdout is not None
            selector.register(worker.stdout, selectors.EVENT_READ, worker)
        for _ in range(AHEAD):
            for worker in started:
                _hand(worker, waiting)
        left = len(jobs)
        while left:
            for key, _ in selector.select():
                worker = key.data
                yield _result(worker)
                left -= 1
                _hand(worker, waiting)


def _hand(worker: Worker, waiting: Iterator[str]) -> None:
    assert worker.stdin is not None
    if (job := next(waiting, None)) is not None:
        worker.stdin.write(f"{job}\n".encode())
        worker.stdin.flush()


def _result(worker: Worker) -> bytes:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise RunFailed(f"a worker of the simulator died (exit code {worker.wait()}): run fewer seeds to see where")
    return line


@contextmanager
def _started(count: int, module: str, *arguments: str) -> Iterator[list[Worker]]:
    command = [sys.executable, "-m", module, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    workers = [subprocess.Popen(command, **pipes) for _ in range(count)]  # type: ignore[call-overload]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                pipe.close()


def serve(answers: Callable[[Iterator[str]], Iterator[bytes]]) -> None:
    """A worker's side of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us ends us
    gc.set_threshold(100_000)  # a world lasts for a moment
    for line in answers(iter(sys.stdin.readline, "")):
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
