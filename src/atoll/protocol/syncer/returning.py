"""A learner that comes back after an absence: one event says what became of the steps that it made meanwhile.

What becomes of them, absence.py says. The event is told at the first report of the learner, or at its hello if its
life was closed. An absence shorter than `lost_after_s` is not told.

A contribution that holds the steps of a long absence is heavier than the others' and is limited (weights.py), so the
event names the share of its own weight that it will have, by the weights of the last round.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum

from atoll.protocol.absence import AbsenceOutcome, describe_outcome, find_outcome
from atoll.protocol.messages import Hello, Progress
from atoll.protocol.statistics import median
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.rounds import Rounds
from atoll.protocol.syncer.state import SyncerState
from atoll.protocol.syncer.weights import FEW, limit_of


@dataclass(frozen=True, slots=True)
class LastHeard:
    """State of a learner when it was last heard."""

    incarnation: int
    seconds: float
    t: int
    tokens: int
    dropped: tuple[int, ...]
    back_t: int
    """Its step when it was back, as its hello says."""


class Returns:
    def __init__(self, state: SyncerState, rounds: Rounds) -> None:
        self.state, self.rounds = state, rounds
        self._absent: dict[str, LastHeard] = {}
        """Absences of the learners that are back and have not reported yet."""

    def note_hello(self, now: float, before: KnownLearner | None, hello: Hello) -> tuple[float, int]:
        """Remember the absence before the learner's state is replaced; `before`: that state. Return its seconds, and
        the learner's step when it was last heard, for the learner's own log; zeros: there is nothing to tell."""
        self._absent.pop(hello.learner, None)
        if before is None or before.connected or before.session != hello.session or not before.last_heard:
            return 0.0, 0
        away_s = now - before.last_heard
        if before.closed and away_s >= self.state.settings.abandon_s:
            self._tell_given_up(before, hello, away_s)
        elif not before.closed and before.recovered and away_s >= self.state.settings.lost_after_s:
            self._absent[before.name] = LastHeard(
                before.incarnation, away_s, before.t, before.tokens_total, before.dropped, hello.t
            )
        else:
            return 0.0, 0
        return away_s, before.t

    def note_report(self, learner: KnownLearner, said: Progress) -> None:
        """Tell the outcome at the first report after an absence."""
        absence = self._absent.pop(learner.name, None)
        if absence is None or absence.incarnation != learner.incarnation or learner.state != "training":
            return
        found = self._outcome(learner, said, absence)
        share = self._weight_share(learner, said)
        text = f"{learner.name} is connected again after {absence.seconds:.1f} s. Of the {found.steps:,} steps that it "
        text += f"made meanwhile {describe_outcome(found, self.state.settings.adopt)}"
        if found.kept >= 0.5:
            text += f"; they get {100 * share:.0f} % of their weight in the next rounds"
            text += " (weight_limit)" if share < 1 else ""
        told = {
            "away_s": round(absence.seconds, 3),
            "t": said.t,
            "steps": found.steps,
            "merged": round(found.merged, 2),
            "kept": round(found.kept, 2),
            "dropped": round(found.dropped, 2),
            "weight_share": round(share, 4),
        }
        self.state.out.note("returned", text, learner, **told)

    def _outcome(self, learner: KnownLearner, said: Progress, absence: LastHeard) -> AbsenceOutcome:
        steps, tokens = max(0, absence.back_t - absence.t), said.tokens_total - absence.tokens
        behind = [held < newest for held, newest in zip(said.versions, self.state.versions, strict=True)]
        given = [learner.synced_t.get(fragment, 0) - absence.t for fragment in range(len(behind))]
        gone = zip(said.dropped, absence.dropped, strict=True) if absence.dropped and tokens > 0 else ()
        overwritten = [max(0, now - before) * (said.t - absence.t) / tokens for now, before in gone]
        return find_outcome(steps, given, behind, self.state.settings.adopt, overwritten)

    def _weight_share(self, learner: KnownLearner, said: Progress) -> float:
        """Return the share of its weight that the coming contributions have, by the others' weights of late.

        Its fragments come up during the coming cycle, so each contribution holds H/2 more steps on average.
        """
        others = [weight for name, weight in self.rounds.last_weights.items() if name != learner.name]
        more = self.state.settings.sync_every / 2
        counters = [(steps, tokens / steps) for steps, tokens in zip(said.steps, said.tokens, strict=True) if steps]
        own = [(steps + more) * per_step**2 for steps, per_step in counters]
        if len(others) < FEW or not own:
            return 1.0
        limit = limit_of(learner.name, learner.usual.steps, self.state.settings)
        most, usual = min(limit * median(others), fsum(others)), median(own)
        return 1.0 if usual <= most else most / usual  # steps without tokens weigh nothing

    def _tell_given_up(self, before: KnownLearner, hello: Hello, away_s: float) -> None:
        steps, settings = max(0, hello.t - before.t), self.state.settings
        leased = before.position >= 0 and self.state.history.leases is not None
        data = "its data was issued again" if leased else "its data is its own"
        text = (
            f"{before.name} is connected again after {away_s:.1f} s, longer than abandon_s = {settings.abandon_s:g}: "
            f"none of the {steps:,} steps that it made meanwhile counts, {data}, and it takes the run's parameters anew"
        )
        told = {"away_s": round(away_s, 3), "t": hello.t, "steps": steps, "merged": 0.0, "kept": 0.0}
        self.state.out.note("returned", text, before, **told, dropped=float(steps), weight_share=0.0)
