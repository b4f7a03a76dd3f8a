"""A run directory brought back from its bucket.

Whoever means to go on with the run claims the next term first and reads after: what the holder before it may still put
lies behind the seal then (docs/adr/0033). Everything is fetched into a folder beside, which takes the name at the end;
a fetch that was cut off goes on with the files that are whole there.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from atoll.bucket.claims import (
    LocalPlace,
    StoredHead,
    claim_term,
    is_released,
    newest_term,
    read_claim,
    read_head,
    read_identity,
    write_place,
)
from atoll.bucket.client import Bucket, MissingKey, StoreUnavailable, open_bucket
from atoll.bucket.cut_copy import find_part
from atoll.bucket.layout import (
    CUTS,
    EVENTS,
    JOURNAL,
    Listing,
    StoredCutKey,
    cover,
    file_key,
    lay_events,
    local_name,
    payload_place,
    read_listing,
    segment_name,
    shard_url,
)
from atoll.config import Config, load, parse
from atoll.protocol.errors import ConfigError, RunFailed
from atoll.protocol.records import CutDoneRecord, MergedRecord, RestoredRecord
from atoll.store.atomic import make_folder, sync_path, write_atomic
from atoll.store.cuts import (
    BadCut,
    CutState,
    check_cut,
    folder_of,
    open_cut,
    read_state,
    read_syncer_part,
    write_absent,
)
from atoll.store.disk import LocalDisk
from atoll.store.event_parts import events_size
from atoll.store.journal import describe_lack, read
from atoll.store.rundir import RunDir
from atoll.store.segments import HEAD_BYTES, follows
from atoll.store.shards import ShardCut
from atoll.store.writer_lease import claim

T = TypeVar("T")
AT_ONCE = 8
TRIES, REST_S = 6, 0.5
SUFFIX = ".restoring"
MAX_TERM = 10**9
SHARD_TERMS = 100_000
"""A shard has terms of its own, which nobody claims in the bucket. In a place that was restored in term 7 of the run
they begin with 700,000: the shards of the place before, should they live, write other objects."""


class Takeover(msgspec.Struct, frozen=True):
    """The claim under which a run is brought back."""

    term: int
    """0: none was made, the copy is only looked at."""
    token: str = ""
    """Of the claim, in the bucket and on the disk."""
    behind: bool = False
    """Its last holder may have told more rounds than the bucket holds."""
    head: StoredHead | None = None
    """What that holder said last."""


@dataclass
class Restored:
    takeover: Takeover
    cut: int | None = None
    shards: int = 1
    """Of its syncer."""
    remarks: list[str] = field(default_factory=list)
    gap: str = ""
    """Part of the journal or cuts that the listing names and the copy lacks; empty: none."""


CLAIM = "claim.json"
"""In the folder that a run is fetched into: what was claimed for it, so that a fetch that died goes on under its own
claim. It is written before the claim is made."""


def find_own_claim(bucket: Bucket, out: Path) -> Takeover | None:
    """Of a fetch into this folder that was cut off. None: there was none, or others have claimed the run since."""
    try:
        saved = msgspec.json.decode((_draft_of(out) / CLAIM).read_bytes(), type=Takeover)
    except (OSError, msgspec.MsgspecError):
        return None
    own = saved.term == newest_term(bucket) and read_claim(bucket, saved.term).token == saved.token
    return saved if own else None


def _draft_of(out: Path) -> Path:
    return out.with_name(out.name + SUFFIX)


def claim_run(bucket: Bucket, out: Path, *, take_over: bool) -> Takeover:
    """Claim the next term for a place of its own. ConfigError: its holder may be alive, or another was faster."""
    read_identity(bucket)
    if (own := find_own_claim(bucket, out)) is not None:
        return own
    newest = newest_term(bucket)
    if not newest:
        return Takeover(1)  # nobody has begun yet; term 1 is claimed by the syncer itself
    released = is_released(bucket, newest)
    kept = read_config(bucket).service.durability == "store"
    holder = read_claim(bucket, newest)
    if not released and not kept and not take_over:
        raise ConfigError(
            f"{bucket.url} was last written by {holder.describe()} (term {newest}), which has not released it: if that "
            f"machine is gone, say so with atoll restore {bucket.url} {out} --take-over"
        )
    head = read_head(bucket, range(1, newest + 1))
    takeover = Takeover(newest + 1, secrets.token_hex(8), behind=not released and not kept, head=head)
    _draft_of(out).mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(_draft_of(out) / CLAIM, msgspec.json.encode(takeover))
    if not claim_term(bucket, newest + 1, takeover.token, out):
        winner = read_claim(bucket, newest + 1)
        raise ConfigError(f"{bucket.url}: term {newest + 1} was claimed by {winner.describe()}, a moment sooner")
    return takeover


def read_config(bucket: Bucket) -> Config:
    listing = read_listing(bucket.list_objects("files"))
    found = listing.choose_files(below=MAX_TERM).get("run.toml")
    if found is None:
        raise ConfigError(f"{bucket.url} holds no run.toml: its run ended before anything of it was uploaded")
    return parse(bucket.get(file_key(found[0], "run.toml")).decode(), f"{bucket.url}/{file_key(found[0], 'run.toml')}")


def fetch_run(
    bucket: Bucket, out: Path, takeover: Takeover, tell: Callable[[str], None] = lambda text: None
) -> tuple[RunDir, Restored]:
    """The run in a folder beside `out`, checked; `finish_restore` gives it its name."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty: choose another folder, or remove it")
    if takeover.term:
        return _fetch_listed(bucket, out, takeover, _try_again(bucket.list_objects), tell)
    # Nothing is claimed, so the run may go on: its syncer puts, joins and deletes objects while they are fetched. What
    # the copy lacks then is no damage, and a newer listing has it. What is lacking twice in the same way is not there.
    objects: dict[str, int] = {}
    gap = ""
    for _ in range(TRIES):
        before, objects = objects, _try_again(bucket.list_objects)
        try:
            draft, restored = _fetch_listed(bucket, out, takeover, objects, tell)
        except (MissingKey, RunFailed) as error:
            if str(error) == gap or objects == before:
                raise
            gap = str(error)
        else:
            if restored.gap in ("", gap) or objects == before:
                return draft, restored
            gap = restored.gap
        clear_draft(out)
        tell("the run goes on meanwhile: reading it again")
    raise RunFailed(f"{bucket.url} changed at each of {TRIES} tries to copy it ({gap}): the run goes on; try again")


def _fetch_listed(
    bucket: Bucket, out: Path, takeover: Takeover, objects: Mapping[str, int], tell: Callable[[str], None]
) -> tuple[RunDir, Restored]:
    """Fetch what is among these objects."""
    identity = read_identity(bucket)
    listing = read_listing(objects)
    draft = RunDir(_draft_of(out))
    draft.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in (draft.journal / "terms", draft.cuts, draft.learners, draft.logs):
        make_folder(folder)
    fetch = _Fetch(bucket, draft, listing, tell)
    below = takeover.term or listing.newest_term + 1
    fetch.fetch_files(below)
    fetch.fetch_events(below)
    way = fetch.fetch_segments(below)
    restored = Restored(takeover, shards=_count_shards(draft))
    # The others' are listed after the lead's journal, which names nothing that is not there before it.
    others = [_fetch_shard(bucket, draft, number, tell) for number in range(2, restored.shards + 1)]
    fetch.fetch_newest_cut(way, restored, others)
    # Terms of others are claimed here too, so that the next one is never given twice.
    for term in range(1, max(takeover.term + 1, below)):
        claim(draft.journal, term, takeover.token if term == takeover.term else "")
    for number in range(2, restored.shards + 1):
        claim(draft.shard(number).journal, max(takeover.term, 1) * SHARD_TERMS)
    if not takeover.term:
        return draft, restored
    size = events_size(draft.events)
    write_place(draft.path, LocalPlace(bucket.url, identity.id, first_term=takeover.term, events=size))
    return draft, restored


def _count_shards(draft: RunDir) -> int:
    return load(draft.settings).service.shards if draft.settings.exists() else 1


def _fetch_shard(run: Bucket, draft: RunDir, number: int, tell: Callable[[str], None]) -> _Fetch:
    """The chain of another shard; its part of a cut is fetched with the lead's."""
    bucket, out = open_bucket(shard_url(run.url, number)), draft.shard(number)
    for folder in (out.journal / "terms", out.cuts):
        make_folder(folder)
    fetch = _Fetch(bucket, out, read_listing(_try_again(bucket.list_objects)), tell)
    fetch.fetch_segments(MAX_TERM)
    return fetch


def clear_draft(out: Path) -> None:
    """Of an earlier try, which may have begun to change what it had fetched; but for what it had claimed."""
    for path in _draft_of(out).iterdir() if _draft_of(out).exists() else ():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != CLAIM:
            path.unlink()


def finish_restore(draft: RunDir, out: Path) -> RunDir:
    if out.exists():
        out.rmdir()
    (draft.path / CLAIM).unlink(missing_ok=True)  # the place says it from here on
    draft.path.rename(out)
    sync_path(out.parent)
    return RunDir(out.absolute())


@dataclass
class _Fetch:
    bucket: Bucket
    draft: RunDir
    listing: Listing
    tell: Callable[[str], None]

    def fetch_files(self, below: int) -> None:
        found = self.listing.choose_files(below)
        wanted = [
            (file_key(term, name), self.draft.path / name, size)
            for name, (term, size) in found.items()
            if ".." not in Path(name).parts
        ]
        for _, path, _ in wanted:
            make_folder(path.parent)
            path.unlink(missing_ok=True)  # settings may have changed under the same size
        self._fetch_whole(wanted)

    def fetch_events(self, below: int) -> None:
        earlier = {term: pieces for term, pieces in self.listing.events.items() if term < below}
        with self.draft.events.open("wb") as file:
            for part in lay_events(earlier):
                for piece in sorted(self.listing.events[part.term]):
                    if piece.end <= file.tell() or piece.begin >= part.end:
                        continue
                    data = self._get(piece.key(f"{EVENTS}/{part.term:06d}"))
                    file.write(data[file.tell() - piece.begin : part.end - piece.begin])

    def fetch_segments(self, below: int) -> dict[int, int]:
        """The segments that count, from the newest back to where the run began; by term, up to which byte."""
        ends = {term: self.listing.journal_end(term) for term in self.listing.segment_terms() if term < below}
        way: dict[int, int] = {}
        term = max((term for term, end in ends.items() if end > HEAD_BYTES), default=0)
        end = ends.get(term, 0)
        while term:
            self._fetch_growing(segment_name(term))
            way[term] = end
            before = follows(self.draft.journal, term, LocalDisk())
            if before.term and self.listing.journal_end(before.term) < before.offset:
                raise RunFailed(
                    f"{self.bucket.url} lacks a part of {JOURNAL}/{segment_name(before.term)}, which term {term} "
                    "follows: the run cannot be resumed from there"
                )
            term, end = before.term, before.offset
        # A payload is put before the record that names it, but a listing of many pages, in the order of keys, comes to
        # payloads before it comes to segments. Listed after the segments, all that these name are there.
        now = read_listing(_try_again(lambda: self.bucket.list_objects(JOURNAL))).journal
        self.listing.journal |= {name: pieces for name, pieces in now.items() if payload_place(name) is not None}
        return way

    def fetch_newest_cut(self, way: dict[int, int], restored: Restored, shards: Sequence[_Fetch] = ()) -> None:
        """The newest complete cut that the journal here reaches, with the payloads behind it, and the same of other
        shards; a damaged one is passed over for the one before it."""
        for key in self.listing.complete_cuts():
            folder = self.draft.cuts / f"{key.cut:06d}"
            try:
                state = self._fetch_state(key, folder)
                if state.position.offset > way.get(key.term, -1) or state.position.term != key.term:
                    shutil.rmtree(folder)  # of a syncer that was replaced, or the journal is not that far yet
                    continue
                self.tell(f"cut {key.cut}, {_size(self.listing.cuts[key].values())}")
                self._fetch_cut(key, folder)
                manifest = check_cut(self.draft.cuts, self.draft.learners, key.cut).manifest
                parts = [fetch.fetch_part(key.cut, mark) for fetch, mark in zip(shards, manifest.shards, strict=True)]
            except (BadCut, MissingKey) as error:
                restored.gap = restored.gap or str(error)
                restored.remarks.append(f"cut {key.cut} of the bucket is passed over: {error}")
                for root in (self.draft.cuts, *(fetch.draft.cuts for fetch in shards)):
                    shutil.rmtree(folder_of(root, key.cut), ignore_errors=True)
                continue
            self._fetch_payloads((state.position.term, state.file))
            for fetch, first in zip(shards, parts, strict=True):
                fetch._fetch_payloads(first)
            restored.cut = key.cut
            restored.gap = ""
            done: set[int] = set()
            for position, record in read(self.draft.journal, start=state.position, disk=LocalDisk()):
                if isinstance(record, CutDoneRecord):
                    done.add(record.cut)
                elif isinstance(record, MergedRecord | RestoredRecord) and record.payload is not None:
                    restored.gap = restored.gap or describe_lack(self.draft.journal, position.term, record.payload)
            write_absent(self.draft.cuts, done - {key.cut})
            return

    def fetch_part(self, cut: int, digest: str) -> tuple[int, int]:
        """Of a shard, its part of a cut, which the lead's manifest names by this digest; the first payload file behind
        it."""
        found = {one.key(name): size for one, files in self.listing.cuts.items() for name, size in files.items()}
        prefix = f"{CUTS}/{cut:06d}/"
        of_cut = {name: size for name, size in found.items() if name.startswith(prefix)}
        key = _try_again(lambda: find_part(self.bucket, of_cut, digest))
        if key is None:
            raise BadCut(f"{self.bucket.url} has no part of cut {cut} that the manifest names")
        make_folder(folder_of(self.draft.cuts, cut))
        self._fetch_cut(key, folder_of(self.draft.cuts, cut))
        read_syncer_part(self.draft.cuts, cut)
        _, state = read_state(self.draft.cuts, cut, ShardCut)
        return state.position.term, state.file

    def _fetch_state(self, key: StoredCutKey, folder: Path) -> CutState:
        make_folder(folder)
        files = self.listing.cuts[key]
        wanted = [(key.key(name), folder / name, files.get(name, 0)) for name in ("syncer.json", "state.bin")]
        self._fetch_whole(wanted)
        try:
            return open_cut(self.draft.cuts, key.cut).state
        finally:
            (folder / "syncer.json").unlink(missing_ok=True)  # with it the cut would count as whole

    def _fetch_cut(self, key: StoredCutKey, folder: Path) -> None:
        files = self.listing.cuts[key]
        wanted = []
        for name, size in files.items():
            inside, parts = name.removeprefix("learners/"), Path(name).parts
            if ".." in parts or Path(name).is_absolute():
                raise BadCut(f"{name[:80]!r} is no name of a file")
            path = self.draft.learners / inside if inside != name else folder / name
            make_folder(path.parent)
            wanted.append((key.key(name), path, size))
        last = ("syncer.json", "manifest.json")
        self._fetch_whole([one for one in wanted if one[1].name not in last])
        self._fetch_whole([one for one in wanted if one[1].name in last])

    def _fetch_payloads(self, first: tuple[int, int]) -> None:
        for name in self.listing.journal:
            place = payload_place(name)
            if place is not None and place >= first:
                self._fetch_growing(name)

    # ---- objects ----------------------------------------------------------------------------------------------------

    def _fetch_growing(self, name: str) -> None:
        path = self.draft.journal / local_name(name)
        way = cover(tuple(self.listing.journal[name]))
        if not way or (path.exists() and path.stat().st_size == way[-1].end):
            return
        with path.open("wb") as file, ThreadPoolExecutor(AT_ONCE) as pool:
            # In order, and no more of them in memory than are fetched at once.
            for begin in range(0, len(way), AT_ONCE):
                some = way[begin : begin + AT_ONCE]
                parts = pool.map(self._get, [piece.key(f"{JOURNAL}/{name}") for piece in some])
                for piece, data in zip(some, parts, strict=True):
                    file.write(data[file.tell() - piece.begin :])
            file.flush()
            os.fsync(file.fileno())

    def _fetch_whole(self, wanted: Iterable[tuple[str, Path, int]]) -> None:
        missing = [(key, path) for key, path, size in wanted if not (path.exists() and path.stat().st_size == size)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda one: _try_again(lambda: self.bucket.get_file(*one)), missing))

    def _get(self, key: str) -> bytes:
        return _try_again(lambda: self.bucket.get(key))


def _try_again(request: Callable[[], T]) -> T:
    for number in range(TRIES):
        try:
            return request()
        except StoreUnavailable:
            if number == TRIES - 1:
                raise
            time.sleep(REST_S * 2**number)
    raise AssertionError("every try returns or raises")


def _size(sizes: Iterable[int]) -> str:
    return f"{sum(sizes) / 2**20:,.0f} MiB"
