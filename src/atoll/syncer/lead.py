"""The lead of a syncer of several shards (docs/adr/0031): its channels to the others, and its own part of the work.

`LeadShards` (protocol/syncer/shards.py) decides who is told what and when something is whole. This file carries that
out for the service: orders go to the shards' channels, those to shard 1 to its own `Merging`; what is whole is screened
or combined, and becomes one event of the syncer's state machine. A syncer of one process has no lead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np

from atoll.bucket.uploader import StoreLag
from atoll.digests import combine_digests
from atoll.fabric.shard_channel import ShardChannel
from atoll.fabric.wire import MIB, one_line
from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import FragmentPlan
from atoll.numerics.screen import NormScreen, measure_part
from atoll.numerics.shard_plan import ShardPlan, exchange_of
from atoll.protocol import records
from atoll.protocol.effects import Note
from atoll.protocol.errors import AtollError, PeerError, RunFailed
from atoll.protocol.messages import Contribution, ContributionKey, Pull, RankBoxes, Welcome
from atoll.protocol.shard_messages import (
    AskInitial,
    BodyHere,
    CutHere,
    DeclareRanks,
    FromLead,
    FromShard,
    InitialHere,
    NormsHere,
    NormsOfAll,
    ShardHello,
    Stage,
    Staged,
    Traffic,
    Unstage,
    Unstaged,
)
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer import shard_effects as to_shards
from atoll.protocol.syncer import shards as pure
from atoll.protocol.syncer.shard_effects import HeldEffects, expect_answer, find_wrong_parts, merge_of
from atoll.syncer.contributions import LARGE, Inbox, Merging, PendingContribution
from atoll.syncer.model import Model
from atoll.syncer.parameters import Parameters
from atoll.syncer.run_store import CapturedCut, CutWriter, RunStore
from atoll.syncer.shard_norms import NormGathering, body_here, measured_of
from atoll.syncer.shared_filter import SharedFilter
from atoll.telemetry.events import EventLog

CHUNK = 16 * MIB
"""Of the finished model are fetched at a time."""
LEAD = to_shards.LEAD


class LeadService(Protocol):
    """What the lead needs of the service around it."""

    def handle_event(self, event: fx.SyncerEvent) -> None: ...

    def carry_out_held(self, effect: fx.SyncerEffect) -> None: ...

    def initial_part_here(self, shard: int, message: InitialHere) -> None: ...

    def close_all_learners(self, reason: str) -> None: ...

    def lost_shard(self) -> None: ...


class ShardLead:
    """The `ShardHandlers` of the fabric's server. Belongs to one event loop."""

    def __init__(
        self,
        shards: int,
        run_store: RunStore,
        events: EventLog,
        service: LeadService,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.state = pure.LeadShards(shards, run_store.term)
        run_store.trims_at_completion = True
        self._run_store, self._events, self._service, self._spawn = run_store, events, service, spawn
        self._loop = asyncio.get_running_loop()
        self._channels: dict[int, ShardChannel] = {}
        self._waiting: deque[to_shards.LeadEffect] = deque()
        self._busy = False
        self._digests: tuple[str, ...] = ()
        """Of the other shards' parts of the cut that is open."""
        self._were_there = False
        """All shards have been ready in this term."""
        self._held = HeldEffects()
        self._own_merges: dict[int, fx.Merged] = {}
        """By order: of the lead's own part, until all have staged theirs."""
        self._own_turn = asyncio.Lock()
        self._gatherings: dict[int, NormGathering] = {}
        """By order, of the lead's own merge in a thread."""
        self._void: set[int] = set()
        """Orders that were taken back while a thread carried them out."""
        self._cut_parts: dict[int, asyncio.Future[to_shards.CutPartsKept]] = {}
        self._cut_dones: dict[int, asyncio.Future[to_shards.CutPartsDone]] = {}
        self._values: dict[int, asyncio.Future[bytes]] = {}
        self._asks = 0
        self._traffic: dict[str, tuple[int, int]] = {}
        """By process: bytes in and out."""
        self._told_lags: dict[int, Traffic] = {}
        """By shard: with how far its part of the bucket is behind."""

    def set_up(
        self, model: Model, inbox: Inbox, screen: NormScreen, merging: Merging, cuts: CutWriter, plan: ShardPlan
    ) -> None:
        """The run has begun, now or in an earlier term."""
        self._model, self._inbox, self._screen, self._merging, self._cuts = model, inbox, screen, merging, cuts
        self.plan = plan
        merging.use_shards(plan)
        begun = model.history.begun
        self.state.restore_decisions(self._run_store.read_decisions())
        holders = [plan.holders(fragment) for fragment in range(len(model.plan.fragments))]
        self.state.begin_run(begun.run, records.encode(begun), holders)
        self._carry_out()

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that the other shards have received and sent in this term; those of dead processes count too."""
        found = self._traffic.values()
        return sum(bytes_in for bytes_in, _ in found), sum(bytes_out for _, bytes_out in found)

    def join_lags(self, own: StoreLag) -> StoreLag:
        """How far the bucket is behind with all parts of the syncer."""
        told = self._told_lags.values()
        trouble = [one.store_trouble for one in told if one.store_trouble]
        return StoreLag(
            own.url,
            max([own.rounds, *(one.store_rounds for one in told)]),
            max([own.seconds, *(one.store_s for one in told)]),
            own.trouble or next(iter(trouble), ""),
            own.known,
        )

    @property
    def _parameters(self) -> Parameters:
        return self._model.parameters

    # ---- channels -----------------------------------------------------------------------------------------------

    def refuse_learner(self) -> str:
        """Why nobody is let in yet; empty: they may come."""
        begun = bool(self.state.run)
        there = self._were_there if begun else all(seat.process for seat in self.state.seats.values())
        return "" if there else f"the syncer is not whole: {self.state.describe_missing()}"

    def shard_opened(self, channel: ShardChannel, hello: ShardHello) -> None:
        try:
            self.state.open_shard(self._loop.time(), hello)
        except PeerError as error:
            text = f"shard {hello.shard} was refused: {error}"
            self._events.say("refused", text, {"shard": hello.shard}, whose="shards")
            raise
        self._channels[hello.shard] = channel
        self._carry_out()

    def shard_said(self, channel: ShardChannel, message: FromShard) -> None:
        if self._channels.get(channel.shard) is not channel:
            return
        if isinstance(message, Traffic):
            process = self.state.seats[channel.shard].process
            self._traffic[process] = (message.bytes_in, message.bytes_out)
            self._told_lags[channel.shard] = message
        else:
            self.state.hear(self._loop.time(), channel.shard, message)
            self._carry_out()

    def shard_closed(self, channel: ShardChannel, reason: str) -> None:
        if self._channels.get(channel.shard) is channel:
            del self._channels[channel.shard]
            self.state.lose_shard(self._loop.time(), channel.shard, reason)
            self._service.lost_shard()
            for order in list(self._values):
                self._values.pop(order).cancel()
            self._carry_out()

    def _hear_own(self, message: FromShard) -> None:
        self.state.hear(self._loop.time(), LEAD, message)
        self._carry_out()

    def _carry_out(self) -> None:
        """In order, also where one leads to others."""
        self._waiting += self.state.take_effects()
        if self._busy:
            return
        self._busy = True
        try:
            while self._waiting:
                self._carry_out_one(self._waiting.popleft())
        finally:
            self._busy = False

    def _carry_out_one(self, effect: to_shards.LeadEffect) -> None:
        match effect:
            case to_shards.Order(1, message):
                self._order_own(message)
            case to_shards.Order(shard, message):
                if shard in self._channels:
                    self._channels[shard].send(message)
            case to_shards.Complete(learner, message, parts):
                refusal = self._screen_parts(learner, message, parts)
                self._service.handle_event(fx.Delivered(learner, message, refusal))
            case to_shards.Combine(merge, staged):
                self._service.handle_event(self._combine(effect, merge, dict(staged)))
            case to_shards.Tell(event):
                self._service.handle_event(event)
            case to_shards.CutPartsKept(cut):
                _resolve(self._cut_parts, cut, effect)
            case to_shards.CutPartsDone(cut):
                _resolve(self._cut_dones, cut, effect)
            case to_shards.InitialParts(shard, message):
                self._service.initial_part_here(shard, message)
            case to_shards.ValuesHere(_, message):
                _resolve(self._values, message.order, message.data)
            case to_shards.Moved(shard):
                self._service.close_all_learners(f"shard {shard} of the syncer has another address: connect again")
            case to_shards.AllThere():
                self._were_there = True
                for one in self._held.take_all():
                    self._service.carry_out_held(one)
            case Note():
                self._service.carry_out_held(effect)

    # ---- effects of the syncer's state machine --------------------------------------------------------------------

    def hold(self, effect: fx.SyncerEffect) -> bool:
        """Whether it waits for a shard that is away."""
        return self._held.hold(effect, all_ready=self.state.all_ready)

    def note_records(self, found: Sequence[records.AnyRecord]) -> None:
        """They are durable."""
        for record in found:
            if isinstance(record, records.ResetRecord):
                self._parameters.reset_outer_state(record.fragment)
            self.state.note_record(record)
        self._carry_out()

    def expect_body(self, learner: str, session: str, token: str, pull: Pull) -> None:
        self.state.expect_body(expect_answer(learner, session, pull, token))
        self._carry_out()

    def declare_ranks(self, learner: str, ranks: tuple[RankBoxes, ...]) -> None:
        self.state.declare_ranks(DeclareRanks(learner=learner, ranks=ranks))
        self._carry_out()

    def discard(self, body: ContributionKey) -> None:
        self.state.discard(body)
        self._carry_out()

    def address_shards(self, welcome: Welcome) -> Welcome:
        return msgspec.structs.replace(welcome, shards=self.state.addresses)

    def ask_initial(self, learner: str, session: str, token: str) -> None:
        self.state.ask_initial(AskInitial(learner=learner, session=session, token=token))
        self._carry_out()

    def end_initial(self) -> None:
        self.state.ask_initial(None)

    # ---- contributions ------------------------------------------------------------------------------------------

    def body_arrived(self, body: ContributionKey, fragment: int, digest: str) -> None:
        """The lead's own part of a contribution is whole."""
        if self._parameters.plan.fragments[fragment].size <= LARGE:
            self._hear_own(self._measure(body, fragment, digest))
        else:
            self._spawn(self._measure_in_thread(body, fragment, digest, self._inbox.hold_buffers(body)))

    async def _measure_in_thread(
        self, body: ContributionKey, fragment: int, digest: str, held: PendingContribution | None
    ) -> None:
        here = await asyncio.to_thread(self._measure, body, fragment, digest)
        self._inbox.release_buffers(body, held)
        self._hear_own(here)

    def _measure(self, body: ContributionKey, fragment: int, digest: str) -> BodyHere:
        try:
            delta = self._inbox.open_body(body, digest)
        except PeerError as error:
            return body_here(body, digest, None, reason=str(error))
        buffer, part = self._parameters.committed_buffers()[fragment], self._parameters.plan.fragments[fragment]
        measured = measure_part(part, delta, buffer.values, self._parameters.threads)
        return body_here(body, digest, measured, version=buffer.version)

    def hear_contribution(self, learner: str, message: Contribution) -> None:
        self.state.hear_contribution(learner, message)
        self._carry_out()

    def _screen_parts(self, learner: str, message: Contribution, parts: Sequence[BodyHere]) -> str | None:
        wrong = find_wrong_parts(message, parts, combine_digests)
        if wrong is not None or message.probe or message.steps <= 0:
            return wrong
        sizes = [self.plan.part(n, message.fragment).size for n in self.plan.holders(message.fragment)]
        measured = [measured_of(part, size, message.base) for part, size in zip(parts, sizes, strict=True)]
        return self._screen.judge_parts(
            message.fragment, measured, message.steps, (learner, message.round, message.attempt)
        )

    # ---- rounds -------------------------------------------------------------------------------------------------

    def merge(self, merge: fx.Merge) -> None:
        for part in merge.parts:
            self._screen.note_merged((part.learner, merge.round, part.attempt))
        self.state.merge(merge, compare=self._merging.robust)
        self._carry_out()

    def _order_own(self, message: FromLead) -> None:
        match message:
            case Stage():
                self._spawn(self._stage_own(message))
            case NormsOfAll(order=order, turn=turn, squares=squares):
                if (waits := self._gatherings.get(order)) is not None:
                    waits.give(turn, squares)
            case Unstage(order=order, fragment=fragment):
                if (waits := self._gatherings.get(order)) is not None:
                    waits.abandon()
                if order in self._own_merges:
                    del self._own_merges[order]
                    self._parameters.drop_staged(fragment)
                else:
                    self._void.add(order)

    async def _stage_own(self, stage: Stage) -> None:
        """One at a time: an order that was taken back may still be carried out."""
        merge = merge_of(stage)
        async with self._own_turn:
            gathering = NormGathering(partial(self._tell_own_norms, stage.order))
            exchange = exchange_of(self.plan, LEAD, stage.fragment, self._parameters.rule, gathering.gather)
            if stage.order in self._void:
                gathering.abandon()
            self._gatherings[stage.order] = gathering
            shared = SharedFilter(self.plan, LEAD, stage.round, gathering.gather) if stage.compare else None
            done = await asyncio.to_thread(self._merging.merge_and_step, merge, exchange, shared)
            del self._gatherings[stage.order]
            void = stage.order in self._void
            self._void.discard(stage.order)
            if isinstance(done, fx.Unmergeable):
                if not void:
                    self._hear_own(Unstaged(order=stage.order, reason=done.reason, reset=done.reset))
            elif void:
                self._parameters.drop_staged(stage.fragment)
            else:
                self._own_merges[stage.order] = done
                self._hear_own(Staged(order=stage.order, digest=done.digest, marks=done.marks, seconds=done.merge_s))

    def _tell_own_norms(self, order: int, turn: int, squares: bytes) -> None:
        self._hear_own(NormsHere(order=order, turn=turn, squares=squares))

    def _combine(self, effect: to_shards.Combine, merge: fx.Merge, staged: dict[int, Staged]) -> fx.Merged:
        own = self._own_merges.pop(staged[LEAD].order)
        holders = self.plan.holders(merge.fragment)
        return fx.Merged(
            merge.round,
            combine_digests([staged[n].digest for n in holders]),
            max(one.seconds for one in staged.values()),
            combine_marks(self._model.plan, self.plan, merge.fragment, {n: staged[n].marks for n in holders}),
            own.judged,
            heads=effect.heads(self.state.shards),
        )

    # ---- cuts ---------------------------------------------------------------------------------------------------

    async def write_first_cut(self, cut: fx.TakeCut) -> None:
        """Cut 0 is complete in every other shard before this process has any of it: with its own part the run has
        parameters, also for the next lead. NoRoom: try again later."""
        captured, waits = self._cuts.capture_state(cut), self._begin_cut(cut)
        self._hear_own(CutHere(cut=cut.cut))
        kept = await waits
        done = None if kept.reason else await self._finish_cut(fx.CompleteCut(cut.cut, (), ()))
        if reason := kept.reason or (done.reason if done is not None else ""):
            raise RunFailed(f"the first parameters were lost with a shard ({reason}): the syncer starts again")
        await self._cuts.write_part(captured, None)
        complete = partial(self._run_store.complete_cut, self.state.run, fx.CompleteCut(cut.cut, (), ()), kept.digests)
        await asyncio.to_thread(complete)

    def take_cut(self, cut: fx.TakeCut) -> None:
        kept = self._begin_cut(cut)
        self._spawn(self._write_cut(cut, self._cuts.capture_state(cut), kept))

    def _begin_cut(self, cut: fx.TakeCut) -> asyncio.Future[to_shards.CutPartsKept]:
        kept = self._cut_parts[cut.cut] = self._loop.create_future()
        self.state.take_cut(cut.cut, cut.cut, hurry=cut.first or cut.last)
        self._carry_out()
        return kept

    async def _write_cut(
        self, cut: fx.TakeCut, captured: CapturedCut, kept: asyncio.Future[to_shards.CutPartsKept]
    ) -> None:
        reason = ""
        try:
            await self._cuts.write_part(captured, self._cuts.rests_of(cut))
        except AtollError as error:
            reason = one_line(error)
        self._hear_own(CutHere(cut=cut.cut, reason=reason))
        found = await kept
        self._digests = found.digests
        self._service.handle_event(fx.CutKept(cut.cut, reason or found.reason))

    def complete_cut(self, done: fx.CompleteCut) -> None:
        self._spawn(self._complete_cut(done, self._finish_cut(done)))

    def _finish_cut(self, done: fx.CompleteCut) -> asyncio.Future[to_shards.CutPartsDone]:
        waits = self._cut_dones[done.cut] = self._loop.create_future()
        self.state.finish_cut(done.cut, self._run_store.kept_cuts, done.spared)
        self._carry_out()
        return waits

    async def _complete_cut(self, done: fx.CompleteCut, waits: asyncio.Future[to_shards.CutPartsDone]) -> None:
        try:
            if reason := (await waits).reason:
                raise RunFailed(reason)
            complete = partial(self._run_store.complete_cut, self.state.run, done, self._digests)
            mark = await asyncio.to_thread(complete)
        except AtollError as error:
            self._service.handle_event(fx.CutKept(done.cut, one_line(error)))
        else:
            self._service.handle_event(fx.CutWritten(done.cut, mark))

    # ---- the finished model ---------------------------------------------------------------------------------------

    async def fetch_whole(self) -> list[FloatArray]:
        """Every fragment's committed values, of all shards. RunFailed: one of them is away."""
        found = []
        for fragment in self._model.plan.fragments:
            values = np.empty(fragment.size, np.float32)
            for shard in self.plan.holders(fragment.index):
                into = values[self.plan.values(shard, fragment.index)]
                if shard == LEAD:
                    into[:] = self._parameters.committed_buffers()[fragment.index].values
                else:
                    await self._fetch_part(shard, fragment.index, into)
            found.append(values)
        return found

    async def _fetch_part(self, shard: int, fragment: int, into: FloatArray) -> None:
        data = into.view(np.uint8)
        for start in range(0, data.size, CHUNK):
            self._asks += 1
            came = self._values[self._asks] = self._loop.create_future()
            if not self.state.seats[shard].ready:
                raise RunFailed(f"shard {shard} is away: the model is written once it is back; resume the run then")
            self.state.ask_values(shard, self._asks, fragment, start, CHUNK)
            self._carry_out()
            try:
                part = await came
            except asyncio.CancelledError:
                raise RunFailed(f"shard {shard} was lost while the model was written: resume the run") from None
            data[start : start + CHUNK] = np.frombuffer(part, np.uint8)

    def end_run(self, reason: str) -> None:
        self.state.end_run(reason)
        self._carry_out()


def combine_marks(whole: FragmentPlan, plan: ShardPlan, fragment: int, marks: dict[int, bytes]) -> bytes:
    """A checksum of each piece of the whole fragment, of those of its parts (`VersionCheck.piece_marks`)."""
    fragment_of_all = whole.fragments[fragment]
    found = np.zeros(len(fragment_of_all.pieces), np.uint32)
    for shard, own in marks.items():
        for piece, mark in zip(plan.part(shard, fragment).pieces, np.frombuffer(own, np.uint32), strict=True):
            found[fragment_of_all.find_piece(piece)] ^= mark
    return found.tobytes()


def _resolve(waiting: dict[int, asyncio.Future[Any]], key: int, value: object) -> None:
    future = waiting.pop(key, None)
    if future is not None and not future.done():
        future.set_result(value)
