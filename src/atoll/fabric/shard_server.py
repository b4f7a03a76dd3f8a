"""The port of a shard of the syncer (docs/adr/0031): bodies of its part of every fragment, and nothing else.

    PUT  /v1/contributions/{learner}/{round}/{attempt}   as at the syncer (`server`)
    PUT  /v1/initial/{learner}/{fragment}
    GET  /v1/fragments/{fragment}[?have=VERSION][&least=VERSION]
    …?rank=RANK, …?learner=…&rank=…                      that rank's part, of a learner of several

Who may send is what the lead says: a body is taken under the session and the token of the learner's control channel.
The lead's word may come a moment after the learner's request: then the request waits, for WAIT_S at most.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection
from typing import Protocol

from aiohttp import web

from atoll.fabric.authorizer import VISITOR, Authorizer, Rejected
from atoll.fabric.body_port import BodyPort, codec_of, rank_of, resumed_at
from atoll.fabric.handlers import ServedFragment
from atoll.fabric.host import error_response, range_start
from atoll.fabric.listener import Tls
from atoll.fabric.wire import SESSION_HEADER, FabricLimits, one_line
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import ContributionKey

WAIT_S = 2.0
_NUMBER = "[0-9]{1,12}"


class ShardBodies(Protocol):
    """The service behind the port; PeerError is told to the peer in one line."""

    def is_expected(self, body: ContributionKey) -> bool: ...

    def is_asked(self, learner: str) -> bool:
        """Whether the first parameters are to come from this learner."""
        ...

    def expect_contribution(
        self, body: ContributionKey, session: str, token: str, named: int, rank: int
    ) -> memoryview: ...

    def contribution_arrived(self, body: ContributionKey, digest: str, rank: int) -> None: ...

    def contribution_aborted(self, body: ContributionKey, rank: int) -> None: ...

    def expect_initial(
        self, learner: str, session: str, token: str, fragment: int, rank: int, codec: str
    ) -> memoryview: ...

    async def initial_arrived(
        self, learner: str, session: str, fragment: int, body: memoryview, digest: str, rank: int, codec: str
    ) -> None: ...

    def committed_version(self, fragment: int) -> int: ...

    def fragment(self, index: int, have: int, codec: str) -> ServedFragment: ...

    def knows_rank(self, learner: str, rank: int) -> bool:
        """Whether the lead has told of it, and it has not gone since."""
        ...

    async def fragment_of_rank(self, index: int, learner: str, rank: int, codec: str) -> ServedFragment: ...


class ShardServer(BodyPort):
    def __init__(
        self,
        bodies: ShardBodies,
        *,
        host: str,
        port: int,
        limits: FabricLimits | None = None,
        authorizer: Authorizer | None = None,
        tls: Tls | None = None,
        names: Collection[str] = (),
    ) -> None:
        super().__init__(host, port, limits or FabricLimits(), authorizer=authorizer, tls=tls, names=names)
        self._bodies = bodies
        self._news = asyncio.Condition()

    @property
    def bytes_in(self) -> int:
        """Of bodies."""
        return self._intake.bytes_in

    @property
    def bytes_out(self) -> int:
        return self._bodies_out

    async def start(self) -> None:
        await self._open(
            [
                web.put(f"/v1/contributions/{{learner}}/{{round:{_NUMBER}}}/{{attempt:{_NUMBER}}}", self._contribution),
                web.put(f"/v1/initial/{{learner}}/{{fragment:{_NUMBER}}}", self._initial),
                web.get(f"/v1/fragments/{{fragment:{_NUMBER}}}", self._fragment, allow_head=False),
            ]
        )

    async def stop(self) -> None:
        await self._close()

    async def announce_news(self) -> None:
        """Something may be there that a request waits for."""
        async with self._news:
            self._news.notify_all()

    async def _wait_for(self, holds: Callable[[], bool]) -> None:
        """Or until WAIT_S are over: then whatever is there is answered with."""
        try:
            async with asyncio.timeout(WAIT_S), self._news:
                await self._news.wait_for(holds)
        except TimeoutError:
            return

    async def _contribution(self, request: web.Request) -> web.Response:
        learner, session = request.match_info["learner"], request.headers.get(SESSION_HEADER, "")
        body: ContributionKey = (learner, int(request.match_info["round"]), int(request.match_info["attempt"]))
        rank = rank_of(request)
        key = (*body, rank)
        await self._wait_for(lambda: self._bodies.is_expected(body))
        if self._intake.taken(key):
            raise Rejected(409, "the same contribution is being received already")
        named = request.content_length or 0
        into = self._bodies.expect_contribution(body, session, request[VISITOR].token, named, rank)
        digest = ""
        try:
            received = await self._intake.receive(request, learner, key, into)
            digest = received.digest
        finally:
            if not digest:
                self._bodies.contribution_aborted(body, rank)
        self._bodies.contribution_arrived(body, digest, rank)
        return web.Response(status=204, headers=received.headers)

    async def _initial(self, request: web.Request) -> web.Response:
        learner, session = request.match_info["learner"], request.headers.get(SESSION_HEADER, "")
        fragment, rank = int(request.match_info["fragment"]), rank_of(request)
        await self._wait_for(lambda: self._bodies.is_asked(learner))
        codec = codec_of(request)
        into = self._bodies.expect_initial(learner, session, request[VISITOR].token, fragment, rank, codec)
        with self._uploads.begin(session, request):
            received = await self._intake.receive(request, learner, (session, fragment, rank), into)
            named = (received.digest, rank, codec)
            await self._bodies.initial_arrived(learner, session, fragment, into, *named)
        return web.Response(status=204)

    async def _fragment(self, request: web.Request) -> web.StreamResponse:
        index, start = int(request.match_info["fragment"]), range_start(request)
        have, least = _version(request, "have"), _version(request, "least")
        try:
            if least > self._bodies.committed_version(index):
                await self._wait_for(lambda: self._bodies.committed_version(index) >= least)
            if "rank" in request.query:
                served = await self._fragment_of_rank(request, index)
            else:
                served = self._bodies.fragment(index, have, codec_of(request))
        except PeerError as error:
            return error_response(404, error)
        try:
            return await self._serve(request, served, resumed_at(request, served, start))
        finally:
            served.release()

    async def _fragment_of_rank(self, request: web.Request, index: int) -> ServedFragment:
        learner, rank = request.query.get("learner", ""), rank_of(request)
        await self._wait_for(lambda: self._bodies.knows_rank(learner, rank))
        if not self._bodies.knows_rank(learner, rank):
            raise Rejected(503, f"rank {rank} of {one_line(learner)} is not known here: try again later")
        return await self._bodies.fragment_of_rank(index, learner, rank, codec_of(request))


def _version(request: web.Request, name: str) -> int:
    said = request.query.get(name, "")
    if said and not re.fullmatch(_NUMBER, said, re.ASCII):
        raise Rejected(400, f"{name} is no version: it is a number of up to 12 digits")
    return int(said or -1)
