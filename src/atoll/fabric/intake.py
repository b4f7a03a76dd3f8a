"""Bodies that a port receives: into buffers, or, to measure a link, into nothing.

A body is received straight into the buffer that the service names. While it comes, its key is taken, so that no second
body can write into the same buffer. Rules, in the order they are checked: length known and exact (400), key free (409),
byte budget of the run and of the learner (429), rate (408), digest as named in the header (422).

A probe measures how fast a link is: random bytes both ways, and the time here. It is bounded in size, one per visitor
at a time and a few in all, so that it takes little from the run.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from aiohttp import web

from atoll.fabric.authorizer import VISITOR, Rejected
from atoll.fabric.body_meter import ArrivalMeter, ArrivedBytes
from atoll.fabric.body_reader import extend
from atoll.fabric.calls import next_chunk
from atoll.fabric.host import piece_bytes, within
from atoll.fabric.requests import RequestReader
from atoll.fabric.wire import DIGEST_HEADER, MIB, RECEIVED_HEADER, FabricLimits, digest_aside
from atoll.protocol.errors import Unreachable


class ReceivedBody(NamedTuple):
    digest: str
    seconds: float
    """Seconds in which the body arrived, at the rate after its first piece; 0: it came in one piece."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer to the body."""
        return {RECEIVED_HEADER: f"{self.seconds:.6f}"}


class Intake:
    def __init__(self, limits: FabricLimits) -> None:
        self._limits = limits
        self._taken: set[Hashable] = set()
        self._under_way = 0
        """Bytes of bodies that are being received …"""
        self._under_way_of: Counter[str] = Counter()
        """… and of each learner's."""
        self._arrived_of: dict[str, ArrivedBytes] = {}
        """What arrived of each learner's bodies while one of them was under way: together they use its link."""
        self.bytes_in = 0

    async def receive(self, request: web.Request, learner: str, key: Hashable, into: memoryview) -> ReceivedBody:
        """Receive a body into a buffer. Rejected: it did not come whole, or not as its digest says."""
        into = into.cast("B")
        self._admit(request, learner, key, into.nbytes)
        self._taken.add(key)
        self._count_under_way(learner, into.nbytes)
        try:
            seconds = await self._fill(request, learner, into)
            found = await digest_aside(into)
        finally:
            self._taken.discard(key)
            self._count_under_way(learner, -into.nbytes)
        named = request.headers.get(DIGEST_HEADER, "")
        if found != named:
            raise Rejected(422, f"the body's digest is {found}, the header says {named[:32] or 'nothing'}")
        return ReceivedBody(found, seconds)

    def _count_under_way(self, learner: str, size: int) -> None:
        self._under_way += size
        self._under_way_of[learner] += size
        if not self._under_way_of[learner]:
            del self._under_way_of[learner]
            self._arrived_of.pop(learner, None)

    def taken(self, key: Hashable) -> bool:
        return key in self._taken

    def _admit(self, request: web.Request, learner: str, key: Hashable, size: int) -> None:
        named = request.content_length
        if named != size:
            said = "no length" if named is None else f"{named} bytes"
            raise Rejected(400, f"the body has {said}, this fragment needs exactly {size} bytes")
        if key in self._taken:
            raise Rejected(409, "the same body is being received already")
        if self._under_way + size > self._limits.run_bytes:
            raise Rejected(
                429, f"the run's budget of {self._limits.run_bytes} bytes on their way is used up: try later"
            )
        under_way = self._under_way_of[learner]
        if under_way + size > self._limits.budget_bytes:
            raise Rejected(
                429,
                f"{under_way} bytes of {learner} are being received, {size} more would pass "
                f"the budget of {self._limits.budget_bytes}: try again later",
            )

    async def _fill(self, request: web.Request, learner: str, into: memoryview) -> float:
        """Fill the buffer with the body; return the seconds that it takes on the learner's link alone."""
        limits, clock, connection = self._limits, asyncio.get_running_loop().time, request.protocol
        start, at = clock(), 0
        meter = ArrivalMeter(clock=clock, arrived=self._arrived_of.setdefault(learner, ArrivedBytes()))
        part = meter.expect_part()
        assert isinstance(connection, RequestReader)

        def count(size: int) -> None:
            nonlocal at
            at += size
            self.bytes_in += size
            part.count(size)
            slowest = start + limits.body_grace_s + at / limits.body_rate
            extend(deadline, min(slowest, clock() + limits.body_idle_s))

        try:
            async with asyncio.timeout(min(limits.body_grace_s, limits.body_idle_s)) as deadline:
                await connection.read_body(request.content, into, count)
        except TimeoutError:
            raise Rejected(
                408,
                f"the body came too slowly: {at} of {into.nbytes} bytes in {clock() - start:.1f} s, "
                f"at least {limits.body_rate} bytes/s are asked for",
            ) from None
        except Unreachable as error:
            raise Rejected(400, f"the connection broke after {at} of {into.nbytes} bytes: {error}") from None
        return meter.measure_whole()


class Uploads:
    """Bodies of first parameters that are being received, of one session at a time: where the next one that is asked
    for them sends its own, those of the one before are cut off."""

    def __init__(self) -> None:
        self._session = ""
        self._transports: set[asyncio.Transport] = set()

    @contextmanager
    def begin(self, session: str, request: web.Request) -> Iterator[None]:
        if request.transport is None:
            raise Rejected(400, "the connection broke")
        if session != self._session:
            for before in self._transports:
                before.abort()
            self._session, self._transports = session, set()
        under_way, own = self._transports, request.transport
        under_way.add(own)
        try:
            yield
        finally:
            under_way.discard(own)


# ---- probes ---------------------------------------------------------------------------------------------------------

TIME_HEADER = "Atoll-Time"
LONGEST = 64 * MIB
AT_ONCE = 4
PATH = "/v1/probe/{bytes:[0-9]{1,9}}"


class Probe:
    def __init__(self, limits: FabricLimits) -> None:
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
            piece = os.urandom(min(size, piece_bytes(request, self._limits)))  # nothing on the way makes it smaller
            for at in range(0, size, len(piece) or 1):
                async with within(self._limits.send_s):
                    await response.write(memoryview(piece)[: size - at])
            async with within(self._limits.send_s):
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
