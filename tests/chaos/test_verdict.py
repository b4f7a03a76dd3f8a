"""The ground truth of faults held against what a run says of itself, on events made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.chaos import verdict
from atoll.chaos.verdict import Finding, VerdictLimits, judge
from atoll.telemetry.events import Event

A, B, C = "learner-0", "learner-1", "learner-2"
SETTINGS = {"learners": 3, "fragments": 1, "sync_every": 1}


def event(at: float, kind: str, **more: Any) -> Event:
    return {"at": at, "kind": kind, "text": f"{kind} at {at}", **more}


def round_of(at: float, **members: int) -> Event:
    """Members by name (learner_0=t)."""
    said = [
        {"learner": name.replace("_", "-"), "incarnation": 1, "t": t, "tokens": 10, "since": 1, "steps": 1}
        for name, t in members.items()
    ]
    number = round(10 * at)
    return event(at, "round", round=number, fragment=0, version=number, live=3, members=said)


def a_run(*extra: Event, rounds: list[Event] | None = None) -> list[Event]:
    """Ten seconds, a round every second, everybody in every round; one step a second."""
    usual = [round_of(float(at), learner_0=at, learner_1=at, learner_2=at) for at in range(1, 11)]
    tokens = {"computed": 300, "merged": 280, "dropped": 20, "lost": 0, "in_flight": 0}
    events = [
        event(-1.0, "run", run="r", learners=3, settings=SETTINGS),
        *(event(0.0, "joined", learner=name, incarnation=1) for name in (A, B, C)),
        *(event(0.0, "recovered", learner=name, incarnation=1) for name in (A, B, C)),
        *(usual if rounds is None else rounds),
        *extra,
        event(10.5, "ending", reason="enough"),
        event(11.0, "finished", reason="enough", tokens=tokens, learners=[]),
    ]
    return sorted(events, key=lambda one: float(one["at"]))


def a_fault(number: int, what: str, target: str, start: float, end: float) -> list[Event]:
    told = {"number": number, "what": what, "targets": [target], "target": target, "seconds": end - start}
    return [event(start, "fault", **told), event(end, "mended", number=number)]


def test_faults_have_a_beginning_and_an_end() -> None:
    found = verdict.read_faults(a_run(*a_fault(1, "pause", A, 2.0, 4.0), *a_fault(2, "kill", B, 3.0, 3.0)[:1]))
    assert [(one.what, one.targets, one.span.start) for one in found] == [("pause", (A,), 2.0), ("kill", (B,), 3.0)]
    assert found[1].span.end == float("inf"), "it was never said to be over"


def test_who_is_paused_or_slowed_is_not_missed() -> None:
    rounds = [round_of(float(at), learner_0=at, learner_1=at) for at in range(1, 11)]
    assert verdict.measure_participation(a_run(rounds=rounds)) == pytest.approx(2 / 3)
    assert verdict.measure_participation(a_run(*a_fault(1, "slow", C, 0.5, 10.4), rounds=rounds)) == pytest.approx(1.0)
    assert verdict.measure_participation(a_run(*a_fault(1, "pause", C, 0.5, 5.5), rounds=rounds)) == pytest.approx(
        5 / 6
    )
    assert verdict.measure_participation(a_run(*a_fault(1, "delay", C, 0.5, 10.4), rounds=rounds)) == pytest.approx(
        2 / 3
    )


def test_a_learner_with_a_share_of_the_rounds_is_not_missed_in_the_others() -> None:
    rounds = [round_of(float(at), learner_0=at, learner_1=at) for at in range(1, 11)]
    narrow = event(0.6, "share", learner=C, incarnation=1, share=0.25)
    assert verdict.measure_participation(a_run(narrow, rounds=rounds)) == pytest.approx(1.0)
    wide = event(5.5, "share", learner=C, incarnation=1, share=1.0)
    assert verdict.measure_participation(a_run(narrow, wide, rounds=rounds)) == pytest.approx((5 + 5 * 2 / 3) / 10)


def test_a_learner_that_is_there_to_misbehave_is_not_missed() -> None:
    rogue = [event(2.0, kind, learner="rogue-nan-17", incarnation=1) for kind in ("joined", "recovered")]
    assert verdict.measure_participation(a_run(*rogue)) == pytest.approx(1.0)


def test_steps_are_counted_where_a_learner_was_live_and_able() -> None:
    assert verdict.measure_steps_per_live_s(a_run()) == pytest.approx(1.0)
    slow = [round_of(float(at), learner_0=at, learner_1=at, learner_2=min(at, 4)) for at in range(1, 11)]
    assert verdict.measure_steps_per_live_s(a_run(rounds=slow)) == pytest.approx((9 + 9 + 3) / 27)
    paused = a_run(*a_fault(1, "pause", C, 4.0, 10.4), rounds=slow)
    assert verdict.measure_steps_per_live_s(paused) == pytest.approx(1.0)
    leaving = a_run(event(4.5, "leaving", learner=C, incarnation=1, t=4), rounds=slow)
    assert verdict.measure_steps_per_live_s(leaving) == pytest.approx(1.0), (
        "its last steps are collected; it makes no more"
    )
    before = a_run(event(4.5, "leaving", learner=C, incarnation=0, t=4), rounds=slow)
    assert verdict.measure_steps_per_live_s(before) == verdict.measure_steps_per_live_s(a_run(rounds=slow)), (
        "that was an earlier life"
    )


def test_a_gap_while_the_syncer_is_away_does_not_count() -> None:
    rounds = [round_of(at, learner_0=round(at)) for at in (1.0, 2.0, 3.0, 7.0, 8.0, 8.5, 9.5)]
    assert verdict.measure_gaps(a_run(rounds=rounds)) == (4.0, 1.0)
    killed = event(3.2, "killed", process="syncer")
    assert verdict.measure_gaps(a_run(killed, rounds=rounds)) == (1.0, 1.0)
    assert verdict.find_syncer_deaths(a_run(killed, rounds=rounds)) == [(3.2, 7.0)]
    assert verdict.measure_gaps(a_run(*a_fault(1, "disk-full", "syncer", 4.0, 6.0), rounds=rounds)) == (1.0, 1.0)


def test_a_death_that_nobody_caused_is_found() -> None:
    killed, died = event(4.0, "killed", process=A), event(4.1, "exited", process=A, code=-9)
    assert verdict.find_unexplained(a_run(killed, died)) == []
    assert verdict.find_unexplained(a_run(died)) == ["exited at 4.1"]
    assert verdict.find_unexplained(a_run(event(5.0, "exited", process=B, code=1))) == ["exited at 5.0"]
    assert verdict.find_unexplained(a_run(event(5.0, "exited", process=B, code=0))) == []
    assert verdict.find_unexplained(a_run(event(5.0, "exited", process=B, code=143, unjoined=True))) == []


def found(limits: VerdictLimits, timeline: list[Event], **more: Any) -> dict[str, Finding]:
    return {one.name: one for one in judge(limits, timeline, **{"verified": "", **more})}


def test_a_verdict_says_what_was_asked_and_what_was_found() -> None:
    limits = VerdictLimits(participation=0.9, longest_gap=3.0, syncer_back_s=5.0, tokens_per_live_s=0.97)
    answers = found(limits, a_run(), calm=[a_run()])
    assert all(one.ok for one in answers.values()), answers
    assert answers["tokens per live second, of calm"].found == "1"
    assert answers["syncer back, s"].found == "none" and answers["ledger"].found.startswith("0 unaccounted")


@pytest.mark.parametrize(
    ("limits", "timeline", "name"),
    [
        (VerdictLimits(participation=0.9), a_run(rounds=[round_of(5.0, learner_0=5)]), "participation of the able"),
        (
            VerdictLimits(longest_gap=3.0),
            a_run(rounds=[round_of(at, learner_0=1) for at in (1.0, 1.5, 2.0, 6.0)]),
            "longest gap between rounds, s",
        ),
        (VerdictLimits(syncer_back_s=5.0), a_run(event(10.2, "killed", process="syncer")), "syncer back, s"),
        (VerdictLimits(), a_run(event(5.0, "exited", process=B, code=1)), "unhandled errors"),
        (VerdictLimits(goodput=0.5), a_run(), "goodput"),
        (VerdictLimits(loss=0.01), a_run(), "loss above calm"),
    ],
)
def test_what_does_not_hold_is_named(limits: VerdictLimits, timeline: list[Event], name: str) -> None:
    answers = found(limits, timeline)
    assert [one.name for one in answers.values() if not one.ok] == [name]


def test_a_ledger_that_does_not_balance_and_a_run_that_does_not_verify_are_named() -> None:
    broken = a_run()
    broken[-1]["tokens"] = {"computed": 300, "merged": 280, "dropped": 0, "lost": 0, "in_flight": 0}
    answers = found(VerdictLimits(), broken, verified="round 3 is missing", logs=["a traceback in syncer.log"])
    assert {name: one.ok for name, one in answers.items()} == {
        "ledger": False,
        "verify": False,
        "unhandled errors": False,
    }
    assert answers["ledger"].found.startswith("20 unaccounted") and answers["verify"].found == "round 3 is missing"


def test_loss_is_held_against_the_calm_run() -> None:
    def scored(loss: float) -> list[Event]:
        return a_run(event(10.8, "score", round=9, loss=loss, cpu_s=0.1))

    answer = found(VerdictLimits(loss=0.01), scored(1.514), calm=[scored(1.5)])["loss above calm"]
    assert answer.ok and answer.found.startswith("+0.93 %")
    assert not found(VerdictLimits(loss=0.01), scored(1.52), calm=[scored(1.5)])["loss above calm"].ok
    several = found(VerdictLimits(loss=0.01), scored(1.52), calm=[scored(1.5), scored(1.53)])["loss above calm"]
    assert several.ok and several.found.startswith("+0.33 % (1.5200, 2 calm 1.5000 to 1.5300")
    assert not found(VerdictLimits(loss=0.01), scored(1.5), calm=[scored(1.5), a_run()])["loss above calm"].ok


def test_limits_say_whether_a_calm_run_is_needed() -> None:
    assert not VerdictLimits(goodput=0.5, ledger=True).needs_calm
    assert VerdictLimits(loss=0.01).needs_calm and VerdictLimits(tokens_per_live_s=0.97).needs_calm
