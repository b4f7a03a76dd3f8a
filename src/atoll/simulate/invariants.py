"""What must hold after every event of the syncer and at every effect, whatever the world does. Each has a name:

    acknowledged = durable          nobody is told of a version before it is written down
    nothing acknowledged is lost    a new term knows every version that anybody was told of, with its values
    the journal's rules             every record passes the audit of `atoll verify` (store/audit.py)
    versions +1                     rounds are merged in order; a learner adopts newer versions only
    merged at most once             no step of a learner is in a fragment twice; members are what they gave
    Θ is the replay of the journal  the committed values are those of the members' Δ, worked out anew
    Δ is the learner's own steps    a contribution holds the steps it says, on the base it says
    ledger balances                 every token has one fate; the ledger's merged tokens are those of the contributions
    a sample is in one holder's hands at a time; a data range is issued again only if no fragment has merged it
    only the recovered contribute   nobody is a member who has not taken the run's parameters, or waits for a state
    no broken numbers are committed
    a rollback leaves nothing behind: whoever held something newer takes all that it brings in place of its own
    quorum                          a round asks and merges K, or as many as there are
    one fenced writer               a syncer speaks for its own term; learners heed no term older than they heard of
    a cut never waits for the dead
    a part of a cut is of its life  of each learner, of the life that it had when the cut was taken
    carry subtracts what is merged  the copy that an adopted version holds and the one before does not, or else the base
    no step blocks                  in an asynchronous run no training process ever waits
    an honest claim is believed     nobody is refused for the tokens or samples it says it trained on
    bounded memory                  what the machines keep does not grow with the run
    clocks                          the rounds that are told never go back, a wake-up lies in the future, progress goes
                                    up, and so does the run's step over all terms
    a budget ends the run           once the run's step has come to it

oracle.py holds those that follow from the journal alone, timing.py what the syncer must do in time, link_checks.py how
old contributions get where links have a width, learner_checks.py what learners do and what a drain promises,
part_checks.py what ranks of a learner, shards of the syncer and relays do, campaign.py those of the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import le
from typing import Any

from atoll.protocol.clock import SYNCER
from atoll.protocol.effects import Note
from atoll.protocol.history import History
from atoll.protocol.learner import effects as learner_fx
from atoll.protocol.ledger import Account
from atoll.protocol.messages import (
    Announce,
    Ending,
    Finish,
    FromSyncer,
    Help,
    Lease,
    Pull,
    Recover,
    Started,
    Welcome,
)
from atoll.protocol.records import EndedRecord, RestoredRecord, TailRecord
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as syncer_fx
from atoll.protocol.syncer.machine import Syncer
from atoll.simulate.disk import SimulatedDisk
from atoll.simulate.learner_checks import Drains, LearnerChecks
from atoll.simulate.link_checks import LinkChecks
from atoll.simulate.oracle import Oracle, Violation
from atoll.simulate.simulated_learner import SimulatedLearner
from atoll.simulate.simulated_syncer import SimulatedSyncer
from atoll.simulate.timing import Timing
from atoll.simulate.training import Training
from atoll.store.audit import PLAIN_FIELDS

NEVER_LOST = (EndedRecord, RestoredRecord, TailRecord)
"""Records that are synced with any durability; `must_be_synced`, which decides it, is held against these."""
SUMS = 8
"""All accounts are added up once in so many rounds; each of them is checked whenever it changes."""


class Invariants:
    """It watches what the machines were told and what they want done; it changes nothing."""

    def __init__(
        self,
        settings: Settings,
        disk: SimulatedDisk,
        syncer: SimulatedSyncer,
        learners: Mapping[str, SimulatedLearner],
        *,
        outer_lr: float,
        gradient: Callable[[int], float],
        trip_s: float,
        link_checks: LinkChecks,
    ) -> None:
        """`learners`: by name, the newest process of that name. `trip_s`: the longest that a message takes."""
        self.link_checks = link_checks
        self._run_settings, self._disk, self._learners = settings, disk, learners
        self._newest = syncer
        """The syncer of the newest term."""
        self.drains = Drains(settings, learners, trip_s, syncer)
        self.oracle = Oracle(disk, settings.fragments, outer_lr, gradient, self.drains.watch_closed_account)
        self.told = [-1] * settings.fragments
        """The newest version of every fragment that any learner was told of."""
        self.learner_checks = LearnerChecks(self.oracle, disk)
        self._recovered: set[tuple[str, int]] = set()
        self._asked: dict[str, set[str]] = {}
        """Per newcomer, the peers that were asked to help it, in any term: what was on its way may still arrive."""
        self._saved: dict[tuple[str, int, int], set[int]] = {}
        """Lives that saved a part of a cut, keyed by learner, cut and step."""
        self._begin()

    def _begin(self) -> None:
        """What one term of the syncer says of itself."""
        self.timing = Timing()
        self._rounds_told = 0
        self._progress = self._step = 0.0
        self._settings: Settings | None = None
        self._accounts: dict[tuple[str, int], Account] = {}
        self._helping: set[str] = set()
        """Newcomers that a peer helps now."""
        self._lives_at: dict[int, dict[str, int]] = {}
        """Per cut, the incarnation of each learner when it was taken."""

    def restarted(self, syncer: SimulatedSyncer) -> None:
        """Another process, which knows what is durable: nothing that was told may be missing."""
        self._newest = syncer
        oracle, machine = self.oracle, syncer.machine
        if oracle.restart_if_lost():
            self.told = [min(told, kept) for told, kept in zip(self.told, oracle.versions, strict=True)]
        oracle.catch_up()
        for fragment, told in enumerate(self.told):
            if machine.versions[fragment] < told:
                said = f"version {told} of fragment {fragment} was told, {machine.versions[fragment]} is what is left"
                raise Violation("nothing acknowledged is lost", said, fragment=fragment)
        if (wrong := forgotten(machine.history, oracle.history)) is not None:
            raise Violation("a cut is the journal in short", wrong)
        if machine.versions != oracle.versions or (oracle.theta and syncer.theta != oracle.theta):
            said = f"{machine.versions} of {syncer.theta} come back, {oracle.versions} of {oracle.theta} were committed"
            raise Violation("nothing acknowledged is lost", said)
        self._begin()
        self.drains.restarted(syncer)

    def watch_power_cut(self) -> None:
        """The machine is about to go down: what it loses may be rounds alone, and only where they are not synced."""
        disk = self._disk
        for record in disk.journal[disk.synced :]:
            if disk.every_round or isinstance(record, NEVER_LOST):
                said = f"a power cut takes a record that had to be synced: {record}"
                raise Violation("acknowledged = durable", said)

    # ---- after an event -----------------------------------------------------------------------------------------

    def watch_syncer(self, syncer: SimulatedSyncer, now: float, event: syncer_fx.SyncerEvent) -> None:
        """Check the syncer after an event."""
        machine = syncer.machine
        if machine.wake_at is not None and machine.wake_at <= now:
            raise Violation("clocks", f"at {now} it wants to be woken at {machine.wake_at}")
        if type(event) is syncer_fx.DrainAsked:
            self.drains.watch_request(syncer, event.learner)
        if syncer is not self._newest:
            return
        self.drains.watch_end(syncer)
        progress = machine.progress
        if machine.settings is not self._settings:
            self._settings = machine.settings
        elif progress < self._progress:
            raise Violation("clocks", f"progress goes back from {self._progress} to {progress}")
        self._progress = progress
        self._check_step(machine)
        self.timing.watch_syncer(syncer, now, event)
        if type(event) is not syncer_fx.Delivered:
            self._check_accounts(syncer)
        if machine.peers.open:
            self._check_recoveries(syncer)
        if machine.cuts.open is not None:
            self._check_cut(syncer, now)

    def _check_step(self, machine: Syncer) -> None:
        """It never falls, nor does a new term begin before what is written; and a budget that is spent ends the run."""
        step, before = machine.rounds.step, max(self._step, machine.history.step)
        if step < before:
            raise Violation("clocks", f"the run's step goes back from {before} to {step}")
        self._step = step
        budget = machine.settings.steps
        waits = machine.assembly.returning or machine.rollback.is_under_way
        if 0 < budget <= step and machine.phase == "running" and not waits:
            raise Violation("a budget ends the run", f"it runs on at step {step} of {budget}")

    def _check_accounts(self, syncer: SimulatedSyncer) -> None:
        """Those that have changed: total − begin = (m − u) + d + c, for every fragment."""
        seen = self._accounts
        for key, account in syncer.machine.history.ledger.open.items():
            if seen.get(key) is not account:
                seen[key] = account
                if account.begin is not None and not _balances(account, account.total - account.begin):
                    raise Violation("ledger balances", f"{account.fates()} of {key[0]}", key[0])

    def _check_recoveries(self, syncer: SimulatedSyncer) -> None:
        for name, recovery in syncer.machine.peers.open.items():
            if recovery.newcomer.live:
                said = f"{name} is live before it has a peer's state, or knows that there is none"
                raise Violation("only the recovered contribute", said, name)
            if recovery.peer is not None and (recovery.peer is recovery.newcomer or not recovery.peer.connected):
                raise Violation("only the recovered contribute", f"{recovery.peer.name} cannot help {name}", name)

    def _check_cut(self, syncer: SimulatedSyncer, now: float) -> None:
        open_, learners = syncer.machine.cuts.open, syncer.machine.members.learners
        assert open_ is not None
        for name, incarnation in open_.awaited.items():
            one = learners.get(name)
            if one is None or not one.connected or one.incarnation != incarnation or now >= open_.deadline:
                said = f"cut {open_.cut} waits for {name} (incarnation {incarnation})"
                raise Violation("a cut never waits for the dead", said, name)

    # ---- at an effect -------------------------------------------------------------------------------------------

    def watch_effect(self, syncer: SimulatedSyncer, effect: syncer_fx.SyncerEffect) -> None:
        """What it does, in the order in which it is carried out."""
        match effect:
            case syncer_fx.Send(learner, message):
                self._watch_message(syncer, learner, message)
            case Note() if syncer is self._newest:
                self._watch_note(syncer, effect)
            case syncer_fx.Persist():
                self.oracle.catch_up()
            case syncer_fx.Merge(number, fragment, parts):
                self._watch_merge(syncer, number, fragment, parts)
            case syncer_fx.TakeCut(cut, history) if syncer is self._newest:
                self._lives_at[cut] = {name: life.incarnation for name, life in history.lives.items()}
            case syncer_fx.CompleteCut():
                self.timing.watch_cut(effect)
                if syncer is self._newest:
                    self._check_parts(effect)
            case syncer_fx.CommitRestored(versions):
                # Held against these versions and not the newest: a syncer that stood still since its record was
                # written may have a successor by now.
                written = [self.oracle.values.get(one) for one in enumerate(versions)]
                if syncer.restored != written:
                    said = f"the run is rolled back to {syncer.restored}, it was {written} then"
                    raise Violation("Θ is the replay of the journal", said)
            case syncer_fx.Commit(number, fragment, version):
                self._watch_commit(syncer, number, fragment, version)
            case _:
                pass

    def watch_save(self, learner: SimulatedLearner, cut: int, life: int) -> None:
        self._saved.setdefault((learner.name, cut, learner.t), set()).add(life)

    def _check_parts(self, done: syncer_fx.CompleteCut) -> None:
        lives = self._lives_at[done.cut]
        for name, part in done.saved:
            told, saved = lives.get(name, 0), self._saved.get((name, done.cut, part.t), set())
            if part.incarnation != told or (saved and told not in saved):  # tests may say that a part was saved
                said = f"cut {done.cut} was taken in life {told} of {name}; its part is of life {part.incarnation}"
                raise Violation("a part of a cut is of its life", f"{said}, lives {saved} saved then", name)

    def _watch_message(self, syncer: SimulatedSyncer, learner: str, message: FromSyncer) -> None:
        if syncer is self._newest:
            rounds = message.clock[SYNCER]
            if len(message.clock) > 1 or not self._rounds_told <= rounds <= syncer.machine.committed:
                said = f"{message.clock} is sent after {self._rounds_told} of {syncer.machine.committed} rounds"
                raise Violation("clocks", said, learner)
            self._rounds_told = rounds
            if message.term != syncer.term:
                raise Violation("one fenced writer", f"a message of term {message.term} leaves term {syncer.term}")
        match message:
            case Announce(round=number, fragment=fragment, version=version):
                if number >= self.oracle.committed:
                    raise Violation("acknowledged = durable", f"round {number} is told, not written", learner, fragment)
                self._check_told(fragment, version, learner)
                return
            case Welcome(versions=versions) | Finish(versions=versions):
                for fragment, version in enumerate(versions):
                    self._check_told(fragment, version, learner)
            case Pull():
                if syncer is self._newest:
                    self.timing.watch_pull(syncer, learner, message)
                    self.drains.watch_pull(learner)
                return
            case Help():
                self.learner_checks.watch_help(message, syncer.served)  # a deposed syncer knows of nothing newer
            case _:
                pass
        if (wrong := unwritten(self.oracle, learner, message)) is not None:
            raise Violation("acknowledged = durable", f"{wrong}, which is not written down", learner)

    def _check_told(self, fragment: int, version: int, learner: str) -> None:
        if version > self.oracle.versions[fragment]:
            said = f"{learner} is told of version {version} of fragment {fragment}, which is not written down"
            raise Violation("acknowledged = durable", said, learner, fragment)
        self.told[fragment] = max(self.told[fragment], version)

    def _watch_merge(
        self, syncer: SimulatedSyncer, number: int, fragment: int, parts: tuple[syncer_fx.Part, ...]
    ) -> None:
        if number != syncer.machine.committed:
            said = f"round {number} is merged where round {syncer.machine.committed} is due"
            raise Violation("versions +1", said, fragment=fragment)
        for part in parts:
            if (part.learner, number, part.attempt) not in syncer.payloads:
                said = f"round {number} merges a contribution of {part.learner} that never came"
                raise Violation("merged at most once", said, part.learner, fragment)

    def _watch_commit(self, syncer: SimulatedSyncer, number: int, fragment: int, version: int) -> None:
        oracle, staged = self.oracle, syncer.staged[fragment][1]
        if oracle.committed <= number or oracle.values.get((fragment, version)) is None:
            raise Violation("acknowledged = durable", f"round {number} is committed, not written", fragment=fragment)
        if staged != oracle.values[fragment, version]:
            said = f"version {version} of fragment {fragment} is {staged}, its members make {oracle.theta[fragment]}"
            raise Violation("Θ is the replay of the journal", said, fragment=fragment)
        if syncer is not self._newest or number % SUMS:
            return
        totals = syncer.machine.history.ledger.totals()
        if any(totals.balance()):
            raise Violation("ledger balances", f"{totals}", fragment=fragment)
        own = [fates.merged for fates in syncer.machine.history.ledger.by_learner().values()]
        if not all(map(le, totals.missed, totals.dropped)) or tuple(map(sum, zip(*own, strict=True))) != totals.merged:
            raise Violation("ledger balances", f"{totals}, by learner {own} merged", fragment=fragment)
        if (much := too_much(syncer, self._learners)) is not None:
            raise Violation("bounded memory", much)

    # ---- notes --------------------------------------------------------------------------------------------------

    def _watch_note(self, syncer: SimulatedSyncer, note: Note) -> None:
        data: Any = note.data
        self.drains.watch_note(note)
        match note.kind:
            case "round":
                for member in data["members"]:
                    self._check_member(data["fragment"], data["version"], member)
                self.timing.watch_commit(syncer, data)
                self.link_checks.watch_commit(syncer, data)
                self._check_member_count(syncer, len(data["members"]), data)
            case "passed" | "again":
                if not data["reason"].strip():
                    raise Violation("quorum", f"{note.text} gives no reason")
            case "unbalanced":
                raise Violation("ledger balances", note.text, data.get("learner", ""))
            case "refused":
                if data.get("claim"):
                    raise Violation("an honest claim is believed", note.text, data["learner"])
            case "recovered":
                if data["learner"] in self._helping:
                    said = f"{data['learner']} recovered while its help is under way"
                    raise Violation("only the recovered contribute", said, data["learner"])
                self._recovered.add((data["learner"], data["incarnation"]))
            case "helping":
                self._recovered.discard((data["learner"], data["incarnation"]))  # it is to say so anew
                self._helping.add(data["learner"])
                self._asked.setdefault(data["learner"], set()).add(data["peer"])
            case "helped":
                self._helping.discard(data["learner"])
                if data["peer"] not in self._asked.get(data["learner"], ()):
                    said = f"{data['learner']} was helped by {data['peer']}, which was not asked"
                    raise Violation("only the recovered contribute", said, data["learner"])
            case "fresh" | "lost" | "left" | "quarantined":
                self._helping.discard(data["learner"])
            case _:
                pass

    def _check_member_count(self, syncer: SimulatedSyncer, members: int, data: Any) -> None:
        machine = syncer.machine
        if machine.state.draining or machine.settings.synchronous or data["attempt"] > 1:
            return
        if not members:
            raise Violation("quorum", f"round {data['round']} is committed without a member")

    def _check_member(self, fragment: int, version: int, member: Any) -> None:
        who = (member["learner"], member["incarnation"])
        if who not in self._recovered:
            said = f"{who[0]} (incarnation {who[1]}) contributes without having taken the run's parameters"
            raise Violation("only the recovered contribute", said, who[0], fragment)
        if not (member["steps"] > 0 and member["tokens"] > 0 and member["weight"] > 0):
            raise Violation("merged at most once", f"{who[0]} is a member with nothing: {member}", who[0], fragment)
        if not 0 <= member["base"] < version:
            raise Violation("versions +1", f"{who[0]}'s base is {member['base']}", who[0], fragment)

    # ---- what learners do ---------------------------------------------------------------------------------------

    def watch_contribution(self, learner: SimulatedLearner, copy: learner_fx.Copied) -> None:
        """A contribution leaves."""
        if learner.waits:
            said = f"{learner.name} sends a contribution while it waits for a peer's state"
            raise Violation("only the recovered contribute", said, learner.name, copy.fragment)

    def watch_adoption(self, learner: Training, adopt: learner_fx.Adopt, value: float, dropped: int) -> None:
        f = adopt.fragment
        committed = self.oracle.values.get((f, adopt.version))
        if committed != value and (f, adopt.version, value) not in self.oracle.never_were:
            said = f"{learner.name} adopts {value} as version {adopt.version} of fragment {f}, committed is {committed}"
            raise Violation("Θ is the replay of the journal", said, learner.name, f)
        if adopt.version <= learner.adopted[f]:
            said = f"{learner.name} adopts version {adopt.version} of fragment {f} over {learner.adopted[f]}"
            raise Violation("versions +1", said, learner.name, f)
        if learner.adopted[f] < self.oracle.least[f] <= adopt.version and adopt.rule != "overwrite":
            said = f"{learner.name} takes version {adopt.version} of fragment {f} by {adopt.rule} after a rollback"
            raise Violation("a rollback leaves nothing behind", said, learner.name, f)
        if adopt.rule == "carry" and committed == value:
            merged_t = self.oracle.find_copy(learner.name, learner.life, f, learner.adopted[f], adopt.version)
            if adopt.copy_t != merged_t:
                said = f"{learner.name} subtracts its copy of step {adopt.copy_t} (None: its base) from version "
                said += f"{adopt.version} of fragment {f}, which contains that of step {merged_t}"
                raise Violation("carry subtracts what is merged", said, learner.name, f)
        if dropped < 0:
            said = f"{learner.name} adopts version {adopt.version} of fragment {f}: more was merged than was there"
            raise Violation("ledger balances", said, learner.name, f)

    def watch_own(self, learner: Training) -> None:
        """It takes its own values for version 0, and fetches nothing."""
        for f, own in enumerate(learner.base):
            committed = self.oracle.values.get((f, 0))
            if committed != own and (f, 0, own) not in self.oracle.never_were:
                said = f"{learner.name} takes its own {own} for version 0 of fragment {f}, committed is {committed}"
                raise Violation("only the recovered contribute", said, learner.name, f)

    def watch_block(self, learner: Training) -> None:
        if not self._run_settings.synchronous:
            raise Violation("no step blocks", f"{learner.name} waits after step {learner.t}", learner.name)

    def watch_learner(
        self, learner: SimulatedLearner, event: learner_fx.LearnerEvent, effects: Sequence[learner_fx.LearnerEffect]
    ) -> None:
        """A learner heeds no term below the newest it has heard of."""
        if type(event) is learner_fx.Arrived and event.message.term != learner.term:
            term = event.message.term
            if term < learner.term and any(
                not isinstance(one, learner_fx.HangUp | Note | learner_fx.Say) for one in effects
            ):
                said = f"{learner.name} heeds term {term} after term {learner.term}: {effects}"
                raise Violation("one fenced writer", said, learner.name)
            learner.term = max(learner.term, term)
        self.learner_checks.watch_learner(learner, event, effects)


def _balances(account: Account, computed: int) -> bool:
    """computed = (m − u) + d + c, for every fragment."""
    rows = zip(account.merged, account.dropped, account.tokens, account.pending, strict=True)
    return all(m + d + c - (p.tokens if p is not None else 0) == computed for m, d, c, p in rows)


# ---- what may be told only once it is written ------------------------------------------------------------------------


def unwritten(oracle: Oracle, learner: str, message: FromSyncer) -> str | None:
    """What a message tells that no record does."""
    match message:
        case Welcome(incarnation=incarnation) | Recover(incarnation=incarnation):
            life = oracle.history.lives.get(learner)
            known = life is not None and life.incarnation >= incarnation
            return None if known else f"{learner} is told of its incarnation {incarnation}"
        case Lease(ranges=ranges):
            granted = {one.lease for life in oracle.samples.lives.values() for one in life.granted[-len(ranges) - 8 :]}
            missing = [one.lease for one in ranges if one.lease not in granted]
            return f"{learner} is told of leases {missing}" if missing else None
        case Started():
            return None if oracle.theta else "the first parameters are told of"
        case Ending():
            return None if oracle.history.ended else "it is told that the run ends"
        case Finish():
            return None if oracle.history.finished else "it is told that the run is over"
        case _:
            return None


def forgotten(history: History, whole: History) -> str | None:
    """What a cut and the journal behind it tell otherwise than the whole journal does."""
    ours, theirs = history.state(), whole.state()
    for name in ("term", "leases", *PLAIN_FIELDS):
        if (mine := getattr(ours, name)) != (other := getattr(theirs, name)):
            return f"{name}: {mine} after a cut, {other} by the whole journal"
    return None


# ---- how much the machines may keep: bounds by the settings, not by the length of the run ----------------------------


def too_much(syncer: SimulatedSyncer, learners: Mapping[str, SimulatedLearner]) -> str | None:
    """The first thing there is too much of."""
    for what, count, most in _sizes(syncer, learners):
        if count > most:
            return f"{what}: {count}, at most {most}"
    return None


def _sizes(syncer: SimulatedSyncer, learners: Mapping[str, SimulatedLearner]) -> Iterator[tuple[str, int, int]]:
    names, fragments = len(learners), syncer.machine.settings.fragments
    machine, history = syncer.machine, syncer.machine.history
    yield "learners known", len(machine.members.learners), names
    yield "rounds open", len(machine.state.open_rounds), fragments
    yield "recoveries open", len(machine.peers.open), names
    yield "accounts open", len(history.ledger.open), names
    yield "lives remembered", len(history.lives), names
    yield "cuts remembered", len(history.cuts), 8
    yield "payloads kept", len(syncer.payloads), (fragments + 1) * names
    for learner in learners.values():
        yield from _of_learner(learner, fragments)


def _of_learner(learner: SimulatedLearner, fragments: int) -> Iterator[tuple[str, int, int]]:
    name, flights = learner.name, 3 * fragments + 3
    yield f"copies at hand at {name}", len(learner.machine._copies._at_hand), fragments
    yield f"pulls waiting at {name}", len(learner.machine._copies.waiting), fragments
    yield f"orders of {name}", len(learner.machine._orders.pending), flights
    yield f"adoptions due at {name}", len(learner.inbox), fragments
    yield f"states given by {name}", len(learner.given), 2
