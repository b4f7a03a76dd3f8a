"""Who comes and goes: a hello and its welcome, a connection that is lost, a learner that leaves or is thrown out.

Rules kept here, each with its test: a name belongs to the process that said hello last, and who may say it while
another lives is decided before (succession.py); one that knows what the disk did not keep begins another life; whoever
comes back is told again what it may not have heard; when a run is over, only those are let in that were part of it; who
has been away for too long is not counted on any more, and its data goes to others.
"""

from __future__ import annotations

from operator import gt

from atoll.protocol.accounts import Accounts
from atoll.protocol.beginning import Beginning
from atoll.protocol.clock import SYNCER
from atoll.protocol.effects import Expel
from atoll.protocol.membership import Learner, Membership
from atoll.protocol.messages import Drain, Ending, Finish, Hello, Refused, Welcome
from atoll.protocol.outbox import Outbox
from atoll.protocol.peers import Peers
from atoll.protocol.phase import RunPhase
from atoll.protocol.rounds import Rounds
from atoll.protocol.rules import wrong_hello
from atoll.protocol.settings import Settings


class Attendance:
    def __init__(
        self,
        settings: Settings,
        run_phase: RunPhase,
        members: Membership,
        accounts: Accounts,
        rounds: Rounds,
        peers: Peers,
        beginning: Beginning,
        out: Outbox,
    ) -> None:
        self.settings, self.run_phase, self.members, self.accounts = settings, run_phase, members, accounts
        self.rounds, self.peers, self.beginning, self.out = rounds, peers, beginning, out
        self.history = out.history

    # ---- coming -------------------------------------------------------------------------------------------------

    def greet(self, now: float, hello: Hello, token: str) -> None:
        before = self.members.learners.get(hello.learner)
        if self.run_phase.phase == "finished" and (before is None or before.session != hello.session):
            self.out.send(hello.learner, Refused(reason="the run is over", over=True))
            return
        if (wrong := wrong_hello(hello, self.history.run, self.settings.fragments)) is not None:
            self._turn_off(before, hello, wrong)
            return
        if before is not None:
            self._take_the_place_of(before, hello)
        learner, new = self.members.greet(now, hello, self.history.run)
        if new:
            self.accounts.open(learner)
        self.accounts.own(learner, token)
        if hello.run == self.history.run:
            self.out.hear(hello.clock)
        self.beginning.greeted(hello)
        self._welcome(learner)
        word = "joined" if new else "came back"
        text = f"{learner.name} {word} (incarnation {learner.incarnation})"
        known_as = hello.incarnation if hello.run == self.history.run else 0
        self.out.note("joined", text, learner, declared=learner.declared, known_as=known_as)
        self._tell_again(learner)

    def _turn_off(self, before: Learner | None, hello: Hello, wrong: str) -> None:
        """Nobody joins like this; whoever had the name has lost its channel, and may dial again."""
        if before is not None:
            self._disconnect(before, hello)
        self.out.note("refused", f"{hello.learner} was refused: {wrong}", before, reason=wrong)
        self.out.send(hello.learner, Refused(reason=wrong))
        self.out.add(Expel(hello.learner, wrong))

    def _disconnect(self, before: Learner, hello: Hello) -> None:
        if before.connected:
            same = before.session == hello.session
            self.lose(before, "lost", "it dialled again" if same else "another process took its name")

    def _take_the_place_of(self, before: Learner, hello: Hello) -> None:
        """Its connection is gone; so is its life where another process took its name, or the disk did not keep it."""
        self._disconnect(before, hello)
        if before.session != hello.session:
            self.close(before, "another process took its name")
        elif self._is_ahead(hello) or hello.incarnation > before.incarnation:
            text = f"{before.name} knows what the disk did not keep: it takes the run's parameters anew"
            self.out.note("warning", text, before)
            self.close(before, "it knew what the disk did not keep")

    def _is_ahead(self, hello: Hello) -> bool:
        """With durability = "cut" a crash of the machine may cost rounds that learners have heard of, and others may
        have taken their place: what it knows must have been there when each term began that it has not heard of."""
        found = [(rounds, versions) for term, rounds, versions in self.history.began if 0 < hello.term < term]
        heard = hello.clock.get(SYNCER, 0)
        return hello.run == self.history.run and (
            any(heard > rounds for rounds, _ in found)
            or any(map(gt, hello.versions, self.rounds.versions))
            or any(held > kept for _, versions in found for held, kept in zip(hello.versions, versions, strict=False))
        )

    def _welcome(self, learner: Learner) -> None:
        welcome = Welcome(
            run=self.history.run,
            incarnation=learner.incarnation,
            settings=self.settings,
            fingerprint=self.history.begun.fingerprint,
            versions=tuple(self.rounds.versions),
            gathering=self.rounds.aim,
            reset=learner.reset,
            upload=self.beginning.asks(learner),
            progress=self.history.progress,
            global_step=self.history.global_step,
            committed=self.rounds.committed,
            merged=learner.last_merged(),
            leases=self.accounts.held(learner),
            taped=self.history.lives[learner.name].taped,
            cuts=self.history.kept_cuts,
            session=learner.session,
            protocol=learner.protocol,
            least=tuple(self.members.least) if max(self.members.least) > 0 else (),
            index=self.history.index_of(learner.name),
            frozen=self.history.begun.frozen,
        )
        self.out.send(learner.name, welcome)

    def _tell_again(self, learner: Learner) -> None:
        """For all we know it did not hear it."""
        if self.run_phase.phase == "ending":
            self.out.send(learner.name, Ending(reason=self.run_phase.reason))
        elif self.run_phase.phase == "finished":
            self.out.send(learner.name, Finish(reason=self.run_phase.reason, versions=tuple(self.rounds.versions)))
        elif learner.draining:
            self.out.send(learner.name, Drain(reason=learner.draining))

    # ---- going --------------------------------------------------------------------------------------------------

    def ask_to_leave(self, learner: Learner, reason: str) -> None:
        learner.draining = self.members.asked_to_leave[learner.session] = reason
        self.out.send(learner.name, Drain(reason=reason))
        self.out.note("draining", f"{learner.name} is asked to leave: {reason}", learner)

    def lose(self, learner: Learner, kind: str, reason: str) -> None:
        """Its connection is gone; `kind`: "lost", and it may come back, or "left", which is for good."""
        unmerged = round(learner.unmerged_tokens())
        learner.state, learner.tokens = "gone", ()
        self.rounds.unseat(learner, reason)
        self.rounds.cuts.lose(learner)
        self.peers.lost(learner, reason)
        if kind == "left":
            self.members.asked_to_leave.pop(learner.session, None)
            self.close(learner, reason)
        known = {"t": learner.t, "tokens": learner.tokens_total, "busy_s": learner.busy_s, "reason": reason}
        self.out.note(kind, f"{learner.name} is gone: {reason}", learner, **known, unmerged_tokens=unmerged)
        if (heir := self.beginning.lost(learner)) is not None:
            self._welcome(heir)

    def hurry(self, now: float, wakes: list[float]) -> None:
        """A run without parameters waits for nobody who sends none."""
        if (heir := self.beginning.overdue(now, wakes)) is not None:
            self._welcome(heir)

    def expel(self, learner: Learner, reason: str) -> None:
        self.lose(learner, "lost", reason)
        self.out.add(Expel(learner.name, reason))

    def close(self, learner: Learner, reason: str) -> None:
        """This life is over for good."""
        self.accounts.close(learner, reason, self.rounds.under_way(learner))

    def abandon(self, now: float, wakes: list[float]) -> None:
        """Close the lives of those that have been away for too long."""
        for learner in [one for one in self.members.learners.values() if one.state == "gone" and not one.closed]:
            learner.last_heard = learner.last_heard or now
            until = learner.last_heard + self.settings.abandon_s
            if now >= until:
                self.close(learner, f"away for {self.settings.abandon_s:g} s")
            else:
                wakes.append(until)
