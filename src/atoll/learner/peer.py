"""A learner and its peers, in the training process: a copy of its state for a newcomer, a peer's state for itself.

That is the inner optimizer's state, persistent buffers and what the script registered for it; parameters are the run's,
chance is each learner's own. Between two steps only copies are made; a thread brings them into memory that the courier
can read, so giving its state away holds no step up. A peer's state is checked as a whole before anything is changed
(taking.py): what is not as this script's own is refused, and this learner goes on as it is.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue

from torch import nn

from atoll.learner.courier_process import CourierProcess
from atoll.learner.ending import say
from atoll.learner.inner import Optimizers
from atoll.learner.model import BufferRule
from atoll.learner.recorder import Recorder
from atoll.learner.snapshot import Snapshot, decode, encode, ranged, size
from atoll.learner.state import Stateful, capture
from atoll.learner.taking import take
from atoll.learner.unmerged import Unmerged
from atoll.mailbox.channel import AwaitOrder, BeginOrder, CaptureOrder, StateCopy, StateTaken, TakeOrder
from atoll.mailbox.memory import mapped, reserve
from atoll.protocol.bounds import clipped
from atoll.protocol.errors import AtollError, PeerError
from atoll.protocol.tape import Gave, Took

PeerOrder = CaptureOrder | AwaitOrder | TakeOrder | BeginOrder


class PeerStates:
    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        extras: Mapping[str, Stateful],
        courier: CourierProcess,
        tape: Recorder | None = None,
        buffers: BufferRule = None,
        unmerged: Unmerged | None = None,
        not_from_peers: Sequence[str] = (),
    ) -> None:
        """`extras`: what the script registered and lets newcomers take from peers; `not_from_peers`: the rest of it."""
        self._not_from_peers = not_from_peers
        self._model, self._optimizers, self._extras, self._courier = model, optimizers, extras, courier
        self._tape, self._buffers = tape or Recorder(courier), buffers
        self._unmerged = unmerged or Unmerged(model, buffers, "mine")
        self.waits = False
        """A peer's state is on its way, or sought."""
        self._made: SimpleQueue[tuple[int, StateCopy, int | None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._couriers = 0
        """That died; what one of them had ordered is not for the next."""

    def obey(self, order: PeerOrder, t: int) -> None:
        """Between two steps."""
        match order:
            case CaptureOrder(number, frozen):
                self._give(number, t, frozen)
            case AwaitOrder():
                self.waits = True
            case TakeOrder(ticket, length):
                reason, refused = self._take(self._courier.take_descriptor(), length)
                if not reason:
                    self._tape.add(Took(t, ticket))
                    self._tell_begun_anew()
                self._courier.send(StateTaken(ticket, t, clipped(reason), refused))
            case BeginOrder(text):
                self.waits = False
                say(text)
                self._unmerged.refuse()

    def _tell_begun_anew(self) -> None:
        for name in self._not_from_peers:
            say(f"'{name}' begins anew here: learner.register({name!r}, ..., from_peers=True) takes a peer's")

    def courier_died(self) -> None:
        self._couriers += 1

    def settle(self) -> None:
        """Hand over what the thread has finished."""
        try:
            while True:
                courier, frame, fd = self._made.get_nowait()
                if courier == self._couriers:
                    self._courier.send(frame, fd)
                if fd is not None:
                    os.close(fd)
        except Empty:
            pass

    # ---- ours ---------------------------------------------------------------------------------------------------

    def _give(self, number: int, t: int, frozen: bool) -> None:
        try:
            if self._thread is not None and self._thread.is_alive():
                raise AtollError("an earlier copy of its state is still being made")
            whole = (self._model, self._optimizers, self._extras)
            copied = capture(*whole, parameters=False, rng=False, buffers=self._buffers)
            if frozen:
                copied = self._unmerged.add_frozen(copied)
        except AtollError as error:
            self._courier.send(StateCopy(number, t, reason=str(error)))
            return
        self._tape.add(Gave(t))
        # Not a daemon: torch's memory must not go while it is read.
        order = (self._couriers, number, t, copied)
        self._thread = threading.Thread(target=self._write, args=order, name="atoll-peer")
        self._thread.start()

    def _write(self, courier: int, number: int, t: int, copied: Snapshot) -> None:
        try:
            self._made.put((courier, *_in_memory(number, t, copied)))
        except Exception as error:  # whatever it is: the courier waits for an answer
            self._made.put((courier, StateCopy(number, t, reason=f"its state could not be copied: {error}"), None))

    # ---- a peer's -----------------------------------------------------------------------------------------------

    def _take(self, fd: int, length: int) -> tuple[str, bool]:
        """Why it is not taken (empty: it is in), and whether that is the peer's doing."""
        try:
            came = decode(bytearray(mapped(fd, length)))
            self._unmerged.check_frozen(came)
            take(self._model, self._optimizers, self._extras, came, self._buffers)
            self._unmerged.take_frozen(came)
        except PeerError as error:
            return str(error), True
        except (AtollError, RuntimeError, MemoryError) as error:  # torch's own, where the device has no room
            return str(error).partition("\n")[0] or "there is no memory for it", False
        finally:
            os.close(fd)
        return "", False


def _in_memory(number: int, t: int, copied: Snapshot) -> tuple[StateCopy, int]:
    header, parts = encode(copied)
    length, hashed = size(header, parts), hashlib.blake2b(digest_size=16)
    fd = reserve(length, "a copy of its state")
    try:
        with open(fd, "wb", closefd=False) as memory:
            for piece in ranged(header, parts):
                hashed.update(piece)
                memory.write(piece)
    except OSError:
        os.close(fd)
        raise
    return StateCopy(number, t, length, hashed.hexdigest()), fd
