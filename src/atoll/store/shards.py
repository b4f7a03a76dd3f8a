"""Reading what the other shards of a syncer hold (docs/adr/0031): their parts of cuts, and what their chains keep.

    shards/2/journal/   the chain of shard 2: a record, with what changed its part, for every round that it staged
    shards/2/cuts/      its parts of the run's cuts

The lead's journal decides: a round's record names the head of each shard's chain behind its part of it. Records that
none names are void. They come in the order of the rounds, so a chain is read once, from a cut on.

A shard on another host keeps its folder there: whoever reads the whole run needs a copy of it at its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from atoll.digests import combine_digests, compute_digest
from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.fragments import FragmentPlan
from atoll.numerics.shard_plan import ShardPlan, make_shard_plan
from atoll.protocol.records import BegunRecord, MergedRecord
from atoll.store.audit_members import BadRun
from atoll.store.cuts import BadCut, SyncerPart, folder_of, read_manifest, read_syncer_part
from atoll.store.disk import LocalDisk
from atoll.store.journal import payload, payload_path, read
from atoll.store.rundir import RunDir
from atoll.store.segments import Position

LEAD = 1


class ShardCut(msgspec.Struct, frozen=True, array_like=True):
    """The state.bin of a shard's part of a cut."""

    run: str
    shard: int
    shards: int
    versions: tuple[int, ...]
    """Per fragment."""
    rounds: tuple[int, ...]
    position: Position
    """Of the chain: what the cut does not hold lies behind it."""
    file: int
    """The payload file that the rounds after the cut go to, of the term of `position`."""
    outer: dict[str, str | float | bool]


def divide_plan(plan: FragmentPlan, begun: BegunRecord) -> ShardPlan | None:
    """Which part each shard holds; None: the syncer is one process."""
    settings = begun.settings
    if begun.shards == 1:
        return None
    return make_shard_plan(plan, begun.shards, (settings.codec, settings.version_codec))


def shard_dir(run: RunDir, shard: int) -> RunDir:
    """BadCut: it is not here."""
    folder = RunDir(run.path / "shards" / str(shard))
    if not folder.journal.is_dir():
        raise BadCut(f"{folder.path} is missing: it holds shard {shard}'s part of the run; copy it there from its host")
    return folder


def digest_version(values: FloatArray, plan: ShardPlan | None, fragment: int) -> str:
    """As the journal names a version: of the digests of its parts."""
    if plan is None:
        return compute_digest(values.view(np.uint8).data)
    parts = [values[plan.values(shard, fragment)] for shard in plan.holders(fragment)]
    return combine_digests([compute_digest(part.view(np.uint8).data) for part in parts])


# ---- cuts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredPart:
    shard: int
    part: SyncerPart
    state: ShardCut
    arrays: dict[str, ByteArray]


def read_shard_part(run: RunDir, begun: BegunRecord, shard: int, cut: int) -> StoredPart:
    """A shard's part of a cut, every byte checked. BadCut names what is wrong."""
    folder = shard_dir(run, shard)
    part, data, arrays = read_syncer_part(folder.cuts, cut)
    try:
        state = msgspec.msgpack.decode(data, type=ShardCut)
    except msgspec.MsgspecError as error:
        raise BadCut(f"{folder_of(folder.cuts, cut)} cannot be read by this version of Atoll: {error}") from error
    if (state.run, state.shard, state.shards) != (begun.run, shard, begun.shards):
        what = f"shard {state.shard} of {state.shards} of run {state.run}"
        raise BadCut(f"{folder_of(folder.cuts, cut)} is of {what}, not shard {shard} of {begun.shards} of {begun.run}")
    return StoredPart(shard, part, state, arrays)


def join_arrays(own: dict[str, ByteArray], parts: Sequence[StoredPart]) -> dict[str, ByteArray]:
    """The arrays of a whole cut: parts lie one behind the other, in order of shard."""
    names = own.keys()
    if wrong := next((part for part in parts if part.arrays.keys() != names), None):
        raise BadCut(f"shard {wrong.shard}'s part of the cut holds other arrays than the lead's")
    return {name: np.concatenate([own[name], *(part.arrays[name] for part in parts)]) for name in names}


def check_shard_cuts(run: RunDir, begun: BegunRecord, cuts: Sequence[int]) -> None:
    """The parts of complete cuts are those that their manifests name, and whole. BadCut or BadRun."""
    for cut in cuts:
        named = read_manifest(run.cuts, cut).shards
        if len(named) != begun.shards - 1:
            raise BadRun(f"the manifest of cut {cut} names {len(named)} other shards, the run has {begun.shards - 1}")
        for shard, digest in enumerate(named, start=LEAD + 1):
            part = read_shard_part(run, begun, shard, cut)
            table = folder_of(shard_dir(run, shard).cuts, part.part.cut) / "syncer.json"
            if compute_digest(table.read_bytes()) != digest:
                raise BadRun(f"{table} is not the one that the manifest of cut {cut} names")


# ---- chains ---------------------------------------------------------------------------------------------------------


class ShardChain:
    """A shard's chain from a position on, read as far as it is asked for."""

    def __init__(self, run: RunDir, shard: int, start: Position | None) -> None:
        self.shard, self._folder = shard, shard_dir(run, shard).journal
        self._lines = self._rounds(start)

    def _rounds(self, start: Position | None) -> Iterator[tuple[Position, MergedRecord]]:
        for position, record in read(self._folder, start=start, disk=LocalDisk()):
            if isinstance(record, MergedRecord):
                yield position, record

    def find_record(self, round: int, head: str) -> tuple[Position, MergedRecord]:
        """What a decision names. BadRun: the chain does not hold it."""
        found = next((one for one in self._lines if one[0].hash == head), None)
        if found is None:
            raise BadRun(
                f"round {round} was decided, and the chain in {self._folder} does not hold shard {self.shard}'s part "
                "of it: put back a copy of that folder"
            )
        return found

    def read_payload(self, round: int, head: str) -> bytes | None:
        """Of the record that a decision names; None: it was trimmed. Corrupt: it is damaged."""
        position, record = self.find_record(round, head)
        assert record.payload is not None, "a round is written with its payload"
        if not payload_path(self._folder, position.term, record.payload.file).exists():
            return None
        return payload(self._folder, position.term, record.payload, disk=LocalDisk())


def check_chains(run: RunDir, begun: BegunRecord) -> None:
    """Every decision of the lead's journal names a record of every chain, in order, and of the same round."""
    chains = [ShardChain(run, shard, None) for shard in range(LEAD + 1, begun.shards + 1)]
    for _, record in read(run.journal, disk=LocalDisk()):
        if not isinstance(record, MergedRecord):
            continue
        if len(record.heads) != begun.shards:
            raise BadRun(f"round {record.round} names {len(record.heads)} shards, the run has {begun.shards}")
        for chain in chains:
            if head := record.heads[chain.shard - LEAD]:
                _, found = chain.find_record(record.round, head)
                if (found.round, found.fragment) != (record.round, record.fragment):
                    raise BadRun(f"round {record.round} names shard {chain.shard}'s part of round {found.round}")
