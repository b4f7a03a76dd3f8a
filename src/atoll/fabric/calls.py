"""Every call of aiohttp's client, and every read of a body: whatever goes wrong in one comes out as Unreachable.

aiohttp does not keep to its own tree of errors. A body whose connection is gone raises a plain RuntimeError
("Connection closed."), so does a request on a session that was closed; bytes that are no HTTP raise errors of its
parser; an answer to a ping raises inside `receive`. So everything but a TimeoutError, which belongs to whoever set the
deadline, is taken for the failure of the network that it is. That is safe only because nothing of our own runs inside:
these calls are made here and nowhere else (tests/architecture/test_aiohttp_calls.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import aiohttp

from atoll.fabric.trouble import told
from atoll.fabric.wire import one_line
from atoll.protocol.errors import AtollError, Unreachable


@contextmanager
def as_unreachable(doing: str = "") -> Iterator[None]:
    """`doing`: what failed, for the text."""
    try:
        yield
    except (AtollError, TimeoutError):
        raise
    except Exception as error:
        raise Unreachable(one_line(f"{doing} failed: {told(error)}" if doing else told(error))) from error


def open_session(**settings: Any) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(trust_env=False, cookie_jar=aiohttp.DummyCookieJar(), **settings)


async def close_session(session: aiohttp.ClientSession, within_s: float) -> None:
    """aiohttp waits until a peer has taken what was written to it; one that stands still does not hold us up."""
    with suppress(TimeoutError, Unreachable):
        async with asyncio.timeout(within_s):
            with as_unreachable():
                await session.close()


@asynccontextmanager
async def request(
    session: aiohttp.ClientSession, method: str, url: str, **how: Any
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer's head; its body is read by `next_chunk`. Redirects are not followed."""
    asking, doing = session.request(method, url, allow_redirects=False, **how), f"{method} {url}"
    with as_unreachable(doing):
        response = await asking.__aenter__()
    try:
        yield response
    finally:
        with as_unreachable(doing):
            await asking.__aexit__(None, None, None)


async def next_chunk(body: aiohttp.StreamReader) -> bytes:
    """Of an answer, or of what a peer sends to a server of ours; empty at its end."""
    with as_unreachable():
        return (await body.readchunk())[0]


async def dial_socket(session: aiohttp.ClientSession, url: str, **how: Any) -> aiohttp.ClientWebSocketResponse:
    with as_unreachable():
        socket: aiohttp.ClientWebSocketResponse = await session.ws_connect(url, **how)
    return socket


async def receive_frame(socket: aiohttp.ClientWebSocketResponse) -> aiohttp.WSMessage:
    with as_unreachable():
        return await socket.receive()


async def send_frame(socket: aiohttp.ClientWebSocketResponse, data: bytes) -> None:
    with as_unreachable():
        await socket.send_bytes(data)


async def close_socket(socket: aiohttp.ClientWebSocketResponse) -> None:
    with as_unreachable():
        await socket.close()
