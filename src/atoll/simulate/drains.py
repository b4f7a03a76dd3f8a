"""What a drain promises:

a drain loses nothing             who leaves with all its steps given has none of them in the account of what was lost;
                                  and nobody leaves with steps left where nothing hindered it
who has left is gone              it is asked for nothing more, until it joins again
a drain is of one learner         a run does not end because some were asked to leave; only a process that was asked
                                  leaves, no other of its name
a drained one leaves              once it can be reached, and has given all its steps (campaign.py looks when the faults
                                  have stopped); a new term does not know who was asked
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.protocol import effects as fx
from atoll.protocol.records import Gone
from atoll.simulate.faults import TO_LEAVE, Fault
from atoll.simulate.violation import Violation

if TYPE_CHECKING:
    from atoll.simulate.simulated_learner import SimulatedLearner
    from atoll.simulate.simulated_syncer import SimulatedSyncer
    from atoll.simulate.world import World


class Drains:
    def __init__(self, world: World) -> None:
        self._world = world
        self._peace = True
        """Nothing but drains has happened so far."""
        self._asked: set[str] = set()
        """Sessions that know that they are to leave."""
        self._gave_all: set[tuple[str, int, str]] = set()
        """Name and incarnation of those that left with nothing left to give, and what they said last."""
        self._left: set[str] = set()
        self._to_leave: set[str] = set()
        """Sessions that this term's syncer was asked to drain."""
        self._ever_to_leave: set[str] = set()
        """Sessions that the syncer of any term was asked to drain: what one sent may arrive after it has died."""

    def happened(self, fault: Fault) -> None:
        self._peace = self._peace and fault.kind in TO_LEAVE

    def requested(self, syncer: SimulatedSyncer, name: str) -> None:
        """The syncer has dealt with a request to drain this learner. The process that is meant is the one that has the
        name now: by the time the note of it is written down and told, another process may have taken the name."""
        learner = syncer.machine.members.learners.get(name)
        if learner is not None and learner.draining:
            self._ever_to_leave.add(learner.session)
            if syncer is self._world.simulated_syncer:
                self._to_leave.add(learner.session)

    def begins(self, learner: SimulatedLearner) -> None:
        """A training process was asked to leave."""
        self._asked.add(learner.session)
        if not learner.leaving.hurried and learner.session not in self._ever_to_leave:
            said = f"{learner.session} leaves, but the drain was meant for another process of its name"
            raise Violation("a drain is of one learner", said, learner.name)

    def leaves(self, learner: SimulatedLearner) -> None:
        """A training process goes."""
        if not any(learner.steps):
            self._gave_all.add((learner.name, learner.machine.incarnation, learner.leaving.why))
        elif self._peace and not learner.leaving.hurried and self._fits(learner):
            said = f"{learner.name} leaves with {learner.steps} steps per fragment that no version contains"
            raise Violation("a drain loses nothing", said, learner.name)

    def _fits(self, learner: SimulatedLearner) -> bool:
        """Whether everybody could have made a cycle while it waited, and a quorum be lowered. Before its first round a
        synchronous run waits for all its learners."""
        world, settings = self._world, self._world.settings
        if settings.synchronous and world.syncer.next_round == 0:
            return False
        slowest_s = max(one.step_s for one in world.learners.values())
        trips_s = 8 * settings.fragments * world.network.latency_s * (1 + world.network.jitter)
        needs_s = (settings.sync_every + 2) * slowest_s + settings.patience_s + settings.startup_s + trips_s
        return learner.leaving.waits_s >= needs_s

    def closed(self, gone: Gone) -> None:
        """Its last word came, and with it all its reports: nothing may be lost by them."""
        said = (gone.learner, gone.incarnation, gone.reason) in self._gave_all
        if said and any(gone.lost):
            text = f"{gone.learner} had given all its steps, {gone.lost} tokens of it are lost by the books"
            raise Violation("a drain loses nothing", text, gone.learner)

    def noted(self, note: fx.Note) -> None:
        name = str(note.data.get("learner", ""))
        if note.kind == "left":
            self._left.add(name)
        elif note.kind == "joined":
            self._left.discard(name)

    def restarted(self) -> None:
        self._to_leave.clear()

    def have_left(self) -> None:
        """Nothing hinders anybody any more."""
        for name, learner in self._world.learners.items():
            asked = learner.leaving.why or learner.session in self._to_leave
            if learner.alive and asked and not learner.leaving.run_ends:
                said = f"{name} (stopped: {learner.stopped}) has {learner.steps} steps per fragment left to give"
                raise Violation("a drained one leaves", said, name)

    def asked(self, learner: str) -> None:
        if learner in self._left:
            raise Violation("who has left is gone", f"{learner} is asked for a contribution", learner)

    def ended(self, syncer: SimulatedSyncer, reason: str) -> None:
        learners = syncer.machine.members.learners.values()
        if reason == "every learner has stopped" and not any(
            one.stopped and one.session not in self._asked for one in learners
        ):
            raise Violation("a drain is of one learner", "the run ends since all its learners were drained")
