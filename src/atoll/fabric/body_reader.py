"""A body straight from its connection into a buffer.

aiohttp makes a bytes object of every piece that it reads, and copies of those would have to be made. So behind the head
its connection is taken over, and given back when the body is whole: asyncio reads from the socket, or out of TLS, into
the buffer itself. Rules:
- not a byte more is read than the body has: what comes behind it is aiohttp's again;
- what aiohttp had read of the body by then (768 KiB at most) is copied;
- aiohttp is told as ever that writing has to wait, or that the connection is lost;
- once it is over nothing here refers to the buffer: asyncio's TLS keeps a reader for as long as the connection lives;
- aiohttp's parser has not seen the body, and is not used again: whoever takes a body over sees to that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from atoll.fabric.wire import KIB, MIB
from atoll.protocol.errors import Unreachable

READ_BYTES = 1 * MIB
"""At most, in one turn of the event loop."""
_DROPPED_BYTES = 64 * KIB


class BodyReader(asyncio.BufferedProtocol):
    """Has the connection from when it is made until the body is whole, or it is given back."""

    def __init__(self, transport: asyncio.Transport | None, into: memoryview, came: Callable[[int], None]) -> None:
        """`came` is told the size of every piece. Unreachable: the connection is lost already."""
        if transport is None or transport.is_closing():
            raise Unreachable("the connection is lost")
        self._transport, self._left, self._came = transport, into, came
        self._aiohttp = cast(asyncio.Protocol, transport.get_protocol())
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the connection was lost; empty: the body is whole."""
        transport.set_protocol(self)

    async def wait(self) -> None:
        """Until the body is whole; Unreachable when the connection is lost before."""
        try:
            if lost := await self._over:
                raise Unreachable(lost)
        finally:
            self.give_back()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._left[:READ_BYTES] or memoryview(bytearray(_DROPPED_BYTES))

    def buffer_updated(self, nbytes: int) -> None:
        if not self._left:
            return  # nobody waits for it, and the connection is being closed
        self._left = self._left[nbytes:]
        self._came(nbytes)
        if not self._left:
            self.give_back()
            if not self._over.done():
                self._over.set_result("")

    def eof_received(self) -> bool | None:
        return self._aiohttp.eof_received()

    def pause_writing(self) -> None:
        self._aiohttp.pause_writing()

    def resume_writing(self) -> None:
        self._aiohttp.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._aiohttp.connection_lost(error)
        if not self._over.done():
            self._over.set_result(f"the connection is lost: {error or 'the peer hung up'}")

    def give_back(self) -> None:
        """Not while it is being closed: then aiohttp is told through us."""
        self._left, self._came = memoryview(b""), lambda size: None
        if not self._transport.is_closing() and self._transport.get_protocol() is self:
            self._transport.set_protocol(self._aiohttp)


def extend(deadline: asyncio.Timeout, when: float) -> None:
    """Something came before the deadline, which is `when` now. One that has passed stays so."""
    if not deadline.expired():
        deadline.reschedule(when)
