"""One connection to a syncer, step by step, for whoever wants to know where the time goes and who answers.

Learners dial through `client`; this takes the same way (proxy, TLS, certificate), says nothing over it, and hangs up.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ssl
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from atoll.fabric.address import SyncerAddress, host_port
from atoll.fabric.trouble import told
from atoll.fabric.wire import one_line
from atoll.protocol.errors import Unreachable

_HEAD_BYTES = 16384
_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Dialled:
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


async def dial(address: SyncerAddress, url: str, deadline_s: float) -> Dialled:
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
                return Dialled(reached - begun)
            await writer.start_tls(context, server_hostname=urlsplit(url).hostname, ssl_handshake_timeout=deadline_s)
            tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
            cipher = tls.cipher()
            der = tls.getpeercert(binary_form=True) or b""
            return Dialled(reached - begun, clock() - reached, cipher[0] if cipher else "", der)
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
