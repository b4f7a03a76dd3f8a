"""Who may write to a bucket: the id of the store, and claims of terms by create-only puts.

A *place* is a run directory on one disk; `store.json` in it names the bucket, the store's id and the place. Within a
place the lock and the terms of its disk decide who writes (store/writer_lease.py); between places the newest claim in
the bucket does. Claims have no gaps: the claim of the next term is all that a holder has to look for.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from pathlib import Path

import msgspec

from atoll.bucket.client import Bucket, MissingKey, TakenKey
from atoll.bucket.layout import STORE, TERMS, head_key, released_key, term_key
from atoll.protocol.errors import ConfigError
from atoll.store.atomic import write_atomic
from atoll.store.writer_lease import Deposed

FORMAT = 1


class StoreIdentity(msgspec.Struct, frozen=True):
    """The store.json of a bucket."""

    id: str
    format: int = FORMAT


class LocalPlace(msgspec.Struct, frozen=True):
    """The store.json of a run directory."""

    url: str
    id: str
    place: str
    first_term: int = 1
    """Of this place; earlier ones were others' …"""
    events: int = 0
    """… who left so many bytes of events.jsonl."""


class TermClaim(msgspec.Struct, frozen=True):
    place: str
    host: str = ""
    pid: int = 0
    at: float = 0.0
    folder: str = ""
    token: str = ""
    """Tells our own claim, whose answer was lost, from another's."""

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


def write_place(folder: Path, place: LocalPlace) -> None:
    write_atomic(folder / STORE, msgspec.json.format(msgspec.json.encode(place)) + b"\n")


def new_place() -> str:
    return secrets.token_hex(8)


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
    place = LocalPlace(bucket.url, own.id, new_place())
    write_place(folder, place)
    return place


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


def check_own(bucket: Bucket, place: LocalPlace) -> None:
    """ConfigError: the bucket is another run's, or the run went on elsewhere."""
    if read_identity(bucket).id != place.id:
        raise ConfigError(f"{bucket.url} holds another run than this folder: name the run's own bucket by --store")
    term = newest_term(bucket)
    if term and (claim := read_claim(bucket, term)).place != place.place:
        raise ConfigError(
            f"this run went on elsewhere ({claim.describe()}, term {term}), and this folder holds an old copy: go on "
            f"from the bucket in an empty folder (atoll restore {bucket.url} DIR)"
        )


def newest_term(bucket: Bucket) -> int:
    names = (key.rpartition("/")[2] for key in bucket.list_objects(TERMS))
    return max((int(name) for name in names if name.isdigit()), default=0)


def read_claim(bucket: Bucket, term: int) -> TermClaim:
    try:
        return msgspec.json.decode(bucket.get(term_key(term)), type=TermClaim)
    except (MissingKey, msgspec.MsgspecError):
        return TermClaim("")


def claim_term(bucket: Bucket, term: int, place: str, folder: Path) -> bool:
    """Claim a term for this place; False: another has it."""
    own = TermClaim(place, socket.gethostname(), os.getpid(), time.time(), str(folder), secrets.token_hex(8))
    try:
        bucket.create(term_key(term), msgspec.json.encode(own))
    except TakenKey:
        return read_claim(bucket, term).token == own.token
    return True


def claim_through(bucket: Bucket, term: int, place: str, folder: Path) -> None:
    """Claim every term up to this one that is not claimed yet: while the store was down, terms may have passed on the
    disk alone. Deposed: the newest claim is another place's."""
    newest = newest_term(bucket)
    if newest and read_claim(bucket, newest).place != place:
        raise Deposed
    for number in range(newest + 1, term + 1):
        if not claim_term(bucket, number, place, folder):
            raise Deposed


class TermClaimed:
    """The right of a syncer to write: its own term in the bucket."""

    def __init__(self, bucket: Bucket, term: int, place: str, folder: Path) -> None:
        self._bucket, self._term, self._place, self._folder = bucket, term, place, folder

    def begin(self) -> None:
        """Deposed: the newest claim is another place's."""
        claim_through(self._bucket, self._term, self._place, self._folder)

    def is_over(self) -> bool:
        return is_claimed(self._bucket, self._term + 1)


class PlaceClaimed:
    """The right of a shard other than the lead: whichever term its run is in, as long as that is this place's. It
    claims nothing itself (docs/adr/0033)."""

    def __init__(self, bucket: Bucket, place: str) -> None:
        self._bucket, self._place, self._term = bucket, place, 0

    def begin(self) -> None:
        self._term = newest_term(self._bucket)
        if self._term and read_claim(self._bucket, self._term).place != self._place:
            raise Deposed

    def is_over(self) -> bool:
        while is_claimed(self._bucket, self._term + 1):
            if read_claim(self._bucket, self._term + 1).place != self._place:
                return True
            self._term += 1
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
