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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from atoll.bucket.claims import (
    LocalPlace,
    StoredHead,
    claim_through,
    is_claimed,
    read_place,
    release_term,
    write_head,
)
from atoll.bucket.client import Bucket, StoreRefused, open_bucket
from atoll.bucket.files_copy import FilesCopy
from atoll.bucket.journal_copy import JournalCopy, JournalMark
from atoll.bucket.layout import Listing, payload_name, payload_place, read_listing
from atoll.protocol.errors import AtollError, ConfigError, RunFailed
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import Deposed

JOURNAL_S = 1.0
"""Between two puts of what was appended meanwhile: the bucket is about as far behind."""
FILES_S = 2.0
EVENTS_S = 15.0
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


class Uploader:
    def __init__(
        self, bucket: Bucket, out: RunDir, place: LocalPlace, term: int, *, keep: int, told_after_put: bool = False
    ) -> None:
        self._bucket, self._out, self._place, self.term, self._keep = bucket, out, place, term, keep
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
        self._failing: dict[str, tuple[float, str]] = {}
        """By lane, since when it fails and with what."""
        self._journal: JournalCopy | None = None
        self._files: FilesCopy | None = None
        self._head_at = 0.0
        self._threads: list[threading.Thread] = []

    # ---- for the syncer ---------------------------------------------------------------------------------------------

    def note_append(self, mark: JournalMark) -> None:
        """After every append, on the thread that made it: cheap. With durability = "store" it returns when the bucket
        has it; Deposed: another place has claimed the run."""
        with self._marks:
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
        return self._files.held_cut if self._files is not None else -1

    def lag(self) -> StoreLag:
        now, waiting = time.monotonic(), list(self._waiting)
        rounds = max(0, waiting[-1].rounds - self._stored_rounds) if waiting else 0
        seconds = now - waiting[0].at if waiting else 0.0
        failing = [one for one in list(self._failing.values()) if now - one[0] >= TROUBLE_S]
        trouble = min(failing)[1] if failing else ""
        return StoreLag(self._bucket.url, rounds, seconds, trouble)

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
        since = self._failing.get(lane, (time.monotonic(), ""))[0]
        self._failing[lane] = (since, " ".join(words.split()))

    def _check(self) -> None:
        if self._stop.is_set():
            raise _Stopped
        if self.deposed or is_claimed(self._bucket, self.term + 1):
            raise Deposed

    def _prepare(self) -> tuple[JournalCopy, FilesCopy]:
        """Claim the term and look at what is there, once."""
        with self._lock:
            if self._journal is None or self._files is None:
                if not self._waiting:
                    raise _NothingYet
                claim_through(self._bucket, self.term, self._place.place, self._out.path)
                listing = read_listing(self._bucket.list_objects())
                # Each thread has its own part of the listing; both read the other's.
                self._journal = JournalCopy(self._bucket, self._out.journal, listing, self._waiting[-1])
                begin = _events_begin(listing, self._place)
                self._files = FilesCopy(
                    self._bucket, self._out, self.term, listing, self._keep, self._check, events_from=begin
                )
            return self._journal, self._files

    def _put_journal(self) -> None:
        journal, files = self._prepare()
        with self._lock:
            waiting = list(self._waiting)
            if not waiting:
                return
            mark = waiting[-1]
            with self._marks:
                written = dict(self._written)
            journal.put_through(mark, written, files.has_cut_behind)
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

    def _copy_files(self) -> float:
        try:
            journal, files = self._prepare()
        except _NothingYet:
            return 0.1
        self._check()
        files.put_files()
        if files.put_newest_cut():
            files.delete_needless()
        journal.join_small_pieces(self._check)
        now = time.monotonic()
        if now >= self._head_at:
            self._head_at = now + HEADS_S
            told = self._waiting[-1].rounds if self._waiting else self._stored_rounds
            write_head(self._bucket, self.term, StoredHead(told, self._stored_rounds, time.time()))
            files.put_events()
        return FILES_S

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
                words = self._failing["end"][1]
                # What took long has come far, and goes on from there.
                left_s = patience_s if time.monotonic() - began > patience_s else left_s - (time.monotonic() - began)
                if left_s <= 0 or isinstance(error, StoreRefused):
                    return words
                tell(words)
                time.sleep(rest_s)
                left_s -= rest_s
                rest_s = min(2 * rest_s, LONGEST_REST_S)

    def _put_all(self) -> None:
        _, files = self._prepare()
        self._check()
        files.put_newest_cut()
        self._put_journal()
        files.delete_needless()
        files.put_files(last=True)
        files.put_events()
        write_head(self._bucket, self.term, StoredHead(self._stored_rounds, self._stored_rounds, time.time()))
        release_term(self._bucket, self.term)


def make_uploader(out: RunDir, url: str, term: int, *, keep: int, told_after_put: bool) -> Uploader:
    """Of the run in this folder, which was attached to its bucket before."""
    place = read_place(out.path)
    if place is None or place.url != url:
        raise ConfigError(f"{out.path} is not attached to {url}: start the run by atoll train or atoll syncer --store")
    return Uploader(open_bucket(url), out, place, term, keep=keep, told_after_put=told_after_put)


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


__all__ = ["JournalMark", "StoreLag", "Uploader", "make_uploader"]
