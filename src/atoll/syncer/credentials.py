"""Who may connect to a syncer's port: tokens and TLS, as its keys say.

With keys: TLS and join tokens, which both may change while the run goes on. Without keys: this machine alone, by
secrets that the run makes for itself and that commands of the same user find (fabric/local_secrets.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from atoll.config import Service
from atoll.fabric.authorizer import Authorizer, TokenAuthorizer, host_name
from atoll.fabric.join_tokens import FEW_DAYS, SECRET, JoinToken, JoinTokens, Role, new_secret
from atoll.fabric.listener import Tls
from atoll.fabric.local_secrets import publish_secrets, withdraw_secrets
from atoll.protocol.errors import ConfigError
from atoll.store.keys import RELOAD_S, KeyDir, LastingTrouble, Stamp, check_folder, check_private, kept_secret, stamp
from atoll.telemetry.events import EventLog

LogEvent = Callable[[str, str], None]
"""An event's kind and text."""
LOCAL: dict[str, Role] = {
    "join": "learner",
    "viewer": "viewer",
    "evaluator": "evaluator",
    "relay": "relay",
    "operator": "operator",
}
"""The tokens of a run without keys: a file each in its folder of secrets."""
DAY_S = 86400.0
AWAY_S = 1.0
"""Between two events of somebody who was not let in."""
LOCAL_NAMES = 1 << 16
"""Names that one user's learners may take on this machine: more than anybody starts."""


@dataclass(frozen=True, slots=True)
class PortAccess:
    authorizer: Authorizer | None = None
    tls: Tls | None = None
    notice: Callable[[], str] = str
    """What the operator should see to; empty: nothing."""
    names: frozenset[str] = frozenset()
    """Host names by which learners may address the port, beside its addresses."""
    secrets: Mapping[Role, str] = field(default_factory=dict, repr=False)
    """Secrets for commands of the same user, published with the port; empty with keys: then only join tokens count."""

    def publish(self, host: str, port: int) -> None:
        if self.secrets:
            publish_secrets(host, port, self.secrets)

    def withdraw(self, host: str, port: int) -> None:
        if self.secrets:
            withdraw_secrets(host, port)

    def dashboard_path(self) -> str:
        """With a code that works once, or to the page that asks for a join token."""
        own = self.authorizer if self.secrets else None
        return own.make_code("viewer") if isinstance(own, TokenAuthorizer) else "/"


def make_port_access(
    service: Service,
    run: Callable[[], str],
    say: LogEvent = lambda kind, text: None,
    *,
    secrets: Path | None = None,
    succeeds: Collection[str] = (),
) -> PortAccess:
    """TLS and join tokens; only tokens without keys (those of the folder `secrets`) and behind a proxy that ends TLS,
    where the port listens on this machine alone. `say` logs what the operator should know."""
    if not service.keys:
        assert secrets is not None, "a run without keys has secrets of its own"
        own = local_tokens(secrets)
        authorizer = TokenAuthorizer(lambda: own, run, password=False, succeeds=succeeds)
        by_role = {token.role: token.secret for token in own.all}
        return PortAccess(authorizer, names=advertised_names(service), secrets=by_role)
    keys = KeyDir.open(Path(service.keys))
    warn = partial(say, "warning")
    tokens = LiveTokens(keys, warn=warn)
    authorizer = TokenAuthorizer(tokens, run, warn, succeeds=succeeds)
    names = names_of(keys, service)
    if service.front:
        return PortAccess(authorizer, notice=tokens.describe_expiry, names=names)
    if service.mutual and not keys.authority.is_file():
        raise ConfigError(f"mutual TLS needs an authority, and {keys.path} has none: make it with `atoll cert --ca`")
    from atoll.syncer.renewal import LiveTls  # loads cryptography, which is slow and not needed on one machine

    tls = LiveTls(keys, say, mutual=service.mutual)
    return PortAccess(authorizer, tls, lambda: tls.describe_expiry() or tokens.describe_expiry(), names)


def names_of(keys: KeyDir, service: Service) -> frozenset[str]:
    """The advertised names, and those in the certificates: the current one, the next one, and a proxy's."""
    from atoll.fabric.certificates import hosts_of

    files = [keys.certificate, keys.next_certificate, *([Path(service.front)] if service.front else [])]
    try:
        shown = [name for file in files if file.is_file() for name in hosts_of(file.read_bytes())]
    except (OSError, ValueError) as error:
        raise ConfigError(f"a certificate of {keys.path} cannot be read: {error}") from error
    return advertised_names(service) | frozenset(shown)


def advertised_names(service: Service) -> frozenset[str]:
    return frozenset(host_name(one) or one for one in service.advertise)


def local_tokens(folder: Path) -> JoinTokens:
    """The secrets of a run without keys, one for each role, made if missing. Those of an earlier term stay valid."""
    KeyDir.create(folder)
    check_folder(folder)
    made = (
        JoinToken(
            id=name, role=role, names=LOCAL_NAMES, secret=kept_secret(folder / name, new_secret, SECRET.fullmatch)
        )
        for name, role in LOCAL.items()
    )
    return JoinTokens(made)


def read_tokens(keys: KeyDir) -> JoinTokens:
    try:
        return JoinTokens(msgspec.json.decode(keys.tokens.read_bytes(), type=list[JoinToken]))
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"{keys.tokens} cannot be read: {error}") from error


def token_ends_soon(tokens: JoinTokens, now: float) -> str:
    ending = [token for token in tokens.all if now < token.expires < now + DAY_S * FEW_DAYS and not token.refuses(now)]
    if not ending:
        return ""
    first = min(ending, key=lambda token: token.expires)
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(first.expires))
    return (
        f"the token {first.id!r} ends on {when}, and who came by it is sent away: "
        f"atoll tokens change {first.id} --hours"
    )


def write_tokens(keys: KeyDir, tokens: JoinTokens) -> None:
    keys.write(keys.tokens, msgspec.json.format(msgspec.json.encode(tokens.all)))


class LiveTokens:
    """The join tokens in the file as of now, or the last ones that could be read: then a warning says why, once, if it
    lasts."""

    def __init__(
        self,
        keys: KeyDir,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._keys, self._clock, self._warn = keys, clock, warn
        self._looked_at, self._stamp = clock(), stamp(keys.tokens)
        self._tokens = read_tokens(keys)
        self._trouble = LastingTrouble()

    def __call__(self) -> JoinTokens:
        now = self._clock()
        if now - self._looked_at >= RELOAD_S:
            self._looked_at = now
            if (now_there := stamp(self._keys.tokens)) != self._stamp:
                self._reload(now, now_there)
            else:
                self._trouble.clear()
        return self._tokens

    def describe_expiry(self) -> str:
        """Name the token that ends next, if it ends within days, and what to do; empty: nothing ends."""
        return token_ends_soon(self(), time.time())

    def _reload(self, now: float, found: Stamp) -> None:
        try:
            check_folder(self._keys.path)
            check_private(self._keys.tokens)
            self._tokens, self._stamp = read_tokens(self._keys), found
        except (ConfigError, OSError) as error:  # the file is read again at the next look
            if self._trouble.is_news(now):
                self._warn(f"the tokens that were read last still count, since those of now cannot be used: {error}")


class RefusalLog:
    """Counts everybody who was not let in. One event a second at most: nobody fills the disk by dialling."""

    def __init__(self, events: EventLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._events, self._clock = events, clock
        self._count, self._told_at = 0, -AWAY_S

    def log_refusal(self, address: str, reason: str) -> None:
        self._count += 1
        now = self._clock()
        if now - self._told_at < AWAY_S:
            return
        self._told_at = now
        data: dict[str, object] = {"address": address, "reason": reason, "count": self._count}
        self._events.say("turned_away", f"{address} was not let in: {reason}", data)
