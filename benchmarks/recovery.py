"""How long a syncer takes to come back, and what a run leaves on disk: neither may grow with the length of the run.

    python benchmarks/recovery.py

A run is written down with the syncer's own books and parameters, round after round, with four members in each and a cut
every 150 rounds; copies of it are kept after 100, 1,000 and 10,000 rounds, each 100 rounds behind its newest cut. Then
`recover` reads them in turns. Disk is what lies in journal/ and cuts/; events.jsonl is a log and not part of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from atoll.config import Outer
from atoll.numerics import kernels
from atoll.numerics.fragments import make_plan
from atoll.protocol.history import History
from atoll.protocol.messages import TensorSpec
from atoll.protocol.records import (
    AnyRecord,
    BegunRecord,
    CutDoneRecord,
    JoinedRecord,
    MergedRecord,
    Share,
    SourcesRecord,
    StartedRecord,
)
from atoll.protocol.settings import Settings
from atoll.protocol.syncer.effects import CompleteCut
from atoll.store.disk import LocalDisk
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import acquire
from atoll.syncer.parameters import Parameters
from atoll.syncer.recovery import recover
from atoll.syncer.run_store import RunStore

LENGTHS = (100, 1_000, 10_000)
CUT_EVERY = 150
MEMBERS = tuple(f"learner-{number}" for number in range(4))
FRAGMENTS, TOKENS, BATCH = 24, 512, 8
TENSORS = tuple(TensorSpec(f"blocks.{number}.weight", (32, 32), "float32") for number in range(FRAGMENTS))
SLOWEST, MOST_BYTES = 1.5, 500
"""Limits: recovery after the longest run against the shortest; bytes per round."""


class WrittenRun:
    """A run of four learners that take a step a round, as its syncer would write it down."""

    def __init__(self, path: Path) -> None:
        self.out = RunDir.create(path)
        # What it costs to wait for the disk is measured elsewhere (journal.py); the bytes are the same.
        self.run_store = RunStore(self.out, acquire(self.out.journal), every_round=False)
        settings = Settings(learners=len(MEMBERS), cut_every=CUT_EVERY).resolved(FRAGMENTS)
        plan = make_plan(TENSORS, settings.fragments, settings.plan)
        begun = BegunRecord("benchmark", settings, msgspec.to_builtins(Outer()), TENSORS, plan.fingerprint)
        self.parameters = Parameters(plan, Outer())
        self.history = History(begun, self.run_store.term)
        self.run_store.append([(begun, None)])
        self.dice = np.random.default_rng(0)
        self.base = [0] * FRAGMENTS
        self.given_at = [0] * FRAGMENTS
        self._begin()

    def _begin(self) -> None:
        for name in MEMBERS:
            self.write(JoinedRecord(name, 1, f"session-of-{name}", 0))
        self.parameters.commit_initial()
        self.cut()
        self.write(StartedRecord(MEMBERS[0]))
        self.write(SourcesRecord((("text", 1_000_000, 1.0),), 0))

    def write(self, record: AnyRecord, gradient: memoryview | None = None) -> None:
        self.run_store.append([(record, gradient)])
        self.history.apply(record)

    def round(self) -> None:
        number, fragment = self.history.committed, self.history.committed % FRAGMENTS
        self._lease(number)
        shares = tuple(self._share(name, number, fragment) for name in MEMBERS)
        size = self.parameters.plan.fragments[fragment].size
        deltas = [self.dice.standard_normal(size, dtype=np.float32) for _ in MEMBERS]
        mark = self.parameters.stage_merge(fragment, deltas, [share.weight for share in shares])
        version = self.history.versions[fragment] + 1
        reason = f"all {len(MEMBERS)} live learners reported"
        gradient = self.parameters.outer_gradient(fragment).view(np.uint8).data
        self.write(MergedRecord(number, fragment, version, 1, reason, shares, mark), gradient)
        self.parameters.commit_version(fragment, version, number)
        self.base[fragment], self.given_at[fragment] = version, number + 1
        if self.history.committed % CUT_EVERY == 0:
            self.cut()

    def _share(self, name: str, number: int, fragment: int) -> Share:
        t = number + 1
        steps = t - self.given_at[fragment]
        tokens = steps * TOKENS
        weight, base = tokens * (tokens / steps), self.base[fragment]
        return Share(name, 1, t, steps, tokens, weight, base, total=t * TOKENS, position=t * BATCH)

    def _lease(self, number: int) -> None:
        """Ahead of what is taken, 64 batches at a time."""
        leases = self.history.leases
        assert leases is not None
        for name in MEMBERS:
            leases.taken(name, 1, number * BATCH)
            while leases.room(name, 1) < 2 * 64 * BATCH and (lease := leases.next(name, 1, 64 * BATCH)) is not None:
                self.write(lease)

    def cut(self) -> None:
        cut = self.history.committed
        held, arrays = self.parameters.committed_buffers(), self.parameters.hold_arrays()
        state = self.run_store.open_cut(self.history.state(), self.parameters.version_rounds())
        self.run_store.write_cut(cut, state, arrays)
        for buffer in held:
            buffer.readers -= 1
        mark = self.run_store.complete_cut(self.history.run, CompleteCut(cut, (), ()))
        if cut:
            self.write(CutDoneRecord(cut, cut, (), mark))


def write_runs(scratch: Path) -> dict[int, Path]:
    """One run, and a copy of it at every length."""
    run, copies = WrittenRun(scratch / "run"), {}
    for length in LENGTHS:
        while run.history.committed < length:
            run.round()
        copies[length] = scratch / f"run-{length}"
        shutil.copytree(run.out.path, copies[length])
    run.run_store.close()
    return copies


def bytes_on_disk(run: RunDir) -> int:
    return sum(
        file.stat().st_size for folder in (run.journal, run.cuts) for file in folder.rglob("*") if file.is_file()
    )


def recovery_s(path: Path, rounds: int) -> float:
    began = time.perf_counter()
    found = recover(RunDir(path), disk=LocalDisk())
    took = time.perf_counter() - began
    assert found is not None and found.history.committed == rounds and found.rounds == LENGTHS[0]
    return took


def measure(scratch: Path, repeats: int) -> dict[str, Any]:
    copies = write_runs(scratch)
    times: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for _ in range(repeats + 1):
        for length, path in copies.items():
            times[length].append(recovery_s(path, length))
    took = {length: median(found[1:]) for length, found in times.items()}  # the first of each finds cold files
    disk = {length: bytes_on_disk(RunDir(path)) for length, path in copies.items()}
    short, middle, long = LENGTHS
    return {
        "parameters": sum(32 * 32 for _ in TENSORS),
        "fragments": FRAGMENTS,
        "members": len(MEMBERS),
        "cut_every": CUT_EVERY,
        "recovery_ms": {str(length): round(1e3 * seconds, 2) for length, seconds in took.items()},
        "ratio": round(took[long] / took[short], 3),
        "disk_bytes": {str(length): size for length, size in disk.items()},
        "bytes_per_round": round((disk[long] - disk[middle]) / (long - middle), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/recovery.json"))
    options = parser.parse_args()
    kernels.warm()
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(Path(scratch), options.repeats)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0 if result["ratio"] < SLOWEST and result["bytes_per_round"] < MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
