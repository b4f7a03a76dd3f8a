"""A syncer's server on a free port of this machine with a desk in memory behind it, and learners that dial it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import aiohttp
import pytest
from tests.fabric.fort import Fort, fort_in

from atoll.digests import compute_digest
from atoll.fabric.client import SyncerConnection
from atoll.fabric.control_channel import ControlChannel
from atoll.fabric.handlers import ServedFragment
from atoll.fabric.host import StateHost
from atoll.fabric.server import Server
from atoll.fabric.state_forwarding import ForwardingLimits, StateForwarder
from atoll.fabric.wire import FabricLimits, ScoreReport
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import PROTOCOL, FromLearner, FromSyncer, Hello, Started

WAIT_S = 60.0


class MemoryDesk:
    """Remembers what it is told, and lets a test wait for it."""

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.channels: dict[str, ControlChannel] = {}
        self.refuse: str | None = None
        self.buffers: dict[tuple[str, int, int], bytearray] = {}
        self.initials: dict[int, bytearray] = {}
        self.fragments: dict[int, bytes] = {}
        self.coded: dict[int, bytes] = {}
        """Bodies in the form that a reader may ask for."""
        self.forces = ""
        """Form in which everything is served, asked for or not."""
        self.steps: list[bytes] = []
        """Of every fragment, to versions 1, 2 and 3."""
        self.tickets: dict[str, tuple[str, str]] = {}
        """The newcomer and the peer of each recovery."""
        self.held = 0
        self._news = asyncio.Event()

    def note(self, *what: object) -> None:
        self.log.append(what)
        self._news.set()

    def told(self, kind: str) -> list[tuple[object, ...]]:
        return [entry for entry in self.log if entry[0] == kind]

    async def until(self, kind: str, count: int = 1) -> tuple[object, ...]:
        async with asyncio.timeout(WAIT_S):
            while len(self.told(kind)) < count:
                self._news.clear()
                await self._news.wait()
        return self.told(kind)[count - 1]

    def opened(self, channel: ControlChannel, hello: Hello) -> None:
        self.note("opened", channel.learner, channel.session)
        if self.refuse is not None:
            raise PeerError(self.refuse)
        self.channels[channel.learner] = channel
        channel.send(Started(uploader="nobody"))

    def turned_away(self, address: str, reason: str) -> None:
        """Nobody counts them here."""

    def received(self, channel: ControlChannel, message: FromLearner) -> None:
        self.note("received", channel.learner, message)

    def closed(self, channel: ControlChannel, reason: str) -> None:
        self.note("closed", channel.learner, channel.session, reason)

    def expect_contribution(
        self, learner: str, session: str, round: int, attempt: int, named: int, rank: int
    ) -> memoryview:
        self.note("asked", learner, round, attempt, *([rank] if rank else []))
        try:
            return memoryview(self.buffers[learner, round, attempt])
        except KeyError:
            raise PeerError(f"round {round} did not ask {learner} for attempt {attempt}") from None

    def contribution_arrived(self, learner: str, round: int, attempt: int, digest: str, rank: int) -> None:
        self.note("arrived", learner, round, attempt, digest)

    def contribution_aborted(self, learner: str, round: int, attempt: int, reason: str, rank: int) -> None:
        self.note("aborted", learner, round, attempt, reason)

    def expect_initial(self, learner: str, session: str, fragment: int, rank: int, codec: str) -> memoryview:
        return memoryview(self.initials[fragment])

    async def initial_arrived(
        self,
        learner: str,
        session: str,
        fragment: int,
        body: memoryview,
        digest: str,
        rank: int,
        codec: str,
        loss: float,
    ) -> None:
        self.note("initial", learner, fragment, digest)

    def fragment(self, index: int, have: int, codec: str = "") -> ServedFragment:
        if index not in self.fragments:
            raise PeerError(f"there is no fragment {index}")
        self.held += 1
        data = self.fragments[index]
        if form := codec or self.forces:
            body = self.coded[index]
            return ServedFragment(3, 7, compute_digest(body), memoryview(body), self._release, codec=form)
        steps = tuple((compute_digest(one), memoryview(one)) for one in self.steps[have:3]) if have >= 0 else ()
        return ServedFragment(3, 7, compute_digest(data), memoryview(data), self._release, steps=steps)

    async def fragment_of_rank(self, index: int, learner: str, rank: int, codec: str) -> ServedFragment:
        self.note("part", index, learner, rank)
        whole = self.fragment(index, -1)
        data = whole.data[4 * rank :]
        return ServedFragment(whole.version, whole.round, compute_digest(data), data, whole.release)

    def moments(self, index: int, version: int) -> ServedFragment:
        if (index, version) != (0, 3):
            raise PeerError(f"there are no averaged moments of version {version} of fragment {index}")
        return self.fragment(0, -1)

    def _release(self) -> None:
        self.held -= 1
        self.note("released")

    def forwarding_wanted(self, ticket: str, learner: str, start: int) -> None:
        if self.tickets.get(ticket, ("", ""))[0] != learner:
            raise PeerError(f"{ticket} is no ticket of {learner}")
        self.note("wanted", ticket, learner, start)

    def forwarding_allowed(self, ticket: str, learner: str) -> None:
        if self.tickets.get(ticket, ("", ""))[1] != learner:
            raise PeerError(f"{learner} is not the peer of {ticket}")

    def status(self) -> bytes:
        return json.dumps({"round": 7}).encode()

    def manifest(self) -> bytes:
        return json.dumps({"fragments": len(self.fragments)}).encode()

    def score(self, score: ScoreReport) -> None:
        self.note("score", score)

    def evaluator_here(self) -> None:
        self.note("evaluator_here")

    async def change(self, words: Sequence[str]) -> str:
        self.note("change", *words)
        return ", ".join(words)


class Learner:
    """A link with a memory."""

    def __init__(self, url: str, name: str, session: str, limits: FabricLimits) -> None:
        self.messages: asyncio.Queue[FromSyncer] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.link = SyncerConnection(
            url,
            hello=lambda: Hello(protocol=PROTOCOL, learner=name, session=session, proof=f"restarts of {name}"),
            on_open=lambda: None,
            on_message=self.messages.put_nowait,
            on_lost=self.lost.put_nowait,
            limits=limits,
            jitter=lambda: 0.1,
        )

    async def heard(self) -> FromSyncer:
        async with asyncio.timeout(WAIT_S):
            return await self.messages.get()

    async def lost_it(self) -> str:
        async with asyncio.timeout(WAIT_S):
            return await self.lost.get()


class ServedFabric:
    """One server and everything a test does around it."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.handlers = MemoryDesk()
        self.limits = FabricLimits()
        self._stack = stack
        self._server: Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    @property
    def states(self) -> StateForwarder:
        return self.server._states

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def open(
        self, limits: FabricLimits | None = None, port: int = 0, forwarding: ForwardingLimits | None = None
    ) -> None:
        self.limits = limits or FabricLimits()
        self._server = Server(self.handlers, host="127.0.0.1", port=port, limits=self.limits, forwarding=forwarding)
        await self._server.start()
        self._stack.push_async_callback(self._server.stop)

    async def learner(self, name: str = "learner-0", session: str = "s0") -> Learner:
        learner = Learner(self.url, name, session, self.limits)
        task = asyncio.create_task(learner.link.run())
        self._stack.push_async_callback(_ended, task)
        self._stack.push_async_callback(learner.link.close)
        return learner

    async def joined(self, name: str = "learner-0", session: str = "s0") -> Learner:
        learner = await self.learner(name, session)
        assert isinstance(await learner.heard(), Started)
        return learner

    async def socket(self) -> aiohttp.ClientWebSocketResponse:
        """A bare WebSocket, for peers that do not behave."""
        http = await self._stack.enter_async_context(aiohttp.ClientSession())
        return await self._stack.enter_async_context(http.ws_connect(f"{self.url}/v1/control"))

    async def raw(self, port: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare TCP connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port or self.server.port)
        self._stack.push_async_callback(_hung_up, writer)
        return reader, writer

    async def host(self, limits: FabricLimits | None = None) -> StateHost:
        """A courier's own server."""
        host = StateHost(limits=limits)
        await host.start()
        self._stack.push_async_callback(host.stop)
        return host

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - nobody tells when it becomes true
                await asyncio.sleep(0.001)

    async def request(
        self, method: str, path: str, data: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, str]:
        async with (
            aiohttp.ClientSession() as http,
            http.request(method, self.url + path, data=data, headers=headers) as answer,
        ):
            return answer.status, await answer.text()


async def _hung_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def _ended(task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(WAIT_S):
        await task


@pytest.fixture
async def place() -> AsyncIterator[ServedFabric]:
    async with AsyncExitStack() as stack:
        yield ServedFabric(stack)
    for _ in range(3):
        await asyncio.sleep(0)  # a closed transport lets go of its socket in a later turn of the loop


@pytest.fixture
def hello() -> Callable[..., Hello]:
    def make(learner: str = "learner-0", session: str = "s0", protocol: int = PROTOCOL, seq: int = 1) -> Hello:
        return Hello(protocol=protocol, learner=learner, session=session, seq=seq)

    return make


@pytest.fixture
async def fort(tmp_path: Path) -> AsyncIterator[Fort]:
    async with fort_in(tmp_path) as fort:
        yield fort
