"""Who answers at each address of a link: through which proxy, with which certificate, and what TLS costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll.fabric.address import BY_AUTHORITY, SyncerAddress
from atoll.fabric.certificates import FEW_DAYS, days_left
from atoll.fabric.dial import Dialled, dial
from atoll.observe.doctor.check import Check, brief
from atoll.observe.figures import listing
from atoll.protocol.errors import Unreachable

DEADLINE_S = 5.0
RECORD = 16384
"""Bytes that TLS encrypts at a time."""
CIPHER_S = 0.1
"""How long the cipher is measured."""
SLOW_HANDSHAKE_S = 1.0
ENOUGH = 4 << 20
"""Fewer bytes say nothing of what a gigabyte costs."""


@dataclass(frozen=True, slots=True)
class Address:
    url: str
    dialled: Dialled | None
    trouble: str = ""

    @property
    def shown(self) -> str:
        return self.url.partition("://")[2]


async def knock(address: SyncerAddress) -> list[Address]:
    """At every address, one after the other: each is timed alone."""
    found = []
    for url in address.urls:
        try:
            found.append(Address(url, await dial(address, url, DEADLINE_S)))
        except Unreachable as error:
            found.append(Address(url, None, str(error)))
    return found


def judge_addresses(address: SyncerAddress, found: Sequence[Address]) -> Check:
    there = [one for one in found if one.dialled is not None]
    figures: dict[str, Any] = {
        "proxy": address.proxy_shown,
        "addresses": [
            {"url": one.url, "reach_s": round(one.dialled.reach_s, 6)}
            if one.dialled is not None
            else {"url": one.url, "trouble": one.trouble}
            for one in found
        ],
    }
    answers = "; ".join(f"{one.shown} answers in {brief(one.dialled.reach_s)}" for one in there if one.dialled)
    silent = "; ".join(f"{one.shown}: {one.trouble}" for one in found if one.dialled is None)
    value = "; ".join(part for part in (answers, silent) if part) + (address.through if there else "")
    if not there:
        advice = "Is the run over, the port right, a firewall in between, the link of another run?"
        return Check("addresses", "fail", value, advice, figures)
    if len(there) < len(found):
        advice = "A standby answers once it serves; if there is none, the link names an address too many."
        return Check("addresses", "warn", value, advice, figures)
    return Check("addresses", "ok", value, figures=figures)


def judge_certificate(address: SyncerAddress, found: Sequence[Address]) -> Check:
    """Whoever answered has shown the right one: others are not spoken to."""
    there = [one for one in found if one.dialled is not None]
    known = (
        f"the fingerprint that the link names, {address.pin[:16]}…"
        if address.pin != BY_AUTHORITY
        else "by its authority"
    )
    left = min(days_left(one.dialled.certificate) for one in there if one.dialled is not None)
    value = f"{known}; counts for {left:.0f} more days"
    figures = {"pinned": address.pin != BY_AUTHORITY, "days_left": round(left, 2)}
    if left < FEW_DAYS:
        advice = "When it has expired nobody gets in: renew it while the run goes on (atoll cert --next, --renew)."
        return Check("certificate", "warn", value, advice, figures)
    return Check("certificate", "ok", value, figures=figures)


def clear(address: SyncerAddress) -> Check:
    """No TLS: then it is this machine, or `way_of` would have refused."""
    return Check(
        "certificate", "ok", f"none: {listing(address.urls)} is this machine, in the clear", figures={"tls": False}
    )


def judge_tls(dialled: Dialled, moved: int, cpu_s: float) -> Check:
    """Seconds of one core per gigabyte: what the cipher alone takes here, and what moving it takes in all."""
    rate = cipher_rate(dialled.cipher)
    figures: dict[str, Any] = {
        "cipher": dialled.cipher,
        "handshake_s": round(dialled.handshake_s, 6),
        "cipher_bytes_per_core_s": round(rate),
        "cipher_core_s_per_gb": round(1e9 / rate, 4),
    }
    value = f"handshake {brief(dialled.handshake_s)}; the cipher takes {1e9 / rate:.2f} s of a core per GB"
    if moved >= ENOUGH:
        figures["core_s_per_gb"] = round(1e9 * cpu_s / moved, 4)
        value += f", sending and receiving as a whole {1e9 * cpu_s / moved:.2f} s"
    if dialled.handshake_s > SLOW_HANDSHAKE_S:
        advice = "Only new connections pay for it, but a learner that comes back waits for two of them."
        return Check("TLS", "warn", value, advice, figures)
    return Check("TLS", "ok", value, figures=figures)


def cipher_rate(name: str, seconds: float = CIPHER_S) -> float:
    """Bytes a second that one core encrypts, in pieces as TLS does."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

    if "CHACHA20" in name:
        seal: AESGCM | ChaCha20Poly1305 = ChaCha20Poly1305(ChaCha20Poly1305.generate_key())
    else:
        seal = AESGCM(AESGCM.generate_key(256 if "256" in name else 128))
    nonce, record = bytes(12), bytes(RECORD)  # nobody gets to see what is sealed here
    done, begun = 0, time.process_time()
    while (took := time.process_time() - begun) < seconds:
        seal.encrypt(nonce, record, None)
        done += RECORD
    return done / took
