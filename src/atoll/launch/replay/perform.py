"""`atoll train --tape FILE`: real learners under a scenario that a simulator wrote.

What comes out is a run like any other, with a journal of its own: the scenario's decisions, the model's tensors and the
digest of every version. `atoll replay` repeats it, and the same tape with the same script and seed gives the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from atoll.config import Config
from atoll.launch.children import cores
from atoll.launch.replay.conductor import Conductor, Outcome
from atoll.launch.replay.play import start_script
from atoll.launch.replay.score import Score, read_score
from atoll.numerics.fragments import Plan, make_plan
from atoll.protocol.errors import ConfigError, RunFailed
from atoll.protocol.messages import TensorSpec
from atoll.protocol.records import AnyRecord, Begun, Merged, Reigned
from atoll.store.atomic import write_atomic
from atoll.store.disk import LocalDisk
from atoll.store.journal import Journal, read_tape
from atoll.store.rundir import RunDir, save_model
from atoll.store.writer_lease import acquire, hold_run
from atoll.syncer.parameters import Parameters


@dataclass
class Performance:
    tape: Path
    config: Config
    out: RunDir
    jobs: int = 0
    watch: Callable[[Outcome, int], None] = lambda outcome, rounds: None

    def run(self) -> dict[str, Any]:
        """Its summary. RunFailed when the tape could not be followed to its end."""
        with hold_run(self.out.path):
            return self._run_held()

    def _run_held(self) -> dict[str, Any]:
        began = time.monotonic()
        lines = read_tape(self.tape)
        write_atomic(self.out.settings, self.config.toml())
        score = read_score(lines)
        conductor = self._conductor(score)
        outcome = conductor.play()
        if outcome.stopped:
            raise RunFailed(f"{outcome.stopped}; logs are in {self.out.logs}")
        self._write(lines, conductor)
        save_model(self.out.model, dict(conductor.parameters.tensors()))
        return {
            "run": score.begun.run,
            "tape": str(self.tape),
            "rounds": score.rounds,
            "versions": outcome.compared,
            "learners": score.begun.settings.learners,
            "processes": len(score.parts),
            "parameters": conductor.parameters.plan.size,
            "wall_s": round(time.monotonic() - began, 3),
        }

    def _conductor(self, score: Score) -> Conductor:
        def stage(tensors: tuple[TensorSpec, ...]) -> Parameters:
            self._tensors, self._plan = tensors, _plan(score.begun, tensors)
            return Parameters(self._plan, self.config.outer)

        return Conductor(
            score,
            [(part, part.acts()) for part in score.parts],
            score.decisions,
            stage=stage,
            begun=False,
            launch=lambda part, path: start_script(part, path, self.out, self.config, self.out.logs, {}),
            gradient=lambda record: None,
            jobs=self.jobs or cores(),
            watch=lambda outcome: self.watch(outcome, score.rounds),
        )

    def _write(self, lines: Sequence[AnyRecord], conductor: Conductor) -> None:
        """The journal of this run, in one term."""
        lease = acquire(self.out.journal)
        journal = Journal.begin(self.out.journal, lease.term, disk=LocalDisk())
        kept = [self._own(line, conductor.outcome) for line in lines if not isinstance(line, Reigned)]
        journal.append([(line, None) for line in kept])
        journal.close()
        lease.release()

    def _own(self, line: AnyRecord, outcome: Outcome) -> AnyRecord:
        if isinstance(line, Begun):
            outer = msgspec.to_builtins(self.config.outer)
            named = {"tensors": self._tensors, "fingerprint": self._plan.fingerprint, "outer": outer}
            return msgspec.structs.replace(line, seed=self.config.seed, **named)
        if isinstance(line, Merged):
            digest, marks = outcome.made[line.round]
            return msgspec.structs.replace(line, digest=digest, marks=marks)
        return line


def _plan(begun: Begun, tensors: tuple[TensorSpec, ...]) -> Plan:
    if begun.settings.fragments > len(tensors):
        raise ConfigError(
            f"the tape cuts the model into {begun.settings.fragments} fragments, it has {len(tensors)} tensors: "
            "make the tape with fewer --fragments"
        )
    return make_plan(tensors, begun.settings.fragments, begun.settings.plan)
