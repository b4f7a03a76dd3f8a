"""How learners conduct themselves, seen from what their machines want done.

only the recovered contribute     no answer leaves before every fragment is adopted
what is missing is on its way     a version that it was told of, and lacks, is being fetched
leases come in order              none that was granted to it is left out
a state is as new as was asked    what a peer gives holds all that was committed when it was asked
the last to go has the model      nobody leaves a finished run without all of it
a heartbeat                       whoever has nothing to say says so
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from atoll.protocol import effects as fx
from atoll.protocol.learner.machine import Learner
from atoll.protocol.messages import Announce, Finish, FromSyncer, Help, Leave, Started, Welcome
from atoll.simulate.violation import Violation

if TYPE_CHECKING:
    from atoll.simulate.invariants import Invariants
    from atoll.simulate.simulated_learner import SimulatedLearner


WATCHED = frozenset({fx.Upload, fx.Give, fx.Supply})
OF_VERSIONS = frozenset({fx.Arrived, fx.FetchFailed, fx.Fetched, fx.Adopted})


class LearnerChecks:
    def __init__(self, invariants: Invariants) -> None:
        self._invariants = invariants
        self._wanted: dict[str, list[int]] = {}
        """Per ticket, what was committed when its peer was asked."""
        self._told: dict[Learner, tuple[list[int], set[int]]] = {}
        """By machine: the versions that it was told of, and fragments of which it was sent one before it was told."""

    def asked(self, help_: Help, versions: list[int]) -> None:
        self._wanted[help_.ticket] = list(versions)

    def heard(self, learner: SimulatedLearner, event: fx.LearnerEvent, effects: Sequence[fx.LearnerEffect]) -> None:
        """After an event, before its effects are carried out."""
        for effect in effects:
            if type(effect) in WATCHED or (isinstance(effect, fx.Say) and isinstance(effect.message, Leave)):
                self._does(learner, effect)
        if type(event) in OF_VERSIONS:
            self._lacks_nothing(learner, event)
        line, every_s = learner.machine._connection, learner.machine.settings.heartbeat_s
        if line.connected and learner.clock.last >= line.said_at + every_s:
            said = f"{learner.name} has said nothing for {learner.clock.last - line.said_at:.1f} s"
            raise Violation("a heartbeat", said, learner.name)

    def _does(self, learner: SimulatedLearner, effect: fx.LearnerEffect) -> None:
        match effect:
            case fx.Say(Leave(reason="the run is over")):
                self._leaves(learner)
            case fx.Upload(fragment=fragment):
                self._contributes(learner, fragment)
            case fx.Give(number, ticket):
                self._gives(learner, number, ticket)
            case fx.Supply():
                self._is_supplied(learner, effect)
            case _:
                pass

    def _contributes(self, learner: SimulatedLearner, fragment: int) -> None:
        if not any(f == fragment for f, _ in learner.copies):
            said = f"{learner.name} answers with a copy that it has dropped"
            raise Violation("Δ is the learner's own steps", said, learner.name, fragment)
        if min(learner.adopted) < 0 or learner.waits:
            said = f"{learner.name} answers with versions {learner.adopted} (waits for a peer: {learner.waits})"
            raise Violation("only the recovered contribute", said, learner.name, fragment)

    def _gives(self, learner: SimulatedLearner, number: int, ticket: str) -> None:
        wanted, given = self._wanted.get(ticket), learner.given.get(number)
        if wanted and given and any(held < want for held, want in zip(given.held, wanted, strict=True)):
            said = f"{learner.name} gives a state of versions {given.held}, {wanted} were committed when it was asked"
            raise Violation("a state is as new as was asked", said, learner.name)

    def _is_supplied(self, learner: SimulatedLearner, supply: fx.Supply) -> None:
        oracle, disk = self._invariants.oracle, self._invariants.world.disk
        life = oracle.samples.lives.get((learner.name, learner.machine.incarnation))
        if life is None or learner.leased is None or (disk.losses and learner.term < oracle.term):
            return  # (the disk may have lost what an earlier term granted: its life is over once it hears so)
        new = [one.lease for one in supply.ranges if one.lease > learner.leased.newest]
        due = [one.lease for one in life.granted if one.lease > learner.leased.newest]
        if new != due[: len(new)]:
            said = f"{learner.name} is given leases {new} after {learner.leased.newest}, {due} were granted to it"
            raise Violation("leases come in order", said, learner.name)

    def _leaves(self, learner: SimulatedLearner) -> None:
        final = self._invariants.oracle.versions
        if any(held < version for held, version in zip(learner.adopted, final, strict=True)):
            said = f"{learner.name} leaves with versions {learner.adopted}, the run ended with {final}"
            raise Violation("the last to go has the model", said, learner.name)

    def _lacks_nothing(self, learner: SimulatedLearner, event: fx.LearnerEvent) -> None:
        machine = learner.machine
        told, ahead = self._told.setdefault(machine, ([], set()))
        match event:
            case fx.Arrived(message) if message.term >= machine.term:
                _hear(told, ahead, message)
            case fx.Fetched(fragment, version) if version > told[fragment]:
                ahead.add(fragment)
            case _:
                pass
        if not machine._connection.connected or machine.phase == "finished":
            return
        versions = machine._versions
        for fragment, version in enumerate(told):
            coming = fragment in versions._fetching or fragment in versions.adopting or fragment in versions.retry_at
            if version > versions.held[fragment] and not coming and fragment not in ahead:
                said = f"{learner.name} lacks version {version} of fragment {fragment}, and does not fetch it"
                raise Violation("what is missing is on its way", said, learner.name, fragment)


def _hear(told: list[int], ahead: set[int], message: FromSyncer) -> None:
    match message:
        case Welcome() | Finish():
            told[:] = message.versions
            ahead.clear()
        case Started():
            told[:] = [max(version, 0) for version in told]
        case Announce(fragment=fragment, version=version) if told:
            told[fragment] = max(told[fragment], version)
            ahead.discard(fragment)
        case _:
            pass
