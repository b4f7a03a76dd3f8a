"""What a syncer's keys make of its port: TLS, and tokens; both may change while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atoll.config import Service
from atoll.fabric.doorway import Tls
from atoll.fabric.guard import Guard, TokenDoor
from atoll.fabric.tokens import Token, Tokens
from atoll.protocol.errors import ConfigError
from atoll.store.keys import KeyDir, Stamp, check_private, stamp

Say = Callable[[str, str], None]
"""An event's kind and text."""
LOOK_S = 0.5
"""Between two looks at the files of tokens and certificates."""


@dataclass(frozen=True, slots=True)
class Doors:
    guard: Guard | None = None
    tls: Tls | None = None
    notice: Callable[[], str] = str
    """What the operator should see to; empty: nothing."""


def doors_of(service: Service, run: Callable[[], str], say: Say = lambda kind, text: None) -> Doors:
    """None of both without keys. Behind a proxy that ends TLS, tokens alone: then only this machine is listened to.
    `say`: what the operator should know of either."""
    if not service.keys:
        return Doors()
    keys = KeyDir.open(Path(service.keys))
    guard = TokenDoor(LiveTokens(keys), run, lambda text: say("warning", text))
    if service.front:
        return Doors(guard)
    if service.mutual and not keys.authority.is_file():
        raise ConfigError(f"mutual TLS needs an authority, and {keys.path} has none: make it with `atoll cert --ca`")
    from atoll.syncer.renewal import LiveTls  # what certificates need is large, and a run on one machine needs none

    tls = LiveTls(keys, say, mutual=service.mutual)
    return Doors(guard, tls, tls.notice)


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
        self._looked_at, self._stamp = clock(), stamp(keys.tokens)
        self._tokens = read_tokens(keys)

    def __call__(self) -> Tokens:
        now = self._clock()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            if (now_there := stamp(self._keys.tokens)) != self._stamp:
                self._look(now_there)
        return self._tokens

    def _look(self, found: Stamp) -> None:
        try:
            check_private(self._keys.tokens)
            self._tokens, self._stamp = read_tokens(self._keys), found
        except ConfigError:
            return  # it is tried again: what was good stays good
