"""What arrives in the lockstep loop, of all learners at once, is what the shipped codec decodes: bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from lockstep_codec import find_blocks, transfer, work_on_blocks
from lockstep_learner import Sender
from shared_moments import transfer_moments
from tests.numerics.moment_bodies import decode_moment

from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import Delta, body_nbytes, count_values, decode_contribution, encode_contribution, make_codec
from atoll.numerics.fragments import Fragment, make_plan, row_lengths
from atoll.numerics.moments import Moment, encode_moment
from atoll.protocol.messages import TensorSpec

SHAPES = {"a": (3, 70), "b": (24,), "c": (5, 64), "d": (2, 1300), "e": (), "f": (16, 64), "g": (2, 3, 128), "h": (320,)}
"""Rows of whole blocks and of others, next to each other, and less than a block."""
LEARNERS = 3


@pytest.fixture
def part() -> Fragment:
    (part,) = make_plan([TensorSpec(name, shape, "float32") for name, shape in SHAPES.items()], 1).fragments
    return part


def draw(size: int, seed: int) -> torch.Tensor:
    """Of many sizes, some zero, some too small to have a scale, some equal."""
    dice = np.random.default_rng(seed)
    values = dice.normal(size=(LEARNERS, size)) * 10.0 ** dice.integers(-9, 3, size=(LEARNERS, size))
    values[:, :100] = 0.0
    values[:, 300:400] *= 1e-38
    values[:, 900:2000] = np.round(values[:, 900:2000])
    return torch.from_numpy(values.astype(np.float32))


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4", "topk"])
def test_what_arrives_of_all_learners_is_what_the_shipped_codec_decodes(name: str, part: Fragment) -> None:
    codec, rows, values = make_codec(name), row_lengths(part.pieces), draw(part.size, 1)
    arrived = transfer(codec, values, rows)
    for own, ours in zip(values.numpy(), arrived.numpy(), strict=True):
        body, theirs = np.empty(codec.nbytes(rows), np.uint8), np.empty_like(own)
        codec.encode(own, rows, body)
        codec.decode(body, rows, theirs)
        assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("squared", [False, True])
def test_what_arrives_of_moments_is_what_the_shipped_codec_decodes(squared: bool, part: Fragment) -> None:
    codec, rows, values = make_codec("int8"), row_lengths(part.pieces), draw(part.size, 2)
    values = values.abs() if squared else values
    arrived, start = transfer_moments(codec, values, rows, squared=squared), 0
    for count, width in rows:
        here = slice(start, start + count * width)
        moment = Moment(0, 0, squared, ((count, width),), slice(0, codec.nbytes(((count, width),))))
        for own, ours in zip(values[:, here].numpy(), arrived[:, here].numpy(), strict=True):
            body = np.empty(moment.data.stop, np.uint8)
            encode_moment(codec, moment, own, body)
            assert np.array_equal(ours.view(np.uint32), decode_moment(codec, moment, body).view(np.uint32))
        start = here.stop
    assert start == count_values(rows)


@pytest.mark.parametrize("name", ["bf16", "int4", "topk"])
def test_contributions_with_feedback_are_the_shipped_ones_where_learners_miss_rounds(name: str, part: Fragment) -> None:
    codec, sender = make_codec(name), Sender(make_codec(name))
    feedback: list[FloatArray | None] = [None] * LEARNERS
    for number, members in enumerate(([0, 1, 2], [0, 2], [1, 2], [0, 1, 2])):
        bases, thetas = draw(part.size, 10 + number), draw(part.size, 20 + number)
        given = ([own[m] for m in members] for own in (bases, thetas))
        for m, ours in zip(members, sender.contribute(part, members, *given), strict=True):
            rest = np.empty(part.size, np.float32) if codec.needs_feedback else None
            body, theirs = np.empty(body_nbytes(codec, part), np.uint8), np.empty(part.size, np.float32)
            encode_contribution(codec, part, Delta(bases[m].numpy(), thetas[m].numpy(), feedback[m], rest), body)
            decode_contribution(codec, part, body, theirs)
            feedback[m] = rest
            assert np.array_equal(ours.numpy(), theirs)
    assert sender.sent == {m: 3 * body_nbytes(codec, part) for m in (0, 1)} | {2: 4 * body_nbytes(codec, part)}


def test_full_blocks_of_tensors_next_to_each_other_are_worked_on_at_once() -> None:
    int8, topk = make_codec("int8"), make_codec("topk")
    assert [*find_blocks(int8, ((5, 64), (1, 320), (320, 1280)))] == [64]
    assert len(find_blocks(int8, ((5, 64), (1, 320), (320, 1280)))[64]) == 1
    assert {length: len(places) for length, places in find_blocks(topk, ((32, 320), (1, 320), (16, 64))).items()} == {
        1024: 2,
        320: 1,
    }
    values, seen = torch.arange(2 * 448.0).view(2, 448), []
    work_on_blocks(find_blocks(int8, ((2, 64), (1, 320))), values, lambda blocks: seen.append(blocks) or blocks)
    assert [one.shape for one in seen] == [(2, 7, 64)]
