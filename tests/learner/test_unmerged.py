"""What of a model is not merged: compared when a learner joins, looked at while it trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atoll.learner.model import BufferRule
from atoll.learner.unmerged import LOOK_EVERY, UnmergedTensors, digest_unmerged
from atoll.protocol.errors import ConfigError


def net(seed: int = 0) -> nn.Sequential:
    """A frozen layer, a layer with running statistics, a trained one."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    return model


def joined(model: nn.Module, buffers: BufferRule = None) -> UnmergedTensors:
    unmerged = UnmergedTensors(model, buffers, "refuse")
    unmerged.describe()
    return unmerged


def test_equal_seeds_make_equal_digests_and_trained_parameters_do_not_count() -> None:
    one, other = net(), net()
    with torch.no_grad():
        other[2].weight += 1
        other[1].running_mean += 1  # merged
    assert digest_unmerged(one) == digest_unmerged(other)


def test_a_frozen_parameter_of_another_draw_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"are not those of the run's first learner.*torch\.manual_seed.*\"mine\""):
        joined(net(1)).compare(joined(net()).digest)


def test_another_value_type_or_name_is_another_digest() -> None:
    digests = {digest_unmerged(net())}
    for change in (
        lambda m: m[0].bfloat16(),
        lambda m: m.register_buffer("mask", torch.ones(2)),
        lambda m: m[0].half(),
    ):
        model = net()
        change(model)  # type: ignore[no-untyped-call]
        digests.add(digest_unmerged(model))
    assert len(digests) == 4


def test_local_running_statistics_count_and_passing_buffers_do_not() -> None:
    one, other = net(), net()
    other[1].running_mean += 1
    other.register_buffer("cache", torch.rand(3), persistent=False)
    assert digest_unmerged(one, "local") != digest_unmerged(other, "local")
    assert digest_unmerged(one, "mean") == digest_unmerged(other, "mean")


def test_with_mine_nothing_is_compared() -> None:
    mine = UnmergedTensors(net(1), None, "mine")
    mine.describe()
    assert mine.digest == ""
    mine.compare(joined(net()).digest)
    joined(net()).compare("")  # the run's first learner said mine, or was of an earlier version


class TestLooking:
    def test_a_parameter_that_begins_to_train_is_named_with_the_next_step(self) -> None:
        model = net()
        unmerged = joined(model)
        unmerged.look(1)
        model[0].weight.requires_grad_(True)
        unmerged.look(LOOK_EVERY + 1)  # not now
        with pytest.raises(ConfigError, match=r"'0.weight' has begun to train.*before the Learner is entered"):
            unmerged.look(2 * LOOK_EVERY)

    def test_one_that_stops_training_is_fine(self) -> None:
        model = net()
        unmerged = joined(model)
        model[2].requires_grad_(False)
        unmerged.look(LOOK_EVERY)

    def test_a_new_module_or_another_tensor_is_told(self) -> None:
        model = net()
        unmerged = joined(model)
        model[2] = nn.Linear(3, 1)
        with pytest.raises(ConfigError, match=r"'2.weight' is another tensor than when this learner joined"):
            unmerged.look(LOOK_EVERY)

    def test_a_merged_buffer_that_is_replaced_is_told_and_a_local_one_is_not(self) -> None:
        model = net()
        unmerged, local = joined(model), joined(model, "local")
        model[1].running_mean = torch.zeros(3)
        local.look(LOOK_EVERY)
        with pytest.raises(ConfigError, match=r"'1.running_mean' is another tensor"):
            unmerged.look(LOOK_EVERY)
