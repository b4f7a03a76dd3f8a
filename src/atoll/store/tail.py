"""Tail averaging: the mean of the last versions of every fragment, from a cut and the journal behind it.

Of each fragment the last CYCLES versions are averaged: a cycle makes one of each. Versions from before the last
rollback are not among them, nor is version 0, which nobody trained. Where older outer gradients are not kept, fewer
are, and a remark says so. The mean is that of numerics/version_mean.py, so it is the same whichever cut it begins at.

A syncer with `tail_average` writes the mean at the end of a run: first a `TailRecord` with the versions and digests,
then the file. So a file that the journal does not know of is none of the run's, and `atoll verify` can make the mean
again. `atoll export --tail` only reads a run, whose journal may have another writer: it puts the versions into the
metadata of its file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from atoll.digests import compute_digest
from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import FragmentPlan, assemble_tensors
from atoll.numerics.version_mean import VersionMeans
from atoll.protocol.errors import ConfigError
from atoll.protocol.records import AnyRecord, MergedRecord, RestoredRecord, TailRecord
from atoll.store.cuts import BadCut, complete_cuts, known_cuts, open_cut
from atoll.store.disk import Corrupt, LocalDisk
from atoll.store.journal import Position, payload_path, read
from atoll.store.rebuild import NotKept, load_at_cut, read_steadily, replay_rounds
from atoll.store.rundir import RunDir, facts_of_model, read_model_facts

LEAST_CYCLES = 2


@dataclass(frozen=True, slots=True)
class TailModel:
    run: str
    round: int
    """Rounds behind it."""
    plan: FragmentPlan
    values: list[FloatArray]
    """Of every fragment."""
    record: TailRecord
    remarks: tuple[str, ...]

    def tensors_by_name(self) -> dict[str, FloatArray]:
        return assemble_tensors(self.plan, self.values)

    def facts(self) -> dict[str, str]:
        """What its file says of itself."""
        return facts_of_model(self.run, self.round, self.record.last) | _describe_first(self.record.first)


class TailSpan(NamedTuple):
    """What a cut and the rounds behind it give of the versions that are asked for."""

    cut: int
    first: tuple[int, ...]
    last: tuple[int, ...]
    end: Position
    reaches: bool
    """No older cut would give more."""


def average_tail(run: RunDir, cycles: int) -> TailModel:
    """ConfigError for what cannot be asked; BadCut, Corrupt or NotKept name what is wrong in the run's directory."""
    if cycles < LEAST_CYCLES:
        raise ConfigError(f"the mean of {cycles} cycles is no mean: average over {LEAST_CYCLES} or more")
    return read_steadily(run, lambda: _average(run, cycles))


def _average(run: RunDir, cycles: int) -> TailModel:
    span, remarks = _choose_span(run, cycles)
    if span.first == span.last:
        raise NotKept(
            f"no fragment of {run.path} has two versions that can be made again: outer gradients are trimmed at cuts, "
            f"and a run with tail_average = {cycles} keeps them for longer"
        )
    head = load_at_cut(run, span.cut)
    means = VersionMeans(head.model.plan, span.first, span.last)
    for fragment, version in enumerate(head.versions):
        means.add_version(fragment, version, head.model.fragment_values(fragment))
    replay_rounds(head, run.journal, until=span.end, means=means)
    if not means.is_complete():
        raise Corrupt(f"{run.journal} does not give all versions that its records name behind cut {span.cut}")
    values = means.compute()
    record = TailRecord(cycles, span.first, span.last, digests_of(values))
    return TailModel(head.run, head.round, head.model.plan, values, record, (*remarks, *_tell_fewer(span, cycles)))


def digests_of(values: Sequence[FloatArray]) -> tuple[str, ...]:
    return tuple(compute_digest(one.view("u1").data) for one in values)


def _choose_span(run: RunDir, cycles: int) -> tuple[TailSpan, list[str]]:
    """The newest cut that goes back far enough, or else the oldest behind which all outer gradients are kept."""
    chosen: TailSpan | None = None
    remarks: list[str] = []
    for number in known_cuts(run.cuts):
        try:
            span = find_span(run, number, cycles)
        except BadCut as error:
            remarks.append(f"cut {number} is passed over: {error}")
            continue
        if span is None:
            break
        chosen = span
        if span.reaches:
            break
    if chosen is None:
        raise NotKept("; ".join([f"{run.path} holds no cut behind which all outer gradients are kept", *remarks]))
    return chosen, remarks


def find_span(run: RunDir, number: int, cycles: int) -> TailSpan | None:
    """None: behind this cut an outer gradient is not kept."""
    state = open_cut(run.cuts, number).state
    if state.history.begun.shards > 1 and number not in complete_cuts(run.cuts):
        raise BadCut(f"cut {number} is not complete: a shard of the syncer may have no part of it")
    least = [max(0, version) for version in state.history.versions]
    last, end, rolled_back = list(least), state.position, False
    for position, record in read(run.journal, start=end, disk=LocalDisk()):
        if not _keeps_payload(run.journal, position, record):
            return None
        if isinstance(record, MergedRecord):
            last[record.fragment] = record.version
        elif isinstance(record, RestoredRecord):
            least, last, rolled_back = list(record.versions), list(record.versions), True
        end = position
    wanted = [max(1, version - cycles + 1) for version in last]
    first = tuple(min(v, max(w, n)) for v, w, n in zip(last, wanted, least, strict=True))
    reaches = rolled_back or all(n <= w for w, n in zip(wanted, least, strict=True))
    return TailSpan(number, first, tuple(last), end, reaches)


def _keeps_payload(journal: Path, position: Position, record: AnyRecord) -> bool:
    if not isinstance(record, MergedRecord | RestoredRecord):
        return True
    return record.payload is not None and payload_path(journal, position.term, record.payload.file).exists()


def _tell_fewer(span: TailSpan, cycles: int) -> list[str]:
    fewest = min(last - first + 1 for first, last in zip(span.first, span.last, strict=True))
    if fewest >= cycles:
        return []
    return [
        f"averaged are {fewest} versions of some fragment where {cycles} were asked for: no more are there, or the "
        "outer gradients of older rounds are not kept"
    ]


# ---- a file, and what the journal says of it -------------------------------------------------------------------------


def _describe_first(first: Sequence[int]) -> dict[str, str]:
    return {"averaged_from": ",".join(map(str, first))}


def find_record(path: Path, run: str, records: Sequence[TailRecord]) -> TailRecord | None:
    """The record of the mean that this file says it holds."""
    facts = read_model_facts(path)
    for record in reversed(records):
        due = {"run": run, "versions": ",".join(map(str, record.last)), **_describe_first(record.first)}
        if due.items() <= facts.items():
            return record
    return None
