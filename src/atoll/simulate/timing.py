"""What the syncer does in time: nobody is waited for longer than the rules allow, and no round without need.

Each of these holds once an event is dealt with; a look a virtual second is enough, since what is late stays late:

    who says nothing is gone            after lost_after_s
    who makes no steps is not live      after stalled_after_s, or eight of its steps
    who stays away is given up          after abandon_s: its account is closed, its samples go to others
    who does not answer is probed
    a member that dies is left out      at once; one that does not answer, at the deadline it was told
    an attempt asks once                so that an answer tells what it answers
    last steps are waited for           until then: who has stopped is left out by its own word alone
    no round waits without need         it freezes when all are there, or when the grace window is over
    a cut waits no longer than it says, and holds every learner that was live, or says why not
    quorum                              a round asks K, or fewer once K could not be had for a while
    H is honest                         the median of steps between two syncs of a fragment
    what is decided is written          in the same event, and nobody may contribute who lacks a fragment
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

from atoll.protocol.messages import Progress, Pull
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.closing import overdue_at
from atoll.protocol.syncer.machine import Syncer
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.state import Round
from atoll.simulate.oracle import Violation
from atoll.simulate.simulated_syncer import SimulatedSyncer

LOOK_S = 1.0
SAMPLES = 40
"""Behind a judgement about H."""
HONEST = 0.45
"""The least share of H: slow learners make fewer steps between two syncs than the median that sets the pace."""


class Timing:
    def __init__(self) -> None:
        self._next_look = 0.0
        self._due: dict[tuple[str, int, int], float] = {}
        """(learner, round, attempt) → the deadline that was told."""
        self._out: set[tuple[str, int, int]] = set()
        """(learner, round, attempt) that came to nothing."""
        self._unprobed: set[str] = set()
        """At the last look."""
        self._frozen: dict[int, tuple[int, int]] = {}
        """Per fragment, the last round and attempt that was judged when it froze."""
        self._quorum_since: dict[tuple[int, int], float] = {}
        self._cut: tuple[int, float, set[str]] = (0, 0.0, set())
        """The open cut, when it was first seen, and who was to be in it."""
        self._steps: deque[float] = deque(maxlen=SAMPLES)
        self._h = 0
        """H when the last round was committed; 0: none was."""
        self._of_another_h = 0
        """Rounds whose fragments were synced last under another H."""
        self._t_then: dict[int, dict[tuple[str, int], int]] = {}
        """Per fragment, the steps of every life that stepped when it was synced last."""

    def watch_syncer(self, syncer: SimulatedSyncer, now: float, event: fx.SyncerEvent) -> None:
        machine = syncer.machine
        if isinstance(event, fx.StoodStill):
            self._due = {key: due + event.seconds for key, due in self._due.items()}
            self._quorum_since = {key: min(now, since + event.seconds) for key, since in self._quorum_since.items()}
        if machine.committed != machine.history.committed:
            said = f"{machine.committed} rounds are behind it, {machine.history.committed} by its records"
            raise Violation("what is decided is written", said)
        if isinstance(event, fx.Received) and isinstance(event.message, Progress):
            self._check_report(machine.members.learners[event.learner])
        for round_ in machine.state.open_rounds.values():
            self._check_last_steps(syncer, now, event, round_)
            if (round_.number, round_.attempt) in self._quorum_since:
                self._forget_lost_quorum(syncer, now, round_)
            if round_.stage == "pulling" and (round_.number, round_.attempt) > self._frozen.get(
                round_.fragment, (-1, 0)
            ):
                self._frozen[round_.fragment] = (round_.number, round_.attempt)
                self._check_quorum(syncer, now, round_)
        if machine.cuts.open is not None and machine.cuts.open.cut != self._cut[0]:
            self._cut = (machine.cuts.open.cut, now, set(machine.cuts.open.awaited))
        if now >= self._next_look and machine.phase not in ("empty", "finished"):
            self._next_look = now + LOOK_S
            self._check_all(syncer, now)

    def _check_report(self, one: KnownLearner) -> None:
        if one.state == "training" and one.versions and min(one.versions) < 0:
            said = f"{one.name} may contribute with versions {one.versions}"
            raise Violation("only the recovered contribute", said, one.name)

    def _check_all(self, syncer: SimulatedSyncer, now: float) -> None:
        machine = syncer.machine
        for one in machine.members.learners.values():
            self._check_learner(syncer, now, one)
        rounds = machine.state.open_rounds
        if len({round_.fragment for round_ in rounds.values()}) < len(rounds):
            raise Violation("versions +1", f"two rounds of a fragment are under way: {sorted(rounds)}")
        for round_ in rounds.values():
            if round_.stage == "pulling":
                self._check_seats(syncer, now, round_)
            elif round_.stage == "gathering":
                self._check_gathering(syncer, now, round_)
        cut, since, _ = self._cut
        open_ = machine.cuts.open
        if open_ is not None and open_.cut == cut and open_.awaited and now > since + machine.settings.cut_wait_s:
            raise Violation(
                "a cut never waits for the dead", f"cut {cut} waits for {sorted(open_.awaited)} for too long"
            )

    def _check_learner(self, syncer: SimulatedSyncer, now: float, one: KnownLearner) -> None:
        settings = syncer.machine.settings
        if one.connected and now >= one.last_heard + settings.lost_after_s:
            raise Violation(
                "who says nothing is gone", f"{one.name} was last heard {now - one.last_heard:.1f} s ago", one.name
            )
        if one.live and now >= syncer.machine.members.stall_limit(one):
            raise Violation(
                "who makes no steps is not live", f"{one.name} made its last at {one.last_step_at:.1f}", one.name
            )
        unprobed = one.connected and one.muted and now >= one.probed_at + syncer.machine.liveness.probe_every_s
        if unprobed and one.name in self._unprobed:
            raise Violation("who does not answer is probed", f"{one.name} was probed at {one.probed_at:.1f}", one.name)
        (self._unprobed.add if unprobed else self._unprobed.discard)(one.name)  # one that just fell mute has its time
        away = not one.connected and not one.closed and one.last_heard > 0
        if away and now >= one.last_heard + settings.abandon_s:
            raise Violation("who stays away is given up", f"{one.name} is away since {one.last_heard:.1f}", one.name)

    # ---- rounds -------------------------------------------------------------------------------------------------

    def watch_pull(self, syncer: SimulatedSyncer, learner: str, pull: Pull) -> None:
        if pull.probe:
            return
        if (key := (learner, pull.round, pull.attempt)) in self._due:
            said = f"attempt {pull.attempt} of round {pull.round} asks {learner} twice"
            raise Violation("an attempt asks once", said, learner, pull.fragment)
        self._due[key] = syncer.clock.read(syncer.world.queue.now) + pull.deadline_s

    def was_asked(self, learner: str, number: int) -> bool:
        """Whether a round asked this learner for a copy, in either attempt."""
        return any((learner, number, attempt) in self._due for attempt in (1, 2))

    def _check_seats(self, syncer: SimulatedSyncer, now: float, round_: Round) -> None:
        for seat in round_.asked:
            learner = syncer.machine.members.learners[seat.learner]
            if not learner.connected or learner.incarnation != seat.incarnation:
                said = f"round {round_.number} waits for {seat.learner} (incarnation {seat.incarnation}), which is gone"
                raise Violation("a member that dies is left out", said, seat.learner, round_.fragment)
            if now > self._due.get((seat.learner, round_.number, round_.attempt), now) + LOOK_S:
                said = f"round {round_.number} waits for {seat.learner} past its deadline"
                raise Violation("a member that does not answer is left out", said, seat.learner, round_.fragment)

    def _check_last_steps(self, syncer: SimulatedSyncer, now: float, event: fx.SyncerEvent, round_: Round) -> None:
        """Whether they are lost or dropped where they are left out depends on the rule of adoption; here it shows."""
        for seat in round_.seats.values():
            key = (seat.learner, round_.number, round_.attempt)
            if seat.state != "out" or key in self._out:
                continue
            self._out.add(key)
            learner = syncer.machine.members.learners[seat.learner]
            is_there = learner.connected and learner.incarnation == seat.incarnation
            if learner.stopped and is_there and now < seat.deadline and _speaker(event) != seat.learner:
                said = f"round {round_.number} goes on without {seat.learner} before its deadline: {seat.why_out}"
                raise Violation("last steps are waited for", said, seat.learner, round_.fragment)

    def _check_quorum(self, syncer: SimulatedSyncer, now: float, round_: Round) -> None:
        """It asks K, or fewer once K could not be had for a while."""
        machine = syncer.machine
        gathering, settings = machine.rounds.closing, machine.settings
        if gathering.state.draining or settings.synchronous:
            return
        least = self._least_quorum(syncer, now, round_)
        if len(round_.seats) < least:
            raise Violation("quorum", f"round {round_.number} asks {len(round_.seats)} where {least} are to be had")

    def _least_quorum(self, syncer: SimulatedSyncer, now: float, round_: Round) -> int:
        members, settings = syncer.machine.members, syncer.machine.settings
        quorum = settings.quorum
        if without_turn := len(syncer.machine.rounds.closing.without_turn(round_)):
            quorum = max(1, min(quorum, len(members.stepping_learners()) - without_turn))
        if round_.due_at is not None and now >= overdue_at(round_.due_at, members.longest_stall_s(), settings):
            return 1
        if (short := syncer.machine.rounds.closing._short_since) is not None:
            if now < short + settings.patience_s:
                return quorum
            quorum = max(1, min(quorum, len(members.stepping_learners())))
        return quorum

    def _forget_lost_quorum(self, syncer: SimulatedSyncer, now: float, round_: Round) -> None:
        """Between two looks too: the next quorum has a grace window of its own."""
        ready = syncer.machine.rounds.closing.ready_learners(round_)
        if round_.stage != "gathering" or len(ready) < self._least_quorum(syncer, now, round_):
            del self._quorum_since[round_.number, round_.attempt]

    def _check_gathering(self, syncer: SimulatedSyncer, now: float, round_: Round) -> None:
        rounds, settings = syncer.machine.rounds, syncer.machine.settings
        gathering, key = rounds.closing, (round_.number, round_.attempt)
        if gathering.state.draining or settings.synchronous or round_.due_at is None:
            return
        if syncer.machine.rollback.is_under_way:
            return  # it waits for the merge that is under way, and every round for it
        able = gathering.ready_learners(round_)
        ready, awaited = len(able), gathering.count_awaited(round_, able)
        if ready < self._least_quorum(syncer, now, round_):
            return
        since = max(self._quorum_since.setdefault(key, now), round_.due_at)
        window_s = 0.0 if ready >= awaited else gathering.window_s(round_)
        under_way = sum(other.is_under_way for other in syncer.machine.state.open_rounds.values())
        held = under_way >= rounds.interval.allowed or (under_way > 0 and gathering.state.changing_rounds)
        waits = held and round_.attempt == 1
        if not waits and now >= since + window_s:
            late = f"{now - since:.2f} s after its quorum"
            said = f"round {round_.number} gathers with {ready} of {awaited} learners, {late}"
            raise Violation("no round waits without need", said, fragment=round_.fragment)

    def watch_commit(self, syncer: SimulatedSyncer, data: Any) -> None:
        """Of a round's note: steps between two syncs."""
        machine = syncer.machine
        if machine.state.draining or machine.settings.synchronous or machine.phase != "running":
            return
        asked = machine.settings.sync_every
        if self._h not in (0, asked):
            self._steps.clear()
            self._of_another_h = machine.settings.fragments
        self._h = asked
        if self._of_another_h:
            self._of_another_h -= 1
            return
        since = [member["since"] for member in data["members"] if member["since"] is not None]
        without_turn = self._steps_without_turn(machine, data["fragment"], {one["learner"] for one in data["members"]})
        if since:
            since += without_turn
            self._steps.append(median(since))  # of the round: with two learners each speed would be half of the samples
        if len(self._steps) < SAMPLES:
            return
        effective = median(self._steps)
        if effective < HONEST * asked:
            said = f"a fragment is synced every {effective:g} steps, not every {asked}"
            raise Violation("H is honest", said, fragment=data["fragment"])

    def _steps_without_turn(self, machine: Syncer, fragment: int, members: set[str]) -> list[int]:
        """Steps since the last sync of this fragment, as reported, of learners with a share that had no part in this
        round. H counts the steps of the median learner, whoever is in a round: where the link of a quick learner is
        narrow, the members alone are the slow ones."""
        before, stepping = self._t_then.get(fragment, {}), machine.members.stepping_learners()
        self._t_then[fragment] = {(one.name, one.incarnation): one.t for one in stepping}
        shared = [one for one in stepping if one.share < 1.0 and one.name not in members]
        return [one.t - before[life] for one in shared if (life := (one.name, one.incarnation)) in before]

    # ---- cuts ---------------------------------------------------------------------------------------------------

    def watch_cut(self, cut: fx.CompleteCut) -> None:
        named = {name for name, _ in (*cut.saved, *cut.left_out)}
        if cut.cut == self._cut[0] and (missing := self._cut[2] - named):
            raise Violation("a cut holds all", f"cut {cut.cut} says nothing of {sorted(missing)}", min(missing))


def _speaker(event: fx.SyncerEvent) -> str:
    return event.hello.learner if isinstance(event, fx.Greeted) else getattr(event, "learner", "")
