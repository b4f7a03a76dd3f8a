from __future__ import annotations

import numpy as np
import pytest

from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import Delta, make_codec
from atoll.numerics.fragments import make_plan
from atoll.numerics.screen import NormScreen, UsualNorms
from atoll.protocol.messages import TensorSpec, buffer_name

WIDTH = 4096
CYCLE = 24


def of_norm(norm: float, size: int = 4) -> FloatArray:
    values = np.zeros(size, np.float32)
    values[0] = norm
    return values


def seasoned(norm: float = 0.3, count: int = 8) -> NormScreen:
    screen = NormScreen([4, 2])
    assert [screen.judge(0, of_norm(norm)) for _ in range(count)] == [None] * count
    return screen


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_broken_numbers_are_refused_and_counted(broken: float) -> None:
    delta = np.ones(4096, np.float32)
    delta[[0, 77, 4095]] = broken
    assert NormScreen([4096]).judge(0, delta) == "3 of 4096 values are not finite"


def test_broken_numbers_are_counted_over_the_whole_fragment() -> None:
    delta = np.full(200_000, np.nan, np.float32)
    assert NormScreen([200_000]).judge(0, delta) == "200000 of 200000 values are not finite"


def test_the_largest_float_is_finite() -> None:
    assert NormScreen([1000]).judge(0, np.full(1000, 3.4028235e38, np.float32)) is None


def test_an_absurd_norm_is_refused() -> None:
    assert seasoned(0.3).judge(0, of_norm(1230)) == "norm 1.23e+03 is 4.1e+03 times the running median 0.3 (limit 10)"


def test_a_norm_that_may_be_sound_is_refused_with_the_setting_that_lets_it_in() -> None:
    """As after a learning rate that rose again."""
    screen = seasoned(0.3)
    told = "norm 12.3 is 41 times the running median 0.3 (limit 10)"
    assert screen.judge(0, of_norm(12.3)) == f"{told}; if its learning rate rose: atoll set RUN norm_limit=82"
    screen.limit = 82.0
    assert screen.judge(0, of_norm(12.3)) is None


def test_a_large_norm_within_the_limit_is_accepted() -> None:
    assert seasoned(0.5).judge(0, of_norm(5.0)) is None
    assert seasoned(0.5).judge(0, of_norm(5.01)) is not None


def test_before_there_are_enough_norms_only_what_is_absurd_is_refused() -> None:
    """A learning rate that warms up makes norms grow by much, but not by a thousand."""
    assert seasoned(0.3, count=3).judge(0, of_norm(1e6)) is None, "nothing is known"
    assert seasoned(0.3, count=7).judge(0, of_norm(290.0)) is None
    assert seasoned(0.3, count=7).judge(0, of_norm(310.0)) is not None
    assert seasoned(0.3, count=8).judge(0, of_norm(3.1)) is not None


def test_a_fragment_without_a_gradient_in_the_first_step_is_judged_by_what_others_do() -> None:
    """Parameters in front of a matrix that starts at zero move by weight decay alone, a thousandth of what comes."""
    screen = NormScreen([4, 16])
    for _ in range(4):
        assert screen.judge(0, of_norm(0.3)) is None and screen.judge(1, of_norm(1e-5, size=16)) is None
    assert screen.judge(1, of_norm(601.0, size=16)) is not None, "a thousand times what others do, for each value"
    assert [screen.judge(1, of_norm(2.0, size=16)) for _ in range(5)] == [None] * 5
    assert screen.judge(1, of_norm(21.0, size=16)) is not None, "by now its own norms are known"


@pytest.mark.parametrize(("moves", "starts", "most"), [(0, 1, 200.0), (1, 0, 800.0)])
def test_buffers_do_not_count_where_fragments_are_compared_for_each_value(moves: int, starts: int, most: float) -> None:
    """A norm is of parameters alone: 16 of them in one fragment, in the other 4 beside 12 values of buffers."""
    tensors = [("a", 16), (buffer_name("mean", "b"), 12), ("c", 4)]
    plan = make_plan([TensorSpec(name, (size,), "float32") for name, size in tensors], 2)
    assert [part.buffers.stop - part.buffers.start for part in plan.fragments] == [0, 12]
    screen = NormScreen(plan)

    def judge(fragment: int, norm: float) -> str | None:
        values = np.zeros(16, np.float32)
        values[0 if plan.fragments[fragment].buffers.start else -1] = norm
        return screen.judge(fragment, values)

    for _ in range(4):
        assert judge(moves, 0.4) is None and judge(starts, 1e-6) is None
    assert judge(starts, 1.01 * most) is not None and judge(starts, 0.99 * most) is None


def test_a_new_term_knows_what_was_usual() -> None:
    screen = NormScreen([4, 2])
    screen.restore_norms(seasoned(0.3).usual_norms())
    assert screen.judge(0, of_norm(12.3)) is not None and screen.judge(0, of_norm(0.4)) is None


@pytest.mark.parametrize("norms", [[], [[0.3] * 8], [[0.3] * 8, [float("nan")]], [[-1.0] * 8, []]])
def test_norms_of_another_plan_or_broken_ones_say_nothing(norms: list[list[float]]) -> None:
    screen = NormScreen([4, 2])
    screen.restore_norms(UsualNorms(norms, [0.0] * len(norms)))
    assert screen.judge(0, of_norm(1e6)) is None


def test_claimed_steps_do_not_make_a_norm_small() -> None:
    """Steps are the learner's own word: 10^9 of them would let any size in."""
    screen = NormScreen([4], most_steps=16 * 24)
    for _ in range(8):
        assert screen.judge(0, of_norm(0.3 * 24), steps=24) is None
    assert screen.judge(0, of_norm(0.3 * 24 * 20), steps=24 * 20) is None, "it was away for twenty cycles"
    assert screen.judge(0, of_norm(0.3 * 24 * 1e6), steps=10**9) is not None


def test_each_fragment_has_its_own_usual() -> None:
    assert seasoned(0.3).judge(1, of_norm(1e6, size=2)) is None


def test_a_refused_norm_is_not_remembered() -> None:
    screen = seasoned(0.3)
    for _ in range(200):
        assert screen.judge(0, of_norm(100.0)) is not None
    assert screen.judge(0, of_norm(0.3)) is None


def test_the_usual_follows_what_is_accepted() -> None:
    screen = seasoned(1.0)
    for norm in (5.0, 25.0, 125.0):
        for _ in range(64):
            assert screen.judge(0, of_norm(norm)) is None


def test_what_was_usual_once_is_not_absurd_later() -> None:
    """Near a loss of zero norms are tiny. Healthy learners were refused, quarantined, and refused again for the steps
    of their new inner optimizers."""
    screen = seasoned(0.05)
    for norm in (0.01, 0.002, 0.0005):
        assert [screen.judge(0, of_norm(norm)) for _ in range(64)] == [None] * 64
    assert screen.judge(0, of_norm(0.09)) is None, "as at the beginning of the run"
    assert screen.judge(0, of_norm(0.11)) is not None
    later = NormScreen([4, 2])
    later.restore_norms(screen.usual_norms())
    assert later.judge(0, of_norm(0.09)) is None and later.judge(0, of_norm(0.11)) is not None, "in a new term too"


def test_zeros_do_not_make_everything_else_absurd() -> None:
    screen = seasoned(0.0, count=64)
    assert screen.judge(0, of_norm(1.0)) is None


def test_a_learner_that_was_not_heard_for_long_has_more_to_give() -> None:
    screen = NormScreen([4])
    assert [screen.judge(0, of_norm(2.4), steps=24) for _ in range(8)] == [None] * 8
    assert screen.judge(0, of_norm(100.0), steps=1000) is None
    refusal = screen.judge(0, of_norm(100.0), steps=24)
    assert refusal is not None
    assert refusal.startswith("norm per step 4.17 is 41.7 times the running median 0.1 (limit 10); ")


@pytest.mark.parametrize("cycle", [CYCLE, 20 * CYCLE])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "topk"])
@pytest.mark.parametrize("wander", [0.0, 1.0])
def test_the_last_steps_of_learners_that_no_longer_drift_are_taken(codec: str, cycle: int, wander: float) -> None:
    """They were refused at the end of a run, and their tokens were lost: the norm of steps that undo each other does
    not grow with their number (`wander` = 0), and that of random ones only with its root."""
    dice = np.random.default_rng(0)
    screen = screen_of(codec)

    def give(steps: int) -> str | None:
        length = 1.0 + wander * (np.sqrt(steps) - 1.0)
        return screen.judge(0, (length * dice.standard_normal(WIDTH)).astype(np.float32), steps)

    assert [give(cycle) for _ in range(16)] == [None] * 16
    assert [give(steps) for steps in (1, 2, 1)] == [None] * 3
    assert [give(cycle) for _ in range(16)] == [None] * 16, "and those of a cycle as before"


def test_a_short_contribution_may_be_as_large_as_one_of_usual_length_and_no_larger() -> None:
    screen = NormScreen([4])
    for steps in (CYCLE,) * 8 + (16 * CYCLE,) * 7:
        assert screen.judge(0, of_norm(0.3 * steps), steps) is None
    most = 10 * 0.3 * CYCLE
    assert screen.judge(0, of_norm(1.01 * most), 1, key="above") is not None
    assert screen.judge(0, of_norm(0.99 * most), 1, key="below") is None
    assert screen.judge(0, of_norm(1.99 * most), 2 * CYCLE, key="of its own steps") is None


def test_a_new_term_knows_how_many_steps_are_usual() -> None:
    screen = NormScreen([4])
    assert [screen.judge(0, of_norm(0.3 * CYCLE), CYCLE) for _ in range(8)] == [None] * 8
    later = NormScreen([4])
    later.restore_norms(screen.usual_norms())
    assert later.judge(0, of_norm(0.3 * CYCLE), 1) is None


def test_another_length_or_fragment_is_refused() -> None:
    assert NormScreen([4, 2]).judge(1, of_norm(1.0, size=4)) == "4 values came, fragment 1 has 2"
    assert NormScreen([4, 2]).judge(2, of_norm(1.0)) == "fragment 2 is not one of the plan's 2"
    assert NormScreen([4, 2]).judge(-1, of_norm(1.0)) == "fragment -1 is not one of the plan's 2"


def test_a_plan_says_the_sizes() -> None:
    screen = NormScreen(make_plan([TensorSpec("a", (1, 6), "float32"), TensorSpec("b", (2,), "float32")], 2))
    assert screen.judge(0, of_norm(1.0, size=6)) is None
    assert screen.judge(1, of_norm(1.0, size=6)) == "6 values came, fragment 1 has 2"


def test_what_is_found_in_order_but_not_merged_does_not_shift_what_is_usual() -> None:
    """Otherwise contributions that are refused for another reason could make honest ones look absurd."""
    screen = seasoned(0.3)
    for number in range(200):
        assert screen.judge(0, of_norm(1e-6), key=number) is None
        screen.forget_norm(number)
    assert screen.judge(0, of_norm(0.3), key="honest") is None
    screen.note_merged("honest")
    assert screen.judge(0, of_norm(2.9)) is None and screen.judge(0, of_norm(3.1)) is not None
    screen.note_merged("nobody")


# ---- codecs with feedback -------------------------------------------------------------------------------------------


class Sender:
    """A learner that drifts in one direction, with noise, and keeps what its bodies leave out once they are merged."""

    def __init__(self, codec: str, screen: NormScreen) -> None:
        self.codec, self.screen = make_codec(codec), screen
        self._dice = np.random.default_rng(0)
        self._drift = 0.02 * self._dice.standard_normal(WIDTH) ** 3
        self._feedback, self._nothing = np.zeros(WIDTH, np.float32), np.zeros(WIDTH, np.float32)

    def give(self, steps: int, times: float = 1.0) -> str | None:
        moved = steps * self._drift + np.sqrt(steps) * 0.05 * self._dice.standard_normal(WIDTH)
        delta = Delta((times * moved).astype(np.float32), self._nothing, self._feedback, np.empty(WIDTH, np.float32))
        rows = [(1, WIDTH)]
        body, decoded = np.empty(self.codec.nbytes(rows), np.uint8), np.empty(WIDTH, np.float32)
        self.codec.encode_delta(delta, rows, body)
        self.codec.decode(body, rows, decoded)
        refusal = self.screen.judge(0, decoded, steps)
        if refusal is None:
            assert delta.rest is not None
            self._feedback = delta.rest
        return refusal

    def give_often(self, steps: int, count: int) -> Sender:
        assert [self.give(steps) for _ in range(count)] == [None] * count
        return self


def screen_of(codec: str) -> NormScreen:
    """As the syncer makes it."""
    return NormScreen([WIDTH], most_steps=16 * CYCLE, feedback=make_codec(codec).needs_feedback)


@pytest.mark.parametrize("cycle", [CYCLE, 10 * CYCLE])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "topk"])
def test_a_last_step_with_the_feedback_of_many_is_taken(codec: str, cycle: int) -> None:
    """With topk it was refused, and its tokens were lost; with int4 where links are slow, so that cycles are long."""
    sender = Sender(codec, screen_of(codec)).give_often(cycle, 24)
    assert [sender.give(1), sender.give(2)] == [None, None]


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "topk"])
def test_what_follows_a_long_time_alone_is_taken(codec: str) -> None:
    """Three refusals in a row were a quarantine."""
    sender = Sender(codec, screen_of(codec)).give_often(CYCLE, 24)
    assert sender.give(100 * CYCLE) is None
    sender.give_often(CYCLE, 24)


@pytest.mark.parametrize("steps", [1, CYCLE])
@pytest.mark.parametrize("codec", ["int8", "int4", "topk"])
def test_feedback_excuses_no_absurd_norm(codec: str, steps: int) -> None:
    sender = Sender(codec, screen_of(codec)).give_often(CYCLE, 24)
    refusal = sender.give(steps, times=50 * CYCLE / steps)
    assert refusal is not None and "times the running median" in refusal
    assert sender.give(100 * CYCLE) is None
    assert sender.give(steps, times=1000 * CYCLE / steps) is not None, "nor after a long time alone"


def test_with_feedback_one_step_may_be_as_large_as_the_longest_contribution_and_no_larger() -> None:
    for feedback, most in ((True, 10 * 0.3 * 16 * CYCLE), (False, 10 * 0.3 * CYCLE)):
        screen = NormScreen([4], feedback=feedback)
        for steps in (CYCLE,) * 8 + (16 * CYCLE,):
            assert screen.judge(0, of_norm(0.3 * steps), steps) is None
        assert screen.judge(0, of_norm(1.01 * most), key="above") is not None
        assert screen.judge(0, of_norm(0.99 * most), key="below") is None


def test_a_new_term_knows_how_many_steps_feedback_may_hold() -> None:
    sender = Sender("topk", screen_of("topk")).give_often(CYCLE, 24)
    known, sender.screen = sender.screen.usual_norms(), screen_of("topk")
    sender.screen.restore_norms(known)
    assert sender.give(1) is None
    sender.screen = screen_of("topk")
    sender.screen.restore_norms(UsualNorms(known.recent, known.highest))
    assert sender.give(1) is not None, "norms of an earlier Atoll had no steps beside them"


def test_claimed_steps_count_no_further_for_what_follows() -> None:
    screen = NormScreen([4], most_steps=16 * CYCLE, feedback=True)
    for _ in range(8):
        assert screen.judge(0, of_norm(0.3 * CYCLE), steps=CYCLE) is None
    assert screen.judge(0, of_norm(0.3 * CYCLE), steps=10**9) is None
    assert screen.judge(0, of_norm(0.3 * CYCLE * 16 * 11)) is not None
