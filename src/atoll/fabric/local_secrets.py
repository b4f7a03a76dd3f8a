"""Secrets of the runs on this machine, by the address of their syncer: how whatever the same user starts here gets in
without being given anything.

    $XDG_RUNTIME_DIR/atoll/127.0.0.1:7077.json     where that folder is this user's
    /run/user/UID/atoll/127.0.0.1:7077.json        the same, for a process that was started without the variable
    TEMP/atoll-UID/127.0.0.1:7077.json             where there is no such folder

Rules:
- a folder counts only if it is this user's own (mode 700) and no link: nobody else reads, writes or replaces what lies
  in it;
- another address has other secrets, or none: [::1]:7077 may be another user's when 127.0.0.1:7077 is ours;
- secrets count while the process that published them lives: whoever takes the port of a dead syncer is shown none;
- a request shows the secret of the least role that its path takes.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

import msgspec

from atoll.fabric.join_tokens import Role, roles_for
from atoll.protocol.errors import ConfigError

RUNTIME = "XDG_RUNTIME_DIR"
USERS = Path("/run/user")
"""Where systemd keeps the runtime folders of users."""


class PortSecrets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pid: int
    """Of the process that published them."""
    secrets: dict[Role, str]

    def __repr__(self) -> str:
        """A secret is in no log, wherever this is printed."""
        return f"PortSecrets(pid={self.pid}, {', '.join(self.secrets)})"


def secret_for(host: str, port: int, path: str, env: Mapping[str, str] = os.environ) -> str:
    """What a request for this path shows at that address of this machine; empty: nothing is known."""
    found = published_secrets(host, port, env)
    return next((found[role] for role in roles_for(path) if role in found), "")


def published_secrets(host: str, port: int, env: Mapping[str, str] = os.environ) -> dict[Role, str]:
    """Empty where no living process of this user has published any."""
    for folder in _folders(env):
        if (
            is_private(folder)
            and (found := _read(folder / _name(host, port))) is not None
            and is_own_process(found.pid)
        ):
            return found.secrets
    return {}


def publish_secrets(host: str, port: int, secrets: Mapping[Role, str], env: Mapping[str, str] = os.environ) -> None:
    """For as long as this process lives. Not durable: after a crash of the machine nobody listens there."""
    folder = _own_folder(env)
    file, draft = folder / _name(host, port), folder / ".draft"
    try:
        with _alone_in(folder):
            _forget_the_dead(folder)
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as out:
                out.write(msgspec.json.encode(PortSecrets(os.getpid(), dict(secrets))))
            draft.replace(file)
    except OSError as error:
        raise ConfigError(
            f"cannot write {file}: {error.strerror or error}; name another folder of your own by {RUNTIME}"
        ) from error


def withdraw_secrets(host: str, port: int, env: Mapping[str, str] = os.environ) -> None:
    """Those that this process has published."""
    for folder in _folders(env):
        file = folder / _name(host, port)
        if is_private(folder) and (found := _read(file)) is not None and found.pid == os.getpid():
            with suppress(OSError):
                file.unlink()


def _name(host: str, port: int) -> str:
    """No name that a resolver may send elsewhere: addresses only."""
    address = ip_address(host)
    return f"[{address}]:{port}.json" if address.version == 6 else f"{address}:{port}.json"


def is_private(folder: Path) -> bool:
    """Whether it is a folder of this user's own that nobody else can enter."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _folders(env: Mapping[str, str]) -> Iterator[Path]:
    """Where secrets may lie. The first two belong to a folder that the system made for this user alone."""
    named, user = env.get(RUNTIME, ""), os.geteuid()
    for runtime in dict.fromkeys([*([Path(named)] if named else []), USERS / str(user)]):
        if is_private(runtime):
            yield runtime / "atoll"
    yield Path(tempfile.gettempdir()) / f"atoll-{user}"


def _own_folder(env: Mapping[str, str]) -> Path:
    """The first of them that can be used, made if it is not there."""
    tried = []
    for folder in _folders(env):
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
        if is_private(folder):
            return folder
        tried.append(str(folder))
    raise ConfigError(
        f"{' and '.join(tried)} cannot be made, or others can enter it: "
        f"name a folder that is yours alone (mode 700) by {RUNTIME}"
    )


def _read(file: Path) -> PortSecrets | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=PortSecrets)
    except (OSError, msgspec.MsgspecError, ValueError):
        return None


def is_own_process(pid: int) -> bool:
    """Whether this user has a process of that number now."""
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError):  # gone, or another user's by now
        return False
    return pid > 0


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Of all that publish, so that nobody takes what another has just put there for a dead one's."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _forget_the_dead(folder: Path) -> None:
    """A process that was killed has withdrawn nothing."""
    for file in folder.glob("*.json"):
        if (found := _read(file)) is None or not is_own_process(found.pid):
            with suppress(OSError):
                file.unlink()
