"""Replay a run's records in order and check each one against those before it.

The audit folds records with the same `History` as the syncer. It checks these rules (audit_members.py has the rest):
- the run begins once, and terms increase;
- rounds are 0, 1, 2, … over all terms, each merged or passed once; round n takes fragment n mod P, and a merged one
  raises its fragment's version by one; no round follows the end;
- the run's step never decreases, and no round's progress is less than its step over the budget;
- a lease is the one that was due: no position of a pass is issued twice unless it was returned in between, and merged
  samples were leased;
- a rollback raises every version by one, restores values that the run had at the round it names, and lists what it
  undoes of every incarnation;
- the ledger balances to zero, its sums match the members, and the syncer raised no alarm about it;
- a cut holds the state that the records before it give. Reports are in no record, so of an open account only what
  records say can be compared.
"""

from __future__ import annotations

from operator import gt

import msgspec

from atoll.config import Outer
from atoll.protocol.errors import AtollError
from atoll.protocol.history import History
from atoll.protocol.leases import wrong_sources
from atoll.protocol.ledger import Ledger, LedgerState, Totals
from atoll.protocol.records import (
    AlarmedRecord,
    AnyRecord,
    BegunRecord,
    ChangedRecord,
    CutDoneRecord,
    DrawnRecord,
    EndedRecord,
    GoneRecord,
    GrantedRecord,
    JoinedRecord,
    LentRecord,
    LossRecord,
    MergedRecord,
    OwnedRecord,
    PassedRecord,
    PlayedRecord,
    ResetRecord,
    RestoredRecord,
    ScoredRecord,
    SourcesRecord,
    StartedRecord,
    TailRecord,
    TermRecord,
)
from atoll.protocol.syncer.rollback import undone
from atoll.protocol.syncer.rounds import NOTHING_LEFT
from atoll.store.audit_members import BadRun, MemberAudit
from atoll.store.cuts import CutState

PLAIN_FIELDS = (
    "begun",
    "settings",
    "outer",
    "started",
    "versions",
    "committed",
    "lives",
    "cuts",
    "ended",
    "finished",
    "progress",
    "step",
    "global_step",
    "trend",
    "least",
    "rolled_back",
    "good_cut",
)
"""Fields of the history that records alone decide."""


class JournalAudit:
    def __init__(self, begun: BegunRecord, term: int = 1) -> None:
        self.fragments = begun.settings.fragments
        if self.fragments < 1:
            raise BadRun(f"the run begins with {self.fragments} fragments")
        self.history = History(begun)
        self.members = MemberAudit(self.fragments)
        self.recent = RecentRounds(self.fragments)
        self.term = term
        self.empty = 0
        """Rounds of the last cycle for which nobody had steps left."""
        self.alarms = 0
        self.alarm = ""
        """The first of them, as the syncer said it."""
        self.untaped = 0
        """Entries that are missing in learners' tapes."""
        self.rounds = [-1] * self.fragments
        """Per fragment, the round that made its current version."""

    @classmethod
    def restore_from_cut(cls, cut: CutState, *, under_way: bool) -> JournalAudit:
        """Start from a cut. `under_way`: older records are missing, so rounds may hold members that are not known."""
        audit = cls(cut.history.begun, cut.position.term)
        audit.history = History.restore(cut.history)
        audit.members = MemberAudit.restore_from_state(cut.history, under_way=under_way)
        audit.rounds = list(cut.rounds)
        audit.recent.forget_before(cut.history.committed)
        return audit

    def take_record(self, record: AnyRecord) -> None:
        """Check one record and fold it. BadRun says what is wrong with it."""
        self._check_record(record)
        try:
            self.history.apply(record)
        except (AssertionError, LookupError, ValueError) as error:
            raise BadRun(f"{type(record).__name__} cannot follow the records before it: {error}") from error
        if isinstance(record, MergedRecord | PassedRecord):
            self.members.forget_before(self.history.committed)
        if isinstance(record, CutDoneRecord):
            self.recent.forget_before(min(self.history.cuts[0], self.history.good_cut))

    def _check_record(self, record: AnyRecord) -> None:
        match record:
            case BegunRecord(run):
                raise BadRun(f"the run begins a second time, as {run}")
            case TermRecord():
                self._check_term(record)
            case JoinedRecord():
                self.members.check_join(record)
            case StartedRecord(uploader):
                if self.history.started:
                    raise BadRun(f"the run starts a second time, from {uploader}")
            case MergedRecord():
                self._check_merged(record)
            case PassedRecord():
                self._check_round(record)
                if self.history.ended and record.reason == NOTHING_LEFT:
                    self.empty += 1
            case ScoredRecord(round):
                if not 0 <= round <= self.history.committed:
                    raise BadRun(f"round {round} is scored, with {self.history.committed} rounds committed")
            case RestoredRecord():
                self._check_rollback(record)
            case ResetRecord(fragment):
                self._check_fragment(fragment)
            case SourcesRecord(datasets, epochs):
                self._check_sources(wrong_sources(datasets, epochs))
            case GrantedRecord():
                self._check_lease(record)
            case GoneRecord():
                self.members.check_departure(record, self.history.committed)
            case ChangedRecord():
                self._check_change(record)
            case CutDoneRecord():
                self._check_cut_record(record)
            case PlayedRecord(tapes):
                for one in tapes:
                    self._check_tape(one.learner, one.incarnation, one.first)
            case EndedRecord(step=step):
                self._check_step("the end", step)
            case AlarmedRecord(wrong=wrong):
                self.alarm, self.alarms = self.alarm or wrong, self.alarms + 1
            case TailRecord():
                self._check_tail(record)
            case LentRecord() | OwnedRecord() | DrawnRecord() | LossRecord():
                pass

    def _check_tape(self, learner: str, incarnation: int, first: int) -> None:
        life = self.history.lives.get(learner)
        if life is None or life.incarnation < incarnation:
            raise BadRun(f"the tape of {learner} (incarnation {incarnation}) goes on before it has joined")
        if first < life.taped:
            raise BadRun(f"the tape of {learner} goes on at entry {first}, after entry {life.taped - 1}")
        self.untaped += first - life.taped

    def _check_term(self, record: TermRecord) -> None:
        if record.term <= self.term:
            raise BadRun(f"term {record.term} follows term {self.term}: terms only go up")
        if record.round != self.history.committed:
            raise BadRun(f"term {record.term} goes on from round {record.round}, not {self.history.committed}")
        self.term = record.term

    # ---- rounds -------------------------------------------------------------------------------------------------

    def _check_round(self, record: MergedRecord | PassedRecord) -> None:
        round, fragment, due = record.round, record.fragment, self.history.committed
        if round != due:
            raise BadRun(f"round {round} comes where round {due} is due")
        if fragment != round % self.fragments:
            raise BadRun(f"round {round} takes fragment {fragment}, its turn is fragment {round % self.fragments}")
        if not self.history.started or self.history.finished:
            raise BadRun(f"round {round} comes {'after the end' if self.history.finished else 'before version 0'}")
        self._check_step(f"round {round}", record.step)
        budget = self.history.settings.steps
        if budget and not min(1.0, record.step / budget) <= record.progress <= 1.0:
            raise BadRun(f"round {round} has a progress of {record.progress} at step {record.step} of {budget}")

    def _check_step(self, what: str, step: float) -> None:
        if not step >= self.history.step:
            raise BadRun(f"{what} is at step {step:g} of the run, after step {self.history.step:g}")

    def _check_merged(self, record: MergedRecord) -> None:
        self._check_round(record)
        before = self.history.versions[record.fragment]
        if record.version != before + 1:
            raise BadRun(
                f"round {record.round} makes fragment {record.fragment} version {record.version}, after {before}"
            )
        self.members.check_members(record, self.history.settings)
        for share in record.members:
            if share.position > 0 and self.members.is_open(share.learner, share.incarnation):
                self._check_position(record.round, share.learner, share.incarnation, share.position)
        self.rounds[record.fragment] = record.round
        self.recent.add_round(record)

    def _check_rollback(self, record: RestoredRecord) -> None:
        due = tuple(version + 1 for version in self.history.versions)
        if record.versions != due or record.at != self.history.committed:
            raise BadRun(f"a rollback behind {record.at} rounds makes versions {record.versions}, {due} are due")
        if not 0 <= record.round < record.at or len(record.digests) != self.fragments:
            raise BadRun(f"the run is rolled back to round {record.round} behind round {record.at - 1}")
        self.recent.check_rollback(record)
        for one in record.undone:
            self.members.merged = [had - gone for had, gone in zip(self.members.merged, one.tokens, strict=True)]
        self.rounds = [record.at - 1] * self.fragments

    def _check_position(self, round: int, learner: str, incarnation: int, position: int) -> None:
        leases = self.history.leases
        wrong = leases.taken(learner, incarnation, position) if leases else "samples are merged that nobody leased"
        if wrong is not None:
            raise BadRun(f"round {round}: {wrong}")

    def _check_fragment(self, fragment: int) -> None:
        if not 0 <= fragment < self.fragments:
            raise BadRun(f"fragment {fragment} is reset, the run has {self.fragments}")

    def _check_tail(self, record: TailRecord) -> None:
        if not len(record.first) == len(record.last) == len(record.digests) == self.fragments:
            raise BadRun(f"a mean is written of {len(record.last)} fragments, the run has {self.fragments}")
        for fragment, (first, last) in enumerate(zip(record.first, record.last, strict=True)):
            if not 0 <= first <= last <= self.history.versions[fragment]:
                raise BadRun(
                    f"a mean is written of versions {first} to {last} of fragment {fragment}, which is at version "
                    f"{self.history.versions[fragment]}"
                )

    def _check_change(self, record: ChangedRecord) -> None:
        ours, theirs = self.history.settings, record.settings
        if (theirs.fragments, theirs.plan) != (ours.fragments, ours.plan):
            raise BadRun(f"the fragments of a run cannot change: {ours.fragments} became {theirs.fragments}")
        try:
            msgspec.convert(record.outer, Outer)
        except (msgspec.MsgspecError, AtollError) as error:
            raise BadRun(f"the outer settings were changed to what cannot be: {error}") from error

    def _check_cut_record(self, record: CutDoneRecord) -> None:
        newest = self.history.cuts[-1] if self.history.cuts else -1
        if not newest < record.cut <= self.history.committed:
            raise BadRun(f"cut {record.cut} is done after cut {newest}, with {self.history.committed} rounds committed")

    # ---- leases -------------------------------------------------------------------------------------------------

    def _check_sources(self, wrong: str | None) -> None:
        if self.history.leases is not None:
            raise BadRun("the data that leases are cut from is named a second time")
        if wrong is not None:
            raise BadRun(wrong)

    def _check_lease(self, record: GrantedRecord) -> None:
        leases = self.history.leases
        if leases is None:
            raise BadRun(f"{_words(record)} is granted, but no record names the data")
        if not self.members.is_open(record.learner, record.incarnation):
            who = f"{record.learner} (incarnation {record.incarnation})"
            raise BadRun(f"{_words(record)} is granted to {who}, which is not there")
        due = leases.next(record.learner, record.incarnation, max(1, record.stop - record.start))
        if record != due:
            raise BadRun(self._not_due(record, due))

    def _not_due(self, record: GrantedRecord, due: GrantedRecord | None) -> str:
        assert self.history.leases is not None
        state = self.history.leases.state()
        if not 0 <= record.dataset < len(state.cursors) or not 0 <= record.start < record.stop:
            return f"{_words(record)} is of no dataset of the run, or empty"
        cursor = state.cursors[record.dataset]
        came_back = any(
            (piece.dataset, piece.epoch) == (record.dataset, record.epoch) and piece.start <= record.start < piece.stop
            for piece in state.waiting
        )
        if (record.epoch, record.start) < (cursor.epoch, cursor.start) and not came_back:
            return f"{_words(record)} is issued twice: it was issued before and did not come back"
        return f"{_words(record)} is granted, but {_words(due) if due else 'nothing'} is due"

    # ---- sums ---------------------------------------------------------------------------------------------------

    def compute_totals(self) -> Totals:
        return self.history.ledger.totals()

    def check_totals(self) -> None:
        totals = self.compute_totals()
        _check_balance("the ledger of all records", totals)
        if list(totals.merged) != self.members.merged:
            raise BadRun(f"the ledger says {totals.merged} tokens are merged, the members make {self.members.merged}")

    def check_alarms(self) -> None:
        """Reports are in no record, but the syncer's alarm about one is."""
        if self.alarms:
            more = f" ({self.alarms - 1} more like it)" if self.alarms > 1 else ""
            raise BadRun(f"the ledger does not balance: {self.alarm}{more}; the syncer said so while the run went on")

    def list_unmerged(self) -> list[tuple[str, int, int]]:
        """Learner, incarnation and fragment-tokens in flight of every account that is open, as far as records tell."""
        accounts = self.history.ledger.state().open
        found = [(one.learner, one.incarnation, sum(one.fates().in_flight)) for one in accounts]
        return [one for one in found if one[2]]

    # ---- cuts ---------------------------------------------------------------------------------------------------

    def check_cut(self, cut: CutState) -> None:
        """BadRun says where a cut differs from the records up to here."""
        ours, theirs = self.history.state(), cut.history
        for name in PLAIN_FIELDS:
            if (found := getattr(theirs, name)) != (due := getattr(ours, name)):
                told = f": {found} instead of {due}" if name in ("versions", "committed") else ""
                raise BadRun(f"its {name} is not what the records up to there give{told}")
        _check_ledger(ours.ledger, theirs.ledger)
        if theirs.leases != ours.leases:
            raise BadRun(
                f"its leases are not what the records up to there give: {_first_field(ours, theirs, 'leases')}"
            )
        if list(cut.rounds) != self.rounds:
            raise BadRun(f"it says that rounds {list(cut.rounds)} made its versions, the records say {self.rounds}")


def _check_balance(whose: str, totals: Totals) -> None:
    for fragment, rest in enumerate(totals.balance()):
        if rest:
            raise BadRun(f"{whose} does not balance: {rest} tokens of fragment {fragment} have no fate")


def _check_ledger(ours: LedgerState, theirs: LedgerState) -> None:
    if theirs.closed != ours.closed:
        raise BadRun(f"its ledger is not what the records up to there give: {_first_field(ours, theirs, 'closed')}")
    for learner, told in theirs.by_learner.items():
        if learner not in ours.by_learner or _is_more(told, ours.by_learner[learner]):
            raise BadRun(f"its ledger is not what the records up to there give: more of {learner} than is known")
    due = {(one.learner, one.incarnation): one for one in ours.open}
    found = {(one.learner, one.incarnation): one for one in theirs.open}
    if due.keys() != found.keys():
        raise BadRun(
            f"its ledger has other open accounts than the records up to there: {sorted(due.keys() ^ found.keys())}"
        )
    for (learner, incarnation), account in found.items():
        known = due[learner, incarnation]
        if (account.origin, account.merged) != (known.origin, known.merged) or account.total < known.total:
            raise BadRun(
                f"its ledger is not what the records up to there give: {learner} (incarnation {incarnation}) has "
                f"{account.merged} merged of {account.total} tokens, {known.merged} of {known.total} by the records"
            )
    try:
        totals = Ledger.restore(theirs).totals()
    except ValueError as error:
        raise BadRun("its ledger cannot be added up: accounts of other fragments than the run's") from error
    _check_balance("its ledger", totals)


def _is_more(told: Totals, known: Totals) -> bool:
    """A cut of an earlier version knows nothing of single learners, and those after it know less than the records."""
    rows = ((told.computed, known.computed), (told.merged, known.merged))
    return any(len(ours) != len(theirs) or any(map(gt, theirs, ours)) for theirs, ours in rows)


def _first_field(ours: object, theirs: object, name: str) -> str:
    """The first part that differs, and how."""
    due, found = getattr(ours, name), getattr(theirs, name)
    if due is None or found is None:
        return f"{name} {'missing' if found is None else 'not expected'}"
    for part in due.__struct_fields__:
        if getattr(due, part) != getattr(found, part):
            return f"{part} {getattr(found, part)} instead of {getattr(due, part)}"[:200]
    return name


def _words(lease: GrantedRecord) -> str:
    where = f"dataset {lease.dataset}, pass {lease.epoch}"
    return f"lease {lease.lease} (samples {lease.start} to {lease.stop} of {where})"


class RecentRounds:
    """Recent rounds, back to the oldest cut that a rollback may return to; older ones are not compared."""

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._since = 0
        """Rounds before this one are not known any more."""
        self._merged: list[MergedRecord] = []
        self._digests: list[tuple[int, int, str]] = []
        """From how many rounds on, fragment, digest of the values from then on; in that order."""

    def add_round(self, record: MergedRecord) -> None:
        self._merged.append(record)
        self._digests.append((record.round + 1, record.fragment, record.digest))

    def forget_before(self, before: int) -> None:
        """What lies before this round, but for what each fragment held then."""
        self._since = max(self._since, before)
        self._merged = [one for one in self._merged if one.round >= self._since]
        held = self._digests_at(self._since)
        self._digests = [one for one in self._digests if one[0] > self._since]
        self._digests[:0] = [(self._since, fragment, mark) for fragment, mark in sorted(held.items())]

    def _digests_at(self, rounds: int) -> dict[int, str]:
        """After so many rounds; of version 0 no record tells the digest."""
        return {fragment: mark for since, fragment, mark in self._digests if since <= rounds}

    def check_rollback(self, record: RestoredRecord) -> None:
        """BadRun says what the rollback restores or undoes that the records before it do not give."""
        if record.round >= self._since:
            held = self._digests_at(record.round)
            differ = [f for f, mark in enumerate(record.digests) if held.get(f, mark) != mark]
            if differ:
                raise BadRun(
                    f"the run is rolled back to round {record.round}, but fragment {differ[0]} to other values"
                )
            if (due := undone(self._merged, record.round, self._fragments)) != record.undone:
                raise BadRun(f"the rollback to round {record.round} undoes {record.undone}, the members make {due}")
        self._merged = [one for one in self._merged if one.round < record.round]
        self._digests += [(record.at, fragment, mark) for fragment, mark in enumerate(record.digests)]
