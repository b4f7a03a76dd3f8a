"""The tape on its way: numbered where it is made, said once on a connection, written down before what depends on it."""

from __future__ import annotations

import msgspec
import pytest
from tests.protocol.world import World

from atoll.protocol import messages as msg
from atoll.protocol import records
from atoll.protocol.history import History
from atoll.protocol.learner import effects as learner_fx
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as syncer_fx
from atoll.protocol.syncer.outbox import ROUND_BYTES, TAPE_BYTES, Taping
from atoll.protocol.tape import KEPT, AdoptedEntry, BeganEntry, InformedEntry, Numbered, Spoken


def entries(start: int, stop: int) -> tuple[AdoptedEntry, ...]:
    return tuple(AdoptedEntry(t, 0, t) for t in range(start, stop))


class TestNumbered:
    def test_what_comes_twice_is_kept_once(self) -> None:
        tape = Numbered()
        tape.add(entries(0, 5))
        tape.add(entries(3, 8), first=3)
        assert tape.since(0) == (0, entries(0, 8))
        assert tape.since(6) == (6, entries(6, 8))
        assert tape.since(8) == (8, ())

    def test_a_gap_stays_one(self) -> None:
        tape = Numbered()
        tape.add(entries(0, 5))
        tape.add(entries(7, 9), first=7)
        assert tape.since(0) == (7, entries(7, 9))

    def test_only_the_newest_are_kept(self) -> None:
        tape = Numbered()
        tape.add(entries(0, KEPT + 10))
        assert tape.since(0) == (10, entries(10, KEPT + 10))


class TestSpoken:
    def test_everything_is_said_once_on_a_connection(self) -> None:
        tape = Spoken()
        tape.add(0, entries(0, 3))
        assert tape.waiting and tape.next() == (0, entries(0, 3))
        assert not tape.waiting and tape.next() == (3, ())
        tape.add(3, entries(3, 4))
        assert tape.next() == (3, entries(3, 4))

    def test_a_new_connection_goes_on_where_the_journal_ends(self) -> None:
        tape = Spoken()
        tape.add(0, entries(0, 9))
        tape.next()
        tape.welcomed(4)
        assert tape.next() == (4, entries(4, 9))


@pytest.fixture
def history() -> History:
    settings = Settings(learners=1, fragments=1, sync_every=1)
    history = History(records.BegunRecord("run", settings, {}, (), "plan"))
    history.apply(records.JoinedRecord("a", 1, "session", 0))
    return history


class TestTaping:
    def test_parts_become_one_record_and_what_is_known_is_passed_over(self, history: History) -> None:
        taping = Taping(history)
        assert taping.add_entries("a", 1, 0, entries(0, 3)) is None
        assert taping.add_entries("a", 1, 2, entries(2, 5)) is None
        [played] = taping.take_records()
        assert played == records.PlayedRecord((records.Stretch("a", 1, 0, entries(0, 5)),))
        history.apply(played)
        assert taping.add_entries("a", 1, 0, entries(0, 5)) is None
        assert taping.take_records() == []

    def test_what_is_missing_is_said_and_seen(self, history: History) -> None:
        taping = Taping(history)
        taping.add_entries("a", 1, 0, entries(0, 2))
        assert taping.add_entries("a", 1, 4, entries(4, 6)) == "entries 2 to 3 of its tape are missing"
        [played] = taping.take_records()
        assert isinstance(played, records.PlayedRecord) and [one.first for one in played.tapes] == [0, 4]

    def test_all_that_a_process_keeps_fits_and_so_does_what_a_round_brings(self, history: History) -> None:
        taping = Taping(history)
        late = tuple(AdoptedEntry(10**6 + n, 20_000, 50_000, "c", 10**6 + n) for n in range(KEPT))
        taping.add_entries("a", 1, 0, late)
        for number in range(100_000):
            history.committed += 1
            taping.add_entries("a", 1, KEPT + 2 * number, (late[-1], InformedEntry(10**6, 10**6)))
            assert not taping.is_full("a")
            if number % 50 == 0:
                for record in taping.take_records():
                    history.apply(record)

    def test_what_waits_and_what_is_written_are_counted_in_bytes(self, history: History) -> None:
        taping, long = Taping(history), BeganEntry(0, 1, "x" * 900, "x" * 900, "cpu", True)
        for number in range(1000):
            taping.add_entries("a", 1, number, (long,))
            if taping.is_full("a"):
                break
        [played] = taping.take_records()
        assert 0.9 * TAPE_BYTES < len(records.encode(played)) < 1.1 * TAPE_BYTES
        history.apply(played)
        taping.add_entries("a", 1, number, (long,))
        assert taping.is_full("a") and taping.take_records() == [], "a record more gives no room"
        history.committed += 3
        taping.add_entries("a", 1, number, (long,))
        assert not taping.is_full("a") and taping.take_records(), f"three rounds give {3 * ROUND_BYTES} bytes"

    def test_one_that_lends_without_end_fills_no_journal(self, history: History) -> None:
        taping = Taping(history)
        for t in range(100_000):
            taping.note_lent_state("ticket", "a", 1, t)
        assert sum(len(records.encode(lent)) for lent in taping.take_records()) < TAPE_BYTES

    def test_a_crash_takes_what_was_not_written_and_the_learner_says_it_again(self, history: History) -> None:
        Taping(history).add_entries("a", 1, 0, entries(0, 3))
        assert history.lives["a"].taped == 0, "so the next welcome asks for all of it"

    def test_a_new_process_of_the_same_learner_has_a_tape_of_its_own(self, history: History) -> None:
        history.apply(records.PlayedRecord((records.Stretch("a", 1, 0, entries(0, 3)),)))
        history.apply(records.JoinedRecord("a", 2, "session", 0))
        assert history.lives["a"].taped == 3, "the same process goes on"
        history.apply(records.JoinedRecord("a", 3, "another", 0))
        assert history.lives["a"].taped == 0


def test_a_round_is_written_down_behind_what_its_members_depend_on() -> None:
    world = World(2, fragments=2, sync_every=4).run_until(round=4)
    said = {"taped": 0, "tape": entries(0, 3)}
    learner = world.learners["learner-0"]
    progress = msg.Progress(t=learner.t, steps=(0, 0), tokens=(0, 0), versions=(0, 0), incarnation=1, **said)  # type: ignore[arg-type]
    assert not any(
        isinstance(effect, syncer_fx.Persist) for effect in world.inject(syncer_fx.Received("learner-0", progress))
    )
    before = len(world.journal)
    world.run_until(round=world.syncer.committed + 1)
    [played, merged] = [
        line for line in world.journal[before:] if isinstance(line, records.PlayedRecord | records.MergedRecord)
    ]
    assert isinstance(played, records.PlayedRecord) and isinstance(merged, records.MergedRecord), "in this order"
    assert world.syncer.history.lives["learner-0"].taped == 3


def test_a_contribution_takes_along_what_no_report_has_said() -> None:
    world = World(1, fragments=1, sync_every=4).run_until(round=2)
    machine = world.learners["learner-0"].machine
    machine.handle(world.now, learner_fx.Told(0, entries(0, 2)))
    machine._connection.send_message(
        world.now, msg.Contribution(round=9, attempt=1, fragment=0, base=0, t=1, steps=1, tokens=1, digest="")
    )
    said = machine._effects[-1]
    assert isinstance(said, learner_fx.Say) and isinstance(said.message, msg.Contribution)
    assert said.message.tape == entries(0, 2)


def test_an_entry_takes_few_bytes() -> None:
    adopted, informed = AdoptedEntry(123_456, 17, 5_000), InformedEntry(123_456, 123_000, 0.123, 123_000)
    assert len(msgspec.msgpack.encode(adopted)) + len(msgspec.msgpack.encode(informed)) < 45
