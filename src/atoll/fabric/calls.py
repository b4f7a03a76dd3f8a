"""Connections that a client makes: every call of aiohttp's client, a diagnostic dial, and errors in words that help.

aiohttp does not keep to its own tree of errors. A body whose connection is gone raises a plain RuntimeError
("Connection closed."), as does a request on a closed session; bytes that are no HTTP raise parser errors; a reply
to a ping raises inside `receive`. So everything but a TimeoutError, which belongs to whoever set the deadline, becomes
Unreachable. That is safe only because none of our own code runs inside: aiohttp's client is called here and nowhere
else (tests/architecture/test_aiohttp_calls.py).

`dial` makes one connection to a syncer, step by step (proxy, TLS, certificate), sends nothing over it, and hangs up:
for whoever wants to know where the time goes and who answers. Learners dial through `client`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

import aiohttp
from aiohttp.http_exceptions import BadHttpMessage

from atoll.fabric.address import SyncerAddress, host_port
from atoll.fabric.body_reader import BodyReader
from atoll.fabric.wire import one_line
from atoll.protocol.errors import AtollError, Unreachable, WrongCertificate


@contextmanager
def as_unreachable(doing: str = "") -> Iterator[None]:
    """`doing`: what failed, for the text."""
    try:
        yield
    except (AtollError, TimeoutError):
        raise
    except Exception as error:
        wrong = isinstance(error, ssl.SSLCertVerificationError | aiohttp.ClientConnectorCertificateError)
        kind = WrongCertificate if wrong else Unreachable
        raise kind(one_line(f"{doing} failed: {told(error)}" if doing else told(error))) from error


def open_session(**settings: Any) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(trust_env=False, cookie_jar=aiohttp.DummyCookieJar(), **settings)


async def close_session(session: aiohttp.ClientSession, within_s: float) -> None:
    """aiohttp waits until a peer has taken what was written to it; one that stands still does not hold us up."""
    with suppress(TimeoutError, Unreachable):
        async with asyncio.timeout(within_s):
            with as_unreachable():
                await session.close()


@asynccontextmanager
async def request(
    session: aiohttp.ClientSession, method: str, url: str, **how: Any
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer's head; its body is read by `next_chunk` or `receive_body`. Redirects are not followed."""
    asking, doing = session.request(method, url, allow_redirects=False, **how), f"{method} {url}"
    with as_unreachable(doing):
        response = await asking.__aenter__()
    try:
        yield response
    finally:
        with as_unreachable(doing):
            await asking.__aexit__(None, None, None)


async def next_chunk(body: aiohttp.StreamReader) -> bytes:
    """Of an answer, or of what a peer sends to a server of ours; empty at its end."""
    with as_unreachable():
        return (await body.readchunk())[0]


def copy_early(body: aiohttp.StreamReader, into: memoryview, came: Callable[[int], None]) -> memoryview:
    """Copy what aiohttp has read of a body by now into its buffer, as one piece; return what is left of the buffer."""
    left = into
    while left:
        with as_unreachable():
            chunk = body.read_nowait()
        if not chunk:
            break
        left[: len(chunk)] = chunk
        left = left[len(chunk) :]
    if early := into.nbytes - left.nbytes:
        came(early)
    return left


async def receive_body(response: aiohttp.ClientResponse, into: memoryview, came: Callable[[int], None]) -> None:
    """The body of an answer into a buffer of its length; `came` is told the size of every piece."""
    left, connection = copy_early(response.content, into, came), response.connection
    if left:
        reader = BodyReader(connection and connection.transport, left, came)
        assert connection is not None and connection.protocol is not None
        connection.protocol._parser = NothingMore()  # type: ignore[assignment]  # every request makes a new one
        await reader.wait()
        response.content.feed_eof()  # the connection is free for another


class NothingMore:
    """A parser for what comes behind an answer, before anything else is asked: such a connection is closed."""

    def feed_data(self, data: bytes) -> NoReturn:
        raise BadHttpMessage("more bytes came than the answer has")

    def feed_eof(self) -> None:
        """As it should be."""


async def dial_socket(session: aiohttp.ClientSession, url: str, **how: Any) -> aiohttp.ClientWebSocketResponse:
    with as_unreachable():
        socket: aiohttp.ClientWebSocketResponse = await session.ws_connect(url, **how)
    return socket


async def receive_frame(socket: aiohttp.ClientWebSocketResponse) -> aiohttp.WSMessage:
    with as_unreachable():
        return await socket.receive()


async def send_frame(socket: aiohttp.ClientWebSocketResponse, data: bytes) -> None:
    with as_unreachable():
        await socket.send_bytes(data)


async def close_socket(socket: aiohttp.ClientWebSocketResponse, message: bytes = b"") -> None:
    with as_unreachable():
        await socket.close(message=message)


# ---- errors in words ------------------------------------------------------------------------------------------------

NOT_TLS = "it answers, but not in TLS: is that the port of a plain HTTP server?"
HUNG_UP = "it hung up without an answer: does it ask for a certificate (mutual TLS: --cert and --key)?"
"""TLS 1.3 refuses a certificate, or that there is none, only after the handshake, and who hangs up may say no more."""
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL")
_OURS_ASKED = ("CERTIFICATE_REQUIRED", "UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_UNKNOWN", "CERTIFICATE_EXPIRED")


def told(error: BaseException) -> str:
    """One line; a proxy that is at fault is named by its address, never with its password."""
    match error:
        case aiohttp.ClientProxyConnectionError():
            return f"the proxy {error.host}:{error.port} cannot be reached: {_system(error.os_error)}"
        case aiohttp.ClientHttpProxyError():
            where = error.request_info.real_url
            return one_line(
                f"the proxy {where.host}:{where.port} does not let us through: {error.status} {error.message}"
            )
        case aiohttp.ClientConnectorCertificateError():
            return told(error.certificate_error)
        case aiohttp.ClientConnectorError():
            return told(error.os_error)
        case aiohttp.ServerDisconnectedError():
            return HUNG_UP
        case ssl.SSLCertVerificationError():
            return one_line(getattr(error, "verify_message", "") or error.args[-1])
        case ssl.SSLError():
            return _tls(error)
        case OSError() if not isinstance(error, TimeoutError):
            return _system(error)
    return one_line(str(error) or type(error).__name__)


def _tls(error: ssl.SSLError) -> str:
    reason: str = getattr(error, "reason", "") or ""
    if any(word in reason for word in _NOT_TLS):
        return NOT_TLS
    if "ALERT" in reason and any(word in reason for word in _OURS_ASKED):
        return "it asks for a certificate that its authority made (mutual TLS): name ours with --cert and --key"
    return one_line(f"the TLS handshake failed: {reason.replace('_', ' ').lower() or error}")


def _system(error: OSError) -> str:
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)  # asyncio has words of its own for some, and they say less
    return one_line(error.strerror or str(error) or type(error).__name__)


# ---- a diagnostic dial ----------------------------------------------------------------------------------------------

_HEAD_BYTES = 16384
_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class DialResult:
    reach_s: float
    """Until the syncer's machine answers, a proxy's part in it included."""
    handshake_s: float = 0.0
    cipher: str = ""
    """Empty: in the clear."""
    certificate: bytes = b""
    """Of whoever answers, as DER."""

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.certificate).hexdigest()


async def dial(address: SyncerAddress, url: str, deadline_s: float) -> DialResult:
    """Unreachable says at which step it failed."""
    writer: asyncio.StreamWriter | None = None
    clock = asyncio.get_running_loop().time
    begun = clock()
    try:
        async with asyncio.timeout(deadline_s):
            writer = await _reached(address, url)
            reached = clock()
            context = address.context()
            if context is None:
                return DialResult(reached - begun)
            await writer.start_tls(context, server_hostname=urlsplit(url).hostname, ssl_handshake_timeout=deadline_s)
            tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
            cipher = tls.cipher()
            der = tls.getpeercert(binary_form=True) or b""
            return DialResult(reached - begun, clock() - reached, cipher[0] if cipher else "", der)
    except TimeoutError:
        raise Unreachable(f"no answer within {deadline_s:g} s{address.through}") from None
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise Unreachable(told(error)) from None
    finally:
        if writer is not None:
            writer.transport.abort()


async def _reached(address: SyncerAddress, url: str) -> asyncio.StreamWriter:
    target = urlsplit(url)
    assert target.hostname and target.port, "a way has whole addresses only"
    if not address.proxy:
        return (await asyncio.open_connection(target.hostname, target.port))[1]
    proxy = urlsplit(address.proxy)
    try:
        reader, writer = await asyncio.open_connection(proxy.hostname, proxy.port, limit=_HEAD_BYTES)
    except OSError as error:
        raise Unreachable(f"the proxy {address.proxy_shown} cannot be reached: {told(error)}") from None
    try:
        writer.write(_connect(host_port(target.hostname, target.port), address.proxy))
        answer = (await reader.readuntil(_END)).split(b"\r\n")[0].decode("latin-1").split(maxsplit=1)
    except BaseException:
        writer.transport.abort()
        raise
    if len(answer) < 2 or not answer[1].startswith("2"):
        writer.transport.abort()
        raise Unreachable(one_line(f"the proxy {address.proxy_shown} does not let us through: {' '.join(answer[1:])}"))
    return writer


def _connect(target: str, proxy: str) -> bytes:
    head = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n"
    parts = urlsplit(proxy)
    if parts.username is not None:
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        head += f"Proxy-Authorization: Basic {base64.b64encode(secret.encode()).decode()}\r\n"
    return f"{head}\r\n".encode()
