"""How fast a link is: bytes that mean nothing, both ways, and what time it is here.

Bounded in size, one of each visitor at a time and a few in all: a measurement takes nothing from the run for long.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from atoll.fabric.authorizer import VISITOR
from atoll.fabric.calls import next_chunk
from atoll.fabric.intake import Rejected
from atoll.fabric.wire import MIB, Limits
from atoll.protocol.errors import Unreachable

TIME_HEADER = "Atoll-Time"
LONGEST = 64 * MIB
AT_ONCE = 4
PATH = "/v1/probe/{bytes:[0-9]{1,9}}"


class Probe:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._busy: list[str] = []

    def routes(self) -> list[web.RouteDef]:
        return [web.get(PATH, self._give, allow_head=False), web.put(PATH, self._take)]

    async def _give(self, request: web.Request) -> web.StreamResponse:
        size = _size(request)
        response = web.StreamResponse(headers={TIME_HEADER: repr(time.time())})
        response.content_length = size
        with self._turn(request):
            await response.prepare(request)
            piece = os.urandom(min(size, self._limits.chunk_bytes))  # nothing on the way makes it smaller
            for at in range(0, size, len(piece) or 1):
                async with asyncio.timeout(self._limits.send_s):
                    await response.write(memoryview(piece)[: size - at])
            await response.write_eof()
        return response

    async def _take(self, request: web.Request) -> web.Response:
        size, came = _size(request), 0
        if request.content_length != size:
            raise Rejected(400, f"the body has {request.content_length} bytes, its address says {size}")
        with self._turn(request):
            try:
                async with asyncio.timeout(self._limits.body_grace_s + size / self._limits.body_rate):
                    while chunk := await next_chunk(request.content):
                        came += len(chunk)
            except TimeoutError:
                raise Rejected(408, f"the body came too slowly: {came} of {size} bytes") from None
            except Unreachable as error:
                raise Rejected(400, f"the connection broke after {came} of {size} bytes: {error}") from None
        return web.Response(status=204, headers={TIME_HEADER: repr(time.time())})

    @contextmanager
    def _turn(self, request: web.Request) -> Iterator[None]:
        who = request[VISITOR].token
        if len(self._busy) >= AT_ONCE or (who and who in self._busy):
            raise Rejected(429, "another measurement is going on: try again later")
        self._busy.append(who)
        try:
            yield
        finally:
            self._busy.remove(who)


def _size(request: web.Request) -> int:
    if (size := int(request.match_info["bytes"])) > LONGEST:
        raise Rejected(400, f"{size} bytes are too many to measure with: at most {LONGEST}")
    return size
