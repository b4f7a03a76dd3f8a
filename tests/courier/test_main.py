from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

CODE = """
import atexit, runpy, sys
import atoll.courier.service
atexit.register(print, "taken apart")
sys.argv = ["courier", {fd!r}]
atoll.courier.service.main = lambda fd: print("ended", fd, end="") or 7
runpy.run_module("atoll.courier", run_name="__main__")
"""


def test_a_courier_that_is_done_ends_at_once_with_its_words_and_its_code() -> None:
    """The training process waits for it: taking its modules apart would be time for nothing."""
    command = [sys.executable, "-c", CODE.format(fd="3")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (7, "ended 3", "")


def test_one_whose_training_process_is_gone_ends_well() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "atoll.courier", str(theirs.fileno())]
    with ours, theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    assert process.communicate(timeout=60) == (None, b"")
    assert process.returncode == 0


def test_a_signal_to_the_whole_job_leaves_it_to_its_training_process() -> None:
    """A scheduler that preempts a job sends SIGTERM to all its processes; the learner needs its courier to leave."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "atoll.courier", str(theirs.fileno())]
    with ours, theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
        status, mask = Path(f"/proc/{process.pid}/status"), 1 << (signal.SIGTERM - 1)
        deadline = time.monotonic() + 60
        while not int(status.read_text().partition("SigIgn:")[2].split()[0], 16) & mask:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == (None, b"")
    assert process.returncode == 0
