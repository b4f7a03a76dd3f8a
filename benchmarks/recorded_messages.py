"""A recorded stream of control messages: what 8 learners send to their syncer, with the moments at which it comes.

    python benchmarks/recorded_messages.py      # records it anew: a few seconds

The stream is made in virtual time by the simulator, whose learners are the shipped state machine: hellos, reports,
contributions, declines, requests for data, saved cuts, and what a learner says that is killed, drained or loses its
connection. It is committed (results/messages.msgpack.xz), so that a changed rule changes the work of the syncer and
not the messages it is measured with. Record it anew when a message cannot be read any more, or when the syncer
commits other rounds than those of the recording: then the messages no longer answer what it asks.
"""

from __future__ import annotations

import lzma
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from atoll.digests import compute_digest
from atoll.numerics.codec import body_nbytes, make_codec
from atoll.numerics.fragments import make_plan
from atoll.protocol.learner.effects import Registered
from atoll.protocol.messages import FromLearner, TensorSpec
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as fx
from atoll.simulate import inject
from atoll.simulate.faults import Fault
from atoll.simulate.simulated_syncer import SimulatedSyncer
from atoll.simulate.world import World

STREAM = Path(__file__).parent / "results" / "messages.msgpack.xz"
MESSAGES = 20_000
LEARNERS = 8
FRAGMENTS = 24
TENSORS = tuple(TensorSpec(f"blocks.{number}.mlp.weight", (2, 4), "float32") for number in range(FRAGMENTS))
PLAN = make_plan(TENSORS, FRAGMENTS)
SETTINGS = Settings(learners=LEARNERS, fragments=FRAGMENTS, sync_every=FRAGMENTS, quorum=4).resolved(FRAGMENTS)
FAULTS = tuple(
    Fault(at, kind, target, length, number=1)  # type: ignore[arg-type]
    for at, kind, target, length in (
        (200.0, "kill", 1, 20.0),
        (300.0, "reset", 2, 1.0),
        (400.0, "partition", 3, 15.0),
        (500.0, "slow", 4, 60.0),
        (600.0, "drain", 5, 30.0),
        (700.0, "courier", 6, 5.0),
        (800.0, "reset", 0, 1.0),
        (900.0, "kill", 7, 10.0),
    )
)


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """What comes from one learner at one moment."""

    at_ms: int
    learner: str
    data: bytes = b""
    """Encoded message; a hello opens a new connection. Empty: the connection breaks, or, with `initial`, the first
    parameters come."""
    body: tuple[int, int, int] | None = None
    """Round, attempt and fragment of the body that comes just before the message."""
    initial: str = ""
    """Session whose first parameters come."""


class Stream(msgspec.Struct, frozen=True):
    """A recording, and what became of it when it was made."""

    settings: Settings
    tensors: tuple[TensorSpec, ...]
    rounds: int
    """Rounds that the simulated syncer committed."""
    frames: list[Frame]


def make_body(fragment: int) -> bytes:
    """Return the body that every contribution to this fragment has: small values, all the same."""
    return b"\x3a" * body_nbytes(make_codec(SETTINGS.codec), PLAN.fragments[fragment])


def name_on_wire(session: str) -> str:
    """Return the session's name in the letters that names of a real syncer may have."""
    return session.replace("/", ".")


class RecordedWorld(World):
    """A world that keeps what its syncer is sent."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.frames: list[Frame] = []
        self.kinds: Counter[str] = Counter()
        self._sessions_of: dict[str, str] = {}
        self._numbers: Counter[str] = Counter()
        """Messages of each session so far: they are numbered on the wire."""
        self._digests = [compute_digest(memoryview(make_body(part.index))) for part in PLAN.fragments]

    def deliver(self, syncer: SimulatedSyncer, event: fx.SyncerEvent, least: float = 0.0) -> list[fx.SyncerEffect]:
        match event:
            case fx.Greeted(hello):
                self._sessions_of[hello.learner] = session = name_on_wire(hello.session)
                self._keep(hello.learner, msgspec.structs.replace(hello, session=session, tensors=TENSORS))
            case fx.Received(learner, message):
                self._keep(learner, message)
            case fx.Delivered(learner, given):
                named = msgspec.structs.replace(given, digest=self._digests[given.fragment])
                self._keep(learner, named, (given.round, given.attempt, given.fragment))
            case fx.Lost(learner):
                self.frames.append(Frame(self._moment(), learner))
            case fx.Initialised(learner, session):
                self.frames.append(Frame(self._moment(), learner, initial=name_on_wire(session)))
        return super().deliver(syncer, event, least)

    def _keep(self, learner: str, message: FromLearner, body: tuple[int, int, int] | None = None) -> None:
        session = self._sessions_of[learner]
        self._numbers[session] += 1
        self.kinds[type(message).__name__] += 1
        data = msgspec.msgpack.encode(msgspec.structs.replace(message, seq=self._numbers[session]))
        self.frames.append(Frame(self._moment(), learner, data, body))

    def _moment(self) -> int:
        return round(1e3 * self.now)


def record() -> tuple[Stream, Counter[str]]:
    """Return the stream and how many messages of each kind it has."""
    data = Registered((("web", 1_000_000, 3.0), ("code", 200_000, 1.0)), 1, 8)
    world = RecordedWorld(SETTINGS, seed=1, latency_s=0.02, jitter=0.5, data=data)
    world.network.redials = True
    for number in range(LEARNERS):
        world.network.dial_later(world.join(f"learner-{number}", 1.0 + 0.02 * number))
    inject.schedule(world, list(FAULTS))
    while world.kinds.total() < MESSAGES:
        world.step()
    return Stream(SETTINGS, TENSORS, world.syncer.committed, world.frames), world.kinds


def read_stream() -> Stream:
    return msgspec.msgpack.decode(lzma.decompress(STREAM.read_bytes()), type=Stream)


def main() -> int:
    stream, kinds = record()
    STREAM.write_bytes(lzma.compress(msgspec.msgpack.encode(stream), preset=9 | lzma.PRESET_EXTREME))
    print(f"{STREAM.name}: {STREAM.stat().st_size:,} bytes, {stream.rounds} rounds; {dict(kinds)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
