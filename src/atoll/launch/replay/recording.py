"""What a journal recorded: the syncer's decisions in order, and the actions of every training process.

A process's actions are the entries of its tape, with the copies that rounds merged put after the adoption that gave
them their base, and before all else that the tape has of their step. A copy goes with the rest of the one before it
(courier/feedback.py): of the last that was merged of its fragment, since the process was told to forget and since the
run was rolled back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from atoll.protocol.errors import ConfigError
from atoll.protocol.history import History, number_learners
from atoll.protocol.messages import Range
from atoll.protocol.records import (
    AnyRecord,
    BegunRecord,
    ChangedRecord,
    GrantedRecord,
    JoinedRecord,
    LentRecord,
    MergedRecord,
    PassedRecord,
    PlayedRecord,
    ResetRecord,
    RestoredRecord,
    StartedRecord,
    TermRecord,
)
from atoll.protocol.tape import AdoptedEntry, AnyEntry, BeganEntry, ForgotEntry, InformedEntry, MarkedEntry, OwnedEntry

ALONE, LOST = -1, -2


class RecordedCopy(msgspec.Struct, frozen=True):
    """A copy that went into a round."""

    t: int
    round: int
    fragment: int
    base: int
    steps: int
    rollbacks: int = 0
    """Of the run before this round."""
    feedback: int = ALONE
    """The round whose copy left out what went with this one; LOST: that one was made before what is played."""


RecordedAction = AnyEntry | RecordedCopy
RecordedDecision = (
    StartedRecord | MergedRecord | PassedRecord | ResetRecord | RestoredRecord | ChangedRecord | TermRecord
)


def decisions_after(decisions: Sequence[RecordedDecision], committed: int, term: int) -> list[RecordedDecision]:
    """Those that a cut, taken with so many rounds behind the run in this term, does not contain.

    A reset or other settings between the last round before the cut and the first behind it are among them, on whichever
    side of the cut they were decided: to carry them out again changes nothing.
    """
    first = 0
    for number, one in enumerate(decisions, start=1):
        match one:
            case MergedRecord(round=at) | PassedRecord(round=at) | RestoredRecord(at=at):
                contained = at < committed
            case TermRecord():
                contained = one.term <= term
            case StartedRecord():
                contained = True
            case _:
                continue
        if contained:
            first = number
    return list(decisions[first:])


@dataclass
class ProcessRecording:
    """One training process."""

    learner: str
    session: str
    number: int
    """Which of the learner's processes it is, from 1."""
    entries: list[AnyEntry] = field(default_factory=list)
    copies: list[RecordedCopy] = field(default_factory=list)
    missing: str = ""
    """Why it cannot be played to its end, if so."""
    joined_at: int = 0
    """Rounds that were decided before it joined."""
    index: int = 0
    """The learner's number in the run."""
    incarnation: int = 1
    """Number of the life that the process began with."""

    @property
    def name(self) -> str:
        return f"{self.learner}-{self.number}" if self.number > 1 else self.learner

    @property
    def began(self) -> BeganEntry | None:
        first = self.entries[0] if self.entries else None
        return first if isinstance(first, BeganEntry) else None

    @property
    def ranks(self) -> int:
        """Processes that are this one learner."""
        return self.began.ranks if self.began is not None else 1

    def began_after(self, rounds: int) -> bool:
        """Whether it joined when this many rounds were behind the run."""
        return self.joined_at >= rounds

    def acts(self, after: int = -1) -> list[RecordedAction]:
        """All it does, in order; with `after`, from the entry behind the mark of that cut on, and before that what it
        knew of the run at the mark: that is no part of the state it saved."""
        whole = _with_feedback(_in_place([], self.entries, self.copies))
        if after < 0:
            return whole
        marks = [n for n, entry in enumerate(self.entries) if isinstance(entry, MarkedEntry) and entry.cut == after]
        start = marks[-1] + 1 if marks else len(self.entries)  # a cut may be taken anew, in a new term
        before = self.entries[:start]
        known = [entry for entry in before if isinstance(entry, InformedEntry)][-1:]
        copies = [act for act in whole if isinstance(act, RecordedCopy)]
        acts = _without_lost(_in_place(before, self.entries[start:], copies))
        return [*known, *acts] if acts else []


@dataclass
class RunRecording:
    begun: BegunRecord
    parts: list[ProcessRecording] = field(default_factory=list)
    decisions: list[RecordedDecision] = field(default_factory=list)
    leases: dict[int, Range] = field(default_factory=dict)
    lent: dict[str, tuple[ProcessRecording, int]] = field(default_factory=dict)
    """Ticket → whose state it stands for, and after which step the copy was made."""
    rounds: int = 0
    rollbacks: int = 0
    progress: dict[int, float] = field(default_factory=dict)
    """How much of the budget was spent, by the rounds behind the run …"""
    global_steps: dict[int, int] = field(default_factory=dict)
    """… and the run's step."""
    of: dict[tuple[str, int], ProcessRecording] = field(default_factory=dict)
    """Learner and incarnation → its training process."""

    def find_process(self, learner: str, incarnation: int) -> ProcessRecording:
        """ConfigError: it joined before this journal begins."""
        found = self.of.get((learner, incarnation))
        if found is None:
            raise ConfigError(
                f"{learner} went on in this run as the process that it was in {self.begun.parent}, and what that did "
                "is in the journal of that run: it cannot be replayed yet; atoll verify checks it from its files"
            )
        return found

    @property
    def has_first_parameters(self) -> bool:
        """Whether a process that gave version 0 went on with it: only then its script makes it again."""
        return any(isinstance(entry, OwnedEntry) for part in self.parts for entry in part.entries)

    def begin_at(self, history: History) -> None:
        """It is played from a cut: what learners were told of the run there, which a run made of that cut has no round
        for in its own journal."""
        self.progress.setdefault(history.committed, history.progress)
        self.global_steps.setdefault(history.committed, history.global_step)
        self.number_parts(history.lives)

    def number_parts(self, before: Iterable[str] = ()) -> None:
        """As the run did; `before`: who had joined already."""
        names = dict.fromkeys([*before, *(part.learner for part in self.parts)])
        numbers = number_learners(names, self.begun.settings.learners)
        for part in self.parts:
            part.index = numbers[part.learner]


def read_recording(records: Iterable[AnyRecord]) -> RunRecording:
    lines = iter(records)
    begun = next(lines)
    assert isinstance(begun, BegunRecord), "a journal begins with the beginning of a run"
    score = RunRecording(begun)
    for record in lines:
        _take(score, record)
    score.number_parts()
    return score


def _take(score: RunRecording, record: AnyRecord) -> None:
    match record:
        case JoinedRecord(learner, incarnation, session):
            score.of[learner, incarnation] = _part(score, learner, session, incarnation)
        case PlayedRecord(tapes):
            for one in tapes:
                _add(score.find_process(one.learner, one.incarnation), one.first, one.entries)
        case MergedRecord():
            for share in record.members:
                counters = (share.base, share.steps, score.rollbacks)
                copy = RecordedCopy(share.t, record.round, record.fragment, *counters)
                score.find_process(share.learner, share.incarnation).copies.append(copy)
            _decided(score, record)
        case PassedRecord():
            _decided(score, record)
        case StartedRecord() | ResetRecord() | RestoredRecord() | ChangedRecord() | TermRecord():
            score.decisions.append(record)
            score.rollbacks += isinstance(record, RestoredRecord)
        case GrantedRecord():
            range_ = Range(record.lease, record.dataset, record.epoch, record.start, record.stop)
            score.leases[record.lease] = range_
        case LentRecord(ticket, learner, incarnation, t):
            score.lent[ticket] = (score.find_process(learner, incarnation), t)
        case _:
            pass


def _decided(score: RunRecording, record: MergedRecord | PassedRecord) -> None:
    score.decisions.append(record)
    score.rounds = record.round + 1
    score.progress[score.rounds], score.global_steps[score.rounds] = record.progress, int(record.step)


def _add(part: ProcessRecording, first: int, entries: tuple[AnyEntry, ...]) -> None:
    if first > len(part.entries) and not part.missing:
        part.missing = f"its tape lacks entries {len(part.entries)} to {first - 1}"
    if not part.missing:
        part.entries.extend(entries)


def _part(score: RunRecording, learner: str, session: str, incarnation: int) -> ProcessRecording:
    mine = [part for part in score.parts if part.learner == learner]
    for part in mine:
        if part.session == session:
            return part
    part = ProcessRecording(learner, session, len(mine) + 1, joined_at=score.rounds, incarnation=incarnation)
    score.parts.append(part)
    return part


def _in_place(before: list[AnyEntry], entries: list[AnyEntry], copies: list[RecordedCopy]) -> list[RecordedAction]:
    """Copies between the entries; those that were made before them are left out.

    A copy of a step stands as early in that step as its base allows. What is adopted between two steps does not change
    what a copy of another fragment holds, and the real copy may have been made before the process waited for a version:
    two learners that adopt each other's last rounds in different orders would wait for each other otherwise.
    """
    held = ModelVersions()
    for entry in before:
        held.take(entry)
    since = before[-1].t if before else 0
    waiting = deque(sorted((copy for copy in copies if copy.t >= since), key=lambda copy: (copy.t, copy.round)))
    acts: list[RecordedAction] = []
    now: list[RecordedCopy] = []
    """Copies of the step that is being looked at, whose base is still to be adopted."""

    def place_copies() -> None:
        acts.extend(copy for copy in now if held.is_base_of(copy))
        now[:] = [copy for copy in now if not held.is_base_of(copy)]

    for entry in entries:
        if now and now[0].t < entry.t:
            acts.extend(now)
            now.clear()
        while waiting and waiting[0].t <= entry.t:
            (now if waiting[0].t == entry.t else acts).append(waiting.popleft())
        place_copies()
        held.take(entry)
        acts.append(entry)
        place_copies()
    return [*acts, *now, *waiting]


def _with_feedback(acts: list[RecordedAction]) -> list[RecordedAction]:
    """Every copy with the round whose rest went with it."""
    last: dict[int, RecordedCopy] = {}
    found: list[RecordedAction] = []
    for act in acts:
        if isinstance(act, ForgotEntry):
            last.clear()
        elif isinstance(act, RecordedCopy):
            before = last.get(act.fragment)
            if before is not None and before.rollbacks == act.rollbacks:
                act = msgspec.structs.replace(act, feedback=before.round)
            last[act.fragment] = act
        found.append(act)
    return found


def _without_lost(acts: list[RecordedAction]) -> list[RecordedAction]:
    """Copies whose feedback cannot be made again say so: what they left out themselves is lost as well."""
    known, found = {ALONE}, list[RecordedAction]()
    for act in acts:
        if isinstance(act, RecordedCopy):
            if act.feedback in known:
                known.add(act.round)
            else:
                act = msgspec.structs.replace(act, feedback=LOST)
        found.append(act)
    return found


class ModelVersions:
    """The versions in a model, by fragment."""

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}
        self._others = -1

    def take(self, entry: AnyEntry) -> None:
        if isinstance(entry, AdoptedEntry):
            self._versions[entry.fragment] = entry.version
        elif isinstance(entry, ForgotEntry | OwnedEntry):
            self._versions.clear()
            self._others = 0 if isinstance(entry, OwnedEntry) else -1

    def is_base_of(self, copy: RecordedCopy) -> bool:
        return self._versions.get(copy.fragment, self._others) == copy.base
