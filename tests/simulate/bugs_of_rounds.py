"""Planted bugs of the rounds: who may give what, when a round freezes, what becomes of it, how the run ends."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from tests.simulate.planting import Plain, always, mutant, nothing

from atoll.protocol.learner.versions import Versions
from atoll.protocol.leases import Leases
from atoll.protocol.messages import Contribution, Progress
from atoll.protocol.syncer import claims, closing, contributions
from atoll.protocol.syncer.closing import Pace, Verdict
from atoll.protocol.syncer.contributions import Contributions
from atoll.protocol.syncer.effects import Merge, Merged, Part
from atoll.protocol.syncer.ending import LastCycle
from atoll.protocol.syncer.joining import Joining
from atoll.protocol.syncer.liveness import Liveness
from atoll.protocol.syncer.membership import KnownLearner, Membership
from atoll.protocol.syncer.rounds import SILENT_BEATS, Rounds
from atoll.protocol.syncer.state import Round, Seat
from atoll.protocol.syncer.weights import weight

# ---- what may be merged -------------------------------------------------------------------------------------------


def _not_noted(plain: Plain) -> Any:
    def broken(self: Rounds, round_: Round, seat: Seat, version: int, judged: Any) -> Any:
        learner = self.state.members.learners[seat.learner]
        merged = list(learner.merged)
        told = plain(self, round_, seat, version, judged)
        learner.merged = merged
        return told

    return broken


mutant("the syncer does not note whose steps it merged", (Rounds, "_book_member", _not_noted))


def _any_base(plain: Plain) -> Any:
    def broken(learner: KnownLearner, round_: Round, given: Contribution, newest: int) -> str | None:
        merged, learner.merged = learner.merged, [-1] * learner.fragments
        try:
            wrong: str | None = plain(learner, round_, given, newest)
        finally:
            learner.merged = merged
        return wrong

    return broken


mutant(
    "a stale base is accepted",
    (contributions, "against_the_rules", _any_base),
    (KnownLearner, "may_give", lambda plain: lambda self, fragment: bool(self.versions)),
    (Versions, "owed_version", always(None)),
)


def _any_seat(plain: Plain) -> Any:
    def broken(self: Rounds, learner: KnownLearner, number: int, attempt: int) -> Seat | None:
        """An answer is an answer, whichever try it answers and whoever was asked."""
        round_ = self.state.open_rounds.get(number)
        seat = round_.seats.get(learner.name) if round_ else None
        return seat if seat is not None and seat.state == "asked" else None

    return broken


mutant("the answer to an earlier attempt is taken", (Rounds, "find_seat", _any_seat))


def _any_life(plain: Plain) -> Any:
    def broken(self: Contributions, now: float, learner: KnownLearner, progress: Progress) -> bool:
        return bool(plain(self, now, learner, replace(progress, incarnation=learner.incarnation)))

    return broken


mutant("a report of an earlier life counts", (Contributions, "hear_report", _any_life))


def _no_refusal(plain: Plain) -> Any:
    return lambda self, now, learner, given, refusal: plain(self, now, learner, given, None)


mutant("broken numbers are merged", (Contributions, "hear_contribution", _no_refusal))


def _two_of_a_fragment(plain: Plain) -> Any:
    def broken(self: Rounds, now: float) -> None:
        open_, self.state.open_rounds = self.state.open_rounds, {}
        plain(self, now)
        self.state.open_rounds = {**open_, **self.state.open_rounds}

    return broken


mutant("two rounds of a fragment are under way", (Rounds, "open_one", _two_of_a_fragment))

# ---- when a round freezes -----------------------------------------------------------------------------------------


def _one_less(plain: Plain) -> Any:
    return lambda *args: max(1, plain(*args) - 1)


def _grace_goes_on(plain: Plain) -> Any:
    def broken(now: float, *, ready: int, awaited: int, quorum: int, grace_ends: float | None) -> Verdict:
        """The window ends when it ends, also where everybody is there."""
        if grace_ends is not None and ready >= quorum and now < grace_ends:
            return Verdict(False, "grace window open", until=grace_ends)
        verdict: Verdict = plain(now, ready=ready, awaited=awaited, quorum=quorum, grace_ends=grace_ends)
        return verdict

    return broken


mutant("the quorum is one short", (closing.RoundClosing, "_current_quorum", _one_less))
mutant("the grace window is not closed when all are there", (closing, "judge", _grace_goes_on))
mutant(
    "a quorum that cannot be had is waited for",
    (closing, "lowered_quorum", lambda plain: lambda quorum, stepping: quorum),
)
mutant("there is no pace", (Pace, "is_due", always(True)))
mutant("a new term begins at step 0 of the run", (Pace, "go_on_from", nothing))
mutant("the run goes on past its steps", (Rounds, "steps_spent", always(False)))


def _follows_the_median(plain: Plain) -> Any:
    def broken(self: Pace, learner: str, *rest: Any) -> None:
        """The clock is where the learners are, also when that is further back."""
        plain(self, learner, *rest)
        self.clock = self._middle() if learner in self._anchors else self.clock

    return broken


def _keeps_its_place(plain: Plain) -> Any:
    def broken(self: Pace, steps: dict[str, int], now: float) -> None:
        """Whoever joins stands where its own count of steps says."""
        if steps.keys() != self._anchors.keys():
            self._anchored_at, self._anchors = 0.0, dict.fromkeys(steps, 0)
            self._places = {learner: float(t) for learner, t in steps.items()}
            self._sorted = sorted(self._places.values())

    return broken


mutant(
    "the run's step falls when learners change",
    (Pace, "move_learner", _follows_the_median),
    (Pace, "set_members", _keeps_its_place),
)


# ---- who is waited for --------------------------------------------------------------------------------------------


def _no_deadline(plain: Plain) -> Any:
    def broken(self: Rounds, now: float, round_: Round, wakes: list[float]) -> bool:
        for seat in round_.asked:
            seat.deadline = now + 1.0
        return bool(plain(self, now, round_, wakes))

    return broken


mutant("a pull has no deadline", (Rounds, "_collect_answers", _no_deadline))
mutant("a muted learner is never probed", (Liveness, "_probe_muted", nothing))
mutant(
    "a learner that makes no steps is waited for",
    (KnownLearner, "live", lambda plain: property(lambda self: self.state == "training" and not self.muted)),
)
mutant("a dead member keeps its seat", (Rounds, "leave_learner_out", nothing))
mutant("silence is not noticed", (Membership, "silence_limit", lambda plain: lambda self, one: one.last_heard + 1e6))

# ---- what becomes of a round --------------------------------------------------------------------------------------


def _version_of_round(plain: Plain) -> Any:
    def broken(self: Rounds, now: float, event: Merged) -> None:
        """The version is worked out from the round, which is right until one is passed over."""
        fragment = self.state.open_rounds[event.round].fragment
        self.state.versions[fragment] = event.round // self.state.settings.fragments
        plain(self, now, event)

    return broken


mutant("a version is skipped after a round was passed over", (Rounds, "commit_round", _version_of_round))


def _as_they_come(plain: Plain) -> Any:
    def broken(self: Rounds, now: float, round_: Round, wakes: list[float]) -> bool:
        moved = plain(self, now, round_, wakes)
        if round_.stage == "pulling" and not round_.asked and round_.given and round_.number in self.state.open_rounds:
            round_.stage = "merging"
            self._weigh_contributions(round_)
            parts = tuple(Part(seat.learner, round_.attempt, weight(seat.answer)) for seat in round_.given)
            self.state.out.add_effect(Merge(round_.number, round_.fragment, parts))
        return bool(moved)

    return broken


mutant("rounds are merged as they come, not in order", (Rounds, "_collect_answers", _as_they_come))


def _passed_at_once(plain: Plain) -> Any:
    def broken(self: Rounds, round_: Round, reason: str) -> None:
        committed, self.state.committed = self.state.committed, round_.number
        plain(self, round_, reason)
        self.state.committed = committed + 1

    return broken


mutant("a round is passed over before its turn", (Rounds, "_pass_over", _passed_at_once))


def _stays_open(plain: Plain) -> Any:
    def broken(self: Rounds, round_: Round, reason: str) -> None:
        plain(self, round_, reason)
        self.state.open_rounds[round_.number] = round_

    return broken


mutant("a round that was passed over keeps its place", (Rounds, "_pass_over", _stays_open))


def _skip_unwritten(plain: Plain) -> Any:
    def broken(self: Rounds) -> None:
        self.state.next_round += 1
        self._count_round()

    return broken


mutant("a skipped round is not written down", (Rounds, "skip_next", _skip_unwritten))

# ---- quarantine and the end ---------------------------------------------------------------------------------------


def _one_short(plain: Plain) -> Any:
    def broken(self: LastCycle, now: float, wakes: list[float]) -> bool:
        done = plain(self, now, wakes)
        if self._until is not None and self.state.next_round == self._until - 1 and not self.state.open_rounds:
            return True
        return bool(done)

    return broken


mutant("the last cycle leaves out a fragment", (LastCycle, "collect_next", _one_short))
mutant(
    "the run ends without a last cycle",
    (LastCycle, "collect_next", lambda plain: lambda self, now, wakes: not self.state.open_rounds),
)
mutant("the last cycle does not wait for those that train on", (LastCycle, "_waits_for_stops", always(False)))


def _all_alike(plain: Plain) -> Any:
    def broken(self: Rounds, now: float, round_: Round, wakes: list[float]) -> bool:
        found = False
        for seat in round_.asked:
            last = max(round_.frozen_at, self.state.members.learners[seat.learner].last_heard)
            silent_at = last + SILENT_BEATS * self.state.settings.heartbeat_s
            if now >= silent_at:
                self._note_miss(now, round_, seat, "says nothing any more", strike=True)
                found = True
            elif silent_at < seat.deadline:
                wakes.append(silent_at)
        return found

    return broken


mutant("a moment of silence costs the last steps", (Rounds, "_leave_out_silent", _all_alike))


# ---- drains -------------------------------------------------------------------------------------------------------


def _as_if_it_had_ended(plain: Plain) -> Any:
    def broken(self: Membership, now: float, learner: KnownLearner, progress: Progress, furthest: int) -> None:
        plain(self, now, learner, replace(progress, leaving=False), furthest)

    return broken


mutant("a run whose learners are drained is at its end", (Membership, "take_report", _as_if_it_had_ended))
mutant("last steps wait behind a round that has none", (closing.RoundClosing, "is_skipped", always(False)))
mutant("last steps wait for a pace that nobody sets", (closing.RoundClosing, "_is_paced", always(True)))


def _told_once(plain: Plain) -> Any:
    def broken(self: Joining, learner: KnownLearner) -> None:
        learner.draining = ""
        plain(self, learner)

    return broken


mutant("one that was cut off is not told again that it is to leave", (Joining, "_tell_again", _told_once))


# ---- what is believed ---------------------------------------------------------------------------------------------

mutant(
    "a claim is judged without the time and the slack that it has",
    (claims, "MAX_RATIO", lambda plain: 0.0),
    (claims, "beyond_steps", always("too much")),
)
mutant("what was leased is forgotten where it is judged", (Leases, "leased", always(0)))


def _keeps_its_place(plain: Plain) -> Any:
    def broken(self: Membership, now: float, learner: KnownLearner) -> None:
        place = learner.position
        plain(self, now, learner)
        learner.position = place

    return broken


mutant("a life is judged by the place that the one before had", (Membership, "restart_learner", _keeps_its_place))


def _of_the_term_before(plain: Plain) -> Any:
    def broken(learner: KnownLearner, given: Contribution, run: str, term: int) -> str | None:
        wrong: str | None = plain(learner, given, run, term - 1)
        return wrong

    return broken


mutant("only what is of the term before is taken", (contributions, "meant_for_another", _of_the_term_before))
