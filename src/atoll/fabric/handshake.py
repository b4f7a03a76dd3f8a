"""A control channel as a learner dials it, which knows the version of the syncer that answered."""

from __future__ import annotations

from typing import Any

import aiohttp

from atoll.fabric.wire import PROTOCOL_HEADER, spoken


class Socket(aiohttp.ClientWebSocketResponse):
    def __init__(
        self, reader: Any, writer: Any, protocol: str | None, response: aiohttp.ClientResponse, *rest: Any, **more: Any
    ) -> None:
        super().__init__(reader, writer, protocol, response, *rest, **more)
        self.version = spoken(response.headers.get(PROTOCOL_HEADER))
