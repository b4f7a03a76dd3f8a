"""Control channels: one WebSocket per learner, binary frames, opened by a Hello.

Rules:
- one live channel per learner: a newer one that the desk accepts replaces it, and the desk hears nothing more of the
  replaced one; a newer one that the desk refuses changes nothing;
- a bad frame costs its sender the channel: Refused with one line, then closed; one over 4 MiB is closed unread (1009);
- the hello must come within 5 s; a silent peer is pinged and lost after 9 s; a slow one after 1024 waiting messages.
"""

from __future__ import annotations

import asyncio
from typing import cast

from aiohttp import WSMsgType, web

from atoll.fabric.desk import Channel, Desk
from atoll.fabric.outbox import Outbox
from atoll.fabric.wire import Limits, check_hello, decode_from_learner, encode, one_line
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import Hello, Refused


class Control:
    def __init__(self, desk: Desk, limits: Limits) -> None:
        self.bytes_in = 0
        self.bytes_out = 0
        self.bad_frames = 0
        self._desk = desk
        self._limits = limits
        self._channels: dict[str, Channel] = {}

    def channel(self, learner: str) -> Channel | None:
        """The live one."""
        channel = self._channels.get(learner)
        return None if channel is None or channel.closing else channel

    def close(self, reason: str) -> None:
        for channel in list(self._channels.values()):
            channel.close(reason)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        limits = self._limits
        socket = web.WebSocketResponse(
            compress=False, heartbeat=limits.ping_s, max_msg_size=limits.control_bytes, timeout=limits.flush_s
        )
        await socket.prepare(request)
        try:
            hello = check_hello(decode_from_learner(await self._frame(socket, limits.hello_s)))
        except _Gone:
            return socket
        except PeerError as error:
            await self._refuse(socket, error)
            return socket
        outbox = Outbox(limits.send_queue)
        channel = Channel(
            hello.learner, hello.session, outbox=outbox, flush_s=limits.flush_s, abort=lambda: _abort(request)
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write(socket, channel, outbox))
            try:
                if self._open(channel, hello):
                    await self._read(socket, channel)
                else:
                    await self._until_closed(socket)
            except _Gone as gone:
                channel.reason = channel.reason or str(gone)
            finally:
                outbox.close(discard=True)
                self._shut(channel)
        return socket

    def _open(self, channel: Channel, hello: Hello) -> bool:
        try:
            self._desk.opened(channel, hello)
        except PeerError as error:
            self._reject(channel, error)
        if channel.closing:
            return False
        older = self._channels.get(channel.learner)
        self._channels[channel.learner] = channel
        if older is not None:
            older.close("replaced by a newer connection of the same learner")
        return True

    async def _read(self, socket: web.WebSocketResponse, channel: Channel) -> None:
        while True:
            try:
                message = decode_from_learner(await self._frame(socket))
                if isinstance(message, Hello):
                    raise PeerError("a second hello on the same channel")
                if not channel.closing:
                    self._desk.received(channel, message)
            except PeerError as error:
                self._reject(channel, error)

    def _reject(self, channel: Channel, error: PeerError) -> None:
        self.bad_frames += 1
        channel.send(Refused(reason=one_line(error), final=False))
        channel.close(f"refused: {error}")

    def _shut(self, channel: Channel) -> None:
        if self._channels.get(channel.learner) is channel:
            del self._channels[channel.learner]
            self._desk.closed(channel, channel.reason or "the connection broke")

    async def _write(self, socket: web.WebSocketResponse, channel: Channel, outbox: Outbox) -> None:
        try:
            await outbox.drain(lambda data: self._send(socket, data), self._limits.send_s)
            await socket.close(message=channel.reason.encode("ascii", "replace")[:120])
        except TimeoutError:
            channel.drop(f"the learner took no message for {self._limits.send_s:g} s")
        except OSError as error:
            channel.drop(f"the connection broke: {error}")

    async def _send(self, socket: web.WebSocketResponse, data: bytes) -> None:
        self.bytes_out += len(data)
        await socket.send_bytes(data)

    async def _refuse(self, socket: web.WebSocketResponse, error: PeerError) -> None:
        self.bad_frames += 1
        try:
            async with asyncio.timeout(self._limits.flush_s):
                await self._send(socket, encode(Refused(reason=one_line(error), final=True)))
                await socket.close()
        except (OSError, TimeoutError):
            pass  # it is gone already

    async def _frame(self, socket: web.WebSocketResponse, deadline_s: float | None = None) -> bytes:
        """The next frame; `_Gone` when there will be none. Without a deadline, pings notice a dead peer."""
        try:
            frame = await socket.receive(deadline_s)
        except TimeoutError:
            raise PeerError(f"no hello within {deadline_s:g} s") from None
        except ConnectionError as error:  # it went while its ping was answered
            raise _Gone(one_line(f"the connection broke: {error}")) from None
        if frame.type is WSMsgType.BINARY:
            data = cast(bytes, frame.data)
            self.bytes_in += len(data)
            return data
        if frame.type is WSMsgType.TEXT:
            raise PeerError("a text frame: control messages are binary")
        if frame.type is WSMsgType.ERROR:
            self.bad_frames += socket.exception() is not None
            raise _Gone(one_line(f"the channel failed: {socket.exception() or frame.data}"))
        raise _Gone(f"the learner closed the channel ({one_line(frame.extra or 'no reason given')})")

    async def _until_closed(self, socket: web.WebSocketResponse) -> None:
        while True:
            await self._frame(socket)


class _Gone(Exception):
    """No more frames will come."""


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
