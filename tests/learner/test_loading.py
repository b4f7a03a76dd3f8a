"""Leased batches through torch's DataLoader, and what counts as trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.learner.test_learner import Joined, small
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from atoll.learner.data import Drawn
from atoll.learner.learner import Learner
from atoll.learner.loading import DrawCounter, seed_of
from atoll.mailbox.channel import StepReport, StopOrder, ToCourier, ToTraining
from atoll.numerics.permutation import permuted
from atoll.protocol.errors import ConfigError
from atoll.protocol.learner import effects as fx
from atoll.protocol.messages import Range

LENGTH = 4000


@pytest.fixture(autouse=True)
def _no_run_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_SYNCER", "ATOLL_LEARNER", "ATOLL_ROLE", "ATOLL_SEED"):
        monkeypatch.delenv(name, raising=False)


class Numbers:
    """A dataset whose samples are their own indices."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


class InARun(Joined):
    """A learner that is leased these positions as soon as it asks for data."""

    def __init__(self, *ranges: Range, over: bool = False) -> None:
        super().__init__(small(), join_wait_s=5.0)
        self._supplies = fx.Supply(ranges, over, "")

    def _answer(self, frame: ToCourier) -> list[ToTraining]:
        return [self._supplies] if isinstance(frame, fx.Registered) else super()._answer(frame)

    @property
    def position(self) -> int:
        """As it was last reported."""
        return self.courier.of(StepReport)[-1].stepped.position  # type: ignore[attr-defined, no-any-return]


def leased(start: int, stop: int) -> list[int]:
    positions = np.arange(start, stop, dtype=np.int64)
    return [int(one) for one in permuted(positions, length=LENGTH, seed=0, dataset=0, epoch=0)]


WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 1}, {"num_workers": 2, "prefetch_factor": 3}]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_loader_of_ones_own_is_handed_what_was_leased_and_a_batch_counts_when_it_is_stepped_on(
    workers: dict[str, Any],
) -> None:
    run, seen = InARun(Range(0, 0, 0, 0, 400)), []
    with run.learner as learner:
        loader = DataLoader(Numbers(), batch_sampler=learner.sampler(Numbers(), 4), **workers)
        for batch in loader:
            seen += batch.tolist()
            learner.step(tokens=4)
            assert run.position == len(seen), "what is prefetched does not count"
            if learner.steps == 6:
                break
    assert seen == leased(0, 24)


@pytest.mark.parametrize("workers", WORKERS)
def test_the_same_through_batches_with_the_options_of_a_loader(workers: dict[str, Any]) -> None:
    run, seen = InARun(Range(0, 0, 0, 0, 400)), []
    with run.learner as learner:
        for number, batch in enumerate(learner.batches(Numbers(), 4, collate_fn=list, **workers), 1):
            seen += batch
            if number % 3 == 0:  # gradients of three batches are one step
                learner.step(tokens=12)
                assert run.position == len(seen)
            if number == 9:
                break
    assert seen == leased(0, 36)


def test_what_one_loop_prefetched_and_never_trained_on_the_next_loop_gets() -> None:
    run, seen = InARun(Range(0, 0, 0, 0, 400)), []
    with run.learner as learner:
        loader = DataLoader(Numbers(), batch_sampler=learner.sampler(Numbers(), 4), num_workers=1)
        for _ in range(3):
            for number, batch in enumerate(loader, 1):
                seen += batch.tolist()
                learner.step(tokens=4)
                if number == 2:
                    break
    assert seen == leased(0, 24) and run.position == 24


def test_a_cut_carries_what_was_stepped_on_and_not_what_was_prefetched() -> None:
    run = InARun(Range(0, 0, 0, 0, 400))
    with run.learner as learner:
        loader = iter(DataLoader(Numbers(), batch_sampler=learner.sampler(Numbers(), 4), num_workers=2))
        for _ in range(3):
            next(loader)
            learner.step(tokens=4)
        state = learner._feed.state()
    assert (state["at"], state["position"]) == (12, 12)


@pytest.mark.parametrize("workers", WORKERS)
def test_at_the_end_of_the_data_all_of_it_was_stepped_on(workers: dict[str, Any]) -> None:
    run, seen = InARun(Range(0, 0, 0, 0, 42), over=True), []
    with run.learner as learner:
        for batch in DataLoader(Numbers(), batch_sampler=learner.sampler(Numbers(), 4), **workers):
            seen += batch.tolist()
            learner.step(tokens=len(batch))
            assert run.position == len(seen)
    assert seen == leased(0, 42)


def test_when_the_run_is_done_batches_end_at_once_and_the_sampler_draws_no_more() -> None:
    for options in ({}, {"num_workers": 2}):
        run = InARun(Range(0, 0, 0, 0, 4000))
        with run.learner as learner:
            for _ in learner.batches(Numbers(), 4, **options):
                if learner.steps == 2:
                    run.courier.waiting.append(StopOrder("enough", final=False))
                learner.step(tokens=4)
            assert learner.steps == 3
            assert list(learner.sampler(Numbers(), 4)) == []


# ---- which batches a step was on, by the draws alone -----------------------------------------------------------------


def play(ahead: DrawCounter, prefetch: int, per_step: list[int]) -> Iterator[tuple[int, int]]:
    """As torch's DataLoader draws: batches handed over, and those known to be trained on, after each step."""
    draws = iter(ahead)
    loaded = sum(next(draws, None) is not None for _ in range(prefetch))
    handed = used = 0
    for batches in per_step:
        for _ in range(batches):
            if prefetch == 0:
                if next(draws, None) is None:
                    return
            else:
                if loaded == 0:
                    return
                loaded += (next(draws, None) is not None) - 1
            handed += 1
        used += ahead.count_step()
        yield handed, used


def drawn(batches: int) -> Iterator[Drawn]:
    return ((0, np.array([number])) for number in range(batches))


@given(prefetch=st.integers(0, 8), per_step=st.integers(1, 4), batches=st.integers(1, 60))
def test_never_more_counts_than_was_handed_over_and_all_of_it_from_the_second_step_on(
    prefetch: int, per_step: int, batches: int
) -> None:
    said = list(play(DrawCounter(drawn(batches)), prefetch, [per_step] * 60))
    assert all(used <= handed for handed, used in said)
    if per_step == 1:
        assert all(used == handed for handed, used in said)
    elif batches >= prefetch + 2 * per_step:
        assert all(used == handed for handed, used in said[1:])


@given(prefetch=st.integers(0, 8), rest=st.lists(st.integers(0, 5), max_size=20))
def test_later_steps_may_be_on_more_batches_fewer_or_none(prefetch: int, rest: list[int]) -> None:
    said = list(play(DrawCounter(drawn(1000)), prefetch, [2, 2, *rest]))
    assert said[0] == (2, 1), "of the first step it is not known yet"
    assert all(used == handed for handed, used in said[1:])


# ---- seeds, mistakes -------------------------------------------------------------------------------------------------


def test_a_learners_seed_is_its_own_in_every_life() -> None:
    def seed(run: int, name: str) -> int:
        return Learner(small(), name=name, seed=run).seed

    assert seed(0, "learner-0") == seed(0, "learner-0")
    assert len({seed_of(0, "learner-0", life) for life in range(20)}) == 20
    assert len({seed(run, f"learner-{n}") for run in (0, 1, -1) for n in range(20)}) == 60
    np.random.default_rng(seed(7, "a"))
    assert 0 <= seed(7, "a") < 2**32


def test_alone_every_pass_has_another_order() -> None:
    learner = Learner(small())
    loader = DataLoader(Numbers(), batch_sampler=learner.sampler(Numbers(), 100))
    first, second = torch.cat(list(loader)), torch.cat(list(loader))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(LENGTH))
    assert first.tolist() != second.tolist()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("call", ["batches", "sampler"])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        (DataLoader(TensorDataset(torch.zeros(4))), r"a dataset, not a DataLoader: hand over loader.dataset"),
        ({"text": DataLoader(TensorDataset(torch.zeros(4)))}, "not a DataLoader"),
        (3, "which a int has not: make a list of it"),
        ({"text": Stream()}, "which a Stream has not: make a list of it"),
    ],
)
def test_a_loader_or_no_dataset_is_told_what_to_do_at_the_call(call: str, given: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told) as caught:
        getattr(Learner(small()), call)(given, 2)
    assert "\n" not in str(caught.value)


def test_a_sampler_has_no_use_for_a_stream() -> None:
    for stream in (Stream(), iter([1, 2])):
        with pytest.raises(TypeError, match=r"has not: make a list of it; learner.batches and learner.stream take"):
            Learner(small()).sampler(stream, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["shuffle", "sampler", "batch_sampler", "in_order"])
def test_what_would_change_the_order_is_refused(option: str) -> None:
    with pytest.raises(TypeError, match=f"takes no {option}: the run says which samples come in which order"):
        Learner(small()).batches(Numbers(), 4, **{option: True})


def test_a_stream_is_not_asked_to_leave_batches_out() -> None:
    with pytest.raises(TypeError, match="takes no drop_last with a stream"):
        Learner(small()).batches(Stream(), 4, drop_last=True)


def test_an_option_that_no_loader_has_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="takes no 'workers'; of DataLoader's options it takes num_workers, "):
        Learner(small()).batches(Numbers(), 4, workers=2)


def test_the_sampler_takes_one_dataset_and_a_batch_that_fits() -> None:
    with pytest.raises(TypeError, match="batches takes several by name"):
        Learner(small()).sampler({"a": Numbers()}, 4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="fewer than one batch of 5000"):
        Learner(small()).sampler(Numbers(), 5000)


# ---- what is fetched -------------------------------------------------------------------------------------------------


def test_a_dataset_that_fetches_many_at_once_is_asked_once_as_by_a_plain_loader() -> None:
    class Many(Numbers):
        def __getitem__(self, index: int) -> int:
            raise AssertionError("one by one")

        def __getitems__(self, indices: list[int]) -> list[int]:
            assert all(type(index) is int for index in indices)
            return indices

    for options in ({}, {"pin_memory": False}, {"collate_fn": torch.tensor}):
        batch = next(iter(Learner(small()).batches(Many(), 4, **options)))
        assert batch.shape == (4,)


def test_several_datasets_come_through_a_loader_too() -> None:
    data = {"low": torch.arange(8), "high": torch.arange(1000, 1008)}
    batches = [batch.tolist() for batch in Learner(small()).batches(data, 4, num_workers=1)]
    assert [min(batch) >= 1000 for batch in batches] == [False, True, False, True]
    assert sorted(sample for batch in batches for sample in batch) == [*range(8), *range(1000, 1008)]
