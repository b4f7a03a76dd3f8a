"""A simulated relay (docs/adr/0032), and what the syncer knows of its relays. The rules are protocol/relay.py's.

`SimulatedRelay` is what relay/service.py does: it has a channel of its own to the syncer, dialled again whenever it is
lost; it holds bodies of learners whose pulls it passed on, and sums those that it is asked for. What a process had in
memory goes with it: the next one has another session. `SyncerSums` is what syncer/relays.py does. How messages and
bodies pass through a relay is relay_network.py's.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any, Protocol

from atoll.protocol import relay as rl
from atoll.protocol.learner.ways import Ways
from atoll.protocol.messages import Announce, ContributionKey, FromSyncer, Pull, Welcome
from atoll.protocol.syncer import effects as fx
from atoll.relay.versions import WHOLE, KeptVersion, VersionCopies
from atoll.simulate.links import SimulatedLink
from atoll.simulate.oracle import weigh
from atoll.simulate.training import Payload
from atoll.simulate.virtual_time import Action, EventQueue

AGAIN_S = 0.5
"""Between two dials."""
SUM_S = 10.0
"""A sum that has not come after this time is given up."""


@dataclass(frozen=True, slots=True)
class SumBody:
    """What a relay sends up, and what is in it, whatever its message says."""

    mean: float
    counted: tuple[tuple[ContributionKey, float], ...]
    """Every body that was summed, with its weight."""


class RelayLink:
    """A relay's own channel, as both ends hold it."""

    __slots__ = ("arrives", "relay", "session", "syncer")

    def __init__(self, relay: SimulatedRelay, syncer: Any) -> None:
        """`syncer`: a SimulatedSyncer, which this file does not know."""
        self.relay, self.session, self.syncer = relay, relay.session, syncer
        self.arrives: dict[str, float] = {}


class RelayChecks(Protocol):
    def watch_feedback(self, relay: SimulatedRelay, asked: rl.SumAsked) -> None: ...

    def watch_holdings(self, relay: SimulatedRelay) -> None: ...


class RelayWorld(Protocol):
    """What a relay needs of the world around it."""

    queue: EventQueue
    random: random.Random
    events: int

    @property
    def relay_checks(self) -> RelayChecks: ...

    def syncer_for_relay(self) -> Any: ...

    def relay_delay(self) -> float: ...

    def on_handled(self, machine: type, node: str, event: object, effects: Sequence[object]) -> None: ...

    def on_relay_lost(self, relay: SimulatedRelay, connections: Sequence[Any], reason: str) -> None: ...


class SimulatedRelay:
    def __init__(self, world: RelayWorld, number: int, sum_s: float) -> None:
        """`sum_s`: what it takes to make a sum."""
        self.world, self.name, self._sum_s = world, f"relay-{number}", sum_s
        self.alive = self.paused = self.hidden = False
        """`hidden`: learners do not reach it."""
        self.cut = False
        """Nothing passes between it and the syncer."""
        self._held_up: deque[tuple[Action, tuple[object, ...]]] = deque()
        """What waits for that, on either way."""
        self._backlog: list[tuple[Action, tuple[object, ...]]] = []
        """What came while its process stood still."""
        self.body_link: SimulatedLink | None = None
        """Link of a given width that its bodies take to the syncer and back; None: they travel side by side."""
        self._processes = 0
        self.link: RelayLink | None = None
        self._forget()
        self.start()

    def _forget(self) -> None:
        self.session = f"{self.name}/{self._processes}"
        self.holdings = rl.RelayHoldings()
        self.versions = VersionCopies()
        self.bodies: dict[ContributionKey, Payload] = {}
        self.passages: list[Any] = []
        """Connections that come through."""
        self._newest: dict[str, Any] = {}
        """By learner, the last of its passages that was opened."""
        self.up = self.sums = False
        self._summed: dict[int, rl.SumAsked] = {}
        self.ways = Ways()
        """Rates of its link, as it has measured."""
        self._coming: dict[int, tuple[int, float]] = {}
        """Version that is on its way down the link and the time at which it is through, keyed by fragment."""

    def _on_handled(self, event: object, *answers: object) -> None:
        self.world.on_handled(rl.RelayHoldings, self.session, event, answers)

    # ---- its processes ------------------------------------------------------------------------------------------

    def start(self) -> object:
        if self.alive:
            return False
        self._processes += 1
        self.alive, self.paused = True, False
        self._forget()
        self.world.queue.call_later(0.0, self._dial, self.session)
        return None

    def kill(self) -> object:
        """Its host closes its sockets: below, and above if anything passes."""
        if not self.alive:
            return False
        self._backlog.clear()
        self._close_passages("the relay died")
        self._close_link()
        self.alive = self.paused = self.up = False
        return None

    def stop(self) -> None:
        self.paused = True

    def wake_up(self) -> object:
        if not self.alive or not self.paused:
            return False
        self.paused = False
        waiting, self._backlog = self._backlog, []
        for action, arguments in waiting:
            action(*arguments)
        return None

    def unless_paused(self, action: Action, *arguments: object) -> object:
        """Done now, or when its process goes on."""
        if self.paused:
            self._backlog.append((action, arguments))
            return None
        return action(*arguments)

    def unless_cut(self, action: Action, *arguments: object) -> object:
        """What passes between it and the syncer: now, or when something passes again."""
        if self.cut:
            self._held_up.append((action, arguments))
            return None
        return action(*arguments)

    def mend(self) -> None:
        """What was held up comes in a burst."""
        self.cut = False
        while self._held_up and not self.cut:
            action, arguments = self._held_up.popleft()
            action(*arguments)

    # ---- its own channel ----------------------------------------------------------------------------------------

    def _dial_later(self) -> None:
        self.world.queue.call_later(AGAIN_S * (0.5 + self.world.random.random()), self._dial, self.session)

    def _dial(self, session: str) -> object:
        if not self.alive or self.session != session or self.link is not None:
            return False
        syncer = None if self.cut or self.paused else self.world.syncer_for_relay()
        if syncer is None:
            self._dial_later()
            return None
        self.link = link = RelayLink(self, syncer)
        syncer.sums.open_relay(link, rl.RelayHello(protocol=1, name=self.name, session=self.session))
        return None

    def pass_up(self, link: RelayLink, action: Action, *arguments: object) -> None:
        self._pass(link, "up", action, arguments)

    def send_down(self, link: RelayLink, message: rl.ToRelay) -> None:
        """From the syncer."""
        self._pass(link, "down", self.unless_paused, (self._hear, link, message))

    def close_down(self, link: RelayLink) -> None:
        """The syncer's end is gone."""
        self._pass(link, "down", self.unless_paused, (self._lose_syncer, link, "the syncer closed the channel"))

    def _pass(self, link: RelayLink, way: str, action: Action, arguments: tuple[object, ...]) -> None:
        """In order, and late."""
        queue = self.world.queue
        at = max(queue.now + self.world.relay_delay(), link.arrives.get(way, 0.0))
        link.arrives[way] = at
        queue.call_later(at - queue.now, self.unless_cut, action, *arguments)

    def give_up_link(self) -> object:
        """Both ends notice that no ping is answered."""
        link = self.link
        if link is None or not (self.cut or self.paused or link.syncer.paused):
            return False
        link.syncer.sums.lose_relay(link)
        return self.unless_paused(self._lose_syncer, link, "the syncer does not answer pings")

    def _lose_syncer(self, link: RelayLink, reason: str) -> object:
        """It sends away who is there: they connect directly."""
        if self.link is not link or not self.alive:
            return False
        self.world.events += 1
        self.link, self.up, self.sums = None, False, False
        self._on_handled(("lost", reason), self.holdings.lose_syncer())
        self._free_bodies()
        self._summed.clear()
        self._close_passages(reason)
        self._dial_later()
        return None

    def _close_link(self) -> None:
        if (link := self.link) is not None:
            self.link = None
            self.pass_up(link, link.syncer.sums.lose_relay, link)

    def _close_passages(self, reason: str) -> None:
        closed, self.passages, self._newest = self.passages, [], {}
        self.world.on_relay_lost(self, closed, reason)

    def _hear(self, link: RelayLink, message: rl.ToRelay) -> object:
        if self.link is not link or not self.alive:
            return False
        self.world.events += 1
        match message:
            case rl.RelayWelcome():
                self.versions.clear()
                self.up = True
            case rl.RelayMode(sums=sums):
                self.sums = sums
            case rl.SumAsked():
                self._answer(message)
            case rl.SumSettled():
                self._settle(message)
            case rl.HeldDropped(learner=learner, round=number, attempt=attempt):
                self.drop_body((learner, number, attempt))
            case _:
                raise AssertionError(f"no relay is told {message}")
        self.world.relay_checks.watch_holdings(self)
        return None

    # ---- learners -----------------------------------------------------------------------------------------------

    def open_passage(self, connection: Any) -> None:
        self.passages.append(connection)
        self._newest[connection.learner.name] = connection

    def close_passage(self, connection: Any) -> None:
        self.passages.remove(connection)
        if self.is_newest(connection):
            del self._newest[connection.learner.name]
            gone = self.holdings.forget_learner(connection.learner.name)
            self._on_handled(("left", connection.learner.name), gone)

    def has_passage(self, connection: Any) -> bool:
        return connection in self.passages

    def is_newest(self, connection: Any) -> bool:
        """Whether bodies of its learner are those of this process."""
        return self._newest.get(connection.learner.name) is connection

    def read_message(self, learner: str, message: FromSyncer) -> None:
        """One that it passes on."""
        match message:
            case Welcome(versions=versions):
                for fragment, version in enumerate(versions):
                    self.versions.note_version(fragment, version)
            case Announce(fragment=fragment, version=version):
                self.versions.note_version(fragment, version)
            case Pull() if self.sums:
                gone = self.holdings.expect_body(learner, message.round, message.attempt, message.fragment)
                self._on_handled((learner, message), gone)
                self._free_bodies()
            case _:
                pass

    # ---- bodies -------------------------------------------------------------------------------------------------

    def hold_body(self, key: ContributionKey, digest: str, payload: Payload) -> bool:
        """False: it is not for this relay to hold."""
        is_held = self.sums and self.holdings.fragment_of(key) is not None and self.holdings.hold_body(key, digest)
        self._on_handled((key, digest), is_held)
        if is_held:
            self.bodies[key] = payload
        return is_held

    def drop_body(self, key: ContributionKey) -> None:
        self.holdings.forget_body(key)
        self._on_handled(("drop", key))
        self._free_bodies()

    def _free_bodies(self) -> None:
        """Those that it does not hold any more."""
        self.bodies = {key: body for key, body in self.bodies.items() if key in self.holdings.held}

    def find_version(self, fragment: int) -> tuple[int, float] | None:
        kept = self.versions.find(fragment, WHOLE)
        return None if kept is None else (kept.version, struct.unpack("d", kept.data)[0])

    def keep_version(self, fragment: int, version: int, value: float) -> None:
        kept = KeptVersion(version, {}, bytearray(struct.pack("d", value)), False)
        self.versions.keep_version(fragment, WHOLE, kept)

    def pass_version_down(self, link: SimulatedLink, fragment: int, version: int) -> float:
        """Let a version pass the link, once for all learners that ask for it. Return when it is through."""
        coming, through_at = self._coming.get(fragment, (-1, 0.0))
        if coming != version:
            through_at, seconds = link.pass_down(self.world.queue.now)
            self._coming[fragment] = version, through_at
            self.ways.down.add(round(link.down_bytes), seconds)
            self.tell_rates()
        return through_at

    # ---- sums ---------------------------------------------------------------------------------------------------

    def _answer(self, asked: rl.SumAsked) -> None:
        try:
            keys = self.holdings.find_members(asked)
        except ValueError as error:
            self._say(failed := rl.SumFailed(ask=asked.ask, reason=str(error)))
            self._on_handled(asked, failed)
            return
        self._on_handled(asked, keys)
        weights = {member.learner: member.weight for member in asked.members}
        summed = tuple((key, weights[key[0]]) for key in keys)
        deltas = [self.bodies[key].delta for key in keys]
        mean = (
            deltas[0] if len(keys) == 1 else weigh((weight, d) for (_, weight), d in zip(summed, deltas, strict=True))
        )
        body = SumBody(mean, summed)
        self.world.queue.call_later(self._sum_s, self._if_same, self.session, self._send_sum, asked, keys, body)

    def _if_same(self, session: str, action: Action, *arguments: object) -> object:
        return self.unless_paused(action, *arguments) if self.alive and self.session == session else False

    def _send_sum(self, asked: rl.SumAsked, keys: list[ContributionKey], body: SumBody) -> None:
        """Over the channel that it has by now."""
        ready = self.holdings.describe_sum(asked, keys, "digest")
        self._on_handled("sum", ready)
        self.holdings.note_summed(asked)
        self._summed[asked.ask] = asked
        if self.body_link is None:
            self._say(ready, body)
            return
        through_at, seconds = self.body_link.pass_up(self.world.queue.now)
        self.ways.up.add(round(self.body_link.up_bytes), seconds)
        self.world.queue.call_at(through_at, self._if_same, self.session, self._say_with_rates, ready, body)

    def _say_with_rates(self, ready: rl.SumReady, body: SumBody) -> None:
        self._say(ready, body)
        self.tell_rates()

    def tell_rates(self) -> None:
        """Tell the syncer the rates of the link that the learners of this region share."""
        if (link := self.link) is not None:
            names = tuple(sorted(connection.learner.name for connection in self.passages))
            measured = fx.RelayMeasured(names, self.ways.up.bytes_per_s, self.ways.down.bytes_per_s)
            self.pass_up(link, link.syncer.sums.hear_rates, link, measured)

    def _say(self, message: rl.FromRelay, body: SumBody | None = None) -> None:
        if (link := self.link) is not None:
            self.pass_up(link, link.syncer.sums.hear_relay, link, message, body)

    def _settle(self, settled: rl.SumSettled) -> None:
        gone, fragment = self.holdings.settle_round(settled)
        self._on_handled(settled, gone, fragment)
        self._free_bodies()
        asked = self._summed.pop(settled.ask, None)
        self._summed = {ask: one for ask, one in self._summed.items() if ask in self.holdings.summed}
        if fragment is not None and asked is not None:
            self.world.relay_checks.watch_feedback(self, asked)


# ---- the syncer's side -----------------------------------------------------------------------------------------------


class SumsSyncer(Protocol):
    """What `SyncerSums` needs of the syncer around it."""

    alive: bool
    paused: bool
    payloads: dict[ContributionKey, float]
    held: set[ContributionKey]

    def handle_event(self, event: fx.SyncerEvent, least: float = 0.0) -> list[fx.SyncerEffect]: ...

    def stage_gradient(self, merge: fx.Merge, gradient: float, groups: tuple[tuple[str, ...], ...]) -> None: ...

    def stage_bodies(self, merge: fx.Merge) -> None: ...

    def watch_sums(self, merge: fx.Merge, counted: Sequence[tuple[ContributionKey, float]]) -> None: ...

    def on_handled(self, machine: type, event: object, effects: Sequence[object]) -> None: ...

    def call_later(self, seconds: float, action: Action, *arguments: object) -> None: ...


@dataclass(slots=True)
class MergeOfSums:
    merge: fx.Merge
    asked: dict[int, rl.SumAsked]
    came: dict[int, SumBody] = field(default_factory=dict)


class SyncerSums:
    def __init__(self, syncer: SumsSyncer) -> None:
        self._syncer = syncer
        self.gathering = rl.SumGathering()
        self._links: dict[str, RelayLink] = {}
        self._merge: MergeOfSums | None = None
        self._unheard: list[tuple[Action, tuple[object, ...]]] = []
        """What came while its process stood still."""

    def _waits(self, action: Action, *arguments: object) -> bool:
        if self._syncer.paused:
            self._unheard.append((action, arguments))
        return self._syncer.paused

    def _on_handled(self, event: object, answers: Sequence[object]) -> None:
        self._syncer.on_handled(rl.SumGathering, event, answers)

    def hear_unheard(self) -> None:
        heard, self._unheard = self._unheard, []
        for action, arguments in heard:
            action(*arguments)

    def close(self) -> None:
        """The process is gone."""
        for link in self._links.values():
            link.relay.close_down(link)
        self._links.clear()

    # ---- channels -----------------------------------------------------------------------------------------------

    def is_connected(self, session: str) -> bool:
        return session in self._links

    def open_relay(self, link: RelayLink, hello: rl.RelayHello) -> None:
        replaced = self.gathering.add_relay(hello.session, hello.name)
        self._on_handled(hello, replaced)
        for before in replaced:
            self._lose(before)
        self._links[hello.session] = link
        link.relay.send_down(link, rl.RelayWelcome(run="run", term=0))
        link.relay.send_down(link, rl.RelayMode(sums=True))

    def lose_relay(self, link: RelayLink) -> object:
        if self._links.get(link.session) is not link or not self._syncer.alive:
            return False
        if self._waits(self.lose_relay, link):
            return None
        self._lose(link.session)
        return None

    def _lose(self, session: str) -> None:
        self._links.pop(session, None)
        rounds = self.gathering.lose_relay(session)
        self._on_handled(("lost", session), rounds)
        if self._merge is not None and self._merge.merge.round in rounds:
            self._fail("the relay is gone")

    def hear_relay(self, link: RelayLink, message: rl.FromRelay, body: SumBody | None) -> object:
        if self._links.get(link.session) is not link or not self._syncer.alive:
            return False
        if self._waits(self.hear_relay, link, message, body):
            return None
        match message:
            case rl.SumReady(ask=ask):
                wrong = self.gathering.take_answer(link.session, message)
                self._on_handled((link.session, message), (wrong,))
                if self._merge is None or ask not in self._merge.asked:
                    return None
                if wrong:
                    self._fail(wrong)
                    return None
                assert body is not None
                self._merge.came[ask] = body
                self._end_if_whole()
            case rl.SumFailed(ask=ask, reason=reason):
                if self._merge is not None and self.gathering.find_ask(link.session, ask) is not None:
                    self._fail(reason)
            case _:
                raise AssertionError(f"no syncer is told {message}")
        return None

    def hear_rates(self, link: RelayLink, measured: fx.RelayMeasured) -> object:
        if self._links.get(link.session) is not link or not self._syncer.alive:
            return False
        self._syncer.handle_event(measured)
        return None

    # ---- bodies -------------------------------------------------------------------------------------------------

    def hold_body(self, session: str, key: ContributionKey, body: rl.HeldBody) -> None:
        self.gathering.hold_body(session, key, body)
        self._on_handled((session, key, body), ())

    def drop_body(self, key: ContributionKey) -> None:
        dropped = self.gathering.drop_body(key)
        self._on_handled(("drop", key), (dropped,))
        if dropped is not None and (link := self._links.get(dropped[0])) is not None:
            link.relay.send_down(link, dropped[1])

    def settle_round(self, number: int, *, merged: bool) -> None:
        settlements = self.gathering.end_round(number, merged=merged)
        self._on_handled(("end", number, merged), settlements)
        for session, settled in settlements:
            if (link := self._links.get(session)) is not None:
                link.relay.send_down(link, settled)

    # ---- merging ------------------------------------------------------------------------------------------------

    def begin_merge(self, merge: fx.Merge, held: Sequence[tuple[ContributionKey, float]]) -> None:
        """`held`: by relays, of its members."""
        self._merge = MergeOfSums(merge, {})
        try:
            asks = self.gathering.ask_sums(merge.round, merge.fragment, "mean", held)
        except ValueError as error:
            self._on_handled(merge, (str(error),))
            self._syncer.call_later(0.0, self._fail_merge, self._merge, str(error))
            return
        self._on_handled(merge, asks)
        for session, asked in asks:
            self._merge.asked[asked.ask] = asked
            if (link := self._links.get(session)) is not None:
                link.relay.send_down(link, asked)
        self._syncer.call_later(SUM_S, self._fail_merge, self._merge, "no sum came in time")
        self._end_if_whole()

    def _fail_merge(self, merge: MergeOfSums, reason: str) -> object:
        if self._merge is not merge or not self._syncer.alive:
            return False
        if not self._waits(self._fail_merge, merge, reason):
            self._fail(reason)
        return None

    def _fail(self, reason: str) -> None:
        assert self._merge is not None
        merge, self._merge = self._merge.merge, None
        self.settle_round(merge.round, merged=False)
        self._syncer.handle_event(fx.Unmergeable(merge.round, reason))

    def _end_if_whole(self) -> None:
        under_way = self._merge
        if under_way is None or set(under_way.came) != set(under_way.asked):
            return
        self._merge, merge = None, under_way.merge
        asked = [one for _, one in sorted(under_way.asked.items())]
        terms = [(fsum(member.weight for member in one.members), under_way.came[one.ask].mean) for one in asked]
        parts = [((part.learner, merge.round, part.attempt), part.weight) for part in merge.parts]
        own = [one for one in parts if one[0] not in self._syncer.held]
        self._syncer.watch_sums(merge, [*own, *(one for body in under_way.came.values() for one in body.counted)])
        groups = tuple(tuple(member.learner for member in one.members) for one in asked if len(one.members) > 1)
        if not groups:
            self._syncer.stage_bodies(merge)
            return
        terms += [(weight, self._syncer.payloads[key]) for key, weight in own]
        self._syncer.stage_gradient(merge, weigh(terms), groups)
