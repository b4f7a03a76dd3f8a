"""The folder of a syncer's keys, apart from any run's. The secrets of a run that has no keys lie in its own folder.

    syncer.crt, syncer.key     the syncer's certificate and its key; a syncer that runs takes new ones as they come
    next.crt, next.key         those that are to follow, where they are made: join links name both
    tokens.json                who may join (fabric/join_tokens.py), changed while a run goes on
    ca.crt, ca.key             an authority of one's own, where there is one
    NAME.crt, NAME.key         a learner's certificate, for mutual TLS; `operator`: of commands on this machine

    RUN/secrets/NAME           of a run without keys: one secret, as Prometheus and curl read it from a file

Both folders have mode 700 and every file in them mode 600. Their .gitignore keeps them out of a repository.
A folder that others can write to is refused, and so is one that holds a file of another user.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.protocol.errors import ConfigError
from atoll.store.atomic import write_atomic
from atoll.store.rundir import checked_name

FOLDER = Path("atoll-keys")
"""Where `atoll cert` puts them, below the current folder."""
OPEN_TO_OTHERS, WRITABLE_BY_OTHERS = 0o077, 0o022
_ENDS_WITH_PORT = re.compile(r":[0-9]+$")
_LONG_WORD = re.compile(r"[A-Za-z0-9]{32,}")
"""May be a token that was given without the rest of its link: it is not repeated."""

Stamp = tuple[int, int]
"""When a file was last written, and which it is: another stamp, another file."""
RELOAD_S = 0.5
"""Between two looks of a running syncer at its files of tokens and certificates."""
LASTS_S = 2.0
"""Files that are unusable for this long are not just being written."""


@dataclass(frozen=True, slots=True)
class KeyDir:
    path: Path

    @property
    def certificate(self) -> Path:
        return self.path / "syncer.crt"

    @property
    def key(self) -> Path:
        return self.path / "syncer.key"

    @property
    def next_certificate(self) -> Path:
        return self.path / "next.crt"

    @property
    def next_key(self) -> Path:
        return self.path / "next.key"

    @property
    def authority(self) -> Path:
        return self.path / "ca.crt"

    @property
    def authority_key(self) -> Path:
        return self.path / "ca.key"

    @property
    def tokens(self) -> Path:
        return self.path / "tokens.json"

    def of_learner(self, name: str) -> tuple[Path, Path]:
        name = checked_name(name)
        if name in ("syncer", "next", "ca"):
            raise ConfigError(f"a learner cannot be called {name!r} here: its files would take the place of others")
        return self.path / f"{name}.crt", self.path / f"{name}.key"

    @property
    def is_complete(self) -> bool:
        return self.certificate.is_file() and self.tokens.is_file()

    @classmethod
    def open(cls, path: Path) -> KeyDir:
        """One that `atoll cert` has made, and nobody else can read."""
        found = cls(path.absolute())
        if not found.is_complete:
            raise ConfigError(f"{path} holds no keys: make them with `atoll cert --out {path}`")
        check_folder(found.path)
        for file in (found.key, found.next_key, found.tokens, found.authority_key):
            check_private(file)
        return found

    @classmethod
    def create(cls, path: Path) -> KeyDir:
        """Made if it is not there; git then ignores all of it. A folder of the user's own gets no such file."""
        found = cls(path.absolute())
        try:
            is_new = not found.path.exists()
            found.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found.path.chmod(0o700)
        except OSError as error:
            raise ConfigError(f"cannot make {path}: {error.strerror}") from error
        if is_new:
            found.write(found.path / ".gitignore", b"*\n")
        return found

    def renew(self) -> None:
        """The pair that was to follow takes its place. A syncer that looks in between finds a key that does not fit
        and waits; whoever was stopped in between does it again."""
        try:
            if self.next_key.exists():
                os.replace(self.next_key, self.key)
            os.replace(self.next_certificate, self.certificate)
        except OSError as error:
            raise ConfigError(f"cannot move {self.next_certificate} into place: {error.strerror}") from error

    def write(self, path: Path, data: bytes) -> None:
        """Never readable by others, not for a moment."""
        before = os.umask(0o077)
        try:
            write_atomic(path, data)
            path.chmod(0o600)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        finally:
            os.umask(before)


def kept_secret(file: Path, make: Callable[[], str], good: Callable[[str], object]) -> str:
    """The secret in a file, which is made if it is not there or says nothing that is `good`. Never readable by others;
    not durable: should the machine crash before it is on disk, nobody is left who holds it."""
    check_private(file)
    try:
        with suppress(FileNotFoundError):
            if good(found := file.read_text().strip()):
                return found
            file.unlink()
        secret = make()
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as out:
            out.write(f"{secret}\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot keep a secret in {file}: {error}; remove it, and a new one is made") from error
    return secret


class LastingTrouble:
    """Whether files have been unusable for so long that the operator should know: that is said once."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._told = False

    def is_news(self, now: float) -> bool:
        """They are unusable now."""
        if self._since is None:
            self._since = now
        news = now - self._since >= LASTS_S and not self._told
        self._told = self._told or news
        return news

    def clear(self) -> None:
        self._since, self._told = None, False


def check_private(file: Path) -> None:
    """ConfigError for one that is there and that others can read, or have written."""
    try:
        found = file.stat()
    except OSError:
        return
    if found.st_mode & OPEN_TO_OTHERS:
        raise ConfigError(f"{file} can be read by others on this machine: chmod 600 {file}")
    if found.st_uid not in trusted():
        raise _belongs_to_another(file)


def read_link(said: str, named_by: str = "ATOLL_JOIN") -> str:
    """A join link or an address as it is, or the one in a file that nobody else may read. `named_by`: for complaints
    about the file."""
    path = Path(said)
    if "://" in said or (_ENDS_WITH_PORT.search(said) and not path.exists()):
        return said
    shown = _LONG_WORD.sub("…", said)
    if path.is_dir():
        raise ConfigError(f"{named_by} names {shown}, which is a folder: name the file in it that holds a join link")
    check_private(path)
    try:
        link = path.read_text("utf-8-sig").strip()  # some editors begin a file with a mark
    except FileNotFoundError:
        raise ConfigError(f"{named_by} names {shown}, which is missing") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{named_by} names {shown}, which is no text: write the join link to it anew") from None
    except OSError as error:
        raise ConfigError(f"{named_by} names {shown}, which cannot be read: {error.strerror}") from None
    if not link:
        raise ConfigError(f"{named_by} names {shown}, which is empty")
    if len(link.split()) > 1 or not ("://" in link or _ENDS_WITH_PORT.search(link)):
        raise ConfigError(f"{named_by} names {shown}, which holds something else than one join link")
    return link


def check_folder(folder: Path) -> None:
    """ConfigError where others can put files of their own, or have done so. A sticky bit protects only files that are
    there: where next.crt or ca.crt is missing, anybody could add one. Closing the folder leaves such a file in it, so
    owners are checked too."""
    found = folder.stat()
    if found.st_uid not in trusted() or found.st_mode & WRITABLE_BY_OTHERS:
        raise ConfigError(f"{folder} can be changed by others on this machine: chmod 700 {folder}")
    try:
        files = list(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"cannot look into {folder}: {error.strerror}") from error
    for file in files:
        with suppress(FileNotFoundError):  # a draft that was renamed meanwhile
            if file.lstat().st_uid not in trusted():
                raise _belongs_to_another(file)


def _belongs_to_another(file: Path) -> ConfigError:
    return ConfigError(f"{file} belongs to another user of this machine: remove it, and make one of your own")


def trusted() -> tuple[int, int]:
    """Whose files count: this user's, and those of whoever runs the machine."""
    return os.geteuid(), 0


def stamp(file: Path) -> Stamp:
    """(0, 0) for one that is not there."""
    try:
        found = file.stat()
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_ino)
