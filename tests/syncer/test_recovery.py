"""A syncer that comes back knows what was acknowledged, bit for bit, whatever else lies there."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from tests.store.written import OUTER, WrittenRun, begun, cut_run, flip, whole, with_rounds

from atoll.config import Outer
from atoll.protocol.records import ChangedRecord, JoinedRecord, ResetRecord, StartedRecord, TermRecord
from atoll.store import disk as disk_module
from atoll.store.cuts import BadCut, folder_of
from atoll.store.disk import Corrupt, LocalDisk
from atoll.store.journal import Journal
from atoll.store.rundir import RunDir
from atoll.syncer.recovery import Recovered, recover


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut leaves is the store's to test."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(disk_module, "datasync", lambda descriptor: None)


class CountingDisk(LocalDisk):
    def __init__(self) -> None:
        self.bytes_read = 0

    def read(self, path: Path, offset: int, limit: int) -> bytes:
        data = super().read(path, offset, limit)
        self.bytes_read += len(data)
        return data


def found_in(run: WrittenRun, disk: LocalDisk | None = None) -> Recovered:
    found = recover(run.dir, disk=disk or LocalDisk())
    assert found is not None
    return found


def test_a_term_that_goes_on_tells_the_runs_settings(tmp_path: Path) -> None:
    """In a folder whose run was made from another one nothing else does."""
    run = with_rounds(tmp_path, 3)
    _, data = found_in(run).describe()
    assert data["learners"] == run.history.settings.learners
    assert data["settings"] == msgspec.to_builtins(run.history.settings)


def the_same(found: Recovered, run: WrittenRun, *, reports: bool = True) -> None:
    """Θ, momentum, versions and the history are those of the run, to the bit.

    What learners reported is in no record: without `reports` the ledger is compared by what was merged alone.
    """
    assert found.parameters is not None
    was, now = run.parameters.hold_arrays(), found.parameters.hold_arrays()
    assert was.keys() == now.keys() and any("momentum" in name for name in was)
    for name in was:
        assert was[name].tobytes() == now[name].tobytes(), name
    assert found.parameters.version_rounds() == run.rounds
    assert [found.parameters.serve_fragment(f).version for f in range(3)] == run.history.versions
    state = found.history.state()
    assert found.history.ledger.totals().merged == run.history.ledger.totals().merged
    assert (state if reports else replace(state, ledger=run.history.ledger.state())) == run.history.state()
    assert found.end == run.journal.position


def damage(run: WrittenRun, cut: int, name: str = "theta-001.bin") -> None:
    flip(folder_of(run.dir.cuts, cut) / name, 5, bit=3)


# ---- what comes back -------------------------------------------------------------------------------------------------


def test_a_folder_without_a_run_holds_nothing(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    assert recover(run, disk=LocalDisk()) is None
    run.journal.mkdir()
    assert recover(run, disk=LocalDisk()) is None


def test_a_segment_whose_writer_died_before_its_first_record_holds_nothing(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.journal.mkdir()
    Journal.begin(run.journal, 1, disk=LocalDisk()).close()
    assert recover(run, disk=LocalDisk()) is None


def test_a_run_without_parameters_is_known_by_its_records(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.join("learner-0")
    found = found_in(run)
    assert found.parameters is None and found.cut is None
    assert found.history.state() == run.history.state()
    assert found.history.lives.keys() == {"learner-0"}


def test_right_behind_the_first_cut_the_run_is_as_it_began(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    found = found_in(run)
    assert (found.cut, found.rounds) == (0, 0)
    the_same(found, run)


@pytest.mark.parametrize("rounds", [1, 3, 7])
def test_a_run_comes_back_from_the_first_cut_and_its_journal(tmp_path: Path, rounds: int) -> None:
    run = with_rounds(tmp_path / "run", rounds)
    found = found_in(run)
    assert (found.cut, found.rounds, found.remarks) == (0, rounds, [])
    the_same(found, run)


def test_a_run_comes_back_from_its_newest_cut(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    found = found_in(run)
    assert (found.cut, found.rounds, found.remarks) == (4, 1, [])
    the_same(found, run)


def test_all_that_can_happen_to_a_run_comes_back(tmp_path: Path) -> None:
    run = whole(tmp_path / "run")
    found = found_in(run)
    the_same(found, run)
    assert found.history.finished and found.history.term == 2


def test_a_cut_that_no_record_speaks_of_is_as_good(tmp_path: Path) -> None:
    """The syncer died between its own part and the manifest."""
    run = with_rounds(tmp_path / "run", 4)
    run.syncer_part(4)
    run.round()
    found = found_in(run)
    assert (found.cut, found.rounds) == (4, 1)
    the_same(found, run)


def test_coming_back_changes_nothing_and_is_the_same_again(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    before = {path: path.read_bytes() for path in run.dir.path.rglob("*") if path.is_file()}
    the_same(found_in(run), run)
    the_same(found_in(run), run)
    assert {path: path.read_bytes() for path in run.dir.path.rglob("*") if path.is_file()} == before


def test_what_is_needed_of_the_payloads_is_said(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    assert found_in(run).kept == (1, 3), "term 1, and the payload file that was begun with cut 4"


# ---- resets and changes ----------------------------------------------------------------------------------------------


def test_an_outer_state_that_started_anew_does_so_again(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    run.write(ResetRecord(1, "the outer step gave values that are not finite"))
    run.parameters.reset_outer_state(1)
    for _ in range(3):
        run.round()
    the_same(found_in(run), run)


def test_without_that_record_the_same_rounds_do_not_fit(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    run.parameters.reset_outer_state(1)
    run.round()
    with pytest.raises(BadCut, match="round 4 gives fragment 1 the digest"):
        found_in(run)


def test_settings_that_changed_hold_for_the_rounds_behind_the_change(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    outer = {**OUTER, "lr": 0.25, "momentum": 0.9, "merge": "mean"}
    rules = replace(run.history.settings, quorum=2)
    run.write(ChangedRecord(rules, outer, "quorum=2 outer_lr=0.25 outer_momentum=0.9 merge=mean"))
    run.parameters.change_outer(msgspec.convert(outer, Outer))
    for _ in range(4):
        run.round()
    found = found_in(run)
    the_same(found, run)
    assert found.history.settings.quorum == 2 and found.history.outer["lr"] == 0.25


def test_settings_that_changed_before_the_cut_hold_behind_it(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 2)
    outer = {**OUTER, "lr": 0.25}
    run.write(ChangedRecord(run.history.settings, outer, "outer_lr=0.25"))
    run.parameters.change_outer(msgspec.convert(outer, Outer))
    run.round()
    run.cut()
    run.round()
    found = found_in(run)
    assert found.cut == 3
    the_same(found, run)


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["theta-001.bin", "momentum-002.bin", "state.bin", "syncer.json"])
def test_a_damaged_cut_is_passed_over_for_the_one_before_it_and_that_is_said(tmp_path: Path, name: str) -> None:
    run = cut_run(tmp_path / "run")
    damage(run, 4, name)
    found = found_in(run)
    assert (found.cut, found.rounds) == (2, 3)
    (remark,) = found.remarks
    assert remark.startswith("cut 4 is passed over: ") and name in remark
    the_same(found, run, reports=False)


def test_a_cut_that_names_another_run_is_passed_over(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 2)
    run.cut(run="another")
    found = found_in(run)
    assert found.cut == 0
    assert found.remarks == ["cut 2 is passed over: cut 2 says it is of run another and holds run small"]
    the_same(found, run, reports=False)


def test_when_every_cut_is_damaged_all_of_it_is_said(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    for cut in (0, 2, 4):
        damage(run, cut)
    with pytest.raises(BadCut, match="the journal tells of parameters, but no cut holds them: ") as error:
        found_in(run)
    for cut in (0, 2, 4):
        assert f"cut {cut} is passed over: {folder_of(run.dir.cuts, cut)}/theta-001.bin is damaged" in str(error.value)


def test_a_run_that_began_and_has_no_cut_at_all_asks_for_it(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    shutil.rmtree(run.dir.cuts)
    with pytest.raises(BadCut, match=r"/cuts holds no cut: put back a copy of that folder"):
        found_in(run)


def test_when_the_cuts_whose_payloads_are_kept_are_damaged_that_is_what_is_said(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    run.trim()
    damage(run, 4)
    with pytest.raises(Corrupt) as error:
        found_in(run)
    said = str(error.value)
    assert "cut 4 is passed over" in said and "theta-001.bin is damaged" in said
    assert "payload-000001-0002.bin is missing" in said, "and why the ones before it do not help"


def test_an_append_that_was_not_finished_is_cut_off_and_that_is_said(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    segment = run.dir.journal / "segment-000001.log"
    with segment.open("ab") as file:
        file.write(b"\x40\0\0\0torn")
    found = found_in(run)
    said = "segment-000001.log ended in 8 bytes of an append that was never acknowledged: cut off"
    assert found.remarks == [said]
    the_same(found, run)


def test_a_torn_end_is_said_where_there_is_no_cut_yet(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.join("learner-0")
    with (run.dir.journal / "segment-000001.log").open("ab") as file:
        file.write(b"\x40\0\0\0torn")
    found = found_in(run)
    assert [remark.partition(" ended in ")[0] for remark in found.remarks] == ["segment-000001.log"]
    assert found.end == run.journal.position


def test_a_flipped_bit_behind_the_cut_is_never_passed_over(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    run.round()
    flip(run.dir.journal / "segment-000001.log", run.journal.position.offset - 40)
    with pytest.raises(Corrupt, match=r"segment-000001\.log is damaged"):
        found_in(run)


def test_a_flipped_bit_of_an_outer_gradient_is_never_passed_over(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    flip(run.dir.journal / "payload-000001-0003.bin", 9)
    with pytest.raises(Corrupt, match=r"payload-000001-0003\.bin is damaged"):
        found_in(run)


def test_a_round_that_does_not_give_again_what_was_committed_is_named(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    run.round(change=lambda record: replace(record, digest="0" * 32))
    with pytest.raises(BadCut, match=r"round 5 gives fragment 2 the digest .* the journal says 0000"):
        found_in(run)


def test_a_round_without_its_outer_gradient_is_named(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    run.round(keep=False)
    with pytest.raises(BadCut, match="round 5 has no outer gradient in the journal"):
        found_in(run)


def test_a_journal_that_does_not_begin_with_a_run_is_refused(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.journal.mkdir()
    Journal.begin(run.journal, 1, disk=LocalDisk()).append([(JoinedRecord("learner-0", 1, "session", 0), None)])
    with pytest.raises(BadCut, match="does not begin with the beginning of a run"):
        recover(run, disk=LocalDisk())


def test_a_model_that_is_cut_another_way_now_is_refused(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    run.history.begun = replace(run.history.begun, fingerprint="of another version")
    run.round()
    run.cut()
    run.trim()
    with pytest.raises(Corrupt, match="makes other fragments of the run's model: use the version that began it"):
        found_in(run)


# ---- syncers that were replaced --------------------------------------------------------------------------------------


def usurped(run: WrittenRun) -> WrittenRun:
    """A successor goes on from here with other contributions, while the one it replaced has not noticed."""
    heir = copy.deepcopy(run)
    heir.dice = np.random.default_rng(99)
    end = run.journal.position
    heir.journal = Journal.begin(run.dir.journal, end.term + 1, after=end, disk=LocalDisk(), marks=run.dir.marks)
    heir.write(TermRecord(end.term + 1, end.offset, end.hash, heir.history.committed))
    return heir


def test_what_a_replaced_syncer_wrote_behind_its_seal_counts_for_nothing(tmp_path: Path) -> None:
    old = cut_run(tmp_path / "run")
    heir = usurped(old)
    old.round()
    heir.round()
    old.round()
    the_same(found_in(heir), heir)


def test_a_cut_behind_its_writers_seal_is_passed_over_and_that_is_said(tmp_path: Path) -> None:
    old = with_rounds(tmp_path / "run", 2)
    old.cut()
    heir = usurped(old)
    old.round()
    old.round()
    old.cut()
    heir.round()
    found = found_in(heir)
    assert found.cut == 2
    (remark,) = found.remarks
    assert remark.startswith("cut 4 is passed over: ") and "segment-000001.log" in remark
    the_same(found, heir)
    heir.round()
    heir.round()
    heir.cut()
    assert found_in(heir).cut == 5, "the next one is the newest"


def test_a_successor_that_died_before_its_first_record_changes_nothing(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    Journal.begin(run.dir.journal, 2, after=run.journal.position, disk=LocalDisk()).close()
    the_same(found_in(run), run)


# ---- how long it takes -----------------------------------------------------------------------------------------------


def test_what_is_read_does_not_grow_with_the_records_before_the_cut(tmp_path: Path) -> None:
    read: dict[int, int] = {}
    for rounds in (4, 120):
        run = with_rounds(tmp_path / f"run-{rounds}", rounds)
        run.cut()
        run.round()
        run.round()
        disk = CountingDisk()
        assert found_in(run, disk).rounds == 2
        read[rounds] = disk.bytes_read
    assert read[120] < 1.1 * read[4], "but for the digits of larger numbers"
    segment = tmp_path / "run-120" / "journal" / "segment-000001.log"
    assert segment.stat().st_size > 10 * read[120], "most of the journal is left alone"


def test_what_is_read_does_not_grow_with_the_terms_before_the_cut(tmp_path: Path) -> None:
    read: dict[int, int] = {}
    for terms in (1, 12):
        run = with_rounds(tmp_path / f"run-{terms}", 2)
        for _ in range(terms):
            run.reign()
            run.round()
        run.cut()
        run.round()
        disk = CountingDisk()
        assert found_in(run, disk).rounds == 1
        read[terms] = disk.bytes_read
    assert read[12] < 1.1 * read[1]


def test_only_rounds_behind_the_cut_are_replayed(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 6)
    run.cut()
    run.trim()
    run.round()
    found = found_in(run)
    assert found.rounds == 1, "payloads before the cut are gone, and nobody misses them"
    the_same(found, run)


def test_the_first_parameters_are_asked_for_again_when_they_were_not_told_of(tmp_path: Path) -> None:
    """The first cut is damaged, but the run had not started: nothing is lost."""
    run = WrittenRun(tmp_path / "run")
    run.join("learner-0")
    run.syncer_part(0)
    damage(run, 0)
    found = found_in(run)
    assert found.parameters is None and "cut 0 is passed over" in found.remarks[0]
    run.raw(StartedRecord("learner-0"))
    with pytest.raises(BadCut, match="cut 0 is passed over"):
        found_in(run)
