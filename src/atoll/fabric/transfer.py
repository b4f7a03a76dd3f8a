"""Bodies and small JSON on plain HTTP requests: what a courier and an evaluator ask of a syncer.

Rules: the caller's deadline covers the whole of a request; redirects are not followed and no proxy is asked; a body
goes straight between the caller's buffer and the socket, 1 MiB at a time; a fragment of another length or digest than
the syncer named is a PeerError. `Unreachable` is worth another try, a PeerError is the syncer's considered answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from atoll.fabric.wire import (
    DIGEST_HEADER,
    MIB,
    ROUND_HEADER,
    SESSION_HEADER,
    VERSION_HEADER,
    Limits,
    Score,
    digest_aside,
    one_line,
)
from atoll.protocol.errors import PeerError, Unreachable

_ANSWER_BYTES = 64 * MIB
"""Largest JSON answer that is read."""
_ERROR_BYTES = 64 * 1024


def body_session(limits: Limits) -> aiohttp.ClientSession:
    """Connections for bodies, apart from the control channel's."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=16, keepalive_timeout=limits.keepalive_s / 2),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.dial_s),
        trust_env=False,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        raise_for_status=False,
    )


async def put_body(
    session: aiohttp.ClientSession,
    url: str,
    data: memoryview,
    headers: dict[str, str],
    deadline_s: float,
    limits: Limits,
) -> None:
    data = data.cast("B")
    headers = {**headers, "Content-Length": str(data.nbytes), "Content-Type": "application/octet-stream"}
    body = sent(pieces([data], 0, limits.chunk_bytes))
    async with asked(session, "PUT", url, deadline_s, headers=headers, data=body):
        pass


async def get_body(
    session: aiohttp.ClientSession, url: str, into: memoryview, deadline_s: float
) -> tuple[int, int, str]:
    """Version, round and digest of what is now in `into`; after an error its content is undefined."""
    into = into.cast("B")
    async with asked(session, "GET", url, deadline_s) as response:
        version, round, named = _labels(response)
        if response.content_length != into.nbytes:
            raise PeerError(f"{url} has {response.content_length} bytes, {into.nbytes} were expected")
        at = 0
        while chunk := (await response.content.readchunk())[0]:
            into[at : at + len(chunk)] = chunk
            at += len(chunk)
        found = await digest_aside(into)
    if found != named:
        raise PeerError(f"{url} has digest {found}, the syncer named {named[:32]}")
    return version, round, found


async def get_json(url: str, path: str, deadline_s: float = 10.0) -> object:
    """What the syncer answers to GET `path`, decoded."""
    async with (
        body_session(Limits()) as session,
        asked(session, "GET", url.rstrip("/") + path, deadline_s) as response,
    ):
        data = await _bounded(response, _ANSWER_BYTES)
    try:
        answer: object = msgspec.json.decode(data)
    except msgspec.MsgspecError as error:
        raise PeerError(one_line(f"{path} is not JSON: {error}")) from None
    return answer


async def post_score(url: str, score: Score, deadline_s: float = 10.0) -> None:
    headers = {"Content-Type": "application/json"}
    data = msgspec.json.encode(score)
    async with (
        body_session(Limits()) as session,
        asked(session, "POST", url.rstrip("/") + "/v1/scores", deadline_s, headers=headers, data=data),
    ):
        pass


async def post_settings(url: str, words: Sequence[str], deadline_s: float = 10.0) -> str:
    """Change settings of a running run, `key=value`; what has changed, empty for nothing."""
    data = msgspec.json.encode(list(words))
    async with (
        body_session(Limits()) as session,
        asked(session, "POST", url.rstrip("/") + "/v1/settings", deadline_s, data=data) as response,
    ):
        answer = msgspec.json.decode(await _bounded(response, _ANSWER_BYTES), type=dict[str, str])
    return answer.get("changed", "")


async def get_fragment_once(url: str, index: int, into: memoryview, deadline_s: float = 60.0) -> tuple[int, int, str]:
    """One fragment without a link: version, round, digest."""
    async with body_session(Limits()) as session:
        return await get_body(session, fragment_url(url, index), into, deadline_s)


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
            session.request(method, url, headers=headers, data=data, allow_redirects=False) as response,
        ):
            if response.status not in (200, 204, 206):
                await _complain(response, url)
            yield response
    except TimeoutError:
        raise Unreachable(f"{method} {url} was not done within {deadline_s:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise Unreachable(one_line(f"{method} {url} failed: {str(error) or type(error).__name__}")) from None


async def _complain(response: aiohttp.ClientResponse, url: str) -> None:
    data = await _bounded(response, _ERROR_BYTES)
    try:
        reason = msgspec.json.decode(data, type=dict[str, str]).get("error", "")
    except (msgspec.MsgspecError, ValueError):
        reason = ""
    text = one_line(reason or f"{url} answered {response.status}")
    if response.status in (408, 429) or response.status >= 500:
        raise Unreachable(text)
    raise PeerError(text)


async def _bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    data = bytearray()
    while chunk := (await response.content.readchunk())[0]:
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
