"""By which names a port may be asked: the Host header of every request is checked.

A web page reads what its own host answers. Whoever runs a page can have its name lead to this machine (DNS rebinding),
and the browser then asks our port in the page's name, from inside. So a port answers only under names that are known
to be its own: loopback, the address that it listens on or was reached by, this machine's name, those that the operator
advertises, and those of the certificate.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

from atoll.fabric.address import is_loopback
from atoll.fabric.intake import Rejected
from atoll.fabric.wire import one_line


def check_host(said: Sequence[str], names: Collection[str]) -> None:
    """Rejected unless the one Host header of a request is loopback or among the names; any port may be said with it,
    since a relay in front has another."""
    host = host_name(said[0]) if len(said) == 1 else ""
    if not host or not (is_loopback(host) or any(_matches(host, name.lower()) for name in names)):
        shown = one_line(said[0])[:80] if said else ""
        raise Rejected(
            403,
            f"this syncer is not known as {shown!r}: ask for it by its own address, 127.0.0.1 on its machine; "
            "the operator adds a name with atoll syncer --advertise NAME",
        )


def host_name(said: str) -> str:
    """The name in HOST or HOST:PORT, in small letters; empty for what is none."""
    try:
        parts = urlsplit(f"//{said}")
        _ = parts.port  # ValueError for what is no number
    except ValueError:
        return ""
    return "" if parts.netloc != said or "@" in said else (parts.hostname or "").removesuffix(".")


def own_names() -> frozenset[str]:
    """What this machine calls itself. No resolver is asked."""
    name = socket.gethostname().lower()
    return frozenset({name, name.partition(".")[0]} - {""})


def _matches(host: str, name: str) -> bool:
    """A certificate's *.example.org is for one label."""
    return host == name or (name.startswith("*.") and host.partition(".")[2] == name[2:] and not host.startswith("."))
