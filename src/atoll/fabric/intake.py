"""Bodies into buffers: exact size, minimum rate, a byte budget per learner, the digest of what really came.

A body is received straight into the buffer the desk names. While it comes, its key is taken, so that no second body can
write into the same buffer. Rules, in the order they are checked: length known and exact (400), key free (409), budget
of the learner (429), rate (408), digest as named in the header (422).
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

from aiohttp import web

from atoll.fabric.calls import next_chunk
from atoll.fabric.wire import DIGEST_HEADER, Limits, digest_aside, one_line
from atoll.protocol.errors import Unreachable


class Rejected(Exception):
    """The answer to a request that may not be: an HTTP status and one line."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(one_line(reason))
        self.status = status


class Intake:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._taken: dict[Hashable, tuple[str, int]] = {}
        self.bytes_in = 0

    async def receive(self, request: web.Request, learner: str, key: Hashable, into: memoryview) -> str:
        """The digest of the body, once it is whole and right; Rejected otherwise."""
        into = into.cast("B")
        self._admit(request, learner, key, into.nbytes)
        self._taken[key] = (learner, into.nbytes)
        try:
            await self._fill(request, into)
            found = await digest_aside(into)
        finally:
            del self._taken[key]
        named = request.headers.get(DIGEST_HEADER, "")
        if found != named:
            raise Rejected(422, f"the body's digest is {found}, the header says {named[:32] or 'nothing'}")
        return found

    def taken(self, key: Hashable) -> bool:
        return key in self._taken

    def _admit(self, request: web.Request, learner: str, key: Hashable, size: int) -> None:
        named = request.content_length
        if named != size:
            said = "no length" if named is None else f"{named} bytes"
            raise Rejected(400, f"the body has {said}, this fragment needs exactly {size} bytes")
        if key in self._taken:
            raise Rejected(409, "the same body is being received already")
        if sum(length for _, length in self._taken.values()) + size > self._limits.run_bytes:
            raise Rejected(
                429, f"the run's budget of {self._limits.run_bytes} bytes on their way is used up: try later"
            )
        under_way = sum(length for owner, length in self._taken.values() if owner == learner)
        if under_way + size > self._limits.budget_bytes:
            raise Rejected(
                429,
                f"{under_way} bytes of {learner} are being received, {size} more would pass "
                f"the budget of {self._limits.budget_bytes}: try again later",
            )

    async def _fill(self, request: web.Request, into: memoryview) -> None:
        limits, clock = self._limits, asyncio.get_running_loop().time
        start, at = clock(), 0
        try:
            async with asyncio.timeout(min(limits.body_grace_s, limits.body_idle_s)) as deadline:
                while at < into.nbytes:
                    chunk = await next_chunk(request.content)
                    if not chunk:
                        raise Rejected(400, f"the body ended after {at} of {into.nbytes} bytes")
                    into[at : at + len(chunk)] = chunk
                    at += len(chunk)
                    self.bytes_in += len(chunk)
                    slowest = start + limits.body_grace_s + at / limits.body_rate
                    deadline.reschedule(min(slowest, clock() + limits.body_idle_s))
        except TimeoutError:
            raise Rejected(
                408,
                f"the body came too slowly: {at} of {into.nbytes} bytes in {clock() - start:.1f} s, "
                f"at least {limits.body_rate} bytes/s are asked for",
            ) from None
        except Unreachable as error:
            raise Rejected(400, f"the connection broke after {at} of {into.nbytes} bytes: {error}") from None
