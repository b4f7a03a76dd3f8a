"""The end of a run's journal is gone: verify and whoever would go on with the run say so, until it is accepted.

One run of real processes for each layout, killed as a whole; its folder is copied and damaged once for each case.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.system.conftest import SCRIPTS, Event, Run

from atoll.launch.losses import check_whole
from atoll.launch.resume import plan_resume
from atoll.protocol.records import LossRecord, MergedRecord
from atoll.store.cuts import complete_cuts, open_cut
from atoll.store.disk import Corrupt, LocalDisk
from atoll.store.durable_end import EndLost
from atoll.store.end_mark import read_mark
from atoll.store.journal import payload_path, read
from atoll.store.rundir import RunDir
from atoll.store.segments import HEAD_BYTES, Position, Segment, follows
from atoll.store.verify import verify_run
from atoll.store.writer_lease import acquire
from atoll.syncer.run_store import RunStore
from atoll.syncer.shard_store import ShardStore

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

FEW = ("--set", "fragments=2", "--set", "sync_every=4", "--set", "evaluate_every=0", "--set", "cut_every=10")
LAYOUTS = ["plain", pytest.param("sharded", marks=pytest.mark.faults)]
if find_spec("obstore") is not None:
    LAYOUTS.append(pytest.param("restored", marks=pytest.mark.faults))


def kinds_in_term(events: list[Event]) -> list[str]:
    kinds = [event["kind"] for event in events]
    return kinds[max((place for place, kind in enumerate(kinds) if kind == "reigned"), default=0) :]


def rounds_in_term(events: list[Event]) -> int:
    return kinds_in_term(events).count("round")


def rounds_behind_cut(events: list[Event]) -> int:
    """Closed since the last snapshot of the term; 0: it has none."""
    kinds = kinds_in_term(events)
    return kinds[kinds.index("cut") :].count("round") if "cut" in kinds else 0


@pytest.fixture(scope="module", params=LAYOUTS)
def stages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Folders of one run that was killed three times: with no snapshot in its newest term, and behind one."""
    run = Run(tmp_path_factory.mktemp("lost-end"))
    words: tuple[str, ...] = ("--syncer-shards", "2") if request.param == "sharded" else ()
    if request.param == "restored":
        words = ("--store", f"file://{run.folder}/bucket", "--set", "durability=store")
    try:
        script = (SCRIPTS / "line.py", "--learners", "2", "--steps", "100000", "--out", run.out)
        run.start("train", *script, *FEW, *words)
        run.until(lambda events: rounds_behind_cut(events) > 2)
        run.kill_everything()
        found = {}
        for stage, seen in (("none", rounds_in_term), ("snapshot", rounds_behind_cut)):
            begun = len(run.events("reigned"))
            run.start("train", "--resume", run.out)
            run.until(lambda events, begun=begun, seen=seen: len(run.events("reigned")) > begun and seen(events) > 3)
            run.kill_everything()
            found[stage] = Path(shutil.copytree(run.out, run.folder / stage))
        if request.param == "restored":
            shutil.rmtree(run.out)
            shutil.rmtree(found["snapshot"])
            restored = run.command("restore", f"file://{run.folder}/bucket", found["snapshot"])
            assert restored.returncode == 0, restored.stderr
        yield found
    finally:
        run.kill()


# ---- damage ----------------------------------------------------------------------------------------------------------


def newest_segment(out: RunDir) -> Path:
    return max(path for path in out.journal.glob("segment-*.log") if path.stat().st_size > HEAD_BYTES)


def ends_of_appends(out: RunDir, path: Path) -> list[int]:
    term = int(path.stem.removeprefix("segment-"))
    segment = Segment(
        out.journal, Position(term, HEAD_BYTES, follows(out.journal, term, LocalDisk()).hash), None, LocalDisk()
    )
    ends = []
    while segment.next_append():
        ends.append(segment.at.offset)
    return ends


def delete_segment(out: RunDir) -> None:
    newest_segment(out).unlink()


def cut_journal(out: RunDir, more: int = 0) -> None:
    path = newest_segment(out)
    with path.open("r+b") as file:
        file.truncate(ends_of_appends(out, path)[-3] + more)


def cut_in_record(out: RunDir) -> None:
    cut_journal(out, more=9)


def zero_the_last_append(out: RunDir) -> None:
    """The last one that was marked, as in a file that grew, and whose data never came. The kill may have come between
    an append and its mark: what is behind the mark was told to nobody, and is no loss."""
    path, mark = newest_segment(out), read_mark(out.marks, LocalDisk())
    assert mark is not None
    data, end = path.read_bytes(), max(end for end in ends_of_appends(out, path) if end < mark.position.offset)
    path.write_bytes(data[:end].ljust(len(data), b"\0"))


def delete_payload(out: RunDir) -> None:
    start = open_cut(out.cuts, complete_cuts(out.cuts)[0]).state.position
    for position, record in read(out.journal, start=start, disk=LocalDisk()):
        if isinstance(record, MergedRecord) and record.payload is not None:
            newest = payload_path(out.journal, position.term, record.payload.file)
    newest.unlink()


DAMAGES = [delete_segment, cut_journal, cut_in_record, zero_the_last_append, delete_payload]
CASES = [(damage, "snapshot") for damage in DAMAGES]
CASES += [(delete_segment, "none")]
CASES += [pytest.param(damage, "none", marks=pytest.mark.faults) for damage in DAMAGES[1:]]
MISSING = {
    delete_segment: r"the journal ends at round \d+, but round \d+ was durable: .*segment-\d+.log is gone",
    delete_payload: r"payload-\d+-\d+.bin is (gone|missing)",
}
CUT = r"the journal ends .*was durable: .* holds [\d,]+ of [\d,]+ bytes"


def list_files(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


# ---- what is said ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("damage", "where"), CASES)
def test_what_is_missing_is_said_and_refused_until_it_is_accepted(
    stages: dict[str, Path], where: str, damage: Callable[[RunDir], None], tmp_path: Path
) -> None:
    out = RunDir(Path(shutil.copytree(stages[where], tmp_path / "run")))
    whole = verify_run(out.path)
    assert whole.ok, whole.problem
    damage(out)
    before, missing = list_files(out.path), MISSING.get(damage, CUT)
    report = verify_run(out.path)
    assert not report.ok
    with pytest.raises(EndLost, match=missing) as refused:
        plan_resume(out)
    assert "--accept-loss" in str(refused.value) and refused.value.exit_code == 4
    if damage is not delete_payload:
        assert refused.value.what in report.problem
    lease = acquire(out.journal)
    with pytest.raises(Corrupt):
        RunStore(out, lease)  # as a standby or a supervisor would begin it
    lease.release()
    after = list_files(out.path)
    assert {name for name in after if after[name] != before.get(name)} <= set(after) - set(before) | {"journal/alive"}

    said = plan_resume(out, accept_loss=True).remarks[0]
    assert said == f"accepted: {refused.value.what}"
    assert check_whole(out, accept=False) == [], "once is enough"
    lease = acquire(out.journal)
    store = RunStore(out, lease)
    assert store.found_on_disk is not None and refused.value.what in store.found_on_disk.remarks[-1]
    store.close()
    for shard in (2,) if (out.path / "shards").exists() else ():
        ShardStore(out.shard(shard), acquire(out.shard(shard).journal), shard).close()
    told = verify_run(out.path)
    assert told.ok, told.problem
    assert any(refused.value.what in remark for remark in told.remarks), told.remarks
    losses = [record for _, record in read(out.journal, disk=LocalDisk()) if isinstance(record, LossRecord)]
    assert [record.what for record in losses] == [refused.value.what]


def test_a_shards_chain_that_lost_its_end_is_refused(stages: dict[str, Path], tmp_path: Path) -> None:
    if not (stages["snapshot"] / "shards").exists():
        pytest.skip("the syncer has no other shards")
    out = RunDir(Path(shutil.copytree(stages["snapshot"], tmp_path / "run")))
    cut_journal(out.shard(2))
    assert "the chain of shard 2 ends at round" in verify_run(out.path).problem
    with pytest.raises(EndLost, match="the chain of shard 2 ends at round"):
        plan_resume(out)
    lease = acquire(out.shard(2).journal)
    with pytest.raises(EndLost, match="the chain of shard 2 ends at round"):
        ShardStore(out.shard(2), lease, 2)
    lease.release()
    assert "the chain of shard 2" in plan_resume(out, accept_loss=True).remarks[0]
    RunStore(out, acquire(out.journal)).close()
    ShardStore(out.shard(2), acquire(out.shard(2).journal), 2).close()
    told = verify_run(out.path)
    assert told.ok, told.problem


def test_where_nothing_is_left_a_snapshot_is_named(stages: dict[str, Path], tmp_path: Path) -> None:
    out = RunDir(Path(shutil.copytree(stages["none"], tmp_path / "run")))
    for path in out.journal.glob("segment-*.log"):
        path.unlink()
    before = list_files(out.path)
    for accept in (False, True):
        with pytest.raises(EndLost, match=r"holds no round, but round \d+ was durable: .*make a new run of snapshot"):
            plan_resume(out, accept_loss=accept)
    assert list_files(out.path) == before


def test_the_commands_refuse_with_a_line_and_go_on_once_it_is_accepted(stages: dict[str, Path], run: Run) -> None:
    shutil.copytree(stages["none"], run.out)
    out = RunDir(run.out)
    delete_segment(out)
    for words in (("verify", out.path), ("train", "--resume", out.path, "--trust"), ("syncer", "--standby", out.path)):
        # A syncer has the run until its process ends.
        refused = run.command(*words) if words[0] == "syncer" else run.ask(*words)
        assert "was durable" in refused.stderr and "segment-000002.log is gone" in refused.stderr, refused.stderr
        assert refused.returncode == (1 if words[0] == "verify" else 4)
        assert refused.stderr.count("\n") == 1, refused.stderr
    run.start("train", "--resume", out.path, "--trust", "--accept-loss")
    run.until(lambda events: rounds_in_term(events) > 6)
    run.interrupt()
    run.ended()
    assert "accepted: the journal ends at round" in run.stderr + run.stdout
    verified = run.ask("verify", out.path)
    assert verified.returncode == 0 and "went on without what was lost, as accepted" in verified.stdout
