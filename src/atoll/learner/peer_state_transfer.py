"""Optimizer state between learners, in the training process: a copy for a newcomer, and a peer's state for itself.

It consists of the inner optimizer's state, persistent buffers and what the script registered for it; parameters are the
run's, random states each learner's own. Between two steps only copies are made; a thread moves them into memory that
the courier can read, so giving its state away delays no step.

A peer may be broken or hostile, so its state is checked before anything is changed (peer_state_checks.py). A state that
does not fit is refused, and this learner goes on as it is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence

import torch

from atoll.learner.capture import BegunSnapshot, Stateful
from atoll.learner.copy_room import CopyRoom
from atoll.learner.courier_process import CourierProcess, TapeRecorder
from atoll.learner.offload import ignore_graph_captures
from atoll.learner.script import say
from atoll.learner.snapshot import Snapshot, decode, encode, ranged, size, write_pieces
from atoll.learner.trained_model import TrainedModel
from atoll.learner.unmerged import UnmergedTensors
from atoll.mailbox.box import mapped, reserve
from atoll.mailbox.channel import StateCopyMade, TakeOrder
from atoll.protocol.errors import AtollError, PeerError
from atoll.protocol.learner import effects as fx
from atoll.protocol.limits import clipped
from atoll.protocol.tape import GaveEntry, TookEntry

PeerOrder = fx.Capture | fx.Await | TakeOrder | fx.Begin


class PeerStates:
    def __init__(
        self,
        trained: TrainedModel,
        extras: Mapping[str, Stateful],
        courier: CourierProcess,
        tape: TapeRecorder | None = None,
        unmerged: UnmergedTensors | None = None,
        not_from_peers: Sequence[str] = (),
        room: CopyRoom | None = None,
    ) -> None:
        """`extras`: what the script registered and lets newcomers take from peers; `not_from_peers`: the rest of it."""
        self._room = room or CopyRoom()
        self._not_from_peers = not_from_peers
        self._trained, self._extras, self._courier = trained, extras, courier
        self._tape = tape or TapeRecorder(courier)
        self._unmerged = unmerged or trained.find_unmerged("mine")
        self.waits = False
        """A peer's state is on its way, or sought."""
        self._thread: threading.Thread | None = None
        self._couriers = 0
        """How many couriers have died: what one of them ordered is not for the next."""

    def carry_out(self, order: PeerOrder, t: int) -> None:
        match order:
            case fx.Capture(number, frozen):
                self._give(number, t, frozen)
            case fx.Await():
                self.waits = True
            case TakeOrder(ticket, length):
                reason, refused = self._take(self._courier.take_descriptor(), length)
                if not reason:
                    self._tape.add(TookEntry(t, ticket))
                    self._tell_begun_anew()
                self._courier.send(fx.Taken(ticket, t, clipped(reason), refused))
            case fx.Begin(text):
                self.waits = False
                say(text)
                self._unmerged.refuse()

    def _tell_begun_anew(self) -> None:
        for name in self._not_from_peers:
            say(f"'{name}' begins anew here: learner.register({name!r}, ..., from_peers=True) takes a peer's")

    def courier_died(self) -> None:
        self._couriers += 1

    # ---- ours ---------------------------------------------------------------------------------------------------

    def _give(self, number: int, t: int, frozen: bool) -> None:
        try:
            if self._thread is not None and self._thread.is_alive():
                raise AtollError("an earlier copy of its state is still being made")
            room = self._room.take()
            begun = self._trained.begin_capture(self._extras, parameters=False, rng=False, room=room)
            own_frozen = self._unmerged.copy_frozen() if frozen else {}
        except AtollError as error:
            self._courier.send(StateCopyMade(number, t, reason=str(error)))
            return
        self._tape.add(GaveEntry(t))
        # Not a daemon: torch's memory must not go while it is read.
        order = (self._couriers, number, t, begun, own_frozen)
        self._thread = threading.Thread(target=self._write, args=order, name="atoll-peer")
        self._thread.start()

    def _write(
        self, courier: int, number: int, t: int, begun: BegunSnapshot, frozen: Mapping[str, torch.Tensor]
    ) -> None:
        """A thread. It tells the courier itself: a newcomer would wait for the end of a step otherwise."""
        ignore_graph_captures()
        try:
            copied = begun.finish()
            frame, fd = _in_memory(number, t, Snapshot({**copied.tensors, **frozen}, copied.states))
        except Exception as error:  # whatever it is: the courier waits for an answer
            self._hand_over(courier, StateCopyMade(number, t, reason=f"its state could not be copied: {error}"))
            return
        try:
            self._hand_over(courier, frame, fd)
        finally:
            os.close(fd)

    def _hand_over(self, courier: int, frame: StateCopyMade, fd: int | None = None) -> None:
        """One that is started in this moment gets it too, and lets go what it has not ordered."""
        if courier == self._couriers:
            self._courier.send(frame, fd)

    # ---- a peer's -----------------------------------------------------------------------------------------------

    def _take(self, fd: int, length: int) -> tuple[str, bool]:
        """Why it is not taken (empty: it is in), and whether that is the peer's doing."""
        try:
            came = decode(bytearray(mapped(fd, length)))
            self._unmerged.check_frozen(came)
            self._trained.take_peer_state(self._extras, came)
            self._unmerged.take_frozen(came)
        except PeerError as error:
            return str(error), True
        except (AtollError, RuntimeError, MemoryError) as error:  # torch's own, where the device has no room
            return str(error).partition("\n")[0] or "there is no memory for it", False
        finally:
            os.close(fd)
        return "", False


def _in_memory(number: int, t: int, copied: Snapshot) -> tuple[StateCopyMade, int]:
    header, parts = encode(copied)
    length = size(header, parts)
    fd = reserve(length, "a copy of its state")
    try:
        with open(fd, "wb", closefd=False) as memory:
            mark = write_pieces(memory, ranged(header, parts))
    except OSError:
        os.close(fd)
        raise
    return StateCopyMade(number, t, length, mark), fd
