"""`atoll relay`: one body for each round over a region's slow link."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from atoll.cli.advertised import own_host, with_port
from atoll.cli.keys import own_address, pins_of
from atoll.cli.shared import compile_kernels, short
from atoll.fabric.address import BY_AUTHORITY, SyncerAddress, check_bind, is_loopback, parse_address
from atoll.fabric.authorizer import host_name
from atoll.fabric.listener import Tls, check_port
from atoll.fabric.tls import server_context
from atoll.protocol.errors import ConfigError
from atoll.relay.process import RelayOptions, run_relay
from atoll.store.keys import KeyDir, read_link
from atoll.store.rundir import checked_name

MOST_PINS = 4
"""Fingerprints that a join link names."""


def relay(
    *,
    join: str | None,
    out: Path | None,
    name: str | None,
    host: str,
    port: int,
    keys: Path | None,
    advertise: list[str],
) -> None:
    if join is None:
        raise ConfigError(
            "which run? Name it by --join LINK (or ATOLL_JOIN), the link that atoll tokens add NAME --role relay prints"
        )
    address = parse_address(read_link(join, "--join (or ATOLL_JOIN)"))
    address.context()  # what cannot be used is said now
    if bool(address.pin) != bool(keys):
        raise ConfigError(
            "this syncer speaks TLS, and so does its relay: make a certificate with `atoll cert --out DIR` and name it "
            "by --keys DIR"
            if address.pin
            else "--keys go with a syncer that speaks TLS: this link names one in the clear, on this machine"
        )
    check_bind(host, secured=keys is not None)
    check_port(host, port, choose="--port 7172")
    advertise = advertise or [own_host_toward(address, host)]
    called = checked_name(name or _own_name())
    folder = KeyDir.open(keys) if keys is not None else None
    options = RelayOptions(
        address=address,
        name=called,
        out=(out or Path("atoll-relays") / called).absolute(),
        host=host,
        port=port,
        tls=_tls(folder),
        names=frozenset(host_name(one) or one for one in advertise),
        make_link=lambda opened, run: _link(address, folder, opened, run, advertise),
    )

    def ready(file: Path, run: str) -> None:
        console = Console()
        if (warning := warn_of_loopback(host, advertise)) and not is_loopback(urlsplit(address.urls[0]).hostname or ""):
            console.print(warning, style="yellow", soft_wrap=True, highlight=False)
        console.print(f"relay {called} for run {run}, in {short(options.out)}", soft_wrap=True, highlight=False)
        secret = " (a secret: whoever has it can join)" if address.private else ""
        console.print(f"learners join with: atoll learn SCRIPT --join {short(file)}{secret}", soft_wrap=True)

    compile_kernels(Console())
    if code := run_relay(options, ready):
        raise SystemExit(code)


def own_host_toward(address: SyncerAddress, bound: str) -> str:
    """Return the host that links to this relay name: without a default route, the one that it reaches its syncer by."""
    if bound not in ("0.0.0.0", "::") or own_address() is not None:
        return own_host(bound)
    parts = [urlsplit(url) for url in address.urls]
    found = [own_address(one.hostname or "", one.port or 443) for one in parts]
    return next((host for host in found if host and not is_loopback(host)), "127.0.0.1")


def warn_of_loopback(bound: str, advertise: Sequence[str]) -> str:
    """Return a warning where the link leads other machines to themselves; empty: it does not."""
    if bound not in ("0.0.0.0", "::") or any(not is_loopback(host_name(one) or one) for one in advertise):
        return ""
    return "atoll: this machine's address is not known, so the link names 127.0.0.1: add --advertise HOST"


def _own_name() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"relay-{socket.gethostname()}")[:48]


def _tls(keys: KeyDir | None) -> Tls | None:
    if keys is None:
        return None
    context = server_context(keys.certificate, keys.key)

    def current() -> ssl.SSLContext:
        return context

    return current


def _link(address: SyncerAddress, keys: KeyDir | None, port: int, run: str, advertise: list[str]) -> str:
    """The relay first, then the syncer itself: that is where learners go while the relay is away."""
    named = [with_port(one, port) for one in advertise]
    scheme, pin = "http", ""
    if keys is not None:
        scheme, pin = "https", address.pin
        if pin != BY_AUTHORITY:
            pins = dict.fromkeys([*pins_of(keys).split(","), *pin.split(",")])
            pin = ",".join(list(pins)[:MOST_PINS])
    urls = tuple(f"{scheme}://{one}" for one in named) + address.urls
    if not address.private:
        return ",".join(urls)
    return SyncerAddress(urls=urls, run=address.run or run, token=address.token, pin=pin).link()
