"""A learner that was cut off alone: which of the steps that it made meanwhile are merged, and with which weight."""

from __future__ import annotations

from typing import Any

import pytest
from tests.protocol.world import World

from atoll.protocol import records
from atoll.protocol.learner import effects as fx
from atoll.protocol.messages import Pull
from atoll.simulate.simulated_learner import SimulatedLearner

ALONE = "learner-0"
P = H = 24


class Cut(World):
    """Four learners that dial again by themselves; the link of one is cut for a while, without a word."""

    def __init__(self, step_s: float = 1.0, *, latency_s: float = 0.04, body_s: float = 0.05, **settings: Any) -> None:
        usual = {"fragments": P, "sync_every": H, "jitter": 0.5, "adopt": "carry"}
        super().__init__(4, step_s=step_s, latency_s=latency_s, body_s=body_s, **{**usual, **settings})
        self.network.redials = self.network.apart = True
        self.began = self.ended = self.back_in_round = 0

    @property
    def alone(self) -> SimulatedLearner:
        return self.learners[ALONE]

    def cut_for(self, seconds: float) -> Cut:
        self.began = self.alone.t
        self.network.block(self.alone, up=True, down=True)
        self.run_until(seconds=seconds)
        self.network.unblock(self.alone, up=True, down=True)
        while not self.syncer.members.learners[ALONE].connected:
            self.step()
        self.ended, self.back_in_round = self.alone.t, self.syncer.committed
        return self

    def contributions(self) -> list[tuple[records.MergedRecord, records.Share]]:
        merged = [record for record in self.journal if isinstance(record, records.MergedRecord)]
        return [(record, share) for record in merged for share in record.members if share.learner == ALONE]

    def merged_of_the_absence(self) -> float:
        """Share of the absence's steps, over all fragments, that versions contain: contributions follow each other."""
        steps = self.ended - self.began
        found = [min(own.t, self.ended) - max(own.t - own.steps, self.began) for _, own in self.contributions()]
        return sum(max(0, covered) for covered in found) / (steps * self.settings.fragments)

    def applied_weight(self) -> float:
        """Weight of the contributions that hold such steps, over the weight that they name."""
        rounds = {note.data["round"]: note.data["members"] for note in self.said("round")}
        applied = claimed = 0.0
        for record, own in self.contributions():
            if record.round >= self.back_in_round and own.t - own.steps < self.ended:
                [member] = [one for one in rounds[record.round] if one["learner"] == ALONE]  # type: ignore[attr-defined]
                applied, claimed = applied + member["weight"], claimed + own.tokens * (own.tokens / own.steps)
        return applied / claimed


def two_cycles_later(world: Cut) -> Cut:
    world.run_until(round=world.back_in_round + 2 * world.settings.fragments)
    return world


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.faults) for seed in (1, 2))])
@pytest.mark.parametrize(("step_s", "weight"), [(1.0, 0.55), (0.2, 0.15)])
def test_the_steps_of_a_minute_alone_are_merged_within_two_cycles(step_s: float, weight: float, seed: int) -> None:
    """A contribution of 2.6 or 12.5 cycles of steps counts for twice the median of the others: for all of its steps,
    at a part of their weight."""
    world = Cut(step_s, seed=seed).run_until(seconds=3.3 * H * step_s)
    assert isinstance(world, Cut)
    two_cycles_later(world.cut_for(60.0))
    assert world.merged_of_the_absence() >= 0.95
    assert world.applied_weight() == pytest.approx(weight, rel=0.15)
    [note] = world.said("returned")
    assert note.data["steps"] == pytest.approx(60.0 / step_s, abs=10 / step_s)
    assert note.data["kept"] >= 0.95 * note.data["steps"] and note.data["dropped"] < 1  # type: ignore[operator]
    assert note.data["weight_share"] == pytest.approx(world.applied_weight(), rel=0.15)
    assert "% of their weight in the next rounds (weight_limit)" in note.text
    by_learner = world.syncer.history.ledger.by_learner()
    assert by_learner[ALONE].merged_share() >= 0.99  # type: ignore[operator]


def test_steps_without_tokens_have_all_of_their_weight_which_is_none() -> None:
    """The first report of such a learner after an absence ended the syncer, by a division by zero."""
    world = Cut(seed=0)
    world.alone.tokens_per_step = 0
    world.run_until(seconds=80.0)
    assert isinstance(world, Cut)
    world.cut_for(60.0).run_until(seconds=3.0)
    [note] = world.said("returned")
    assert note.data["weight_share"] == 1.0


def test_overwrite_drops_the_steps_of_an_absence_and_says_so() -> None:
    world = Cut(adopt="overwrite").run_until(seconds=80.0)
    assert isinstance(world, Cut)
    two_cycles_later(world.cut_for(60.0))
    assert world.merged_of_the_absence() < 0.2, "of a few fragments a round asked before their version was there"
    [note] = world.said("returned")
    assert note.data["dropped"] > 0.9 * note.data["steps"]  # type: ignore[operator]
    assert "up to " in note.text
    assert "adopt = overwrite drops them with the versions that it missed of 24 of 24 fragments" in note.text


def test_past_abandon_s_nothing_of_the_absence_counts_and_its_data_is_issued_again() -> None:
    world = Cut(abandon_s=30.0, present=0)
    world.data = fx.Registered((("data", 1_000_000, 1.0),), 1, 10)
    for number in range(4):
        world.join(f"learner-{number}")
    world.run_until(seconds=80.0)
    two_cycles_later(world.cut_for(60.0))
    world.ended -= 1  # in the round trip of its hello it has begun another life
    assert world.merged_of_the_absence() == 0.0
    [note] = world.said("returned")
    assert (note.data["kept"], note.data["weight_share"]) == (0.0, 0.0)
    assert "longer than abandon_s = 30: none of the " in note.text
    assert "its data was issued again, and it takes the run's parameters anew" in note.text
    [gone] = [record for record in world.journal if isinstance(record, records.GoneRecord)]
    assert gone.reason == "away for 30 s"
    assert world.learners[ALONE].machine.incarnation == 2
    granted = [one for one in world.journal if isinstance(one, records.GrantedRecord)]
    before = [(one.epoch, one.start, one.stop) for one in granted if (one.learner, one.incarnation) == (ALONE, 1)]
    later = [(one.epoch, one.start, one.stop) for one in granted[granted.index(_last(granted)) + 1 :]]
    assert any(e == epoch and a < stop and start < b for epoch, start, stop in before for e, a, b in later)


def _last(granted: list[records.GrantedRecord]) -> records.GrantedRecord:
    """The last lease of its first life."""
    return [one for one in granted if (one.learner, one.incarnation) == (ALONE, 1)][-1]


def test_the_learner_says_in_its_own_log_that_it_is_connected_again_and_what_becomes_of_its_steps() -> None:
    texts = []
    for adopt in ("carry", "overwrite"):
        world = Cut(adopt=adopt, abandon_s=100.0).run_until(seconds=80.0)
        assert isinstance(world, Cut)
        world.cut_for(60.0).run_until(seconds=3.0)
        texts += [note.text for note in world.said("connected") if note.text.startswith(ALONE)]
        [event] = world.said("returned")
        figures = f"connected again after {event.data['away_s']:.1f} s. Of the {event.data['steps']:,} steps "
        assert figures in texts[-1] and figures in event.text, "one absence has one figure"
    kept, dropped = texts
    assert kept.startswith("learner-0: connected again after ") and kept.endswith(" are kept")
    assert "because adopt = overwrite drops them with the versions that it missed of 24 of 24 fragments" in dropped


def test_past_abandon_s_its_own_log_says_that_none_of_the_steps_counts() -> None:
    world = Cut(abandon_s=30.0).run_until(seconds=80.0)
    assert isinstance(world, Cut)
    world.cut_for(60.0).run_until(seconds=3.0)
    told = [note.text for note in world.said("connected") if note.text.startswith(ALONE)][-1]
    assert "its life was closed meanwhile (abandon_s = 30): none of the " in told


def test_a_short_absence_is_not_told() -> None:
    world = Cut().run_until(seconds=50.0)
    assert isinstance(world, Cut)
    world.unlink(ALONE)
    world.run_until(seconds=2.0)
    world.link(ALONE)
    world.run_until(seconds=30.0)
    assert not world.said("returned")


def test_one_that_was_silent_when_it_missed_its_pulls_is_asked_at_once_when_it_is_back() -> None:
    world = Cut().run_until(seconds=80.0)
    assert isinstance(world, Cut)
    world.cut_for(60.0)
    assert world.said("muted")
    back = world.now
    world.run_until(seconds=10.0)
    pulls = [message for at, message in world.sent(Pull, ALONE) if at >= back]
    assert pulls and not any(pull.probe for pull in pulls)


def test_a_probe_whose_answer_takes_long_counts() -> None:
    """The next probe voided it after two seconds: on a narrow link a learner that fell mute stayed so for good."""
    world = World(3, fragments=4, sync_every=16, step_s=0.5, body_s=2.5, latency_s=0.1).run_until(round=8)
    world.network.apart = True
    world.learners["learner-2"].answers = False
    world.run_until(seconds=60.0)
    assert world.said("muted")
    world.learners["learner-2"].answers = True
    world.run_until(seconds=60.0)
    assert world.said("probed")


@pytest.mark.parametrize("body_s", [2.0, 4.0])
def test_carry_drops_nothing_where_versions_take_as_long_as_a_cycle(body_s: float) -> None:
    """A version that came while a copy was on its way to a round was adopted, and the copy could not be subtracted when
    the version came that holds it: a tenth to four tenths of all steps were overwritten."""
    world = Cut(0.2, latency_s=0.1, body_s=body_s, seed=3)
    world.run_until(seconds=90.0)
    totals = world.syncer.history.ledger.by_learner().values()
    assert sum(sum(one.dropped) for one in totals) == 0
    assert sum(sum(one.merged) for one in totals) > 0
