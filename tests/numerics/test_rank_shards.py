"""What ranks send to shards is the whole, to the bit, however boxes and ranges cut it; and both ends cut it alike."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.numerics.test_rank_plan import Ranks, box, decode, encode, plans_of, rank_models, some_values

from atoll.choices import CODEC
from atoll.numerics import merge as merging
from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import body_nbytes, make_codec
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.numerics.rank_plan import RankPlan, make_rank_plans
from atoll.numerics.rank_shards import RankShards, cut_rank_plan
from atoll.numerics.shard_plan import ShardPlan, locate_bodies, make_shard_plan
from atoll.protocol.messages import TensorSpec

Drawn = tuple[FragmentPlan, Ranks]
SHARDS = st.integers(1, 4)


@pytest.fixture(autouse=True, scope="module")
def small_cuts() -> Iterator[None]:
    """So that small tensors are cut like large ones."""
    with patch.object(merging, "PART", 8):
        yield


class Layout:
    """A model, its ranks and its shards: `mine` as couriers have it, `theirs` as shards have it, by shard and rank."""

    def __init__(self, drawn: Drawn, count: int, codec: str = "fp32") -> None:
        self.plan, ranks = drawn
        self.shards: ShardPlan = make_shard_plan(self.plan, count, [codec])
        self.ranks: list[RankPlan] = plans_of(self.plan, ranks)
        self.mine: list[RankShards] = [cut_rank_plan(one, self.shards) for one in self.ranks]
        self.theirs = {n: make_rank_plans(self.shards.plan_of(n), ranks) for n in range(1, count + 1)}

    def take(self, rank: int, fragment: int, whole: FloatArray) -> FloatArray:
        of = self.ranks[rank]
        of.take(fragment, whole, local := np.full(of.plan.fragments[fragment].size, np.nan, np.float32))
        return local


@given(rank_models(), SHARDS)
def test_parts_tile_a_ranks_array_and_are_what_the_shards_have(drawn: Drawn, count: int) -> None:
    layout = Layout(drawn, count)
    for rank, (of, mine) in enumerate(zip(layout.ranks, layout.mine, strict=True)):
        for fragment, parts in enumerate(mine.parts):
            places = [*(one.front for one in parts), *(one.behind for one in parts)]
            covered = [at for place in places for at in range(place.start, place.stop)]
            assert covered == list(range(of.plan.fragments[fragment].size))
            assert sum(one.sent.size for one in parts) == of.sent(fragment).size == mine.sent(fragment).size
            known = {one.shard: (one.held, one.sent) for one in parts}
            for shard, theirs in layout.theirs.items():
                held, sent = theirs[rank].plan.fragments[fragment], theirs[rank].sent(fragment)
                assert known.get(shard, (held, sent)) == (held, sent)
                assert (shard in known) == (held.size > 0)


@given(rank_models(), SHARDS)
def test_every_value_of_a_shards_part_comes_from_one_rank(drawn: Drawn, count: int) -> None:
    layout = Layout(drawn, count)
    for fragment in layout.plan.fragments:
        values = some_values(fragment)
        held = {n: np.zeros(layout.shards.part(n, fragment.index).size, np.float32) for n in layout.theirs}
        times = {n: np.zeros_like(part) for n, part in held.items()}
        for rank, mine in enumerate(layout.mine):
            local = layout.take(rank, fragment.index, values)
            for place in mine.places_sent(fragment.index):
                sent, plan = local[place.values], layout.theirs[place.shard][rank]
                plan.scatter(fragment.index, sent, held[place.shard])
                once = np.zeros_like(held[place.shard])
                plan.scatter(fragment.index, np.ones_like(sent), once)
                times[place.shard] += once
        for n, part in held.items():
            assert part.tobytes() == values[layout.shards.values(n, fragment.index)].tobytes()
            assert (times[n] == 1).all()


@given(rank_models(), SHARDS)
def test_what_shards_serve_gives_the_ranks_array(drawn: Drawn, count: int) -> None:
    layout = Layout(drawn, count)
    for fragment in layout.plan.fragments:
        values = some_values(fragment)
        for rank, mine in enumerate(layout.mine):
            found = np.full(layout.ranks[rank].plan.fragments[fragment.index].size, np.nan, np.float32)
            for one in mine.parts[fragment.index]:
                part = values[layout.shards.values(one.shard, fragment.index)].copy()
                served = np.empty(one.held.size, np.float32)
                layout.theirs[one.shard][rank].take(fragment.index, part, served)
                found[one.front], found[one.behind] = served[: one.sent.size], served[one.sent.size :]
            assert found.tobytes() == layout.take(rank, fragment.index, values).tobytes()


@pytest.mark.parametrize("codec", CODEC.names())
@given(rank_models(), SHARDS)
def test_bodies_are_cut_out_of_one_that_decodes_as_without_shards(codec: str, drawn: Drawn, count: int) -> None:
    """Of every codec: tensors here are smaller than a block of topk, which is therefore cut at tensors."""
    layout, by = Layout(drawn, count, codec), make_codec(codec)
    for fragment in layout.plan.fragments:
        base, theta = some_values(fragment), some_values(fragment, seed=1)
        for rank, mine in enumerate(layout.mine):
            of, sent = layout.ranks[rank].sent(fragment.index), mine.sent(fragment.index)
            front = [layout.take(rank, fragment.index, values)[: sent.size] for values in (base, theta)]
            alone, body = decode(codec, of, encode(codec, of, *front)), encode(codec, sent, *front)
            for shard, slices in locate_bodies(by, sent, mine.places_sent(fragment.index)):
                place = next(one for one in mine.places_sent(fragment.index) if one.shard == shard)
                cut = np.concatenate([body[one] for one in slices])
                theirs = layout.theirs[shard][rank].sent(fragment.index)
                assert cut.size == body_nbytes(by, theirs)
                assert decode(codec, theirs, cut).tobytes() == alone[place.values].tobytes()


@pytest.mark.parametrize("codec", CODEC.names())
def test_blocks_that_run_over_rows_begin_anew_at_a_shard(codec: str) -> None:
    """With topk a rank's box begins elsewhere than the blocks of the whole tensor: then bits depend on the shards."""
    tensor = TensorSpec("w", (96, 64), "float32")
    plan = make_plan([tensor], 1)
    layout = Layout((plan, [(box(tensor, (0, 40), (0, 64)),), (box(tensor, (40, 96), (0, 64)),)]), 2, codec)
    of, mine = layout.ranks[1], layout.mine[1]
    assert [one.shard for one in mine.parts[0]] == [1, 2]
    values = some_values(of.sent(0))
    alone = decode(codec, of.sent(0), encode(codec, of.sent(0), values, np.zeros_like(values)))
    cut = decode(codec, mine.sent(0), encode(codec, mine.sent(0), values, np.zeros_like(values)))
    assert (cut.tobytes() == alone.tobytes()) == (codec != "topk")


def test_one_shard_gets_all_that_the_rank_has() -> None:
    tensors = [TensorSpec("w", (6, 4), "float32"), TensorSpec("b", (5,), "float32")]
    plan = make_plan(tensors, 2)
    ranks = [(box(tensors[0], (0, 4), (0, 4)), box(tensors[1], (0, 5), sends=True)), (box(tensors[0], (4, 6), (0, 4)),)]
    layout = Layout((plan, ranks), 1)
    for of, mine in zip(layout.ranks, layout.mine, strict=True):
        assert mine.fragments_sent == of.fragments_sent
        assert [part[0].held for part in mine.parts if part] == [part for part in of.plan.fragments if part.size]
