"""The syncer's service: events in, effects out, bytes in between.

The server hands over hellos, messages and bodies; the rules of `protocol.syncer` decide; what they want done goes
through the scribe, which lets nothing be told before it is durable. Merging and the outer step run beside the event
loop when they are large. The first joiner's tensors make the fragment plan; a model that differs is refused with the
first difference named. A run that an earlier term left behind is gone on with.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any

import msgspec
import numpy as np

from atoll.config import Config, Outer
from atoll.fabric.desk import Channel, Served
from atoll.fabric.pages import Pages
from atoll.fabric.server import Server
from atoll.fabric.wire import Limits, Score, one_line, understood
from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import make_codec
from atoll.numerics.fragments import Plan, difference, make_plan
from atoll.numerics.screen import Screen
from atoll.protocol import effects as fx
from atoll.protocol import schedule
from atoll.protocol.errors import AtollError, ConfigError, PeerError, PlanError
from atoll.protocol.history import History
from atoll.protocol.messages import Contribution, Drain, FromLearner, Hello, Pull, Refused, Welcome
from atoll.protocol.records import Begun
from atoll.protocol.syncer import Syncer
from atoll.syncer.books import Books
from atoll.syncer.ceiling import ceiling
from atoll.syncer.changes import change
from atoll.syncer.doors import doors_of
from atoll.syncer.inbox import Inbox, Key
from atoll.syncer.parameters import Buffer, Overflow, Parameters
from atoll.syncer.recovery import CutState, Recovered, outer_of
from atoll.syncer.scribe import DEPOSED, Deposed, Scribe
from atoll.syncer.status import Meter
from atoll.telemetry.events import EventLog
from atoll.telemetry.status import RunStatus
from atoll.telemetry.versions import versions

LARGE = 1 << 18
"""Fragments of more elements than this are decoded and merged beside the event loop."""
GOODBYE_S = 15.0
"""How long a finished run stays up for learners that fetch its last versions."""
NORMS_BEATS = 3
AWAY_S = 1.0
"""Between two events of somebody who was not let in."""
BEAT_S = 1.0
"""Between two signs of life to a standby."""
LAST_SCORE_S = 120.0
"""How long it waits for the evaluator's last word."""


class SyncerService:
    """A `fabric.Desk`. Belongs to one event loop."""

    def __init__(
        self,
        config: Config,
        *,
        run: str,
        events: EventLog,
        books: Books,
        evaluated: bool = False,
        pages: Pages | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._config, self._run, self._events, self._books = config, run, events, books
        self._evaluated = evaluated
        self._loop = asyncio.get_running_loop()
        self._channels: dict[str, Channel] = {}
        self._machine: Syncer | None = None
        self._plan: Plan | None = None
        self._data = ""
        """The digest of the data that the first joiner trains on."""
        self._wake: asyncio.TimerHandle | None = None
        self._initial: set[int] = set()
        self._arriving: dict[tuple[str, int], bytearray] = {}
        """Fragments of the first parameters on their way: one that is asked no more writes into nothing that counts."""
        self._uploader = ("", "")
        """The learner and session that is asked for the first parameters."""
        self._probes: dict[str, Key] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self.started = asyncio.Event()
        self._finished = asyncio.Event()
        self._scored = asyncio.Event()
        self._emptied = asyncio.Event()
        self._reason = ""
        self._strangers, self._told_away_at = 0, -AWAY_S
        self._scribe = Scribe(
            books.append,
            carry_out=self._carry_out,
            payload=self._gradient,
            first_cut=self._first_cut,
            fenced=books.fenced,
            alarm=self._alarm,
        )
        self.meter = Meter(config)
        doors = doors_of(config.service, lambda: self._run)
        host, port = config.service.host, config.service.port
        self.server = Server(self, host=host, port=port, limits=limits, pages=pages, guard=doors.guard, tls=doors.tls)
        if books.recovered is not None:
            self._come_back(books.recovered)
            return
        settings = msgspec.to_builtins(config.protocol)
        data: dict[str, object] = {"run": run, "learners": config.protocol.learners, "settings": settings}
        data["versions"] = versions()
        events.say("run", f"run {run}: waiting for {config.protocol.learners} learners", data)

    @property
    def name(self) -> str:
        """The run's."""
        return self._run

    async def run(self, save: Callable[[Parameters], None]) -> None:
        """Serve until the run is over; `save` writes the finished model down."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            scribe = tasks.create_task(self._scribe.run())
            beats = tasks.create_task(self._beat())
            await self.server.start()
            self.started.set()
            self._handle(fx.Tick())
            await self._finished.wait()
            if self._machine is not None and min(self._machine.versions) >= 0:
                save(self._parameters)
            await self._goodbye()
            self._handle(fx.Over())
            await self._scribe.emptied()
            self._say_finished()
            await self.server.stop()
            scribe.cancel()
            beats.cancel()
            if self._wake is not None:
                self._wake.cancel()

    def end(self, reason: str) -> None:
        """The operator wants the run to end in good order."""
        if self._machine is None:
            self._reason = reason
            self._finished.set()
        else:
            self._handle(fx.EndAsked(reason))

    def change(self, words: Sequence[str], *, reopen: bool = False) -> str:
        """Settings as an operator writes them; what has changed. PeerError: nothing has."""
        if self._machine is None:
            raise PeerError("the run has not begun: settings can change once its first learner is there")
        try:
            asked = change(self._machine.history, words, reopen=reopen)
        except ConfigError as error:
            raise PeerError(str(error)) from None
        if asked is None:
            return ""
        self._handle(asked)
        return asked.what

    def drain(self, learner: str) -> str:
        """Have a learner leave in good order; what was done. PeerError: it cannot be asked."""
        channel = self._channels.get(learner)
        if self._machine is None or channel is None:
            known = self._machine is not None and learner in self._machine.members.learners
            raise PeerError(
                f"{learner} is away: it can be drained once it is back"
                if known
                else f"no learner of this run is called {one_line(learner)!r}: atoll status says who is there"
            )
        if not understood(Drain(reason=""), channel.protocol):
            raise PeerError(
                f"{learner} speaks protocol {channel.protocol}, which knows no drain: send its process SIGTERM instead"
            )
        self._handle(fx.DrainAsked(learner, "the operator asked"))
        return f"{learner} gives its last steps to the run and leaves"

    def unscored(self) -> None:
        """No evaluator is there any more: nobody waits for its last word."""
        self._scored.set()

    async def _goodbye(self) -> None:
        waits = [(self._emptied, GOODBYE_S, "its last learners")]
        if self._evaluated and self._machine is not None and min(self._machine.versions) >= 0:
            waits.append((self._scored, LAST_SCORE_S, "the evaluator's last score"))
        if not self._channels:
            self._emptied.set()
        for event, limit_s, whom in waits:
            try:
                async with asyncio.timeout(limit_s):
                    await event.wait()
            except TimeoutError:
                self._events.say("warning", f"the run closes without {whom}, after a wait of {limit_s:g} s")

    def _say_finished(self) -> None:
        learners = (
            []
            if self._machine is None
            else [
                {
                    "learner": one.name,
                    "incarnation": one.incarnation,
                    "t": one.t,
                    "tokens": one.tokens_total,
                    "busy_s": one.busy_s,
                }
                for one in self._machine.members.learners.values()
            ]
        )
        data: dict[str, object] = {
            "reason": self._reason,
            "learners": learners,
            "tokens": self._machine.history.ledger.totals().whole() if self._machine is not None else None,
            "bytes_in": self.server.bytes_in,
            "bytes_out": self.server.bytes_out,
        }
        self._events.say("finished", "the run is finished", data)

    # ---- the desk: learners -------------------------------------------------------------------------------------

    def opened(self, channel: Channel, hello: Hello) -> None:
        try:
            machine = self._machine or self._begin(hello)
            self._check_model(hello)
        except AtollError as error:
            reason = one_line(error)
            self._events.say("refused", f"{hello.learner} was refused: {reason}", {"learner": hello.learner})
            channel.send(Refused(reason=reason, final=True))
            channel.close(reason)
            return
        self._channels[channel.learner] = channel
        self._emptied.clear()
        assert machine is self._machine
        self._handle(fx.Greeted(hello))

    def _begin(self, hello: Hello) -> Syncer:
        """The first joiner's model is the run's model."""
        settings = self._config.protocol.resolved(len(hello.tensors))
        settings = msgspec.structs.replace(settings, seed=self._config.seed)
        plan = make_plan(hello.tensors, settings.fragments, settings.plan)
        begun = Begun(
            run=self._run,
            settings=settings,
            outer=msgspec.to_builtins(self._config.outer),
            tensors=hello.tensors,
            fingerprint=plan.fingerprint,
            data=hello.data,
            seed=self._config.seed,
        )
        machine = self._set_up(History(begun, self._books.term), plan, self._room_for(plan))
        self._scribe.put([fx.Persist((begun,))])
        text = f"the model has {plan.size:,} parameters in {settings.fragments} fragments, H = {settings.sync_every}"
        most = ceiling(plan, settings, len(self._config.outer.make().slots()))
        data = {
            "settings": msgspec.to_builtins(settings),
            "parameters": plan.size,
            "data": hello.data,
            "memory_ceiling": {"fixed_bytes": most.fixed, "bytes_per_learner": most.each},
        }
        self._events.say("plan", text, data)
        return machine

    def _room_for(self, plan: Plan) -> Parameters:
        try:
            return Parameters(plan, self._config.outer)
        except (MemoryError, ValueError):  # numpy's word for what no address reaches
            raise PlanError(f"a model of {plan.size:,} parameters does not fit into this syncer's memory") from None

    def _set_up(self, history: History, plan: Plan, parameters: Parameters) -> Syncer:
        settings, outer = history.settings, outer_of(history)
        self._plan, self._parameters, self._data = plan, parameters, history.begun.data
        self._inbox = Inbox(plan, make_codec(settings.codec))
        # Eight rounds of everybody before norms are judged: a learning rate that warms up makes the first ones tiny.
        few = 8 * settings.learners
        self._screen = Screen(plan, limit=outer.norm_limit, window=2 * few, least=few)
        self._machine = machine = Syncer(history)
        return machine

    def _come_back(self, found: Recovered) -> None:
        """Go on where an earlier term ended."""
        history = found.history
        self._run = history.run
        plan = make_plan(history.tensors, history.begun.settings.fragments, history.begun.settings.plan)
        self._set_up(history, plan, found.parameters or Parameters(plan, outer_of(history)))
        self._screen.restore(self._books.norms(history.run))
        for remark in found.remarks:
            self._events.say("warning", remark)
        text = (
            f"run {history.run} goes on in term {history.term} at round {history.committed}: "
            f"{'no cut' if found.cut is None else f'cut {found.cut}'} and {found.rounds} rounds of the journal"
        )
        data: dict[str, object] = {"run": history.run, "term": history.term, "round": history.committed}
        self._events.say("reigned", text, {**data, "cut": found.cut, "replayed": found.rounds})

    def _check_model(self, hello: Hello) -> None:
        assert self._plan is not None
        run = tuple(tensor for part in self._plan.fragments for tensor in part.tensors)
        if (reason := difference(hello.tensors, run)) is not None:
            raise PeerError(f"{reason}. The run's own settings are in its run.toml.")
        if hello.data != self._data:
            text = f"{hello.learner} trains on other data (digest {hello.data[:12]}) than the run ({self._data[:12]})"
            self._events.say("warning", text, {"learner": hello.learner})

    async def _beat(self) -> None:
        """Say to a standby that this syncer moves; one that was replaced while it stood still ends, also with nothing
        to write down. Every few beats what is usual is kept for the next term."""
        for beat in count():
            await asyncio.to_thread(self._books.beat)
            if beat % NORMS_BEATS == 0 and self._machine is not None and self._machine.committed:
                await asyncio.to_thread(self._books.keep_norms, self._run, self._screen.snapshot())
            if self._books.fenced():
                raise Deposed(DEPOSED)
            await asyncio.sleep(BEAT_S)

    def _alarm(self, text: str) -> None:
        self.meter.alarm = text
        self._events.say("alarm", text or "rounds are committed again", {"over": not text})

    def received(self, channel: Channel, message: FromLearner) -> None:
        if self._channels.get(channel.learner) is not channel:
            return
        if isinstance(message, Contribution):
            self._contribution(channel.learner, message)
        else:
            self._handle(fx.Received(channel.learner, message))

    def closed(self, channel: Channel, reason: str) -> None:
        if self._channels.get(channel.learner) is channel:
            del self._channels[channel.learner]
            self._handle(fx.Lost(channel.learner, reason))
        if not self._channels:
            self._emptied.set()

    def turned_away(self, address: str, reason: str) -> None:
        """Told once a second at most: whoever knocks fills no disk."""
        self._strangers += 1
        if self._loop.time() - self._told_away_at < AWAY_S:
            return
        self._told_away_at = self._loop.time()
        data: dict[str, object] = {"address": address, "reason": reason, "count": self._strangers}
        self._events.say("turned_away", f"{address} was not let in: {reason}", data)

    # ---- the desk: bodies ---------------------------------------------------------------------------------------

    def expect_contribution(self, learner: str, session: str, round: int, attempt: int) -> memoryview:
        if self._machine is None:
            raise PeerError("the run has not begun")
        return self._inbox.receive((learner, round, attempt))

    def contribution_arrived(self, learner: str, round: int, attempt: int, digest: str) -> None:
        self._inbox.arrived((learner, round, attempt), digest)

    def contribution_aborted(self, learner: str, round: int, attempt: int, reason: str) -> None:
        self._inbox.aborted((learner, round, attempt))

    def expect_initial(self, learner: str, session: str, fragment: int) -> memoryview:
        if not self._waits_for_initial(learner, session):
            raise PeerError(f"{learner} was not asked for the first parameters")
        if self._plan is None or fragment >= len(self._plan.fragments):
            raise PeerError(f"there is no fragment {fragment}")
        key, size = (learner, fragment), self._parameters.initial(fragment).nbytes
        body = self._arriving[key] if key in self._arriving else self._arriving.setdefault(key, bytearray(size))
        self._handle(fx.Uploading(learner, size))
        return memoryview(body)

    def initial_arrived(self, learner: str, fragment: int, digest: str) -> None:
        assert self._plan is not None
        channel = self._channels.get(learner)
        if channel is None or not self._waits_for_initial(learner, channel.session):
            raise PeerError(f"{learner} is not asked for the first parameters any more")
        self._parameters.initial(fragment)[:] = self._arriving.pop((learner, fragment))
        if (reason := self._parameters.check_initial(fragment, digest)) is not None:
            self._events.say("refused", f"{learner}: {reason}", {"learner": learner, "reason": reason})
            channel.send(Refused(reason=reason, final=True))
            channel.close(reason)
            return
        if fragment not in self._initial:
            self._initial.add(fragment)
            self._handle(fx.Uploading(learner, 0))
        if len(self._initial) == len(self._plan.fragments):
            self._parameters.begin()
            self._arriving.clear()
            self._handle(fx.Initialised(learner))

    def _waits_for_initial(self, learner: str, session: str) -> bool:
        empty = self._machine is not None and self._machine.phase == "empty"
        return empty and (learner, session) == self._uploader

    def fragment(self, index: int) -> Served:
        if self._machine is None:
            raise PeerError("the run has no parameters yet")
        return self._parameters.serve(index)

    def relay_wanted(self, ticket: str, learner: str, start: int) -> None:
        if self._machine is None or (wrong := self._machine.peers.wrong_newcomer(ticket, learner)) is not None:
            raise PeerError("the run has not begun" if self._machine is None else wrong)
        self._handle(fx.RelayWanted(ticket, start))

    def relay_allowed(self, ticket: str, learner: str) -> None:
        if self._machine is None or (wrong := self._machine.peers.wrong_peer(ticket, learner)) is not None:
            raise PeerError("the run has not begun" if self._machine is None else wrong)

    def _contribution(self, learner: str, message: Contribution) -> None:
        assert self._plan is not None
        key = (learner, message.round, message.attempt)
        if self._inbox.opened(key):
            return  # said twice: once is what counts
        in_range = 0 <= message.fragment < len(self._plan.fragments)
        if not in_range or self._plan.fragments[message.fragment].size <= LARGE:
            self._handle(fx.Delivered(learner, message, self._examine(key, message)))
        else:
            self._spawn(self._examine_aside(key, message))

    async def _examine_aside(self, key: Key, message: Contribution) -> None:
        with self._inbox.hold(key):
            refusal = await asyncio.to_thread(self._examine, key, message)
        self._handle(fx.Delivered(key[0], message, refusal))

    def _examine(self, key: Key, message: Contribution) -> str | None:
        """Decode and screen; the reason of a refusal."""
        try:
            delta = self._inbox.open(key, message.digest)
        except PeerError as error:
            return str(error)
        if message.probe or message.steps <= 0:
            return None
        return self._screen.judge(message.fragment, delta, message.steps, key)

    # ---- the desk: people and evaluators --------------------------------------------------------------------------

    def figures(self) -> RunStatus:
        traffic = (self.server.bytes_in, self.server.bytes_out)
        return self.meter.status(time.time(), self._run, self._machine, traffic)

    def status(self) -> bytes:
        return msgspec.json.encode(self.figures())

    def manifest(self) -> bytes:
        if self._machine is None or self._plan is None:
            raise PeerError("the run has not begun")
        machine = self._machine
        return msgspec.json.encode(
            {
                "run": self._run,
                "phase": machine.phase,
                "round": machine.committed,
                "plan": self._plan,
                "evaluate_every": self._config.service.evaluate_every,
            }
        )

    def score(self, score: Score) -> None:
        self.meter.score(score)
        found = "is not finite" if score.loss is None else f"{score.loss:.4f}"
        text = f"validation loss {found} at round {score.round}"
        data = {"round": score.round, "loss": score.loss, "cpu_s": score.cpu_s, "sample": score.sample}
        self._events.say("score", text, {**data, "final": score.final})
        if score.final:
            self._scored.set()

    # ---- the machine --------------------------------------------------------------------------------------------

    def _handle(self, event: fx.SyncerEvent) -> None:
        if self._machine is None:
            return
        self._scribe.put(self._machine.handle(self._loop.time(), event))
        self._wake_at(self._machine.wake_at)

    def _wake_at(self, moment: float | None) -> None:
        if self._wake is not None and self._wake.when() != moment:
            self._wake.cancel()
            self._wake = None
        if self._wake is None and moment is not None:
            self._wake = self._loop.call_at(moment, self._tick)

    def _tick(self) -> None:
        self._wake = None
        self._handle(fx.Tick())

    def _carry_out(self, effect: fx.SyncerEffect) -> None:
        match effect:
            case fx.Send(learner, message):
                channel = self._channels.get(learner)
                if isinstance(message, Pull):
                    self._ask(learner, message)
                elif isinstance(message, Welcome) and message.upload and channel is not None:
                    self._uploader = (learner, channel.session)
                    self._initial.clear()  # what another one sent is worth nothing
                if channel is not None:
                    channel.send(message)
            case fx.Merge(number, _, parts):
                for part in parts:
                    self._screen.merged((part.learner, number, part.attempt))
                self._merge(effect)
            case fx.Commit(number, fragment, version):
                self._parameters.commit(fragment, version, number)
            case fx.Retune(outer):
                self._retune(msgspec.convert(outer, Outer))
            case fx.TakeCut():
                self._take_cut(effect)
            case fx.CompleteCut():
                self._spawn(self._complete_cut(effect))
            case fx.Discard(learner, number, attempt):
                self._inbox.discard((learner, number, attempt))
                if self._plan is not None:
                    self._screen.forget((learner, number, attempt))
            case fx.Expel(learner, reason):
                if (channel := self._channels.pop(learner, None)) is not None:
                    channel.close(reason)
            case fx.Finished(reason):
                self._reason = reason
                self._finished.set()
            case fx.Note(kind, text, data):
                self.meter.note(time.time(), kind, data)
                self._events.say(kind, text, data)

    def _ask(self, learner: str, pull: Pull) -> None:
        key = (learner, pull.round, pull.attempt)
        if pull.probe:
            self._inbox.discard(self._probes.get(learner, key))  # whatever came of it: one probe at a time
            self._probes[learner] = key
        self._inbox.ask(key, pull.fragment)

    # ---- cuts ---------------------------------------------------------------------------------------------------

    def _gradient(self, number: int) -> memoryview:
        assert self._machine is not None
        fragment = schedule.fragment_of(number, self._machine.settings)
        return self._parameters.outer_gradient(fragment).view(np.uint8).data

    async def _first_cut(self, cut: fx.TakeCut) -> None:
        state = self._books.open_cut(cut.history, self._parameters.rounds())
        held, arrays = self._parameters.held(), self._parameters.snapshot()
        try:
            await asyncio.to_thread(self._books.write_cut, cut.cut, state, arrays)
        finally:
            for buffer in held:
                buffer.readers -= 1
        await asyncio.to_thread(self._books.complete, self._run, fx.CompleteCut(cut.cut, (), ()))

    def _take_cut(self, cut: fx.TakeCut) -> None:
        state = self._books.open_cut(cut.history, self._parameters.rounds())
        held = self._parameters.held()
        self._spawn(self._write_cut(cut.cut, state, self._parameters.snapshot(), held))

    async def _write_cut(self, cut: int, state: CutState, arrays: dict[str, FloatArray], held: list[Buffer]) -> None:
        reason = ""
        try:
            await asyncio.to_thread(self._books.write_cut, cut, state, arrays)
        except AtollError as error:
            reason = one_line(error)
        finally:
            for buffer in held:
                buffer.readers -= 1
        self._handle(fx.CutKept(cut, reason))

    async def _complete_cut(self, done: fx.CompleteCut) -> None:
        try:
            mark = await asyncio.to_thread(self._books.complete, self._run, done)
        except AtollError as error:
            self._handle(fx.CutKept(done.cut, one_line(error)))
        else:
            self._handle(fx.CutWritten(done.cut, mark))

    def _retune(self, outer: Outer) -> None:
        self._parameters.change(outer)
        self._screen.limit = outer.norm_limit

    # ---- merging ------------------------------------------------------------------------------------------------

    def _merge(self, merge: fx.Merge) -> None:
        assert self._plan is not None
        if self._plan.fragments[merge.fragment].size <= LARGE:
            self._loop.call_soon(self._handle, self._staged(merge))
        else:
            self._spawn(self._merge_aside(merge))

    async def _merge_aside(self, merge: fx.Merge) -> None:
        self._handle(await asyncio.to_thread(self._staged, merge))

    def _staged(self, merge: fx.Merge) -> fx.SyncerEvent:
        began = time.perf_counter()
        deltas = [self._inbox.delta((part.learner, merge.round, part.attempt)) for part in merge.parts]
        try:
            mark = self._parameters.stage(merge.fragment, deltas, [part.weight for part in merge.parts])
        except Overflow as error:
            return fx.Unmergeable(merge.round, str(error), reset=True)
        except ValueError as error:
            return fx.Unmergeable(merge.round, str(error))
        marks = self._parameters.marks(merge.fragment)
        return fx.Merged(merge.round, mark, time.perf_counter() - began, marks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(work)
