"""All interleavings of a few learners, fragments and faults: no rule is broken, and a bug that is planted is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.scope.calm import calmly
from tests.scope.form import clone, form
from tests.scope.search import SCOPES, Scope, search
from tests.scope.turn import take
from tests.scope.world import State, choices
from tests.simulate.mutants import planted

from atoll.protocol.learner import effects as fx
from atoll.protocol.messages import Hello
from atoll.protocol.syncer.membership import KnownLearner, Membership


@pytest.mark.parametrize("scope", SCOPES, ids=lambda scope: scope.name)
def test_no_order_of_things_breaks_a_rule(scope: Scope) -> None:
    found = search(scope, states=120)
    assert found.violation is None, "\n".join(found.violation.story)
    assert found.states >= 120


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_states(capsys: pytest.CaptureFixture[str]) -> None:
    known: set[bytes] = set()
    for scope in SCOPES:
        found = search(scope, states=14_000, known=known)
        with capsys.disabled():
            print(f"\n{found}", end="", flush=True)
        assert found.violation is None, "\n".join(found.violation.story)
    with capsys.disabled():
        print(f"\n{len(known):,} distinct states in all")
    assert len(known) >= 100_000


def test_the_same_search_finds_the_same_states() -> None:
    first, second = (search(SCOPES[1], states=120) for _ in range(2))
    assert first == second


# ---- what counts as the same state --------------------------------------------------------------------------------


def a_state() -> State:
    scope = Scope("three rounds", rounds=3)
    return scope.start()


def test_states_that_differ_only_in_clock_values_count_once() -> None:
    scope = Scope("as before, but slower", rounds=3)
    slow = a_state()
    slow.now += 0.125
    fast, slow = take(a_state(), ("step", "learner-0")), take(slow, ("step", "learner-0"))
    assert fast.now != slow.now and fast.form() == slow.form()
    assert scope.start().form() == a_state().form()


def test_a_timer_that_is_set_is_another_state_than_one_that_is_not() -> None:
    state = a_state()
    other = clone(state.syncer.machine)
    other.wake_at = None
    assert form(other) != form(state.syncer.machine)


def test_every_choice_leaves_the_state_it_starts_from_as_it_was() -> None:
    state = a_state()
    before = state.form()
    for choice in list(choices(state)):
        take(state, choice)
        marks = [form(syncer.machine) == syncer.mark for syncer in state.syncers.values()]
        marks += [form(learner.process) == learner.mark for learner in state.learners.values()]
        assert all(marks) and state.form() == before, choice


def test_a_copy_behaves_like_what_it_was_copied_from() -> None:
    """The copy of a machine is bound to itself, not to the original."""
    state = a_state()
    machine = state.learners["learner-0"].process.machine
    before, copy = form(machine), clone(machine)
    copy.handle(state.now, fx.Disconnected("connection reset"))
    assert form(machine) == before != form(copy)


# ---- planted bugs -------------------------------------------------------------------------------------------------


def test_a_bug_is_found_by_the_shortest_way_and_told_as_a_story(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Membership.find_or_begin_life

    def greet(self: Membership, now: float, hello: Hello, run: str) -> tuple[KnownLearner, bool]:
        """Another process under a known name is taken for a new life of the same number."""
        known = self.learners.get(hello.learner)
        learner, new = plain(self, now, hello, run)
        if known is not None and new:
            learner.incarnation = known.incarnation
        return learner, new

    monkeypatch.setattr(Membership, "find_or_begin_life", greet)
    found = search(Scope("rounds under way", rounds=3), states=5000)
    assert found.violation is not None and "incarnation" in found.violation.text
    assert [kind for kind, _ in found.violation.path] == ["crash", "step", "kill"]
    assert found.violation.story[-1].startswith("!!!")


@pytest.mark.parametrize(
    ("bug", "rule"),
    [
        ("a learner is welcomed before its incarnation is durable", "told only what is durable"),
        ("a lease is sent before it is durable", "told only what is durable"),
        ("a skipped round is not written down", "what is decided is written"),
        pytest.param(
            *("what a version holds is counted as dropped too", "the ledger balances"), marks=pytest.mark.faults
        ),
    ],
)
def test_planted_bugs_are_found_by_the_search_too(bug: str, rule: str) -> None:
    with planted(bug):
        scopes = [scope for scope in SCOPES if scope.name in ("a run begins", "the run ends")]
        broken = [found.violation for found in (search(scope, states=400) for scope in scopes) if found.violation]
    assert broken and broken[0].rule == rule


def test_a_bug_that_a_calm_run_shows_needs_no_search() -> None:
    with planted("a round is announced before it is durable"):
        found = search(Scope("rounds under way", rounds=3), states=5000)
    assert found.violation is not None and found.violation.rule == "durable, then committed"


@pytest.mark.parametrize(
    "until",
    [
        lambda one: one.syncer.machine.phase == "finished",
        lambda one: all(p.process.over for p in one.learners.values()),
    ],
)
def test_a_calm_run_comes_to_its_end(until: Callable[[State], bool]) -> None:
    state = calmly(Scope("short", steps=4).start(), until)
    assert not any(state.syncer.machine.history.ledger.totals().balance())
