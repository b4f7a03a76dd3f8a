"""The journal on its way into the bucket, and an uploader whose bucket fails or was claimed by another place."""

from __future__ import annotations

import re
import socket
import threading
import time
from pathlib import Path

import pytest
from tests.store.entries import entry, reign

from atoll.bucket import client
from atoll.bucket import uploader as uploads
from atoll.bucket.claims import LocalPlace, begin_store, claim_term, newest_term
from atoll.bucket.client import Bucket, StoreUnavailable, open_bucket
from atoll.bucket.journal_copy import JournalCopy, JournalMark, MissingPayloads
from atoll.bucket.layout import cover, read_listing
from atoll.bucket.uploader import Uploader
from atoll.store.disk import LocalDisk
from atoll.store.journal import ORIGIN, Journal
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import Deposed, claim

pytest.importorskip("obstore")
WAIT_S = 30.0


class FailingBucket:
    """A bucket that fails while `down` is set."""

    def __init__(self, inner: Bucket) -> None:
        self.url, self._inner, self.down = inner.url, inner, threading.Event()
        self.asked = 0

    def describe_silence(self) -> str:
        return self._inner.describe_silence()

    def __getattr__(self, name: str) -> object:
        def ask(*words: object) -> object:
            self.asked += 1
            if self.down.is_set():
                raise StoreUnavailable("it is down")
            return getattr(self._inner, name)(*words)

        return ask


def mark_of(journal: Journal, rounds: int) -> JournalMark:
    at = journal.position
    return JournalMark(at.term, at.offset, journal.file, journal.payload_bytes, rounds, time.monotonic())


def stored(bucket: Bucket, name: str) -> bytes:
    pieces = read_listing(bucket.list_objects()).journal.get(name, set())
    data = b""
    for piece in cover(pieces):
        data += bucket.get(piece.key(f"journal/{name}"))[len(data) - piece.begin :]
    return data


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    out = RunDir.create(tmp_path / "run")
    out.journal.mkdir()
    out.cuts.mkdir()
    return out


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return open_bucket(f"file://{tmp_path}/bucket")


def begin(run: RunDir) -> Journal:
    (run.journal / "terms").mkdir()
    assert claim(run.journal, 1)
    return Journal.begin(run.journal, 1, after=ORIGIN, disk=LocalDisk())


def copy_of(run: RunDir, bucket: Bucket, mark: JournalMark) -> JournalCopy:
    return JournalCopy(bucket, run.journal, read_listing(bucket.list_objects()), mark)


def never(place: tuple[int, int]) -> bool:
    return False


def wait_for(what: object) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_was_appended_is_put_and_nothing_behind_its_mark(run: RunDir, bucket: Bucket) -> None:
    journal = begin(run)
    journal.append([entry(0, b"first")])
    mark = mark_of(journal, 1)
    journal.append([entry(1, b"second")])
    copy = copy_of(run, bucket, mark)
    copy.put_through(mark, {}, never)
    assert stored(bucket, "payload-000001-0000") == b"first"
    whole = (run.journal / "segment-000001.log").read_bytes()
    assert stored(bucket, "segment-000001") == whole[: mark.segment_bytes] != whole
    copy.put_through(mark_of(journal, 2), {}, never)
    assert stored(bucket, "segment-000001") == whole


def test_a_later_term_sends_what_the_one_before_had_not_sent_up_to_its_seal(run: RunDir, bucket: Bucket) -> None:
    first = begin(run)
    first.append([entry(0, b"first")])
    second = reign(LocalDisk(), 2, run.journal)
    sealed = first.position.offset
    first.append([entry(1)])  # by a syncer that was replaced and does not know it yet
    mark = mark_of(second, 1)
    copy_of(run, bucket, mark).put_through(mark, {}, never)
    assert len(stored(bucket, "segment-000001")) == sealed
    assert stored(bucket, "segment-000002") == (run.journal / "segment-000002.log").read_bytes()
    assert stored(bucket, "payload-000001-0000") == b"first"


def test_records_do_not_go_past_payloads_that_are_gone_before_a_cut_is_there(run: RunDir, bucket: Bucket) -> None:
    first = begin(run)
    first.append([entry(0, b"first")])
    second = reign(LocalDisk(), 2, run.journal)
    mark = mark_of(second, 1)
    copy = copy_of(run, bucket, mark)
    (run.journal / "payload-000001-0000.bin").unlink()
    with pytest.raises(MissingPayloads):
        copy.put_through(mark, {}, never)
    assert stored(bucket, "segment-000001") == stored(bucket, "segment-000002") == b""
    copy.put_through(mark, {}, lambda place: place < (2, 0))
    assert stored(bucket, "segment-000002") == (run.journal / "segment-000002.log").read_bytes()


def test_payloads_of_this_term_that_were_deleted_before_they_were_put_are_missed_too(
    run: RunDir, bucket: Bucket
) -> None:
    failing, journal = FailingBucket(bucket), begin(run)
    uploader = uploader_of(run, failing)
    journal.append([entry(0, b"first")])
    uploader.note_append(mark_of(journal, 1))
    journal.rotate()
    journal.append([entry(1, b"second")])
    uploader.note_append(mark_of(journal, 2))
    journal.trim(1, 1)
    with pytest.raises(MissingPayloads):
        uploader._put_journal()
    assert stored(bucket, "segment-000001") == b"" and uploader.lag().rounds == 2


def test_many_small_pieces_become_one(run: RunDir, bucket: Bucket) -> None:
    journal = begin(run)
    copy: JournalCopy | None = None
    for round in range(300):
        journal.append([entry(round)])
        mark = mark_of(journal, round + 1)
        copy = copy or copy_of(run, bucket, mark)
        copy.put_through(mark, {}, never)
    assert copy is not None
    copy.join_small_pieces(lambda: None)
    assert len(bucket.list_objects("journal")) == 1
    assert stored(bucket, "segment-000001") == (run.journal / "segment-000001.log").read_bytes()


def uploader_of(run: RunDir, bucket: FailingBucket, *, told_after_put: bool = False) -> Uploader:
    place = begin_store(bucket, run.path)  # type: ignore[arg-type]
    assert isinstance(place, LocalPlace)
    return Uploader(bucket, run, place, 1, keep=3, told_after_put=told_after_put)  # type: ignore[arg-type]


def test_an_append_does_not_wait_for_a_store_that_is_down_and_all_of_it_comes_later(
    run: RunDir, bucket: Bucket
) -> None:
    failing, journal = FailingBucket(bucket), begin(run)
    uploader = uploader_of(run, failing)
    failing.down.set()
    uploader.start()
    for round in range(20):
        journal.append([entry(round, b"values")])
        uploader.note_append(mark_of(journal, round + 1))
    wait_for(lambda: failing.asked > 4)
    assert uploader.lag().rounds == 20 and bucket.list_objects("journal") == {}
    failing.down.clear()
    wait_for(lambda: uploader.lag().rounds == 0)
    assert stored(bucket, "segment-000001") == (run.journal / "segment-000001.log").read_bytes()
    uploader.stop()


@pytest.mark.parametrize("committed", [0, 2671])
def test_what_earlier_terms_put_there_is_not_known_before_the_store_answers(
    run: RunDir, bucket: Bucket, committed: int
) -> None:
    """After a takeover "2671 rounds behind" was told, of a bucket that held nearly all of them."""
    failing, journal = FailingBucket(bucket), begin(run)
    uploader = uploader_of(run, failing)
    failing.down.set()
    uploader.start()
    for number in range(2):
        journal.append([entry(number, b"values")])
        uploader.note_append(mark_of(journal, committed + number))
    assert uploader.lag().known == (committed == 0)
    failing.down.clear()
    wait_for(lambda: uploader.lag().known and uploader.lag().rounds == 0)
    uploader.stop()


def test_a_store_that_does_not_answer_is_named_and_not_what_follows_from_it(
    run: RunDir, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SILENT_S", 0.2)
    monkeypatch.setattr(uploads, "TROUBLE_S", 0.0)
    place = begin_store(bucket, run.path)
    assert isinstance(place, LocalPlace)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        uploader = Uploader(open_bucket("s3://bucket/run"), run, place, 1, keep=3)
        journal = begin(run)
        journal.append([entry(0, b"values")])
        uploader.note_append(mark_of(journal, 1))
        uploader.start()
        wait_for(lambda: bool(uploader.lag().trouble))
        uploader._note_failure("journal", MissingPayloads("payload-000001-0000"))
        said = r"s3://bucket/run has not answered for \d+ s; what waits: list terms"
        assert re.fullmatch(said, uploader.lag().trouble)
        uploader.stop()


def test_with_durability_store_an_append_returns_when_the_bucket_has_it(run: RunDir, bucket: Bucket) -> None:
    failing, journal = FailingBucket(bucket), begin(run)
    uploader = uploader_of(run, failing, told_after_put=True)
    failing.down.set()
    journal.append([entry(0, b"values")])
    told = threading.Event()

    def append() -> None:
        uploader.note_append(mark_of(journal, 1))
        told.set()

    thread = threading.Thread(target=append)
    thread.start()
    wait_for(lambda: failing.asked > 4)
    assert not told.is_set() and "it is down" in [text for _, _, text in uploader._failing.values()]
    failing.down.clear()
    thread.join(WAIT_S)
    assert told.is_set()
    assert stored(bucket, "segment-000001") == (run.journal / "segment-000001.log").read_bytes()


def test_with_durability_store_nothing_is_told_once_another_place_has_claimed_the_run(
    run: RunDir, bucket: Bucket
) -> None:
    journal = begin(run)
    uploader = uploader_of(run, FailingBucket(bucket), told_after_put=True)
    journal.append([entry(0)])
    uploader.note_append(mark_of(journal, 1))
    assert newest_term(bucket) == 1 and claim_term(bucket, 2, "another", Path("/"))
    journal.append([entry(1)])
    with pytest.raises(Deposed):
        uploader.note_append(mark_of(journal, 2))
    assert uploader.deposed


def test_the_end_is_released_and_a_store_that_stays_down_is_said(run: RunDir, bucket: Bucket) -> None:
    failing, journal = FailingBucket(bucket), begin(run)
    journal.append([entry(0)])
    uploader = uploader_of(run, failing)
    failing.down.set()
    assert uploader.finish(mark_of(journal, 1), 0.1, lambda text: None) == "it is down"
    failing.down.clear()
    assert uploader.finish(mark_of(journal, 1), 0.1, lambda text: None) == ""
    assert read_listing(bucket.list_objects()).released == {1}
