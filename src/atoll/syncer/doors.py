"""What a syncer's keys make of its port: TLS, and tokens that may change while it goes on."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atoll.config import Service
from atoll.fabric.guard import Guard, TokenDoor
from atoll.fabric.tls import server_context
from atoll.fabric.tokens import Token, Tokens
from atoll.protocol.errors import ConfigError
from atoll.store.keys import KeyDir

Say = Callable[[str, str], None]
"""An event's kind and text."""
LOOK_S = 0.5
"""Between two looks at the file of tokens."""


@dataclass(frozen=True, slots=True)
class Doors:
    guard: Guard | None = None
    tls: ssl.SSLContext | None = None


def doors_of(service: Service, run: Callable[[], str], say: Say = lambda kind, text: None) -> Doors:
    """None of both without keys. Behind a proxy that ends TLS, tokens alone: then only this machine is listened to.
    `say`: what the operator should know of either."""
    if not service.keys:
        return Doors()
    keys = KeyDir.open(Path(service.keys))
    guard = TokenDoor(LiveTokens(keys), run, lambda text: say("warning", text))
    if service.front:
        return Doors(guard)
    authority = keys.authority if service.mutual else None
    if authority is not None and not authority.is_file():
        raise ConfigError(f"mutual TLS needs an authority, and {keys.path} has none: make it with `atoll cert --ca`")
    return Doors(guard, server_context(keys.certificate, keys.key, authority))


def read_tokens(keys: KeyDir) -> Tokens:
    try:
        return Tokens(msgspec.json.decode(keys.tokens.read_bytes(), type=list[Token]))
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"{keys.tokens} cannot be read: {error}") from error


def write_tokens(keys: KeyDir, tokens: Tokens) -> None:
    keys.write(keys.tokens, msgspec.json.format(msgspec.json.encode(tokens.all)))


class LiveTokens:
    """As the file says now, or said before it could not be read."""

    def __init__(self, keys: KeyDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys, self._clock = keys, clock
        self._looked_at, self._stamp = clock(), _stamp(keys.tokens)
        self._tokens = read_tokens(keys)

    def __call__(self) -> Tokens:
        now = self._clock()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            if (stamp := _stamp(self._keys.tokens)) != self._stamp:
                self._look(stamp)
        return self._tokens

    def _look(self, stamp: tuple[int, int]) -> None:
        try:
            self._tokens, self._stamp = read_tokens(self._keys), stamp
        except ConfigError:
            return  # it is tried again: what was good stays good


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_ino)
