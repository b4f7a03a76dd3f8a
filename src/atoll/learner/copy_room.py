"""Host memory for the copies of a learner's state, made ready before the first one is wanted.

A copy of 12 bytes a parameter goes into memory that the process does not have yet. To get it takes far longer than the
copy itself: on an H200 the first copy of a 1.0B learner held training up for 7.4 s, the later ones, which found the
memory there, for 0.2 s. So a thread reserves it, touches every page and locks the pages for the device, a little at a
time; locking the pages all at once, or allocating them by torch, holds up the training thread as well.

One copy at a time lies here. Who comes while it is still held, or before the room is ready, or with more than fits,
allocates for itself, and waits for it.
"""

from __future__ import annotations

import mmap
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
import torch

from atoll.learner.offload import lock_pages, unlock_pages
from atoll.mailbox.box import can_spare
from atoll.numerics.arrays import ByteArray

SMALL_BYTES = 16 << 20
"""A smaller copy is made as quickly without."""
BLOCK_BYTES = 64 << 20
"""What is locked at a time: 3 ms on an H200. A copy may not cross from one block into the next."""
TOUCH_BYTES = 4 << 20
ALIGN = 256


class CopyRoom:
    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._sizes: list[int] = []
        self._block = BLOCK_BYTES
        self._locked: list[ByteArray] = []
        self._ready = False
        self._held: weakref.ref[ByteArray] | None = None
        """Alive while somebody has a tensor of the last copy."""
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def is_begun(self) -> bool:
        return self._thread is not None

    def make_ready(self, tensors: Iterable[torch.Tensor]) -> None:
        """For a copy of these; called once. In the background."""
        found = list(tensors)
        self._sizes = [tensor.nbytes for tensor in found]
        device = next((tensor.device for tensor in found if tensor.is_cuda), None)
        self._thread = threading.Thread(
            target=self._try_to_prepare, args=(device,), name="atoll-copy-room", daemon=True
        )
        self._thread.start()

    def wait_until_ready(self, seconds: float) -> bool:
        if self._thread is not None:
            self._thread.join(seconds)
        return self._ready

    def take(self) -> TakenRoom | None:
        """Room for one copy; None: it is held, or not ready."""
        if not self._ready or self._memory is None or (self._held is not None and self._held() is not None):
            return None
        memory = np.frombuffer(self._memory, dtype=np.uint8)
        self._held = weakref.ref(memory)
        return TakenRoom(memory, self._block)

    def close(self) -> None:
        """The pages stay as long as somebody reads them."""
        self._closed, self._ready = True, False
        if self._thread is not None:
            self._thread.join()
        for block in self._locked:
            unlock_pages(block)
        self._locked = []

    def _try_to_prepare(self, device: torch.device | None) -> None:
        with suppress(OSError, MemoryError):  # no memory to be had: copies allocate for themselves
            self._prepare(device)

    def _prepare(self, device: torch.device | None) -> None:
        if sum(self._sizes) < SMALL_BYTES:
            return
        self._block = -(-max(BLOCK_BYTES, *self._sizes) // mmap.PAGESIZE) * mmap.PAGESIZE
        total = _end_of(self._sizes, self._block)
        if not can_spare(total):
            return
        # Shared, as mmap's default is: pages of private memory would be copied, and the locked ones left behind, where
        # the script forks workers.
        self._memory = mmap.mmap(-1, -(-total // mmap.PAGESIZE) * mmap.PAGESIZE)
        memory = np.frombuffer(self._memory, dtype=np.uint8)
        for start in range(0, total, TOUCH_BYTES):
            if self._closed:
                return
            memory[start : start + TOUCH_BYTES].fill(0)
            time.sleep(0.001)  # the training thread goes first
        if device is not None:
            torch.cuda.set_device(device)
            for start in range(0, len(memory), self._block):
                block = memory[start : start + self._block]
                if lock_pages(block):
                    self._locked.append(block)
                time.sleep(0.005)
        self._ready = True


class TakenRoom:
    """Gives tensors of the room, one behind the other."""

    def __init__(self, memory: ByteArray, block: int) -> None:
        self._memory, self._block, self._end = memory, block, 0

    def make_tensor(self, like: torch.Tensor) -> torch.Tensor | None:
        """Contiguous, of that shape and type; None: it does not fit any more."""
        start = _place(self._end, like.nbytes, self._block)
        if like.nbytes > self._block or start + like.nbytes > len(self._memory):
            return None
        self._end = start + like.nbytes
        flat = torch.from_numpy(self._memory[start : self._end])
        return flat.view(like.dtype).view(like.shape)


def _place(end: int, size: int, block: int) -> int:
    """Where the next one starts: in this block if all of it fits."""
    start = -(-end // ALIGN) * ALIGN
    return start if start % block + size <= block else -(-start // block) * block


def _end_of(sizes: Iterable[int], block: int) -> int:
    end = 0
    for size in sizes:
        end = _place(end, size, block) + size
    return end
