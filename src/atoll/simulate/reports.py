"""Reports of seeds: what became of each, and for a broken promise the shortest schedule of faults and its story.

The story is told from a second run. Schedules are shrunk by delta debugging, in a fixed order and with a bound on the
runs it takes. `python -m atoll.simulate.reports KIND [LEARNERS]` is a worker: seeds in, one a line, reports out.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from atoll.protocol.effects import Note, Tick
from atoll.protocol.learner import effects as learner_fx
from atoll.protocol.syncer import effects as syncer_fx
from atoll.simulate import campaign, worker_pool
from atoll.simulate.campaign import KINDS, Outcome, SeedPlan, WorldKind
from atoll.simulate.faults import Fault
from atoll.simulate.simulated_learner import SimulatedLearner
from atoll.simulate.simulated_syncer import SimulatedSyncer
from atoll.simulate.world import World

T = TypeVar("T")
MOST_RUNS = 150
LINES = 40
WIDTH = 160


class FailureReport(msgspec.Struct, frozen=True):
    """A broken promise with all it takes to look into it."""

    seed: int
    learners: int
    invariant: str
    message: str
    command: str
    faults: tuple[Fault, ...]
    """Those that it takes, of all that were drawn."""
    story: tuple[str, ...]


class RecordingWorld(World):
    """A world that remembers what was said and done of late."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.lines: deque[tuple[float, str, str]] = deque(maxlen=20_000)
        """When, about whom, what."""
        super().__init__(*arguments, **named)

    def _say(self, whom: str, text: str) -> None:
        self.lines.append((self.now, whom, text))

    def on_fault(self, fault: Fault) -> None:
        self._say("", f"FAULT {fault.line()}")

    def on_note(self, note: Note) -> None:
        self._say(str(note.data.get("learner", "")) or str(note.data.get("members", "")), note.text)

    def on_syncer_event(
        self,
        syncer: SimulatedSyncer,
        now: float,
        event: syncer_fx.SyncerEvent,
        effects: Sequence[syncer_fx.SyncerEffect],
    ) -> None:
        if not isinstance(event, Tick):
            self._say(_whom(event), f"{syncer.name} <- {_short(event)}")
        for effect in effects:
            if not isinstance(effect, Note):
                self._say(_whom(effect), f"{syncer.name} -> {_short(effect)}")
        super().on_syncer_event(syncer, now, event, effects)

    def on_learner_event(
        self, learner: SimulatedLearner, event: learner_fx.LearnerEvent, effects: Sequence[learner_fx.LearnerEffect]
    ) -> None:
        self._say(learner.name, f"{learner.session} <- {_short(event)}")
        super().on_learner_event(learner, event, effects)

    def about(self, learner: str, fragment: int, count: int = LINES) -> list[str]:
        """The last lines that concern this learner, or this fragment, or everybody."""
        wanted = [(at, text) for at, whom, text in self.lines if _concerns(whom, text, learner, fragment)]
        return [f"{at:9.3f} {text[:WIDTH]}" for at, text in wanted[-count:]]


def explain_failure(outcome: Outcome, plan: SeedPlan) -> FailureReport:
    """Shrink the schedule, then run what is left once more and listen."""

    def fails(faults: Sequence[Fault]) -> bool:
        return campaign.run(msgspec.structs.replace(plan, faults=tuple(faults))).invariant == outcome.invariant

    fewer = msgspec.structs.replace(plan, faults=tuple(shrink(plan.faults, fails)))
    world = campaign.make(fewer, RecordingWorld)
    assert isinstance(world, RecordingWorld)
    last = campaign.run(fewer, world)
    command = f"atoll simulate faults --seed {plan.seed} --learners {outcome.learners}"
    command += "" if plan.kind == "plain" else f" --worlds {plan.kind}"
    story = tuple(world.about(last.learner, last.fragment))
    return FailureReport(plan.seed, outcome.learners, last.invariant, last.message, command, fewer.faults, story)


def _concerns(whom: str, text: str, learner: str, fragment: int) -> bool:
    if not whom or (not learner and fragment < 0):
        return True
    return (bool(learner) and learner in whom) or (fragment >= 0 and f"fragment={fragment}" in text)


def _whom(thing: syncer_fx.SyncerEvent | syncer_fx.SyncerEffect) -> str:
    match thing:
        case syncer_fx.Greeted(hello):
            return hello.learner
        case syncer_fx.Persist(lines):
            return str(lines)
        case _:
            return getattr(thing, "learner", "everybody")


def _short(thing: object) -> str:
    """Without what every message carries."""
    message = getattr(thing, "message", None) or getattr(thing, "contribution", None) or getattr(thing, "hello", None)
    if message is not None:
        return f"{type(thing).__name__} {_short(message)}"
    fields = [(name, getattr(thing, name)) for name in getattr(thing, "__struct_fields__", ())]
    kept = [
        f"{name}={value}"
        for name, value in fields
        if name not in ("clock", "term", "cut", "seq", "settings", "history")
    ]
    return f"{type(thing).__name__}({', '.join(kept)})"


def shrink(things: Sequence[T], fails: Callable[[Sequence[T]], bool], most_runs: int = MOST_RUNS) -> list[T]:
    """A part of these that still fails, none of which can be left out alone (unless the runs ran out)."""
    left, pieces, runs = list(things), 2, 0
    while left:
        size = -(-len(left) // pieces)
        for start in range(0, len(left), size):
            fewer = [*left[:start], *left[start + size :]]
            runs += 1
            if runs > most_runs:
                return left
            if fails(fewer):
                left, pieces = fewer, max(2, pieces - 1)
                break
        else:
            if size == 1:
                return left
            pieces = min(len(left), 2 * pieces)
    return left


# ---- many seeds on many cores ----------------------------------------------------------------------------------------


class Report(msgspec.Struct, frozen=True):
    """What became of one seed."""

    outcome: Outcome
    told: FailureReport | None = None
    """Where a promise was broken."""


def report(seed: int, learners: int | None, kind: WorldKind = "plain", *, traced: bool = True) -> Report:
    plan = campaign.plan(seed, learners, kind)
    outcome = campaign.run(plan, campaign.make(plan, traced=traced))
    return Report(outcome, explain_failure(outcome, plan) if outcome.invariant else None)


def all_of(seeds: Sequence[int], learners: int | None, workers: int, kind: WorldKind = "plain") -> Iterator[Report]:
    """On so many cores."""
    arguments = (kind,) if learners is None else (kind, str(learners))
    for line in worker_pool.run("atoll.simulate.reports", [str(seed) for seed in seeds], workers, *arguments):
        yield msgspec.json.decode(line, type=Report)


def reports(lines: Iterator[str], learners: int | None, kind: WorldKind = "plain") -> Iterator[bytes]:
    for line in lines:
        yield msgspec.json.encode(report(int(line), learners, kind, traced=False)) + b"\n"


def main(arguments: list[str]) -> None:
    kind = next(one for one in KINDS if one == arguments[0])
    worker_pool.serve(lambda lines: reports(lines, int(arguments[1]) if arguments[1:] else None, kind))


if __name__ == "__main__":
    main(sys.argv[1:])
