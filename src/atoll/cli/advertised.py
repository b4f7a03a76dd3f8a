"""Addresses that the join links of a syncer name, and which of them is this process."""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from atoll.cli.keys import own_address, pins_of, read_last
from atoll.config import Service
from atoll.fabric.address import SyncerAddress, host_port, is_loopback, parse_address
from atoll.store.keys import KeyDir


def name_hosts(service: Service, port: int) -> tuple[tuple[str, ...], str]:
    """Return what a join link says of a syncer: its addresses, and the fingerprint of the certificate they show."""
    pin = pins_of(KeyDir.open(Path(service.keys)), service.front)
    hosts = tuple(with_port(host, port) for host in service.advertise or (own_host(service.host),))
    parse_address(SyncerAddress(urls=tuple(f"https://{host}" for host in hosts), pin=pin).link(), {})
    return hosts, pin


def own_host(bound: str) -> str:
    return (own_address() or "127.0.0.1") if bound in ("0.0.0.0", "::") else bound


def with_port(host: str, port: int) -> str:
    named = re.search(r":\d+$", host) and (not host.count(":") > 1 or "]:" in host)
    return host if named else host_port(host, port)


def complete_ports(service: Service, port: int) -> Service:
    """Add the port of the run's first syncer to addresses without one: the links that learners hold name it."""
    return msgspec.structs.replace(service, advertise=tuple(with_port(host, port) for host in service.advertise))


def known_hosts(service: Service, port: int) -> tuple[str, ...]:
    """Return the addresses in the links that learners of the run hold already."""
    last = None if service.advertise else read_last(KeyDir.open(Path(service.keys)))
    return last.hosts if last is not None else name_hosts(service, port)[0]


def find_own_hosts(hosts: Sequence[str]) -> frozenset[str]:
    """Return the names and addresses among them that are this machine's. Asks a resolver, so it may take a while."""
    return frozenset(host for host in {_split(host)[0] for host in hosts} if _is_own(host))


def _is_own(host: str) -> bool:
    with suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)  # the kernel binds addresses of this machine alone
                return True
    return False


class Place(NamedTuple):
    """Where a syncer is found."""

    shown: str = ""
    """HOST:PORT for the terminal: the address of the links that is this process, or that leads to it."""
    remark: str = ""
    """Where it listens, if no address of the links is this process."""
    warns: bool = False
    """No learner finds it by the links."""


def find_place(service: Service, port: int, hosts: Sequence[str], own: Collection[str], *, goes_on: bool) -> Place:
    """Return where a syncer with keys is found. `own`: hosts of the links that are this machine. `goes_on`: the links
    were made by an earlier syncer, maybe elsewhere; those of a new run name what its operator has just typed."""
    if here := next((host for host in hosts if _is_here(host, port, own)), ""):
        return Place(here)
    listens = f"it listens on port {port} of this host; the links name {' and '.join(hosts)}"
    may_lead = f"{listens}: learners find it where one of these leads here"
    proxied = service.front or (is_loopback(service.host) and not any(is_loopback(_split(host)[0]) for host in hosts))
    if proxied or not goes_on:
        return Place(hosts[0], may_lead)
    shown = host_port(own_host(service.host), port)
    ports = [_split(host)[1] for host in hosts if _split(host)[0] in own]
    if not ports and port in (_split(host)[1] for host in hosts):
        return Place(shown, may_lead)
    advice = " or ".join(f"--port {named}" for named in dict.fromkeys(ports))
    advice = advice or "--advertise HOST:PORT, and hand out new links"
    return Place(shown, f"{listens}: no learner finds it there; add {advice}", warns=True)


def _is_here(host: str, port: int, own: Collection[str]) -> bool:
    return _split(host)[0] in own and _split(host)[1] == port


def _split(host: str) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    return parts.hostname or "", parts.port or 0
