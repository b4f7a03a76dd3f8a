"""Which learners are silent, make no steps, or report but do not answer pulls.

Rules kept here, each with its test:
- a learner that sends nothing for `lost_after_s` is disconnected;
- no round waits for a learner that makes no steps;
- a first step that uses the processor is no fault for `first_step_s`;
- a learner that missed its pulls is muted and probed; a probe's answer is never merged;
- time in which the syncer itself stood still counts against nobody.
"""

from __future__ import annotations

from math import inf

from atoll.protocol import schedule
from atoll.protocol.messages import Pull
from atoll.protocol.syncer.beginning import Beginning
from atoll.protocol.syncer.effects import ConfirmSent
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.rounds import Rounds
from atoll.protocol.syncer.state import SyncerState

PROBE_EVERY_S = 2.0
"""Least time between two probes of a learner."""


PAUSED = "a pause in its training loop, as of validation or a checkpoint, or it hangs"


class Liveness:
    def __init__(self, state: SyncerState, rounds: Rounds, beginning: Beginning) -> None:
        self.state, self.rounds, self.beginning = state, rounds, beginning

    def find_silent(self, now: float, wakes: list[float]) -> list[KnownLearner]:
        """Look at everyone; those that have been silent for too long."""
        silent, connected = [], self.state.members.connected_learners()
        deadline_s = self.rounds.closing.deadline_s if any(learner.muted for learner in connected) else 0.0
        for learner in connected:
            limit = self.state.members.silence_limit(learner)
            if now >= limit:
                silent.append(learner)
                continue
            wakes.append(limit)
            if learner.state == "training":
                self._watch_steps(now, learner, wakes)
            if learner.muted:
                self._probe_muted(now, learner, deadline_s, wakes)
        return silent

    def note_answer(self, learner: KnownLearner) -> None:
        learner.misses = 0
        if learner.muted:
            learner.muted = False
            self.state.members.update_medians(learner)
            self.state.out.note("probed", f"{learner.name} answers again", learner)

    def probe_sent(self, now: float, name: str) -> None:
        self.state.members.learners[name].probed_at = now

    def stood_still(self, now: float, seconds: float) -> None:
        """Nobody is silent, stalled or late for the time in which the syncer itself heard nothing."""
        for learner in self.state.members.learners.values():
            learner.download.put_off(now, seconds)
            idle_at = max(learner.last_step_at, learner.idle_at)
            learner.idle_at = min(now, idle_at + seconds)
            learner.last_heard = min(now, learner.last_heard + seconds) if learner.last_heard else 0.0
        for round_ in self.state.open_rounds.values():
            round_.put_off(now, seconds)
        self.rounds.closing.put_off(now, seconds)

    def _watch_steps(self, now: float, learner: KnownLearner, wakes: list[float]) -> None:
        waits = self.state.settings.synchronous and learner.offer >= self.state.committed
        if learner.stopped or waits or self.beginning.holds_back:
            learner.idle_at = now  # it waits for us, not we for it
        limit = self.state.members.stall_limit(learner)
        learner.first_step_s = now - max(learner.last_step_at, learner.idle_at) if learner.starting else 0.0
        longest_s = self.state.settings.first_step_s
        stalled, excused = now >= limit, learner.starting and learner.first_step_s < longest_s
        if stalled != learner.stalled or (stalled and excused != learner.excused):
            self._tell_steps(now, learner, stalled=stalled, excused=stalled and excused)
        wakes.append(limit)
        if stalled and excused:
            wakes.append(now + longest_s - learner.first_step_s)

    def _tell_steps(self, now: float, learner: KnownLearner, *, stalled: bool, excused: bool) -> None:
        began = learner.excused
        if stalled and not learner.stalled:
            learner.paused_at = max(learner.last_step_at, learner.idle_at)
        learner.stalled, learner.excused = stalled, excused
        self.state.members.update_medians(learner)
        if not stalled:
            stood_s = now - learner.paused_at
            word = "has made its first step" if began else f"makes steps again, after {stood_s:.1f} s without one"
            self.state.out.note("steps", f"{learner.name} {word}", learner)
        elif excused:
            text = f"first step: {learner.first_step_s:.0f} s so far (compiling?); nobody waits for it"
            self.state.out.note("starting", f"{learner.name}: {text}", learner)
        elif learner.t and not learner.starting:
            self.state.out.note("stalled", f"{learner.name} makes no steps ({PAUSED}); it is not waited for", learner)
        else:
            longest_s = self.state.settings.first_step_s
            late = f" in {longest_s:g} s (first_step_s)" if learner.starting else " yet"
            asked = "does its script call learner.step() after every optimizer step?"
            self.state.out.note("stalled", f"{learner.name} has made no step{late}; {asked}", learner)

    @property
    def probe_every_s(self) -> float:
        return probe_every_s(self.rounds.closing.deadline_s)

    def _probe_muted(self, now: float, learner: KnownLearner, deadline_s: float, wakes: list[float]) -> None:
        every_s = probe_every_s(deadline_s)
        if now >= learner.probed_at + every_s:
            learner.probed_at = inf  # until it has left
            # One that waits at a hold makes no new copy.
            copied = self.state.settings.synchronous and learner.offer >= 0
            number = learner.offer if copied else self.state.gathering_round
            pull = Pull(
                round=number,
                attempt=0,
                fragment=schedule.fragment_of(number, self.state.settings),
                gathering=self.state.gathering_round,
                deadline_s=deadline_s,
                probe=True,
            )
            self.state.out.send(learner.name, pull)
            self.state.out.add_effect(ConfirmSent(number, 0, learner.name))
        wakes.append(learner.probed_at + every_s)


def probe_every_s(deadline_s: float) -> float:
    """Time between two probes of a learner. The next voids the last one, so an answer has as long as to a pull: where a
    body took longer, no answer would ever count, and the learner would stay muted."""
    return max(PROBE_EVERY_S, deadline_s)
