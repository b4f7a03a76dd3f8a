"""What must hold after every event of the syncer, whatever the world does to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.protocol import effects as fx
from atoll.protocol import records
from atoll.protocol.clock import knows
from atoll.protocol.messages import Announce

if TYPE_CHECKING:
    from tests.protocol.world import World


class Invariants:
    def __init__(self, world: World) -> None:
        self.world = world
        self.versions = [0] * world.settings.fragments
        self.round = -1
        self.merged: set[tuple[Any, ...]] = set()
        self.bases: dict[tuple[str, int, int], int] = {}
        """(learner, incarnation, fragment) → the version its last contribution went into."""
        self.recovered: set[tuple[str, int]] = set()
        self.helping: dict[str, set[str]] = {}
        """Newcomers that a peer helps now, and all that were asked."""
        self.clock: dict[str, int] = {}
        self.progress = 0.0
        self.written: set[int] = set()
        self.told = [-1] * world.settings.fragments
        """The newest version of every fragment that any learner was told of."""

    def restarted(self) -> None:
        """The syncer is another process, which knows what is durable: nothing that was told may be missing."""
        versions = self.world.syncer.versions
        assert all(now >= told for now, told in zip(versions, self.told, strict=True)), "a version was lost"
        self.clock, self.progress, self.helping = {}, 0.0, {}
        self.versions = [max(0, version) for version in versions]
        self.round = self.world.syncer.committed - 1

    def check(self) -> None:
        """What the syncer is, after an event."""
        syncer, now = self.world.syncer, self.world.now
        assert syncer.wake_at is None or syncer.wake_at > now, "wake_at lies in the future"
        assert syncer.progress >= self.progress, "progress never goes back"
        self.progress = syncer.progress
        totals = syncer.history.ledger.totals()
        assert not any(totals.balance()), f"the ledger does not balance: {totals}"
        for recovery in syncer.peers.open.values():
            assert not recovery.newcomer.live, "live before it has a peer's state, or knows that there is none"
            assert recovery.peer is not recovery.newcomer and (recovery.peer is None or recovery.peer.connected)

    def see(self, effect: fx.SyncerEffect) -> None:
        """What it does, in the order in which it is carried out."""
        match effect:
            case fx.Persist(lines):
                self.written |= {line.round for line in lines if isinstance(line, records.Merged | records.Passed)}
            case fx.Note():
                self._note(effect)
            case fx.Commit(number, fragment, version):
                assert number in self.written, "durable, then committed"
                self._commit(number, fragment, version)
            case fx.Send(_, message):
                assert knows(message.clock, self.clock), "a vector clock never goes back"
                self.clock = dict(message.clock)
                if isinstance(message, Announce):
                    assert message.round in self.written, "told only what is written down before"
                    self.told[message.fragment] = max(self.told[message.fragment], message.version)

    def _commit(self, number: int, fragment: int, version: int) -> None:
        assert number > self.round, "rounds commit in order of t"
        assert number % self.world.settings.fragments == fragment, "round t takes fragment t mod P"
        assert version == self.versions[fragment] + 1, "versions go up by one"
        self.round, self.versions[fragment] = number, version

    def _note(self, note: fx.Note) -> None:
        assert note.text.strip(), "every note has a text"
        assert note.kind != "unbalanced", note.text
        data: Any = note.data
        if note.kind == "recovered":
            assert data["learner"] not in self.helping, "recovered while its help is under way"
            self.recovered.add((data["learner"], data["incarnation"]))
        elif note.kind == "helping":
            self.recovered.discard((data["learner"], data["incarnation"]))  # it is to say so anew, after its help
            self.helping.setdefault(data["learner"], set()).add(data["peer"])
        elif note.kind == "helped":
            assert data["peer"] in self.helping.pop(data["learner"]), "helped by one that was asked"
        elif note.kind in ("fresh", "lost", "left", "quarantined"):
            self.helping.pop(data["learner"], None)
        elif note.kind in ("round", "passed", "again"):
            assert data["reason"].strip(), "every round says why"
        if note.kind == "round":
            assert data["members"], "a committed round has members"
            for member in data["members"]:
                self._member(data["fragment"], data["version"], member)

    def _member(self, fragment: int, version: int, member: Any) -> None:
        who = (member["learner"], member["incarnation"])
        assert who in self.recovered, f"{who} contributes without having taken the run's parameters"
        island = self.world.islands[member["learner"]]
        if island.alive and island.machine.incarnation == member["incarnation"]:
            assert not island.waits, f"{who} contributes while it waits for a peer's state"
        assert member["steps"] > 0 and member["tokens"] > 0 and member["weight"] > 0
        assert 0 <= member["base"] < version, "a base is a committed version"
        assert member["base"] >= self.bases.get((*who, fragment), 0), "merged again only on a base that holds it"
        key = (*who, fragment, member["base"], member["t"])
        assert key not in self.merged, f"{key} merged twice"
        self.merged.add(key)
        self.bases[(*who, fragment)] = version
