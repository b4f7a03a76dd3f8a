"""What a training process is told of its run is read whole, changes between two steps only, and is what the tape says.

The courier here is a hostile writer: it owns the other end of the real socket and lets the bytes through in any pieces,
at any moment of a step.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atoll.learner.courier_process import CourierProcess
from atoll.learner.learner import Learner
from atoll.learner.model import describe
from atoll.mailbox.channel import (
    CourierChannel,
    RunProgress,
    StopOrder,
    ToTraining,
    Welcomed,
    decode_to_courier,
    encode_frame,
)
from atoll.numerics.fragments import make_plan
from atoll.protocol.learner import effects as fx
from atoll.protocol.settings import Settings
from atoll.protocol.tape import InformedEntry

Seen = tuple[float, int]
NOTHING = RunProgress()
RULES = Settings(fragments=2, overlap=0).resolved(2)


@pytest.fixture(autouse=True)
def _no_run_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_SYNCER", "ATOLL_LEARNER", "ATOLL_ROLE", "ATOLL_SEED"):
        monkeypatch.delenv(name, raising=False)


def in_bytes(frame: ToTraining) -> bytes:
    data = encode_frame(frame)
    return len(data).to_bytes(4, "little") + data


class Wire(CourierProcess):
    """A partner whose courier is whoever holds the other end."""

    def __init__(self) -> None:
        super().__init__()
        self._channel, self.far = CourierChannel.pair()

    def start(self) -> None:
        pass


@dataclass
class Script:
    """A training script that looks at its learner several times in each step, and what it saw."""

    learner: Learner
    far: socket.socket
    seen: list[Seen] = field(default_factory=list)
    """By step, the first at 0: before any step was counted."""
    _taped: list[InformedEntry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._courier = CourierChannel(socket.socket(fileno=os.dup(self.far.fileno())))

    def look(self) -> Seen:
        return self.learner.progress, self.learner.global_step

    def compute(self) -> Iterator[None]:
        """The computation of one step, which stops in its middle twice."""
        self.seen.append(self.look())
        yield
        assert self.look() == self.seen[-1], "it changed under a step"
        self.learner._session.wait(0.0)  # type: ignore[union-attr]  # as `batches` does while it waits for a lease
        assert self.look() == self.seen[-1], "it changed under a step, by waiting for data"
        yield
        assert self.look() == self.seen[-1], "it changed under a step"
        self.learner.step(tokens=1)

    def close(self) -> None:
        self._courier.close()

    def taped(self) -> list[InformedEntry]:
        """What it has told its courier by now. A read ends at a frame that brings a descriptor: hence several."""
        while frames := self._courier.receive():
            told = [frame for frame in map(decode_to_courier, frames) if isinstance(frame, fx.Told)]
            self._taped += [entry for frame in told for entry in frame.entries if isinstance(entry, InformedEntry)]
        return self._taped


@contextmanager
def joined(first: RunProgress) -> Iterator[Script]:
    model = nn.Linear(2, 1)
    wire, plan = Wire(), make_plan(describe(model), RULES.fragments)
    learner = Learner(model, syncer="http://127.0.0.1:9", name="learner-0", join_wait_s=30.0)
    learner._courier = wire
    wire.far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    wire.far.sendall(b"".join(map(in_bytes, (Welcomed(RULES, plan.fingerprint, 1), first, fx.Own()))))
    with wire.far, learner:
        script = Script(learner, wire.far)
        try:
            yield script
        finally:
            script.close()
        wire.far.sendall(in_bytes(StopOrder("the run is over", final=True)))


def bits(seen: Seen) -> tuple[bytes, int]:
    return struct.pack(">d", seen[0]), seen[1]


def as_replayed(entries: list[InformedEntry], steps: int) -> list[Seen]:
    """What a replay tells: before the step after `t`, what the newest entry of up to `t` says."""
    seen, at, known = [], 0, (0.0, 0)
    for t in range(steps):
        while at < len(entries) and entries[at].t <= t:
            assert entries[at].progress is not None
            known, at = (min(1.0, entries[at].progress), entries[at].global_step), at + 1
        seen.append(known)
    return seen


values = st.builds(
    RunProgress,
    committed=st.integers(0, 2**40),
    progress=st.floats(0.0, 1.0) | st.just(0.1 + 0.2),
    global_step=st.integers(0, 2**40),
)
others = st.sampled_from([fx.LetGo(round=3), fx.AskToLeave(reason="x" * 300)])


@settings(deadline=None, max_examples=60)
@given(frames=st.lists(values | values | others, max_size=12), cuts=st.lists(st.integers(0, 40), max_size=60))
def test_whatever_the_pieces_it_is_read_whole_and_taped(frames: list[ToTraining], cuts: list[int]) -> None:
    """Every step sees one announcement, and the tape repeats what each step saw, bit for bit."""
    stream = b"".join(map(in_bytes, frames))
    told = {bits((min(1.0, frame.progress), frame.global_step)) for frame in frames if isinstance(frame, RunProgress)}
    with joined(NOTHING) as script:
        pieces = deque(cuts)
        while pieces:
            for _ in script.compute():
                size = pieces.popleft() if pieces else 0
                script.far.sendall(stream[:size])
                stream = stream[size:]
        script.far.sendall(stream)
        for _ in range(2):  # all of it has come, and its entry in the tape is told at the boundary after
            list(script.compute())
        assert {bits(seen) for seen in script.seen} <= {*told, bits((0.0, 0))}
        if last := [frame for frame in frames if isinstance(frame, RunProgress)][-1:]:
            assert script.seen[-1] == (last[0].progress, last[0].global_step), "the newest counts in the end"
        repeated = as_replayed(script.taped(), len(script.seen))
        assert [bits(seen) for seen in repeated] == [bits(seen) for seen in script.seen]


def test_a_writer_beside_it_that_is_stopped_anywhere_never_makes_a_mixture() -> None:
    """A thread writes in pieces of a few bytes, now fast and now slowly, while the script trains."""
    rounds, chance, stepped = 1000, random.Random(13), threading.Event()

    def announced(committed: int) -> RunProgress:
        return RunProgress(committed, committed / rounds, 3 * committed)

    with joined(announced(0)) as script:
        stream = b"".join(in_bytes(announced(number)) for number in range(1, rounds + 1))

        def write() -> None:
            at = 0
            while at < len(stream):
                size = chance.choice((1, 2, 3, 5, 11, 40, 400))
                script.far.sendall(stream[at : at + size])
                at += size
                if chance.random() < 0.1:
                    stepped.clear()
                    stepped.wait(1.0)

        writer = threading.Thread(target=write)
        writer.start()
        while writer.is_alive() or script.look() != (1.0, 3 * rounds):
            list(script.compute())
            script.taped()  # a courier reads what it is told
            stepped.set()
        writer.join()
        committed = [step // 3 for _, step in script.seen]
        assert all(seen == (c / rounds, 3 * c) for seen, c in zip(script.seen, committed, strict=True)), "a mixture"
        assert committed == sorted(committed)
        assert len(set(committed)) > 10, "it was read while it was written"
        assert as_replayed(script.taped(), len(script.seen)) == script.seen


def test_training_begins_once_it_is_known_how_far_the_run_is() -> None:
    """A learner that goes on from a cut has its parameters at once; its first step must not go by progress 0."""
    with joined(RunProgress(40, 0.5, 60)) as script:
        list(script.compute())
        assert script.seen == [(0.5, 60)]
        list(script.compute())
        assert script.taped() == [InformedEntry(0, 40, 0.5, 60)], "once: nothing new was said"
