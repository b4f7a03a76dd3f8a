"""Who may reach a syncer. For now: this machine alone, and no web page that happens to be open on it."""

from __future__ import annotations

import ipaddress

from atoll.protocol.errors import ConfigError


def check_loopback(host: str) -> None:
    """ConfigError for any address that another machine could reach."""
    if host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(f"binding to {host} needs the secure join that is not there yet: use 127.0.0.1")
