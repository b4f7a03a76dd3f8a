"""The syncer's side of the fabric: one port, control channels and bodies. The rules of rounds are the service's.

    GET  /v1/control                                   WebSocket, binary frames, opens with Hello
    PUT  /v1/contributions/{learner}/{round}/{attempt} a body; headers Atoll-Session, Atoll-Digest
    PUT  /v1/initial/{learner}/{fragment}              the same, for version 0
    GET  /v1/fragments/{fragment}[?have=VERSION]       a body; headers Atoll-Version, Atoll-Round, Atoll-Digest, and
                                                       Atoll-Steps where it is the steps from that version on;
                                                       with Range: bytes=START-, Atoll-Version and Atoll-Digest
                                                       the rest of that version, or a newer one whole
    …?rank=RANK                                        of the two PUTs: that rank's part, of a learner of several
    …?codec=bf16                                       of version 0, both ways: in 2 bytes a value where it has that
                                                       form, which the answer names as Atoll-Codec
    GET  /v1/fragments/{fragment}?learner=…&rank=…     that rank's part, and its digest; never as steps
    GET  /v1/shard                                     WebSocket of another shard of this syncer (see `shard_channel`)
    GET  /v1/moments/{fragment}/{version}              a body: averaged moments, with the same headers
    GET, PUT /v1/relay/{ticket}                        a peer's state for a newcomer, passed on (see `state_forwarding`)
    /v1/relays, /v1/held, /v1/sums                     relays of regions (see `relay_channel`)
    GET  /v1/status, /v1/manifest     POST /v1/scores, /v1/settings, /v1/drain  JSON
    GET  /v1/scores                                    an evaluator says that it is there
    POST /v1/codes, GET /enter/{code}                  how a browser gets in (see `authorizer`)
    GET, PUT /v1/probe/{bytes}                         how fast the link is (see `intake`)
    and whatever `pages` bring, which only read

Rules:
- whoever asks anything has been let in by the authorizer (join tokens, and a host name of this syncer), before
  it is looked at;
- only a learner whose channel is open, under that channel's session, may send a body, or ask for a peer's state;
- a bad frame costs its sender the channel (see `control`), a bad request gets {"error": "one line"};
  nobody else notices either;
- requests of web pages (an Origin header) are refused where they could change anything; WebSockets too, but those of
  `pages`, which look at the origin themselves;
- every wait for a peer has a deadline and every queue a bound: the numbers are in `wire.FabricLimits`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection
from typing import NoReturn, TypeVar

from aiohttp import web

from atoll.fabric.authorizer import (
    CODES_PATH,
    ENTER,
    PAGE,
    PAGE_HEADERS,
    VISITOR,
    Authorizer,
    Rejected,
    TokenAuthorizer,
    cookie_name,
)
from atoll.fabric.body_port import BodyPort, codec_of, loss_of, rank_of, resumed_at
from atoll.fabric.control import ControlServer
from atoll.fabric.control_channel import ControlChannel
from atoll.fabric.handlers import Handlers, ServedFragment, ServedPages
from atoll.fabric.host import error_response, range_start
from atoll.fabric.intake import Probe
from atoll.fabric.join_tokens import NameOwners
from atoll.fabric.listener import Tls
from atoll.fabric.relay_channel import RelayHandlers, RelayServer
from atoll.fabric.shard_channel import SHARD_PATH, ShardChannels, ShardHandlers
from atoll.fabric.state import LEARNER_HEADER, TICKET
from atoll.fabric.state_forwarding import ForwardingLimits, StateForwarder
from atoll.fabric.wire import (
    SESSION_HEADER,
    FabricLimits,
    decode_score,
    decode_words,
    one_line,
)
from atoll.protocol.errors import PeerError
from atoll.protocol.limits import Budgets

T = TypeVar("T")
SWEEP_S = 1.0
"""Between two looks for tokens and certificates that count no more."""
_NUMBER = "[0-9]{1,12}"


class Server(BodyPort):
    def __init__(
        self,
        handlers: Handlers,
        *,
        host: str,
        port: int,
        limits: FabricLimits | None = None,
        forwarding: ForwardingLimits | None = None,
        pages: ServedPages | None = None,
        authorizer: Authorizer | None = None,
        tls: Tls | None = None,
        owners: NameOwners | None = None,
        names: Collection[str] = (),
        shards: ShardHandlers | None = None,
        relays: RelayHandlers | None = None,
    ) -> None:
        """`shards`: of a syncer of several, who hears of the others; `relays`: who sums what relays hold. None: they
        are not served."""
        super().__init__(host, port, limits or FabricLimits(), authorizer=authorizer, tls=tls, names=names)
        self._handlers = handlers
        self._pages = pages
        self._control = ControlServer(handlers, self._limits, authorizer, owners)
        self._relays = None
        if relays is not None:
            self._relays = RelayServer(relays, self._limits, self._authorizer, self._intake, self._control)
            self._control.relays = self._relays
        self._states = StateForwarder(handlers, self._limits, forwarding or ForwardingLimits())
        self._shards = ShardChannels(shards, self._limits) if shards is not None else None
        self._probe = Probe(self._limits)
        self._scores = Budgets(self._limits.score_bytes, self._limits.score_rate)
        self._sweeping: asyncio.Task[NoReturn] | None = None

    @property
    def bytes_in(self) -> int:
        """Of bodies and control messages."""
        return self._intake.bytes_in + self._control.bytes_in + self._states.bytes_in

    @property
    def bytes_out(self) -> int:
        return self._bodies_out + self._control.bytes_out + self._states.bytes_out

    @property
    def bad_frames(self) -> int:
        """Frames that cost their senders a channel."""
        return self._control.bad_frames

    async def start(self) -> None:
        await self._open(
            [
                web.get("/v1/control", self._control.serve),
                web.put(f"/v1/contributions/{{learner}}/{{round:{_NUMBER}}}/{{attempt:{_NUMBER}}}", self._contribution),
                web.put(f"/v1/initial/{{learner}}/{{fragment:{_NUMBER}}}", self._initial),
                web.get(f"/v1/fragments/{{fragment:{_NUMBER}}}", self._fragment, allow_head=False),
                web.get(f"/v1/moments/{{fragment:{_NUMBER}}}/{{version:{_NUMBER}}}", self._moments, allow_head=False),
                web.get(f"/v1/relay/{{ticket:{TICKET}}}", self._fetch_state, allow_head=False),
                web.put(f"/v1/relay/{{ticket:{TICKET}}}", self._send_state),
                web.get("/v1/status", self._status),
                web.get("/v1/manifest", self._manifest),
                web.post("/v1/scores", self._score),
                web.get("/v1/scores", self._evaluator_here, allow_head=False),
                web.post("/v1/settings", self._settings),
                web.post("/v1/drain", self._drain),
                *([web.get(SHARD_PATH, self._shards.serve)] if self._shards is not None else ()),
                *self._browser_routes(),
                *self._probe.routes(),
                *(self._relays.routes() if self._relays is not None else ()),
                *(self._pages.routes() if self._pages is not None else ()),
            ]
        )
        self._sweeping = self.vital.start("sweep", self._sweep)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._control.sweep()
            if self._relays is not None:
                self._relays.sweep()
            if self._tls is not None:
                self._tls()  # whoever renews a certificate is told what became of it, also when nobody dials
            if self._pages is not None:
                self._pages.sweep(self._authorizer.gone)

    async def stop(self) -> None:
        """Close every channel in good order (2 s at most), then everything else."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._control.close("the syncer is stopping")
        if self._shards is not None:
            self._shards.close()
        if self._relays is not None:
            self._relays.close()
        self._states.close("the syncer is stopping")
        if self._pages is not None:
            self._pages.close()
        await self._close()

    def _pages_may(self, request: web.Request) -> bool:
        if self._pages is not None and request.method == "GET" and request.path in self._pages.sockets:
            return True
        changes = request.method != "GET" or "Upgrade" in request.headers or request.path.startswith("/v1/relay/")
        return not changes

    # ---- bodies ---------------------------------------------------------------------------------------------------

    def _member(self, request: web.Request) -> ControlChannel:
        learner = request.match_info.get("learner", request.headers.get(LEARNER_HEADER, "nobody"))
        channel = self._control.channel(learner)
        if channel is None or channel.session != request.headers.get(SESSION_HEADER):
            raise Rejected(403, f"{learner} has no open control channel under this session: say hello first")
        if channel.token != request[VISITOR].token:
            raise Rejected(403, f"{learner} came by another token than this request shows")
        return channel

    def _refused(self, request: web.Request, reason: str) -> None:
        self._handlers.turned_away(request.remote or "?", reason)

    async def _contribution(self, request: web.Request) -> web.Response:
        channel = self._member(request)
        learner, session = channel.learner, channel.session
        round, attempt = int(request.match_info["round"]), int(request.match_info["attempt"])
        rank = rank_of(request)
        key = (learner, round, attempt, rank)
        if self._intake.taken(key):
            raise Rejected(409, "the same contribution is being received already")
        named = request.content_length or 0
        into = self._handlers.expect_contribution(learner, session, round, attempt, named, rank)
        reason = "the syncer is stopping"
        digest = ""
        try:
            received = await self._intake.receive(request, learner, key, into)
            now = self._control.channel(learner)
            if now is not None and now.session != session:
                raise Rejected(409, f"{learner} has come back as another session")
            digest = received.digest
        except Rejected as error:
            reason = str(error)
            raise
        finally:
            if not digest:
                self._handlers.contribution_aborted(learner, round, attempt, reason, rank)
        self._handlers.contribution_arrived(learner, round, attempt, digest, rank)
        return web.Response(status=204, headers=received.headers)

    async def _initial(self, request: web.Request) -> web.Response:
        channel = self._member(request)
        learner, session = channel.learner, channel.session
        fragment, rank = int(request.match_info["fragment"]), rank_of(request)
        codec = codec_of(request)
        into = self._handlers.expect_initial(learner, session, fragment, rank, codec)
        with self._uploads.begin(session, request):
            received = await self._intake.receive(request, learner, (session, fragment, rank), into)
            named = (received.digest, rank, codec, loss_of(request))
            await self._handlers.initial_arrived(learner, session, fragment, into, *named)
        return web.Response(status=204)

    async def _fragment(self, request: web.Request) -> web.StreamResponse:
        have, start = request.query.get("have", ""), range_start(request)
        if have and not re.fullmatch(_NUMBER, have, re.ASCII):
            raise Rejected(400, "have is no version: it is a number of up to 12 digits")
        index = int(request.match_info["fragment"])
        try:
            if "rank" in request.query:
                served = await self._fragment_of_rank(request, index)
            else:
                served = self._handlers.fragment(index, int(have or -1), codec_of(request))
        except PeerError as error:
            return error_response(404, error)
        try:
            return await self._serve(request, served, resumed_at(request, served, start))
        finally:
            served.release()

    async def _fragment_of_rank(self, request: web.Request, index: int) -> ServedFragment:
        learner = request.query.get("learner", "")
        if self._control.channel(learner) is None:  # which declares its ranks: it may come back
            raise Rejected(503, f"{one_line(learner)} has no open control channel: try again later")
        return await self._handlers.fragment_of_rank(index, learner, rank_of(request), codec_of(request))

    async def _moments(self, request: web.Request) -> web.StreamResponse:
        try:
            served = self._handlers.moments(int(request.match_info["fragment"]), int(request.match_info["version"]))
        except PeerError as error:
            return error_response(404, error)
        try:
            return await self._serve(request, served, 0)
        finally:
            served.release()

    async def _fetch_state(self, request: web.Request) -> web.StreamResponse:
        return await self._states.fetch(request, self._member(request).learner)

    async def _send_state(self, request: web.Request) -> web.Response:
        return await self._states.send(request, self._member(request).learner)

    # ---- browsers -------------------------------------------------------------------------------------------------

    def _browser_routes(self) -> list[web.RouteDef]:
        """Where tokens are asked for, and there is something to look at."""
        authorizer = self._authorizer
        if not isinstance(authorizer, TokenAuthorizer) or self._pages is None:
            return []

        async def make_code(request: web.Request) -> web.Response:
            return web.json_response({"path": authorizer.make_code(request[VISITOR].token)})

        async def enter(request: web.Request) -> web.Response:
            response = web.Response(text=PAGE, content_type="text/html", headers=PAGE_HEADERS)
            if cookie := authorizer.take_code(request.match_info["code"], request[VISITOR]):
                name = cookie_name(request.headers.get("Host", ""))
                response.set_cookie(name, cookie, httponly=True, samesite="Strict", secure=request.secure)
            return response

        return [web.post(CODES_PATH, make_code), web.get(f"{ENTER}{{code}}", enter, allow_head=False)]

    # ---- JSON -----------------------------------------------------------------------------------------------------

    async def _status(self, request: web.Request) -> web.Response:
        return web.Response(body=self._handlers.status(), content_type="application/json")

    async def _manifest(self, request: web.Request) -> web.Response:
        return web.Response(body=self._handlers.manifest(), content_type="application/json")

    async def _score(self, request: web.Request) -> web.Response:
        now, size = asyncio.get_running_loop().time(), len(await self._body(request))
        if not self._scores.take(request[VISITOR].token, now, size):
            raise Rejected(429, f"more than {self._limits.score_rate} bytes of scores a second: try again later")
        self._handlers.score(await self._read(request, decode_score))
        return web.Response(status=204)

    async def _evaluator_here(self, request: web.Request) -> web.Response:
        self._handlers.evaluator_here()
        return web.json_response({})

    async def _settings(self, request: web.Request) -> web.Response:
        changed = await self._handlers.change(await self._read(request, decode_words))
        return web.json_response({"changed": changed})

    async def _drain(self, request: web.Request) -> web.Response:
        names = await self._read(request, decode_words)
        if len(names) != 1:
            raise Rejected(400, "name one learner to drain")
        return web.json_response({"drained": await self._handlers.drain(names[0])})

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._limits.body_grace_s):
                return await request.read()
        except TimeoutError:
            raise Rejected(408, "it came too slowly") from None

    async def _read(self, request: web.Request, decode: Callable[[bytes], T]) -> T:
        try:
            return decode(await self._body(request))
        except PeerError as error:
            raise Rejected(400, str(error)) from None
