"""Ports of this machine, and which network card the bytes of a run would take."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from urllib.parse import urlsplit

from atoll.observe.doctor.check import UNKNOWN, Check

SLOW_MBIT = 100
CARDS = Path("/sys/class/net")
ROUTES = Path("/proc/net/route")


def ports() -> Check:
    """A run on this machine listens on loopback."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=2.0):
                pass
    except OSError as error:
        advice = "A syncer must be able to listen on 127.0.0.1: look at the firewall or the sandbox."
        return Check("ports", "fail", f"127.0.0.1 cannot be used: {error.strerror or error}", advice)
    return Check("ports", "ok", "127.0.0.1 can be listened on and reached")


def card(url: str | None, cards: Path = CARDS, routes: Path = ROUTES) -> Check:
    """The one that reaches the syncer; without one, that of the default route."""
    if url is None:
        return judge_card(default_card(routes), None, cards)
    try:
        own = own_address(url)
    except OSError as error:
        where = urlsplit(url).hostname
        return Check("network card", "fail", f"no way to {where}: {error.strerror or error}", "Check the address.")
    return judge_card(_card_of(own, cards), own, cards)


def judge_card(name: str | None, own: str | None, cards: Path = CARDS) -> Check:
    if name is None:
        return Check("network card", "ok", f"{own}; which card that is, {UNKNOWN}" if own else "no default route")
    mbit = speed(cards / name / "speed")
    figures = {"card": name, "mbit_per_s": mbit, "address": own}
    told = f"{mbit:,} Mbit/s" if mbit else "loopback" if name == "lo" else "which does not tell its speed"
    value = f"{name}{f' ({own})' if own else ''}, {told}"
    if mbit is not None and mbit < SLOW_MBIT:
        advice = "atoll simulate bandwidth says what a link like this gives."
        return Check("network card", "warn", value, advice, figures)
    return Check("network card", "ok", value, figures=figures)


def speed(path: Path) -> int | None:
    """Mbit/s; virtual cards say -1 or nothing."""
    try:
        found = int(path.read_text())
    except (OSError, ValueError):
        return None
    return found if found > 0 else None


def default_card(routes: Path = ROUTES) -> str | None:
    try:
        rows = [line.split() for line in routes.read_text().splitlines()[1:]]
    except OSError:
        return None
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), None)


def own_address(url: str) -> str:
    """From which of our addresses the syncer is reached: a UDP socket knows without sending anything."""
    parts = urlsplit(url)
    family, kind, _, _, address = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _card_of(own: str, cards: Path) -> str | None:
    if own.startswith("127.") or own == "::1":
        return "lo"
    try:
        import fcntl
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == own:
                return name
    return None
