"""Which members a round's event names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.observe.summary import summarise
from atoll.telemetry.events import Event
from atoll.telemetry.round_members import FEW, MemberSampler, count_members, count_merged_tokens, names_all

FRAGMENTS = 4


def round_data(number: int, members: dict[str, int], tokens: int = 100) -> dict[str, Any]:
    """`members`: of each its incarnation."""
    told = [
        {"learner": name, "incarnation": life, "t": number, "steps": 4, "tokens": tokens, "weight": 2500.0}
        | {"base": number // FRAGMENTS, "since": 4, "overlap": 2, "loss": 2.5, "total": 400 * number, "busy_s": 1.5}
        | {"agreement": 0.4972, "influence": 0.0833, "filtered": 10}
        for name, life in sorted(members.items())
    ]
    head = {"kind": "round", "text": f"round {number}: fragment 0 is version 1; all 512 live learners reported"}
    figures = {"gather_s": 0.1234, "sync_s": 0.1234, "merge_s": 0.123456, "effective_h": 24.0, "step": 1000.125}
    return {"at": 1795109947.113447 + number, **head, "round": number, "fragment": number % FRAGMENTS} | {
        "version": number // FRAGMENTS, "live": len(members), **figures, "members": tuple(told)
    }  # fmt: skip


def write(rounds: int, members: dict[str, int]) -> list[Event]:
    sampler = MemberSampler()
    return [sampler.thin_out(round_data(number, members), FRAGMENTS) for number in range(rounds)]


@given(st.integers(1, FEW))
def test_of_a_few_all_are_named_in_every_round(count: int) -> None:
    assert all(map(names_all, write(20, {f"learner-{number}": 1 for number in range(count)})))


@pytest.mark.parametrize("count", [2, 8, 9, 32, 128, 512])
def test_a_round_takes_two_kilobytes_however_many_members_it_has(count: int) -> None:
    first, *later = write(4 * count + 200, {f"learner-{number}": 1 for number in range(count)})
    sizes = [len(msgspec.json.encode(event)) for event in later]
    assert sum(sizes) / len(sizes) <= 2048 and names_all(first)


def test_sums_and_counts_are_those_of_all_members() -> None:
    events = write(200, {f"learner-{number}": 1 for number in range(40)})
    assert {count_members(event) for event in events} == {40}
    assert {count_merged_tokens(event) for event in events} == {40 * 90}
    assert 0 < sum(map(names_all, events)) < 50
    named = {event["fragment"] for event in events if names_all(event)}
    assert named == set(range(FRAGMENTS)), "of every fragment some"


def test_a_life_is_named_in_its_first_round() -> None:
    sampler, members = MemberSampler(), {f"learner-{number:02}": 1 for number in range(40)}
    events = [sampler.thin_out(round_data(number, members), FRAGMENTS) for number in range(10)]
    members |= {"learner-07": 2, "new": 1}
    event = sampler.thin_out(round_data(10, members), FRAGMENTS)
    assert not names_all(event) and [one["learner"] for one in event["members"]] == ["learner-07", "new"]
    assert not sampler.thin_out(round_data(11, members), FRAGMENTS)["members"] and events


def test_a_summary_of_rounds_that_name_few_has_the_figures_of_one_that_names_all() -> None:
    members = {f"learner-{number:02}": 1 for number in range(30)}
    came = [
        {"at": 1795109946.0, "kind": kind, "text": "", "learner": name, "incarnation": 1, "seconds": 1.0}
        for name in members
        for kind in ("joined", "recovered")
    ]
    ending = {"at": 1795119947.0, "kind": "ending", "text": "", "reason": "asked"}
    settings = {"at": 1795109945.0, "kind": "run", "text": "", "run": "r", "learners": 30}
    settings |= {"settings": {"fragments": FRAGMENTS, "sync_every": 4, "learners": 30}}
    whole = [dict(round_data(number, members)) for number in range(400)]
    thin = write(400, members)
    assert sum(map(names_all, thin)) < 100
    full, few = (summarise([settings, *came, *rounds, ending]) for rounds in (whole, thin))
    for name in ("participation", "effective_h", "overlap", "rounds", "training_loss_end"):
        assert few[name] == full[name], name
    # Without an account, what was computed is what learners said in the last round that names them.
    assert few["merged_share"] == pytest.approx(full["merged_share"], rel=0.02)
    for name, learner in few["per_learner"].items():
        assert learner["participation"] == full["per_learner"][name]["participation"] == 1.0
        assert learner["longest_absence_rounds"] == full["per_learner"][name]["longest_absence_rounds"] == 0
