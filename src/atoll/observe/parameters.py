"""The parameters of a run against its records: the whole way made again, as far as payloads are kept.

From the oldest cut that is there the outer gradients are applied round by round: each gives the digest that its record
names, and every newer cut is met bit for bit, Θ and the outer optimizer's state. Where payloads were trimmed, the way
goes on from the next cut; behind the newest none may be missing. What comes out at the end is the model of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from atoll.observe.findings import Findings, Wrong
from atoll.observe.rebuild import NotKept, Rebuilt, load, replay
from atoll.observe.shelf import StoredCut
from atoll.protocol.records import AnyRecord, Merged, Restored
from atoll.store.disk import LocalDisk
from atoll.store.journal import Position, read
from atoll.store.rundir import RunDir


class ParameterWalk:
    """From cut to cut to the end of the journal. `cuts`: the oldest first, each at its place in the journal."""

    def __init__(self, run: RunDir, cuts: Sequence[StoredCut], findings: Findings) -> None:
        self._run, self._findings = run, findings
        self._cuts = {cut.state.position: cut for cut in cuts}
        self._newest = cuts[-1].number
        self._at = cuts[0]
        """The cut that was met last."""
        self.model: Rebuilt | None = load(run.cuts, cuts[0])
        """None while payloads are missing."""
        self.rounds = 0
        """Made again, each with the digest of its record."""

    def go_to(self, end: Position) -> None:
        if self._at.state.position == end:
            return
        for position, record in read(self._run.journal, start=self._at.state.position, disk=LocalDisk()):
            self._pass(position, record)
            if (cut := self._cuts.get(position)) is not None:
                self._meet(cut)
            lost = self.model is None and self._at.number == self._newest
            if lost or position == end:  # a run that goes on has written more since
                return

    def _pass(self, position: Position, record: AnyRecord) -> None:
        if self.model is None:
            return
        try:
            replay(self.model, self._run.journal, position, record)
        except NotKept as error:
            self._lose_the_way(record, error)
            return
        if isinstance(record, Merged):
            self.rounds += 1
            self._findings.progress("rounds made again", self.rounds)

    def _lose_the_way(self, record: AnyRecord, error: NotKept) -> None:
        self.model = None
        assert isinstance(record, Merged | Restored)
        if self._at.number != self._newest:
            return
        if record.payload is not None:
            raise Wrong(f"{error}, and no newer cut makes up for it")
        behind = record.round if isinstance(record, Merged) else record.at
        self._findings.remark(f"rounds from {behind} on kept no outer gradients: they cannot be made again")

    def _meet(self, cut: StoredCut) -> None:
        if self.model is None:
            self.model = load(self._run.cuts, cut)
        elif (name := self.model.differs(cut.part)) is not None:
            path = cut.path / name
            raise Wrong(f"{path} is not what cut {self._at.number} and the rounds behind it give")
        self._at = cut


def difference(path: Path, model: Rebuilt) -> str | None:
    """What a safetensors file holds that the model does not, or the other way round; None when they are equal."""
    tensors = model.tensors()
    try:
        with safe_open(path, framework="numpy") as file:
            if set(file.keys()) != tensors.keys():
                return f"its tensors are not the model's: {', '.join(sorted(set(file.keys()) ^ tensors.keys())[:3])}"
            for name in sorted(tensors):
                found, due = file.get_tensor(name), tensors[name]
                if found.dtype != due.dtype or found.shape != due.shape or found.tobytes() != due.tobytes():
                    return f"tensor {name!r} is not what the cuts and the journal give"
    except (SafetensorError, OSError) as error:
        return f"it cannot be read: {error}"
    return None
