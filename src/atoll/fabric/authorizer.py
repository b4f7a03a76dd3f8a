"""Who stands at the door, and may they come in. Asked for every request, before anything else is read of it.

A syncer answers nobody who shows no token (a browser: a cookie, or the code of its link): 401 to strangers, 403 to
those whose token is not for this. A link of another run is told so. A courier's port asks for none: what it gives away
goes by a ticket that nobody can guess.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
from aiohttp import web

from atoll.fabric.address import RUN_HEADER
from atoll.fabric.browser import ENTER, OneTimeCodes, cookie_for, opens, token_of_cookie
from atoll.fabric.intake import Rejected
from atoll.fabric.owners import Owners
from atoll.fabric.tokens import Role, Token, Tokens, roles_for
from atoll.protocol.errors import PeerError


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

    def may_join(self, visitor: Visitor, learner: str, there: set[str], owners: Owners) -> None:
        """PeerError unless this visitor may take part under that name. `there`: learners that came by its token;
        `owners`: whose every name is that ever was."""
        ...

    def gone(self, id: str, mark: str) -> str:
        """Why a token that was shown, with this mark, counts no more; empty: it does."""
        ...


class OpenDoor:
    """Everybody may ask: of a courier, whose tickets are secrets."""

    password = False

    def admit(self, request: web.Request) -> Visitor:
        return NOBODY

    def may_join(self, visitor: Visitor, learner: str, there: set[str], owners: Owners) -> None:
        return None

    def gone(self, id: str, mark: str) -> str:
        return ""


class TokenDoor:
    def __init__(
        self,
        tokens: Callable[[], Tokens],
        run: Callable[[], str],
        warn: Callable[[str], None] = lambda text: None,
        *,
        password: bool = True,
    ) -> None:
        """`password`: browsers are asked for one, which is a token."""
        self.password = password
        self._codes = OneTimeCodes()
        self._tokens, self._run, self._warn = tokens, run, warn
        """The first two are asked each time: tokens come and go while a run goes on."""
        self._warned: dict[str, int] = {}
        """Tokens that have brought many names, and how many they might when that was said."""

    def admit(self, request: web.Request) -> Visitor:
        token = self._shown(request)
        if reason := token.refuses(time.time()):
            raise Rejected(401, reason)
        if token.role not in (takes := roles_for(request.path)):
            raise Rejected(403, f"the token {token.id!r} is for {_a(token.role)}, and this takes {_a(takes[0])}")
        run = request.headers.get(RUN_HEADER, "")
        if run and run != self._run():
            raise Rejected(403, f"the join link is for another run, and this is run {self._run()}: ask for its link")
        return Visitor(token.id, token.learner, token.most, token.role, token.mark)

    def _shown(self, request: web.Request) -> Token:
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

    def _of_browser(self, request: web.Request) -> Token | None:
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

    def may_join(self, visitor: Visitor, learner: str, there: set[str], owners: Owners) -> None:
        if reason := self.gone(visitor.token, visitor.mark):  # also one that was there a moment ago
            raise PeerError(reason)
        token = self._tokens().named(visitor.token)
        if not token.allows(learner):
            raise PeerError(f"the token {token.id!r} is for {token.learner}, not for {learner}")
        if token.most and learner not in there and len(there) >= token.most:
            raise PeerError(f"the token {token.id!r} is for {token.most} learners at once, and they are there already")
        if (owner := owners.of(learner)) != token.id:
            self._not_anothers(token, learner, owner)
            self._one_name_more(token, owners.names(token.id) + 1)

    def _not_anothers(self, token: Token, learner: str, owner: str) -> None:
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

    def _one_name_more(self, token: Token, names: int) -> None:
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
        found: Token | None = next((token for token in self._tokens().all if token.id == id), None)
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
