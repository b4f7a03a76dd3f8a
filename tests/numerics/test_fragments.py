"""A plan is a function of names, shapes and dtypes alone; its errors name the thing and the fix."""

from __future__ import annotations

import random
from itertools import product
from math import prod

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.numerics.fragments import FragmentPlan, default_fragments, difference, make_plan
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
    return [{tensor.name for tensor in fragment.tensors} for fragment in plan.fragments]


shapes = st.lists(st.integers(1, 40), max_size=3).map(tuple)
models = st.lists(shapes, min_size=1, max_size=30).map(
    lambda drawn: [TensorSpec(f"t{i}", shape, "float32") for i, shape in enumerate(drawn)]
)


@given(models, st.data())
@settings(max_examples=150, deadline=None)
def test_every_tensor_is_in_exactly_one_fragment(tensors: list[TensorSpec], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(tensors)))
    plan = make_plan(tensors, count)
    held = [tensor for fragment in plan.fragments for tensor in fragment.tensors]
    assert sorted(held, key=lambda t: t.name) == sorted(tensors, key=lambda t: t.name)
    assert len(plan.fragments) == count and all(fragment.tensors for fragment in plan.fragments)
    assert plan.size == sum(prod(tensor.shape) for tensor in tensors)
    assert plan.largest == max(fragment.size for fragment in plan.fragments)


@given(models, st.data())
@settings(max_examples=100, deadline=None)
def test_tensors_lie_one_after_the_other(tensors: list[TensorSpec], data: st.DataObject) -> None:
    plan = make_plan(tensors, data.draw(st.integers(1, len(tensors))))
    for index, (fragment, start) in enumerate(zip(plan.fragments, plan.starts, strict=True)):
        assert fragment.index == index
        assert start == sum(before.size for before in plan.fragments[:index])
        ends = [o + prod(t.shape) for o, t in zip(fragment.offsets, fragment.tensors, strict=True)]
        assert list(fragment.offsets) == [0, *ends[:-1]] and ends[-1] == fragment.size


@given(st.lists(st.integers(1, 30), min_size=3, max_size=7), st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_balanced_is_within_four_thirds_of_the_best_possible(sizes: list[int], count: int) -> None:
    tensors = [spec(f"t{i}", size) for i, size in enumerate(sizes)]
    deals = product(range(count), repeat=len(sizes))
    best = min(
        max(sum(s for s, b in zip(sizes, deal, strict=True) if b == bin) for bin in range(count)) for deal in deals
    )
    assert 3 * count * make_plan(tensors, count).largest <= (4 * count - 1) * best


@given(models, st.randoms())
@settings(max_examples=100, deadline=None)
def test_the_order_of_the_model_does_not_matter(tensors: list[TensorSpec], shuffle: random.Random) -> None:
    shuffled = list(tensors)
    shuffle.shuffle(shuffled)
    count = default_fragments(len(tensors))
    assert make_plan(shuffled, count) == make_plan(tensors, count)


def test_balanced_by_hand() -> None:
    plan = make_plan([spec("a", 5), spec("b", 4), spec("c", 3), spec("d", 3), spec("e", 3)], 2)
    assert names(plan) == [{"a", "d"}, {"b", "c", "e"}]
    assert [fragment.offsets for fragment in plan.fragments] == [(0, 5), (0, 4, 7)]
    assert plan.starts == (0, 8) and plan.size == 18 and plan.largest == 10


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
    assert make_plan(gpt(), 4).fingerprint == "1ce3f5df7c0ab045bfdfd8068de40cf70c921ad1a38d92a2c4ce34d4fe9b5158"


def test_a_plan_survives_msgspec() -> None:
    plan = make_plan(gpt(), 4)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=FragmentPlan) == plan


def test_default_fragments() -> None:
    assert [default_fragments(n) for n in (1, 10, 24, 300)] == [1, 10, 24, 24]


@pytest.mark.parametrize(
    ("tensors", "count", "strategy", "text"),
    [
        (
            [spec(f"t{i}", 1) for i in range(10)],
            24,
            "balanced",
            "24 fragments asked for, but the model has 10 tensors: ask for 10 or fewer (--set fragments=10)",
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
