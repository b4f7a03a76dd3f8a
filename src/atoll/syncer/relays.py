"""Relays at the syncer: what they hold, and the sums that a merge takes of them (docs/adr/0032).

A contribution that came through a relay has no body here, but figures: its digest and its norm. It is screened by them
and is a member like any other. When its round is merged, each relay is asked once for the sum over its members, with
the weights that the state machine gave them (protocol/relay.py). What comes is checked before it is merged:

- it is of exactly the members that were asked for, and of their weight;
- its length is the one that plan, codec and rule say, and it is finite;
- it is no longer than its members are: ‖Σ w Δ / Σ w‖ ≤ Σ w‖Δ‖ / Σ w, but for what a codec leaves out and gives later.

Without it (the relay is gone, silent or wrong) the merge fails, and the state machine gathers the round once more.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from atoll.fabric.relay_channel import RelayChannel
from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.codec import Codec, body_nbytes, decode_contribution
from atoll.numerics.deltas import read_whole
from atoll.numerics.fragments import Fragment, FragmentPlan
from atoll.numerics.group_sums import GroupTerm, count_rows, find_rows, merge_groups, place_means
from atoll.numerics.screen import measure_delta
from atoll.protocol.errors import PeerError
from atoll.protocol.limits import MANY
from atoll.protocol.messages import ContributionKey
from atoll.protocol.relay import (
    FromRelay,
    HeldBody,
    RelayMode,
    RelayRates,
    RelayWelcome,
    SumAsked,
    SumFailed,
    SumGathering,
    SumReady,
)
from atoll.protocol.syncer import effects as fx
from atoll.syncer.contributions import Inbox, SumMissing
from atoll.telemetry.status import RelayStatus

SUM_S = 10.0
"""A relay begins to send a sum within this, and what it takes to make it; once it has begun, the fabric's least rate is
what it has to keep to."""
VALUES_RATE = 50e6
"""Values of members that a relay decodes and sums in a second, at least."""
LONGER = 1.02
"""Times as long as its members together, a sum is refused: for what rounding does to it …"""
LONGER_BY_FEEDBACK = 32.0
"""… and where the codec gives later what it left out before."""


MOST_NAMES = 1024
"""Relays whose bytes are counted."""


@dataclass(slots=True)
class ComingSum:
    relay: str
    asked: SumAsked
    buffer: ByteArray
    done: asyncio.Future[None]
    receiving: bool = False
    digest: str = ""


@dataclass(slots=True)
class RelaySums:
    """The `RelayHandlers` of the fabric's server, for one run. Belongs to one event loop."""

    say: Callable[[str, str, dict[str, object]], None]
    run: Callable[[], tuple[str, int]]
    """Its name and term."""
    refusal: str = ""
    """Why no relay may stand before this syncer."""
    tell_rates: Callable[[str, RelayRates], None] = lambda session, rates: None
    """Hears what the link of the relay with this session carries."""
    rates: dict[str, RelayRates] = field(default_factory=dict)
    """Rates that relays have told, by session."""
    traffic: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes of bodies from each relay and to it, by name."""
    gathering: SumGathering = field(default_factory=SumGathering)
    rule: str = "mean"
    mode: RelayMode | None = None
    """None: the run has not begun."""
    _inbox: Inbox | None = None
    _plan: FragmentPlan | None = None
    _codec: Codec | None = None
    _threads: int = 1
    _channels: dict[str, RelayChannel] = field(default_factory=dict)
    _coming: dict[int, ComingSum] = field(default_factory=dict)

    def begin(self, inbox: Inbox, plan: FragmentPlan, codec: Codec, threads: int) -> None:
        """The run has its model."""
        self._inbox, self._plan, self._codec, self._threads = inbox, plan, codec, threads

    def set_mode(self, rule: str, why_not: str) -> None:
        """`why_not`: why contributions are passed on one by one; empty: they are summed by this rule."""
        self.rule, mode = rule, RelayMode(sums=not why_not, reason=why_not)
        if mode != self.mode:
            self.mode = mode
            for channel in self._channels.values():
                channel.send(mode)

    def name_of(self, session: str) -> str:
        return self.gathering.relays.get(session, "")

    # ---- relays -------------------------------------------------------------------------------------------------

    def relay_opened(self, channel: RelayChannel) -> None:
        if self.refusal:
            raise PeerError(self.refusal)
        for before in self.gathering.add_relay(channel.session, channel.name):
            self._lose(before)
        self._channels[channel.session] = channel
        run, term = self.run()
        channel.send(RelayWelcome(run=run, term=term))
        if self.mode is not None:
            channel.send(self.mode)
        self.say("relay", f"relay {channel.name} is connected", {"relay": channel.name})

    def relay_closed(self, channel: RelayChannel, reason: str) -> None:
        if self._channels.get(channel.session) is channel:
            self._lose(channel.session)
            self.say("relay", f"relay {channel.name} is gone: {reason}", {"relay": channel.name, "gone": True})

    def _lose(self, session: str) -> None:
        self._channels.pop(session, None)
        self.rates.pop(session, None)
        self.gathering.lose_relay(session)
        for coming in [one for one in self._coming.values() if one.relay == session]:
            self._fail(coming.asked.ask, "the relay is gone")

    def relay_received(self, channel: RelayChannel, message: FromRelay) -> None:
        match message:
            case SumReady(ask=ask):
                coming = self._coming.get(ask)
                wrong = self.gathering.take_answer(channel.session, message)
                if coming is None or coming.done.done():
                    return
                if not wrong and (not coming.digest or coming.digest != message.digest):
                    wrong = "the sum's body is not the one that its message names"
                if wrong:
                    self._fail(ask, wrong)
                else:
                    coming.done.set_result(None)
            case SumFailed(ask=ask, reason=reason):
                if self.gathering.find_ask(channel.session, ask) is not None:
                    self._fail(ask, reason)
            case RelayRates(up_rate=up, down_rate=down):
                if min(up, down) < 0:
                    raise PeerError(f"up_rate = {up:g} and down_rate = {down:g}: a rate is not below 0")
                self._note_traffic(channel.session, channel.name, message)
                self.rates[channel.session] = message
                self.tell_rates(channel.session, message)

    def _note_traffic(self, session: str, name: str, told: RelayRates) -> None:
        """Add what has crossed its link since it told that last."""
        before = self.rates.get(session, RelayRates())
        bytes_in, bytes_out = self.traffic.get(name, (0, 0))
        if name in self.traffic or len(self.traffic) < MOST_NAMES:
            more = (max(0, told.bytes_up - before.bytes_up), max(0, told.bytes_down - before.bytes_down))
            self.traffic[name] = (bytes_in + more[0], bytes_out + more[1])

    def list_relays(self) -> tuple[RelayStatus, ...]:
        """Every relay that has been here since this syncer started, or not long before, in order of names."""
        here = {channel.name: self.rates.get(session, RelayRates()) for session, channel in self._channels.items()}
        return tuple(
            RelayStatus(
                relay=name,
                connected=name in here,
                bytes_in=self.traffic.get(name, (0, 0))[0],
                bytes_out=self.traffic.get(name, (0, 0))[1],
                up_rate=here[name].up_rate if name in here else 0.0,
                down_rate=here[name].down_rate if name in here else 0.0,
            )
            for name in sorted({*self.traffic, *here})
        )

    def _fail(self, ask: int, reason: str) -> None:
        coming = self._coming.get(ask)
        if coming is not None and not coming.done.done():
            coming.done.set_exception(SumMissing(reason))

    # ---- bodies -------------------------------------------------------------------------------------------------

    def contribution_held(self, session: str, learner: str, round: int, attempt: int, body: HeldBody) -> None:
        if self._inbox is None or self.mode is None or not self.mode.sums:
            raise PeerError("contributions to this run are not summed: send them one by one")
        self._inbox.note_held((learner, round, attempt), body)
        self.gathering.hold_body(session, (learner, round, attempt), body)

    def expect_sum(self, session: str, ask: int) -> memoryview:
        coming = self._coming.get(ask)
        if coming is None or coming.relay != session or coming.digest or coming.done.done():
            raise PeerError("nobody waits for this sum")
        coming.receiving = True
        return coming.buffer.data

    def sum_arrived(self, session: str, ask: int, digest: str) -> None:
        if (coming := self._coming.get(ask)) is not None and coming.relay == session:
            coming.receiving, coming.digest = False, digest
            if not digest:
                self._fail(ask, "the sum broke off on its way")

    def drop_body(self, key: ContributionKey) -> None:
        if (told := self.gathering.drop_body(key)) is not None and (channel := self._channels.get(told[0])) is not None:
            channel.send(told[1])

    def settle_round(self, round: int, *, merged: bool) -> None:
        for session, settled in self.gathering.end_round(round, merged=merged):
            if (channel := self._channels.get(session)) is not None:
                channel.send(settled)

    # ---- merging ------------------------------------------------------------------------------------------------

    def holds_any(self, merge: fx.Merge) -> bool:
        """Whether this merge needs a relay."""
        return any(self._inbox_of().is_held((one.learner, merge.round, one.attempt)) for one in merge.parts)

    async def merge_sums(self, merge: fx.Merge) -> tuple[FloatArray, tuple[tuple[str, ...], ...]]:
        """The round's outer gradient, and the learners that were summed, group by group. SumMissing: it cannot be made;
        ValueError: nobody weighs anything."""
        assert self._plan is not None
        part = self._plan.fragments[merge.fragment]
        coming = self._ask_sums(merge)
        try:
            await self._wait_for(coming)
            terms = await asyncio.to_thread(self._make_terms, merge, part, coming)
            gradient = np.empty(part.size, np.float32)
            rows = await asyncio.to_thread(merge_groups, self.rule, part, terms, gradient, self._threads)
            if rows:
                means = await self._fetch_means(part, terms, coming, rows)
                await asyncio.to_thread(place_means, self.rule, part, rows, terms, means, gradient)
        finally:
            self._forget([one.asked.ask for one in coming])
        groups = tuple(tuple(member.learner for member in one.asked.members) for one in coming)
        return gradient, tuple(group for group in groups if len(group) > 1)

    def _ask_sums(self, merge: fx.Merge) -> list[ComingSum]:
        keys = [((one.learner, merge.round, one.attempt), one.weight) for one in merge.parts]
        wanted = [(key, weight) for key, weight in keys if weight > 0 and self._inbox_of().is_held(key)]
        try:
            asks = self.gathering.ask_sums(merge.round, merge.fragment, self.rule, wanted)
        except ValueError as error:
            raise SumMissing(str(error)) from None
        return [self._send_ask(*ask) for ask in asks]

    def _send_ask(self, session: str, asked: SumAsked) -> ComingSum:
        if (channel := self._channels.get(session)) is None:
            raise SumMissing("the relay is gone")
        buffer = np.empty(self._nbytes(asked), np.uint8)
        coming = ComingSum(session, asked, buffer, asyncio.get_running_loop().create_future())
        self._coming[asked.ask] = coming
        channel.send(asked)
        return coming

    def _nbytes(self, asked: SumAsked) -> int:
        assert self._plan is not None and self._codec is not None
        part = self._plan.fragments[asked.fragment]
        if asked.rows:
            return 4 * sum(row.stop - row.start for row in find_rows(asked.rule, part, asked.rows))
        radii = 4 * count_rows(asked.rule, part) if len(asked.members) > 1 else 0
        return body_nbytes(self._codec, part) + radii

    async def _wait_for(self, coming: Sequence[ComingSum]) -> None:
        for one in coming:
            name, patience_s = self.name_of(one.relay), self._patience_s(one.asked)
            while not one.done.done():
                done, _ = await asyncio.wait([one.done], timeout=patience_s)
                if not done and not one.receiving:
                    raise SumMissing(f"relay {name} gave no sum within {patience_s:.0f} s")
            if (error := one.done.exception()) is not None:
                raise SumMissing(f"no sum came of relay {name or '?'}: {error}")

    def _patience_s(self, asked: SumAsked) -> float:
        assert self._plan is not None
        return SUM_S + len(asked.members) * self._plan.fragments[asked.fragment].size / VALUES_RATE

    async def _fetch_means(
        self, part: Fragment, terms: Sequence[GroupTerm], coming: Sequence[ComingSum], rows: Sequence[int]
    ) -> list[FloatArray | None]:
        """Of every group, the means of rows whose directions cancel."""
        if len(rows) > MANY:
            raise SumMissing(f"the directions of {len(rows)} rows of fragment {part.index} cancel")
        summed = [one for one in coming if len(one.asked.members) > 1]
        asked: list[ComingSum] = []
        try:
            try:
                asked += [self._send_ask(*self.gathering.ask_rows(one.asked.ask, tuple(rows))) for one in summed]
            except ValueError:
                raise SumMissing("the relay is gone") from None
            await self._wait_for(asked)
        finally:
            self._forget([one.asked.ask for one in asked])
        means = iter([one.buffer.view(np.float32) for one in asked])
        found = [None if term.radii is None else next(means) for term in terms]
        if not all(mean is None or np.isfinite(mean).all() for mean in found):
            raise SumMissing("a relay's means are not finite")
        return found

    def _make_terms(self, merge: fx.Merge, part: Fragment, coming: Sequence[ComingSum]) -> list[GroupTerm]:
        """Sums in the order of their asks, then what came directly, in order of learners."""
        inbox = self._inbox_of()
        terms = [self._open_sum(part, merge.round, one) for one in coming]
        for one in merge.parts:
            key = (one.learner, merge.round, one.attempt)
            if not inbox.is_held(key):
                terms.append(GroupTerm(read_whole(inbox.get_delta(key)), one.weight))
        return terms

    def _open_sum(self, part: Fragment, round: int, coming: ComingSum) -> GroupTerm:
        """Decoded and checked."""
        assert self._codec is not None
        asked, size = coming.asked, body_nbytes(self._codec, part)
        values = np.empty(part.size, np.float32)
        try:
            decode_contribution(self._codec, part, coming.buffer[:size], values)
        except PeerError as error:
            raise SumMissing(str(error)) from None
        weight = math.fsum(one.weight for one in asked.members)
        radii = np.frombuffer(coming.buffer[size:].tobytes(), np.float32) if len(asked.members) > 1 else None
        keys = [((one.learner, round, one.attempt), one.weight) for one in asked.members]
        usual = sum(share * self._inbox_of().held_norm(key) for key, share in keys) / weight
        norm, broken = measure_delta(values)
        most = usual * (LONGER_BY_FEEDBACK if self._codec.needs_feedback else LONGER)
        if not broken and norm > most:
            broken = f"the sum's norm is {norm:.3g}, that of its members together {usual:.3g}"
        if not broken and radii is not None and radii.size:
            length = float(np.linalg.norm(radii.astype(np.float64)))
            if not (radii >= 0).all() or not length <= LONGER * usual:
                broken = "the sum's radii are not those of its members"
        if broken:
            raise SumMissing(broken)
        return GroupTerm(values, weight, radii)

    def _forget(self, asks: Sequence[int]) -> None:
        for ask in asks:
            self._coming.pop(ask, None)

    def _inbox_of(self) -> Inbox:
        assert self._inbox is not None
        return self._inbox
