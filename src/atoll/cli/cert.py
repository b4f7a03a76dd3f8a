"""`atoll cert`: certificates for a run that leaves its machine, made and renewed."""

from __future__ import annotations

import socket
from pathlib import Path

from rich.console import Console

from atoll.cli.keys import new_token
from atoll.cli.shared import OPERATOR, short
from atoll.fabric.certificates import (
    Pair,
    fingerprint,
    hosts_of,
    is_host,
    make_authority,
    make_client,
    make_server,
    signs_itself,
)
from atoll.fabric.join_tokens import Tokens
from atoll.protocol.errors import ConfigError
from atoll.store.keys import KeyDir
from atoll.syncer.credentials import write_tokens


def cert(
    *,
    out: Path,
    host: list[str],
    days: float,
    ca: bool,
    learner: str | None,
    following: bool,
    renew: bool,
    force: bool,
) -> None:
    if not 0 < days <= 3650:
        raise ConfigError(f"--days {days:g} is not from 0 to 3650")
    if sum((learner is not None, following, renew, ca)) > 1:
        raise ConfigError("--ca, --learner, --next and --renew are one thing each: name one of them")
    console = Console(highlight=False, soft_wrap=True)
    if following or renew:
        keys = KeyDir.open(out)
        (_make_next if following else _renew)(keys, host, days, force, console)
        return
    keys = KeyDir.create(out)
    if learner is not None:
        _certify(keys, learner, days, console)
        return
    if keys.certificate.exists() and not force:
        raise ConfigError(f"{short(keys.path)} holds keys already: use them, or replace them with --force")
    authority = make_authority(max(days, 3650.0)) if ca else None
    if authority is not None:
        _write(keys, keys.authority, keys.authority_key, authority)
        _write(keys, *keys.of_learner(OPERATOR), make_client(OPERATOR, days, authority))
    pair = make_server(_hosts(host), days, authority)
    _write(keys, keys.certificate, keys.key, pair)
    write_tokens(keys, Tokens([new_token("join"), new_token("operator", role="operator")]))
    for old in (keys.next_certificate, keys.next_key):
        old.unlink(missing_ok=True)
    console.print(f"keys in {short(keys.path)}, for {days:g} days; fingerprint {fingerprint(pair.certificate)[:16]}…")
    console.print(f"next: atoll syncer --bind 0.0.0.0 --keys {short(keys.path)}")


def _make_next(keys: KeyDir, hosts: list[str], days: float, force: bool, console: Console) -> None:
    if keys.next_certificate.exists() and not force:
        raise ConfigError(f"{short(keys.next_certificate)} is there already: use it, or replace it with --force")
    pair = _successor(keys, hosts, days)
    _write(keys, keys.next_certificate, keys.next_key, pair)
    mark = fingerprint(pair.certificate)[:16]
    console.print(f"{short(keys.next_certificate)}, for {days:g} days; fingerprint {mark}…")
    console.print("links name both from now on: hand them out (atoll tokens link), then atoll cert --renew")


def _renew(keys: KeyDir, hosts: list[str], days: float, force: bool, console: Console) -> None:
    if keys.next_certificate.is_file():
        keys.renew()
        console.print("the certificate that was to follow is in its place; a syncer that goes on takes it in seconds")
        return
    if signs_itself(keys.certificate.read_bytes()) and not force:
        raise ConfigError(
            "links name the certificate that is there, and whoever has one could not dial anew: let them know of the "
            "next first (atoll cert --next), or replace it all the same with --force"
        )
    _write(keys, keys.certificate, keys.key, _successor(keys, hosts, days))
    console.print("the certificate is renewed; a syncer that goes on takes it in seconds")
    console.print("links that end with ca stay good; of those with a fingerprint there are new: atoll tokens link")


def _successor(keys: KeyDir, hosts: list[str], days: float) -> Pair:
    """For the names and addresses of the one that is there, and more."""
    before, authority = keys.certificate.read_bytes(), None
    if not signs_itself(before):
        if not keys.authority_key.is_file():
            raise ConfigError(
                f"{short(keys.certificate)} is of an authority that is not here: put another of it there, with its key"
            )
        authority = Pair(keys.authority.read_bytes(), keys.authority_key.read_bytes())
    return make_server(list(dict.fromkeys([*hosts_of(before), *hosts])), days, authority)


def _certify(keys: KeyDir, learner: str, days: float, console: Console) -> None:
    if not keys.authority_key.is_file():
        raise ConfigError(f"{short(keys.path)} has no authority to sign with: make it with `atoll cert --ca`")
    authority = Pair(keys.authority.read_bytes(), keys.authority_key.read_bytes())
    certificate, key = keys.of_learner(learner)
    _write(keys, certificate, key, make_client(learner, days, authority))
    files = f"{short(certificate)} and {short(key)}"
    console.print(f"{files}: give both to {learner}, for atoll learn --cert and --key")


def _write(keys: KeyDir, certificate: Path, key: Path, pair: Pair) -> None:
    keys.write(key, pair.key)
    keys.write(certificate, pair.certificate)


def _hosts(named: list[str]) -> list[str]:
    itself = socket.gethostname()
    found = [*named, *([itself] if is_host(itself) else []), "localhost", "127.0.0.1", "::1"]
    if (own := own_address()) is not None:
        found.append(own)
    return list(dict.fromkeys(found))


def own_address() -> str | None:
    """By which this machine reaches others. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
