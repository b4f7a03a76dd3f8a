"""A checker that finds nothing proves nothing: every planted bug is found by the fault simulator, within 500 seeds."""

from __future__ import annotations

from functools import cache

import pytest
from tests.simulate.mutants import MUTANTS, planted

from atoll.simulate import campaign
from atoll.simulate.campaign import Outcome, WorldKind

SEEDS = 500
STATED = "the rules hold together"
"""What the campaign calls an error that no invariant names; an assertion of the protocol itself is fine too."""

EASY = [
    "a round is announced before it is durable",
    "nothing waits for the disk",
    "a new syncer speaks for the old term",
    "a stale base is accepted",
    "a newcomer contributes before its peer's state is there",
    "a contribution tells the counters of now",
    "what is lost is counted twice",
    "samples that a version holds are leased again",
    "a cut is complete without a live learner's part",
    "the run ends without a last cycle",
    "there is no pace",
    "heartbeats are never sent",
    "a learner keeps its own steps on top of a rollback",
    "ranks carry out what each has, not what all have",
    "a contribution is told of before every rank has sent its part",
    "a round is decided before the other shards have written it",
    "a shard comes back without telling its cuts",
    "a relay counts a learner twice",
    "a relay is told of a round that came to nothing as if it were committed",
    "carry subtracts the last copy, whether the version holds it or not",
    "a rollback takes back a round too many",
]
"""Found by almost any seed: of each part of the protocol a few are looked for in every run of the tests, all of them in
`test_every_planted_bug_is_found`."""


def found(name: str, seeds: range) -> Outcome | None:
    """The first seed that shows it."""
    for seed in seeds:
        kind = MUTANTS[name].kind
        drawn = campaign.plan(seed, kind=kind)
        with planted(name):
            outcome = campaign.run(drawn)
        if outcome.invariant:
            assert not is_broken(seed, kind), f"seed {seed} finds something without a bug"
            return outcome
    return None


@cache
def is_broken(seed: int, kind: WorldKind = "plain") -> bool:
    return bool(campaign.run(campaign.plan(seed, kind=kind)).invariant)


def is_named(outcome: Outcome) -> bool:
    """Caught by an invariant, or by an assertion that the protocol states itself."""
    return outcome.invariant != STATED or (outcome.message.startswith("AssertionError") and ": " in outcome.message)


@pytest.mark.parametrize("name", EASY)
def test_a_planted_bug_is_found_at_once(name: str) -> None:
    outcome = found(name, range(20))
    assert outcome is not None, f"no seed up to 20 shows that {name}"
    assert is_named(outcome), outcome.message


def test_without_a_bug_these_seeds_find_nothing() -> None:
    assert not any(is_broken(seed) for seed in range(5))


def test_every_planted_bug_has_a_place() -> None:
    """A function that was renamed since would be looked for in vain, and only in the long campaign."""
    for name in MUTANTS:
        with planted(name):
            pass


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 25 and set(EASY) <= set(MUTANTS)


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MUTANTS)
def test_every_planted_bug_is_found(name: str) -> None:
    """One case for each bug, so that they are looked for on every core; `-rP` shows the seeds each one needed."""
    outcome = found(name, range(SEEDS))
    assert outcome is not None, f"none of {SEEDS} seeds shows that {name}"
    assert is_named(outcome), outcome.message
    print(f"{outcome.seed + 1:>5}  {name:64}{outcome.invariant}")
