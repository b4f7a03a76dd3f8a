from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.statistics import median
from atoll.protocol.syncer.claims import (
    KNOWN_STEPS,
    MAX_RATIO,
    MAX_RATIO_NEW,
    Usual,
    beyond_lease,
    beyond_rate,
    beyond_steps,
)

step_s = st.floats(0.01, 10.0)
per_step = st.integers(1, 100_000)


def usual(steps: int = 100, tokens: int = 1000, seconds: float = 100.0) -> Usual:
    """Ten tokens a step, a step a second."""
    own = Usual()
    own.add(0.0, 0, 0)
    own.add(seconds, steps, tokens)
    return own


def median_of(others: list[float]) -> float | None:
    return median(others) if others else None


def more(now: float, steps: int, tokens: int, own: Usual, others: list[float]) -> str | None:
    """What is wrong with so much more than its last report said."""
    return beyond_rate(now, own.t + steps, own.total + tokens, own, lambda: median_of(others))


# ---- leases -------------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(-1, 1000), st.integers(0, 1000))
def test_a_place_in_a_lease_lies_within_it_and_never_goes_back(position: int, before: int, leased: int) -> None:
    believed = beyond_lease(position, before, leased) is None
    assert believed == (position <= leased and position >= before)


def test_a_place_beyond_says_why() -> None:
    assert beyond_lease(9, 3, 8) == "it says it took 9 samples, 8 were leased to it"
    assert beyond_lease(2, 3, 8) == "its place in its leases went back from 3 to 2"
    assert beyond_lease(-1, 3, 8) is None, "it went over to data of its own"


# ---- tokens -------------------------------------------------------------------------------------------------------


@given(
    per_step,
    st.lists(st.tuples(st.floats(0.0, 1000.0), st.integers(0, 50), st.floats(0.2, 4.0)), max_size=60),
    st.lists(st.floats(1.0, 1e6), max_size=5),
)
def test_honest_reports_are_believed_however_they_come(
    tokens: int, reports: list[tuple[float, int, float]], others: list[float]
) -> None:
    """Any wait before a report, any number of steps in it, batches within a factor of 4 and a fifth of the usual."""
    own, now = Usual(), 0.0
    own.add(now, 0, 0)
    own.add(now + 60.0, 64, 64 * tokens)
    now += 60.0
    for wait_s, steps, size in reports:
        now += wait_s
        claimed = round(steps * tokens * size)
        assert more(now, steps, claimed, own, others) is None
        assert beyond_steps(steps, claimed, own, lambda: median_of(others)) is None
        own.add(now, own.t + steps, own.total + min(claimed, steps * tokens))


@given(per_step, step_s, st.floats(1.01, 1e6), st.lists(st.floats(1.0, 10.0), max_size=5))
def test_a_step_of_many_times_the_usual_in_no_time_is_not_believed(
    tokens: int, step_s: float, times: float, others: list[float]
) -> None:
    own = usual(100, 100 * tokens, 100 * step_s)
    measure = max(tokens, *others) if others else tokens
    claimed = int(MAX_RATIO * measure * times) + tokens + 1
    assert more(own.at, 1, claimed, own, others) is not None


def test_what_is_not_believed_says_what_is_usual() -> None:
    wrong = more(101.0, 1, 100_000, usual(), [12.0, 8.0])
    assert wrong == "100000 tokens in 1 s, where 10 are usual: 1e+05 tokens per step, where 10 are usual"


def test_larger_batches_are_believed_where_they_take_their_time() -> None:
    assert more(101.0, 1, 900, usual(), []) is not None
    assert more(200.0, 1, 900, usual(), []) is None


def test_larger_batches_are_believed_where_everybody_has_them() -> None:
    assert more(100.5, 1, 900, usual(), [10.0, 10.0]) is not None
    assert more(100.5, 1, 900, usual(), [900.0, 900.0, 10.0]) is None


def test_a_burst_after_a_pause_is_believed() -> None:
    assert more(100.0, 500, 5000, usual(), lambda: 10.0) is None, "many steps at once, each of the usual size"


def test_nobody_is_judged_by_a_short_life_or_by_nothing() -> None:
    few = usual(KNOWN_STEPS - 1, 10 * (KNOWN_STEPS - 1))
    assert more(100.0, 1, 10**9, few, []) is None
    assert more(100.0, 1, 10**9, usual(tokens=0), []) is None
    assert more(100.0, 1, 10**9, Usual(), []) is None
    at_once = usual(seconds=0.0)
    assert not at_once.known, "a burst alone gives no rate"


@given(st.integers(0, KNOWN_STEPS - 1), st.floats(1.0, 1e6), st.integers(1, 50), st.floats(0.01, 1.0))
def test_a_short_life_has_the_others_for_a_measure(made: int, usual_of: float, steps: int, share: float) -> None:
    own = usual(made, 10 * made) if made else Usual()
    others = [usual_of, usual_of, 1e9]
    within = int(MAX_RATIO_NEW * usual_of * steps * share)
    assert (
        more(own.at, steps, within, own, others) is None
        and beyond_steps(steps, within, own, lambda: median_of(others)) is None
    )
    beyond = int(MAX_RATIO_NEW * usual_of * steps) + steps
    assert more(own.at, steps, beyond, own, others) is not None
    assert beyond_steps(steps, beyond, own, lambda: median_of(others)) is not None


def test_what_it_had_before_its_first_report_is_no_measure() -> None:
    own = Usual()
    own.add(5.0, 1000, 10**9)
    own.add(6.0, 1001, 10**9 + 10)
    assert (own.steps, own.tokens) == (1, 10)


def test_a_report_without_a_step_is_no_measure_of_time() -> None:
    own = usual()
    own.add(100.9, 100, 1000)
    assert own.at == 100.0


def test_a_contribution_of_few_steps_and_many_tokens_is_not_believed() -> None:
    assert beyond_steps(24, 240, usual(), lambda: 10.0) is None
    assert beyond_steps(1, 240, usual(), lambda: 10.0) == "240 tokens per step, where 10 are usual"
    assert beyond_steps(1, 240, usual(), lambda: 240.0) is None


def test_what_was_trained_on_while_the_line_was_down_is_believed() -> None:
    """Its usual pace looks slow after a long pause; then many steps come in one report, each of the usual size."""
    own = usual(seconds=10_000.0)
    assert more(10_060.0, 60, 600, own, []) is None
