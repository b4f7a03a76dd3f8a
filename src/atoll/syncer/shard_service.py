"""A shard of the syncer at work (docs/adr/0031): the lead's orders in, bodies in, effects carried out.

What it does and in which order is decided by protocol/shard.py; this file does it: on its part of the model
(`Parameters` and `Inbox` on its shard plan), on its folder (`ShardStore`), at its port (`ShardServer`). Large fragments
are worked on in threads, as the lead does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec
import numpy as np

from atoll.fabric.handlers import ServedFragment
from atoll.fabric.shard_channel import LeadConnection
from atoll.fabric.shard_server import ShardServer
from atoll.fabric.wire import one_line
from atoll.numerics.codec import make_codec
from atoll.numerics.merge import NormExchange
from atoll.numerics.rank_plan import check_tiling
from atoll.numerics.screen import measure_part
from atoll.numerics.shard_plan import exchange_of
from atoll.protocol import shard as sh
from atoll.protocol.errors import AtollError, PeerError
from atoll.protocol.messages import ContributionKey
from atoll.protocol.shard_messages import (
    AskInitial,
    AskValues,
    BodyHere,
    CutDone,
    CutHere,
    DeclareRanks,
    Expect,
    FinishCut,
    FromShard,
    InitialHere,
    RoundDecided,
    Stage,
    TakeUp,
    Traffic,
    Values,
)
from atoll.store.disk import NoRoom, Rests
from atoll.store.writer_lease import Deposed
from atoll.syncer.contributions import LARGE, Inbox, PendingContribution
from atoll.syncer.credentials import PortAccess
from atoll.syncer.first_parameters import FirstParameters, InitialBody
from atoll.syncer.outer_state import Overflow
from atoll.syncer.parameters import Parameters
from atoll.syncer.ranks import LearnerRanks
from atoll.syncer.shard_norms import NormGathering, body_here
from atoll.syncer.shard_store import CapturedPart, ShardStore
from atoll.syncer.shared_filter import SharedFilter
from atoll.syncer.versions import VersionBuffer

AGAIN_S = 0.1
"""Between two tries on a full disk."""


class ShardEnded(Exception):
    """The lead said so; `refused`: this process may not take part."""

    def __init__(self, reason: str, refused: bool) -> None:
        super().__init__(reason)
        self.refused = refused


class ShardService:
    """The `ShardBodies` of its port. Belongs to one event loop."""

    def __init__(
        self,
        machine: sh.Shard,
        store: ShardStore,
        lead: str,
        access: PortAccess,
        *,
        host: str,
        port: int,
        tell_operator: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._machine, self._store, self._tell_operator = machine, store, tell_operator
        self._lead_is_lost = False
        self._last_reason = ""
        """Why it ends when the lead is gone; empty: it dials the lead again."""
        self._parameters: Parameters | None = None
        self._inbox: Inbox | None = None
        self._learner_ranks: LearnerRanks | None = None
        self._initial: FirstParameters | None = None
        self._expected: dict[ContributionKey, Expect] = {}
        self._asked: AskInitial | None = None
        self._gatherings: dict[int, NormGathering] = {}
        """By order, of merges in threads."""
        self._tasks: asyncio.TaskGroup | None = None
        self._ended: asyncio.Future[ShardEnded] = asyncio.get_running_loop().create_future()
        self.url = ""
        """Where learners reach it; set before it runs."""
        self.server = ShardServer(
            self, host=host, port=port, authorizer=access.authorizer, tls=access.tls, names=access.names
        )
        self._lead = LeadConnection(
            lead,
            hello=lambda: machine.hello(self.url, store.cuts),
            on_message=lambda message: self._handle(sh.LeadSaid(message)),
            on_lost=self._lose_lead,
        )

    def _lose_lead(self, reason: str) -> None:
        if not self._lead_is_lost:
            self._lead_is_lost = True
            self._tell_operator(f"the first shard is out of reach ({reason}); dialling again")
        self._handle(sh.LeadLost())
        if self._last_reason:
            self.end(self._last_reason)

    def end_with_lead(self, reason: str) -> None:
        """Nobody would start another process: it stays for as long as the lead, which brings the run to its end."""
        self._last_reason = reason
        if not self._lead.up:
            self.end(reason)

    def end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(ShardEnded(reason, refused=False))

    async def run(self) -> ShardEnded:
        """Once the port is open: until the lead, or the operator, ends it. Why."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            lasting = [
                tasks.create_task(self._lead.run()),
                tasks.create_task(self.server.vital.watch()),
                tasks.create_task(self._send_heartbeats()),
            ]
            self._store.start_upload()
            ended = await self._ended
            self._store.stop_upload()
            for waits in self._gatherings.values():
                waits.abandon()
            await self.server.stop()
            for task in lasting:
                task.cancel()
        return ended

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.to_thread(self._store.send_heartbeat)
            if self._store.fenced:
                raise Deposed
            self._tell_traffic()
            await asyncio.sleep(1.0)

    def _tell_traffic(self) -> None:
        lag = self._store.store_lag()
        self._say(
            Traffic(
                bytes_in=self.server.bytes_in,
                bytes_out=self.server.bytes_out,
                store_rounds=lag.rounds,
                store_s=lag.seconds,
                store_trouble=one_line(lag.trouble) if lag.trouble else "",
            )
        )

    # ---- the machine --------------------------------------------------------------------------------------------

    def _handle(self, event: sh.ShardEvent) -> None:
        for effect in self._machine.handle(event):
            self._carry_out(effect)

    def _carry_out(self, effect: sh.ShardEffect) -> None:
        match effect:
            case sh.TellLead(message):
                self._say(message)
            case sh.RestoreParameters(take_up):
                self._spawn(self._take_up(take_up))
            case sh.KnowRanks(declared):
                self._know_ranks(declared)
            case sh.ExpectBody(expect):
                self._expected[expect.body] = expect
                plans = self._ranks.plans_of(expect.learner)
                self._room.expect_body(expect.body, expect.fragment, probe=expect.probe, plans=plans)
                self._spawn(self.server.announce_news())
            case sh.FreeBody(body):
                self._expected.pop(body, None)
                self._room.discard(body)
            case sh.AskFor(asked):
                self._ask_for(asked)
            case sh.Step(stage):
                self._spawn(self._step(stage))
            case sh.UseNorms(norms):
                if (waits := self._gatherings.get(norms.order)) is not None:
                    waits.give(norms.turn, norms.squares)
            case sh.Abandon(order):
                if (waits := self._gatherings.get(order)) is not None:
                    waits.abandon()
            case sh.Write(stage, digest):
                self._spawn(self._write(stage, digest))
            case sh.Undo(fragment):
                self._model.drop_staged(fragment)
            case sh.Apply(RoundDecided() as decision, staged):
                self._commit(decision, staged=staged)
            case sh.Apply(decision):
                self._store.apply_other(self._model, decision)
            case sh.CaptureCut(write):
                captured = self._store.capture(self._model, write.cut, write.round)
                held = self._model.committed_buffers()
                self._spawn(self._write_part(captured, held, None if write.hurry else Rests()))
            case sh.CompletePart(finish):
                self._spawn(self._complete_part(finish))
            case sh.ReadValues(asked):
                self._say(self._read_values(asked))
            case sh.LeaveLead():
                self._lead.hang_up()
            case sh.End(reason, refused):
                if not self._ended.done():
                    self._ended.set_result(ShardEnded(reason, refused))

    def _say(self, message: FromShard) -> None:
        self._lead.send(msgspec.structs.replace(message, term=self._machine.term))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(work)

    @property
    def _model(self) -> Parameters:
        assert self._parameters is not None, "orders come behind TakeUp"
        return self._parameters

    @property
    def _room(self) -> Inbox:
        assert self._inbox is not None, "orders come behind TakeUp"
        return self._inbox

    @property
    def _ranks(self) -> LearnerRanks:
        assert self._learner_ranks is not None, "orders come behind TakeUp"
        return self._learner_ranks

    @property
    def _first(self) -> FirstParameters:
        assert self._initial is not None, "orders come behind TakeUp"
        return self._initial

    async def _take_up(self, message: TakeUp) -> None:
        try:
            parameters, rounds = await asyncio.to_thread(self._store.take_up, message)
        except (AtollError, MemoryError) as error:
            reason = one_line(error) or "its part of the model does not fit into this machine's memory"
            self._handle(sh.TookUp(self._store.run, reason=reason))
            return
        assert self._store.begun is not None
        self._parameters = parameters
        self._inbox = Inbox(parameters.plan, make_codec(self._store.begun.settings.codec, parameters.threads))
        self._learner_ranks, self._initial = LearnerRanks(parameters.plan), FirstParameters(parameters)
        self._expected.clear()
        self._asked = None
        self._lead_is_lost = False
        self._tell_operator(f"part of run {self._store.run}" + (f", {rounds} rounds made again" if rounds else ""))
        self._handle(sh.TookUp(self._store.run, rounds))

    # ---- rounds -------------------------------------------------------------------------------------------------

    async def _step(self, stage: Stage) -> None:
        model, gathering = self._model, NormGathering(partial(self._tell_norms, stage.order))
        assert self._store.plan is not None
        exchange = exchange_of(self._store.plan, self._machine.shard, stage.fragment, model.rule, gathering.gather)
        shared = None
        if stage.compare:
            shared = SharedFilter(self._store.plan, self._machine.shard, stage.round, gathering.gather)
        elif exchange is None and model.plan.fragments[stage.fragment].size <= LARGE:
            self._handle(self._merge(stage, None, None))
            return
        self._gatherings[stage.order] = gathering
        try:
            done = await asyncio.to_thread(self._merge, stage, exchange, shared)
        finally:
            del self._gatherings[stage.order]
        self._handle(done)

    def _tell_norms(self, order: int, turn: int, squares: bytes) -> None:
        if order in self._gatherings:
            self._handle(sh.Measured(order, turn, squares))

    def _merge(
        self, stage: Stage, exchange: NormExchange | None, shared: SharedFilter | None
    ) -> sh.PartStepped | sh.StepFailed:
        began, model, fragment = time.perf_counter(), self._model, stage.fragment
        try:
            deltas = [self._room.get_delta((one.learner, stage.round, one.attempt)) for one in stage.given]
        except KeyError:
            return sh.StepFailed(
                stage.order, f"shard {self._machine.shard} lacks a contribution to round {stage.round}"
            )
        weights, bases = [one.weight for one in stage.given], [one.base for one in stage.given]
        try:
            factors = shared.hear_factors(fragment, deltas, model) if shared is not None else ()
            digest = model.stage_merge(fragment, deltas, weights, factors, bases, exchange=exchange)
        except Overflow as error:
            return sh.StepFailed(stage.order, str(error), reset=True)
        except ValueError as error:
            return sh.StepFailed(stage.order, str(error))
        return sh.PartStepped(stage.order, digest, model.piece_marks(fragment), time.perf_counter() - began)

    async def _write(self, stage: Stage, digest: str) -> None:
        data = self._model.round_payload(stage.fragment)
        append = partial(self._store.append_round, stage.round, stage.attempt, stage.fragment, digest, data)
        if (head := await asyncio.to_thread(_append_if_room, append)) is None:
            asyncio.get_running_loop().call_later(AGAIN_S, lambda: self._spawn(self._write(stage, digest)))
        else:
            self._handle(sh.Written(stage.order, head))
            await asyncio.to_thread(self._store.settle)

    def _commit(self, decision: RoundDecided, *, staged: bool) -> None:
        if staged:
            self._model.commit_version(decision.fragment, decision.version, decision.round)
        else:  # it was staged by the process before this one, or on an earlier connection: rare, so the loop may wait
            record, data = self._store.read_round(decision)
            self._store.replay(self._model, decision, record, data)
        self._spawn(self.server.announce_news())

    def _read_values(self, asked: AskValues) -> Values:
        values = self._model.committed_buffers()[asked.fragment].values.view(np.uint8)
        data = values[asked.start : asked.start + asked.size].tobytes()
        return Values(order=asked.order, fragment=asked.fragment, start=asked.start, data=data)

    # ---- cuts ---------------------------------------------------------------------------------------------------

    async def _write_part(self, captured: CapturedPart, held: list[VersionBuffer], rests: Rests | None) -> None:
        try:
            digest = await asyncio.to_thread(self._store.write_part, captured, rests)
        except AtollError as error:
            self._handle(sh.Came(CutHere(cut=captured.cut, reason=one_line(error))))
        else:
            self._handle(sh.Came(CutHere(cut=captured.cut, digest=digest)))
        finally:
            for buffer in held:
                buffer.readers -= 1

    async def _complete_part(self, finish: FinishCut) -> None:
        reason = ""
        try:
            await asyncio.to_thread(self._store.complete_part, finish)
        except AtollError as error:
            reason = one_line(error)
        self._tell_traffic()  # the last cut is the last that the lead hears of a run
        self._handle(sh.Came(CutDone(cut=finish.cut, reason=reason)))

    # ---- bodies: contributions ------------------------------------------------------------------------------------

    def _know_ranks(self, declared: DeclareRanks) -> None:
        """They were checked by the lead; what does not fit this shard's plan would be a mistake of ours, and no body of
        it is taken."""
        assert self._store.plan is not None
        try:
            if declared.ranks:
                check_tiling(self._store.plan.whole.tensors, declared.ranks)
            self._ranks.add_learner(declared.learner, declared.ranks)
        except AtollError as error:
            self._ranks.remove_learner(declared.learner)
            self._tell_operator(f"the ranks of {declared.learner} cannot be served: {one_line(error)}")
        self._spawn(self.server.announce_news())

    def is_expected(self, body: ContributionKey) -> bool:
        return body in self._expected

    def expect_contribution(self, body: ContributionKey, session: str, token: str, named: int, rank: int) -> memoryview:
        if (expect := self._expected.get(body)) is None:
            raise PeerError(f"no contribution to round {body[1]} (attempt {body[2]}) is waited for")
        if (expect.session, expect.token) != (session, token):
            raise PeerError(f"{body[0]} came to the lead under another session or token than this request shows")
        return self._room.receive_body(body, named, rank)

    def contribution_aborted(self, body: ContributionKey, rank: int) -> None:
        self._room.mark_aborted(body, rank)

    def contribution_arrived(self, body: ContributionKey, digest: str, rank: int) -> None:
        whole = self._room.mark_arrived(body, digest, rank)
        if (expect := self._expected.get(body)) is None:
            return  # it was discarded meanwhile
        if whole is not None:  # of all ranks
            self._measure_body(expect, whole)

    def _measure_body(self, expect: Expect, digest: str) -> None:
        body = expect.body
        if self._model.plan.fragments[expect.fragment].size <= LARGE:
            self._handle(sh.Came(self._measure(expect, digest)))
        else:
            self._spawn(self._measure_in_thread(expect, digest, self._room, self._room.hold_buffers(body)))

    async def _measure_in_thread(
        self, expect: Expect, digest: str, room: Inbox, held: PendingContribution | None
    ) -> None:
        here = await asyncio.to_thread(self._measure, expect, digest)
        room.release_buffers(expect.body, held)
        self._handle(sh.Came(here))

    def _measure(self, expect: Expect, digest: str) -> BodyHere:
        try:
            delta = self._room.open_body(expect.body, digest)
        except PeerError as error:
            return body_here(expect.body, digest, None, reason=str(error))
        buffer = self._model.committed_buffers()[expect.fragment]
        part = self._model.plan.fragments[expect.fragment]
        measured = measure_part(part, delta, buffer.values, self._model.threads)
        return body_here(expect.body, digest, measured, version=buffer.version)

    # ---- bodies: first parameters, and fragments ------------------------------------------------------------------

    def is_asked(self, learner: str) -> bool:
        return self._asked is not None and self._asked.learner == learner

    def _ask_for(self, asked: AskInitial) -> None:
        self._asked = asked
        self._first.ask_learner(asked.learner, asked.session)
        if self._first.is_complete:
            self._handle(sh.Came(InitialHere(learner=asked.learner, session=asked.session, complete=True)))
        self._spawn(self.server.announce_news())

    def _check_asked(self, learner: str, session: str) -> AskInitial:
        asked = self._asked
        if asked is None or (asked.learner, asked.session) != (learner, session):
            raise PeerError(f"{learner} was not asked for the first parameters")
        return asked

    def expect_initial(
        self, learner: str, session: str, token: str, fragment: int, rank: int, codec: str = ""
    ) -> memoryview:
        if self._check_asked(learner, session).token != token:
            raise PeerError(f"{learner} came to the lead under another token than this request shows")
        body = self._first.make_room(fragment, self._ranks.find_sender(learner, rank), codec)
        self._handle(sh.Came(InitialHere(learner=learner, session=session, size=body.nbytes)))
        return body

    async def initial_arrived(
        self, learner: str, session: str, fragment: int, body: memoryview, digest: str, rank: int, codec: str = ""
    ) -> None:
        plan = self._ranks.find_sender(learner, rank)
        received = await self._first.read_body(fragment, plan, body, digest, codec)
        self._check_asked(learner, session)
        if not received.finite:
            reason = f"fragment {fragment} of the first parameters is not finite"
            self._handle(sh.Came(InitialHere(learner=learner, session=session, reason=reason)))
            return
        whole: InitialBody | None = received
        if plans := self._ranks.plans_of(learner):
            whole = await self._first.join_part(fragment, rank, plans, received, codec)
            self._check_asked(learner, session)
        if whole is not None:
            self._first.accept_fragment(fragment, whole)
        complete = whole is not None and self._first.is_complete
        self._handle(sh.Came(InitialHere(learner=learner, session=session, complete=complete)))

    def committed_version(self, fragment: int) -> int:
        model = self._served()
        if fragment >= len(model.plan.fragments):
            raise PeerError(f"there is no fragment {fragment}: the run has {len(model.plan.fragments)}")
        return model.committed_buffers()[fragment].version

    def fragment(self, index: int, have: int, codec: str = "") -> ServedFragment:
        return self._served().serve_fragment(index, have, codec)

    def knows_rank(self, learner: str, rank: int) -> bool:
        return self._learner_ranks is not None and rank < len(self._ranks.plans_of(learner))

    async def fragment_of_rank(self, index: int, learner: str, rank: int, codec: str = "") -> ServedFragment:
        serve = partial(self._served().serve_fragment, index)
        return await self._ranks.serve_part(learner, rank, index, serve, codec)

    def _served(self) -> Parameters:
        if self._parameters is None:
            raise PeerError("this shard has no parameters yet")
        return self._parameters


def _append_if_room(append: Callable[[], str]) -> str | None:
    """None: the disk is full. The lead says that nothing is committed, since it waits."""
    try:
        return append()
    except NoRoom:
        return None
