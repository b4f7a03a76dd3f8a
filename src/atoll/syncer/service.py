"""The syncer's service: events in, effects out, bytes in between.

The server hands over hellos, messages and bodies; the state machine of `protocol.syncer` decides; its effects go
through the effect queue, where only a merge, which nobody hears of, is carried out before the records in front of it
are durable. This file is the way of an event from the server to the state machine. What is beside it:

- `model`: the run's model, from the first joiner or an earlier term;
- `begun_run`: what is made of it, and which part carries out an effect;
- `run_store`: the journal; `operator`: what an operator asks for; `ending`: whom the syncer waits for when the run is
  over; `lead`: the other shards, of a syncer of several.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from atoll.bucket.uploader import StoreLag
from atoll.config import Config
from atoll.fabric.control_channel import ControlChannel
from atoll.fabric.handlers import ServedFragment, ServedPages
from atoll.fabric.join_tokens import NameOwners
from atoll.fabric.server import Server
from atoll.fabric.tasks import VitalTasks, lasting
from atoll.fabric.wire import MIB, FabricLimits, ScoreReport, one_line
from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import assemble_tensors
from atoll.numerics.screen import UsualNorms
from atoll.protocol.effects import Note
from atoll.protocol.errors import AtollError, PeerError
from atoll.protocol.messages import Contribution, FromLearner, Hello, Refused
from atoll.protocol.relay import RelayRates
from atoll.protocol.shard_messages import InitialHere
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.machine import Syncer
from atoll.store.rundir import facts_of_model
from atoll.syncer.begun_run import BegunRun
from atoll.syncer.credentials import RefusalLog, make_port_access
from atoll.syncer.effect_queue import EffectQueue
from atoll.syncer.ending import RunEnding, write_tail
from atoll.syncer.evaluator_presence import EvaluatorPresence
from atoll.syncer.first_parameters import refuse_learner
from atoll.syncer.lead import ShardLead
from atoll.syncer.liveness import send_heartbeats
from atoll.syncer.machine_clock import MachineClock
from atoll.syncer.model import (
    Model,
    model_of_earlier_terms,
    model_of_first_joiner,
)
from atoll.syncer.operator import OperatorRequests
from atoll.syncer.ranks import check_ranks
from atoll.syncer.recovery import Recovered
from atoll.syncer.relays import RelaySums
from atoll.syncer.run_store import RunStore
from atoll.syncer.status import Meter, describe_score, manifest
from atoll.telemetry.events import EventLog, versions
from atoll.telemetry.round_members import MemberSampler
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
        score_wait_s: float = 0.0,
        earlier_relays: Collection[str] = (),
        pages: ServedPages | None = None,
        limits: FabricLimits | None = None,
    ) -> None:
        """`earlier_relays`: those that were here before this syncer started. One that stays away is shown as gone."""
        self._config, self._run, self._events, self._run_store = config, run, events, run_store
        self._channels: dict[str, ControlChannel] = {}
        self.begun: BegunRun | None = None
        """None: no learner has brought a model yet."""
        self._tasks: asyncio.TaskGroup | None = None
        self.started = asyncio.Event()
        found = run_store.found_on_disk
        shards = config.service.shards if found is None else found.history.begun.shards
        self._lead = ShardLead(shards, run_store, events, self, self._spawn) if shards > 1 else None
        """None: this process is all of the syncer."""
        self._ending = RunEnding(events, evaluated=evaluated, score_wait_s=score_wait_s)
        self._refusals = RefusalLog(events, asyncio.get_running_loop().time)
        self._effect_queue = EffectQueue(
            run_store.append,
            carry_out=self._carry_out,
            payload=self._payload,
            first_cut=self._write_first_cut,
            fenced=run_store.fenced,
            alarm=self._alarm,
            slow=run_store.describe_slowness,
            settle=run_store.settle,
        )
        self.operator = OperatorRequests(
            lambda: self._machine, self._handle, retunes=lambda: self._effect_queue.awaits(fx.Retune)
        )
        self.meter = Meter(config)
        self._evaluator = EvaluatorPresence(events.say)
        self._members = MemberSampler()
        self.meter.evaluator = lambda: (self._evaluator.here, self._evaluator.heard_at)
        succeeds = () if found is None else found.history.begun.succeeds
        self._access = access = make_port_access(
            config.service, lambda: self._run, events.say, secrets=run_store.secrets, succeeds=succeeds
        )
        self.meter.notice, self.meter.standby = access.notice, lambda: run_store.standby
        self.meter.upload = lambda: self.begun.first.describe_progress() if self.begun is not None else ""
        self.meter.disk_free_bytes = lambda: run_store.disk_free_bytes
        known = NameOwners(None if found is None else found.history.owners)
        apart = f"this run's syncer has {shards} shards, to which learners send directly: let them join it, no relay"
        refusal, of_run = apart if shards > 1 else "", lambda: (self._run, run_store.term)
        self._relays = RelaySums(events.say, of_run, refusal, self._note_relay_rates)
        self._relays.traffic.update((name, (0, 0)) for name in earlier_relays)
        self.meter.relays = self._relays.list_relays
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
        self._clock = MachineClock(
            lambda: self._machine, self._effect_queue.enqueue, events, self._lead, self.vital.fail
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
            # Before the loop runs again, and with it anybody who has just connected.
            self._access.publish(self.server.host, self.server.port)
            self.started.set()
            self._clock.start()
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
            self._ending.log_end(self._machine, self._traffic, self._relays.list_relays())
            await self.server.stop()
            self._access.withdraw(self.server.host, self.server.port)
            for task in (writing, beats, watch):
                task.cancel()
            self._clock.stop()
            self._evaluator.stop()

    async def _collect_tensors(self) -> Mapping[str, FloatArray]:
        """The finished model, by the names of its tensors."""
        run = self._require_begun()
        if self._lead is None:
            return run.parameters.tensors_by_name()
        return assemble_tensors(run.model.plan, await self._lead.fetch_whole())

    @property
    def vital(self) -> VitalTasks:
        """The tasks that must not fail: the port, the state machine, timers."""
        return self.server.vital

    def dashboard_path(self) -> str:
        """The dashboard's path: with a code that works once, or to the page that asks for a join token."""
        return self._access.dashboard_path()

    def model_facts(self) -> dict[str, str]:
        """Which run and round the finished model is of."""
        machine = self._require_begun().machine
        return facts_of_model(self._run, machine.committed, machine.versions)

    def _norms(self) -> UsualNorms | None:
        run = self.begun
        return run.screen.usual_norms() if run is not None and run.machine.committed else None

    def _alarm(self, text: str) -> None:
        self.meter.alarm = text
        self._events.say("alarm", text or "rounds are committed again", {"over": not text})

    # ---- beginning ----------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        protocol = self._config.protocol
        data: dict[str, object] = {"run": self._run, "learners": protocol.learners}
        data |= {"settings": msgspec.to_builtins(protocol), "versions": versions()}
        if self._config.data_parallel:
            data["data_parallel"] = self._config.data_parallel
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
        self._ending.computed_before = found.history.ledger.totals().whole()["computed"]
        run = self._set_up(model_of_earlier_terms(found))
        run.screen.restore_norms(self._run_store.read_norms(self._run))
        for remark in found.remarks:
            self._events.say("warning", remark)
        self._events.say("reigned", *found.describe())

    def _set_up(self, model: Model) -> BegunRun:
        self.begun = BegunRun(
            model,
            run_store=self._run_store,
            events=self._events,
            channels=self._channels,
            relays=self._relays,
            lead=self._lead,
            round_memory_mib=self._config.service.round_memory_mib,
            handle=self._handle,
            spawn=self._spawn,
        )
        self.begun.join_shards()
        return self.begun

    @property
    def _machine(self) -> Syncer | None:
        return None if self.begun is None else self.begun.machine

    def _require_begun(self) -> BegunRun:
        """PeerError while the run has not begun."""
        if self.begun is None:
            raise PeerError("the run has not begun")
        return self.begun

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
            if self.begun is None:
                self._begin(hello)
            run = self._require_begun()
            self._check_model(run.model, hello, channel.token)
            run.ranks.add_learner(hello.learner, hello.ranks)
        except AtollError as error:
            reason = one_line(error)
            self._say_of_hello("refused", f"{hello.learner} was refused: {reason}", hello, channel.token)
            refuse_learner(channel, reason)
            return
        self._channels[channel.learner] = channel
        self._ending.count_connected(len(self._channels))
        self._handle(fx.Greeted(hello, channel.token))
        if (rates := self._relays.rates.get(channel.relay)) is not None:
            self._handle(fx.RelayMeasured((channel.learner,), rates.up_rate, rates.down_rate))

    def _note_relay_rates(self, session: str, rates: RelayRates) -> None:
        learners = sorted(name for name, channel in self._channels.items() if channel.relay == session)
        if learners:
            self._handle(fx.RelayMeasured(tuple(learners), rates.up_rate, rates.down_rate))

    def _check_model(self, model: Model, hello: Hello, token: str) -> None:
        model.check_learner(hello)
        if text := model.describe_other_data(hello):
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
            self._require_begun().merging.screen_contribution(channel.learner, message)
        else:
            self._handle(fx.Received(channel.learner, message))

    def closed(self, channel: ControlChannel, reason: str) -> None:
        if self._channels.get(channel.learner) is channel:
            del self._channels[channel.learner]
            self._require_begun().ranks.remove_learner(channel.learner)
            self._handle(fx.Lost(channel.learner, reason))
        self._ending.count_connected(len(self._channels))

    def turned_away(self, address: str, reason: str) -> None:
        self._refusals.log_refusal(address, reason)

    # ---- handlers: bodies ---------------------------------------------------------------------------------------

    def expect_contribution(
        self, learner: str, session: str, round: int, attempt: int, named: int, rank: int = 0
    ) -> memoryview:
        return self._require_begun().inbox.receive_body((learner, round, attempt), named, rank)

    def contribution_arrived(self, learner: str, round: int, attempt: int, digest: str, rank: int = 0) -> None:
        key, inbox = (learner, round, attempt), self._require_begun().inbox
        fragment, whole = inbox.fragment_of(key), inbox.mark_arrived(key, digest, rank)
        if self._lead is not None and fragment is not None and whole is not None:
            self._lead.body_arrived(key, fragment, whole)

    def contribution_aborted(self, learner: str, round: int, attempt: int, reason: str, rank: int = 0) -> None:
        self._require_begun().inbox.mark_aborted((learner, round, attempt), rank)

    def expect_initial(self, learner: str, session: str, fragment: int, rank: int = 0, codec: str = "") -> memoryview:
        return self._require_begun().first.expect_body(learner, session, fragment, rank, codec)

    async def initial_arrived(
        self,
        learner: str,
        session: str,
        fragment: int,
        body: memoryview,
        digest: str,
        rank: int = 0,
        codec: str = "",
        loss: float = 0.0,
    ) -> None:
        await self._require_begun().first.take_body(learner, session, fragment, body, digest, rank, codec, loss)

    def fragment(self, index: int, have: int, codec: str = "") -> ServedFragment:
        if self.begun is None:
            raise PeerError("the run has no parameters yet")
        return self.begun.parameters.serve_fragment(index, have, codec)

    async def fragment_of_rank(self, index: int, learner: str, rank: int, codec: str = "") -> ServedFragment:
        run = self._require_begun()
        serve = partial(run.parameters.serve_fragment, index)
        return await run.ranks.serve_part(learner, rank, index, serve, codec)

    def moments(self, index: int, version: int) -> ServedFragment:
        return self._require_begun().parameters.serve_moments(index, version)

    def forwarding_wanted(self, ticket: str, learner: str, start: int) -> None:
        if (wrong := self._require_begun().machine.peers.wrong_newcomer(ticket, learner)) is not None:
            raise PeerError(wrong)
        self._handle(fx.ForwardingWanted(ticket, start))

    def forwarding_allowed(self, ticket: str, learner: str) -> None:
        if (wrong := self._require_begun().machine.peers.wrong_peer(ticket, learner)) is not None:
            raise PeerError(wrong)

    # ---- for the lead of several shards -----------------------------------------------------------------------------

    def handle_event(self, event: fx.SyncerEvent) -> None:
        self._handle(event)

    def carry_out_held(self, effect: fx.SyncerEffect) -> None:
        self._carry_out(effect)

    def initial_part_here(self, shard: int, message: InitialHere) -> None:
        self._require_begun().first.hear_shard(shard, message)

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
        run, shards = self._require_begun(), () if self._lead is None else self._lead.state.addresses
        return manifest(run.machine, run.model.plan, self._config.service.evaluate_every, shards)

    def score(self, score: ScoreReport) -> None:
        self.meter.note_score(score)
        self._events.say("score", *describe_score(score))
        if score.has_loss:
            self._handle(fx.Scored(score.round, score.loss))
        self._ending.note_score(final=score.final, took_s=score.cpu_s)

    def evaluator_here(self) -> None:
        self._evaluator.note_word()

    # ---- the machine --------------------------------------------------------------------------------------------

    def _handle(self, event: fx.SyncerEvent) -> None:
        self._clock.handle(event)

    def _carry_out(self, effect: fx.SyncerEffect) -> None:
        match effect:
            case Note(kind, text, data):
                self._log_note(kind, text, data)
            case fx.Finished(reason):
                self._ending.finish_run(reason)
            case _:
                self._require_begun().carry_out(effect)
                if isinstance(effect, fx.Retune):
                    self.operator.note_changed()

    def _log_note(self, kind: str, text: str, data: dict[str, object]) -> None:
        if answer := data.get("answer"):
            text += f": atoll set {shlex.quote(str(self._run_store.folder))} {answer}"
        if kind == "round" and isinstance(index := data["fragment"], int):
            data = {**data, **self._require_begun().merging.describe_outer_step(index)}
        self.operator.note_event(kind, text, data)
        self.meter.note_event(time.time(), kind, data, text)
        if kind == "round":
            data = self._members.thin_out(data, self._require_begun().machine.settings.fragments)
        refused = kind == "refused" and "learner" not in data
        self._events.say(kind, text, data, whose=NEVER_LET_IN if refused else "")

    async def _write_first_cut(self, cut: fx.TakeCut) -> None:
        await self._require_begun().write_first_cut(cut)

    def _payload(self, persist: fx.Persist) -> memoryview | None:
        return self._require_begun().payload_of(persist)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(work)
