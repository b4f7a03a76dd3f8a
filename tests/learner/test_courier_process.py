"""With real couriers, killed for real; the clock between two starts is the test's own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.learner import courier_process as module
from atoll.learner.courier_process import HEALTHY_S, RESTART_S, CourierProcess
from atoll.mailbox.channel import Goodbye, Start, StopOrder, ToTraining
from atoll.protocol.messages import TensorSpec

pytestmark = pytest.mark.system

WAIT_S = 90.0
NOWHERE = Start("learner-0", "session", "no-address", (TensorSpec("w", (1,), "float32"),))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def courier(clock: Clock) -> Iterator[CourierProcess]:
    courier = CourierProcess()
    courier.start()
    yield courier
    courier.close()


def pid(courier: CourierProcess) -> int:
    assert courier._process is not None
    return courier._process.pid


def kill(courier: CourierProcess) -> None:
    os.kill(pid(courier), signal.SIGKILL)
    courier.wait(WAIT_S)
    assert courier.receive() == []
    assert not courier.alive


def answer(courier: CourierProcess) -> list[ToTraining]:
    """A courier that runs says what is wrong with this start."""
    courier.send(NOWHERE)
    courier.wait(WAIT_S)
    return courier.receive()


def test_a_courier_runs_and_answers(courier: CourierProcess) -> None:
    [stop] = answer(courier)
    assert isinstance(stop, StopOrder) and stop.failed and stop.mistake
    assert "'no-address' is no address of a syncer" in stop.reason
    assert not courier.restart_if_dead()


def test_a_dead_courier_is_followed_by_another_that_works(courier: CourierProcess) -> None:
    first = pid(courier)
    kill(courier)
    assert courier.restart_if_dead()
    assert pid(courier) != first and courier.alive and courier.restarts == 1
    assert len(answer(courier)) == 1


def test_couriers_that_die_young_are_started_after_longer_and_longer_waits(
    courier: CourierProcess, clock: Clock
) -> None:
    for wait_s in [*RESTART_S, RESTART_S[-1]]:
        kill(courier)
        if wait_s:
            assert not courier.restart_if_dead()
            clock.now += wait_s - 0.01
            assert not courier.restart_if_dead()
            clock.now += 0.02
        assert courier.restart_if_dead()
    assert courier.restarts == len(RESTART_S) + 1


def test_a_courier_that_lived_long_starts_the_waits_anew(courier: CourierProcess, clock: Clock) -> None:
    kill(courier)
    assert courier.restart_if_dead()
    clock.now += HEALTHY_S + 1
    kill(courier)
    assert courier.restart_if_dead()


def test_to_a_dead_courier_one_can_still_speak(courier: CourierProcess) -> None:
    kill(courier)
    courier.send(Goodbye("nobody hears this"))
    courier.wait(0.01)
    assert not courier.clogged


def test_closing_ends_the_courier(clock: Clock) -> None:
    courier = CourierProcess()
    courier.start()
    process = courier._process
    assert process is not None
    answer(courier)
    courier.close(patience_s=WAIT_S)
    assert process.returncode == 0
    courier.close()


def test_closing_ends_the_courier_also_while_a_forked_worker_holds_the_socket(clock: Clock) -> None:
    """As the workers of a DataLoader do: a courier that were not told would be killed for being late."""
    courier = CourierProcess()
    courier.start()
    courier.send(NOWHERE)
    courier.wait(WAIT_S)
    assert courier._channel is not None and courier._process is not None
    process = courier._process
    held = os.dup(courier._channel.sock.fileno())
    courier.close(patience_s=WAIT_S)
    os.close(held)
    assert process.returncode == 0


def test_modules_in_the_scripts_folder_do_not_get_in_the_way(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    courier = CourierProcess()
    courier.start()
    assert len(answer(courier)) == 1
    courier.close()
