"""A small run whose every figure can be worked out by hand, and statuses in every state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from atoll.telemetry.events import Event
from atoll.telemetry.status import LearnerStatus, RunStatus

STATES = ("training", "training", "joining", "gone", "stalled", "muted", "quarantined", "stopped")


RHO = {2: 0.1, 5: 0.3, 6: 0.9}
"""By round, the autocorrelation of its merged gradient."""


def said(at: float, kind: str, **fields: Any) -> Event:
    return {"at": 1000.0 + at, "kind": kind, "text": fields.pop("text", f"{kind} happened"), **fields}


def member(learner: str, incarnation: int, t: int, tokens: int, since: int | None) -> dict[str, Any]:
    return {
        "learner": learner,
        "incarnation": incarnation,
        "t": t,
        "steps": 2,
        "tokens": tokens,
        "weight": 1.0,
        "base": 0,
        "since": since,
        "overlap": None if since is None else since - 2,
    }


def committed(at: float, number: int, live: int, *members: dict[str, Any]) -> Event:
    return said(
        at,
        "round",
        text=f"round {number}",
        round=number,
        fragment=number % 2,
        version=number // 2 + 1,
        attempt=0,
        live=live,
        members=list(members),
        gather_s=0.1,
        sync_s=0.1,
        merge_s=0.01,
        grace_s=0.1,
        effective_h=4.0,
        rho=(rho := RHO.get(number)),
        outer_step=None if rho is None else 1 + rho,
    )


def small_run() -> list[Event]:
    """Two learners, two fragments, H = 4; 10 s of training from 2 to 12; b is killed at 6 and back in a round at 9."""
    return [
        said(0.0, "run", run="small", learners=2, settings={"learners": 2, "fragments": 2, "sync_every": 4}),
        said(0.0, "plan", settings={"fragments": 2}, parameters=12, data="5eed"),
        said(0.5, "started", process="a", pid=1),
        said(1.0, "joined", learner="a", incarnation=1),
        said(1.5, "score", round=-1, loss=5.5, cpu_s=1.0, sample="first"),
        said(2.0, "recovered", learner="a", incarnation=1, seconds=1.0, text="a recovered"),
        said(2.0, "joined", learner="b", incarnation=1),
        said(3.0, "recovered", learner="b", incarnation=1, seconds=1.0),
        committed(4.0, 0, 2, member("a", 1, 4, 40, None), member("b", 1, 2, 20, None)),
        committed(5.0, 1, 2, member("a", 1, 6, 60, None), member("b", 1, 4, 40, None)),
        said(6.0, "killed", process="b", text="b was killed"),
        said(6.1, "lost", learner="b", incarnation=1, t=6, tokens=60, busy_s=2.5, unmerged_tokens=25),
        said(6.1, "exited", process="b", code=-9),
        said(7.0, "restarted", process="b", pid=3, text="b restarted"),
        committed(7.0, 2, 1, member("a", 1, 8, 40, 4)),
        said(8.0, "joined", learner="b", incarnation=2),
        said(8.5, "recovered", learner="b", incarnation=2, seconds=0.5),
        committed(9.0, 3, 2, member("a", 1, 11, 50, 5), member("b", 2, 1, 10, None)),
        said(9.5, "refused", learner="b", round=4, text="not finite"),
        said(9.6, "passed", round=4, fragment=0),
        committed(10.0, 5, 2, member("b", 2, 2, 20, 3)),
        said(12.0, "ending", text="the budget is spent"),
        committed(12.1, 6, 2, member("a", 1, 14, 60, 6), member("b", 2, 4, 20, 2)),
        committed(12.1, 7, 2, member("a", 1, 14, 30, 3)),
        said(12.5, "score", round=7, loss=2.25, cpu_s=1.5, sample="last"),
        said(
            13.0,
            "finished",
            learners=[
                {"learner": "a", "t": 14, "tokens": 140, "busy_s": 9.0},
                {"learner": "b", "t": 4, "tokens": 40, "busy_s": 2.0},
            ],
            bytes_in=1000,
            bytes_out=1400,
        ),
    ]


def a_learner(number: int, state: str = "training", loss: float | None = 1.7934) -> LearnerStatus:
    return LearnerStatus(
        learner=f"learner-{number}",
        state=state,
        incarnation=2 if number == 2 else 1,
        step=1204 - 3 * number,
        tokens=2_465_792,
        tokens_per_s=21_034.2,
        loss=loss,
        version_round=-1 if state == "joining" else 1203,
        in_last_round=state == "training",
        merged_share=0.91 - 0.01 * number,
    )


def a_status(phase: str = "training", learners: int = 4, loss: float | None = 1.7934, **changes: Any) -> RunStatus:
    waiting = phase == "waiting"
    crowd = tuple(
        a_learner(i, "joining" if waiting else STATES[i] if learners > 4 else "training", loss) for i in range(learners)
    )
    fields: dict[str, Any] = {
        "run": "first",
        "phase": phase,
        "elapsed_s": 0.0 if waiting else 64.2,
        "left_s": None if waiting else 38.0,
        "progress": 0.0 if waiting else 0.63,
        "global_step": 0 if waiting else 1203,
        "round": 0 if waiting else 1203,
        "rounds_merged": changes.get("round", 0 if waiting else 1203),
        "fragments": 24,
        "sync_every": 24,
        "synchronous": False,
        "quorum": 1,
        "members": () if waiting else tuple(x.learner for x in crowd if x.in_last_round),
        "reason": "" if waiting else "every live learner reported",
        "effective_h": None if waiting else 24.0,
        "effective_h_mean": None if waiting else 24.31,
        "effective_h_p95": None if waiting else 31.0,
        "merged_share": None if waiting else 0.897,
        "fates": {"computed": 1000, "merged": 880, "dropped": 90, "lost": 11, "in_flight": 19},
        "dropped_by_cause": {"overlap": 80, "missed": 10, "crash": 11},
        "grace_s": 0.0123,
        "participation": None if waiting else 0.968,
        "goodput": None if waiting else 0.934,
        "tokens": 9_863_168,
        "tokens_per_s": 84_136.8,
        "median_gap_s": None if waiting else 0.052,
        "validation_loss": None if waiting else 1.832,
        "validation_round": None if waiting else 1180,
        "learners": crowd,
    }
    return RunStatus(**{**fields, **changes})


def some_notes() -> list[Event]:
    return [
        said(0, "recovered", learner="learner-0", incarnation=1, text="learner-0 has the run's parameters after 0.4 s"),
        said(1, "joined", learner="learner-2", incarnation=1, text="learner-2 joined as incarnation 1"),
        said(2, "round", text="never shown"),
        said(10, "score", loss=3.1, text="validation loss 3.10 at round 200"),
        said(20, "score", loss=2.4, text="validation loss 2.40 at round 400"),
        said(40, "killed", process="learner-2", text="learner-2 was killed with SIGKILL, as asked"),
        said(40.1, "lost", learner="learner-2", incarnation=1, text="learner-2 is away: its connection closed"),
        said(41, "restarted", process="learner-2", text="learner-2 was started again after 1.0 s (restart 1 of 10)"),
        said(
            46, "recovered", learner="learner-2", incarnation=2, text="learner-2 has the run's parameters after 0.6 s"
        ),
        said(50, "refused", learner="learner-1", text="learner-1, round 1100: a value is not finite \x1b[31m[bold]x"),
        said(60, "score", loss=1.83, text="validation loss 1.83 at round 1180"),
    ]


@pytest.fixture
def events() -> list[Event]:
    return small_run()


@pytest.fixture
def notes() -> list[Event]:
    return some_notes()


@pytest.fixture
def say() -> Callable[..., Event]:
    return said


@pytest.fixture
def status() -> Callable[..., RunStatus]:
    return a_status
