"""Merged buffers on their way: values, not steps, are averaged, and no momentum moves them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from atoll.config import Outer
from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import Delta, body_nbytes, decode_contribution, encode_contribution, make_codec
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.numerics.screen import NormScreen
from atoll.protocol.messages import TensorSpec, buffer_name
from atoll.store.rebuild import RebuiltModel
from atoll.syncer.parameters import Parameters

WEIGHTS = [1.0, 3.0]


def plan(rule: str = "mean", fragments: int = 1) -> FragmentPlan:
    names = ["a.weight", buffer_name(rule, "norm.running_mean"), buffer_name(rule, "norm.running_var"), "z.weight"]
    return make_plan([TensorSpec(name, (4,), "float32") for name in names], fragments)


def contribution(of: FragmentPlan, base: FloatArray, theta: FloatArray, codec: str = "fp32") -> FloatArray:
    """As it lies before the merge."""
    made, part = make_codec(codec), of.fragments[0]
    body, delta = np.empty(body_nbytes(made, part), np.uint8), np.empty(part.size, np.float32)
    encode_contribution(made, part, Delta(base, theta), body)
    decode_contribution(made, part, body, delta)
    return delta


def begun(of: FragmentPlan, theta: FloatArray, **outer: object) -> Parameters:
    parameters = Parameters(of, Outer(**outer))  # type: ignore[arg-type]
    parameters.initial_bytes(0)[:] = theta.view(np.uint8).data
    parameters.commit_initial()
    return parameters


def merge(parameters: Parameters, deltas: list[FloatArray], bases: list[int] | None = None) -> str:
    """A round, of contributions that were made on the committed version unless it is said."""
    version = parameters.committed_buffers()[0].version
    bases = [version] * len(deltas) if bases is None else bases
    mark = parameters.stage_merge(0, deltas, WEIGHTS[: len(deltas)], bases=bases)
    parameters.commit_version(0, version + 1, version)
    return mark


def floats(*values: float) -> FloatArray:
    """One value for each of the four tensors."""
    return np.repeat(np.array(values, np.float32), 4)


def test_buffers_lie_side_by_side_and_have_their_names_in_the_model() -> None:
    part = plan().fragments[0]
    assert part.buffers == slice(4, 12)
    found = [(piece.tensor.name_in_model, piece.tensor.buffer_rule) for piece in part.pieces]
    assert found == [("a.weight", ""), ("norm.running_mean", "mean"), ("norm.running_var", "mean"), ("z.weight", "")]
    assert make_plan([TensorSpec("a.weight", (4,), "float32")], 1).fragments[0].buffers == slice(0, 0)


def test_the_mean_of_the_values_is_the_new_version() -> None:
    of, committed = plan(), floats(1, 5, 40, 1)
    parameters = begun(of, committed)
    deltas = [contribution(of, committed, floats(1, 6, 36, 1)), contribution(of, committed, floats(1, 4, 32, 1))]
    merge(parameters, deltas)
    tensors = parameters.tensors_by_name()
    assert np.allclose(tensors["norm.running_mean"], 0.25 * 6 + 0.75 * 4)
    assert np.allclose(tensors["norm.running_var"], 0.25 * 36 + 0.75 * 32)
    assert np.array_equal(tensors["a.weight"], floats(1)), "nobody moved it"


def test_a_fall_that_two_learners_saw_from_the_same_version_counts_once() -> None:
    """Merged one after the other, as rounds of a quorum of one are; as steps the variance would go to -20."""
    of, first = plan(), floats(1, 0, 100, 1)
    parameters = begun(of, first)
    both = [contribution(of, first, floats(0.5, 0, 40, 1)) for _ in range(2)]
    merge(parameters, both[:1], [0])
    merge(parameters, both[1:], [0])
    tensors = parameters.tensors_by_name()
    assert np.array_equal(tensors["norm.running_var"], floats(40))
    assert (tensors["a.weight"] < 0.5).all(), "steps of parameters add up"


def test_rounding_takes_no_variance_below_zero() -> None:
    """bf16 of 0.998 to the nearest is 1: more than there is."""
    of, base, theta = plan(), floats(1, 0, 0.9987, 1), floats(1, 0, 0.0007, 1)
    parameters = begun(of, base)
    merge(parameters, [contribution(of, base, theta, "bf16")] * 2)
    found = parameters.tensors_by_name()["norm.running_var"]
    assert (found >= np.float32(0.0007)).all() and (found < 0.01).all()


def test_what_nobody_changes_stays_to_the_bit() -> None:
    of, frozen = plan(), floats(1, 0.123456789, 0.987654321, 1)
    parameters = begun(of, frozen)
    merge(parameters, [contribution(of, frozen, frozen, "bf16")] * 2)
    assert np.array_equal(parameters.tensors_by_name()["norm.running_var"], frozen[8:12])


def test_first_is_the_first_members_values() -> None:
    of, base = plan("first"), floats(1, 5, 40, 1)
    for rule in ("mean", "rda"):
        parameters = begun(of, base, merge=rule)
        merge(parameters, [contribution(of, base, floats(0, value, value, 0)) for value in (7, 9)])
        assert np.array_equal(parameters.tensors_by_name()["norm.running_var"], floats(7))


def test_no_momentum_and_no_learning_rate_moves_them() -> None:
    of = plan()
    parameters = begun(of, floats(1, 5, 40, 1), lr=0.5, momentum=0.9)
    for value in (4, 2, 2):
        base = np.concatenate(
            [parameters.tensors_by_name()[piece.tensor.name_in_model] for piece in of.fragments[0].pieces]
        )
        merge(parameters, [contribution(of, base, floats(-1, value, value, -1))])
        assert np.array_equal(parameters.tensors_by_name()["norm.running_mean"], floats(value))
    momentum = parameters.momentum(0)
    assert momentum is not None and not momentum[of.fragments[0].buffers].any() and momentum[:4].all()


def test_a_reader_of_the_journal_comes_to_the_same_bits() -> None:
    of, theta = plan(), floats(1, 5, 40, 1)
    parameters = begun(of, theta)
    rebuilt = RebuiltModel(of, Outer(), {"theta-000": theta.copy().view(np.uint8)})
    draw = np.random.default_rng(0)
    for _ in range(3):
        given = [draw.normal(size=16).astype(np.float32) for _ in WEIGHTS]
        mark = merge(parameters, [contribution(of, theta, one, "bf16") for one in given])
        assert rebuilt.take_step(0, [parameters.outer_gradient(0).tobytes()]) == mark
    assert rebuilt.tensors_by_name().keys() == parameters.tensors_by_name().keys() >= {"norm.running_var"}


@pytest.mark.parametrize("steps", [1, 24, 400])
def test_their_size_says_nothing_about_the_pace_of_a_learner(steps: int) -> None:
    of = plan()
    screen, base = NormScreen(of), floats(1, 0, 0, 1)
    for _ in range(20):
        assert screen.judge(0, contribution(of, base, floats(1 - 0.024, 50, 900, 1)), 24) is None
    assert screen.judge(0, contribution(of, base, floats(1 - 0.001 * steps, 50, 900, 1)), steps) is None
    broken = contribution(of, base, floats(1, np.nan, 900, 1))
    assert screen.judge(0, broken, steps) == "4 of 16 values are not finite"


def settled(of: FragmentPlan, committed: FloatArray) -> NormScreen:
    """Once norms are judged."""
    screen = NormScreen(of)
    for _ in range(8):
        assert (
            screen.judge(0, contribution(of, committed, committed - floats(0.01, 0, 0, 0)), committed=committed) is None
        )
    return screen


def judge(screen: NormScreen, of: FragmentPlan, committed: FloatArray, values: Sequence[float]) -> str | None:
    """Of one that gives these running statistics."""
    theta = committed - floats(0.01, 0, 0, 0)
    theta[of.fragments[0].buffers] = np.repeat(np.array(values, np.float32), 4)
    return screen.judge(0, contribution(of, committed, theta, "bf16"), committed=committed)


def test_statistics_beyond_all_bounds_are_refused() -> None:
    of, committed = plan(), floats(1, 3, 4, 1)
    screen = settled(of, committed)
    wrong = judge(screen, of, committed, [1e30, 1.0])
    assert wrong == "the norm of its buffers is 1.99e+30, over 1,000,000 times the run's 10"
    assert judge(screen, of, committed, [1e5, 1e5]) is None


def test_nobody_raises_the_bound_of_statistics_bit_by_bit() -> None:
    of, committed = plan(), floats(1, 3, 4, 1)
    screen = settled(of, committed)
    raised = floats(1, 1e6, 1e6, 1)
    assert judge(screen, of, committed, [1e6, 1e6]) is None and judge(screen, of, raised, [2e6, 2e6]) is None
    assert judge(screen, of, raised, [1e8, 1e8]) is not None
    assert judge(screen, of, raised, [3.0, 4.0]) is None, "whoever has the usual ones again is never refused"


def test_statistics_of_raw_data_are_taken_in_the_first_rounds_and_later() -> None:
    """From a mean of 0 and a variance of 1, while norms are not judged yet."""
    of, committed, found = plan(), floats(1, 0, 1, 1), [1e7, 1e12]
    screen = NormScreen(of)
    for _ in range(40):
        assert judge(screen, of, committed, found) is None
        committed = floats(1, *found, 1)


def test_a_dead_channel_may_come_back() -> None:
    of, dead = plan(), floats(1, 1e-30, 0, 1)
    screen = settled(of, dead)
    assert judge(screen, of, dead, [500.0, 90_000.0]) is None


def test_statistics_on_an_old_version_are_not_judged_since_they_are_not_merged() -> None:
    of, committed = plan(), floats(1, 3, 4, 1)
    assert settled(of, committed).judge(0, contribution(of, committed, floats(0.99, 1e30, 1, 1))) is None
