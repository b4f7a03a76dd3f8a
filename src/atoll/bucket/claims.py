"""Who may write to a bucket: the id of the store, and claims of terms by create-only puts.

A *place* is a run directory on one disk; `store.json` in it names the bucket and the store's id. Within a place the
lock and the terms of its disk decide who writes (store/writer_lease.py); between places the newest claim in the bucket
does: it carries the token of the disk's claim of that term, so a disk that holds another token, or none, did not make
it. Claims have no gaps: the claim of the next term is all that a holder has to look for.

A copy of a folder holds the tokens of its original up to the term in which it was made. It is known as a copy by the
inode of its store.json, and goes on only with a run that was released.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from pathlib import Path

import msgspec

from atoll.bucket.client import Bucket, MissingKey, TakenKey
from atoll.bucket.layout import STORE, TERMS, head_key, read_listing, released_key, term_key
from atoll.protocol.errors import ConfigError
from atoll.store.atomic import staged
from atoll.store.event_parts import events_size
from atoll.store.rundir import RunDir
from atoll.store.segments import segment_path
from atoll.store.writer_lease import Deposed, read_claim_token

FORMAT = 2


class StoreIdentity(msgspec.Struct, frozen=True):
    """The store.json of a bucket."""

    id: str
    format: int = FORMAT


class LocalPlace(msgspec.Struct, frozen=True):
    """The store.json of a run directory."""

    url: str
    id: str
    inode: int = 0
    """Of this very file: a copy of the folder has another."""
    first_term: int = 1
    """Of this place; earlier ones were others' …"""
    events: int = 0
    """… who left so many bytes of events.jsonl."""


class TermClaim(msgspec.Struct, frozen=True):
    host: str = ""
    pid: int = 0
    at: float = 0.0
    folder: str = ""
    token: str = ""
    """That of the claim on the disk."""

    def describe(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.at))
        return f"{self.folder or 'a folder'} on {self.host or 'an unknown host'}, since {when}"


class StoredHead(msgspec.Struct, frozen=True):
    """How far a term had come, as it said last."""

    told: int
    """Rounds that may have been told to learners …"""
    stored: int
    """… and those that were in the bucket."""
    at: float


def read_place(folder: Path) -> LocalPlace | None:
    try:
        return msgspec.json.decode((folder / STORE).read_bytes(), type=LocalPlace)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{folder / STORE} cannot be read: {error}; it says which bucket this run is in") from error


def write_place(folder: Path, place: LocalPlace) -> LocalPlace:
    with staged(folder / STORE) as draft:  # the rename keeps the inode
        own = msgspec.structs.replace(place, inode=draft.stat().st_ino)
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(own)) + b"\n")
    return own


def is_copy(folder: Path, place: LocalPlace) -> bool:
    return (folder / STORE).stat().st_ino != place.inode


def begin_store(bucket: Bucket, folder: Path) -> LocalPlace:
    """Make this bucket that of a new run. The create-only put is the probe: what may not be written is said now."""
    own = StoreIdentity(secrets.token_hex(8))
    try:
        bucket.create(STORE, msgspec.json.encode(own))
    except TakenKey:
        if newest_term(bucket):
            raise ConfigError(
                f"{bucket.url} holds another run: name another place by --store, or go on with that run by "
                f"atoll train --resume DIR --store {bucket.url}"
            ) from None
        own = read_identity(bucket)  # of a start that came no further
    return write_place(folder, LocalPlace(bucket.url, own.id))


def read_identity(bucket: Bucket) -> StoreIdentity:
    try:
        found = msgspec.json.decode(bucket.get(STORE), type=StoreIdentity)
    except MissingKey:
        raise ConfigError(
            f"{bucket.url} holds no run: check the URL, and that the run was begun with --store"
        ) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{bucket.url}/{STORE} is damaged, or none of Atoll's: {error}") from error
    if found.format != FORMAT:
        raise ConfigError(f"{bucket.url} was written by another version of Atoll: go on with the run with that version")
    return found


def check_own(bucket: Bucket, out: RunDir, place: LocalPlace) -> None:
    """ConfigError: the bucket is another run's, or the run went on elsewhere."""
    if read_identity(bucket).id != place.id:
        raise ConfigError(f"{bucket.url} holds another run than this folder: name the run's own bucket by --store")
    term = newest_term(bucket)
    if term and not _is_own(bucket, term, out.journal):
        raise _went_on(bucket, term)


def own_copy(bucket: Bucket, out: RunDir, place: LocalPlace) -> None:
    """Make a copied folder a place of its own, which claims the next term when it starts. ConfigError: the run was not
    released, or went on behind the copy. After `check_own`."""
    listing = read_listing(bucket.list_objects())
    term = listing.newest_term
    if term not in listing.released:
        raise refuse_copy(bucket, out.path)
    last = max(listing.segment_terms(), default=0)  # `term` itself may have written nothing
    segment = segment_path(out.journal, last)
    if listing.journal_end(last) > (segment.stat().st_size if segment.exists() else 0):
        raise _went_on(bucket, term)
    write_place(out.path, LocalPlace(place.url, place.id, first_term=term + 1, events=events_size(out.events)))


def refuse_copy(bucket: Bucket, folder: Path) -> ConfigError:
    claim = read_claim(bucket, newest_term(bucket))
    return ConfigError(
        f"{folder} is a copy, and the run may be alive where {bucket.url} was last written from: {claim.describe()}. "
        f"Go on there, or, where that is gone, from the bucket: atoll restore {bucket.url} DIR --take-over. "
        "A folder that was moved to another disk counts as a copy, as do all where inode numbers of files change"
    )


def _went_on(bucket: Bucket, term: int) -> ConfigError:
    return ConfigError(
        f"this run went on elsewhere ({read_claim(bucket, term).describe()}, term {term}), and this folder holds an "
        f"old copy: go on from the bucket in an empty folder (atoll restore {bucket.url} DIR)"
    )


def newest_term(bucket: Bucket) -> int:
    names = (key.rpartition("/")[2] for key in bucket.list_objects(TERMS))
    return max((int(name) for name in names if name.isdigit()), default=0)


def read_claim(bucket: Bucket, term: int) -> TermClaim:
    try:
        return msgspec.json.decode(bucket.get(term_key(term)), type=TermClaim)
    except (MissingKey, msgspec.MsgspecError):
        return TermClaim()


def _is_own(bucket: Bucket, term: int, journal: Path) -> bool:
    """Whether the disk of this journal/ folder made the claim."""
    token = read_claim_token(journal, term)
    return bool(token) and read_claim(bucket, term).token == token


def claim_term(bucket: Bucket, term: int, token: str, folder: Path) -> bool:
    """Claim a term for the disk whose claim has this token; False: another has it."""
    own = TermClaim(socket.gethostname(), os.getpid(), time.time(), str(folder), token)
    try:
        bucket.create(term_key(term), msgspec.json.encode(own))
    except TakenKey:  # by another, or by this very put, whose answer was lost
        return read_claim(bucket, term).token == token
    return True


def claim_through(bucket: Bucket, term: int, out: RunDir) -> None:
    """Claim every term up to this one that is not claimed yet: while the store was down, terms may have passed on the
    disk alone. Deposed: the newest claim is of another disk, or of a later term."""
    newest = newest_term(bucket)
    if newest > term or (newest and not _is_own(bucket, newest, out.journal)):
        raise Deposed
    for number in range(newest + 1, term + 1):
        if not claim_term(bucket, number, read_claim_token(out.journal, number), out.path):
            raise Deposed


class TermClaimed:
    """The right of a syncer to write: its own term in the bucket."""

    def __init__(self, bucket: Bucket, term: int, out: RunDir) -> None:
        self._bucket, self._term, self._out = bucket, term, out

    def begin(self) -> None:
        """Deposed: the newest claim is not this term's, made by this disk."""
        claim_through(self._bucket, self._term, self._out)

    def is_over(self) -> bool:
        return is_claimed(self._bucket, self._term + 1)


class PlaceClaimed:
    """The right of a shard other than the lead: whichever term its run is in, as long as the disk of the run claimed
    it. It claims nothing itself (docs/adr/0033)."""

    def __init__(self, bucket: Bucket, run: RunDir) -> None:
        self._bucket, self._run, self._term = bucket, run, 0

    def begin(self) -> None:
        self._term = newest_term(self._bucket)
        if self._term and not _is_own(self._bucket, self._term, self._run.journal):
            raise Deposed

    def is_over(self) -> bool:
        term = self._term  # two threads ask
        while is_claimed(self._bucket, term + 1):
            term += 1
            if not _is_own(self._bucket, term, self._run.journal):
                return True
        self._term = term
        return False


def is_claimed(bucket: Bucket, term: int) -> bool:
    return bucket.exists(term_key(term))


def is_released(bucket: Bucket, term: int) -> bool:
    return bucket.exists(released_key(term))


def release_term(bucket: Bucket, term: int) -> None:
    bucket.put(released_key(term), b"{}")


def write_head(bucket: Bucket, term: int, head: StoredHead) -> None:
    bucket.put(head_key(term), msgspec.json.encode(head))


def read_head(bucket: Bucket, terms: range) -> StoredHead | None:
    """Of the newest of these terms that wrote one."""
    for term in reversed(terms):
        try:
            return msgspec.json.decode(bucket.get(head_key(term)), type=StoredHead)
        except (MissingKey, msgspec.MsgspecError):
            continue
    return None
