"""`atoll tokens` and join links: who may join a run that leaves its machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, get_args

import msgspec
from rich.console import Console

from atoll.fabric.address import BY_AUTHORITY, SyncerAddress
from atoll.fabric.certificates import fingerprint
from atoll.fabric.join_tokens import NAMES, Role, Token, new_secret
from atoll.observe.figures import span, table
from atoll.protocol.errors import ConfigError
from atoll.store.keys import KeyDir
from atoll.store.rundir import RunDir, checked_name
from atoll.syncer.credentials import local_tokens, read_tokens, write_tokens

LONGEST_HOURS = 24 * 3650.0
LAST = "last.json"
"""In the folder of keys: where the syncer that used them last can be reached. No secret."""


class Last(msgspec.Struct, frozen=True):
    hosts: tuple[str, ...]
    run: str
    pin: str
    front: str = ""
    """The certificate of a proxy in front, whose fingerprint links name then."""


def list_tokens(keys: Path) -> None:
    now = time.time()
    made = table("tokens", "name", "role", "learners", "at once", "names ever", "counts", words=6)
    for token in read_tokens(KeyDir.open(keys)).all:
        left = "never ends" if not token.expires else f"for {span(max(0.0, token.expires - now))}"
        state = "revoked" if token.revoked else "expired" if token.refuses(now) else left
        most = str(token.most or "any number")
        made.add_row(token.id, token.role, token.learner or "any", most, f"{token.names:,}", state)
    Console().print(made)


def add(keys: Path, name: str, role: str, learner: str, most: int, names: int, hours: float) -> None:
    if role not in get_args(Role):
        raise ConfigError(f"--role {role} is none of {', '.join(get_args(Role))}")
    _check_numbers(most, names, hours)
    folder = KeyDir.open(keys)
    token = new_token(checked_name(name), role=role, learner=learner, most=most, names=names, hours=hours)
    write_tokens(folder, read_tokens(folder).added(token))
    _print_link(folder, token)


def change_token(keys: Path, name: str, most: int | None, names: int | None, hours: float | None) -> None:
    _check_numbers(most or 0, NAMES if names is None else names, hours or 0.0)
    asked: dict[str, Any] = {"most": most, "names": names}
    changes = {key: value for key, value in asked.items() if value is not None}
    if hours is not None:
        changes["expires"] = _expires(hours)
    if not changes:
        raise ConfigError("nothing to change: name --most, --names or --hours")
    folder = KeyDir.open(keys)
    write_tokens(folder, read_tokens(folder).with_changed(name, **changes))
    Console(highlight=False).print(f"{name} is changed; a syncer that goes on sees it within two seconds")


def revoke(keys: Path, name: str) -> None:
    folder = KeyDir.open(keys)
    write_tokens(folder, read_tokens(folder).without(name))
    Console(highlight=False).print(f"{name} is revoked; a syncer that goes on sees it within two seconds")


def link(keys: Path, name: str, ca: bool, run: Path | None) -> None:
    if run is not None:
        print(local_link(RunDir(run.absolute()), name))
        return
    folder = KeyDir.open(keys)
    _print_link(folder, read_tokens(folder).named(name), by_authority=ca)


def join_link(last: Last, token: Token) -> str:
    urls = tuple(f"{'https' if last.pin else 'http'}://{host}" for host in last.hosts)
    return SyncerAddress(urls=urls, run=last.run, token=token.secret, pin=last.pin).link()


def local_link(run: RunDir, name: str) -> str:
    """Of a run that has no keys, on its own machine."""
    if not run.secrets.is_dir() or not run.address.is_file():
        raise ConfigError(
            f"{run.path} has no secrets of its own: they are made when a syncer without --keys starts; "
            f"with --keys the link is that of atoll tokens --keys DIR link {name}"
        )
    token = local_tokens(run.secrets).named(name)
    return SyncerAddress(urls=(run.address.read_text(),), token=token.secret).link()


def remember(keys: KeyDir, last: Last) -> None:
    keys.write(keys.path / LAST, msgspec.json.encode(last))


def pins_of(keys: KeyDir, front: str = "") -> str:
    """The fingerprints that a link names: of the certificate that is shown, and of the one that is to follow it."""
    shown = Path(front) if front else keys.certificate
    follows = [] if front or not keys.next_certificate.is_file() else [keys.next_certificate]
    try:
        return ",".join(fingerprint(file.read_bytes()) for file in (shown, *follows))
    except OSError as error:
        raise ConfigError(f"cannot read {shown}: {error.strerror}") from error


def _print_link(keys: KeyDir, token: Token, *, by_authority: bool = False) -> None:
    try:
        last = msgspec.json.decode((keys.path / LAST).read_bytes(), type=Last)
    except (OSError, msgspec.MsgspecError):
        print(f"{token.id} counts; its link is printed by atoll tokens link {token.id} once a syncer was started")
        return
    pin = BY_AUTHORITY if by_authority else pins_of(keys, last.front)
    print(join_link(msgspec.structs.replace(last, pin=pin), token))


def new_token(
    name: str, *, role: str = "learner", learner: str = "", most: int = 0, names: int = NAMES, hours: float = 0.0
) -> Token:
    document = {"role": role, "learner": learner, "most": most, "names": names, "expires": _expires(hours)}
    return msgspec.convert({"id": name, "secret": new_secret(), **document}, Token)


def _expires(hours: float) -> float:
    return time.time() + 3600 * hours if hours else 0.0


def _check_numbers(most: int, names: int, hours: float) -> None:
    if most < 0 or names < 1 or not 0 <= hours <= LONGEST_HOURS:
        raise ConfigError(f"--most is 0 or more, --names 1 or more, --hours from 0 to {LONGEST_HOURS:g}")
