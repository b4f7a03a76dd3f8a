"""What is decoded where it is read is what a whole body decodes to: no bit depends on where it is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.choices import CODEC, MERGE
from atoll.config import Outer
from atoll.numerics import sample
from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import (
    AddingCodec,
    Delta,
    body_nbytes,
    decode_contribution,
    encode_contribution,
    make_codec,
)
from atoll.numerics.compiled import read_only
from atoll.numerics.deltas import EncodedDelta, GivenDelta, as_readable, read_whole, sum_bodies
from atoll.numerics.filter import Filter
from atoll.numerics.fragments import Fragment, FragmentPlan, make_plan
from atoll.numerics.merge import take_mean
from atoll.numerics.screen import NormScreen, measure_part
from atoll.protocol.messages import TensorSpec, buffer_name
from atoll.syncer.parameters import Parameters

WIDTHS = st.sampled_from([1, 3, 63, 64, 65, 128, 200, 1030])


@st.composite
def plans(draw: st.DrawFn) -> FragmentPlan:
    rows, width = draw(st.integers(1, 9)), draw(WIDTHS)
    names = ["a.weight", "b.bias", buffer_name("mean", "norm"), "d.embed"]
    shapes: list[tuple[int, ...]] = [(rows, width), (draw(WIDTHS),), (draw(st.integers(1, 5)), 7), (3, draw(WIDTHS))]
    kept = draw(st.lists(st.sampled_from(range(4)), min_size=1, unique=True))
    return make_plan([TensorSpec(names[n], shapes[n], "float32", embedding=n == 3) for n in kept], 1)


def encode(name: str, part: Fragment, seed: int) -> tuple[EncodedDelta, FloatArray]:
    """Of contributions of all sizes, as it came, and decoded."""
    dice, codec = np.random.default_rng(seed), make_codec(name)
    delta = dice.standard_normal(part.size).astype(np.float32) * np.float32(10.0 ** dice.integers(-3, 3))
    body, decoded = np.empty(body_nbytes(codec, part), np.uint8), np.empty(part.size, np.float32)
    encode_contribution(codec, part, Delta(delta, np.zeros_like(delta)), body)
    decode_contribution(codec, part, body, decoded)
    return EncodedDelta(codec, part, body), decoded


@pytest.mark.parametrize("name", CODEC.names())
@settings(max_examples=12, deadline=None)
@given(plan=plans(), seed=st.integers(0, 99), data=st.data())
def test_runs_are_what_the_whole_has_there(name: str, plan: FragmentPlan, seed: int, data: st.DataObject) -> None:
    encoded, decoded = encode(name, plan.fragments[0], seed)
    assert read_whole(encoded).tobytes() == decoded.tobytes()
    for number, (piece, at) in enumerate(plan.fragments[0].parts):
        size = data.draw(st.integers(1, piece.size))
        starts = np.array(data.draw(st.lists(st.integers(0, piece.size - size), min_size=1, max_size=3)))
        out = np.full(size * len(starts), np.nan, np.float32)
        encoded.read_runs(number, read_only(starts), out)
        assert out.tobytes() == b"".join(decoded[at][start : start + size].tobytes() for start in starts)


@pytest.mark.parametrize("name", CODEC.names())
@settings(max_examples=12, deadline=None)
@given(plan=plans(), seed=st.integers(0, 99), members=st.integers(1, 6), rule=st.sampled_from(MERGE.names()))
def test_a_round_of_bodies_is_the_round_of_what_they_decode_to(
    name: str, plan: FragmentPlan, seed: int, members: int, rule: str
) -> None:
    part = plan.fragments[0]
    both = [encode(name, part, 10 * seed + m) for m in range(members)]
    dice = np.random.default_rng(seed)
    factors = [dice.random(len(part.pieces)).astype(np.float32) for _ in both] if seed % 2 else []
    found = []
    rounds: list[list[GivenDelta]] = [[one for one, _ in both], [one for _, one in both]]
    for threads, given_deltas in zip((3, 1), rounds, strict=True):
        parameters = Parameters(plan, Outer(merge=rule))
        parameters.threads = threads
        parameters.commit_initial()
        for version in range(3):  # the last one with members on an older version
            bases = [max(0, version - m % 2) for m in range(members)]
            weights = [1.0 + m for m in range(members)]
            parameters.stage_merge(0, given_deltas, weights, factors, bases)
            found.append((parameters.outer_gradient(0).tobytes(), parameters.staged_values(0).tobytes()))
            parameters.commit_version(0, version + 1, version + 1)
    assert found[:3] == found[3:]


@pytest.mark.parametrize("name", CODEC.names())
@settings(max_examples=12, deadline=None)
@given(plan=plans(), seed=st.integers(0, 99), threads=st.integers(1, 3))
def test_a_body_is_measured_and_judged_as_what_it_decodes_to(
    name: str, plan: FragmentPlan, seed: int, threads: int
) -> None:
    part = plan.fragments[0]
    both = [encode(name, part, 10 * seed + m) for m in range(3)]
    committed = np.full(part.size, 0.5, np.float32)
    for one, decoded in both:
        here, there = measure_part(part, one, committed, threads), measure_part(part, decoded, committed)
        assert [np.asarray(figure).tobytes() for figure in here] == [np.asarray(figure).tobytes() for figure in there]
    here_judged, there_judged = (
        Filter(plan, threads).judge(0, ["a", "b", "c"], [pair[n] for pair in both]) for n in range(2)
    )
    for one, other in zip(here_judged, there_judged, strict=True):
        assert (one.factors == other.factors).all() and one.agreement == other.agreement


@pytest.mark.parametrize("name", [name for name in CODEC.names() if isinstance(make_codec(name), AddingCodec)])
@settings(max_examples=12, deadline=None)
@given(plan=plans(), seed=st.integers(0, 99), members=st.integers(2, 9), data=st.data())
def test_a_sum_of_bodies_is_the_sum_of_what_they_decode_to(
    name: str, plan: FragmentPlan, seed: int, members: int, data: st.DataObject
) -> None:
    part, shares = plan.fragments[0], np.random.default_rng(seed).random(members)
    both = [encode(name, part, 10 * seed + m) for m in range(members)]
    for number, (piece, at) in enumerate(part.parts):
        expected, size = np.empty(piece.size, np.float32), data.draw(st.integers(1, piece.size))
        take_mean(np.stack([decoded[at] for _, decoded in both]), shares, expected)
        start, out = data.draw(st.integers(0, piece.size - size)), np.full(size, np.nan, np.float32)
        found = sum_bodies([one for one, _ in both], number, shares)
        assert found is not None
        found.add_values(start, out)
        assert out.tobytes() == expected[start : start + size].tobytes()


def test_only_bodies_of_one_codec_are_summed_straight() -> None:
    plan = make_plan([TensorSpec("t", (3, 100), "float32")], 1)
    part, shares = plan.fragments[0], np.ones(2)
    (one, decoded), (other, _), (sparse, _) = (encode(name, part, 1) for name in ("bf16", "int4", "topk"))
    assert sum_bodies([one, one], 0, shares) is not None
    for others in ([one, other], [one, as_readable(part, decoded)], [sparse, sparse]):
        assert sum_bodies(others, 0, shares) is None


@pytest.mark.parametrize("name", CODEC.names())
def test_a_sample_of_a_body_is_that_of_what_it_decodes_to(name: str) -> None:
    """Of fragments that are large enough to be sampled; blocks lie at the beginning of a piece or at its end."""
    shapes = [(300, 1000), (401, 1030), (9_000,), (64, 64)]
    plan = make_plan([TensorSpec(f"t{n}", shape, "float32") for n, shape in enumerate(shapes)], 1)
    encoded, decoded = encode(name, plan.fragments[0], 1)
    for seed in range(4):
        drawn = sample.draw_sample(plan.fragments[0], [seed])
        assert drawn.blocks and drawn.read(encoded, 2).tobytes() == drawn.take(decoded).tobytes()


def test_a_value_that_is_not_finite_is_counted_in_a_body() -> None:
    plan = make_plan([TensorSpec("t", (300, 1000), "float32")], 1)
    delta = np.ones(plan.size, np.float32)
    delta[[7, 299_999]] = np.nan, np.inf
    given_delta = EncodedDelta(make_codec("fp32"), plan.fragments[0], delta.view(np.uint8))
    assert NormScreen(plan, threads=2).judge(0, given_delta) == "2 of 300000 values are not finite"
