"""Fragments between the device and the shared host memory.

On the CPU a copy is a copy. On CUDA nothing waits: a fragment is gathered on the training stream into a staging buffer
(a copy inside the device), and travels on a stream of its own, one for each direction; an event tells when it has
arrived. The shared slots are page-locked once, so that the copies are real asynchronous ones.

Versions are brought and copies are waited for by threads (boundary.py, courier_process.py), also while the training
thread captures a CUDA graph: `enter_thread` lets such a thread do that without breaking the capture.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from atoll.mailbox.box import Mailbox
from atoll.numerics.arrays import FloatArray
from atoll.protocol.errors import ConfigError

OwnPieces: TypeAlias = Callable[[int], list[torch.Tensor]]
"""The model's own pieces of a fragment, as they lie on the device now."""


class DeviceCopy(Protocol):
    """A copy under way."""

    def done(self) -> bool: ...
    def wait(self) -> None: ...


class Offload(Protocol):
    takes_time: bool
    """Copies go on after `read` and `bring`, which other threads may wait for and (`bring`) start."""

    def enter_thread(self) -> None:
        """Called once by every other thread that waits for copies or starts them."""
        ...

    def read(self, fragment: int, slot: int) -> DeviceCopy:
        """Start copying the fragment as it is now into an outgoing slot."""
        ...

    def bring(self, fragment: int, slot: int) -> DeviceCopy:
        """Start bringing an incoming slot to where `arrived` gives it."""
        ...

    def arrived(self, fragment: int, slot: int) -> list[torch.Tensor]:
        """What `bring` brought, on the device, shaped like the pieces."""
        ...

    def release(self, slot: int) -> None:
        """What `arrived` gave is read by work that has been queued: its memory may be used again behind that."""
        ...

    def outgoing(self, fragment: int, slot: int) -> list[torch.Tensor]: ...
    def base(self, fragment: int) -> list[torch.Tensor]: ...
    def close(self) -> None: ...


class FinishedCopy:
    """A copy that was made at once."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class SlotViews:
    """The shared memory as tensors shaped like the pieces of a fragment; made when first asked for."""

    def __init__(self, box: Mailbox) -> None:
        self._box = box
        self._made: dict[tuple[str, int, int], list[torch.Tensor]] = {}

    def incoming(self, fragment: int, slot: int) -> list[torch.Tensor]:
        return self._shaped("in", fragment, slot)

    def outgoing(self, fragment: int, slot: int) -> list[torch.Tensor]:
        return self._shaped("out", fragment, slot)

    def base(self, fragment: int) -> list[torch.Tensor]:
        return self._shaped("base", fragment, 0)

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
        self.outgoing, self.base = self._views.outgoing, self._views.base

    @torch.no_grad()
    def read(self, fragment: int, slot: int) -> DeviceCopy:
        torch._foreach_copy_(self._views.outgoing(fragment, slot), self._own(fragment))
        return FinishedCopy()

    def bring(self, fragment: int, slot: int) -> DeviceCopy:
        return FinishedCopy()

    def arrived(self, fragment: int, slot: int) -> list[torch.Tensor]:
        return self._views.incoming(fragment, slot)

    def enter_thread(self) -> None:
        pass

    def release(self, slot: int) -> None:
        pass

    def close(self) -> None:
        pass


class StreamCopy:
    """A copy on the side stream, marked by an event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


READ_STAGES = 3
"""Of copies on their way out, as large as the largest fragment each."""
RELAXED = 2
"""cudaStreamCaptureModeRelaxed."""


class CudaOffload:
    takes_time = True

    def __init__(self, box: Mailbox, own: OwnPieces, device: torch.device) -> None:
        self._box, self._own, self._device = box, own, device
        self._index = device.index
        """torch looks a device up in 10 µs and a number in none."""
        self._views = SlotViews(box)
        self._locked: dict[int, npt.NDArray[np.uint8]] = {}
        """Page-locked memory, by its first slot."""
        self._lock(0, box.layout.first_outgoing)
        self._lock(box.layout.most_outgoing, box.layout.first_incoming)
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._read_stages: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        """Used in turn, each with the moment from which on it may be written to again."""
        self._hosts: dict[tuple[str, int, int], torch.Tensor] = {}
        self._shapes: dict[tuple[int, int], list[torch.Tensor]] = {}
        """By a stage's address and the fragment: making views takes longer than all the rest of a copy."""
        self._stages: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}
        """By slot, what is on its way to the device or has arrived and waits; and when it is there."""
        self._spare: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        """With the moment on the training stream from which on nobody reads it."""

    @torch.no_grad()
    def read(self, fragment: int, slot: int) -> DeviceCopy:
        training = torch.cuda.current_stream(self._index)
        stage = self._take_read_stage(training)
        torch._foreach_copy_(self._shaped(stage, fragment), self._own(fragment))
        self._out.wait_event(_mark(training))
        self._lock_if_new(slot, slot >= self._box.layout.first_outgoing)
        host = self._host("out", fragment, slot)
        with torch.cuda.stream(self._out):
            host.copy_(stage[: host.numel()], non_blocking=True)
        event = _mark(self._out)
        self._read_stages.append((stage, event))
        return StreamCopy(event)

    def _take_read_stage(self, training: torch.cuda.Stream) -> torch.Tensor:
        """Training does not wait for a copy that is on its way out where another stage is free, or may be made."""
        if self._read_stages and (self._read_stages[0][1].query() or len(self._read_stages) >= READ_STAGES):
            stage, event = self._read_stages.popleft()
            training.wait_event(event)
            return stage
        return torch.empty(self._box.layout.largest, dtype=torch.float32, device=self._device)

    def bring(self, fragment: int, slot: int) -> DeviceCopy:
        layout = self._box.layout
        self._lock_if_new(layout.most_outgoing + slot, slot >= layout.first_incoming)
        host = self._host("in", fragment, slot)
        stage = self._stage(slot)
        with torch.cuda.stream(self._in):
            stage[: host.numel()].copy_(host, non_blocking=True)
        event = _mark(self._in)
        self._stages[slot] = (stage, event)
        return StreamCopy(event)

    def arrived(self, fragment: int, slot: int) -> list[torch.Tensor]:
        """The caller's next work on the training stream may read it."""
        stage, event = self._stages[slot]
        torch.cuda.current_stream(self._index).wait_event(event)
        return self._shaped(stage, fragment)

    def _shaped(self, stage: torch.Tensor, fragment: int) -> list[torch.Tensor]:
        """Stages are never given back, so an address stays the one of its stage."""
        key = (stage.data_ptr(), fragment)
        if key not in self._shapes:
            self._shapes[key] = shaped(stage, self._box, fragment)
        return self._shapes[key]

    def _host(self, kind: str, fragment: int, slot: int) -> torch.Tensor:
        key = (kind, fragment, slot)
        if key not in self._hosts:
            self._hosts[key] = torch.from_numpy(self._views.floats(*key))
        return self._hosts[key]

    def release(self, slot: int) -> None:
        stage, _ = self._stages.pop(slot)
        self._spare.append((stage, _mark(torch.cuda.current_stream(self._index))))

    def _stage(self, slot: int) -> torch.Tensor:
        """As many as there are versions on their way at once, and no more: each is as large as the largest fragment."""
        if slot in self._stages:
            return self._stages.pop(slot)[0]
        if self._spare:
            stage, event = self._spare.pop()
            self._in.wait_event(event)
            return stage
        with torch.cuda.stream(self._in):  # memory that no work of the training stream may still use
            return torch.empty(self._box.layout.largest, dtype=torch.float32, device=self._device)

    def enter_thread(self) -> None:
        """While the training thread captures a graph, CUDA refuses waiting and allocating to all threads, and breaks
        the capture, unless a thread says that its work has nothing to do with captures."""
        torch.cuda.set_device(self._device)
        with suppress(OSError, AttributeError):
            _runtime().cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))

    def outgoing(self, fragment: int, slot: int) -> list[torch.Tensor]:
        return [view.to(self._device, non_blocking=True) for view in self._views.outgoing(fragment, slot)]

    def base(self, fragment: int) -> list[torch.Tensor]:
        return [view.to(self._device) for view in self._views.base(fragment)]

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        for memory in self._locked.values():
            unlock_pages(memory)

    def _lock_if_new(self, index: int, is_later: bool) -> None:
        """`is_later`: a slot that the courier reserved later."""
        if is_later and index not in self._locked:
            self._lock(index, 1)

    def _lock(self, first: int, count: int) -> None:
        memory = self._box.slots_memory(first, count)
        if lock_pages(memory):
            self._locked[first] = memory


def lock_pages(memory: npt.NDArray[np.uint8]) -> bool:
    """So that copies between it and the device need no help of the processor; without it they still work, slower."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0:
        return True
    with suppress(OSError, AttributeError):
        _runtime().cudaGetLastError()  # it is kept, and the next call of anybody would raise it
    return False


def unlock_pages(memory: npt.NDArray[np.uint8]) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)


def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded, for calls that torch does not offer."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
    event.record(stream)
    return event


def make_offload(box: Mailbox, own: OwnPieces) -> Offload:
    device = own(0)[0].device
    if device.type == "cpu":
        return CpuOffload(box, own)
    if device.type == "cuda":
        return CudaOffload(box, own, device)
    raise ConfigError(f"the model is on '{device}': Atoll moves fragments to and from cpu and cuda devices")
