from __future__ import annotations

import os
import signal
import threading

import pytest

from atoll.learner.script import LeaveRequest, LeftUnjoined


@pytest.fixture
def default_handler() -> object:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("default_handler")
def test_a_signal_is_noted_and_kills_nobody() -> None:
    preemption = LeaveRequest()
    preemption.watch()
    preemption.begun = True
    assert not preemption.asked
    os.kill(os.getpid(), signal.SIGTERM)
    assert preemption.asked
    preemption.stop()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("default_handler")
def test_a_scripts_own_handler_stays() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    preemption = LeaveRequest()
    preemption.watch()
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM] and not preemption.asked
    preemption.stop()


@pytest.fixture
def interruptible() -> object:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_handler", "interruptible")
def test_workers_of_a_loader_leave_an_interrupt_to_the_training_process(capfd: pytest.CaptureFixture[str]) -> None:
    preemption = LeaveRequest()
    preemption.watch()
    preemption.begun = True
    if (worker := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(3 if preemption.asked else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0
    assert capfd.readouterr().err == "" and not preemption.asked
    preemption.stop()


@pytest.mark.usefixtures("default_handler", "interruptible")
def test_the_first_interrupt_asks_and_the_second_ends(capfd: pytest.CaptureFixture[str]) -> None:
    preemption = LeaveRequest()
    preemption.watch()
    preemption.begun = True
    os.kill(os.getpid(), signal.SIGINT)
    assert preemption.why == "it was interrupted (Ctrl-C)"
    assert "Ctrl-C again ends it at once" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    preemption.stop()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("default_handler", "interruptible")
def test_before_training_has_begun_an_interrupt_ends_at_once() -> None:
    preemption = LeaveRequest()
    preemption.watch()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert not preemption.asked
    preemption.stop()


@pytest.mark.usefixtures("default_handler")
def test_before_training_has_begun_sigterm_ends_the_script_once() -> None:
    preemption = LeaveRequest()
    preemption.watch()
    with pytest.raises(LeftUnjoined) as ended:
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143 and preemption.asked
    os.kill(os.getpid(), signal.SIGTERM)  # on its way out: not broken off by another
    preemption.stop()


def test_whoever_is_drained_before_it_joined_ends_with_code_0() -> None:
    preemption = LeaveRequest()
    preemption.ask("it was drained")
    assert preemption.make_unjoined().code == 0 and "it was drained" in str(preemption.make_unjoined())


@pytest.mark.usefixtures("default_handler", "interruptible")
def test_after_a_drain_an_interrupt_ends_at_once() -> None:
    preemption = LeaveRequest()
    preemption.watch()
    preemption.begun = True
    preemption.ask("it was drained")
    os.kill(os.getpid(), signal.SIGTERM)
    assert preemption.why == "it was drained", "the first to ask is the reason"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    preemption.stop()


@pytest.mark.usefixtures("default_handler")
def test_an_interrupt_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    preemption = LeaveRequest()
    preemption.watch()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    preemption.stop()
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_handler")
def test_in_another_thread_nothing_is_watched() -> None:
    preemption = LeaveRequest()
    thread = threading.Thread(target=preemption.watch)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
