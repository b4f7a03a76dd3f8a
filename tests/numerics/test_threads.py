"""Any number of threads gives the bits of one pass after the other over the whole fragment."""

from __future__ import annotations

from threading import Barrier
from typing import Any
from unittest import mock
from weakref import ref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.choices import CODEC, MERGE, OUTER_OPTIMIZER
from atoll.config import Outer
from atoll.digests import compute_digest
from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import Delta, body_nbytes, decode_contribution, encode_contribution, make_codec
from atoll.numerics.compiled import MOST_THREADS, PART, _helpers, in_parts, thread_count
from atoll.numerics.filter import Filter
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.numerics.merge import take_mean
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import TensorSpec, buffer_name
from atoll.syncer import parameters
from atoll.syncer.outer_state import Overflow
from atoll.syncer.parameters import Parameters

THREADS = [1, 2, 3, 7]


@st.composite
def plans(draw: st.DrawFn) -> FragmentPlan:
    """A matrix of about as many values as one thread takes at a time, or twice as many; and what is treated apart."""
    width = draw(st.sampled_from([1, 63, 64, 65, 1000, PART - 1, PART, PART + 1]))
    rows = max(1, draw(st.sampled_from([1, 2])) * PART // width + draw(st.integers(-1, 1)))
    tensors = [TensorSpec("a", (rows, width), "float32"), TensorSpec("b", (draw(st.integers(1, 70)),), "float32")]
    if draw(st.booleans()):
        tensors.append(TensorSpec("c", (7, 5), "float32", embedding=True))
    if draw(st.booleans()):
        tensors.append(TensorSpec(buffer_name("first", "d"), (3,), "float32"))
        tensors.append(TensorSpec(buffer_name("mean", "e"), (9,), "float32"))
        tensors.append(TensorSpec("z", (11,), "float32"))
    return make_plan(tensors, 1)


def draw_deltas(plan: FragmentPlan, count: int, seed: int) -> list[FloatArray]:
    dice = np.random.default_rng(seed)
    return [dice.standard_normal(plan.size, dtype=np.float32) for _ in range(count)]


def made_with(threads: int, plan: FragmentPlan, outer: Outer, version_codec: str = "fp32") -> Parameters:
    with mock.patch.object(parameters, "thread_count", return_value=threads):
        made = Parameters(plan, outer, version_codec)
    assert made.threads == threads
    made.put_initial(0, np.linspace(-1, 1, plan.size, dtype=np.float32), "")
    made.commit_initial()
    return made


class WholePasses:
    """Merge, outer step, checksums and digest, one after the other over whole pieces, on one thread."""

    def __init__(self, plan: FragmentPlan, outer: Outer) -> None:
        self.part, self.by, self.optimizer = plan.fragments[0], MERGE.load(outer.merge), outer.make()
        self.embeddings = outer.merge == "rda-row-embeddings"
        self.theta = np.linspace(-1, 1, plan.size, dtype=np.float32)
        self.state = {name: np.zeros(plan.size, np.float32) for name in self.optimizer.slots()}
        self.gradient = np.empty(plan.size, np.float32)

    def merge(self, deltas: list[FloatArray], weights: list[float]) -> str:
        shares = np.array([weight / max(weights) for weight in weights])
        shares /= float(np.sum(shares))
        for piece, at in self.part.parts:
            given, out, rule = np.stack([one[at] for one in deltas]), self.gradient[at], piece.tensor.buffer_rule
            if len(given) == 1 or rule == "first":
                out[:] = given[0]
            elif rule or (piece.tensor.embedding and not self.embeddings):
                take_mean(given, shares, out)
            else:
                self.by.merge_piece(piece, given, shares, out)
            if rule:
                self.theta[at] -= out
            else:
                held = {name: values[at] for name, values in self.state.items()}
                self.optimizer.step(self.theta[at], self.theta[at], held, out)
        return compute_digest(self.theta.view(np.uint8).data)

    def piece_marks(self) -> bytes:
        return np.bitwise_xor.reduceat(self.theta.view(np.uint32), self.part.offsets).tobytes()


@given(plans(), st.sampled_from(MERGE.names()), st.sampled_from(OUTER_OPTIMIZER.names()), st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_a_round_is_the_same_version_with_any_number_of_threads(
    plan: FragmentPlan, rule: str, optimizer: str, members: int
) -> None:
    outer, weights = Outer(merge=rule, optimizer=optimizer), [1.0, 2.0, 4.0][:members]
    expected, made = WholePasses(plan, outer), [made_with(count, plan, outer) for count in THREADS]
    for version in (1, 2):
        deltas = draw_deltas(plan, members, version)
        mark = expected.merge(deltas, weights)
        for one in made:
            assert one.stage_merge(0, deltas, weights, bases=[version - 1] * members) == mark
            assert one.outer_gradient(0).tobytes() == expected.gradient.tobytes()
            assert one.piece_marks(0) == expected.piece_marks()
            one.commit_version(0, version, version)
            state = one._state[0].own_arrays()
            assert all(state[name].tobytes() == slot.tobytes() for name, slot in expected.state.items())


@given(plans(), st.sampled_from(["bf16", "int8", "int4", "topk"]), st.integers(0, 99))
@settings(max_examples=8, deadline=None)
def test_a_lossy_version_is_the_same_with_any_number_of_threads(plan: FragmentPlan, codec: str, seed: int) -> None:
    deltas, found = draw_deltas(plan, 2, seed), set()
    for count in THREADS:
        one = made_with(count, plan, Outer(), codec)
        mark = one.stage_merge(0, deltas, [1.0, 1.0], bases=[0, 0])
        found.add((mark, one.piece_marks(0), bytes(one.round_payload(0))))
        one.commit_version(0, 1, 1)
        assert len({*(slot.tobytes() for slot in one._state[0].own_arrays().values()), mark}) > 1
    assert len(found) == 1


@given(plans(), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=8, deadline=None)
def test_the_filter_judges_the_same_with_any_number_of_threads(plan: FragmentPlan, members: int, seed: int) -> None:
    *deltas, momentum = draw_deltas(plan, members + 1, seed)
    names, said = [f"l{n}" for n in range(members)], set()
    for count in THREADS:
        by = Filter(plan, count)
        for _ in range(2):
            judged = [
                *by.judge(0, names, deltas, momentum),
                *by.judge(0, names, deltas, momentum, round=1, sample=True),
            ]
        said.add(tuple((one.factors.tobytes(), one.agreement, one.suspect) for one in judged))
    assert len(said) == 1


@pytest.mark.parametrize("name", CODEC.names())
@given(plans(), st.integers(0, 99))
@settings(max_examples=4, deadline=None)
def test_bodies_are_the_same_both_ways_with_any_number_of_threads(name: str, plan: FragmentPlan, seed: int) -> None:
    (base, theta), part = draw_deltas(plan, 2, seed), plan.fragments[0]
    bodies, values = set(), set()
    for codec in (make_codec(name, count) for count in THREADS):
        body, out = np.empty(body_nbytes(codec, part), np.uint8), np.empty(plan.size, np.float32)
        encode_contribution(codec, part, Delta(base, theta), body)
        decode_contribution(codec, part, body, out)
        bodies.add(body.tobytes())
        values.add(out.tobytes())
    assert len(bodies) == len(values) == 1


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_first_fault_is_named_with_any_number_of_threads(name: str) -> None:
    rows, said = ((3, PART), (1, 100)), set()
    for codec in (make_codec(name, count) for count in THREADS):
        body = np.zeros(codec.nbytes(rows), np.uint8)
        body[[-1, body.size // 2, body.size // 3]] = 0x88 if name == "int4" else 0x80  # reserved codes
        with pytest.raises(PeerError) as raised:
            codec.check(body, rows)
        said.add(str(raised.value))
    assert len(said) == 1


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("place", [0, PART, 3 * PART - 1])
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_is_found_in_every_part(threads: int, place: int, broken: float) -> None:
    plan = make_plan([TensorSpec("t", (3, PART), "float32")], 1)
    made, delta = made_with(threads, plan, Outer()), np.ones(plan.size, np.float32)
    delta[place] = broken
    with pytest.raises(Overflow):
        made.stage_merge(0, [delta], [1.0])
    assert not any(slot.any() for slot in made._state[0].own_arrays().values()), "the outer state is reset"
    made.stage_merge(0, [np.ones(plan.size, np.float32)], [1.0])


def test_what_cannot_be_merged_changes_nothing() -> None:
    plan = make_plan([TensorSpec("t", (4,), "float32")], 1)
    made = made_with(2, plan, Outer())
    with pytest.raises(ValueError, match="sum to 0"):
        made.stage_merge(0, [np.ones(4, np.float32)], [0.0])
    assert not made._state[0].own_arrays()["momentum"].any() and len(made._versions[0]._spare) == 1


# ---- in_parts -------------------------------------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(1, 9), st.sampled_from(THREADS))
@settings(deadline=None)
def test_every_unit_is_worked_on_once(count: int, step: int, threads: int) -> None:
    done: list[int] = []
    in_parts(lambda first, last: done.extend(range(first, last)), count, step, threads)
    assert sorted(done) == list(range(count))


def test_threads_work_at_the_same_time() -> None:
    meet = Barrier(3)

    def work(first: int, last: int) -> None:
        meet.wait(60)

    in_parts(work, 3, 1, 3)


def test_a_failure_is_raised_after_all_threads_have_stopped() -> None:
    done: list[int] = []

    def work(first: int, last: int) -> None:
        if first == 0:
            raise ValueError("of a part")
        done.append(first)

    with pytest.raises(ValueError, match="of a part"):
        in_parts(work, 20, 1, 4)
    before = list(done)
    in_parts(lambda first, last: None, 20, 1, 4)
    assert done == before


def test_helpers_that_come_late_do_not_keep_what_was_worked_on() -> None:
    busy = 2 * MOST_THREADS
    together = Barrier(busy + 1, timeout=60)
    for _ in range(busy):
        _helpers().submit(together.wait)
    values = np.zeros(3)
    kept = ref(values)
    in_parts(lambda first, last, values=values: values[first:last].fill(1.0), 3, 1, 3)
    del values
    assert kept() is None
    together.wait()


def test_work_in_parts_may_run_in_parts_itself() -> None:
    """More callers than helpers: each does its own work, and nobody waits for a helper that never comes."""
    done: list[Any] = []
    in_parts(lambda a, _: in_parts(lambda b, _: done.append((a, b)), 5, 1, 7), 40, 1, 100)
    assert sorted(done) == [(a, b) for a in range(40) for b in range(5)]


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (3, 2), (4, 2), (8, 4), (16, 8), (64, 8)])
def test_half_of_the_cores_are_left_to_learners(cores: int, threads: int) -> None:
    with mock.patch("os.sched_getaffinity", return_value=set(range(cores))):
        assert thread_count() == threads
