"""A certificate that is renewed while its syncer runs.

Rules:
- once the files have changed, new handshakes use the new pair; open connections stay as they are;
- a pair is used when it is complete: the key matches, only its owner can read it, and the certificate is valid today.
  Until then the pair before it stays. The two files are written one after the other, so a mismatch is logged only when
  it lasts, and once;
- the folder must still be one that nobody else can change, and hold no file of another user;
- a new authority of the learners' certificates is logged;
- a certificate that expires soon is logged once a day.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

from atoll.fabric.certificates import days_left, short_fingerprint
from atoll.fabric.join_tokens import FEW_DAYS
from atoll.fabric.tls import first_certificate, server_context
from atoll.protocol.errors import ConfigError
from atoll.store.keys import RELOAD_S, KeyDir, LastingTrouble, Stamp, check_folder, check_private, stamp
from atoll.syncer.credentials import DAY_S


@dataclass(frozen=True, slots=True)
class LoadedPair:
    """A certificate and its key, checked and loaded."""

    context: ssl.SSLContext
    certificate: bytes
    """In DER."""
    authority: bytes = b""
    """Of the learners' certificates (ca.crt), as it was read; empty: none is asked for."""


def ends_soon(days: float) -> str:
    """What the operator should do about a certificate that expires in so many days; empty: nothing yet."""
    if days >= FEW_DAYS:
        return ""
    when = "has expired, and nobody can dial anew" if days <= 0 else f"ends in {_span(days)}"
    return f"the syncer's certificate {when}: renew it (docs/security.md, atoll cert --renew)"


def read_pair(keys: KeyDir, *, mutual: bool) -> LoadedPair:
    """Load the pair. ConfigError: it cannot be used."""
    try:
        check_folder(keys.path)  # it may have been renamed, and another put in its place
        check_private(keys.key)
        context = server_context(keys.certificate, keys.key, keys.authority if mutual else None)
        authority = keys.authority.read_bytes() if mutual else b""
        return LoadedPair(context, first_certificate(keys.certificate), authority)
    except (OSError, ValueError) as error:  # it was deleted or rewritten since it was read a moment ago
        raise ConfigError(f"{keys.certificate} cannot be read: {error}") from error


class LiveTls:
    """The TLS context of the files as of now, or of the last pair that could be used."""

    def __init__(
        self,
        keys: KeyDir,
        say: Callable[[str, str], None] = lambda kind, text: None,
        *,
        mutual: bool = False,
        clock: Callable[[], float] = time.monotonic,
        days: Callable[[bytes], float] = days_left,
    ) -> None:
        self._keys, self._say, self._mutual, self._clock, self._days = keys, say, mutual, clock, days
        self._looked_at, self._stamps = clock(), self._stamps_now()
        self._shown = read_pair(keys, mutual=mutual)
        self._trouble = LastingTrouble()
        self._told_end_at: float | None = None

    def __call__(self) -> ssl.SSLContext:
        """For the next handshake."""
        now = self._clock()
        if now - self._looked_at >= RELOAD_S:
            self._looked_at = now
            if (stamps := self._stamps_now()) != self._stamps:
                self._reload_pair(now, stamps)
            self._warn_of_expiry(now)
        return self._shown.context

    def describe_expiry(self) -> str:
        """What the operator should do; empty: nothing."""
        return ends_soon(self._days(self._shown.certificate))

    def _reload_pair(self, now: float, stamps: tuple[Stamp, ...]) -> None:
        try:
            found = read_pair(self._keys, mutual=self._mutual)
        except ConfigError as error:
            if self._trouble.is_news(now):
                why = f"the certificate that was put there is not taken, and the one before stays: {error}"
                self._say("warning", why)
            return
        if self._stamps_now() != stamps:
            return  # written while it was read: the next check sees the rest
        renewed = found.certificate != self._shown.certificate
        if found.authority != self._shown.authority:
            self._say("renewed", f"learners' certificates are checked by the new authority in {self._keys.authority}")
        self._shown, self._stamps = found, stamps
        self._trouble.clear()
        if renewed:
            self._told_end_at = None
            left = _span(self._days(found.certificate))
            self._say(
                "renewed",
                f"the syncer shows a new certificate, {short_fingerprint(found.certificate)}, which counts for {left}",
            )

    def _warn_of_expiry(self, now: float) -> None:
        if (self._told_end_at is None or now - self._told_end_at >= DAY_S) and (text := self.describe_expiry()):
            self._told_end_at = now
            self._say("warning", text)

    def _stamps_now(self) -> tuple[Stamp, ...]:
        files = (self._keys.certificate, self._keys.key, *([self._keys.authority] if self._mutual else []))
        return tuple(stamp(file) for file in files)


def _span(days: float) -> str:
    return f"{days:.0f} days" if days >= 2 else f"{24 * days:.0f} hours"
