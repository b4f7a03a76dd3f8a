"""Samples of a fragment: which values they hold, and that nobody can tell which without the seed."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.numerics import sample
from atoll.numerics.fragments import Fragment, make_plan
from atoll.numerics.sample import BLOCK, ONE_IN, draw_sample, largest_sample, take_all
from atoll.protocol.messages import TensorSpec

SHAPES = {"a": (130, 1000), "b": (77,), "c": (3 * BLOCK + 5,), "d": ()}
PLAN = make_plan([TensorSpec(name, shape, "float32") for name, shape in SHAPES.items()], 1)
FRAGMENT = PLAN.fragments[0]
VALUES = np.arange(FRAGMENT.size, dtype=np.float32)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "LEAST", 1)


def taken(seed: list[int], fragment: Fragment = FRAGMENT) -> list[list[int]]:
    """Of each piece, the numbers of the values in it."""
    drawn = draw_sample(fragment, seed)
    values = drawn.take(VALUES)
    return [values[part].astype(int).tolist() for part in drawn.parts]


def test_every_piece_gives_its_share_in_whole_blocks_of_its_own_values() -> None:
    pieces = taken([1])
    assert [len(one) for one in pieces] == [-(-(130_000 // BLOCK) // ONE_IN) * BLOCK, 77, BLOCK, 1]
    for values, (_, part) in zip(pieces, FRAGMENT.parts, strict=True):
        assert set(values) <= set(range(part.start, part.stop)) and len(set(values)) == len(values)


def test_every_value_is_in_some_sample() -> None:
    seen = {value for seed in range(400) for piece in taken([seed]) for value in piece}
    assert seen == set(range(FRAGMENT.size))


def test_equal_seeds_draw_equal_blocks_and_others_draw_others() -> None:
    assert taken([7, 0, 3]) == taken([7, 0, 3])
    assert len({str(taken(seed)) for seed in ([7, 0], [7, 0, 3], [7, 0, 4], [7, 1, 3], [8, 0, 3])}) == 5


def test_a_small_fragment_is_taken_whole_and_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "LEAST", FRAGMENT.size // 2 + 1)
    assert draw_sample(FRAGMENT, [1]) == take_all(FRAGMENT)
    assert take_all(FRAGMENT).take(VALUES) is VALUES
    assert largest_sample(PLAN) == 0


def test_the_largest_sample_is_as_large_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {draw_sample(FRAGMENT, [seed]).size for seed in range(20)} == {largest_sample(PLAN)}
    monkeypatch.setattr(sample, "LEAST", FRAGMENT.size // 4)
    assert largest_sample(PLAN) >= FRAGMENT.size // 4 - 2 * BLOCK, "a fragment that is not so large gives more of it"
