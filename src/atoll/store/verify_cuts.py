"""Check the cuts of a run, file by file.

Cuts are listed before the journal is read, because what a cut refers to is durable once the cut is there. While the
journal is read, each cut is compared with the audit at its position. Afterwards:

- a cut is of this run, is in the folder of its number, and its position is the end of a record in the journal;
- every file of a complete cut matches its digest, and its manifest is the one the journal names; no record names cut 0
  (the syncer's alone) or the cut a run was begun from;
- a corrupt or missing learner file invalidates only that learner's part: the cut stays good, with a remark. Missing
  ones share one remark, since learners started by hand keep theirs; `--json` has them one by one (`missing_parts`);
- cuts are removed oldest first, so none may be missing after the oldest one present, nor the newest; where the run may
  be rolled back, the oldest may be one kept for that, with a gap after it. Of a run that was brought back from its
  bucket those may be missing that were on their way there, with a remark;
- a cut that never became complete only gets a remark, even if damaged: nobody resumes from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from atoll.protocol.errors import AtollError
from atoll.protocol.records import BegunRecord, CutDoneRecord
from atoll.store.audit import JournalAudit
from atoll.store.audit_members import BadRun
from atoll.store.cuts import (
    BadCut,
    CutState,
    StoredCut,
    check_cut,
    complete_cuts,
    digest_file,
    folder_of,
    known_cuts,
    open_cut,
    read_absent,
    read_manifest,
    read_syncer_part,
)
from atoll.store.journal import Position
from atoll.store.rundir import RunDir

TellProgress = Callable[[str, int], None]
"""Told what is being counted, and how many there are so far."""


def _to_nobody(what: str, number: int) -> None:
    pass


@dataclass
class Findings:
    progress: TellProgress = _to_nobody
    remarks: list[str] = field(default_factory=list)
    """Not wrong, but worth knowing."""
    missing_parts: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """By cut, the learners whose file is not there."""

    def add_remark(self, text: str) -> None:
        self.remarks.append(text)


class CutVerifier:
    def __init__(self, run: RunDir, findings: Findings) -> None:
        self._run, self._findings = run, findings
        self.complete = complete_cuts(run.cuts)
        self._stored: dict[int, StoredCut] = {}
        self._unreadable: dict[int, str] = {}
        self._met: set[int] = set()
        self._done: dict[int, CutDoneRecord] = {}
        """The records of cuts that are not older than all that are here."""
        self._origin = 0
        """The cut that the run was begun from; no record tells of it."""
        for number in known_cuts(run.cuts):
            self._open_listed(number)
        self._places = {cut.state.position: cut for cut in self._stored.values()}

    def _open_listed(self, number: int) -> None:
        try:
            self._stored[number] = open_cut(self._run.cuts, number)
        except BadCut as error:
            self._unreadable[number] = str(error)

    def __bool__(self) -> bool:
        return bool(self._stored or self._unreadable)

    def list_usable(self) -> list[StoredCut]:
        """Cuts without a problem, the oldest first."""
        return [self._stored[number] for number in sorted(self._met & self._stored.keys())]

    # ---- while the journal is read ------------------------------------------------------------------------------

    def take_record(self, record: CutDoneRecord) -> None:
        if not self.complete:
            self._done.clear()  # of those that are gone, only the newest should not be
        if record.cut >= min(self.complete, default=0):
            self._done[record.cut] = record

    def begin_audit(self, begun: BegunRecord, position: Position, *, origin: bool) -> JournalAudit | None:
        """A run that was made of another goes on from what its own first cut holds, or, once that is removed, from the
        copy of its state."""
        cut = self._find_cut_at(begun.run, position)
        if cut is not None:
            state, whose = cut.state, f"cut {cut.number} ({cut.path / 'state.bin'})"
            self._origin = cut.number if origin else 0
        elif origin and (kept := self._read_origin(begun.run, position)) is not None:
            state, whose = kept, str(self._run.origin)
        else:
            return None
        try:
            audit = JournalAudit.restore_from_cut(state, under_way=not origin)
            audit.check_totals()
        except (BadRun, LookupError, ValueError) as error:
            raise BadRun(f"{whose}: {error}") from error
        return audit

    def _read_origin(self, run: str, position: Position) -> CutState | None:
        try:
            state = msgspec.msgpack.decode(self._run.origin.read_bytes(), type=CutState)
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, AtollError) as error:
            raise BadRun(f"{self._run.origin} cannot be read: {error}") from error
        return state if (state.history.begun.run, state.position) == (run, position) else None

    def _find_cut_at(self, run: str, position: Position) -> StoredCut | None:
        """The cut whose place is here; what is wrong with its place or its run is told later."""
        cut = self._places.get(position)
        if cut is None or cut.part.run != run:
            return None
        self._met.add(cut.number)
        return cut

    def compare_at(self, audit: JournalAudit, position: Position) -> None:
        """The journal has been read up to here: if a cut was taken here, it holds what the records give."""
        if (cut := self._find_cut_at(audit.history.run, position)) is None:
            return
        try:
            audit.check_cut(cut.state)
        except BadRun as error:
            raise BadRun(f"cut {cut.number} ({cut.path / 'state.bin'}): {error}") from error

    # ---- afterwards ---------------------------------------------------------------------------------------------

    def check_files(self, run: str, gap_before: int = 0) -> None:
        """`gap_before`: behind the oldest some may be missing, but none of so many that are the newest."""
        for entry in sorted(self._run.cuts.iterdir()) if self._run.cuts.is_dir() else ():
            if entry.name.isdigit() and not (entry / "syncer.json").exists():
                self._findings.add_remark(f"{entry} is not finished: the syncer's part was never whole")
        for number in sorted(self._stored.keys() | self._unreadable.keys()):
            self._check_one(run, number)
            self._findings.progress("cuts", number)
        self._remark_missing_parts()
        self._check_none_missing(gap_before)

    def _remark_missing_parts(self) -> None:
        if missing := self._findings.missing_parts:
            files, names = (
                sum(map(len, missing.values())),
                sorted({name for parts in missing.values() for name in parts}),
            )
            self._findings.add_remark(
                f"{files} learner files of {len(missing)} cuts are not in {self._run.learners}, those of "
                f"{', '.join(names)}: learners started by hand keep theirs in their own folders (--json names each)"
            )

    def _check_one(self, run: str, number: int) -> None:
        whole = number in self.complete or number == 0
        try:
            self._check_belongs(run, number)
            if number in self.complete:
                self._check_manifest(run, number)
            else:
                read_syncer_part(self._run.cuts, number)
        except BadCut as error:
            if whole:
                raise
            self._findings.add_remark(f"cut {number} is passed over: {error}")
            self._stored.pop(number, None)
            return
        if not whole:
            self._findings.add_remark(f"cut {number} is not complete: it has no manifest")

    def _check_belongs(self, run: str, number: int) -> None:
        if number in self._unreadable:
            raise BadCut(self._unreadable[number])
        cut = self._stored[number]
        part, at = cut.part, cut.state.position
        theirs = part.run if part.run != run else cut.state.history.begun.run
        if theirs != run:
            raise BadRun(f"cut {number} ({cut.path}) is of another run: {theirs}, this one is {run}")
        if part.cut != number:
            raise BadRun(f"{cut.path / 'syncer.json'} is of cut {part.cut}, and lies in the folder of cut {number}")
        if number not in self._met:
            raise BadCut(
                f"cut {number} ({cut.path / 'state.bin'}) goes on at byte {at.offset} of term {at.term}, "
                "where no record of this journal ends"
            )

    def _check_manifest(self, run: str, number: int) -> None:
        path = folder_of(self._run.cuts, number) / "manifest.json"
        manifest, record = read_manifest(self._run.cuts, number), self._done.get(number)
        if manifest.run != run:
            raise BadRun(f"{path} is of another run: {manifest.run}, this one is {run}")
        if record is None and number not in (0, self._origin):
            self._findings.add_remark(f"cut {number} has a manifest and no record: its syncer was stopped in between")
        elif record is not None and digest_file(path) != record.manifest:
            raise BadCut(f"{path} is damaged: its digest is not the one in the record of cut {number}")
        elif record is not None and set(record.learners) != set(manifest.learners):
            raise BadRun(f"{path} names other learners than its record does")
        if (manifest.cut, manifest.round) != (number, self._stored[number].part.round):
            raise BadRun(f"{path} is of cut {manifest.cut}, round {manifest.round}: of another one than syncer.json")
        checked = check_cut(self._run.cuts, self._run.learners, number)
        if checked.missing:
            self._findings.missing_parts[number] = checked.missing
        for remark in checked.list_remarks(but=checked.missing):
            self._findings.add_remark(remark)

    def _check_none_missing(self, gap_before: int) -> None:
        absent = self._done.keys() & set(read_absent(self._run.cuts)) - set(self.complete)
        for number in sorted(absent):
            self._findings.add_remark(f"cut {number} was not in the bucket when the run was brought back")
        due = sorted(self._done.keys() - absent)
        if gap_before and len(self.complete) > 1:
            second = sorted(self.complete)[1]
            due = [number for number in due if number >= min(second, due[-gap_before:][0])]
        for number in due:
            if number not in self.complete:
                folder = folder_of(self._run.cuts, number)
                raise BadRun(f"cut {number} is missing: the journal says it is complete, {folder} does not hold it")

    def has_grown(self) -> bool:
        """Whether the run has completed a cut since these were listed: it may have removed some of them."""
        return complete_cuts(self._run.cuts)[:1] > self.complete[:1]
