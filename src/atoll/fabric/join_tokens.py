"""Join tokens: who may do what, for how long, and under which names. Secrets are looked up by hash.

| role | may |
| --- | --- |
| viewer | look: status, dashboard, metrics |
| learner | take part, and look |
| evaluator | fetch the model and score it, and look; only its scores are taken |
| relay | stand in a region as relays, a few at once, and what a learner may |
| operator | change settings, drain learners, and what a relay may |

A learner's name belongs to the token that it first came by, for as long as that token counts. Names are never
forgotten, also when their learners have left: each is an entry in the run's journal (`protocol.records.OwnedRecord`)
and in the syncer's memory, so a token may bring only so many (`names`).
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from atoll.protocol.errors import ConfigError

Role = Literal["viewer", "learner", "evaluator", "relay", "operator"]
SECRET = re.compile(r"[A-Za-z0-9_-]{16,128}")
"""What fits into a join link and a header; anything shorter is guessed."""
NAMES = 4096
"""Different names that one token may bring into a run, unless it says otherwise: 64 learners, each started 64 times."""
FEW_DAYS = 14.0
"""A token or certificate that ends within so many days is named where the operator looks."""

OPERATOR_PATHS = frozenset({"/v1/settings", "/v1/drain", "/v1/shard"})
VIEWER_PATHS = frozenset({"/v1/status", "/v1/live", "/v1/codes"})
SCORES = "/v1/scores"
RELAYS, HELD, SUMS = "/v1/relays", "/v1/held", "/v1/sums"
MANIFEST, FRAGMENTS = "/v1/manifest", "/v1/fragments/"


class JoinToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What is as usual is not written down: an older version reads the file while nothing newer is asked of it."""

    id: str
    """What people call it; no secret."""
    secret: str
    role: Role = "learner"
    learner: str = ""
    """Only for learners of this name; with a star at its end, of names that begin so. Empty: of any."""
    most: int = 0
    """Learners at once; 0: any number."""
    names: int = NAMES
    """Different names that it may ever bring into a run, those that have left included."""
    expires: float = 0.0
    """Seconds since 1970; 0: never."""
    revoked: bool = False

    def __post_init__(self) -> None:
        if not self.id.isprintable() or not 0 < len(self.id) <= 64:
            raise ConfigError("a token's id is 1 to 64 characters that can be printed")
        if not SECRET.fullmatch(self.secret):
            raise ConfigError(f"the secret of token {self.id!r} is none: 16 to 128 of a-z, A-Z, 0-9, '-' and '_'")
        if self.most < 0 or not (self.expires >= 0 and math.isfinite(self.expires)):
            raise ConfigError(f"most and expires of token {self.id!r} are 0 or above")
        if self.names < 1:
            raise ConfigError(f"names of token {self.id!r} is 1 or above: without a name nobody joins")

    def __repr__(self) -> str:
        """A secret is in no log, wherever this is printed."""
        return f"JoinToken({self.id!r}, {self.role}, learner={self.learner!r}, revoked={self.revoked})"

    @property
    def mark(self) -> str:
        """Tells two secrets apart, and is none."""
        return _hash(self.secret).hex()[:16]

    def refuses(self, now: float) -> str:
        """Why it does not count; empty: it does."""
        if self.revoked:
            return f"the token {self.id!r} was revoked: ask for another join link"
        if self.expires and now >= self.expires:
            since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.expires))
            return f"the token {self.id!r} expired on {since}: ask for another join link"
        return ""

    def allows(self, learner: str) -> bool:
        if self.learner.endswith("*"):
            return learner.startswith(self.learner[:-1])
        return self.learner in ("", learner)

    @property
    def precision(self) -> int:
        """How closely it says whom it is for: any name, names that begin so, this one."""
        return len(self.learner.removesuffix("*")) + (bool(self.learner) and not self.learner.endswith("*"))


class JoinTokens:
    """Those of one run, found by the secret that a client shows."""

    def __init__(self, tokens: Iterable[JoinToken] = ()) -> None:
        self.all = tuple(tokens)
        self._by_hash = {_hash(token.secret): token for token in self.all}
        """By hash: how long a look-up takes says nothing about a secret."""
        ids = [token.id for token in self.all]
        if len(set(ids)) < len(ids):
            raise ConfigError(f"two tokens are called {max(ids, key=ids.count)!r}: each needs a name of its own")
        if len(self._by_hash) < len(ids):
            raise ConfigError("two tokens have the same secret: which of them was revoked could not be told")

    def find(self, secret: str) -> JoinToken | None:
        return self._by_hash.get(_hash(secret))

    def named(self, id: str) -> JoinToken:
        for token in self.all:
            if token.id == id:
                return token
        known = ", ".join(token.id for token in self.all) or "none"
        raise ConfigError(f"there is no token {id!r}; there are: {known}")

    def with_role(self, role: Role, now: float) -> JoinToken | None:
        """The first that counts now."""
        return next((token for token in self.all if token.role == role and not token.refuses(now)), None)

    def added(self, token: JoinToken) -> JoinTokens:
        return JoinTokens((*self.all, token))

    def without(self, id: str) -> JoinTokens:
        """The same with one that counts no more."""
        return self.with_changed(id, revoked=True)

    def with_changed(self, id: str, **changes: object) -> JoinTokens:
        """The same with one that is as it was but for these fields."""
        before = self.named(id)
        changed = msgspec.structs.replace(before, **changes)
        return JoinTokens(changed if token is before else token for token in self.all)


def roles_for(path: str) -> tuple[Role, ...]:
    """Who may ask for it, the least of them first. What lies beside /v1/ are pages, which only read."""
    if path in OPERATOR_PATHS:
        return ("operator",)
    if path == SCORES:
        return ("evaluator",)
    if path == MANIFEST or path.startswith(FRAGMENTS):
        return ("learner", "evaluator", "relay", "operator")
    if path == RELAYS or path.startswith((f"{HELD}/", f"{SUMS}/")):
        return ("relay", "operator")
    if path.startswith("/v1/") and path not in VIEWER_PATHS:
        return ("learner", "relay", "operator")
    return ("viewer", "learner", "evaluator", "relay", "operator")


def new_secret() -> str:
    """256 bits that nobody guesses, as letters and digits that survive a chat and a shell."""
    return secrets.token_hex(32)


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


# ---- owners of names ------------------------------------------------------------------------------------------------


class NameOwners:
    def __init__(self, known: Mapping[str, str] | None = None) -> None:
        """`known`: names and their tokens, as the journal has them."""
        self._token_of = dict(known or {})
        self._names = Counter(self._token_of.values())

    def owner_of(self, learner: str) -> str:
        """The token that a name belongs to; empty: nobody's yet."""
        return self._token_of.get(learner, "")

    def count_names(self, token: str) -> int:
        """How many it has brought so far, those that have left included."""
        return self._names[token]

    def assign_name(self, learner: str, token: str) -> None:
        """Nothing is owned where nobody is asked for a token."""
        if not token or (before := self.owner_of(learner)) == token:
            return
        self._token_of[learner] = token
        self._names[token] += 1
        if before:
            self._names[before] -= 1
