"""What bodies tell of a learner's link: their bytes and seconds, and that a version is nearly there."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from tests.courier.conftest import committed_as_held
from tests.courier.test_body import place as plain_place
from tests.fabric.narrow_link import ObservedLink

from atoll.chaos.tcp_relay import TcpRelay
from atoll.config import Outer
from atoll.courier import body as module
from atoll.courier.body import FragmentTransfers
from atoll.courier.rank_channel import PartArriving, PartFetched, PartUploaded
from atoll.courier.rank_orders import FetchAgain, RankOrders
from atoll.courier.slots import IncomingSlots, OutgoingSlots
from atoll.digests import compute_digest
from atoll.fabric.bodies import BodyConnection
from atoll.fabric.body_meter import ArrivalMeter
from atoll.fabric.host import Port
from atoll.fabric.intake import Intake
from atoll.fabric.transfer import SentBody
from atoll.fabric.wire import DIGEST_HEADER, ROUND_HEADER, STEPS_HEADER, VERSION_HEADER, FabricLimits
from atoll.mailbox.box import Mailbox
from atoll.mailbox.channel import Start
from atoll.numerics.fragments import make_plan
from atoll.numerics.shard_plan import make_shard_plan
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.ways import Ways
from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import Settings
from atoll.syncer.parameters import Parameters

RATE = 5e5
"""Bytes per second of the narrow link."""
TENSORS = (TensorSpec("a", (400, 256), "float32"),)
FRAGMENT_BYTES = 4 * 400 * 256
WAIT_S = 20.0


class BodyServer(Port):
    """Serves what a syncer's parameters serve, and takes contributions."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__("127.0.0.1", 0, FabricLimits())
        self.parameters, self._intake = parameters, Intake(FabricLimits())
        self.fails = 0
        """Number of requests that are refused from now on."""

    async def start(self) -> None:
        await self._open(
            [
                web.get("/v1/fragments/{fragment}", self._serve),
                web.put("/v1/contributions/{learner}/{round}/{attempt}", self._take),
            ]
        )

    async def stop(self) -> None:
        await self._close()

    async def _serve(self, request: web.Request) -> web.Response:
        if self.fails:
            self.fails -= 1
            return web.json_response({"error": "no such fragment"}, status=404)
        served = self.parameters.serve_fragment(
            int(request.match_info["fragment"]), int(request.query.get("have", "-1"))
        )
        served.release()
        labels = (str(served.version), str(served.round), served.digest)
        headers = dict(zip((VERSION_HEADER, ROUND_HEADER, DIGEST_HEADER), labels, strict=True))
        if served.steps:
            headers[STEPS_HEADER] = ",".join(digest for digest, _ in served.steps)
        return web.Response(body=b"".join(bytes(part) for part in served.body), headers=headers)

    async def _take(self, request: web.Request) -> web.Response:
        into = memoryview(bytearray(request.content_length or 0))
        received = await self._intake.receive(request, "learner-0", request.path, into)
        return web.Response(status=204, headers=received.headers)


class NarrowPlace:
    """A courier's side and its syncer of one or two shards, behind a narrow link that all share."""

    def __init__(self, shards: int, version_codec: str) -> None:
        self.settings = Settings(
            fragments=1, sync_every=2, overlap=1, codec="fp32", version_codec=version_codec
        ).resolved(1)
        self.plan = make_plan(TENSORS, 1)
        plans = make_shard_plan(self.plan, shards, ("fp32", version_codec)) if shards > 1 else None
        self.dice = np.random.default_rng(1)
        values = self.dice.standard_normal(self.plan.fragments[0].size).astype(np.float32)
        cuts = [(self.plan, slice(None))]
        if plans is not None:
            cuts = [(plans.plans[n - 1], plans.values(n, 0)) for n in range(1, shards + 1)]
        self.cuts = [cut for _, cut in cuts]
        self.servers = []
        for plan, cut in cuts:
            parameters, part = Parameters(plan, Outer(merge="mean"), version_codec), values[cut].copy()
            parameters.put_initial(0, part, compute_digest(part.view(np.uint8).data))
            parameters.commit_initial()
            self.servers.append(BodyServer(parameters))
        self.lines: list[TcpRelay] = []
        self.events: asyncio.Queue[fx.LearnerEvent] = asyncio.Queue()
        self.ways = Ways()

    async def open(self, tasks: asyncio.TaskGroup) -> None:
        for server in self.servers:
            await server.start()
            line = TcpRelay("127.0.0.1", server.port)
            await line.start()
            self.lines.append(line)
        self.limit(RATE)
        self.box = Mailbox.create(self.plan, self.settings)
        self.link = BodyConnection(self.lines[0].url)
        start = Start("learner-0", "session", self.lines[0].url, TENSORS)
        given = (self.settings, start, self._tell, tasks)
        self.bodies = FragmentTransfers(self.box, self.link, *given, ways=self.ways)
        self.bodies.use_shards([line.url for line in self.lines[1:]])

    def _tell(self, event: fx.LearnerEvent) -> None:
        if isinstance(event, fx.Fetched):
            self.slot = self.bodies.incoming.landed.pop(0)
        self.events.put_nowait(event)

    def limit(self, rate: float) -> None:
        self.up, self.down = ObservedLink(rate), ObservedLink(rate)
        for line in self.lines:
            line.share(self.up, self.down)

    async def close(self) -> None:
        self.bodies.close()
        await self.link.close()
        for line in self.lines:
            await line.stop()
        for server in self.servers:
            await server.stop()
        self.box.close()

    def round(self) -> None:
        delta = self.dice.standard_normal(self.plan.fragments[0].size).astype(np.float32)
        for server, cut in zip(self.servers, self.cuts, strict=True):
            held = server.parameters
            held.stage_merge(0, [delta[cut].copy()], [1.0])
            version = held.committed_buffers()[0].version + 1
            held.commit_version(0, version, version)

    async def told(self) -> fx.LearnerEvent:
        async with asyncio.timeout(WAIT_S):
            return await self.events.get()

    async def fetch(self) -> fx.Fetched:
        """Fetch, adopt, and check that what is said comes in order."""
        self.down.begin()
        self.bodies.fetch(0)
        assert isinstance(await self.told(), fx.Arriving)
        fetched = await self.told()
        assert isinstance(fetched, fx.Fetched) and self.events.empty()
        slot = self.slot
        if (copying := self.bodies.into_base(slot, 0, fetched.version)) is not None:
            await copying
        self.box.adopted[0] = fetched.version
        self.bodies.finish_adoption(slot, 0)
        return fetched


@asynccontextmanager
async def narrow(shards: int = 1, version_codec: str = "fp32") -> AsyncIterator[NarrowPlace]:
    made = NarrowPlace(shards, version_codec)
    async with asyncio.TaskGroup() as tasks:
        await made.open(tasks)
        try:
            yield made
        finally:
            await made.close()


@pytest.mark.parametrize("shards", [1, 2])
async def test_every_version_tells_the_rate_of_the_way_down(shards: int) -> None:
    async with narrow(shards) as here:
        fetched = await here.fetch()
        assert fetched.nbytes / fetched.seconds == pytest.approx(here.down.rate, rel=0.15)
        assert 0.8 * FRAGMENT_BYTES < fetched.nbytes < FRAGMENT_BYTES and 0 < fetched.latency_s < fetched.seconds
        assert here.ways.down.bytes_per_s == pytest.approx(here.down.rate, rel=0.15)
        assert here.ways.latency_s == fetched.latency_s


async def test_encoded_steps_tell_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with narrow(version_codec="bf16") as here:
        here.limit(1e9)
        await here.fetch()
        here.round()
        here.limit(RATE)
        fetched = await here.fetch()
        assert fetched.nbytes < FRAGMENT_BYTES / 2, "steps came"
        assert fetched.nbytes / fetched.seconds == pytest.approx(here.down.rate, rel=0.15)
        assert here.box.base(0).tobytes() == committed_as_held(here.servers[0].parameters, 0).tobytes()


async def test_work_that_takes_longer_than_the_transfer_is_what_a_version_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with narrow() as here:
        keep, worked_s = here.bodies._keep_and_round, 0.0

        def slow(*given: Any) -> None:
            nonlocal worked_s
            worked_s = 100.0
            keep(*given)

        slow_meter = functools.partial(ArrivalMeter, clock=lambda: time.monotonic() + worked_s)
        monkeypatch.setattr(module, "ArrivalMeter", slow_meter)
        monkeypatch.setattr(here.bodies, "_keep_and_round", slow)
        fetched = await here.fetch()
        assert fetched.nbytes == FRAGMENT_BYTES and 100.0 < fetched.seconds < 110.0


@pytest.mark.parametrize(("shards", "pipe"), [(1, 0.0), (1, 150_000.0), (2, 150_000.0), (1, 1e12)])
async def test_arriving_is_said_once_when_no_more_is_to_come_than_a_full_link_has_under_way(
    shards: int, pipe: float
) -> None:
    async with narrow(shards) as here:
        came: list[float] = []
        tell = here.bodies._tell

        def note(event: fx.LearnerEvent) -> None:
            if isinstance(event, fx.Arriving):
                came.append(sum(line.bytes_down for line in here.lines))
            tell(event)

        here.bodies._tell = note
        for _ in range(2):  # the second time on connections that are there
            came.clear()
            before = sum(line.bytes_down for line in here.lines)
            here.bodies.ways = Ways()
            here.bodies.ways.down.add(1_000_000, 1.0)
            here.bodies.ways.add_latency(pipe / 1e6)
            await here.fetch()
            assert len(came) == 1
            to_come = FRAGMENT_BYTES - (came[0] - before)
            # The line counts whole chunks once they are delivered, with the headers.
            assert min(pipe, FRAGMENT_BYTES) - 70_000 * (1 + shards) < to_come < pipe + 70_000


async def test_a_version_that_does_not_come_is_no_word_of_a_free_way() -> None:
    async with narrow() as here:
        here.servers[0].fails = 1
        here.bodies.fetch(0)
        assert isinstance(await here.told(), fx.FetchFailed)
        await asyncio.sleep(0)
        assert here.events.empty()
        await here.fetch()


@pytest.mark.parametrize("shards", [1, 2])
async def test_every_answer_tells_the_rate_of_the_way_up(shards: int) -> None:
    async with narrow(shards) as here:
        await here.fetch()
        here.up.begin()
        slot = here.bodies.outgoing.take_slot(urgent=True)
        assert slot is not None
        here.box.outgoing(slot, 0)[:] = 0.5
        here.bodies.outgoing.add_copy(0, 1, slot, 1, 1)
        here.bodies.upload(3, 1, 0)
        uploaded = await here.told()
        assert isinstance(uploaded, fx.Uploaded) and uploaded.nbytes == FRAGMENT_BYTES
        # Two shards receive at the same time, each half the rate of the link that they share.
        assert uploaded.nbytes / uploaded.seconds == pytest.approx(here.up.rate, rel=0.15)
        assert here.ways.up.bytes_per_s == pytest.approx(here.up.rate, rel=0.15)


async def test_encoding_that_takes_longer_than_the_link_is_what_an_answer_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with plain_place() as here:
        clock = iter([10.0, 13.0] * 2)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        here.link.received_s = 0.5
        here.copy(0, 5, 0.5)
        here.bodies.upload(9, 1, 0)
        uploaded = await here.told()
        assert isinstance(uploaded, fx.Uploaded) and (uploaded.nbytes, uploaded.seconds) == (16, 3.0)
        here.link.received_s = 0.0
        here.copy(0, 6, 0.5)
        here.bodies.upload(10, 1, 0)
        uploaded = await here.told()
        assert isinstance(uploaded, fx.Uploaded) and (uploaded.nbytes, uploaded.seconds) == (16, 0.0), "one piece"
        assert here.bodies.ways.up.bytes_per_s == pytest.approx(16 / 3)


async def test_where_the_receiver_says_nothing_its_answer_counts_without_the_latency() -> None:
    async with plain_place() as here:

        async def put(*given: object) -> SentBody:
            return SentBody(None, 0.75)

        here.link._put = put  # type: ignore[method-assign,assignment]
        here.bodies.ways.add_latency(0.25)
        here.copy(0, 5, 0.5)
        here.bodies.upload(9, 1, 0)
        uploaded = await here.told()
        assert isinstance(uploaded, fx.Uploaded) and uploaded.seconds == 0.5


async def test_answers_are_sent_one_after_the_other_once_the_rate_is_known() -> None:
    async with plain_place() as here:
        here.bodies.ways.up.add(1, 1.0)
        here.link.open.clear()
        for fragment in range(2):
            here.copy(fragment, 5, 0.5)
            here.bodies.upload(9 + fragment, 1, fragment)
        await asyncio.sleep(0.01)
        assert here.bodies._turns._before is not None and here.bodies._turns._before.nbytes == 16
        assert here.bodies._turns._lock.locked(), "the second one waits"
        here.link.open.set()
        assert {type(await here.told()) for _ in range(2)} == {fx.Uploaded}
        assert list(here.link.contributions) == [(9, 1), (10, 1)]


# ---- several ranks ---------------------------------------------------------------------------------------------------


def orders(ranks: int) -> RankOrders:
    made = RankOrders(ranks)
    made.use_slots(OutgoingSlots([0], lambda slot: False), IncomingSlots(1))
    return made


async def test_all_ranks_have_to_be_near_their_end_before_the_way_is_free() -> None:
    here = orders(3)
    for _ in range(2):
        here.order_fetch(4, await here._incoming.take_slot())
        assert [here.take_answer(rank, PartArriving(4)) for rank in (2, 0)] == [None, None]
        assert here.take_answer(2, PartFetched(4, 6, "", 100, 2.0, 0.5)) is None
        assert here.take_answer(0, PartFetched(4, 7, "", 200, 4.0, 0.1)) is None
        assert here.take_answer(1, PartArriving(4)) == fx.Arriving()
        again = here.take_answer(1, PartFetched(4, 7, "", 300, 1.0, 0.2))
        assert isinstance(again, FetchAgain) and again.ranks == (2,)
        assert here.take_answer(2, PartArriving(4)) is None, "it was said"
        fetched = here.take_answer(2, PartFetched(4, 7, "", 50, 1.5, 0.4))
        assert fetched == fx.Fetched(4, 7, 550, 4.0, 0.4), "the bytes of all in the seconds of the slowest"
        here._incoming.release_unwanted(4)
        assert here.take_answer(0, PartArriving(4)) is None and not here._arriving


async def test_a_failed_fetch_of_several_ranks_leaves_nothing_behind() -> None:
    here = orders(2)
    here.order_fetch(1, await here._incoming.take_slot())
    assert here.take_answer(0, PartArriving(1)) is None
    assert here.take_answer(0, PartFetched(1, 3)) is None
    assert isinstance(here.take_answer(1, PartFetched(1, reason="gone")), fx.FetchFailed)
    assert not here._arriving


def test_an_answer_of_several_ranks_takes_the_seconds_of_the_slowest() -> None:
    here = orders(2)
    here._outgoing.add_copy(1, 5, 0, 1, 1)
    order = here.order_upload(9, 0, 1, 3)
    assert not isinstance(order, fx.UploadFailed)
    assert here.take_answer(1, PartUploaded(order.ask, ((1, "b"),), "", 300, 0.0)) is None
    uploaded = here.take_answer(0, PartUploaded(order.ask, ((1, "a"),), "", 100, 2.0))
    assert isinstance(uploaded, fx.Uploaded) and (uploaded.nbytes, uploaded.seconds) == (400, 2.0)
