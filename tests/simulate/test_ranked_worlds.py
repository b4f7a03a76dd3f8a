"""The fault simulator's worlds with learners of several ranks: every promise holds, and those of ranks too."""

from __future__ import annotations

import msgspec
import pytest

from atoll.learner.meeting import Meeting
from atoll.mailbox.channel import StopOrder, ToTraining
from atoll.simulate import campaign
from atoll.simulate.cells import LAYOUTS, CellModel, begin_cells, front_of, join_parts, take_part
from atoll.simulate.faults import Fault
from atoll.simulate.ranked_learner import RankedLearner


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.faults) for block in range(1, 50))])
def test_whatever_is_drawn_every_promise_holds(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        plan = campaign.plan(seed, kind="ranks")
        outcome = campaign.run(plan, campaign.make(plan, traced=False))
        again = f"atoll simulate faults --seed {seed} --worlds ranks"
        assert not outcome.invariant, f"{again}: {outcome.invariant}: {outcome.message}"


@pytest.mark.parametrize("seed", [430, 615])
def test_ranks_that_encode_for_longer_than_a_round_waits_give_their_last_steps(seed: int) -> None:
    """At the end a pull had the deadline of any other, and nobody asks again: up to half of what a learner computed was
    lost."""
    plan = campaign.plan(seed, kind="ranks")
    assert plan.ranks is not None and plan.ranks.delay_s == 0.3
    plan = msgspec.structs.replace(plan, faults=())
    outcome = campaign.run(plan, campaign.make(plan, traced=False))
    assert not outcome.invariant, outcome.message


ENDED_AS_IT_BEGAN = [(1336631, 5), (21346, 4), (22441, 3)]
"""Seeds and numbers of learners: the run ends before the ranks of the learner that gave version 0 know it by its
number."""


@pytest.mark.parametrize(("seed", "learners"), ENDED_AS_IT_BEGAN)
def test_ranks_leave_a_run_that_ends_as_it_begins_with_version_0(seed: int, learners: int) -> None:
    """The learner was judged by what its ranks had carried out when it said that it leaves. The order to take their own
    values for version 0 was on its way to them, in front of the order to stop."""
    plan = campaign.plan(seed, learners, "ranks")
    outcome = campaign.run(plan, campaign.make(plan, traced=False))
    assert not outcome.invariant, outcome.message


@pytest.mark.parametrize(("seed", "learners"), ENDED_AS_IT_BEGAN)
def test_ranks_that_stop_before_they_take_version_0_are_found(
    monkeypatch: pytest.MonkeyPatch, seed: int, learners: int
) -> None:
    plain = Meeting.add

    def add_stop_first(self: Meeting, frame: ToTraining) -> None:
        plain(self, frame)
        if isinstance(frame, StopOrder):
            self.waiting.rotate(1)

    monkeypatch.setattr(Meeting, "add", add_stop_first)
    plan = campaign.plan(seed, learners, "ranks")
    outcome = campaign.run(plan, campaign.make(plan, traced=False))
    assert outcome.invariant == "the last to go has the model" and "rank 0 of" in outcome.message, outcome.message


def test_ranks_are_drawn_apart() -> None:
    """Settings, hosts, links and all other faults are those of the seed's plain world."""
    for seed in range(20):
        plain, ranked = campaign.plan(seed), campaign.plan(seed, kind="ranks")
        assert plain.ranks is None and ranked.ranks is not None and ranked.options == plain.options
        assert set(plain.faults) <= set(ranked.faults)
        assert len(ranked.ranks.counts) == plain.options.settings.learners and 2 <= max(ranked.ranks.counts) <= 4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_of_ranks_are_the_whole(layout: str, ranks: int) -> None:
    model = CellModel(3)
    plans = model.make_plans(model.make_boxes(ranks, layout))  # type: ignore[arg-type]
    for fragment in range(3):
        held = {rank: take_part(plan, fragment, begin_cells()) for rank, plan in enumerate(plans)}
        sent = {rank: front_of(plans[rank], fragment, part) for rank, part in held.items()}
        assert join_parts(plans, fragment, sent) == begin_cells()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_the_learner_which_comes_back_as_one(rank: int) -> None:
    plan = campaign.plan(3, 2, "ranks")
    assert plan.ranks is not None
    ranks = msgspec.structs.replace(plan.ranks, counts=(2, 1), layouts=("rows", "rows"))
    plan = msgspec.structs.replace(plan, ranks=ranks, faults=(Fault(20.0, "lose-rank", 0, 5.0, 2 + rank),))
    world = campaign.make(plan)
    world.run(19.0)
    before = world.learners["learner-0"]
    world.run(24.0)
    assert isinstance(before, RankedLearner) and not before.alive
    world.run(40.0)
    after = world.learners["learner-0"]
    assert isinstance(after, RankedLearner) and after is not before and len(after.ranks) == 2
    assert after.adopted == after.ranks[1].adopted and min(after.adopted) > 0
