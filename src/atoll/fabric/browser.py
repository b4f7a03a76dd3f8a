"""How a browser gets in without typing a token: by a link with a code that counts once, exchanged for a cookie.

    POST /v1/codes       by any token: {"path": "/enter/CODE"}
    GET  /enter/CODE     sets the cookie, and leads to /

Rules:
- a code counts once, for a day, and only at the syncer that made it: after a restart, ask for another;
- the cookie is read by no script (HttpOnly), comes with no request of another site (SameSite=Strict), and opens the
  pages and what they listen to, nothing else. It counts as long as the token that it came by, for a month at most,
  also for the next syncer of the run: it is made of that token's secret, and kept nowhere;
- browsers send a cookie to every port of a host. So its name has the port in it, for two runs side by side; but whoever
  opens a page of another user's server on this very machine shows it the cookie.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

from atoll.fabric.tokens import Token, Tokens

CODES_PATH, ENTER = "/v1/codes", "/enter/"
LIVE = "/v1/live"
CODE_S = 86400.0
COOKIE_S = 30 * 86400
CODES = 64
"""Unused ones are remembered; the oldest gives way."""


class OneTimeCodes:
    def __init__(self) -> None:
        self._made: dict[str, tuple[Token, float]] = {}
        """The token as it was then, and the moment at which it ends, by code; the oldest first."""

    def make(self, token: Token, now: float) -> str:
        while len(self._made) >= CODES:
            del self._made[next(iter(self._made))]
        code = secrets.token_urlsafe(18)
        self._made[code] = (token, now + CODE_S)
        return code

    def token_of(self, code: str, now: float) -> Token | None:
        """The token that it was made by; None: it counts no more, or never did."""
        token, ends = self._made.get(code, (None, 0.0))
        return token if now < ends else None

    def use(self, code: str) -> bool:
        """Whether it counted; it counts no more."""
        return self._made.pop(code, None) is not None


def opens(path: str) -> bool:
    """Whether a cookie is enough: for the pages, and for the one channel by which they are told."""
    return path == LIVE or not path.startswith("/v1/")


def cookie_name(host: str) -> str:
    """By the port in a Host header; one that cannot be read has none, and is refused elsewhere."""
    try:
        return f"atoll-{urlsplit(f'//{host}').port}"
    except ValueError:
        return "atoll-None"


def cookie_for(token: Token, now: float) -> str:
    ends = int(now) + COOKIE_S
    name = base64.urlsafe_b64encode(token.id.encode()).decode().rstrip("=")
    return f"{name}.{ends}.{_seal(token, ends)}"


def token_of_cookie(tokens: Tokens, cookies: Mapping[str, str], host: str, now: float) -> Token | None:
    """The token that a cookie was made by; None for one that is not ours, or counts no more."""
    name, _, rest = cookies.get(cookie_name(host), "").partition(".")
    ends, _, seal = rest.partition(".")
    if not (ends.isascii() and ends.isdecimal() and len(ends) < 16 and now < int(ends) and seal.isascii()):
        return None
    try:
        id = base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
    except ValueError:
        return None
    token = next((one for one in tokens.all if one.id == id), None)
    return token if token is not None and hmac.compare_digest(seal, _seal(token, int(ends))) else None


def _seal(token: Token, ends: int) -> str:
    return hmac.new(token.secret.encode(), f"atoll cookie\n{token.id}\n{ends}".encode(), hashlib.sha256).hexdigest()


PAGE = """<!doctype html><meta charset="utf-8"><title>Atoll</title><meta http-equiv="refresh" content="0; url=../">
<a href="../">the dashboard</a>
"""
"""Not a redirect: after one from a link of another site, a browser would not send the cookie that it was just given."""
PAGE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
