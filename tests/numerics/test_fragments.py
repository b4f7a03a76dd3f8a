"""A plan is a function of names, shapes and dtypes alone; its errors name the thing and the fix."""

from __future__ import annotations

import random
from itertools import accumulate
from math import prod

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import (
    Fragment,
    FragmentPlan,
    Piece,
    assemble_tensors,
    difference,
    make_plan,
    most_fragments,
)
from atoll.protocol.errors import PlanError
from atoll.protocol.messages import TensorSpec


def spec(name: str, *shape: int, dtype: str = "float32", embedding: bool = False) -> TensorSpec:
    return TensorSpec(name, shape, dtype, embedding)


def gpt(blocks: int = 4) -> list[TensorSpec]:
    inside = [
        spec(f"blocks.{i}.{part}", *shape) for i in range(blocks) for part, shape in (("mlp", (8, 4)), ("norm", (4,)))
    ]
    return [spec("embed.weight", 50, 4, embedding=True), *inside, spec("head", 4, 3)]


def names(plan: FragmentPlan) -> list[set[str]]:
    return [{piece.label for piece in fragment.pieces} for fragment in plan.fragments]


def rows(tensor: TensorSpec) -> int:
    return tensor.shape[0] if tensor.shape else 1


def width(tensor: TensorSpec) -> int:
    """Of the widest row: elements that stay together."""
    return prod(tensor.shape[1:])


shapes = st.lists(st.integers(1, 40), max_size=3).map(tuple)
models = st.lists(shapes, min_size=1, max_size=30).map(
    lambda drawn: [TensorSpec(f"t{i}", shape, "float32") for i, shape in enumerate(drawn)]
)


def drawn_plan(tensors: list[TensorSpec], data: st.DataObject) -> FragmentPlan:
    return make_plan(tensors, data.draw(st.integers(1, min(60, most_fragments(tensors)))))


@given(models, st.data())
def test_pieces_tile_every_tensor_exactly_once_and_no_fragment_is_empty(
    tensors: list[TensorSpec], data: st.DataObject
) -> None:
    plan = drawn_plan(tensors, data)
    held: dict[str, list[Piece]] = {}
    for fragment in plan.fragments:
        assert fragment.pieces
        for piece in fragment.pieces:
            held.setdefault(piece.tensor.name, []).append(piece)
    assert held.keys() == {tensor.name for tensor in tensors}
    for tensor in tensors:
        pieces = sorted(held[tensor.name], key=lambda piece: piece.first)
        assert all(piece.tensor == tensor and piece.rows >= 1 for piece in pieces)
        assert [piece.first for piece in pieces] == [0, *accumulate(piece.rows for piece in pieces[:-1])]
        assert sum(piece.rows for piece in pieces) == rows(tensor)
        assert sum(piece.size for piece in pieces) == prod(tensor.shape)
        assert all(piece.is_whole == (len(pieces) == 1) for piece in pieces)
    assert plan.tensors == tuple(sorted(tensors, key=lambda tensor: tensor.name))
    assert plan.size == sum(prod(tensor.shape) for tensor in tensors)
    assert plan.largest == max(fragment.size for fragment in plan.fragments)


@given(models, st.data())
def test_pieces_lie_one_after_the_other(tensors: list[TensorSpec], data: st.DataObject) -> None:
    plan = drawn_plan(tensors, data)
    for index, (fragment, start) in enumerate(zip(plan.fragments, plan.starts, strict=True)):
        assert fragment.index == index
        assert start == sum(before.size for before in plan.fragments[:index])
        ends = [o + prod(piece.shape) for o, piece in zip(fragment.offsets, fragment.pieces, strict=True)]
        assert list(fragment.offsets) == [0, *ends[:-1]] and ends[-1] == fragment.size
        assert [part for _, part in fragment.parts] == [slice(*ab) for ab in zip([0, *ends[:-1]], ends, strict=True)]


@given(models, st.data())
def test_no_fragment_is_above_the_mean_by_a_tenth_or_by_a_row(tensors: list[TensorSpec], data: st.DataObject) -> None:
    plan = drawn_plan(tensors, data)
    mean = plan.size / len(plan.fragments)
    for fragment in plan.fragments:
        widest = max(width(piece.tensor) for piece in fragment.pieces)
        assert fragment.size <= max(1.1 * mean, mean + widest)


@given(models, st.data())
def test_a_split_ends_its_fragment(tensors: list[TensorSpec], data: st.DataObject) -> None:
    """So there are few of them, and what a fragment holds of a tensor is one piece."""
    plan = drawn_plan(tensors, data)
    assert sum(len(fragment.pieces) for fragment in plan.fragments) <= len(tensors) + len(plan.fragments) - 1
    for fragment in plan.fragments:
        assert len({piece.tensor.name for piece in fragment.pieces}) == len(fragment.pieces)


@given(models, st.data())
def test_tensors_are_assembled_from_their_pieces(tensors: list[TensorSpec], data: st.DataObject) -> None:
    """What two sides put into the fragments, piece by piece, comes out as it was."""
    plan = drawn_plan(tensors, data)
    whole = {t.name: np.arange(n := prod(t.shape), dtype=np.float32).reshape(t.shape) + 7 * n for t in tensors}

    def values(fragment: Fragment) -> FloatArray:
        cut = [whole[p.tensor.name].reshape(rows(p.tensor), -1)[p.first : p.first + p.rows] for p in fragment.pieces]
        return np.concatenate([piece.ravel() for piece in cut])

    found = assemble_tensors(plan, [values(fragment) for fragment in plan.fragments])
    assert found.keys() == whole.keys()
    assert all(found[name].shape == whole[name].shape and (found[name] == whole[name]).all() for name in whole)


LLAMA_7B = [
    spec("embed.weight", 32000, 4096, embedding=True),
    spec("head.weight", 32000, 4096),
    spec("norm", 4096),
    *(spec(f"blocks.{i}.attention.{part}", 4096, 4096) for i in range(32) for part in "qkvo"),
    *(spec(f"blocks.{i}.mlp.{part}", 11008, 4096) for i in range(32) for part in ("gate", "up")),
    *(spec(f"blocks.{i}.mlp.down", 4096, 11008) for i in range(32)),
    *(spec(f"blocks.{i}.norm{n}", 4096) for i in range(32) for n in range(2)),
]
WIDE_2B = [
    spec("embed.weight", 256_000, 2048, embedding=True),
    *(spec(f"blocks.{i}.attention.{part}", 2048, 2048) for i in range(18) for part in "qo"),
    *(spec(f"blocks.{i}.attention.{part}", 256, 2048) for i in range(18) for part in "kv"),
    *(spec(f"blocks.{i}.mlp.{part}", 16384, 2048) for i in range(18) for part in ("gate", "up")),
    *(spec(f"blocks.{i}.mlp.down", 2048, 16384) for i in range(18)),
    *(spec(f"blocks.{i}.norm{n}", 2048) for i in range(18) for n in range(2)),
]


@pytest.mark.parametrize(
    "tensors", [LLAMA_7B, WIDE_2B, gpt(), [spec("w", 240)], [spec(f"t{n}", 1000) for n in range(25)]]
)
def test_24_fragments_of_any_model_are_balanced(tensors: list[TensorSpec]) -> None:
    plan = make_plan(tensors, 24)
    assert plan.largest <= 1.1 * plan.size / 24


def test_what_is_balanced_without_splits_is_not_split() -> None:
    assert all(piece.is_whole for fragment in make_plan(LLAMA_7B, 24).fragments for piece in fragment.pieces)


@given(models, st.randoms())
def test_the_order_of_the_model_does_not_matter(tensors: list[TensorSpec], shuffle: random.Random) -> None:
    shuffled = list(tensors)
    shuffle.shuffle(shuffled)
    count = min(24, most_fragments(tensors))
    assert make_plan(shuffled, count) == make_plan(tensors, count)


def test_balanced_by_hand() -> None:
    plan = make_plan([spec("a", 6), spec("b", 4), spec("c", 3), spec("d", 3), spec("e", 2)], 2)
    assert names(plan) == [{"a", "d"}, {"b", "c", "e"}]
    assert [fragment.offsets for fragment in plan.fragments] == [(0, 6), (0, 4, 7)]
    assert plan.starts == (0, 9) and plan.size == 18 and plan.largest == 9


def test_a_split_by_hand() -> None:
    """A mean of 30: eight rows of four fill a fragment to just above it, and the rest is dealt behind "b"."""
    plan = make_plan([spec("a", 15, 4), spec("b", 29), spec("c")], 3)
    assert names(plan) == [{"a[0:8]"}, {"b"}, {"a[8:15]", "c"}]
    assert [fragment.size for fragment in plan.fragments] == [32, 29, 29]


def test_a_model_has_as_many_fragments_as_rows() -> None:
    tensors = [spec("wide", 1, 1000), spec("scalar"), spec("vector", 3), spec("matrix", 2, 5)]
    assert most_fragments(tensors) == 7
    assert names(make_plan(tensors, 7)) == [
        {"wide"}, {"matrix[0:1]"}, {"matrix[1:2]"}, {"vector[0:1]"}, {"vector[1:2]"}, {"scalar"}, {"vector[2:3]"}
    ]  # fmt: skip


def test_layers_and_tensors_stay_whole_in_their_plans() -> None:
    for strategy, most in (("layer", 5), ("tensor", 9)):
        assert most_fragments(gpt(), strategy) == most
        plan = make_plan(gpt(), most, strategy)
        assert all(piece.is_whole for fragment in plan.fragments for piece in fragment.pieces)
    assert most_fragments([spec("a", 9)], "layer") == most_fragments([spec("h.0", 9)], "tensor") == 1


def test_layer_deals_blocks_in_strides() -> None:
    plan = make_plan(gpt(4), 3, "layer")
    assert names(plan) == [
        {"embed.weight", "head"},
        {"blocks.0.mlp", "blocks.0.norm", "blocks.2.mlp", "blocks.2.norm"},
        {"blocks.1.mlp", "blocks.1.norm", "blocks.3.mlp", "blocks.3.norm"},
    ]


def test_layer_counts_blocks_as_numbers() -> None:
    plan = make_plan(gpt(12), 13, "layer")
    assert names(plan)[3] == {"blocks.2.mlp", "blocks.2.norm"}


def test_blocks_of_two_stacks_are_different_blocks() -> None:
    stacks = [spec("head", 2), spec("encoder.0.w", 2), spec("decoder.0.w", 2)]
    assert names(make_plan(stacks, 3, "layer")) == [{"head"}, {"decoder.0.w"}, {"encoder.0.w"}]


def test_tensor_deals_single_tensors_in_strides() -> None:
    plan = make_plan(gpt(2), 3, "tensor")
    assert names(plan) == [
        {"embed.weight", "head"},
        {"blocks.0.mlp", "blocks.1.mlp"},
        {"blocks.0.norm", "blocks.1.norm"},
    ]


@pytest.mark.parametrize("strategy", ["balanced", "layer", "tensor"])
def test_one_fragment_is_the_whole_model(strategy: str) -> None:
    assert make_plan(gpt(), 1, strategy).size == sum(prod(tensor.shape) for tensor in gpt())


def test_fingerprint_tells_every_difference() -> None:
    model = gpt()
    variants = [
        make_plan(model, 4),
        make_plan(model, 5),
        make_plan(model, 4, "layer"),
        make_plan([msgspec.structs.replace(model[0], name="other"), *model[1:]], 4),
        make_plan([msgspec.structs.replace(model[0], shape=(4, 50)), *model[1:]], 4),
        make_plan([msgspec.structs.replace(model[0], dtype="bfloat16"), *model[1:]], 4),
        make_plan([msgspec.structs.replace(model[0], embedding=False), *model[1:]], 4),
    ]
    assert len({plan.fingerprint for plan in variants}) == len(variants)


def test_fingerprint_stays_the_same_from_release_to_release() -> None:
    assert make_plan(gpt(), 4).fingerprint == "a84bce4de5b66ad9e3b6c5c55f3251d0d687469141b61c282be74ae5d53fc5f8"


def test_a_plan_survives_msgspec() -> None:
    plan = make_plan(gpt(), 4)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=FragmentPlan) == plan


@pytest.mark.parametrize(
    ("tensors", "count", "strategy", "text"),
    [
        (
            [spec(f"t{i}", 1) for i in range(10)],
            24,
            "balanced",
            "24 fragments asked for, but the model can be cut into 10 at most, its rows: ask for 10 or fewer (--set f",
        ),
        ([spec("a", 1)], 0, "balanced", "0 fragments asked for: ask for 1 to 1 (--set fragments=1)"),
        ([spec("a", 1)], -3, "balanced", "-3 fragments asked for: ask for 1 to 1 (--set fragments=1)"),
        ([], 1, "balanced", "the model has no tensors to train"),
        ([spec("a", 3, 0)], 1, "balanced", "'a' has shape (3, 0) and so no values"),
        ([spec("a", 2**40, 2**40)], 1, "balanced", "no machine holds that many values"),
        ([spec("a", 1), spec("a", 2)], 1, "balanced", "two tensors are named 'a'"),
        ([spec("a", 1, dtype="int8")], 1, "balanced", "'a' is int8, which cannot be synced: use float32, bfloat16"),
        (gpt(2), 5, "layer", "5 were asked for and the model has 2 blocks: ask for 3 or fewer (--set fragments=3)"),
        (gpt(1), 4, "tensor", "has 2 tensors in blocks: ask for 3 or fewer (--set fragments=3)"),
        ([spec("a", 1), spec("b", 1)], 2, "layer", "the model has no blocks"),
        ([spec("h.0", 1), spec("h.1", 1)], 2, "layer", "the model has no tensors outside of blocks"),
    ],
)
def test_errors_name_the_thing_and_the_fix(tensors: list[TensorSpec], count: int, strategy: str, text: str) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(tensors, count, strategy)
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_no_difference_between_equal_models_in_another_order() -> None:
    assert difference(gpt(), gpt()[::-1]) is None


BLOCK = spec("blocks.3.mlp.weight", 512, 2048)


@pytest.mark.parametrize(
    ("here", "run", "text"),
    [
        ([BLOCK], [spec("blocks.3.mlp.weight", 512, 1024)], "(512, 2048) here, (512, 1024) in the run"),
        ([BLOCK], [msgspec.structs.replace(BLOCK, dtype="bfloat16")], "float32 here, bfloat16 in the run"),
        ([BLOCK], [], "(512, 2048) float32 here, missing in the run"),
        ([], [BLOCK], "missing here, (512, 2048) float32 in the run"),
        ([BLOCK], [msgspec.structs.replace(BLOCK, embedding=True)], "no embedding here, an embedding in the run"),
    ],
)
def test_difference_names_the_first(here: list[TensorSpec], run: list[TensorSpec], text: str) -> None:
    same = [spec("a", 1), spec("z", 2)]
    assert difference([*same, *here], [*same, *run]) == (
        f"fragment plan differs from the run's: 'blocks.3.mlp.weight' is {text}"
    )
