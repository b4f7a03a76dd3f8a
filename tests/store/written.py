"""A small run on disk, written with the real store and the real numbers, and ways to break one thing of it.

Two learners, three fragments (P = 3): every round both take two steps of eight tokens, give what they have of the
round's fragment and adopt the new version at once. `WrittenRun` writes what it is told, also what no syncer would.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from atoll.config import Outer
from atoll.numerics.fragments import make_plan
from atoll.protocol.history import History
from atoll.protocol.leases import Leases
from atoll.protocol.messages import TensorSpec
from atoll.protocol.records import (
    AnyRecord,
    BegunRecord,
    ChangedRecord,
    CutDoneRecord,
    EndedRecord,
    GoneRecord,
    GrantedRecord,
    JoinedRecord,
    MergedRecord,
    PassedRecord,
    ResetRecord,
    RestoredRecord,
    ScoredRecord,
    Share,
    SourcesRecord,
    StartedRecord,
    TermRecord,
)
from atoll.protocol.settings import Settings
from atoll.protocol.syncer.effects import Restore
from atoll.store.cuts import CutState, LearnerPart, Manifest, digest_file, write_manifest, write_syncer_part
from atoll.store.disk import LocalDisk
from atoll.store.export import NOTHING_UNMERGED
from atoll.store.journal import Journal, read
from atoll.store.rundir import RunDir, facts_of_model, save_model
from atoll.store.verify import VerifyReport, verify_run
from atoll.store.writer_lease import claim
from atoll.syncer.outer_state import Overflow
from atoll.syncer.parameters import Parameters
from atoll.syncer.recovery import read_earlier

P = 3
TENSORS = (
    TensorSpec("embed", (6, 4), "float32", embedding=True),
    TensorSpec("blocks.0.weight", (5, 4), "float32"),
    TensorSpec("blocks.1.weight", (4, 4), "float32"),
    TensorSpec("head.bias", (7,), "float32"),
)
OUTER: dict[str, str | float] = {"merge": "rda-row", "optimizer": "nesterov", "lr": 0.6, "momentum": 0.6}
STEPS, TOKENS, BATCH = 2, 16, 4
"""Of a learner between two rounds: steps, tokens, samples."""


@dataclass
class Island:
    incarnation: int
    t: int = 0
    total: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        self.steps, self.tokens, self.base, self.dropped = [0] * P, [0] * P, [0] * P, [0] * P

    def train(self) -> None:
        self.t, self.total, self.position = self.t + STEPS, self.total + TOKENS, self.position + BATCH
        for fragment in range(P):
            self.steps[fragment] += STEPS
            self.tokens[fragment] += TOKENS


class WrittenRun:
    def __init__(
        self,
        path: Path,
        run: str = "small",
        outer: dict[str, str | float] = OUTER,
        tensors: tuple[TensorSpec, ...] = TENSORS,
        version_codec: str = "fp32",
        frozen: str = NOTHING_UNMERGED,
        unmerged: tuple[str, ...] = (),
        renamed: tuple[str, ...] = (),
    ) -> None:
        self.dir = RunDir.create(path)
        self.dir.settings.write_text("seed = 7\n")
        self.dir.journal.mkdir()
        self.dice = np.random.default_rng(7)
        settings = Settings(learners=2, fragments=P, sync_every=6, version_codec=version_codec)
        plan = make_plan(tensors, P, settings.plan)
        self.parameters = Parameters(plan, msgspec.convert(outer, Outer), version_codec)
        told = {"frozen": frozen, "unmerged": unmerged, "renamed": renamed}
        self.history = History(BegunRecord(run, settings, outer, tensors, plan.fingerprint, **told))  # type: ignore[arg-type]
        self.rounds = [-1] * P
        self.islands: dict[str, Island] = {}
        self.journal = begin_term(self.dir.journal, 1)
        self.raw(self.history.begun)

    # ---- records ------------------------------------------------------------------------------------------------

    def raw(self, record: AnyRecord, gradient: memoryview | None = None) -> None:
        """On disk and no further: also what the history would not take."""
        self.journal.append([(record, gradient)])

    def write(self, record: AnyRecord) -> None:
        self.raw(record)
        self.history.apply(record)

    def join(self, learner: str) -> None:
        incarnation = self.history.lives[learner].incarnation + 1 if learner in self.history.lives else 1
        self.write(JoinedRecord(learner, incarnation, f"{learner}-{incarnation}", 0))
        self.islands[learner] = Island(incarnation)
        self.islands[learner].base = [max(0, version) for version in self.history.versions]

    def start(self) -> None:
        """Version 0, in cut 0."""
        for fragment in range(P):
            data = self.parameters.initial_bytes(fragment)
            np.frombuffer(data, np.float32)[:] = self.dice.standard_normal(data.nbytes // 4)
        self.parameters.commit_initial()
        table = self.syncer_part(0)
        write_manifest(self.dir.cuts, Manifest(self.history.run, 0, 0, table, {}))
        self.write(StartedRecord("learner-0"))

    def sources(self) -> None:
        self.write(SourcesRecord((("text", 1000, 1.0),), 0))

    def lease(self, learner: str, samples: int = 64) -> GrantedRecord:
        granted = self.leases.next(learner, self.islands[learner].incarnation, samples)
        assert granted is not None
        self.write(granted)
        return granted

    @property
    def leases(self) -> Leases:
        assert self.history.leases is not None
        return self.history.leases

    def round(
        self,
        change: Callable[[MergedRecord], MergedRecord] = lambda record: record,
        share: Callable[[Share], Share] = lambda share: share,
        keep: bool = True,
    ) -> None:
        """One round of all learners; `change` and `share` (of learner-0) make its record say what is not so."""
        number = self.history.committed
        fragment = number % P
        names = sorted(self.islands)
        for island in self.islands.values():
            island.train()
        shares = tuple(self._share(name, fragment) for name in names)
        size = self.parameters.plan.fragments[fragment].size
        deltas = [self.dice.standard_normal(size).astype(np.float32) for _ in shares]
        weights, bases = [one.weight for one in shares], [one.base for one in shares]
        mark = self.parameters.stage_merge(fragment, deltas, weights, bases=bases)
        version = self.history.versions[fragment] + 1
        honest = MergedRecord(number, fragment, version, 1, "every live learner reported", shares, mark, step=self.step)
        told = change(replace(honest, members=(share(shares[0]), *shares[1:])))
        self.raw(told, self.parameters.round_payload(fragment) if keep else None)
        self.parameters.commit_version(fragment, version, number)
        if replace(told, digest=mark) == honest:
            self.history.apply(told)
        self.rounds[fragment] = number
        for name in names:
            self._adopt(self.islands[name], fragment, version)

    def _share(self, name: str, f: int) -> Share:
        island = self.islands[name]
        steps, tokens = island.steps[f], island.tokens[f]
        position = island.position if self.history.leases is not None else -1
        weight = tokens * (tokens / steps)
        counters = (island.t, steps, tokens, weight, island.base[f], island.total, position)
        return Share(name, island.incarnation, *counters, limit=self.history.settings.weight_limit)

    def _adopt(self, island: Island, fragment: int, version: int) -> None:
        island.steps[fragment] = island.tokens[fragment] = 0
        island.base[fragment] = version

    @property
    def step(self) -> float:
        """The run's step with the round that comes next."""
        settings = self.history.settings
        return (self.history.committed + 1) * settings.sync_every / settings.fragments

    def pass_over(self, reason: str = "0 of 1 contributions came") -> None:
        number = self.history.committed
        self.write(PassedRecord(number, number % P, reason, step=self.step))

    def set_guard(self, guard: str) -> None:
        settings = msgspec.convert({**msgspec.to_builtins(self.history.settings), "guard": guard}, Settings)
        self.write(ChangedRecord(settings, self.history.outer, f"guard={guard}"))

    def set_outer(self, **changes: str | float) -> None:
        outer = {**self.history.outer, **changes}
        self.write(ChangedRecord(self.history.settings, outer, "outer"))
        self.parameters.change_outer(msgspec.convert(outer, Outer))

    def overflow(self) -> None:
        """A round whose outer step is not finite: it is passed over, and its fragment's outer state starts anew."""
        fragment = self.history.committed % P
        huge = np.full(self.parameters.plan.fragments[fragment].size, 3e38, np.float32)
        with pytest.raises(Overflow):
            self.parameters.stage_merge(fragment, [huge], [1.0], bases=[-1])
        self.write(ResetRecord(fragment, "the outer step gave values that are not finite"))
        self.pass_over()

    def score(self, loss: float | None) -> None:
        self.write(ScoredRecord(self.history.committed, loss))

    def roll_back(
        self, to: int, change: Callable[[RestoredRecord], RestoredRecord] = lambda record: record
    ) -> RestoredRecord:
        """The guard takes the run back; learners drop what they have."""
        earlier = read_earlier(self.dir, Restore(to, tuple(self.history.rolled_back)), disk=LocalDisk())
        told, at = earlier.told, self.history.committed
        versions = tuple(version + 1 for version in self.history.versions)
        honest = RestoredRecord(told.round, at, versions, told.digests, told.undone, "the loss was good then")
        record = change(honest)
        self.raw(record, earlier.packed.data)
        self.parameters.restore_state(earlier.packed, versions, at - 1)
        if record == honest:
            self.history.apply(record)
        self.rounds = [at - 1] * P
        for island in self.islands.values():
            for fragment, version in enumerate(versions):
                island.dropped[fragment] += island.tokens[fragment]
                self._adopt(island, fragment, version)
        return record

    def report(self) -> None:
        """What learners say is in no record; a cut's ledger knows of it."""
        for name, island in self.islands.items():
            wrong = self.history.ledger.reported(
                name, island.incarnation, island.total, island.tokens, island.dropped, island.base
            )
            assert wrong is None, wrong

    def gone(self, learner: str, **changes: Any) -> None:
        island = self.islands.pop(learner)
        fate = self.history.ledger.closing(learner, island.incarnation)
        again = -1
        if self.history.leases is not None:
            again = self.history.leases.merged_to(learner, island.incarnation)
        fates = msgspec.structs.asdict(fate)
        honest = GoneRecord(learner, island.incarnation, island.t, **fates, again_from=again)
        told = replace(honest, **changes)
        self.raw(told)
        if told == honest:
            self.history.apply(told)

    def reign(self) -> None:
        """The syncer was killed; another goes on."""
        before = self.journal.position
        self.journal.close()
        self.journal = begin_term(self.dir.journal, before.term + 1)
        self.write(TermRecord(before.term + 1, before.offset, before.hash, self.history.committed))
        self.parameters.begin_term()

    def end(self, progress: float = -1.0) -> None:
        self.write(EndedRecord("24 steps are done", step=self.history.step))
        self.write(EndedRecord("24 steps are done", final=True, step=self.history.step, progress=progress))
        facts = facts_of_model(self.history.run, self.history.committed, self.history.versions)
        save_model(self.dir.model, self.parameters.tensors_by_name(), facts)
        for learner in sorted(self.islands):
            self.gone(learner)

    # ---- cuts ---------------------------------------------------------------------------------------------------

    def syncer_part(self, cut: int, change: Callable[[CutState], CutState] = lambda state: state, run: str = "") -> str:
        self.report()
        file = self.journal.rotate()
        state = change(CutState(self.history.state(), self.journal.position, file, tuple(self.rounds)))
        arrays = {name: values.view(np.uint8) for name, values in self.parameters.hold_arrays().items()}
        data = msgspec.msgpack.encode(state)
        return write_syncer_part(self.dir.cuts, run or self.history.run, cut, cut, data, arrays)

    def cut(self, change: Callable[[CutState], CutState] = lambda state: state, run: str = "") -> int:
        """A complete one. `change`: what its state says instead of the truth, with all digests as they should be."""
        cut = self.history.committed
        table = self.syncer_part(cut, change, run)
        learners = {name: self._learner_part(name, cut) for name in self.islands}
        mark = write_manifest(self.dir.cuts, Manifest(run or self.history.run, cut, cut, table, learners))
        self.write(CutDoneRecord(cut, cut, tuple(sorted(learners)), mark))
        return cut

    def _learner_part(self, name: str, cut: int) -> LearnerPart:
        path = self.dir.learner(name) / f"cut-{cut:06d}.safetensors"
        path.write_bytes(f"the state of {name} at {cut}".encode())
        return LearnerPart(self.islands[name].incarnation, self.islands[name].t, path.name, digest_file(path))

    def trim(self) -> None:
        """As after the newest cut: only its payloads and later ones stay."""
        self.journal.trim(self.journal.position.term, self.journal.file)


def begin_term(folder: Path, term: int) -> Journal:
    (folder / "terms").mkdir(exist_ok=True)
    assert claim(folder, term)
    return Journal.begin(folder, term, disk=LocalDisk(), marks=RunDir(folder.parent).marks)


def begun(path: Path, **given: Any) -> WrittenRun:
    """Two learners, version 0, leases."""
    run = WrittenRun(path, **given)
    run.join("learner-0")
    run.join("learner-1")
    run.start()
    run.sources()
    run.lease("learner-0")
    run.lease("learner-1")
    return run


def with_rounds(path: Path, rounds: int = 4, **given: Any) -> WrittenRun:
    run = begun(path, **given)
    for _ in range(rounds):
        run.round()
    return run


def whole(path: Path) -> WrittenRun:
    """All that can happen to a run that is well: cuts at 4 and 9, a killed learner, a killed syncer, a void round."""
    run = with_rounds(path, 4)
    run.cut()
    run.round()
    run.gone("learner-1")
    run.round()
    run.reign()
    run.join("learner-1")
    run.lease("learner-1", 32)
    run.round()
    run.pass_over()
    run.round()
    run.cut()
    for _ in range(4):
        run.round()
    run.end()
    return run


def cut_run(path: Path) -> WrittenRun:
    """Cuts 0, 2 and 4, and a round behind."""
    run = with_rounds(path, 2)
    run.cut()
    run.round()
    run.round()
    run.cut()
    run.round()
    return run


def ended_run(path: Path) -> WrittenRun:
    """Of which rounds 5 to 7 are the last cycle, with cuts in the middle of it, at 6, and behind it, at 8."""
    run = cut_run(path)
    run.set_outer(lr=0.3)
    run.write(EndedRecord("24 steps are done", step=run.history.step))
    run.set_outer(optimizer="nesterov-last")
    run.round()
    run.cut()
    run.round()
    run.round()
    run.cut()
    run.end()
    return run


def continued(old: WrittenRun, path: Path, change: Callable[[CutState], CutState] = lambda state: state) -> WrittenRun:
    """A new run that begins as the old one is now; the old one has just taken a cut."""
    run, cut = copy.copy(old), old.history.committed
    run.dir = RunDir.create(path)
    run.dir.journal.mkdir()
    begun = replace(old.history.begun, run="next", parent=f"{old.history.run} cut {cut}")
    run.history = History.restore(replace(old.history.state(), begun=begun, cuts=[]))
    run.journal = begin_term(run.dir.journal, 1)
    run.raw(begun)
    learners = {name: run._learner_part(name, cut) for name in run.islands}
    write_manifest(run.dir.cuts, Manifest("next", cut, cut, run.syncer_part(cut, change), learners))
    run.reign()
    return run


# ---- what verify says of it -----------------------------------------------------------------------------------------


def well(run: WrittenRun) -> VerifyReport:
    report = verify_run(run.dir.path)
    assert report.ok and not report.problem, report.problem
    return report


def wrong(run: WrittenRun) -> str:
    report = verify_run(run.dir.path)
    assert not report.ok and report.problem and "\n" not in report.problem
    return report.problem


def last_record(run: WrittenRun) -> str:
    """How a finding names the place of the last record."""
    *_, (position, _) = read(run.dir.journal, disk=LocalDisk())
    number = sum(1 for _ in read(run.dir.journal, disk=LocalDisk()))
    segment = run.dir.journal / f"segment-{position.term:06d}.log"
    return f"record {number} (up to byte {position.offset} of {segment}): "


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    """Name, size and time of every file below a folder."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)
