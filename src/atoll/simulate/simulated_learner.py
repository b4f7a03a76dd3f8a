"""A simulated learner: a training process and its courier, which runs the learner's state machine and sends its
messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from atoll.protocol.effects import Note, Tick
from atoll.protocol.learner import effects as learner_fx
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.messages import Contribution, FromLearner, RankBoxes, TensorSpec
from atoll.protocol.syncer import effects as syncer_fx
from atoll.simulate.simulated_syncer import Connection, SimulatedSyncer
from atoll.simulate.training import Leased, Payload, Training, TrainingWorld
from atoll.simulate.virtual_time import HostClock

TENSORS = (TensorSpec("w", (1,), "float32"),)
MUTE_S = 30.0
"""After this time a payload that never moves is given up."""
NOT_FINITE = "3 of 4 values are not finite"
NO_FIT = "'optimizer' is SGD here, AdamW in the snapshot"


@dataclass(slots=True)
class OfferedMoments:
    """A copy of a peer's inner optimizer, for whoever brings a ticket."""

    helper: SimulatedLearner
    moments: int
    t: int
    held: list[int]
    """The versions in its peer's model when it was made."""
    tickets: set[str] = field(default_factory=set)


class LearnerNetwork(Protocol):
    def delay(self, times: float = 1.0) -> float: ...

    def send_up(self, learner: SimulatedLearner, event: syncer_fx.SyncerEvent, way: str = "up") -> None: ...

    def upload(self, learner: SimulatedLearner, number: int, attempt: int, payload: Payload) -> None: ...

    def upload_all(self, learner: SimulatedLearner) -> None: ...

    def fetch(self, learner: SimulatedLearner, fragment: int) -> None: ...

    def disconnect(self, learner: SimulatedLearner, reason: str) -> None: ...

    def say_goodbye(self, learner: SimulatedLearner, reason: str) -> None: ...

    def close_finished(self, learner: SimulatedLearner) -> None: ...

    def if_same(self, learner: SimulatedLearner, machine: LearnerMachine, event: learner_fx.LearnerEvent) -> object: ...


class LearnerWorld(TrainingWorld, Protocol):
    """What a learner needs of the world around it."""

    direct: bool
    courier_s: float
    learners: dict[str, SimulatedLearner]
    processes: list[SimulatedLearner]

    @property
    def network(self) -> LearnerNetwork: ...

    def on_learner_event(
        self, learner: SimulatedLearner, event: learner_fx.LearnerEvent, effects: list[learner_fx.LearnerEffect]
    ) -> None: ...

    def carry_out_learner_effect(self, learner: SimulatedLearner, effect: learner_fx.LearnerEffect) -> None: ...

    def on_own(self, learner: SimulatedLearner) -> None: ...

    def on_contribution_sent(self, learner: SimulatedLearner, copy: learner_fx.Copied) -> None: ...

    def on_save(self, learner: SimulatedLearner, cut: int, life: int) -> None: ...

    def on_leave_asked(self, learner: SimulatedLearner) -> None: ...

    def on_left(self, learner: SimulatedLearner) -> None: ...

    def end_process(self, learner: SimulatedLearner) -> None: ...

    def on_inform(self, learner: SimulatedLearner, progress: float) -> None: ...

    def on_note(self, note: Note) -> None: ...


class SimulatedLearner(Training):
    world: LearnerWorld

    def __init__(
        self,
        world: LearnerWorld,
        name: str,
        session: str,
        step_s: float,
        gradient: Callable[[int], float],
        *,
        restored: bool = False,
        data: learner_fx.Registered | None = None,
        tensors: tuple[TensorSpec, ...] = TENSORS,
        ranks: tuple[RankBoxes, ...] = (),
    ) -> None:
        super().__init__(world, name, step_s, gradient)
        self.session, self.data, self.tensors = session, data, tensors
        self.machine = LearnerMachine(name, session, tensors, restored=restored, ranks=ranks)
        self.clock = HostClock()
        self.connection: Connection | None = None
        self.courier = True
        """False: the courier is dead, nobody has started another yet."""
        self.answers = True
        """False: it reports but its payloads never arrive."""
        self.saves = True
        """False: it never comes to save its part of a cut."""
        self.silent = False
        """True: what it says never arrives."""
        self.blocked_up = self.blocked_down = 0
        """Partitions: so many of them hold up what it says, or what it is told."""
        self.backlog: list[learner_fx.LearnerEvent] = []
        """What came while the host stood still."""
        self.term = 0
        """The newest that it has heard of."""
        self._alarm = inf
        """The earliest wake-up that is set."""
        self.fetched: dict[int, float] = {}
        self.fetch_s = 0.0
        """Seconds that a version takes on this learner's own way down, in addition to those of all learners."""
        self.informed: list[float] = []
        # of recoveries
        self.source = ""
        self.fetching = ""
        self.arrived: OfferedMoments | None = None
        self.capture = 0
        self.given: dict[int, OfferedMoments] = {}
        self.fits = True
        self.lies = False
        """True: what it gives newcomers is refused."""
        self.stream_s = 0.0
        self.state_bytes = 100
        if data is not None:
            self.leased = Leased(data.batch)
            self.handle_event(data)

    @property
    def linked(self) -> bool:
        return self.connection is not None

    @property
    def syncer(self) -> SimulatedSyncer | None:
        """The syncer it believes itself connected to."""
        return self.connection.syncer if self.connection is not None else None

    @property
    def reachable(self) -> bool:
        return not self.blocked_up and not self.blocked_down

    def serve(self) -> None:
        if self.capture or self.arrived is not None:
            serve_states(self)

    # ---- the machine --------------------------------------------------------------------------------------------

    def handle_event(self, event: learner_fx.LearnerEvent, least: float = 0.0) -> object:
        if not self.alive or not self.courier:
            return False
        if self.frozen:
            self.backlog.append(event)
            return None
        world, machine = self.world, self.machine
        now = self.clock.read(world.queue.now, least)
        effects = machine.handle(now, event)
        world.on_learner_event(self, event, effects)
        for effect in effects:
            world.carry_out_learner_effect(self, effect)
        if (wake := machine.wake_at) is not None and wake < self._alarm:
            self._alarm = wake
            world.queue.call_later(self.clock.when(wake) - world.queue.now, self._wake, wake)
        return None

    def _wake(self, alarm: float) -> object:
        """The earliest alarm goes off; the machine may want to be woken later by now."""
        if alarm != self._alarm:
            return False
        self._alarm, wake = inf, self.machine.wake_at
        if wake is None or not self.alive or not self.courier or self.over:
            return False
        if wake > alarm:
            self._alarm = wake
            self.world.queue.call_later(self.clock.when(wake) - self.world.queue.now, self._wake, wake)
            return False
        return self.handle_event(Tick(), wake)

    def jump(self, seconds: float) -> None:
        """Its clock goes forward; whatever is due by it now is dealt with."""
        self.clock.jump(seconds)
        self._alarm = inf
        self.handle_event(Tick())

    def resume_host(self) -> None:
        """The host runs again: what came meanwhile is dealt with first."""
        self.frozen = False
        events, self.backlog = self.backlog, []
        for event in events:
            self.handle_event(event)
        self.handle_event(Tick())
        if not self.paused:
            self.go_on_after_a_pause()

    def lose_courier(self) -> None:
        """It dies; the training process drops its orders and goes on."""
        self.courier = False
        self.backlog = []
        self.drop_orders()
        self.capture, self.given, self.fetching, self.arrived = 0, {}, "", None
        self.wake_soon()

    def new_courier(self) -> None:
        """It takes over what the shared memory and the training process say."""
        old = self.machine
        self.courier = True
        self.machine = LearnerMachine(self.name, self.session, self.tensors)
        stepped = self.stepped_event()
        self.machine.restore(old.run, list(self.adopted), stepped, old.incarnation, seeking=self.waits, term=old.term)
        if self.data is not None and self.leased is not None:
            self.handle_event(self.data)

    # ---- what the machine wants ---------------------------------------------------------------------------------

    def carry_out(self, effect: learner_fx.LearnerEffect) -> None:
        match effect:
            case learner_fx.Say(message):
                self._say(message)
            case learner_fx.Inform(progress):
                self.world.on_inform(self, progress)
            case learner_fx.Read(round=number):
                self.reads[number] = effect
                self.wake_soon()
            case learner_fx.Drop(fragment, t):
                if (copy := self.copies.get((fragment, t))) is not None and not copy.sent:
                    del self.copies[fragment, t]
            case learner_fx.Fetch(fragment, _):
                self.world.network.fetch(self, fragment)
            case learner_fx.Adopt():
                self.inbox.append((effect, self.fetched[effect.fragment]))
                self.wake_soon()
            case learner_fx.Upload(number, attempt, fragment):
                self._upload(number, attempt, fragment)
            case learner_fx.CancelRead(number):
                self.reads.pop(number, None)
            case learner_fx.Hold(number, step):
                self.holds[number] = step
                self.wake_soon()
            case learner_fx.LetGo(number):
                self.holds.pop(number, None)
                self.wake_soon()
            case learner_fx.Own():
                self.world.on_own(self)
                self.adopted = [0] * self.fragments
                self.plain = self.plain and self.theta == self.base
                self.wake_soon()
            case learner_fx.ForgetVersions(reset=reset):
                self.forget(reset)
                self.life = self.machine.incarnation
                self.wake_soon()
            case learner_fx.Save(cut):
                self._save(cut)
            case learner_fx.Supply(ranges, over, own):
                self._supply(learner_fx.Supply(ranges, over, own))
            case learner_fx.UploadAll():
                self.world.network.upload_all(self)
            case learner_fx.HangUp(reason):
                self.world.network.disconnect(self, reason)
            case learner_fx.Stop(final=final, failed=failed):
                self.world.queue.call_later(0.0 if final else self.world.courier_s, self.stop, final, failed)
            case learner_fx.HoldBack():
                self.held_back = True
            case learner_fx.BeginTraining():
                self.held_back = False
                self.wake_soon()
            case learner_fx.AskToLeave(reason):
                self.world.queue.call_later(self.world.courier_s, self.leave, reason)
            case Note():
                self.world.on_note(effect)
            case _:
                self._of_recoveries(effect)

    def _of_recoveries(self, effect: learner_fx.LearnerEffect) -> None:
        match effect:
            case learner_fx.Await():
                self.waits = True
            case learner_fx.Begin():
                self.waits = False
                self.wake_soon()
            case learner_fx.Capture(number):
                self.capture = number
                self.wake_soon()
            case learner_fx.Give(number, ticket):
                self.given[number].tickets.add(ticket)
            case learner_fx.PassOn(ticket):
                pass_on_state(self, ticket)
            case learner_fx.TakeBack(ticket):
                take_back_state(self, ticket)
            case learner_fx.Dispose(number):
                self.given.pop(number, None)
            case learner_fx.FetchState(ticket, direct=direct):
                fetch_state(self, ticket, direct)
            case learner_fx.LeaveState():
                self.fetching = ""
            case learner_fx.TakeState():
                self.wake_soon()
            case _:
                raise AssertionError(f"nobody carries out {effect}")

    def stop(self, final: bool, failed: bool) -> object:
        if super().stop(final, failed) is False:
            return False
        if self.over:
            self.world.network.close_finished(self)
        return None

    def leave(self, why: str, *, hurried: bool = False) -> object:
        if super().leave(why, hurried=hurried) is False:
            return False
        self.world.on_leave_asked(self)
        return None

    def leave_now(self) -> None:
        self.leaving.left = True
        self.world.on_left(self)
        self.world.network.say_goodbye(self, self.leaving.why)
        self.world.end_process(self)
        self.leaving.then()

    def _say(self, message: FromLearner) -> None:
        if self.silent:
            return
        event: syncer_fx.SyncerEvent = syncer_fx.Received(self.name, message)
        if isinstance(message, Contribution):
            event = syncer_fx.Delivered(self.name, message)
        self.world.network.send_up(self, event)

    def _upload(self, number: int, attempt: int, fragment: int) -> None:
        if not self.answers:
            failed = learner_fx.UploadFailed(number, attempt, "it got stuck")
            self.world.queue.call_later(MUTE_S, self.world.network.if_same, self, self.machine, failed)
            return
        copy = max((c for (f, _), c in self.copies.items() if f == fragment), key=lambda c: c.fact.t)
        copy.sent = True
        delta = float("nan") if self.broken else copy.base - copy.value
        self.world.on_contribution_sent(self, copy.fact)
        payload = Payload(self.session, self.machine.incarnation, copy.fact, delta, self.plain)
        self.world.network.upload(self, number, attempt, payload)

    def _save(self, cut: int) -> None:
        if self.saves:
            self.world.on_save(self, cut, self.life)
            fact = learner_fx.Saved(cut, self.t, "file", "digest")
            self.world.queue.call_later(self.world.network.delay(), self.handle_event, fact)

    def _supply(self, supply: learner_fx.Supply) -> None:
        if supply.own:
            self.leased = self.data = None
        elif self.leased is not None:
            self.leased.supply(supply.ranges, supply.over)
        self.wake_soon()


# ---- peers' states: copied and taken between two steps, streamed meanwhile -------------------------------------------


def serve_states(learner: SimulatedLearner) -> None:
    """Between two steps: copy its state for a newcomer, take a peer's."""
    if learner.capture > 0:
        _capture(learner)
    if learner.arrived is not None and learner.fetching:
        _take(learner, learner.arrived)


def _capture(learner: SimulatedLearner) -> None:
    number, learner.capture = learner.capture, 0
    made = OfferedMoments(learner, learner.moments, learner.t, list(learner.adopted))
    direct = learner.name if learner.world.direct else ""
    fact = learner_fx.Captured(number, learner.t, learner.state_bytes, "digest", direct)
    learner.world.queue.call_later(learner.world.network.delay(), _captured, learner, learner.machine, made, fact)


def _captured(learner: SimulatedLearner, machine: object, made: OfferedMoments, fact: learner_fx.Captured) -> object:
    if learner.machine is not machine:
        return False
    learner.given[fact.number] = made
    return learner.handle_event(fact)


def _take(learner: SimulatedLearner, given: OfferedMoments) -> None:
    ticket, learner.fetching, learner.arrived = learner.fetching, "", None
    fits = learner.fits and not given.helper.lies
    if fits:
        learner.moments, learner.source = given.moments, given.helper.name
    learner.handle_event(learner_fx.Taken(ticket, learner.t, "" if fits else NO_FIT, refused=not fits))


def fetch_state(learner: SimulatedLearner, ticket: str, direct: str) -> None:
    """From the peer itself, or through the syncer it is connected to."""
    learner.fetching, learner.arrived = ticket, None
    world, syncer = learner.world, learner.syncer
    if direct:
        stream_s = world.learners[direct].stream_s if direct in world.learners else 0.0
        world.queue.call_later(stream_s + world.network.delay(2.0), stream_arrives, learner, ticket)
        return
    wrong = syncer.machine.peers.wrong_newcomer(ticket, learner.name) if syncer is not None else "unreachable"
    if wrong is not None:
        world.queue.call_later(0.0, learner.handle_event, learner_fx.StateFailed(ticket, wrong))
    else:
        world.network.send_up(learner, syncer_fx.ForwardingWanted(ticket, 0), "relay")


def pass_on_state(learner: SimulatedLearner, ticket: str) -> None:
    """Through the syncer, to whoever waits for it."""
    world = learner.world
    for newcomer in list(world.processes):
        if newcomer.fetching == ticket:
            world.queue.call_later(learner.stream_s + world.network.delay(2.0), stream_arrives, newcomer, ticket)


def stream_arrives(newcomer: SimulatedLearner, ticket: str) -> object:
    """Whole, if its peer is still there and can be reached, and the newcomer still wants it."""
    if newcomer.fetching != ticket or not newcomer.alive:
        return False
    helpers = [
        learner for learner in newcomer.world.processes if learner.alive and not learner.frozen and learner.reachable
    ]
    given = next((one for learner in helpers for one in learner.given.values() if ticket in one.tickets), None)
    if given is not None and newcomer.reachable:
        newcomer.arrived = given
        return newcomer.handle_event(learner_fx.StateCame(ticket))
    newcomer.fetching = ""
    return newcomer.handle_event(learner_fx.StateFailed(ticket, "the connection broke"))


def take_back_state(learner: SimulatedLearner, ticket: str) -> None:
    for given in learner.given.values():
        given.tickets.discard(ticket)
