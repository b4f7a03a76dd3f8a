"""Messages between the training process and its courier, over a local socket: whole frames, in order.

    training process → courier    Start  MailboxReady  StepReport  CopyMade  VersionTaken  SlotFreed  StateCopyMade
                                  Goodbye
                                  and the events Told, Registered, Saved, Taken
    courier → training process    Welcomed  SettingsTold  RunProgress  DialFailed  JoinProgress  ReadOrder  HoldOrder
                                  AdoptOrder  ForgetOrder  TakeOrder  GoOrder  StopOrder
                                  and the effects CancelRead, LetGo, Own, Supply, Save, Capture, Await, Begin,
                                  HoldBack, BeginTraining, AskToLeave

Events and effects of the learner's state machine (protocol/learner/effects.py) travel as they are if nothing has to be
added; a frame of its own carries what the state machine does not know, such as a slot's number.

A learner of several ranks has a courier beside each. They send the frames that all ranks carry out at the same step
(`is_counted`) in the same order and with the same content, so the training processes agree by counting them.

Neither side ever waits to send: what does not fit into the socket waits in memory. What the other side sent before it
went is read first: only then is the channel closed. The courier alone decides who uses which slot for what. The channel
duplicates a descriptor that goes with a frame: the sender may close its own.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from typing import Any, get_args

import msgspec

from atoll.protocol.errors import PeerError
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.effects import Adopted, Stepped
from atoll.protocol.messages import RankBoxes, TensorSpec
from atoll.protocol.settings import Settings

FRAME_LIMIT = 16 * 2**20
"""A frame may carry the names and shapes of every tensor; more than this is nonsense."""
ANCILLARY = socket.CMSG_SPACE(4 * array.array("i").itemsize)
BASE = -1
"""In place of a slot, for carry: subtract the base."""


class Frame(msgspec.Struct, frozen=True):
    """A message that only these two processes know."""


class Start(Frame, frozen=True):
    learner: str
    session: str
    url: str
    tensors: tuple[TensorSpec, ...]
    boxed: bool = False
    """A box follows at once: this courier takes over from one that died."""
    data: str = ""
    restored: bool = False
    """Its inner optimizer comes from what this learner saved: it takes no peer's."""
    tokens_per_step: int = 0
    """The most that a step has, where the script says so."""
    host: str = ""
    pid: int = 0
    """Of the training process."""
    proof: str = ""
    """That it is the successor of whoever had its name (protocol/succession.py)."""
    frozen: str = ""
    """A digest of what it does not merge."""
    takes_frozen: bool = False
    """Where that is not the run's, it takes a peer's …"""
    frozen_bytes: int = 0
    """… frozen parameters, which have so many bytes."""
    ranks: tuple[RankBoxes, ...] = ()
    """What each rank of this learner holds; empty: it is one process, which holds everything. All ranks give the same
    learner, session, url and tensors (of the whole model)."""
    rank: int = 0
    """Of this process. To rank 0 of several the listening socket at which the others come goes with this frame …"""
    leader: str = ""
    """… and the others are told where it is: host:port."""
    secret: str = ""
    """By which the couriers of one learner know each other."""
    unmerged: tuple[str, ...] = ()
    """Tensors that are not merged."""
    renamed: tuple[str, ...] = ()
    """Tensors that `state_dict()` of the model has under other names."""


class MailboxReady(Frame, frozen=True):
    """The descriptor of the shared memory comes with this frame."""

    settings: Settings
    stepped: Stepped
    sure: bool = False
    """The base is whole and nothing was on its way: it comes out of a cut, not from a courier that died."""
    waits: bool = False
    """It waited for a peer's state when that courier died."""
    on_device: bool = False
    """Its layout: copies come encoded."""


class StepReport(Frame, frozen=True):
    stepped: Stepped
    epoch: int = 0


class StepMissing(Frame, frozen=True):
    """The script draws batch after batch and has never called `learner.step`: it is not in a long first step."""

    batches: int


class CopyMade(Frame, frozen=True):
    slot: int
    round: int
    fragment: int
    t: int
    steps: int
    tokens: int
    base: int
    epoch: int
    """How many times the training process was told to forget; what it did before no longer counts."""
    total: int = 0
    position: int = -1
    feedback: int = -1
    """Placement device: the step of the copy whose rest it was encoded with."""


class VersionTaken(Frame, frozen=True):
    """A version is in the model; its slot may be copied into the base."""

    slot: int
    adopted: Adopted
    epoch: int


class SlotFreed(Frame, frozen=True):
    """An order was dropped undone; its slot is free."""

    slot: int
    incoming: bool


class StateCopyMade(Frame, frozen=True):
    """The training process's state for newcomers, or the reason why there is none. Its memory comes with this frame."""

    number: int
    t: int
    size: int = 0
    digest: str = ""
    reason: str = ""


class Goodbye(Frame, frozen=True):
    reason: str


class Welcomed(Frame, frozen=True):
    settings: Settings
    fingerprint: str
    incarnation: int
    versions: tuple[int, ...] = ()
    """The run's newest, which a learner takes before it trains on."""
    index: int = -1
    """This learner's number in the run."""
    frozen: str = ""
    """The digest that the run's first learner brought of what it does not merge."""
    run: str = ""
    succeeds: tuple[str, ...] = ()
    """Lost runs that this one goes on for: what was saved in them is used here."""


class SettingsTold(Frame, frozen=True):
    """H, τ or adoption of the run have changed."""

    settings: Settings


class RunProgress(Frame, frozen=True):
    """How far the run is. These values belong to one moment of the run, so they travel in one frame: in shared memory a
    reader could see some of them from before and some from after an announcement."""

    committed: int = 0
    """Rounds that are behind the run."""
    progress: float = 0.0
    """How much of its budget is spent."""
    global_step: int = 0


class DialFailed(Frame, frozen=True):
    """The syncer could not be reached, and there is no run to be part of yet; it is dialled again."""

    reason: str
    met_another: bool = False
    """Somebody with another certificate answered."""


class JoinProgress(Frame, frozen=True):
    """Progress of the download of the run's parameters, about twice a second while this process joins."""

    whole: int
    """Bytes of the run's parameters that this process fetches; 0: it fetches none."""
    lacking: int
    """Bytes of them that have not arrived yet."""


class ReadOrder(Frame, frozen=True):
    slot: int
    round: int
    fragment: int
    step: int


class HoldOrder(Frame, frozen=True):
    round: int
    fragment: int
    step: int


class AdoptOrder(Frame, frozen=True):
    slot: int
    fragment: int
    version: int
    round: int
    rule: str
    blend: float
    step: int
    minus: int = BASE
    """carry: the outgoing slot to subtract, or BASE."""
    minus_steps: int = 0
    minus_tokens: int = 0
    held_tokens: int = 0
    """Own tokens that the version contains: what is overwritten beyond them is dropped."""
    copy_t: int = -1
    """carry: the step of the copy in that slot."""
    moments: bool = False
    """Averaged moments are in the slot, to be adopted with the version."""


class ForgetOrder(Frame, frozen=True):
    epoch: int
    reset: bool
    """The inner optimizer starts afresh too."""


class TakeOrder(Frame, frozen=True):
    """Take a peer's state between two steps. Its memory comes with this frame."""

    ticket: str
    size: int


class GoOrder(Frame, frozen=True):
    """Replay: train on until this step is done, and wait there."""

    until: int


class StopOrder(Frame, frozen=True):
    reason: str
    final: bool
    failed: bool = False
    mistake: bool = False
    """It failed, and the operator can mend it: the model or the settings do not fit."""


ToCourier = (
    Start
    | MailboxReady
    | StepReport
    | StepMissing
    | fx.Told
    | fx.Registered
    | CopyMade
    | VersionTaken
    | SlotFreed
    | fx.Saved
    | StateCopyMade
    | fx.Taken
    | Goodbye
)
ToTraining = (
    Welcomed
    | SettingsTold
    | RunProgress
    | ReadOrder
    | fx.CancelRead
    | HoldOrder
    | fx.LetGo
    | AdoptOrder
    | fx.Own
    | ForgetOrder
    | fx.Supply
    | fx.Save
    | fx.Capture
    | fx.Await
    | TakeOrder
    | fx.Begin
    | GoOrder
    | fx.HoldBack
    | fx.BeginTraining
    | fx.AskToLeave
    | StopOrder
    | DialFailed
    | JoinProgress
)
COUNTED = (
    Welcomed,
    SettingsTold,
    ReadOrder,
    fx.CancelRead,
    HoldOrder,
    fx.LetGo,
    AdoptOrder,
    fx.Own,
    ForgetOrder,
    fx.Supply,
    fx.Save,
    fx.HoldBack,
    fx.BeginTraining,
    fx.AskToLeave,
)
_TO_COURIER = {kind.__name__: kind for kind in get_args(ToCourier)}
_TO_TRAINING = {kind.__name__: kind for kind in get_args(ToTraining)}


def is_counted(frame: ToTraining) -> bool:
    """Return whether all ranks of a learner get this frame, and carry it out at the same step. Only rank 0 gets the
    progress of the run, the progress of joining, and the notice that no syncer answers. A rank obeys an order to stop
    because something failed at once, since a rank that is gone could not agree."""
    return isinstance(frame, COUNTED) or (isinstance(frame, StopOrder) and not frame.failed)


class CourierChannel:
    """One end of the socket: whole frames in, whole frames out, never blocking."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.closed = False
        self._incoming = bytearray()
        self._waiting: deque[tuple[memoryview, int | None]] = deque()
        """Bytes, and the descriptor that goes with the first of them."""
        self._descriptors: deque[int] = deque()

    @staticmethod
    def pair() -> tuple[CourierChannel, socket.socket]:
        """Our end, and the end to hand to the other process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return CourierChannel(ours), theirs

    @property
    def clogged(self) -> bool:
        """The other side does not keep up with what is sent."""
        return bool(self._waiting)

    @property
    def waiting(self) -> int:
        """Frames that the other side has not taken yet."""
        return len(self._waiting)

    def send(self, frame: msgspec.Struct, descriptor: int | None = None) -> None:
        data = encode_frame(frame)
        own = None if descriptor is None else os.dup(descriptor)
        self._waiting.append((memoryview(len(data).to_bytes(4, "little") + data), own))
        self.flush()

    def flush(self) -> bool:
        """Send what waits; True when nothing is left."""
        while self._waiting and not self.closed:
            packet, descriptor = self._waiting.popleft()
            try:
                sent = self.sock.sendmsg([packet], _rights(descriptor))
            except BlockingIOError:
                self._waiting.appendleft((packet, descriptor))
                return False
            except OSError:
                self._waiting.appendleft((packet, descriptor))
                self._clear()  # nobody is there to read it; `receive` finds the end
                return True
            _close(descriptor)
            if sent < len(packet):
                self._waiting.appendleft((packet[sent:], None))
        return not self._waiting

    def receive(self) -> list[bytes]:
        """Every whole frame that has come; sets `closed` when the other side is gone."""
        while not self.closed:
            try:
                data, ancillary, _, _ = self.sock.recvmsg(1 << 16, ANCILLARY)
            except BlockingIOError:
                break
            except OSError:
                self.closed = True
                break
            self._take_descriptors(ancillary)
            if not data:
                self.closed = True
            self._incoming += data
            if len(data) < 1 << 16:
                break
        return self._frames()

    def take_descriptor(self) -> int:
        if not self._descriptors:
            raise PeerError("a frame that should carry a descriptor came without one")
        return self._descriptors.popleft()

    def close(self) -> None:
        self.closed = True
        self._clear()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self.sock.close()

    def _clear(self) -> None:
        while self._waiting:
            _close(self._waiting.popleft()[1])

    def _frames(self) -> list[bytes]:
        frames = []
        while len(self._incoming) >= 4:
            length = int.from_bytes(self._incoming[:4], "little")
            if length > FRAME_LIMIT:
                raise PeerError(f"a frame of {length} bytes between learner and courier; the limit is {FRAME_LIMIT}")
            if len(self._incoming) < 4 + length:
                break
            frames.append(bytes(self._incoming[4 : 4 + length]))
            del self._incoming[: 4 + length]
        return frames

    def _take_descriptors(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                self._descriptors.extend(numbers)


def _rights(descriptor: int | None) -> list[tuple[int, int, array.array[int]]]:
    return [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def encode_frame(frame: msgspec.Struct) -> bytes:
    """By its name: the structs of protocol/learner/effects.py carry no tag."""
    return msgspec.msgpack.encode((type(frame).__name__, frame))


def decode_to_courier(data: bytes) -> ToCourier:
    frame: ToCourier = decode_frame(data, _TO_COURIER)
    return frame


def decode_to_training(data: bytes) -> ToTraining:
    frame: ToTraining = decode_frame(data, _TO_TRAINING)
    return frame


def decode_frame(data: bytes, kinds: dict[str, Any]) -> Any:
    """One of these kinds, by name."""
    name, body = msgspec.msgpack.decode(data, type=tuple[str, msgspec.Raw])
    if name not in kinds:
        raise msgspec.ValidationError(f"no frame is called {name[:40]!r} here")
    return msgspec.msgpack.decode(body, type=kinds[name])
