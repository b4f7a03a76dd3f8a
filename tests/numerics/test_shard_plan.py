"""Shards' parts are the whole, to the bit: ranges, merge, outer step, codecs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.choices import CODEC
from atoll.numerics import merge as merging
from atoll.numerics.arrays import ByteArray, DoubleArray, FloatArray
from atoll.numerics.codec import Delta, body_nbytes, decode_contribution, encode_contribution, make_codec
from atoll.numerics.fragments import Fragment, FragmentPlan, make_plan, most_fragments
from atoll.numerics.merge import cut_fragment, merge
from atoll.numerics.outer import make_outer, take_outer_step
from atoll.numerics.shard_plan import PartPlace, ShardPlan, exchange_of, locate_bodies, make_shard_plan
from atoll.protocol.messages import TensorSpec, buffer_name

RULES = ("mean", "rda", "rda-row", "rda-row-embeddings")


@st.composite
def models(draw: st.DrawFn) -> FragmentPlan:
    """Rows of many widths, tensors without rows, scalars and buffers."""
    matrix = st.tuples(st.integers(1, 40), st.sampled_from([1, 3, 8, 63, 64, 130]))
    cube = st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 7))
    one_shape = st.one_of(matrix, cube, st.just(()), st.tuples(st.integers(1, 300)))
    shapes = draw(st.lists(one_shape, min_size=1, max_size=8))
    merged = draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes)))
    names = [buffer_name("mean", f"t{i}") if one else f"t{i}" for i, one in enumerate(merged)]
    tensors = [
        TensorSpec(name, tuple(shape), "float32", embedding=draw(st.booleans()) and len(shape) == 2)
        for name, shape in zip(names, shapes, strict=True)
    ]
    return make_plan(tensors, draw(st.integers(1, min(6, most_fragments(tensors)))))


@pytest.fixture(autouse=True, scope="module")
def small_cuts() -> Iterator[None]:
    """So that small tensors are cut like large ones. Whole blocks of every codec but topk still fit into one."""
    with patch.object(merging, "PART", 128):
        yield


def some_values(size: int, *seed: int) -> FloatArray:
    return np.random.default_rng([size, *seed]).normal(size=size).astype(np.float32)


def largest_cut(plan: FragmentPlan) -> int:
    """Of what is not cut further."""
    wide: int = max(cut.values.stop - cut.values.start for part in plan.fragments for cut in cut_fragment(part))
    flat = [piece.size for part in plan.fragments for piece in part.pieces if len(piece.shape) < 2]
    return max([wide, *flat])


# ---- ranges ---------------------------------------------------------------------------------------------------------


@given(models(), st.integers(1, 5))
def test_ranges_tile_every_fragment_and_a_shards_plan_is_of_its_pieces(plan: FragmentPlan, count: int) -> None:
    shards = make_shard_plan(plan, count)
    assert shards == make_shard_plan(plan, count)
    for fragment in plan.fragments:
        ranges = [shards.values(shard, fragment.index) for shard in range(1, count + 1)]
        assert [part.stop for part in ranges[:-1]] == [part.start for part in ranges[1:]]
        assert (ranges[0].start, ranges[-1].stop) == (0, fragment.size)
        rows = [(p.tensor.name, p.first + r) for p in fragment.pieces for r in range(p.rows)]
        held = [shards.part(shard, fragment.index) for shard in range(1, count + 1)]
        assert [(p.tensor.name, p.first + r) for part in held for p in part.pieces for r in range(p.rows)] == rows
        assert [part.size for part in held] == [part.stop - part.start for part in ranges]
        assert shards.holders(fragment.index) == tuple(n for n, part in enumerate(held, start=1) if part.size)


@given(models(), st.integers(1, 5))
def test_the_cuts_of_the_shards_are_the_cuts_of_the_fragment(plan: FragmentPlan, count: int) -> None:
    shards = make_shard_plan(plan, count)
    for fragment in plan.fragments:
        found = [cut.piece for n in range(1, count + 1) for cut in cut_fragment(shards.part(n, fragment.index))]
        assert found == [cut.piece for cut in cut_fragment(fragment)]


@given(models(), st.integers(2, 5))
def test_parts_of_a_fragment_and_shares_of_the_model_are_equal_within_a_cut(plan: FragmentPlan, count: int) -> None:
    shards, cut = make_shard_plan(plan, count), largest_cut(plan)
    for fragment in plan.fragments:
        for shard in range(1, count):
            border = shards.values(shard, fragment.index).stop
            assert abs(border - fragment.size * shard / count) <= cut + 1
    for shard in range(1, count + 1):
        assert abs(shards.plan_of(shard).size - plan.size / count) <= cut + 1


def test_what_a_shard_lacks_of_one_fragment_it_gets_of_the_next() -> None:
    plan = make_plan([TensorSpec(f"t{i}", (100,), "float32") for i in range(4)], 4)
    shards = make_shard_plan(plan, 2)
    assert [shards.plan_of(n).size for n in (1, 2)] == [200, 200]
    assert {shards.holders(fragment) for fragment in range(4)} == {(1,), (2,)}


def test_one_shard_holds_the_plan_of_the_run() -> None:
    plan = make_plan([TensorSpec("a", (40, 64), "float32"), TensorSpec("b", (7,), "float32")], 3)
    assert make_shard_plan(plan, 1).plans == (plan,)


class Table:
    """Where the threads of a test tell each other their norms, turn by turn."""

    def __init__(self, holders: tuple[int, ...]) -> None:
        self._holders, self._turns = holders, threading.Barrier(len(holders))
        self._told: dict[int, DoubleArray] = {}

    def gather(self, shard: int, squares: DoubleArray) -> list[DoubleArray]:
        self._told[shard] = squares
        self._turns.wait(10)
        found = [self._told[n] for n in self._holders]
        self._turns.wait(10)
        return found


def merge_in_shards(
    shards: ShardPlan, fragment: Fragment, deltas: list[FloatArray], weights: list[float], rule: str
) -> dict[int, FloatArray]:
    """Each shard in a thread of its own: they wait for each other's norms."""
    table, places = Table(shards.holders(fragment.index)), shards.places(fragment.index)

    def work(place: PartPlace) -> FloatArray:
        out = np.empty(place.part.size, np.float32)
        exchange = exchange_of(shards, place.shard, fragment.index, rule, partial(table.gather, place.shard))
        given = [np.ascontiguousarray(delta[place.values]) for delta in deltas]
        merge(place.part, given, weights, out, rule, exchange=exchange)
        return out

    with ThreadPoolExecutor(len(places)) as threads:
        return dict(zip((place.shard for place in places), threads.map(work, places), strict=True))


# ---- bits -----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(models(), st.integers(2, 4), st.sampled_from(RULES), st.integers(1, 5))
def test_merging_and_stepping_in_parts_gives_the_bits_of_the_whole(
    plan: FragmentPlan, count: int, rule: str, members: int
) -> None:
    shards, weights = make_shard_plan(plan, count), [1.0 + m for m in range(members)]
    optimizer = make_outer("nesterov", 0.7, 0.5)
    for fragment in plan.fragments:
        deltas = [some_values(fragment.size, fragment.index, m) for m in range(members)]
        theta = some_values(fragment.size, 99)
        state = {slot: some_values(fragment.size, 98) for slot in optimizer.slots()}
        kept = {slot: values.copy() for slot, values in state.items()}
        whole, stepped = np.empty_like(theta), np.empty_like(theta)
        merge(fragment, deltas, weights, whole, rule)
        take_outer_step(optimizer, fragment, theta, stepped, state, whole)
        merged = merge_in_shards(shards, fragment, deltas, weights, rule)
        for shard, part, values in shards.places(fragment.index):
            out, new = merged[shard], np.empty(part.size, np.float32)
            own = {slot: held[values].copy() for slot, held in kept.items()}
            take_outer_step(optimizer, part, theta[values], new, own, out)
            assert out.tobytes() == whole[values].tobytes()
            assert new.tobytes() == stepped[values].tobytes()
            assert all(own[slot].tobytes() == state[slot][values].tobytes() for slot in own)


def encode(codec: str, part: Fragment, delta: Delta) -> tuple[ByteArray, FloatArray]:
    """The body, and what is decoded from it."""
    by = make_codec(codec)
    body, out = np.empty(body_nbytes(by, part), np.uint8), np.empty(part.size, np.float32)
    encode_contribution(by, part, delta, body)
    decode_contribution(by, part, body, out)
    return body, out


@settings(max_examples=40, deadline=None)
@given(models(), st.integers(2, 4), st.sampled_from(CODEC.names()))
def test_every_codec_gives_numbers_rest_and_bytes_of_the_whole(plan: FragmentPlan, count: int, codec: str) -> None:
    shards = make_shard_plan(plan, count, [codec, "fp32"])
    for fragment in plan.fragments:
        base, theta, feedback = (some_values(fragment.size, n) for n in range(3))
        rest, own = np.empty_like(base), np.full_like(base, np.nan)
        whole_body, whole = encode(codec, fragment, Delta(base, theta, feedback, rest))
        delta = Delta(base, theta, feedback, own)
        located = dict(locate_bodies(make_codec(codec), fragment, shards.places(fragment.index)))
        assert list(located) == list(shards.holders(fragment.index))
        for shard, part, values in shards.places(fragment.index):
            body, decoded = encode(codec, part, delta.cut_out(values))
            assert decoded.tobytes() == whole[values].tobytes()
            assert b"".join(whole_body[one].tobytes() for one in located[shard]) == body.tobytes()
        assert own.tobytes() == rest.tobytes()


def test_topk_is_cut_where_its_blocks_begin() -> None:
    plan = make_plan([TensorSpec("a", (64, 64), "float32")], 1)
    at = [make_shard_plan(plan, 3, codecs).ranges[0][0].stop for codecs in ((), ("int8",), ("topk",))]
    assert at[0] == at[1] == 1408  # 11 of 32 cuts, as near to a third as cuts are
    assert at[2] == 1024
