"""Who stands at the door, and may they come in. Asked for every request, before anything else is read of it.

A syncer without tokens is for this machine alone, and lets everybody do everything there. One with tokens answers
nobody who shows none: 401 to strangers, 403 to those whose token is not for this. A link of another run is told so.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
from aiohttp import web

from atoll.fabric.intake import Rejected
from atoll.fabric.tokens import RANKS, Role, Token, Tokens
from atoll.fabric.way import RUN_HEADER
from atoll.protocol.errors import PeerError

OPERATOR_PATHS = frozenset({"/v1/settings", "/v1/drain"})
LEARNER_PATHS = ("/v1/control", "/v1/contributions/", "/v1/initial/", "/v1/relay/", "/v1/scores", "/v1/probe/")


class Visitor(msgspec.Struct, frozen=True):
    """Somebody who was let in."""

    token: str = ""
    """Its name; empty where there are none."""
    learner: str = ""
    most: int = 0


NOBODY = Visitor()
VISITOR = web.RequestKey("visitor", Visitor)
"""Where a request keeps who it is."""


class Guard(Protocol):
    def admit(self, request: web.Request) -> Visitor:
        """Rejected for whoever may not ask this."""
        ...

    def may_join(self, visitor: Visitor, learner: str, there: set[str]) -> None:
        """PeerError unless this visitor may take part under that name; `there`: learners that came by its token."""
        ...

    def gone(self, id: str) -> str:
        """Why a token that was shown counts no more; empty: it does."""
        ...


class OpenDoor:
    """This machine alone: everybody is its owner."""

    def admit(self, request: web.Request) -> Visitor:
        return NOBODY

    def may_join(self, visitor: Visitor, learner: str, there: set[str]) -> None:
        return None

    def gone(self, id: str) -> str:
        return ""


class TokenDoor:
    def __init__(self, tokens: Callable[[], Tokens], run: Callable[[], str]) -> None:
        self._tokens, self._run = tokens, run
        """Asked each time: tokens come and go while a run goes on."""

    def admit(self, request: web.Request) -> Visitor:
        secret = _shown(request)
        if not secret:
            raise Rejected(401, "this syncer asks for a token: join by its link (atoll learn --join LINK)")
        token = self._tokens().find(secret)
        if token is None:
            raise Rejected(401, "this token is not known here: is the join link of another run?")
        if reason := token.refuses(time.time()):
            raise Rejected(401, reason)
        needed = role_for(request.path)
        if RANKS[token.role] < RANKS[needed]:
            raise Rejected(403, f"the token {token.id!r} is for a {token.role}, and this takes a {needed}")
        run = request.headers.get(RUN_HEADER, "")
        if run and run != self._run():
            raise Rejected(403, f"the join link is for run {run[:64]}, and this is run {self._run()}: ask for its link")
        return Visitor(token.id, token.learner, token.most)

    def may_join(self, visitor: Visitor, learner: str, there: set[str]) -> None:
        token = self._tokens().named(visitor.token)
        if reason := token.refuses(time.time()):
            raise PeerError(reason)
        if not token.allows(learner):
            raise PeerError(f"the token {token.id!r} is for {token.learner}, not for {learner}")
        if token.most and learner not in there and len(there) >= token.most:
            raise PeerError(f"the token {token.id!r} is for {token.most} learners at once, and they are there already")

    def gone(self, id: str) -> str:
        found: Token | None = next((token for token in self._tokens().all if token.id == id), None)
        return f"the token {id!r} is not there any more" if found is None else found.refuses(time.time())


def role_for(path: str) -> Role:
    if path in OPERATOR_PATHS:
        return "operator"
    return "learner" if path.startswith(LEARNER_PATHS) else "viewer"


def _shown(request: web.Request) -> str:
    """A bearer's token; or, of a browser, the password that its owner typed."""
    scheme, _, value = request.headers.get("Authorization", "").partition(" ")
    match scheme.lower():
        case "bearer":
            return value.strip()
        case "basic":
            try:
                return base64.b64decode(value, validate=True).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                return ""
    return ""
