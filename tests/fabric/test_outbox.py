from __future__ import annotations

import asyncio

import pytest

from atoll.fabric.control_channel import SendQueue


async def test_what_goes_in_comes_out_in_order_also_after_closing() -> None:
    outbox, sent = SendQueue(3), list[bytes]()

    async def send(data: bytes) -> None:
        sent.append(data)

    assert [outbox.put(data) for data in (b"1", b"2", b"3", b"4")] == [True, True, True, False]
    outbox.close()
    assert not outbox.put(b"5")
    await outbox.drain(send, 1.0)
    assert sent == [b"1", b"2", b"3"]


async def test_a_peer_that_takes_nothing_is_a_timeout() -> None:
    outbox = SendQueue(1)
    outbox.put(b"1")

    async def send(data: bytes) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await outbox.drain(send, 0.01)


def test_a_few_long_messages_fill_it_too() -> None:
    outbox = SendQueue(limit=100, limit_bytes=10)
    assert outbox.put(b"12345") and outbox.put(b"12345")
    assert not outbox.put(b"1")
