"""Who may write a run: the run lock, and the writer lease with its terms and heartbeat.

    run.lock               flock'ed by the supervisor of the whole run (`atoll train`, a tape, a baseline), with its pid
    journal/terms/000001   the claim of a term, made by exclusive creation and never removed; who made it, for people,
                           and a token, by which a bucket knows the disk that claimed it (bucket/claims.py)
    journal/lock           flock'ed by a living syncer; released when its process ends
    journal/alive          the holder's heartbeat: its term and a counter
    journal/standby        a standby's sign: its machine, its process and a counter

Rules of the lease:
- a term is claimed once. Claims order the syncers of a run: a syncer that sees a higher claim than its own is fenced;
- claims that somebody removed are made again for the segments present, or a term would be given twice;
- the lock says that a process exists, the heartbeat that it makes progress. A paused holder keeps its lock, so a
  standby goes by the heartbeat and claims the next term without the lock;
- staleness is measured on the standby's own monotonic clock, as the time in which it saw no change. The wall clock
  decides nothing.

Why nothing that was acknowledged is lost: a holder appends, syncs, THEN checks whether it is fenced, and acknowledges
only if it is not. A successor claims its term first and reads the predecessor's segment after. So if the holder saw no
higher claim, its records were durable before the successor's claim and are in what the successor reads: inside the
seal. If it saw one, it acknowledges nothing, and it does not matter on which side of the seal its records fall.

A run is alive while run.lock or journal/lock is held: a supervisor may be between two syncers, and a syncer may have no
supervisor, or outlive it. run.lock is never removed: two processes could otherwise hold locks on two files of one name.

This needs a folder that all see alike at once: a local disk, or a network file system that does not cache names.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from atoll.protocol.errors import ConfigError, RunFailed
from atoll.store.atomic import make_folder, mode_in
from atoll.store.disk import LocalDisk, not_written, reading

RUN_LOCK, STANDBY = "run.lock", "standby"
STANDBY_S, SIGN_BYTES = 5.0, 128
"""A standby whose sign has not changed for so long is not there."""
_SEGMENT = re.compile(r"segment-(\d{6,})\.log")


class Deposed(RunFailed):
    """Another syncer has taken over."""

    exit_code = 5

    def __init__(self) -> None:
        super().__init__("another syncer has taken over this run: this one ends without a word to anybody")


class WriterLease:
    """The right to write a run, as long as nobody claims a higher term."""

    def __init__(self, folder: Path, term: int, lock: int | None, reason: str) -> None:
        """Use `acquire`, or a `StandbyTurn`."""
        self.term, self.reason = term, reason
        self._folder, self._lock = folder, lock
        with _writing(folder / "alive"):
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            self._alive: int | None = os.open(folder / "alive", flags, mode_in(folder))
        self._beats = 0
        self.beat()

    def fenced(self) -> bool:
        """Whether this lease is over. To be asked after every sync and before its acknowledgement."""
        return newest_claim(self._folder) != self.term

    def beat(self) -> None:
        """Say that this holder moves. Cheap and not durable: a beat that fails can only cost the lease."""
        if self._alive is None or self.fenced():
            return
        self._beats += 1
        with suppress(OSError):
            os.pwrite(self._alive, f"{self.term:06d} {self._beats:012d}\n".encode(), 0)
        if self._lock is None:
            # Taken over from a paused holder: once that is gone, its lock belongs to this one.
            self._lock = _take_lock(self._folder)

    def release(self) -> None:
        for descriptor in (self._alive, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._alive = self._lock = None


class StandbyTurn:
    """A standby's wait for its turn: call `try_claim` now and then."""

    def __init__(self, folder: Path, stale_s: float) -> None:
        self.folder, self.stale_s = folder, stale_s
        self._seen: tuple[int, bytes] | None = None
        self._since = 0.0
        self._looks = 0
        _make_folders(folder)

    def try_claim(self, now: float) -> WriterLease | None:
        """The lease, once the lock is free or its holder has not moved for `stale_s`; `now` is monotonic."""
        self._looks += 1
        lock = _take_lock(self.folder)
        if lock is not None:
            return self._taken(_hold(self.folder, lock))
        self._show_sign()
        _restore_claims(self.folder)
        seen = newest_claim(self.folder), _heartbeat(self.folder)
        if seen != self._seen:
            self._seen, self._since = seen, now
        if now - self._since < self.stale_s:
            return None
        # Exactly the next term: if another standby was faster, its claim counts as a sign of life.
        if not claim(self.folder, seen[0] + 1):
            return None
        reason = f"term {seen[0]} did not move for {now - self._since:.1f} s"
        return self._taken(WriterLease(self.folder, seen[0] + 1, None, reason))

    def _show_sign(self) -> None:
        """Write the sign over the one before, in one piece. Without it the standby waits all the same."""
        line = f"{socket.gethostname()[:64]} pid {os.getpid()} {self._looks}".ljust(SIGN_BYTES - 1) + "\n"
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with suppress(OSError):
            descriptor = os.open(self.folder / STANDBY, flags, mode_in(self.folder))
            try:
                os.pwrite(descriptor, line.encode(), 0)
            finally:
                os.close(descriptor)

    def _taken(self, lease: WriterLease) -> WriterLease:
        with suppress(OSError):
            (self.folder / STANDBY).unlink(missing_ok=True)
        return lease


class StandbyWatch:
    """Whether a standby waits for this run: its sign changes. By the watcher's own monotonic clock."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / STANDBY
        self._seen, self._since = self._read(), -math.inf

    def look(self, now: float) -> str:
        """Return the machine and process that waits; empty: none does."""
        if (seen := self._read()) != self._seen:
            self._seen, self._since = seen, now
        return seen.rpartition(" ")[0] if now - self._since < STANDBY_S else ""

    def _read(self) -> str:
        try:
            descriptor = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                return os.read(descriptor, SIGN_BYTES).decode(errors="replace").strip()
            finally:
                os.close(descriptor)
        except OSError:
            return ""


def acquire(folder: Path) -> WriterLease:
    """The next term, or a ConfigError if a syncer holds the lock."""
    _make_folders(folder)
    lock = _take_lock(folder)
    if lock is None:
        raise served(folder, describe_holder(folder))
    return _hold(folder, lock)


def served(folder: Path, holder: str) -> ConfigError:
    """What a second syncer is told."""
    return ConfigError(
        f"{folder.parent} is served by another syncer ({holder}): end that one first, "
        "or wait for your turn with --standby"
    )


def syncer_holding(folder: Path) -> str:
    """Who serves the run of this journal/ folder now (pid and term); empty: nobody."""
    return describe_holder(folder) if is_locked(folder / "lock") else ""


def find_other_host(folder: Path) -> str:
    """Return the machine that serves the run of this journal/ folder; empty: none does, or this one."""
    host = str(_read_claim(folder, newest_claim(folder)).get("host", "")) if is_locked(folder / "lock") else ""
    return host if host != socket.gethostname() else ""


def is_locked(path: Path) -> bool:
    """Whether a living process holds this lock. Nothing is made or changed by asking."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise not_written(error, path) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def claim(folder: Path, term: int, token: str = "") -> bool:
    """Claim a term, durably; False if somebody else has it. `token`: of a claim that was made in a bucket before."""
    path = folder / "terms" / f"{term:06d}"
    at, token = time.strftime("%Y-%m-%dT%H:%M:%S%z"), token or secrets.token_hex(8)
    who = {"pid": os.getpid(), "host": socket.gethostname(), "at": at, "token": token}
    disk = LocalDisk()
    with _writing(path):
        try:
            file = disk.create(path)
        except FileExistsError:
            return False
        with closing(file):
            file.write(json.dumps(who).encode())
            file.datasync()
        disk.sync(path.parent)
    return True


def newest_claim(folder: Path) -> int:
    """The highest term that was claimed; 0: none."""
    terms = folder / "terms"
    with reading(terms):
        return max((int(name) for name in os.listdir(terms) if name.isdecimal()), default=0)


def read_claim_token(folder: Path, term: int) -> str:
    """Return the token of this disk's claim of a term; empty: it made none, or a crash tore it."""
    return str(_read_claim(folder, term).get("token", ""))


def _read_claim(folder: Path, term: int) -> dict[str, Any]:
    try:
        found = json.loads((folder / "terms" / f"{term:06d}").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def unclaimed_terms(folder: Path) -> list[int]:
    """Terms that have written a segment, and whose claim is not there: somebody has removed it."""
    with reading(folder):
        written = [int(found[1]) for name in os.listdir(folder) if (found := _SEGMENT.fullmatch(name))]
    return sorted(term for term in written if not (folder / "terms" / f"{term:06d}").exists())


def _restore_claims(folder: Path) -> None:
    for term in unclaimed_terms(folder):
        claim(folder, term)


def _hold(folder: Path, lock: int) -> WriterLease:
    try:
        _restore_claims(folder)
        while not claim(folder, term := newest_claim(folder) + 1):
            pass
        return WriterLease(folder, term, lock, "no other syncer is there")
    except BaseException:
        os.close(lock)
        raise


def _take_lock(folder: Path) -> int | None:
    """An open descriptor that holds the lock; None if another has it."""
    path = folder / "lock"
    with _writing(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode_in(folder))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        return descriptor


def _heartbeat(folder: Path) -> bytes:
    path = folder / "alive"
    with reading(path):
        return path.read_bytes() if path.exists() else b""


def describe_holder(folder: Path) -> str:
    """Who made the newest claim of this journal/ folder, as far as it can be read: "pid 4711, term 2"."""
    term = newest_claim(folder)
    return f"pid {_read_claim(folder, term).get('pid', 'unknown')}, term {term}"


def _make_folders(folder: Path) -> None:
    terms = folder / "terms"
    with _writing(terms):
        if not terms.is_dir():
            make_folder(terms)
            for path in (folder, folder.parent):
                LocalDisk().sync(path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """What the operator is told when something cannot be written."""
    try:
        yield
    except OSError as error:
        raise not_written(error, path) from error


@contextmanager
def hold_run(path: Path, *, served: bool = False) -> Iterator[None]:
    """Have the whole run in hand; ConfigError, with nothing touched, while somebody else has it. `served`: its syncers
    go on, and only who looked after them is gone."""
    if not served:
        check_not_alive(path)
    descriptor = _lock(path / RUN_LOCK)
    if descriptor is None:  # somebody was faster
        raise _alive(path, f"pid {_pid(path / RUN_LOCK)}")
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def is_alive(path: Path) -> bool:
    """Whether a supervisor or a syncer on this machine has this run; nothing is made or changed by asking."""
    return is_locked(path / RUN_LOCK) or bool(syncer_holding(path / "journal"))


def check_not_alive(path: Path) -> None:
    """ConfigError while a supervisor or a syncer has this run; nothing is made or changed by asking."""
    if is_locked(path / RUN_LOCK):
        raise _alive(path, f"pid {_pid(path / RUN_LOCK)}")
    if holder := syncer_holding(path / "journal"):
        raise _alive(path, holder)


def _alive(path: Path, who: str) -> ConfigError:
    return ConfigError(f"run {path} is alive, {who}: end it first, or use another folder; nothing of it was touched")


def _lock(path: Path) -> int | None:
    """An open descriptor that holds the lock; None if another has it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode_in(path.parent))
    except OSError as error:
        raise not_written(error, path) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        raise not_written(error, path) from error
    return descriptor


def _pid(path: Path) -> str:
    """Of whoever holds the lock, as far as it can be read."""
    try:
        return path.read_text().strip() or "unknown"
    except OSError:
        return "unknown"
