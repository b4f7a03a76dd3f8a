"""Every pass is a bijection, the same on every machine for ever, and looks like chance."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.numerics.permutation import ROUNDS, permuted

GOLDEN_TEN = [6, 7, 9, 3, 1, 5, 2, 4, 0, 8]
GOLDEN_SEVENTEEN = [2, 15, 7, 4, 13, 14, 10, 6, 9, 0, 11, 5, 1, 3, 8, 16, 12]
GOLDEN_LARGE = [239809131565, 245980888334, 822487203041, 251639400539, 668713858989]


def a_pass(length: int, seed: int = 7, dataset: int = 0, epoch: int = 0) -> list[int]:
    return permuted(np.arange(length), length=length, seed=seed, dataset=dataset, epoch=epoch).tolist()


def by_hand(position: int, length: int, seed: int, dataset: int, epoch: int) -> int:
    """The same, one position at a time, in Python's own integers."""
    base = next(a for a in range(1, length + 1) if a * a >= length)
    name = f"atoll permutation 1: length {length}, seed {seed}, dataset {dataset}, epoch {epoch}"
    words = hashlib.shake_256(name.encode()).digest(8 * ROUNDS)
    sample = length
    while sample >= length:
        x, y = divmod(position, base)
        for place in range(ROUNDS):
            word = (y + int.from_bytes(words[8 * place : 8 * place + 8], "little")) % 2**64
            word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
            x, y = y, (x + (word ^ (word >> 31)) % base) % base
        sample = position = x * base + y
    return sample


@pytest.mark.parametrize("epoch", [0, 1])
def test_every_sample_has_one_position_whatever_the_length(epoch: int) -> None:
    for length in range(1, 301):
        assert sorted(a_pass(length, epoch=epoch)) == list(range(length)), length


@pytest.mark.parametrize("length", [10_007, 65_536, 65_537, 1_000_000])
def test_every_sample_has_one_position_in_a_large_dataset(length: int) -> None:
    assert np.array_equal(np.sort(np.array(a_pass(length))), np.arange(length))


@given(st.integers(1, 2000), st.integers(-(2**70), 2**70), st.integers(0, 5), st.integers(0, 10**6), st.data())
@settings(max_examples=60, deadline=None)
def test_the_arrays_say_what_plain_integers_say(
    length: int, seed: int, dataset: int, epoch: int, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, length - 1))
    found = permuted(np.array([position]), length=length, seed=seed, dataset=dataset, epoch=epoch)
    assert found.tolist() == [by_hand(position, length, seed, dataset, epoch)]


def test_the_order_stays_the_same_from_release_to_release() -> None:
    assert a_pass(10, seed=0) == GOLDEN_TEN
    assert a_pass(17, seed=123, dataset=2, epoch=5) == GOLDEN_SEVENTEEN
    some = np.array([0, 1, 2, 10**9, 10**12 - 1])
    assert permuted(some, length=10**12, seed=-1, dataset=0, epoch=3).tolist() == GOLDEN_LARGE


def test_a_part_of_a_pass_can_be_had_alone_in_any_order_and_shape() -> None:
    whole = a_pass(1000)
    wanted = np.array([[999, 0, 500], [3, 3, 17]])
    found = permuted(wanted, length=1000, seed=7, dataset=0, epoch=0)
    assert found.dtype == np.int64 and found.tolist() == [[whole[p] for p in row] for row in wanted.tolist()]
    assert permuted(np.array([], dtype=np.int64), length=5, seed=0, dataset=0, epoch=0).tolist() == []
    assert int(permuted(np.array(999), length=1000, seed=7, dataset=0, epoch=0)) == whole[999]


def test_another_seed_dataset_epoch_or_length_is_another_order() -> None:
    orders = [a_pass(50), a_pass(50, seed=8), a_pass(50, dataset=1), a_pass(50, epoch=1), a_pass(51)[:50]]
    assert len({tuple(order) for order in orders}) == len(orders)


@pytest.mark.parametrize("length", [10_000, 99_999])
def test_it_looks_shuffled(length: int) -> None:
    order, after = np.array(a_pass(length)), np.array(a_pass(length, epoch=1))
    bound = 5 / np.sqrt(length)
    assert abs(np.corrcoef(np.arange(length), order)[0, 1]) < bound, "a sample's place says nothing of its number"
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < bound, "neither do its neighbours"
    assert abs(np.corrcoef(order, after)[0, 1]) < bound, "neither does the pass before"
    assert (order == after).sum() < 15, "two passes agree in about one place"


def test_all_orders_of_a_few_samples_are_about_equally_likely() -> None:
    seen = Counter(tuple(a_pass(4, seed=seed)) for seed in range(2400))
    assert len(seen) == 24 and min(seen.values()) > 50 and max(seen.values()) < 160


def test_a_position_outside_of_the_pass_is_our_mistake() -> None:
    for position in (-1, 10):
        with pytest.raises(AssertionError):
            permuted(np.array([position]), length=10, seed=0, dataset=0, epoch=0)
