"""What counts towards a budget of tokens: what can be, and nobody's word alone."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.world import World

from atoll.protocol.history import History
from atoll.protocol.messages import Hello, Progress
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.budget import LEAST_S, Counted, believed_rate, rate_of
from atoll.protocol.syncer.claims import MAX_RATIO_NEW, Usual
from atoll.protocol.syncer.machine import Syncer


def test_whoever_is_alone_is_believed() -> None:
    counted = Counted()
    counted.add(1.0, 10**9, lambda: None)
    assert counted.tokens == 10**9


def test_what_did_not_count_while_the_others_had_shown_nothing_counts_later() -> None:
    counted = Counted()
    counted.add(1.0, 100, lambda: believed_rate([], 3600))
    assert counted.tokens == 1
    counted.add(2.0, 200, lambda: 6400.0)
    assert counted.tokens == 200


@given(st.lists(st.tuples(st.floats(0.001, 100.0), st.integers(0, 2**48)), min_size=1, max_size=50))
def test_no_number_of_reports_is_worth_more_than_the_time_they_took(reports: list[tuple[float, int]]) -> None:
    counted, now, total = Counted(), 0.0, 0
    for wait_s, more in reports:
        now, total = now + wait_s, total + more
        counted.add(now, total, lambda: 640.0)
        assert counted.tokens <= min(total, 640.0 * now + 1)


@given(st.floats(0.01, 10.0), st.integers(1, 10_000), st.integers(1, 40), st.data())
def test_an_honest_learner_is_believed_in_bursts_and_after_a_silence(
    step_s: float, per_step: int, times: int, data: st.DataObject
) -> None:
    """Up to forty times as fast as the others, from its first step on."""
    counted, now, total = Counted(), 0.0, 0
    rate = believed_rate([per_step / step_s / times], 1)
    for steps in data.draw(st.lists(st.integers(1, 500), max_size=20)):
        now, total = now + steps * step_s, total + steps * per_step
        for said in range(total - steps * per_step, total + 1, max(1, steps * per_step // 7)):
            counted.add(now, said, lambda: rate)
        counted.add(now, total, lambda: rate)
        assert counted.tokens == total


@given(st.lists(st.floats(0.0, 1e9), min_size=1, max_size=9), st.integers(1, 2**47))
def test_a_budget_is_spent_in_its_least_time_however_slow_the_others_are(others: list[float], budget: int) -> None:
    rate = believed_rate(others, budget)
    assert rate * LEAST_S >= budget * (1 - 1e-9)
    assert rate <= max(budget / LEAST_S, MAX_RATIO_NEW * sorted(others)[len(others) // 2]), (
        "half of them raise it no more"
    )


def test_what_is_believed_is_what_the_others_see() -> None:
    boast = Usual()
    boast.add(0.0, 0, 0)
    boast.add(1.0, 1, 2**47)
    assert rate_of(Counted(100, 0.0, 10.0), boast) == 10.0
    assert rate_of(Counted(), boast) == 2**47
    assert rate_of(Counted(), Usual()) is None


# ---- in a run -----------------------------------------------------------------------------------------------------


def begun(tokens: int = 10**9) -> Syncer:
    """Two learners that have taken the run's parameters and made no step."""
    settings = Settings(learners=2, fragments=2, sync_every=4, tokens=tokens).resolved(4)
    syncer = Syncer.fresh(settings, run="r", fingerprint="")
    for name in ("a", "b"):
        syncer.handle(0.0, fx.Greeted(Hello(protocol=2, learner=name, session=f"s-{name}")))
    syncer.handle(0.0, fx.Initialised("a", "s-a"))
    for name in ("a", "b"):
        report(syncer, 0.1, name, 0, 0)
    return syncer


def report(syncer: Syncer, now: float, name: str, t: int, total: int) -> None:
    none = (0, 0)
    said = Progress(t=t, steps=(t, t), tokens=(total, total), versions=none, tokens_total=total, incarnation=1)
    syncer.handle(now, fx.Received(name, msgspec.structs.replace(said, dropped=none, counted=none)))


def test_one_that_trains_on_next_to_nothing_does_not_keep_a_run_from_its_end() -> None:
    syncer = begun(36_000)
    for t in range(1, 1900):
        report(syncer, float(t), "b", t, 1)
        report(syncer, float(t), "a", t, 10 * t)
        if syncer.phase == "running":
            assert syncer.progress == pytest.approx((10 * t + 1) / 36_000, abs=1e-3)


@pytest.mark.parametrize("steps", [1, 2**40])
@pytest.mark.parametrize("after", [0, 5])
def test_one_report_does_not_end_a_run(steps: int, after: int) -> None:
    syncer = begun()
    for t in range(1, after + 1):
        report(syncer, float(t), "a", t, 100 * t)
    for more in range(100):
        report(syncer, after + 0.2 + more / 1000, "b", steps + more, 2**47 + more)
    assert syncer.phase == "running" and syncer.progress < 0.01
    report(syncer, 7.0, "a", after + 2, 100 * after + 200)
    report(syncer, 7.1, "b", steps + 100, 2**47 + 100)
    assert syncer.phase == "running" and syncer.progress < 0.01


def test_one_report_does_not_end_a_run_whose_others_are_long_in_their_first_step() -> None:
    syncer, now = begun(), 0.1
    while now < 600.0:
        now += 1.0
        report(syncer, now, "a", 0, 0)
        report(syncer, now, "b", 0, 0)
    for more in range(100):
        report(syncer, now + more / 1000, "b", 1 + more, 10**9 + more)
    assert syncer.phase == "running" and syncer.progress < 0.2, "no more than 600 s of an hour"


def test_whoever_is_left_alone_is_believed_though_the_other_never_made_a_step() -> None:
    syncer, now = begun(), 0.1
    while now < 100.0:
        now += 1.0
        report(syncer, now, "b", 0, 0)
    assert not syncer.members.learners["a"].connected
    report(syncer, now, "b", 1, 10**9)
    assert syncer.phase == "ending"


def test_one_that_restarts_again_and_again_does_not_keep_tokens_from_counting() -> None:
    syncer = begun(3600)
    for t in range(1, 1801):
        if t % 30 == 0:
            syncer.handle(float(t), fx.Greeted(Hello(protocol=2, learner="a", session=f"s-{t}")))
        report(syncer, float(t), "b", t, t)
    assert syncer.progress == pytest.approx(0.5, abs=0.01)


def test_a_new_term_counts_no_more_than_the_one_before_did() -> None:
    syncer = begun()
    report(syncer, 1.0, "a", 1, 100)
    report(syncer, 1.0, "b", 1, 2**47)
    counted = syncer.members.total_tokens()
    life = syncer.history.lives["b"]
    life.total = 2**47
    syncer.history.progress = syncer.progress
    again = Syncer(History.restore(syncer.history.state()))
    assert again.members.total_tokens() <= counted + 1 and again.progress < 0.001


@pytest.mark.parametrize("closed", [False, True])
def test_a_new_term_counts_what_its_learners_make_however_long_its_machine_is_up(closed: bool) -> None:
    """Its clock may read anything; the tokens of the term before it are no measure of a rate."""
    syncer = begun(4000)
    for t in range(1, 6):
        for name in ("a", "b"):
            report(syncer, float(t), name, t, 100 * t)
    syncer.history.progress = syncer.progress
    for life in syncer.history.lives.values():
        life.total, life.open = 500, not closed
    again, up_s = Syncer(History.restore(syncer.history.state())), 1e6
    for name in ("a", "b"):
        again.handle(
            up_s, fx.Greeted(Hello(protocol=2, learner=name, session=f"s-{name}", run="r", incarnation=1, t=5))
        )
    made = 0
    while again.phase in ("assembling", "running") and made < 40:
        made += 1
        for name in ("a", "b"):
            learner = again.members.learners[name]
            said = Progress(
                t=5 + made,
                steps=(made, made),
                tokens=(100 * made, 100 * made),
                versions=(0, 0),
                tokens_total=500 + 100 * made,
                incarnation=learner.incarnation,
                dropped=(0, 0),
                counted=(0, 0),
            )
            again.handle(up_s + made, fx.Received(name, said))
    assert again.phase == "ending" and made < 20, (again.phase, made, again.members.total_tokens())


def test_an_honest_run_ends_on_its_budget_to_the_token() -> None:
    world = World(2, fragments=2, sync_every=4, tokens=400, step_s=[1.0, 0.1]).run_to_end()
    [ended] = world.said("ending")
    assert "the budget of 400 tokens is spent" in ended.text
    assert 400 <= world.syncer.members.total_tokens() < 500
