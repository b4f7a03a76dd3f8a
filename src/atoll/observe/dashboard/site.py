"""The dashboard's paths, and the browsers connected to it.

    GET /              the page            GET /assets/{name}   its parts    GET /plotly.min.js  plotly's own file
    GET /v1/live       WebSocket: a snapshot, then deltas, about twice a second
    GET /metrics       the same figures for Prometheus

Rules:
- everything is read only; verbs other than GET and HEAD are refused (405);
- the WebSocket accepts only a page of this very port. A page from elsewhere reads nothing, and one whose DNS name was
  made to point here used a name that the port does not answer to (fabric/authorizer.py);
- a page runs no script but those served here, and loads nothing from elsewhere;
- while nobody watches, the run is sampled every two seconds, for the curves of the next viewer;
- viewers only listen: any frame of theirs but close, ping and pong ends their connection;
- the number of viewers is bounded. When all places are taken, the token with the most gives one to a token with fewer,
  so that nobody keeps others out; a viewer whose token was revoked is disconnected;
- a viewer that reads too slowly is dropped, and its page reconnects by itself;
- a new viewer gets a snapshot with the next delta, so that nobody hears anything twice or misses it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from aiohttp import WSCloseCode, WSMsgType, web

from atoll.fabric.authorizer import NOBODY, VISITOR, Rejected
from atoll.fabric.control_channel import SendQueue
from atoll.fabric.host import FileAnswer
from atoll.observe.dashboard.history import DashboardHistory
from atoll.observe.tail import EventTail
from atoll.store.event_parts import read_events
from atoll.store.rundir import RunDir
from atoll.telemetry.events import parse
from atoll.telemetry.status import RunStatus

TICK_S = 0.5
ALONE_S = 2.0
"""Between two looks while nobody looks on."""
BACK_BYTES = 64 << 20
"""Of events.jsonl are read at most, at the start …"""
NEAR_BYTES = 8 << 20
"""… and of those that many with their rounds."""

HEAD_BYTES = 1 << 18
"""Of events.jsonl say when the run began."""

ASSETS = Path(__file__).parent / "assets"
TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    # plotly writes style elements of its own; scripts come from here alone.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

AnswerRequest = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dashboard:
    """A `syncer.pages.LivePages`."""

    sockets = frozenset({"/v1/live"})

    def __init__(self, events: Path) -> None:
        self.history = DashboardHistory(beginning(events))
        self.viewers = Viewers()
        self._tail = EventTail(events, most_bytes=BACK_BYTES, near_bytes=NEAR_BYTES)
        self._figures: Callable[[], RunStatus] | None = None
        self._reading = False
        """Another thread has the history."""

    def routes(self) -> Sequence[web.RouteDef]:
        answers: dict[str, AnswerRequest] = {
            "/": self._serve_page,
            "/assets/{name}": self._serve_asset,
            "/plotly.min.js": self._serve_plotly,
            "/metrics": self._serve_metrics,
            "/v1/live": self._serve_live,
        }
        return [web.get(path, answer, allow_head=path != "/v1/live") for path, answer in answers.items()]

    async def run(self, figures: Callable[[], RunStatus]) -> None:
        self._figures = figures
        while True:
            self._reading = True
            try:
                await asyncio.to_thread(self._catch_up)
            finally:
                self._reading = False
            self.tick(time.time(), figures())
            await self._wait_for_tick()

    def tick(self, at: float, status: RunStatus) -> None:
        """Take in the state of now, and tell whoever looks on."""
        self.history.take_status(at, status)
        delta = self.history.encode_delta(at, status)
        self.viewers.tell(delta, lambda: self.history.encode_snapshot(at, status))

    def sweep(self, gone: Callable[[str, str], str]) -> None:
        self.viewers.sweep(gone)

    def close(self) -> None:
        if self._figures is not None and not self._reading:
            self.tick(time.time(), self._figures())
        self.viewers.close()

    def _catch_up(self) -> None:
        self.history.take_events(self._tail.new_events())

    async def _wait_for_tick(self) -> None:
        if self.viewers:
            await asyncio.sleep(TICK_S)
            return
        try:
            async with asyncio.timeout(ALONE_S):
                await self.viewers.came.wait()
        except TimeoutError:
            pass

    # ---- answers ----------------------------------------------------------------------------------------------------

    async def _serve_page(self, request: web.Request) -> web.StreamResponse:
        return _file(ASSETS / "index.html")

    async def _serve_asset(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in {path.name for path in ASSETS.iterdir() if path.suffix in TYPES}:
            raise Rejected(404, "there is no such part of the page")
        return _file(ASSETS / name)

    async def _serve_plotly(self, request: web.Request) -> web.StreamResponse:
        path = plotly_file()
        if path is None:
            raise Rejected(404, "plotly is not installed beside the syncer: no charts (the extra plots)")
        return _file(path)

    async def _serve_metrics(self, request: web.Request) -> web.StreamResponse:
        if self._figures is None:
            raise Rejected(503, "the syncer is starting")
        body = await asyncio.to_thread(_exposition, self._figures(), len(self.viewers))
        return web.Response(body=body, headers={**HEADERS, "Content-Type": METRICS_TYPE})

    async def _serve_live(self, request: web.Request) -> web.StreamResponse:
        own = {f"{request.scheme}://{request.host}", f"https://{request.host}"}  # a proxy may end TLS in front
        if request.headers.get("Origin") not in own:
            raise Rejected(403, "only a page that was loaded from this address may open this")
        if request.headers.get("Upgrade", "").lower() != "websocket":
            raise Rejected(426, "this is a WebSocket: open the page at / instead")
        return await self.viewers.serve(request)


def pages(out: RunDir) -> Dashboard:
    return Dashboard(out.events)


def beginning(events: Path) -> float | None:
    """When the first parameters were there, as the head of the events says."""
    try:
        lines = parse(read_events(events, 0, HEAD_BYTES).splitlines(keepends=True))
    except OSError:
        return None
    return next((event["at"] for event in lines if event.get("kind") == "recovered"), None)


def plotly_file() -> Path | None:
    """Found without importing plotly, which takes a second and much memory."""
    spec = find_spec("plotly")
    folders = spec.submodule_search_locations if spec is not None else None
    found = [Path(folder) / "package_data" / "plotly.min.js" for folder in folders or ()]
    return next((path for path in found if path.is_file()), None)


def _file(path: Path) -> FileAnswer:
    kind = f"{TYPES[path.suffix]}; charset=utf-8"
    return FileAnswer(path, headers={**HEADERS, "Content-Type": kind})


def _exposition(status: RunStatus, viewers: int) -> bytes:
    from atoll.observe.dashboard.metrics import exposition  # 0.1 s, for those who ask for it

    return exposition(status, viewers)


# ---- viewers --------------------------------------------------------------------------------------------------------

MOST_VIEWERS = 16
WAITING = 8
"""Messages on their way to one viewer; one more and it is dropped."""
SEND_S = 5.0
PING_S = 10.0
CLOSE_S = 1.0
FRAME_BYTES = 1024
WHY_BYTES = 120
"""A frame that closes has no room for more."""


@dataclass(eq=False, slots=True)
class Viewer:
    token: str = ""
    mark: str = ""
    """The name and the mark of the join token it authenticated with."""
    outbox: SendQueue = field(default_factory=lambda: SendQueue(WAITING))
    code: int = WSCloseCode.GOING_AWAY
    why: str = "the syncer is stopping"

    def send_away(self, code: int, why: str) -> None:
        self.code, self.why = code, why
        self.outbox.close(discard=True)


class Viewers:
    def __init__(self) -> None:
        self.came = asyncio.Event()
        """Somebody waits for a snapshot."""
        self._there: dict[Viewer, None] = {}
        self._new: dict[Viewer, None] = {}
        """Both in the order in which they came."""
        self._closed = False

    def __len__(self) -> int:
        return len(self._there) + len(self._new)

    def tell(self, delta: bytes, snapshot: Callable[[], bytes]) -> None:
        """News to those who are there, everything to those who have just come."""
        if self._closed:
            return
        for viewer in [one for one in self._there if not one.outbox.put(delta)]:
            self._send_away(viewer, WSCloseCode.TRY_AGAIN_LATER, "you read too slowly")
        whole = snapshot() if self._new else b""
        for viewer in self._new:
            viewer.outbox.put(whole)
        self._there |= self._new
        self._new.clear()
        self.came.clear()

    def close(self) -> None:
        """What is on its way still arrives."""
        self._closed = True
        for viewer in self._there | self._new:
            viewer.outbox.close()

    def sweep(self, gone: Callable[[str, str], str]) -> None:
        """Send away whose token counts no more; `gone` says why."""
        for viewer in [*self._there, *self._new]:
            if reason := gone(viewer.token, viewer.mark):
                self._send_away(viewer, WSCloseCode.POLICY_VIOLATION, reason)

    def _send_away(self, viewer: Viewer, code: int, why: str) -> None:
        """Its place is free at once."""
        self._there.pop(viewer, None)
        self._new.pop(viewer, None)
        viewer.send_away(code, why)

    def _has_room(self, token: str) -> bool:
        """Whether there is a place for one more of this token; another may have to go for it."""
        if len(self) < MOST_VIEWERS:
            return True
        everybody = [*self._there, *self._new]
        counts = Counter(viewer.token for viewer in everybody)
        most, held = counts.most_common(1)[0]
        if held <= counts[token] + 1:
            return False
        newest = [viewer for viewer in everybody if viewer.token == most][-1]
        self._send_away(newest, WSCloseCode.TRY_AGAIN_LATER, "others look on too: your token has the most places")
        return True

    async def serve(self, request: web.Request) -> web.StreamResponse:
        visitor = request.get(VISITOR, NOBODY)
        if self._closed or not self._has_room(visitor.token):
            raise Rejected(503, f"{MOST_VIEWERS} viewers are looking on already: close one of them")
        viewer = Viewer(visitor.token, visitor.mark)
        self._new[viewer] = None
        socket = web.WebSocketResponse(heartbeat=PING_S, max_msg_size=FRAME_BYTES, timeout=CLOSE_S, compress=False)
        try:
            await socket.prepare(request)
            self.came.set()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_write(request, socket, viewer))
                tasks.create_task(_read(socket, viewer))
        finally:
            self._new.pop(viewer, None)
            self._there.pop(viewer, None)
        return socket


async def _write(request: web.Request, socket: web.WebSocketResponse, viewer: Viewer) -> None:
    try:
        await viewer.outbox.drain(lambda data: socket.send_frame(data, WSMsgType.TEXT), SEND_S)
        await socket.close(code=viewer.code, message=viewer.why.encode()[:WHY_BYTES])
    except OSError:  # gone, or too slow: a TimeoutError is one
        if request.transport is not None:
            request.transport.abort()


async def _read(socket: web.WebSocketResponse, viewer: Viewer) -> None:
    frame = await socket.receive()
    if frame.type in (WSMsgType.TEXT, WSMsgType.BINARY):
        viewer.send_away(WSCloseCode.POLICY_VIOLATION, "this channel only tells")
    else:
        viewer.outbox.close(discard=True)
