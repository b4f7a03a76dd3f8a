"""Streams: which samples a learner reads of them, and where it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from atoll.learner.learner import Learner
from atoll.learner.streams import DataStream, StreamShare, is_stream
from atoll.protocol.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_run_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_SYNCER", "ATOLL_JOIN", "ATOLL_LEARNER", "ATOLL_ROLE"):
        monkeypatch.delenv(name, raising=False)


class Plain(IterableDataset[int]):
    """Numbers, others in each pass."""

    def __init__(self, length: int = 24) -> None:
        self.length, self.at, self.epoch = length, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        start, self.at = self.at, 0
        for number in range(start, self.length):
            self.at = number + 1
            yield 100 * self.epoch + number
        self.at = 0


class Positioned(Plain):
    """The same, and it says where it is."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def enter() -> Learner:
    model = nn.Linear(1, 1)
    return Learner(model, torch.optim.SGD(model.parameters(), lr=0.1)).__enter__()


def test_what_counts_as_a_stream() -> None:
    assert is_stream(Plain()) and is_stream(iter([1])) and is_stream({1, 2})
    assert not is_stream([1]) and not is_stream({"a": [1]}) and not is_stream(3) and not is_stream(torch.ones(3))
    assert not is_stream(DataLoader(Plain())), "it would not say how far it is"


def test_shares_are_disjoint_and_each_is_read_in_order() -> None:
    shares = [list(DataStream(Plain(10), 2, StreamShare(part, 3)).read(1)) for part in range(3)]
    assert shares == [[[0, 3], [6]], [[1, 4], [7]], [[2, 5], [8]]], "the rest that gives no turn is left out"


def test_passes_follow_one_another_and_know_their_number() -> None:
    assert list(DataStream(Plain(4), 2, StreamShare()).read(2)) == [[0, 1], [2, 3], [100, 101], [102, 103]]
    assert list(DataStream(iter(range(3)), 2, StreamShare()).read(None)) == [[0, 1], [2]], "an iterator has one pass"
    with pytest.raises(ConfigError, match="no samples for this learner: it reads share 4 of 5"):
        list(DataStream(Plain(4), 2, StreamShare(4, 5)).read(None))


@pytest.mark.parametrize("steps", [1, 3, 4, 6])
def test_it_goes_on_behind_the_last_batch_that_was_stepped_on(steps: int) -> None:
    share = StreamShare(1, 3)
    whole = [batch for _, batch in zip(range(10), DataStream(Positioned(), 2, share).read(None), strict=False)]
    first, seen = DataStream(Positioned(), 2, share), []
    batches = first.read(None)
    for _ in range(steps):
        seen.append(next(batches))
        first.stepped(1)
    next(batches), next(batches)  # read ahead
    second = DataStream(Positioned(), 2, share)
    second.load(first.state())
    assert second.state() == first.state()
    seen += [batch for _, batch in zip(range(10 - steps), second.read(None), strict=False)]
    assert seen == whole


def test_it_is_begun_once() -> None:
    """torchdata's loader forgets the position that it was given as soon as somebody iterates."""
    begun: list[int] = []

    class Counting(Positioned):
        def __iter__(self) -> Iterator[int]:
            begun.append(self.at)
            return super().__iter__()

    assert len(list(DataStream(Counting(4), 2, StreamShare()).read(1))) == 2 and begun == [0]


def test_another_share_or_a_stream_that_says_nothing_begins_again(capsys: pytest.CaptureFixture[str]) -> None:
    first = DataStream(Positioned(), 2, StreamShare(0, 2))
    next(first.read(None))
    first.stepped(None)
    for source, share in ((Positioned(), StreamShare(0, 3)), (Plain(), StreamShare(0, 2))):
        second = DataStream(source, 2, share)
        second.load(first.state())
        assert next(second.read(None))[0] == 0 and "begins again" in capsys.readouterr().err
    assert DataStream(Plain(), 2, StreamShare()).state() == {}


def test_a_learner_reads_it_in_batches_and_keeps_its_position() -> None:
    learner, seen = enter(), []
    for batch in learner.batches(Positioned(8), batch_size=4):
        seen.append(batch.tolist())
        assert learner._feed.state()["stream"]["state"] == {"at": 4} if len(seen) == 2 else True
        learner.step(tokens=4)
    learner.leave()
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]], "alone it is one pass"


def test_a_loader_of_ones_own_reads_ahead_and_the_position_is_that_of_the_steps() -> None:
    learner = enter()
    loader = DataLoader(learner.stream(Positioned(), 2), batch_size=2)
    batches, ahead = iter(loader), []
    ahead.append(next(batches))  # as Accelerate does
    for number in range(5):
        ahead.append(next(batches))
        assert ahead[number].tolist() == [2 * number, 2 * number + 1]
        learner.step(tokens=2)
    assert learner._feed.state()["stream"]["state"] == {"at": 10}
    learner.leave()


def test_what_a_stream_cannot_be_read_with_is_refused() -> None:
    learner = enter()
    with pytest.raises(TypeError, match="no num_workers with a stream"):
        learner.batches(Plain(), 2, num_workers=2)
    with pytest.raises(TypeError, match="mix the streams"):
        learner.batches(Plain(), 2, weights={"a": 1.0})
    with pytest.raises(TypeError, match="without a length"):
        learner.stream([1, 2], 2)
    learner.leave()
