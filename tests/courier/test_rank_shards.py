"""Bodies of one rank and the shards of a syncer: each shard gets and gives what both hold of a fragment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from unittest.mock import patch

import numpy as np
import pytest
from tests.courier.test_shards import TENSORS, ShardLink

from atoll.config import Outer
from atoll.courier.body import FragmentTransfers
from atoll.courier.rank_channel import FetchPart, PartArriving, PartFetched, PartUploaded, UploadPart
from atoll.digests import compute_digest
from atoll.fabric.body_meter import PartArrival
from atoll.fabric.transfer import CodedBody
from atoll.mailbox.box import Mailbox
from atoll.mailbox.channel import Start
from atoll.numerics import merge as merging
from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import Delta, body_nbytes, decode_contribution, encode_contribution, make_codec
from atoll.numerics.fragments import Fragment, make_plan
from atoll.numerics.rank_plan import RankPlan, make_rank_plan
from atoll.numerics.rank_shards import RankPart
from atoll.numerics.shard_plan import make_shard_plan
from atoll.protocol.errors import Unreachable
from atoll.protocol.messages import Box, RankBoxes, TensorSpec, buffer_name
from atoll.protocol.settings import Settings
from atoll.syncer.parameters import Parameters

FRAGMENTS = 2
MODEL = (*TENSORS, TensorSpec("e", (50, 64), "float32"))
RANK = 1
RANKS: tuple[RankBoxes, ...] = (
    (
        Box("a", (0, 0), (37, 64)),
        Box("b", (0, 0), (40, 20)),
        Box(buffer_name("mean", "c"), (0, 0), (64, 2), False),
        Box("d", (0,), (3,)),
        Box("e", (0, 0), (50, 64)),
    ),
    (
        Box("a", (37, 0), (63, 64)),
        Box("b", (0, 20), (40, 44)),
        Box(buffer_name("mean", "c"), (0, 0), (64, 2)),
        Box("d", (0,), (3,), False),
        Box("e", (0, 0), (50, 64), False),
    ),
)
"""Rows, columns, and copies that one of them sends: rank 1 holds what it does not send apart from what it sends."""


@pytest.fixture(autouse=True)
def small_cuts() -> Iterator[None]:
    with patch.object(merging, "PART", 1024):
        yield


class RankLink(ShardLink):
    """Serves what a rank holds of a shard's part, as the shard does."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self.plan: RankPlan = make_rank_plan(parameters.plan, RANKS[RANK])

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
        assert (learner, rank) == ("learner-0", RANK)
        whole = np.empty(self.parameters.plan.fragments[index].size, np.float32)
        found = await super().get_fragment(index, whole.view(np.uint8).data, deadline_s)
        part = np.empty(self.plan.plan.fragments[index].size, np.float32)
        self.plan.take(index, whole, part)
        into.cast("B")[:] = part.view(np.uint8).data
        return found


class RankTransfers:
    """The courier of rank 1, and a syncer of as many shards."""

    def __init__(self, tasks: asyncio.TaskGroup, count: int, codec: str) -> None:
        settings = Settings(fragments=FRAGMENTS, sync_every=FRAGMENTS, overlap=1, codec=codec).resolved(FRAGMENTS)
        self.plan = make_plan(MODEL, FRAGMENTS)
        self.rank_plan = make_rank_plan(self.plan, RANKS[RANK])
        self.shards = make_shard_plan(self.plan, count, (codec, "fp32"))
        self.dice = np.random.default_rng(1)
        self.values = [self._draw(part.size) for part in self.plan.fragments]
        held = [Parameters(plan, Outer(merge="mean"), "fp32") for plan in self.shards.plans]
        for n, one in enumerate(held, start=1):
            for part in one.plan.fragments:
                values = self.values[part.index][self.shards.values(n, part.index)].copy()
                one.put_initial(part.index, values, compute_digest(values.view(np.uint8).data))
            one.commit_initial()
        self.links = [RankLink(one) for one in held]
        self.links[0].others = {f"shard-{n}": link for n, link in enumerate(self.links[1:], start=2)}
        self.box = Mailbox.create(self.rank_plan.plan, settings, ranks=True)
        self.events: asyncio.Queue[object] = asyncio.Queue()
        start = Start("learner-0", "session", "", MODEL, rank=RANK, ranks=RANKS)
        told = (self.links[0], settings, start, self.events.put_nowait, tasks)
        self.bodies = FragmentTransfers(self.box, *told, self.rank_plan)  # type: ignore[arg-type]
        self.bodies.use_shards(tuple(self.links[0].others))

    def _draw(self, size: int) -> FloatArray:
        return self.dice.standard_normal(size).astype(np.float32)

    def draw(self, fragment: int) -> FloatArray:
        """As the rank holds it."""
        return self._draw(self.rank_plan.plan.fragments[fragment].size)

    async def told(self) -> object:
        async with asyncio.timeout(20):
            return await self.events.get()


@asynccontextmanager
async def place(count: int = 3, codec: str = "fp32") -> AsyncIterator[RankTransfers]:
    async with asyncio.TaskGroup() as tasks:
        made = RankTransfers(tasks, count, codec)
        yield made
        made.bodies.close()
        made.box.close()


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "topk"])
async def test_every_shard_decodes_what_this_rank_has_of_its_part(codec: str) -> None:
    async with place(codec=codec) as here:
        by = make_codec(codec)
        for fragment in range(FRAGMENTS):
            here.box.base(fragment)[:] = base = here.draw(fragment)
            here.box.base_version[fragment] = 0
            slot = here.bodies.outgoing.take_slot(urgent=True)
            assert slot is not None
            here.box.outgoing(slot, fragment)[:] = theta = here.draw(fragment)
            here.bodies.upload_part(UploadPart(7, fragment, 1, fragment, slot, 1, base=0))
            uploaded = await here.told()
            assert isinstance(uploaded, PartUploaded) and not uploaded.reason
            digests, sent = dict(uploaded.digests), here.rank_plan.sent(fragment).size
            found = []
            for shard, link in enumerate(here.links, start=1):
                part = link.plan.sent(fragment)
                assert ((fragment, 1) in link.contributions) == (shard in digests) == (part.size > 0)
                if part.size:
                    body = np.frombuffer(link.contributions[fragment, 1], np.uint8)
                    assert compute_digest(body.data) == digests[shard]
                    decode_contribution(by, part, body.copy(), values := np.empty(part.size, np.float32))
                    found.append(values)
            alone = encode_and_decode(codec, here.rank_plan.sent(fragment), Delta(base[:sent], theta[:sent]))
            equal = np.array_equal(np.concatenate(found), alone)
            assert equal or codec == "topk"  # whose blocks begin anew at a shard
            assert np.dot(np.concatenate(found), alone) > 0.8 * np.dot(alone, alone)


def encode_and_decode(codec: str, part: Fragment, delta: Delta) -> FloatArray:
    by, values = make_codec(codec), np.empty(part.size, np.float32)
    body = np.empty(body_nbytes(by, part), np.uint8)
    encode_contribution(by, part, delta, body)
    decode_contribution(by, part, body, values)
    return values


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_a_version_comes_from_all_shards_into_the_places_of_this_rank(count: int) -> None:
    async with place(count) as here:
        for fragment in range(FRAGMENTS):
            here.bodies.fetch_part(FetchPart(fragment, slot := await here.bodies.incoming.take_slot()))
            assert [await here.told(), await here.told()] == [PartArriving(fragment), PartFetched(fragment, 0)]
            expected = np.empty(here.rank_plan.plan.fragments[fragment].size, np.float32)
            here.rank_plan.take(fragment, here.values[fragment], expected)
            got = here.box.incoming(slot, fragment)
            exact = [
                at for piece, at in here.rank_plan.plan.fragments[fragment].parts if piece.tensor.dtype == "float32"
            ]
            assert all(got[at].tobytes() == expected[at].tobytes() for at in exact)
            assert np.allclose(got, expected, rtol=1e-2)  # b is bfloat16
    if count > 1:
        assert any(one.sent.size not in (0, one.held.size) for of in _cut(here) for one in of), "both lie apart"


def _cut(here: RankTransfers) -> tuple[tuple[RankPart, ...], ...]:
    shards = here.bodies.shards._rank_shards
    assert shards is not None
    return shards.parts


async def test_a_shard_that_is_away_is_asked_again() -> None:
    async with place(2) as here:
        here.links[1]._urls = ["http://127.0.0.1:2222"]
        here.links[1].errors = [Unreachable("nobody is there")] * 2
        here.bodies.fetch_part(FetchPart(0, await here.bodies.incoming.take_slot()))
        assert [await here.told(), await here.told()] == [PartArriving(0), PartFetched(0, 0)]


async def test_the_first_parameters_go_to_every_shard() -> None:
    async with place(3) as here:
        for fragment in range(FRAGMENTS):
            here.box.base(fragment)[:] = here.draw(fragment)
        here.bodies.upload_all()
        async with asyncio.timeout(10):
            await asyncio.gather(*here.bodies._running)
        for fragment in range(FRAGMENTS):
            sent = [link.values.pop(fragment) for link in here.links if link.plan.sent(fragment).size]
            assert b"".join(sent) == here.box.base(fragment)[: here.rank_plan.sent(fragment).size].tobytes()
        assert not any(link.values for link in here.links), "nothing of empty parts"
