"""What learners say of their steps: reports and contributions, and whether they count.

A report moves the learner's counters. A contribution takes its seat in the round that asked for it; it is refused when
it breaks a rule (rules.py) or claims more than can be (scrutiny.py), and that is a strike (strikes.py).

Rules kept here, each with its test: nobody contributes who has not adopted a committed version of this run; a learner
whose contribution went into version v of a fragment contributes to it again only on a base ≥ v; the answer's own t,
steps, tokens and base are weighed, not the report's; what is not a channel's own, or claims more than can be, is merged
into nothing; no steps to give are no strike; what no learner says closes its channel.
"""

from __future__ import annotations

from atoll.protocol.accounts import Accounts
from atoll.protocol.attendance import Attendance
from atoll.protocol.bounds import MOST
from atoll.protocol.membership import Learner, Membership
from atoll.protocol.messages import Contribution, Progress, Refused
from atoll.protocol.outbox import Outbox
from atoll.protocol.peers import Peers
from atoll.protocol.phase import RunPhase
from atoll.protocol.round import Seat
from atoll.protocol.rounds import Rounds
from atoll.protocol.rules import against_the_rules, not_its_own, wrong_report
from atoll.protocol.sameness import SameBatches
from atoll.protocol.scrutiny import Scrutiny
from atoll.protocol.shares import ShareWatch
from atoll.protocol.strikes import Strikes
from atoll.protocol.watch import Watch


class Hearing:
    def __init__(
        self,
        run_phase: RunPhase,
        members: Membership,
        accounts: Accounts,
        rounds: Rounds,
        watch: Watch,
        peers: Peers,
        attendance: Attendance,
        strikes: Strikes,
        out: Outbox,
    ) -> None:
        self.run_phase, self.members, self.accounts, self.rounds = run_phase, members, accounts, rounds
        self.watch, self.peers, self.attendance, self.strikes, self.out = watch, peers, attendance, strikes, out
        self.scrutiny = Scrutiny(members, accounts)
        self.shares = ShareWatch(members, out)
        self.same_batches = SameBatches(members, out)

    # ---- reports ------------------------------------------------------------------------------------------------

    def report(self, now: float, learner: Learner, said: Progress) -> bool:
        """True: it moved counters and nothing else."""
        if said.incarnation > learner.incarnation:
            self.attendance.expel(learner, f"a report of incarnation {said.incarnation}, which has not begun")
            return False
        if not self._tape(learner, said) or said.incarnation != learner.incarnation:  # a tape also of the life before
            return False
        if (wrong := wrong_report(learner, said, self.rounds.versions)) is not None:
            self.attendance.expel(learner, wrong)
            return False
        if (beyond := self.scrutiny.report(now, learner, said)) is not None:
            self.strikes.strike(now, learner, f"report of {learner.name} refused", beyond, claim=True)
            return False
        begins_to_leave = said.leaving and not learner.leaving
        self.members.report(now, learner, said, self.rounds.furthest)
        self.accounts.reported(learner, said)
        if begins_to_leave:
            text = f"{learner.name} is leaving: it stopped at step {learner.t}, and its last steps are collected"
            self.out.note("leaving", text, learner, t=learner.t)
        if self.run_phase.phase == "running":
            self.shares.reported(learner)
            self.same_batches.reported(learner, said.inputs)
            self._compare(learner)
        if not said.seeking:
            self.peers.gave_up(learner)
        if learner.state == "joining" and self.run_phase.phase != "empty" and self._has_recovered(said):
            self._let_in(now, learner)
        same = not self.rounds.gathering.watch(now)
        self.rounds.gathering.stepped(learner)
        return same and learner.live and not learner.stopped

    def _compare(self, learner: Learner) -> None:
        """Tell of one whose tokens per step are far above the others', once, unless the operator allows it that."""
        allowed = learner.name in self.members.settings.weight_limits
        if allowed or learner.above or (text := self.scrutiny.above(learner)) is None:
            return
        learner.above = text
        limit = f"its weight is limited; `atoll set RUN weight_limit.{learner.name}=8` allows it more"
        self.out.note("above", f"{learner.name} has {text}: {limit}", learner, declared=learner.declared)

    def _has_recovered(self, said: Progress) -> bool:
        """It holds a committed version of every fragment, and waits for no peer's state."""
        return min(said.versions) >= 0 and not said.seeking

    def _let_in(self, now: float, learner: Learner) -> None:
        learner.state, learner.last_step_at, learner.recovered = "training", now, True
        text = f"{learner.name} took the run's parameters and may contribute"
        self.out.note("recovered", text, learner, seconds=round(now - learner.joined_at, 3))

    def _tape(self, learner: Learner, said: Progress | Contribution) -> bool:
        """Keep what it says of its tape for the next record. False: no learner says that, and it is gone."""
        if not 0 <= said.taped < MOST:
            self.attendance.expel(learner, f"its tape goes on at entry {said.taped}")
            return False
        missing = self.out.taping.heard(learner.name, learner.incarnation, said.taped, said.tape)
        if missing is not None:
            self.out.note("warning", f"{learner.name}: {missing}: the run cannot be replayed past there", learner)
        if self.out.taping.is_full(learner.name):
            self.attendance.expel(learner, "it said more of its tape than a learner keeps")
        return learner.connected

    # ---- contributions ------------------------------------------------------------------------------------------

    def contribution(self, now: float, learner: Learner, given: Contribution, refusal: str | None) -> None:
        """`refusal`: what screening its body found."""
        history = self.out.history
        if (foreign := not_its_own(learner, given, history.run, history.term)) is not None:
            self._turn_away(learner, given, foreign)
        elif not self._tape(learner, given):
            return
        elif given.probe:
            self.out.discard(learner.name, given.round, given.attempt)
            self.watch.answered(learner)
        elif self.rounds.has_given(learner, given.round, given.attempt):
            return  # said twice: once is what counts, and its body is still needed
        elif (seat := self.rounds.seat(learner, given.round, given.attempt)) is None:
            self.out.discard(learner.name, given.round, given.attempt)
        else:
            self._judge(now, learner, seat, given, refusal)

    def _judge(self, now: float, learner: Learner, seat: Seat, given: Contribution, refusal: str | None) -> None:
        """It was asked for: refused, nothing to give, or taken."""
        round_ = self.rounds.open[given.round]
        refusal = refusal or against_the_rules(learner, round_, given, self.rounds.versions[round_.fragment])
        claim = refusal is None and given.steps > 0
        refusal = refusal or (self.scrutiny.contribution(now, learner, given) if claim else None)
        if refusal is not None:
            self.rounds.leave_out(round_, seat, f"refused: {refusal}")
            what = f"contribution of {learner.name} to round {round_.t} refused"
            self.strikes.strike(now, learner, what, refusal, round=round_.t, claim=claim)
        elif given.steps == 0 or given.tokens == 0:
            self.rounds.nothing_from(round_, seat, "nothing to give: no steps since its last adoption")
        else:
            seat.give(given)
            round_.answered_at = now
            learner.answer_s.add(now - round_.frozen_at)
            learner.misses = learner.strikes = 0
            learner.helper = ""  # whatever it began with, its numbers are good

    def _turn_away(self, learner: Learner, given: Contribution, reason: str) -> None:
        """It is not this channel's to give: no numbers of its own are broken, so it is no strike."""
        if self.rounds.has_given(learner, given.round, given.attempt):
            return
        seat = self.rounds.seat(learner, given.round, given.attempt)
        self.out.discard(learner.name, given.round, given.attempt)
        if seat is not None:
            self.rounds.leave_out(self.rounds.open[given.round], seat, f"refused: {reason}")
        elif given.incarnation < learner.incarnation:
            return  # its life ended while the answer was on its way: nobody's mistake
        text = f"contribution of {learner.name} to round {given.round} refused: {reason}"
        self.out.note("refused", text, learner, round=given.round, reason=reason)
        self.out.send(learner.name, Refused(reason=text, final=False))
