"""A slow learner's work is merged like everybody's: readiness per fragment, and copies ahead of what comes due."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.protocol.world import World

from atoll.courier.slots import COPY_GONE, OutgoingSlots
from atoll.protocol import records
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.copies import Orders, RoundsPerStep
from atoll.protocol.settings import Settings
from atoll.protocol.statistics import Average
from atoll.simulate.simulated_learner import SimulatedLearner
from atoll.simulate.training import Training

SLOW = "learner-3"
LEAST = {1.18: 0.88, 1.5: 0.88, 2.0: 0.85, 4.0: 0.75}
"""The least share of its work that is merged under overwrite, by how much slower it is."""


class Uneven(World):
    """Steps of 1 s for most, each longer or shorter by up to 1 %; 20 to 50 ms to anybody."""

    def __init__(self, slower: float, seed: int, **settings: object) -> None:
        speeds = [1.0, 1.0, 1.0, slower]
        super().__init__(
            4, step_s=speeds, seed=seed, latency_s=0.02, jitter=1.5, fragments=24, sync_every=24, **settings
        )

    def step_s(self, learner: Training) -> float:
        return learner.step_s * self.random.uniform(0.99, 1.01)


def merged_share(world: World, name: str) -> float:
    """Fragment-tokens merged over fragment-tokens computed."""
    shares = [share for record in world.journal if isinstance(record, records.MergedRecord) for share in record.members]
    merged = sum(share.tokens for share in shares if share.learner == name)
    return merged / (world.settings.fragments * world.learners[name].tokens_total)


def steps_between_syncs(world: World) -> float:
    since = [
        member["since"]
        for _, note in world.notes
        if note.kind == "round"
        for member in note.data["members"]  # type: ignore[attr-defined]
        if member["learner"] != SLOW and member["since"] is not None
    ]
    return sum(since) / len(since)


def check(slower: float, seed: int, adopt: str) -> None:
    world = Uneven(slower, seed, adopt=adopt).run_until(round=480)
    world.end()
    world.run_to_end()
    least = 0.96 if adopt == "carry" else LEAST[slower]
    shares = {name: merged_share(world, name) for name in world.learners}
    assert shares[SLOW] >= least, shares
    assert min(shares.values()) >= min(least, 0.88), shares
    assert not world.said("muted")
    assert 21.6 <= steps_between_syncs(world) <= 26.4


@pytest.mark.parametrize("adopt", ["overwrite", pytest.param("carry", marks=pytest.mark.faults)])
@pytest.mark.parametrize("slower", [4.0, *(pytest.param(some, marks=pytest.mark.faults) for some in (1.18, 1.5, 2.0))])
def test_the_work_of_a_slow_learner_is_merged(slower: float, adopt: str) -> None:
    check(slower, 0, adopt)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("adopt", ["overwrite", "carry"])
@pytest.mark.parametrize("slower", LEAST)
def test_the_work_of_a_slow_learner_is_merged_whatever_the_seed(slower: float, adopt: str, seed: int) -> None:
    check(slower, seed, adopt)


@pytest.mark.parametrize("adopt", ["carry", "overwrite"])
def test_carry_merges_the_work_of_a_learner_eight_times_slower(adopt: str) -> None:
    """Overwrite drops one of its three steps between two syncs: known, and the reason to carry (docs/promises.md)."""
    world = Uneven(8.0, 0, adopt=adopt).run_until(round=480)
    world.end()
    world.run_to_end()
    share = merged_share(world, SLOW)
    print(adopt, share)
    assert share >= 0.96 if adopt == "carry" else share < 0.75
    assert not world.said("muted")


# ---- with the courier's real slots ----------------------------------------------------------------------------------


class Slotted(Uneven):
    """Its learners keep their copies in the courier's slots."""

    def __init__(self, slower: float, seed: int, *, most: int, **settings: object) -> None:
        self.slots: dict[str, OutgoingSlots] = {}
        self.orders: dict[tuple[str, int], int] = {}
        """(learner, round) → slot of a copy that is ordered and not made."""
        self.most = most
        super().__init__(slower, seed, **settings)

    def slots_of(self, learner: SimulatedLearner) -> OutgoingSlots:
        first = OutgoingSlots(list(range(7)), reserve=lambda slot: slot < self.most)
        return self.slots.setdefault(learner.name, first)

    def carry_out_learner_effect(self, learner: SimulatedLearner, effect: fx.LearnerEffect) -> None:
        slots = self.slots_of(learner)
        match effect:
            case fx.Read(round=number, step=step):
                self._free(learner, number)
                if (slot := slots.take_slot(urgent=step <= learner.machine.t)) is None:
                    return
                self.orders[learner.name, number] = slot
            case fx.CancelRead(number):
                self._free(learner, number)
            case fx.Drop(fragment, t):
                slots.drop(fragment, t)
            case fx.Upload(number, attempt, fragment):
                if slots.send(fragment) is None:
                    learner.handle_event(fx.UploadFailed(number, attempt, COPY_GONE, no_copy=True))
                    return
        super().carry_out_learner_effect(learner, effect)

    def on_learner_event(
        self, learner: SimulatedLearner, event: fx.LearnerEvent, effects: Sequence[fx.LearnerEffect]
    ) -> None:
        slots = self.slots_of(learner)
        match event:
            case fx.Copied():
                slot = self.orders.pop((learner.name, event.round))
                slots.add_copy(event.fragment, event.t, slot, event.steps, event.tokens)
            case fx.Adopted(fragment):
                slots.adopted(fragment)
        super().on_learner_event(learner, event, effects)

    def _free(self, learner: SimulatedLearner, number: int) -> None:
        if (slot := self.orders.pop((learner.name, number), None)) is not None:
            self.slots_of(learner).free.append(slot)


@pytest.mark.parametrize("adopt", ["overwrite", pytest.param("carry", marks=pytest.mark.faults)])
def test_slots_are_reserved_as_a_slow_learner_needs_them(adopt: str) -> None:
    world = Slotted(4.0, 0, most=50, adopt=adopt).run_until(round=300)
    world.end()
    world.run_to_end()
    assert merged_share(world, SLOW) >= (0.96 if adopt == "carry" else LEAST[4.0])
    assert 7 < world.slots[SLOW].count <= 24, "about twice the copies ahead of one boundary, and no more"
    assert world.slots["learner-0"].count <= 12, "the burst of three rounds at the start included"


def test_where_slots_run_out_the_nearest_rounds_are_served_and_nobody_is_muted() -> None:
    world = Slotted(4.0, 0, most=0).run_until(round=300)
    world.end()
    world.run_to_end()
    assert world.slots[SLOW].count == 7
    assert merged_share(world, SLOW) >= 0.35
    assert min(merged_share(world, f"learner-{index}") for index in range(3)) >= 0.88
    assert not world.said("muted")


# ---- what is copied at which boundary -------------------------------------------------------------------------------


def test_as_many_rounds_are_prepared_for_as_went_by_between_two_boundaries() -> None:
    settings, rounds = Settings(fragments=24, sync_every=24), RoundsPerStep()
    assert rounds.count_ahead(settings) == 1
    for t, gathering in [(0, 0), (1, 4), (2, 7), (3, 12)]:
        rounds.pass_boundary(t, gathering)
    assert rounds.count_ahead(settings) == 5
    rounds.pass_boundary(4, 60)
    assert rounds.count_ahead(settings) == 24, "there are no more fragments"


def test_reports_that_were_left_out_do_not_make_rounds_look_faster() -> None:
    settings, rounds = Settings(fragments=24, sync_every=24), RoundsPerStep()
    for t, gathering in [(0, 0), (4, 4), (8, 8)]:
        rounds.pass_boundary(t, gathering)
    assert rounds.count_ahead(settings) == 1


def test_the_first_copy_waits_until_a_boundary_before_the_round_is_due() -> None:
    settings, rounds = Settings(fragments=4, sync_every=40), RoundsPerStep()
    assert rounds.steps_to_next(settings) == 9
    rounds.move_on(0, 0)
    rounds.move_on(5, 1)  # it makes five steps while the others make ten
    assert rounds.steps_to_next(settings) == 4


def test_orders_follow_the_round_that_gathers_and_keep_what_pulls_wait_for() -> None:
    done: list[fx.LearnerEffect] = []
    orders = Orders(done.append)
    orders.settings = Settings(fragments=24, sync_every=24)
    for t, gathering in [(0, 0), (1, 2)]:
        orders.move_on(t, gathering)
        orders.pass_boundary(t)
    orders.order_ahead(1, [])
    assert orders.pending == {2: 2, 3: 2}
    orders.move_on(1, 3)
    orders.order_ahead(1, [9])
    assert orders.pending == {3: 2, 4: 2, 9: 1} and fx.CancelRead(2) in done
    orders.move_on(9, 20)
    orders.order_ahead(9, [])
    assert min(orders.pending) == 20, "copies that were never made for want of a slot are forgotten"


def test_a_newcomer_has_the_time_of_the_median_learner_until_it_is_known() -> None:
    """A round waited for one that had just joined over a bad link for as long as the slowest link needs."""
    world = World(4, fragments=4, sync_every=8, latency_s=0.02).run_until(round=20)
    gathering, learners = world.syncer.rounds.closing, world.syncer.members.learners
    gathering.estimates.sync_s.value = 0.5  # one on a slow link has raised it
    newcomer, usual = learners["learner-3"], gathering.deadlines.of(learners["learner-2"])
    newcomer.answer_s.value = newcomer.step_s.value = None
    world.syncer.members.update_medians(newcomer)
    assert gathering.deadlines.of(newcomer) == pytest.approx(usual) and usual < gathering.deadline_s
    newcomer.answer_s.add(usual)  # it has missed a pull: from now on it has the time that it needs
    assert gathering.deadlines.of(newcomer) == gathering.deadline_s


def test_one_that_gives_its_last_steps_has_the_time_of_its_own_answers_up_to_a_limit() -> None:
    """It was asked again and again with a deadline that it could not keep, as long as the others answered soon."""
    world = World(3, fragments=4, sync_every=8).run_until(round=12)
    closing, one = world.syncer.rounds.closing, world.syncer.members.learners["learner-2"]
    floor_s = world.settings.pull_floor_s
    one.stopped = True
    assert closing.deadlines.of(one) == closing.deadline_s == floor_s, "its answers have been quick"
    one.answer_s = Average()
    one.answer_s.add(0.6 * floor_s)  # it missed a pull, say, and has had so long for it
    world.syncer.members.update_medians(one)
    assert closing.deadlines.of(one) == pytest.approx(4 * 0.6 * floor_s)
    one.answer_s.add(1000.0)
    world.syncer.members.update_medians(one)
    assert closing.deadlines.of(one) == 4 * floor_s, "no learner stretches it further"
