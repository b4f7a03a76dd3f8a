"""What the filter finds of each contribution: in the round's event, in the journal, and told once when it changes."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace
from tests.protocol.world import World

from atoll.numerics.filter import Filter
from atoll.numerics.fragments import make_plan
from atoll.protocol.messages import TensorSpec
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


PLAN = make_plan([TensorSpec("a", (40, 20), "float32"), TensorSpec("b", (30, 20), "float32")], 2)


class Comparing(World):
    """Its syncer judges by the shipped filter: contributions are as long as their steps, directions agree a little."""

    hostile = ""
    lowest = 1.0
    """Smallest share of a contribution that was kept."""

    def answer_merge(self, merge: fx.Merge) -> fx.SyncerEvent:
        event = super().answer_merge(merge)
        assert isinstance(event, fx.Merged)
        if "filter_" not in vars(self):
            self.filter_, self.dice = Filter(PLAN, sync_every=self.settings.sync_every), np.random.default_rng(0)
        size = PLAN.fragments[merge.fragment % 2].size
        common = 0.5 * self.dice.standard_normal(size)
        deltas = [
            (part.steps * (6.0 if part.learner == self.hostile else 1.0) * (common + self.dice.standard_normal(size)))
            for part in merge.parts
        ]
        names, steps = [part.learner for part in merge.parts], [part.steps for part in merge.parts]
        judged = self.filter_.judge(
            merge.fragment % 2, names, [delta.astype(np.float32) for delta in deltas], steps=steps
        )
        kept = [float(one.factors.mean()) for one in judged]
        self.lowest = min(*kept, self.lowest)
        told = zip(names, judged, kept, strict=True)
        return replace(
            event,
            judged=tuple(
                fx.Judged(name, one.agreement, 0.2, FACTORS if of < 1 else b"", one.suspect, of)
                for name, one, of in told
            ),
        )


def grow(hostile: str = "") -> Comparing:
    """Two learners become five at once."""
    world = Comparing(2, fragments=12, sync_every=12)
    world.hostile = hostile
    world.run_until(round=40)
    for number in range(2, 5):
        world.join(f"learner-{number}")
    return world.run_until(round=100)


def test_a_run_that_grows_makes_no_suspect_of_anybody() -> None:
    world = grow()
    assert {len(one["members"]) for one in (world.round_note(n) for n in range(60, 100))} == {5}
    assert told(world) == [] and world.lowest > 0.75
    filtered = world.syncer.history.ledger.totals().whole()["filtered"]
    assert filtered <= 0.01 * world.syncer.history.ledger.totals().whole()["computed"]


def test_in_a_run_that_grows_a_loud_learner_is_named_and_the_ledger_says_what_was_left_out() -> None:
    world = grow("learner-1")
    assert {name for name, _ in told(world)} == {"learner-1"}
    by_learner = world.syncer.history.ledger.by_learner()
    loud, honest = by_learner["learner-1"].whole(), by_learner["learner-0"].whole()
    assert loud["filtered"] > 0.3 * loud["computed"] and honest["filtered"] < 0.05 * honest["computed"]
    assert not any(world.syncer.history.ledger.totals().balance())
    assert world.syncer.history.ledger.totals().by_cause()["filtered"] > 0


def test_where_as_many_are_suspects_as_not_robust_is_no_advice() -> None:
    world = Watched(4, fragments=2, sync_every=4).run_until(round=4)
    world.suspects = frozenset({"learner-0", "learner-1"})
    world.run_until(round=10)
    texts = [note.text for note in world.said("suspect")]
    assert texts[0].endswith("`atoll set RUN robust=true` leaves such ones out")
    assert texts[1].endswith("2 of 4 learners are: compare their data, batches and learning rates")
