"""The end of a run: when it comes, and what is said of it.

Rules kept here, each with its test: a run ends when its budget of steps or tokens is spent, when every learner has
stopped, or when the operator asks; first the last steps are collected (drain.py) and a last cut is taken (cut.py), then
it is finished. Both ends are durable before they are told. A term that finds a run ending lets the learners come back
first; one that finds it finished says so once more, unless its first event opens the run again. The last record of an
end says how much of the budget is spent: tokens that came after the last round are in no other record.
"""

from __future__ import annotations

from atoll.protocol.assembling import Assembling
from atoll.protocol.drain import Drain
from atoll.protocol.effects import Finished
from atoll.protocol.membership import Membership
from atoll.protocol.messages import Ending, Finish
from atoll.protocol.outbox import Outbox
from atoll.protocol.peers import Peers
from atoll.protocol.phase import RunPhase
from atoll.protocol.records import Ended
from atoll.protocol.rounds import Rounds
from atoll.protocol.settings import Settings


class End:
    def __init__(
        self,
        settings: Settings,
        run_phase: RunPhase,
        members: Membership,
        rounds: Rounds,
        peers: Peers,
        assembling: Assembling,
        out: Outbox,
    ) -> None:
        self.settings, self.run_phase, self.members, self.rounds = settings, run_phase, members, rounds
        self.peers, self.assembling, self.out, self.history = peers, assembling, out, out.history
        self.drain = Drain(settings, members, rounds)
        self._idle_since = 0.0
        """The last moment at which somebody made steps, or nobody was there."""
        self._was_over = run_phase.phase == "finished"
        """An earlier term came to the end and could not say so to everybody."""

    def turn(self, now: float, wakes: list[float]) -> None:
        """Begin to end, or go on with it, where it is time."""
        if self.run_phase.phase == "running" and (reason := self._reason(now, wakes)) is not None:
            self.begin(now, reason)
        if self.run_phase.phase == "ending" and self.drain.step(now, wakes) and self._took_last_cut(now, wakes):
            self._finish(self.run_phase.reason)

    def _took_last_cut(self, now: float, wakes: list[float]) -> bool:
        return self.rounds.cuts.end_with_one(now, self.rounds.committed, self.run_phase.reason, wakes)

    def _reason(self, now: float, wakes: list[float]) -> str | None:
        """Why the run is to end now, if it is."""
        if not self.assembling.may_end(now, wakes):
            return None
        if self.history.ended:
            return self.history.ended  # an earlier term had begun to
        if self.rounds.steps_spent():
            return f"{self.settings.steps:,} steps are done"
        if self.tokens_spent():
            return f"the budget of {self.settings.tokens:,} tokens is spent"
        return "every learner has stopped" if self._everyone_stopped(now, wakes) else None

    def tokens_spent(self) -> bool:
        return 0 < self.settings.tokens <= self.members.tokens()

    def budget_spent(self) -> bool:
        return self.rounds.steps_spent() or self.tokens_spent()

    def stepped(self, now: float) -> None:
        """Somebody makes steps."""
        self._idle_since = now

    def _everyone_stopped(self, now: float, wakes: list[float]) -> bool:
        """All the run was meant for; or those that are there, and nobody else has come for a while. Who was asked to
        leave has not come to an end: it may be back, or another in its place."""
        there = self.members.connected()
        if not there or not all(one.stopped and not one.leaving for one in there):
            self._idle_since = now
            return False
        wakes.append(self._idle_since + self.settings.assemble_s)
        seen = self.members.learners.values()
        stopped = sum(one.stopped and not one.leaving for one in seen)  # also those that have left since
        return stopped >= self.settings.learners or now >= self._idle_since + self.settings.assemble_s

    def begin(self, now: float, reason: str) -> None:
        """Learners are told to stop. A run without parameters has nothing to collect, and is over at once."""
        if self.run_phase.phase == "empty":
            self._finish(reason)
        if self.run_phase.phase != "running":
            return
        if not self.history.ended:
            self.out.persist(Ended(reason, step=self.rounds.step))
        self.run_phase.phase, self.run_phase.reason = "ending", reason
        self.out.note("ending", f"the run ends: {reason}; the last steps are collected")
        self.drain.begin(now)
        self.peers.end("the run ends")
        for learner in self.members.connected():
            self.out.send(learner.name, Ending(reason=reason))

    def _finish(self, reason: str) -> None:
        self.out.persist(Ended(reason, final=True, step=self.rounds.step, progress=self.rounds.spent()))
        self.run_phase.phase, self.run_phase.reason = "finished", reason
        self.out.note("finishing", f"the run is over: {reason}")
        for learner in self.members.connected():
            self.out.send(learner.name, Finish(reason=reason, versions=tuple(self.rounds.versions)))
        self.out.add(Finished(reason))

    # ---- in a later term ----------------------------------------------------------------------------------------

    def say_again(self) -> None:
        """Of a run that was over already."""
        if self._was_over:
            self._was_over = False
            self.out.add(Finished(self.run_phase.reason))

    def reopen(self) -> None:
        """A run that had ended, or had begun to, goes on; the history says so already."""
        now = RunPhase.of(self.history)
        self.run_phase.phase, self.run_phase.reason, self._was_over = now.phase, now.reason, False
