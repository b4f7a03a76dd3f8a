"""What this version is, held against a recorded exchange of it: the next version is to understand the same frames.

`exchanges/v2.json` is a real run of version 2, recorded by `exchanges/record.py`: a syncer on loopback and a learner in
a process of its own that gives the first parameters, trains on leases, answers pulls, saves its part of a cut, falls
silent for a second and ends with the run. It holds the raw frames of both sides and the bodies of the learner in the
order in which the syncer saw them, and the field names of every message. Once version 2 is released it is never
recorded anew: later versions add files of their own beside it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
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
    DIGEST_HEADER,
    PROTOCOL_HEADER,
    SESSION_HEADER,
    decode_from_learner,
    decode_from_syncer,
    encode,
)
from atoll.protocol import messages as msg
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.settings import Settings
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import acquire
from atoll.syncer.run_store import RunStore
from atoll.syncer.service import SyncerService
from atoll.telemetry.events import EventLog

WAIT_S = 20.0
RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "exchanges" / "v2.json").read_text())
EXCHANGE: list[dict[str, str]] = RECORDED["exchange"]
FIELDS: dict[str, list[str]] = RECORDED["fields"]


def frames(of: str) -> list[bytes]:
    return [bytes.fromhex(entry["frame"]) for entry in EXCHANGE if entry["from"] == of and "frame" in entry]


HELLO = decode_from_learner(frames("learner")[0])
assert isinstance(HELLO, msg.Hello)


def place_of(data: bytes) -> tuple[object, ...]:
    """What a syncer's frame is about: the same in every run of the same course."""
    said = msgspec.msgpack.decode(data)
    return said["type"], said.get("round"), said.get("attempt")


# ---- what was recorded --------------------------------------------------------------------------------------------


def test_the_recording_is_of_this_version_and_whole() -> None:
    assert RECORDED["protocol"] == HELLO.protocol == msg.PROTOCOL
    learner = {place_of(data)[0] for data in frames("learner")}
    syncer = {place_of(data)[0] for data in frames("syncer")}
    assert learner == {"Hello", "Progress", "Heartbeat", "Register", "Contribution", "CutSaved", "Leave"}
    assert syncer == {"Welcome", "Started", "TrainingBegins", "Lease", "Pull", "Announce", "Ending", "Finish"}


def test_every_recorded_frame_is_understood_and_would_be_sent_the_same() -> None:
    for data in frames("learner"):
        assert encode(decode_from_learner(data)) == data
    for data in frames("syncer"):
        assert encode(decode_from_syncer(data)) == data


def test_every_message_has_the_fields_that_it_had_when_this_version_was_recorded() -> None:
    """Otherwise it is another version: peers refuse fields that they do not know."""
    kinds = (*msg.FromLearner.__args__, *msg.FromSyncer.__args__, msg.TensorSpec, msg.Range, msg.Member, Settings)
    assert {kind.__name__: list(kind.__struct_encode_fields__) for kind in kinds} == FIELDS


# ---- the recorded learner, a real syncer ----------------------------------------------------------------------------


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


class RecordedLearner:
    """Says what was recorded, when it has heard what was recorded."""

    def __init__(self, url: str, http: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.url, self.http, self.socket = url, http, socket
        self._unmatched: list[tuple[object, ...]] = []

    async def play(self) -> None:
        for entry in EXCHANGE:
            if entry["from"] == "syncer":
                await self._until(place_of(bytes.fromhex(entry["frame"])))
            elif "put" in entry:
                await self._put(entry)
            else:
                with suppress(ConnectionError):  # its last word may come after the syncer hung up
                    await self.socket.send_bytes(bytes.fromhex(entry["frame"]))

    async def _until(self, place: tuple[object, ...]) -> None:
        async with asyncio.timeout(WAIT_S):
            while place not in self._unmatched:
                frame = await self.socket.receive()
                assert frame.type is aiohttp.WSMsgType.BINARY, f"waiting for {place}: {frame}"
                self._unmatched.append(place_of(frame.data))
        self._unmatched.remove(place)

    async def _put(self, entry: dict[str, str]) -> None:
        assert isinstance(HELLO, msg.Hello)
        url = self.url + entry["put"]
        headers = {SESSION_HEADER: HELLO.session, DIGEST_HEADER: entry["digest"], **shown(self.url, url)}
        async with self.http.put(url, data=bytes.fromhex(entry["body"]), headers=headers) as answer:
            assert answer.status == 204, await answer.text()


def shown(syncer_url: str, url: str) -> dict[str, str]:
    """What a process of the syncer's user shows at its door."""
    return parse_address(syncer_url, {}).headers_for(url)


async def test_the_recorded_learner_takes_part_in_a_run(syncer: Syncer) -> None:
    url = f"{syncer.url}/v1/control"
    async with aiohttp.ClientSession() as http, http.ws_connect(url, headers=shown(syncer.url, url)) as socket:
        await RecordedLearner(syncer.url, http, socket).play()
        await syncer.until("left")
    assert syncer.service.server.bad_frames == 0 and not syncer.said("refused")
    rounds = [event["round"] for event in syncer.said("round")]
    assert rounds == [place_of(data)[1] for data in frames("syncer") if place_of(data)[0] == "Announce"]
    assert all(event["members"][0]["learner"] == "learner-0" for event in syncer.said("round"))
    assert [event["learner"] for event in syncer.said("left")] == ["learner-0"]


async def test_a_syncer_names_the_versions_that_it_understands_when_a_channel_opens(syncer: Syncer) -> None:
    url = f"{syncer.url}/v1/control"
    headers = {**shown(syncer.url, url), **UPGRADE}
    async with aiohttp.ClientSession() as http, http.get(url, headers=headers) as answer:
        assert answer.status == 101 and answer.headers[PROTOCOL_HEADER] == "2-2"


UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


# ---- a real learner, the recorded syncer ----------------------------------------------------------------------------


@asynccontextmanager
async def recorded_syncer(heard: list[bytes], version: str | None) -> AsyncIterator[str]:
    """Names this version, and after a hello says all that was recorded."""

    async def control(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        if version is not None:
            socket.headers[PROTOCOL_HEADER] = version
        await socket.prepare(request)
        async for frame in socket:
            heard.append(frame.data)
            if len(heard) == 1:
                for data in frames("syncer"):
                    await socket.send_bytes(data)
        return socket

    app = web.Application()
    app.router.add_get("/v1/control", control)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


class Learner:
    """The shipped rules and a link; its training process makes a step for every message, and every body arrives."""

    def __init__(self, url: str) -> None:
        assert isinstance(HELLO, msg.Hello)
        self.machine = LearnerMachine(HELLO.learner, HELLO.session, HELLO.tensors)
        self.t, self.heard, self.lost = 0, 0, asyncio.Event()
        self.finished, self.end = asyncio.Event(), ""
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
                case fx.Stop(reason, final=True):
                    self.end = reason
                    self.finished.set()


async def ended(url: str) -> Learner:
    """A learner that dialled this syncer and has stopped."""
    learner = Learner(url)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(learner.link.run())
        await learner.finished.wait()
        await learner.link.close()
    return learner


@pytest.mark.parametrize("version", ["2", "2-2", "2-3", "1-2"])
async def test_a_learner_takes_part_in_the_recorded_run(version: str) -> None:
    heard: list[bytes] = []
    async with recorded_syncer(heard, version) as url:
        learner = await ended(url)
    assert learner.heard == len(frames("syncer")) and not learner.lost.is_set()
    said = [decode_from_learner(data) for data in heard]
    assert isinstance(said[0], msg.Hello) and said[0].protocol == 2
    assert {"Progress", "Contribution", "Leave"} <= {type(message).__name__ for message in said}


def as_non_member(data: bytes) -> bytes:
    """The recorded announcement as a learner receives it that was no member: with the entry of one who was."""
    announce = decode_from_syncer(data)
    if not isinstance(announce, msg.Announce):
        return data
    return encode(msgspec.structs.replace(announce, members=(msg.Member("learner-1", 1, announce.round, 8),)))


async def test_a_learner_that_was_no_member_of_the_announced_rounds_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """In frames of this version: the same fields, of which the list has one entry, also where others gave. It takes the
    versions, and offers its own steps again."""
    recorded = frames("syncer")
    others = [as_non_member(data) for data in recorded]
    announced = [data for data in others if place_of(data)[0] == "Announce"]
    assert announced and all(len(msgspec.msgpack.decode(data)["members"]) == 1 for data in announced)
    names = [set(msgspec.msgpack.decode(data)) for data in others]
    assert names == [set(msgspec.msgpack.decode(data)) for data in recorded]
    monkeypatch.setattr(f"{__name__}.frames", lambda of: others)
    heard: list[bytes] = []
    async with recorded_syncer(heard, "2") as url:
        learner = await ended(url)
    said = [decode_from_learner(data) for data in heard]
    last = [message for message in said if isinstance(message, msg.Progress)][-1]
    assert learner.heard == len(others) and not learner.lost.is_set()
    newest = {said["fragment"]: said["version"] for said in map(msgspec.msgpack.decode, announced)}
    assert last.versions == tuple(newest[fragment] for fragment in sorted(newest))


@pytest.mark.parametrize(
    ("version", "says"),
    [
        pytest.param(None, "the syncer names no version", id="none"),
        pytest.param("latest", "the syncer names no version", id="no-number"),
        pytest.param("1", "the syncer speaks 1", id="older"),
        pytest.param("3", "the syncer speaks 3", id="newer"),
        pytest.param("3-4", "the syncer speaks 3-4", id="newer-that-understands-no-older"),
    ],
)
async def test_a_learner_says_so_and_ends_where_a_syncer_has_no_version_in_common(
    version: str | None, says: str
) -> None:
    heard: list[bytes] = []
    async with recorded_syncer(heard, version) as url:
        learner = await ended(url)
    assert learner.end == f"{url}: this learner speaks protocol 2, {says}: install the same version of atoll on both"
    assert heard == [], "nothing is said to it, not even a hello"
