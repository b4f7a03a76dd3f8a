"""The folder of one shard of the syncer (docs/adr/0031): its chain, its cuts, and how its parameters are read back.

    journal/    the chain: for every round that it staged a record, with what changed its part; a journal like the
                lead's (store/journal.py), with terms and a lease of its own
    cuts/       its parts of the run's cuts (store/cuts.py), each complete once the lead said so

- A record that no decision of the lead names is void. So the folder alone says what may have been decided, and the
  lead's journal what was.
- A record is durable before the lead hears of it.
- A shard comes back from a cut that the lead holds too, and the decisions since: each names a record by its head. What
  comes out is compared with the digest in that record, which the head covers.
- Cuts and payloads go when the lead says that it has newer ones: a cut counts once it is complete there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import numpy as np

from atoll.bucket.uploader import JournalMark, ShardUploader, StoreLag
from atoll.config import Outer
from atoll.digests import compute_digest
from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import make_plan
from atoll.numerics.shard_plan import ShardPlan, make_shard_plan
from atoll.protocol import records
from atoll.protocol.errors import AtollError, ConfigError
from atoll.protocol.records import BegunRecord, MergedRecord, TermRecord
from atoll.protocol.shard_messages import (
    AnyDecision,
    FinishCut,
    OuterChanged,
    RoundDecided,
    StateReset,
    TakeUp,
    TermBegun,
)
from atoll.store.cuts import (
    BadCut,
    Manifest,
    complete_cuts,
    folder_of,
    prune_before,
    read_state,
    read_syncer_part,
    write_manifest,
    write_syncer_part,
)
from atoll.store.disk import Corrupt, Disk, LocalDisk, Rests, not_written
from atoll.store.durable_end import check_end
from atoll.store.journal import Journal, payload, read, seal
from atoll.store.removal import finish_removals
from atoll.store.rundir import RunDir
from atoll.store.segments import ORIGIN, Position
from atoll.store.shards import ShardCut
from atoll.store.writer_lease import WriterLease
from atoll.syncer.parameters import Parameters


@dataclass(frozen=True, slots=True)
class CapturedPart:
    cut: int
    round: int
    state: ShardCut
    arrays: Mapping[str, FloatArray]
    digests: Mapping[str, str]


def shard_plan_of(begun: BegunRecord) -> ShardPlan:
    """The same in every process of the run."""
    settings = begun.settings
    plan = make_plan(begun.tensors, settings.fragments, settings.plan)
    if plan.fingerprint != begun.fingerprint:
        raise BadCut("this version of Atoll makes other fragments of the run's model: use the version that began it")
    return make_shard_plan(plan, begun.shards, (settings.codec, settings.version_codec))


class ShardStore:
    def __init__(
        self,
        out: RunDir,
        lease: WriterLease,
        shard: int,
        *,
        disk: Disk | None = None,
        uploader: ShardUploader | None = None,
    ) -> None:
        """Find what an earlier process left, and begin a segment of the chain. `uploader`: copies it to a bucket."""
        self._out, self._lease, self._disk, self.shard = out, lease, disk or LocalDisk(), shard
        self._uploader, self._written_rounds = uploader, 0
        self._writing = threading.Lock()
        """Held while the chain is appended to or read."""
        self._newest: Position | None = None
        """Where the newest cut begins in the chain: whatever is decided from now on lies behind it."""
        check_end(out, self._disk, shard=shard)
        self.begun: BegunRecord | None = self._read_begun()
        end = self._find_end() if self.begun is not None else ORIGIN
        self._journal = Journal.begin(out.journal, lease.term, after=end, disk=self._disk, marks=out.marks)
        if self.begun is not None:
            self._journal.append([(TermRecord(lease.term, end.offset, end.hash, 0), None)])
            self._note_append()
        self._places: dict[int, tuple[int, int]] = {}
        """By cut, the term and file from which it needs payloads."""
        self._needless: tuple[int, int] | None = None
        self.outer: dict[str, str | float | bool] = {}
        self.plan: ShardPlan | None = None
        """Known once it was told what to take up."""

    def _read_begun(self) -> BegunRecord | None:
        """The first record of the chain; None: there is none yet."""
        lines = read(self._out.journal, disk=self._disk) if self._out.journal.is_dir() else iter(())
        _, first = next(lines, (ORIGIN, None))
        if first is not None and not isinstance(first, BegunRecord):
            where = self._out.journal
            raise Corrupt(f"the journal in {where} does not begin with the beginning of a run: put back a copy")
        return first

    def _find_end(self) -> Position:
        """Of the chain, which is read from the newest cut on: what a start takes does not grow with the run. A cut that
        cannot be read is passed over for the one before it, and with no cut all of the chain is read."""
        for cut in self.cuts:
            with suppress(BadCut, Corrupt):
                _, state = read_state(self._out.cuts, cut, ShardCut)
                end = seal(self._out.journal, start=state.position, disk=self._disk)
                self._newest = state.position
                return end
        return seal(self._out.journal, disk=self._disk)

    @property
    def run(self) -> str:
        return self.begun.run if self.begun is not None else ""

    @property
    def cuts(self) -> tuple[int, ...]:
        """Those that a shard may come back from, the newest first."""
        return tuple(complete_cuts(self._out.cuts))

    def store_lag(self) -> StoreLag:
        return self._uploader.lag() if self._uploader is not None else StoreLag("", 0, 0.0)

    def start_upload(self) -> None:
        if self._uploader is not None:
            self._uploader.start()

    def stop_upload(self) -> None:
        """An append that waits for the bucket fails."""
        if self._uploader is not None:
            self._uploader.stop()

    def send_heartbeat(self) -> None:
        self._lease.beat()

    @property
    def fenced(self) -> bool:
        return self._lease.fenced() or (self._uploader is not None and self._uploader.deposed)

    # ---- the chain ----------------------------------------------------------------------------------------------

    def append_round(self, round: int, attempt: int, fragment: int, digest: str, data: memoryview) -> str:
        """In a thread. The head of the chain behind it, once it is durable."""
        record = MergedRecord(round, fragment, -1, attempt, "", (), digest)
        with self._writing:
            self._journal.append([(record, data)])
            self._written_rounds = round + 1
            self._note_append()
            if (before := self._needless) is not None:
                self._needless = None
                self._journal.trim(*before)
            return self._journal.position.hash

    def settle(self) -> None:
        """Make the mark of the last append durable. Called in a thread, behind the answer to the lead."""
        with self._writing:
            self._journal.settle_mark()

    def _note_append(self) -> None:
        """Let the uploader know; with durability = "store" it returns when the bucket has it."""
        if self._uploader is not None:
            journal, at = self._journal, self._journal.position
            size = journal.payload_bytes
            self._uploader.note_append(
                JournalMark(at.term, at.offset, journal.file, size, self._written_rounds, time.monotonic())
            )

    def read_round(self, decision: RoundDecided) -> tuple[MergedRecord, bytes]:
        """The record that a new decision names, and its payload. Corrupt: the chain does not hold it."""
        for position, record in self._rounds(self._newest):
            if position.hash == decision.head:
                return record, self._payload(position, record)
        raise self._behind(decision)

    def _rounds(self, start: Position | None) -> Iterator[tuple[Position, MergedRecord]]:
        with self._writing:
            for position, record in read(self._out.journal, start=start, disk=self._disk):
                if isinstance(record, MergedRecord):
                    yield position, record

    def _payload(self, position: Position, record: MergedRecord) -> bytes:
        assert record.payload is not None, "a round is written with its payload"
        return payload(self._out.journal, position.term, record.payload, disk=self._disk)

    def _behind(self, decision: RoundDecided) -> Corrupt:
        return Corrupt(
            f"round {decision.round} was decided, and the chain in {self._out.journal} does not hold shard "
            f"{self.shard}'s part of it: its disk lost what it had confirmed; put back a copy of the folder"
        )

    # ---- coming back --------------------------------------------------------------------------------------------

    def take_up(self, message: TakeUp) -> tuple[Parameters, int]:
        """In a thread. The parameters as they were decided, and how many rounds of the chain that took. AtollError:
        they cannot be had."""
        begun = records.decode(message.begun)
        assert isinstance(begun, BegunRecord), "the lead tells what the run began with"
        if self.begun is None:
            with self._writing:
                self._journal.append([(begun, None)])
                self._note_append()
            self.begun = begun
        elif self.begun != begun:
            raise ConfigError(f"{self._out.path} holds shard {self.shard} of another run ({self.run}), not {begun.run}")
        self.plan = shard_plan_of(begun)
        plan = self.plan.plan_of(self.shard)
        outer = msgspec.convert(begun.outer, Outer) if begun.outer else Outer()
        parameters = Parameters(plan, outer, begun.settings.version_codec, may_drop=True)
        self.outer = dict(begun.outer)
        start: Position | None = None
        if message.cut >= 0:
            state = self._load_cut(parameters, message.cut)
            start = self._newest = state.position
            self._places[message.cut] = (state.position.term, state.file)
        return parameters, self._apply_all(parameters, message.decisions, start)

    def _load_cut(self, parameters: Parameters, cut: int) -> ShardCut:
        part, data, arrays = read_syncer_part(self._out.cuts, cut)
        try:
            state = msgspec.msgpack.decode(data, type=ShardCut)
            if (state.run, state.shard) != (self.run, self.shard):
                raise BadCut(f"cut {cut} in {self._out.cuts} is of shard {state.shard} of run {state.run}")
            self.outer = dict(state.outer)
            parameters.change_outer(msgspec.convert(state.outer, Outer) if state.outer else Outer())
            parameters.load_cut(arrays, part.list_digests(), [max(0, one) for one in state.versions], state.rounds)
        except (msgspec.MsgspecError, ValueError) as error:
            raise BadCut(f"cut {cut} in {self._out.cuts} cannot be used: {error}") from error
        return state

    def _apply_all(self, parameters: Parameters, decisions: Sequence[AnyDecision], start: Position | None) -> int:
        """Decisions come in the order of the lead's journal, their records in the order of the chain."""
        named = {one.head for one in decisions if isinstance(one, RoundDecided)}
        found: dict[str, tuple[Position, MergedRecord]] = {}
        for position, record in self._rounds(start) if named else ():
            if position.hash in named:
                found[position.hash] = (position, record)
        rounds = 0
        for decision in decisions:
            if not isinstance(decision, RoundDecided):
                self.apply_other(parameters, decision)
                continue
            if decision.head not in found:
                raise self._behind(decision)
            position, record = found[decision.head]
            self.replay(parameters, decision, record, self._payload(position, record))
            rounds += 1
        return rounds

    def replay(self, parameters: Parameters, decision: RoundDecided, record: MergedRecord, data: bytes) -> None:
        try:
            parameters.replay_round(
                decision.fragment, decision.version, decision.round, memoryview(data), record.digest
            )
        except ValueError as error:
            raise Corrupt(
                f"the chain in {self._out.journal} does not give what was decided when it is replayed: {error}"
            ) from error

    def apply_other(self, parameters: Parameters, decision: AnyDecision) -> None:
        match decision:
            case StateReset(fragment):
                parameters.reset_outer_state(fragment)
            case OuterChanged(outer):
                self.outer = dict(outer)
                parameters.change_outer(msgspec.convert(outer, Outer))
            case TermBegun():
                parameters.begin_term()
            case _:
                raise AssertionError("rounds are read from the chain")

    # ---- cuts ---------------------------------------------------------------------------------------------------

    def capture(self, parameters: Parameters, cut: int, round: int) -> CapturedPart:
        """Nothing is copied: the buffers of Θ count as read until `write_part` is over."""
        assert self.begun is not None
        position, buffers = self._journal.position, parameters.committed_buffers()
        versions, rounds = tuple(one.version for one in buffers), tuple(one.round for one in buffers)
        file = self._journal.rotate()
        state = ShardCut(self.run, self.shard, self.begun.shards, versions, rounds, position, file, self.outer)
        return CapturedPart(cut, round, state, parameters.hold_arrays(), parameters.known_digests())

    def write_part(self, captured: CapturedPart, rests: Rests | None) -> str:
        """In a thread. The digest of its table, once it is durable; NoRoom: try again later."""
        whole = {name: values.view(np.uint8) for name, values in captured.arrays.items()}
        data = msgspec.msgpack.encode(captured.state)
        try:
            mark = write_syncer_part(
                self._out.cuts, self.run, captured.cut, captured.round, data, whole, known=captured.digests, rests=rests
            )
        except OSError as error:
            raise not_written(error, folder_of(self._out.cuts, captured.cut)) from error
        self._places[captured.cut] = (captured.state.position.term, captured.state.file)
        return mark

    def complete_part(self, finish: FinishCut) -> None:
        """In a thread: the part counts from now on."""
        table = folder_of(self._out.cuts, finish.cut) / "syncer.json"
        try:
            write_manifest(
                self._out.cuts,
                Manifest(self.run, finish.cut, finish.cut, compute_digest(table.read_bytes()), {}),
            )
            if finish.oldest >= 0:
                held = self._uploader.held_cut if self._uploader is not None else -1
                prune_before(self._out.cuts, finish.oldest, finish.spared, held)
        except OSError as error:
            raise not_written(error, table.parent) from error
        if (needless := self._places.get(finish.newest)) is not None:
            self._needless = needless

    def close(self) -> None:
        self.stop_upload()
        self._journal.close()
        self._lease.release()
        with suppress(AtollError):
            finish_removals()
