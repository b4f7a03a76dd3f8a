"""Cuts, settings, models and events on their way into the bucket.

Of cuts only the newest complete one is uploaded: a bucket that is slower than the run takes cuts leaves some out. While
it is on its way the run does not delete it (`held_cut`). A cut is whole once its manifest is there, which is put last.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from atoll.bucket.client import Bucket, TakenKey
from atoll.bucket.layout import (
    EVENTS,
    JOURNAL,
    CopyPiece,
    Listing,
    StoredCutKey,
    cut_pieces,
    file_key,
    needless_objects,
)
from atoll.store.cuts import BadCut, StoredCut, complete_cuts, open_cut, read_manifest
from atoll.store.rundir import UNMERGED, RunDir

SMALL = ("run.toml", "environment.json", "norms.json", "summary.json")
MODELS = ("model.safetensors", "model-best.safetensors", "model-tail.safetensors")
MODELS_S = 300.0
"""Between two uploads of a model that changes: what scored best may do so often."""
AT_ONCE = 4
"""Files of a cut that are on their way together."""
EVENTS_BYTES = 8 * 2**20
PAYLOAD_CUTS = 2
"""Payloads are kept in the bucket back to the second newest cut, as on the disk: should the newest be damaged."""

Stamp = tuple[int, int, int]


@dataclass
class FilesCopy:
    bucket: Bucket
    out: RunDir
    term: int
    listing: Listing
    keep: int
    check: Callable[[], None]
    """Raises where this syncer is deposed, or told to stop."""
    events_from: int
    """Where this term's part of events.jsonl begins."""
    held_cut: int = -1
    """The cut that is on its way; −1: none."""
    _stamps: dict[str, Stamp] = field(default_factory=dict)
    """Of files that are in the bucket as they are."""
    _models_at: float = 0.0
    _newest_put: int = -1

    # ---- cuts -----------------------------------------------------------------------------------------------------

    def put_newest_cut(self) -> bool:
        """Whether there was one to upload."""
        newest = next(iter(complete_cuts(self.out.cuts)), None)
        if newest is None or newest == self._newest_put:
            return False
        self.held_cut = newest
        try:
            cut = open_cut(self.out.cuts, newest)
            key = StoredCutKey(newest, cut.state.position.term)
            known = self.listing.cuts.setdefault(key, {})
            if "manifest.json" not in known:
                self._put_cut(cut, key, known)
            self._newest_put = newest
        except (BadCut, FileNotFoundError):
            return False  # damaged, or deleted before it was held: the next one will do
        finally:
            self.held_cut = -1
        return True

    def _put_cut(self, cut: StoredCut, key: StoredCutKey, known: dict[str, int]) -> None:
        files = {name: cut.path / name for name in cut.part.files}
        parts = self._list_learner_parts(cut.number)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            sent = [pool.submit(self._put_part, key, name, path, known) for name, path in {**files, **parts}.items()]
            missing = [one.result() for one in sent]
        if any(name in files for name in missing):
            raise FileNotFoundError(cut.path)
        self.check()
        for name in ("syncer.json", "manifest.json"):
            self._put_part(key, name, cut.path / name, known)

    def _list_learner_parts(self, cut: int) -> dict[str, Path]:
        """Those that lie here, of all ranks: learners that were started by hand keep theirs."""
        found: dict[str, Path] = {}
        for learner, part in read_manifest(self.out.cuts, cut).learners.items():
            first = self.out.learners / learner / part.file
            for path in (first, *first.parent.glob(f"rank-*/{part.file}")):
                if path.is_file():
                    found[f"learners/{path.relative_to(self.out.learners)}"] = path
        return found

    def _put_part(self, key: StoredCutKey, name: str, path: Path, known: dict[str, int]) -> str:
        """Empty, or the name where the file is gone."""
        self.check()
        try:
            size = path.stat().st_size
            if known.get(name) == size:
                return ""  # from a try before this one
            self.bucket.put_file(key.key(name), path)
            if path.stat().st_size != size:
                return name  # it was being deleted, bit by bit (store/removal.py)
        except FileNotFoundError:
            return name
        known[name] = size
        return ""

    def list_kept(self) -> list[StoredCut]:
        """Complete cuts of this disk that are whole in the bucket too and that the journal there reaches, the newest
        first."""
        found: list[StoredCut] = []
        for number in complete_cuts(self.out.cuts):
            try:
                cut = open_cut(self.out.cuts, number)
            except BadCut:
                continue
            position = cut.state.position
            there = self.listing.cuts.get(StoredCutKey(number, position.term), {})
            if "manifest.json" in there and self.listing.journal_end(position.term) >= position.offset:
                found.append(cut)
        return found[: self.keep]

    def has_cut_behind(self, place: tuple[int, int]) -> bool:
        """Whether a cut in the bucket needs no payloads up to this term and file."""
        for number in complete_cuts(self.out.cuts):
            try:
                state = open_cut(self.out.cuts, number).state
            except BadCut:
                continue
            there = self.listing.cuts.get(StoredCutKey(number, state.position.term), {})
            if "manifest.json" in there and place < (state.position.term, state.file):
                return True
        return False

    def delete_needless(self) -> None:
        """What newer cuts made needless. Those cuts are in the bucket before the claims are looked at, so whoever
        claims after that has them, and needs nothing of this."""
        kept = self.list_kept()
        if not kept:
            return
        oldest = kept[:PAYLOAD_CUTS][-1].state
        keys = [StoredCutKey(cut.number, cut.state.position.term) for cut in kept]
        needless = needless_objects(self.listing, keys, (oldest.position.term, oldest.file))
        if not needless:
            return
        self.check()
        self.bucket.delete(needless)
        self._forget(set(needless))

    def _forget(self, gone: set[str]) -> None:
        for key in list(self.listing.cuts):
            files = self.listing.cuts[key]
            for name in [name for name in files if key.key(name) in gone]:
                del files[name]
            if not files:
                del self.listing.cuts[key]
        for name in tuple(self.listing.journal):
            pieces = self.listing.journal[name]
            pieces.difference_update([piece for piece in tuple(pieces) if piece.key(f"{JOURNAL}/{name}") in gone])

    # ---- files ----------------------------------------------------------------------------------------------------

    def put_files(self, *, last: bool = False) -> None:
        """Settings and models that have changed. `last`: nothing will change any more."""
        names = [*SMALL, *(str(path.relative_to(self.out.path)) for path in self.out.learners.glob(f"*/{UNMERGED}"))]
        if last or time.monotonic() >= self._models_at:
            names += MODELS
            self._models_at = time.monotonic() + MODELS_S
        for name in names:
            self._put_changed(name)

    def _put_changed(self, name: str) -> None:
        path = self.out.path / name
        stamp = _stamp(path)
        if stamp is None or self._stamps.get(name) == stamp:
            return
        self.check()
        try:
            self.bucket.put_file(file_key(self.term, name), path)
        except FileNotFoundError:
            return
        if _stamp(path) == stamp:  # otherwise another has taken its place meanwhile: the next time
            self._stamps[name] = stamp

    def put_events(self) -> None:
        known = self.listing.events.setdefault(self.term, set())
        done = max((piece.end for piece in known), default=self.events_from)
        size = self.out.events.stat().st_size if self.out.events.exists() else 0
        for piece in cut_pieces(done, size, EVENTS_BYTES):
            with self.out.events.open("rb") as file:
                file.seek(piece.begin)
                data = file.read(piece.end - piece.begin)
            with suppress(TakenKey):  # our own put, whose answer was lost
                self.bucket.create(piece.key(f"{EVENTS}/{self.term:06d}"), data)
            known.add(CopyPiece(piece.begin, piece.end))


def _stamp(path: Path) -> Stamp | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns)
