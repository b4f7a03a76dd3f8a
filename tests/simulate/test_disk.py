"""The simulated run directory: what counts, and what a crash leaves of it."""

from __future__ import annotations

import random

import pytest

from atoll.protocol.history import History
from atoll.protocol.records import (
    BegunRecord,
    EndedRecord,
    JoinedRecord,
    MergedRecord,
    PassedRecord,
    Share,
    StartedRecord,
    TermRecord,
)
from atoll.protocol.settings import Settings
from atoll.simulate.disk import DiskEntry, SimulatedDisk
from atoll.simulate.virtual_time import EventQueue

BEGUN = BegunRecord("run", Settings(learners=1, fragments=1, sync_every=1, overlap=0).resolved(1), {}, (), "plan")


def disk(*, every_round: bool = True, seed: int = 0) -> SimulatedDisk:
    made = SimulatedDisk(BEGUN, random.Random(seed), sync_s=0.1, every_round=every_round)
    made.claim, made.start = 1, [1.0]
    return made


def entries(count: int) -> list[DiskEntry]:
    return [(PassedRecord(number, 0, "nobody"), None) for number in range(count)]


def test_what_is_being_written_does_not_count_yet() -> None:
    one = disk()
    assert one.begin_append(1, entries(2)) == 0.1
    assert one.journal == []
    assert one.end_append(1) and len(one.journal) == 2


def test_a_crash_in_the_middle_leaves_a_prefix() -> None:
    left = set()
    for seed in range(30):
        one = disk(seed=seed)
        one.begin_append(1, entries(3))
        one.abandon_append(1)
        assert one.journal == [record for record, _ in entries(3)][: len(one.journal)]
        left.add(len(one.journal))
    assert left == {0, 1, 2, 3}


def test_a_term_that_was_claimed_past_writes_nothing_that_counts() -> None:
    one = disk()
    one.begin_append(1, entries(1))
    one.claim_term(History(BEGUN))
    assert not one.end_append(1)
    assert [type(record) for record in one.journal] == [TermRecord]


def test_a_power_cut_takes_what_was_never_synced() -> None:
    one = disk(every_round=False)
    one.append(entries(2))
    one.keep_cut(0, History(BEGUN).state(), [1.0], place=1)
    assert one.power_cut() == 1 and len(one.journal) == 1 and one.losses == 1
    kept = disk()
    kept.append(entries(2))
    assert kept.power_cut() == 0 and len(kept.journal) == 2


def test_a_crash_never_leaves_less_than_the_mark_says_and_the_mark_never_says_what_was_not_synced() -> None:
    places = set()
    for seed in range(30):
        for every_round in (True, False):
            one = disk(every_round=every_round, seed=seed)
            one.append(entries(2))
            assert one.marked == (2 if every_round else 0)
            one.begin_append(1, entries(3))
            one.abandon_append(1)
            places.add(len(one.journal) - one.marked)
            one.power_cut()
            assert one.marked <= len(one.journal)
    assert 3 in places, "the machine went down between an append and its mark"


def test_records_that_were_durable_and_are_gone_are_not_passed_over() -> None:
    one = disk()
    one.append(entries(2))
    del one.journal[1:]
    with pytest.raises(AssertionError, match="2 records were durable, 1 are there"):
        one.recover(1.0)


def test_the_end_of_a_run_is_synced_with_all_before_it_whatever_the_durability() -> None:
    one = disk(every_round=False)
    one.append(entries(2))
    assert one.begin_append(1, [(EndedRecord("asked to"), None)]) == one.sync_s
    assert one.end_append(1)
    assert one.power_cut() == 0 and len(one.journal) == 3


def test_recovery_gives_the_values_that_the_gradients_make() -> None:
    one = disk()
    share = Share("learner-0", 1, 2, 2, 20, 200.0, 0)
    merged = MergedRecord(0, 0, 1, 1, "all", (share,), "digest")
    one.append([(JoinedRecord("learner-0", 1, "session", 0), None), (StartedRecord("learner-0"), None), (merged, 2.0)])
    history, theta = one.recover(0.5)
    assert history.versions == [1] and theta == [0.0]


def test_no_cut_counts_before_the_run_has_begun() -> None:
    """A lead that died between cut 0 and the record of it: others take the place of those parameters."""
    one = disk()
    one.append(entries(1))
    one.keep_cut(0, History(BEGUN).state(), [1.0], 1)
    assert one.read_decisions() == one.journal
    one.append([(StartedRecord("a"), None)])
    assert one.read_decisions() == [0, StartedRecord("a")]


def test_things_that_are_due_together_happen_in_the_order_in_which_they_were_sent() -> None:
    """Seed 1360 of the ranks' worlds: what was sent last came first, by the rounding of its delay."""
    now, at = 1.257, 3.44
    assert now + (at - now) < at
    queue, happened = EventQueue(), list[str]()
    queue.call_at(at, happened.append, "first")
    queue.now = now
    queue.call_at(at, happened.append, "second")
    while len(queue):
        queue.step()
    assert happened == ["first", "second"]
