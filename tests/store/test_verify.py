"""A run's directory is verified; then one thing in it is broken at a time, and the finding names that thing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.store.written import (
    WrittenRun,
    begin_term,
    cut_run,
    everything,
    flip,
    last_record,
    well,
    whole,
    with_rounds,
    wrong,
)

from atoll.observe.story import verification_rows
from atoll.protocol.errors import ConfigError
from atoll.protocol.records import (
    AlarmedRecord,
    ChangedRecord,
    CutDoneRecord,
    EndedRecord,
    JoinedRecord,
    MergedRecord,
    PassedRecord,
    Share,
)
from atoll.protocol.settings import Settings
from atoll.protocol.syncer.rounds import NOTHING_LEFT
from atoll.simulate.scenario import make_tape
from atoll.store.cuts import folder_of, prune
from atoll.store.disk import LocalDisk
from atoll.store.journal import Journal, read
from atoll.store.rundir import save_model
from atoll.store.verify import verify_run
from atoll.store.writer_lease import acquire

# ---- runs that are well ---------------------------------------------------------------------------------------------


def test_a_whole_run_is_well_and_every_figure_of_it_is_counted(tmp_path: Path) -> None:
    run = whole(tmp_path / "run")
    before = everything(run.dir.path)
    report = well(run)
    assert everything(run.dir.path) == before, "nothing is written into a run"
    assert not report.remarks
    facts = {name: value for name, value in report.facts.items() if name != "seconds"}
    assert facts == {
        "run": "small",
        "records": 30,
        "unjudged": 0,
        "rounds": 13,
        "passed": 1,
        "empty": 0,
        "terms": 2,
        "learners": 2,
        "incarnations": 3,
        "contributions": 23,
        "fragment_tokens": {
            "computed": 1104,
            "merged": 960,
            "dropped": 0,
            "lost": 144,
            "rolled_back": 0,
            "filtered": 0,
            "in_flight": 0,
        },
        "tokens": {
            "computed": 368,
            "merged": 320,
            "dropped": 0,
            "lost": 48,
            "rolled_back": 0,
            "filtered": 0,
            "in_flight": 0,
        },
        "dropped_by_cause": {"overlap": 0, "missed": 0, "crash": 48},
        "per_learner": {
            "learner-0": {
                "merged_share": 176 / 192,
                "tokens": {
                    "computed": 192,
                    "merged": 176,
                    "dropped": 0,
                    "lost": 16,
                    "rolled_back": 0,
                    "filtered": 0,
                    "in_flight": 0,
                },
            },
            "learner-1": {
                "merged_share": 144 / 176,
                "tokens": {
                    "computed": 176,
                    "merged": 144,
                    "dropped": 0,
                    "lost": 32,
                    "rolled_back": 0,
                    "filtered": 0,
                    "in_flight": 0,
                },
            },
        },
        "missing_parts": {},
        "finished": True,
        "cuts": [0, 4, 9],
        "torn_bytes": 0,
        "rebuilt_rounds": 12,
    }
    assert report.document()["ok"] is True and dict(verification_rows(report))["cuts"] == "0, 4, 9"


def test_rounds_of_the_last_cycle_that_collected_nothing_are_not_passed_over(tmp_path: Path) -> None:
    """The summary does not count them as passed over either."""
    run = with_rounds(tmp_path / "run", 4)
    run.pass_over(NOTHING_LEFT)
    run.write(EndedRecord("24 steps are done", step=run.history.step))
    run.pass_over(NOTHING_LEFT)
    run.pass_over()
    report = well(run)
    assert [report.facts[name] for name in ("rounds", "passed", "empty")] == [7, 2, 1]
    told = dict(verification_rows(report))["rounds"]
    assert told == "7, 2 of them passed over, 1 at the end with nothing left to collect"


@pytest.mark.parametrize("rounds", [0, 1, 5])
def test_a_run_that_goes_on_is_well(tmp_path: Path, rounds: int) -> None:
    report = well(with_rounds(tmp_path / "run", rounds))
    assert report.facts["rebuilt_rounds"] == report.facts["rounds"] == rounds and not report.facts["finished"]


def test_what_was_dropped_is_by_overlap_or_missed_only_once_its_account_is_closed(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    for island in run.islands.values():
        island.total += 48
        island.dropped = [48 for _ in island.dropped]
    for _ in island.dropped:  # a contribution tells what was dropped before it, and not why
        run.round()
    report = well(run)
    assert report.facts["dropped_by_cause"] == {"overlap": 0, "missed": 0, "crash": 0, "untold": 96}
    assert "96 by overlap or in missed rounds (told apart when" in dict(verification_rows(report))["not merged"]
    run.gone("learner-0", missed=(16,) * len(island.dropped))
    assert well(run).facts["dropped_by_cause"] == {"overlap": 32, "missed": 16, "crash": 16, "untold": 48}


def test_a_run_without_parameters_is_well(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.join("learner-0")
    assert well(run).facts["records"] == 2


def test_a_run_that_has_not_begun_is_well(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    shutil.rmtree(run.dir.journal)
    shutil.rmtree(run.dir.marks)
    run.dir.journal.mkdir()
    begin_term(run.dir.journal, 1).close()
    report = well(run)
    assert report.facts["records"] == 0 and report.remarks == ("the run has not begun: its journal holds no record",)
    assert dict(verification_rows(report))["run"] == "has not begun"


def test_a_run_under_a_tape_keeps_no_cut_and_is_well(tmp_path: Path) -> None:
    settings = Settings(learners=2, fragments=2, sync_every=4, overlap=1, steps=20, cut_every=0).resolved(2)
    lease = acquire(tmp_path / "journal")
    journal = Journal.begin(tmp_path / "journal", lease.term, disk=LocalDisk(), marks=tmp_path / "durable")
    journal.append([(line, None) for line in make_tape(settings, step_s=[1.0, 1.5])])
    journal.close()
    lease.release()
    report = verify_run(tmp_path)
    assert report.ok, report.problem
    assert report.remarks == ("the run followed a tape and keeps no cut: atoll replay checks its parameters",)


def test_a_folder_without_a_journal_is_the_askers_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run that can be verified: there is no journal/ in it"):
        verify_run(tmp_path)


def test_a_torn_end_is_remarked_on(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run")
    segment = run.dir.journal / "segment-000001.log"
    size = segment.stat().st_size
    with segment.open("ab") as file:
        file.write(b"\x40\0\0\0 half of a recor")
    report = well(run)
    assert report.facts["torn_bytes"] == 20
    assert report.remarks == (
        f"segment-000001.log ends in 20 bytes, from byte {size} on, of an append that was never acknowledged",
    )


def test_a_segment_that_came_too_late_is_remarked_on(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run")
    begin_term(run.dir.journal, 2).close()
    (remark,) = well(run).remarks
    assert remark.startswith("segment-000002.log counts for nothing")


def test_trimmed_payloads_are_not_missed(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 5)
    run.cut()
    run.trim()
    run.round()
    report = well(run)
    assert report.facts["rebuilt_rounds"] == 1 and not report.remarks


def test_rounds_that_kept_no_outer_gradient_are_remarked_on(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 2)
    run.cut()
    run.round(keep=False)
    run.round(keep=False)
    report = well(run)
    assert report.facts["rebuilt_rounds"] == 2
    assert report.remarks == ("rounds from 2 on kept no outer gradients: they cannot be made again",)


def going_on(run: WrittenRun, times: int) -> Callable[[str, int], None]:
    """Once the journal was read, the run takes a cut and removes what lies before it."""
    left = [times]

    def progress(what: str, number: int) -> None:
        if what == "records" and left[0]:
            left[0] -= 1
            run.round()
            run.cut()
            run.trim()
            prune(run.dir.cuts, keep=1)

    return progress


def test_a_run_may_take_a_cut_while_it_is_verified(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 5)
    run.cut()
    run.round()
    report = verify_run(run.dir.path, progress=going_on(run, times=1))
    assert report.ok and not report.remarks, report
    assert report.facts["cuts"] == [7]


def test_a_run_that_is_always_faster_than_its_reader_is_said_to_go_on(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 5)
    run.cut()
    report = verify_run(run.dir.path, progress=going_on(run, times=100))
    assert report.problem.endswith("(the run goes on, and has removed old files meanwhile: verify it once more)")
    well(run)


def test_payloads_of_a_run_that_goes_on_may_be_trimmed_while_they_are_read(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 5)
    told: list[str] = []

    def trim(what: str, number: int) -> None:
        if what == "rounds made again" and what not in told:
            run.cut()
            run.trim()
        told.append(what)

    report = verify_run(run.dir.path, progress=trim)
    assert report.ok and not report.remarks, report


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    verify_run(whole(tmp_path / "run").dir.path, progress=lambda what, number: told.append((what, number)))
    assert ("records", 30) in told and ("cuts", 9) in told and ("rounds made again", 12) in told


def test_tokens_in_flight_at_the_end_are_remarked_on(tmp_path: Path) -> None:
    """learner-1 was never seen again and has trained since its last contributions."""
    run = with_rounds(tmp_path / "run", 4)
    del run.islands["learner-1"]
    run.end()
    (remark,) = well(run).remarks
    # Its 64 tokens are in fragment 0; of fragment 1 the last 32 are not, of fragment 2 the last 16.
    assert remark.startswith("48 fragment-tokens of learner-1 (incarnation 1) were in flight at the end")


def test_claims_that_were_removed_are_named(tmp_path: Path) -> None:
    run = whole(tmp_path)
    shutil.rmtree(run.dir.journal / "terms")
    report = verify_run(run.dir.path)
    assert not report.ok and "journal/terms holds no claim of term 1" in report.problem
    acquire(run.dir.journal).release()
    assert verify_run(run.dir.path).ok, "whoever goes on with the run makes them again"


# ---- the journal ----------------------------------------------------------------------------------------------------


def test_what_the_ledgers_alarm_said_is_said_again(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run")
    well(run)
    run.write(AlarmedRecord("a", 1, "a (incarnation 1), fragment 0: 24 tokens computed, but 8 merged make 16"))
    assert wrong(run).startswith("the ledger does not balance: a (incarnation 1), fragment 0: 24 tokens computed")


def test_a_flipped_bit_in_a_segment_is_named_with_its_byte(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run")
    *_, (before, _), (_, _) = read(run.dir.journal, disk=LocalDisk())
    segment = run.dir.journal / "segment-000001.log"
    flip(segment, before.offset + 40)
    assert wrong(run).startswith(f"{segment} is damaged at byte {before.offset}, record 11: its hash does not fit")


def test_every_flipped_bit_of_a_sealed_segment_is_found(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 1)
    run.reign()
    segment = run.dir.journal / "segment-000001.log"
    for offset in range(0, segment.stat().st_size, 7):
        flip(segment, offset, offset % 8)
        found = wrong(run)
        assert "segment-000001.log is damaged" in found or (offset < 16 and "written by another version" in found)
        flip(segment, offset, offset % 8)
    well(run)


def test_a_segment_that_is_missing_is_named(tmp_path: Path) -> None:
    run = whole(tmp_path / "run")
    (run.dir.journal / "segment-000001.log").unlink()
    assert "segment-000001.log is missing, and term 2 follows it" in wrong(run)


def test_a_journal_begins_with_the_beginning(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    shutil.rmtree(run.dir.journal)
    run.dir.journal.mkdir()
    run.journal = Journal.begin(run.dir.journal, 1, disk=LocalDisk())
    shutil.rmtree(run.dir.marks)
    run.raw(JoinedRecord("learner-0", 1, "s", 0))
    assert wrong(run) == f"{last_record(run)}the journal begins with JoinedRecord, not with the beginning of a run"


def test_cuts_without_any_record_are_told(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run")
    for path in run.dir.journal.glob("segment-*"):
        path.unlink()
    assert "the journal holds no round, but round 3 was durable" in wrong(run)
    shutil.rmtree(run.dir.marks)
    assert "holds no record, but there are cuts: put back a copy of the journal" in wrong(run)


# ---- records --------------------------------------------------------------------------------------------------------


def a_merge(change: Callable[[MergedRecord], MergedRecord]) -> Callable[[WrittenRun], None]:
    return lambda run: run.round(change)


def a_share(change: Callable[[Share], Share]) -> Callable[[WrittenRun], None]:
    return lambda run: run.round(share=change)


def _leased_twice(run: WrittenRun) -> None:
    run.raw(replace(run.leases.next("learner-0", 1, 64), start=64, stop=128))


def _leased_out_of_turn(run: WrittenRun) -> None:
    run.raw(replace(run.leases.next("learner-0", 1, 64), start=200, stop=210))


BROKEN: list[tuple[str, Callable[[WrittenRun], None], str]] = [
    (
        "a round is skipped",
        a_merge(lambda record: replace(record, round=5, fragment=2)),
        "round 5 comes where round 4 is due",
    ),
    ("a void round is skipped", lambda run: run.raw(PassedRecord(5, 2, "")), "round 5 comes where round 4 is due"),
    (
        "another fragment",
        a_merge(lambda record: replace(record, fragment=2)),
        "round 4 takes fragment 2, its turn is fragment 1",
    ),
    (
        "a version jump",
        a_merge(lambda record: replace(record, version=record.version + 1)),
        "round 4 makes fragment 1 version 3, after 1",
    ),
    (
        "a version twice",
        a_merge(lambda record: replace(record, version=record.version - 1)),
        "round 4 makes fragment 1 version 1, after 1",
    ),
    (
        "a wrong weight",
        a_share(lambda share: replace(share, weight=share.weight * (1 + 2**-52))),
        "round 4: learner-0 (incarnation 1) weighs 384.0000000000001, but 48 tokens in 6 steps weigh 384.0",
    ),
    (
        "merged twice",
        a_share(lambda share: replace(share, t=4, base=0)),
        "round 4: learner-0 (incarnation 1) is merged twice: its contribution of step 4 is in version 1 already",
    ),
    (
        "a step of before",
        a_share(lambda share: replace(share, t=3)),
        "round 4: learner-0 (incarnation 1) gave step 3, but its step 4 is in version 1 already",
    ),
    (
        "a stale base",
        a_share(lambda share: replace(share, base=0)),
        "round 4: learner-0 (incarnation 1) has a stale base: version 0, but version 1 already contains its steps",
    ),
    (
        "a base of the future",
        a_share(lambda share: replace(share, base=2)),
        "round 4: learner-0 (incarnation 1) is merged into version 2 on a base of version 2",
    ),
    (
        "nothing was given",
        a_share(lambda share: replace(share, tokens=0, weight=0.0)),
        "round 4: learner-0 (incarnation 1) gave 6 steps and 0 tokens",
    ),
    (
        "no steps",
        a_share(lambda share: replace(share, steps=0, weight=0.0)),
        "round 4: learner-0 (incarnation 1) gave 0 steps and 48 tokens",
    ),
    (
        "another life",
        a_share(lambda share: replace(share, incarnation=2)),
        "round 4: learner-0 (incarnation 2) is a member, but it never joined",
    ),
    (
        "in another order",
        a_merge(lambda record: replace(record, members=record.members[::-1])),
        "the members of round 4 are not in the order of learner ids: learner-1, learner-0",
    ),
    (
        "a member twice",
        a_merge(lambda record: replace(record, members=(record.members[0], *record.members))),
        "the members of round 4 are not in the order of learner ids: learner-0, learner-0, learner-1",
    ),
    (
        "more merged than computed",
        a_share(lambda share: replace(share, total=79)),
        "the ledger does not balance: round 4: learner-0 (incarnation 1) had trained on 79 tokens, but 80 of them are "
        "merged in fragment 1",
    ),
    (
        "a fate too many",
        lambda run: run.gone("learner-0", dropped=(0, 1, 0)),
        "the ledger does not balance: learner-0 (incarnation 1), fragment 1: 64 tokens computed, but 32 merged + "
        "1 dropped + 32 lost make 65",
    ),
    (
        "a lease twice",
        _leased_twice,
        "lease 2 (samples 64 to 128 of dataset 0, pass 0) is issued twice: it was issued before and did not come back",
    ),
    (
        "a lease out of turn",
        _leased_out_of_turn,
        "lease 2 (samples 200 to 210 of dataset 0, pass 0) is granted, but lease 2 (samples 128 to 138 of dataset 0, "
        "pass 0) is due",
    ),
    (
        "merged and never leased",
        a_share(lambda share: replace(share, position=65)),
        "round 4: learner-0 (incarnation 1) says it took 65 samples, 64 were leased to it",
    ),
    (
        "a cut of the future",
        lambda run: run.raw(CutDoneRecord(5, 5, (), "")),
        "cut 5 is done after cut -1, with 4 rounds committed",
    ),
    ("the run begins again", lambda run: run.raw(run.history.begun), "the run begins a second time, as small"),
]


@pytest.mark.parametrize(("breaking", "words"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_record_that_cannot_be_is_named_with_its_place(
    tmp_path: Path, breaking: Callable[[WrittenRun], None], words: str
) -> None:
    run = with_rounds(tmp_path / "run", 4)
    well(run)
    breaking(run)
    assert wrong(run) == last_record(run) + words


def test_the_first_of_two_wrong_things_is_told(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    run.cut()
    run.round(lambda record: replace(record, version=9))
    flip(folder_of(run.dir.cuts, 4) / "theta-000.bin", 3)
    assert wrong(run).startswith("record 13 ")


# ---- the model -------------------------------------------------------------------------------------------------------


def test_an_old_model_beside_a_newer_journal_is_named_also_where_the_run_goes_on(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    run.end()
    well(run)
    run.write(ChangedRecord(run.history.settings, dict(run.history.outer), "the run goes on", reopen=True))
    well(run)
    run.join("learner-0")
    run.lease("learner-0")
    run.round()
    text = wrong(run)
    assert f"{run.dir.model} is not the head of the run: it says it is of round 5, " in text
    assert "the journal's head is round 6" in text
    run.dir.model.unlink()
    well(run)


def test_a_model_that_was_never_told_its_round_is_compared_all_the_same(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    run.end()
    tensors = {name: values + 1 for name, values in run.parameters.tensors_by_name().items()}
    save_model(run.dir.model, tensors)
    assert "is not the head of the run: the journal's head is round 5" in wrong(run)


def test_a_run_that_comes_to_its_end_while_it_is_verified_is_read_again(tmp_path: Path) -> None:
    run, left = cut_run(tmp_path / "run"), [1]

    def progress(what: str, count: int) -> None:
        if what == "rounds made again" and left[0]:
            left[0] = 0
            run.round()
            run.end()

    report = verify_run(run.dir.path, progress=progress)
    assert report.ok and left == [0], report
