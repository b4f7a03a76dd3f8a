"""The training process's connection to its courier: starts it, watches it, starts another when it dies.

What the training process did, with the step after which it did it, goes to the courier too, for the tape.

Where copies to a device take time, a thread reads the courier's frames: it starts to bring a version at once and keeps
the frames, in their order, for the training thread. Then the thread alone receives.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch

from atoll.mailbox.channel import AdoptOrder, CourierChannel, ToCourier, ToTraining, decode_to_training
from atoll.protocol.errors import RunFailed
from atoll.protocol.learner import effects as fx
from atoll.protocol.tape import AnyEntry, BeganEntry, Numbered

RESTART_S = (0.0, 0.5, 1.0, 2.0, 5.0)
"""Waits before a courier is started again; the last one holds for all later ones."""
READ_S = 1.0
"""The thread that reads looks this often whether the channel was closed on this side."""
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
        self._lock = threading.Lock()
        """Held by whoever uses the channel: copies are told by another thread."""
        self._bring: Callable[[AdoptOrder], None] | None = None
        self._enter_thread: Callable[[], None] = lambda: None
        self._reader: threading.Thread | None = None
        self._frames: deque[ToTraining] = deque()
        """What the thread has read."""
        self._came = threading.Event()
        self._broken: Exception | None = None

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
        else:
            self._channel = self._start_process()
        if self._bring is not None:
            self._start_reader()

    def _start_process(self) -> CourierChannel:
        channel, theirs = CourierChannel.pair()
        with theirs:
            env = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                # -P: no module in the script's folder takes the place of one of Python's own
                [sys.executable, "-P", "-m", "atoll.courier", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=env,
                # IPython's kernel, shut down, ends its process group before anything in it could leave a run.
                process_group=0 if "ipykernel" in sys.modules else None,
            )
        return channel

    def read_in_background(
        self, bring: Callable[[AdoptOrder], None] | None, enter_thread: Callable[[], None] = lambda: None
    ) -> None:
        """From now on a thread reads, and gives every order to adopt to `bring` before anybody else sees it. None:
        it only reads; the shared memory is gone."""
        self._bring, self._enter_thread = bring, enter_thread
        if self._reader is None and bring is not None and self.alive:
            self._start_reader()

    def _start_reader(self) -> None:
        assert self._channel is not None
        self._frames.clear()  # of a courier that is dead
        self._reader = threading.Thread(
            target=self._read_frames, args=(self._channel,), name="atoll-frames", daemon=True
        )
        self._reader.start()

    def _read_frames(self, channel: CourierChannel) -> None:
        """The thread. An error is raised where the frames would have been taken."""
        try:
            self._enter_thread()
            while not channel.closed:
                _poll(channel.sock, READ_S)
                with self._lock:
                    data = channel.receive()
                for frame in map(decode_to_training, data):
                    if isinstance(frame, AdoptOrder) and (bring := self._bring) is not None:
                        bring(frame)
                    self._frames.append(frame)
                self._came.set()
        except Exception as error:
            self._broken = error
            self._came.set()

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
        with self._lock:
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
        with self._lock:
            self._channel.flush()
            if self._reader is None:
                return [decode_to_training(data) for data in self._channel.receive()]
        if self._broken is not None:
            raise self._broken
        self._came.clear()
        return [self._frames.popleft() for _ in range(len(self._frames))]

    def wait(self, seconds: float) -> None:
        """Until something comes or the time is over."""
        if self._channel is None or self._channel.closed:
            time.sleep(min(seconds, 0.05))
        elif self._reader is not None:
            self._came.wait(seconds)
        else:
            _poll(self._channel.sock, seconds)

    def close(self, patience_s: float = 5.0) -> None:
        """The courier ends when our end of the socket closes."""
        if self._channel is not None:
            self._channel.flush()
            with suppress(OSError):
                self._channel.sock.shutdown(socket.SHUT_RDWR)  # workers of a loader, forked off, hold this end too
            self._close_channel(self._channel)
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
            self._close_channel(self._channel)
        self._process.kill()
        self._process.wait()
        self._process = None
        self._failures = 0 if now - self._started_at > HEALTHY_S else self._failures + 1
        self._retry_at = now + RESTART_S[min(self._failures, len(RESTART_S)) - 1] if self._failures else now

    def _close_channel(self, channel: CourierChannel) -> None:
        """The other side is gone, or was told to go: its reader finds the end and is waited for."""
        if self._reader is not None:
            self._reader.join()
            self._reader = None
        channel.close()


def _poll(sock: socket.socket, seconds: float) -> None:
    poll = select.poll()  # select() cannot watch descriptors past 1023
    poll.register(sock, select.POLLIN)
    poll.poll(1000 * seconds)


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
