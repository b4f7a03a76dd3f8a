"""The syncer's side of the fabric: one port, control channels and bodies. Knows no rule of rounds; the desk does.

    GET  /v1/control                                   WebSocket, binary frames, opens with Hello
    PUT  /v1/contributions/{learner}/{round}/{attempt} a body; headers Atoll-Session, Atoll-Digest
    PUT  /v1/initial/{learner}/{fragment}              the same, for version 0
    GET  /v1/fragments/{fragment}                      a body; headers Atoll-Version, Atoll-Round, Atoll-Digest
    GET  /v1/status, /v1/manifest     POST /v1/scores  JSON

Rules:
- only a learner whose channel is open, under that channel's session, may send a body;
- a bad frame costs its sender the channel (see `control`), a bad request gets {"error": "one line"};
  nobody else notices either;
- requests of web pages (an Origin header) are refused where they could change anything;
- every wait for a peer has a deadline and every queue a bound: the numbers are in `wire.Limits`.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable

from aiohttp import web

from atoll.fabric.control import Control
from atoll.fabric.desk import Channel, Desk, Served
from atoll.fabric.intake import Intake, Rejected
from atoll.fabric.security import check_loopback
from atoll.fabric.wire import (
    DIGEST_HEADER,
    ROUND_HEADER,
    SESSION_HEADER,
    VERSION_HEADER,
    Limits,
    decode_score,
    one_line,
)
from atoll.protocol.errors import ConfigError, PeerError

__all__ = ["Channel", "Desk", "Served", "Server"]

_NUMBER = r"\d{1,12}"


class Server:
    def __init__(self, desk: Desk, *, host: str, port: int, limits: Limits | None = None) -> None:
        check_loopback(host)
        if not 0 <= port <= 65535:
            raise ConfigError(f"port = {port} is not between 0 and 65535: choose another with --port, or 0 for any")
        self.host = host
        self.port = port
        """As asked for; after `start`, as it is."""
        self._desk = desk
        self._limits = limits or Limits()
        self._intake = Intake(self._limits)
        self._control = Control(desk, self._limits)
        self._unheard: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}
        self._bodies_out = 0
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None

    @property
    def bytes_in(self) -> int:
        """Of bodies and control messages."""
        return self._intake.bytes_in + self._control.bytes_in

    @property
    def bytes_out(self) -> int:
        return self._bodies_out + self._control.bytes_out

    @property
    def bad_frames(self) -> int:
        """Frames that cost their senders a channel."""
        return self._control.bad_frames

    async def start(self) -> None:
        limits = self._limits
        app = web.Application(middlewares=[self._answer], client_max_size=limits.score_bytes)
        app.add_routes(
            [
                web.get("/v1/control", self._control.serve),
                web.put(f"/v1/contributions/{{learner}}/{{round:{_NUMBER}}}/{{attempt:{_NUMBER}}}", self._contribution),
                web.put(f"/v1/initial/{{learner}}/{{fragment:{_NUMBER}}}", self._initial),
                web.get(f"/v1/fragments/{{fragment:{_NUMBER}}}", self._fragment, allow_head=False),
                web.get("/v1/status", self._status),
                web.get("/v1/manifest", self._manifest),
                web.post("/v1/scores", self._score),
            ]
        )
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            keepalive_timeout=limits.keepalive_s,
            lingering_time=limits.flush_s,
            shutdown_timeout=limits.flush_s,
            auto_decompress=False,
        )
        await self._runner.setup()
        try:
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_server(self._accept, self.host, self.port, backlog=128)
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(_unbindable(self.host, self.port, error)) from error
        self.port = self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close every channel in good order (2 s at most), then everything else."""
        if self._listener is not None:
            self._listener.close()
        self._control.close("the syncer is stopping")
        if self._runner is not None:
            await self._runner.cleanup()
        for timer in self._unheard.values():
            timer.cancel()
        self._unheard.clear()

    # ---- connections ----------------------------------------------------------------------------------------------

    def _accept(self) -> asyncio.BaseProtocol:
        assert self._runner is not None
        server = self._runner.server
        if server is None or max(len(server.connections), len(self._unheard)) >= self._limits.connections:
            return _Closed()
        connection = server()
        loop = asyncio.get_running_loop()
        self._unheard[connection] = loop.call_later(self._limits.header_s, self._unanswered, connection)
        return connection

    def _unanswered(self, connection: web.RequestHandler) -> None:
        del self._unheard[connection]
        connection.force_close()

    @web.middleware
    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        timer = self._unheard.pop(request.protocol, None)
        if timer is not None:
            timer.cancel()
        try:
            if "Origin" in request.headers and (request.method != "GET" or "Upgrade" in request.headers):
                raise Rejected(403, "web pages may only read")
            return await handler(request)
        except Rejected as error:
            return _error(error.status, error)
        except PeerError as error:
            return _error(409, error)
        except web.HTTPException as error:
            return _error(error.status, error.reason)

    # ---- bodies ---------------------------------------------------------------------------------------------------

    def _member(self, request: web.Request) -> Channel:
        learner = request.match_info["learner"]
        channel = self._control.channel(learner)
        if channel is None or channel.session != request.headers.get(SESSION_HEADER):
            raise Rejected(403, f"{learner} has no open control channel under this session: say hello first")
        return channel

    async def _contribution(self, request: web.Request) -> web.Response:
        channel = self._member(request)
        learner, session = channel.learner, channel.session
        round, attempt = int(request.match_info["round"]), int(request.match_info["attempt"])
        key = (learner, round, attempt)
        if self._intake.taken(key):
            raise Rejected(409, "the same contribution is being received already")
        into = self._desk.expect_contribution(learner, session, round, attempt)
        reason = "the syncer is stopping"
        digest = ""
        try:
            found = await self._intake.receive(request, learner, key, into)
            now = self._control.channel(learner)
            if now is not None and now.session != session:
                raise Rejected(409, f"{learner} has come back as another session")
            digest = found
        except Rejected as error:
            reason = str(error)
            raise
        finally:
            if not digest:
                self._desk.contribution_aborted(learner, round, attempt, reason)
        self._desk.contribution_arrived(learner, round, attempt, digest)
        return web.Response(status=204)

    async def _initial(self, request: web.Request) -> web.Response:
        channel = self._member(request)
        fragment = int(request.match_info["fragment"])
        into = self._desk.expect_initial(channel.learner, channel.session, fragment)
        digest = await self._intake.receive(request, channel.learner, ("initial", fragment), into)
        self._desk.initial_arrived(channel.learner, fragment, digest)
        return web.Response(status=204)

    async def _fragment(self, request: web.Request) -> web.StreamResponse:
        try:
            served = self._desk.fragment(int(request.match_info["fragment"]))
        except PeerError as error:
            return _error(404, error)
        try:
            return await self._serve(request, served)
        finally:
            served.release()

    async def _serve(self, request: web.Request, served: Served) -> web.StreamResponse:
        data, limits = served.data.cast("B"), self._limits
        response = web.StreamResponse(
            headers={
                VERSION_HEADER: str(served.version),
                ROUND_HEADER: str(served.round),
                DIGEST_HEADER: served.digest,
                "Content-Type": "application/octet-stream",
            }
        )
        response.content_length = data.nbytes
        if request.transport is not None:
            request.transport.set_write_buffer_limits(0)  # a drain means sent: then the buffer may be released
        await response.prepare(request)
        try:
            for at in range(0, data.nbytes, limits.chunk_bytes):
                piece = data[at : at + limits.chunk_bytes]
                self._bodies_out += piece.nbytes
                async with asyncio.timeout(limits.send_s):
                    await response.write(piece)
            async with asyncio.timeout(limits.send_s):
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        return response

    # ---- JSON -----------------------------------------------------------------------------------------------------

    async def _status(self, request: web.Request) -> web.Response:
        return web.Response(body=self._desk.status(), content_type="application/json")

    async def _manifest(self, request: web.Request) -> web.Response:
        return web.Response(body=self._desk.manifest(), content_type="application/json")

    async def _score(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(self._limits.body_grace_s):
                score = decode_score(await request.read())
        except TimeoutError:
            raise Rejected(408, "the score came too slowly") from None
        except PeerError as error:
            raise Rejected(400, str(error)) from None
        self._desk.score(score)
        return web.Response(status=204)


class _Closed(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _error(status: int, reason: object) -> web.Response:
    return web.json_response({"error": one_line(reason)}, status=status)


def _unbindable(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use on {host}: choose another with --port, or 0 for any"
    return one_line(f"port {port} on {host} cannot be bound ({error.strerror or error}): choose another with --port")
