"""A run's state as a fold over its records: what a syncer knows again after a crash, and what a cut carries.

The living syncer applies every record at the moment it decides it, so its history is at any time what a reader of the
journal would arrive at. It does not grow with the run: one entry per learner, fragment and open lease.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from atoll.protocol import guard
from atoll.protocol.leases import DatasetSpec, Leases, LeasesState
from atoll.protocol.ledger import Ledger, LedgerState
from atoll.protocol.messages import TensorSpec
from atoll.protocol.phases import outer_again
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
from atoll.protocol.settings import Settings

TERMS = 32
"""So many terms back it is known what each began with …"""
ROLLBACKS = 32
"""… and so many times that the run was rolled back."""


class Life(msgspec.Struct, array_like=True):
    """What the records tell of one learner."""

    incarnation: int
    session: str
    t: int
    merged: list[tuple[int, int, int]]
    """Per fragment, the version its last contribution went into, the step and the tokens of it; −1 for none."""
    total: int = 0
    """Tokens of its present process, as far as contributions told."""
    before: int = 0
    """Tokens of its earlier processes."""
    open: bool = True
    taped: int = 0
    """Entries of its present process's tape that are written down."""
    steps_before: int = 0
    """Steps of its earlier processes."""
    rounds: int = 0
    """Contributions of all its incarnations that were merged."""


def number_learners(names: Iterable[str], learners: int) -> dict[str, int]:
    """A number for each name, in the order in which they first joined: the one that it ends in (learner-2, rack3-2)
    where the run was begun with so many learners and nobody has it; otherwise the lowest that is free. Who joins later
    changes nothing for those before."""
    numbers: dict[str, int] = {}
    taken: set[int] = set()
    lowest = 0
    for name in names:
        ending = re.search(r"-([0-9]{1,9})$", name)
        wanted = int(ending[1]) if ending else learners
        while lowest in taken:
            lowest += 1
        numbers[name] = wanted if wanted < learners and wanted not in taken else lowest
        taken.add(numbers[name])
    return numbers


class HistoryState(msgspec.Struct, array_like=True):
    """All of it, as a cut carries it."""

    begun: BegunRecord
    settings: Settings
    outer: dict[str, str | float | bool]
    term: int
    started: bool
    versions: list[int]
    committed: int
    lives: dict[str, Life]
    ledger: LedgerState
    leases: LeasesState | None
    cuts: list[int]
    ended: str
    finished: bool
    began: list[tuple[int, int, tuple[int, ...]]] = []
    progress: float = 0.0
    owners: dict[str, str] = {}
    step: float = 0.0
    global_step: int = 0
    trend: guard.Trend = guard.Trend()
    least: list[int] = []
    rolled_back: list[tuple[int, int]] = []
    good_cut: int = 0
    training_phase: int = 0
    cuts_from: int = 0
    merged_rounds: int = -1
    """−1 in cuts of earlier versions."""
    progress_from: float = 0.0

    def begin_run(self, run: str, at: str, *, term: int, succeeds: tuple[str, ...] = ()) -> HistoryState:
        """The state of a new run that begins with this one. It goes on, however this one ended, so its outer steps look
        ahead again (phases.py). `at`: where in this run that is; `succeeds`: the runs whose learners join it."""
        begun = msgspec.structs.replace(self.begun, run=run, parent=f"{self.begun.run} {at}", succeeds=succeeds)
        outer, ledger = outer_again(begun.outer, self.outer), self.ledger.begin_run()
        anew = {"begun": begun, "outer": outer, "ledger": ledger, "term": term}
        return msgspec.structs.replace(self, **anew, cuts=[], ended="", finished=False)


class History:
    def __init__(self, begun: BegunRecord, term: int = 1) -> None:
        fragments = begun.settings.fragments
        self.begun = begun
        self.settings, self.outer = begun.settings, dict(begun.outer)
        self.term = term
        self.started = False
        self.versions = [-1] * fragments
        self.committed = 0
        self.merged_rounds = 0
        """Committed rounds in which something was merged, also those of the runs that this one was begun from."""
        self.progress = 0.0
        """How much of its budget was spent with the last round; learners are told this and nothing newer …"""
        self.progress_from = 0.0
        """Share that was spent when the budget was last raised, if `progress = "added"`."""
        self.global_step = 0
        """… and with it the run's step in whole steps, which then was …"""
        self.step = 0.0
        """… this. Also the end of a run names it: it may be past the last round."""
        self.lives: dict[str, Life] = {}
        self._numbers: dict[str, int] = {}
        self.owners: dict[str, str] = {}
        """By which token each learner's name came; empty where no tokens are asked for."""
        self.ledger = Ledger(fragments)
        self.leases: Leases | None = None
        self.cuts: list[int] = []
        """Complete ones, the newest last; only a few are remembered."""
        self.ended = ""
        self.finished = False
        self.began: list[tuple[int, int, tuple[int, ...]]] = []
        """Terms, and the rounds and versions that each found; only those of late are remembered."""
        self.trend = guard.Trend()
        """What its scores say."""
        self.least = [-1] * fragments
        """Per fragment, the version that it was last rolled back with: who holds less contributes nothing."""
        self.rolled_back: list[tuple[int, int]] = []
        """From how many rounds to how many: cuts in between hold what was rolled back."""
        self.good_cut = 0
        """The newest cut that is no newer than the last good score."""
        self.training_phase = 0
        """Which phase of training the run is in (phases.py); 0: none has begun."""
        self.cuts_from = 0
        """Cuts are taken every `cut_every` rounds, counted from this one; 0 unless H has changed."""

    @property
    def run(self) -> str:
        return self.begun.run

    @property
    def schedule_progress(self) -> float:
        """Progress as learning rates see it, in [0, 1]."""
        start = self.progress_from
        return max(0.0, self.progress - start) / (1.0 - start) if start < 1.0 else 1.0

    @property
    def kept_cuts(self) -> tuple[int, ...]:
        """Those whose parts may still be asked for."""
        return tuple(self.cuts[-self.settings.keep_cuts :])

    @property
    def spared_cut(self) -> int:
        """An old cut that is not removed: the run may be rolled back to it, or its operator may want that; −1: none."""
        wanted = {"off": False, "alarm": self.trend.bad > 0, "rollback": True}
        return self.good_cut if wanted[self.settings.guard] else -1

    def index_of(self, learner: str) -> int:
        """Its number in the run. Counted anew only for a new name: every welcome asks, and names may be many."""
        if learner not in self._numbers:
            self._numbers = number_learners(self.lives, self.begun.settings.learners)
        return self._numbers[learner]

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.begun.tensors

    def apply(self, record: AnyRecord) -> None:
        match record:
            case BegunRecord():
                raise AssertionError("a run begins once")
            case TermRecord(term):
                self.term = term
                self.began = [*self.began[1 - TERMS :], (term, self.committed, tuple(self.versions))]
            case JoinedRecord():
                self._joined(record)
            case OwnedRecord(learner, token):
                self.owners[learner] = token
            case StartedRecord():
                self.started, self.versions = True, [0] * len(self.versions)
            case MergedRecord():
                self._merged(record)
            case PassedRecord():
                self._decided(record)
            case ScoredRecord(round, loss):
                self.trend = guard.scored(self.trend, round, loss)
                self._choose_good_cut()
            case RestoredRecord():
                self._restored(record)
            case ResetRecord() | LentRecord() | AlarmedRecord() | DrawnRecord() | TailRecord() | LossRecord():
                pass  # concerns the numbers alone, or a reader of the tape or of the books
            case PlayedRecord(tapes):
                for one in tapes:
                    if (life := self.lives.get(one.learner)) is not None:
                        life.taped = max(life.taped, one.first + len(one.entries))
            case SourcesRecord(datasets, epochs):
                self.leases = Leases([DatasetSpec(*dataset) for dataset in datasets], epochs)
            case GrantedRecord():
                assert self.leases is not None
                self.leases.granted(record)
            case GoneRecord():
                self._gone(record)
            case ChangedRecord(settings, outer, _, reopen, training_phase, progress):
                if settings.phases != self.settings.phases:  # of the new ones none has begun
                    self.training_phase = 0
                self._keep_steps_since_cut(settings)
                self._change_budget(settings, progress)
                self.settings, self.outer = settings, dict(outer)
                self.training_phase = training_phase or self.training_phase
                if reopen:
                    self.ended, self.finished = "", False
            case CutDoneRecord(cut):
                self.cuts = [*self.cuts, cut][-max(8, self.settings.keep_cuts) :]
                self._choose_good_cut()
            case EndedRecord(reason, final, step, progress):
                self.ended, self.finished, self.step = reason, final, max(self.step, step)
                self.progress = progress if progress >= 0.0 else self.progress

    def _keep_steps_since_cut(self, settings: Settings) -> None:
        """Where H changes, the rounds since the last cut count for as many as make the same learner steps now."""
        before = self.settings
        if settings.sync_every != before.sync_every and before.cut_every and settings.cut_every:
            since = (self.committed - self.cuts_from) % before.cut_every
            since = min(round(since * before.sync_every / settings.sync_every), settings.cut_every - 1)
            self.cuts_from = self.committed - since

    def _change_budget(self, settings: Settings, progress: float) -> None:
        """The same work is another share of another budget. Learners hear of it at once, before the next round."""
        before = self.settings
        if progress >= 0.0 and (settings.steps, settings.tokens) != (before.steps, before.tokens):
            self.progress = progress
            if settings.steps > before.steps or settings.tokens > before.tokens:
                self.progress_from = progress
        if not settings.restarts_progress:
            self.progress_from = 0.0

    def _joined(self, record: JoinedRecord) -> None:
        known = self.lives.get(record.learner)
        same = known is not None and known.session == record.session
        self.lives[record.learner] = Life(
            record.incarnation,
            record.session,
            record.t,
            [(-1, 0, 0)] * len(self.versions),
            total=known.total if known and same else 0,
            before=known.before if known and same else known.before + known.total if known else 0,
            taped=known.taped if known and same else 0,
            steps_before=known.steps_before + (0 if same else known.t) if known else 0,
            rounds=known.rounds if known else 0,
        )
        self.ledger.joined(record.learner, record.incarnation, record.origin)

    def _decided(self, record: MergedRecord | PassedRecord) -> None:
        self.committed, self.progress = record.round + 1, record.progress
        self.step, self.global_step = record.step, int(record.step)

    def _merged(self, record: MergedRecord) -> None:
        self._decided(record)
        self.merged_rounds += 1
        self.versions[record.fragment] = record.version
        for share in record.members:
            life = self.lives.get(share.learner)
            if life is not None:
                life.rounds += 1
            if life is not None and life.incarnation == share.incarnation:
                life.merged[record.fragment] = (record.version, share.t, share.tokens)
                life.t, life.total = max(life.t, share.t), max(life.total, share.total)
        self.ledger.merged(record)
        if self.leases is not None:
            self.leases.merged(record)

    def _restored(self, record: RestoredRecord) -> None:
        self.versions, self.least = list(record.versions), list(record.versions)
        self.rolled_back = [*self.rolled_back[1 - ROLLBACKS :], (record.round, record.at)]
        self.trend = guard.rolled_back(self.trend, record.round, record.at)
        self.ledger.roll_back(record.undone)

    def _choose_good_cut(self) -> None:
        good = (cut for cut in self.cuts if cut <= self.trend.good and not self.is_rolled_back(cut))
        self.good_cut = max(good, default=self.good_cut)

    def is_rolled_back(self, cut: int) -> bool:
        return any(start < cut <= end for start, end in self.rolled_back)

    def _gone(self, record: GoneRecord) -> None:
        life = self.lives.get(record.learner)
        if life is not None and life.incarnation == record.incarnation:
            life.open, life.t, life.total = False, record.t, max(life.total, record.total)
        self.ledger.closed(record)
        if self.leases is not None and record.again_from >= 0:
            self.leases.gone(record.learner, record.incarnation, record.again_from)

    # ---- as a cut carries it ------------------------------------------------------------------------------------

    def state(self) -> HistoryState:
        return HistoryState(
            self.begun,
            self.settings,
            dict(self.outer),
            self.term,
            self.started,
            list(self.versions),
            self.committed,
            {name: msgspec.structs.replace(life, merged=list(life.merged)) for name, life in self.lives.items()},
            self.ledger.state(),
            self.leases.state() if self.leases is not None else None,
            list(self.cuts),
            self.ended,
            self.finished,
            list(self.began),
            self.progress,
            dict(self.owners),
            self.step,
            self.global_step,
            self.trend,
            list(self.least),
            list(self.rolled_back),
            self.good_cut,
            self.training_phase,
            self.cuts_from,
            self.merged_rounds,
            self.progress_from,
        )

    @classmethod
    def restore(cls, state: HistoryState) -> History:
        history = cls(state.begun)
        history.settings, history.outer = state.settings, dict(state.outer)
        history.term, history.started = state.term, state.started
        history.versions, history.committed = list(state.versions), state.committed
        history.lives, history.cuts, history.ended = dict(state.lives), list(state.cuts), state.ended
        history.finished, history.began = state.finished, list(state.began)
        history.progress, history.progress_from = state.progress, state.progress_from
        history.owners = dict(state.owners)
        history.step, history.global_step = state.step, state.global_step
        history.trend, history.good_cut = state.trend, state.good_cut
        history.training_phase, history.cuts_from = state.training_phase, state.cuts_from
        known = state.merged_rounds >= 0
        history.merged_rounds = state.merged_rounds if known else sum(max(version, 0) for version in state.versions)
        history.least = list(state.least) or history.least
        history.rolled_back = list(state.rolled_back)
        history.ledger = Ledger.restore(state.ledger)
        history.leases = Leases.restore(state.leases) if state.leases is not None else None
        return history
