"""Many seeds on all cores: every worker is a process that is handed seeds one after another, and is done when its
input ends. Results come in the order in which they are ready; what is made of them does not depend on it.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from atoll.protocol.errors import RunFailed
from atoll.simulate.worker import Report

AHEAD = 2
"""Seeds that a worker has before it, so that it never waits for the next."""

Worker = subprocess.Popen[bytes]


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(seeds: Sequence[int], learners: int | None, workers: int) -> Iterator[Report]:
    waiting = iter(seeds)
    with _started(min(workers, len(seeds)), learners) as started, selectors.DefaultSelector() as selector:
        for worker in started:
            assert worker.stdout is not None
            selector.register(worker.stdout, selectors.EVENT_READ, worker)
        for _ in range(AHEAD):
            for worker in started:
                _hand(worker, waiting)
        left = len(seeds)
        while left:
            for key, _ in selector.select():
                worker = key.data
                yield _result(worker)
                left -= 1
                _hand(worker, waiting)


def _hand(worker: Worker, waiting: Iterator[int]) -> None:
    assert worker.stdin is not None
    if (seed := next(waiting, None)) is not None:
        worker.stdin.write(f"{seed}\n".encode())
        worker.stdin.flush()


def _result(worker: Worker) -> Report:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise RunFailed(f"a worker of the simulator died (exit code {worker.wait()}): run fewer seeds to see where")
    return msgspec.json.decode(line, type=Report)


@contextmanager
def _started(count: int, learners: int | None) -> Iterator[list[Worker]]:
    command = [sys.executable, "-m", "atoll.simulate.worker", *([str(learners)] if learners is not None else [])]
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
