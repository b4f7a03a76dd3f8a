"""Who may ask what: checked for every request, before anything else of it is read.

A syncer answers nobody who shows no join token (a browser: a cookie, or the code of its link): 401 for an unknown one,
403 for one that is not for this. A link of another run is told so, unless this run goes on for that one: then its
certificate and its tokens prove that it does, and learners come back by the links that they have. A courier's port asks
for none: what it gives away needs a ticket that nobody can guess.

Browsers get in without typing a token: by a link with a one-time code, which is exchanged for a cookie.

    POST /v1/codes       with any token: {"path": "/enter/CODE"}
    GET  /enter/CODE     sets the cookie, and leads to /

- a code counts once, for a day, and only at the syncer that made it: after a restart, ask for another;
- no script can read the cookie (HttpOnly), no request of another site carries it (SameSite=Strict), and it opens the
  pages and their live channel, nothing else. It counts as long as the token it came by, for a month at most, also for
  the next syncer of the run: it is derived from that token's secret, and stored nowhere;
- browsers send a cookie to every port of a host, so its name contains the port, for two runs side by side. Whoever
  opens a page of another user's server on the same machine still shows it the cookie.

Host names: the Host header of every request is checked. A web page can have its own name lead to this machine (DNS
rebinding); the browser then asks our port in the page's name, from inside. So a port answers only under names that are
its own: loopback, the address that it listens on or was reached by, this machine's name, those that the operator
advertises, and those of the certificate.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from atoll.fabric.address import RUN_HEADER, is_loopback
from atoll.fabric.join_tokens import JoinToken, JoinTokens, NameOwners, Role, roles_for
from atoll.fabric.wire import one_line
from atoll.protocol.errors import PeerError


class Rejected(Exception):
    """The answer to a request that may not be: an HTTP status and one line."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(one_line(reason))
        self.status = status


class Visitor(msgspec.Struct, frozen=True):
    """Somebody who was let in."""

    token: str = ""
    """Its name; empty where there are none."""
    learner: str = ""
    most: int = 0
    role: Role = "operator"
    """Where there are no tokens, everybody is."""
    mark: str = ""
    """Of the secret it showed: another one of the same name is another token."""


MANY = 0.75
"""The share of its names from which on it is said that a token has brought many."""
NOBODY = Visitor()
VISITOR = web.RequestKey("visitor", Visitor)
"""Where a request keeps who it is."""


class Authorizer(Protocol):
    @property
    def password(self) -> bool:
        """Whether a browser that shows nothing is to ask for a password."""
        ...

    def admit(self, request: web.Request) -> Visitor:
        """Rejected for whoever may not ask this."""
        ...

    def may_join(self, visitor: Visitor, learner: str, there: set[str], owners: NameOwners) -> None:
        """PeerError unless this visitor may take part under that name. `there`: learners that came by its token;
        `owners`: whose every name is that ever was."""
        ...

    def gone(self, id: str, mark: str) -> str:
        """Why a token that was shown, with this mark, counts no more; empty: it does."""
        ...


class OpenAuthorizer:
    """Everybody may ask: of a courier, whose tickets are secrets."""

    password = False

    def admit(self, request: web.Request) -> Visitor:
        return NOBODY

    def may_join(self, visitor: Visitor, learner: str, there: set[str], owners: NameOwners) -> None:
        return None

    def gone(self, id: str, mark: str) -> str:
        return ""


class TokenAuthorizer:
    def __init__(
        self,
        tokens: Callable[[], JoinTokens],
        run: Callable[[], str],
        warn: Callable[[str], None] = lambda text: None,
        *,
        password: bool = True,
        succeeds: Collection[str] = (),
    ) -> None:
        """`password`: browsers are asked for one, which is a token; `succeeds`: lost runs that this one goes on for."""
        self.password = password
        self._codes = OneTimeCodes()
        self._tokens, self._run, self._warn, self._succeeds = tokens, run, warn, succeeds
        """The first two are asked each time: tokens come and go while a run goes on."""
        self._warned: dict[str, int] = {}
        """Tokens that have brought many names, and how many they might when that was said."""

    def admit(self, request: web.Request) -> Visitor:
        token = self._shown(request)
        if reason := token.refuses(time.time()):
            raise Rejected(401, reason)
        if token.role not in (takes := roles_for(request.path)):
            role = takes[0]
            raise Rejected(
                403,
                f"the token {token.id!r} is for {_a(token.role)}, and this takes {_a(role)}: "
                f"atoll tokens add NAME --role {role}",
            )
        run = request.headers.get(RUN_HEADER, "")
        if run and run not in (self._run(), *self._succeeds):
            raise Rejected(403, f"the join link is for another run, and this is run {self._run()}: ask for its link")
        return Visitor(token.id, token.learner, token.most, token.role, token.mark)

    def _shown(self, request: web.Request) -> JoinToken:
        """What the request shows: a token, or a browser's cookie or code where those are enough."""
        if secret := _secret(request):
            if (token := self._tokens().find(secret)) is None:
                raise Rejected(401, "this token is not known here: is the join link of another run?")
            return token
        if opens(request.path) and (token := self._of_browser(request)) is not None:
            return token
        if request.path.startswith(ENTER):
            raise Rejected(
                401, "this link was used, or its syncer was started anew: atoll dashboard RUN prints another"
            )
        raise Rejected(
            401,
            "this syncer asks for a token: join by its link (atoll learn --join LINK), "
            "look at it by the link that atoll dashboard RUN prints",
        )

    def _of_browser(self, request: web.Request) -> JoinToken | None:
        tokens, now = self._tokens(), time.time()
        if request.path.startswith(ENTER):
            made_by = self._codes.token_of(request.path.removeprefix(ENTER), now)
            if made_by is not None and (found := tokens.find(made_by.secret)) is not None:
                return found
        return token_of_cookie(tokens, request.cookies, request.headers.get("Host", ""), now)

    def make_code(self, token: str) -> str:
        """The path by which a browser gets in once, in the name of this token."""
        return f"{ENTER}{self._codes.make(self._tokens().named(token), time.time())}"

    def take_code(self, code: str, visitor: Visitor) -> str:
        """The cookie that a browser which came by it gets; empty for one that has its cookie already, which a used link
        must not make last longer. The code counts no more."""
        if not self._codes.use(code):
            return ""
        return cookie_for(self._tokens().named(visitor.token), time.time())

    def may_join(self, visitor: Visitor, learner: str, there: set[str], owners: NameOwners) -> None:
        if reason := self.gone(visitor.token, visitor.mark):  # also one that was there a moment ago
            raise PeerError(reason)
        token = self._tokens().named(visitor.token)
        if not token.allows(learner):
            raise PeerError(f"the token {token.id!r} is for {token.learner}, not for {learner}")
        if token.most and learner not in there and len(there) >= token.most:
            raise PeerError(f"the token {token.id!r} is for {token.most} learners at once, and they are there already")
        if (owner := owners.owner_of(learner)) != token.id:
            self._not_anothers(token, learner, owner)
            self._one_name_more(token, owners.count_names(token.id) + 1)

    def _not_anothers(self, token: JoinToken, learner: str, owner: str) -> None:
        """A name is kept for the token that is most closely for it, and is otherwise its first holder's."""
        now = time.time()
        others = [one for one in self._tokens().all if one.allows(learner) and not one.refuses(now)]
        closest = max(others, key=lambda one: (one.precision, one.id == owner))
        if closest.precision > token.precision:
            raise PeerError(f"the name {learner} is kept for the token {closest.id!r}: choose another with --name")
        if closest.id == owner:
            raise PeerError(
                f"the name {learner} belongs to whoever holds the token {owner!r}: choose another with --name"
            )

    def _one_name_more(self, token: JoinToken, names: int) -> None:
        """Names that stay cost nothing; a token that comes with ever new ones is stopped, and its owner told before."""
        advice = (
            f"give learners names that stay (--name), or let it have more: "
            f"atoll tokens change {token.id} --names {2 * token.names}"
        )
        if names > token.names:
            raise PeerError(f"the token {token.id!r} has brought {token.names} different names, and no more: {advice}")
        if names >= MANY * token.names and self._warned.get(token.id) != token.names:
            self._warned[token.id] = token.names
            self._warn(f"the token {token.id!r} has brought {names} of at most {token.names} names: {advice}")

    def gone(self, id: str, mark: str) -> str:
        found: JoinToken | None = next((token for token in self._tokens().all if token.id == id), None)
        if found is None:
            return f"the token {id!r} is not there any more"
        if found.mark != mark:
            return f"the token {id!r} was replaced by another of its name: ask for another join link"
        return found.refuses(time.time())


def _a(role: str) -> str:
    return f"an {role}" if role[0] in "aeiou" else f"a {role}"


def _secret(request: web.Request) -> str:
    """A bearer's token; or, of a browser, the password that its owner typed. Said twice, it is not said."""
    said = request.headers.getall("Authorization", [])
    if len(said) != 1:
        return ""
    scheme, _, value = said[0].partition(" ")
    match scheme.lower():
        case "bearer":
            return value.strip()
        case "basic":
            try:
                return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
            except ValueError:  # no base64, no UTF-8, no ASCII
                return ""
    return ""


# ---- browsers -------------------------------------------------------------------------------------------------------

CODES_PATH, ENTER = "/v1/codes", "/enter/"
LIVE = "/v1/live"
CODE_S = 86400.0
COOKIE_S = 30 * 86400
CODES = 64
"""Unused ones are remembered; the oldest gives way."""


class OneTimeCodes:
    def __init__(self) -> None:
        self._made: dict[str, tuple[JoinToken, float]] = {}
        """The token as it was then, and the moment at which it ends, by code; the oldest first."""

    def make(self, token: JoinToken, now: float) -> str:
        while len(self._made) >= CODES:
            del self._made[next(iter(self._made))]
        code = secrets.token_urlsafe(18)
        self._made[code] = (token, now + CODE_S)
        return code

    def token_of(self, code: str, now: float) -> JoinToken | None:
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


def cookie_for(token: JoinToken, now: float) -> str:
    ends = int(now) + COOKIE_S
    name = base64.urlsafe_b64encode(token.id.encode()).decode().rstrip("=")
    return f"{name}.{ends}.{_seal(token, ends)}"


def token_of_cookie(tokens: JoinTokens, cookies: Mapping[str, str], host: str, now: float) -> JoinToken | None:
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


def _seal(token: JoinToken, ends: int) -> str:
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


# ---- host names -----------------------------------------------------------------------------------------------------


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
