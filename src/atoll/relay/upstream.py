"""The way from a relay to its syncer: requests and sockets, in a learner's name or in its own.

What a learner shows (its join token, its session) is passed on as it is: the syncer decides about it, and its refusal
goes back in its own words (`DialRefused`). The relay's own token is shown for its own requests only.

What this way carries is measured with the versions that the relay fetches and the sums that it sends (`ways`). Bodies
that are passed on say nothing: they may be held up by a learner's own link.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

import aiohttp
import msgspec

from atoll.fabric.address import SyncerAddress
from atoll.fabric.body_meter import ArrivalMeter, PartArrival
from atoll.fabric.calls import close_session, dial_socket, open_session, request
from atoll.fabric.control_channel import ClientSocket
from atoll.fabric.join_tokens import HELD, RELAYS, SUMS
from atoll.fabric.relay_channel import MESSAGE_BYTES
from atoll.fabric.transfer import SentBody, put_body, reason_of
from atoll.fabric.wire import (
    DIGEST_HEADER,
    PROTOCOL_HEADER,
    RELAY_HEADER,
    SESSION_HEADER,
    FabricLimits,
    check_syncer_version,
)
from atoll.protocol.errors import PeerError, Unreachable
from atoll.protocol.learner.ways import Ways
from atoll.protocol.messages import ContributionKey
from atoll.protocol.relay import HeldBody

DIALS = 16
"""For learners that the syncer has not let in yet, at once."""
BODY_S = 600.0
"""The most a body may take; the syncer's least rate ends a stuck one long before."""


class DialRefused(PeerError):
    """The syncer's answer to a dial: a status, and why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Upstream:
    """Belongs to one event loop."""

    def __init__(self, address: SyncerAddress, session: str, limits: FabricLimits) -> None:
        self._address, self._session, self._limits = address, session, limits
        self._urls = list(address.urls)
        self._bodies: aiohttp.ClientSession | None = None
        self._sockets: aiohttp.ClientSession | None = None
        self._dials = asyncio.Semaphore(DIALS)
        self.bytes_up = self.bytes_down = 0
        """Of bodies: contributions and sums, versions."""
        self.ways = Ways()
        self._arrivals = ArrivalMeter()
        self._arrived_at = 0.0
        """When the last sum had arrived: of sums that are on their way at once, time counts once."""

    @property
    def url(self) -> str:
        return self._urls[0]

    def take_next_address(self) -> None:
        self._urls.append(self._urls.pop(0))

    def open(self) -> None:
        common = {
            "timeout": aiohttp.ClientTimeout(total=None, sock_connect=self._limits.dial_s),
            "proxy": self._address.proxy or None,
        }
        secure = self._address.context() or True
        self._bodies = open_session(
            connector=aiohttp.TCPConnector(limit=64, keepalive_timeout=self._limits.keepalive_s / 2, ssl=secure),
            auto_decompress=False,
            **common,
        )
        self._sockets = open_session(
            connector=aiohttp.TCPConnector(limit=0, force_close=True, ssl=secure),
            middlewares=[_explain_refusals],
            ws_response_class=ClientSocket,
            **common,
        )

    async def close(self) -> None:
        for session in (self._bodies, self._sockets):
            if session is not None:
                await close_session(session, self._limits.flush_s)

    # ---- sockets ------------------------------------------------------------------------------------------------

    async def dial_own(self) -> ClientSocket:
        """The relay's own channel. DialRefused, Unreachable."""
        return await self._dial(RELAYS, self._own(RELAYS), MESSAGE_BYTES)

    async def dial_for(self, shown: Mapping[str, str]) -> ClientSocket:
        """A learner's control channel, by what the learner shows. Who shows nothing that counts costs the syncer a
        dial: so many at once are made, and the others wait."""
        async with self._dials:
            return await self._dial("/v1/control", {**shown, RELAY_HEADER: self._session}, self._limits.control_bytes)

    async def _dial(self, path: str, headers: Mapping[str, str], most_bytes: int) -> ClientSocket:
        assert self._sockets is not None
        limits = self._limits
        try:
            async with asyncio.timeout(limits.dial_s):
                socket = await dial_socket(
                    self._sockets,
                    self.url + path,
                    headers=headers,
                    timeout=aiohttp.ClientWSTimeout(ws_close=limits.flush_s),
                    heartbeat=limits.ping_s,
                    max_msg_size=most_bytes,
                    compress=0,
                )
        except TimeoutError:
            raise Unreachable(f"{self.url} did not answer within {limits.dial_s:g} s") from None
        assert isinstance(socket, ClientSocket)
        return socket

    # ---- requests -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def request(
        self, method: str, path: str, headers: Mapping[str, str], data: AsyncIterator[bytes] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A learner's request, as it is; whatever the answer."""
        assert self._bodies is not None
        async with request(self._bodies, method, self.url + path, headers=headers, data=data) as response:
            yield response

    async def put_held(self, key: ContributionKey, session: str, body: HeldBody) -> None:
        """What is held in place of a contribution's body. PeerError: the syncer does not want it."""
        learner, round, attempt = key
        path = f"{HELD}/{learner}/{round}/{attempt}"
        await self._put(path, msgspec.json.encode(body), {SESSION_HEADER: session}, self._limits.send_s)

    async def put_sum(self, ask: int, data: memoryview, digest: str, work_s: float = 0.0) -> None:
        """`work_s`: how long the sum took to make; sums leave no faster than they are made."""
        sent = await self._put(f"{SUMS}/{ask}", data, {DIGEST_HEADER: digest}, BODY_S)
        self.bytes_up += data.nbytes
        if seconds := sent.seconds(self.ways.latency_s):
            now = asyncio.get_running_loop().time()
            shared_s = max(0.0, self._arrived_at - (now - seconds))
            self._arrived_at = now
            self.ways.up.add(data.nbytes, max(seconds - shared_s, work_s))

    @contextmanager
    def measure_version(self) -> Iterator[PartArrival]:
        """Count what arrives of a version. Several that arrive at once share the link."""
        part = self._arrivals.expect_part()
        part.ask()
        try:
            yield part
        finally:
            part.close()
            self.ways.add_latency(self._arrivals.latency_s)
            self.ways.down.add(*self._arrivals.take())

    async def _put(
        self, path: str, data: memoryview | bytes, headers: Mapping[str, str], deadline_s: float
    ) -> SentBody:
        assert self._bodies is not None
        headers = {**self._own(path), **headers}
        return await put_body(self._bodies, self.url + path, memoryview(data), headers, deadline_s, self._limits)

    def _own(self, path: str) -> dict[str, str]:
        return {**self._address.headers_for(self.url + path), RELAY_HEADER: self._session}


async def _explain_refusals(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """A WebSocket's handshake would follow a redirect, and would not say why it was refused."""
    response = await handler(request)
    if response.status == 101:
        try:
            check_syncer_version(response.headers.get(PROTOCOL_HEADER))
        except PeerError as error:
            response.close()
            raise DialRefused(403, str(error)) from None
        return response
    try:
        reason = await reason_of(response)
    finally:
        response.close()
    raise DialRefused(response.status if response.status >= 400 else 502, reason)
