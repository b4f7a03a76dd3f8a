"""Every figure of a small run, worked out by hand. The run itself is in conftest.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from atoll.config import convert
from atoll.observe.story import story
from atoll.observe.summary import summarise
from atoll.protocol.messages import PROTOCOL, Hello
from atoll.protocol.settings import Settings
from atoll.protocol.syncer.machine import Syncer
from atoll.syncer.status import Meter
from atoll.telemetry.events import Event

Say = Callable[..., Event]

BY_HAND: dict[str, Any] = {
    "run": "small",
    "data_parallel": 0,
    "data_digest": "5eed",
    "parameters": 12,
    "reason": "the budget is spent",
    "parent": "",
    "goodput": (9.0 + 2.5 + 2.0) / (2 * 10),
    "merged_share": 390 / (2 * 240),
    "fragments": None,
    "uptime": 1.0,  # a was there all the time
    "liveness": (10 + 4 + 4) / (2 * 10),  # b from 2 to 6 and from 8 to 12
    "participation": round((1 + 1 + 1 + 1 + 0.5 + 1 + 0.5) / 7, 6),
    "effective_h": 4.0,  # of 4, 5, 3; the 6, 2, 3 of the drain do not count
    "effective_h_mean": 4.0,
    "effective_h_p95": 5.0,
    "carried_h": 4.0,
    "narrowest": "",
    "phases": [],
    "overlap": 2.0,  # of 2, 3, 1; the others are of the drain, or nothing was measured
    "overlap_mean": 2.0,
    "overlap_p95": 3.0,
    "rho": 0.2,  # of 0.1 and 0.3; the first rounds have none, and the drain does not count
    "outer_step": 1.2,
    "tokens": {
        "computed": 240,
        "merged": 195,
        "dropped": 240 - 195 - 25,
        "lost": 25,
        "rolled_back": 0,
        "filtered": 0,
        "in_flight": 0,
    },
    "rounds": 7,
    "rounds_closed": 8,
    "rounds_passed": 1,
    "resumes": [],
    "restarts": 1,
    "kills": 1,
    "refusals": 1,
    "quarantines": 0,
    "recovery": [
        {"learner": "b", "after": "killed", "at_s": 4.0, "seconds": 3.0},
        {"learner": "b", "after": "restarted", "at_s": 5.0, "seconds": 2.0},
    ],
    "bytes_per_token": 2400 / 240,
    "relays": {},
    "validation_loss_start": 5.5,
    "validation_loss_end": 2.25,
    "validation_stale_round": None,
    "validation_not_finite": 0,
    "validation_loss_best": 2.25,
    "validation_loss_best_round": 7,
    "loss_unit": "",
    "metrics": {},
    "training_loss_start": None,  # nobody told one
    "training_loss_end": None,
    "evaluator_cpu_s": 2.5,
    "longest_gap_s": 2.0,  # of 1, 2, 2, 1
    "median_gap_s": 1.5,
    "wall_s": 10.0,
    "total_s": 13.0,
    "settings": {"learners": 2, "fragments": 2, "sync_every": 4},
    "per_learner": {
        "a": {
            "merged_share": None,
            "tokens_by_fate": None,
            "participation": round(6 / 7, 6),
            "round_share": 1.0,
            "muted_s": 0.0,
            "steps": 14,
            "tokens": 140,
            "busy_s": 9.0,
            "rounds": 6,
            "share": round(6 / 7, 6),
            "incarnations": 1,
            "longest_absence_s": 3.0,  # its last round before the end is at 9
            "longest_absence_rounds": 1,
        },
        "b": {
            "merged_share": None,
            "tokens_by_fate": None,
            "participation": round(5 / 6, 6),  # of the rounds while it was there
            "round_share": 1.0,
            "muted_s": 0.0,
            "steps": 6 + 4,
            "tokens": 60 + 40,
            "busy_s": 4.5,
            "rounds": 5,
            "share": round(5 / 7, 6),
            "incarnations": 2,
            "longest_absence_s": 4.0,  # from 5 to 9
            "longest_absence_rounds": 1,
        },
    },
}


@pytest.mark.parametrize("field", sorted(BY_HAND))
def test_a_figure_is_what_it_is_by_hand(events: list[Event], field: str) -> None:
    assert summarise(events)[field] == BY_HAND[field]


def test_there_is_no_field_that_nobody_worked_out(events: list[Event]) -> None:
    assert summarise(events).keys() == BY_HAND.keys()


def test_the_summary_is_json(events: list[Event]) -> None:
    assert msgspec.json.decode(msgspec.json.encode(summarise(events))) == summarise(events)


def test_the_order_of_lines_from_different_processes_does_not_matter(events: list[Event]) -> None:
    other = [e for e in events if e["kind"] in ("started", "killed", "restarted", "exited")]
    shuffled = [e for e in events if e not in other] + other
    assert summarise(shuffled)["recovery"] == summarise(events)["recovery"]
    assert summarise(shuffled)["liveness"] == summarise(events)["liveness"]


NARROW = "way down of b: 58 of 60 Mbit/s"


def test_the_part_that_makes_h_larger_is_that_of_the_last_event_of_the_pace(events: list[Event], say: Say) -> None:
    text = f"H is 9, 4 was asked: {NARROW}"
    pace = say(4.5, "pace", h=9.0, asked=4, part="way down of b", narrowest=NARROW, text=text)
    summary = summarise([*events, pace])
    assert (summary["carried_h"], summary["narrowest"]) == (9.0, NARROW)
    wide = say(9.2, "pace", h=4.0, asked=4, part="", narrowest="", text="H is 4")
    summary = summarise([*events, pace, wide])
    assert (summary["carried_h"], summary["narrowest"]) == (4.0, "")


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "reigned", "run": "small", "term": 2, "round": 3, "cut": None, "replayed": 0},
        {"kind": "changed", "what": "sync_every", "sync_every": 4},
        {"kind": "phase", "training_phase": 1, "sync_every": 4, "overlap": 2, "adopt": "overwrite"},
    ],
    ids=lambda event: event["kind"],
)
def test_a_new_term_and_another_h_begin_with_the_h_asked_for(
    events: list[Event], say: Say, event: dict[str, Any]
) -> None:
    pace = say(4.5, "pace", h=9.0, asked=4, part="way down of b", narrowest=NARROW)
    summary = summarise([*events, pace, {"text": "", **event, "at": pace["at"] + 1}])
    assert (summary["carried_h"], summary["narrowest"]) == (4.0, "")


def test_a_share_is_the_mean_over_the_rounds_made_while_the_learner_was_there(events: list[Event], say: Say) -> None:
    share = say(4.5, "share", learner="b", incarnation=1, share=0.25, text="its link is narrow")
    learners = summarise([*events, share])["per_learner"]
    assert learners["a"]["round_share"] == 1.0
    # Of its 6 rounds one came before the event, one behind it; a new process has a new link.
    assert learners["b"]["round_share"] == pytest.approx((1 + 0.25 + 4 * 1) / 6, abs=1e-6)


def test_effective_h_is_that_of_the_last_phase_of_training(events: list[Event], say: Say) -> None:
    phases = [
        say(2.5, "phase", training_phase=1, sync_every=2, overlap=1, adopt="carry"),
        say(9.5, "phase", training_phase=2, sync_every=3, overlap=2, adopt="overwrite"),
    ]
    summary = summarise([*events, *phases])
    assert (summary["effective_h"], summary["overlap"]) == (3.0, 1.0), "of the one round that came later"
    assert (summary["settings"]["sync_every"], summary["settings"]["overlap"]) == (3, 2)
    assert not any("were asked for" in line for line in story(summary, events))
    told = [(one["phase"], one["by_hand"], one["sync_every"], one["effective_h"]) for one in summary["phases"]]
    assert told == [(1, False, 2, 4.5), (2, False, 3, 3.0)]
    assert "phase 2: 3 and 3.0 (1 rounds)." in " ".join(story(summary, events))


def test_an_h_set_by_hand_has_figures_of_its_own(events: list[Event], say: Say) -> None:
    changes = [
        say(2.5, "phase", training_phase=1, sync_every=2, overlap=1, adopt="carry"),
        say(9.5, "changed", what="sync_every=3", sync_every=3, overlap=1, adopt="carry"),
        say(9.6, "changed", what="quorum=2"),
    ]
    summary = summarise([*events, *changes])
    assert summary["settings"]["sync_every"] == 3
    assert [(one["phase"], one["by_hand"]) for one in summary["phases"]] == [(1, False), (1, True)]


def test_uptime_leaves_out_the_time_without_any_learner(say: Say) -> None:
    events = [
        say(0, "recovered", learner="a", incarnation=1),
        say(2, "recovered", learner="b", incarnation=1),
        say(3, "left", learner="a", incarnation=1, t=1, tokens=1, busy_s=1.0, unmerged_tokens=0),
        say(4, "lost", learner="b", incarnation=1, t=1, tokens=1, busy_s=1.0, unmerged_tokens=0),
        say(6, "joined", learner="b", incarnation=2),
        say(8, "recovered", learner="b", incarnation=2),
        say(10, "ending"),
    ]
    summary = summarise(events)
    assert summary["uptime"] == 0.6  # from 0 to 4 and from 8 to 10
    assert summary["liveness"] == (3 + 2 + 4) / 20  # two at once: so many were allocated


def test_live_figures_and_summary_agree_where_a_learner_joins_by_hand(say: Say) -> None:
    """The live goodput was 100 % and the summary's 80 %: one divided by M, the other by all that were ever there."""
    events = [
        say(0, "run", learners=2, settings={"fragments": 1}),
        say(0, "recovered", learner="a", incarnation=1),
        say(0, "recovered", learner="b", incarnation=1),
        say(6, "joined", learner="by-hand", incarnation=1),
        say(6, "recovered", learner="by-hand", incarnation=1),
        *(
            say(10, "left", learner=name, incarnation=1, t=1, tokens=1, busy_s=busy_s, unmerged_tokens=0)
            for name, busy_s in (("a", 9.0), ("b", 8.0), ("by-hand", 3.0))
        ),
        say(10, "ending"),
    ]
    summary, meter = summarise(events), Meter(convert({"protocol": {"learners": 2}}, "a test"))
    for event in events:
        meter.note_event(event["at"], event["kind"], event)
    syncer = Syncer.fresh(Settings().resolved(2), run="r", fingerprint="f")
    for name, busy_s in (("a", 9.0), ("b", 8.0), ("by-hand", 3.0)):
        learner, _ = syncer.members.find_or_begin_life(0.0, Hello(protocol=PROTOCOL, learner=name, session=name), "r")
        learner.busy_before, learner.busy_s = 0.0, busy_s
    live = meter.make_status(events[-1]["at"] + 3, "r", syncer)
    assert live.goodput == pytest.approx(20 / (2 * 10 + 4)) and summary["goodput"] == round(live.goodput, 6)
    assert summary["liveness"] == live.liveness == 1.0


def in_round(say: Say, at: float, number: int, incarnation: int, busy_s: float) -> Event:
    told = {"learner": "a", "incarnation": incarnation, "t": int(busy_s), "tokens": 10, "since": None}
    member = {**told, "total": int(10 * busy_s), "busy_s": busy_s, "loss": None, "steps": 1}
    return say(at, "round", round=number, fragment=0, live=1, members=[member])


def killed_whole(say: Say) -> list[Event]:
    """One learner for 8 s, until everything is killed; started again 92 s later, it trains after 5 s more."""
    return [
        say(0, "started", process="syncer"),
        say(0, "run", learners=1, settings={"fragments": 1}),
        say(0, "recovered", learner="a", incarnation=1),
        in_round(say, 4, 0, 1, 4.0),
        in_round(say, 8, 1, 1, 8.0),
        say(100, "started", process="syncer"),
        say(101, "reigned"),
        say(105, "recovered", learner="a", incarnation=2),
        in_round(say, 114, 2, 2, 9.0),
    ]


def test_a_run_that_was_killed_whole_and_goes_on_counts_all_its_work_and_no_time_in_which_it_lay_still(
    say: Say,
) -> None:
    left = say(115, "left", learner="a", incarnation=2, t=10, tokens=100, busy_s=10.0, unmerged_tokens=0)
    summary = summarise([*killed_whole(say), left, say(115, "ending")])
    assert summary["per_learner"]["a"]["busy_s"] == 18.0 and summary["tokens"]["computed"] == 180
    assert summary["wall_s"] == 18.0 and summary["longest_gap_s"] == 9.0
    assert summary["goodput"] == summary["uptime"] == summary["liveness"] == 1.0
    assert summary["resumes"] == [{"at_s": 8.0, "after": "killed"}]


def test_a_restored_run_counts_no_step_of_the_run_before_it(say: Say) -> None:
    """eu-0 had 1,349 busy seconds in a run of 825 s, and its goodput was 100 %."""
    events = [
        say(0, "started", process="syncer"),
        say(0, "reigned", run="new", term=1, round=40),
        say(1, "joined", learner="a", incarnation=1, known_as=0),
        say(2, "recovered", learner="a", incarnation=1, seconds=1.0, busy_before=500.0),
        in_round(say, 6, 40, 1, 502.0),
        say(12, "left", learner="a", incarnation=1, t=505, tokens=5050, busy_s=505.0, unmerged_tokens=0),
        say(12, "ending"),
    ]
    summary = summarise(events, {"rounds": 41, "round": 41, "fates": {"a": {"steps": 505}}, "tokens": None})
    assert (summary["per_learner"]["a"]["busy_s"], summary["wall_s"], summary["goodput"]) == (5.0, 10.0, 0.5)
    assert story(summary, events)[0].startswith("1 learner made 505 steps on ")
    assert "those before this run included. This run took 10 s; 50 % of learner time" in story(summary, events)[0]


def test_a_restored_run_knows_how_many_learners_it_is_meant_for(say: Say) -> None:
    """A fourth learner was there by hand for two minutes and was drained: liveness was 75 % where it was 96 %."""
    names = ("a", "b", "c")
    events = [
        say(0, "started", process="syncer"),
        say(0, "reigned", run="new", term=1, round=40, learners=3, settings={"learners": 3, "sync_every": 24}),
        *(say(0, "recovered", learner=name, incarnation=1, busy_before=500.0) for name in names),
        say(10, "joined", learner="by-hand", incarnation=1, known_as=0),
        say(10, "recovered", learner="by-hand", incarnation=1, busy_before=0.0),
        say(20, "left", learner="by-hand", incarnation=1, t=9, tokens=9, busy_s=9.0, unmerged_tokens=0),
        say(100, "ending"),
    ]
    summary = summarise(events)
    assert (summary["liveness"], summary["run"], summary["settings"]["sync_every"]) == (1.0, "new", 24)


def test_steps_made_while_the_syncer_was_down_are_no_busy_time_as_that_time_counts_nowhere(say: Say) -> None:
    """87.5 busy seconds in 76.9 of the run: learners train on, and the outage is left out."""
    events = [
        say(0, "started", process="syncer"),
        say(0, "run", learners=1, settings={"fragments": 1}),
        say(0, "recovered", learner="a", incarnation=1, busy_before=0.0),
        in_round(say, 8, 0, 1, 4.0),
        say(30, "started", process="syncer"),
        say(31, "reigned"),
        say(32, "joined", learner="a", incarnation=1, known_as=1),
        say(32, "recovered", learner="a", incarnation=1, busy_before=28.0),
        in_round(say, 40, 1, 1, 32.0),
        say(40, "ending"),
    ]
    summary = summarise(events)
    assert (summary["wall_s"], summary["per_learner"]["a"]["busy_s"], summary["goodput"]) == (16.0, 8.0, 0.5)


def test_steps_made_while_a_standby_takes_over_count_as_that_time_does(say: Say) -> None:
    events = [
        say(0, "started", process="syncer"),
        say(0, "run", learners=1, settings={"fragments": 1}),
        say(0, "recovered", learner="a", incarnation=1, busy_before=0.0),
        in_round(say, 8, 0, 1, 4.0),
        say(14, "reigned"),
        say(15, "recovered", learner="a", incarnation=1, busy_before=8.0),
        in_round(say, 20, 1, 1, 12.0),
        say(20, "ending"),
    ]
    summary = summarise(events)
    assert (summary["wall_s"], summary["per_learner"]["a"]["busy_s"], summary["goodput"]) == (20.0, 12.0, 0.6)


def test_the_first_start_of_a_run_that_an_earlier_version_began_by_hand_was_not_told(say: Say) -> None:
    """Its outage counted as training time, and `resumes` was empty."""
    assert summarise(killed_whole(say)[1:])["resumes"] == [{"at_s": 8.0, "after": "killed"}]


def test_a_run_that_ended_went_on_and_was_killed_is_as_long_as_both(say: Say) -> None:
    before = killed_whole(say)
    summary = summarise([*before[:5], say(8, "ending"), *before[5:]])
    assert summary["wall_s"] == 17.0 and summary["reason"] is None


def test_work_behind_a_lost_connection_counts(say: Say) -> None:
    lost = say(5, "lost", learner="a", incarnation=1, t=5, tokens=50, busy_s=5.0, unmerged_tokens=0)
    before = killed_whole(say)
    summary = summarise([*before[:4], lost, say(5.1, "joined", learner="a", incarnation=1), *before[4:]])
    assert summary["per_learner"]["a"]["busy_s"] == 17.0 and summary["tokens"]["computed"] == 170


def test_an_end_that_the_run_went_on_from_says_nothing_of_what_came_later(say: Say) -> None:
    before = killed_whole(say)
    ended = {"tokens": {"computed": 80, "merged": 80}, "fates": {"a": {"computed": 80}}, "reason": "asked for"}
    over = say(9, "finished", learners=[], **ended)
    summary = summarise([*before[:5], over, *before[5:]])
    assert summary["resumes"] == [{"at_s": 9.0, "after": "ended"}]
    assert summary["tokens"]["computed"] == 80 + 90 and summary["per_learner"]["a"]["tokens"] == 80 + 90
    assert summary["reason"] is None


def test_a_lost_connection_that_comes_back_loses_no_tokens(events: list[Event], say: Say) -> None:
    lost = say(10.5, "lost", learner="a", incarnation=1, t=12, tokens=120, busy_s=8.0, unmerged_tokens=30)
    back = say(10.7, "joined", learner="a", incarnation=1)
    summary = summarise([*events, lost, back])
    assert summary["tokens"] == BY_HAND["tokens"]
    assert summary["per_learner"]["a"]["busy_s"] == 9.0
    assert summary["liveness"] == pytest.approx((9.8 + 4 + 4) / 20)


def test_a_process_out_of_quarantine_keeps_its_counters(events: list[Event], say: Say) -> None:
    fenced = say(10.2, "quarantined", learner="b", incarnation=2)
    again = say(10.8, "recovered", learner="b", incarnation=3)
    summary = summarise([*events, fenced, again])
    assert summary["per_learner"]["b"]["tokens"] == 100
    assert summary["per_learner"]["b"]["busy_s"] == 4.5
    assert summary["per_learner"]["b"]["incarnations"] == 3


def test_steps_of_processes_that_take_a_name_from_each_other_count_once(say: Say) -> None:
    """873 times in 45 s: 100,930 steps were summed up where 618 were made."""
    events = [say(0, "run", learners=1), say(0.1, "joined", learner="a", incarnation=1, known_as=0)]
    for life in range(1, 101):
        steps = {"t": life + 10 * (life % 2), "tokens": 4 * life, "busy_s": 0.1 * life, "unmerged_tokens": 0}
        events.append(say(life, "lost", learner="a", incarnation=life, **steps))
        events.append(say(life, "joined", learner="a", incarnation=life + 1, known_as=max(0, life - 1)))
    told = summarise([*events, say(101, "ending")])["per_learner"]["a"]
    assert (told["steps"], told["tokens"], told["busy_s"]) == (109 + 100, 396 + 400, pytest.approx(9.9 + 10.0))
    assert told["incarnations"] == 101


def test_a_run_that_was_cut_off_leaves_the_rest_in_flight(events: list[Event]) -> None:
    cut = [event for event in events if event["at"] <= 1010.0]
    summary = summarise(cut)
    tokens = summary["tokens"]
    assert summary["wall_s"] == 8.0  # to the last round
    assert summary["bytes_per_token"] is None
    assert tokens["dropped"] == 0
    assert tokens["computed"] == 95 + 60 + 15  # a and the second b: what was merged of them
    assert tokens["computed"] == tokens["merged"] + tokens["lost"] + tokens["in_flight"]


def test_what_the_ledger_said_at_the_end_is_told_of_every_learner(events: list[Event]) -> None:
    causes = {"overlap": 15, "missed": 5, "crash": 25}
    kept = {"computed": 140, "merged": 120, "dropped": 20, "lost": 0, "rolled_back": 0, "filtered": 0, "in_flight": 0}
    fates = {**kept, "dropped_by_cause": causes}
    tokens = {
        "computed": 240,
        "merged": 195,
        "dropped": 20,
        "lost": 25,
        "rolled_back": 0,
        "filtered": 0,
        "in_flight": 0,
    }
    events[-1] |= {"tokens": tokens, "dropped_by_cause": causes, "fates": {"a": {**fates, "merged_share": 6 / 7}}}
    summary = summarise(events)
    assert summary["tokens"] == {**tokens, "dropped_by_cause": causes}
    assert summary["per_learner"]["a"]["merged_share"] == round(6 / 7, 6)
    assert summary["per_learner"]["a"]["tokens_by_fate"] == fates
    assert summary["per_learner"]["b"]["merged_share"] is None, "the ledger does not know it"


def test_the_muted_stay_in_the_denominator_and_their_time_is_told(events: list[Event], say: Say) -> None:
    muted = [
        say(3.5, "muted", learner="b", incarnation=1),
        say(8.6, "muted", learner="b", incarnation=2),
        say(9.6, "probed", learner="b", incarnation=2),
        say(11.0, "muted", learner="a", incarnation=1),
    ]
    learners = summarise(sorted([*events, *muted], key=lambda event: float(event["at"])))["per_learner"]
    assert learners["b"]["muted_s"] == pytest.approx(2.6 + 1.0), "the first ends with its process"
    assert learners["a"]["muted_s"] == 1.0, "to the end of the training part"
    assert learners["b"]["participation"] == BY_HAND["per_learner"]["b"]["participation"]


def test_a_kill_without_a_return_has_no_recovery_time(events: list[Event]) -> None:
    dead = [e for e in events if e.get("incarnation") != 2]
    for event in dead:
        event["members"] = [m for m in event.get("members", ()) if m["incarnation"] != 2]
    assert [entry["seconds"] for entry in summarise(dead)["recovery"]] == [None, None]


def test_the_tokens_balance_whatever_is_missing(events: list[Event]) -> None:
    dice = random.Random(0)
    for _ in range(200):
        some = [event for event in events if dice.random() < 0.7]
        tokens = summarise(some)["tokens"]
        assert min(tokens.values()) >= 0
        known = tokens["merged"] + tokens["lost"] + tokens["dropped"] + tokens["in_flight"]
        assert known == max(tokens["computed"], tokens["merged"] + tokens["lost"])


def test_nothing_at_all_is_a_summary_of_nothing() -> None:
    summary = summarise([])
    assert summary.keys() == BY_HAND.keys()
    assert summary["goodput"] is None and summary["effective_h"] is None and summary["longest_gap_s"] is None
    assert summary["rounds"] == 0 and summary["per_learner"] == {}
