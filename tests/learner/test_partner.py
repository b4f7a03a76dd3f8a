"""With real couriers, killed for real; the clock between two starts is the test's own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.learner import partner as module
from atoll.learner.partner import HEALTHY_S, RESTART_S, Partner
from atoll.mailbox.channel import Bye, Start, StopOrder, ToTraining
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
def partner(clock: Clock) -> Iterator[Partner]:
    partner = Partner()
    partner.start()
    yield partner
    partner.close()


def pid(partner: Partner) -> int:
    assert partner._process is not None
    return partner._process.pid


def kill(partner: Partner) -> None:
    os.kill(pid(partner), signal.SIGKILL)
    partner.wait(WAIT_S)
    assert partner.receive() == []
    assert not partner.alive


def answer(partner: Partner) -> list[ToTraining]:
    """A courier that runs says what is wrong with this start."""
    partner.send(NOWHERE)
    partner.wait(WAIT_S)
    return partner.receive()


def test_a_courier_runs_and_answers(partner: Partner) -> None:
    [stop] = answer(partner)
    assert isinstance(stop, StopOrder) and stop.failed and stop.mistake
    assert "'no-address' is no address of a syncer" in stop.reason
    assert not partner.restart_if_dead()


def test_a_dead_courier_is_followed_by_another_that_works(partner: Partner) -> None:
    first = pid(partner)
    kill(partner)
    assert partner.restart_if_dead()
    assert pid(partner) != first and partner.alive and partner.restarts == 1
    assert len(answer(partner)) == 1


def test_couriers_that_die_young_are_started_after_longer_and_longer_waits(partner: Partner, clock: Clock) -> None:
    for wait_s in [*RESTART_S, RESTART_S[-1]]:
        kill(partner)
        if wait_s:
            assert not partner.restart_if_dead()
            clock.now += wait_s - 0.01
            assert not partner.restart_if_dead()
            clock.now += 0.02
        assert partner.restart_if_dead()
    assert partner.restarts == len(RESTART_S) + 1


def test_a_courier_that_lived_long_starts_the_waits_anew(partner: Partner, clock: Clock) -> None:
    kill(partner)
    assert partner.restart_if_dead()
    clock.now += HEALTHY_S + 1
    kill(partner)
    assert partner.restart_if_dead()


def test_to_a_dead_courier_one_can_still_speak(partner: Partner) -> None:
    kill(partner)
    partner.send(Bye("nobody hears this"))
    partner.wait(0.01)
    assert not partner.clogged


def test_closing_ends_the_courier(clock: Clock) -> None:
    partner = Partner()
    partner.start()
    process = partner._process
    assert process is not None
    answer(partner)
    partner.close(patience_s=WAIT_S)
    assert process.returncode == 0
    partner.close()


def test_closing_ends_the_courier_also_while_a_forked_worker_holds_the_socket(clock: Clock) -> None:
    """As the workers of a DataLoader do: a courier that were not told would be killed for being late."""
    partner = Partner()
    partner.start()
    partner.send(NOWHERE)
    partner.wait(WAIT_S)
    assert partner._channel is not None and partner._process is not None
    process = partner._process
    held = os.dup(partner._channel.sock.fileno())
    partner.close(patience_s=WAIT_S)
    os.close(held)
    assert process.returncode == 0


def test_modules_in_the_scripts_folder_do_not_get_in_the_way(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    partner = Partner()
    partner.start()
    assert len(answer(partner)) == 1
    partner.close()
