"""What a relay and the syncer say to each other, and the rules of both sides. Pure: no sockets, no arrays, no clock.

A relay stands in a region: learners below it, the syncer above (docs/adr/0032). It has no say. Rounds, members,
weights, screening and the ledger are the syncer's state machine's, per learner, as without a relay. What is here
decides only how a merge gets its terms.

    relay → syncer      RelayHello  SumReady  SumFailed  RelayRates
    syncer → relay      RelayWelcome  RelayRefused  RelayMode  SumAsked  SumSettled  HeldDropped  RunOver

Rules of a relay (`RelayHoldings`):
- it takes a body only of a learner whose pull for that round and attempt it has passed on;
- of a learner and a round it holds one body, that of the newest attempt: nobody is counted twice;
- it answers an ask with exactly the bodies that are named in it, by learner, attempt and digest, or not at all;
- it forgets a body when the syncer says so, when its round is settled, and all of them when the syncer is lost;
- its feedback changes when a commit that names its sum is told, and at no other time.

Rules of the syncer (`SumGathering`):
- a body that is held somewhere else counts as arrived while the relay that holds it is connected in the same session;
- a merge asks each relay once for all of its members; of one member it gets the learner's own body;
- an answer that names others than were asked, one of them twice, or another weight, is refused;
- without an answer (lost, refused, too late) the round is gathered once more, as after any failed merge.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from atoll.protocol.limits import MANY, Count, Line, Name, Number, Real, Row, Words
from atoll.protocol.messages import ContributionKey

RELAY_BACK = "it goes to its relay, which is there now"
"""Why a learner leaves the syncer's channel for that of its relay. Both ends know it by these words."""

MOST_HELD = 256
"""Bodies of one learner that a relay expects or holds; rounds under way are far fewer."""


# ---- messages -------------------------------------------------------------------------------------------------------


class RelayMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True, omit_defaults=True):
    pass


class RelayHello(RelayMessage, frozen=True):
    """The first message of a relay."""

    protocol: Number
    name: Line
    session: Line
    """Drawn once per process. Whoever names it in a header comes through this relay, so it is a secret."""


class RelayWelcome(RelayMessage, frozen=True):
    run: Line
    term: Count


class RelayRefused(RelayMessage, frozen=True):
    """It ends: trying again cannot help."""

    reason: Words


class RelayMode(RelayMessage, frozen=True):
    """Whether contributions are held and summed, or passed on as they are, and why."""

    sums: bool
    reason: Words = ""


class HeldBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a relay tells of a body that it holds, in place of sending it."""

    digest: Line
    norm: Real
    refusal: Words = ""
    """Why no syncer would take it: it is no body of its fragment, or not finite."""


class SumMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    learner: Name
    attempt: Number
    digest: Line
    weight: Real = 0.0


Members = Annotated[tuple[SumMember, ...], Meta(max_length=MANY)]


class SumAsked(RelayMessage, frozen=True):
    """The sum over these members of a round, please; their weights are final. Of one member: its body as it came."""

    ask: Count
    round: Number
    fragment: Number
    rule: Line
    members: Members
    rows: Row = ()
    """Only the means of these rows, in fp32: their directions cancel."""


class SumReady(RelayMessage, frozen=True):
    """The body of an ask has arrived whole: this is what it is."""

    ask: Count
    digest: Line
    members: Members
    weight: Real
    """Σ w of what was summed."""


class SumFailed(RelayMessage, frozen=True):
    ask: Count
    reason: Words


class RelayRates(RelayMessage, frozen=True):
    """Rates of the link between this relay and the syncer, which all of its learners share (0: not measured yet), and
    what has crossed it."""

    up_rate: Real = 0.0
    """Bytes per second of the sums that it sent."""
    down_rate: Real = 0.0
    """Bytes per second of the versions that it fetched."""
    bytes_up: Count = 0
    """Bytes of bodies that it has sent since this channel opened: sums, and contributions that it passed on."""
    bytes_down: Count = 0
    """Bytes of versions that it has fetched since then."""


class SumSettled(RelayMessage, frozen=True):
    """The round is committed with the sum of this ask in it."""

    round: Number
    ask: Count


class HeldDropped(RelayMessage, frozen=True):
    """Nobody wants this body any more."""

    learner: Name
    round: Number
    attempt: Number


class RunOver(RelayMessage, frozen=True):
    """The run has ended: there is nothing left to pass on."""


FromRelay = RelayHello | SumReady | SumFailed | RelayRates
ToRelay = RelayWelcome | RelayRefused | RelayMode | SumAsked | SumSettled | HeldDropped | RunOver


# ---- the relay's side -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    fragment: int
    digest: str


@dataclass(slots=True)
class RelayHoldings:
    """What a relay expects, holds, sums and forgets."""

    expected: dict[ContributionKey, int] = field(default_factory=dict)
    """Pulls that were passed on, with their fragments."""
    held: dict[ContributionKey, Held] = field(default_factory=dict)
    summed: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Ask → round and fragment, of sums that were sent and not settled."""

    def expect_body(self, learner: str, round: int, attempt: int, fragment: int) -> list[ContributionKey]:
        """A pull was passed on. Those that are forgotten for it: earlier attempts of the same round, and the oldest of
        too many."""
        earlier = [key for key in self._keys_of(learner) if key[1] == round]
        self.expected[learner, round, attempt] = fragment
        own = sorted(self._keys_of(learner), key=lambda key: key[1:])
        gone = [*(key for key in earlier if key[2] != attempt), *own[: max(0, len(own) - MOST_HELD)]]
        for key in gone:
            self.forget_body(key)
        return gone

    def fragment_of(self, key: ContributionKey) -> int | None:
        """Of a body that may come; None: it was not asked for here, or is here."""
        return None if key in self.held else self.expected.get(key)

    def hold_body(self, key: ContributionKey, digest: str) -> bool:
        """False: it was forgotten while it came."""
        fragment = self.expected.pop(key, None)
        if fragment is not None:
            self.held[key] = Held(fragment, digest)
        return fragment is not None

    def find_members(self, asked: SumAsked) -> list[ContributionKey]:
        """The bodies that an ask is about. ValueError says why they cannot be summed."""
        keys = [(member.learner, asked.round, member.attempt) for member in asked.members]
        if not keys or len({key[0] for key in keys}) < len(keys):
            raise ValueError("an ask names each member once, and at least one")
        for key, member in zip(keys, asked.members, strict=True):
            found = self.held.get(key)
            if found is None or found != Held(asked.fragment, member.digest):
                raise ValueError(f"the contribution of {key[0]} to round {asked.round} is not here")
        return keys

    def describe_sum(self, asked: SumAsked, keys: Iterable[ContributionKey], digest: str) -> SumReady:
        """What was summed, by the bodies themselves: whoever asked compares it with what it has asked for."""
        weights = {member.learner: member.weight for member in asked.members}
        members = tuple(
            SumMember(key[0], key[2], self.held[key].digest, weights.get(key[0], 0.0))
            for key in keys
            if key in self.held
        )
        weight = math.fsum(member.weight for member in members)
        return SumReady(ask=asked.ask, digest=digest, members=members, weight=weight)

    def note_summed(self, asked: SumAsked) -> None:
        if not asked.rows:
            self.summed[asked.ask] = (asked.round, asked.fragment)

    def settle_round(self, settled: SumSettled) -> tuple[list[ContributionKey], int | None]:
        """Bodies that are not needed any more, and the fragment whose feedback is now that of the sum; None: it was not
        made here, or is no sum."""
        gone = [key for key in {**self.expected, **self.held} if key[1] == settled.round]
        for key in gone:
            self.forget_body(key)
        _, fragment = self.summed.pop(settled.ask, (0, None))
        for ask in [ask for ask, (round, _) in self.summed.items() if round <= settled.round]:
            del self.summed[ask]  # of a round that was gathered again, or passed over
        return gone, fragment

    def forget_body(self, key: ContributionKey) -> None:
        self.expected.pop(key, None)
        self.held.pop(key, None)

    def forget_learner(self, learner: str) -> list[ContributionKey]:
        """Its channel is gone: nothing more comes of it. What is held may still be merged."""
        gone = [key for key in self.expected if key[0] == learner]
        for key in gone:
            del self.expected[key]
        return gone

    def lose_syncer(self) -> list[ContributionKey]:
        """A syncer that comes back asks again for all that is not committed."""
        gone = [*self.expected, *self.held]
        self.expected.clear()
        self.held.clear()
        self.summed.clear()
        return gone

    def _keys_of(self, learner: str) -> list[ContributionKey]:
        return [key for key in {**self.expected, **self.held} if key[0] == learner]


# ---- the syncer's side ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class OpenAsk:
    relay: str
    """The session of the relay that was asked."""
    asked: SumAsked
    answered: bool = False


@dataclass(slots=True)
class SumGathering:
    """Who holds what, and what was asked of whom."""

    relays: dict[str, str] = field(default_factory=dict)
    """Session → name, of those that are connected."""
    held: dict[ContributionKey, tuple[str, HeldBody]] = field(default_factory=dict)
    """By the relay of this session."""
    asks: dict[int, OpenAsk] = field(default_factory=dict)
    last_ask: int = 0

    def add_relay(self, session: str, name: str) -> list[str]:
        """Sessions that it takes the place of."""
        before = [one for one, other in self.relays.items() if other == name and one != session]
        self.relays[session] = name
        return before

    def lose_relay(self, session: str) -> list[int]:
        """The rounds that waited for its sum. What it held is lost with it."""
        self.relays.pop(session, None)
        self.held = {key: found for key, found in self.held.items() if found[0] != session}
        gone = {ask: one for ask, one in self.asks.items() if one.relay == session}
        for ask in gone:
            del self.asks[ask]
        return sorted({one.asked.round for one in gone.values() if not one.answered})

    def hold_body(self, session: str, key: ContributionKey, body: HeldBody) -> None:
        assert session in self.relays, "only a relay that is connected holds anything"
        self.held[key] = (session, body)

    def drop_body(self, key: ContributionKey) -> tuple[str, HeldDropped] | None:
        """Whom to tell that nobody wants it."""
        found = self.held.pop(key, None)
        return None if found is None else (found[0], HeldDropped(learner=key[0], round=key[1], attempt=key[2]))

    def ask_sums(
        self, round: int, fragment: int, rule: str, members: Iterable[tuple[ContributionKey, float]]
    ) -> list[tuple[str, SumAsked]]:
        """One ask for each relay, of those members that are held at one. ValueError: one of them is lost."""
        by_relay: dict[str, list[SumMember]] = {}
        for key, weight in members:
            if (found := self.held.get(key)) is None:
                raise ValueError(f"the relay that held the contribution of {key[0]} is gone")
            by_relay.setdefault(found[0], []).append(SumMember(key[0], key[2], found[1].digest, weight))
        return [self._ask(relay, round, fragment, rule, tuple(these)) for relay, these in sorted(by_relay.items())]

    def ask_rows(self, before: int, rows: tuple[int, ...]) -> tuple[str, SumAsked]:
        """The means of some rows of what an answered ask was about. ValueError: its relay is lost."""
        if (one := self.asks.get(before)) is None:
            raise ValueError("the relay that made a sum is gone")
        return self._ask(one.relay, one.asked.round, one.asked.fragment, one.asked.rule, one.asked.members, rows)

    def _ask(
        self, relay: str, round: int, fragment: int, rule: str, members: tuple[SumMember, ...], rows: Row = ()
    ) -> tuple[str, SumAsked]:
        self.last_ask += 1
        asked = SumAsked(ask=self.last_ask, round=round, fragment=fragment, rule=rule, members=members, rows=rows)
        self.asks[asked.ask] = OpenAsk(relay, asked)
        return relay, asked

    def find_ask(self, session: str, ask: int) -> SumAsked | None:
        """An ask that this relay has not answered."""
        one = self.asks.get(ask)
        return one.asked if one is not None and one.relay == session and not one.answered else None

    def take_answer(self, session: str, ready: SumReady) -> str:
        """Why it is refused; empty: it is what was asked for."""
        if (asked := self.find_ask(session, ready.ask)) is None:
            return "nobody has asked for this sum"
        if wrong := wrong_sum(asked, ready):
            del self.asks[ready.ask]
            return wrong
        self.asks[ready.ask].answered = True
        return ""

    def end_round(self, round: int, *, merged: bool) -> list[tuple[str, SumSettled]]:
        """Nothing more is asked for it. Which relays hear that their sum is in the model."""
        mine = {ask: one for ask, one in self.asks.items() if one.asked.round == round}
        for ask in mine:
            del self.asks[ask]
        if not merged:
            return []
        told = [(one.relay, SumSettled(round=round, ask=ask)) for ask, one in mine.items() if not one.asked.rows]
        for one in mine.values():
            for member in one.asked.members:  # their relays forget them with the round
                self.held.pop((member.learner, round, member.attempt), None)
        return told


def wrong_sum(asked: SumAsked, ready: SumReady) -> str:
    """Whether a sum is of exactly what was asked for; why not."""
    named = [(one.learner, one.attempt, one.digest) for one in ready.members]
    wanted = [(one.learner, one.attempt, one.digest) for one in asked.members]
    if twice := sorted({learner for learner, *_ in named if [one[0] for one in named].count(learner) > 1}):
        return f"the sum counts {', '.join(twice)} more than once"
    if sorted(named) != sorted(wanted):
        return "the sum is of other contributions than were asked for"
    if not math.isclose(ready.weight, math.fsum(one.weight for one in asked.members), rel_tol=1e-9):
        return f"the sum has the weight {ready.weight:g}, which is not that of its members"
    return ""
