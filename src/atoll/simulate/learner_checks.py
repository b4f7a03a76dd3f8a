"""What learners must do, seen from what their machines want done:

only the recovered contribute     no answer leaves before every fragment is adopted
what is missing is on its way     a version that it was told of, and lacks, is being fetched
announced, then adopted           nobody takes a version before it knows whether its own steps are in it
leases come in order              none that was granted to it is left out
a state is as new as was asked    what a peer gives holds all that was committed when it was asked
the last to go has the model      nobody leaves a finished run without all of it
a heartbeat                       whoever has nothing to say says so

and what a drain promises:

a drain loses nothing             who leaves with all its steps given has none of them in the account of what was lost;
                                  and nobody leaves with steps left where nothing hindered it
who has left is gone              it is asked for nothing more, until it joins again
a drain is of one learner         a run does not end because some were asked to leave; only a process that was asked
                                  leaves, no other of its name
a drained one leaves              once it can be reached, and has given all its steps (campaign.py looks when the faults
                                  have stopped); a new term does not know who was asked
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.protocol.effects import Note
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.messages import Announce, Finish, FromSyncer, Help, Leave, Started, Welcome
from atoll.protocol.records import GoneRecord
from atoll.protocol.settings import Settings
from atoll.simulate.disk import SimulatedDisk
from atoll.simulate.faults import TO_LEAVE, Fault
from atoll.simulate.oracle import Oracle, Violation
from atoll.simulate.ranked_learner import RankedLearner
from atoll.simulate.simulated_learner import SimulatedLearner
from atoll.simulate.simulated_syncer import SimulatedSyncer

WATCHED = frozenset({fx.Upload, fx.Give, fx.Supply})
OF_VERSIONS = frozenset({fx.Arrived, fx.FetchFailed, fx.Fetched, fx.Adopted})


class LearnerChecks:
    def __init__(self, oracle: Oracle, disk: SimulatedDisk) -> None:
        self._oracle, self._disk = oracle, disk
        self._wanted: dict[str, list[int]] = {}
        """Per ticket, what was committed when its peer was asked."""
        self._told: dict[LearnerMachine, tuple[list[int], set[int]]] = {}
        """By machine: the versions that it was told of, and fragments of which it was sent one before it was told."""
        self._final: dict[str, list[int]] = {}
        """Versions that the run ended with, keyed by session of the learners that left it."""

    def watch_help(self, help_: Help, versions: list[int]) -> None:
        self._wanted[help_.ticket] = list(versions)

    def watch_learner(
        self, learner: SimulatedLearner, event: fx.LearnerEvent, effects: Sequence[fx.LearnerEffect]
    ) -> None:
        """After an event, before its effects are carried out."""
        for effect in effects:
            if type(effect) in WATCHED or (isinstance(effect, fx.Say) and isinstance(effect.message, Leave)):
                self._check_effect(learner, effect)
        if type(event) in OF_VERSIONS:
            self._check_nothing_missing(learner, event)
        line, every_s = learner.machine._connection, learner.machine.settings.heartbeat_s
        if line.connected and learner.clock.last >= line.said_at + every_s:
            said = f"{learner.name} has said nothing for {learner.clock.last - line.said_at:.1f} s"
            raise Violation("a heartbeat", said, learner.name)

    def _check_effect(self, learner: SimulatedLearner, effect: fx.LearnerEffect) -> None:
        match effect:
            case fx.Say(Leave(reason="the run is over")):
                self._check_last_leave(learner)
            case fx.Upload(fragment=fragment):
                self._check_contribution(learner, fragment)
            case fx.Give(number, ticket):
                self._check_given_state(learner, number, ticket)
            case fx.Supply() if not isinstance(learner, RankedLearner):
                self.check_supply(learner, effect)
            case _:
                pass

    def _check_contribution(self, learner: SimulatedLearner, fragment: int) -> None:
        kept = any(f == fragment for f, _ in learner.copies)
        if not kept and not isinstance(learner, RankedLearner):  # whose slots may be few: then older copies give way
            said = f"{learner.name} answers with a copy that it has dropped"
            raise Violation("Δ is the learner's own steps", said, learner.name, fragment)
        if min(learner.adopted) < 0 or learner.waits:
            said = f"{learner.name} answers with versions {learner.adopted} (waits for a peer: {learner.waits})"
            raise Violation("only the recovered contribute", said, learner.name, fragment)

    def _check_given_state(self, learner: SimulatedLearner, number: int, ticket: str) -> None:
        wanted, given = self._wanted.get(ticket), learner.given.get(number)
        if wanted and given and any(held < want for held, want in zip(given.held, wanted, strict=True)):
            said = f"{learner.name} gives a state of versions {given.held}, {wanted} were committed when it was asked"
            raise Violation("a state is as new as was asked", said, learner.name)

    def check_supply(self, learner: SimulatedLearner, supply: fx.Supply) -> None:
        """When it takes effect: for several ranks that is not when it is sent."""
        oracle, disk = self._oracle, self._disk
        life = oracle.samples.lives.get((learner.name, learner.machine.incarnation))
        if life is None or learner.leased is None or (disk.losses and learner.term < oracle.term):
            return  # (the disk may have lost what an earlier term granted: its life is over once it hears so)
        new = [one.lease for one in supply.ranges if one.lease > learner.leased.newest]
        due = [one.lease for one in life.granted if one.lease > learner.leased.newest]
        if new != due[: len(new)]:
            said = f"{learner.name} is given leases {new} after {learner.leased.newest}, {due} were granted to it"
            raise Violation("leases come in order", said, learner.name)

    def _check_last_leave(self, learner: SimulatedLearner) -> None:
        """Ranks may still have to carry out the order to take their own values for version 0: it lies in front of the
        order to stop, at which they are judged (`watch_final_stop`)."""
        self._final[learner.session] = list(self._oracle.versions)
        versions = learner.machine.versions if isinstance(learner, RankedLearner) else learner.adopted
        self._check_has_model(learner, versions, learner.name)

    def watch_final_stop(self, learner: RankedLearner, rank: int, adopted: Sequence[int]) -> None:
        """The training process of a rank carries out the order to stop for good."""
        if learner.session in self._final:
            self._check_has_model(learner, adopted, f"rank {rank} of {learner.name}")

    def _check_has_model(self, learner: SimulatedLearner, versions: Sequence[int], who: str) -> None:
        final = self._final[learner.session]
        if any(held < version for held, version in zip(versions, final, strict=True)):
            said = f"{who} leaves with versions {list(versions)}, the run ended with {final}"
            raise Violation("the last to go has the model", said, learner.name)

    def _check_nothing_missing(self, learner: SimulatedLearner, event: fx.LearnerEvent) -> None:
        machine = learner.machine
        told, ahead = self._told.setdefault(machine, ([], set()))
        match event:
            case fx.Arrived(message) if message.term >= machine.term:
                _hear(told, ahead, message)
            case fx.Fetched(fragment, version) if version > told[fragment]:
                ahead.add(fragment)
                self._check_not_adopted(learner, fragment, version)
            case _:
                pass
        if not machine._connection.connected or machine.phase == "finished":
            return
        versions = machine._versions
        for fragment, version in enumerate(told):
            coming = fragment in versions._fetching or fragment in versions.adopting or fragment in versions.retry_at
            coming = coming or fragment in versions.given
            queued = not versions._may_order()
            if queued or versions.passes_over(fragment, machine._takes_owed_only):
                continue
            if version > versions.held[fragment] and not coming and fragment not in ahead:
                said = f"{learner.name} lacks version {version} of fragment {fragment}, and does not fetch it"
                raise Violation("what is missing is on its way", said, learner.name, fragment)

    def _check_not_adopted(self, learner: SimulatedLearner, fragment: int, version: int) -> None:
        adopting, _ = learner.machine._versions.adopting.get(fragment, (-1, -1))
        if adopting == version:
            said = f"{learner.name} takes version {version} of fragment {fragment} before it is told of it"
            raise Violation("announced, then adopted", said, learner.name, fragment)


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


class Drains:
    def __init__(
        self, settings: Settings, learners: Mapping[str, SimulatedLearner], trip_s: float, syncer: SimulatedSyncer
    ) -> None:
        """`trip_s`: the longest that a message takes. `syncer`: that of the newest term."""
        self._settings, self._learners, self._trip_s, self._newest = settings, learners, trip_s, syncer
        self._peace = True
        """Nothing but drains has happened so far."""
        self._asked: set[str] = set()
        """Sessions that were asked to leave before their training loop had ended by itself."""
        self._end_was_judged = False
        self._gave_all: set[tuple[str, int, str]] = set()
        """Name and incarnation of those that left with nothing left to give, and what they said last."""
        self._left: set[str] = set()
        self._to_leave: set[str] = set()
        """Sessions that this term's syncer was asked to drain."""
        self._ever_to_leave: set[str] = set()
        """Sessions that the syncer of any term was asked to drain: what one sent may arrive after it has died."""

    def watch_fault(self, fault: Fault) -> None:
        self._peace = self._peace and fault.kind in TO_LEAVE

    def watch_request(self, syncer: SimulatedSyncer, name: str) -> None:
        """The syncer has dealt with a request to drain this learner. The process that is meant is the one that has the
        name now: by the time the note of it is written down and told, another process may have taken the name."""
        learner = syncer.machine.members.learners.get(name)
        if learner is not None and learner.draining:
            self._ever_to_leave.add(learner.session)
            if syncer is self._newest:
                self._to_leave.add(learner.session)

    def watch_leave_asked(self, learner: SimulatedLearner) -> None:
        """A training process was asked to leave."""
        if not learner.stopped:
            self._asked.add(learner.session)
        if not learner.leaving.hurried and learner.session not in self._ever_to_leave:
            said = f"{learner.session} leaves, but the drain was meant for another process of its name"
            raise Violation("a drain is of one learner", said, learner.name)

    def watch_left(self, learner: SimulatedLearner) -> None:
        """A training process goes."""
        if not any(learner.steps):
            self._gave_all.add((learner.name, learner.machine.incarnation, learner.leaving.why))
        elif self._peace and not learner.leaving.hurried and self._had_time(learner):
            said = f"{learner.name} leaves with {learner.steps} steps per fragment that no version contains"
            raise Violation("a drain loses nothing", said, learner.name)

    def _had_time(self, learner: SimulatedLearner) -> bool:
        """Whether everybody could have made a cycle while it waited, and a quorum be lowered. Before its first round a
        synchronous run waits for all its learners."""
        settings = self._settings
        if settings.synchronous and self._newest.machine.next_round == 0:
            return False
        slowest_s = max(one.step_s for one in self._learners.values())
        trips_s = 8 * settings.fragments * self._trip_s
        longest = max(one.sync_every for one in (settings, *self._newest.machine.settings.in_all_phases))
        needs_s = (longest + 2) * slowest_s + settings.patience_s + settings.startup_s + trips_s
        return learner.leaving.waits_s >= needs_s

    def watch_closed_account(self, gone: GoneRecord) -> None:
        """Its last word came, and with it all its reports: nothing may be lost by them."""
        said = (gone.learner, gone.incarnation, gone.reason) in self._gave_all
        if said and any(gone.lost):
            text = f"{gone.learner} had given all its steps, {gone.lost} tokens of it are lost in the ledger"
            raise Violation("a drain loses nothing", text, gone.learner)

    def watch_note(self, note: Note) -> None:
        name = str(note.data.get("learner", ""))
        if note.kind == "left":
            self._left.add(name)
        elif note.kind == "joined":
            self._left.discard(name)

    def restarted(self, syncer: SimulatedSyncer) -> None:
        self._newest = syncer
        self._to_leave.clear()
        self._end_was_judged = bool(syncer.machine.history.ended)  # the term before decided that

    def check_all_left(self) -> None:
        """Nothing hinders anybody any more."""
        for name, learner in self._learners.items():
            asked = learner.leaving.why or learner.session in self._to_leave
            if learner.alive and asked and not learner.leaving.run_ends:
                said = f"{name} (stopped: {learner.stopped}) has {learner.steps} steps per fragment left to give"
                raise Violation("a drained one leaves", said, name)

    def watch_pull(self, learner: str) -> None:
        if learner in self._left:
            raise Violation("who has left is gone", f"{learner} is asked for a contribution", learner)

    def watch_end(self, syncer: SimulatedSyncer) -> None:
        """Judge the end in the turn that decides it. A slow disk holds its note back, and by then others have come."""
        if self._end_was_judged or syncer.machine.state.phase != "ending":
            return
        self._end_was_judged = True
        learners = syncer.machine.members.learners.values()
        if syncer.machine.state.end_reason == "every learner has stopped" and not any(
            one.stopped and one.session not in self._asked for one in learners
        ):
            raise Violation("a drain is of one learner", "the run ends since all its learners were drained")
