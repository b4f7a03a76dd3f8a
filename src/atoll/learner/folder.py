"""A learner's folder: where it lies, the name that goes with it, and the lock that says who has it.

    ATOLL_FOLDER              where a supervisor or the operator names one (atoll learn --folder)
    atoll-learners/RUN/NAME   otherwise, below the current folder. Where no link names the run, the syncer is asked
                              for it when the learner joins; until then its name is kept by the syncer's address, as
                              atoll-learners/127.0.0.1-7077/NAME

    lock          flock'ed by the training process that has the folder, with its pid, the learner's name and the machine
    succession    the secret by which a restart proves to the syncer that the name is its own; mode 600
    run           the run that the parts of cuts in it are of (saved_state.py)
    successor     a run that goes on for lost ones, and those: their links lead to that run, and to what is saved of it

Rules:
- one process has a folder at a time: a second one of the same name is refused, and one whose name is only a default
  takes the next that is free;
- the default name is the machine and the lowest free number (HOST-0, HOST-1, …), or the job and its index where a
  scheduler gives one: a restart finds its old name, and with it its state and its secret;
- the lock is free as soon as the process is gone, also while workers that it forked live on;
- what is shown to the syncer is made of the secret and this machine's name: a folder that two machines share makes
  neither of them the other's successor;
- it stays where it is when the script changes the current folder;
- what is saved lies by the run and not by the address: another address finds it, and another run on the same address
  does not touch it. Where only another folder of this name holds parts of the run, that one is used;
- where no folder can be made, the learner trains without one; where it cannot be locked, with a secret of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import socket
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from itertools import count, islice
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from atoll.fabric.address import parse_address
from atoll.protocol.errors import ConfigError
from atoll.protocol.limits import LONGEST, is_name
from atoll.protocol.succession import tell_taken
from atoll.store.atomic import make_folder, mode_in, write_atomic
from atoll.store.keys import kept_secret
from atoll.store.rundir import LEARNERS, checked_name

RUN, SUCCESSOR = "run", "successor"
STATUS = "/v1/status"
INDEXES = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_JOB_NAME"),
    ("JOB_COMPLETION_INDEX", ""),
    ("GROUP_RANK", ""),
)
"""Where a scheduler says which of its tasks this is, and how the job is called; without that, the machine."""
MAX_DEFAULT_NAMES = 1024
"""Default names that are tried."""
_SECRET = re.compile(r"[0-9a-f]{32}")


class LearnerFolder:
    """A name, and the folder that goes with it, in this process's hands."""

    def __init__(self, name: str, path: Path | None = None, lock: int | None = None) -> None:
        """`path`: None where there is no folder; `lock`: the descriptor that holds it, ours from here on."""
        self.name, self.path = name, path
        self.runs: Path | None = None
        """Where the folders of all runs lie; None: this one was named, or there is none."""
        self._of_run: LearnerFolder | None = None
        self.host, self.pid = socket.gethostname()[:LONGEST], os.getpid()
        secret = _kept_secret(path) if path is not None and lock is not None else secrets.token_hex(16)
        self.proof = make_proof(secret, self.host)
        self._close = weakref.finalize(self, os.close, lock) if lock is not None else None
        if lock is not None:
            mine = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _release(mine))

    def enter_run(self, run: str) -> Path | None:
        """Where this learner saves its part of that run's cuts. ConfigError: another process has it."""
        if self.runs is None or not is_name(run) or (path := find_saved(self.runs, run, self.name)) == self.path:
            return self.path
        if self._of_run is None or self._of_run.path != path:
            self._of_run = _claim(path, self.name) or _refuse(path, self.name)
        return self._of_run.path

    def note_successor(self, run: str, lost: Sequence[str]) -> None:
        """Note that this run goes on for the lost ones, for a process that is started again by a link of theirs."""
        if self.path is not None and lost:
            with suppress(OSError):
                write_atomic(self.path / SUCCESSOR, "\n".join([run, *lost]).encode())

    def find_successor(self, run: str) -> str:
        """Return the run that goes on for this one as far as is known here; it may be this one."""
        with suppress(OSError, UnicodeDecodeError, ValueError):
            if self.path is not None:
                successor, *lost = (self.path / SUCCESSOR).read_text().split()
                return successor if run in lost else run
        return run

    def release(self) -> None:
        """Another process may have it now."""
        if self._of_run is not None:
            self._of_run.release()
        if self._close is not None:
            self._close()


def claim_folder(syncer: str, name: str = "", env: Mapping[str, str] = os.environ) -> LearnerFolder:
    """The folder of this name, or of the first default name that is free; ConfigError: another process has the name."""
    if name:
        checked_name(name)
    if named := env.get("ATOLL_FOLDER"):
        path = Path(named).absolute()
        name = name or (path.name if is_name(path.name) else next(default_names(env)))
        return _claim(path, name) or _refuse(path, name)
    root = LEARNERS.absolute() / run_or_address(syncer)
    with suppress(OSError):
        LEARNERS.mkdir(mode=0o700, exist_ok=True)
    for one in [name] if name else islice(default_names(env), MAX_DEFAULT_NAMES):
        if (found := _claim(root / one, one)) is not None:
            found.runs = root.parent
            return found
    if name:
        return _refuse(root / name, name)
    raise ConfigError(f"{MAX_DEFAULT_NAMES} learners of {root} are here already: name this one with --name")


def run_or_address(syncer: str) -> str:
    """What a join link, or a syncer's address, names a run by; may be part of a path."""
    address = parse_address(syncer)
    if is_name(address.run):
        return address.run
    parts = urlsplit(address.urls[0])
    return f"{re.sub(r'[^A-Za-z0-9.]+', '-', parts.hostname or '').strip('-.')}-{parts.port}"


def find_saved(runs: Path, run: str, name: str) -> Path:
    """The folder of a learner in a run: by the run's name, unless only another one has parts of it."""
    own = runs / run / name
    if read_run(own) != run:
        with suppress(OSError):
            old = [path for one in runs.iterdir() if read_run(path := one / name) == run]
            return max(old, key=lambda path: (path / RUN).stat().st_mtime, default=own)
    return own


def read_run(folder: Path) -> str:
    """Which run the parts in a folder are of; empty: nobody has said so."""
    try:
        return (folder / RUN).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


class _Status(msgspec.Struct):
    run: str


def ask_run(syncer: str, limit_s: float = 2.0) -> str | None:
    """The run that is served at an address of this machine; empty: nobody says; None: nobody answers."""
    address = parse_address(syncer)
    for url in address.urls:
        parts = urlsplit(url)
        connection = HTTPConnection(parts.hostname or "", parts.port or 0, timeout=limit_s)
        try:
            connection.request("GET", STATUS, headers=address.headers_for(f"{url}{STATUS}"))
            answer = connection.getresponse()
            return msgspec.json.decode(answer.read(), type=_Status).run if answer.status == 200 else ""
        except msgspec.MsgspecError:
            return ""
        except (OSError, HTTPException):
            continue
        finally:
            connection.close()
    return None


def default_names(env: Mapping[str, str] = os.environ, host: str = "") -> Iterator[str]:
    """In the order in which they are tried. No end of them."""
    machine = _as_name(host or socket.gethostname())
    for variable, job in INDEXES:
        index = env.get(variable, "")
        if re.fullmatch(r"[0-9]{1,9}", index) and not (variable == "GROUP_RANK" and env.get("GROUP_WORLD_SIZE") == "1"):
            base = _as_name(env.get(job, "") or machine)
            first = base if base.endswith(f"-{index}") else f"{base}-{index}"  # pods are called so
            yield first
            yield from (f"{first}-{number}" for number in count(1))
    yield from (f"{machine}-{number}" for number in count())


def make_proof(secret: str, host: str) -> str:
    """What is shown of the secret on this machine."""
    return hashlib.blake2b(f"{host}\n{secret}".encode(), digest_size=16).hexdigest()


def _as_name(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-") or "learner"


def _claim(path: Path, name: str) -> LearnerFolder | None:
    """None: another process has it."""
    try:
        make_folder(path)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode_in(path))
    except OSError:
        return LearnerFolder(name)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:  # this file system knows no locks
        os.close(lock)
        return LearnerFolder(name, path)
    with suppress(OSError):  # a full disk is no reason to train without the folder
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()} {name} {socket.gethostname()}\n".encode(), 0)
    return LearnerFolder(name, path, lock)


def _refuse(path: Path, name: str) -> LearnerFolder:
    pid, holder, host = 0, name, ""
    with suppress(OSError, ValueError):
        first, holder, host = (path / "lock").read_text().strip().split(" ", 2)
        pid = int(first)
    if holder != name:
        raise ConfigError(f"{path} is the folder of {holder}, pid {pid}: choose another --folder for {name}")
    raise ConfigError(tell_taken(name, host, pid))


def list_parts(folder: Path) -> list[Path]:
    """Return the learner's parts of snapshots in this folder, the oldest first, also past six digits."""
    return sorted(folder.glob("cut-*.safetensors"), key=lambda part: (len(part.name), part.name))


def _kept_secret(path: Path) -> str:
    """One of this process alone where none can be kept: its restart is asked for like a stranger."""
    try:
        return kept_secret(path / "succession", lambda: secrets.token_hex(16), _SECRET.fullmatch)
    except ConfigError:
        return secrets.token_hex(16)


def _release(folder: weakref.ref[LearnerFolder]) -> None:
    if (found := folder()) is not None:
        found.release()
