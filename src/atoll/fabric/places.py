"""The places at a port: a connection takes one when it is accepted, and gives it back when it is closed.

Rules:
- a connection is a stranger until it has shown who it is (`admit`); so many strangers at once;
- one stranger more costs another its place: of the address that has the most of them, of those that have come equally
  far (silent, spoke, past the TLS handshake) the most numerous, the oldest. So a flood takes places from itself,
  however far its connections go, and whoever comes in properly is through long before it is the oldest;
- an address where a learner is connected, or was lately, has places that strangers of other addresses cannot take;
- so many connections in all, of one address, and of one token; a viewer's token has few, so that most are learners'.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import IntEnum

from atoll.fabric.wire import Limits

KNOWN_S = 600.0
"""An address counts as a learner's for this long after its last connection was closed."""
KNOWN_SHARE = 8
"""Of all strangers' places, one part in so many is kept for each address of a learner."""


class Stage(IntEnum):
    """How far a stranger has come."""

    SILENT = 0
    SPOKE = 1
    """Its first byte is here."""
    SECURED = 2
    """The TLS handshake is over."""


@dataclass(eq=False, slots=True)
class Place:
    address: str
    stage: Stage = Stage.SILENT
    token: str | None = None
    """The name of what it has shown; None: a stranger."""
    learner: bool = False
    taken: bool = True


class Places:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.strangers: dict[Place, None] = {}
        self._waiting: dict[str, dict[Stage, dict[Place, None]]] = {}
        """The same by address and stage, in the order in which they came: in a flood one is looked for often."""
        self._taken = 0
        self._addresses: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._learners: Counter[str] = Counter()
        """Learners' connections, by address."""
        self._known_until: dict[str, float] = {}
        """Addresses of learners that have gone; the one that went last is the last."""

    def __len__(self) -> int:
        return self._taken

    def has_room(self, address: str) -> bool:
        """Whether one more connection of this address may come in at all."""
        limits = self._limits
        return self._taken < limits.connections and self._addresses[address] < limits.address_connections

    def take(self, address: str) -> Place:
        place = Place(address)
        self.strangers[place] = None
        self._waiting.setdefault(address, {stage: {} for stage in Stage})[place.stage][place] = None
        self._taken += 1
        self._addresses[address] += 1
        return place

    def advance(self, place: Place, stage: Stage) -> None:
        """A stranger has come further."""
        if place in self.strangers:
            waiting = self._waiting[place.address]
            del waiting[place.stage][place]
            waiting[stage][place] = None
        place.stage = stage

    def admit(self, place: Place, token: str, *, viewer: bool) -> bool:
        """A stranger has shown its token. Whether there is a place for one more of that token."""
        if place.token is not None:
            return True
        limits = self._limits
        if self._tokens[token] >= (limits.viewer_connections if viewer else limits.token_connections):
            return False
        self.dismiss(place)
        place.token, place.learner = token, not viewer
        self._tokens[token] += 1
        if place.learner:
            self._learners[place.address] += 1
        return True

    def dismiss(self, place: Place) -> None:
        """A stranger that is being closed, or is none any more, stands in nobody's way."""
        if place in self.strangers:
            del self.strangers[place]
            waiting = self._waiting[place.address]
            del waiting[place.stage][place]
            if not any(waiting.values()):
                del self._waiting[place.address]

    def give_back(self, place: Place, now: float) -> None:
        """Its connection is closed. A second time changes nothing."""
        if not place.taken:
            return
        place.taken = False
        self.dismiss(place)
        self._taken -= 1
        _count_down(self._addresses, place.address)
        if place.token is not None:
            _count_down(self._tokens, place.token)
        if place.learner:
            _count_down(self._learners, place.address)
            self._remember(place.address, now)

    def one_to_drop(self, now: float) -> Place | None:
        """The stranger that has to go before another may come; None: there is room."""
        if len(self.strangers) < self._limits.strangers:
            return None
        kept = self._limits.strangers // KNOWN_SHARE

        def crowd(address: str) -> int:
            return sum(map(len, self._waiting[address].values())) - kept * self.knows(address, now)

        stages = self._waiting[max(self._waiting, key=crowd)]
        theirs = max(stages.values(), key=len)
        return next(iter(theirs))

    def knows(self, address: str, now: float) -> bool:
        """Whether a learner is there, or was lately."""
        return address in self._learners or self._known_until.get(address, now) > now

    def _remember(self, address: str, now: float) -> None:
        self._known_until.pop(address, None)
        self._known_until[address] = now + KNOWN_S
        if len(self._known_until) > self._limits.connections:
            del self._known_until[next(iter(self._known_until))]


def _count_down(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
