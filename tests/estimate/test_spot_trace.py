"""A spot trace: who has no node when, and what goodput that leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.estimate.chips import Strike
from atoll.estimate.goodput import Job, run
from atoll.estimate.profile import Elasticity, Failures, Profile
from atoll.estimate.spot_trace import NodeChange, SpotTrace, find_absences, load_trace
from atoll.protocol.errors import ConfigError

DOWN, UP = False, True
EXAMPLE = Path(__file__).parents[2] / "examples" / "spot_trace.toml"


def trace(*changes: tuple[float, str, bool], nodes: tuple[str, ...] = ("a", "b"), seconds: float = 100.0) -> SpotTrace:
    return SpotTrace(seconds, nodes, tuple(NodeChange(*change) for change in changes))


def test_a_learner_waits_for_the_next_node_whichever_that_is() -> None:
    found = find_absences(trace((10, "a", DOWN), (20, "b", DOWN), (30, "c", UP), (45, "a", UP)), 2)
    assert found == ((Strike(10, 20),), (Strike(20, 25),))


def test_a_learner_goes_to_a_free_node_at_once() -> None:
    found = find_absences(trace((10, "a", DOWN), (30, "a", UP), (40, "b", DOWN), nodes=("a", "b", "c")), 2)
    assert found == ((Strike(10, 0),), (Strike(40, 0),))


def test_who_never_has_a_node_again_waits_to_the_end() -> None:
    assert find_absences(trace((10, "a", DOWN), nodes=("a",)), 2) == ((Strike(10, 90),), (Strike(0, 100),))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([(10, "a", UP)], "a is there already"),
        ([(10, "c", DOWN)], "c is away already"),
        ([(20, "a", DOWN), (10, "b", DOWN)], "in order"),
        ([(101, "a", DOWN)], "from 0 to seconds"),
    ],
)
def test_what_cannot_be_is_refused(changes: list[tuple[float, str, bool]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trace(*changes)


def test_goodput_lacks_what_was_taken_away_and_every_recovery() -> None:
    """Two learners for 100 s: 20 and 25 s without a node, 5 s each to recover."""
    still = Failures(mtbi_s=1e12)
    profile = Profile(step_s=0.25, slices=2, failures=still, elasticity=Elasticity(recover_s=5.0, start_s=(0.0,)))
    away = find_absences(trace((10, "a", DOWN), (20, "b", DOWN), (30, "c", UP), (45, "a", UP)), 2)
    outcome = run(Job(profile, "decoupled", 2, 2, 0, 100 / 3600, 0, away))
    assert outcome.tally.goodput == pytest.approx((200 - 45 - 10) / 200, abs=0.005)
    assert outcome.tally.lost == pytest.approx({"gone": 0.225, "recovering": 0.05}, abs=0.005)


def test_absences_suit_the_learners() -> None:
    with pytest.raises(ConfigError, match="do not suit"):
        Job(Profile(slices=4), "decoupled", 4, 4, 0, 1.0, 0, ((),))


def test_the_trace_of_the_examples_is_read() -> None:
    found = load_trace(EXAMPLE)
    assert len(found.nodes) == 4 and sum(not change.up for change in found.changes) >= 4
    with pytest.raises(ConfigError, match=r"nothing\.toml"):
        load_trace(EXAMPLE.with_name("nothing.toml"))
