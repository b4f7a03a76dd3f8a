"""A failure scenario as a tape: the shipped machines in virtual time, and what every training process was told.

`atoll train --tape` follows it with real learners on one machine: the same members, bases and steps of adoption each
time, whatever the machine. Data is not part of it: learners take theirs in a seeded order of their own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from atoll.protocol import tape
from atoll.protocol.errors import ConfigError
from atoll.protocol.learner import effects as fx
from atoll.protocol.records import AnyRecord, EndedRecord, JoinedRecord, MergedRecord, PlayedRecord, Stretch
from atoll.protocol.settings import Settings
from atoll.simulate import inject
from atoll.simulate.faults import Fault
from atoll.simulate.simulated_learner import SimulatedLearner
from atoll.simulate.training import Training
from atoll.simulate.world import World

KINDS = ("kill", "leave", "pause", "suspend", "slow", "partition", "crash")
SYNCER = "crash"
"""The one kind that happens to the syncer."""
_FAULT = re.compile(r"([a-z]+)(?::learner-(\d+))?@(\d+(?:\.\d+)?)\+(\d+(?:\.\d+)?)")
MOST_S = 1e7


class TapeWorld(World):
    """A world that keeps what its training processes are told."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.tapes: dict[str, list[tape.AnyEntry]] = {}
        self._heard: dict[str, fx.Inform] = {}
        self._stopped: set[str] = set()

    def start_process(self, name: str, step_s: float, *, restored: bool = False) -> SimulatedLearner:
        learner = super().start_process(name, step_s, restored=restored)
        began = tape.BeganEntry(0, 1, "", "", "cpu", True)
        self.tapes[learner.session] = [began, tape.SuppliedEntry(0, (), own=True)]
        return learner

    def carry_out_learner_effect(self, learner: SimulatedLearner, effect: fx.LearnerEffect) -> None:
        match effect:
            case fx.Own():
                self._say(learner, tape.OwnedEntry(learner.t))
            case fx.ForgetVersions(reset=reset):
                self._say(learner, tape.ForgotEntry(learner.t, reset))
            case fx.Inform():
                self._heard[learner.session] = effect
            case _:
                pass
        super().carry_out_learner_effect(learner, effect)

    def on_learner_event(
        self, learner: SimulatedLearner, event: fx.LearnerEvent, effects: Sequence[fx.LearnerEffect]
    ) -> None:
        match event:
            case fx.Stepped(t, stopped=True) if learner.session not in self._stopped:
                self._stopped.add(learner.session)
                self._say(learner, tape.StoppedEntry(t))
            case fx.Captured(t=t, reason=""):
                self._say(learner, tape.GaveEntry(t))
            case fx.Taken(ticket, t, ""):
                self._say(learner, tape.TookEntry(t, ticket))
            case _:
                pass
        super().on_learner_event(learner, event, effects)

    def on_adoption(self, learner: Training, adopt: fx.Adopt, value: float, dropped: int) -> None:
        assert isinstance(learner, SimulatedLearner)
        gone = adopt.copy_t is not None and (adopt.fragment, adopt.copy_t) not in learner.copies
        rule = "overwrite" if adopt.rule == "carry" and gone else adopt.rule
        copy_t = adopt.copy_t if rule == "carry" and adopt.copy_t is not None else -1
        self._say(learner, tape.AdoptedEntry(learner.t, adopt.fragment, adopt.version, tape.shorten_rule(rule), copy_t))
        super().on_adoption(learner, adopt, value, dropped)

    def on_step(self, learner: Training) -> None:
        assert isinstance(learner, SimulatedLearner)
        if (heard := self._heard.pop(learner.session, None)) is not None:
            self._say(learner, tape.InformedEntry(learner.t, heard.committed, heard.progress, heard.global_step))

    def _say(self, learner: SimulatedLearner, entry: tape.AnyEntry) -> None:
        self.tapes[learner.session].append(entry)

    def play_to_the_end(self) -> list[AnyRecord]:
        """The records of the whole run."""
        self.run(MOST_S)
        if not self.finished:
            raise ConfigError("this run does not come to an end: give it --steps, and faults that end")
        return _records(self)


def make_tape(
    settings: Settings, *, step_s: Sequence[float], faults: Sequence[Fault] = (), seed: int = 0, latency_s: float = 0.0
) -> list[AnyRecord]:
    """The records of a whole run. `step_s`: how long a step of each learner takes; times are in the same unit."""
    world = TapeWorld(settings, seed=seed, latency_s=latency_s)
    world.network.redials = True
    world.simulated_syncer.check_lease()
    for number, seconds in enumerate(step_s):
        world.network.dial_later(world.join(f"learner-{number}", seconds))
    inject.schedule(world, list(faults))
    return world.play_to_the_end()


def _records(world: TapeWorld) -> list[AnyRecord]:
    lives: dict[str, JoinedRecord] = {}
    lines: list[AnyRecord] = []
    ends: list[AnyRecord] = []
    for line in world.disk.journal:
        if isinstance(line, JoinedRecord):
            lives[line.session] = line
        elif isinstance(line, MergedRecord):
            line = msgspec.structs.replace(line, digest="")
        (ends if isinstance(line, EndedRecord) and line.final else lines).append(line)
    tapes = tuple(_stretch(life, world.tapes[session]) for session, life in lives.items())
    return [world.begun, *lines, PlayedRecord(tapes), *ends]


def _stretch(life: JoinedRecord, entries: list[tape.AnyEntry]) -> Stretch:
    return Stretch(life.learner, life.incarnation, 0, tuple(sorted(entries, key=lambda entry: entry.t)))


def parse_fault(text: str, learners: int) -> Fault:
    """kill:learner-1@40+20: at 40, for 20. The syncer: crash@60+5."""
    found = _FAULT.fullmatch(text)
    if found is None or found[1] not in KINDS or (found[1] == SYNCER) == bool(found[2]):
        kinds = ", ".join(kind for kind in KINDS if kind != SYNCER)
        raise ConfigError(
            f"{text!r} is not understood: write kill:learner-1@40+20 (kinds: {kinds}) or, for the syncer, crash@60+5"
        )
    if found[2] and int(found[2]) >= learners:
        raise ConfigError(f"{text!r}: there is no such learner; they are learner-0 to learner-{learners - 1}")
    target = int(found[2]) if found[2] else -1
    return Fault(float(found[3]), found[1], target, float(found[4]), number=1)  # type: ignore[arg-type]
