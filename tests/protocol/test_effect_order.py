"""The order of a syncer's effects: what waits for a write, what goes out with it, and the end of one that was replaced.

How the service uses it, with a disk and threads, is in tests/syncer/test_effect_queue.py.
"""

from __future__ import annotations

from tests.protocol.work import count_opcodes

from atoll.protocol.effects import Note
from atoll.protocol.history import History
from atoll.protocol.records import BegunRecord, EndedRecord, PassedRecord
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.effect_order import EffectOrder, entries_of

HISTORY = History(BegunRecord("run", Settings(fragments=2, sync_every=4), {}, (), "plan")).state()
FIRST_CUT = fx.TakeCut(0, HISTORY, first=True)


def note(text: str) -> Note:
    return Note("note", text)


def persist(*numbers: int) -> fx.Persist:
    return fx.Persist(tuple(PassedRecord(number, 0, "no quorum") for number in numbers))


class Told:
    """An order, and what it has carried out so far."""

    def __init__(self, *effects: fx.SyncerEffect) -> None:
        self.order, self.effects = EffectOrder(), list[fx.SyncerEffect]()
        self.order.enqueue(effects)

    def texts(self) -> list[str]:
        self.order.carry_out_ready(self.effects.append)
        return [effect.text for effect in self.effects if isinstance(effect, Note)]


def test_what_is_decided_during_a_write_waits_for_the_next() -> None:
    told = Told(note("before"), persist(1), note("behind"))
    assert told.texts() == ["before"]
    assert told.order.begin_write() == [persist(1)]
    told.order.enqueue([persist(2), note("later"), persist(3)])
    assert told.order.begin_write() is None, "one write at a time"
    assert told.order.end_write(fenced=False) and told.texts() == ["before", "behind"]
    assert told.order.begin_write() == [persist(2), persist(3)]
    assert told.order.end_write(fenced=False) and told.texts() == ["before", "behind", "later"]
    assert not told.order.has_waiting


def test_no_write_begins_while_an_effect_is_carried_out() -> None:
    order = EffectOrder()
    begun: list[object] = []

    def carry_out(effect: fx.SyncerEffect) -> None:
        order.enqueue([persist(1)])
        order.carry_out_ready(carry_out)
        begun.append(order.begin_write())

    order.enqueue([note("one"), note("two")])
    order.carry_out_ready(carry_out)
    assert begun == [None, None], "what stands before the record is not carried out yet"
    assert order.begin_write() == [persist(1), persist(1)]


def test_the_first_cut_is_a_write_of_its_own_and_not_carried_out_again() -> None:
    told = Told(FIRST_CUT, note("started"))
    assert told.texts() == [] and told.order.begin_write() == FIRST_CUT
    assert told.order.end_write(fenced=False) and told.texts() == ["started"]
    assert told.effects == [note("started")]


def test_one_that_was_replaced_tells_nothing_more() -> None:
    for write in (persist(1), FIRST_CUT):
        told = Told(write, note("behind"))
        assert told.texts() == [] and told.order.begin_write() is not None
        assert not told.order.end_write(fenced=True)
        told.order.enqueue([note("later")])
        assert told.texts() == [] and told.order.begin_write() is None
        assert told.order.has_waiting, "whoever waits for the end of this queue waits for ever"


def test_a_payload_belongs_to_the_last_record_of_its_own() -> None:
    ended = fx.Persist((PassedRecord(3, 0, "no quorum"), EndedRecord("done")), round=3)
    batch = [ended, persist(4)]
    assert entries_of(batch, lambda persist: "payload" if persist.round >= 0 else None) == [
        (PassedRecord(3, 0, "no quorum"), None),
        (EndedRecord("done"), "payload"),
        (PassedRecord(4, 0, "no quorum"), None),
    ]


# ---- merges ahead of the disk ---------------------------------------------------------------------------------------


def round_of(number: int, fragment: int) -> tuple[fx.SyncerEffect, ...]:
    """What is decided once a round is merged."""
    written = fx.Persist((PassedRecord(number, 0, "no quorum"),), round=number)
    return written, fx.Commit(number, fragment, 1), note(f"round {number}")


def merge(number: int, fragment: int) -> fx.Merge:
    return fx.Merge(number, fragment, ())


def begun(told: Told) -> list[int]:
    told.texts()
    return [effect.round for effect in told.effects if isinstance(effect, fx.Merge)]


def test_a_merge_is_begun_while_the_round_before_it_is_written() -> None:
    told = Told(*round_of(0, 0), merge(1, 1))
    assert begun(told) == [1] and told.texts() == []
    assert told.order.begin_write() is not None
    told.order.enqueue([*round_of(1, 1), merge(2, 2)])
    assert begun(told) == [1], "two rounds would be ahead of the one that is written"
    assert told.order.end_write(fenced=False)
    assert begun(told) == [1, 2] and told.texts() == ["round 0"]
    (written,) = told.order.begin_write() or ()
    assert isinstance(written, fx.Persist) and written.round == 1


def test_a_merge_waits_for_the_version_that_it_goes_on_from() -> None:
    told = Told(*round_of(0, 0), merge(1, 0))
    assert begun(told) == [] and told.order.begin_write() is not None
    assert told.order.end_write(fenced=False)
    assert begun(told) == [1]


def test_a_merge_waits_for_what_reads_or_changes_the_parameters() -> None:
    changing: list[fx.SyncerEffect] = [
        fx.TakeCut(1, HISTORY),
        fx.Retune({}),
        fx.Restore(0),
        fx.CommitRestored((1, 1), 1),
        fx.Persist((PassedRecord(9, 0, "no quorum"),), restored=True),
    ]
    for effect in changing:
        told = Told(*round_of(0, 0), effect, merge(1, 1))
        assert begun(told) == []
        while told.order.begin_write() is not None:
            assert told.order.end_write(fenced=False)
            told.texts()
        assert begun(told) == [1], effect


def test_one_that_was_replaced_merges_nothing_more() -> None:
    told = Told(*round_of(0, 0))
    assert begun(told) == [] and told.order.begin_write() is not None
    assert not told.order.end_write(fenced=True)
    told.order.enqueue([merge(1, 1)])
    assert begun(told) == []


def test_what_comes_while_a_merge_is_held_back_does_not_look_at_all_that_waits() -> None:
    """Each event looked at every waiting effect: with 512 learners, at 4 million of them for one slow write."""
    looks = []
    for waiting in (10, 10_000):
        told = Told(*round_of(0, 0), *round_of(1, 1), *[note("waits")] * waiting, merge(2, 2))
        assert begun(told) == [] and told.order.begin_write() is not None
        told.order.enqueue([note("later")])
        looks.append(count_opcodes(told.texts))
        assert told.order.end_write(fenced=False) and begun(told) == [2]
    assert looks[0] == looks[1]
