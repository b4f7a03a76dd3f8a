"""One term's journal and cuts: what is written through them comes back, and what is needed is kept."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.store.faulty import FaultyDisk
from tests.syncer.conftest import TENSORS, plan

from atoll.config import Outer
from atoll.numerics.screen import UsualNorms
from atoll.protocol.history import History
from atoll.protocol.messages import CutSaved
from atoll.protocol.records import (
    AnyRecord,
    BegunRecord,
    ChangedRecord,
    CutDoneRecord,
    EndedRecord,
    GoneRecord,
    JoinedRecord,
    MergedRecord,
    Share,
    StartedRecord,
    TermRecord,
)
from atoll.protocol.settings import Settings
from atoll.protocol.syncer.effects import CompleteCut
from atoll.store import atomic
from atoll.store import disk as disk_module
from atoll.store.cuts import check_cut, complete_cuts, digest_file, folder_of, known_cuts, read_manifest
from atoll.store.disk import DiskFailed, LocalDisk, LocalFile, NoRoom
from atoll.store.journal import read
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import Deposed, acquire, claim
from atoll.syncer.parameters import Parameters
from atoll.syncer.run_store import RunStore

OUTER = Outer(merge="mean", optimizer="nesterov", lr=0.6, momentum=0.6)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut leaves, the disk in memory tells."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(disk_module, "datasync", lambda descriptor: None)


class Reigning:
    """A syncer's numbers and its books, without anybody to talk to: one learner gives to every round."""

    def __init__(self, path: Path, **given: object) -> None:
        self.out = RunDir(path) if path.exists() else RunDir.create(path)
        self.run_store = RunStore(self.out, acquire(self.out.journal), **given)  # type: ignore[arg-type]
        self.dice = np.random.default_rng(self.run_store.term)
        found = self.run_store.found_on_disk
        if found is None:
            settings = Settings(learners=1, fragments=2, sync_every=4)
            begun = BegunRecord("r1", settings, msgspec.to_builtins(OUTER), TENSORS, plan().fingerprint)
            self.history, self.parameters = History(begun), Parameters(plan(), OUTER)
            self.run_store.append([(begun, None)])
        else:
            assert found.parameters is not None
            self.history, self.parameters = found.history, found.parameters

    def write(self, *records: AnyRecord) -> None:
        for record in records:
            self.history.apply(record)
        self.run_store.append([(record, None) for record in records])

    def start(self, *, begin: bool = True) -> Reigning:
        self.write(JoinedRecord("learner-0", 1, "session", 0))
        for part in plan().fragments:
            np.frombuffer(self.parameters.initial_bytes(part.index), np.float32)[:] = self.dice.standard_normal(
                part.size
            )
        self.parameters.commit_initial()
        self.cut(0)
        self.run_store.complete_cut("r1", CompleteCut(0, (), ()))
        if begin:
            self.write(StartedRecord("learner-0"))
        return self

    def round(self, times: int = 1) -> Reigning:
        for _ in range(times):
            number = self.history.committed
            f, version = number % 2, self.history.versions[number % 2] + 1
            delta = self.dice.standard_normal(plan().fragments[f].size).astype(np.float32)
            mark = self.parameters.stage_merge(f, [delta], [1.0])
            t, tokens = 2 * (number + 1), 16 * min(number + 1, 2)
            share = Share("learner-0", 1, t, 2, tokens, 128.0, version - 1, 8 * t)
            record = MergedRecord(number, f, version, 1, "every live learner reported", (share,), mark)
            self.history.apply(record)
            self.run_store.append([(record, self.parameters.round_payload(f))])
            self.parameters.commit_version(f, version, number)
        return self

    def cut(self, cut: int | None = None) -> int:
        """The syncer's part of one."""
        cut = self.history.committed if cut is None else cut
        state = self.run_store.open_cut(self.history.state(), self.parameters.version_rounds())
        held, arrays = self.parameters.committed_buffers(), self.parameters.hold_arrays()
        try:
            self.run_store.write_cut(cut, state, arrays)
        finally:
            for buffer in held:
                buffer.readers -= 1
        return cut

    def whole_cut(self) -> int:
        cut = self.cut()
        mark = self.run_store.complete_cut("r1", CompleteCut(cut, (), ()))
        self.write(CutDoneRecord(cut, cut, (), mark))
        return cut

    def payloads(self) -> list[str]:
        return sorted(path.name for path in self.out.journal.glob("payload-*"))

    def bits(self) -> dict[str, bytes]:
        bits = {name: values.tobytes() for name, values in self.parameters.hold_arrays().items()}
        for buffer in self.parameters.committed_buffers():
            buffer.readers -= 1
        return bits


# ---- a term ends, another begins -------------------------------------------------------------------------------------


def test_a_cut_that_was_complete_before_its_syncer_could_say_so_is_known_to_the_next(tmp_path: Path) -> None:
    """Learners keep their parts of the cuts that they are told of: one that nobody tells of would lose them."""
    one = Reigning(tmp_path / "run").start().round(5)
    cut = one.cut()
    one.run_store.complete_cut("r1", CompleteCut(cut, (), ()))
    one.run_store.close()
    two = Reigning(tmp_path / "run")
    assert two.history.kept_cuts == (5,)
    two.run_store.close()
    assert Reigning(tmp_path / "run").history.cuts == [5], "said once"


def test_a_run_that_was_written_comes_back_to_the_bit(tmp_path: Path) -> None:
    one = Reigning(tmp_path / "run").start().round(5)
    one.whole_cut()
    one.round(3)
    one.run_store.close()
    two = Reigning(tmp_path / "run")
    assert two.bits() == one.bits()
    assert two.parameters.version_rounds() == one.parameters.version_rounds()
    assert two.history.versions == one.history.versions == [4, 4]
    assert two.history.began == [(2, 8, (4, 4))]
    assert msgspec.structs.replace(two.history.state(), term=1, began=[]) == one.history.state()
    assert two.run_store.found_on_disk is not None and two.run_store.found_on_disk.cut == 5


@pytest.mark.parametrize("begun", [False, True])
def test_shards_are_told_of_cut_0_once_the_run_has_begun(tmp_path: Path, begun: bool) -> None:
    """A lead that dies between the two: the first parameters are asked for anew, and shards hold none before that."""
    Reigning(tmp_path / "run").start(begin=begun).run_store.close()
    found = Reigning(tmp_path / "run").run_store.read_decisions()
    assert [one for one in found if isinstance(one, int)] == ([0] if begun else [])
    assert any(isinstance(one, JoinedRecord) for one in found) != begun, "without a cut, all records count"


def test_many_terms_of_a_few_rounds_are_one_run(tmp_path: Path) -> None:
    straight = Reigning(tmp_path / "straight").start()
    reign = Reigning(tmp_path / "run").start()
    for term in range(1, 6):
        assert reign.run_store.term == term
        straight.dice = np.random.default_rng(100 + term)
        reign.dice = np.random.default_rng(100 + term)
        straight.round(2)
        reign.round(2)
        if term % 2 == 0:
            reign.whole_cut()
        reign.run_store.close()
        reign = Reigning(tmp_path / "run")
    assert reign.history.committed == 10 and reign.history.versions == [5, 5]
    assert reign.bits() == straight.bits(), "as if it had never been interrupted"


def test_a_new_term_writes_down_what_it_found_before_anything_else(tmp_path: Path) -> None:
    one = Reigning(tmp_path / "run").start().round(2)
    end = one.run_store._journal.position
    one.run_store.close()
    two = Reigning(tmp_path / "run")
    assert two.history.term == 2
    records = [record for _, record in read(two.out.journal, start=end, disk=LocalDisk())]
    assert records == [TermRecord(2, end.offset, end.hash, 2)]


def test_the_first_term_of_a_run_has_nothing_to_come_back_to(tmp_path: Path) -> None:
    out = RunDir.create(tmp_path / "run")
    run_store = RunStore(out, acquire(out.journal))
    assert run_store.found_on_disk is None and run_store.term == 1
    assert [record for _, record in read(out.journal, disk=LocalDisk())] == []
    run_store.close()


def test_books_that_are_closed_leave_the_run_to_the_next(tmp_path: Path) -> None:
    one = Reigning(tmp_path / "run").start()
    one.run_store.close()
    with pytest.raises(DiskFailed, match="is closed"):
        one.run_store.append([(GoneRecord("learner-0", 1, 0, 0, (0, 0), (0, 0)), None)])
    assert Reigning(tmp_path / "run").run_store.term == 2


def test_they_know_when_another_term_was_claimed(tmp_path: Path) -> None:
    reign = Reigning(tmp_path / "run").start()
    assert not reign.run_store.fenced()
    assert claim(reign.out.journal, 2)
    assert reign.run_store.fenced()


# ---- cuts ------------------------------------------------------------------------------------------------------------


def test_a_cut_says_where_the_journal_stood_when_it_was_opened(tmp_path: Path) -> None:
    reign = Reigning(tmp_path / "run").start().round(2)
    state = reign.run_store.open_cut(reign.history.state(), reign.parameters.version_rounds())
    held, arrays = reign.parameters.committed_buffers(), reign.parameters.hold_arrays()
    as_it_was = reign.bits()
    reign.round(3)  # the run goes on while it is written
    reign.run_store.write_cut(2, state, arrays)
    for buffer in held:
        buffer.readers -= 1
    reign.run_store.close()
    again = Reigning(tmp_path / "run")
    assert again.run_store.found_on_disk is not None
    assert (again.run_store.found_on_disk.cut, again.run_store.found_on_disk.rounds) == (2, 3)
    assert again.bits() == reign.bits() != as_it_was


def test_a_complete_cut_names_its_learners_and_those_left_out(tmp_path: Path) -> None:
    reign = Reigning(tmp_path / "run").start().round(2)
    path = reign.out.learner("learner-0") / "cut-000002.safetensors"
    path.write_bytes(b"state")
    cut = reign.cut()
    saved = CutSaved(of=2, incarnation=1, t=4, file=path.name, digest=digest_file(path))
    mark = reign.run_store.complete_cut(
        "r1", CompleteCut(cut, (("learner-0", saved),), (("learner-1", "it was gone"),))
    )
    manifest = check_cut(reign.out.cuts, reign.out.learners, 2).manifest
    assert (manifest.run, manifest.cut, manifest.round) == ("r1", 2, 2)
    assert {name: (part.incarnation, part.t) for name, part in manifest.learners.items()} == {"learner-0": (1, 4)}
    assert manifest.left_out == {"learner-1": "it was gone"}
    assert mark == digest_file(folder_of(reign.out.cuts, 2) / "manifest.json")


def test_only_so_many_cuts_are_kept(tmp_path: Path) -> None:
    reign = Reigning(tmp_path / "run", keep=2).start()
    for _ in range(5):
        reign.round()
        reign.whole_cut()
    assert complete_cuts(reign.out.cuts) == [5, 4]
    assert read_manifest(reign.out.cuts, 5).cut == 5


# ---- payloads --------------------------------------------------------------------------------------------------------


def test_payloads_are_kept_back_to_the_cut_before_the_newest(tmp_path: Path) -> None:
    reign = Reigning(tmp_path / "run").start().round(2)
    assert reign.payloads() == ["payload-000001-0001.bin"]
    reign.whole_cut()
    reign.round()
    assert reign.payloads() == ["payload-000001-0001.bin", "payload-000001-0002.bin"], "cut 0 needs the first"
    reign.whole_cut()
    reign.round()
    assert reign.payloads() == ["payload-000001-0002.bin", "payload-000001-0003.bin"]
    reign.whole_cut()
    reign.round()
    assert reign.payloads() == ["payload-000001-0003.bin", "payload-000001-0004.bin"]


def test_for_a_mean_of_the_last_versions_they_are_kept_back_to_one_cut_more(tmp_path: Path) -> None:
    """The last cut of a run may come right behind the one before it."""
    reign = Reigning(tmp_path / "run", payload_cuts=3).start().round(2)
    for _ in range(2):
        reign.whole_cut()
        reign.round(6)
    reign.whole_cut()
    reign.round(1)
    reign.whole_cut()
    reign.write(EndedRecord("enough"))
    tail = reign.run_store.average_tail(3)
    assert [last - first for first, last in zip(tail.record.first, tail.record.last, strict=True)] == [2, 2]
    assert reign.payloads() == ["payload-000001-0003.bin", "payload-000001-0004.bin"], "of the second cut and the third"


def test_with_the_newest_cut_damaged_the_one_before_it_gives_the_same(tmp_path: Path) -> None:
    reign = Reigning(tmp_path / "run").start()
    for _ in range(4):
        reign.round(2)
        reign.whole_cut()
    reign.round(3)
    reign.run_store.close()
    path = folder_of(reign.out.cuts, 8) / "theta-000.bin"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    again = Reigning(tmp_path / "run")
    assert again.run_store.found_on_disk is not None and again.run_store.found_on_disk.cut == 6
    assert again.run_store.found_on_disk.remarks[0].startswith("cut 8 is passed over: ")
    assert again.bits() == reign.bits()


def test_a_new_term_keeps_what_the_cut_it_came_back_from_needs(tmp_path: Path) -> None:
    one = Reigning(tmp_path / "run").start().round(2)
    one.whole_cut()
    one.round(2)
    one.run_store.close()
    two = Reigning(tmp_path / "run").round(1)
    two.whole_cut()
    two.round(1)
    assert two.payloads() == ["payload-000001-0002.bin", "payload-000002-0000.bin", "payload-000002-0001.bin"]
    two.whole_cut()
    two.round(1)
    assert two.payloads() == ["payload-000002-0001.bin", "payload-000002-0002.bin"]


def test_a_cut_that_could_not_be_written_lets_no_payload_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reign = Reigning(tmp_path / "run").start().round(1)
    reign.whole_cut()
    reign.round(1)
    before = reign.payloads()
    with failing(monkeypatch, errno.ENOSPC), pytest.raises(NoRoom):
        reign.cut()
    reign.round(1)
    assert set(before) <= set(reign.payloads())


class WatchedDisk(LocalDisk):
    """Who writes and who deletes, and whether two do so at a time."""

    def __init__(self) -> None:
        self.by: list[tuple[str, int]] = []
        self._inside = threading.Lock()

    def create(self, path: Path) -> LocalFile:
        disk, plain = self, super().create(path)

        class Watched(LocalFile):
            def write(self, data: disk_module.Buffer) -> int:
                return disk.alone("write", lambda: plain.write(data))

        watched = Watched(-1)
        watched.datasync, watched.truncate = plain.datasync, plain.truncate  # type: ignore[method-assign]
        watched.close = plain.close  # type: ignore[method-assign]
        return watched

    def remove(self, path: Path) -> None:
        self.alone("remove", lambda: super(WatchedDisk, self).remove(path))

    def alone(self, what: str, work: Callable[[], object]) -> int:
        assert self._inside.acquire(blocking=False), "two at a time"
        try:
            self.by.append((what, threading.get_ident()))
            return work() or 0  # type: ignore[return-value]
        finally:
            self._inside.release()


def in_a_thread(work: Callable[[], object]) -> int:
    """Its number, once it is done."""
    found: list[int] = []

    def run() -> None:
        found.append(threading.get_ident())
        work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_payloads_are_deleted_by_whoever_appends_and_not_by_whoever_writes_the_cut(tmp_path: Path) -> None:
    disk = WatchedDisk()
    reign = Reigning(tmp_path / "run", disk=disk).start().round(1)
    reign.whole_cut()
    reign.round(1)
    state = reign.run_store.open_cut(reign.history.state(), reign.parameters.version_rounds())
    arrays = reign.parameters.hold_arrays()
    disk.by.clear()
    in_a_thread(lambda: reign.run_store.write_cut(2, state, arrays))
    assert disk.by == [], "the journal is not touched"
    appends = in_a_thread(lambda: reign.round(1))
    assert {who for _, who in disk.by} == {appends}
    assert [what for what, _ in disk.by if what == "remove"] == ["remove"]
    assert disk.by[-1][0] == "remove", "once the append is durable"


# ---- disks -----------------------------------------------------------------------------------------------------------


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    """No file is written whole in here."""

    def sync(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "sync_path", sync)
        yield


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, NoRoom), (errno.EDQUOT, NoRoom), (errno.EIO, DiskFailed)])
def test_a_cut_that_finds_no_room_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    """The first cut is waited for like the journal: it has to say which of the two it is."""
    reign = Reigning(tmp_path / "run").start().round(1)
    with failing(monkeypatch, number), pytest.raises(kind, match="cuts/000001"):
        reign.cut()
    assert known_cuts(reign.out.cuts) == [0]
    reign.cut()
    assert known_cuts(reign.out.cuts) == [1, 0]


def test_a_syncer_that_was_deposed_leaves_its_successors_cut_as_it_is(tmp_path: Path) -> None:
    """It had recorded its part before, and writes it after: both would be cut 1."""
    deposed = Reigning(tmp_path / "run").start().round(1)
    claim(deposed.out.journal, deposed.run_store.term + 1)
    table = folder_of(deposed.out.cuts, 1) / "syncer.json"
    with pytest.raises(Deposed):
        deposed.cut()
    with pytest.raises(Deposed):
        deposed.run_store.complete_cut("r1", CompleteCut(0, (), ()))
    assert known_cuts(deposed.out.cuts) == [0] and not table.exists()


def after_a_power_cut(reign: Reigning, disk: FaultyDisk) -> Reigning:
    reign.run_store.close()
    disk.crash("forgotten")
    return Reigning(reign.out.path, disk=disk)


def test_durable_at_every_round_means_that_a_power_cut_costs_none(tmp_path: Path) -> None:
    disk = FaultyDisk()
    one = Reigning(tmp_path / "run", disk=disk).start().round(3)
    one.whole_cut()
    one.round(2)
    two = after_a_power_cut(one, disk)
    assert two.history.committed == 5 and two.bits() == one.bits()


def test_durable_at_cuts_means_that_a_power_cut_costs_the_rounds_since_the_last(tmp_path: Path) -> None:
    disk = FaultyDisk()
    one = Reigning(tmp_path / "run", disk=disk, every_round=False).start().round(3)
    one.whole_cut()
    as_it_was = one.bits()
    one.round(2)
    two = after_a_power_cut(one, disk)
    assert two.history.committed == 3 and two.bits() == as_it_was


def test_durable_at_cuts_the_end_of_a_run_survives_a_power_cut(tmp_path: Path) -> None:
    disk = FaultyDisk()
    one = Reigning(tmp_path / "run", disk=disk, every_round=False).start().round(3)
    one.write(EndedRecord("100 steps are done"))
    one.round(2)
    one.write(EndedRecord("100 steps are done", final=True))
    two = after_a_power_cut(one, disk)
    assert two.history.finished and two.history.committed == 5 and two.bits() == one.bits()


def test_durable_at_cuts_what_a_new_term_builds_on_survives_a_power_cut(tmp_path: Path) -> None:
    """The records of the term before were made durable, the outer gradients that they name were not."""
    disk = FaultyDisk()
    one = Reigning(tmp_path / "run", disk=disk, every_round=False).start().round(3)
    one.whole_cut()
    one.round(2)
    one.run_store.close()  # the process is killed, its machine goes on
    two = Reigning(one.out.path, disk=disk, every_round=False)
    assert two.history.committed == 5
    three = after_a_power_cut(two, disk)
    assert three.history.committed == 5 and three.bits() == one.bits()


def test_durable_at_cuts_a_round_that_is_written_beside_a_cut_survives_with_its_outer_gradient(tmp_path: Path) -> None:
    """To make the journal durable up to a cut takes the records behind it along: their outer gradients go first."""
    disk = FaultyDisk()
    one = Reigning(tmp_path / "run", disk=disk, every_round=False).start().round(3)
    state, arrays = (
        one.run_store.open_cut(one.history.state(), one.parameters.version_rounds()),
        one.parameters.hold_arrays(),
    )
    arrays = {name: values.copy() for name, values in arrays.items()}
    one.round(2)
    one.run_store.write_cut(3, state, arrays)
    two = after_a_power_cut(one, disk)
    assert two.history.committed == 5 and two.bits() == one.bits()


def test_durable_at_cuts_the_disk_is_not_waited_for_in_between(tmp_path: Path) -> None:
    disk = FaultyDisk()
    reign = Reigning(tmp_path / "run", disk=disk, every_round=False).start().round(1)
    disk.calls.clear()
    reign.round(5)
    assert disk.calls and not [call for call in disk.calls if call[0] == "sync" and "segment" in call[1]]


def test_what_is_usual_is_kept_for_the_next_term_of_the_same_run(tmp_path: Path) -> None:
    out = RunDir.create(tmp_path / "run")
    run_store = RunStore(out, acquire(out.journal))
    usual, nothing = UsualNorms([[0.5, 0.25], []], [0.7, 0.0]), UsualNorms()
    assert run_store.read_norms("r1") == nothing
    run_store.write_norms("r1", usual)
    assert run_store.read_norms("r1") == usual and run_store.read_norms("r2") == nothing
    out.norms.write_bytes(b"{torn")
    assert run_store.read_norms("r1") == nothing


# ---- the model of an earlier end -------------------------------------------------------------------------------------


def test_the_model_of_an_earlier_end_is_gone_before_the_next_round_is_durable(tmp_path: Path) -> None:
    first = Reigning(tmp_path / "run").start().round(3)
    first.run_store.close()
    again = Reigning(tmp_path / "run")
    again.out.model.write_bytes(b"the head of round 3")
    again.write(EndedRecord("the operator asked for it", final=True))
    again.write(ChangedRecord(again.history.settings, {}, "the run goes on", reopen=True))
    assert again.out.model.exists(), "it is still the head"
    there: list[bool] = []
    append = again.run_store._journal.append
    again.run_store._journal.append = lambda *given, **more: (  # type: ignore[method-assign]
        there.append(again.out.model.exists()),
        append(*given, **more),
    )[1]
    again.round(2)
    assert there == [False, False]


def test_a_model_that_cannot_be_removed_keeps_the_round_from_being_durable(tmp_path: Path) -> None:
    run = Reigning(tmp_path / "run").start()
    run.out.model.mkdir()  # cannot be unlinked, by root neither
    before = run.history.committed
    with pytest.raises(DiskFailed, match=r"model\.safetensors"):
        run.round()
    records = [record for _, record in read(run.out.journal, disk=LocalDisk())]
    assert not any(isinstance(record, MergedRecord) for record in records) and before == 0
