from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from atoll.protocol.errors import ConfigError
from atoll.protocol.records import PassedRecord, TermRecord
from atoll.store.disk import DiskFailed, LocalDisk, NoRoom
from atoll.store.journal import Journal, read, seal
from atoll.store.writer_lease import (
    STANDBY_S,
    StandbyTurn,
    StandbyWatch,
    WriterLease,
    acquire,
    claim,
    newest_claim,
    unclaimed_terms,
)

STALE_S = 10.0

HOLDER = """
import pathlib, sys
from atoll.store.writer_lease import acquire
acquire(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "journal"


def test_terms_count_up_from_one_and_their_claims_stay(folder: Path) -> None:
    for term in (1, 2, 3):
        reign = acquire(folder)
        assert reign.term == term
        reign.release()
    assert sorted(os.listdir(folder / "terms")) == ["000001", "000002", "000003"]
    assert newest_claim(folder) == 3
    assert json.loads((folder / "terms" / "000003").read_bytes())["pid"] == os.getpid()


def test_a_run_that_is_served_is_refused_and_its_syncer_named(folder: Path) -> None:
    held = acquire(folder)
    with pytest.raises(ConfigError) as caught:
        acquire(folder)
    text = str(caught.value)
    assert f"{folder.parent} is served by another syncer (pid {os.getpid()}, term 1)" in text
    assert "or wait for your turn with --standby" in text and "\n" not in text
    assert not held.fenced(), "who only asked has claimed nothing"
    held.release()
    assert acquire(folder).term == 2


def test_a_claim_without_content_still_counts(folder: Path) -> None:
    held = acquire(folder)
    (folder / "terms" / "000002").touch()
    assert held.fenced()
    with pytest.raises(ConfigError, match="pid unknown, term 2"):
        acquire(folder)
    held.release()
    assert acquire(folder).term == 3


def test_a_lock_is_free_once_its_process_is_gone(folder: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"pid {holder.pid}, term 1"):
            acquire(folder)
        holder.kill()
    assert acquire(folder).term == 2


def test_of_many_claims_of_one_term_one_wins(folder: Path) -> None:
    acquire(folder).release()
    start, won = threading.Barrier(8), []

    def try_it() -> None:
        start.wait()
        won.append(claim(folder, 2))

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]


def test_a_claim_that_was_overtaken_takes_the_next_term(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acquire(folder).release()
    looked = newest_claim

    def overtaken(where: Path) -> int:
        newest = looked(where)
        if newest == 1:
            assert claim(where, 2)
        return newest

    monkeypatch.setattr("atoll.store.writer_lease.newest_claim", overtaken)
    assert acquire(folder).term == 3


def test_a_claim_is_durable_before_it_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    sync = LocalDisk.sync

    def noted(disk: LocalDisk, path: Path) -> None:
        synced.append(path)
        sync(disk, path)

    monkeypatch.setattr(LocalDisk, "sync", noted)
    acquire(folder)
    assert synced == [folder, folder.parent, folder / "terms"]


def test_a_claim_that_cannot_be_written_is_no_reign(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, kind in ((errno.ENOSPC, NoRoom), (errno.EROFS, DiskFailed)):

        def fails(disk: LocalDisk, path: Path, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(LocalDisk, "create", fails)
            with pytest.raises(kind, match="terms/000001"):
                acquire(folder)
    assert acquire(folder).term == 1, "the lock was let go"


# ---- a standby ------------------------------------------------------------------------------------------------------


def test_a_standby_takes_its_turn_when_the_lock_is_free(folder: Path) -> None:
    turn = StandbyTurn(folder, STALE_S)
    held = acquire(folder)
    assert turn.try_claim(0.0) is None
    held.release()
    reign = turn.try_claim(0.1)
    assert reign is not None and reign.term == 2 and reign.reason == "no other syncer is there"
    with pytest.raises(ConfigError):
        acquire(folder)


def test_a_standby_replaces_a_holder_that_does_not_move(folder: Path) -> None:
    held = acquire(folder)
    turn = StandbyTurn(folder, STALE_S)
    assert turn.try_claim(100.0) is None
    assert turn.try_claim(109.9) is None
    assert not held.fenced()
    reign = turn.try_claim(110.0)
    assert reign is not None and reign.term == 2 and reign.reason == "term 1 did not move for 10.0 s"
    assert held.fenced() and not reign.fenced()


def test_a_holder_that_moves_is_left_alone(folder: Path) -> None:
    held = acquire(folder)
    turn = StandbyTurn(folder, STALE_S)
    for now in range(0, 100, 9):
        held.beat()
        assert turn.try_claim(float(now)) is None
    assert not held.fenced()


def test_of_two_standbys_one_takes_the_turn_and_the_other_waits_anew(folder: Path) -> None:
    held = acquire(folder)
    first, second = StandbyTurn(folder, STALE_S), StandbyTurn(folder, STALE_S)
    assert first.try_claim(0.0) is None and second.try_claim(0.0) is None
    reign = first.try_claim(10.0)
    assert reign is not None and held.fenced()
    assert second.try_claim(10.0) is None and second.try_claim(19.9) is None
    assert not reign.fenced()
    taken = second.try_claim(20.0)
    assert taken is not None and taken.term == 3 and reign.fenced()


def test_a_standby_overtaken_between_its_look_and_its_claim_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = acquire(folder)
    turn = StandbyTurn(folder, STALE_S)
    assert turn.try_claim(0.0) is None
    looked = newest_claim

    def overtaken(where: Path) -> int:
        newest = looked(where)
        claim(where, newest + 1)
        return newest

    with monkeypatch.context() as patch:
        patch.setattr("atoll.store.writer_lease.newest_claim", overtaken)
        assert turn.try_claim(10.0) is None
    assert turn.try_claim(10.1) is None
    assert newest_claim(folder) == 2 and held.fenced()


def test_a_fenced_holder_gives_no_sign_of_life(folder: Path) -> None:
    held = acquire(folder)
    assert claim(folder, 2)
    before = (folder / "alive").read_bytes()
    held.beat()
    assert (folder / "alive").read_bytes() == before


def test_a_reign_without_the_lock_takes_it_once_its_predecessor_is_gone(folder: Path) -> None:
    held = acquire(folder)
    turn = StandbyTurn(folder, STALE_S)
    turn.try_claim(0.0)
    reign = turn.try_claim(STALE_S)
    assert reign is not None
    reign.beat()
    held.release()
    reign.beat()
    with pytest.raises(ConfigError):
        acquire(folder)
    reign.release()
    assert acquire(folder).term == 3


def test_a_reign_whose_claim_is_gone_is_over(folder: Path) -> None:
    held = acquire(folder)
    (folder / "terms" / "000001").unlink()
    assert held.fenced()
    (folder / "terms").rmdir()
    with pytest.raises(DiskFailed, match="terms"):
        held.fenced()


# ---- with a journal -------------------------------------------------------------------------------------------------


def test_whatever_was_acknowledged_is_inside_the_seal(folder: Path) -> None:
    """A holder is paused before each of its steps in turn; a standby takes over there, and the holder goes on after."""
    for paused_before in ("append", "look", "acknowledge"):
        here = folder.with_name(paused_before)
        acknowledged = _lives_of_two(here, paused_before)
        rounds = [record.round for _, record in read(here, disk=LocalDisk()) if isinstance(record, PassedRecord)]
        assert acknowledged == ([0, 1] if paused_before == "acknowledge" else [0])
        assert set(acknowledged) <= set(rounds)


def _lives_of_two(folder: Path, paused_before: str) -> list[int]:
    disk, acknowledged = LocalDisk(), [0]
    held = acquire(folder)
    journal = Journal.begin(folder, held.term, disk=disk)
    journal.append([(PassedRecord(0, 0, "acknowledged"), None)])
    if paused_before == "append":
        _take_over(folder)
    journal.append([(PassedRecord(1, 0, "perhaps"), None)])
    if paused_before == "look":
        _take_over(folder)
    over = held.fenced()
    if paused_before == "acknowledge":
        _take_over(folder)
    if not over:
        acknowledged.append(1)
    return acknowledged


def _take_over(folder: Path) -> WriterLease:
    turn = StandbyTurn(folder, STALE_S)
    assert turn.try_claim(0.0) is None
    reign = turn.try_claim(STALE_S)
    assert reign is not None
    end = seal(folder, disk=LocalDisk())
    journal = Journal.begin(folder, reign.term, after=end, disk=LocalDisk())
    journal.append([(TermRecord(reign.term, end.offset, end.hash, 0), None)])
    return reign


def test_a_standby_is_seen_while_it_waits_and_no_longer(folder: Path) -> None:
    held, watch = acquire(folder), StandbyWatch(folder)
    turn = StandbyTurn(folder, STALE_S)
    assert watch.look(0.0) == ""
    assert turn.try_claim(0.0) is None
    assert watch.look(1.0).endswith(f" pid {os.getpid()}")
    assert watch.look(1.0 + STANDBY_S) == "", "its sign has not changed"
    assert turn.try_claim(1.0) is None
    assert watch.look(2.0 + STANDBY_S)
    held.release()
    assert turn.try_claim(2.0) is not None and not (folder / "standby").exists()


def test_the_sign_of_a_standby_follows_no_link(folder: Path, tmp_path: Path) -> None:
    held, other = acquire(folder), tmp_path / "other"
    other.write_text("mine")
    (folder / "standby").symlink_to(other)
    watch = StandbyWatch(folder)
    assert StandbyTurn(folder, STALE_S).try_claim(0.0) is None
    assert other.read_text() == "mine" and watch.look(1.0) == ""
    held.release()


@pytest.mark.parametrize("standby", [False, True])
def test_claims_that_were_removed_are_made_again_from_the_segments(folder: Path, standby: bool) -> None:
    """Or the next syncer would take a term that has written already."""
    for term in (1, 2, 3):
        reign = acquire(folder)
        assert reign.term == term
        (folder / f"segment-{term:06d}.log").touch()
        reign.release()
    shutil.rmtree(folder / "terms")
    assert unclaimed_terms(folder) == [1, 2, 3]
    found = StandbyTurn(folder, 5.0).try_claim(0.0) if standby else acquire(folder)
    assert found is not None and found.term == 4 and not found.fenced()
    assert unclaimed_terms(folder) == [] and newest_claim(folder) == 4
    found.release()
