"""`atoll replay DIR` repeats a run from its files; `atoll train --tape FILE` runs real learners under a simulated
scenario.

A tape gives a run like any other, with its own journal: the scenario's decisions, the model's tensors and the digest of
every version. `atoll replay` repeats it, and the same tape with the same script and seed gives the same result.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from atoll.config import Config
from atoll.launch.begun_here import remember_run
from atoll.launch.children import Child, cores
from atoll.launch.environment import LaunchEnvironment
from atoll.launch.local import RUNNER, WORKLOAD
from atoll.launch.ranks import RankProcesses
from atoll.launch.replay.own_records import OwnRecords
from atoll.launch.replay.recording import (
    ProcessRecording,
    RecordedAction,
    RecordedDecision,
    RunRecording,
    decisions_after,
    read_recording,
)
from atoll.launch.replay.syncer import ReplayOutcome, ReplaySyncer
from atoll.numerics.fragments import FragmentPlan, make_plan, most_fragments
from atoll.protocol.errors import ConfigError, RunFailed
from atoll.protocol.history import History
from atoll.protocol.messages import TensorSpec
from atoll.protocol.records import (
    AnyRecord,
    BegunRecord,
    ChangedRecord,
    DrawnRecord,
    MergedRecord,
    RestoredRecord,
    TermRecord,
)
from atoll.store.atomic import Appender, write_atomic
from atoll.store.cuts import CutState, check_cut, complete_cuts, read_syncer_part
from atoll.store.disk import Corrupt, LocalDisk
from atoll.store.journal import Journal, describe_lack, payload, read, read_tape
from atoll.store.rundir import RunDir, save_model
from atoll.store.shards import divide_plan
from atoll.store.writer_lease import acquire, hold_run
from atoll.syncer.parameters import Parameters
from atoll.syncer.recovery import outer_of

RecordKey = tuple[type[AnyRecord], int]


def _key(record: MergedRecord | RestoredRecord) -> RecordKey:
    """Which round it is, or behind how many rounds."""
    return type(record), record.at if isinstance(record, RestoredRecord) else record.round


@dataclass(frozen=True)
class RunReplay:
    out: RunDir
    config: Config
    jobs: int = 0
    """Training processes that compute at a time; 0: one for each core."""
    until: int | None = None
    cut: int | None = None
    logs: Path | None = None
    """Where what the scripts print goes; None: nowhere that lasts."""
    launch: LaunchEnvironment | None = None
    """Folder and variables that the scripts start with; None: those of this process."""
    watch: Callable[[ReplayOutcome, int], None] = lambda outcome, rounds: None

    def play(self) -> ReplayOutcome:
        score, terms = self._read_run()
        if self.until is not None and not 0 <= self.until < score.rounds:
            raise ConfigError(f"--until {self.until}: the tape has rounds 0 to {score.rounds - 1}")
        with tempfile.TemporaryDirectory(prefix="atoll-replay-logs-") as folder:
            logs = self.logs or Path(folder)
            logs.mkdir(parents=True, exist_ok=True)
            return self._make_syncer(score, terms, logs).play()

    def _read_run(self) -> tuple[RunRecording, dict[RecordKey, int]]:
        """The score, and the terms of all records that have a payload: it lies there."""
        terms: dict[RecordKey, int] = {}

        def lines() -> Iterator[AnyRecord]:
            for position, record in read(self.out.journal, disk=LocalDisk()):
                if isinstance(record, MergedRecord | RestoredRecord):
                    terms[_key(record)] = position.term
                yield record

        first = next(read(self.out.journal, disk=LocalDisk()), None)
        if first is None or not isinstance(first[1], BegunRecord):
            raise ConfigError(f"{self.out.path} holds no tape: its journal does not begin with the beginning of a run")
        return read_recording(lines()), terms

    def _make_syncer(self, score: RunRecording, terms: dict[RecordKey, int], logs: Path) -> ReplaySyncer:
        begun = score.begun
        if begun.parent and begun.shards > 1:
            raise ConfigError(
                f"this run was made from {begun.parent}, not from the beginning, and its syncer has several shards: "
                "such a run cannot be replayed yet; atoll verify checks it from its files"
            )
        if begun.parent and self.cut is None:
            newest = min(complete_cuts(self.out.cuts), default=None)
            raise ConfigError(
                f"this run was made from {begun.parent}, not from the beginning: replay it with --from-cut {newest}"
            )
        if self.cut is None and score.rounds and not score.has_first_parameters:
            oldest = min(complete_cuts(self.out.cuts), default=None)
            raise ConfigError(
                "the process that gave the first parameters was gone when training began, so no script makes them "
                f"again: replay what came after a snapshot with --from-cut {oldest}"
            )
        plan = make_plan(begun.tensors, begun.settings.fragments, begun.settings.plan)
        if plan.fingerprint != begun.fingerprint:
            raise ConfigError(
                "this version of Atoll makes other fragments of the run's model: use the version that ran it"
            )
        parameters = Parameters(plan, outer_of(History(begun)), begun.settings.version_codec)
        shards = divide_plan(plan, begun)
        if shards is not None and self.cut is not None:
            raise ConfigError(
                "a run whose syncer has several shards is replayed from its beginning: leave --from-cut out"
            )
        decisions, parts, states = self._beginning(score, parameters)
        self._check_sums(decisions, terms)

        def gradient(record: MergedRecord | RestoredRecord) -> memoryview | None:
            if record.payload is None or shards is not None:  # the other shards have the rest of it
                return None
            try:
                return memoryview(payload(self.out.journal, terms[_key(record)], record.payload, disk=LocalDisk()))
            except Corrupt:
                return None

        conductor = ReplaySyncer(
            score,
            parts,
            decisions,
            stage=lambda tensors: parameters,
            begun=self.cut is not None,
            launch=lambda part, path: self._launch_process(part, path, logs, states),
            gradient=gradient,
            jobs=self.jobs or cores(),
            until=self.until,
            watch=lambda outcome: self.watch(outcome, score.rounds),
            shards=shards,
        )
        conductor.outcome.remarks += _remarks(score)
        return conductor

    def _check_sums(self, decisions: Sequence[RecordedDecision], terms: dict[RecordKey, int]) -> None:
        """ConfigError if a round that is to be replayed was merged from a relay's sum that the journal lacks by now: no
        script makes it again, so it is said before anything is trained."""
        records = [one for one in decisions if isinstance(one, MergedRecord) and one.groups]
        lacking = [
            record.round
            for record in records
            if record.payload is None or describe_lack(self.out.journal, terms[_key(record)], record.payload)
        ]
        if not lacking or (self.until is not None and lacking[0] > self.until):
            return
        ways = [f"--until {lacking[0] - 1} repeats the rounds before it"] if lacking[0] else []
        cuts = [cut for cut in complete_cuts(self.out.cuts) if cut > lacking[-1]]
        ways += [f"--from-cut {min(cuts)} those since that cut"] if cuts else []
        raise ConfigError(
            f"round {lacking[0]} was merged from a relay's sum, and the journal keeps such sums since its last cuts "
            f"alone: {'; '.join(ways) or 'atoll verify checks what the journal has of it'}"
        )

    def _beginning(
        self, score: RunRecording, parameters: Parameters
    ) -> tuple[list[RecordedDecision], list[tuple[ProcessRecording, list[RecordedAction]]], dict[str, Path]]:
        """What is to be played: all of it, or what came after a cut."""
        if self.cut is None:
            return score.decisions, [(part, self._list_actions(part)) for part in score.parts], {}
        if self.cut not in complete_cuts(self.out.cuts):
            known = ", ".join(map(str, sorted(complete_cuts(self.out.cuts)))) or "none"
            raise ConfigError(f"{self.out.path} has no complete cut {self.cut}: there are {known}")
        checked = check_cut(self.out.cuts, self.out.learners, self.cut)
        kept, data, arrays = read_syncer_part(self.out.cuts, self.cut)
        then = msgspec.msgpack.decode(data, type=CutState)
        history = History.restore(then.history)
        score.begin_at(history)
        parameters.load_cut(arrays, kept.list_digests(), [max(0, version) for version in history.versions], then.rounds)
        parameters.change_outer(outer_of(history))
        parts: list[tuple[ProcessRecording, list[RecordedAction]]] = []
        states: dict[str, Path] = {}
        for part in score.parts:
            saved = checked.manifest.learners.get(part.learner)
            if saved is not None and score.of.get((part.learner, saved.incarnation)) is part:
                states[part.session] = self.out.learners / part.learner / saved.file
                parts.append((part, part.acts(after=self.cut)))
            elif part.began_after(history.committed):
                parts.append((part, self._list_actions(part)))
            elif part.learner in checked.spoilt:
                part.missing = part.missing or checked.spoilt[part.learner]
        return decisions_after(score.decisions, history.committed, then.position.term), parts, states

    def _list_actions(self, part: ProcessRecording) -> list[RecordedAction]:
        began = part.began
        if began is not None and began.state and not (self.out.learners / part.learner / began.state).exists():
            part.missing = part.missing or f"the state it went on from, {began.state}, is not there any more"
            return []
        return part.acts()

    def _launch_process(self, part: ProcessRecording, path: str, logs: Path, states: dict[str, Path]) -> Child:
        began, state, env = part.began, states.get(part.session), {}
        if state is None and began is not None and began.state:
            state = self.out.learners / part.learner / began.state
        if state is not None:
            exact = part.session in states or (began is not None and began.exact)
            env = {"ATOLL_STATE": str(state), "ATOLL_EXACT": "1" if exact else "0", "ATOLL_RUN": "replay"}
        return start_script(part, path, self.out, self.config, logs, env, self.launch)


def start_script(
    part: ProcessRecording,
    path: str,
    out: RunDir,
    config: Config,
    logs: Path,
    more: dict[str, str],
    launch: LaunchEnvironment | None = None,
) -> Child:
    """A training process that is told what to do by whoever listens at `path`."""
    threads = str(part.began.threads) if part.began is not None else "1"
    env = {
        "ATOLL_LEARNER": part.learner,
        "ATOLL_ROLE": "learner",
        "ATOLL_REPLAY": path,
        "ATOLL_SYNCER": "replay",
        "ATOLL_RUN_TOML": str(out.settings),
        "ATOLL_SEED": str(config.seed),
        "ATOLL_THREADS": threads,
        "OMP_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
    }
    if config.init:
        env["ATOLL_INIT"] = str(Path(config.init).absolute())
    for name in ("ATOLL_FOLDER", "ATOLL_DIRECT"):
        os.environ.pop(name, None)
    script, folder = [*RUNNER, *(config.script or WORKLOAD)], None
    if launch is not None:
        env, folder = {**launch.find_missing(os.environ), **env}, launch.find_folder()
    # As the launcher does: a script that expects ranks finds the variables of a group also where it is alone.
    of_ranks = partial(RankProcesses, count=part.ranks, hidden=config.algorithm == "data-parallel")
    make = of_ranks if max(part.ranks, config.ranks) > 1 else Child
    child = make(part.name, [sys.executable, *script], {**env, **more}, logs / f"{part.name}.log", folder=folder)
    child.start()
    return child


def _remarks(score: RunRecording) -> list[str]:
    """What cannot be promised."""
    remarks = [f"{part.name}: {part.missing}" for part in score.parts if part.missing]
    machines = {part.began.device: part.began for part in score.parts if part.began is not None}
    for device, began in machines.items():
        if device != "cpu" and not began.deterministic:
            remarks.append(
                f"the run trained on {device} without torch.use_deterministic_algorithms(True): "
                "its kernels may give other bits each time, so a difference need not be a fault"
            )
    return remarks


# ---- a tape ---------------------------------------------------------------------------------------------------------


@dataclass
class TapeRun:
    tape: Path
    config: Config
    out: RunDir
    jobs: int = 0
    watch: Callable[[ReplayOutcome, int], None] = lambda outcome, rounds: None

    def run(self) -> dict[str, Any]:
        """Return the part of the summary about the tape. RunFailed if the tape cannot be followed to its end."""
        with hold_run(self.out.path):
            return self._run_held()

    def _run_held(self) -> dict[str, Any]:
        began = time.monotonic()
        lines = [self._with_outer(line) for line in read_tape(self.tape)]
        write_atomic(self.out.settings, self.config.toml())
        remember_run(self.config, None)
        score = read_recording(lines)
        conductor = self._make_syncer(score)
        outcome = conductor.play()
        if outcome.stopped:
            raise RunFailed(f"{outcome.stopped}; logs are in {self.out.logs}")
        self._write_records(lines, score, outcome)
        save_model(self.out.model, dict(conductor.parameters.tensors_by_name()))
        drawn = next((line for line in lines if isinstance(line, DrawnRecord)), None)
        return {
            "goodput": None,  # learners wait for each other, whatever the scenario says of their speeds
            "tape": str(self.tape),
            **({"goodput": drawn.goodput, "learner_steps": drawn.steps, "drawn": drawn.describe()} if drawn else {}),
            "versions": outcome.compared,
            "learners": score.begun.settings.learners,
            "processes": len(score.parts),
            "parameters": conductor.parameters.plan.size,
            "wall_s": round(time.monotonic() - began, 3),
        }

    def _make_syncer(self, score: RunRecording) -> ReplaySyncer:
        def stage(tensors: tuple[TensorSpec, ...]) -> Parameters:
            self._tensors, self._plan = tensors, make_tape_plan(score.begun, tensors)
            return Parameters(self._plan, self.config.outer, score.begun.settings.version_codec)

        return ReplaySyncer(
            score,
            [(part, part.acts()) for part in score.parts],
            score.decisions,
            stage=stage,
            begun=False,
            launch=lambda part, path: start_script(part, path, self.out, self.config, self.out.logs, {}),
            gradient=lambda record: None,
            jobs=self.jobs or cores(),
            watch=lambda outcome: self.watch(outcome, score.rounds),
            scenario=True,
        )

    def _write_records(self, lines: Sequence[AnyRecord], score: RunRecording, outcome: ReplayOutcome) -> None:
        """The journal of this run, in one term, and its events."""
        begun = self._begin_record(score.begun)
        lease = acquire(self.out.journal)
        journal = Journal.begin(self.out.journal, lease.term, disk=LocalDisk(), marks=self.out.marks)
        with Appender(self.out.events) as sink:
            own = OwnRecords(begun, score, outcome, sink)
            kept = [own.take(line) for line in lines[1:] if not isinstance(line, TermRecord)]
        journal.append([(line, None) for line in (begun, *kept)])
        journal.close()
        lease.release()

    def _with_outer(self, line: AnyRecord) -> AnyRecord:
        """A tape names of the outer settings what its phases of training change; the rest is this run's own."""
        if not isinstance(line, ChangedRecord):
            return line
        return msgspec.structs.replace(line, outer={**msgspec.to_builtins(self.config.outer), **line.outer})

    def _begin_record(self, begun: BegunRecord) -> BegunRecord:
        outer = msgspec.to_builtins(self.config.outer)
        named = {"tensors": self._tensors, "fingerprint": self._plan.fingerprint, "outer": outer}
        return msgspec.structs.replace(begun, seed=self.config.seed, **named)


def make_tape_plan(begun: BegunRecord, tensors: tuple[TensorSpec, ...]) -> FragmentPlan:
    settings, most = begun.settings, most_fragments(tensors, begun.settings.plan)
    if settings.fragments > most:
        raise ConfigError(
            f"the tape cuts the model into {settings.fragments} fragments, but no more than {most} can be made of it: "
            f"make the tape with --fragments {most} or fewer"
        )
    return make_plan(tensors, settings.fragments, settings.plan)
