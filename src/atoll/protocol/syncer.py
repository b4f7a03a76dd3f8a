"""The syncer's rules, with no clock, no socket and no tensors: `handle(now, event) -> effects`.

A round's way: *gathering* until a quorum has made new steps, the pace allows it and the grace window is over (quorum.py,
pace.py, grace.py) → *pulling* its fragment from the frozen members, each until its deadline → *merging*, in order of t →
committed and announced to everyone connected. A round that loses its quorum gathers once more; after a second failure it
is passed over with the reason.

A run's way: *empty* (the first joiner is asked for version 0) → *running* → *ending* (budget spent or the operator asked:
learners stop, then one unpaced cycle of P rounds brings their last steps in) → *finished*.

Rules kept here, each with its test: rounds commit in order of t and versions go up by one; a learner whose contribution
went into version v of a fragment contributes to it again only on a base ≥ v; the answer's own t, steps, tokens and base
are weighed, not the report's; nobody contributes who has not adopted a committed version of this run; three refusals in a
row send a learner into recovery; one that misses two pulls is muted until a probe succeeds.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Literal

import msgspec

from atoll.protocol import schedule
from atoll.protocol.clock import SYNCER, Clock, merged
from atoll.protocol.effects import (
    Commit,
    Delivered,
    Discard,
    EndAsked,
    Expel,
    Finished,
    Greeted,
    Initialised,
    Lost,
    Merge,
    Merged,
    Note,
    Part,
    Received,
    Send,
    SyncerEffect,
    SyncerEvent,
    Unmergeable,
)
from atoll.protocol.grace import Estimates, grace_s
from atoll.protocol.membership import Learner, Membership
from atoll.protocol.messages import (
    Announce,
    Contribution,
    Decline,
    Ending,
    Finish,
    FromSyncer,
    Leave,
    Member,
    Progress,
    Pull,
    Recover,
    Refused,
    Started,
    Welcome,
)
from atoll.protocol.pace import Pace
from atoll.protocol.quorum import Verdict, effective_quorum, judge, judge_all
from atoll.protocol.rounds import Round, Seat
from atoll.protocol.settings import Settings

Phase = Literal["empty", "running", "ending", "finished"]
PROBE_EVERY_S = 2.0
RECENT = 512
"""Samples behind the live figure of effective H."""


class Syncer:
    def __init__(self, settings: Settings, *, run: str, fingerprint: str, term: int = 1) -> None:
        assert settings.fragments > 0, "settings must be resolved"
        assert settings.sync_every > 0, "settings must be resolved"
        self.settings = settings
        self.run, self.fingerprint, self.term = run, fingerprint, term
        self.phase: Phase = "empty"
        self.members = Membership(settings)
        self.versions = [-1] * settings.fragments
        self.rounds: dict[int, Round] = {}
        self.next_round = 0
        self.committed = 0
        """Rounds behind us, empty ones included: the syncer's t."""
        self.estimates = Estimates()
        self.pace = Pace(schedule.interval(settings))
        self.last_members: tuple[str, ...] = ()
        self.last_reason = ""
        self.wake_at: float | None = None
        self._clock: Clock = {SYNCER: 0}
        self._since: deque[int] = deque(maxlen=RECENT)
        self._uploader: str | None = None
        self._started_at = 0.0
        self._ending_at = 0.0
        self._end_reason = ""
        self._drained_from: int | None = None
        self._effects: list[SyncerEffect] = []

    # ---- the face ---------------------------------------------------------------------------------------------

    def handle(self, now: float, event: SyncerEvent) -> list[SyncerEffect]:
        self._effects = []
        match event:
            case Greeted():
                self._greet(now, event)
            case Received(name, message):
                if (learner := self._known(name)) is not None:
                    self._receive(now, learner, message)
            case Delivered(name, contribution, refusal):
                if (learner := self._known(name)) is not None:
                    learner.last_heard = now
                    self._contribute(now, learner, contribution, refusal)
            case Lost(name, reason):
                if (learner := self._known(name)) is not None:
                    self._lose(learner, "lost", reason)
            case Initialised(name):
                self._start(now, name)
            case Merged():
                self._commit(now, event)
            case Unmergeable(round, reason):
                self._fail(now, self.rounds[round], reason)
            case EndAsked(reason):
                self._end(now, reason)
        self._advance(now)
        return self._effects

    @property
    def progress(self) -> float:
        """How much of the run's budget is spent, in [0, 1]."""
        last = schedule.last_round(self.settings)
        by_steps = self.committed / last if last else 0.0
        by_tokens = self.members.tokens() / self.settings.tokens if self.settings.tokens else 0.0
        return min(1.0, max(by_steps, by_tokens))

    @property
    def uploader(self) -> str | None:
        """Who is asked for the first parameters."""
        return self._uploader

    @property
    def global_step(self) -> int:
        return schedule.global_step(self.committed, self.settings)

    @property
    def effective_h(self) -> float | None:
        """Median learner steps between two syncs of a fragment, of late."""
        return median(self._since) if self._since else None

    @property
    def grace_s(self) -> float:
        return grace_s(self.members.step_s(), self.estimates, self.settings)

    # ---- joining and leaving ----------------------------------------------------------------------------------

    def _greet(self, now: float, event: Greeted) -> None:
        hello = event.hello
        if self.phase == "finished":
            self._send(hello.learner, Refused(reason="the run is over", final=True))
            return
        before = self.members.learners.get(hello.learner)
        if before is not None and before.connected and before.session != hello.session:
            self._lose(before, "lost", "another process took its name")
        learner, new = self.members.greet(now, hello)
        self._clock = merged(self._clock, hello.clock)
        if self.phase == "empty" and self._uploader is None:
            self._uploader = hello.learner
        self._welcome(learner)
        word = "joined" if new else "came back"
        self._note("joined", f"{learner.name} {word} (incarnation {learner.incarnation})", learner)
        if self.phase == "ending":
            self._send(learner.name, Ending(reason=self._end_reason))

    def _welcome(self, learner: Learner) -> None:
        welcome = Welcome(
            run=self.run,
            term=self.term,
            incarnation=learner.incarnation,
            settings=self.settings,
            fingerprint=self.fingerprint,
            versions=tuple(self.versions),
            gathering=self._gathering,
            upload=self.phase == "empty" and self._uploader == learner.name,
            progress=self.progress,
            global_step=self.global_step,
        )
        self._send(learner.name, welcome)

    def _lose(self, learner: Learner, kind: str, reason: str) -> None:
        unmerged = round(learner.unmerged_tokens())
        learner.state = "gone"
        learner.tokens = ()
        for round_ in self.rounds.values():
            seat = round_.seats.get(learner.name)
            if seat is not None and seat.state == "asked":
                self._out(round_, seat, reason)
        data: dict[str, object] = {"t": learner.t, "tokens": learner.tokens_total, "busy_s": learner.busy_s, "unmerged_tokens": unmerged}
        self._note(kind, f"{learner.name} is gone: {reason}", learner, data)
        if self._uploader == learner.name and self.phase == "empty":
            self._ask_next_uploader()

    def _ask_next_uploader(self) -> None:
        """What the last one sent is discarded; the next joiner is asked."""
        heirs = self.members.connected()
        self._uploader = heirs[0].name if heirs else None
        if heirs:
            self._note("warning", f"{heirs[0].name} is asked for the first parameters instead", heirs[0])
            self._welcome(heirs[0])

    def _start(self, now: float, uploader: str) -> None:
        if self.phase != "empty" or uploader != self._uploader:
            return
        self.phase, self._started_at = "running", now
        self.versions = [0] * self.settings.fragments
        self._note("initial", f"{uploader} gave the first parameters")
        for learner in self.members.connected():
            self._send(learner.name, Started(uploader=uploader, gathering=self._gathering))

    def _receive(self, now: float, learner: Learner, message: object) -> None:
        learner.last_heard = now
        match message:
            case Progress():
                self._clock = merged(self._clock, message.clock)
                self._report(now, learner, message)
            case Decline(round=number, attempt=attempt, reason=reason):
                self._decline(learner, number, attempt, reason)
            case Leave(reason=reason):
                self._lose(learner, "left", reason)

    def _report(self, now: float, learner: Learner, progress: Progress) -> None:
        if len(progress.steps) != self.settings.fragments or len(progress.versions) != self.settings.fragments:
            self._expel(learner, f"a report of {len(progress.steps)} fragments in a run of {self.settings.fragments}")
            return
        self.members.report(now, learner, progress)
        if learner.state == "joining" and self.phase != "empty" and min(progress.versions) >= 0:
            learner.state, learner.last_step_at = "training", now
            text = f"{learner.name} took the run's parameters and may contribute"
            self._note("recovered", text, learner, {"seconds": round(now - learner.joined_at, 3)})
        self.pace.members({live.name: live.t for live in self.members.live()})
        self.pace.stepped(learner.name, progress.t)
        budget = self.settings.tokens
        if self.phase == "running" and budget and self.members.tokens() >= budget:
            self._end(now, f"the budget of {budget:,} tokens is spent")

    # ---- contributions ----------------------------------------------------------------------------------------

    def _contribute(self, now: float, learner: Learner, given: Contribution, refusal: str | None) -> None:
        if given.probe:
            self._discard(learner.name, given.round, given.attempt)
            self._answered(learner)
            return
        seat = self._seat(learner, given.round, given.attempt)
        if seat is None:
            self._discard(learner.name, given.round, given.attempt)
            return
        round_ = self.rounds[given.round]
        refusal = refusal or self._against_the_rules(learner, round_, given)
        if refusal is not None:
            self._refuse(now, learner, round_, seat, refusal)
        elif given.steps == 0 or given.tokens == 0:
            self._out(round_, seat, "nothing to give: no steps since its last adoption")
        else:
            seat.give(given)
            learner.misses = learner.strikes = 0

    def _against_the_rules(self, learner: Learner, round_: Round, given: Contribution) -> str | None:
        newest, least = self.versions[round_.fragment], learner.merged[round_.fragment]
        if given.fragment != round_.fragment:
            return f"it is fragment {given.fragment}, the round takes {round_.fragment}"
        if not 0 <= given.base <= newest:
            return f"its base is version {given.base}, which this run never committed"
        if given.base < least:
            return f"its base is version {given.base}, but version {least} already contains its steps"
        if given.steps < 0 or given.tokens < 0:
            return f"its counters are below zero: {given.steps} steps, {given.tokens} tokens"
        return None

    def _refuse(self, now: float, learner: Learner, round_: Round, seat: Seat, reason: str) -> None:
        self._out(round_, seat, f"refused: {reason}")
        learner.strikes += 1
        text = f"contribution of {learner.name} to round {round_.t} refused: {reason}"
        self._note("refused", text, learner, {"round": round_.t, "reason": reason})
        if learner.strikes >= self.settings.strikes:
            text = f"{learner.name} is in quarantine after {learner.strikes} refusals in a row; it recovers from the run"
            self._note("quarantined", text, learner)
            self.members.restart(now, learner)
            self._send(learner.name, Recover(incarnation=learner.incarnation, reason=reason))

    def _decline(self, learner: Learner, number: int, attempt: int, reason: str) -> None:
        seat = self._seat(learner, number, attempt)
        if seat is not None:
            self._out(self.rounds[number], seat, reason)

    def _seat(self, learner: Learner, number: int, attempt: int) -> Seat | None:
        """The seat an answer belongs to, if it is still waited for."""
        round_ = self.rounds.get(number)
        seat = round_.seats.get(learner.name) if round_ else None
        if round_ is None or seat is None or seat.state != "asked" or round_.attempt != attempt:
            return None
        return seat if seat.incarnation == learner.incarnation else None

    def _out(self, round_: Round, seat: Seat, reason: str) -> None:
        seat.leave(reason)
        self._discard(seat.learner, round_.t, round_.attempt)

    def _answered(self, learner: Learner) -> None:
        learner.misses = 0
        if learner.muted:
            learner.muted = False
            self._note("probed", f"{learner.name} answers again", learner)

    # ---- rounds -----------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Let everything happen that may happen now, then say when to look again."""
        wakes: list[float] = []
        self._watch(now, wakes)
        if self.phase in ("running", "ending"):
            while self._turn(now, wakes):
                wakes.clear()
                self._watch(now, wakes)
        self.wake_at = min((wake for wake in wakes if wake > now), default=None)

    def _turn(self, now: float, wakes: list[float]) -> bool:
        """One pass over the rounds; True when something moved and another pass may move more."""
        self._end_by_steps(now)
        if self.phase == "ending" and self._drain(now, wakes):
            return True
        self._open(now)
        moved = False
        for round_ in sorted(self.rounds.values(), key=lambda r: r.t):
            if round_.stage == "gathering":
                moved |= self._gather(now, round_, wakes)
            elif round_.stage == "pulling":
                moved |= self._collect(now, round_, wakes)
            elif round_.stage == "void" and round_.t == self.committed:
                self._pass_over(round_, round_.reason)
                moved = True
        return moved

    def _open(self, now: float) -> None:
        """The next round gathers while the others transfer."""
        last = schedule.last_round(self.settings)
        if self.phase != "running" or (last is not None and self.next_round >= last):
            return
        if any(round_.stage == "gathering" and round_.attempt == 1 for round_ in self.rounds.values()):
            return
        if self.settings.synchronous and not self._assembled(now):
            return
        self._new_round(now)

    def _new_round(self, now: float) -> None:
        fragment = schedule.fragment_of(self.next_round, self.settings)
        if any(round_.fragment == fragment for round_ in self.rounds.values()):
            return
        roster = frozenset(learner.name for learner in self.members.live())
        self.rounds[self.next_round] = Round(self.next_round, fragment, now, roster)
        self.next_round += 1

    def _assembled(self, now: float) -> bool:
        there = len(self.members.live())
        late = now >= self._started_at + self.settings.assemble_s
        return self.next_round > 0 or there >= self.settings.learners or (there > 0 and late)

    def _gather(self, now: float, round_: Round, wakes: list[float]) -> bool:
        ready = self._ready(round_)
        verdict = self._judge(now, round_, ready, wakes)
        if not verdict.close:
            if verdict.until is not None:
                wakes.append(verdict.until)
            return False
        under_way = sum(other.stage != "gathering" for other in self.rounds.values())
        if under_way >= schedule.flights(self.settings) and round_.attempt == 1:
            return False
        self._freeze(now, round_, ready, verdict.reason)
        return True

    def _ready(self, round_: Round) -> list[Learner]:
        live = self.members.live()
        if self.phase == "ending":
            return [one for one in live if one.stopped and self._has_more(one, round_.fragment)]
        if self.settings.synchronous:
            return [one for one in live if one.offer == round_.t or (round_.attempt > 1 and one.offer >= round_.t)]
        return [one for one in live if one.t > one.included_t]

    def _judge(self, now: float, round_: Round, ready: list[Learner], wakes: list[float]) -> Verdict:
        live = self.members.live()
        if self.phase == "ending":
            return Verdict(bool(ready), f"the last steps of {len(ready)} learners")
        if self.settings.synchronous:
            names = {one.name for one in ready}
            awaited = [one for one in live if one.name in round_.roster and one.name not in names and one.aims <= round_.t]
            return judge_all(ready=len(ready), awaited=len(awaited))
        quorum = self._quorum(now, round_, len(live), wakes)
        if len(ready) >= quorum and round_.quorum_at is None:
            round_.quorum_at = now
        if round_.due_at is None and (round_.attempt > 1 or self._in_turn(round_)):
            round_.due_at = now
        grace_ends = None
        if round_.quorum_at is not None and round_.due_at is not None:
            grace_ends = max(round_.quorum_at, round_.due_at) + self.grace_s
        return judge(now, ready=len(ready), live=len(live), quorum=quorum, grace_ends=grace_ends)

    def _in_turn(self, round_: Round) -> bool:
        earlier = any(other.t < round_.t and other.stage == "gathering" for other in self.rounds.values())
        return not earlier and self.pace.is_due()

    def _quorum(self, now: float, round_: Round, live: int, wakes: list[float]) -> int:
        if live >= self.settings.quorum:
            round_.short_since = None
            return self.settings.quorum
        if round_.short_since is None:
            round_.short_since = now
        wakes.append(round_.short_since + self.settings.patience_s)
        return effective_quorum(self.settings.quorum, live, now - round_.short_since, self.settings.patience_s)

    def _freeze(self, now: float, round_: Round, ready: list[Learner], reason: str) -> None:
        if round_.due_at is not None and round_.quorum_at is not None:
            self.estimates.quorum_s.add(max(0.0, round_.quorum_at - round_.due_at))
        round_.grace_s = max(0.0, now - max(round_.quorum_at or now, round_.due_at or now))
        round_.stage, round_.frozen_at, round_.reason = "pulling", now, reason
        round_.live = len(self.members.live())
        deadline_s = self.estimates.pull_deadline_s(self.settings)
        round_.deadline = now + deadline_s
        if round_.attempt == 1:
            self.pace.froze()
        for learner in ready:
            round_.seats[learner.name] = Seat(learner.name, learner.incarnation, learner.t, learner.included_t)
            learner.included_t = learner.t
        for name in round_.seats:
            pull = Pull(
                round=round_.t,
                attempt=round_.attempt,
                fragment=round_.fragment,
                gathering=self._gathering_after(round_),
                deadline_s=deadline_s,
            )
            self._send(name, pull)

    def _collect(self, now: float, round_: Round, wakes: list[float]) -> bool:
        """Wait for the members' answers; merge once it is this round's turn."""
        if now >= round_.deadline:
            for seat in round_.asked:
                self._miss(round_, seat)
        if round_.asked:
            wakes.append(round_.deadline)
            return False
        if len(round_.given) < self._least(round_):
            reasons = "; ".join(f"{seat.learner}: {seat.why_out}" for seat in round_.seats.values() if seat.why_out)
            self._fail(now, round_, f"{len(round_.given)} of {self._least(round_)} contributions came ({reasons})")
            return True
        if round_.t != self.committed:
            return False
        round_.stage = "merging"
        parts = tuple(Part(seat.learner, round_.attempt, _weight(seat)) for seat in round_.given)
        self._effects.append(Merge(round_.t, round_.fragment, parts))
        return False

    def _least(self, round_: Round) -> int:
        return max(1, min(self.settings.quorum, len(round_.seats))) if self.phase == "running" else 1

    def _miss(self, round_: Round, seat: Seat) -> None:
        self._out(round_, seat, "missed its deadline")
        learner = self.members.learners[seat.learner]
        if learner.incarnation != seat.incarnation or not learner.connected:
            return
        learner.misses += 1
        if learner.misses >= 2 and not learner.muted:
            learner.muted = True
            self._note("muted", f"{learner.name} reports but missed {learner.misses} pulls; it is probed from now on", learner)

    def _fail(self, now: float, round_: Round, reason: str) -> None:
        for seat in round_.seats.values():
            learner = self.members.learners[seat.learner]
            if learner.incarnation == seat.incarnation:
                learner.included_t = min(learner.included_t, seat.included_before)
            self._discard(seat.learner, round_.t, round_.attempt)
        if round_.attempt == 1 and self.phase == "running":
            round_.again(now)
            return
        self._pass_over(round_, reason)

    def _pass_over(self, round_: Round, reason: str) -> None:
        """Journaled as empty: nothing changes but t. A round is passed in its turn, so order holds."""
        round_.stage, round_.reason = "void", reason
        if round_.t != self.committed:
            return
        del self.rounds[round_.t]
        self.committed += 1
        self._clock[SYNCER] = self.committed
        data: dict[str, object] = {"round": round_.t, "fragment": round_.fragment}
        self._note("passed", f"round {round_.t} is passed over: {reason}", data=data)
        self._announce(round_, ())

    def _commit(self, now: float, event: Merged) -> None:
        round_ = self.rounds.pop(event.round)
        assert round_.t == self.committed, "rounds commit in order"
        self.committed += 1
        self._clock[SYNCER] = self.committed
        self.versions[round_.fragment] += 1
        version = self.versions[round_.fragment]
        self._effects.append(Commit(round_.t, round_.fragment, version))
        self.estimates.sync_s.add(now - round_.frozen_at)
        members = tuple(self._include(round_, seat, version) for seat in round_.given)
        self.last_members = tuple(str(member["learner"]) for member in members)
        self.last_reason = round_.reason
        data: dict[str, object] = {
            "round": round_.t,
            "fragment": round_.fragment,
            "version": version,
            "attempt": round_.attempt,
            "live": round_.live,
            "members": members,
            "gather_s": round(round_.frozen_at - round_.opened_at, 6),
            "sync_s": round(now - round_.frozen_at, 6),
            "merge_s": round(event.merge_s, 6),
            "grace_s": round(round_.grace_s, 6),
            "effective_h": self.effective_h,
        }
        self._note("round", f"round {round_.t}: fragment {round_.fragment} is version {version}; {round_.reason}", data=data)
        self._announce(round_, tuple(_member(seat) for seat in round_.given), event.digest)
        for seat in round_.given:
            self._discard(seat.learner, round_.t, round_.attempt)

    def _include(self, round_: Round, seat: Seat, version: int) -> dict[str, object]:
        """Book a member's contribution and tell about it."""
        given = seat.contribution
        assert given is not None
        learner = self.members.learners[seat.learner]
        since: int | None = None
        if learner.incarnation == seat.incarnation:
            learner.merged[round_.fragment] = version
            before = learner.synced_t.get(round_.fragment)
            since = None if before is None else given.t - before
            learner.synced_t[round_.fragment] = given.t
            if since is not None and self.phase == "running":
                self._since.append(since)
        return {
            "learner": seat.learner,
            "incarnation": seat.incarnation,
            "t": given.t,
            "steps": given.steps,
            "tokens": given.tokens,
            "weight": _weight(seat),
            "base": given.base,
            "since": since,
        }

    def _announce(self, round_: Round, members: tuple[Member, ...], digest: str = "") -> None:
        for learner in self.members.connected():
            announce = Announce(
                round=round_.t,
                fragment=round_.fragment,
                version=self.versions[round_.fragment],
                members=members,
                gathering=self._gathering,
                digest=digest,
                progress=self.progress,
                global_step=self.global_step,
            )
            self._send(learner.name, announce)

    # ---- the end ----------------------------------------------------------------------------------------------

    def _end_by_steps(self, now: float) -> None:
        last = schedule.last_round(self.settings)
        if self.phase == "running" and last is not None and self.committed >= last:
            self._end(now, f"{self.settings.steps:,} steps are done")

    def _end(self, now: float, reason: str) -> None:
        if self.phase == "empty":
            self._finish(reason)
        if self.phase != "running":
            return
        self.phase, self._ending_at, self._end_reason = "ending", now, reason
        self._note("ending", f"the run ends: {reason}; the last steps are collected")
        under_way = max((r.t for r in self.rounds.values() if r.stage != "gathering"), default=-1)
        for round_ in [r for r in self.rounds.values() if r.stage == "gathering"]:
            if round_.t > under_way:
                del self.rounds[round_.t]
            else:
                round_.stage, round_.reason = "void", "the run ends"
        self.next_round = max(self.rounds, default=self.committed - 1) + 1
        for learner in self.members.connected():
            self._send(learner.name, Ending(reason=reason))

    def _drain(self, now: float, wakes: list[float]) -> bool:
        """One unpaced cycle of P rounds once every live learner has stopped."""
        patience = self._ending_at + max(self.settings.patience_s, 4 * (self.members.step_s() or 0.0))
        waiting = any(not learner.stopped for learner in self.members.live())
        if self.rounds or (waiting and now < patience):
            wakes.append(patience)
            return False
        if self._drained_from is None:
            self._drained_from = self.next_round
        while self.next_round < self._drained_from + self.settings.fragments:
            fragment = schedule.fragment_of(self.next_round, self.settings)
            if any(one.stopped and self._has_more(one, fragment) for one in self.members.live()):
                self._new_round(now)
                return False
            if now < patience and self._owed(fragment):
                wakes.append(patience)
                return False
            self.next_round += 1
            self.committed += 1
        self._finish(self._end_reason)
        return False

    def _has_more(self, learner: Learner, fragment: int) -> bool:
        """Whether it has steps of this fragment that no version contains, on a base it may use."""
        steps = learner.steps[fragment] if learner.steps else 0
        return steps > 0 and learner.versions[fragment] >= learner.merged[fragment] and not learner.muted

    def _owed(self, fragment: int) -> bool:
        """Whether a learner has yet to adopt the version that holds its last contribution."""
        return any(one.versions[fragment] < one.merged[fragment] for one in self.members.live())

    def _finish(self, reason: str) -> None:
        self.phase = "finished"
        self._note("finishing", f"the run is over: {reason}")
        for learner in self.members.connected():
            self._send(learner.name, Finish(reason=reason, versions=tuple(self.versions)))
        self._effects.append(Finished(reason))

    # ---- watching ---------------------------------------------------------------------------------------------

    def _watch(self, now: float, wakes: list[float]) -> None:
        """Silence, stalls and probes."""
        for learner in self.members.connected():
            if now >= self.members.silence_limit(learner):
                self._expel(learner, f"nothing heard for {self.settings.lost_after_s:g} s")
                continue
            wakes.append(self.members.silence_limit(learner))
            if learner.state == "training":
                self._watch_steps(now, learner, wakes)
            if learner.muted:
                self._probe(now, learner, wakes)
        self.pace.members({live.name: live.t for live in self.members.live()})

    def _watch_steps(self, now: float, learner: Learner, wakes: list[float]) -> None:
        waits = learner.stopped or (self.settings.synchronous and learner.offer >= self.committed)
        limit = self.members.stall_limit(learner)
        stalled = not waits and now >= limit
        if stalled != learner.stalled:
            learner.stalled = stalled
            word = "makes no steps; it is not waited for" if stalled else "makes steps again"
            self._note("stalled" if stalled else "recovered_pace", f"{learner.name} {word}", learner)
        if not waits and not stalled:
            wakes.append(limit)

    def _probe(self, now: float, learner: Learner, wakes: list[float]) -> None:
        if now >= learner.probed_at + PROBE_EVERY_S:
            learner.probed_at = now
            number = self._gathering
            fragment = schedule.fragment_of(number, self.settings)
            pull = Pull(
                round=number,
                attempt=0,
                fragment=fragment,
                gathering=number,
                deadline_s=self.estimates.pull_deadline_s(self.settings),
                probe=True,
            )
            self._send(learner.name, pull)
        wakes.append(learner.probed_at + PROBE_EVERY_S)

    # ---- small things -----------------------------------------------------------------------------------------

    @property
    def _gathering(self) -> int:
        """The round that gathers now, or will next."""
        return min((r.t for r in self.rounds.values() if r.stage == "gathering" and r.attempt == 1), default=self.next_round)

    def _gathering_after(self, round_: Round) -> int:
        return max(round_.t + 1, self._gathering)

    def _known(self, name: str) -> Learner | None:
        learner = self.members.learners.get(name)
        return learner if learner is not None and learner.connected else None

    def _send(self, learner: str, message: FromSyncer) -> None:
        self._effects.append(Send(learner, _with_clock(message, self._clock)))

    def _discard(self, learner: str, number: int, attempt: int) -> None:
        self._effects.append(Discard(learner, number, attempt))

    def _expel(self, learner: Learner, reason: str) -> None:
        self._lose(learner, "lost", reason)
        self._effects.append(Expel(learner.name, reason))

    def _note(self, kind: str, text: str, learner: Learner | None = None, data: dict[str, object] | None = None) -> None:
        who: dict[str, object] = {"learner": learner.name, "incarnation": learner.incarnation} if learner else {}
        self._effects.append(Note(kind, text, {**who, **(data or {})}))


def _weight(seat: Seat) -> float:
    """Quantity × quality: w = tokens · (tokens / steps)."""
    assert seat.contribution is not None
    return seat.contribution.tokens * (seat.contribution.tokens / seat.contribution.steps)


def _member(seat: Seat) -> Member:
    assert seat.contribution is not None
    return Member(seat.learner, seat.incarnation, seat.contribution.t)


def _with_clock(message: FromSyncer, clock: Clock) -> FromSyncer:
    return msgspec.structs.replace(message, clock=dict(clock))
