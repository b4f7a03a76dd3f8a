"""Cuts on their way into the bucket, and what newer ones make needless there.

Only the newest complete cut is uploaded: a bucket that is slower than the run takes cuts leaves some out. While it is
on its way the run does not delete it (`held_cut`). A cut is whole once its manifest is there, which is put last.

Of a syncer of several shards (docs/adr/0031) every shard uploads its own part, below shards/N. The lead chooses the
cut, by beginning to upload its part, and holds it until all parts are there; then it puts its manifest. So a cut that
is whole at the lead is whole in all shards, as on the disk. The lead deletes for all: it knows what is whole.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from atoll.bucket.client import Bucket, MissingKey
from atoll.bucket.layout import CUTS, JOURNAL, Listing, StoredCutKey, needless_objects, read_listing
from atoll.digests import compute_digest
from atoll.store.cuts import BadCut, CutState, SyncerPart, complete_cuts, folder_of, read_manifest, read_state
from atoll.store.rundir import RunDir
from atoll.store.segments import Position
from atoll.store.shards import ShardCut

AT_ONCE = 4
"""Files of a cut that are on their way together."""
PAYLOAD_CUTS = 2
"""Payloads are kept in the bucket back to the second newest cut, as on the disk: should the newest be damaged."""
GIVE_UP_S = 600.0
"""A shard that has put nothing of a cut for so long may have lost it: the lead takes a newer one."""
_CUT_NUMBER = re.compile(rf"{CUTS}/(\d{{6,}})/.+")


@dataclass(frozen=True, slots=True)
class LocalCut:
    """A complete cut on this disk, or a shard's part of one."""

    number: int
    path: Path
    part: SyncerPart
    position: Position
    file: int

    @property
    def key(self) -> StoredCutKey:
        return StoredCutKey(self.number, self.position.term)

    @property
    def payloads_from(self) -> tuple[int, int]:
        return self.position.term, self.file


@dataclass
class CutCopy:
    """Of a syncer of one process, and what is common to all."""

    bucket: Bucket
    out: RunDir
    listing: Listing
    keep: int
    check: Callable[[], None]
    """Raises where this syncer is deposed, or told to stop."""
    held_cut: int = -1
    """The cut that is on its way; −1: none."""
    kind: type[CutState] | type[ShardCut] = CutState
    newest_put: int = -1

    def put_newest_cut(self) -> bool:
        """Whether a cut became whole in the bucket."""
        newest = self._choose_cut()
        if newest is None or newest == self.newest_put:
            return False
        self.held_cut = newest
        try:
            if not self._put_cut(self._open(newest)):
                return False
        except (BadCut, FileNotFoundError):
            self.held_cut = -1  # damaged, or deleted before it was held: the next one will do
            return False
        self.held_cut, self.newest_put = -1, newest
        return True

    def _choose_cut(self) -> int | None:
        return next(iter(complete_cuts(self.out.cuts)), None)

    def _open(self, number: int) -> LocalCut:
        part, state = read_state(self.out.cuts, number, self.kind)
        return LocalCut(number, folder_of(self.out.cuts, number), part, state.position, state.file)

    def _put_cut(self, cut: LocalCut) -> bool:
        """Whether all of it is in the bucket."""
        known = self.listing.cuts.setdefault(cut.key, {})
        if "manifest.json" in known:
            return True
        files = {name: cut.path / name for name in cut.part.files}
        parts = self._list_learner_parts(cut.number)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            every = {**files, **parts}.items()
            sent = [pool.submit(self._put_part, cut.key, name, path, known) for name, path in every]
            missing = [one.result() for one in sent]
        if any(name in files for name in missing):
            raise FileNotFoundError(cut.path)
        self.check()
        self._put_part(cut.key, "syncer.json", cut.path / "syncer.json", known)
        if not self._may_complete(cut):
            return False
        self._put_part(cut.key, "manifest.json", cut.path / "manifest.json", known)
        return True

    def _may_complete(self, cut: LocalCut) -> bool:
        return True

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

    def list_kept(self) -> list[LocalCut]:
        """Complete cuts of this disk that are whole in the bucket too and that the journal there reaches, the newest
        first."""
        whole = [
            cut for cut in self._list_whole() if self.listing.journal_end(cut.position.term) >= cut.position.offset
        ]
        return whole[: self.keep]

    def has_cut_behind(self, place: tuple[int, int]) -> bool:
        """Whether a cut in the bucket needs no payloads up to this term and file."""
        return any(place < cut.payloads_from for cut in self._list_whole())

    def _list_whole(self) -> list[LocalCut]:
        """Complete cuts of this disk that are whole in the bucket too, the newest first."""
        found: list[LocalCut] = []
        for number in complete_cuts(self.out.cuts):
            try:
                cut = self._open(number)
            except BadCut:
                continue
            if "manifest.json" in self.listing.cuts.get(cut.key, {}):
                found.append(cut)
        return found

    def delete_needless(self) -> None:
        """What newer cuts made needless. Those cuts are in the bucket before the claims are looked at, so whoever
        claims after that has them, and needs nothing of this."""
        kept = self.list_kept()
        if not kept:
            return
        needless = needless_objects(self.listing, [cut.key for cut in kept], kept[:PAYLOAD_CUTS][-1].payloads_from)
        if needless:
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


@dataclass
class LeadCutCopy(CutCopy):
    """Of the lead of several shards."""

    shards: Sequence[Bucket] = ()
    """Of shards 2 to S."""
    _seen: dict[str, int] = field(default_factory=dict)
    """What the others had put of the cut that is held, when they last put something …"""
    _seen_at: float = 0.0
    """… on the monotonic clock."""

    def _choose_cut(self) -> int | None:
        """The one that is held, until the others have it too."""
        newest = super()._choose_cut()
        if self.held_cut >= 0 and not (newest != self.held_cut and time.monotonic() > self._seen_at + GIVE_UP_S):
            return self.held_cut
        self._seen_at = time.monotonic()
        return newest

    def _put_cut(self, cut: LocalCut) -> bool:
        known = self.listing.cuts.setdefault(cut.key, {})
        self._put_part(cut.key, "state.bin", cut.path / "state.bin", known)  # the others see by it which cut to take
        return super()._put_cut(cut)

    def _may_complete(self, cut: LocalCut) -> bool:
        named = read_manifest(self.out.cuts, cut.number).shards
        there = [_list_part(shard, cut.number) for shard in self.shards]
        objects = {f"{at}/{key}": size for at, found in enumerate(there) for key, size in found.items()}
        if objects != self._seen:
            self._seen, self._seen_at = objects, time.monotonic()
        every = zip(self.shards, there, named, strict=True)
        return all(find_part(shard, found, digest) is not None for shard, found, digest in every)

    def delete_needless(self) -> None:
        super().delete_needless()
        kept = self.list_kept()
        for shard in self.shards if kept else ():
            listing, oldest = read_listing(shard.list_objects()), kept[:PAYLOAD_CUTS][-1].number
            begins = [_read_payloads_from(shard, key) for key in listing.cuts if key.cut == oldest]
            known = [one for one in begins if one is not None]
            if len(known) < max(1, len(begins)):
                continue
            if needless := needless_objects(listing, [cut.key for cut in kept], min(known)):
                self.check()
                shard.delete(needless)


@dataclass
class ShardCutCopy(CutCopy):
    """Of another shard than the lead: `bucket` is its own part of the run's."""

    kind: type[CutState] | type[ShardCut] = ShardCut
    lead: Bucket | None = None
    chosen: int = -1
    """The cut to upload, where it is known; −1: the one that the lead has begun to upload."""

    def _choose_cut(self) -> int | None:
        complete = complete_cuts(self.out.cuts)
        if self.chosen >= 0:
            return self.chosen if self.chosen in complete else None
        if self.lead is None or not [cut for cut in complete if cut > self.newest_put]:
            return None
        begun = {int(found[1]) for key in self.lead.list_objects(CUTS) if (found := _CUT_NUMBER.fullmatch(key))}
        return max((cut for cut in complete if cut in begun), default=None)

    def delete_needless(self) -> None:
        """The lead does."""


def find_part(shard: Bucket, objects: dict[str, int], digest: str) -> StoredCutKey | None:
    """A shard's part of a cut, among these objects: that whose table has this digest. None: it is not whole yet."""
    for key, files in read_listing(objects).cuts.items():
        if {"syncer.json", "manifest.json"} <= files.keys():
            try:
                if compute_digest(shard.get(key.key("syncer.json"))) == digest:
                    return key
            except MissingKey:
                continue
    return None


def _list_part(shard: Bucket, cut: int) -> dict[str, int]:
    return shard.list_objects(f"{CUTS}/{cut:06d}")


def _read_payloads_from(shard: Bucket, key: StoredCutKey) -> tuple[int, int] | None:
    """From which payloads on a shard's part of a cut needs them; None: it cannot be read."""
    try:
        state = msgspec.msgpack.decode(shard.get(key.key("state.bin")), type=ShardCut)
    except (MissingKey, msgspec.MsgspecError):
        return None
    return state.position.term, state.file
