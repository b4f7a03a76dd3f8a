"""Control channels as both ends hold them: a learner's knows the version of the syncer that answered.

A ping's answer may lie in the socket, unread, because this end's event loop was busy: then nobody is taken for dead.
When a loop comes back it reads sockets before it looks at timers, so whatever was read in the same turn counts.
"""

from __future__ import annotations

from typing import Any

import aiohttp
from aiohttp import web

from atoll.fabric.wire import PROTOCOL_HEADER, spoken


class Socket(aiohttp.ClientWebSocketResponse):
    def __init__(
        self, reader: Any, writer: Any, protocol: str | None, response: aiohttp.ClientResponse, *rest: Any, **more: Any
    ) -> None:
        super().__init__(reader, writer, protocol, response, *rest, **more)
        self.version = spoken(response.headers.get(PROTOCOL_HEADER))

    def _pong_not_received(self) -> None:
        if not self._need_heartbeat_reset:  # else something has come from it just now
            super()._pong_not_received()


class ServedSocket(web.WebSocketResponse):
    """The syncer's end."""

    def _pong_not_received(self) -> None:
        if not self._need_heartbeat_reset:
            super()._pong_not_received()
