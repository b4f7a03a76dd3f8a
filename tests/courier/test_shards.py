"""Bodies between shared memory and the shards of a syncer: each has its part, all together are the whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from unittest.mock import patch

import numpy as np
import pytest
from tests.courier.conftest import committed_as_held, fetch_and_adopt
from tests.courier.test_held import SyncerLink

from atoll.config import Outer
from atoll.courier.body import FragmentTransfers
from atoll.digests import combine_digests, compute_digest
from atoll.fabric.body_meter import PartArrival
from atoll.fabric.transfer import CodedBody
from atoll.mailbox.box import Mailbox
from atoll.mailbox.channel import Start
from atoll.numerics import merge as merging
from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import Delta, body_nbytes, encode_contribution, make_codec
from atoll.numerics.fragments import make_plan
from atoll.numerics.shard_plan import make_shard_plan
from atoll.protocol.errors import Unreachable
from atoll.protocol.learner import effects as fx
from atoll.protocol.messages import TensorSpec, buffer_name
from atoll.protocol.settings import Settings
from atoll.syncer.parameters import Parameters

TENSORS = (
    TensorSpec("a", (100, 64), "float32"),
    TensorSpec("b", (40, 64), "bfloat16"),
    TensorSpec(buffer_name("mean", "c"), (64, 2), "float32"),
    TensorSpec("d", (3,), "float32"),
)
FRAGMENTS = 3


@pytest.fixture(autouse=True)
def small_cuts() -> Iterator[None]:
    """So that small tensors are cut like large ones."""
    with patch.object(merging, "PART", 1024):
        yield


class ShardLink(SyncerLink):
    """The way to one shard. The lead's knows those to the others."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self.others: dict[str, ShardLink] = {}
        self.values: dict[int, bytes] = {}

    def connect_shard(self, link: str) -> ShardLink:
        return self.others[link]

    async def close(self) -> None: ...

    async def put_initial(
        self,
        learner: str,
        session: str,
        fragment: int,
        data: memoryview,
        digest: str,
        deadline_s: float,
        rank: int = 0,
        codec: str = "",
        loss_ppb: int = 0,
    ) -> None:
        await self._through()
        assert digest == compute_digest(data)
        self.values[fragment] = bytes(data)

    async def get_fragment(
        self,
        index: int,
        into: memoryview,
        deadline_s: float,
        learner: str = "",
        rank: int = -1,
        least: int = -1,
        part: PartArrival | None = None,
        coded: CodedBody | None = None,
    ) -> tuple[int, int, str]:
        await self._through()
        return await super().get_fragment(index, into, deadline_s)


class ShardedTransfers:
    """A courier's side and a syncer of as many shards."""

    def __init__(self, tasks: asyncio.TaskGroup, count: int, codec: str, version_codec: str) -> None:
        settings = Settings(
            fragments=FRAGMENTS, sync_every=FRAGMENTS, overlap=1, codec=codec, version_codec=version_codec
        ).resolved(FRAGMENTS)
        self.plan = make_plan(TENSORS, FRAGMENTS)
        self.shards = make_shard_plan(self.plan, count, (codec, version_codec))
        self.dice = np.random.default_rng(1)
        self.whole = Parameters(self.plan, Outer(merge="mean"), version_codec)
        held = [Parameters(plan, Outer(merge="mean"), version_codec) for plan in self.shards.plans]
        for part in self.plan.fragments:
            self._put_initial(part.index, self.draw(part.index), held)
        for one in (self.whole, *held):
            one.commit_initial()
        self.links = [ShardLink(one) for one in held]
        self.links[0].others = {f"shard-{n}": link for n, link in enumerate(self.links[1:], start=2)}
        self.box = Mailbox.create(self.plan, settings)
        self.events: asyncio.Queue[fx.LearnerEvent] = asyncio.Queue()
        start = Start("learner-0", "session", "", TENSORS)
        self.bodies = FragmentTransfers(self.box, self.links[0], settings, start, self._tell, tasks)  # type: ignore[arg-type]
        self.bodies.use_shards(tuple(self.links[0].others))
        self.slots: dict[int, int] = {}

    def _put_initial(self, fragment: int, values: FloatArray, held: list[Parameters]) -> None:
        self.whole.put_initial(fragment, values, compute_digest(values.view(np.uint8).data))
        for n, one in enumerate(held, start=1):
            part = values[self.shards.values(n, fragment)].copy()
            one.put_initial(fragment, part, compute_digest(part.view(np.uint8).data))

    def draw(self, fragment: int) -> FloatArray:
        return self.dice.standard_normal(self.plan.fragments[fragment].size).astype(np.float32)

    def _tell(self, event: fx.LearnerEvent) -> None:
        if isinstance(event, fx.Arriving):
            return
        if isinstance(event, fx.Fetched):
            self.slots[event.fragment] = self.bodies.incoming.landed.pop(event.fragment)
        self.events.put_nowait(event)

    async def told(self) -> fx.LearnerEvent:
        async with asyncio.timeout(20):
            return await self.events.get()

    def round(self, fragment: int, only: int | None = None, gradient: FloatArray | None = None) -> FloatArray:
        """A round in all shards that have any of the fragment, or in one of them."""
        delta = self.draw(fragment) if gradient is None else gradient
        for shard in self.shards.holders(fragment):
            if only in (None, shard):
                self._commit(self.links[shard - 1].parameters, fragment, delta[self.shards.values(shard, fragment)])
        if only in (None, 1):
            self._commit(self.whole, fragment, delta)
        return delta

    def _commit(self, parameters: Parameters, fragment: int, delta: FloatArray) -> None:
        version = parameters.committed_buffers()[fragment].version + 1
        parameters.stage_merge(fragment, [delta.copy()], [1.0], bases=[version - 1])
        parameters.commit_version(fragment, version, version)

    async def fetch(self, fragment: int) -> FloatArray:
        return await fetch_and_adopt(self.bodies, self.box, self.slots, fragment, self.told())

    def due(self, fragment: int) -> FloatArray:
        return committed_as_held(self.whole, fragment)

    def copy(self, fragment: int, t: int) -> FloatArray:
        slot = self.bodies.outgoing.take_slot(urgent=True)
        assert slot is not None
        theta = self.box.outgoing(slot, fragment)
        theta[:] = self.draw(fragment)
        self.bodies.outgoing.add_copy(fragment, t, slot, 1, 1)
        return theta.copy()


@asynccontextmanager
async def place(count: int = 3, codec: str = "fp32", version_codec: str = "fp32") -> AsyncIterator[ShardedTransfers]:
    async with asyncio.TaskGroup() as tasks:
        made = ShardedTransfers(tasks, count, codec, version_codec)
        yield made
        made.bodies.close()
        made.box.close()


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "topk"])
async def test_every_shard_gets_the_body_of_its_part_and_the_digest_is_of_them_all(codec: str) -> None:
    async with place(codec=codec) as here:
        by = make_codec(codec)
        for fragment in range(FRAGMENTS):
            await here.fetch(fragment)
            base, theta = here.box.base(fragment).copy(), here.copy(fragment, t=1)
            here.bodies.upload(fragment, 1, fragment)
            sent = []
            uploaded = await here.told()
            for shard, part, values in here.shards.places(fragment):
                body = np.empty(body_nbytes(by, part), np.uint8)
                encode_contribution(by, part, Delta(base[values], theta[values]), body)
                assert here.links[shard - 1].contributions[fragment, 1] == body.tobytes()
                sent.append(compute_digest(body.data))
            nbytes = body_nbytes(by, here.plan.fragments[fragment])
            assert uploaded == fx.Uploaded(fragment, 1, combine_digests(sent), nbytes)
            nobody = set(range(1, 4)) - set(here.shards.holders(fragment))
            assert not any((fragment, 1) in here.links[shard - 1].contributions for shard in nobody)


@pytest.mark.parametrize("version_codec", ["fp32", "bf16", "int4", "topk"])
async def test_versions_come_in_parts_with_the_bits_of_the_whole(version_codec: str) -> None:
    async with place(version_codec=version_codec) as here:
        for fragment in range(FRAGMENTS):
            for behind in (0, 1, 2):
                for _ in range(behind):
                    here.round(fragment)
                assert (await here.fetch(fragment)).tobytes() == here.due(fragment).tobytes()
                assert here.box.base(fragment).tobytes() == here.due(fragment).tobytes()
    if version_codec != "fp32":
        assert any(have == 1 for link in here.links for _, have in link.asked), "steps were asked for"


@pytest.mark.parametrize("late", [1, 2])
async def test_a_part_that_is_older_is_fetched_again(late: int) -> None:
    async with place(count=2) as here:
        fragment = next(n for n in range(FRAGMENTS) if here.shards.holders(n) == (1, 2))
        await here.fetch(fragment)
        delta = here.round(fragment, only=3 - late)
        here.bodies.fetch(fragment)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await here.events.get()
        assert len(here.links[late - 1].asked) >= 3, "it is asked again"
        here.round(fragment, only=late, gradient=delta)
        assert await here.told() == fx.Fetched(fragment, 1)
        got = here.box.incoming(here.slots[fragment], fragment)
        assert got.tobytes() == here.due(fragment).tobytes()


async def test_a_shard_that_does_not_answer_is_asked_again_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    async with place(count=2) as here:
        fragment = next(n for n in range(FRAGMENTS) if here.shards.holders(n) == (1, 2))
        here.links[1]._urls = ["http://127.0.0.1:2222"]
        here.links[1].errors = [Unreachable("nobody is there")] * 3
        await here.fetch(fragment)
        here.links[1].errors = [Unreachable("nobody is there")] * 3
        here.copy(fragment, t=1)
        here.bodies.upload(5, 1, fragment)
        assert isinstance(await here.told(), fx.Uploaded)
    said = capfd.readouterr().err
    away = "shard 2 of the syncer at http://127.0.0.1:2222 does not answer: nobody is there; training goes on"
    assert said.count(away) == 2, said
    assert said.count("shard 2 of the syncer answers again") == 2


async def test_without_the_lead_nothing_is_asked_again() -> None:
    """Who comes back to the lead is told what is missing then."""
    async with place(count=2) as here:
        fragment = next(n for n in range(FRAGMENTS) if here.shards.holders(n) == (1, 2))
        await here.fetch(fragment)
        here.copy(fragment, t=1)
        here.links[0].up = False
        here.links[1].errors = [Unreachable("nobody is there")] * 100
        here.bodies.upload(5, 1, fragment)
        assert await here.told() == fx.UploadFailed(5, 1, "nobody is there")


async def test_the_first_parameters_go_to_every_shard() -> None:
    async with place(count=3) as here:
        for part in here.plan.fragments:
            here.box.base(part.index)[:] = here.draw(part.index)
        here.bodies.upload_all()
        async with asyncio.timeout(10):
            await asyncio.gather(*here.bodies._running)
        for fragment in range(FRAGMENTS):
            for shard, _, values in here.shards.places(fragment):
                sent = here.links[shard - 1].values.pop(fragment)
                assert sent == here.box.base(fragment)[values].tobytes()
        assert not any(link.values for link in here.links), "nothing of empty parts"


async def test_a_shard_that_moved_is_asked_at_its_new_address_and_others_keep_their_connections() -> None:
    async with place(count=3) as here:
        fragment = next(n for n in range(FRAGMENTS) if 3 in here.shards.holders(n))
        old, moved = here.links[2], ShardLink(here.links[2].parameters)
        old.errors = [Unreachable("nobody is there")] * 1000
        here.bodies.fetch(fragment)  # it is under way, and asks again
        await asyncio.sleep(0.05)
        here.links[0].others["shard-3-anew"] = moved
        before = here.bodies.shards._connections[1]
        here.bodies.use_shards(("shard-2", "shard-3-anew"))
        assert isinstance(await here.told(), fx.Fetched)
        assert moved.asked and here.bodies.shards._connections[1] is before
