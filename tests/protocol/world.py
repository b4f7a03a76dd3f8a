"""The simulator's world as tests use it.

Learners are connected from the start, faults happen at once, and every note and effect is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from atoll.protocol import records
from atoll.protocol.effects import Note
from atoll.protocol.history import History
from atoll.protocol.learner import effects as learner_fx
from atoll.protocol.messages import Contribution
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as syncer_fx
from atoll.protocol.syncer.machine import Syncer
from atoll.simulate import world as simulated
from atoll.simulate.disk import SimulatedDisk
from atoll.simulate.simulated_learner import TENSORS, SimulatedLearner
from atoll.simulate.simulated_syncer import SimulatedSyncer
from atoll.simulate.training import Payload, Training

__all__ = ["TENSORS", "SimulatedLearner", "World"]


class World(simulated.World):
    def __init__(
        self,
        learners: int = 3,
        *,
        step_s: float | list[float] = 1.0,
        present: int | None = None,
        gradient: Callable[[int], float] = lambda t: 1.0,
        latency_s: float = 0.0,
        jitter: float = 0.0,
        seed: int = 0,
        outer_lr: float = 1.0,
        outer: Mapping[str, str | float | bool] | None = None,
        theta: float = 1.0,
        direct: bool = True,
        courier_s: float = 0.0,
        merge_s: float = 0.0,
        body_s: float = 0.0,
        **settings: Any,
    ) -> None:
        settings.setdefault("fragments", 2)
        settings.setdefault("sync_every", max(4, settings["fragments"]))
        self.notes: list[tuple[float, Note]] = []
        self.log: list[tuple[float, syncer_fx.SyncerEffect]] = []
        self.complete: list[syncer_fx.CompleteCut] = []
        """Cuts that were completed."""
        self.outages: list[float] = []
        self.speeds = step_s if isinstance(step_s, list) else [step_s] * learners
        super().__init__(
            Settings(learners=learners, **settings).resolved(1000),
            seed=seed,
            latency_s=latency_s,
            jitter=jitter,
            outer_lr=outer_lr,
            outer=outer,
            theta=theta,
            gradient=gradient,
            direct=direct,
            courier_s=courier_s,
            merge_s=merge_s,
            body_s=body_s,
        )
        for index in range(learners if present is None else present):
            self.join(f"learner-{index}", step_s=self.speeds[index])

    # ---- what a test does to it ---------------------------------------------------------------------------------

    def join(self, name: str, step_s: float = 1.0, *, restored: bool = False) -> SimulatedLearner:
        learner = super().join(name, step_s, restored=restored)
        self.link(name)
        return learner

    def link(self, name: str) -> None:
        self.network.connect(self.learners[name], self.simulated_syncer)

    def kill(self, name: str) -> None:  # type: ignore[override]
        learner = self.learners[name]
        self.unlink(name, "killed")
        self.end_process(learner)

    def unlink(self, name: str, reason: str = "connection reset") -> None:
        """Both sides know at once."""
        learner = self.learners[name]
        if learner.connection is not None:
            learner.connection = None
            if self.simulated_syncer.channels.pop(name, None) is not None:
                self._deliver(syncer_fx.Lost(name, reason))
            learner.handle_event(learner_fx.Disconnected(reason))

    def hold_up(self, name: str, seconds: float) -> None:
        """What it says from now on comes in a burst after this time, as behind a packet that is sent again."""
        connection = self.learners[name].connection
        assert connection is not None
        connection.at("up", self.now + seconds)

    def restart_courier(self, name: str) -> None:
        """A new machine takes over; the training process drops the orders of the dead one."""
        learner = self.learners[name]
        self.unlink(name, "courier died")
        learner.lose_courier()
        learner.new_courier()
        self.link(name)
        learner.if_idle()

    def replace_syncer(self, run: str) -> None:
        """The syncer's process is another one, with another run."""
        self._disconnect_all()
        self.begun = records.BegunRecord(run, self.settings, {}, (), "plan")
        self.disk = SimulatedDisk(self.begun, self.random)
        self.disk.claim = 1
        self.simulated_syncer = SimulatedSyncer(self, History(self.begun), list(self.theta))
        self.simulated_syncers = [self.simulated_syncer]
        self.invariants = self.make_invariants()
        for name, learner in self.learners.items():
            if learner.alive:
                self.link(name)

    def crash_syncer(self, down_s: float | None = None, apart_s: float = 0.0, *, power: bool = False) -> None:
        """A new one is there at once; learners come back `apart_s` one by one."""
        self.outages.append(self.now)
        self.simulated_syncer.die()
        self._disconnect_all()
        self.start_syncer(self.disk.claim)
        for number, name in enumerate(self.learners):
            wait_s = self.down_s if down_s is None else down_s
            self._later(wait_s + number * apart_s, lambda name=name: self._redial(name))

    def _disconnect_all(self) -> None:
        self.simulated_syncer.channels = {}
        for learner in self.learners.values():
            if learner.connection is not None:
                learner.connection = None
                learner.handle_event(learner_fx.Disconnected("the syncer died"))

    def _redial(self, name: str) -> None:
        if self.learners[name].alive and not self.learners[name].linked:
            self.link(name)

    def pause(self, name: str) -> None:
        self.learners[name].paused = True

    def resume(self, name: str) -> None:
        learner = self.learners[name]
        if learner.paused:
            learner.paused = False
            learner.go_on_after_a_pause()

    def end(self, reason: str = "asked to") -> None:
        self._deliver(syncer_fx.EndAsked(reason))

    def inject(self, event: syncer_fx.SyncerEvent) -> list[syncer_fx.SyncerEffect]:
        """An event from nowhere."""
        if isinstance(event, syncer_fx.Delivered):
            self._is_known(event.learner, event.contribution)
        return self._deliver(event)

    def _is_known(self, name: str, given: Contribution) -> None:
        """A contribution that a test makes up is what its learner gave."""
        counters = (given.t, given.steps, given.tokens, given.base, given.total, given.position)
        copy, learner = learner_fx.Copied(given.round, given.fragment, *counters), self.learners[name]
        delta = self.payloads.get((name, given.round, given.attempt), 0.0)
        payload = Payload(learner.session, learner.machine.incarnation, copy, delta, plain=False)
        self.invariants.oracle.payloads[self.simulated_syncer.term, name, given.round, given.attempt] = payload

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        self._later(seconds - self.now, action)

    def run_until(self, *, round: int | None = None, seconds: float | None = None) -> Self:
        limit = self.now + (seconds if seconds is not None else 100_000.0)
        while len(self.queue) and not self.finished:
            if round is not None and self.syncer.committed >= round:
                return self
            if self.queue.next_at > limit:
                break
            self.step()
        if seconds is not None and not self.finished:
            self.queue.now = max(self.now, limit)
        elif round is not None and self.syncer.committed < round:
            raise AssertionError(f"the world came to rest in round {self.syncer.committed}:\n{self.story()}")
        return self

    def run_to_end(self, seconds: float = 100_000) -> Self:
        self.run_until(seconds=seconds)
        assert self.finished, f"the run does not end: {self.syncer.phase}\n{self.story()}"
        return self

    # ---- what a test looks at -----------------------------------------------------------------------------------

    @property
    def syncer(self) -> Syncer:
        return self.simulated_syncer.machine

    @property
    def journal(self) -> list[records.AnyRecord]:
        return self.disk.journal

    @property
    def theta(self) -> list[float]:
        return self.simulated_syncer.theta

    @property
    def payloads(self) -> dict[tuple[str, int, int], float]:
        return self.simulated_syncer.payloads

    def said(self, kind: str) -> list[Note]:
        return [note for _, note in self.notes if note.kind == kind]

    def round_note(self, number: int) -> dict[str, Any]:
        return next(note.data for note in self.said("round") if note.data["round"] == number)

    def members(self, number: int) -> set[str]:
        return {member["learner"] for member in self.round_note(number)["members"]}

    def sent(self, kind: type[Any], learner: str | None = None) -> list[tuple[float, Any]]:
        """(when, message) of what the syncer sent."""
        return [
            (at, effect.message)
            for at, effect in self.log
            if isinstance(effect, syncer_fx.Send)
            and isinstance(effect.message, kind)
            and learner in (None, effect.learner)
        ]

    def commits(self) -> list[tuple[float, syncer_fx.Commit]]:
        return [(at, effect) for at, effect in self.log if isinstance(effect, syncer_fx.Commit)]

    def merged_steps(self, learner: str, fragment: int) -> int:
        """Steps of this fragment that went into the model, over all rounds."""
        return sum(
            member["steps"]
            for note in self.said("round")
            if note.data["fragment"] == fragment
            for member in note.data["members"]  # type: ignore[attr-defined]
            if member["learner"] == learner
        )

    def story(self) -> str:
        return "\n".join(f"{at:8.3f} {note.text}" for at, note in self.notes[-40:])

    # ---- what the simulator asks, as tests listen to it -----------------------------------------------------------

    def _later(self, delay: float, action: Callable[[], object]) -> None:
        self.queue.call_later(delay, action)

    def deliver(
        self, syncer: SimulatedSyncer, event: syncer_fx.SyncerEvent, least: float = 0.0
    ) -> list[syncer_fx.SyncerEffect]:
        return (
            self._deliver(event)
            if syncer is self.simulated_syncer and not least
            else super().deliver(syncer, event, least)
        )

    def _deliver(self, event: syncer_fx.SyncerEvent) -> list[syncer_fx.SyncerEffect]:
        return super().deliver(self.simulated_syncer, event)

    def carry_out_syncer_effect(self, syncer: SimulatedSyncer, effect: syncer_fx.SyncerEffect) -> None:
        if self.crash is not None and self.crash(effect, "before"):
            self.crash_syncer()
            return
        self.log.append((self.now, effect))
        self.invariants.watch_effect(syncer, effect)
        self._carry_out(effect)
        if self.crash is not None and self.crash(effect, "after"):
            self.crash_syncer()

    def _carry_out(self, effect: syncer_fx.SyncerEffect) -> None:
        self.simulated_syncer.carry_out(effect)

    def carry_out_learner_effect(self, learner: SimulatedLearner, effect: learner_fx.LearnerEffect) -> None:
        self._do(learner, effect)

    def _do(self, learner: SimulatedLearner, effect: learner_fx.LearnerEffect) -> None:
        super().carry_out_learner_effect(learner, effect)

    def on_note(self, note: Note) -> None:
        self.notes.append((self.now, note))

    def on_cut_complete(self, cut: syncer_fx.CompleteCut) -> None:
        self.complete.append(cut)

    def on_inform(self, learner: SimulatedLearner, progress: float) -> None:
        learner.informed.append(progress)

    def on_step(self, learner: Training) -> None:
        learner.history.append(tuple(learner.theta))

    def on_adoption(self, learner: Training, adopt: learner_fx.Adopt, value: float, dropped: int) -> None:
        learner.adoptions.append((learner.t, adopt.fragment, adopt.version))
        super().on_adoption(learner, adopt, value, dropped)

    def begin_term(self, syncer: SimulatedSyncer) -> None:
        """The first to come back sets a new term going."""

    def close_run(self, syncer: SimulatedSyncer) -> object:
        self.finished = True
        return None
