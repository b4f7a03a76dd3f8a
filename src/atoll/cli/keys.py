"""`atoll cert` and `atoll tokens`: what a run needs that leaves its machine."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Annotated, get_args

import msgspec
import typer
from rich.console import Console

from atoll.cli.app import OPERATOR, app, short
from atoll.fabric.certificates import Pair, fingerprint, is_host, make_authority, make_client, make_server
from atoll.fabric.tokens import RANKS, Role, Token, Tokens, new_secret
from atoll.fabric.way import Way
from atoll.observe.figures import span
from atoll.observe.tables import table
from atoll.protocol.errors import ConfigError
from atoll.store.keys import FOLDER, KeyDir
from atoll.store.rundir import checked_name
from atoll.syncer.doors import read_tokens, write_tokens

tokens_app = typer.Typer(help="Who may join a run: list, add, revoke, while it goes on.", no_args_is_help=False)
app.add_typer(tokens_app, name="tokens", invoke_without_command=True)

Keys = Annotated[Path, typer.Option(help="The folder that atoll cert made.", metavar="DIR", envvar="ATOLL_KEYS")]
LONGEST_HOURS = 24 * 3650.0
LAST = "last.json"
"""In the folder of keys: where the syncer that used them last can be reached. No secret."""


class Last(msgspec.Struct, frozen=True):
    hosts: tuple[str, ...]
    run: str
    pin: str


@app.command()
def cert(
    out: Annotated[Path, typer.Option(help="Where the keys go.", metavar="DIR")] = FOLDER,
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address the syncer is reached by; several times for more.")
    ] = None,
    days: Annotated[float, typer.Option(help="How long the certificate counts.")] = 365.0,
    ca: Annotated[bool, typer.Option("--ca", help="With an authority of its own, for --learner.")] = False,
    learner: Annotated[
        str | None, typer.Option(help="A certificate for this learner (mutual TLS).", metavar="NAME")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace keys that lie there, and old links.")] = False,
) -> None:
    """Make what a run needs to leave this machine: a certificate and a first token.

    Examples:

      atoll cert

      atoll cert --ca --host syncer.example.org && atoll cert --learner learner-0
    """
    if not 0 < days <= 3650:
        raise ConfigError(f"--days {days:g} is not from 0 to 3650")
    console = Console(highlight=False, soft_wrap=True)
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
    pair = make_server(_hosts(host or []), days, authority)
    _write(keys, keys.certificate, keys.key, pair)
    write_tokens(keys, Tokens([_new("join"), _new("operator", role="operator")]))
    console.print(f"keys in {short(keys.path)}, for {days:g} days; fingerprint {fingerprint(pair.certificate)[:16]}…")
    console.print(f"next: atoll syncer --bind 0.0.0.0 --keys {short(keys.path)}")


@tokens_app.callback()
def list_tokens(context: typer.Context, keys: Keys = FOLDER) -> None:
    """Who may join, and until when.

    Examples:

      atoll tokens

      atoll tokens add eu --learner 'eu-*' --most 4 --hours 24

      atoll tokens revoke eu
    """
    context.obj = keys
    if context.invoked_subcommand is not None:
        return
    now = time.time()
    made = table("tokens", "name", "role", "learners", "at once", "counts", words=5)
    for token in read_tokens(KeyDir.open(keys)).all:
        left = "never ends" if not token.expires else f"for {span(max(0.0, token.expires - now))}"
        state = "revoked" if token.revoked else "expired" if token.refuses(now) else left
        made.add_row(token.id, token.role, token.learner or "any", str(token.most or "any number"), state)
    Console().print(made)


@tokens_app.command()
def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What it is called; no secret.")],
    role: Annotated[str, typer.Option(help="viewer, learner or operator.")] = "learner",
    learner: Annotated[str, typer.Option(help="Only for this learner, or with a star at the end for a group.")] = "",
    most: Annotated[int, typer.Option(help="So many learners at once; 0: any number.")] = 0,
    hours: Annotated[float, typer.Option(help="How long it counts; 0: until it is revoked.")] = 0.0,
) -> None:
    """One token more; its join link is printed.

    Example:

      atoll tokens add anna --learner anna-laptop --hours 48
    """
    if role not in RANKS:
        raise ConfigError(f"--role {role} is none of {', '.join(get_args(Role))}")
    if most < 0 or not 0 <= hours <= LONGEST_HOURS:
        raise ConfigError(f"--most is 0 or more, --hours from 0 to {LONGEST_HOURS:g}")
    keys = KeyDir.open(context.obj)
    token = _new(checked_name(name), role=role, learner=learner, most=most, hours=hours)
    write_tokens(keys, read_tokens(keys).added(token))
    _print_link(keys, token)


@tokens_app.command()
def revoke(context: typer.Context, name: Annotated[str, typer.Argument(help="Which.")]) -> None:
    """One token less: whoever came by it is sent away within seconds.

    Example:

      atoll tokens revoke anna
    """
    keys = KeyDir.open(context.obj)
    write_tokens(keys, read_tokens(keys).without(name))
    Console(highlight=False).print(f"{name} is revoked; a syncer that goes on sees it within two seconds")


@tokens_app.command()
def link(context: typer.Context, name: Annotated[str, typer.Argument(help="Which.")] = "join") -> None:
    """The join link of a token, again. It is a secret: whoever has it can join.

    Example:

      atoll tokens link eu
    """
    keys = KeyDir.open(context.obj)
    _print_link(keys, read_tokens(keys).named(name))


def join_link(last: Last, token: Token) -> str:
    urls = tuple(f"{'https' if last.pin else 'http'}://{host}" for host in last.hosts)
    return Way(urls=urls, run=last.run, token=token.secret, pin=last.pin).link()


def remember(keys: KeyDir, last: Last) -> None:
    keys.write(keys.path / LAST, msgspec.json.encode(last))


def _print_link(keys: KeyDir, token: Token) -> None:
    try:
        last = msgspec.json.decode((keys.path / LAST).read_bytes(), type=Last)
    except (OSError, msgspec.MsgspecError):
        print(f"{token.id} counts; its link is printed by atoll tokens link {token.id} once a syncer was started")
        return
    print(join_link(last, token))


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


def _new(name: str, *, role: str = "learner", learner: str = "", most: int = 0, hours: float = 0.0) -> Token:
    expires = time.time() + 3600 * hours if hours else 0.0
    document = {"role": role, "learner": learner, "most": most, "expires": expires}
    return msgspec.convert({"id": name, "secret": new_secret(), **document}, Token)


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
