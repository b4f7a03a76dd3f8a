"""A syncer's address: where it is reached, and what a client shows and checks there. One line of text, the join link.

    atoll://TOKEN@HOST:PORT,HOST:PORT/RUN/FINGERPRINT     TLS 1.3, by the fingerprint of its certificate
    atoll://TOKEN@HOST:PORT/RUN/FINGERPRINT,FINGERPRINT   the same, by that of the one that follows it too
    atoll://TOKEN@HOST:PORT/RUN/ca                        TLS 1.3, by an authority (ATOLL_CA, or this machine's own)
    atoll://HOST:PORT/RUN                                 in the clear: this machine alone
    http://HOST:PORT,http://HOST:PORT                     the same, without a run

An address without a token shows the secret that a syncer of the same user published for its port (`local_secrets`).
Nothing in it means a thing to a shell or a chat. Beside it, the environment may name files and an HTTP proxy. ATOLL_CA,
ATOLL_CERT and ATOLL_KEY (mutual TLS); ATOLL_PROXY, without it HTTPS_PROXY, for what is not this machine and not in
NO_PROXY. A proxy is only asked to pass TLS on: what goes in the clear never goes there, nor a token.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import msgspec

from atoll.fabric.local_secrets import secret_for
from atoll.fabric.tls import client_context
from atoll.fabric.wire import one_line
from atoll.protocol.errors import ConfigError

SCHEME = "atoll://"
BY_AUTHORITY = "ca"
RUN_HEADER = "Atoll-Run"

_LINK = re.compile(
    r"atoll://(?:(?P<token>[A-Za-z0-9_-]{16,128})@)?(?P<hosts>[^/@\s]+)"
    r"(?:/(?P<run>[A-Za-z0-9._-]{0,64})(?:/(?P<pin>[0-9a-fA-F]{64}(?:,[0-9a-fA-F]{64}){0,3}|ca))?)?/?"
)


_HOST = re.compile(r"[A-Za-z0-9._:%-]+")


class SyncerAddress(msgspec.Struct, frozen=True, kw_only=True):
    urls: tuple[str, ...]
    run: str = ""
    token: str = ""
    pin: str = ""
    """SHA-256 of the syncer's certificate, in hex, or of several with commas between them; `ca`: by an authority."""
    authority: str = ""
    certificate: str = ""
    key: str = ""
    proxy: str = ""

    def __repr__(self) -> str:
        """A secret is in no log, wherever this is printed."""
        return f"SyncerAddress({', '.join(self.urls)}, run={self.run!r}, token={'…' if self.token else None})"

    @property
    def private(self) -> bool:
        """Whether somebody has to show something to get in."""
        return bool(self.token or self.pin)

    def headers_for(self, url: str) -> dict[str, str]:
        """What a request shows: to the syncer's own addresses, and to nobody else."""
        if _origin(url) not in map(_origin, self.urls):
            return {}
        token = self.token
        if not token and not self.pin:
            _, host, port = _origin(url)
            token = secret_for(host, port, urlsplit(url).path)
        shown = {"Authorization": f"Bearer {token}"} if token else {}
        return {**shown, RUN_HEADER: self.run} if self.run else shown

    def address_of_shard(self, link: str) -> SyncerAddress:
        """Of another shard of this syncer, from what the lead says of it: by the same token, if it goes there by TLS
        too. ConfigError: it is no address that one may dial."""
        shard = parse_address(link)
        return msgspec.structs.replace(shard, token=self.token) if shard.pin and not shard.token else shard

    @property
    def proxy_shown(self) -> str:
        """Its address alone: its password is in no log either."""
        parts = urlsplit(self.proxy)
        return host_port(parts.hostname or "", parts.port or 0) if self.proxy else ""

    @property
    def through(self) -> str:
        """For the end of a complaint."""
        return f" (through the proxy {self.proxy_shown})" if self.proxy else ""

    def context(self) -> ssl.SSLContext | None:
        """None: in the clear."""
        if not self.pin:
            return None
        return client_context(
            "" if self.pin == BY_AUTHORITY else self.pin,
            _path(self.authority),
            _path(self.certificate),
            _path(self.key),
        )

    def link(self) -> str:
        """As a person hands it on."""
        hosts = ",".join(url.partition("://")[2] for url in self.urls)
        return f"{SCHEME}{self.token + '@' if self.token else ''}{hosts}/{self.run}{'/' + self.pin if self.pin else ''}"


def parse_address(text: str, env: Mapping[str, str] = os.environ) -> SyncerAddress:
    """What a join link, or plain addresses with commas between them, name."""
    text = text.strip()
    if text == SCHEME:  # see `entry`: it was on a command line, where everybody could read it
        text = env.get("ATOLL_LINK", "").strip()
    if not text.startswith(SCHEME):
        return SyncerAddress(urls=tuple(checked_url(one) for one in text.split(",")))
    found = _LINK.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"{without_secrets(text)!r} is no join link: it looks like atoll://TOKEN@HOST:7077/RUN/FINGERPRINT, "
            "as atoll syncer prints it"
        )
    pin = (found["pin"] or "").lower()
    urls = tuple(_url(host, secure=bool(pin)) for host in found["hosts"].split(","))
    return SyncerAddress(
        urls=urls,
        run=found["run"] or "",
        token=found["token"] or "",
        pin=pin,
        authority=env.get("ATOLL_CA", ""),
        certificate=env.get("ATOLL_CERT", ""),
        key=env.get("ATOLL_KEY", ""),
        proxy=_proxy(urls, env) if pin else "",
    )


def _proxy(urls: tuple[str, ...], env: Mapping[str, str]) -> str:
    """ATOLL_PROXY is meant for us; HTTPS_PROXY is everybody's, with its exceptions."""
    if own := env.get("ATOLL_PROXY", ""):
        return _checked_proxy("ATOLL_PROXY", own)
    common = env.get("https_proxy") or env.get("HTTPS_PROXY") or ""
    spared = env.get("no_proxy") or env.get("NO_PROXY") or ""
    hosts = [urlsplit(url).hostname or "" for url in urls]
    if not common or all(is_loopback(host) or _spared(host, spared) for host in hosts):
        return ""
    return _checked_proxy("HTTPS_PROXY", common)


def _spared(host: str, exceptions: str) -> bool:
    """Names, ends of names, addresses and networks, with commas between them; a star for all."""
    words = [word.strip().lower().removeprefix(".") for word in exceptions.split(",")]
    return any(
        word == "*" or host == word or host.endswith(f".{word}") or _within(host, word) for word in words if word
    )


def _within(host: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def _checked_proxy(name: str, value: str) -> str:
    parts = urlsplit(value if "://" in value else f"http://{value}")
    try:
        good = parts.scheme == "http" and bool(parts.hostname and parts.port)
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"{name} is no address of an HTTP proxy: it looks like http://proxy.example.org:3128")
    return parts.geturl()


def checked_url(url: str) -> str:
    """http://HOST:PORT without a path, on this machine; ConfigError otherwise."""
    parts = _parts(url)
    if parts is None or parts.scheme != "http" or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ConfigError(f"{without_secrets(url)!r} is no address of a syncer: it looks like http://127.0.0.1:7077")
    if not is_loopback(parts.hostname or ""):
        shown = without_secrets(url)
        raise ConfigError(f"{shown} is another machine, and this would go there in the clear: use its join link")
    # By a name, a request could reach ::1, where another user may listen.
    return f"http://{host_port(address_of_name(parts.hostname or ''), parts.port or 0)}"


def address_of_name(host: str) -> str:
    """`localhost` is one address here, on both sides of a connection."""
    return "127.0.0.1" if host == "localhost" else host


@lru_cache(maxsize=256)  # every request is asked for by a host
def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(host: str, *, secured: bool) -> None:
    """ConfigError for an address that another machine could reach, unless it is secured."""
    if not secured and not is_loopback(host):
        raise ConfigError(
            f"binding to {host} lets other machines in, and that needs TLS and a token: make both with `atoll cert`, "
            "then start with --keys, or bind to 127.0.0.1"
        )


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def without_secrets(text: str) -> str:
    """An address or a link as it may be shown: nothing in it that could be a token, wherever it slipped to."""
    return re.sub(r"[A-Za-z0-9_-]{16,}", "…", re.sub(r"//[^@]*@", "//…@", one_line(text)))[:120]


def _url(host: str, *, secure: bool) -> str:
    if not secure:
        return checked_url(f"http://{host}")
    parts = _parts(f"https://{host}")
    if parts is None or parts.netloc != host:
        raise ConfigError(f"{without_secrets(host)!r} in the join link is no HOST:PORT")
    return f"https://{host}"


def _parts(url: str) -> SplitResult | None:
    """None for what is no address of a port: nothing but the letters of one is in it, and nobody's name."""
    try:
        parts = urlsplit(url)
        good = parts.port and _HOST.fullmatch(parts.hostname or "") and parts.username is None
    except ValueError:
        return None
    return parts if good else None


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _path(name: str) -> Path | None:
    return Path(name) if name else None
