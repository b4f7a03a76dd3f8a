"""Nothing is told before it is durable: effects in their order, writes that gather, full and broken disks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from atoll.protocol.effects import Note
from atoll.protocol.history import History
from atoll.protocol.records import AnyRecord, BegunRecord, EndedRecord, MergedRecord, PassedRecord
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as fx
from atoll.store.disk import DiskFailed, NoRoom
from atoll.store.journal import JournalEntry
from atoll.store.writer_lease import Deposed
from atoll.syncer import effect_queue
from atoll.syncer.effect_queue import EffectQueue

WAIT_S = 10.0
HISTORY = History(BegunRecord("run", Settings(fragments=2, sync_every=4), {}, (), "plan")).state()


def note(text: str) -> Note:
    return Note("note", text)


def record(number: int) -> PassedRecord:
    return PassedRecord(number, 0, "no quorum")


def persist(*numbers: int) -> fx.Persist:
    return fx.Persist(tuple(record(number) for number in numbers))


def merged(number: int) -> MergedRecord:
    return MergedRecord(number, 0, 1, 1, "every live learner reported", (), "digest")


class Disk:
    """An append that a test lets through, in the queue's own thread."""

    def __init__(self) -> None:
        self.appended: list[list[AnyRecord]] = []
        self.payloads: list[bytes] = []
        self.asked: list[tuple[int, int]] = []
        """(round, appends before) of every outer gradient that was asked for."""
        self.done: list[tuple[fx.SyncerEffect, int]] = []
        """What was carried out, with the appends that had returned by then."""
        self.failures: list[Exception] = []
        self.alarms: list[str] = []
        self.is_fenced = False
        self.first_cuts: list[int] = []
        self.returned = 0
        self._loop = asyncio.get_running_loop()
        self._open = threading.Event()
        self._open.set()
        self.busy = asyncio.Event()
        """An append has begun."""
        self.alarmed = asyncio.Event()
        self.cut_asked = asyncio.Event()
        self.cut_may_end = asyncio.Event()
        self.cut_may_end.set()
        self.queue = EffectQueue(
            self._append,
            carry_out=self.carry_out,
            payload=self._payload,
            first_cut=self._first_cut,
            fenced=lambda: self.is_fenced,
            alarm=self._alarm,
        )

    def hold(self) -> None:
        """The next append takes as long as the test wants."""
        self._open.clear()
        self.busy.clear()

    def let_go(self) -> None:
        self._open.set()

    def carry_out(self, effect: fx.SyncerEffect) -> None:
        self.done.append((effect, self.returned))

    def texts(self) -> list[str]:
        return [effect.text for effect, _ in self.done if isinstance(effect, Note)]

    def _append(self, entries: Sequence[JournalEntry]) -> None:
        assert threading.current_thread() is not threading.main_thread(), "beside the event loop"
        self._loop.call_soon_threadsafe(self.busy.set)
        assert self._open.wait(WAIT_S)
        if self.failures:
            raise self.failures.pop(0)
        self.appended.append([record for record, _ in entries])
        self.payloads.extend(bytes(data) for _, data in entries if data is not None)
        self.returned += 1

    def _payload(self, persist: fx.Persist) -> memoryview | None:
        if persist.round < 0:
            return None
        self.asked.append((persist.round, self.returned))
        return memoryview(f"gradient of {persist.round}".encode())

    async def _first_cut(self, cut: fx.TakeCut) -> None:
        self.cut_asked.set()
        await self.cut_may_end.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.first_cuts.append(cut.cut)

    def _alarm(self, text: str) -> None:
        self.alarms.append(text)
        self.alarmed.set()

    async def emptied(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.queue.wait_until_empty()

    async def is_busy(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.busy.wait()


@asynccontextmanager
async def writing(disk: Disk) -> AsyncIterator[Disk]:
    """With the queue at work."""
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(disk.queue.run())
        try:
            yield disk
        finally:
            disk.let_go()
            running.cancel()


# ---- the order -------------------------------------------------------------------------------------------------------


async def test_what_waits_for_nothing_is_carried_out_at_once() -> None:
    disk = Disk()
    disk.queue.enqueue([note("one"), note("two")])
    assert disk.texts() == ["one", "two"]


async def test_nothing_behind_a_record_is_told_before_its_append_returned() -> None:
    async with writing(Disk()) as disk:
        disk.hold()
        disk.queue.enqueue([note("before"), persist(1), note("behind")])
        disk.queue.enqueue([note("later")])
        await disk.is_busy()
        assert disk.texts() == ["before"]
        disk.queue.enqueue([note("later still")])
        assert disk.texts() == ["before"]
        disk.let_go()
        await disk.emptied()
        assert disk.texts() == ["before", "behind", "later", "later still"]
        assert [returned for effect, returned in disk.done if isinstance(effect, Note)] == [0, 1, 1, 1]


async def test_a_record_of_a_later_batch_holds_up_only_what_is_behind_it() -> None:
    async with writing(Disk()) as disk:
        disk.hold()
        disk.queue.enqueue([persist(1), note("a")])
        await disk.is_busy()
        disk.queue.enqueue([note("b"), persist(2), note("c")])
        disk.let_go()
        await disk.emptied()
        assert [(e.text, n) for e, n in disk.done if isinstance(e, Note)] == [("a", 1), ("b", 1), ("c", 2)]


async def test_what_carrying_out_leads_to_comes_behind_what_waits() -> None:
    disk = Disk()
    told: list[str] = []

    def carry_out(effect: fx.SyncerEffect) -> None:
        assert isinstance(effect, Note)
        if effect.text == "one":
            queue.enqueue([note("its consequence")])
        told.append(effect.text)

    queue = EffectQueue(
        disk._append, carry_out=carry_out, payload=lambda persist: None, first_cut=disk._first_cut, alarm=disk._alarm
    )
    queue.enqueue([note("one"), note("two")])
    assert told == ["one", "two", "its consequence"], "each to its end"


async def test_it_is_emptied_once_everything_is_carried_out() -> None:
    async with writing(Disk()) as disk:
        await disk.emptied()
        disk.hold()
        disk.queue.enqueue([persist(1), note("behind")])
        await disk.is_busy()
        waits = asyncio.create_task(disk.emptied())
        await asyncio.sleep(0)
        assert not waits.done()
        disk.let_go()
        await waits
        assert disk.texts() == ["behind"]


# ---- writes that gather ----------------------------------------------------------------------------------------------


async def test_all_that_was_decided_during_a_write_goes_out_in_one() -> None:
    async with writing(Disk()) as disk:
        disk.hold()
        disk.queue.enqueue([persist(1)])
        await disk.is_busy()
        for number in range(2, 6):
            disk.queue.enqueue([note(f"before {number}"), persist(number, 10 * number), note(f"behind {number}")])
        disk.let_go()
        await disk.emptied()
        together = [record(n) for number in range(2, 6) for n in (number, 10 * number)]
        assert disk.appended == [[record(1)], together]
        assert disk.texts() == [f"{where} {number}" for number in range(2, 6) for where in ("before", "behind")]


async def test_an_outer_gradient_is_asked_for_only_when_it_is_first_in_a_batch() -> None:
    async with writing(Disk()) as disk:
        disk.hold()
        disk.queue.enqueue([persist(1)])
        await disk.is_busy()
        disk.queue.enqueue([persist(2), fx.Persist((record(3), merged(7)), round=7), persist(4)])
        assert disk.asked == [], "it may not be made yet"
        disk.let_go()
        await disk.emptied()
        assert disk.appended == [[record(1)], [record(2)], [record(3), merged(7), record(4)]]
        assert disk.asked == [(7, 2)] and disk.payloads == [b"gradient of 7"], "with the last record of its own"


async def test_two_outer_gradients_are_never_in_one_batch() -> None:
    async with writing(Disk()) as disk:
        disk.hold()
        disk.queue.enqueue([fx.Persist((merged(7),), round=7)])
        await disk.is_busy()
        disk.queue.enqueue([fx.Persist((merged(8),), round=8), fx.Persist((merged(9),), round=9)])
        disk.let_go()
        await disk.emptied()
        assert disk.asked == [(7, 0), (8, 1), (9, 2)]


async def test_a_cut_finds_the_journal_as_it_was_decided() -> None:
    async with writing(Disk()) as disk:
        disk.hold()
        disk.queue.enqueue([persist(1)])
        await disk.is_busy()
        cut = fx.TakeCut(4, HISTORY)
        disk.queue.enqueue([persist(2), cut, persist(3)])
        disk.let_go()
        await disk.emptied()
        assert disk.appended == [[record(1)], [record(2)], [record(3)]]
        assert (cut, 2) in disk.done, "what is decided behind it is not on disk yet"


async def test_the_first_cut_is_durable_before_anything_behind_it() -> None:
    async with writing(Disk()) as disk:
        disk.cut_may_end.clear()
        disk.queue.enqueue([persist(1), fx.TakeCut(0, HISTORY, first=True), persist(2), note("started")])
        waits = asyncio.create_task(disk.emptied())
        async with asyncio.timeout(WAIT_S):
            await disk.cut_asked.wait()
        assert disk.returned == 1 and disk.first_cuts == [] and disk.texts() == []
        disk.cut_may_end.set()
        await waits
        assert disk.first_cuts == [0] and disk.texts() == ["started"]
        assert disk.appended == [[record(1)], [record(2)]], "the cut is a barrier"
        assert not any(isinstance(effect, fx.TakeCut) for effect, _ in disk.done), "it is taken once"


# ---- disks that do not -----------------------------------------------------------------------------------------------


def full(times: int) -> list[Exception]:
    return [NoRoom("no room for segment-000001.log") for _ in range(times)]


async def test_a_full_disk_is_waited_for_without_an_alarm_while_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effect_queue, "AGAIN_S", 0.0)
    async with writing(Disk()) as disk:
        disk.failures = full(3)
        disk.queue.enqueue([persist(1), note("behind")])
        await disk.emptied()
        assert disk.appended == [[record(1)]] and disk.texts() == ["behind"]
        assert disk.alarms == []


async def test_a_disk_that_stays_full_raises_an_alarm_which_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effect_queue, "AGAIN_S", 0.0)
    monkeypatch.setattr(effect_queue, "ALARM_S", 0.0)
    monkeypatch.setattr(effect_queue, "ALARM_AGAIN_S", 0.0)
    async with writing(Disk()) as disk:
        disk.failures = full(2)
        disk.queue.enqueue([persist(1), note("behind")])
        await disk.emptied()
        assert disk.alarms.count("nothing can be committed: no room for segment-000001.log") == 2
        assert disk.alarms[-1] == "" and disk.alarms.count("") == 1
        assert disk.texts() == ["behind"], "and nothing was lost"


async def test_a_disk_that_stays_full_is_tried_often_and_told_of_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal had two equal alarms a second."""
    assert effect_queue.ALARM_AGAIN_S >= 120
    monkeypatch.setattr(effect_queue, "AGAIN_S", 0.0)
    monkeypatch.setattr(effect_queue, "ALARM_S", 0.0)
    monkeypatch.setattr(effect_queue, "ALARM_AGAIN_S", WAIT_S)
    async with writing(Disk()) as disk:
        disk.failures = full(20)
        disk.queue.enqueue([persist(1)])
        await disk.emptied()
        assert disk.alarms.count("nothing can be committed: no room for segment-000001.log") == 1
        assert disk.alarms[-1] == ""


async def test_a_disk_that_does_not_answer_raises_an_alarm_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effect_queue, "ALARM_S", 0.001)
    async with writing(Disk()) as disk:
        disk.hold()
        disk.queue.enqueue([persist(1), note("behind")])
        async with asyncio.timeout(WAIT_S):
            await disk.alarmed.wait()
        assert disk.alarms == ["nothing can be committed: the disk does not answer"]
        assert disk.texts() == []
        disk.let_go()
        await disk.emptied()
        assert disk.alarms[1:] == [""]


async def test_the_first_cut_waits_for_room_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effect_queue, "AGAIN_S", 0.0)
    async with writing(Disk()) as disk:
        disk.failures = full(2)
        disk.queue.enqueue([fx.TakeCut(0, HISTORY, first=True), note("started")])
        await disk.emptied()
        assert disk.first_cuts == [0] and disk.texts() == ["started"]


async def test_any_other_failure_of_the_disk_ends_it() -> None:
    disk = Disk()
    disk.failures = [DiskFailed("cannot make segment-000001.log durable")]
    disk.queue.enqueue([persist(1), note("behind")])
    with pytest.raises(DiskFailed, match="cannot make"):
        await disk.queue.run()
    assert disk.done == [], "what is not known to be durable is told to nobody"


async def test_one_that_was_replaced_ends_without_a_word() -> None:
    disk = Disk()
    disk.is_fenced = True
    disk.queue.enqueue([persist(1), note("behind")])
    with pytest.raises(Deposed, match="another syncer has taken over this run"):
        await disk.queue.run()
    assert disk.appended == [[record(1)]], "it looks only after the write"
    assert disk.done == []
    assert Deposed.exit_code == 5


async def test_it_looks_whether_it_was_replaced_after_every_write() -> None:
    disk = Disk()
    running = asyncio.create_task(disk.queue.run())
    disk.queue.enqueue([persist(1), note("one")])
    await disk.emptied()
    disk.is_fenced = True
    disk.queue.enqueue([fx.Persist((EndedRecord("done"),)), note("two")])
    with pytest.raises(Deposed):
        await asyncio.wait_for(running, WAIT_S)
    assert disk.texts() == ["one"]
