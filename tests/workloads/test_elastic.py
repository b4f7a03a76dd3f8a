"""One rank: which orders it follows, and that what it does over a restart is what it would have done without one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll.protocol.errors import ConfigError
from atoll.workloads.elastic import (
    Batches,
    FlatGradients,
    GroupOrder,
    OrderReader,
    Rank,
    RankEnvironment,
    batch_indices,
)
from atoll.workloads.settings import OPTIMIZERS, WorkloadSettings

ALONE = GroupOrder(generation=1, ranks=(0,))
STOP = GroupOrder(stop=True, scores=0)


class Ordered(OrderReader):
    """Trains alone until it has made so many steps, then is stopped."""

    def __init__(self, until: int) -> None:
        self.until, self.step, self._said = until, 0, iter((ALONE, STOP))

    @property
    def waiting(self) -> bool:
        return self.step >= self.until

    def read_newest(self) -> GroupOrder:
        return next(self._said)


def train(
    tmp_path: Path, until: int, checkpoint: Path | None = None, every: int = 0, optimizer: str = "adamw"
) -> list[dict[str, Any]]:
    data = tmp_path / "data.txt"
    data.write_text("".join(f"{n} squared is {n * n}\n" for n in range(2000)))
    work: dict[str, Any] = {"depth": 1, "block": 16, "batch": 4, "eval_windows": 8}
    settings = WorkloadSettings(**work, data=(str(data),), optimizer=optimizer)
    orders, said = Ordered(until), []

    def say(words: dict[str, object]) -> None:
        said.append(words)
        if words["kind"] in ("step", "ready"):
            orders.step = int(str(words["step"]))

    Rank(settings, 5, RankEnvironment(0, 20, tmp_path, checkpoint, every), orders, say).run()
    return said


def test_a_rank_tells_its_story_and_scores_the_model_in_the_end(tmp_path: Path) -> None:
    said = train(tmp_path, 3)
    assert [(w["kind"], w["step"]) for w in said] == [
        ("ready", 0), ("formed", 0), ("step", 1), ("step", 2), ("step", 3), ("end", 3),
    ]  # fmt: skip
    assert said[-1]["validation_loss"] > 0 and said[2]["tokens"] == 4 * 16


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_rank_that_begins_with_a_checkpoint_ends_where_it_would_have_ended(tmp_path: Path, optimizer: str) -> None:
    checkpoint = tmp_path / "checkpoint.safetensors"
    straight = train(tmp_path, 6, optimizer=optimizer)
    first = train(tmp_path, 5, checkpoint, every=4, optimizer=optimizer)
    assert [w["step"] for w in first if w["kind"] == "saved"] == [4]
    second = train(tmp_path, 6, checkpoint, every=4, optimizer=optimizer)
    assert [w["step"] for w in second if w["kind"] == "step"] == [5, 6]
    assert second[-1]["digest"] == straight[-1]["digest"]


def lines(*orders: str) -> Iterator[bytes]:
    return iter([f"{order}\n".encode() for order in orders])


def test_the_newest_order_counts_and_a_stop_before_all() -> None:
    orders = OrderReader(lines('{"generation": 1, "ranks": [0, 1]}', '{"stop": true, "scores": 1}'))
    heard = [orders.read_newest()]
    if not heard[0].stop:
        heard.append(orders.read_newest())
    assert heard[-1] == GroupOrder(stop=True, scores=1)


def test_a_rank_without_a_launcher_stops_and_scores_nothing() -> None:
    assert OrderReader(lines()).read_newest() == GroupOrder(stop=True, scores=-1)


def test_a_step_has_its_batch_however_often_it_is_tried() -> None:
    batches = Batches(iter(np.arange(8, dtype=np.int64).reshape(4, 2)))
    assert batches.indices_of(1).tolist() == batches.indices_of(1).tolist() == [0, 1]
    assert batches.indices_of(3).tolist() == [4, 5]
    with pytest.raises(AssertionError, match="in order"):
        batches.indices_of(2)


def test_gradients_are_clipped_as_one_vector() -> None:
    model = torch.nn.Linear(3, 2)
    gradients = FlatGradients(model)
    gradients.buffer.fill_(10.0)
    gradients.clip(1.0)
    assert float(gradients.buffer.norm()) == pytest.approx(1.0, rel=1e-4)
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad.flatten(), gradients.buffer[:6])


def test_ranks_see_different_batches_and_every_window_once_per_epoch() -> None:
    epoch = [np.concatenate(list(itertools.islice(batch_indices(12, 4, 0, rank), 3))) for rank in range(2)]
    assert sorted(epoch[0]) == sorted(epoch[1]) == list(range(12))
    assert list(epoch[0]) != list(epoch[1])
    with pytest.raises(ConfigError, match=r"12 windows, too few for workload\.batch = 13"):
        next(batch_indices(12, 13, 0, 0))
