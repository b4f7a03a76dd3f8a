"""Settings, models and events on their way into the bucket."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from atoll.bucket.client import Bucket, TakenKey
from atoll.bucket.layout import EVENTS, CopyPiece, Listing, cut_pieces, file_key
from atoll.store.rundir import UNMERGED, RunDir

SMALL = ("run.toml", "environment.json", "linked-pins.json", "norms.json", "origin.bin", "summary.json")
MODELS = ("model-best.safetensors", "model-ema.safetensors", "model-tail.safetensors")
MODELS_S = 300.0
"""Between two uploads of a model that changes: what scored best may do so often."""
EVENTS_BYTES = 8 * 2**20

FileState = tuple[int, int, int]


@dataclass
class FilesCopy:
    bucket: Bucket
    out: RunDir
    term: int
    listing: Listing
    check: Callable[[], None]
    """Raises where this syncer is deposed, or told to stop."""
    events_from: int
    """Where this term's part of events.jsonl begins."""
    _stamps: dict[str, FileState] = field(default_factory=dict)
    """Of files that are in the bucket as they are."""
    _models_at: float = 0.0

    def put_files(self, *, last: bool = False) -> None:
        """Settings and models that have changed. `last`: nothing will change any more."""
        names = [*SMALL, *(str(path.relative_to(self.out.path)) for path in self.out.learners.glob(f"*/{UNMERGED}"))]
        if last or time.monotonic() >= self._models_at:
            names += MODELS
            self._models_at = time.monotonic() + MODELS_S
        if last:  # a resumed run has the model of the end before, which is gone from the disk with its first round
            names.append(self.out.model.name)
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


def _stamp(path: Path) -> FileState | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns)
