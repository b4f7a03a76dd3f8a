"""The channel between the lead of a syncer and one of its shards (docs/adr/0031): `GET /v1/shard`, a WebSocket.

The shard dials, shows an operator's token, and opens with ShardHello; then both speak as protocol/shard_messages.py
says. A frame that cannot be read costs the channel. A channel that is silent is pinged, and lost after 9 s. Who is lost
dials again after a wait drawn from 0 to 0.1 s, 0.2 s … 1 s.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import aiohttp
import msgspec
from aiohttp import WSMsgType, web

from atoll.fabric.address import SyncerAddress, parse_address
from atoll.fabric.calls import close_session, close_socket, dial_socket, open_session, receive_frame, send_frame
from atoll.fabric.control_channel import ClientSocket, SendQueue, ServerSocket
from atoll.fabric.transfer import reason_of, showing
from atoll.fabric.wire import MIB, FabricLimits, one_line
from atoll.protocol.errors import ConfigError, PeerError, Unreachable
from atoll.protocol.shard_messages import (
    EndShard,
    FromLead,
    FromShard,
    ShardHello,
    decode_from_lead,
    decode_from_shard,
    encode,
)

SHARD_PATH = "/v1/shard"
FRAME_BYTES = 64 * MIB
"""The largest message: what a run began with, with the names of all tensors, and the decisions since a cut."""
QUEUE = 1 << 16


class ShardHandlers(Protocol):
    """The lead's service; every call comes on the event loop."""

    def shard_opened(self, channel: ShardChannel, hello: ShardHello) -> None:
        """PeerError: it may not take part, and is told why."""

    def shard_said(self, channel: ShardChannel, message: FromShard) -> None: ...

    def shard_closed(self, channel: ShardChannel, reason: str) -> None:
        """Once for every channel that was opened."""


class ShardChannel:
    def __init__(self, shard: int, outbox: SendQueue, abort: Callable[[], None]) -> None:
        self.shard = shard
        self._outbox, self._abort = outbox, abort

    def send(self, message: FromLead) -> None:
        if not self._outbox.closed and not self._outbox.put(encode(message)):
            self.drop()

    def close(self) -> None:
        """What was sent before still goes out."""
        self._outbox.close()

    def drop(self) -> None:
        self._outbox.close(discard=True)
        self._abort()


class ShardChannels:
    """The lead's end."""

    def __init__(self, handlers: ShardHandlers, limits: FabricLimits) -> None:
        self._handlers, self._limits = handlers, limits
        self._open: set[ShardChannel] = set()

    def close(self) -> None:
        for channel in self._open:
            channel.close()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        socket = ServerSocket(
            compress=False, heartbeat=self._limits.ping_s, max_msg_size=FRAME_BYTES, timeout=self._limits.flush_s
        )
        await socket.prepare(request)
        outbox = SendQueue(QUEUE)

        def abort() -> None:
            if request.transport is not None:
                request.transport.abort()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write(socket, outbox))
            try:
                await self._talk(socket, outbox, abort)
            finally:
                outbox.close()
        return socket

    async def _talk(self, socket: ServerSocket, outbox: SendQueue, abort: Callable[[], None]) -> None:
        try:
            async with asyncio.timeout(self._limits.hello_s):
                hello = await _next_message(socket)
        except TimeoutError:
            return
        if not isinstance(hello, ShardHello):
            return
        channel = ShardChannel(hello.shard, outbox, abort)
        try:
            self._handlers.shard_opened(channel, hello)
        except PeerError as error:
            channel.send(EndShard(reason=str(error), refused=True, term=hello.term))
            return
        self._open.add(channel)
        reason = "it closed the channel"
        try:
            while (message := await _next_message(socket)) is not None:
                self._handlers.shard_said(channel, message)
        except PeerError as error:
            reason = str(error)
            channel.drop()
        finally:
            self._open.discard(channel)
            self._handlers.shard_closed(channel, reason)

    async def _write(self, socket: ServerSocket, outbox: SendQueue) -> None:
        with suppress(OSError):  # a TimeoutError is one; closing it tells the reader
            await outbox.drain(socket.send_bytes, self._limits.send_s)
        with suppress(OSError):
            await socket.close()


async def _next_message(socket: ServerSocket) -> FromShard | None:
    """None: the channel is closed. PeerError: what came is no message."""
    frame = await socket.receive()
    if frame.type is not WSMsgType.BINARY:
        return None
    try:
        return decode_from_shard(frame.data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise PeerError(one_line(f"a shard's message could not be read: {error}")) from None


class LeadConnection:
    """The shard's end. Belongs to one event loop; `run` is started once."""

    def __init__(
        self,
        where: str,
        *,
        hello: Callable[[], ShardHello],
        on_message: Callable[[FromLead], None],
        on_lost: Callable[[str], None],
        limits: FabricLimits | None = None,
    ) -> None:
        self._address: SyncerAddress = parse_address(where)
        self._urls = list(self._address.urls)
        self._limits = limits or FabricLimits()
        self._hello, self._on_message, self._on_lost = hello, on_message, on_lost
        self._outbox: SendQueue | None = None

    @property
    def up(self) -> bool:
        return self._outbox is not None

    def send(self, message: FromShard) -> None:
        """What cannot be sent is lost with the channel: the lead asks for everything anew."""
        if self._outbox is not None and not self._outbox.put(encode(message)):
            self._outbox.close(discard=True)

    def hang_up(self) -> None:
        if self._outbox is not None:
            self._outbox.close(discard=True)

    async def run(self) -> None:
        """Until cancelled. ConfigError: the lead does not let us in."""
        session = open_session(
            connector=aiohttp.TCPConnector(limit=2, force_close=True, ssl=self._address.context() or True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._limits.dial_s),
            middlewares=[showing(self._address), _refusals],
            proxy=self._address.proxy or None,
            ws_response_class=ClientSocket,
        )
        wait_s = self._limits.backoff_s
        try:
            while True:
                try:
                    reason = await self._connected(session)
                    wait_s = self._limits.backoff_s
                except (Unreachable, TimeoutError) as error:
                    reason = one_line(error) or "it did not answer in time"
                self._on_lost(reason)
                await asyncio.sleep(random.random() * wait_s)
                wait_s = min(2 * wait_s, self._limits.backoff_cap_s)
                self._urls.append(self._urls.pop(0))
        finally:
            await close_session(session, self._limits.flush_s)

    async def _connected(self, session: aiohttp.ClientSession) -> str:
        limits = self._limits
        async with asyncio.timeout(limits.dial_s):
            socket = await dial_socket(
                session,
                f"{self._urls[0]}{SHARD_PATH}",
                timeout=aiohttp.ClientWSTimeout(ws_close=limits.flush_s),
                heartbeat=limits.ping_s,
                max_msg_size=FRAME_BYTES,
                compress=0,
            )
        self._outbox = outbox = SendQueue(QUEUE)
        outbox.put(encode(self._hello()))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(socket, outbox))
                reason = await self._read(socket)
                self._outbox = None
                outbox.close(discard=True)
        finally:
            self._outbox = None
            await close_socket(socket)
        return reason

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> str:
        while True:
            try:
                frame = await receive_frame(socket)
            except Unreachable as error:
                return f"the channel to the lead failed: {error}"
            if frame.type is not aiohttp.WSMsgType.BINARY:
                return "the lead closed the channel"
            try:
                message = decode_from_lead(frame.data)
            except (msgspec.MsgspecError, ValueError) as error:
                return one_line(f"the lead's message could not be read: {error}")
            self._on_message(message)

    async def _write(self, socket: aiohttp.ClientWebSocketResponse, outbox: SendQueue) -> None:
        with suppress(Unreachable, TimeoutError):
            await outbox.drain(lambda data: send_frame(socket, data), self._limits.send_s)
        await close_socket(socket)


async def _refusals(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Whom the lead does not let in is told why, and ends."""
    response = await handler(request)
    if response.status in (403, 404):
        try:
            reason = await reason_of(response)
        finally:
            response.close()
        if response.status == 404:
            reason = "this syncer has one shard: start it with --shard 1/S, or the run with --syncer-shards S"
        raise ConfigError(one_line(f"{request.url.origin()}: {reason}"))
    return response
