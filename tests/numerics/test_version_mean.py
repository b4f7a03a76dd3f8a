"""The mean of versions, against float64 by hand."""

from __future__ import annotations

import numpy as np

from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import make_plan
from atoll.numerics.version_mean import VersionMeans
from atoll.protocol.messages import TensorSpec, buffer_name

PLAN = make_plan([TensorSpec("a", (5, 3), "float32"), TensorSpec("b", (4, 4), "float32")], 2)


def draw_versions(count: int, size: int) -> list[FloatArray]:
    dice = np.random.default_rng(0)
    return [(dice.standard_normal(size) * 10.0 ** dice.integers(-3, 4)).astype(np.float32) for _ in range(count)]


def test_it_is_the_mean_in_float64_rounded_once() -> None:
    means, sizes = VersionMeans(PLAN, [2, 1], [4, 1]), [part.size for part in PLAN.fragments]
    first, second = draw_versions(6, sizes[0]), draw_versions(2, sizes[1])
    for version, values in enumerate(first):
        means.add_version(0, version, values)
    assert not means.is_complete()
    means.add_version(1, 1, second[1])
    assert means.is_complete()
    due = np.mean([values.astype(np.float64) for values in first[2:5]], axis=0).astype(np.float32)
    found = means.compute()
    np.testing.assert_array_equal(found[0], due)
    np.testing.assert_array_equal(found[1], second[1])


def test_a_version_that_is_left_out_or_comes_twice_is_not_made_up_for() -> None:
    means, values = VersionMeans(PLAN, [1, 0], [3, 0]), draw_versions(4, PLAN.fragments[0].size)
    means.add_version(1, 0, np.zeros(PLAN.fragments[1].size, np.float32))
    for version in (1, 1, 3):
        means.add_version(0, version, values[version])
    assert not means.is_complete()
    for version in (2, 3):
        means.add_version(0, version, values[version])
    due = np.mean([one.astype(np.float64) for one in values[1:]], axis=0).astype(np.float32)
    np.testing.assert_array_equal(means.compute()[0], due)


def test_the_values_are_copied() -> None:
    means, values = VersionMeans(PLAN, [1, 1], [1, 1]), [np.ones(part.size, np.float32) for part in PLAN.fragments]
    for fragment in range(2):
        means.add_version(fragment, 1, values[fragment])
        values[fragment].fill(7.0)
    assert all((one == 1.0).all() for one in means.compute())


def test_running_statistics_are_averaged_and_buffers_of_one_learner_are_those_of_the_last_version() -> None:
    first = buffer_name("first", "count")
    names = ["weight", buffer_name("mean", "norm.running_var"), first]
    plan = make_plan([TensorSpec(name, (3,), "float32") for name in names], 1)
    part, versions = plan.fragments[0], draw_versions(3, 9)
    means = VersionMeans(plan, [1], [3])
    for version, values in enumerate(versions, start=1):
        means.add_version(0, version, values)
    (found,) = means.compute()
    due = np.mean([one.astype(np.float64) for one in versions], axis=0).astype(np.float32)
    for piece, place in part.parts:
        np.testing.assert_array_equal(found[place], (versions[-1] if piece.tensor.name == first else due)[place])
