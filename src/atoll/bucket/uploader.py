"""Copies a run directory into its bucket beside the rounds, and never holds one up.

Two threads of the syncer's process: one for the journal, which is small and must not wait for gigabytes, and one for
cuts and files. Whatever the store answers, they try again with longer and longer rests, and `lag` says how far behind
the bucket is and what is wrong. With durability = "store" the journal is put by whoever appends to it, and only the
second thread is there.

Deposed: another place has claimed a later term in the bucket. Nothing more is put, and the syncer ends.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from atoll.bucket.claims import (
    LocalPlace,
    PlaceClaimed,
    StoredHead,
    TermClaimed,
    is_copy,
    read_place,
    refuse_copy,
    release_term,
    write_head,
)
from atoll.bucket.client import Bucket, StoreRefused, StoreUnavailable, open_bucket
from atoll.bucket.cut_copy import CutCopy, LeadCutCopy, ShardCutCopy
from atoll.bucket.files_copy import FilesCopy
from atoll.bucket.journal_copy import JournalCopy, JournalMark, MissingPayloads
from atoll.bucket.layout import Listing, payload_name, payload_place, read_listing, shard_url
from atoll.protocol.errors import AtollError, ConfigError, RunFailed
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import Deposed

JOURNAL_S = 1.0
"""Between two puts of what was appended meanwhile: the bucket is about as far behind."""
FILES_S = 2.0
SOON_S = 0.2
"""Where a cut waits for the parts of other shards."""
HEADS_S = 5.0
FIRST_REST_S, LONGEST_REST_S = 0.25, 15.0
TROUBLE_S = 5.0
"""A store that has not answered well for so long is an alarm."""
FOLLOW_S = 0.5
"""With durability = "store", the longest rest: rounds wait for it."""


@dataclass(frozen=True, slots=True)
class StoreLag:
    url: str
    rounds: int
    """Committed, and not in the bucket …"""
    seconds: float
    """… since so long."""
    trouble: str = ""
    """What is wrong with the store for some time now; empty: nothing."""
    known: bool = True
    """False: what earlier terms put there is not known yet, so `rounds` is the most that it can be."""


@dataclass
class _Copies:
    """Each thread has its own part of the listing; both read the other's."""

    journal: JournalCopy
    cuts: CutCopy
    files: FilesCopy


class Uploader:
    """Of a syncer of one process, or of the lead of several shards."""

    def __init__(
        self,
        bucket: Bucket,
        out: RunDir,
        place: LocalPlace,
        term: int,
        *,
        keep: int,
        told_after_put: bool = False,
        shards: Sequence[Bucket] = (),
    ) -> None:
        """`shards`: of the others, each one's part of the bucket."""
        self._bucket, self._out, self._place, self.term, self._keep = bucket, out, place, term, keep
        self._shards = tuple(shards)
        self._claim: TermClaimed | PlaceClaimed = TermClaimed(bucket, term, out)
        self.told_after_put = told_after_put
        self.deposed = False
        self._lock = threading.Lock()
        """Held by whoever claims, or puts the journal."""
        self._marks = threading.Lock()
        """Held for a moment, by whoever changes the marks."""
        self._stop, self._marked = threading.Event(), threading.Event()
        self._waiting: deque[JournalMark] = deque()
        """Marks that are not in the bucket, but for those between the first and the last."""
        self._written: dict[str, int] = {}
        """Payload files that may not be in the bucket as far as they were written: one that is deleted is missed."""
        self._stored_rounds = 0
        self._first_rounds: int | None = None
        """Rounds that were committed when this term's first mark came: of them earlier terms have put some there."""
        self._failing: dict[str, tuple[bool, float, str]] = {}
        """By lane, whether it only waits for the other lane's cut, since when it fails, and with what."""
        self._copies: _Copies | None = None
        self._head_at = 0.0
        self._threads: list[threading.Thread] = []

    # ---- for the syncer ---------------------------------------------------------------------------------------------

    def note_append(self, mark: JournalMark) -> None:
        """After every append, on the thread that made it: cheap. With durability = "store" it returns when the bucket
        has it; Deposed: another place has claimed the run."""
        with self._marks:
            if self._first_rounds is None:
                self._first_rounds = mark.rounds
            if len(self._waiting) > 1:
                self._waiting[-1] = mark
            else:
                self._waiting.append(mark)
            if mark.payload_bytes:
                self._written[payload_name(mark.term, mark.file)] = mark.payload_bytes
        self._marked.set()
        if self.told_after_put:
            self._put_before_told(mark)

    def start(self) -> None:
        lanes = [("files", self._copy_files)]
        if not self.told_after_put:
            lanes.append(("journal", self._copy_journal))
        for name, work in lanes:
            thread = threading.Thread(target=partial(self._run_lane, name, work), name=f"store-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """What is on its way is left where it is: `finish`, or the next term, goes on with it."""
        self._stop.set()
        self._marked.set()

    @property
    def held_cut(self) -> int:
        """A cut that must not be deleted now; −1: none."""
        return self._copies.cuts.held_cut if self._copies is not None else -1

    def lag(self) -> StoreLag:
        now, waiting = time.monotonic(), list(self._waiting)
        rounds = max(0, waiting[-1].rounds - self._stored_rounds) if waiting else 0
        seconds = now - waiting[0].at if waiting else 0.0
        failing = [one for one in list(self._failing.values()) if now - one[1] >= TROUBLE_S]
        waits, _, trouble = min(failing, default=(True, 0.0, ""))
        trouble = (waits and self._bucket.describe_silence()) or trouble
        known = bool(self._stored_rounds) or not self._first_rounds
        return StoreLag(self._bucket.url, rounds, seconds, trouble, known)

    # ---- lanes ------------------------------------------------------------------------------------------------------

    def _run_lane(self, lane: str, work: Callable[[], float]) -> None:
        rest_s = FIRST_REST_S
        while not self._stop.is_set():
            try:
                pause_s = work()
            except Deposed:
                self.deposed = True
                return
            except _Stopped:
                return
            except Exception as error:  # of whatever kind: a run does not end because it cannot be copied
                self._note_failure(lane, error)
                self._stop.wait(rest_s * random.uniform(0.5, 1.0))
                rest_s = min(2 * rest_s, LONGEST_REST_S)
                continue
            self._failing.pop(lane, None)
            rest_s = FIRST_REST_S
            self._stop.wait(pause_s)

    def _note_failure(self, lane: str, error: Exception) -> None:
        words = str(error) if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
        since = self._failing[lane][1] if lane in self._failing else time.monotonic()
        self._failing[lane] = (isinstance(error, MissingPayloads), since, " ".join(words.split()))

    def _check(self) -> None:
        if self._stop.is_set():
            raise _Stopped
        if self.deposed or self._claim.is_over():
            raise Deposed

    def _prepare(self) -> _Copies:
        """Claim the term and look at what is there, once."""
        with self._lock:
            if self._copies is None:
                if not self._waiting:
                    raise _NothingYet
                self._claim.begin()
                listing = read_listing(self._bucket.list_objects())
                begin = _events_begin(listing, self._place)
                self._copies = _Copies(
                    JournalCopy(self._bucket, self._out.journal, listing, self._waiting[-1]),
                    self._make_cut_copy(listing),
                    FilesCopy(self._bucket, self._out, self.term, listing, self._check, events_from=begin),
                )
            return self._copies

    def _make_cut_copy(self, listing: Listing) -> CutCopy:
        if not self._shards:
            return CutCopy(self._bucket, self._out, listing, self._keep, self._check)
        return LeadCutCopy(self._bucket, self._out, listing, self._keep, self._check, shards=self._shards)

    def _put_journal(self) -> None:
        copies = self._prepare()
        with self._lock:
            waiting = list(self._waiting)
            if not waiting:
                return
            mark = waiting[-1]
            with self._marks:
                written = dict(self._written)
            copies.journal.put_through(mark, written, copies.cuts.has_cut_behind)
            self._stored_rounds = mark.rounds
            with self._marks:  # another append may have taken the last mark's place meanwhile: then it is what waits
                for name in written:
                    if payload_place(name) != (mark.term, mark.file):
                        self._written.pop(name, None)
                newest = self._waiting[-1]
                self._waiting.clear()
                if newest is not mark:
                    self._waiting.append(newest)

    def _copy_journal(self) -> float:
        self._marked.wait()
        self._marked.clear()
        if self._stop.is_set():
            raise _Stopped
        if self.deposed:
            raise Deposed
        try:
            self._put_journal()
        except Exception:
            self._marked.set()
            raise
        return JOURNAL_S

    def _put_before_told(self, mark: JournalMark) -> None:
        rest_s = 0.05
        while True:
            try:
                self._put_journal()
                self._check()
                self._check_first_cut(mark)
                self._failing.pop("journal", None)
                return
            except Deposed:
                self.deposed = True
                raise
            except _Stopped:
                raise RunFailed("the syncer ends: what it decided last was not put into the store") from None
            except Exception as error:  # as in a lane; nothing is told meanwhile, and learners train on
                self._note_failure("journal", error)
                self._stop.wait(rest_s)
                rest_s = min(2 * rest_s, FOLLOW_S)

    def _check_first_cut(self, mark: JournalMark) -> None:
        """Rounds are worth nothing without a cut that they lead on from."""
        if mark.rounds and self._threads and not self._prepare().cuts.listing.complete_cuts():
            raise StoreUnavailable(f"the first cut is on its way to {self._bucket.url}")

    def _copy_files(self) -> float:
        try:
            copies = self._prepare()
        except _NothingYet:
            return 0.1
        self._check()
        copies.files.put_files()
        if copies.cuts.put_newest_cut():
            copies.cuts.delete_needless()
        copies.journal.join_small_pieces(self._check)
        self._put_head_and_events(copies.files)
        return SOON_S if copies.cuts.held_cut >= 0 else FILES_S

    def _put_head_and_events(self, files: FilesCopy) -> None:
        now = time.monotonic()
        if now >= self._head_at:
            self._head_at = now + HEADS_S
            told = self._waiting[-1].rounds if self._waiting else self._stored_rounds
            write_head(self._bucket, self.term, StoredHead(told, self._stored_rounds, time.time()))
            files.put_events()

    # ---- the end ----------------------------------------------------------------------------------------------------

    def finish(self, mark: JournalMark, patience_s: float, tell: Callable[[str], None]) -> str:
        """Of a run that nobody writes any more: upload all that is left and release the term. What is wrong after
        so long without success; empty: all of it is there."""
        self.note_append(mark)
        left_s, rest_s = patience_s, FIRST_REST_S
        while True:
            began = time.monotonic()
            try:
                self._put_all()
                return ""
            except Deposed:
                return "another machine has taken over this run: nothing more is put there"
            except Exception as error:  # as in a lane
                self._note_failure("end", error)
                words = self._failing["end"][2]
                # What took long has come far, and goes on from there.
                left_s = patience_s if time.monotonic() - began > patience_s else left_s - (time.monotonic() - began)
                if left_s <= 0 or isinstance(error, StoreRefused):
                    return words
                tell(words)
                time.sleep(rest_s)
                left_s -= rest_s
                rest_s = min(2 * rest_s, LONGEST_REST_S)

    def _put_all(self) -> None:
        copies = self._prepare()
        self._check()
        copies.cuts.put_newest_cut()
        self._put_journal()
        copies.cuts.delete_needless()
        copies.files.put_files(last=True)
        copies.files.put_events()
        write_head(self._bucket, self.term, StoredHead(self._stored_rounds, self._stored_rounds, time.time()))
        release_term(self._bucket, self.term)


class ShardUploader(Uploader):
    """Of another shard than the lead: its chain and its parts of cuts, below shards/N of the run's bucket. It writes
    under the claim of its run. With durability = "store" the lead tells nothing before it has heard of the shard's
    part, and looks at the claims itself."""

    def __init__(
        self, own: Bucket, lead: Bucket, out: RunDir, run: RunDir, place: LocalPlace, term: int, *, told_after_put: bool
    ) -> None:
        super().__init__(own, out, place, term, keep=0, told_after_put=told_after_put)
        self._lead = lead
        self._claim = PlaceClaimed(lead, run)
        self._chosen_cut = -1

    def _make_cut_copy(self, listing: Listing) -> CutCopy:
        return ShardCutCopy(
            self._bucket, self._out, listing, self._keep, self._check, lead=self._lead, chosen=self._chosen_cut
        )

    def _check_first_cut(self, mark: JournalMark) -> None:
        """The lead looks for it, and its own is there last."""

    def _copy_files(self) -> float:
        try:
            copies = self._prepare()
        except _NothingYet:
            return 0.1
        self._check()
        copies.cuts.put_newest_cut()
        copies.journal.join_small_pieces(self._check)
        return FILES_S / 2

    def finish_with(self, cut: int, mark: JournalMark, patience_s: float, tell: Callable[[str], None]) -> str:
        """As `finish`; `cut` is the lead's newest complete one, −1: it has none."""
        self._chosen_cut = cut
        return self.finish(mark, patience_s, tell)

    def _put_all(self) -> None:
        copies = self._prepare()
        self._check()
        copies.cuts.put_newest_cut()
        self._put_journal()


def make_uploader(out: RunDir, url: str, term: int, *, keep: int, told_after_put: bool, shards: int = 1) -> Uploader:
    """Of the run in this folder, which was attached to its bucket before."""
    others = [open_bucket(shard_url(url, number)) for number in range(2, shards + 1)]
    bucket, place = _open_own(out.path, url)
    return Uploader(bucket, out, place, term, keep=keep, told_after_put=told_after_put, shards=others)


def make_shard_uploader(out: RunDir, url: str, shard: int, term: int, *, told_after_put: bool) -> ShardUploader:
    """Of the shard in this folder, which lies in that of its run."""
    run = RunDir(out.path.parent.parent)
    lead, place = _open_own(run.path, url)
    own = open_bucket(shard_url(url, shard))
    return ShardUploader(own, lead, out, run, place, term, told_after_put=told_after_put)


def _open_own(folder: Path, url: str) -> tuple[Bucket, LocalPlace]:
    bucket, place = open_bucket(url), read_place(folder)
    if place is None or place.url != url:
        raise ConfigError(f"{folder} is not attached to {url}: start the run by atoll train or atoll syncer --store")
    if is_copy(folder, place):  # a standby's, or one that was put in place of the original
        raise refuse_copy(bucket, folder)
    return bucket, place


class _Stopped(Exception):
    pass


class _NothingYet(Exception):
    """The journal has no record of this term."""


def _events_begin(listing: Listing, place: LocalPlace) -> int:
    """Behind what earlier terms of this place have put of its events."""
    own = sorted(piece for term, pieces in listing.events.items() if term >= place.first_term for piece in pieces)
    end = place.events
    for piece in own:
        end = max(end, piece.end) if piece.begin <= end else end
    return end


__all__ = ["JournalMark", "ShardUploader", "StoreLag", "Uploader", "make_shard_uploader", "make_uploader"]
