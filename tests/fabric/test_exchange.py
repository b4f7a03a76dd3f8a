"""A run can be upgraded while it goes on: version 2 and version 1 understand each other, both ways.

`exchanges/v1.json` is a real run of version 1, recorded by `exchanges/record.py` at the last commit before version 2: a
syncer on loopback and a learner in a process of its own that gives the first parameters, trains on leases, answers
pulls, saves its part of a cut, falls silent for a second and ends with the run. It holds the raw frames of both sides
and the bodies of the learner in the order in which the syncer saw them, and the field names of every message. It is
never recorded anew: later versions add files of their own beside it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from atoll.config import convert
from atoll.fabric.address import parse_address
from atoll.fabric.client import SyncerConnection
from atoll.fabric.wire import (
    PROTOCOL_HEADER,
    decode_from_learner,
    decode_from_syncer,
    encode,
)
from atoll.protocol import effects as fx
from atoll.protocol import messages as msg
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.settings import Settings
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import acquire
from atoll.syncer.run_store import RunStore
from atoll.syncer.service import SyncerService
from atoll.telemetry.events import EventLog

WAIT_S = 20.0
RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "exchanges" / "v1.json").read_text())
EXCHANGE: list[dict[str, str]] = RECORDED["exchange"]
FIELDS: dict[str, list[str]] = RECORDED["fields"]


def frames(of: str) -> list[bytes]:
    return [bytes.fromhex(entry["frame"]) for entry in EXCHANGE if entry["from"] == of and "frame" in entry]


HELLO = decode_from_learner(frames("learner")[0])
assert isinstance(HELLO, msg.Hello)


def assert_of_version_1(data: bytes) -> str:
    """Nothing in it that version 1 does not know; its type."""
    said = msgspec.msgpack.decode(data)
    kind = said.pop("type")
    assert said.keys() <= set(FIELDS[kind]), f"{kind} has {said.keys() - set(FIELDS[kind])}"
    assert said.get("settings", {}).keys() <= set(FIELDS["Settings"])
    for name, part in (("tensors", "TensorSpec"), ("ranges", "Range"), ("leases", "Range"), ("members", "Member")):
        for one in said.get(name, ()):
            assert one.keys() <= set(FIELDS[part])
    return str(kind)


def place_of(data: bytes) -> tuple[object, ...]:
    """What a syncer's frame is about: the same in every run of the same course."""
    said = msgspec.msgpack.decode(data)
    return said["type"], said.get("round"), said.get("attempt")


# ---- what was recorded --------------------------------------------------------------------------------------------


def test_the_recording_is_of_version_1_and_whole() -> None:
    assert RECORDED["protocol"] == HELLO.protocol == 1
    learner = {assert_of_version_1(data) for data in frames("learner")}
    syncer = {assert_of_version_1(data) for data in frames("syncer")}
    assert learner == {"Hello", "Progress", "Heartbeat", "Register", "Contribution", "CutSaved", "Leave"}
    assert syncer == {"Welcome", "Started", "Lease", "Pull", "Announce", "Ending", "Finish"}


def test_every_frame_of_version_1_is_understood_and_means_the_same() -> None:
    for data in frames("learner"):
        message = decode_from_learner(data)
        assert decode_from_learner(encode(message, 1)) == message
        assert message.seq == 0
    for data in frames("syncer"):
        message = decode_from_syncer(data)
        assert decode_from_syncer(encode(message, 1)) == message
        if isinstance(message, msg.Welcome):
            assert message.protocol == 1


def test_what_is_new_is_what_version_1_did_not_have() -> None:
    """The tables in protocol/messages.py, held against the recording."""
    kinds = {kind.__name__: kind for kind in (*msg.FromLearner.__args__, *msg.FromSyncer.__args__)}
    assert kinds.keys() - FIELDS.keys() == msg.NEW_MESSAGES
    for name in kinds.keys() & FIELDS.keys():
        new = set(kinds[name].__struct_encode_fields__) - set(FIELDS[name])
        assert new == msg.NEW_FIELDS["*"] | msg.NEW_FIELDS.get(name, frozenset()), name
    for part in (msg.TensorSpec, msg.Range, msg.Member):
        assert list(part.__struct_encode_fields__) == FIELDS[part.__name__]
    assert set(Settings.__struct_encode_fields__) - set(FIELDS["Settings"]) == msg.NEW_SETTINGS


# ---- a learner of version 1, a syncer of version 2 ------------------------------------------------------------------


class Syncer:
    """A real one, and what it noted."""

    def __init__(self, path: Path) -> None:
        self.events: list[dict[str, Any]] = []
        out = RunDir.create(path / "run")
        self.run_store = RunStore(out, acquire(out.journal))
        config = convert({**RECORDED["config"]}, "the recording")
        self._news = asyncio.Event()
        log = EventLog(self._note)
        self.service = SyncerService(config, run="recorded", events=log, run_store=self.run_store)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.service.server.port}"

    def _note(self, line: bytes) -> None:
        self.events.append(json.loads(line))
        self._news.set()

    async def until(self, kind: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while not self.said(kind):
                self._news.clear()
                await self._news.wait()

    def said(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


@pytest.fixture
async def syncer(tmp_path: Path) -> AsyncIterator[Syncer]:
    syncer = Syncer(tmp_path)
    serving = asyncio.ensure_future(syncer.service.run(lambda parameters: None))
    await syncer.service.started.wait()
    yield syncer
    syncer.service.end("the test is over")
    async with asyncio.timeout(WAIT_S):
        await serving
    syncer.run_store.close()


async def test_a_syncer_says_its_version_when_a_channel_opens(syncer: Syncer) -> None:
    url = f"{syncer.url}/v1/control"
    headers = {**parse_address(syncer.url, {}).headers_for(url), **UPGRADE}
    async with aiohttp.ClientSession() as http, http.get(url, headers=headers) as answer:
        assert answer.status == 101 and answer.headers[PROTOCOL_HEADER] == "2"


UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


# ---- a learner of version 2, a syncer of version 1 ------------------------------------------------------------------


@asynccontextmanager
async def old_syncer(heard: list[bytes]) -> AsyncIterator[str]:
    """It names no version, and after a hello says all that was recorded."""

    async def control(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        heard.append((await socket.receive()).data)
        for data in frames("syncer"):
            await socket.send_bytes(data)
        async for frame in socket:
            heard.append(frame.data)
        return socket

    app = web.Application()
    app.router.add_get("/v1/control", control)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


class NewLearner:
    """The shipped rules and a link; its training process makes a step for every message, and every body arrives."""

    def __init__(self, url: str) -> None:
        assert isinstance(HELLO, msg.Hello)
        self.machine = LearnerMachine(HELLO.learner, HELLO.session, HELLO.tensors)
        self.t, self.heard, self.lost = 0, 0, asyncio.Event()
        self.finished = asyncio.Event()
        self.reads: dict[int, int] = {}
        self.link = SyncerConnection(
            url,
            hello=self.machine.hello,
            on_open=lambda: None,
            on_message=self._hear,
            on_lost=lambda reason: self.lost.set(),
        )

    def _hear(self, message: msg.FromSyncer) -> None:
        self.heard += 1
        self._tell(fx.Arrived(message))
        self.t += 1
        counters = (self.t,) * len(self.machine.versions)
        reads, self.reads = self.reads, {}
        for number, fragment in reads.items():
            base = self.machine.versions[fragment]
            self._tell(fx.Copied(number, fragment, self.t, 1, 1, base, total=self.t))
        self._tell(fx.Stepped(self.t, counters, counters, tokens_total=self.t))

    def _tell(self, event: fx.LearnerEvent) -> None:
        for effect in self.machine.handle(float(self.t), event):
            match effect:
                case fx.Say(message):
                    self.link.send(message)
                case fx.Fetch(fragment, version):
                    self._tell(fx.Fetched(fragment, version))
                case fx.Adopt(fragment, version):
                    self._tell(fx.Adopted(fragment, version, self.t))
                case fx.Read(number, fragment):
                    self.reads[number] = fragment
                case fx.Upload(number, attempt):
                    self._tell(fx.Uploaded(number, attempt, "0" * 32))
                case fx.Stop(final=True):
                    self.finished.set()


async def test_a_learner_of_version_2_speaks_version_1_to_a_syncer_that_names_none() -> None:
    heard: list[bytes] = []
    async with old_syncer(heard) as url:
        learner = NewLearner(url)
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(learner.link.run())
            await learner.finished.wait()
            await learner.link.close()
    assert learner.heard == len(frames("syncer")) and not learner.lost.is_set()
    kinds = [assert_of_version_1(data) for data in heard]
    assert kinds[0] == "Hello" and msgspec.msgpack.decode(heard[0])["protocol"] == 1
    assert {"Progress", "Contribution", "Leave"} <= set(kinds)
