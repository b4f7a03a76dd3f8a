"""A line that can be made worse: bytes come through in order, late, slowly, not at all, or not any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from atoll.chaos.tcp_relay import Bottleneck, TcpRelay


class Echo:
    """What is at the far end: gives back what it gets."""

    def __init__(self) -> None:
        self.got = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                self.got += len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


@pytest.fixture
async def line() -> AsyncIterator[TcpRelay]:
    echo = Echo()
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    made = TcpRelay("127.0.0.1", server.sockets[0].getsockname()[1])
    await made.start()
    yield made
    await made.stop()
    server.close()


async def through(line: TcpRelay, data: bytes) -> tuple[bytes, float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", line.port)
    began = asyncio.get_running_loop().time()
    writer.write(data)
    await writer.drain()
    back = await asyncio.wait_for(reader.readexactly(len(data)), 20)
    took = asyncio.get_running_loop().time() - began
    writer.close()
    return back, took


async def test_bytes_come_through_in_order(line: TcpRelay) -> None:
    data = bytes(range(256)) * 4000
    assert (await through(line, data))[0] == data
    assert line.bytes_up == line.bytes_down == len(data)


async def test_a_delay_is_felt_both_ways_and_does_not_change_the_order(line: TcpRelay) -> None:
    line.delay_s, line.jitter_s = 0.1, 0.05
    data = bytes(range(256)) * 400
    back, took = await through(line, data)
    assert back == data and took >= 0.2


async def test_a_narrow_line_carries_no_more_than_it_can(line: TcpRelay) -> None:
    line.limit(200_000)
    _, took = await through(line, bytes(100_000))
    assert took >= 0.4, "half a second each way, of which one begins as the other goes on"


async def test_a_silent_line_lets_connections_stand_and_goes_on_where_it_stopped(line: TcpRelay) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", line.port)
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"
    line.silence(True)
    writer.write(b"two")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readexactly(3), 0.2)
    line.silence(False)
    assert await asyncio.wait_for(reader.readexactly(3), 5) == b"two"
    writer.close()


async def test_a_silent_line_takes_no_more_than_its_buffer(line: TcpRelay) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", line.port)
    line.silence(True)
    writer.transport.set_write_buffer_limits(0)
    writer.write(bytes(64 * 1024 * 1024))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(writer.drain(), 0.3)
    writer.transport.abort()


async def test_a_silent_line_takes_as_much_as_the_buffer_that_it_was_given(line: TcpRelay) -> None:
    roomy = TcpRelay(*line._upstream, buffer=64 * 1024 * 1024)
    await roomy.start()
    _, writer = await asyncio.open_connection("127.0.0.1", roomy.port)
    roomy.silence(True)
    writer.transport.set_write_buffer_limits(0)
    writer.write(bytes(64 * 1024 * 1024))
    await asyncio.wait_for(writer.drain(), 20)
    writer.transport.abort()
    await roomy.stop()


async def test_a_reset_breaks_every_connection(line: TcpRelay) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", line.port)
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"
    line.reset()
    with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
        await asyncio.wait_for(reader.readexactly(1), 5)
    writer.close()
    assert (await through(line, b"a new one goes through"))[0] == b"a new one goes through"


async def test_nobody_at_the_far_end_is_the_end_of_a_connection() -> None:
    line = TcpRelay("127.0.0.1", 1)
    await line.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", line.port)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    await line.stop()


async def test_those_that_share_a_bottleneck_take_turns(line: TcpRelay) -> None:
    """A small message is not held up behind a large body of somebody else."""
    line.share(Bottleneck(500_000), Bottleneck(500_000))
    bulk = asyncio.ensure_future(through(line, bytes(500_000)))
    await asyncio.sleep(0.1)
    _, took = await through(line, b"ping")
    assert took < 0.25 and not bulk.done()
    await bulk
