"""The syncer's service: events in, effects out, bytes in between.

The server hands over hellos, messages and bodies; the state machine of `protocol.syncer` decides; its effects go
through the effect queue, where only a merge, which nobody hears of, is carried out before the records in front of it
are durable. This file is the way of an event from the server to the state machine, and of an effect to the part that
carries it out:

- `model`: the run's model, from the first joiner or an earlier term; `first_parameters`: its version 0;
- `contributions`: their bodies, and the versions made of them; `relays`: those that came as sums;
- `ranks`: what each rank of a learner of several holds, and fetches;
- `run_store`: the journal, cuts, and the values of a rollback;
- `operator`: what an operator asks for; `ending`: whom the syncer waits for when the run is over;
- `lead`: the other shards, of a syncer of several.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from atoll.bucket.uploader import StoreLag
from atoll.choices import CODEC
from atoll.config import Config, Outer
from atoll.fabric.authorizer import TokenAuthorizer
from atoll.fabric.control_channel import ControlChannel
from atoll.fabric.handlers import ServedFragment, ServedPages
from atoll.fabric.join_tokens import NameOwners
from atoll.fabric.local_secrets import publish_secrets, withdraw_secrets
from atoll.fabric.server import Server
from atoll.fabric.tasks import VitalTasks, lasting
from atoll.fabric.wire import MIB, FabricLimits, ScoreReport, one_line
from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import largest_body, make_codec
from atoll.numerics.fragments import assemble_tensors
from atoll.numerics.group_sums import why_not_summed
from atoll.numerics.screen import UsualNorms
from atoll.numerics.shard_plan import make_shard_plan
from atoll.protocol import schedule
from atoll.protocol.effects import Note, Tick
from atoll.protocol.errors import AtollError, PeerError
from atoll.protocol.messages import Contribution, FromLearner, FromSyncer, Hello, Pull, Refused, Welcome
from atoll.protocol.settings import Settings
from atoll.protocol.shard_messages import InitialHere
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.machine import Syncer
from atoll.store.rundir import facts_of_model
from atoll.syncer.contributions import Inbox, Merging, make_screen, most_steps
from atoll.syncer.credentials import RefusalLog, make_port_access
from atoll.syncer.effect_queue import EffectQueue
from atoll.syncer.ending import RunEnding, write_tail
from atoll.syncer.first_parameters import FirstParameters, FirstUpload, refuse_learner
from atoll.syncer.lead import ShardLead
from atoll.syncer.liveness import Standstill, send_heartbeats
from atoll.syncer.model import (
    Model,
    contribution_bytes,
    model_of_earlier_terms,
    model_of_first_joiner,
    moments_room,
)
from atoll.syncer.operator import OperatorRequests
from atoll.syncer.ranks import LearnerRanks, check_ranks
from atoll.syncer.recovery import Recovered, outer_of
from atoll.syncer.relays import RelaySums
from atoll.syncer.run_store import CutWriter, Restorer, RunStore
from atoll.syncer.status import Meter, describe_score, manifest
from atoll.telemetry.events import EventLog, versions
from atoll.telemetry.status import RunStatus

NEVER_LET_IN = "whoever was never let in"
"""Causes refusals that name no learner."""


class SyncerService:
    """The `Handlers` of the fabric's server. Belongs to one event loop."""

    def __init__(
        self,
        config: Config,
        *,
        run: str,
        events: EventLog,
        run_store: RunStore,
        evaluated: bool = False,
        pages: ServedPages | None = None,
        limits: FabricLimits | None = None,
    ) -> None:
        self._config, self._run, self._events, self._run_store = config, run, events, run_store
        self._loop = asyncio.get_running_loop()
        self._channels: dict[str, ControlChannel] = {}
        self._machine: Syncer | None = None
        self._model: Model | None = None
        """Both are set once the run has begun, with everything that `_set_up` makes."""
        self._wake: asyncio.TimerHandle | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self.started = asyncio.Event()
        found = run_store.found_on_disk
        shards = config.service.shards if found is None else found.history.begun.shards
        self._lead = ShardLead(shards, run_store, events, self, self._spawn) if shards > 1 else None
        """None: this process is all of the syncer."""
        self._ending = RunEnding(events, evaluated=evaluated)
        self._refusals = RefusalLog(events, self._loop.time)
        self._standstill = Standstill(self._loop, self._look_for_standstill)
        self._effect_queue = EffectQueue(
            run_store.append,
            carry_out=self._carry_out,
            payload=self._payload,
            first_cut=self._write_first_cut,
            fenced=run_store.fenced,
            alarm=self._alarm,
            slow=run_store.describe_slowness,
        )
        self.operator = OperatorRequests(
            lambda: self._machine, self._handle, retunes=lambda: self._effect_queue.awaits(fx.Retune)
        )
        self.meter = Meter(config)
        self._access = access = make_port_access(
            config.service, lambda: self._run, events.say, secrets=run_store.secrets
        )
        self.meter.notice = access.notice
        known = NameOwners(run_store.found_on_disk.history.owners if run_store.found_on_disk is not None else None)
        apart = f"this run's syncer has {shards} shards, to which learners send directly: let them join it, no relay"
        self._relays = RelaySums(events.say, lambda: (self._run, run_store.term), apart if shards > 1 else "")
        host, port = config.service.host, config.service.port
        self.server = Server(
            self,
            host=host,
            port=port,
            limits=msgspec.structs.replace(limits or FabricLimits(), answer_s=config.protocol.heartbeat_s),
            pages=pages,
            authorizer=access.authorizer,
            tls=access.tls,
            owners=known,
            names=access.names,
            shards=self._lead,
            relays=self._relays,
        )
        if found is not None:
            self._come_back(found)
        else:
            self._announce()

    @property
    def name(self) -> str:
        """The run's."""
        return self._run

    async def run(self, save: Callable[[Mapping[str, FloatArray]], None]) -> None:
        """Serve until the run is over; `save` writes the finished model down."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            watch = tasks.create_task(self.vital.watch())
            writing = tasks.create_task(lasting("journal", self._effect_queue.run))
            beats = tasks.create_task(
                lasting("heartbeat", partial(send_heartbeats, self._run_store, self._run, self._norms))
            )
            # What the operator changed (a reopened run, more steps) is durable before anybody can connect: should this
            # syncer die now, its supervisor starts the next one without those options.
            await self._effect_queue.wait_until_empty()
            await self.server.start()
            self._publish_secrets()  # before the loop runs again, and with it anybody who has just connected
            self.started.set()
            self._standstill.start()
            self._handle(Tick())
            await self._ending.wait_until_finished()
            trained = self._machine is not None and min(self._machine.versions) >= 0
            if trained:
                self._ending.log_last_work()
                await asyncio.to_thread(save, await self._collect_tensors())
                cycles = self._config.service.tail_average
                await write_tail(cycles, self._run_store, self._effect_queue, self._events)
            self._ending.count_connected(len(self._channels))
            await self._ending.wait_for_last(trained=trained)
            self._handle(fx.Over())
            await self._effect_queue.wait_until_empty()
            if self._lead is not None:
                self._lead.end_run("the run is over")
            self._ending.log_end(self._machine, self._traffic)
            await self.server.stop()
            if self._access.secrets:
                withdraw_secrets(self.server.host, self.server.port)
            for task in (writing, beats, watch):
                task.cancel()
            self._standstill.stop()
            if self._wake is not None:
                self._wake.cancel()

    async def _collect_tensors(self) -> Mapping[str, FloatArray]:
        """The finished model, by the names of its tensors."""
        if self._lead is None or self._model is None:
            return self._parameters.tensors_by_name()
        return assemble_tensors(self._model.plan, await self._lead.fetch_whole())

    @property
    def vital(self) -> VitalTasks:
        """The tasks that must not fail: the port, the state machine, timers."""
        return self.server.vital

    def _publish_secrets(self) -> None:
        """A run with keys has none: only its join tokens count."""
        if self._access.secrets:
            publish_secrets(self.server.host, self.server.port, self._access.secrets)

    def dashboard_path(self) -> str:
        """The dashboard's path: with a code that works once, or to the page that asks for a join token."""
        authorizer = self._access.authorizer
        return (
            authorizer.make_code("viewer") if self._access.secrets and isinstance(authorizer, TokenAuthorizer) else "/"
        )

    def model_facts(self) -> dict[str, str]:
        """Which run and round the finished model is of."""
        machine = self._begun()
        return facts_of_model(self._run, machine.committed, machine.versions)

    def _norms(self) -> UsualNorms | None:
        return self._screen.usual_norms() if self._machine is not None and self._machine.committed else None

    def _alarm(self, text: str) -> None:
        self.meter.alarm = text
        self._events.say("alarm", text or "rounds are committed again", {"over": not text})

    # ---- beginning ----------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        protocol = self._config.protocol
        data: dict[str, object] = {"run": self._run, "learners": protocol.learners}
        data |= {"settings": msgspec.to_builtins(protocol), "versions": versions()}
        self._events.say("run", f"run {self._run}: waiting for {protocol.learners} learners", data)

    def _begin(self, hello: Hello) -> None:
        """Begin the run with the first joiner's model."""
        model = model_of_first_joiner(hello, self._config, self._run, self._run_store.term)
        self._set_up(model)
        self._effect_queue.enqueue([fx.Persist((model.history.begun,))])
        service = self._config.service
        told = model.describe(service.round_memory_mib * MIB, tail_average=service.tail_average > 0)
        self._events.say("plan", *told)

    def _come_back(self, found: Recovered) -> None:
        """Go on where an earlier term ended."""
        self._run = found.history.run
        self._set_up(model_of_earlier_terms(found))
        self._screen.restore_norms(self._run_store.read_norms(self._run))
        for remark in found.remarks:
            self._events.say("warning", remark)
        self._events.say("reigned", *found.describe())

    def _set_up(self, model: Model) -> None:
        history, settings = model.history, model.history.settings
        self._model, self._parameters = model, model.parameters
        codec = make_codec(settings.codec, self._parameters.threads)
        self._inbox = Inbox(self._parameters.plan, codec, moments=settings.shares_moments)
        declare = (lambda *ranks: None) if self._lead is None else self._lead.declare_ranks
        self._ranks = LearnerRanks(self._parameters.plan, model.plan, declare)
        self._screen = make_screen(model.plan, settings, outer_of(history).norm_limit, feedback=codec.needs_feedback)
        robust = outer_of(history).robust
        self._merging = Merging(self._parameters, self._inbox, self._screen, robust, self._handle, self._spawn)
        self._merging.relays = self._relays
        self._relays.begin(self._inbox, model.plan, codec, self._parameters.threads)
        self._set_relays(outer_of(history), settings)
        self._cuts = CutWriter(self._run_store, self._parameters, history.run, self._handle, self._spawn)
        self._restorer = Restorer(self._run_store, self._parameters, self._handle, self._spawn)
        self._machine = Syncer(history)
        flights = self._machine.rounds.flights
        moments = moments_room(model.plan, settings)
        flights.bodies = {name: largest_body(make_codec(name), model.plan) + moments for name in CODEC.names()}
        flights.contribution_bytes = contribution_bytes(model.plan, settings)
        flights.budget_bytes = self._config.service.round_memory_mib * MIB
        machine = self._machine
        first = FirstParameters(self._parameters, lambda: machine.phase == "empty")
        self._first = FirstUpload(first, self._ranks, self._channels, self._events, self._handle, self._lead)
        if self._lead is not None:
            plan = make_shard_plan(model.plan, history.begun.shards, (settings.codec, settings.version_codec))
            self._lead.set_up(model, self._inbox, self._screen, self._merging, self._cuts, plan)

    def _set_relays(self, outer: Outer, settings: Settings) -> None:
        """Whether relays sum what they hold, by these settings."""
        why_not = why_not_summed(
            outer.merge, self._parameters.plan, robust=outer.robust, moments=settings.shares_moments
        )
        self._relays.set_mode(outer.merge, why_not)

    def _begun(self) -> Syncer:
        """The state machine; PeerError while the run has not begun."""
        if self._machine is None:
            raise PeerError("the run has not begun")
        return self._machine

    # ---- the operator -------------------------------------------------------------------------------------------

    def end(self, reason: str) -> None:
        """End the run in good order, as the operator asked."""
        if self._machine is None:
            self._ending.finish_run(reason)
        else:
            self._handle(fx.EndAsked(reason))

    async def change(self, words: Sequence[str]) -> str:
        return await self.operator.change_settings(words)

    async def drain(self, learner: str) -> str:
        return await self.operator.drain_learner(learner)

    def unscored(self) -> None:
        """No evaluator is left: do not wait for its last score."""
        self.meter.scorer = False
        self._ending.stop_scoring()

    # ---- handlers: learners -------------------------------------------------------------------------------------

    def opened(self, channel: ControlChannel, hello: Hello) -> None:
        if self._lead is not None and (reason := self._lead.refuse_learner()):
            channel.send(Refused(reason=reason, final=False))
            channel.close(reason)
            return
        try:
            settings = self._config.protocol if self._machine is None else self._machine.settings
            check_ranks(hello, settings)
            if self._machine is None:
                self._begin(hello)
            self._check_model(hello, channel.token)
            self._ranks.add_learner(hello.learner, hello.ranks)
        except AtollError as error:
            reason = one_line(error)
            self._say_of_hello("refused", f"{hello.learner} was refused: {reason}", hello, channel.token)
            refuse_learner(channel, reason)
            return
        self._channels[channel.learner] = channel
        self._ending.count_connected(len(self._channels))
        self._handle(fx.Greeted(hello, channel.token))

    def _check_model(self, hello: Hello, token: str) -> None:
        assert self._model is not None
        self._model.check_learner(hello)
        if text := self._model.describe_other_data(hello):
            self._say_of_hello("warning", text, hello, token)

    def _say_of_hello(self, kind: str, text: str, hello: Hello, token: str) -> None:
        """At the cost of its token: a name that is not let in yet may be any."""
        self._events.say(kind, text, {"learner": hello.learner}, whose=f"the token {token!r}")

    def received(self, channel: ControlChannel, message: FromLearner) -> None:
        if self._channels.get(channel.learner) is not channel:
            return
        if isinstance(message, Contribution) and self._lead is not None:
            self._lead.hear_contribution(channel.learner, message)
        elif isinstance(message, Contribution):
            self._merging.screen_contribution(channel.learner, message)
        else:
            self._handle(fx.Received(channel.learner, message))

    def closed(self, channel: ControlChannel, reason: str) -> None:
        if self._channels.get(channel.learner) is channel:
            del self._channels[channel.learner]
            self._ranks.remove_learner(channel.learner)
            self._handle(fx.Lost(channel.learner, reason))
        self._ending.count_connected(len(self._channels))

    def turned_away(self, address: str, reason: str) -> None:
        self._refusals.log_refusal(address, reason)

    # ---- handlers: bodies ---------------------------------------------------------------------------------------

    def expect_contribution(
        self, learner: str, session: str, round: int, attempt: int, named: int, rank: int = 0
    ) -> memoryview:
        self._begun()
        return self._inbox.receive_body((learner, round, attempt), named, rank)

    def contribution_arrived(self, learner: str, round: int, attempt: int, digest: str, rank: int = 0) -> None:
        key = (learner, round, attempt)
        fragment, whole = self._inbox.fragment_of(key), self._inbox.mark_arrived(key, digest, rank)
        if self._lead is not None and fragment is not None and whole is not None:
            self._lead.body_arrived(key, fragment, whole)

    def contribution_aborted(self, learner: str, round: int, attempt: int, reason: str, rank: int = 0) -> None:
        self._inbox.mark_aborted((learner, round, attempt), rank)

    def expect_initial(self, learner: str, session: str, fragment: int, rank: int = 0) -> memoryview:
        self._begun()
        return self._first.expect_body(learner, session, fragment, rank)

    async def initial_arrived(
        self, learner: str, session: str, fragment: int, body: memoryview, digest: str, rank: int = 0
    ) -> None:
        await self._first.take_body(learner, session, fragment, body, digest, rank)

    def fragment(self, index: int, have: int) -> ServedFragment:
        if self._machine is None:
            raise PeerError("the run has no parameters yet")
        return self._parameters.serve_fragment(index, have)

    async def fragment_of_rank(self, index: int, learner: str, rank: int) -> ServedFragment:
        self._begun()
        return await self._ranks.serve_part(learner, rank, index, partial(self._parameters.serve_fragment, index))

    def moments(self, index: int, version: int) -> ServedFragment:
        self._begun()
        return self._parameters.serve_moments(index, version)

    def forwarding_wanted(self, ticket: str, learner: str, start: int) -> None:
        if (wrong := self._begun().peers.wrong_newcomer(ticket, learner)) is not None:
            raise PeerError(wrong)
        self._handle(fx.ForwardingWanted(ticket, start))

    def forwarding_allowed(self, ticket: str, learner: str) -> None:
        if (wrong := self._begun().peers.wrong_peer(ticket, learner)) is not None:
            raise PeerError(wrong)

    # ---- for the lead of several shards -----------------------------------------------------------------------------

    def handle_event(self, event: fx.SyncerEvent) -> None:
        self._handle(event)

    def carry_out_held(self, effect: fx.SyncerEffect) -> None:
        self._carry_out(effect)

    def initial_part_here(self, shard: int, message: InitialHere) -> None:
        self._first.hear_shard(shard, message)

    def lost_shard(self) -> None:
        """What it had of the first parameters is gone: they are sent anew."""
        if self._machine is not None and self._machine.phase == "empty":
            self.close_all_learners("a shard of the syncer was lost: the first parameters are sent anew")

    def close_all_learners(self, reason: str) -> None:
        for channel in list(self._channels.values()):
            channel.close(reason)

    # ---- handlers: people and evaluators --------------------------------------------------------------------------

    @property
    def _traffic(self) -> tuple[int, int]:
        """Bytes in and out, of all shards."""
        bytes_in, bytes_out = (0, 0) if self._lead is None else self._lead.traffic
        return (self.server.bytes_in + bytes_in, self.server.bytes_out + bytes_out)

    def show_store(self, own: Callable[[], StoreLag]) -> None:
        self.meter.store = own if (lead := self._lead) is None else lambda: lead.join_lags(own())

    def figures(self) -> RunStatus:
        return self.meter.make_status(time.time(), self._run, self._machine, self._traffic)

    def status(self) -> bytes:
        return msgspec.json.encode(self.figures())

    def manifest(self) -> bytes:
        machine, shards = self._begun(), () if self._lead is None else self._lead.state.addresses
        assert self._model is not None
        return manifest(machine, self._model.plan, self._config.service.evaluate_every, shards)

    def score(self, score: ScoreReport) -> None:
        self.meter.note_score(score)
        self._events.say("score", *describe_score(score))
        if score.has_loss:
            self._handle(fx.Scored(score.round, score.loss))
        self._ending.note_score(final=score.final, took_s=score.cpu_s)

    # ---- the machine --------------------------------------------------------------------------------------------

    def _handle(self, event: fx.SyncerEvent) -> None:
        if self._machine is None:
            return
        try:
            self._look_for_standstill()
            self._effect_queue.enqueue(self._machine.handle(self._loop.time(), event))
            self._wake_at(self._machine.wake_at)
        except Exception as error:  # half an event may be handled: the next term goes on from the journal
            self.vital.fail(error)
            raise

    def _look_for_standstill(self) -> None:
        """Called before every event: no deadline may count the time in which this loop stood still."""
        now = self._loop.time()
        stood_s = self._standstill.take_standstill_s(now)
        if self._machine is None:
            return
        if self._lead is not None and (away_s := self._lead.state.take_standstill_s(now)) > 0:
            self._effect_queue.enqueue(self._machine.handle(now, fx.StoodStill(away_s)))
            stood_s = 0.0
        if not stood_s:
            return
        text = f"the syncer stood still for {stood_s:.1f} s: nobody's silence counts for that time"
        self._events.say("warning", text, {"seconds": round(stood_s, 3)})
        self._effect_queue.enqueue(self._machine.handle(now, fx.StoodStill(stood_s)))
        self._wake_at(self._machine.wake_at)

    def _wake_at(self, moment: float | None) -> None:
        if self._wake is not None and self._wake.when() != moment:
            self._wake.cancel()
            self._wake = None
        if self._wake is None and moment is not None:
            self._wake = self._loop.call_at(moment, self._tick)

    def _tick(self) -> None:
        self._wake = None
        self._handle(Tick())

    def _carry_out(self, effect: fx.SyncerEffect) -> None:
        if self._lead is not None and (self._lead.hold(effect) or self._carry_out_with_shards(self._lead, effect)):
            return
        match effect:
            case fx.Send(learner, message):
                self._send(learner, message)
            case fx.ConfirmSent(number, attempt, probed):
                self._handle(fx.PullsSent(number, attempt, probed))
            case fx.Merge():
                self._merging.merge_round(effect)
            case fx.Commit(number, fragment, version):
                self._parameters.commit_version(fragment, version, number)
                self._relays.settle_round(number, merged=True)
            case fx.Restore():
                self._restorer.prepare_values(effect)
            case fx.CommitRestored(versions, at):
                self._restorer.commit_values(versions, at)
            case fx.Retune(outer):
                self._retune(msgspec.convert(outer, Outer))
                self.operator.note_changed()
            case fx.TakeCut():
                self._cuts.take_cut(effect)
            case fx.CompleteCut():
                self._cuts.complete_cut(effect)
            case fx.Discard(learner, number, attempt):
                self._merging.discard((learner, number, attempt))
            case fx.Expel(learner, reason):
                if (channel := self._channels.pop(learner, None)) is not None:
                    self._ranks.remove_learner(learner)
                    channel.close(reason)
            case fx.Finished(reason):
                self._ending.finish_run(reason)
            case Note(kind, text, data):
                if answer := data.get("answer"):
                    text += f": atoll set {shlex.quote(str(self._run_store.folder))} {answer}"
                if kind == "round" and isinstance(index := data["fragment"], int):
                    data = {**data, **self._merging.describe_outer_step(index)}
                self.operator.note_event(kind, text, data)
                self.meter.note_event(time.time(), kind, data, text)
                refused = kind == "refused" and "learner" not in data
                self._events.say(kind, text, data, whose=NEVER_LET_IN if refused else "")

    def _carry_out_with_shards(self, lead: ShardLead, effect: fx.SyncerEffect) -> bool:
        """Whether that is all that there is to do."""
        match effect:
            case fx.Persist(found):
                lead.note_records(found)
            case fx.Merge():
                lead.merge(effect)
            case fx.TakeCut():
                lead.take_cut(effect)
            case fx.CompleteCut():
                lead.complete_cut(effect)
            case fx.Discard(learner, number, attempt):
                lead.discard((learner, number, attempt))
                return False
            case _:
                return False
        return True

    async def _write_first_cut(self, cut: fx.TakeCut) -> None:
        await (self._cuts.write_first(cut) if self._lead is None else self._lead.write_first_cut(cut))

    def _send(self, learner: str, message: FromSyncer) -> None:
        channel = self._channels.get(learner)
        if isinstance(message, Pull):
            key, plans = (learner, message.round, message.attempt), self._ranks.plans_of(learner)
            self._inbox.expect_body(key, message.fragment, probe=message.probe, plans=plans)
            if self._lead is not None and channel is not None:
                self._lead.expect_body(learner, channel.session, channel.token, message)
        elif isinstance(message, Welcome) and message.upload and channel is not None:
            self._first.ask_learner(channel)
        if self._lead is not None and isinstance(message, Welcome):
            message = self._lead.address_shards(message)
        if channel is not None:
            channel.send(message)

    def _retune(self, outer: Outer) -> None:
        self._parameters.change_outer(outer)
        self._screen.limit, self._merging.robust = outer.norm_limit, outer.robust
        self._screen.most_steps = most_steps(self._begun().settings)
        self._set_relays(outer, self._begun().settings)

    def _payload(self, persist: fx.Persist) -> memoryview | None:
        """What the journal keeps beside the records of a round, or of a rollback."""
        if persist.restored:
            return self._restorer.packed.data
        if persist.round < 0:
            return None
        assert self._machine is not None
        fragment = schedule.fragment_of(persist.round, self._machine.settings)
        return self._parameters.round_payload(fragment)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(work)
