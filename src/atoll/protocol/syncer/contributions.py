"""Reports and contributions of learners: which of them count.

A report updates what the syncer knows of a learner. A contribution answers the round that asked for it. It is refused
if it breaks a rule (`against_the_rules`) or claims more than is possible (`Scrutiny`); a refusal is a strike
(`Strikes`).

Rules kept here, each with its test:
- a learner contributes only after it has adopted a committed version of this run;
- after a contribution went into version v of a fragment, the next one to that fragment needs a base ≥ v;
- the merge uses the contribution's own t, steps, tokens and base, not those of the last report;
- a contribution for another run, life or term than its connection's, or one that claims too much, is never merged;
- a contribution without steps is no strike;
- a message that no honest learner sends closes the connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import gt
from typing import NamedTuple

from atoll.protocol.limits import MAX_COUNTER
from atoll.protocol.messages import Contribution, Progress, Recover, Refused
from atoll.protocol.syncer.accounts import Accounts
from atoll.protocol.syncer.claims import KNOWN_STEPS, above_others, beyond_declared, beyond_rate, beyond_steps
from atoll.protocol.syncer.downloads import parameter_bytes
from atoll.protocol.syncer.joining import Joining
from atoll.protocol.syncer.learner_warnings import NotFiniteWatch, SameBatches, ShareWatch
from atoll.protocol.syncer.liveness import Liveness
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.peers import Peers
from atoll.protocol.syncer.rounds import Rounds
from atoll.protocol.syncer.state import Round, Seat, SyncerState


class Contributions:
    def __init__(
        self,
        state: SyncerState,
        accounts: Accounts,
        rounds: Rounds,
        liveness: Liveness,
        peers: Peers,
        joining: Joining,
        strikes: Strikes,
    ) -> None:
        self.state, self.accounts, self.rounds, self.liveness = state, accounts, rounds, liveness
        self.peers, self.joining, self.strikes = peers, joining, strikes
        self.scrutiny = Scrutiny(state, accounts)
        self.shares = ShareWatch(state)
        self.same_batches = SameBatches(state)

    # ---- reports ------------------------------------------------------------------------------------------------

    def hear_report(self, now: float, learner: KnownLearner, said: Progress) -> bool:
        """True: no round closes by it."""
        if said.incarnation > learner.incarnation:
            self.joining.expel_learner(learner, f"a report of incarnation {said.incarnation}, which has not begun")
            return False
        if not self._keep_tape(learner, said):  # also of the life before
            return False
        if said.incarnation != learner.incarnation:
            return False
        if (wrong := wrong_report(learner, said, self.state.versions)) is not None:
            self.joining.expel_learner(learner, wrong)
            return False
        if (beyond := self.scrutiny.check_report(now, learner, said)) is not None:
            self.strikes.add_strike(now, learner, f"report of {learner.name} refused", beyond, claim=True)
            return False
        begins_to_leave = said.leaving and not learner.leaving
        stepped = learner.live and not learner.stopped
        ready = self.rounds.closing.due_rounds_ready_for(learner)
        self.rounds.note_adoptions(learner, said.versions, said.t)
        self.state.members.take_report(now, learner, said, self.state.furthest_round)
        self.accounts.book_report(learner, said)
        if learner.state == "joining" and self.state.phase != "empty":
            self._note_download(now, learner, said.lacking_bytes)
        self.joining.returns.note_report(learner, said)
        if begins_to_leave:
            text = f"{learner.name} is leaving: it stopped at step {learner.t}, and its last steps are collected"
            self.state.out.note("leaving", text, learner, t=learner.t)
        if self.state.phase == "running":
            self.shares.note_report(now, learner)
            self.same_batches.note_batch(learner, said.inputs)
            self._compare_tokens(learner)
        if not said.seeking:
            self.peers.note_gave_up(learner)
        recovered = learner.state == "joining" and self.state.phase != "empty" and self._has_recovered(said)
        if recovered and self.strikes.may_return(now, learner):
            self._mark_recovered(now, learner)
        steps = learner.live and not learner.stopped
        if steps != stepped:
            self.rounds.closing.follow_members(now)
        self.rounds.closing.count_steps(now, learner)
        trains = learner.state == "training" and not learner.stalled and not learner.stopped
        return steps == stepped and trains and self.rounds.closing.note_ready(learner, ready)

    def _note_download(self, now: float, learner: KnownLearner, lacking: int) -> None:
        download = learner.download
        if not lacking and not download.whole:
            return  # it has fetched nothing yet, or cannot tell
        download.note_lacking(now, lacking, parameter_bytes(self.state.history.begun.tensors))
        if download.is_news(now):
            text = f"{learner.name} fetches the run's parameters: {download.describe()}"
            figures = {"lacking_bytes": download.lacking, "whole_bytes": download.whole, "left_s": download.left_s}
            self.state.out.note("fetching", text, learner, **figures)

    def _compare_tokens(self, learner: KnownLearner) -> None:
        """Tell of one whose tokens per step are far above the others', once, unless the operator allows it that."""
        allowed = learner.name in self.state.settings.weight_limits
        if allowed or learner.above or (text := self.scrutiny.find_above(learner)) is None:
            return
        learner.above = text
        limit = f"its weight is limited; `atoll set RUN weight_limit.{learner.name}=8` allows it more"
        self.state.out.note("above", f"{learner.name} has {text}: {limit}", learner, declared=learner.declared)

    def _has_recovered(self, said: Progress) -> bool:
        """It holds a committed version of every fragment, and waits for no peer's state."""
        return min(said.versions) >= 0 and not said.seeking

    def _mark_recovered(self, now: float, learner: KnownLearner) -> None:
        learner.state, learner.last_step_at, learner.recovered = "training", now, True
        self.state.members.update_medians(learner)
        text = f"{learner.name} took the run's parameters and may contribute"
        figures = {"seconds": round(now - learner.joined_at, 3), "busy_before": learner.busy_before}
        self.state.out.note("recovered", text, learner, **figures)

    def _keep_tape(self, learner: KnownLearner, said: Progress | Contribution) -> bool:
        """Keep what it says of its tape for the next record. False: no learner says that, and it is gone."""
        if not 0 <= said.taped < MAX_COUNTER:
            self.joining.expel_learner(learner, f"its tape goes on at entry {said.taped}")
            return False
        missing = self.state.out.taping.add_entries(learner.name, learner.incarnation, said.taped, said.tape)
        if missing is not None:
            self.state.out.note("warning", f"{learner.name}: {missing}: the run cannot be replayed past there", learner)
        if self.state.out.taping.is_full(learner.name):
            self.joining.expel_learner(learner, "it said more of its tape than a learner keeps")
        return learner.connected

    # ---- contributions ------------------------------------------------------------------------------------------

    def hear_contribution(self, now: float, learner: KnownLearner, given: Contribution, refusal: str | None) -> None:
        """`refusal`: what screening its body found."""
        history = self.state.history
        if (foreign := meant_for_another(learner, given, history.run, history.term)) is not None:
            self._refuse_foreign(learner, given, foreign)
        elif not self._keep_tape(learner, given):
            return
        elif given.probe:
            self.state.out.discard(learner.name, given.round, given.attempt)
            self.liveness.note_answer(learner)
        elif self.rounds.has_given(learner, given.round, given.attempt):
            return  # said twice: once is what counts, and its body is still needed
        elif (seat := self.rounds.find_seat(learner, given.round, given.attempt)) is None:
            self.state.out.discard(learner.name, given.round, given.attempt)
        else:
            self._judge_contribution(now, learner, seat, given, refusal)

    def _judge_contribution(
        self, now: float, learner: KnownLearner, seat: Seat, given: Contribution, refusal: str | None
    ) -> None:
        """It was asked for: refused, nothing to give, or taken."""
        round_ = self.state.open_rounds[given.round]
        refusal = refusal or against_the_rules(learner, round_, given, self.state.versions[round_.fragment])
        claim = refusal is None and given.steps > 0
        refusal = refusal or (self.scrutiny.check_contribution(now, learner, given) if claim else None)
        if refusal is not None:
            self.rounds.leave_out(round_, seat, f"refused: {refusal}")
            what = f"contribution of {learner.name} to round {round_.number} refused"
            self.strikes.add_strike(now, learner, what, refusal, round=round_.number, claim=claim)
        elif given.steps == 0 or given.tokens == 0:
            self.rounds.note_nothing_to_give(round_, seat, "nothing to give: no steps since its last adoption")
        else:
            round_.take_answer(seat, given)
            round_.answered_at = now
            learner.answer_s.add(now - seat.asked_at)
            self.state.members.update_medians(learner)
            learner.misses = learner.strikes = 0
            self.strikes.not_finite.note_accepted(learner)
            learner.helper = ""  # whatever it began with, its numbers are good

    def _refuse_foreign(self, learner: KnownLearner, given: Contribution, reason: str) -> None:
        """It belongs to another run, life or term: refused, no strike."""
        if self.rounds.has_given(learner, given.round, given.attempt):
            return
        seat = self.rounds.find_seat(learner, given.round, given.attempt)
        self.state.out.discard(learner.name, given.round, given.attempt)
        if seat is not None:
            self.rounds.leave_out(self.state.open_rounds[given.round], seat, f"refused: {reason}")
        elif given.incarnation < learner.incarnation:
            return  # its life ended while the answer was on its way: nobody's mistake
        text = f"contribution of {learner.name} to round {given.round} refused: {reason}"
        self.state.out.note("refused", text, learner, round=given.round, reason=reason)
        self.state.out.send(learner.name, Refused(reason=text, final=False))


# What a learner's report or contribution must keep to; each function says what is wrong with it, or None. A hello is
# checked by `wrong_hello` (joining.py).


def wrong_report(learner: KnownLearner, report: Progress, versions: Sequence[int]) -> str | None:
    """An honest learner never sends such a report: its channel is closed."""
    fragments = len(versions)
    rows = (report.steps, report.tokens, report.versions, report.dropped, report.counted)
    if {*map(len, rows)} != {fragments}:
        return f"a report of {len(report.steps)} fragments in a run of {fragments}"
    if report.missed and (len(report.missed) != fragments or any(map(gt, report.missed, report.dropped))):
        return "a report in which more was missed than dropped"
    counted = (report.steps, report.tokens, report.dropped, report.missed or (0,), (report.t, report.tokens_total))
    places = (report.versions, report.counted, (report.offer, report.aims, report.position))
    if min(map(min, counted)) < 0 or min(map(min, places)) < -1:
        return "a report with counters below zero"
    if max(map(max, counted)) >= MAX_COUNTER or max(map(max, places)) >= MAX_COUNTER:
        return "a report with counters that no run reaches"
    if report.t < learner.t or report.tokens_total < learner.tokens_total:
        return f"its counters went back: step {report.t} after step {learner.t}"
    if learner.stopped and not report.stopped:
        return "its training loop had ended, and it makes steps again"
    if any(map(gt, report.versions, versions)):
        return "a report of versions that this run never committed"
    return None


def meant_for_another(learner: KnownLearner, given: Contribution, run: str, term: int) -> str | None:
    """Whether a contribution was meant for another run, life or term than that of its connection.

    The welcome names the term, so an honest answer carries it.
    """
    said, own = (given.run, given.learner, given.incarnation), (run, learner.name, learner.incarnation)
    if said != own:
        return f"it is of {_life(*said)}, this channel of {_life(*own)}"
    return f"it is of term {given.term}, the run is in term {term}" if given.term != term else None


def _life(run: str, learner: str, incarnation: int) -> str:
    return f"{learner or 'nobody'} (incarnation {incarnation}) in run {run or 'none'}"


def against_the_rules(learner: KnownLearner, round_: Round, given: Contribution, newest: int) -> str | None:
    """Why a contribution may not be merged."""
    merged, least = learner.merged[round_.fragment], learner.least_base(round_.fragment)
    if given.fragment != round_.fragment:
        return f"it is fragment {given.fragment}, the round takes {round_.fragment}"
    if not 0 <= given.base <= newest:
        return f"its base is version {given.base}, which this run never committed"
    if given.base < merged:
        return f"its base is version {given.base}, but version {merged} already contains its steps"
    if given.base < least:
        return f"its base is version {given.base}, but the run was rolled back with version {least}"
    if min(given.t, given.steps, given.tokens, given.total, given.position + 1) < 0:
        counters = f"{given.steps} steps, {given.tokens} tokens of {given.total}, step {given.t}"
        return f"its counters are below zero: {counters}, position {given.position}"
    if max(given.t, given.steps, given.tokens, given.total, given.position) >= MAX_COUNTER:
        return "its counters are such as no run reaches"
    if given.tokens > given.total:
        return f"it names {given.tokens} tokens, its process has had {given.total} in all"
    return None


class Scrutiny:
    """Whether a learner is believed: its reports and contributions held against what the syncer knows (claims.py)."""

    def __init__(self, state: SyncerState, accounts: Accounts) -> None:
        self.state, self._accounts = state, accounts

    def check_report(self, now: float, learner: KnownLearner, said: Progress) -> str | None:
        """What it claims beyond what it can have, in one line."""
        if (wrong := self._accounts.beyond_lease(learner, said.position, learner.position)) is not None:
            return wrong
        return self._beyond_rate(now, learner, said.t, said.tokens_total)

    def check_contribution(self, now: float, learner: KnownLearner, given: Contribution) -> str | None:
        """Its copy may be older than the last report, or newer."""
        before = learner.position if given.t >= learner.t else -1
        wrong = self._accounts.beyond_lease(learner, given.position, before)
        wrong = wrong or self._beyond_rate(now, learner, given.t, given.total)
        wrong = wrong or self._accounts.beyond_ledger(learner, given)
        wrong = wrong or beyond_declared(given.steps, given.tokens, learner.declared)
        if wrong is not None:
            return wrong
        wrong = beyond_steps(given.steps, given.tokens, learner.usual, lambda: self.state.members.per_step(learner))
        alone = self.state.members.per_step(learner) is None  # then there is no one to weigh it against
        return None if alone else wrong

    def find_above(self, learner: KnownLearner) -> str | None:
        """Whether its steps have far more tokens than the others'; looked at every `KNOWN_STEPS` of its steps."""
        if not learner.usual.known or learner.t < learner.compared_at:
            return None
        learner.compared_at = learner.t + KNOWN_STEPS
        return above_others(learner.usual.per_step, self.state.members.per_step(learner, least=2))

    def _beyond_rate(self, now: float, learner: KnownLearner, t: int, total: int) -> str | None:
        usual = learner.usual
        if usual.began_at is not None:
            wrong = beyond_declared(t - usual.t, total - usual.total, learner.declared)
            if wrong is not None:
                return wrong
        return beyond_rate(now, t, total, learner.usual, lambda: self.state.members.per_step(learner))


SHUT_OUT_S, LONGEST_S = 10.0, 3600.0
"""Seconds that a name's second quarantine keeps it out of the rounds, and the most that any does."""
FORGIVEN_S = 3600.0
"""Seconds after which a quarantine no longer counts, from when the name might take part again."""


class ShutOut(NamedTuple):
    """Quarantines of one name."""

    times: int
    wait_s: float
    until: float


class Strikes:
    """What a refusal costs a learner: its numbers are broken, or not to be believed.

    Rules kept here, each with its test: three refusals (contributions, reports, states given to newcomers) since the
    last accepted contribution send a learner into recovery, as a new life that takes the run's parameters and another
    inner optimizer; meanwhile it is in quarantine: no round waits for it, it helps nobody. The peer whose state
    a newcomer refused, or went into quarantine with, gets a strike too, and is not chosen for that process again
    (forgotten when either that process or the syncer restarts).

    The second quarantine of a name within `FORGIVEN_S` also shuts it out of the rounds for `SHUT_OUT_S`, and each
    further one for twice as long: a name that recovers only to give broken numbers again costs the others less each
    time. Nobody is shut out while no other learner is live, since the run would stand still.
    """

    def __init__(self, state: SyncerState, accounts: Accounts, rounds: Rounds, peers: Peers, joining: Joining) -> None:
        self.state, self.accounts, self.rounds = state, accounts, rounds
        self.peers, self.joining = peers, joining
        self.not_finite = NotFiniteWatch(state)
        self.shut_out: dict[str, ShutOut] = {}
        """Names that were quarantined of late. In memory: a new term forgives."""

    def may_return(self, now: float, learner: KnownLearner) -> bool:
        """Return whether rounds may take from this name again, as far as its quarantines go."""
        known = self.shut_out.get(learner.name)
        return known is None or now >= known.until or not any(self.state.members.live_learners())

    def _shut_out(self, now: float, name: str) -> ShutOut:
        """Count one more quarantine of this name."""
        self.shut_out = {one: known for one, known in self.shut_out.items() if now < known.until + FORGIVEN_S}
        times = self.shut_out[name].times + 1 if name in self.shut_out else 1
        wait_s = min(SHUT_OUT_S * 2.0 ** (times - 2), LONGEST_S) if times > 1 else 0.0
        self.shut_out[name] = ShutOut(times, wait_s, now + wait_s)
        return self.shut_out[name]

    def add_strike(self, now: float, learner: KnownLearner, what: str, reason: str, **data: object) -> None:
        """`what` was refused."""
        learner.strikes += 1
        self.state.out.note("refused", f"{what}: {reason}", learner, **data, reason=reason)
        if learner.strikes >= self.state.settings.strikes:
            self.quarantine_learner(
                now, learner, f"after {learner.strikes} refusals since its last accepted contribution", reason
            )

    def strike_helper(self, now: float, peer: KnownLearner, newcomer: KnownLearner, reason: str) -> None:
        """For the state that it gave the newcomer."""
        self.add_strike(now, peer, f"state of {peer.name} refused by {newcomer.name}", reason, newcomer=newcomer.name)

    def quarantine_learner(self, now: float, learner: KnownLearner, when: str, reason: str) -> None:
        known = self._shut_out(now, learner.name)
        again = f" ({known.times} times of late: no round takes from it for {known.wait_s:g} s)" if known.wait_s else ""
        text = f"{learner.name} is in quarantine {when}{again}; it recovers from the run"
        self.state.out.note("quarantined", text, learner, times=known.times, wait_s=known.wait_s, reason=reason)
        self.not_finite.note_quarantine(learner, reason)
        self.rounds.leave_learner_out(learner, "it is in quarantine")
        self.peers.stop_helping_and_seeking(learner, "it is in quarantine")
        self.joining.close_life(learner, f"its numbers are broken: {reason}")
        self.state.members.restart_learner(now, learner)
        self.accounts.open_life(learner)
        self.state.out.send(learner.name, Recover(incarnation=learner.incarnation, reason=f"{reason}{again}"))
        self._doubt_its_helper(now, learner, reason, breaks_alone=known.times > 1)

    def _doubt_its_helper(self, now: float, learner: KnownLearner, reason: str, *, breaks_alone: bool) -> None:
        """`breaks_alone`: it was in quarantine of late before it took that state too, so the words blame the learner.
        The peer gets its strike all the same: its next accepted contribution takes that away."""
        peer, learner.helper = self.state.members.learners.get(learner.helper), ""
        if peer is not None and peer.session not in learner.distrusted:
            learner.distrusted.add(peer.session)
            if not peer.connected or peer.closed:
                return
            why = "again, as before it took" if breaks_alone else "after it took"
            what = (
                f"{learner.name} went into quarantine {why} the state of {peer.name}: look at the script and data of "
                f"{learner.name} (a strike for {peer.name} all the same)"
            )
            self.add_strike(now, peer, what, reason, newcomer=learner.name)
