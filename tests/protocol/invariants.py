"""What must hold after every event of the syncer, whatever the world does to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.protocol import effects as fx
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
        self.clock: dict[str, int] = {}
        self.progress = 0.0

    def check(self, event: fx.SyncerEvent, effects: list[fx.SyncerEffect]) -> None:
        syncer, now = self.world.syncer, self.world.now
        assert syncer.wake_at is None or syncer.wake_at > now, "wake_at lies in the future"
        assert syncer.progress >= self.progress, "progress never goes back"
        self.progress = syncer.progress
        for effect in effects:
            match effect:
                case fx.Note():
                    self._note(effect)
                case fx.Commit(number, fragment, version):
                    self._commit(number, fragment, version)
                case fx.Send(_, message):
                    assert knows(message.clock, self.clock), "a vector clock never goes back"
                    self.clock = dict(message.clock)
                    if isinstance(message, Announce):
                        assert message.round < syncer.committed, "announced is committed or passed over"

    def _commit(self, number: int, fragment: int, version: int) -> None:
        assert number > self.round, "rounds commit in order of t"
        assert number % self.world.settings.fragments == fragment, "round t takes fragment t mod P"
        assert version == self.versions[fragment] + 1, "versions go up by one"
        self.round, self.versions[fragment] = number, version

    def _note(self, note: fx.Note) -> None:
        assert note.text.strip(), "every note has a text"
        data: Any = note.data
        if note.kind == "recovered":
            self.recovered.add((data["learner"], data["incarnation"]))
        elif note.kind in ("round", "passed", "again"):
            assert data["reason"].strip(), "every round says why"
        if note.kind == "round":
            assert data["members"], "a committed round has members"
            for member in data["members"]:
                self._member(data["fragment"], data["version"], member)

    def _member(self, fragment: int, version: int, member: Any) -> None:
        who = (member["learner"], member["incarnation"])
        assert who in self.recovered, f"{who} contributes without having taken the run's parameters"
        assert member["steps"] > 0 and member["tokens"] > 0 and member["weight"] > 0
        assert 0 <= member["base"] < version, "a base is a committed version"
        assert member["base"] >= self.bases.get((*who, fragment), 0), "merged again only on a base that holds it"
        key = (*who, fragment, member["base"], member["t"])
        assert key not in self.merged, f"{key} merged twice"
        self.merged.add(key)
        self.bases[(*who, fragment)] = version
