"""Ranks' parts are the whole, however boxes cut it; boxes that are not the whole are refused in one line."""

from __future__ import annotations

from math import prod

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.codec import Delta, body_nbytes, decode_contribution, encode_contribution, make_codec
from atoll.numerics.fragments import Fragment, FragmentPlan, make_plan, most_fragments
from atoll.numerics.rank_plan import RankPlan, check_tiling, make_rank_plan
from atoll.protocol.errors import PlanError
from atoll.protocol.messages import Box, RankBoxes, TensorSpec, buffer_name

Ranks = list[RankBoxes]

W = TensorSpec("w", (6, 4), "float32")
B = TensorSpec("b", (5,), "bfloat16")
S = TensorSpec("s", (), "float32")


def box(tensor: TensorSpec, *sides: tuple[int, int], sends: bool = True) -> Box:
    """Sides as start and stop."""
    return Box(tensor.name, tuple(a for a, _ in sides), tuple(b - a for a, b in sides), sends)


def whole(tensor: TensorSpec, *, sends: bool = True) -> Box:
    return Box(tensor.name, (0,) * len(tensor.shape), tensor.shape, sends)


# ---- models and how ranks cut them ----------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> list[TensorSpec]:
    shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=8))
    merged = draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes)))
    names = [buffer_name("mean", f"t{i}") if buffer else f"t{i}" for i, buffer in enumerate(merged)]
    return [TensorSpec(name, shape, "float32") for name, shape in zip(names, shapes, strict=True)]


@st.composite
def cut_side(draw: st.DrawFn, length: int, parts: int) -> list[tuple[int, int]]:
    """Uneven, and some of them perhaps empty."""
    cuts = sorted(draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1)))
    return list(zip([0, *cuts], [*cuts, length], strict=True))


@st.composite
def deal_tensor(draw: st.DrawFn, tensor: TensorSpec, count: int) -> list[Box | None]:
    """The box of each rank: shards along one side, a grid of rows and columns, or copies of which one is sent."""
    along = draw(st.integers(-1, len(tensor.shape) - 1))
    if along < 0:
        sender = draw(st.integers(0, count - 1))
        return [
            whole(tensor, sends=rank == sender) if rank == sender or draw(st.booleans()) else None
            for rank in range(count)
        ]
    sides = [(0, length) for length in tensor.shape]
    if along == 1 and count % 2 == 0:
        rows, columns = draw(cut_side(tensor.shape[0], count // 2)), draw(cut_side(tensor.shape[1], 2))
        return [box(tensor, rows[rank // 2], columns[rank % 2], *sides[2:]) for rank in range(count)]
    shards = draw(cut_side(tensor.shape[along], count))
    return [box(tensor, *sides[:along], shards[rank], *sides[along + 1 :]) for rank in range(count)]


@st.composite
def rank_models(draw: st.DrawFn) -> tuple[FragmentPlan, Ranks]:
    tensors, count = draw(models()), draw(st.integers(1, 4))
    plan = make_plan(tensors, draw(st.integers(1, min(12, most_fragments(tensors)))))
    dealt = [draw(deal_tensor(tensor, count)) for tensor in tensors]
    ranks = [tuple(one for tensor in dealt if (one := tensor[rank]) is not None) for rank in range(count)]
    return plan, ranks


def plans_of(plan: FragmentPlan, ranks: Ranks) -> list[RankPlan]:
    check_tiling(plan.tensors, ranks)
    return [make_rank_plan(plan, boxes) for boxes in ranks]


def some_values(fragment: Fragment, seed: int = 0) -> FloatArray:
    return np.random.default_rng([seed, fragment.index]).normal(size=fragment.size).astype(np.float32)


# ---- laws -----------------------------------------------------------------------------------------------------------


@given(rank_models())
def test_what_all_ranks_hold_of_an_array_gives_it_back(drawn: tuple[FragmentPlan, Ranks]) -> None:
    plan, ranks = drawn
    for fragment in plan.fragments:
        values, back = some_values(fragment), np.full(fragment.size, np.nan, np.float32)
        for one in plans_of(plan, ranks):
            local = np.full(one.plan.fragments[fragment.index].size, np.nan, np.float32)
            one.take(fragment.index, values, local)
            one.scatter(fragment.index, local[: one.sent(fragment.index).size], back)
        assert back.tobytes() == values.tobytes()


@given(rank_models())
def test_what_a_rank_sends_is_the_front_of_its_array_and_it_takes_back_what_it_put(
    drawn: tuple[FragmentPlan, Ranks],
) -> None:
    plan, ranks = drawn
    for one in plans_of(plan, ranks):
        assert one.plan.largest == max(part.size for part in one.plan.fragments)
        for local in one.plan.fragments:
            sent, all_pieces = one.sent(local.index), local.pieces
            assert sent.pieces == all_pieces[: len(sent.pieces)]
            for pieces in (sent.pieces, all_pieces[len(sent.pieces) :]):
                assert list(pieces) == sorted(pieces, key=lambda piece: (piece.tensor.name, piece.first))
            values, whole_values = some_values(sent), some_values(plan.fragments[local.index], seed=1)
            one.scatter(local.index, values, whole_values)
            taken = np.full(local.size, np.nan, np.float32)
            one.take(local.index, whole_values, taken)
            assert taken[: sent.size].tobytes() == values.tobytes()
            assert not np.isnan(taken).any()


@given(rank_models())
def test_pieces_are_of_the_boxes_shapes_and_hold_each_of_their_rows_once(drawn: tuple[FragmentPlan, Ranks]) -> None:
    plan, ranks = drawn
    known = {tensor.name: tensor for tensor in plan.tensors}
    for one, boxes in zip(plans_of(plan, ranks), ranks, strict=True):
        assert one.plan.size == sum(prod(box.sizes) for box in boxes)
        assert sum(map(_size, one.fragments_sent)) == sum(prod(box.sizes) for box in boxes if box.sends)
        for box in boxes:
            if prod(box.sizes):
                spec = next(tensor for tensor in one.plan.tensors if tensor.name == box.tensor)
                assert spec == msgspec.structs.replace(known[box.tensor], shape=box.sizes)


def _size(fragment: Fragment) -> int:
    return fragment.size


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@given(rank_models())
def test_bodies_of_ranks_decode_to_the_bits_of_the_body_of_the_whole(
    codec: str, drawn: tuple[FragmentPlan, Ranks]
) -> None:
    plan, ranks = drawn
    plans = plans_of(plan, ranks)
    for fragment in plan.fragments:
        base, theta = some_values(fragment), some_values(fragment, seed=1)
        expected = decode(codec, fragment, encode(codec, fragment, base, theta))
        found = np.full(fragment.size, np.nan, np.float32)
        for one in plans:
            part, local = one.sent(fragment.index), one.plan.fragments[fragment.index]
            mine = [np.empty(local.size, np.float32) for _ in range(2)]
            for values, to in zip((base, theta), mine, strict=True):
                one.take(fragment.index, values, to)
            body = encode(codec, part, *(values[: part.size] for values in mine))
            one.scatter(fragment.index, decode(codec, part, body), found)
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("codec", ["int8", "int4", "topk"])
def test_codecs_with_blocks_work_on_boxes_as_on_any_tensor(codec: str) -> None:
    tensor = TensorSpec("w", (8, 200), "float32")
    plan = make_plan([tensor], 2)
    for one in plans_of(plan, [(box(tensor, (0, 8), (0, 130)),), (box(tensor, (0, 8), (130, 200)),)]):
        part = one.sent(0)
        base, theta = some_values(part), some_values(part, seed=1)
        decoded = decode(codec, part, encode(codec, part, base, theta))
        assert np.isfinite(decoded).all() and decoded.any()


def encode(codec: str, part: Fragment, base: FloatArray, theta: FloatArray) -> ByteArray:
    by = make_codec(codec)
    body = np.empty(body_nbytes(by, part), np.uint8)
    encode_contribution(by, part, Delta(base, theta), body)
    return body


def decode(codec: str, part: Fragment, body: ByteArray) -> FloatArray:
    values = np.empty(part.size, np.float32)
    decode_contribution(make_codec(codec), part, body, values)
    return values


def test_a_rank_that_holds_nothing_has_an_empty_plan() -> None:
    plan = make_plan([W, B], 3)
    full, none = plans_of(plan, [(whole(W), whole(B)), (box(W, (6, 6), (0, 4)),)])
    assert none.plan.largest == none.plan.size == 0 and len(none.plan.fragments) == 3
    assert all(not part.pieces and not part.offsets and part.parts == () for part in none.plan.fragments)
    assert full.plan.fragments == plan.fragments and full.plan.fingerprint == plan.fingerprint
    none.scatter(0, np.empty(0, np.float32), np.empty(plan.fragments[0].size, np.float32))
    none.take(0, np.empty(plan.fragments[0].size, np.float32), np.empty(0, np.float32))


def test_copies_of_a_tensor_lie_behind_what_is_sent() -> None:
    plan = make_plan([W, B], 1)
    first, second = plans_of(plan, [(whole(W), whole(B, sends=False)), (whole(W, sends=False), whole(B))])
    assert [piece.label for piece in first.plan.fragments[0].pieces] == ["w", "b"]
    assert [piece.label for piece in second.plan.fragments[0].pieces] == ["b", "w"]
    assert (first.sent(0).size, second.sent(0).size) == (24, 5)


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (
            [[box(W, (0, 2), (0, 4)), whole(B)], [box(W, (3, 6), (0, 4))]],
            "of the 24 values of 'w' 20 are sent, by ranks 0 to 1: the",
        ),
        ([[box(W, (0, 5), (0, 4)), whole(B)]], "of the 24 values of 'w' 20 are sent, by rank 0: the others"),
        ([[whole(W)], []], "no rank sends 'b'"),
        ([[whole(W), whole(B, sends=False)]], "no rank sends 'b'"),
        ([[whole(W), box(B, (2, 2))]], "no rank sends 'b'"),
        (
            [[box(W, (0, 4), (0, 4)), whole(B)], [box(W, (3, 6), (0, 4))]],
            "rank 0 and rank 1 both send a part of 'w': [0:4, 0:4] and [3:6, 0:4] overlap",
        ),
        (  # as many values as the tensor has, but some twice
            [[box(W, (0, 6), (0, 2)), whole(B)], [box(W, (0, 6), (1, 3))]],
            "rank 0 and rank 1 both send a part of 'w'",
        ),
        ([[whole(W), whole(B)], [whole(W)]], "rank 0 and rank 1 both send a part of 'w'"),
        ([[whole(B), box(W, (0, 7), (0, 4))]], "rank 0's box of 'w', [0:7, 0:4], is outside of the tensor"),
        ([[whole(W), whole(B)], [box(W, (0, 6), (3, 5), sends=False)]], "rank 1's box of 'w', [0:6, 3:5], is outside"),
        ([[whole(W), Box("b", (0, 0), (5, 1))]], "rank 0's box of 'b' has 2 offsets and 2 sizes"),
        ([[whole(W), Box("b", (0,), ())]], "rank 0's box of 'b' has 1 offsets and 0 sizes"),
        ([[whole(W), whole(B)], [Box("other", (0,), (0,))]], "rank 1 has a box of 'other', which is no tensor"),
        ([[whole(B), box(W, (0, 3), (0, 4)), box(W, (3, 6), (0, 4))]], "rank 0 has two boxes of 'w'"),
        ([], "no rank sends 'w'"),
    ],
)
def test_boxes_that_are_not_the_model_are_refused_in_one_line(ranks: list[list[Box]], says: str) -> None:
    with pytest.raises(PlanError) as refused:
        check_tiling([W, B], [tuple(boxes) for boxes in ranks])
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_a_scalar_is_sent_by_one_rank() -> None:
    check_tiling([S], [(whole(S),), (whole(S, sends=False),)])
    with pytest.raises(PlanError, match="rank 0 and rank 1 both send a part of 's'"):
        check_tiling([S], [(whole(S),), (whole(S),)])


@given(rank_models(), st.data())
def test_one_box_less_is_a_hole_and_one_sent_twice_an_overlap(
    drawn: tuple[FragmentPlan, Ranks], data: st.DataObject
) -> None:
    plan, ranks = drawn
    check_tiling(plan.tensors, ranks)
    sent = [(rank, box) for rank, boxes in enumerate(ranks) for box in boxes if box.sends and 0 not in box.sizes]
    rank, chosen = data.draw(st.sampled_from(sent))
    without = [tuple(box for box in boxes if box is not chosen) for boxes in ranks]
    with pytest.raises(PlanError, match=r"no rank sends|the others by nobody"):
        check_tiling(plan.tensors, without)
    with pytest.raises(PlanError, match=f"rank {rank} and rank {len(ranks)} both send a part of {chosen.tensor!r}"):
        check_tiling(plan.tensors, [*ranks, (chosen,)])


def test_thousands_of_boxes_of_one_tensor_are_compared_with_their_neighbours_only() -> None:
    """A grid of 64 × 64: comparing each with each in Python would be 8 million pairs."""
    tensor = TensorSpec("w", (640, 640), "float32")
    grid = [
        (box(tensor, (10 * row, 10 * row + 10), (10 * column, 10 * column + 10)),)
        for row in range(64)
        for column in range(64)
    ]
    check_tiling([tensor], grid)
    grid[77] = (box(tensor, (10, 20), (129, 140)),)
    with pytest.raises(PlanError, match="rank 76 and rank 77"):
        check_tiling([tensor], grid)
