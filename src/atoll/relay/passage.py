"""A learner's control channel through a relay: a socket below, a socket above, and frames between them, unchanged.

The relay dials the syncer in the learner's name before it answers the learner, so that a refusal comes back in the
syncer's words. It reads what passes as far as it concerns bodies: the hello (whose it is), Welcome (the plan), Pull
(what may come) and Announce (what is current). When one socket ends, so does the other.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from aiohttp import WSMsgType, web

from atoll.fabric.authorizer import Rejected
from atoll.fabric.calls import close_socket, receive_frame, send_frame
from atoll.fabric.control_channel import ClientSocket, ServerSocket
from atoll.fabric.wire import (
    PROTOCOL_HEADER,
    RELAY_HEADER,
    FabricLimits,
    check_hello,
    decode_from_learner,
    decode_from_syncer,
    encode,
    one_line,
)
from atoll.protocol.errors import PeerError, Unreachable
from atoll.protocol.messages import OLDEST, PROTOCOL, Announce, Hello, Pull, Refused, Welcome
from atoll.relay.upstream import DialRefused

if TYPE_CHECKING:
    from atoll.relay.service import RelayService


class Passage:
    """One learner's way through."""

    def __init__(self, hello: Hello, authorization: str, below: ServerSocket, above: ClientSocket) -> None:
        self.learner, self.session, self.authorization = hello.learner, hello.session, authorization
        self.tensors, self.has_ranks = hello.tensors, bool(hello.ranks)
        self._below, self._above = below, above

    async def close(self, why: str) -> None:
        """`why`: told to both ends, which cannot see what became of the other."""
        message = why.encode("ascii", "replace")[:120]
        with suppress(OSError, Unreachable, TimeoutError):
            await close_socket(self._above, message)
        with suppress(OSError, TimeoutError):
            await self._below.close(message=message)


async def serve_passage(
    service: RelayService, request: web.Request, shown: dict[str, str], limits: FabricLimits
) -> web.StreamResponse:
    try:
        above = await service.upstream.dial_for(shown)
    except DialRefused as error:
        raise Rejected(error.status, str(error)) from None
    except (Unreachable, PeerError) as error:
        raise Rejected(503, f"the syncer is out of reach: {error}") from None
    below = ServerSocket(
        compress=False, heartbeat=limits.ping_s, max_msg_size=limits.control_bytes, timeout=limits.flush_s
    )
    below.headers[PROTOCOL_HEADER], below.headers[RELAY_HEADER] = f"{OLDEST}-{PROTOCOL}", service.name
    try:
        await below.prepare(request)
        passage = await _open(service, request, below, above, limits)
        if passage is not None:
            try:
                await _pass_frames(service, passage, below, above, limits)
            finally:
                service.close_passage(passage)
    finally:
        with suppress(Unreachable, TimeoutError):
            await close_socket(above)
    return below


async def _open(
    service: RelayService, request: web.Request, below: ServerSocket, above: ClientSocket, limits: FabricLimits
) -> Passage | None:
    """None: it said nothing that opens a channel."""
    try:
        async with asyncio.timeout(limits.hello_s):
            first = await below.receive()
        if first.type is not WSMsgType.BINARY:
            return None
        hello = check_hello(decode_from_learner(cast(bytes, first.data)))
    except (TimeoutError, PeerError) as error:
        with suppress(OSError):
            await below.send_bytes(encode(Refused(reason=one_line(error) or "no hello came", final=False)))
        return None
    passage = Passage(hello, request.headers.get("Authorization", ""), below, above)
    service.open_passage(passage)
    with suppress(Unreachable):
        await send_frame(above, cast(bytes, first.data))
    return passage


async def _pass_frames(
    service: RelayService, passage: Passage, below: ServerSocket, above: ClientSocket, limits: FabricLimits
) -> None:
    up = asyncio.ensure_future(_pass_up(below, above, limits))
    down = asyncio.ensure_future(_pass_down(service, passage, below, above, limits))
    try:
        await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
    finally:
        why = "the syncer closed the channel" if down.done() else "the learner closed the channel"
        for one in (up, down):
            one.cancel()
        await asyncio.gather(up, down, return_exceptions=True)
        await passage.close(why)


async def _pass_up(below: ServerSocket, above: ClientSocket, limits: FabricLimits) -> None:
    with suppress(Unreachable, TimeoutError):
        while (frame := await below.receive()).type is WSMsgType.BINARY:
            async with asyncio.timeout(limits.send_s):
                await send_frame(above, cast(bytes, frame.data))


async def _pass_down(
    service: RelayService, passage: Passage, below: ServerSocket, above: ClientSocket, limits: FabricLimits
) -> None:
    with suppress(Unreachable, OSError, PeerError):  # a TimeoutError is an OSError
        while (frame := await receive_frame(above)).type is WSMsgType.BINARY:
            message = decode_from_syncer(frame.data)
            match message:
                case Welcome():
                    await service.take_welcome(passage, message)
                case Pull():
                    service.take_pull(passage, message)
                case Announce():
                    service.versions.note_version(message.fragment, message.version)
            async with asyncio.timeout(limits.send_s):
                await below.send_bytes(frame.data)
        if frame.extra:
            await below.close(message=frame.extra.encode("ascii", "replace")[:120])
