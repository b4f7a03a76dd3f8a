from __future__ import annotations

import os
import signal
import threading

import pytest

from atoll.learner.preempt import Preemption


@pytest.fixture
def default_handler() -> object:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("default_handler")
def test_a_signal_is_noted_and_kills_nobody() -> None:
    preemption = Preemption()
    preemption.watch()
    assert not preemption.asked
    os.kill(os.getpid(), signal.SIGTERM)
    assert preemption.asked
    preemption.stop()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("default_handler")
def test_a_scripts_own_handler_stays() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    preemption = Preemption()
    preemption.watch()
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM] and not preemption.asked
    preemption.stop()


@pytest.mark.usefixtures("default_handler")
def test_in_another_thread_nothing_is_watched() -> None:
    preemption = Preemption()
    thread = threading.Thread(target=preemption.watch)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
