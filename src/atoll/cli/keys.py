"""`atoll tokens` and `atoll cert`: who may join a run that leaves its machine, by which link, and its certificates."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import Any, get_args

import msgspec
from rich.console import Console

from atoll.cli.shared import OPERATOR, document_of, short
from atoll.fabric.address import BY_AUTHORITY, SyncerAddress
from atoll.fabric.certificates import (
    CertificateAndKey,
    fingerprint,
    hosts_of,
    is_host,
    make_authority,
    make_client,
    make_server,
    signs_itself,
)
from atoll.fabric.join_tokens import NAMES, JoinToken, JoinTokens, Role, new_secret
from atoll.observe.figures import table
from atoll.protocol.errors import ConfigError
from atoll.store.keys import KeyDir
from atoll.store.rundir import RunDir, checked_name
from atoll.store.writer_lease import is_alive
from atoll.syncer.credentials import local_tokens, read_tokens, write_tokens

LONGEST_HOURS = 24 * 3650.0
YEAR_HOURS = 24 * 365.0
"""How long a token counts unless it is made for another time."""
WIDE = 400
"""Columns of a table that no terminal shows."""
LAST = "last.json"
"""In the folder of keys: where the syncer that used them last can be reached. No secret."""


class Last(msgspec.Struct, frozen=True):
    hosts: tuple[str, ...]
    run: str
    pin: str
    front: str = ""
    """The certificate of a proxy in front, whose fingerprint links name then."""


def list_tokens(keys: Path, json_: bool) -> None:
    if not json_:
        show_tokens(keys)
        return
    shown = [name for name in JoinToken.__struct_fields__ if name != "secret"]
    rows = [{name: getattr(token, name) for name in shown} for token in read_tokens(KeyDir.open(keys)).all]
    print(msgspec.json.encode(rows).decode())


def show_tokens(keys: Path) -> None:
    now = time.time()
    made = table("tokens", "name", "role", "learners", "at once", "names ever", "counts", words=6)
    for token in read_tokens(KeyDir.open(keys)).all:
        left = _until(token) if token.expires else "never ends"
        state = "revoked" if token.revoked else "expired" if token.refuses(now) else left
        most = str(token.most or "any number")
        made.add_row(token.id, token.role, token.learner or "any", most, f"{token.names:,}", state)
    Console(width=None if sys.stdout.isatty() else WIDE).print(made)  # in a pipe nothing is cut


def add(keys: Path, name: str, role: str, learner: str, most: int, names: int, hours: float) -> None:
    if role not in get_args(Role):
        raise ConfigError(f"--role {role} is none of {', '.join(get_args(Role))}")
    _check_numbers(most, names, hours)
    folder = KeyDir.open(keys)
    token = new_token(checked_name(name), role=role, learner=learner, most=most, names=names, hours=hours)
    write_tokens(folder, read_tokens(folder).added(token))
    _print_link(folder, token)
    if hours == YEAR_HOURS:
        print(f"atoll: {token.id} counts {_until(token)}; --hours names another time", file=sys.stderr)


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
    _print_changed(f"{name} is changed", folder)


def revoke(keys: Path, name: str) -> None:
    folder = KeyDir.open(keys)
    write_tokens(folder, read_tokens(folder).without(name))
    _print_changed(f"{name} is revoked", folder)


def _print_changed(what: str, folder: KeyDir) -> None:
    console, place = Console(highlight=False, soft_wrap=True), short(folder.path)
    console.print(f"{what} in {place}; a syncer that reads this folder sees it within two seconds", markup=False)
    copies = f"syncers and standbys with a copy of their own need it too: copy {short(folder.tokens)} there"
    console.print(f"{copies}, first to the one that serves (atoll status)", markup=False)


def link(keys: Path, name: str, ca: bool, run: Path | None) -> None:
    if run is not None:
        print(local_link(RunDir(run.absolute()), name))
        return
    folder = KeyDir.open(keys)
    token = read_tokens(folder).named(name)
    _check_counts(token)
    if not (folder.path / LAST).is_file():
        raise ConfigError(f"there is no link yet: no syncer was started with {short(folder.path)} (--keys)")
    _print_link(folder, token, by_authority=ca)


def _check_counts(token: JoinToken) -> None:
    """ConfigError: every syncer refuses a link with this token."""
    if token.refuses(time.time()):
        add = f"atoll tokens add NAME --role {token.role}"
        mend = f"make another: {add}" if token.revoked else f"atoll tokens change {token.id} --hours HOURS, or {add}"
        raise ConfigError(f"{token.refuses(time.time()).partition(':')[0]}, and nobody can join by its link: {mend}")


def join_link(last: Last, token: JoinToken) -> str:
    urls = tuple(f"{'https' if last.pin else 'http'}://{host}" for host in last.hosts)
    return SyncerAddress(urls=urls, run=last.run, token=token.secret, pin=last.pin).link()


def local_link(run: RunDir, name: str) -> str:
    """Of a run that has no keys, on its own machine."""
    if not run.path.is_dir():
        raise ConfigError(f"{run.path} holds no run: name the folder that --out made")
    if not run.secrets.is_dir() or not run.address.is_file():
        settings = document_of(run.settings if run.settings.is_file() else None)
        keys = settings.get("service", {}).get("keys")
        if not keys and is_alive(run.path):
            raise ConfigError(f"the run in {run.path} is starting, and nothing listens yet: ask again in a few seconds")
        raise ConfigError(
            f"{run.path} has no secrets of its own: they are made when a syncer without --keys starts; "
            f"with --keys the link is that of atoll tokens --keys {keys or 'DIR'} link {name}"
        )
    token = local_tokens(run.secrets).named(name)
    _check_counts(token)
    return SyncerAddress(urls=(run.address.read_text(),), token=token.secret).link()


def remember(keys: KeyDir, last: Last) -> None:
    keys.write(keys.path / LAST, msgspec.json.encode(last))


def read_last(keys: KeyDir) -> Last | None:
    """Return what was remembered; None: no syncer was started with these keys."""
    try:
        return msgspec.json.decode((keys.path / LAST).read_bytes(), type=Last)
    except (OSError, msgspec.MsgspecError):
        return None


def pins_of(keys: KeyDir, front: str = "") -> str:
    """The fingerprints that a link names: of the certificate that is shown, and of the one that is to follow it."""
    shown = Path(front) if front else keys.certificate
    follows = [] if front or not keys.next_certificate.is_file() else [keys.next_certificate]
    try:
        return ",".join(fingerprint(file.read_bytes()) for file in (shown, *follows))
    except OSError as error:
        raise ConfigError(f"cannot read {shown}: {error.strerror}") from error


def _print_link(keys: KeyDir, token: JoinToken, *, by_authority: bool = False) -> None:
    if (last := read_last(keys)) is None:
        print(f"{token.id} counts; its link is printed by atoll tokens link {token.id} once a syncer was started")
        return
    pin = BY_AUTHORITY if by_authority else pins_of(keys, last.front)
    print(join_link(msgspec.structs.replace(last, pin=pin), token))


def new_token(
    name: str, *, role: str = "learner", learner: str = "", most: int = 0, names: int = NAMES, hours: float = YEAR_HOURS
) -> JoinToken:
    document = {"role": role, "learner": learner, "most": most, "names": names, "expires": _expires(hours)}
    return msgspec.convert({"id": name, "secret": new_secret(), **document}, JoinToken)


def _expires(hours: float) -> float:
    """Return the moment so many hours from now; 0 hours: never."""
    return time.time() + 3600 * hours if hours else 0.0


def _until(token: JoinToken) -> str:
    return f"until {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(token.expires))}"


def _check_numbers(most: int, names: int, hours: float) -> None:
    if most < 0 or names < 1 or not 0 <= hours <= LONGEST_HOURS:
        raise ConfigError(f"--most is 0 or more, --names 1 or more, --hours from 0 to {LONGEST_HOURS:g}")


# ---- certificates, made and renewed ---------------------------------------------------------------------------------


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
    tokens = [new_token("join", hours=24 * days), new_token("operator", role="operator", hours=24 * days)]
    write_tokens(keys, JoinTokens(tokens))
    for old in (keys.next_certificate, keys.next_key):
        old.unlink(missing_ok=True)
    console.print(f"keys in {short(keys.path)}, for {days:g} days; fingerprint {fingerprint(pair.certificate)[:16]}…")
    console.print(f"the tokens join and operator count {_until(tokens[0])} (atoll tokens change join --hours)")
    at = f"--keys {short(keys.path)}"
    console.print(f"next: atoll syncer --bind 0.0.0.0 {at} (of a relay: atoll relay --join LINK --host 0.0.0.0 {at})")


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
            "join links name the present certificate, and learners that hold one could not connect again: announce the "
            "next certificate first (atoll cert --next), or replace it all the same with --force"
        )
    _write(keys, keys.certificate, keys.key, _successor(keys, hosts, days))
    console.print("the certificate is renewed; a syncer that goes on takes it in seconds")
    console.print("links that end with ca stay good; of those with a fingerprint there are new: atoll tokens link")


def _successor(keys: KeyDir, hosts: list[str], days: float) -> CertificateAndKey:
    """For the names and addresses of the one that is there, and more."""
    before, authority = keys.certificate.read_bytes(), None
    if not signs_itself(before):
        if not keys.authority_key.is_file():
            raise ConfigError(
                f"{short(keys.certificate)} was signed by an authority whose key is not here: put a new certificate of "
                "that authority there, with its key"
            )
        authority = CertificateAndKey(keys.authority.read_bytes(), keys.authority_key.read_bytes())
    return make_server(list(dict.fromkeys([*hosts_of(before), *hosts])), days, authority)


def _certify(keys: KeyDir, learner: str, days: float, console: Console) -> None:
    if not keys.authority_key.is_file():
        raise ConfigError(f"{short(keys.path)} has no authority to sign with: make it with `atoll cert --ca`")
    authority = CertificateAndKey(keys.authority.read_bytes(), keys.authority_key.read_bytes())
    certificate, key = keys.of_learner(learner)
    _write(keys, certificate, key, make_client(learner, days, authority))
    files = f"{short(certificate)} and {short(key)}"
    console.print(f"{files}: give both to {learner}, for atoll learn --cert and --key")


def _write(keys: KeyDir, certificate: Path, key: Path, pair: CertificateAndKey) -> None:
    keys.write(key, pair.key)
    keys.write(certificate, pair.certificate)


def _hosts(named: list[str]) -> list[str]:
    itself = socket.gethostname()
    found = [*named, *([itself] if is_host(itself) else []), "localhost", "127.0.0.1", "::1"]
    if (own := own_address()) is not None:
        found.append(own)
    return list(dict.fromkeys(found))


def own_address(toward: str = "192.0.2.1", port: int = 9) -> str | None:
    """Return the address by which this machine reaches another; None: it does not. Nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(toward, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return None
