"""Fragments between the device and the shared host memory.

Here is placement host, where copies travel as they are and the courier encodes; device_offload.py has the other one.

On the CPU a copy is a copy. On CUDA nothing waits: a fragment is gathered on the training stream into a staging buffer
(a copy inside the device), and travels on a stream of its own, one for each direction; an event tells when it has
arrived. The shared slots are page-locked once, so that the copies are real asynchronous ones.

Versions are brought and copies are waited for by threads (boundary.py, courier_process.py), also while the training
thread captures a CUDA graph: `ignore_graph_captures` lets such a thread do that without breaking the capture.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from atoll.mailbox.box import Mailbox
from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.moments import read_forms, read_moments
from atoll.protocol.errors import ConfigError

OwnPieces: TypeAlias = Callable[[int], list[torch.Tensor]]
"""Function that returns the model's own pieces of a fragment, as they lie on the device now."""


class EncodedMoments(NamedTuple):
    """Body of moments (numerics/moments.py): its first bytes in host memory, the others on the model's device."""

    forms: list[int]
    data: torch.Tensor


class DeviceCopy(Protocol):
    """Copy under way."""

    @property
    def failed(self) -> bool:
        """Whether there was no memory for the copy. Known once it is done."""
        ...

    @property
    def feedback(self) -> int:
        """Step of the copy whose rest this one was encoded with; −1: none, or it is not encoded."""
        ...

    def done(self) -> bool: ...
    def wait(self) -> None: ...


class Offload(Protocol):
    takes_time: bool
    """Whether copies go on after `read` and `bring` return. Other threads may wait for them, and may call `bring`."""

    def enter_thread(self) -> None:
        """Prepare the calling thread, other than the training thread, to wait for copies or start them."""
        ...

    def read(self, fragment: int, slot: int, t: int, moments: EncodedMoments | None = None) -> DeviceCopy:
        """Start copying the fragment as it is now, after step `t`, into an outgoing slot."""
        ...

    def bring(self, fragment: int, slot: int, *, moments: bool = False) -> DeviceCopy:
        """Start bringing an incoming slot to where `arrived` gives it."""
        ...

    def arrived_moments(self, fragment: int, slot: int) -> EncodedMoments:
        """Return the moments of a slot that was brought with them. Call it after `arrived`."""
        ...

    def outgoing_moments(self, fragment: int, slot: int) -> EncodedMoments: ...

    def arrived(self, fragment: int, slot: int) -> list[torch.Tensor]:
        """Return the values that `bring` brought, on the device, shaped like the pieces."""
        ...

    def release(self, fragment: int, slot: int) -> None:
        """Make the version that `arrived` returned the base, and free its memory once the queued work that adopts it is
        done."""
        ...

    def take_base(self) -> None:
        """Take the base from shared memory. It is whole there, and was not made by adoptions."""
        ...

    def drop_copies(self) -> None:
        """Drop all copies made so far: the courier sends none that it has not begun to send."""
        ...

    def outgoing(self, fragment: int, slot: int, t: int) -> list[torch.Tensor] | None:
        """Return the values of the copy that was made after step `t` into a slot, or None if they are gone."""
        ...

    def base(self, fragment: int) -> list[torch.Tensor]:
        """Return the base in shared memory."""
        ...

    def held_base(self, fragment: int) -> list[torch.Tensor]:
        """Return the version last adopted, for the next work on the training stream."""
        ...

    def close(self) -> None: ...


class FinishedCopy:
    """Copy that was made at once."""

    failed = False
    feedback = -1

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class SlotViews:
    """Tensors in the shared memory, shaped like the pieces of a fragment; made when first asked for."""

    def __init__(self, box: Mailbox) -> None:
        self._box = box
        self._made: dict[tuple[str, int, int], list[torch.Tensor]] = {}

    def incoming(self, fragment: int, slot: int) -> list[torch.Tensor]:
        return self._shaped("in", fragment, slot)

    def outgoing(self, fragment: int, slot: int) -> list[torch.Tensor]:
        return self._shaped("out", fragment, slot)

    def base(self, fragment: int) -> list[torch.Tensor]:
        return self._shaped("base", fragment, 0)

    def make_moments_room(self, slot: int, moments: EncodedMoments) -> torch.Tensor:
        """Write the forms into an outgoing slot, and return the memory for the bytes after them."""
        room, head = self._box.outgoing_moments(slot), len(moments.forms)
        room[:head] = moments.forms
        return torch.from_numpy(room[head : head + moments.data.numel()])

    def outgoing_moments(self, fragment: int, slot: int) -> EncodedMoments:
        return self._read_moments(fragment, self._box.outgoing_moments(slot))

    def incoming_moments(self, fragment: int, slot: int) -> EncodedMoments:
        return self._read_moments(fragment, self._box.incoming_moments(slot))

    def _read_moments(self, fragment: int, memory: ByteArray) -> EncodedMoments:
        part = self._box.plan.fragments[fragment]
        behind = read_moments(part, memory)[len(part.pieces) :]
        return EncodedMoments(read_forms(part, memory), torch.from_numpy(behind))

    def _shaped(self, kind: str, fragment: int, slot: int) -> list[torch.Tensor]:
        key = (kind, fragment, slot)
        if key not in self._made:
            self._made[key] = shaped(torch.from_numpy(self.floats(*key)), self._box, fragment)
        return self._made[key]

    def floats(self, kind: str, fragment: int, slot: int) -> FloatArray:
        if kind == "base":
            return self._box.base(fragment)
        return self._box.incoming(slot, fragment) if kind == "in" else self._box.outgoing(slot, fragment)


def shaped(flat: torch.Tensor, box: Mailbox, fragment: int) -> list[torch.Tensor]:
    return [flat[part].view(piece.shape) for piece, part in box.plan.fragments[fragment].parts]


class CpuOffload:
    takes_time = False

    def __init__(self, box: Mailbox, own: OwnPieces) -> None:
        self._own, self._views = own, SlotViews(box)
        self.base = self.held_base = self._views.base

    @torch.no_grad()
    def read(self, fragment: int, slot: int, t: int, moments: EncodedMoments | None = None) -> DeviceCopy:
        if own := self._own(fragment):  # a rank may hold nothing of it
            torch._foreach_copy_(self._views.outgoing(fragment, slot), own)
        if moments is not None:
            self._views.make_moments_room(slot, moments).copy_(moments.data)
        return FinishedCopy()

    def bring(self, fragment: int, slot: int, *, moments: bool = False) -> DeviceCopy:
        return FinishedCopy()

    def arrived_moments(self, fragment: int, slot: int) -> EncodedMoments:
        return self._views.incoming_moments(fragment, slot)

    def outgoing(self, fragment: int, slot: int, t: int) -> list[torch.Tensor]:
        return self._views.outgoing(fragment, slot)

    def outgoing_moments(self, fragment: int, slot: int) -> EncodedMoments:
        return self._views.outgoing_moments(fragment, slot)

    def arrived(self, fragment: int, slot: int) -> list[torch.Tensor]:
        return self._views.incoming(fragment, slot)

    def enter_thread(self) -> None:
        pass

    def release(self, fragment: int, slot: int) -> None:
        pass

    def take_base(self) -> None:
        pass

    def drop_copies(self) -> None:
        pass

    def close(self) -> None:
        pass


class StreamCopy:
    """Copy on a side stream, marked by an event."""

    failed = False
    feedback = -1

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def hold_stream(self, stream: torch.cuda.Stream) -> None:
        """Make work queued on the stream from now on wait for the copy."""
        stream.wait_event(self._event)


class QueuedCopy(DeviceCopy, Protocol):
    def hold_stream(self, stream: torch.cuda.Stream) -> None: ...


READ_STAGES = 3
"""Most staging buffers for copies on their way out, each as large as the largest fragment."""
RELAXED = 2
"""cudaStreamCaptureModeRelaxed."""


class StreamOffload:
    """Offload on CUDA. On the CPU, where streams are empty shells, its copies are made at once."""

    takes_time = True

    def __init__(self, box: Mailbox, own: OwnPieces, device: torch.device) -> None:
        self._box, self._own, self._device = box, own, device
        self._index = device.index
        """torch looks a device up in 10 µs and a number in none."""
        self._on_cuda = device.type == "cuda"
        self._torch: Any = torch.cuda if self._on_cuda else torch.cpu
        self._views = SlotViews(box)
        self._locked: dict[int, npt.NDArray[np.uint8]] = {}
        """Page-locked memory, keyed by its first slot."""
        self._lock(0, box.layout.first_outgoing)
        self._lock(box.layout.most_outgoing, box.layout.first_incoming)
        self._out, self._in = self._torch.Stream(device), self._torch.Stream(device)
        self._read_stages: deque[tuple[torch.Tensor, QueuedCopy]] = deque()
        """Stages that are used in turn, each with the copy after which it may be written to again."""
        self._hosts: dict[tuple[str, int, int], torch.Tensor] = {}
        self._shapes: dict[tuple[int, int], list[torch.Tensor]] = {}
        """Views of a stage, keyed by its address and the fragment: making them takes longer than the copy itself."""
        self._stages: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}
        """Version that is on its way to the device, or waits there, and the event of its arrival, keyed by slot."""
        self._spare: list[tuple[torch.Tensor, list[QueuedCopy]]] = []
        """Free stages for versions, each with the work that still reads it."""
        self._moments: dict[int, EncodedMoments] = {}
        """Moments that are on their way to the device or have arrived, keyed by slot."""

    def read(self, fragment: int, slot: int, t: int, moments: EncodedMoments | None = None) -> DeviceCopy:
        stage, packed = self._pack(fragment)
        self._out.wait_event(packed)
        self._lock_if_new(slot, slot >= self._box.layout.first_outgoing)
        host = self._host("out", fragment, slot)
        with self._torch.stream(self._out):
            host.copy_(stage[: host.numel()], non_blocking=True)
            if moments is not None:
                self._views.make_moments_room(slot, moments).copy_(moments.data, non_blocking=True)
                self._keep_for(moments.data, self._out)
        copy = StreamCopy(self._mark(self._out))
        self._read_stages.append((stage, copy))
        return copy

    @torch.no_grad()
    def _pack(self, fragment: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Pack the fragment as it is now into a stage, and return that with the event at its end."""
        training = self._torch.current_stream(self._index)
        stage = self._take_read_stage(training)
        if own := self._own(fragment):
            torch._foreach_copy_(self._shaped(stage, fragment), own)
        return stage, self._mark(training)

    def _take_read_stage(self, training: torch.cuda.Stream) -> torch.Tensor:
        """Return a stage to pack into. Training waits for a copy only if no stage is free or may be made."""
        if not self._has_read_stage():
            return torch.empty(self._box.layout.largest, dtype=torch.float32, device=self._device)
        stage, copy = self._read_stages.popleft()
        copy.hold_stream(training)
        return stage

    def _has_read_stage(self) -> bool:
        """Return whether the next copy takes a stage that was used before: the oldest one is free, or no more may be
        made."""
        return bool(self._read_stages) and (self._read_stages[0][1].done() or len(self._read_stages) >= READ_STAGES)

    def bring(self, fragment: int, slot: int, *, moments: bool = False) -> DeviceCopy:
        layout = self._box.layout
        self._lock_if_new(layout.most_outgoing + slot, slot >= layout.first_incoming)
        host = self._host("in", fragment, slot)
        stage = self._stage(slot)
        with self._torch.stream(self._in):
            stage[: host.numel()].copy_(host, non_blocking=True)
            if moments:
                forms, data = self._views.incoming_moments(fragment, slot)
                self._moments[slot] = EncodedMoments(forms, data.to(self._device, non_blocking=True))
        event = self._mark(self._in)
        self._stages[slot] = (stage, event)
        return StreamCopy(event)

    def arrived(self, fragment: int, slot: int) -> list[torch.Tensor]:
        """Return the version; the caller's next work on the training stream may read it."""
        stage, event = self._stages[slot]
        self._torch.current_stream(self._index).wait_event(event)
        return self._shaped(stage, fragment)

    def arrived_moments(self, fragment: int, slot: int) -> EncodedMoments:
        found = self._moments.pop(slot)
        self._keep_for(found.data, self._torch.current_stream(self._index))
        return found

    def outgoing_moments(self, fragment: int, slot: int) -> EncodedMoments:
        """Return the moments in a slot. The slot is written again on a stream that waits for the caller's next work."""
        forms, data = self._views.outgoing_moments(fragment, slot)
        return EncodedMoments(forms, data.to(self._device, non_blocking=True))

    def _keep_for(self, data: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Keep the memory from being reused before the work queued on the stream is done."""
        if self._on_cuda:
            data.record_stream(stream)

    def _shaped(self, stage: torch.Tensor, fragment: int) -> list[torch.Tensor]:
        """Return cached views. Stages are never given back, so an address stays that of its stage."""
        key = (stage.data_ptr(), fragment)
        if key not in self._shapes:
            self._shapes[key] = shaped(stage, self._box, fragment)
        return self._shapes[key]

    def _host(self, kind: str, fragment: int, slot: int) -> torch.Tensor:
        key = (kind, fragment, slot)
        if key not in self._hosts:
            self._hosts[key] = torch.from_numpy(self._views.floats(*key))
        return self._hosts[key]

    def release(self, fragment: int, slot: int) -> None:
        stage, _ = self._stages.pop(slot)
        self._spare.append((stage, [self._queued_training()]))

    def _queued_training(self) -> StreamCopy:
        """Return a mark behind all work queued on the training stream so far."""
        return StreamCopy(self._mark(self._torch.current_stream(self._index)))

    def take_base(self) -> None:
        pass

    def drop_copies(self) -> None:
        pass

    def _stage(self, slot: int) -> torch.Tensor:
        """Return a stage for a version. There are as many as versions on their way at once: each is as large as the
        largest fragment."""
        if slot in self._stages:
            return self._stages.pop(slot)[0]
        if self._spare:
            stage, readers = self._spare.pop()
            for reader in readers:
                reader.hold_stream(self._in)
            return stage
        with self._torch.stream(self._in):  # memory that no work of the training stream may still use
            return torch.empty(self._box.layout.largest, dtype=torch.float32, device=self._device)

    def enter_thread(self) -> None:
        if self._on_cuda:
            torch.cuda.set_device(self._device)
            ignore_graph_captures()

    def outgoing(self, fragment: int, slot: int, t: int) -> list[torch.Tensor] | None:
        return [view.to(self._device, non_blocking=True) for view in self._views.outgoing(fragment, slot)]

    def base(self, fragment: int) -> list[torch.Tensor]:
        return [view.to(self._device) for view in self._views.base(fragment)]

    def held_base(self, fragment: int) -> list[torch.Tensor]:
        return self.base(fragment)

    def close(self) -> None:
        self._torch.synchronize(self._device)
        for memory in self._locked.values():
            unlock_pages(memory)

    def _lock_if_new(self, index: int, is_later: bool) -> None:
        """Lock the pages of a slot that the courier reserved later (`is_later`)."""
        if is_later and index not in self._locked:
            self._lock(index, 1)

    def _lock(self, first: int, count: int) -> None:
        memory = self._box.slots_memory(first, count)
        if self._on_cuda and lock_pages(memory):
            self._locked[first] = memory

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        blocking = {"blocking": True} if self._on_cuda else {}  # a thread that waits for it sleeps
        event: torch.cuda.Event = self._torch.Event(**blocking)
        event.record(stream)
        return event


def lock_pages(memory: npt.NDArray[np.uint8]) -> bool:
    """Page-lock memory, so that the device copies it without the processor; unlocked, copies still work, but slower."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0:
        return True
    with suppress(OSError, AttributeError):
        _runtime().cudaGetLastError()  # it is kept, and the next call of anybody would raise it
    return False


def unlock_pages(memory: npt.NDArray[np.uint8]) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)


def ignore_graph_captures() -> None:
    """Declare that the calling thread's work is no part of a CUDA graph.

    While the training thread captures a graph, CUDA refuses other threads to wait or allocate, and breaks the
    capture, unless they declare that."""
    if torch.cuda.is_initialized():
        with suppress(OSError, AttributeError):
            _runtime().cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))


def _runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch has loaded, for calls that torch does not offer."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")


def make_offload(box: Mailbox, own: OwnPieces) -> Offload:
    device = find_device(own, box.layout.fragments)
    return CpuOffload(box, own) if device.type == "cpu" else StreamOffload(box, own, device)


def find_device(own: OwnPieces, fragments: int = 1) -> torch.device:
    """Return the device of the model. ConfigError: it is none of those that are known."""
    device = next((tensor.device for fragment in range(fragments) for tensor in own(fragment)), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"the model is on '{device}': Atoll moves fragments to and from cpu and cuda devices")
    return device
