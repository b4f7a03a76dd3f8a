"""Scores and rollbacks: a bad validation loss raises an alarm, or takes the run back to a good round (guard.py).

A rollback: no round begins any more; one that is being merged is committed, the others are abandoned → the values and
outer state of the good round are read from the store → they are committed for all fragments at once, as one version
more than the run had, with one record; what was merged in between is undone. Learners take the new versions in place of
their own values, and contribute nothing before that.

Rules kept here, each with its test:
- only a score of this run's rounds counts;
- a run that ends, or that has no good round to go back to, is not rolled back, and the alarm says why;
- suspects are in quarantine from then on.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

from atoll.protocol import guard
from atoll.protocol.records import AnyRecord, MergedRecord, RestoredRecord, ScoredRecord, Undone
from atoll.protocol.statistics import format_score
from atoll.protocol.syncer.contributions import Strikes
from atoll.protocol.syncer.effects import CommitRestored, Restorable, Restore
from atoll.protocol.syncer.rounds import Rounds
from atoll.protocol.syncer.state import SyncerState

REASON = "the run is rolled back"
ROLL_BACK = "guard=rollback"
"""The change of settings that answers an alarm; whoever shows the alarm knows which run `atoll set` is to name."""


def undone(lines: Iterable[AnyRecord], since: int, fragments: int) -> tuple[Undone, ...]:
    """Per incarnation, what these records merged from round `since` on and did not roll back themselves."""
    merged: list[MergedRecord] = []
    for line in lines:
        if isinstance(line, MergedRecord) and line.round >= since:
            merged.append(line)
        elif isinstance(line, RestoredRecord):
            merged = [one for one in merged if one.round < line.round]
    tokens: dict[tuple[str, int], list[int]] = {}
    for one in merged:
        for share in one.members:
            row = tokens.setdefault((share.learner, share.incarnation), [0] * fragments)
            row[one.fragment] += share.tokens - share.filtered
    return tuple(Undone(*who, tuple(row)) for who, row in sorted(tokens.items()))


class Rollback:
    def __init__(self, state: SyncerState, rounds: Rounds, strikes: Strikes) -> None:
        self.state, self.rounds, self.strikes = state, rounds, strikes
        self._to: int | None = None
        """The round to go back to, once that is decided."""
        self._asked = False
        """Values and outer state of then are asked for."""
        self._refused = ""
        """Why the store could not give them, until the alarm is over."""

    # ---- scores -------------------------------------------------------------------------------------------------

    def take_score(self, number: int, loss: float | None) -> None:
        before, committed = self.state.history.trend, self.state.committed
        if self.state.settings.guard == "off" or self.state.phase != "running" or self._to is not None:
            return
        if not guard.counts(before, number, committed):
            return
        loss = loss if loss is not None and isfinite(loss) else None
        self.state.out.persist(ScoredRecord(number, loss))
        trend = self.state.history.trend
        if trend.bad > before.bad and self.state.settings.guard == "rollback" and not self._refused:
            self._to = guard.target(trend, committed)
        if trend.alarmed and (not before.alarmed or self._to is not None):
            self._raise_alarm(number, loss)
        elif (before.alarmed or before.rolled_back) and not (trend.alarmed or trend.rolled_back):
            assert loss is not None, "a good score is finite"
            self._refused = ""
            self.state.out.note(
                "alarm", f"the validation loss is good again: {format_score(loss, 4)} at round {number}", over=True
            )

    def _raise_alarm(self, number: int, loss: float | None) -> None:
        trend = self.state.history.trend
        found = "not finite" if loss is None else format_score(loss, 4)
        best = (
            ""
            if trend.best is None
            else f", after {format_score(trend.best, 4)} at best (the limit is {format_score(trend.limit, 4)})"
        )
        text = f"the validation loss is {found} at round {number}{best}: {self._what_follows()}"
        self.state.out.note(
            "alarm",
            text,
            over=False,
            round=number,
            loss=loss,
            best=trend.best,
            good=trend.good,
            answer=ROLL_BACK if self._may_operator_roll_back() else "",
        )

    def _may_operator_roll_back(self) -> bool:
        """Whether it is the setting alone that keeps the run from a rollback."""
        trend, committed = self.state.history.trend, self.state.committed
        return self.state.settings.guard != "rollback" and guard.target(trend, committed) is not None

    def _what_follows(self) -> str:
        trend = self.state.history.trend
        if self._to is not None:
            return f"the run is rolled back to round {self._to}"
        if self._may_operator_roll_back():
            return "look for the cause, or let the run be rolled back"
        if trend.rolled_back:
            return f"it was rolled back to round {trend.good}, and no good score has come since: look for the cause"
        return "there is no earlier round with a good score to go back to: look for the cause"

    # ---- the way back -------------------------------------------------------------------------------------------

    @property
    def is_under_way(self) -> bool:
        return self._to is not None

    def begin_if_decided(self) -> bool:
        """Whether everything else waits for it."""
        if self._to is None:
            return False
        if self.state.phase != "running":
            self.give_up("the run ends")
            return False
        merging = self.state.is_merging()
        if not merging and not self._asked:
            self._asked = True
            self.rounds.abandon_rounds(REASON)
            self.state.out.add_effect(Restore(self._to, tuple(self.state.history.rolled_back)))
        return True

    def give_up(self, reason: str) -> None:
        """It stays as it is, and the alarm stands."""
        if self._to is not None:
            text = f"the validation loss is bad, but the run is not rolled back to round {self._to}: {reason}"
            self.state.out.note("alarm", text, over=False)
            self._to, self._asked, self._refused = None, False, reason

    def commit_rollback(self, now: float, ready: Restorable) -> None:
        if self._to is None or self.state.phase != "running":
            return
        at, versions = self.state.committed, tuple(version + 1 for version in self.state.versions)
        reason = f"the validation loss was good at round {self._to}, and is not any more"
        self._to, self._asked = None, False
        self.state.out.persist(
            RestoredRecord(ready.round, at, versions, ready.digests, ready.undone, reason),
            restored=True,
        )
        self.state.out.add_effect(CommitRestored(versions, at))
        self.state.members.least[:] = versions
        self._note_rollback(ready, at, versions)
        self.rounds.announce_restored(versions, ready.digests)
        for learner in [one for one in self.state.members.connected_learners() if one.suspect]:
            self.strikes.quarantine_learner(
                now, learner, "since the run is rolled back", "it is suspected of harm to the run"
            )

    def _note_rollback(self, ready: Restorable, at: int, versions: tuple[int, ...]) -> None:
        suspects = [one.name for one in self.state.members.connected_learners() if one.suspect]
        undone = sum(sum(one.tokens) for one in ready.undone)
        self.state.out.note(
            "restored",
            f"the run is as it was after round {ready.round}: what rounds {ready.round} to {at - 1} brought is gone",
            round=ready.round,
            committed=at,
            versions=list(versions),
            fragment_tokens=undone,
            suspects=suspects,
        )
