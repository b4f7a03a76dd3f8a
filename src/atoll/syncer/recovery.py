"""The run's state read back from disk: a cut, then the journal behind it, record by record.

`recover` gives the newest state, for a syncer that starts again; `read_earlier` an earlier one, for a rollback.

- What is read is what was acknowledged: versions, Θ and momentum come out bit for bit, and the digest of every round is
  compared on the way.
- A damaged cut is passed over for the one before it, and an event says so.
- The time it takes depends on the rounds since the cut, not on the length of the run.
- Payloads are kept back to the cut before the newest. A rollback to a round whose payloads are gone gets what the cut
  itself holds, unless that cut was taken in rounds that were rolled back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from atoll.config import Outer
from atoll.numerics.arrays import ByteArray
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.numerics.shard_plan import make_shard_plan
from atoll.protocol import records
from atoll.protocol.history import History
from atoll.protocol.syncer.effects import Restorable, Restore
from atoll.protocol.syncer.rollback import undone
from atoll.store.cuts import BadCut, CutState, known_cuts, read_syncer_part
from atoll.store.disk import Corrupt, Disk
from atoll.store.journal import ORIGIN, Position, TornTail, payload, read
from atoll.store.rundir import RunDir
from atoll.syncer.parameters import Parameters


@dataclass
class Recovered:
    history: History
    parameters: Parameters | None
    """None: the run has no parameters yet."""
    end: Position
    cut: int | None = None
    start: Position = ORIGIN
    """The position in the journal behind that cut."""
    kept: tuple[int, int] = (0, 0)
    """The term and file from which that cut needs payloads."""
    rounds: int = 0
    """Rounds replayed."""
    remarks: list[str] = field(default_factory=list)

    def describe(self) -> tuple[str, dict[str, object]]:
        """For the run's events."""
        run, term, round = self.history.run, self.history.term, self.history.committed
        cut = "no cut" if self.cut is None else f"cut {self.cut}"
        text = f"run {run} goes on in term {term} at round {round}: {cut} and {self.rounds} rounds of the journal"
        data: dict[str, object] = {"run": run, "term": term, "round": round, "cut": self.cut, "replayed": self.rounds}
        # A folder that begins with this event has no event `run`, which tells these.
        settings = self.history.settings
        return text, data | {"learners": settings.learners, "settings": msgspec.to_builtins(settings)}


def outer_of(history: History) -> Outer:
    return msgspec.convert(history.outer, Outer) if history.outer else Outer()


def recover(out: RunDir, *, disk: Disk) -> Recovered | None:
    """The newest state in the run directory; None: no run has begun in it."""
    remarks: list[str] = []
    broken: Corrupt | None = None
    for cut in known_cuts(out.cuts):
        try:
            found = read_cut_state(out.cuts, cut)
            found.remarks = [*remarks]
            return _replayed(found, out.journal, disk)
        except (BadCut, Corrupt) as error:
            # Corrupt: a syncer that was replaced may have left a cut that the journal does not continue.
            broken = broken or (error if isinstance(error, Corrupt) else None)
            remarks.append(f"cut {cut} is passed over: {error}")
    if broken is not None:
        raise Corrupt("; ".join(remarks)) from broken
    return _from_the_beginning(out.journal, disk, remarks)


def read_cut_state(root: Path, cut: int) -> Recovered:
    part, state, arrays = read_syncer_part(root, cut)
    try:
        at = msgspec.msgpack.decode(state, type=CutState)
        history = History.restore(at.history)
        if part.run != history.run:
            raise BadCut(f"cut {cut} says it is of run {part.run} and holds run {history.run}")
        parameters = _parameters(history)
        parameters.load_cut(arrays, part.list_digests(), [max(0, version) for version in history.versions], at.rounds)
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadCut(f"cut {cut} cannot be used: {error}") from error
    return Recovered(history, parameters, at.position, cut, at.position, (at.position.term, at.file))


def _from_the_beginning(folder: Path, disk: Disk, remarks: list[str]) -> Recovered | None:
    if not folder.is_dir():
        return None
    lines = read(folder, disk=disk, on_tail=lambda tail: remarks.append(_torn(tail)))
    first = next(lines, None)
    if first is None:
        return None
    if not isinstance(first[1], records.BegunRecord):
        raise BadCut(f"the journal in {folder} does not begin with the beginning of a run")
    found = Recovered(History(first[1]), None, first[0], remarks=remarks)
    return _apply(found, lines, folder, disk)


def _replayed(found: Recovered, folder: Path, disk: Disk) -> Recovered:
    lines = read(folder, start=found.end, disk=disk, on_tail=lambda tail: found.remarks.append(_torn(tail)))
    return _apply(found, lines, folder, disk)


def _apply(
    found: Recovered, lines: Iterator[tuple[Position, records.AnyRecord]], folder: Path, disk: Disk
) -> Recovered:
    for position, record in lines:
        if isinstance(record, records.StartedRecord) and found.parameters is None:
            cuts = folder.parent / "cuts"
            remarks = found.remarks or [f"{cuts} holds no cut: put back a copy of that folder"]
            raise BadCut(f"the journal tells of parameters, but no cut holds them: {'; '.join(remarks)}")
        if found.parameters is not None:
            replay_record(found, position, record, folder, disk)
        found.history.apply(record)
        found.end = position
    return found


def replay_record(found: Recovered, position: Position, record: records.AnyRecord, folder: Path, disk: Disk) -> None:
    """Apply one record to the parameters. BadCut or Corrupt: the result is not the one of then."""
    assert found.parameters is not None
    match record:
        case records.MergedRecord(round=number, fragment=fragment, version=version, payload=place):
            mark = record.heads[0] if record.heads else record.digest  # of several shards, this is the lead's part
            if place is None:
                raise BadCut(f"round {number} has no outer gradient in the journal")
            kept = payload(folder, position.term, place, disk=disk)
            try:
                found.parameters.replay_round(fragment, version, number, memoryview(kept), mark)
            except ValueError as error:
                raise BadCut(f"replaying the journal does not give what was committed: {error}") from error
            found.rounds += 1
        case records.RestoredRecord(versions=versions, at=at, digests=marks, payload=place):
            if place is None:
                raise BadCut(f"what the run was rolled back to at round {at} is not in the journal")
            data = np.frombuffer(payload(folder, position.term, place, disk=disk), dtype=np.uint8)
            try:
                given = found.parameters.restore_state(data, versions, at - 1)
            except ValueError as error:
                raise BadCut(f"replaying the journal does not give what the run was rolled back to: {error}") from error
            if given != marks:
                raise BadCut(f"replaying the journal does not give what the run was rolled back to at round {at}")
        case records.TermRecord():
            found.parameters.begin_term()
        case records.ResetRecord(fragment):
            found.parameters.reset_outer_state(fragment)
        case records.ChangedRecord(outer=outer):
            found.parameters.change_outer(msgspec.convert(outer, Outer))
        case _:
            pass


def _parameters(history: History) -> Parameters:
    plan = make_plan(history.tensors, history.begun.settings.fragments, history.begun.settings.plan)
    if plan.fingerprint != history.begun.fingerprint:
        raise BadCut("this version of Atoll makes other fragments of the run's model: use the version that began it")
    return make_parameters(plan, history)


def make_parameters(plan: FragmentPlan, history: History) -> Parameters:
    """Of the whole plan; of a syncer of several shards, the lead's part of it."""
    settings, shards = history.begun.settings, history.begun.shards
    if shards == 1:
        return Parameters(plan, outer_of(history), settings.version_codec)
    own = make_shard_plan(plan, shards, (settings.codec, settings.version_codec)).plan_of(1)
    return Parameters(own, outer_of(history), settings.version_codec, may_drop=True)


def _torn(tail: TornTail) -> str:
    return f"{tail.file.name} ended in {tail.size_bytes} bytes of an append that was never acknowledged: cut off"


# ---- an earlier round -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RollbackState:
    packed: ByteArray
    """As `Parameters.pack_state` gives it."""
    told: Restorable


def read_earlier(out: RunDir, restore: Restore, *, disk: Disk) -> RollbackState:
    """The state after round `restore.round`, or at the newest cut before it. BadCut: neither can be read."""
    reasons: list[str] = []
    for cut in [cut for cut in known_cuts(out.cuts) if cut <= restore.round]:
        try:
            return _earlier(cut, restore, out, disk)
        except (BadCut, Corrupt) as error:
            reasons.append(f"cut {cut}: {error}")
    raise BadCut("; ".join(reasons) or f"no cut of round {restore.round} or before is there any more")


def _earlier(cut: int, restore: Restore, out: RunDir, disk: Disk) -> RollbackState:
    found = _reached(cut, restore, out, disk) or read_cut_state(out.cuts, cut)
    assert found.parameters is not None, "a cut holds parameters"
    history = found.history
    lines = (record for _, record in read(out.journal, start=found.start, disk=disk))
    told = undone(lines, history.committed, len(history.versions))
    ready = Restorable(history.committed, found.parameters.digests(), told)
    return RollbackState(found.parameters.pack_state(), ready)


def _reached(cut: int, restore: Restore, out: RunDir, disk: Disk) -> Recovered | None:
    """Replay from this cut to that round. None: payloads are gone, and the state of the cut itself is used."""
    found = read_cut_state(out.cuts, cut)
    assert found.parameters is not None, "a cut holds parameters"
    found.parameters.keep_no_steps()
    lines = read(out.journal, start=found.end, disk=disk)
    try:
        for position, record in lines:
            if found.history.committed >= restore.round:
                break
            replay_record(found, position, record, out.journal, disk)
            found.history.apply(record)
    except Corrupt:
        if any(begin < cut <= end for begin, end in restore.without):
            raise
        return None
    return found
