"""Memory without a name, which one process fills and another reads: a descriptor, handed over, gone with its last user.

All of it is reserved at once: too little memory is an error before anything is written, never a crash in the middle.
"""

from __future__ import annotations

import mmap
import os
import tempfile

from atoll.mailbox.box import available_bytes
from atoll.protocol.errors import PeerError


def reserve(size: int, what: str) -> int:
    """A descriptor of so many bytes; PeerError where they cannot be had."""
    have = available_bytes()
    if have is not None and size > have:
        raise PeerError(f"{what} takes {size / 2**20:,.0f} MiB of memory and {have / 2**20:,.0f} MiB are free")
    fd = _anonymous()
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        raise PeerError(f"{what} takes {size / 2**20:,.0f} MiB of memory: {error.strerror}") from error
    return fd


def mapped(fd: int, size: int, *, write: bool = False) -> memoryview:
    """The memory itself. It stays without its descriptor, until the last view of it is gone."""
    if os.fstat(fd).st_size < size:
        raise PeerError(f"a memory of {os.fstat(fd).st_size} bytes came for {size}")
    return memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)))


def _anonymous() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("atoll-state")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
