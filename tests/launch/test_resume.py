"""Which cut a stopped run goes on with, how exactly, and a new run out of an old one's cut."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from tests.store.written import OUTER, WrittenRun, begun, cut_run, ended_run, flip, with_rounds

from atoll.launch.resume import Resume, describe_resume, describe_unspent, from_cut, plan_resume
from atoll.protocol.errors import AtollError, ConfigError
from atoll.protocol.records import BegunRecord, ChangedRecord, EndedRecord, TermRecord
from atoll.store import disk as disk_module
from atoll.store.cuts import (
    BadCut,
    LearnerPart,
    Manifest,
    check_cut,
    folder_of,
    read_manifest,
    read_syncer_part,
    write_manifest,
)
from atoll.store.disk import LocalDisk
from atoll.store.head import read_head
from atoll.store.journal import Journal, read
from atoll.store.rundir import RunDir, facts_of_model, save_model
from atoll.store.verify import verify_run
from atoll.store.writer_lease import acquire
from atoll.syncer.recovery import recover
from atoll.syncer.run_store import RunStore

EXACT = "exactly as it was"
FROM_HEAD = "the newest model, optimizers as of snapshot"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(disk_module, "datasync", lambda descriptor: None)


def damage(run: WrittenRun, cut: int, name: str = "theta-001.bin") -> None:
    flip(folder_of(run.dir.cuts, cut) / name, 5)


def every_byte(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def states(run: WrittenRun, cut: int) -> dict[str, Path]:
    return {name: run.dir.learners / name / f"cut-{cut:06d}.safetensors" for name in ("learner-0", "learner-1")}


# ---- the newest good cut ---------------------------------------------------------------------------------------------


def test_the_newest_cut_is_gone_on_with(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    found = plan_resume(run.dir)
    assert (found.cut, found.run, found.exact, found.reopen) == (4, "small", False, False)
    assert found.states == states(run, 4)
    assert found.remarks == (f"run small goes on at round 5: {FROM_HEAD} 4",)


@pytest.mark.parametrize("name", ["theta-001.bin", "state.bin", "syncer.json", "manifest.json"])
def test_a_damaged_cut_is_passed_over_and_that_is_said(tmp_path: Path, name: str) -> None:
    run = cut_run(tmp_path / "run")
    if name == "manifest.json":
        (folder_of(run.dir.cuts, 4) / name).write_bytes(b'{"run":')
    else:
        damage(run, 4, name)
    found = plan_resume(run.dir)
    assert found.cut == 2 and found.states == states(run, 2)
    said, goes_on = found.remarks
    assert (
        said.startswith("snapshot 4 cannot be used (") and name in said and said.endswith("snapshot 2 is used instead")
    )
    assert goes_on == f"run small goes on at round 5: {FROM_HEAD} 2", "Θ is the same whichever cut it is"


def test_a_learners_part_that_is_missing_costs_that_learner_alone(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    states(run, 4)["learner-1"].unlink()
    found = plan_resume(run.dir)
    assert found.cut == 4 and found.states == {"learner-0": states(run, 4)["learner-0"]}
    assert "cut 4 is taken without the state of learner-1: " in found.remarks[0]
    assert "cut-000004.safetensors is missing" in found.remarks[0] and not found.exact


def test_that_one_who_joined_by_hand_keeps_its_own_part_is_said_as_what_it_is(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    manifest = read_manifest(run.dir.cuts, 4)
    parts = {**manifest.learners, "third": manifest.learners["learner-1"]}
    write_manifest(run.dir.cuts, replace(manifest, learners=parts))
    found = plan_resume(run.dir)
    assert found.states == states(run, 4)
    assert found.remarks == (
        f"run small goes on at round 5: {FROM_HEAD} 4",
        "third joined by hand and keeps its optimizer where it was started: the same command and link let it join "
        "again, and the model comes from the syncer",
    )


def test_a_cut_without_a_manifest_is_not_gone_on_with(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    run.syncer_part(5)
    found = plan_resume(run.dir)
    assert found.cut == 4 and len(found.remarks) == 1


def test_a_learner_that_was_left_out_has_no_state(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    manifest = read_manifest(run.dir.cuts, 4)
    learners = {"learner-0": manifest.learners["learner-0"]}
    write_manifest(run.dir.cuts, replace(manifest, learners=learners, left_out={"learner-1": "it was gone"}))
    assert plan_resume(run.dir).states == {"learner-0": states(run, 4)["learner-0"]}


def test_before_the_second_cut_nobody_has_a_state(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 3)
    found = plan_resume(run.dir)
    assert (found.cut, found.states, found.exact) == (0, {}, False)


def test_where_no_cut_is_whole_learners_start_with_fresh_inner_optimizers(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 3)
    (folder_of(run.dir.cuts, 0) / "manifest.json").unlink()
    found = plan_resume(run.dir)
    assert (found.cut, found.states, found.exact) == (None, {}, False)
    assert found.remarks == ("run small goes on at round 3: no complete snapshot, so fresh optimizers",)


def test_where_every_cut_is_damaged_each_is_named(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    for cut in (0, 2, 4):
        damage(run, cut)
    with pytest.raises(ConfigError, match="cannot be resumed: ") as error:
        plan_resume(run.dir)
    assert all(f"/{cut:06d}/theta-001.bin is damaged" in str(error.value) for cut in (0, 2, 4))
    assert "\n" not in str(error.value)


def test_a_run_without_parameters_goes_on_from_its_beginning(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    found = plan_resume(run.dir, ("steps=9",))
    assert (found.cut, found.run, found.reopen, found.changes) == (None, "small", False, ("steps=9",))
    assert found.remarks == ("the run has no parameters yet: it goes on from its beginning",)
    run.write(EndedRecord("the operator asked for it", final=True))
    assert plan_resume(run.dir).reopen


def test_a_run_that_nobody_joined_goes_on_with_the_settings_it_has_by_then(tmp_path: Path) -> None:
    out = RunDir.create(tmp_path / "run")
    out.journal.mkdir()
    found = plan_resume(out, ("steps=9",))
    assert (found.run, found.reopen, found.changes, found.only_end) == ("", False, (), False)


def test_a_run_whose_cuts_are_all_gone_cannot_be_gone_on_with_and_says_what_to_put_back(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 3)
    shutil.rmtree(run.dir.cuts)
    with pytest.raises(ConfigError, match=r"and .*/cuts holds no cut with them: put back a copy"):
        plan_resume(run.dir)


def test_a_run_goes_on_behind_claims_that_were_removed(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    run.journal.close()
    shutil.rmtree(run.dir.journal / "terms")
    plan_resume(run.dir)
    run_store = RunStore(run.dir, acquire(run.dir.journal))
    assert (
        run_store.term == 2 and run_store.found_on_disk is not None and run_store.found_on_disk.history.committed == 5
    )
    run_store.close()


def test_a_run_goes_on_before_garbage_behind_its_last_record(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    run.journal.close()
    with (run.dir.journal / "segment-000001.log").open("ab") as segment:
        segment.write(b"what another program wrote to the wrong file" * 10)
    plan_resume(run.dir)
    run_store = RunStore(run.dir, acquire(run.dir.journal))
    assert run_store.found_on_disk is not None and run_store.found_on_disk.history.committed == 5
    assert "ended in 440 bytes" in run_store.found_on_disk.remarks[0]
    run_store.close()
    assert verify_run(run.dir.path).ok


def test_a_damaged_journal_is_an_error_that_names_it(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    flip(run.dir.journal / "segment-000001.log", run.journal.position.offset - 40)
    with pytest.raises(AtollError, match=r"segment-000001\.log is damaged") as error:
        plan_resume(run.dir)
    assert "\n" not in str(error.value)


def test_a_cut_of_a_syncer_that_was_replaced_is_passed_over(tmp_path: Path) -> None:
    old = with_rounds(tmp_path / "run", 2)
    old.cut()
    heir, end = copy.deepcopy(old), old.journal.position
    for _ in range(3):
        old.round()
    old.cut()
    heir.journal = Journal.begin(old.dir.journal, 2, after=end, disk=LocalDisk(), marks=old.dir.marks)
    heir.write(TermRecord(2, end.offset, end.hash, heir.history.committed))
    heir.round()
    found = plan_resume(heir.dir)
    assert found.cut == 2 and found.remarks[0].startswith("snapshot 5 cannot be used (")
    assert found.remarks[1].endswith("optimizers as of snapshot 2")


def test_a_plan_changes_nothing(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    before = every_byte(run.dir.path)
    plan_resume(run.dir, ("steps=1000",))
    assert every_byte(run.dir.path) == before


# ---- exactly ---------------------------------------------------------------------------------------------------------


def test_when_nothing_was_decided_behind_the_cut_everything_is_put_back_exactly(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    run.cut()
    found = plan_resume(run.dir)
    assert found.exact and found.remarks == (f"run small goes on at round 4: {EXACT} in snapshot 4",)
    run.reign()
    assert plan_resume(run.dir).exact, "another term decided nothing"


def test_a_lease_behind_the_cut_is_a_decision_as_good_as_a_round(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    run.cut()
    run.lease("learner-0")
    assert not plan_resume(run.dir).exact


def test_a_round_behind_the_cut_is_not_given_up_for_exactness(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    run.cut()
    run.round()
    found = plan_resume(run.dir)
    assert not found.exact and "goes on at round 5" in found.remarks[0]


def test_without_all_its_learners_a_cut_is_not_exact(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    run.cut()
    manifest = read_manifest(run.dir.cuts, 4)
    write_manifest(run.dir.cuts, replace(manifest, left_out={"learner-2": "it was gone"}))
    assert not plan_resume(run.dir).exact


# ---- budgets ---------------------------------------------------------------------------------------------------------


def with_budget(run: WrittenRun, **budget: int) -> WrittenRun:
    run.write(ChangedRecord(replace(run.history.settings, **budget), dict(run.history.outer), "a budget"))
    return run


def test_a_smaller_budget_than_was_spent_already_is_refused_with_what_to_do(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="has already trained for 10 steps: ask for more with --steps") as error:
        plan_resume(run.dir, ("steps=10",))
    assert "\n" not in str(error.value) and str(run.dir.path) in str(error.value)
    assert plan_resume(run.dir, ("steps=12",)).changes == ("steps=12",)


def test_the_same_for_tokens(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    trained = sum(life.total for life in run.history.lives.values())
    with pytest.raises(ConfigError, match=f"has already trained for {trained:,} tokens: ask for more"):
        plan_resume(run.dir, (f"tokens={trained}",))
    assert plan_resume(run.dir, (f"tokens={trained + 1}",)).cut == 4


@pytest.mark.parametrize("changes", [(), ("steps=8",), ("learners=3",), ("tokens=100000",)])
def test_a_run_that_spent_its_budget_says_so_and_nothing_is_touched(tmp_path: Path, changes: tuple[str, ...]) -> None:
    run = with_budget(cut_run(tmp_path / "run"), steps=8)
    run.end()
    before = every_byte(run.dir.path)
    with pytest.raises(ConfigError, match=r"is done \(24 steps are done\): give it more with --steps") as error:
        plan_resume(run.dir, changes)
    assert "\n" not in str(error.value)
    assert every_byte(run.dir.path) == before


def test_the_advice_for_a_spent_run_names_what_works(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    assert describe_resume(run.dir) == f"atoll train --resume {run.dir.path}"
    with_budget(run, steps=8).end()
    advice = f"atoll train --resume {run.dir.path} --steps N (more than the 8 that are done)"
    assert describe_resume(run.dir) == advice and plan_resume(run.dir, ("steps=99",)).reopen
    assert describe_resume(run.dir, Path("short")).startswith("atoll train --resume short --steps N ")
    assert describe_resume(RunDir(tmp_path / "none")) == f"atoll train --resume {tmp_path / 'none'}"


@pytest.mark.parametrize("reason", ["every learner has stopped", "the operator asked for it"])
def test_of_a_run_with_budget_left_is_known_how_far_it_came(tmp_path: Path, reason: str) -> None:
    run = with_budget(cut_run(tmp_path / "run"), steps=1000, tokens=2000)
    trained = sum(life.total for life in run.history.lives.values())
    run.write(EndedRecord(reason, final=True, step=run.history.step, progress=trained / 2000))
    assert describe_unspent(run.dir) == f"step {run.history.step:.0f} of 1,000 and token {trained} of 2,000"
    assert plan_resume(run.dir).reopen, "and it can be gone on with"


def test_a_run_that_spent_its_budget_or_has_none_has_nothing_unspent(tmp_path: Path) -> None:
    spent = with_budget(cut_run(tmp_path / "spent"), steps=8)
    endless = with_budget(cut_run(tmp_path / "endless"), steps=0, tokens=0)
    for run in (spent, endless):
        run.write(EndedRecord("every learner has stopped", final=True, step=run.history.step))
    assert [describe_unspent(run.dir) for run in (spent, endless)] == ["", ""]
    assert describe_unspent(RunDir(tmp_path / "none")) == ""


def test_a_budget_that_was_spent_between_two_rounds_is_spent(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    trained = sum(life.total for life in run.history.lives.values())
    with_budget(run, tokens=trained).end(progress=1.0)
    with pytest.raises(ConfigError, match=r"is done \(24 steps are done\)"):
        plan_resume(run.dir)
    assert plan_resume(run.dir, (f"tokens={2 * trained}",)).reopen


def test_a_spent_run_whose_end_was_cut_off_is_brought_to_its_end(tmp_path: Path) -> None:
    run = with_budget(cut_run(tmp_path / "run"), steps=8)
    found = plan_resume(run.dir)
    assert found.only_end and not found.reopen and "its end was cut off" in found.remarks[0]
    run.write(EndedRecord("8 steps are done"))
    found = plan_resume(run.dir)
    assert found.only_end and not found.reopen and "is done (8 steps are done)" in found.remarks[0]
    assert plan_resume(run.dir, ("steps=99",)).reopen, "with more budget it goes on"


@pytest.mark.parametrize("model", ["missing", "of an earlier round", "of another run", "unreadable"])
def test_a_spent_run_whose_model_is_not_its_head_gets_it_again(tmp_path: Path, model: str) -> None:
    run = with_budget(cut_run(tmp_path / "run"), steps=8)
    run.end()
    head = run.history
    if model == "missing":
        run.dir.model.unlink()
    elif model == "unreadable":
        run.dir.model.write_bytes(b"nothing")
    else:
        name, round = ("other", head.committed) if "another" in model else (head.run, head.committed - 1)
        save_model(run.dir.model, run.parameters.tensors_by_name(), facts_of_model(name, round, head.versions))
    found = plan_resume(run.dir)
    assert found.only_end and "its model.safetensors is not its head" in found.remarks[0]


def test_a_run_that_had_ended_is_opened_again(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    assert not plan_resume(run.dir).reopen
    run.end()
    found = plan_resume(run.dir, ("steps=1000",))
    assert found.reopen and not found.exact and found.cut == 4


def test_an_end_that_was_only_begun_is_opened_again_too(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    run.write(EndedRecord("the operator asked for it"))
    assert plan_resume(run.dir).reopen


def test_a_change_that_cannot_be_is_told_before_anything_is_started(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="'fragments' cannot change while a run goes on"):
        plan_resume(run.dir, ("fragments=4",))
    with pytest.raises(ConfigError, match="quorum = 9 can never be reached by 2 learners"):
        plan_resume(run.dir, ("quorum=9",))


# ---- a new run out of a cut ------------------------------------------------------------------------------------------


def new_run(old: WrittenRun, cut: int, path: Path, changes: tuple[str, ...] = ()) -> tuple[RunDir, Resume]:
    return from_cut(old.dir, cut, path, changes)


def test_a_new_run_has_its_own_name_and_knows_its_parent(tmp_path: Path) -> None:
    old = cut_run(tmp_path / "old")
    new, found = new_run(old, 2, tmp_path / "new", ("steps=99",))
    records = [record for _, record in read(new.journal, disk=LocalDisk())]
    (beginning,) = records
    assert isinstance(beginning, BegunRecord)
    assert beginning == replace(old.history.begun, run=found.run, parent="small cut 2")
    assert found.run != "small" and found.changes == ("steps=99",) and not found.reopen
    assert found.remarks == (f"a new run {found.run} from cut 2 of run small, {EXACT}",)
    assert new.origin.read_bytes() == (folder_of(new.cuts, 2) / "state.bin").read_bytes()


def test_a_new_run_may_have_settings_that_no_run_changes_while_it_goes_on(tmp_path: Path) -> None:
    old = cut_run(tmp_path / "old")
    own = ("codec=int8", "version_codec=int8", "blend=0.25")
    new, found = new_run(old, 2, tmp_path / "new", ("steps=99", *own))
    begins = recover(new, disk=LocalDisk())
    assert begins is not None and begins.parameters is not None
    for settings in (begins.history.begun.settings, begins.history.settings):
        assert (settings.codec, settings.version_codec, settings.blend) == ("int8", "int8", 0.25)
    _, _, was = read_syncer_part(old.dir.cuts, 2)
    now = begins.parameters.hold_arrays()
    assert all(np.array_equal(was[name], now[name].view(np.uint8)) for name in was), "Θ and momentum"
    feedback = {"feedback-000", "feedback-001", "feedback-002"}
    assert {name for name in now if not now[name].any()} >= now.keys() - was.keys() == feedback
    assert found.changes == ("steps=99",), "as in a run that goes on"
    assert found.states and not found.exact, "learners' own states have the old settings in them"
    assert found.remarks[-2].endswith(", its model and optimizers, with codec=int8 version_codec=int8 blend=0.25")
    unmerged = begins.history.ledger.totals().whole()["in_flight"]
    said = f"{unmerged} of 64 tokens were computed but not merged at cut 2: it begins without them"
    assert unmerged and found.remarks[-1] == said


def test_a_new_run_may_have_another_outer_optimizer_and_its_learners_are_as_they_were(tmp_path: Path) -> None:
    new, found = new_run(cut_run(tmp_path / "old"), 2, tmp_path / "new", ("outer_optimizer=sgd", "tail_average=2"))
    begins = recover(new, disk=LocalDisk())
    assert begins is not None and begins.parameters is not None and found.exact
    assert begins.history.outer["optimizer"] == begins.history.begun.outer["optimizer"] == "sgd"
    assert set(begins.parameters.hold_arrays()) == {"theta-000", "theta-001", "theta-002"}


@pytest.mark.parametrize(
    "word", ["fragments=4", "plan=whole", "shards=2", "seed=3", "synchronous=true", "warm_start=0.1"]
)
def test_what_a_cut_is_made_of_is_the_same_in_a_new_run(tmp_path: Path, word: str) -> None:
    with pytest.raises(ConfigError, match=f"'{word.split('=')[0]}' cannot differ in a new run from a cut"):
        new_run(cut_run(tmp_path / "old"), 2, tmp_path / "new", (word,))
    assert not (tmp_path / "new").exists()


def test_two_new_runs_of_one_cut_are_two_runs(tmp_path: Path) -> None:
    old = cut_run(tmp_path / "old")
    assert new_run(old, 2, tmp_path / "a")[1].run != new_run(old, 2, tmp_path / "b")[1].run


@pytest.mark.parametrize("cut", [0, 2, 4])
def test_a_new_run_begins_as_the_old_one_was_at_the_cut(tmp_path: Path, cut: int) -> None:
    old = cut_run(tmp_path / "old")
    new, found = new_run(old, cut, tmp_path / "new")
    begins = recover(new, disk=LocalDisk())
    assert begins is not None and begins.parameters is not None and begins.rounds == 0 and begins.remarks == []
    _, _, was = read_syncer_part(old.dir.cuts, cut)
    now = begins.parameters.hold_arrays()
    assert was.keys() == now.keys()
    assert all(np.array_equal(was[name], now[name].view(np.uint8)) for name in was), "Θ and momentum"
    assert begins.history.committed == cut and begins.history.run == found.run
    assert (begins.history.ended, begins.history.finished, begins.history.cuts) == ("", False, [])


def test_a_new_run_can_be_served_and_cut_and_comes_back(tmp_path: Path) -> None:
    old = cut_run(tmp_path / "old")
    new, found = new_run(old, 4, tmp_path / "new")
    for term in (2, 3):
        run_store = RunStore(new, acquire(new.journal))
        assert run_store.term == term and run_store.found_on_disk is not None
        assert run_store.found_on_disk.history.run == found.run and run_store.found_on_disk.history.committed == 4
        run_store.close()


def test_the_states_of_all_ranks_come_along(tmp_path: Path) -> None:
    old = cut_run(tmp_path / "old")
    for rank in (1, 2):
        part = old.dir.learners / "learner-1" / f"rank-{rank}" / "cut-000004.safetensors"
        part.parent.mkdir()
        part.write_text(f"of rank {rank}")
        part.with_name("cut-000002.safetensors").write_text("of another cut")
    new, _ = new_run(old, 4, tmp_path / "new")
    found = {str(file.relative_to(new.learners)): file.read_text() for file in new.learners.glob("*/rank-*/*")}
    assert found == {f"learner-1/rank-{rank}/cut-000004.safetensors": f"of rank {rank}" for rank in (1, 2)}


def test_the_learners_states_come_along(tmp_path: Path) -> None:
    old = cut_run(tmp_path / "old")
    new, found = new_run(old, 2, tmp_path / "new")
    assert found.exact and found.states.keys() == {"learner-0", "learner-1"}
    for name, path in found.states.items():
        assert path.is_relative_to(new.path)
        assert path.read_bytes() == states(old, 2)[name].read_bytes()
    manifest = check_cut(new.cuts, new.learners, 2).manifest
    assert (manifest.run, manifest.cut) == (found.run, 2)


def test_a_learner_that_saved_something_else_than_it_said_keeps_nobody_from_a_new_run(tmp_path: Path) -> None:
    old = cut_run(tmp_path / "old")
    states(old, 2)["learner-1"].write_bytes(b"something else")
    new, found = new_run(old, 2, tmp_path / "new")
    assert found.states.keys() == {"learner-0"}
    assert "cut 2 is taken without the state of learner-1: " in found.remarks[0] and "is damaged" in found.remarks[0]
    checked = check_cut(new.cuts, new.learners, 2)
    assert not checked.spoilt and "is damaged" in checked.manifest.left_out["learner-1"]


def test_a_cut_without_learners_makes_a_new_run_too(tmp_path: Path) -> None:
    _, found = new_run(begun(tmp_path / "old"), 0, tmp_path / "new")
    assert (found.cut, found.states, found.exact) == (0, {}, False)


def test_a_new_run_in_the_old_ones_folder_is_refused_also_by_force(tmp_path: Path) -> None:
    old = cut_run(tmp_path / "old")
    before = every_byte(old.dir.path)
    for out in (old.dir.path, tmp_path / "new" / ".." / "old"):
        (tmp_path / "new").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match="holds the run that the cut is of: choose another folder"):
            from_cut(old.dir, 2, out, force=True)
    assert every_byte(old.dir.path) == before


def test_what_lies_where_the_new_run_goes_stays_until_the_cut_is_known_to_be_good(tmp_path: Path) -> None:
    old, lies_there = cut_run(tmp_path / "old"), cut_run(tmp_path / "new")
    damage(old, 2)
    before = every_byte(lies_there.dir.path)
    for cut in (2, 3):
        with pytest.raises(AtollError):
            from_cut(old.dir, cut, lies_there.dir.path, force=True)
    with pytest.raises(ConfigError, match="has 2 steps behind it, all that the new run is to have"):
        from_cut(old.dir, 4, lies_there.dir.path, ("steps=2",), force=True)
    assert every_byte(lies_there.dir.path) == before
    new, _ = from_cut(old.dir, 4, lies_there.dir.path, force=True)
    assert recover(new, disk=LocalDisk()) is not None


def test_the_old_run_is_left_as_it_was_to_the_byte(tmp_path: Path) -> None:
    old = cut_run(tmp_path / "old")
    before = every_byte(old.dir.path)
    new, _ = new_run(old, 2, tmp_path / "new")
    run_store = RunStore(new, acquire(new.journal))
    run_store.close()
    assert every_byte(old.dir.path) == before and len(before) > 20


def test_a_run_that_had_ended_goes_on_in_the_new_one(tmp_path: Path) -> None:
    old = cut_run(tmp_path / "old")
    old.end()
    table = old.syncer_part(5)
    write_manifest(old.dir.cuts, Manifest("small", 5, 5, table, {}))
    assert b"24 steps are done" in read_syncer_part(old.dir.cuts, 5)[1], "this cut knows of the end"
    new, found = new_run(old, 5, tmp_path / "new")
    begins = recover(new, disk=LocalDisk())
    assert not found.reopen
    assert begins is not None and (begins.history.ended, begins.history.finished) == ("", False)


@pytest.mark.parametrize("cut", [4, 6, 8])
def test_a_new_run_looks_ahead_again_also_from_a_cut_of_the_last_cycle(tmp_path: Path, cut: int) -> None:
    old = ended_run(tmp_path / "old")
    set_since = {"lr": 0.3} if cut > 4 else {}
    new, _ = new_run(old, cut, tmp_path / "new")
    head = read_head(new)
    assert head is not None and head.outer == {**OUTER, **set_since}
    assert verify_run(new.path).ok


def test_the_same_run_ends_as_it_began_to_unless_it_is_opened_again(tmp_path: Path) -> None:
    old = ended_run(tmp_path / "old")
    head = read_head(old.dir)
    assert head is not None and head.outer == {**OUTER, "lr": 0.3, "optimizer": "nesterov-last"}


def test_a_cut_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    old = cut_run(tmp_path / "old")
    old.syncer_part(5)
    with pytest.raises(ConfigError, match="has no complete cut 3: there are 0, 2, 4"):
        new_run(old, 3, tmp_path / "new")
    with pytest.raises(ConfigError, match="has no complete cut 5: there are 0, 2, 4"):
        new_run(old, 5, tmp_path / "another")


def test_where_there_is_no_cut_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no complete cut 3: there are none"):
        new_run(WrittenRun(tmp_path / "old"), 3, tmp_path / "new")


def test_a_damaged_cut_makes_no_new_run(tmp_path: Path) -> None:
    old = cut_run(tmp_path / "old")
    damage(old, 2)
    with pytest.raises(BadCut, match=r"theta-001\.bin is damaged"):
        new_run(old, 2, tmp_path / "new")
    assert not (tmp_path / "new" / "journal").exists() and not (tmp_path / "new" / "cuts").exists()


def test_a_learners_file_that_leads_elsewhere_is_not_copied(tmp_path: Path) -> None:
    old = cut_run(tmp_path / "old")
    manifest = read_manifest(old.dir.cuts, 2)
    (old.dir.learners / "secret").write_bytes(b"secret")
    part = LearnerPart(1, 4, "../secret", "digest")
    write_manifest(old.dir.cuts, replace(manifest, learners={"learner-0": part}))
    new, found = new_run(old, 2, tmp_path / "new")
    assert not found.states and "is no name of a file" in found.remarks[0]
    assert not [path for path in new.path.rglob("*") if path.name == "secret"]
