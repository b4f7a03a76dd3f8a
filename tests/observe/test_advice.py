from __future__ import annotations

from typing import Any

from atoll.observe.story import ADVICE, advise, story
from atoll.observe.summary import Summary, summarise
from atoll.telemetry.events import Event


def summary_of(events: list[Event], overlap: int, missed: int, **settings: Any) -> Summary:
    """Of 240 tokens, so many were dropped by each cause."""
    summary = summarise(events)
    summary["tokens"] |= {"dropped_by_cause": {"overlap": overlap, "missed": missed, "crash": 0}}
    summary["settings"] |= settings
    return summary | {"effective_h_mean": 6.0}


def test_where_a_fragment_is_away_for_long_it_is_synced_less_often(events: list[Event]) -> None:
    summary = summary_of(events, overlap=80, missed=0)
    assert advise(summary) == [
        "a fragment comes back after 2 of 6 steps, and what was trained meanwhile is dropped (33 % of the tokens): "
        "--set sync_every=24 drops less of it, --set adopt=carry keeps it."
    ]
    assert any(one.startswith(ADVICE) for one in story(summary, events))


def test_the_further_away_it_is_the_larger_is_the_h_to_take(events: list[Event]) -> None:
    assert "--set sync_every=48" in advise(summary_of(events, overlap=160, missed=0))[0]


def test_where_rounds_were_missed_their_steps_can_be_kept(events: list[Event]) -> None:
    summary = summary_of(events, overlap=0, missed=120)
    for name, share in (("a", 0.9), ("b", 0.3)):
        summary["per_learner"][name]["merged_share"] = share
    assert advise(summary) == [
        "50 % of the tokens were overwritten in rounds that their learner was not in; least was merged of b: "
        "--set adopt=carry keeps such steps."
    ]


def test_what_the_usual_settings_drop_is_nothing_to_speak_of(events: list[Event]) -> None:
    assert advise(summary_of(events, overlap=20, missed=0)) == []
    assert advise(summary_of(events, overlap=200, missed=0, adopt="carry")) == []
    assert advise(summary_of(events, overlap=0, missed=200, adopt="")) == [], "unset, it is carry"
    assert advise(summary_of(events, overlap=0, missed=200, adopt="", synchronous=True)) != []
    assert advise(summarise(events)) == []
    assert advise(summarise([])) == []


def test_where_much_was_refused_nothing_is_advised_that_would_keep_it(events: list[Event]) -> None:
    summary = summary_of(events, overlap=80, missed=120)
    given = sum(one["rounds"] for one in summary["per_learner"].values())
    assert len(advise(summary | {"refusals": 1})) == 2
    assert advise(summary | {"refusals": given}) == []
