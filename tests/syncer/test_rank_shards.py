"""Learners of several ranks at a syncer of several shards: every rank gives each shard what both have of a fragment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.syncer.conftest import WAIT_S
from tests.syncer.test_ranks import MODEL, RUN, THREE, TWO, RankedLearner, contribute, some_values
from tests.syncer.test_shards import ShardedStage, sharded

from atoll.digests import combine_digests, compute_digest
from atoll.fabric.bodies import BodyConnection, fetch_one_version
from atoll.numerics import merge as merging
from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import Delta, body_nbytes, encode_contribution
from atoll.numerics.rank_shards import RankPart, RankShards, cut_rank_plan
from atoll.numerics.shard_plan import locate_bodies, make_shard_plan
from atoll.protocol.errors import PeerError, Unreachable
from atoll.protocol.messages import Announce, Pull, RankBoxes, Started, Welcome
from atoll.store.verify import verify_run


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors are cut like large ones."""
    monkeypatch.setattr(merging, "PART", 12)


class RankedShardedLearner(RankedLearner):
    """Each rank sends each shard its part, as couriers do."""

    def __init__(self, url: str, name: str, ranks: tuple[RankBoxes, ...], codec: str = "fp32") -> None:
        super().__init__(url, name, ranks, codec)
        self.has_ranks = bool(ranks)
        self.shards: list[RankShards] = []
        self.others: list[list[BodyConnection]] = []
        """By rank: to shards 2, 3 …"""

    async def reach_shards(self) -> None:
        welcome = await self.until(Welcome)
        whole = make_shard_plan(self.plan, 1 + len(welcome.shards), [self.codec.name])
        self.shards = [cut_rank_plan(one, whole) for one in self.plans]
        self.others = [[BodyConnection(one) for one in welcome.shards] for _ in self.plans]

    async def close(self) -> None:
        await super().close()
        for ways in self.others:
            for way in ways:
                await way.close()

    def way(self, rank: int, shard: int) -> BodyConnection:
        return self.links[rank] if shard == 1 else self.others[rank][shard - 2]

    def take(self, rank: int, fragment: int, whole: FloatArray) -> FloatArray:
        of = self.plans[rank]
        of.take(fragment, whole, local := np.empty(of.plan.fragments[fragment].size, np.float32))
        return local

    async def upload_values(self, values: list[FloatArray]) -> None:
        await self.until(Welcome, lambda welcome: welcome.upload)
        for fragment, of in enumerate(values):
            for rank, mine in enumerate(self.shards):
                local = self.take(rank, fragment, of)
                for place in mine.places_sent(fragment):
                    data = local[place.values].view(np.uint8).data
                    given = (self.name, self.session, fragment, data, compute_digest(data), WAIT_S)
                    await self.way(rank, place.shard).put_initial(*given, rank=rank)
        await self.until(Started)

    async def send_delta(self, pull: Pull, delta: FloatArray) -> str:
        marks: dict[int, list[str]] = {}
        for rank, mine in enumerate(self.shards):
            for shard, data in self.bodies_of(rank, mine, pull.fragment, delta):
                marks.setdefault(shard, []).append(compute_digest(data))
                given = (self.name, self.session, pull.round, pull.attempt, data, marks[shard][-1], WAIT_S)
                await self.way(rank, shard).put_contribution(*given, rank=rank)
        return combine_digests([combine_digests(marks[shard]) for shard in sorted(marks)])

    def bodies_of(self, rank: int, mine: RankShards, fragment: int, delta: FloatArray) -> list[tuple[int, memoryview]]:
        part = mine.sent(fragment)
        values = self.take(rank, fragment, delta)[: part.size]
        body = np.empty(body_nbytes(self.codec, part), np.uint8) if part.size else np.empty(0, np.uint8)
        if part.size:
            encode_contribution(self.codec, part, Delta(values, np.zeros_like(values)), body)
        cut = locate_bodies(self.codec, part, mine.places_sent(fragment))
        return [(shard, np.concatenate([body[one] for one in slices]).data) for shard, slices in cut]

    async def fetch_version(self, rank: int, fragment: int) -> tuple[int, FloatArray]:
        values = np.empty(self.plans[rank].plan.fragments[fragment].size, np.float32)

        async def fetch(part: RankPart, least: int) -> int:
            came = np.empty(part.held.size, np.float32)
            into = came.view(np.uint8).data
            way = self.way(rank, part.shard)
            who = (self.name, rank) if self.has_ranks else ("", -1)
            version, _, _ = await way.get_fragment(fragment, into, WAIT_S, *who, least)
            values[part.front], values[part.behind] = came[: part.sent.size], came[part.sent.size :]
            return version

        def asking(part: RankPart) -> Any:
            return lambda least: fetch(part, least)

        return await fetch_one_version([asking(one) for one in self.shards[rank].parts[fragment]]), values


async def join(stage: ShardedStage, *of: tuple[RankBoxes, ...], codec: str) -> list[RankedShardedLearner]:
    found = []
    for name, ranks in zip("ab", of, strict=False):
        learner = RankedShardedLearner(stage.url, name, ranks, codec)
        stage.connect(learner)
        await learner.reach_shards()
        found.append(learner)
    return found


async def play(learners: list[RankedShardedLearner], first: int, rounds: int) -> None:
    for number in range(first, first + rounds):
        for learner in learners:
            learner.step()
            learner.step()
        for at, learner in enumerate(learners):
            pull = await learner.until(Pull, lambda pull, n=number: pull.round == n)  # type: ignore[misc]
            size = learner.plan.fragments[pull.fragment].size
            await contribute(learner, pull, 0.01 * some_values(size, seed=100 * number + at))
        for learner in learners:
            await learner.until(Announce, lambda said, n=number: said.round == n)  # type: ignore[misc]


async def begin(learners: list[RankedShardedLearner]) -> None:
    await learners[0].upload_values([some_values(part.size, seed=part.index) for part in learners[0].plan.fragments])
    for learner in learners:
        await learner.until(Started)
        learner.versions = [0, 0]
        learner.report()


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int4"])
@pytest.mark.parametrize("ranks", [TWO, THREE], ids=["columns and copies", "uneven and empty"])
async def test_no_bit_depends_on_the_number_of_shards(tmp_path: Path, codec: str, ranks: tuple[RankBoxes, ...]) -> None:
    found: list[dict[str, Any]] = []
    for count in (1, 2, 3):
        async with sharded(tmp_path / str(count), count, **{**RUN, "codec": codec}) as stage:
            learners = await join(stage, ranks, (), codec=codec)
            await begin(learners)
            await play(learners, 0, 5)
            for rank in range(len(ranks)):
                for fragment in range(2):
                    if learners[0].plans[rank].plan.fragments[fragment].size:
                        version, values = await learners[0].fetch_version(rank, fragment)
                        expected = (await learners[1].fetch_version(0, fragment))[1]
                        assert version == (3 if fragment == 0 else 2)
                        assert values.tobytes() == learners[0].take(rank, fragment, expected).tobytes()
            await stage.end()
            for learner in learners:
                await learner.close()
            assert stage.saved is not None and not stage.events("refused", "alarm")
            found.append(stage.saved)
        report = verify_run(stage.out.path)
        assert report.ok, report.problem
    for other in found[1:]:
        assert other.keys() == {tensor.name for tensor in MODEL}
        assert all(np.array_equal(other[name].view(np.uint8), found[0][name].view(np.uint8)) for name in other)


async def test_a_shard_that_comes_back_hears_of_the_ranks_again(tmp_path: Path) -> None:
    async with sharded(tmp_path, 2, **RUN) as stage:
        learners = await join(stage, TWO, (), codec="fp32")
        await begin(learners)
        await play(learners, 0, 3)
        await stage.shards[2].kill()
        await stage.until("alarm")
        await stage.shards[2].start()
        await stage.until("alarm", 2)
        await play(learners, 3, 3)
        assert (await learners[0].fetch_version(1, 0))[0] == 3
        await stage.end()
        for learner in learners:
            await learner.close()
    report = verify_run(stage.out.path)
    assert report.ok, report.problem


async def test_what_ranks_ask_of_a_shard_wrongly_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sharded(tmp_path, 2, **{**RUN, "learners": 1, "quorum": 1}) as stage:
        (learner,) = await join(stage, TWO, codec="fp32")
        shard = learner.way(1, 2)
        room = memoryview(bytearray(4))
        given = (learner.session, 0, room, compute_digest(room), WAIT_S)
        with pytest.raises(PeerError, match="a has no rank 2: it has declared 2"):
            await shard.put_initial("a", *given, rank=2)
        part = next(one for one in learner.shards[1].parts[0] if one.shard == 2)
        with pytest.raises(PeerError, match=f"this fragment needs exactly {4 * part.sent.size} bytes"):
            await shard.put_initial("a", *given, rank=1)
        await begin([learner])
        with monkeypatch.context() as patched:
            patched.setattr("atoll.fabric.shard_server.WAIT_S", 0.05)
            with pytest.raises(Unreachable, match="rank 0 of nobody is not known here"):
                await shard.get_fragment(0, room, WAIT_S, "nobody", 0)
        learner.step()
        learner.step()
        pull = await learner.until(Pull)
        sent = (learner.session, pull.round, pull.attempt, room, compute_digest(room), WAIT_S)
        with pytest.raises(PeerError, match="a has no rank 7"):
            await shard.put_contribution("a", *sent, rank=7)
        with pytest.raises(PeerError, match="this fragment needs exactly"):
            await shard.put_contribution("a", *sent, rank=1)
        await contribute(learner, pull, 0.01 * some_values(learner.plan.fragments[pull.fragment].size))
        await learner.until(Announce)
        await stage.end()
        await learner.close()
