"""The training process's connection to its courier: starts it, watches it, starts another when it dies.

What the training process did, with the step after which it did it, goes to the courier too, for the tape.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress

import torch

from atoll.mailbox.channel import CourierChannel, ToCourier, ToTraining, decode_to_training
from atoll.protocol import effects as fx
from atoll.protocol.errors import RunFailed
from atoll.protocol.tape import AnyEntry, BeganEntry, Numbered

RESTART_S = (0.0, 0.5, 1.0, 2.0, 5.0)
"""Waits before a courier is started again; the last one holds for all later ones."""
HEALTHY_S = 30.0
"""A courier that lived this long starts the waits anew."""


class CourierProcess:
    """One courier at a time. Nothing in here waits, except `wait` when told to."""

    def __init__(self, replay: str = "") -> None:
        """`replay`: the socket of one that plays a tape; it stands in for the courier."""
        self._replay = replay
        self.restarts = 0
        self._channel: CourierChannel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._failures = 0
        self._retry_at = 0.0

    @property
    def replays(self) -> bool:
        return bool(self._replay)

    @property
    def alive(self) -> bool:
        return self._channel is not None and not self._channel.closed

    def start(self) -> None:
        self._started_at = time.monotonic()
        if self._replay:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(self._replay)
            self._channel = CourierChannel(sock)
            return
        self._channel, theirs = CourierChannel.pair()
        with theirs:
            env = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                # -P: no module in the script's folder takes the place of one of Python's own
                [sys.executable, "-P", "-m", "atoll.courier", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=env,
            )

    def restart_if_dead(self) -> bool:
        """True when a new courier has just been started; it knows nothing yet."""
        if self.alive:
            return False
        if self._replay:
            raise RunFailed("the replay that this training process belongs to is gone")
        now = time.monotonic()
        if self._process is not None:
            self._reap_courier(now)
        if now < self._retry_at:
            return False
        self.restarts += 1
        self.start()
        return True

    def send(self, frame: ToCourier, descriptor: int | None = None) -> None:
        if self._channel is not None and not self._channel.closed:
            self._channel.send(frame, descriptor)

    def take_descriptor(self) -> int:
        """The one that came with the frame that is being obeyed."""
        assert self._channel is not None
        return self._channel.take_descriptor()

    @property
    def clogged(self) -> bool:
        """The courier does not keep up: what can be left out should be."""
        return self._channel is not None and self._channel.clogged

    def receive(self) -> list[ToTraining]:
        if self._channel is None or self._channel.closed:
            return []
        self._channel.flush()
        return [decode_to_training(data) for data in self._channel.receive()]

    def wait(self, seconds: float) -> None:
        """Until something comes or the time is over."""
        if self._channel is None or self._channel.closed:
            time.sleep(min(seconds, 0.05))
        else:
            poll = select.poll()  # select() cannot watch descriptors past 1023
            poll.register(self._channel.sock, select.POLLIN)
            poll.poll(1000 * seconds)

    def close(self, patience_s: float = 5.0) -> None:
        """The courier ends when our end of the socket closes."""
        if self._channel is not None:
            self._channel.flush()
            with suppress(OSError):
                self._channel.sock.shutdown(socket.SHUT_RDWR)  # workers of a loader, forked off, hold this end too
            self._channel.close()
        if self._process is not None:
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _reap_courier(self, now: float) -> None:
        assert self._process is not None
        if self._channel is not None:
            self._channel.close()
        self._process.kill()
        self._process.wait()
        self._process = None
        self._failures = 0 if now - self._started_at > HEALTHY_S else self._failures + 1
        self._retry_at = now + RESTART_S[min(self._failures, len(RESTART_S)) - 1] if self._failures else now


class TapeRecorder:
    def __init__(self, courier: CourierProcess) -> None:
        self._courier = courier
        self._entries = Numbered()
        self._said = 0

    def add(self, entry: AnyEntry) -> None:
        self._entries.add((entry,))

    def tell(self) -> None:
        """The courier hears what is new."""
        if self._said < self._entries.end:
            first, entries = self._entries.since(self._said)
            self._courier.send(fx.Told(first, entries))
            self._said = self._entries.end

    def send_all_entries(self) -> None:
        """To a new courier, all that is kept: it passes over what the syncer has."""
        self._said = 0
        self.tell()


def describe_machine(t: int, device: torch.device, state: str, exact: bool) -> BeganEntry:
    return BeganEntry(
        t=t,
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        cpu=torch.backends.cpu.get_cpu_capability(),
        device=device.type,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        state=state,
        exact=exact,
    )
