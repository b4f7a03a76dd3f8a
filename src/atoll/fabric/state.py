"""A peer's state for a newcomer, seen from the two couriers: what it is called on the wire, how it is fetched and sent.

Rules:
- it is fetched from the peer itself where that can be reached (`host`), through the syncer (`relay`) otherwise;
- after a break it goes on at the byte it had come to, as long as the source names the same size and digest; where it
  names others, it starts over;
- five tries in a row that bring nothing are enough, and the caller's deadline covers them all;
- nothing is allocated before its size is known and allowed; nothing counts before its digest is the one that was named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from atoll.fabric.body_reader import extend
from atoll.fabric.calls import receive_body
from atoll.fabric.transfer import asked, pieces, sent
from atoll.fabric.wire import DIGEST_HEADER, SESSION_HEADER, FabricLimits, digest_aside
from atoll.protocol.errors import PeerError, Unreachable

LEARNER_HEADER = "Atoll-Learner"
OFFSET_HEADER = "Atoll-Offset"
SIZE_HEADER = "Atoll-Size"
TICKET = r"[a-z0-9-]{1,64}"
"""The name of one recovery: the syncer makes it up, and nobody can guess it."""
PEER_S = 60.0
"""How long the syncer lets a newcomer wait for its peer to begin."""

Into = Callable[[int], memoryview]
"""A buffer of that many bytes. Asked once, and again only where a source with a state of another size takes over."""
Parts = Sequence[memoryview]
"""A state's bytes, in order."""

_TRIES = 5
_DIRECT_S = 2.0
"""A peer that can be reached at all is reached, and has answered, within this."""
_RELAYED_S = PEER_S + 15.0
"""The syncer answers once the peer sends, or does not."""


@dataclass(frozen=True, slots=True)
class StateSource:
    """Where a state may be had, or is to be sent."""

    url: str
    headers: dict[str, str]
    answer_s: float

    @classmethod
    def direct(cls, url: str, ticket: str) -> StateSource:
        return cls(f"{url}/v1/state/{ticket}", {}, _DIRECT_S)

    @classmethod
    def relayed(cls, url: str, ticket: str, learner: str, session: str) -> StateSource:
        headers = {LEARNER_HEADER: learner, SESSION_HEADER: session}
        return cls(f"{url}/v1/relay/{ticket}", headers, _RELAYED_S)


class StateArrival:
    """A state as far as it has come."""

    def __init__(self, into: Into, most_bytes: int) -> None:
        self.at = self.size = 0
        self.digest = ""
        self.buffer = memoryview(b"")
        self.received = 0
        """Bytes in all, also those that were worth nothing."""
        self._into = into
        self._most_bytes = most_bytes

    def begin(self, start: int, size: int, digest: str) -> None:
        """A source has this state, from this byte on. Another one than before can only begin at its beginning."""
        if start and (size, digest) != (self.size, self.digest):
            self.at = 0
            raise Unreachable("the source has another state than before: it is fetched from the start")
        if size > self._most_bytes:
            raise PeerError(f"the state has {size} bytes, at most {self._most_bytes} are taken")
        if size != self.size:
            self.buffer = self._into(size).cast("B")
            assert self.buffer.nbytes == size
        self.at, self.size, self.digest = start, size, digest

    def count(self, size: int) -> None:
        self.at += size
        self.received += size


async def get_state(
    session: aiohttp.ClientSession,
    sources: Sequence[StateSource],
    arrival: StateArrival,
    deadline_s: float,
    limits: FabricLimits,
) -> str:
    """The digest of what is then in the arrival's buffer. The last source is the one that is tried again and again."""
    try:
        async with asyncio.timeout(deadline_s):
            await _until_whole(session, list(sources), arrival, deadline_s, limits)
            found = await digest_aside(arrival.buffer)
    except TimeoutError:
        came = f"{arrival.at} of {arrival.size or '?'} bytes came"
        raise Unreachable(f"{sources[-1].url} was not done within {deadline_s:g} s: {came}") from None
    if found != arrival.digest:
        raise PeerError(f"the state has digest {found}, its source named {arrival.digest[:32]}")
    return found


async def put_relay(
    session: aiohttp.ClientSession,
    source: StateSource,
    parts: Parts,
    offset: int,
    digest: str,
    deadline_s: float,
    limits: FabricLimits,
) -> int:
    """The bytes sent, once the newcomer's connection took them all; PeerError: nobody waits for them (any more)."""
    size = sum(part.nbytes for part in parts)
    start = resumed_at(offset, size)
    headers = {
        **source.headers,
        OFFSET_HEADER: str(start),
        SIZE_HEADER: str(size),
        DIGEST_HEADER: digest,
        "Content-Length": str(size - start),
        "Content-Type": "application/octet-stream",
    }
    body = sent(pieces(parts, start, limits.chunk_bytes))
    async with asked(session, "PUT", source.url, deadline_s, headers=headers, data=body):
        return size - start


def resumed_at(start: int, size: int) -> int:
    """The byte a state is sent from when `start` is asked for: one that is no longer than that is sent whole."""
    return start if start < size else 0


async def _until_whole(
    session: aiohttp.ClientSession,
    sources: list[StateSource],
    arrival: StateArrival,
    deadline_s: float,
    limits: FabricLimits,
) -> None:
    tries = 0
    while True:
        before = arrival.at
        try:
            return await _get_rest(session, sources[0], arrival, deadline_s, limits)
        except (Unreachable, PeerError) as error:
            tries = 0 if arrival.at > before else tries + 1
            last = len(sources) == 1
            if last and (tries == _TRIES or isinstance(error, PeerError)):
                raise
        if tries and not last:
            sources.pop(0)  # what cannot be had from the peer itself is asked of the syncer at once
        else:
            await asyncio.sleep(limits.backoff_s * 2**tries)


async def _get_rest(
    session: aiohttp.ClientSession, source: StateSource, arrival: StateArrival, deadline_s: float, limits: FabricLimits
) -> None:
    headers = {**source.headers, "Range": f"bytes={arrival.at}-"} if arrival.at else source.headers
    clock = asyncio.get_running_loop().time

    def count(size: int) -> None:
        arrival.count(size)
        extend(patience, clock() + limits.body_idle_s)

    try:
        async with (
            asyncio.timeout(source.answer_s) as patience,
            asked(session, "GET", source.url, deadline_s, headers=headers) as response,
        ):
            arrival.begin(*_described(response, arrival.at))
            extend(patience, clock() + limits.body_idle_s)
            await receive_body(response, arrival.buffer[arrival.at :], count)
    except TimeoutError:
        raise Unreachable(f"{source.url} was silent for too long, after {arrival.at} bytes") from None


def _described(response: aiohttp.ClientResponse, asked_for: int) -> tuple[int, int, str]:
    """First byte, size and digest of the state that is answered."""
    try:
        size, digest = int(response.headers[SIZE_HEADER]), response.headers[DIGEST_HEADER]
    except (KeyError, ValueError):
        raise PeerError(f"{response.url} came without size and digest: is this a peer's state?") from None
    start = asked_for if response.status == 206 else 0
    if not 0 <= start < size or response.content_length != size - start:
        raise PeerError(f"{response.url} has {response.content_length} bytes from byte {start} on, of {size}")
    return start, size, digest
