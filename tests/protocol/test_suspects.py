"""What the filter finds of each contribution: in the round's event, in the journal, and told once when it changes."""

from __future__ import annotations

from msgspec.structs import replace
from tests.protocol.world import World

from atoll.protocol.records import MergedRecord
from atoll.protocol.syncer import effects as fx

FACTORS = b"\x00\x00\x00\x00"


class Watched(World):
    """Its syncer judges: `suspects` are."""

    suspects: frozenset[str] = frozenset()

    def answer_merge(self, merge: fx.Merge) -> fx.SyncerEvent:
        event = super().answer_merge(merge)
        assert isinstance(event, fx.Merged)
        return replace(event, judged=tuple(self._judged(part.learner) for part in merge.parts))

    def _judged(self, learner: str) -> fx.Judged:
        hostile = learner in self.suspects
        return fx.Judged(learner, -0.5 if hostile else 0.25, 0.0 if hostile else 0.5, FACTORS, "why" if hostile else "")


def told(world: World) -> list[tuple[str, bool]]:
    return [(str(note.data["learner"]), bool(note.data["over"])) for note in world.said("suspect")]


def test_a_suspect_is_told_once_and_again_when_it_is_over() -> None:
    world = Watched(3, fragments=2, sync_every=4).run_until(round=4)
    assert told(world) == []
    world.suspects = frozenset({"learner-1"})
    world.run_until(round=10)
    assert told(world) == [("learner-1", False)], "once, however long it lasts"
    text = world.said("suspect")[0].text
    assert text == "learner-1 is suspect: why; `atoll set RUN robust=true` leaves such ones out"
    assert world.syncer.members.learners["learner-1"].suspect == "why"
    world.suspects = frozenset()
    world.run_until(round=14)
    assert told(world) == [("learner-1", False), ("learner-1", True)]
    assert not world.syncer.members.learners["learner-1"].suspect


def test_what_a_dead_life_gave_makes_no_suspect_of_the_next_one() -> None:
    world = Watched(3, fragments=2, sync_every=4, merge_s=0.5)
    world.run_until(round=4)
    world.suspects = frozenset({"learner-1"})
    while not any(round_.stage == "merging" for round_ in world.syncer.state.open_rounds.values()):
        world.run_until(seconds=0.1)
    world.kill("learner-1")
    world.join("learner-1")
    world.suspects = frozenset()
    world.run_until(seconds=0.6)
    assert "learner-1" in world.members(4), "its contribution had arrived, and is merged"
    assert told(world) == [] and not world.syncer.members.learners["learner-1"].suspect


def test_agreement_and_influence_are_in_the_rounds_event_and_factors_in_the_journal() -> None:
    world = Watched(3, fragments=2, sync_every=4)
    world.suspects = frozenset({"learner-1"})
    world.run_until(round=4)
    members = {one["learner"]: one for one in world.round_note(3)["members"]}
    assert (members["learner-1"]["agreement"], members["learner-1"]["influence"]) == (-0.5, 0.0)
    assert (members["learner-0"]["agreement"], members["learner-0"]["influence"]) == (0.25, 0.5)
    persisted = [record for _, effect in world.log if isinstance(effect, fx.Persist) for record in effect.records]
    merged = next(record for record in persisted if isinstance(record, MergedRecord) and record.round == 3)
    assert [share.factors for share in merged.members] == [FACTORS] * 3


def test_where_nobody_was_judged_the_event_says_nothing() -> None:
    world = World(3, fragments=2, sync_every=4).run_until(round=4)
    assert {one["agreement"] for one in world.round_note(3)["members"]} == {None}
