"""Whether a training process computes, by the processor time of it and of those that it started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from atoll.courier.processor_use import ProcessorUse

WAITS = "input()"
COMPUTES = "print(flush=True)\nwhile True: pass"
STARTS_ONE_THAT_COMPUTES = (
    "import subprocess, sys\nc = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
    "print(c.pid, flush=True)\ntry: input()\nfinally: c.kill()"
)


@contextmanager
def process(code: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            yield child
        finally:
            assert child.stdin is not None
            child.stdin.close()
            if code is COMPUTES:
                child.kill()


def computes_within(pid: int, seconds: float, *, but: int = 0) -> bool:
    usage, until = ProcessorUse(pid, but=but), time.monotonic() + seconds
    while not (found := usage.look()) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def test_one_that_computes_and_one_whose_child_does() -> None:
    for code in (COMPUTES, STARTS_ONE_THAT_COMPUTES):
        with process(code) as child:
            assert child.stdout is not None
            child.stdout.readline()
            assert computes_within(child.pid, 30.0)


def test_one_that_waits_and_a_child_that_is_left_out() -> None:
    with process(STARTS_ONE_THAT_COMPUTES) as child:
        assert child.stdout is not None
        courier = int(child.stdout.readline())
        # What starting cost was used before the first look.
        assert not computes_within(child.pid, 1.0, but=courier)


def test_of_a_process_that_no_system_tells_of_it_is_believed() -> None:
    with process(WAITS) as child:
        pid = child.pid
    assert ProcessorUse(pid, but=os.getpid()).look()
