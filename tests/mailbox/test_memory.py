from __future__ import annotations

import os

import pytest

from atoll.mailbox import box as module
from atoll.mailbox.box import mapped, reserve
from atoll.protocol.errors import PeerError


def test_what_one_writes_the_other_reads_also_without_the_descriptor() -> None:
    fd = reserve(10_000, "a test")
    ours, theirs = mapped(fd, 10_000, write=True), mapped(fd, 10_000)
    os.close(fd)
    ours[9_990:] = b"0123456789"
    assert bytes(theirs[9_990:]) == b"0123456789" and theirs.readonly


def test_more_than_there_is_is_refused_before_anything_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: 2 * 2**20)
    with pytest.raises(PeerError, match="a peer's state takes 3 MiB of memory and 2 MiB are free"):
        reserve(3 * 2**20, "a peer's state")


def test_a_memory_that_is_too_short_is_named() -> None:
    fd = reserve(100, "a test")
    with pytest.raises(PeerError, match="100 bytes came for 101"):
        mapped(fd, 101)
    os.close(fd)
