"""The cuts of a run: what one holds of the history, its files, those that are missing, those of others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.store.written import (
    WrittenRun,
    begun,
    continued,
    cut_run,
    flip,
    last_record,
    well,
    with_rounds,
    wrong,
)

from atoll.protocol.leases import Cursor
from atoll.protocol.ledger import Totals
from atoll.store.cuts import CutState, folder_of, prune, read_manifest, write_absent

# ---- what a cut holds of the history --------------------------------------------------------------------------------


def _more_lost(state: CutState) -> CutState:
    """One token of a closed account is lost twice, and the ledger balances all the same."""
    ledger = state.history.ledger
    more: Totals = replace(ledger.closed, computed=(49, 48, 48), lost=(17, 48, 48))
    return replace(state, history=replace(state.history, ledger=replace(ledger, closed=more)))


def _more_merged(state: CutState) -> CutState:
    """A token in flight is said to be merged."""
    ledger = state.history.ledger
    first = ledger.open[0]
    account = replace(
        first, merged=(first.merged[0] + 1, *first.merged[1:]), tokens=(first.tokens[0] - 1, *first.tokens[1:])
    )
    return replace(state, history=replace(state.history, ledger=replace(ledger, open=(account, *ledger.open[1:]))))


def _unbalanced(state: CutState) -> CutState:
    ledger = state.history.ledger
    account = replace(ledger.open[0], tokens=(5, *ledger.open[0].tokens[1:]))
    return replace(state, history=replace(state.history, ledger=replace(ledger, open=(account, *ledger.open[1:]))))


def _no_accounts(state: CutState) -> CutState:
    ledger = replace(state.history.ledger, open=())
    return replace(state, history=replace(state.history, ledger=ledger))


def _another_cursor(state: CutState) -> CutState:
    assert state.history.leases is not None
    leases = replace(state.history.leases, cursors=(Cursor(0, 96),))
    return replace(state, history=replace(state.history, leases=leases))


def _another_version(state: CutState) -> CutState:
    return replace(state, history=replace(state.history, versions=[2, 2, 2]))


TAMPERED: list[tuple[str, Callable[[CutState], CutState], str]] = [
    (
        "lost",
        _more_lost,
        "its ledger is not what the records up to there give: computed (49, 48, 48) instead of (48, 4",
    ),
    (
        "merged",
        _more_merged,
        "its ledger is not what the records up to there give: learner-0 (incarnation 1) has (65, 80, 48) merged of 80",
    ),
    ("unbalanced", _unbalanced, "its ledger does not balance: 11 tokens of fragment 0 have no fate"),
    ("accounts", _no_accounts, "its ledger has other open accounts than the records up to there: [('learner-0', 1)]"),
    ("leases", _another_cursor, "its leases are not what the records up to there give: cursors (Cursor(epoch=0, sta"),
    (
        "versions",
        _another_version,
        "its versions is not what the records up to there give: [2, 2, 2] instead of [2, 2,",
    ),
    ("rounds", lambda state: replace(state, rounds=(3, 4, 1)), "it says that rounds [3, 4, 1] made its versions, the "),
]


@pytest.mark.parametrize(("change", "words"), [case[1:] for case in TAMPERED], ids=[case[0] for case in TAMPERED])
def test_a_cut_whose_digests_fit_is_still_compared_with_the_records(
    tmp_path: Path, change: Callable[[CutState], CutState], words: str
) -> None:
    run = with_rounds(tmp_path / "run", 3)
    run.gone("learner-1")
    run.round()
    run.round()
    run.cut(change)
    state = folder_of(run.dir.cuts, 5) / "state.bin"
    assert wrong(run).startswith(f"cut 5 ({state}): {words}")


def test_what_learners_reported_is_in_no_record_and_may_be_in_a_cut(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 2)
    for island in run.islands.values():
        island.train()
    run.cut()
    accounts = run.history.ledger.state().open
    assert accounts[0].total == 48, "the report of the steps since the last contribution is in the cut"
    well(run)


# ---- the files of a cut ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["theta-001.bin", "momentum-002.bin", "state.bin"])
@pytest.mark.parametrize("cut", [0, 2, 4])
def test_a_flipped_bit_in_a_cuts_file_is_named(tmp_path: Path, cut: int, name: str) -> None:
    run = cut_run(tmp_path / "run")
    path = folder_of(run.dir.cuts, cut) / name
    flip(path, 17, 3)
    assert wrong(run).startswith(f"{path} is damaged")


def test_a_flipped_bit_in_a_table_is_named(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    table = folder_of(run.dir.cuts, 2) / "syncer.json"
    digit = table.read_bytes().index(b'"digest": "') + 12
    flip(table, digit)
    assert "cuts/000002/" in wrong(run)


def test_a_flipped_bit_in_a_manifest_is_named(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    path = folder_of(run.dir.cuts, 2) / "manifest.json"
    flip(path, path.read_bytes().index(b'"t": ') + 5)
    assert wrong(run) == f"{path} is damaged: its digest is not the one in the record of cut 2"


def test_a_file_of_a_cut_that_is_missing_is_named(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    path = folder_of(run.dir.cuts, 4) / "theta-000.bin"
    path.unlink()
    assert wrong(run).startswith(f"{path} cannot be read: No such file")


def test_a_learners_file_that_is_missing_or_changed_is_named_and_the_cut_is_good_without_it(tmp_path: Path) -> None:
    """What a cut says of a learner's file is that learner's word alone."""
    run = cut_run(tmp_path / "run")
    path, without = run.dir.learners / "learner-1" / "cut-000002.safetensors", "cut 2 is taken without the state of"
    flip(path, 4)
    damaged = f"{without} learner-1: {path} is damaged: its digest is not the one in the cut's manifest"
    assert well(run).remarks == (damaged,)
    path.unlink()
    assert well(run).facts["missing_parts"] == {"2": ["learner-1"]}
    assert len(well(run).remarks) == 1


def test_learner_files_that_are_kept_elsewhere_are_one_remark(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    shutil.rmtree(run.dir.learners)
    report = well(run)
    (remark,) = report.remarks
    parts = report.facts["missing_parts"]
    assert set(parts) == {"2", "4"} and all(names == ["learner-0", "learner-1"] for names in parts.values())
    assert remark == (
        f"4 learner files of 2 cuts are not in {run.dir.learners}, those of learner-0, learner-1: "
        "learners started by hand keep theirs in their own folders (--json names each)"
    )


def test_a_cut_of_another_run_is_named(tmp_path: Path) -> None:
    run, other = cut_run(tmp_path / "run"), with_rounds(tmp_path / "other", 4, run="big")
    other.cut()
    folder = folder_of(run.dir.cuts, 4)
    shutil.rmtree(folder)
    shutil.copytree(folder_of(other.dir.cuts, 4), folder)
    assert wrong(run) == f"cut 4 ({folder}) is of another run: big, this one is small"


def test_a_manifest_that_is_not_of_its_cut_is_named(tmp_path: Path) -> None:
    """Of cut 0 no record tells, so no digest gives it away."""
    run = cut_run(tmp_path / "run")
    honest, path = read_manifest(run.dir.cuts, 0), folder_of(run.dir.cuts, 0) / "manifest.json"
    path.write_bytes(msgspec.json.encode(replace(honest, run="big")))
    assert wrong(run) == f"{path} is of another run: big, this one is small"
    path.write_bytes(msgspec.json.encode(replace(honest, round=3)))
    assert wrong(run) == f"{path} is of cut 0, round 3: of another one than syncer.json"


def test_a_record_that_names_other_learners_than_the_manifest_is_told(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    write = run.write
    run.write = lambda record: write(replace(record, learners=("learner-0",)))  # type: ignore[method-assign]
    run.cut()
    path = folder_of(run.dir.cuts, 5) / "manifest.json"
    assert wrong(run) == f"{path} names other learners than its record does"


def test_a_cut_of_a_run_that_only_has_the_same_name_is_named(tmp_path: Path) -> None:
    run, other = cut_run(tmp_path / "run"), begun(tmp_path / "other")
    other.lease("learner-0")
    for _ in range(4):
        other.round()
    other.cut()
    folder = folder_of(run.dir.cuts, 4)
    shutil.rmtree(folder)
    shutil.copytree(folder_of(other.dir.cuts, 4), folder)
    assert "where no record of this journal ends" in wrong(run) and f"cut 4 ({folder}" in wrong(run)


def test_a_cut_in_the_folder_of_another_is_named(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    folder_of(run.dir.cuts, 2).rename(folder_of(run.dir.cuts, 3))
    assert "000003/syncer.json is of cut 2, and lies in the folder of cut 3" in wrong(run)


@pytest.mark.parametrize("cut", [2, 4])
def test_a_complete_cut_that_is_gone_while_older_ones_are_there_is_missed(tmp_path: Path, cut: int) -> None:
    run = with_rounds(tmp_path / "run", 1)
    run.cut()
    run.round()
    run.cut()
    run.round()
    run.round()
    run.cut()
    well(run)
    shutil.rmtree(folder_of(run.dir.cuts, cut))
    assert wrong(run).startswith(f"cut {cut} is missing: the journal says it is complete")
    write_absent(run.dir.cuts, [cut])  # as of a run that was brought back before its bucket had that cut
    assert f"cut {cut} was not in the bucket when the run was brought back" in well(run).remarks


def test_old_cuts_may_be_gone_but_not_the_newest(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    prune(run.dir.cuts, keep=1)
    assert well(run).facts["cuts"] == [4]
    shutil.rmtree(folder_of(run.dir.cuts, 4))
    assert wrong(run).startswith("cut 4 is missing")


def test_cuts_that_are_not_complete_are_remarked_on(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    run.syncer_part(5)
    assert well(run).remarks == ("cut 5 is not complete: it has no manifest",)
    path = folder_of(run.dir.cuts, 5) / "theta-000.bin"
    flip(path, 0)
    (remark,) = well(run).remarks
    assert remark.startswith(f"cut 5 is passed over: {path} is damaged")
    (folder_of(run.dir.cuts, 5) / "syncer.json").unlink()
    (remark,) = well(run).remarks
    assert remark == f"{folder_of(run.dir.cuts, 5)} is not finished: the syncer's part was never whole"


def test_a_manifest_that_no_record_names_is_remarked_on(tmp_path: Path) -> None:
    """The syncer was killed between the two."""
    run = cut_run(tmp_path / "run")
    written = run.write
    run.write = lambda record: None  # type: ignore[method-assign]
    run.cut()
    run.write = written  # type: ignore[method-assign]
    (remark,) = well(run).remarks
    assert remark == "cut 5 has a manifest and no record: its syncer was stopped in between"


def test_without_its_first_parameters_a_run_cannot_be_made_again(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run")
    shutil.rmtree(run.dir.cuts)
    assert wrong(run) == f"the run has parameters, but no cut in {run.dir.cuts} holds them: put one back"


# ---- a run that was begun from a cut of another ---------------------------------------------------------------------


def from_a_cut(path: Path) -> WrittenRun:
    """Begun at round 4, two rounds on."""
    old = with_rounds(path / "old", 4)
    old.cut()
    run = continued(old, path / "run")
    run.round()
    run.round()
    return run


def test_a_run_that_was_begun_from_a_cut_is_well(tmp_path: Path) -> None:
    run = from_a_cut(tmp_path)
    run.cut()
    run.round()
    run.end()
    report = well(run)
    assert not report.remarks
    assert {"run": "next", "rounds": 7, "contributions": 6, "rebuilt_rounds": 3}.items() <= report.facts.items()


def test_its_records_are_judged_by_what_the_cut_tells_of_the_time_before(tmp_path: Path) -> None:
    run = from_a_cut(tmp_path)
    run.round(share=lambda share: replace(share, base=1))
    expected = (
        "round 6: learner-0 (incarnation 1) has a stale base: version 1, but version 2 already contains its steps"
    )
    assert wrong(run) == last_record(run) + expected
    old = with_rounds(tmp_path / "older", 4)
    old.cut()
    run = continued(old, tmp_path / "other")
    run.round(share=lambda share: replace(share, t=4, base=0))
    assert "learner-0 (incarnation 1) is merged twice: its contribution of step 4 is in version 1" in wrong(run)


def test_when_its_first_cut_is_gone_the_oldest_that_is_there_takes_its_place(tmp_path: Path) -> None:
    run = from_a_cut(tmp_path)
    run.cut()
    run.trim()
    prune(run.dir.cuts, keep=1)
    run.round()
    report = well(run)
    (remark,) = report.remarks
    assert (report.facts["records"], report.facts["unjudged"]) == (6, 4)
    assert remark == (
        "the run was begun from small cut 4, of which nothing is here any more: "
        "the 4 records up to its oldest cut could not be judged"
    )
    shutil.rmtree(run.dir.cuts)
    assert wrong(run) == f"the run was begun from small cut 4, but no cut in {run.dir.cuts} is of it"


def test_a_copy_of_the_state_of_its_first_cut_judges_all_its_records(tmp_path: Path) -> None:
    run = from_a_cut(tmp_path)
    shutil.copy(folder_of(run.dir.cuts, 4) / "state.bin", run.dir.origin)
    run.cut()
    run.trim()
    prune(run.dir.cuts, keep=1)
    run.round()
    report = well(run)
    assert not report.remarks and report.facts["unjudged"] == 0
    assert {"rounds": 7, "passed": 0, "contributions": 6}.items() <= report.facts.items()
    flip(run.dir.origin, 0)
    assert wrong(run).startswith(f"{run.dir.origin} cannot be read: ")


def test_a_first_cut_that_does_not_balance_is_named(tmp_path: Path) -> None:
    old = with_rounds(tmp_path / "old", 4)
    old.cut()
    run = continued(old, tmp_path / "run", _unbalanced)
    state = folder_of(run.dir.cuts, 4) / "state.bin"
    assert wrong(run).startswith(f"cut 4 ({state}): the ledger of all records does not balance: ")
