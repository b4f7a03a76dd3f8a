from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.launch import children
from atoll.launch.children import BACKOFF_S, LIMIT, Child, describe_exit


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(children, "time", clock)
    return clock


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    made: list[Child] = []

    def child(code: str, **options: bool) -> Child:
        made.append(Child("one", [sys.executable, "-c", code], {"SAID": "hello"}, tmp_path / "one.log", **options))
        return made[-1]

    yield child
    for one in made:
        one.kill_all()


def wait(child: Child) -> int:
    deadline = time.monotonic() + 20
    while (code := child.poll_exit()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return code


def test_a_child_prints_into_its_log(make: Callable[..., Child]) -> None:
    said = "print(os.environ['SAID'], flush=True); print('last words', file=sys.stderr)"
    child = make(f"import os, sys; {said}; sys.exit(3)")
    child.start()
    assert wait(child) == 3
    assert child.poll_exit() is None, "told once"
    assert child.log.read_text() == "hello\nlast words\n"
    assert child.last_words() == "last words"


def test_without_a_log_there_are_no_last_words(tmp_path: Path) -> None:
    assert Child("x", [], {}, tmp_path / "none.log").last_words() == ""


def test_waits_grow_and_the_limit_ends_them(make: Callable[..., Child], clock: Clock) -> None:
    child = make("raise SystemExit(1)")
    waits = []
    while child.restart_later():
        at = clock.now
        while not child.restart_if_due():
            assert child.waiting
            clock.now += 0.1
        waits.append(clock.now - at)
        assert child.process is not None
        child.process.wait()
        child.poll_exit()
    assert waits == pytest.approx(BACKOFF_S, abs=0.11)
    assert child.restarts == LIMIT and child.given_up and not child.waiting


def test_a_child_that_lived_long_starts_its_waits_anew(make: Callable[..., Child], clock: Clock) -> None:
    child = make("pass")
    for _ in range(LIMIT):
        assert child.restart_later()
    clock.now += 61
    assert child.restart_later() and not child.given_up


def test_it_is_killed_with_everything_it_started(make: Callable[..., Child]) -> None:
    child = make(
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    child.start()
    deadline = time.monotonic() + 20
    while not child.last_words():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    grandchild = int(child.last_words())
    child.kill_all()
    assert not child.running
    status = Path(f"/proc/{grandchild}/status")
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_orders_go_to_its_standard_input(make: Callable[..., Child]) -> None:
    child = make(
        "import sys; print(sys.stdin.readline().strip().upper()); sys.exit(len(sys.stdin.readline()))", obeys=True
    )
    child.start()
    child.send_order("end of it")
    child.send_order("ab")
    assert wait(child) == 3
    assert child.last_words() == "END OF IT"
    child.send_order("to nobody")


def test_an_order_that_it_did_not_live_to_hear_does_not_end_its_supervisor(make: Callable[..., Child]) -> None:
    child = make("import time; time.sleep(60)", obeys=True)
    child.start()
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    child.send_order("begin")
    assert wait(child) == -signal.SIGKILL


def test_exits_in_words() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-signal.SIGKILL) == "killed by SIGKILL"


def test_a_child_knows_its_supervisor(make: Callable[..., Child]) -> None:
    child = make("import os; print(os.environ['ATOLL_SUPERVISOR'] == str(os.getppid()))")
    child.start()
    wait(child)
    assert child.last_words() == "True"
    assert "ATOLL_SUPERVISOR" not in os.environ


def test_a_child_is_given_up_after_as_many_deaths_as_the_operator_allows(
    make: Callable[..., Child], clock: Clock
) -> None:
    child = make("")
    child.limit = 0
    assert not child.restart_later() and child.given_up
    child.limit = 2 * LIMIT
    assert all(child.restart_later() for _ in range(2 * LIMIT - 1)), "the last wait holds for all later ones"


def test_the_end_of_a_log_is_that_of_the_present_life(make: Callable[..., Child]) -> None:
    child = make("print('hello')")
    for _ in range(2):
        child.start()
        wait(child)
    assert child.log.read_text() == "hello\nhello\n"
    assert child.read_log_tail() == "hello\n"
