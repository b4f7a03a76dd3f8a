"""Bodies and small JSON on plain HTTP requests: what a courier and an evaluator ask of a syncer.

Rules: the caller's deadline covers the whole of a request; redirects are not followed and no proxy is asked but the one
that the syncer's address names; a body goes straight between the caller's buffer and the socket (`body_reader`); a
fragment, or a step of one, of another length or digest than the syncer named is a PeerError. `Unreachable` is worth
another try, a PeerError is the syncer's considered answer.

A whole version that breaks off is asked for again from the byte it had come to, with its version and digest. If the
syncer has another version by then, that one comes from its first byte. The digest of the whole is checked in the end.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp
import msgspec

from atoll.fabric.address import SyncerAddress, parse_address
from atoll.fabric.authorizer import CODES_PATH
from atoll.fabric.body_meter import ArrivalMeter, PartArrival
from atoll.fabric.body_reader import extend
from atoll.fabric.calls import next_chunk, open_session, receive_body, request
from atoll.fabric.listener import PLAIN
from atoll.fabric.wire import (
    CODEC_HEADER,
    DIGEST_HEADER,
    MIB,
    RECEIVED_HEADER,
    ROUND_HEADER,
    SESSION_HEADER,
    STEPS_HEADER,
    VERSION_HEADER,
    FabricLimits,
    ScoreReport,
    digest_aside,
    one_line,
)
from atoll.protocol.errors import NotAdmitted, PeerError, Unreachable, WrongCertificate

_ANSWER_BYTES = 64 * MIB
"""Largest JSON answer that is read."""
_ERROR_BYTES = 64 * 1024
RESUME_S = 30.0
"""A body that has begun is given up when no byte of it came for this long."""
_ANSWERS_S = 3.0
"""An address that has not answered within this is passed over where there are others."""


def body_session(address: SyncerAddress, limits: FabricLimits) -> aiohttp.ClientSession:
    """Connections for bodies, apart from the control channel's."""
    return open_session(
        connector=aiohttp.TCPConnector(
            limit=16, keepalive_timeout=limits.keepalive_s / 2, ssl=address.context() or True
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.dial_s),
        middlewares=[showing(address)],
        proxy=address.proxy or None,
        auto_decompress=False,
        raise_for_status=False,
    )


def showing(address: SyncerAddress) -> aiohttp.ClientMiddlewareType:
    """Every request shows the syncer what the way to it says. Not by headers of the session: aiohttp shows those to
    a proxy too, token and all, when it asks it for a tunnel."""

    async def show(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        request.headers.update(address.headers_for(str(request.url)))
        return await handler(request)

    return show


class SentBody(NamedTuple):
    received_s: float | None
    """Seconds in which the body arrived, as its receiver says; 0: in one piece; None: the answer does not say."""
    elapsed_s: float
    """Seconds from the request to the answer."""

    def seconds(self, latency_s: float) -> float:
        """Return the seconds in which the body arrived. `latency_s`: how long an answer takes on this link."""
        return max(0.0, self.elapsed_s - latency_s) if self.received_s is None else self.received_s


async def put_body(
    session: aiohttp.ClientSession,
    url: str,
    data: memoryview,
    headers: dict[str, str],
    deadline_s: float,
    limits: FabricLimits,
) -> SentBody:
    clock = asyncio.get_running_loop().time
    data, asked_at = data.cast("B"), clock()
    headers = {**headers, "Content-Length": str(data.nbytes), "Content-Type": "application/octet-stream"}
    body = sent(pieces([data], 0, limits.chunk_bytes))
    async with asked(session, "PUT", url, deadline_s, headers=headers, data=body) as response:
        return SentBody(_seconds_of(response.headers.get(RECEIVED_HEADER, "")), clock() - asked_at)


def _seconds_of(header: str) -> float | None:
    """Return the seconds that the receiver of a body named; None: the header is missing or cannot be read."""
    return float(header) if re.fullmatch(r"[0-9]{1,9}\.[0-9]{1,9}", header, re.ASCII) else None


@dataclass(slots=True)
class CodedBody:
    """Version 0 in a form of fewer bytes, for a reader that can decode it (numerics/initial.py)."""

    codec: str
    nbytes: int
    data: memoryview | None = None
    """Body in that form. None: the version came as its values."""


@dataclass(slots=True)
class FragmentArrival:
    """A whole version of a fragment, as far as it has come."""

    into: memoryview
    at: int = 0
    version: int = -1
    round: int = -1
    digest: str = ""
    received: int = 0
    """Bytes in all, also those of a version that was given up for a newer one."""
    part: PartArrival = field(default_factory=lambda: ArrivalMeter().expect_part())
    """Meter of its pieces."""
    coded: CodedBody | None = None
    """Form that the reader takes beside the values."""

    @property
    def target(self) -> memoryview:
        """Buffer that the body goes into, of its exact size."""
        return self.into if self.coded is None or self.coded.data is None else self.coded.data

    @property
    def values_at(self) -> int:
        """Bytes of values that have arrived: 4 for each, in either form of the body."""
        return self.at * self.into.nbytes // max(1, self.target.nbytes)

    @property
    def headers(self) -> dict[str, str]:
        """What asks for the rest."""
        if not self.at:
            return {}
        return {"Range": f"bytes={self.at}-", VERSION_HEADER: str(self.version), DIGEST_HEADER: self.digest}

    def begin(self, response: aiohttp.ClientResponse) -> None:
        """PeerError: it is not what was asked for."""
        version, round, digest = _labels(response)
        codec = response.headers.get(CODEC_HEADER, "")
        if codec and (self.coded is None or codec != self.coded.codec):
            raise PeerError(f"{response.url} answered in a form that was not asked for: {codec[:32]}")
        if response.status != 206:
            self.at = 0
            if self.coded is not None:  # a version that comes anew may have another form
                self.coded.data = memoryview(bytearray(self.coded.nbytes)) if codec else None
        elif not self.at or (version, digest) != (self.version, self.digest):
            raise PeerError(f"{response.url} answered with a part of another version")
        left = self.target.nbytes - self.at
        if response.content_length != left:
            raise PeerError(f"{response.url} has {response.content_length} bytes, {left} were expected")
        self.version, self.round, self.digest = version, round, digest
        self.part.begin(left)

    def count(self, size: int) -> None:
        self.at += size
        self.received += size
        self.part.count(size)


async def get_body(
    session: aiohttp.ClientSession,
    url: Callable[[], str],
    arrival: FragmentArrival,
    deadline_s: float,
    limits: FabricLimits,
) -> tuple[int, int, str]:
    """Version, round and digest of what has then arrived; after an error its content is undefined. `url`: where the
    syncer is now. It is asked again before each try."""
    clock = asyncio.get_running_loop().time
    came_at, wait_s = clock(), limits.backoff_s
    try:
        async with asyncio.timeout(deadline_s):
            while arrival.at < arrival.target.nbytes or not arrival.digest:
                before = arrival.received
                try:
                    await _get_rest(session, url(), arrival, deadline_s, limits)
                except Unreachable:
                    if arrival.received > before:
                        came_at, wait_s = clock(), limits.backoff_s
                    if not arrival.at or clock() - came_at >= RESUME_S:
                        raise
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, limits.backoff_cap_s)
            with arrival.part.working():
                found = await _checked_digest(url(), arrival.target, arrival.digest)
    except TimeoutError:
        came = f"{arrival.at} of {arrival.target.nbytes} bytes came"
        raise Unreachable(f"{url()} was not done within {deadline_s:g} s: {came}") from None
    return arrival.version, arrival.round, found


async def _get_rest(
    session: aiohttp.ClientSession, url: str, arrival: FragmentArrival, deadline_s: float, limits: FabricLimits
) -> None:
    clock = asyncio.get_running_loop().time

    def count(size: int) -> None:
        arrival.count(size)
        extend(patience, clock() + limits.body_idle_s)

    arrival.part.ask()
    try:
        async with (
            asyncio.timeout(limits.body_idle_s if arrival.at else deadline_s) as patience,
            asked(session, "GET", url, deadline_s, headers=arrival.headers) as response,
        ):
            arrival.begin(response)
            await receive_body(response, arrival.target[arrival.at :], count)
    except TimeoutError:
        raise Unreachable(f"{url} was silent for too long, after {arrival.at} bytes") from None
    finally:
        arrival.part.stop()


class FetchedVersion(NamedTuple):
    version: int
    digest: str
    """Of the version's values, as the syncer named it."""
    steps: tuple[memoryview, ...] = ()
    """What leads to it from the version that was named; empty: it came whole."""

    @property
    def nbytes(self) -> int:
        return sum(step.nbytes for step in self.steps)


async def get_version(
    session: aiohttp.ClientSession,
    url: str,
    have: int,
    step_bytes: int,
    into: memoryview,
    deadline_s: float,
    least: int = -1,
    part: PartArrival | None = None,
) -> FetchedVersion:
    """A fragment's version, for whoever holds version `have`: whole in `into`, or as steps of `step_bytes` each, which
    together are fewer bytes. After an error the content of `into` is undefined."""
    into, part = into.cast("B"), part or ArrivalMeter().expect_part()
    wanted = f"{url}?have={have}" + (f"&least={least}" if least >= 0 else "")
    part.ask()
    async with asked(session, "GET", wanted, deadline_s) as response:
        version, _, named = _labels(response)
        marks = [mark for mark in response.headers.get(STEPS_HEADER, "").split(",") if mark]
        if not marks:
            await _receive(response, url, into, part)
            with part.working():
                return FetchedVersion(version, await _checked_digest(url, into, named))
        if len(marks) != version - have or len(marks) * step_bytes >= into.nbytes:
            raise PeerError(f"{url} came as {len(marks)} steps from version {have} to {version}")
        body = memoryview(bytearray(len(marks) * step_bytes))
        await _receive(response, url, body, part)
        steps = tuple(body[at : at + step_bytes] for at in range(0, body.nbytes, step_bytes))
        with part.working():
            for step, mark in zip(steps, marks, strict=True):
                await _checked_digest(url, step, mark)
    return FetchedVersion(version, named, steps)


async def get_moments(
    session: aiohttp.ClientSession, url: str, into: memoryview, deadline_s: float, part: PartArrival | None = None
) -> int:
    """The bytes of averaged moments that are now in `into`, which may be longer."""
    part = part or ArrivalMeter().expect_part()
    part.ask()
    async with asked(session, "GET", url, deadline_s) as response:
        _, _, named = _labels(response)
        size = response.content_length
        if size is None or size > into.nbytes:
            raise PeerError(f"{url} has {size} bytes, {into.nbytes} at most were expected")
        await _receive(response, url, into[:size], part)
        await _checked_digest(url, into[:size], named)
    return size


async def _receive(response: aiohttp.ClientResponse, url: str, into: memoryview, part: PartArrival) -> None:
    if response.content_length != into.nbytes:
        raise PeerError(f"{url} has {response.content_length} bytes, {into.nbytes} were expected")
    part.begin(into.nbytes)
    try:
        await receive_body(response, into, part.count)
    finally:
        part.stop()


async def _checked_digest(url: str, data: memoryview, named: str) -> str:
    found = await digest_aside(data)
    if found != named:
        raise PeerError(f"{url} has digest {found}, the syncer named {named[:32]}")
    return found


async def get_json(where: str, path: str, deadline_s: float = 10.0) -> object:
    """What the syncer answers to GET `path`, decoded."""
    async with once(where, "GET", path, deadline_s) as response:
        return await _json(response)


async def get_json_at(session: aiohttp.ClientSession, url: str, deadline_s: float = 10.0) -> object:
    """The same of one address, on a session that is there already."""
    async with asked(session, "GET", url, deadline_s) as response:
        return await _json(response)


async def _json(response: aiohttp.ClientResponse) -> object:
    data = await _bounded(response, _ANSWER_BYTES)
    try:
        answer: object = msgspec.json.decode(data)
    except msgspec.MsgspecError as error:
        raise PeerError(one_line(f"{response.url.path} is not JSON: {error}")) from None
    return answer


async def post_score(where: str, score: ScoreReport, deadline_s: float = 10.0) -> None:
    async with once(where, "POST", "/v1/scores", deadline_s, msgspec.json.encode(score)):
        pass


async def tell_presence(where: str, deadline_s: float = 10.0) -> None:
    """Say that an evaluator is there."""
    async with once(where, "GET", "/v1/scores", deadline_s):
        pass


async def post_settings(where: str, words: Sequence[str], deadline_s: float = 10.0) -> str:
    """Change settings of a running run, `key=value`; what has changed, empty for nothing."""
    return await _told(where, "/v1/settings", words, "changed", deadline_s)


async def post_drain(where: str, learner: str, deadline_s: float = 10.0) -> str:
    """Let a learner leave without loss; what the syncer says of it."""
    return await _told(where, "/v1/drain", [learner], "drained", deadline_s)


async def make_dashboard_link(where: str, deadline_s: float = 10.0) -> str:
    """A link that opens the dashboard in a browser, once."""
    async with once(where, "POST", CODES_PATH, deadline_s, b"") as response:
        answer = await _json(response)
    try:
        return f"{response.url.origin()}{msgspec.convert(answer, dict[str, str])['path']}"
    except (msgspec.ValidationError, KeyError):
        raise PeerError(f"{CODES_PATH} is not answered as a syncer does: is it an older one?") from None


async def _told(where: str, path: str, words: Sequence[str], key: str, deadline_s: float) -> str:
    async with once(where, "POST", path, deadline_s, msgspec.json.encode(list(words))) as response:
        answer = await _json(response)
    try:
        return msgspec.convert(answer, dict[str, str]).get(key, "")
    except msgspec.ValidationError as error:
        raise PeerError(one_line(f"{path} is not answered as a syncer does: {error}")) from None


async def get_fragment_once(
    where: str | SyncerAddress, index: int, into: memoryview, deadline_s: float = 60.0, least: int = -1
) -> tuple[int, int, str]:
    """One fragment without a link: version, round, digest. `least`: see `BodyConnection.get_fragment`."""
    address = parse_address(where) if isinstance(where, str) else where
    async with body_session(address, FabricLimits()) as session:
        url = fragment_url(await _answering(session, address), index) + (f"?least={least}" if least >= 0 else "")
        return await get_body(session, lambda: url, FragmentArrival(into.cast("B")), deadline_s, FabricLimits())


@asynccontextmanager
async def once(
    where: str, method: str, path: str, deadline_s: float, data: bytes | None = None
) -> AsyncIterator[aiohttp.ClientResponse]:
    """One request on a connection of its own, to the first address that answers."""
    address = parse_address(where)
    headers = {"Content-Type": "application/json"} if data is not None else None
    async with body_session(address, FabricLimits()) as session:
        url = await _answering(session, address)
        async with asked(session, method, url + path, deadline_s, headers=headers, data=data) as response:
            yield response


async def _answering(session: aiohttp.ClientSession, address: SyncerAddress) -> str:
    """Return the first of several addresses at which somebody speaks for the run. WrongCertificate: nobody does, and at
    one of them somebody else answers."""
    wrong: WrongCertificate | None = None
    for url in address.urls if len(address.urls) > 1 else ():
        try:
            async with asked(session, "GET", f"{url}/v1/status", _ANSWERS_S):
                return url
        except WrongCertificate as error:
            wrong = error
        except Unreachable:
            continue
    if wrong is not None:
        raise wrong
    return address.urls[-1]


def moments_url(url: str, index: int, version: int) -> str:
    return f"{url.rstrip('/')}/v1/moments/{index}/{version}"


def fragment_url(url: str, index: int) -> str:
    return f"{url.rstrip('/')}/v1/fragments/{index}"


def body_headers(session: str, digest: str) -> dict[str, str]:
    return {SESSION_HEADER: session, DIGEST_HEADER: digest}


def pieces(parts: Iterable[memoryview], start: int, size: int) -> Iterator[memoryview]:
    """The parts as one run of bytes from `start` on, at most `size` at a time, without copying."""
    for part in parts:
        data = part.cast("B")
        for at in range(start, data.nbytes, size):
            yield data[at : at + size]
        start = max(0, start - data.nbytes)


@asynccontextmanager
async def asked(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    deadline_s: float,
    *,
    headers: dict[str, str] | None = None,
    data: AsyncIterator[memoryview] | bytes | None = None,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer, if it is a good one; Unreachable or PeerError otherwise, whatever goes wrong until it is read."""
    try:
        async with (
            asyncio.timeout(deadline_s),
            request(session, method, url, headers=headers, data=data) as response,
        ):
            if response.status not in (200, 204, 206):
                await _complain(response)
            yield response
    except TimeoutError:
        raise Unreachable(f"{method} {url} was not done within {deadline_s:g} s") from None


async def reason_of(response: aiohttp.ClientResponse) -> str:
    """Why a syncer says no, in its own words."""
    data = await _bounded(response, _ERROR_BYTES)
    try:
        reason = msgspec.json.decode(data, type=dict[str, str]).get("error", "")
    except (msgspec.MsgspecError, ValueError):
        reason = PLAIN.decode() if data == PLAIN else ""
    return one_line(reason or f"{response.url.origin()} answered {response.status}")


async def _complain(response: aiohttp.ClientResponse) -> None:
    text = await reason_of(response)
    if response.status in (408, 429) or response.status >= 500:
        raise Unreachable(text)
    raise NotAdmitted(text) if response.status in (401, 403) else PeerError(text)


async def _bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    data = bytearray()
    while chunk := await next_chunk(response.content):
        data += chunk
        if len(data) > limit:
            raise PeerError(f"{response.url} answered more than {limit} bytes")
    return bytes(data)


def _labels(response: aiohttp.ClientResponse) -> tuple[int, int, str]:
    try:
        return (
            int(response.headers[VERSION_HEADER]),
            int(response.headers[ROUND_HEADER]),
            response.headers[DIGEST_HEADER],
        )
    except (KeyError, ValueError):
        raise PeerError(f"{response.url} came without version, round and digest: is this a syncer?") from None


async def sent(body: Iterator[memoryview]) -> AsyncIterator[memoryview]:
    for piece in body:
        yield piece
        await asyncio.sleep(0)  # a reader that keeps up never makes a write wait: the loop has other work too
