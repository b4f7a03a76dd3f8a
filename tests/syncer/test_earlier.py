"""What a rollback needs is read from cuts and journal, and what it wrote is found again by everybody who reads them."""

from __future__ import annotations

import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.numpy
from msgspec.structs import replace
from tests.store.written import P, WrittenRun, begun, well, with_rounds, wrong
from tests.syncer.test_recovery import damage, found_in, the_same

from atoll.protocol.messages import TensorSpec
from atoll.protocol.records import RestoredRecord, Undone
from atoll.protocol.syncer.effects import Restore
from atoll.store import disk as disk_module
from atoll.store.cuts import BadCut, folder_of, prune
from atoll.store.disk import LocalDisk
from atoll.store.export import export_run
from atoll.syncer.model import memory_bound
from atoll.syncer.parameters import Parameters
from atoll.syncer.recovery import RollbackState, read_earlier


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(disk_module, "datasync", lambda descriptor: None)


def earlier(run: WrittenRun, to: int, *without: tuple[int, int]) -> RollbackState:
    return read_earlier(run.dir, Restore(to, without), disk=LocalDisk())


def packed(run: WrittenRun) -> bytes:
    return run.parameters.pack_state().tobytes()


def gone_back(path: Path) -> WrittenRun:
    """Cut 4, a good score at round 5, bad ones, back to round 5 behind round 7, and two rounds more."""
    run = with_rounds(path, 4)
    run.cut()
    run.round()
    run.score(1.0)
    run.round()
    run.round()
    run.score(None)
    run.roll_back(5)
    run.round()
    run.round()
    return run


# ---- an earlier moment ----------------------------------------------------------------------------------------------


def test_any_round_behind_a_cut_is_made_again_bit_for_bit(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 2)
    then = {2: packed(run)}
    run.cut()
    for number in range(3, 7):
        run.round()
        then[number] = packed(run)
    for number, due in then.items():
        found = earlier(run, number)
        assert (found.told.round, found.packed.tobytes()) == (number, due)


def test_it_says_what_every_incarnation_has_merged_since(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 6)
    assert earlier(run, 4).told.undone == (Undone("learner-0", 1, (0, 48, 48)), Undone("learner-1", 1, (0, 48, 48)))
    assert earlier(run, 6).told.undone == ()


def test_where_payloads_are_gone_the_cut_before_is_what_there_is(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    run.cut()
    then = packed(run)
    for _ in range(4):
        run.round()
    run.cut()
    run.trim()
    found = earlier(run, 6)
    assert found.told.round == 4 and found.packed.tobytes() == then
    assert {one.learner for one in found.told.undone} == {"learner-0", "learner-1"}


def test_a_cut_of_what_was_rolled_back_is_none_to_go_back_to(tmp_path: Path) -> None:
    run = gone_back(tmp_path / "run")
    bad = with_cut_in_between(run)
    assert earlier(run, 9, *run.history.rolled_back).told.round == 9, "with its payloads it leads on"
    run.cut()
    run.trim()
    assert earlier(run, 9, *run.history.rolled_back).told.round < bad


def with_cut_in_between(run: WrittenRun) -> int:
    """Rounds, a cut, and back to before it."""
    target = run.history.committed
    run.round()
    cut = run.cut()
    run.round()
    run.roll_back(target)
    run.round()
    return cut


def test_without_a_cut_there_is_nothing_to_go_back_to(tmp_path: Path) -> None:
    run = gone_back(tmp_path / "run")
    shutil.rmtree(run.dir.cuts)
    run.dir.cuts.mkdir()
    with pytest.raises(BadCut, match="no cut of round 5 or before"):
        earlier(run, 5)


def test_a_damaged_cut_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    run = gone_back(tmp_path / "run")
    damage(run, 4)
    assert earlier(run, 5).told.round == 5, "from cut 0 and five rounds"


def test_tokens_that_were_rolled_back_before_are_not_rolled_back_again(tmp_path: Path) -> None:
    run = gone_back(tmp_path / "run")
    run.roll_back(4)
    totals = run.history.ledger.totals()
    assert min(totals.merged) >= 0 and not any(totals.balance())
    assert sum(totals.merged) == sum(earlier_merged(run, 4))
    well(run)


def earlier_merged(run: WrittenRun, rounds: int) -> list[int]:
    return [2 * 16 * (1 + f) + 96 * ((rounds - 1 - f) // 3) for f in range(3)]


# ---- who reads it afterwards ----------------------------------------------------------------------------------------


def test_a_syncer_that_comes_back_has_what_the_run_was_rolled_back_to(tmp_path: Path) -> None:
    run = gone_back(tmp_path / "run")
    the_same(found_in(run), run, reports=False)


def test_a_cut_behind_it_holds_it_and_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    run = gone_back(tmp_path / "run")
    cut = run.cut()
    run.round()
    the_same(found_in(run), run, reports=False)
    assert found_in(run).cut == cut
    damage(run, cut)
    found = found_in(run)
    assert found.cut == 4 and found.remarks
    the_same(found, run, reports=False)


def test_verify_knows_it_and_its_fate(tmp_path: Path) -> None:
    run = gone_back(tmp_path / "run")
    run.cut()
    run.round()
    run.end()
    fates = well(run).facts["fragment_tokens"]
    assert fates["rolled_back"] == 2 * 96 and fates["computed"] == sum(fates.values()) - fates["computed"]


def test_export_gives_the_model_behind_it(tmp_path: Path) -> None:
    run = gone_back(tmp_path / "run")
    done = export_run(run.dir.path, tmp_path / "model.safetensors")
    assert done.versions == tuple(run.history.versions)
    found = safetensors.numpy.load_file(done.file)
    assert {name: values.tobytes() for name, values in found.items()} == {
        name: values.tobytes() for name, values in run.parameters.tensors_by_name().items()
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: replace(one, versions=(9, 9, 9)), "are due"),
        (lambda one: replace(one, at=one.at + 1), "are due"),
        (lambda one: replace(one, round=one.at), "rolled back to round 7 behind round 6"),
        (lambda one: replace(one, undone=one.undone[:1]), "the members make"),
        (lambda one: replace(one, digests=(one.digests[0], "0" * 32, one.digests[2])), "fragment 1 to other values"),
    ],
)
def test_verify_says_what_is_not_right_with_it(
    tmp_path: Path, change: Callable[[RestoredRecord], RestoredRecord], words: str
) -> None:
    run = with_rounds(tmp_path / "run", 7)
    run.roll_back(5, change)
    assert words in wrong(run)


def test_an_old_cut_that_is_kept_to_go_back_to_is_no_gap(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 3)
    run.set_guard("rollback")
    for _ in range(5):
        run.round()
        run.cut()
    assert prune(run.dir.cuts, 3, 4) == [0, 5]
    well(run)
    shutil.rmtree(folder_of(run.dir.cuts, 6))
    assert "cut 6 is missing" in wrong(run)


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "topk"])
def test_what_a_rollback_holds_is_in_the_memory_ceiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """Long behind a cut, when the replay has gone over more steps than are kept of any fragment. Records and other
    small things count as the program's: 256 KiB of them here, a twelfth of the model."""
    tensors = tuple(TensorSpec(f"w{number}", (128, 1024), "float32") for number in range(2 * P))
    run = begun(tmp_path, version_codec=codec, tensors=tensors)
    for name in run.islands:
        run.lease(name, 512)
    run.cut()
    for _ in range(9 * P):
        run.round()
    pack_state, held = Parameters.pack_state, []

    def weigh(parameters: Parameters) -> object:
        packed = pack_state(parameters)
        held.append(tracemalloc.get_traced_memory()[0])
        return packed

    monkeypatch.setattr(Parameters, "pack_state", weigh)
    tracemalloc.start()
    earlier(run, run.history.committed - 1)
    tracemalloc.stop()
    settings, plan = run.history.begun.settings, run.parameters.plan
    guarded = memory_bound(plan, replace(settings, guard="rollback"), slots=1)
    assert held[0] < guarded.fixed - memory_bound(plan, settings, slots=1).fixed + (256 << 10)


@pytest.mark.parametrize(("begin", "end", "holds"), [(6, 9, True), (5, 6, False), (5, 8, False), (3, 5, True)])
def test_a_cut_at_either_end_of_a_rollback_is_judged_by_what_it_holds(
    tmp_path: Path, begin: int, end: int, holds: bool
) -> None:
    """Payloads behind cut 6 are gone, so its own state is all that there is. It is what a rollback to 6 rounds went
    back to, and what one from behind 6 rounds took back."""
    run = with_rounds(tmp_path / "run", 6)
    run.cut()
    run.round()
    run.round()
    run.cut()
    run.trim()
    found = earlier(run, 7, (begin, end)).told.round
    assert found == 6 if holds else found < 6
