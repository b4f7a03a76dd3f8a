"""`atoll verify`: check a run's promises from the files of its folder alone.

The report names the first thing that is wrong, with its place; nothing after it is checked. In this order:

    journal      the hash chain of every segment, seals, terms; it reaches its durable end (durable_end.py), and so
                 does the chain of every shard; what is torn behind that was never acknowledged: only a remark
    records      versions, members, ledger, leases (audit.py, audit_members.py), and each cut at its position
    cuts         every file by its digest (verify_cuts.py)
    shards       of a syncer of several: every decision is in every chain, their parts of cuts are whole (shards.py)
    parameters   Θ and the outer state, rebuilt from cut to cut to the end (rebuild.py)
    model        model.safetensors, if present, is the head of the journal; every fragment of model-best.safetensors is
                 a version that the journal has the digest of; model-tail.safetensors is the mean that a record names,
                 and the newest such mean comes out again where its outer gradients are kept
    alarms       the syncer raised none about the ledger while the run went on

Records are read one at a time, so memory stays at one copy of the model. Nothing is written, so a live run can be
verified; what it does meanwhile is left for the next time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import Fragment, Piece, make_plan
from atoll.numerics.shard_plan import ShardPlan
from atoll.protocol.errors import AtollError, ConfigError
from atoll.protocol.ledger import Ledger
from atoll.protocol.records import (
    AnyRecord,
    BegunRecord,
    CutDoneRecord,
    LossRecord,
    MergedRecord,
    RestoredRecord,
    TailRecord,
)
from atoll.store.audit import JournalAudit
from atoll.store.audit_members import BadRun
from atoll.store.disk import LocalDisk
from atoll.store.durable_end import UNMARKED, check_end, read_accepted
from atoll.store.end_mark import DurableEnd
from atoll.store.journal import ORIGIN, Position, TornTail, read
from atoll.store.rebuild import ParameterWalk, RebuiltModel, difference
from atoll.store.rundir import RunDir, read_model_facts
from atoll.store.segments import segment_path
from atoll.store.shards import LEAD, check_chains, check_shard_cuts, digest_version, divide_plan, shard_dir
from atoll.store.tail import digests_of, find_record
from atoll.store.verify_cuts import CutVerifier, Findings, TellProgress
from atoll.store.writer_lease import unclaimed_terms

EVERY = 10_000
"""Records between two words of progress."""
TRIES = 3
"""A live run removes old cuts and payloads. If it did so while they were read, everything is read again."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    ok: bool
    problem: str
    """The first problem and its place; empty: there is none."""
    facts: dict[str, Any]
    """What was counted, up to there."""
    remarks: tuple[str, ...] = ()
    """Not wrong, but worth knowing."""

    def document(self) -> dict[str, Any]:
        return {"ok": self.ok, "problem": self.problem, **self.facts, "remarks": list(self.remarks)}


def verify_run(path: Path, *, progress: TellProgress | None = None) -> VerifyReport:
    """ConfigError where there is no run to verify; all that is wrong with one is in the report."""
    run = RunDir(path)
    if not run.journal.is_dir():
        raise ConfigError(f"{path} holds no run that can be verified: there is no journal/ in it")
    began, left = time.monotonic(), TRIES
    while True:
        verification = RunVerification(run, Findings(progress) if progress else Findings())
        problem, left = verification.find_problem(), left - 1
        if not problem or not verification.has_grown():
            return verification.make_report(problem, time.monotonic() - began)
        if not left:
            text = f"{problem} (the run goes on, and has removed old files meanwhile: verify it once more)"
            return verification.make_report(text, time.monotonic() - began)


class RunVerification:
    def __init__(self, run: RunDir, findings: Findings) -> None:
        self._run, self._findings = run, findings
        self._cuts = CutVerifier(run, findings)
        self._begun: BegunRecord | None = None
        self._audit: JournalAudit | None = None
        """None until the records can be judged: from the first one on, but for runs that were begun from a cut."""
        self._walk: ParameterWalk | None = None
        self._end = ORIGIN
        self._records = self._torn_bytes = self._unjudged = 0
        self._read_whole = False
        """All records that were there are read, and none is wrong."""
        self._tails: list[TailRecord] = []
        self._terms: set[int] = set()
        """Whose segments hold records that count."""
        self._under_tape = False
        """A round has no gradient beside it: `atoll train --tape` made it. A syncer writes one with every round."""

    def find_problem(self) -> str:
        """The first thing that is wrong; empty when nothing is."""
        try:
            self.check_run()
        except AtollError as error:
            return str(error)
        except OSError as error:
            return f"{error.filename} cannot be read: {error.strerror or error}"
        return ""

    def check_run(self) -> None:
        mark = check_end(self._run, LocalDisk())
        self._read_journal(mark)
        if self._audit is None:
            self._tell_nothing()
            return
        self._audit.check_totals()
        self._tell_unmerged(self._audit)
        history = self._audit.history
        spares = history.settings.guard != "off"
        self._cuts.check_files(history.run, gap_before=history.settings.keep_cuts if spares else 0)
        if history.begun.shards > 1:
            for shard in range(LEAD + 1, history.begun.shards + 1):
                check_end(shard_dir(self._run, shard), LocalDisk(), shard=shard)
            check_chains(self._run, history.begun)
            check_shard_cuts(self._run, history.begun, sorted(self._cuts.complete))
        self._check_model(self._audit, self._rebuild_model(self._audit))
        self._audit.check_alarms()
        self._check_best(history.begun)
        self._check_ema(history.begun)
        self._check_tail(history.begun)

    def has_grown(self) -> bool:
        """Whether the run has written more since it was read: its other files may be newer than what was read."""
        return self._cuts.has_grown() or (self._read_whole and self._journal_grew())

    def _journal_grew(self) -> bool:
        try:
            return next(read(self._run.journal, start=self._end, disk=LocalDisk()), None) is not None
        except AtollError:
            return False

    # ---- the journal --------------------------------------------------------------------------------------------

    def _read_journal(self, mark: DurableEnd | None) -> None:
        for position, record in read(self._run.journal, disk=LocalDisk(), on_tail=self._tell_tail):
            self._records += 1
            self._terms.add(position.term)
            try:
                self._take_record(position, record)
            except BadRun as error:
                raise BadRun(f"{self._describe_place(position)}: {error}") from error
            self._end = position
            self._meet_cut(position)
            if self._records % EVERY == 0:
                self._findings.progress("records", self._records)
            if mark is not None and self._end != mark.position and _same_place(self._end, mark.position):
                raise BadRun(f"{self._describe_place(position)}: it is not the record that was durable there")
        self._findings.progress("records", self._records)
        self._tell_mark(mark)
        self._check_claims()
        self._tell_segments()
        self._read_whole = True

    def _tell_mark(self, mark: DurableEnd | None) -> None:
        if mark is None and self._records:
            self._findings.add_remark(UNMARKED)
        if lost := read_accepted(self._run):
            self._findings.add_remark(f"the operator accepted that this is lost: {lost}")

    def _take_record(self, position: Position, record: AnyRecord) -> None:
        if self._begun is None:
            if not isinstance(record, BegunRecord):
                raise BadRun(f"the journal begins with {type(record).__name__}, not with the beginning of a run")
            self._begun = record
            self._audit = None if record.parent else JournalAudit(record, position.term)
        elif self._audit is not None:
            self._audit.take_record(record)
        if isinstance(record, CutDoneRecord):
            self._cuts.take_record(record)
        if isinstance(record, TailRecord):
            self._tails.append(record)
        if isinstance(record, LossRecord):
            self._findings.add_remark(f"term {position.term} went on without what was lost, as accepted: {record.what}")
        if isinstance(record, MergedRecord):
            self._under_tape = self._under_tape or record.payload is None

    def _meet_cut(self, position: Position) -> None:
        """What a cut holds is compared; the records of a run that was begun from a cut go on from it."""
        assert self._begun is not None
        if self._audit is not None:
            self._cuts.compare_at(self._audit, position)
            return
        self._audit = self._cuts.begin_audit(self._begun, position, origin=self._records == 1)
        if self._audit is not None and self._records > 1:
            self._unjudged = self._records
            self._findings.add_remark(
                f"the run was begun from {self._begun.parent}, of which nothing is here any more: "
                f"the {self._records} records up to its oldest cut could not be judged"
            )

    def _describe_place(self, position: Position) -> str:
        """A position lies behind its record."""
        path = segment_path(self._run.journal, position.term)
        return f"record {self._records} (up to byte {position.offset} of {path})"

    def _tell_tail(self, tail: TornTail) -> None:
        self._torn_bytes += tail.size_bytes
        self._findings.add_remark(
            f"{tail.file.name} ends in {tail.size_bytes} bytes, from byte {tail.offset} on, "
            "of an append that was never acknowledged"
        )

    def _tell_nothing(self) -> None:
        """There is nothing to judge."""
        if self._begun is not None:
            raise BadRun(f"the run was begun from {self._begun.parent}, but no cut in {self._run.cuts} is of it")
        if self._cuts:
            raise BadRun(f"{self._run.journal} holds no record, but there are cuts: put back a copy of the journal")
        self._findings.add_remark("the run has not begun: its journal holds no record")

    def _check_claims(self) -> None:
        if missing := unclaimed_terms(self._run.journal):
            raise BadRun(
                f"{self._run.journal / 'terms'} holds no claim of term {missing[0]}, of which there is a segment: "
                "put back a copy of that folder, or go on with the run, which makes it again"
            )

    def _tell_segments(self) -> None:
        for path in sorted(self._run.journal.glob("segment-*.log")):
            term = path.stem.removeprefix("segment-")
            if self._records and term.isdigit() and int(term) not in self._terms:
                self._findings.add_remark(f"{path.name} counts for nothing: it is empty, or no later term follows it")

    def _tell_unmerged(self, audit: JournalAudit) -> None:
        for learner, incarnation, tokens in audit.list_unmerged() if audit.history.finished else ():
            self._findings.add_remark(
                f"{tokens:,} fragment-tokens of {learner} (incarnation {incarnation}) were in flight at the end: "
                "its account was never closed"
            )

    # ---- parameters ---------------------------------------------------------------------------------------------

    def _rebuild_model(self, audit: JournalAudit) -> RebuiltModel | None:
        """The model at the end of what was read; None where it cannot be made."""
        cuts = self._cuts.list_usable()
        if audit.history.begun.shards > 1:  # of one that is not complete, some shard may have no part
            cuts = [cut for cut in cuts if cut.number in self._cuts.complete]
        if not audit.history.started and not cuts:
            return None
        if self._under_tape and not cuts:
            self._findings.add_remark("the run followed a tape and keeps no cut: atoll replay checks its parameters")
            return None
        if not cuts:
            raise BadRun(f"the run has parameters, but no cut in {self._run.cuts} holds them: put one back")
        tail = (self._tails[-1].first, self._tails[-1].last) if self._tails else None
        self._walk = ParameterWalk(self._run, cuts, self._findings, tail)
        self._walk.go_to(self._end)
        return self._walk.model

    def _check_model(self, audit: JournalAudit, model: RebuiltModel | None) -> None:
        """If the model file is there it must be the head. The syncer removes it before the first round after an end is
        durable, so that an old model never lies beside a newer journal."""
        path, history = self._run.model, audit.history
        if model is None:
            return
        if not path.exists():
            if history.finished:
                self._findings.add_remark(
                    f"the run is finished, but {path.name} is not there: atoll export makes it again"
                )
        elif (wrong := difference(path, model)) is not None:
            said = read_model_facts(path).get("round")
            of = f"it says it is of round {said}, " if said is not None else ""
            raise BadRun(
                f"{path} is not the head of the run: {of}the journal's head is round {history.committed}; {wrong}"
            )

    def _check_best(self, begun: BegunRecord) -> None:
        found = check_best(self._run, begun)
        if found.problem:
            raise BadRun(found.problem)
        if found.unknown:
            name = self._run.best_model.name
            self._findings.add_remark(
                f"{found.unknown} fragments of {name} are of versions that the journal has no digest of"
            )

    def _check_ema(self, begun: BegunRecord) -> None:
        path = self._run.ema_model
        if not path.exists():
            return
        if (run := read_model_facts(path).get("run")) != begun.run:
            raise BadRun(f"{path} is of run {run or 'nobody knows'}, not of {begun.run}")
        self._findings.add_remark(f"{path.name} is not compared: the journal has no digest of a moving average")

    def _check_tail(self, begun: BegunRecord) -> None:
        """The mean is made again from its versions, and the file is held against the record that it names."""
        means = self._walk.means if self._walk is not None else None
        if means is not None and not means.is_complete():
            self._findings.add_remark("the averaged model cannot be made again: its outer gradients are trimmed")
        elif means is not None and digests_of(means.compute()) != self._tails[-1].digests:
            raise BadRun("the last versions have another mean than the record of the averaged model says")
        path = self._run.tail_model
        if not path.exists():
            return
        if (record := find_record(path, begun.run, self._tails)) is None:
            raise BadRun(f"{path} is not known to the journal: no record names the versions that it says it averages")
        plan = make_plan(begun.tensors, begun.settings.fragments, begun.settings.plan)
        if wrong := _differing(path, list(plan.fragments), dict(enumerate(record.digests))):
            raise BadRun(f"{path} is not the mean that the journal tells of: {wrong}")

    # ---- what was counted ---------------------------------------------------------------------------------------

    def make_report(self, problem: str, seconds: float) -> VerifyReport:
        parts = {str(cut): list(names) for cut, names in self._findings.missing_parts.items()}
        facts = {**self._collect_facts(), "missing_parts": parts, "seconds": round(seconds, 3)}
        return VerifyReport(not problem, problem, facts, tuple(self._findings.remarks))

    def _collect_facts(self) -> dict[str, Any]:
        audit = self._audit
        totals = audit.compute_totals() if audit else None
        return {
            "run": self._begun.run if self._begun else "",
            "records": self._records,
            "unjudged": self._unjudged,
            "rounds": audit.history.committed if audit else 0,
            "passed": audit.history.committed - audit.history.merged_rounds - audit.empty if audit else 0,
            "empty": audit.empty if audit else 0,
            "terms": len(self._terms),
            "learners": audit.members.learners if audit else 0,
            "incarnations": audit.members.incarnations if audit else 0,
            "contributions": audit.members.contributions if audit else 0,
            "fragment_tokens": totals.fragment_tokens() if totals else {},
            "tokens": totals.whole() if totals else {},
            "dropped_by_cause": _find_causes(audit.history.ledger) if audit else {},
            "per_learner": _per_learner(audit.history.ledger) if audit else {},
            "finished": audit.history.finished if audit else False,
            "cuts": sorted(self._cuts.complete),
            "torn_bytes": self._torn_bytes,
            "rebuilt_rounds": self._walk.rounds if self._walk else 0,
        }


def _find_causes(ledger: Ledger) -> dict[str, int]:
    """By cause, the tokens that are in no version. `untold`: dropped by accounts that are open, by overlap or in missed
    rounds. Which of the two, only reports say and the record that closes the account; no record holds a report."""
    causes, open_tokens = ledger.totals().by_cause(), 0
    for account in ledger.open.values():
        fates = account.fates()
        open_tokens += sum(fates.dropped) - sum(fates.missed)
    untold = min(causes["overlap"], -(-open_tokens // len(ledger.totals().computed)))
    return {**causes, "overlap": causes["overlap"] - untold, "untold": untold} if untold else causes


def _per_learner(ledger: Ledger) -> dict[str, dict[str, Any]]:
    """Of an account that is open only what records tell is known: what it dropped stands in none of them."""
    found = sorted(ledger.by_learner().items())
    return {name: {"merged_share": fates.merged_share(), "tokens": fates.whole()} for name, fates in found}


@dataclass(frozen=True, slots=True)
class BestChecked:
    problem: str = ""
    unknown: int = 0
    """Fragments of which the journal has no digest."""


def check_best(run: RunDir, begun: BegunRecord) -> BestChecked:
    """Compare every fragment of the best model with the digest that the journal has of its version.

    The values cannot be rebuilt once outer gradients are trimmed, but digests are kept. The journal has none of
    version 0, nor of what a run had before it was begun from a cut: those are not compared.
    """
    path = run.best_model
    if not path.exists():
        return BestChecked()
    facts = read_model_facts(path)
    if facts.get("run") != begun.run:
        return BestChecked(f"{path} is of run {facts.get('run') or 'nobody knows'}, not of {begun.run}")
    plan = make_plan(begun.tensors, begun.settings.fragments, begun.settings.plan)
    versions = [int(one) for one in facts.get("versions", "").split(",") if one.isdigit()]
    if len(versions) != len(plan.fragments):
        return BestChecked(f"{path} does not say which versions it holds")
    due = committed_digests(run.journal, versions)
    parts = [part for part in plan.fragments if part.index in due]
    wrong = _differing(path, parts, due, divide_plan(plan, begun))
    problem = f"{path} is not what the run had committed: {wrong}" if wrong else ""
    return BestChecked(problem, len(versions) - len(due))


def committed_digests(journal: Path, versions: list[int]) -> dict[int, str]:
    """By fragment, what the journal says of these versions."""
    found: dict[int, str] = {}
    for _, record in read(journal, disk=LocalDisk()):
        if isinstance(record, MergedRecord) and record.version == versions[record.fragment]:
            found[record.fragment] = record.digest
        elif isinstance(record, RestoredRecord):
            restored = zip(record.versions, record.digests, strict=True)
            found |= {f: mark for f, (version, mark) in enumerate(restored) if version == versions[f]}
    return found


def _read_piece(file: Any, piece: Piece) -> FloatArray:
    name = piece.tensor.name_in_model
    rows = slice(piece.first, piece.first + piece.rows)
    values: FloatArray = file.get_tensor(name) if piece.is_whole else file.get_slice(name)[rows]
    return values


def _same_place(position: Position, other: Position) -> bool:
    return (position.term, position.offset) == (other.term, other.offset)


def _differing(path: Path, parts: list[Fragment], due: dict[int, str], shards: ShardPlan | None = None) -> str:
    """The first fragment whose values have another digest; empty: none."""
    try:
        with safe_open(path, framework="numpy") as file:
            for part in parts:
                values = np.zeros(part.size, dtype=np.float32)
                for piece, place in part.parts:
                    values[place] = _read_piece(file, piece).ravel()
                if digest_version(values, shards, part.index) != due[part.index]:
                    return f"fragment {part.index} has other values than the journal's digest"
    except (SafetensorError, OSError, ValueError) as error:
        return f"it cannot be read: {error}"
    return ""
