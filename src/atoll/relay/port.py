"""A relay's port: what the learners of a region ask, answered here or passed on to the syncer.

    GET /v1/control                            passed on, a socket above for each socket below (passage.py)
    PUT /v1/contributions/…                    held here while the run sums, and the syncer is told what is held
    GET /v1/fragments/{fragment}[?have=…]      served from one copy
    everything else under /v1/                 passed on as it is: first parameters, peers' states, ranks' parts,
                                               shared moments, what evaluators and operators ask

Rules:
- whoever shows no join token is refused here; whether a token counts the syncer says, in its own words;
- held and served from a copy is only what comes by the token, and under the session, of a learner whose control channel
  is open through this relay: the syncer has let it in. All else is passed on, and the syncer decides;
- a request that does not reach the syncer is answered with 503: worth another try, here or directly.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Collection
from typing import TYPE_CHECKING

import numpy as np
from aiohttp import StreamReader, web

from atoll.fabric.authorizer import OpenAuthorizer, Rejected, Visitor
from atoll.fabric.body_meter import PartArrival
from atoll.fabric.body_port import codec_of
from atoll.fabric.calls import next_chunk
from atoll.fabric.host import Port, error_response, range_start, send_pieces, within
from atoll.fabric.intake import Intake
from atoll.fabric.listener import Tls
from atoll.fabric.wire import DIGEST_HEADER, RELAY_HEADER, SESSION_HEADER, SMALL_BYTES, VERSION_HEADER, FabricLimits
from atoll.protocol.errors import PeerError, Unreachable
from atoll.relay.passage import Passage, serve_passage
from atoll.relay.upstream import Upstream
from atoll.relay.versions import CODED, WHOLE, KeptVersion, version_of

if TYPE_CHECKING:
    from atoll.relay.service import RelayService

_NUMBER = "[0-9]{1,12}"
PASSED = ("Authorization", "Content-Length", "Content-Type", "Content-Range", "Range")
"""Headers that are passed on, with all that begin with Atoll-; but not the one that names a relay."""
LARGEST_VERSION = 1 << 36
"""Bytes of a fragment that a relay keeps."""
CHUNK_S = 60.0
"""The longest pause of a body that is passed on."""


class PassedToken(OpenAuthorizer):
    """Whoever shows a token may ask: the syncer says whether it counts."""

    def admit(self, request: web.Request) -> Visitor:
        shown = request.headers.getall("Authorization", [])
        if len(shown) != 1:
            raise Rejected(401, "this relay asks for a token: join by its link (atoll learn --join LINK)")
        return Visitor(token=hashlib.sha256(shown[0].encode("utf-8", "replace")).hexdigest()[:16])


class RelayPort(Port):
    def __init__(
        self,
        service: RelayService,
        *,
        host: str,
        port: int,
        limits: FabricLimits,
        tls: Tls | None = None,
        names: Collection[str] = (),
    ) -> None:
        super().__init__(host, port, limits, authorizer=PassedToken(), tls=tls, names=names)
        self._service = service
        self._intake = Intake(limits)

    async def start(self) -> None:
        await self._open(
            [
                web.get("/v1/control", self._control),
                web.put(f"/v1/contributions/{{learner}}/{{round:{_NUMBER}}}/{{attempt:{_NUMBER}}}", self._contribution),
                web.get(f"/v1/fragments/{{fragment:{_NUMBER}}}", self._fragment, allow_head=False),
                web.route("*", "/v1/{rest:.*}", self._pass_on),
            ]
        )

    async def stop(self) -> None:
        await self._close()

    async def _control(self, request: web.Request) -> web.StreamResponse:
        self._check_up()
        return await serve_passage(self._service, request, passed_headers(request), self._limits)

    def _check_up(self) -> None:
        if not self._service.up:
            raise Rejected(503, "this relay has no connection to the syncer: try again later")

    # ---- contributions ------------------------------------------------------------------------------------------

    async def _contribution(self, request: web.Request) -> web.StreamResponse:
        service, learner = self._service, request.match_info["learner"]
        key = (learner, int(request.match_info["round"]), int(request.match_info["attempt"]))
        passage = service.passages.get(learner)
        bodies = service.bodies if service.sums and "rank" not in request.query else None
        fragment = None if bodies is None else bodies.holdings.fragment_of(key)
        if bodies is None or fragment is None or passage is None or not _is_of(passage, request):
            return await self._pass_on(request)
        if self._intake.taken(key):
            raise Rejected(409, "the same contribution is being received already")
        data = np.empty(bodies.body_nbytes(fragment), np.uint8)
        received = await self._intake.receive(request, learner, key, data.data)
        digest = received.digest
        if data.nbytes <= SMALL_BYTES:
            body = bodies.measure(fragment, data, digest)
        else:
            body = await asyncio.to_thread(bodies.measure, fragment, data, digest)
        if bodies is not service.bodies or not bodies.hold(key, digest, data):
            raise Rejected(409, f"no contribution to round {key[1]} (attempt {key[2]}) is waited for any more")
        try:
            await service.upstream.put_held(key, passage.session, body)
        except (PeerError, Unreachable) as error:
            bodies.drop(key)
            if isinstance(error, Unreachable):
                raise Rejected(503, str(error)) from None
            raise
        return web.Response(status=204, headers=received.headers)

    # ---- versions -----------------------------------------------------------------------------------------------

    async def _fragment(self, request: web.Request) -> web.StreamResponse:
        have = request.query.get("have", "")
        shown = request.headers.get("Authorization")
        known = any(one.authorization == shown for one in self._service.passages.values())
        if not known or "rank" in request.query or (have and not re.fullmatch(_NUMBER, have, re.ASCII)):
            return await self._pass_on(request)
        fragment, start = int(request.match_info["fragment"]), range_start(request)
        asked = int(have) if have else CODED if codec_of(request) else WHOLE

        async def fetch() -> KeptVersion:
            return await self._fetch(request)

        try:
            kept = await self._service.versions.get(fragment, asked, fetch)
        except Unreachable as error:
            raise Rejected(503, str(error)) from None
        named = (request.headers.get(VERSION_HEADER), request.headers.get(DIGEST_HEADER))
        if start and (kept.steps or named != (kept.headers.get(VERSION_HEADER), kept.headers.get(DIGEST_HEADER))):
            start = 0  # what the reader has is of another version: it gets this one whole
        if start >= len(kept.data) > 0:
            raise Rejected(416, f"the version has {len(kept.data)} bytes: there is no byte {start}")
        response = web.StreamResponse(status=206 if start else 200, headers=kept.headers)
        if start:
            response.headers["Content-Range"] = f"bytes {start}-{len(kept.data) - 1}/{len(kept.data)}"
        await send_pieces(request, response, [memoryview(kept.data)[start:]], self._limits)
        return response

    async def _fetch(self, request: web.Request) -> KeptVersion:
        """In the form in which the syncer serves it; Rejected with its words where it does not."""
        headers = {name: value for name, value in passed_headers(request).items() if name in ("Authorization",)}
        upstream = self._service.upstream
        with upstream.measure_version() as arrival:
            return await self._receive_version(upstream, request.path_qs, headers, arrival)

    async def _receive_version(
        self, upstream: Upstream, path: str, headers: dict[str, str], arrival: PartArrival
    ) -> KeptVersion:
        async with upstream.request("GET", path, headers) as response:
            if response.status != 200:
                raise Rejected(response.status, await self._service.reason_of(response))
            size = response.content_length
            if size is None or size > LARGEST_VERSION:
                raise Rejected(502, "the syncer served a version without a length, or one that is too large")
            data = bytearray()
            while chunk := await self._chunk(response.content):
                data += chunk
                arrival.count(len(chunk))
            if len(data) != size:
                raise Unreachable("a version broke off on its way")
            upstream.bytes_down += size
            given = {name: value for name, value in response.headers.items() if name.startswith("Atoll-")}
        given["Content-Type"] = "application/octet-stream"
        return KeptVersion(version_of(given), given, data, "Atoll-Steps" in given)

    # ---- all else -----------------------------------------------------------------------------------------------

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        self._check_up()
        upstream, size = self._service.upstream, request.content_length or 0
        data = self._chunks_of(request) if size else None
        try:
            async with upstream.request(request.method, request.path_qs, passed_headers(request), data) as answer:
                headers = {name: value for name, value in answer.headers.items() if _is_passed(name)}
                headers[RELAY_HEADER] = self._service.name  # a learner that is connected directly looks for it
                if answer.status >= 400:
                    return error_response(answer.status, await self._service.reason_of(answer))
                response = web.StreamResponse(status=answer.status, headers=headers)
                if answer.status != 204:
                    response.content_length = answer.content_length
                async with within(self._limits.send_s):
                    await response.prepare(request)
                while chunk := await self._chunk(answer.content):
                    if request.path.startswith("/v1/fragments/"):
                        upstream.bytes_down += len(chunk)
                    async with within(self._limits.send_s):
                        await response.write(chunk)
                async with within(self._limits.send_s):
                    await response.write_eof()
        except Unreachable as error:
            raise Rejected(503, f"the syncer is out of reach: {error}") from None
        if request.path.startswith("/v1/contributions/"):
            upstream.bytes_up += size
        return response

    async def _chunks_of(self, request: web.Request) -> AsyncIterator[bytes]:
        while chunk := await self._chunk(request.content):
            yield chunk

    async def _chunk(self, body: StreamReader) -> bytes:
        try:
            async with asyncio.timeout(CHUNK_S):
                return await next_chunk(body)
        except TimeoutError:
            raise Unreachable(f"nothing came for {CHUNK_S:g} s") from None


def passed_headers(request: web.Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if _is_passed(name)}


def _is_passed(name: str) -> bool:
    return name in PASSED or (name.lower().startswith("atoll-") and name.lower() != RELAY_HEADER.lower())


def _is_of(passage: Passage, request: web.Request) -> bool:
    shown = (request.headers.get(SESSION_HEADER), request.headers.get("Authorization"))
    return shown == (passage.session, passage.authorization)
