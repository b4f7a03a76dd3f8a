"""Browsers that look on, each over one WebSocket.

Rules:
- they hear, they do not speak: any frame of theirs but close, ping and pong ends their connection;
- so many at once; where all places are taken, the token that has the most of them gives one to a token that has fewer,
  so that nobody keeps others out; whose token counts no more is sent away;
- one that reads too slowly is dropped, and comes back by itself if it is still there;
- a newcomer gets a snapshot with the next news, so that nobody hears anything twice or misses it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import WSCloseCode, WSMsgType, web

from atoll.fabric.authorizer import NOBODY, VISITOR
from atoll.fabric.intake import Rejected
from atoll.fabric.outbox import Outbox

MOST = 16
WAITING = 8
"""Messages on their way to one viewer; one more and it is dropped."""
SEND_S = 5.0
PING_S = 10.0
CLOSE_S = 1.0
FRAME_BYTES = 1024
WHY_BYTES = 120
"""A frame that closes has no room for more."""


@dataclass(eq=False, slots=True)
class Viewer:
    token: str = ""
    mark: str = ""
    """The name and the mark of what it showed at the door."""
    outbox: Outbox = field(default_factory=lambda: Outbox(WAITING))
    code: int = WSCloseCode.GOING_AWAY
    why: str = "the syncer is stopping"

    def send_away(self, code: int, why: str) -> None:
        self.code, self.why = code, why
        self.outbox.close(discard=True)


class Viewers:
    def __init__(self) -> None:
        self.came = asyncio.Event()
        """Somebody waits for a snapshot."""
        self._there: dict[Viewer, None] = {}
        self._new: dict[Viewer, None] = {}
        """Both in the order in which they came."""
        self._closed = False

    def __len__(self) -> int:
        return len(self._there) + len(self._new)

    def tell(self, delta: bytes, snapshot: Callable[[], bytes]) -> None:
        """News to those who are there, everything to those who have just come."""
        if self._closed:
            return
        for viewer in [one for one in self._there if not one.outbox.put(delta)]:
            self._send_away(viewer, WSCloseCode.TRY_AGAIN_LATER, "you read too slowly")
        whole = snapshot() if self._new else b""
        for viewer in self._new:
            viewer.outbox.put(whole)
        self._there |= self._new
        self._new.clear()
        self.came.clear()

    def close(self) -> None:
        """What is on its way still arrives."""
        self._closed = True
        for viewer in self._there | self._new:
            viewer.outbox.close()

    def sweep(self, gone: Callable[[str, str], str]) -> None:
        """Send away whose token counts no more; `gone` says why."""
        for viewer in [*self._there, *self._new]:
            if reason := gone(viewer.token, viewer.mark):
                self._send_away(viewer, WSCloseCode.POLICY_VIOLATION, reason)

    def _send_away(self, viewer: Viewer, code: int, why: str) -> None:
        """Its place is free at once."""
        self._there.pop(viewer, None)
        self._new.pop(viewer, None)
        viewer.send_away(code, why)

    def _has_room(self, token: str) -> bool:
        """Whether there is a place for one more of this token; another may have to go for it."""
        if len(self) < MOST:
            return True
        everybody = [*self._there, *self._new]
        counts = Counter(viewer.token for viewer in everybody)
        most, held = counts.most_common(1)[0]
        if held <= counts[token] + 1:
            return False
        newest = [viewer for viewer in everybody if viewer.token == most][-1]
        self._send_away(newest, WSCloseCode.TRY_AGAIN_LATER, "others look on too: your token has the most places")
        return True

    async def serve(self, request: web.Request) -> web.StreamResponse:
        visitor = request.get(VISITOR, NOBODY)
        if self._closed or not self._has_room(visitor.token):
            raise Rejected(503, f"{MOST} viewers are looking on already: close one of them")
        viewer = Viewer(visitor.token, visitor.mark)
        self._new[viewer] = None
        socket = web.WebSocketResponse(heartbeat=PING_S, max_msg_size=FRAME_BYTES, timeout=CLOSE_S, compress=False)
        try:
            await socket.prepare(request)
            self.came.set()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_write(request, socket, viewer))
                tasks.create_task(_read(socket, viewer))
        finally:
            self._new.pop(viewer, None)
            self._there.pop(viewer, None)
        return socket


async def _write(request: web.Request, socket: web.WebSocketResponse, viewer: Viewer) -> None:
    try:
        await viewer.outbox.drain(lambda data: socket.send_frame(data, WSMsgType.TEXT), SEND_S)
        await socket.close(code=viewer.code, message=viewer.why.encode()[:WHY_BYTES])
    except OSError:  # gone, or too slow: a TimeoutError is one
        if request.transport is not None:
            request.transport.abort()


async def _read(socket: web.WebSocketResponse, viewer: Viewer) -> None:
    frame = await socket.receive()
    if frame.type in (WSMsgType.TEXT, WSMsgType.BINARY):
        viewer.send_away(WSCloseCode.POLICY_VIOLATION, "this channel only tells")
    else:
        viewer.outbox.close(discard=True)
