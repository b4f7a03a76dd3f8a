"""Rebuild Θ and the outer optimizer's state from a cut and the payloads of the rounds after it, and check them.

A payload is a round's outer gradient; with a lossy version codec it is the bytes that changed the version. Such a codec
has feedback, which lies in cuts: no payload gives it again, so that a cut's own digest is all it is held to.

This reader shares only the arithmetic of the outer step with the syncer, so that agreement between the two means
something. It holds the model once, reads only, and never writes into a run's folder.

Of a syncer of several shards (shards.py) the parts are put together first: what follows sees whole fragments.

`load_newest` gives the newest model, and tail.py the mean of its last versions. `ParameterWalk` goes from the oldest
cut to the end of the journal: every round must give the digest in its record, and every newer cut must match bit for
bit, Θ and outer state. Where payloads were trimmed it continues from the next cut; after the newest cut none may be
missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from atoll.config import Outer
from atoll.digests import compute_digest
from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.fragments import FragmentPlan, assemble_tensors, make_plan
from atoll.numerics.outer import starts_momentum, take_outer_step
from atoll.numerics.shard_plan import ShardPlan
from atoll.numerics.updates import WHOLE, apply_update, decode_update, make_version_codec
from atoll.numerics.version_mean import VersionMeans
from atoll.protocol.errors import AtollError
from atoll.protocol.history import HistoryState
from atoll.protocol.records import AnyRecord, ChangedRecord, MergedRecord, PassedRecord, ResetRecord, RestoredRecord
from atoll.store.audit_members import BadRun
from atoll.store.cuts import BadCut, StoredCut, SyncerPart, known_cuts, open_cut, read_syncer_part
from atoll.store.disk import Corrupt, LocalDisk
from atoll.store.journal import Position, payload, payload_path, read
from atoll.store.rundir import RunDir
from atoll.store.shards import ShardChain, digest_version, divide_plan, join_arrays, read_shard_part
from atoll.store.verify_cuts import Findings

TRIES = 5
"""A live run may take a cut and trim its payloads while it is read: then it is read again."""


_FEEDBACK = "feedback-"
T = TypeVar("T")


class NotKept(AtollError):
    """The payload of a round is not there: it was trimmed, or never written."""


class RebuiltModel:
    """The whole model at one point of a run."""

    def __init__(
        self,
        plan: FragmentPlan,
        outer: Outer,
        arrays: Mapping[str, ByteArray],
        version_codec: str = WHOLE,
        shards: ShardPlan | None = None,
        chains: Sequence[ShardChain] = (),
    ) -> None:
        """ValueError where the arrays are not those of the plan. They are taken over, not copied. `shards`, `chains`:
        of a syncer of several, who holds which part, and the others' chains from here on."""
        self.plan = plan
        self._shards, self.chains = shards, chains
        self._codec = make_version_codec(version_codec)
        self._arrays = {name: values.view(np.float32) for name, values in arrays.items()}
        for name, values in self._arrays.items():
            if values.size != plan.fragments[int(name.rsplit("-", 1)[1])].size:
                raise ValueError(f"{name} has {values.size} values, another number than its fragment")
        if any(f"theta-{part.index:03d}" not in self._arrays for part in plan.fragments):
            raise ValueError("some fragment's values are missing")
        kept = {name for name in self._arrays if name.startswith(_FEEDBACK)}
        if kept != (self._feedback_names() if self._codec is not None and self._codec.needs_feedback else set()):
            raise ValueError(f"its feedback is not that of version_codec = {version_codec!r}")
        for name in kept:
            del self._arrays[name]
        self._optimizer = outer.make()

    def _feedback_names(self) -> set[str]:
        return {f"{_FEEDBACK}{part.index:03d}" for part in self.plan.fragments}

    def take_step(self, fragment: int, payloads: Sequence[bytes]) -> str:
        """The outer step; the digest of the new version. `payloads`: one, or one of each shard that holds a part."""
        theta, part = self._arrays[f"theta-{fragment:03d}"], self.plan.fragments[fragment]
        state = {slot: self._slot_array(slot, fragment) for slot in self._optimizer.slots()}
        if self._codec is not None:
            apply_update(self._optimizer, part, theta, theta, state, self._decode_updates(fragment, payloads))
        elif (size := sum(map(len, payloads))) != theta.nbytes:
            raise ValueError(f"{size} bytes are no outer gradient of fragment {fragment}: it has {theta.nbytes}")
        else:
            delta = np.frombuffer(payloads[0] if len(payloads) == 1 else b"".join(payloads), dtype=np.float32)
            take_outer_step(self._optimizer, part, theta, theta, state, delta)
        return digest_version(theta, self._shards, fragment)

    def _decode_updates(self, fragment: int, payloads: Sequence[bytes]) -> FloatArray:
        assert self._codec is not None
        parts = [self.plan.fragments[fragment]]
        if self._shards is not None:
            parts = [self._shards.part(shard, fragment) for shard in self._shards.holders(fragment)]
        both = zip(parts, payloads, strict=True)
        found = [decode_update(self._codec, part, np.frombuffer(data, dtype=np.uint8)) for part, data in both]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def restore_packed(self, packed: bytes) -> tuple[str, ...]:
        """Values and outer state of every fragment, one after the other; the digests of the values."""
        values, start = np.frombuffer(packed, dtype=np.float32), 0
        for part in self.plan.fragments:
            for array in self._list_arrays(part.index):
                if start + array.size > values.size:
                    raise ValueError(f"{len(packed)} bytes are less than the values and outer state of this model")
                np.copyto(array, values[start : start + array.size])
                start += array.size
        if start != values.size:
            raise ValueError(f"{len(packed)} bytes are more than the values and outer state of this model")
        return tuple(
            compute_digest(self._list_arrays(part.index)[0].view(np.uint8).data) for part in self.plan.fragments
        )

    def _list_arrays(self, fragment: int) -> list[FloatArray]:
        slots = sorted(self._optimizer.slots())
        return [self._arrays[f"theta-{fragment:03d}"], *(self._slot_array(slot, fragment) for slot in slots)]

    def reset_outer_state(self, fragment: int) -> None:
        for name, values in self._arrays.items():
            if name.endswith(f"-{fragment:03d}") and not name.startswith("theta-"):
                values.fill(0.0)

    def change_outer(self, outer: Outer) -> None:
        before, self._optimizer = self._optimizer, outer.make()
        if starts_momentum(before, self._optimizer):
            for fragment in range(len(self.plan.fragments)):
                for slot in before.slots():
                    self._slot_array(slot, fragment).fill(0.0)

    def _slot_array(self, slot: str, fragment: int) -> FloatArray:
        name = f"{slot}-{fragment:03d}"
        if name not in self._arrays:
            self._arrays[name] = np.zeros(self.plan.fragments[fragment].size, dtype=np.float32)
        return self._arrays[name]

    def find_difference(self, part: SyncerPart, shard: int = 1) -> str | None:
        """The first file of a cut, or of a shard's part of one, that does not hold what lies here, or is missing."""
        kinds = ("theta", *self._optimizer.slots())
        due = {f"{kind}-{fragment.index:03d}.bin" for kind in kinds for fragment in self.plan.fragments}
        beside = {"state.bin", *(f"{name}.bin" for name in self._feedback_names())}
        for name in sorted(due | part.files.keys() - beside):
            here, file = self._part_of(name.removesuffix(".bin"), shard), part.files.get(name)
            if here is None or file is None or compute_digest(here.view(np.uint8).data) != file.digest:
                return name
        return None

    def _part_of(self, name: str, shard: int) -> FloatArray | None:
        whole = self._arrays.get(name)
        if whole is None or self._shards is None:
            return whole
        return whole[self._shards.values(shard, int(name.rsplit("-", 1)[1]))]

    def fragment_values(self, fragment: int) -> FloatArray:
        """Θ of one fragment; it changes with the next step."""
        return self._arrays[f"theta-{fragment:03d}"]

    def tensors_by_name(self) -> dict[str, FloatArray]:
        values = [self._arrays[f"theta-{part.index:03d}"] for part in self.plan.fragments]
        return assemble_tensors(self.plan, values)


def load_cut(run: RunDir, cut: StoredCut) -> RebuiltModel:
    """The model as a cut holds it, every byte checked."""
    _, _, arrays = read_syncer_part(run.cuts, cut.number)
    history = cut.state.history
    others = [read_shard_part(run, history.begun, shard, cut.number) for shard in range(2, history.begun.shards + 1)]
    chains = [ShardChain(run, one.shard, one.state.position) for one in others]
    try:
        outer, version_codec = msgspec.convert(history.outer, Outer), history.begun.settings.version_codec
        plan = plan_of(history)
        whole = join_arrays(arrays, others)
        return RebuiltModel(plan, outer, whole, version_codec, divide_plan(plan, history.begun), chains)
    except (ValueError, LookupError, msgspec.MsgspecError, AtollError) as error:
        raise BadCut(f"cut {cut.number} cannot be used: {error}") from error


def plan_of(history: HistoryState) -> FragmentPlan:
    begun = history.begun
    plan = make_plan(begun.tensors, begun.settings.fragments, begun.settings.plan)
    if plan.fingerprint != begun.fingerprint:
        raise BadCut("this version of Atoll makes other fragments of the run's model: use the version that began it")
    return plan


def replay_record(model: RebuiltModel, folder: Path, position: Position, record: AnyRecord) -> None:
    """What one record does to the model. NotKept: its outer gradient is not there; Corrupt: it gives something else."""
    match record:
        case MergedRecord(round=number, fragment=fragment, digest=mark, payload=place):
            if place is None:
                raise NotKept(f"the outer gradient of round {number} was not kept: the run keeps none between cuts")
            path = payload_path(folder, position.term, place.file)
            if not path.exists():
                raise NotKept(f"{path} is missing: it holds the outer gradient of round {number}")
            gradient = payload(folder, position.term, place, disk=LocalDisk())
            try:
                found = model.take_step(fragment, [*([gradient] if gradient else []), *_read_parts(model, record)])
            except ValueError as error:
                raise Corrupt(f"round {number}, at byte {place.offset} of {path}: {error}") from error
            if found != mark:
                raise Corrupt(f"round {number} gives fragment {fragment} the digest {found}, its record says {mark}")
        case RestoredRecord():
            _restore(model, folder, position, record)
        case ResetRecord(fragment):
            model.reset_outer_state(fragment)
        case ChangedRecord(outer=outer):
            model.change_outer(msgspec.convert(outer, Outer))
        case _:
            pass


def _read_parts(model: RebuiltModel, record: MergedRecord) -> list[bytes]:
    """What the other shards keep of a round, in order."""
    found = []
    for chain in model.chains:
        if head := record.heads[chain.shard - 1]:
            part = chain.read_payload(record.round, head)
            if part is None:
                raise NotKept(f"shard {chain.shard} does not keep its part of round {record.round} any more")
            found.append(part)
    return found


def _restore(model: RebuiltModel, folder: Path, position: Position, record: RestoredRecord) -> None:
    what = f"what the run was rolled back to behind round {record.at - 1}"
    if record.payload is None:
        raise NotKept(f"{what} was not kept")
    path = payload_path(folder, position.term, record.payload.file)
    if not path.exists():
        raise NotKept(f"{path} is missing: it holds {what}")
    try:
        found = model.restore_packed(payload(folder, position.term, record.payload, disk=LocalDisk()))
    except ValueError as error:
        raise Corrupt(f"{what}, at byte {record.payload.offset} of {path}: {error}") from error
    if found != record.digests:
        raise Corrupt(f"{what} has the digests {found}, its record says {record.digests}")


# ---- the newest version ---------------------------------------------------------------------------------------------


@dataclass
class ModelHead:
    """A model, and what it is of."""

    model: RebuiltModel
    run: str
    cut: int
    """The cut it was made from."""
    round: int
    """Rounds behind it."""
    versions: list[int]
    position: Position
    """Of the journal, behind it."""
    replayed: int = 0
    remarks: list[str] = field(default_factory=list)


def load_at_cut(run: RunDir, number: int) -> ModelHead:
    """The model as a named cut holds it."""
    known = known_cuts(run.cuts)
    if number not in known:
        there = ", ".join(map(str, sorted(known))) or "none"
        raise BadCut(f"{run.path} has no cut {number}; there are: {there}")
    cut = open_cut(run.cuts, number)
    history = cut.state.history
    _check_run(run, cut)
    # Cut 0 is taken right before the record that makes it version 0.
    versions = [max(0, version) for version in history.versions]
    return ModelHead(load_cut(run, cut), history.begun.run, number, history.committed, versions, cut.state.position)


def _check_run(run: RunDir, cut: StoredCut) -> None:
    """Without this check a cut copied from another run would go unnoticed if no round follows it."""
    first = next(read(run.journal, disk=LocalDisk()), None)
    if first is not None and first[1] != cut.state.history.begun:
        raise BadCut(f"{cut.path} is of another run: {cut.part.run}")


def load_newest(run: RunDir) -> ModelHead:
    """The newest version of everything: the newest cut that is whole, and all rounds behind it."""
    return read_steadily(run, lambda: _newest(run))


def read_steadily(run: RunDir, make: Callable[[], T]) -> T:
    """What `make` gives, again where it failed while a live run took a cut and trimmed payloads."""
    for _ in range(TRIES - 1):
        before = known_cuts(run.cuts)[:1]
        try:
            return make()
        except (BadCut, Corrupt, NotKept):
            if known_cuts(run.cuts)[:1] == before:
                raise
    return make()


def _newest(run: RunDir) -> ModelHead:
    remarks: list[str] = []
    for number in known_cuts(run.cuts):
        try:
            head = load_at_cut(run, number)
        except BadCut as error:
            remarks.append(f"cut {number} is passed over: {error}")
            continue
        head.remarks = remarks
        return replay_rounds(head, run.journal)
    raise BadCut("; ".join([f"{run.path} holds no cut, so there are no parameters to be had", *remarks]))


def replay_rounds(
    head: ModelHead, folder: Path, *, until: Position | None = None, means: VersionMeans | None = None
) -> ModelHead:
    """All that is behind it in the journal, or up to a position. `means`: get every version that is made."""
    if head.position == until:
        return head
    for position, record in read(folder, start=head.position, disk=LocalDisk()):
        if isinstance(record, MergedRecord) and record.payload is None:
            head.remarks.append(f"round {record.round} and later ones kept no outer gradients: the model is older")
            return head
        replay_record(head.model, folder, position, record)
        head.position = position
        if isinstance(record, RestoredRecord):
            head.versions = list(record.versions)
        if isinstance(record, MergedRecord):
            head.versions[record.fragment] = record.version
            head.replayed += 1
        if isinstance(record, MergedRecord | PassedRecord):
            head.round = record.round + 1
        if means is not None:
            add_versions(means, head.model, record)
        if position == until:
            break
    return head


def add_versions(means: VersionMeans, model: RebuiltModel, record: AnyRecord) -> None:
    """The versions that this record has just made."""
    match record:
        case MergedRecord(fragment=fragment, version=version):
            means.add_version(fragment, version, model.fragment_values(fragment))
        case RestoredRecord(versions=versions):
            for fragment, version in enumerate(versions):
                means.add_version(fragment, version, model.fragment_values(fragment))
        case _:
            pass


class ParameterWalk:
    """From cut to cut to the end of the journal. `cuts`: the oldest first, each at its place in the journal."""

    def __init__(
        self,
        run: RunDir,
        cuts: Sequence[StoredCut],
        findings: Findings,
        tail: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        """`tail`: of each fragment, the first and the last version whose mean is wanted."""
        self._run, self._findings = run, findings
        self._cuts = {cut.state.position: cut for cut in cuts}
        self._newest = cuts[-1].number
        self._at = cuts[0]
        """The cut that was met last."""
        self.model: RebuiltModel | None = load_cut(run, cuts[0])
        """None while payloads are missing."""
        self.rounds = 0
        """Made again, each with the digest of its record."""
        self.means = VersionMeans(self.model.plan, *tail) if tail is not None else None
        self._add_cut(cuts[0])

    def go_to(self, end: Position) -> None:
        if self._at.state.position == end:
            return
        for position, record in read(self._run.journal, start=self._at.state.position, disk=LocalDisk()):
            self._replay_record(position, record)
            if (cut := self._cuts.get(position)) is not None:
                self._compare_cut(cut)
            lost = self.model is None and self._at.number == self._newest
            if lost or position == end:  # a run that goes on has written more since
                return

    def _replay_record(self, position: Position, record: AnyRecord) -> None:
        if self.model is None:
            return
        try:
            replay_record(self.model, self._run.journal, position, record)
        except NotKept as error:
            self._lose_model(record, error)
            return
        if self.means is not None:
            add_versions(self.means, self.model, record)
        if isinstance(record, MergedRecord):
            self.rounds += 1
            self._findings.progress("rounds made again", self.rounds)

    def _lose_model(self, record: AnyRecord, error: NotKept) -> None:
        self.model = None
        assert isinstance(record, MergedRecord | RestoredRecord)
        if self._at.number != self._newest:
            return
        if record.payload is not None:
            raise BadRun(f"{error}, and no newer cut makes up for it")
        behind = record.round if isinstance(record, MergedRecord) else record.at
        self._findings.add_remark(f"rounds from {behind} on kept no outer gradients: they cannot be made again")

    def _compare_cut(self, cut: StoredCut) -> None:
        if self.model is None:
            self.model = load_cut(self._run, cut)
            self._add_cut(cut)
        elif (name := self.model.find_difference(cut.part)) is not None:
            path = cut.path / name
            raise BadRun(f"{path} is not what cut {self._at.number} and the rounds behind it give")
        else:
            self._compare_parts(cut, self.model)
        self._at = cut

    def _compare_parts(self, cut: StoredCut, model: RebuiltModel) -> None:
        for chain in model.chains:
            other = read_shard_part(self._run, cut.state.history.begun, chain.shard, cut.number)
            if (name := model.find_difference(other.part, chain.shard)) is not None:
                what = f"{name} of shard {chain.shard} in cut {cut.number}"
                raise BadRun(f"{what} is not what cut {self._at.number} and the rounds behind it give")

    def _add_cut(self, cut: StoredCut) -> None:
        """The versions that a model begins with."""
        if self.means is not None and self.model is not None:
            for fragment, version in enumerate(cut.state.history.versions):
                self.means.add_version(fragment, max(0, version), self.model.fragment_values(fragment))


def difference(path: Path, model: RebuiltModel) -> str | None:
    """What a safetensors file holds that the model does not, or the other way round; None when they are equal."""
    tensors = model.tensors_by_name()
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
