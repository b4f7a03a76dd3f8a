from __future__ import annotations

from itertools import islice

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from atoll.learner.data import LeasedSamples, collect, generator, orders, sources
from atoll.numerics.permutation import permuted
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import Range


def drawn(seed: int = 0, learner: str = "learner-0", incarnation: int = 1) -> list[list[int]]:
    return [batch.tolist() for batch in orders(20, 4, generator(seed, learner, incarnation), passes=2)]


def test_an_order_repeats_with_its_seed_learner_and_incarnation_and_only_then() -> None:
    assert drawn() == drawn()
    others = [drawn(seed=1), drawn(learner="learner-1"), drawn(incarnation=2)]
    assert all(other != drawn() for other in others)
    assert others[0] != others[1] != others[2]


@given(length=st.integers(1, 50), batch=st.integers(1, 50), passes=st.integers(1, 3))
def test_a_pass_takes_every_sample_once_but_for_the_rest(length: int, batch: int, passes: int) -> None:
    if batch > length:
        return
    batches = list(orders(length, batch, generator(0, "learner-0", 1), passes=passes))
    each = length // batch
    assert len(batches) == each * passes
    for start in range(0, len(batches), each):
        seen = np.concatenate(batches[start : start + each])
        assert len(set(seen.tolist())) == each * batch <= length


def test_without_an_end_passes_follow_each_other_in_another_order() -> None:
    batches = [batch.tolist() for batch in islice(orders(8, 8, generator(0, "learner-0", 1), passes=None), 3)]
    assert all(sorted(batch) == list(range(8)) for batch in batches)
    assert batches[0] != batches[1] != batches[2]


def test_a_dataset_smaller_than_a_batch_is_refused_before_the_first_one() -> None:
    with pytest.raises(ConfigError, match="3 samples, fewer than one batch of 4: use a smaller batch"):
        next(orders(3, 4, generator(0, "learner-0", 1), passes=1))
    with pytest.raises(ConfigError, match="batch_size = 0"):
        next(orders(3, 0, generator(0, "learner-0", 1), passes=1))


INDICES = np.array([2, 0])


def test_a_dataset_that_gathers_is_asked_once() -> None:
    class Windows:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> torch.Tensor:
            raise AssertionError("one by one")

        def gather(self, indices: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(indices * 10)

    assert collect(Windows(), INDICES).tolist() == [20, 0]


def test_a_tensor_gives_its_rows() -> None:
    rows = torch.arange(6).view(3, 2)
    assert collect(rows, INDICES).tolist() == [[4, 5], [0, 1]]


def test_a_numpy_array_gives_its_rows() -> None:
    assert collect(np.arange(6).reshape(3, 2), INDICES).tolist() == [[4, 5], [0, 1]]


def test_torch_datasets_are_collated_as_a_loader_would() -> None:
    inputs, labels = collect(TensorDataset(torch.arange(6).view(3, 2), torch.tensor([7, 8, 9])), INDICES)
    assert inputs.tolist() == [[4, 5], [0, 1]] and labels.tolist() == [9, 7]


def test_samples_that_are_dictionaries_become_one() -> None:
    samples = [{"x": torch.tensor(n), "y": n} for n in range(3)]
    batch = collect(samples, INDICES)
    assert batch["x"].tolist() == batch["y"].tolist() == [2, 0]


# ---- leases ----------------------------------------------------------------------------------------------------------

LENGTHS = (100, 40)


def samples(dataset: int, start: int, stop: int, epoch: int = 0) -> list[int]:
    """What lies at these positions of a pass."""
    positions = np.arange(start, stop, dtype=np.int64)
    return [int(one) for one in permuted(positions, length=LENGTHS[dataset], seed=7, dataset=dataset, epoch=epoch)]


def leased(*ranges: Range, batch: int = 4, over: bool = False) -> LeasedSamples:
    leased = LeasedSamples(LENGTHS, batch, seed=7)
    leased.add_leases(ranges, over)
    return leased


def taken(leased: LeasedSamples) -> list[tuple[int, list[int]]]:
    """All batches there are."""
    batches = []
    while (batch := leased.draw_batch()) is not None:
        leased.stepped()
        batches.append((batch[0], batch[1].tolist()))
    return batches


def test_leased_samples_are_taken_in_the_order_they_were_granted() -> None:
    batches = taken(leased(Range(0, 0, 0, 20, 28), Range(1, 0, 0, 90, 100), Range(2, 0, 1, 0, 6)))
    whole = [sample for _, batch in batches for sample in batch]
    assert whole == [*samples(0, 20, 28), *samples(0, 90, 100), *samples(0, 0, 6, epoch=1)]
    assert [len(batch) for _, batch in batches] == [4] * 6, "a batch may span two leases"


def test_the_rest_of_a_pass_is_left_out_on_demand_and_waits_for_no_step() -> None:
    for ranges in ((Range(0, 0, 0, 90, 100), Range(1, 1, 0, 0, 8)), (Range(0, 1, 0, 0, 8), Range(1, 0, 0, 97, 100))):
        held = leased(*ranges, over=True)
        held.drop_last = True
        assert [len(batch) for _, batch in taken(held)] in ([4] * 4, [4] * 2)
        assert held.empty and held.waiting == 0 and held.position == sum(one.stop - one.start for one in ranges)


def test_batches_drawn_ahead_take_the_rest_of_a_pass_with_them() -> None:
    held = leased(Range(0, 0, 0, 90, 100), over=True)
    held.drop_last = True
    assert [held.draw_batch() is not None for _ in range(3)] == [True, True, False]
    held.stepped(1)
    assert held.position == 4
    held.stepped(1)
    assert held.position == 10 and held.empty


@given(
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    batch=st.integers(1, 20),
    datasets=st.lists(st.integers(0, 1), min_size=12, max_size=12),
)
def test_every_leased_sample_is_taken_once_whatever_the_leases(
    cuts: list[int], batch: int, datasets: list[int]
) -> None:
    ends, ranges, expected = [0, 0], [], []
    for lease, (size, dataset) in enumerate(zip(cuts, datasets, strict=False)):
        start, stop = ends[dataset], min(LENGTHS[dataset], ends[dataset] + size)
        if start < stop:
            ranges.append(Range(lease, dataset, 0, start, stop))
            expected += [(dataset, sample) for sample in samples(dataset, start, stop)]
            ends[dataset] = stop
    source = leased(*ranges, batch=batch)
    batches = taken(source)
    assert [(dataset, sample) for dataset, indices in batches for sample in indices] == expected
    assert all(0 < len(indices) <= batch for _, indices in batches)
    assert source.position == len(expected)


def test_a_batch_never_mixes_datasets_so_a_short_one_goes_before_another() -> None:
    batches = taken(leased(Range(0, 0, 0, 0, 6), Range(1, 1, 0, 0, 6), Range(2, 0, 0, 6, 8)))
    assert batches == [
        (0, samples(0, 0, 4)),
        (0, samples(0, 4, 6)),
        (1, samples(1, 0, 4)),
        (1, samples(1, 4, 6)),
        (0, samples(0, 6, 8)),
    ]


def test_a_short_batch_ends_the_data() -> None:
    source = leased(Range(0, 0, 0, 0, 7), over=True)
    assert [len(batch) for _, batch in taken(source)] == [4, 3]
    assert source.over and source.empty


def test_samples_count_as_taken_when_their_step_is_done() -> None:
    source = leased(Range(0, 0, 0, 0, 20))
    source.draw_batch()
    assert source.position == 0
    source.draw_batch()
    source.stepped()
    assert source.position == 8, "two batches to one step"
    source.stepped()
    assert source.position == 8


def test_a_lease_that_comes_twice_is_taken_once() -> None:
    source = leased(Range(0, 0, 0, 0, 8), Range(1, 0, 0, 8, 12))
    source.draw_batch()
    source.add_leases([Range(0, 0, 0, 0, 8), Range(1, 0, 0, 8, 12), Range(2, 0, 0, 40, 44)], over=False)
    assert [sample for _, batch in taken(source) for sample in batch] == [*samples(0, 4, 12), *samples(0, 40, 44)]


def test_in_another_run_a_lease_of_the_same_number_is_another() -> None:
    source = leased(Range(0, 0, 0, 0, 8))
    taken(source)
    source.forget()
    source.add_leases([Range(0, 0, 0, 40, 48)], over=False)
    assert [sample for _, batch in taken(source) for sample in batch] == samples(0, 40, 48)


def test_the_end_of_the_data_is_not_taken_back() -> None:
    source = leased(Range(0, 0, 0, 0, 8), over=True)
    source.add_leases([], over=False)
    assert source.over


def test_without_a_lease_there_is_no_batch_and_nothing_to_repeat() -> None:
    source = leased()
    assert source.empty and source.draw_batch() is None and source.repeat_batch() is None


def test_when_leases_run_out_the_last_is_gone_through_again_and_counts_for_nothing() -> None:
    source = leased(Range(0, 0, 0, 0, 8), Range(1, 1, 0, 10, 16))
    taken(source)
    again = []
    for _ in range(3):
        batch = source.repeat_batch()
        assert batch is not None and batch[0] == 1
        again += batch[1].tolist()
        source.stepped()
    assert again == samples(1, 10, 16) * 2, "round and round"
    assert source.position == 14
    source.add_leases([Range(2, 0, 0, 8, 12)], over=False)
    assert taken(source) == [(0, samples(0, 8, 12))] and source.position == 18


def test_in_another_life_nothing_is_left_of_the_one_before() -> None:
    source = leased(Range(4, 0, 0, 0, 20), over=True)
    source.draw_batch()
    source.stepped()
    source.draw_batch()
    source.forget()
    assert (source.position, source.empty, source.over) == (0, True, False)
    source.stepped()
    assert source.position == 0, "nor of what was handed out"
    source.add_leases([Range(5, 0, 0, 20, 24)], over=False)
    assert taken(source) == [(0, samples(0, 20, 24))] and source.position == 4


def test_in_another_run_leases_are_numbered_anew() -> None:
    source = leased(*[Range(lease, 0, 0, 4 * lease, 4 * lease + 4) for lease in range(10)])
    source.forget()
    source.add_leases([Range(0, 0, 0, 8, 12)], over=False)
    assert taken(source) == [(0, samples(0, 8, 12))]


def through_json(source: LeasedSamples, batch: int = 4) -> LeasedSamples:
    """Put back from a cut."""
    again = LeasedSamples(LENGTHS, batch, seed=7)
    again.load(msgspec.json.decode(msgspec.json.encode(source.state())))
    return again


@pytest.mark.parametrize("batches", range(7))
def test_out_of_a_cut_it_goes_on_with_the_next_sample(batches: int) -> None:
    ranges = (Range(3, 0, 0, 0, 10), Range(4, 1, 0, 0, 5), Range(5, 1, 0, 5, 9))
    straight, source = leased(*ranges, over=True), leased(*ranges, over=True)
    for _ in range(batches):
        straight.draw_batch()
        straight.stepped()
        source.draw_batch()
        source.stepped()
    again = through_json(source)
    assert (again.position, again.over) == (straight.position, True)
    again.add_leases(ranges, over=False)
    assert taken(again) == taken(straight), "and takes nothing twice that comes again"
    assert again.position == straight.position == 19


@pytest.mark.parametrize("batches", range(4))
def test_a_batch_that_was_handed_out_and_not_stepped_on_is_taken_again_out_of_a_cut(batches: int) -> None:
    ranges = (Range(3, 0, 0, 0, 6), Range(4, 0, 0, 6, 30))
    straight, source = leased(*ranges), leased(*ranges)
    straight.draw_batch()
    straight.stepped()
    source.draw_batch()
    source.stepped()
    for _ in range(batches):
        source.draw_batch()
    again = through_json(source)
    assert again.position == 4
    assert taken(again) == taken(straight)
    assert again.position == 30


# ---- datasets --------------------------------------------------------------------------------------------------------


def test_one_dataset_needs_no_name_and_several_have_theirs() -> None:
    rows = torch.arange(6)
    assert [(one.name, one.weight) for one in sources(rows, None)] == [("data", 1.0)]
    found = sources({"text": rows, "code": rows[:3]}, {"code": 3})
    assert [(one.name, len(one.samples), one.weight) for one in found] == [("text", 6, 1.0), ("code", 3, 3.0)]


@pytest.mark.parametrize(
    ("data", "weights", "said"),
    [
        ({"text": [1]}, {"code": 1.0}, r"weights name 'code', which is none of the datasets \['text'\]"),
        ({"text": [1]}, {"text": 0.0}, "the weight of dataset 'text' is 0.0: it must be above 0"),
        ({"text": [1]}, {"text": float("nan")}, "the weight of dataset 'text' is nan"),
        ({"text": []}, None, "the dataset 'text' has no samples"),
        ({}, None, "no dataset was given"),
    ],
)
def test_datasets_that_cannot_be_trained_on_are_named(
    data: dict[str, list[int]], weights: dict[str, float] | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        sources(data, weights)
