"""The run's journal and cuts, as one term of a syncer writes them.

- `RunStore`: the files. Payloads are kept back to the cut before the newest: should the newest be damaged, the one
  before it and the journal still give everything. For `tail_average` they are kept back to one cut more.
- `CutWriter`: the syncer's part of a cut is captured at once and written in the background; then the manifest makes
  the cut complete. Rounds go on meanwhile, and nobody reuses the buffers of the captured versions. Cut 0, of the first
  parameters, is durable before any effect behind it is carried out: the effect queue waits for it and tries again. Any
  other cut that cannot be written is reported to the state machine with the reason, and costs the run only that cut.
- `Restorer`: the values of a rollback are read in the background, and held until the journal has them.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from atoll.bucket.uploader import JournalMark, Uploader
from atoll.digests import compute_digest
from atoll.fabric.wire import one_line
from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.screen import UsualNorms
from atoll.protocol.errors import AtollError
from atoll.protocol.history import HistoryState
from atoll.protocol.records import (
    AnyRecord,
    CutDoneRecord,
    LossRecord,
    MergedRecord,
    PassedRecord,
    RestoredRecord,
    TermRecord,
)
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.effect_order import must_be_synced
from atoll.protocol.syncer.effects import CompleteCut, Restore
from atoll.store.atomic import write_atomic
from atoll.store.cuts import (
    BadCut,
    CutState,
    LearnerPart,
    Manifest,
    complete_cuts,
    folder_of,
    known_cuts,
    open_cut,
    prune,
    read_manifest,
    write_manifest,
    write_syncer_part,
)
from atoll.store.disk import Disk, LocalDisk, Rests, not_written
from atoll.store.durable_end import UNMARKED, check_end, clear_accepted, read_accepted
from atoll.store.journal import Journal, JournalEntry, Position, read
from atoll.store.removal import finish_removals
from atoll.store.rundir import RunDir, save_model
from atoll.store.tail import TailModel, average_tail
from atoll.store.writer_lease import Deposed, StandbyWatch, WriterLease
from atoll.syncer.parameters import Parameters
from atoll.syncer.recovery import Recovered, RollbackState, read_earlier, recover
from atoll.syncer.versions import VersionBuffer

_NONE: ByteArray = np.empty(0, dtype=np.uint8)
_UNKNOWN: Mapping[str, str] = MappingProxyType({})


class KeptNorms(msgspec.Struct, frozen=True):
    """The usual norms (numerics/screen.py), so that a new term knows them from the start."""

    run: str
    norms: UsualNorms


class RunStore:
    def __init__(
        self,
        out: RunDir,
        lease: WriterLease,
        *,
        every_round: bool = True,
        keep: int = 3,
        payload_cuts: int = 2,
        disk: Disk | None = None,
        uploader: Uploader | None = None,
    ) -> None:
        """Read what earlier terms left, and begin this term's segment of the journal. EndLost: it ends before what was
        durable, and nobody accepted that. `keep`: so many cuts;
        `payload_cuts`: the payloads behind so many of them. `uploader`: copies it all to a bucket."""
        self._out, self._lease, self._disk = out, lease, disk or LocalDisk()
        self._sync, self._keep, self._payload_cuts = every_round, keep, payload_cuts
        self._writing = threading.Lock()
        """Held while the journal is appended to or synced: cuts are written in other threads."""
        lease.beat()
        mark = check_end(out, self._disk)  # before the journal is read: a writer that was replaced may still append
        self.found_on_disk: Recovered | None = recover(out, disk=self._disk)
        lease.beat()
        after = self.found_on_disk.end if self.found_on_disk else None
        self._journal = Journal.begin(out.journal, lease.term, after=after, disk=self._disk, marks=out.marks)
        self._model_gone = False
        """The model file of an earlier end is deleted."""
        self._kept: list[tuple[int, int]] = []
        """Of the last cuts, the term and file from which each needs payloads; the newest last."""
        self._written = (-1, (0, 0))
        """The cut that was written last, and its place as above."""
        self.trims_at_completion = False
        """In a syncer of several shards (docs/adr/0031) others may lack their parts of a cut until it is complete."""
        self._needless: tuple[int, int] | None = None
        """Payloads before this term and file may be deleted with the next append."""
        if self.found_on_disk is not None:
            end, history = self.found_on_disk.end, self.found_on_disk.history
            began = TermRecord(lease.term, end.offset, end.hash, history.committed)
            lines: list[AnyRecord] = [began, *self._unrecorded_cuts(history.cuts, self.found_on_disk.cut)]
            if lost := read_accepted(out):
                lines.append(LossRecord(lost))
                self.found_on_disk.remarks.append(f"goes on without what was lost, as the operator accepted: {lost}")
            if mark is None:
                self.found_on_disk.remarks.append(UNMARKED)
            self._journal.append([(line, None) for line in lines])
            clear_accepted(out)
            for line in lines:
                history.apply(line)
            if self.found_on_disk.parameters is not None:
                self.found_on_disk.parameters.begin_term()  # as its TermRecord says
            if self.found_on_disk.cut is not None:
                self._kept.append(self.found_on_disk.kept)
        self._standby_watch, self.standby = StandbyWatch(out.journal), ""
        """The machine and process of a standby, as of the last heartbeat; empty: none waits."""
        self.disk_free_bytes: int | None = None
        self._uploader = uploader
        self._rounds = self.found_on_disk.history.committed if self.found_on_disk is not None else 0
        """Committed, as far as they are appended."""
        if self.found_on_disk is not None:
            self._note_append(())

    def describe_slowness(self) -> str:
        """Why an append takes long."""
        if self._uploader is None or not self._uploader.told_after_put:
            return "the disk does not answer"
        return self._uploader.lag().trouble or f"{self._uploader.lag().url} does not answer"

    @property
    def folder(self) -> Path:
        return self._out.path

    @property
    def secrets(self) -> Path:
        """The folder of the run's own secrets."""
        return self._out.secrets

    def read_norms(self, run: str) -> UsualNorms:
        """The usual norms that an earlier term wrote; empty: none."""
        try:
            kept = msgspec.json.decode(self._out.norms.read_bytes(), type=KeptNorms)
        except (OSError, msgspec.DecodeError):
            return UsualNorms()
        return kept.norms if kept.run == run else UsualNorms()

    def write_norms(self, run: str, norms: UsualNorms) -> None:
        """A disk that fails here is no reason to stop: older norms will do."""
        with suppress(OSError):
            write_atomic(self._out.norms, msgspec.json.encode(KeptNorms(run, norms)))

    def _unrecorded_cuts(self, known: list[int], cut: int | None) -> list[CutDoneRecord]:
        """A cut whose manifest an earlier term wrote, but which it did not live to record in the journal."""
        if cut is None or (known and cut <= known[-1]) or cut not in complete_cuts(self._out.cuts) or cut == 0:
            return []
        try:
            manifest = read_manifest(self._out.cuts, cut)
        except BadCut:
            return []
        mark = compute_digest((folder_of(self._out.cuts, cut) / "manifest.json").read_bytes())
        return [CutDoneRecord(cut, cut, tuple(sorted(manifest.learners)), mark)]

    @property
    def term(self) -> int:
        return self._lease.term

    @property
    def fenced(self) -> Callable[[], bool]:
        return self._is_fenced

    def _is_fenced(self) -> bool:
        """Whether another syncer has claimed a later term: on this disk, or in the bucket."""
        return self._lease.fenced() or (self._uploader is not None and self._uploader.deposed)

    def send_heartbeat(self) -> None:
        self._lease.beat()
        self.standby = self._standby_watch.look(time.monotonic())
        with suppress(OSError):
            room = os.statvfs(self._out.path)
            self.disk_free_bytes = room.f_bavail * room.f_frsize

    def append(self, entries: Sequence[JournalEntry]) -> None:
        """Append, in a thread, one at a time; fsync with durability = "round", or where `must_be_synced` says so."""
        with self._writing:
            if any(isinstance(record, MergedRecord | RestoredRecord) for record, _ in entries):
                self._remove_model()
            self._journal.append(entries, sync=self._sync or must_be_synced(record for record, _ in entries))
            self._note_append(entries)
            if (before := self._needless) is not None:
                self._needless = None
                self._journal.trim(*before)

    def settle(self) -> None:
        """Make the mark of the last append durable. Called in a thread, behind the effects that the append allowed."""
        with self._writing:
            self._journal.settle_mark()

    def _note_append(self, entries: Sequence[JournalEntry]) -> None:
        """Let the uploader know; with durability = "store" it returns when the bucket has it."""
        if self._uploader is None:
            return
        closed = [record.round for record, _ in entries if isinstance(record, MergedRecord | PassedRecord)]
        self._rounds = max([self._rounds, *(number + 1 for number in closed)])
        journal, position = self._journal, self._journal.position
        mark = JournalMark(
            position.term, position.offset, journal.file, journal.payload_bytes, self._rounds, time.monotonic()
        )
        self._uploader.note_append(mark)

    def _remove_model(self) -> None:
        """Delete the model that an earlier end wrote, before the next round is durable: a crash at any moment must not
        leave an old model beside a newer journal."""
        if self._model_gone:
            return
        try:
            if self._out.model.exists():
                self._disk.remove(self._out.model)
                self._disk.sync(self._out.path)
        except OSError as error:
            raise not_written(error, self._out.model) from error
        self._model_gone = True

    # ---- cuts ---------------------------------------------------------------------------------------------------

    def open_cut(self, history: HistoryState, rounds: Sequence[int]) -> CutState:
        """Note the position of the journal; later payloads go to another file."""
        position = self._journal.position
        return CutState(history, position, self._journal.rotate(), tuple(rounds))

    def write_cut(
        self,
        cut: int,
        state: CutState,
        arrays: Mapping[str, FloatArray],
        known: Mapping[str, str] = _UNKNOWN,
        rests: Rests | None = None,
    ) -> None:
        """In a thread. When it returns, the cut and the journal up to it are durable; NoRoom: try again later. `known`:
        digests of some of the arrays."""
        data, run = msgspec.msgpack.encode(state), state.history.begun.run
        whole = {name: values.view(np.uint8) for name, values in arrays.items()}
        if not self._sync:
            with self._writing:  # later rounds are in the same file: payloads are synced first, as in an append
                self._journal.sync()
        try:
            rounds, check = state.history.committed, self._check_lease
            write_syncer_part(self._out.cuts, run, cut, rounds, data, whole, check, known, rests)
        except OSError as error:
            raise not_written(error, folder_of(self._out.cuts, cut)) from error
        self._written = (cut, (state.position.term, state.file))
        if not self.trims_at_completion:
            self._note_kept(cut)

    def _note_kept(self, cut: int) -> None:
        """Payloads from before the last cuts may be deleted."""
        written, place = self._written
        if written == cut:
            self._kept = [*self._kept, place][-self._payload_cuts :]
            if len(self._kept) == self._payload_cuts:
                self._needless = self._kept[0]

    @property
    def kept_cuts(self) -> list[int]:
        """The complete ones that are kept, the newest first; last one that is on its way to the bucket."""
        kept = complete_cuts(self._out.cuts)[: self._keep]
        held = self._uploader.held_cut if self._uploader is not None else -1
        return [*kept, held] if 0 <= held < min(kept, default=0) else kept

    def complete_cut(self, run: str, done: CompleteCut, shards: tuple[str, ...] = ()) -> str:
        """Write the manifest and return its digest. NoRoom: try again later. `shards`: of each other shard of the
        syncer, the digest of its part."""
        self._check_lease()
        table = folder_of(self._out.cuts, done.cut) / "syncer.json"
        learners = {name: LearnerPart(said.incarnation, said.t, said.file, said.digest) for name, said in done.saved}
        try:
            digest, left_out = compute_digest(table.read_bytes()), dict(done.left_out)
            manifest = Manifest(run, done.cut, done.cut, digest, learners, left_out, shards)
            mark = write_manifest(self._out.cuts, manifest)
            held = self._uploader.held_cut if self._uploader is not None else -1
            prune(self._out.cuts, self._keep, done.spared, held)
        except OSError as error:
            raise not_written(error, table.parent) from error
        if self.trims_at_completion:
            self._note_kept(done.cut)
        return mark

    def _check_lease(self) -> None:
        if self._is_fenced():
            raise Deposed

    def read_decisions(self) -> list[AnyRecord | int]:
        """All records behind the oldest cut, in order, and at their places the numbers of the cuts: for shards that
        come back (docs/adr/0031). A cut 0 whose run did not begin counts for nothing: others take the place of the
        first parameters in it."""
        cuts: dict[Position, int] = {}
        found_on_disk = self.found_on_disk
        begun = found_on_disk is not None and found_on_disk.history.started
        for number in known_cuts(self._out.cuts) if begun else ():
            with suppress(BadCut):
                cuts[open_cut(self._out.cuts, number).state.position] = number
        start = min(cuts, key=lambda one: (one.term, one.offset), default=None)
        found: list[AnyRecord | int] = [cuts[start]] if start is not None else []
        for position, record in read(self._out.journal, start=start, disk=self._disk):
            found += [record, *([cuts[position]] if position in cuts else [])]
        return found

    def read_earlier(self, restore: Restore) -> RollbackState:
        """In a thread. BadCut or Corrupt: that state cannot be restored."""
        with self._writing:  # meanwhile nothing is trimmed, and no append is half written
            return read_earlier(self._out, restore, disk=self._disk)

    def average_tail(self, cycles: int) -> TailModel:
        """In a thread, once the run is finished. AtollError: there is no such mean to be had."""
        return average_tail(self._out, cycles)

    def write_tail(self, tail: TailModel) -> Path:
        """In a thread, once its record is durable."""
        self._check_lease()
        try:
            save_model(self._out.tail_model, tail.tensors_by_name(), tail.facts())
        except OSError as error:
            raise not_written(error, self._out.tail_model) from error
        return self._out.tail_model

    def close(self) -> None:
        if self._uploader is not None:
            self._uploader.stop()
        self._journal.close()
        self._lease.release()
        finish_removals()


@dataclass(frozen=True, slots=True)
class CapturedCut:
    """The syncer's state at the moment of a cut."""

    cut: int
    state: CutState
    arrays: dict[str, FloatArray]
    digests: dict[str, str]
    """Those that are known."""
    held: list[VersionBuffer]
    """Buffers that must not be reused until the cut is written."""


class CutWriter:
    def __init__(
        self,
        run_store: RunStore,
        parameters: Parameters,
        run: str,
        tell: Callable[[fx.SyncerEvent], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._run_store, self._parameters, self._run, self._tell, self._spawn = run_store, parameters, run, tell, spawn

    async def write_first(self, cut: fx.TakeCut) -> None:
        """Write and complete cut 0, which has no learner's part. NoRoom: try again later."""
        await self.write_part(self.capture_state(cut), None)
        await asyncio.to_thread(self._run_store.complete_cut, self._run, CompleteCut(cut.cut, (), ()))

    def take_cut(self, cut: fx.TakeCut) -> None:
        self._spawn(self._keep_part(self.capture_state(cut), self.rests_of(cut)))

    @staticmethod
    def rests_of(cut: fx.TakeCut) -> Rests | None:
        """None: the run waits for it."""
        return None if cut.last else Rests()

    def complete_cut(self, done: CompleteCut) -> None:
        self._spawn(self._write_manifest(done))

    def capture_state(self, cut: fx.TakeCut) -> CapturedCut:
        state = self._run_store.open_cut(cut.history, self._parameters.version_rounds())
        held = self._parameters.committed_buffers()
        parameters = self._parameters
        return CapturedCut(cut.cut, state, parameters.hold_arrays(), parameters.known_digests(), held)

    async def _keep_part(self, captured: CapturedCut, rests: Rests | None) -> None:
        reason = ""
        try:
            await self.write_part(captured, rests)
        except AtollError as error:
            reason = one_line(error)
        self._tell(fx.CutKept(captured.cut, reason))

    async def write_part(self, captured: CapturedCut, rests: Rests | None) -> None:
        try:
            write = self._run_store.write_cut
            await asyncio.to_thread(write, captured.cut, captured.state, captured.arrays, captured.digests, rests)
        finally:
            for buffer in captured.held:
                buffer.readers -= 1

    async def _write_manifest(self, done: CompleteCut) -> None:
        try:
            mark = await asyncio.to_thread(self._run_store.complete_cut, self._run, done)
        except AtollError as error:
            self._tell(fx.CutKept(done.cut, one_line(error)))
        else:
            self._tell(fx.CutWritten(done.cut, mark))


class Restorer:
    def __init__(
        self,
        run_store: RunStore,
        parameters: Parameters,
        tell: Callable[[fx.SyncerEvent], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._run_store, self._parameters, self._tell, self._spawn = run_store, parameters, tell, spawn
        self.packed: ByteArray = _NONE
        """The values of the rollback that is to be committed."""
        self._digests: tuple[str, ...] = ()

    def prepare_values(self, restore: Restore) -> None:
        self._spawn(self._read_values(restore))

    async def _read_values(self, restore: Restore) -> None:
        try:
            earlier = await asyncio.to_thread(self._run_store.read_earlier, restore)
        except (AtollError, MemoryError) as error:
            self._tell(fx.Unrestorable(one_line(error) or "it does not fit into this syncer's memory"))
        else:
            self.packed, self._digests = earlier.packed, earlier.told.digests
            self._tell(earlier.told)

    def commit_values(self, versions: Sequence[int], at: int) -> None:
        self._parameters.take_state(self.packed, versions, at - 1, self._digests)
        self.packed = _NONE
