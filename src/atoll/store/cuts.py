"""Cuts on disk: the syncer's part, and the manifest that says which learners' parts belong to it.

    cuts/000120/theta-000.bin          a fragment's values, fp32
    cuts/000120/<slot>-000.bin         the outer optimizer's state of it
    cuts/000120/state.bin              the history up to there, and where the journal goes on (msgpack)
    cuts/000120/syncer.json            names, sizes and digests of those; written last: with it the part is whole
    cuts/000120/manifest.json          the whole cut: the round, and every learner's file with its digest
    cuts/absent.json                   complete ones that are not here: a bucket did not have them (bucket/restore.py)
    learners/<id>/cut-000120.safetensors

A part is written to a folder of its own, which is then given its name: so it is whole or not there. A syncer that was
deposed meanwhile drops what it wrote, so that it never replaces a part of its successor's. A cut without a manifest is
never resumed from; its syncer's part alone is enough for a syncer to come back. What the manifest says of a learner's
file is that learner's word: where it is not so, that learner is left out of the cut, and nobody else.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import msgspec
import numpy as np

from atoll.digests import compute_digest, digest_pieces
from atoll.numerics.arrays import ByteArray
from atoll.protocol.errors import AtollError
from atoll.protocol.history import HistoryState
from atoll.store.atomic import make_folder, mode_in, sync_path, write_atomic
from atoll.store.disk import Rests, cut_in_pieces, sync_between
from atoll.store.removal import remove_folder_gently
from atoll.store.segments import Position

T = TypeVar("T", bound=msgspec.Struct)

_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""A learner and its file are named by a peer: a name that leads anywhere else is none."""


FORMAT = 2
GONE, DRAFT = "gone-", "draft-"
"""What a cut that is being deleted, or written, is called."""
WRITERS = 2
"""Files of a cut that are written at once: one is hashed and copied while another waits for the disk. While rounds are
committed to the same disk, one at a time."""


class BadCut(AtollError):
    """A cut that cannot be used, with what is wrong and where."""

    exit_code = 2


class MissingPart(BadCut):
    """A learner's file is not there."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: int
    digest: str


class SyncerPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run: str
    cut: int
    round: int
    files: dict[str, FileEntry]
    format: int = 1
    """Of the whole cut. 1: before digests were XXH3."""

    def list_digests(self) -> dict[str, str]:
        """Of the arrays, by name."""
        return {name.removesuffix(".bin"): file.digest for name, file in self.files.items()}


class LearnerPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One learner's saved state: `file` lies in learners/<id>/."""

    incarnation: int
    t: int
    file: str
    digest: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run: str
    cut: int
    round: int
    syncer: str
    """Digest of syncer.json."""
    learners: dict[str, LearnerPart]
    left_out: dict[str, str] = {}
    """Who is not in it, and why."""
    shards: tuple[str, ...] = ()
    """Of the other shards of the syncer, in order: the digest of each one's syncer.json (docs/adr/0031)."""


class CutState(msgspec.Struct, frozen=True, array_like=True):
    """The state.bin of a cut."""

    history: HistoryState
    position: Position
    """Of the journal, right behind the last record that the history holds."""
    file: int
    """The payload file that the rounds after the cut go to, of the term of `position`."""
    rounds: tuple[int, ...]
    """Per fragment, the round that made its version; −1 for version 0."""


def folder_of(root: Path, cut: int) -> Path:
    return root / f"{cut:06d}"


def known_cuts(root: Path) -> list[int]:
    """Every cut that has a whole syncer's part, the newest first."""
    if not root.is_dir():
        return []
    numbers = [int(entry.name) for entry in root.iterdir() if entry.name.isdigit()]
    return sorted((n for n in numbers if (folder_of(root, n) / "syncer.json").exists()), reverse=True)


def complete_cuts(root: Path) -> list[int]:
    return [n for n in known_cuts(root) if (folder_of(root, n) / "manifest.json").exists()]


ABSENT = "absent.json"


def write_absent(root: Path, cuts: Collection[int]) -> None:
    """Of a run that was brought back: cuts that its journal calls complete, and that were not in the bucket."""
    write_atomic(root / ABSENT, msgspec.json.encode(sorted(cuts)))


def read_absent(root: Path) -> list[int]:
    try:
        return msgspec.json.decode((root / ABSENT).read_bytes(), type=list[int])
    except (OSError, msgspec.MsgspecError):
        return []


# ---- the syncer's part -------------------------------------------------------------------------------------------


def write_syncer_part(
    root: Path,
    run: str,
    cut: int,
    round: int,
    state: bytes,
    arrays: Mapping[str, ByteArray],
    check: Callable[[], None] = lambda: None,
    known: Mapping[str, str] = MappingProxyType({}),
    rests: Rests | None = None,
) -> str:
    """Durable once this returns; the digest of its table. `check` is asked last: it raises where nothing may be.
    `known`: digests of arrays that were hashed when they were made. `rests`: rounds are committed meanwhile."""
    folder, mark = folder_of(root, cut), os.urandom(4).hex()
    draft = root / f"{DRAFT}{cut}-{mark}"
    make_folder(draft)
    try:
        whole = {"state": np.frombuffer(state, dtype=np.uint8), **arrays}
        files = _write_all(draft, whole, known, rests)
        table = msgspec.json.format(msgspec.json.encode(SyncerPart(run, cut, round, files, FORMAT)))
        write_atomic(draft / "syncer.json", table)
        check()
        if folder.exists():
            folder.rename(root / f"{GONE}{cut}-{mark}")
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    sync_path(root)
    return compute_digest(table)


def read_syncer_part(root: Path, cut: int) -> tuple[SyncerPart, bytes, dict[str, ByteArray]]:
    """The part, its state and its arrays, every byte checked; BadCut names the file that is wrong."""
    folder = folder_of(root, cut)
    part = _read_part(folder)
    arrays = {name.removesuffix(".bin"): _read(folder / name, file) for name, file in part.files.items()}
    if "state" not in arrays:
        raise BadCut(f"{folder / 'syncer.json'} names no state.bin")
    return part, arrays.pop("state").tobytes(), arrays


def _read_part(folder: Path) -> SyncerPart:
    part = _table(folder / "syncer.json", SyncerPart)
    if part.format != FORMAT:
        raise BadCut(f"{folder} was written by another version of Atoll: go on with the run with that version")
    return part


@dataclass(frozen=True, slots=True)
class StoredCut:
    """A cut's table and state; its arrays stay on disk."""

    number: int
    path: Path
    part: SyncerPart
    state: CutState


def open_cut(root: Path, number: int) -> StoredCut:
    """Read the table and the state, and no array. BadCut says why it cannot be read."""
    part, state = read_state(root, number, CutState)
    return StoredCut(number, folder_of(root, number), part, state)


def read_state(root: Path, number: int, kind: type[T]) -> tuple[SyncerPart, T]:
    """The table and the state of a cut, or of a shard's part of one (store/shards.py)."""
    folder = folder_of(root, number)
    part, path = _read_part(folder), folder / "state.bin"
    state = _bytes(path)
    if part.files.get("state.bin") != FileEntry(len(state), compute_digest(state)):
        raise BadCut(f"{path} is damaged: its digest is not the one in syncer.json")
    try:
        return part, msgspec.msgpack.decode(state, type=kind)
    except (msgspec.MsgspecError, AtollError) as error:
        raise BadCut(f"{path} cannot be read by this version of Atoll: {error}") from error


# ---- the whole ---------------------------------------------------------------------------------------------------


def write_manifest(root: Path, manifest: Manifest) -> str:
    text = msgspec.json.format(msgspec.json.encode(manifest))
    write_atomic(folder_of(root, manifest.cut) / "manifest.json", text)
    return compute_digest(text)


def read_manifest(root: Path, cut: int) -> Manifest:
    return _table(folder_of(root, cut) / "manifest.json", Manifest)


@dataclass(frozen=True, slots=True)
class CheckedCut:
    """A complete cut, as far as it is good."""

    manifest: Manifest
    """With those learners alone whose file is as it says; the others are left out in it."""
    spoilt: dict[str, str]
    """Learners whose file is not there, or another; and what is wrong with it."""
    missing: tuple[str, ...] = ()
    """Of these, those whose file is not there: learners started by hand keep theirs."""

    def list_remarks(self, but: Collection[str] = ()) -> list[str]:
        cut, told = self.manifest.cut, ((name, wrong) for name, wrong in self.spoilt.items() if name not in but)
        return [f"cut {cut} is taken without the state of {name}: {wrong}" for name, wrong in told]


def check_cut(root: Path, learners: Path, cut: int) -> CheckedCut:
    """The syncer's files are as the manifest says, or BadCut; the learners' are looked at one by one."""
    manifest = read_manifest(root, cut)
    table = folder_of(root, cut) / "syncer.json"
    if compute_digest(_bytes(table)) != manifest.syncer:
        raise BadCut(f"{table} is not the one that the manifest of cut {cut} names")
    read_syncer_part(root, cut)
    spoilt: dict[str, str] = {}
    missing: list[str] = []
    for name, part in manifest.learners.items():
        try:
            check_learner_part(learners, name, part)
        except BadCut as error:
            spoilt[name] = str(error)
            if isinstance(error, MissingPart):
                missing.append(name)
    good = {name: part for name, part in manifest.learners.items() if name not in spoilt}
    left_out = {**manifest.left_out, **spoilt}
    return CheckedCut(msgspec.structs.replace(manifest, learners=good, left_out=left_out), spoilt, tuple(missing))


def check_learner_part(learners: Path, name: str, part: LearnerPart) -> Path:
    for word in (name, part.file):
        if not _PLAIN.fullmatch(word):
            raise BadCut(f"{word[:80]!r} is no name of a file: the cut names it in the state of {name[:80]!r}")
    path = learners / name / part.file
    try:
        found = digest_file(path)
    except FileNotFoundError:
        raise MissingPart(
            f"{path} is missing: the cut names it as the state of {name} (learners started by hand keep theirs)"
        ) from None
    except OSError as error:
        raise BadCut(f"{path} cannot be read: {error.strerror}") from error
    if found != part.digest:
        raise BadCut(f"{path} is damaged: its digest is not the one in the cut's manifest")
    return path


def prune(root: Path, keep: int, *spared: int) -> list[int]:
    """Remove all but the newest complete cuts, and whatever lies before them but `spared`; which cuts went.

    A cut goes as a whole: it loses its name first, so that nobody finds half of one.
    """
    kept = complete_cuts(root)[:keep]
    return prune_before(root, min(kept), *spared) if kept else []


def prune_before(root: Path, oldest: int, *spared: int) -> list[int]:
    """Remove all cuts before this one but `spared`."""
    there = [int(entry.name) for entry in root.iterdir() if entry.name.isdigit()]
    old = [cut for cut in there if cut < oldest and cut not in spared]
    for cut in old:
        folder_of(root, cut).rename(root / f"{GONE}{cut}")
    for entry in (*root.glob(f"{GONE}*"), *root.glob(f"{DRAFT}*")):
        with suppress(OSError):
            remove_folder_gently(entry)
    return sorted(old)


def digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return digest_pieces(iter(partial(file.read, 1 << 20), b""))


def _write_all(
    draft: Path, arrays: Mapping[str, ByteArray], known: Mapping[str, str], rests: Rests | None
) -> dict[str, FileEntry]:
    """Durable but for their names: those are with the folder."""
    with ThreadPoolExecutor(WRITERS if rests is None else 1) as writers:
        under_way = {
            f"{name}.bin": writers.submit(_write, draft / f"{name}.bin", values, known.get(name), rests)
            for name, values in arrays.items()
        }
    return {name: written.result() for name, written in under_way.items()}


def _write(path: Path, values: ByteArray, known: str | None, rests: Rests | None) -> FileEntry:
    """Zeros, such as the momentum of a run that has only begun, take no room on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode_in(path.parent))
    with open(descriptor, "wb") as file:
        file.truncate(values.nbytes)
        for piece in sync_between(file, cut_in_pieces(values.data) if values.any() else (), rests):
            file.write(piece)
    return FileEntry(values.nbytes, known or compute_digest(values.data))


def _read(path: Path, file: FileEntry) -> ByteArray:
    try:
        values = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise BadCut(f"{path} cannot be read: {error.strerror}") from error
    if values.nbytes != file.bytes or compute_digest(values.data) != file.digest:
        raise BadCut(f"{path} is damaged: {values.nbytes} bytes lie there, and not the {file.bytes} that were written")
    return values


def _table(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(_bytes(path), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadCut(f"{path} is damaged: {error}") from error


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadCut(f"{path} cannot be read: {error.strerror}") from error
