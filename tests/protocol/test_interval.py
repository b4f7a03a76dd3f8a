"""How far apart rounds are, how many are under way, and which share of them each learner takes part in."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol import schedule
from atoll.protocol.effects import Note
from atoll.protocol.history import History
from atoll.protocol.messages import RoundShare
from atoll.protocol.phases import TrainingPhase
from atoll.protocol.records import BegunRecord, ChangedRecord
from atoll.protocol.settings import Settings
from atoll.protocol.syncer.effects import Send
from atoll.protocol.syncer.interval import HEADROOM, MEASURED_AFTER, NEAR, RISES_AFTER, RoundInterval
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.state import Round, SyncerState

USUAL = Settings(fragments=24, sync_every=24, overlap=2)
STEP_S = 0.2
BODY = 1e6
"""Bytes of a contribution and of a version: at `WIDE` they take half of an interval of one step."""
WIDE = 1e7
RISEN = ceil(24 * RISES_AFTER)
"""Commits after which a share rises."""


@dataclass
class Committing:
    """An interval that follows one commit after another."""

    rates: list[float]
    """Per learner, bytes per second of both ways."""
    settings: Settings = USUAL
    round_s: float = 0.1
    merge_s: float = 0.01
    overlap: float | None = None
    told: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = SyncerState(History(BegunRecord("run", self.settings.resolved(1000), {}, (), "plan")))
        self.interval = RoundInterval(self.state)
        self.interval.up_bytes = self.interval.down_bytes = BODY
        for number, rate in enumerate(self.rates):
            self.add(f"learner-{number}", rate)

    def add(self, name: str, rate: float) -> None:
        learner = KnownLearner(name, name, 1, 0.0, self.state.settings.fragments, state="training")
        learner.step_s.add(STEP_S)
        learner.up_rates = learner.down_rates = (rate, 0.0)
        self.state.members._add(learner)

    def learner(self, number: int) -> KnownLearner:
        return self.state.members.learners[f"learner-{number}"]

    def commit(self, times: int = 3) -> float:
        for _ in range(times):
            round_ = Round(0, 0, 0.0, frozen_at=1.0, merging_at=1.0 + self.round_s - self.merge_s)
            self.interval.note_commit(1.0 + self.round_s, round_, self.overlap)
            self.told += self.state.out.take_effects()
        return self.interval.steps

    def shares_told(self) -> list[tuple[str, float]]:
        sent = [one for one in self.told if isinstance(one, Send) and isinstance(one.message, RoundShare)]
        return [(one.learner, one.message.share) for one in sent]  # type: ignore[union-attr]

    def notes(self, kind: str) -> list[Note]:
        return [one for one in self.told if isinstance(one, Note) and one.kind == kind]


def steps_at(rate: float) -> float:
    """Steps that a round needs of a way of this rate."""
    return HEADROOM * BODY / rate / STEP_S


# ---- the interval --------------------------------------------------------------------------------------------------


def test_links_that_carry_more_than_is_asked_leave_h_alone() -> None:
    committing = Committing([WIDE] * 4)
    assert committing.commit() == 1.0
    assert committing.interval.narrowest is None and not committing.notes("pace")


def test_the_interval_is_h_over_p_where_nothing_is_known() -> None:
    assert Committing([0.0] * 3).commit() == 1.0
    assert Committing([0.0] * 3, Settings(fragments=8, sync_every=24)).commit() == 3.0
    unknown = Committing([1e6] * 3)
    unknown.interval.up_bytes = unknown.interval.down_bytes = 0.0
    assert unknown.commit() == 1.0


@pytest.mark.parametrize(
    ("rates", "pace"),
    [
        ([1e6], 1e6),
        ([1e6, 2e6], 2e6),
        ([2e6, 2e6], 2e6),
        ([1e6, 2e6, 3e6], 2e6),
        ([1e6, 1e6, 3e6], 1e6),
        ([1e6, 2e6, 3e6, 4e6], 3e6),
        ([1e6, 1e6, 1e6, 4e6], 1e6),
        ([2e6, 2e6, 2e6, 0.5e6], 2e6),
        ([1.9e6, 2e6, 2.1e6, 2e6], 1.9e6),
    ],
)
def test_the_median_learners_narrower_way_sets_the_pace(rates: list[float], pace: float) -> None:
    """Of two in the middle the wider one, and those that are near it."""
    assert Committing(rates).commit() == pytest.approx(steps_at(pace))


@pytest.mark.parametrize("way", ["up_rates", "down_rates"])
@pytest.mark.parametrize("stretch", [0, 1])
def test_either_way_and_either_stretch_of_it_counts(way: str, stretch: int) -> None:
    committing = Committing([WIDE] * 3)
    for number in range(3):
        rates = (WIDE, 1e6) if stretch else (1e6, WIDE)
        setattr(committing.learner(number), way, rates)
    assert committing.commit() == pytest.approx(steps_at(1e6))
    assert committing.interval.narrowest is not None
    assert committing.interval.narrowest.part.startswith("way up" if way == "up_rates" else "way down")


def test_merge_and_disk_count_as_they_are() -> None:
    committing = Committing([WIDE] * 3, round_s=0.5, merge_s=0.4)
    assert committing.commit() == pytest.approx(HEADROOM * 0.4 / STEP_S)
    assert committing.interval.narrowest is not None and committing.interval.narrowest.part == "merge and disk"


@pytest.mark.parametrize("slow", range(6))
def test_a_disk_that_stands_still_once_leaves_h_alone(slow: int) -> None:
    committing = Committing([WIDE] * 3, round_s=10.0)
    for commit in range(6):
        committing.merge_s = 9.0 if commit == slow else 0.01
        assert committing.commit(1) == 1.0


@pytest.mark.parametrize("claim", [5e-324, 1e-305, 1e-4, 1e29, 1.0, 0.0])
@given(others=st.integers(1, 5), rate=st.floats(1e5, 2e6))
def test_no_single_claim_moves_the_pace_by_more_than_near(claim: float, others: int, rate: float) -> None:
    honest = Committing([rate] * others).commit()
    claiming = Committing([rate] * others + [claim])
    moved = claiming.commit()
    wider = others == 1 and (claim > rate or not claim)  # 0: nothing was measured, as on a link without a limit
    if wider:
        assert moved <= honest, "of two the wider sets the pace: a claim of more only makes rounds come sooner"
    else:
        assert honest / NEAR <= moved <= honest * NEAR
    # Nobody's share but the claimant's own falls, unless what it claims is the wider way of two.
    shares = [claiming.learner(number).share for number in range(others)]
    assert shares == [1.0] * others or wider


@pytest.mark.parametrize("claim", [5e-324, 1e-305, 1e-4])
def test_the_smallest_claim_leaves_every_time_finite(claim: float) -> None:
    """One report of 1e-305 bytes per second divided by zero, and ended the syncer."""
    alone = Committing([claim])
    alone.commit()
    assert alone.interval.carried_s < inf and len(alone.notes("pace")) == 1, "told once"
    claiming = Committing([2e6] * 3 + [claim])
    claiming.commit()
    assert claiming.learner(3).share == pytest.approx(1 / 24)
    assert claiming.interval.lead_s(claiming.learner(3)) < inf


def test_a_claim_just_above_the_middle_moves_it_by_near_at_most() -> None:
    honest = Committing([1e6] * 3).commit()
    moved = Committing([1e6] * 3 + [1e6 / NEAR * 1.0001]).commit()
    assert honest < moved <= honest * NEAR


def test_reports_in_one_burst_say_nothing_of_a_step() -> None:
    committing = Committing([1e6] * 2)
    for number in range(2):
        learner = committing.learner(number)
        learner.step_s = type(learner.step_s)()
        learner.step_s.add(0.0)
        committing.state.members.update_medians(learner)
    assert committing.commit() == 1.0


# ---- with an H below P ---------------------------------------------------------------------------------------------

PHASES = (TrainingPhase(until=0.5, sync_every=2, overlap=1), TrainingPhase(until=1.0, sync_every=24, overlap=2))


def test_with_an_h_below_p_a_fragment_is_read_again_once_its_version_is_adopted() -> None:
    committing = Committing([1e9] * 3, Settings(fragments=24, sync_every=2, overlap=1), merge_s=0.0)
    assert committing.commit() == pytest.approx(2 / 24)
    committing.overlap = 5.0
    assert committing.commit() == pytest.approx(6 / 24)
    committing.overlap = 1000.0
    assert committing.commit() == 1.0, "however long versions take, there is a round per step"


def test_in_a_phase_the_last_phases_h_is_the_limit() -> None:
    settings = Settings(fragments=8, sync_every=24, steps=1000, phases=PHASES)
    committing = Committing([1e9] * 3, settings, merge_s=0.0, overlap=1000.0)
    begun = committing.state.settings
    committing.state.change_settings(ChangedRecord(begun.in_phase(1, begun), {}, "phase 1", training_phase=1))
    committing.interval.start_anew()
    assert committing.state.settings.sync_every == 2
    assert committing.commit() == 3.0, "as with the H of the last phase"


def test_the_overlap_does_not_lengthen_an_h_of_p_or_more() -> None:
    assert Committing([WIDE] * 3, overlap=50.0).commit() == 1.0


# ---- the drain -----------------------------------------------------------------------------------------------------


def test_versions_that_queue_at_the_median_learner_drain() -> None:
    committing = Committing([1e6] * 3)
    plain = committing.commit()
    committing.state.versions = [9] * 24
    for number in range(3):
        committing.learner(number).versions = (9,) * 24
    assert committing.commit() == pytest.approx(plain)
    for number in range(3):
        committing.learner(number).versions = (8,) * 6 + (9,) * 18
    assert plain < committing.commit() <= 2 * plain
    committing.learner(0).versions = committing.learner(1).versions = (9,) * 24
    assert committing.commit() == pytest.approx(plain), "one learner that is behind slows nobody down"
    assert committing.interval.steps == pytest.approx(plain)


def test_on_links_that_carry_more_than_is_asked_the_drain_leaves_h_alone() -> None:
    committing = Committing([1e9] * 3)
    committing.state.versions = [9] * 24
    for number in range(3):
        committing.learner(number).versions = (8,) * 24
    assert committing.commit() == 1.0


# ---- what is told --------------------------------------------------------------------------------------------------


def test_h_is_told_with_the_part_that_sets_it_once_for_each_change() -> None:
    committing = Committing([1e6] * 3)
    committing.commit(times=10)
    [note] = committing.notes("pace")
    assert "was asked" in note.text and "way down of learner-" in note.text and "Mbit/s" in note.text
    assert note.data["h"] == pytest.approx(24 * steps_at(1e6), rel=1e-3) and note.data["asked"] == 24
    for number in range(3):
        committing.learner(number).up_rates = committing.learner(number).down_rates = (1.1e6, 0.0)
    committing.commit(times=5)
    assert len(committing.notes("pace")) == 1, "a tenth is not worth telling"
    for number in range(3):
        committing.learner(number).up_rates = committing.learner(number).down_rates = (1e9, 0.0)
    committing.commit(times=5)
    assert [note.data["h"] for note in committing.notes("pace")][1:] == [24.0]


def test_a_synchronous_run_is_told_nothing_else_and_keeps_its_schedule() -> None:
    committing = Committing([1e6] * 4, Settings(fragments=24, sync_every=24, synchronous=True))
    committing.add("learner-4", 1e3)
    assert committing.commit() == 1.0
    assert committing.interval.narrowest is not None, "what it would take can be shown"
    assert not committing.shares_told()


def test_the_last_cycle_and_second_attempts_measure_nothing() -> None:
    committing = Committing([1e6] * 3)
    committing.state.draining = True
    assert committing.commit() == 1.0
    committing.state.draining = False
    again = Round(0, 0, 0.0, frozen_at=1.0, merging_at=1.0, attempt=2)
    committing.interval.note_commit(9.0, again, None)
    assert committing.interval.steps == 1.0


# ---- rounds under way ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("round_s", "flights"), [(0.0, 1), (0.1, 2), (0.2, 2), (0.3, 3), (1.0, 6), (60.0, 23)])
def test_as_many_rounds_are_under_way_as_begin_in_the_time_of_one(round_s: float, flights: int) -> None:
    committing = Committing([1e9] * 2, round_s=round_s, merge_s=0.0)
    committing.commit()
    assert committing.interval.needed == flights


def test_the_quickest_of_the_last_rounds_counts() -> None:
    """The others may have waited for each other."""
    committing = Committing([1e9] * 2, round_s=0.3, merge_s=0.0)
    committing.commit()
    committing.round_s = 3.0
    committing.commit(times=10)
    assert committing.interval.needed == 3


@given(budget=st.integers(0, 2**40), each=st.integers(0, 2**32), learners=st.integers(0, 64))
def test_memory_lowers_the_number_to_what_the_overlap_asks_for_at_least(budget: int, each: int, learners: int) -> None:
    found = schedule.affordable_flights(budget, each, learners, USUAL)
    assert schedule.least_flights(USUAL) <= found <= schedule.most_flights(USUAL)
    assert found == schedule.least_flights(USUAL) or found * each * max(1, learners) <= budget
    assert schedule.affordable_flights(2 * budget, each, learners, USUAL) >= found


def test_memory_that_is_allowed_limits_the_rounds_and_is_named() -> None:
    committing = Committing([1e9] * 2, round_s=1.0, merge_s=0.0)
    committing.interval.contribution_bytes, committing.interval.budget_bytes = 10, 80
    committing.commit()
    assert committing.interval.needed == 6 and committing.interval.allowed == 4, "two learners of 10 bytes each"
    assert committing.interval.lacks_memory


# ---- shares --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("carried", "share"),
    [(0.86, 6 / 8), (0.5, 4 / 8), (0.49, 3 / 8), (0.25, 2 / 8), (0.13, 1 / 8), (0.1, 0.1), (0.001, 1 / 24)],
)
def test_a_narrower_learner_has_the_share_that_its_ways_carry(carried: float, share: float) -> None:
    committing = Committing([2e6] * 3 + [carried * 2e6 * 1.0001])
    committing.commit(times=5)
    assert committing.learner(3).share == pytest.approx(share)
    assert committing.shares_told() == [("learner-3", pytest.approx(share))], "told once"
    assert [note.data["share"] for note in committing.notes("share")] == [pytest.approx(share)]
    assert "Mbit/s" in committing.notes("share")[0].text


def test_a_share_counts_against_the_interval_and_not_against_the_median() -> None:
    """Where H/P steps set the interval, a learner with a third of the others' link may carry every round."""
    committing = Committing([3 * WIDE] * 3 + [WIDE])
    committing.commit()
    assert committing.learner(3).share == 1.0
    overloaded = Committing([3 * WIDE] * 3 + [BODY / (1.1 * STEP_S)])
    overloaded.commit()
    assert overloaded.learner(3).share < 1.0, "its bodies would queue without end"


def test_a_share_rises_only_once_its_ways_carry_clearly_more() -> None:
    committing = Committing([2e6] * 3 + [0.51 * 2e6])
    committing.commit()
    learner = committing.learner(3)
    assert learner.share == 4 / 8
    for carried in (0.49, 0.51, 0.52):
        learner.up_rates = learner.down_rates = (carried * 2e6, 0.0)
        committing.commit()
    assert learner.share == 3 / 8 and len(committing.shares_told()) == 2
    learner.up_rates = learner.down_rates = (0.53 * 2e6, 0.0)
    committing.commit(times=RISEN - 1)
    assert learner.share == 3 / 8
    committing.commit(times=1)
    assert learner.share == 4 / 8
    learner.up_rates = learner.down_rates = (2e6, 0.0)
    committing.commit(times=RISEN)
    assert learner.share == 1.0 and committing.shares_told()[-1] == ("learner-3", 1.0)


def test_a_rate_that_moves_about_changes_no_share_again_and_again() -> None:
    """On a busy machine two learners were told of another share about 180 times, often twice in a second."""
    committing = Committing([2e6] * 4)
    learner = committing.learner(3)
    for number in range(200):
        learner.down_rates = (2e6 if number % 10 else 1.2e6, 0.0)
        committing.commit(times=3)
    assert committing.shares_told() == [("learner-3", 4 / 8)]
    learner.down_rates = (2e6, 0.0)
    committing.commit(times=RISEN)
    assert committing.shares_told()[1:] == [("learner-3", 1.0)]


def test_links_that_become_narrower_together_leave_every_learner_its_rounds() -> None:
    """Of four equal links two were first to be measured as narrow; they kept 75 % of the rounds for four cycles."""
    committing = Committing([2e6] * 4)
    committing.commit()
    for number in range(4):
        committing.learner(number).up_rates = (1e6, 0.0)
        committing.commit(times=2)
    assert ("learner-0", 4 / 8) in committing.shares_told(), "it was the first"
    committing.commit(times=MEASURED_AFTER)
    assert {committing.learner(number).share for number in range(4)} == {1.0}


def test_a_share_of_small_bodies_names_their_time_and_no_width() -> None:
    committing = Committing([2e6] * 3 + [1e6])
    committing.interval.up_bytes = committing.interval.down_bytes = 67_600
    committing.learner(3).up_rates = committing.learner(3).down_rates = (67_600 / 0.39, 0.0)
    committing.commit()
    [note] = committing.notes("share")
    assert note.text == (
        "learner-3: way down of learner-3: a body of 67.6 kB takes 0.39 s, a round begins every 0.2 s: "
        "it takes part in 38 % of the rounds"
    )
    assert committing.interval.describe_way(committing.learner(3)) == "way down: a body of 67.6 kB takes 0.39 s"


def test_equal_learners_all_take_part_in_every_round_whatever_is_measured() -> None:
    committing = Committing([1.9e6, 2e6, 2.1e6, 1.95e6])
    committing.commit(times=5)
    assert not committing.shares_told()


# ---- turns ---------------------------------------------------------------------------------------------------------

SHARES = st.one_of(st.integers(1, 8).map(lambda eighths: eighths / 8), st.integers(9, 64).map(lambda n: 1 / n))


@given(fragments=st.integers(1, 64), share=SHARES, cycle=st.integers(0, 1000))
def test_over_as_many_cycles_each_fragment_has_its_turn_equally_often(fragments: int, share: float, cycle: int) -> None:
    settings = Settings(fragments=fragments, sync_every=fragments)
    cycles = 8 if (8 * share).is_integer() else round(1 / share)
    turns = [
        sum(schedule.has_turn((cycle + more) * fragments + fragment, share, settings) for more in range(cycles))
        for fragment in range(fragments)
    ]
    assert turns == [round(cycles * share)] * fragments


@given(fragments=st.integers(1, 64), share=SHARES, cycle=st.integers(0, 1000))
def test_a_cycle_has_as_many_turns_as_the_share_says(fragments: int, share: float, cycle: int) -> None:
    settings = Settings(fragments=fragments, sync_every=fragments)
    rounds = range(cycle * fragments, (cycle + 1) * fragments)
    turns = sum(schedule.has_turn(number, share, settings) for number in rounds)
    assert abs(turns - fragments * share) < 1
