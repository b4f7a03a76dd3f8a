"""Does the loop in lockstep do what real processes do? A real run, repeated by the loop's parts under the same tape.

    atoll train benchmarks/lockstep_follow.py --learners 2 --steps 120 --warm-start 0.3 --out RUN
    python benchmarks/lockstep_follow.py RUN

The first trains a tiny GPT in real processes; a learner is a `LockstepLearner` inside an `atoll.Learner`. The second
reads from the run's journal at which step each learner made which copy and adopted which version, lets the learner,
sender and syncer of the lockstep loop do the same in one process, and compares the digest of every version. Nothing is
rounded differently on the two ways, so all of them are equal, bit for bit. A run without failures alone: no learner may
have started anew. Exit code 1: a version differs.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from lockstep_learner import LockstepLearner, Sender
from lockstep_syncer import HostSyncer
from torch.optim import Optimizer

import atoll
from atoll.config import Outer
from atoll.digests import compute_digest
from atoll.numerics.codec import make_codec
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.protocol.history import number_learners
from atoll.protocol.records import AnyRecord, BegunRecord, ChangedRecord, JoinedRecord, MergedRecord, PlayedRecord
from atoll.protocol.tape import AdoptedEntry, ForgotEntry, TookEntry, whole_rule
from atoll.store.disk import LocalDisk
from atoll.store.journal import read
from atoll.store.rundir import RunDir
from atoll.workloads.gpt import Gpt
from atoll.workloads.settings import WorkloadSettings
from atoll.workloads.text import Text, Windows
from atoll.workloads.training import build_optimizers

SETTINGS = WorkloadSettings(depth=1, block=16, batch=2)
SEED, HORIZON = 0, 200
CPU = torch.device("cpu")


class Learner:
    """The model and its data, on both ways."""

    def __init__(self, index: int) -> None:
        torch.set_num_threads(1)
        self.optimizers: dict[str, Optimizer] = {}
        self.one = LockstepLearner(SETTINGS, SEED, CPU, self._build)
        text = Text(bytes(np.random.default_rng(SEED).integers(32, 64, 40_000, dtype=np.uint8)))
        self._index, self._data = index, Windows(text, SETTINGS.block)

    def _build(self, model: Gpt, settings: WorkloadSettings) -> dict[str, Optimizer]:
        self.optimizers = build_optimizers(model, settings)
        return self.optimizers

    def step(self, t: int) -> None:
        """Its step number t, from 1 on."""
        dice = np.random.default_rng([SEED, self._index, t])
        self.one.step(self._data.gather(dice.integers(len(self._data), size=SETTINGS.batch)), min(1.0, t / HORIZON))


def train() -> None:
    """One of the real processes."""
    first = Learner(0)
    with atoll.Learner(first.one.model, first.optimizers["adamw"]) as learner:
        first._index = learner.index
        while not learner.done:
            first.step(learner.steps + 1)
            learner.step(tokens=SETTINGS.batch * SETTINGS.block)


# ---- the same in lockstep -------------------------------------------------------------------------------------------


class FollowedLearner:
    """Makes the steps, copies and adoptions that the journal names."""

    def __init__(self, learner: Learner, plan: FragmentPlan, codec: str) -> None:
        self._learner, self._plan, self._t = learner, plan, 0
        self._sender, self._held = Sender(make_codec(codec)), [0] * len(plan.fragments)
        self.adopts: dict[int, list[AdoptedEntry]] = defaultdict(list)
        self.copies: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """By step: the fragments that it read, each with the version that it was on."""
        self._made: dict[tuple[int, int], torch.Tensor] = {}
        """By fragment and step."""
        self._course: Iterator[None] | None = None

    def contribute(self, fragment: int, base: int, t: int, versions: Versions) -> torch.Tensor:
        self._course = self._course or self._train(versions)
        while (fragment, t) not in self._made:
            next(self._course)
        part, given = self._plan.fragments[fragment], versions[fragment][base]
        return self._sender.contribute(part, [0], [given], [self._made[fragment, t]])[0]

    def _train(self, versions: Versions) -> Iterator[None]:
        """A fragment is read before or after one of it is adopted at the same step, as the base of the copy says."""
        while True:
            self._make_copies()
            yield
            for entry in self.adopts[self._t]:
                self._adopt(entry, versions)
                self._make_copies()
                yield
            self._t += 1
            self._learner.step(self._t)

    def _make_copies(self) -> None:
        for fragment, base in self.copies[self._t]:
            if base == self._held[fragment] and (fragment, self._t) not in self._made:
                self._made[fragment, self._t] = self._learner.one.read(self._plan.fragments[fragment])

    def _adopt(self, entry: AdoptedEntry, versions: Versions) -> None:
        of_fragment = versions[entry.fragment]
        read = self._made.get((entry.fragment, entry.copy_t), of_fragment[self._held[entry.fragment]])
        part, rule = self._plan.fragments[entry.fragment], whole_rule(entry.rule)
        self._learner.one.adopt(part, of_fragment[entry.version], rule, read)
        self._held[entry.fragment] = entry.version


Versions = list[list[torch.Tensor]]
"""By fragment, each as it was committed."""


def make_learners(begun: BegunRecord, plan: FragmentPlan, records: list[AnyRecord]) -> dict[str, FollowedLearner]:
    names = [record.learner for record in records if isinstance(record, JoinedRecord)]
    numbers = number_learners(names, begun.settings.learners)
    found = {name: FollowedLearner(Learner(number), plan, begun.settings.codec) for name, number in numbers.items()}
    for record in records:
        if isinstance(record, MergedRecord):
            for share in record.members:
                found[share.learner].copies[share.t].append((record.fragment, share.base))
        elif isinstance(record, PlayedRecord):
            for stretch in record.tapes:
                for entry in stretch.entries:
                    anew = isinstance(entry, ForgotEntry | TookEntry) and entry.t > 0
                    assert not anew, f"{stretch.learner} started anew"
                    if isinstance(entry, AdoptedEntry):
                        found[stretch.learner].adopts[entry.t].append(entry)
    return found


def follow(run: Path) -> int:
    """How many versions are as in the run; SystemExit names the first that is not."""
    records = [record for _, record in read(RunDir(run).journal, disk=LocalDisk())]
    begun = records[0]
    assert isinstance(begun, BegunRecord)
    first = Learner(0).one
    plan = make_plan(begun.tensors, begun.settings.fragments, begun.settings.plan)
    versions: Versions = [[first.read(part)] for part in plan.fragments]
    syncer = HostSyncer(plan, [one[0] for one in versions], msgspec.convert(begun.outer, Outer), "fp32")
    learners, compared = make_learners(begun, plan, records), 0
    for record in records:
        if isinstance(record, ChangedRecord):
            syncer.change_outer(msgspec.convert(record.outer, Outer))
        elif isinstance(record, MergedRecord):
            part = plan.fragments[record.fragment]
            deltas = [learners[m.learner].contribute(part.index, m.base, m.t, versions) for m in record.members]
            syncer.merge(part, deltas, [m.base for m in record.members], [m.weight for m in record.members])
            values = syncer.versions[part.index]
            versions[part.index].append(values.clone())
            if compute_digest(values.numpy().view(np.uint8).data) != record.digest:
                raise SystemExit(f"round {record.round}: version {record.version} of fragment {part.index} differs")
            compared += 1
    return compared


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(f"{follow(Path(sys.argv[1]))} versions, each bit for bit as in the run")
    else:
        train()
