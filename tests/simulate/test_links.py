"""Worlds whose links have a width: H, overlap and merged share, and what
happens to a learner whose link is narrower than the others'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
from tests.simulate.linked_world import MBIT, STEP_S, LinkedWorld, PartWorld

from atoll.protocol.messages import Pull
from atoll.protocol.syncer.interval import Narrowest, RoundInterval
from atoll.simulate import campaign
from atoll.simulate.drawn_parts import DrawnRelays, DrawnShards
from atoll.simulate.links import SimulatedLink
from atoll.simulate.oracle import Violation

INT4 = {"up_bytes": 20e6 / 24 * 0.53, "down_bytes": 20e6 / 24 * 0.53}
DEFAULTS = {"up_bytes": 20e6 / 24 * 2, "down_bytes": 20e6 / 24 * 4}
"""Bytes of a body of 20M parameters in 24 fragments: bf16 up, fp32 down."""
RULES = ("overwrite", "carry")
ONE_RULE = [pytest.param("overwrite", marks=pytest.mark.faults), "carry"]
"""For what hardly depends on the rule: both in the long tests."""
LEAST = {"overwrite": 0.83, "carry": 0.97}
"""Merged share of the steady part. Overwrite drops the overlap: at 16 Mbit/s 4.3 of 27.2 steps, which leaves 0.84 over
many cycles and a little less or more over three."""

# ---- links --------------------------------------------------------------------------------------------------------


def test_bodies_of_one_direction_pass_one_after_another() -> None:
    link = SimulatedLink(100.0, 50.0, 100.0, 100.0)
    assert link.pass_up(10.0) == (11.0, 1.0) and link.pass_up(10.0) == (12.0, 1.0)
    assert link.pass_down(10.0) == (12.0, 2.0), "the other direction is free"
    assert link.pass_up(20.0, share=0.5) == (20.5, 0.5)
    link.set_rates(10.0, 10.0)
    assert link.pass_up(20.0) == (30.5, 10.0)
    assert link.carried == 450.0


# ---- the rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adopt", RULES)
@pytest.mark.parametrize(
    ("mbit", "bodies", "quorum", "h"),
    [
        pytest.param(40, INT4, 1, 24, marks=pytest.mark.faults),
        (16, INT4, 1, 27),
        pytest.param(60, DEFAULTS, 1, 55, marks=pytest.mark.faults),
        pytest.param(60, DEFAULTS, 4, 55, marks=pytest.mark.faults),
    ],
)
def test_h_is_what_the_links_carry_and_the_overlap_at_its_floor(
    mbit: float, bodies: dict[str, float], quorum: int, h: float, adopt: str
) -> None:
    world = LinkedWorld([mbit] * 4, **bodies, quorum=quorum, adopt=adopt).run_steps(4 * h)
    steady, before = world.now, {name: world.count_fates(name) for name in world.learners}
    world.run_steps(3 * h)
    assert world.h == pytest.approx(h, rel=0.02)
    for name in world.learners:
        assert world.overlap_p95(steady, name) <= world.floor_steps(mbit) + 1
        assert world.merged_share(name, before[name]) >= LEAST[adopt]
        assert world.share_of(name) == 1.0
    rounds = [note for at, note in world.notes if note.kind == "round" and at > steady]
    assert min(len(note.data["members"]) for note in rounds) == 4  # type: ignore[arg-type]
    assert world.invariants.link_checks.checked > 50


@pytest.mark.parametrize(("mbit", "h"), [(16, 27), pytest.param(22, 24, marks=pytest.mark.faults)])
def test_behind_links_that_are_narrow_from_the_start_all_learners_begin_together(mbit: float, h: float) -> None:
    """Version 0 is 80 MB in fp32: one learner trained alone for 52 s while three fetched it."""
    world = LinkedWorld([mbit] * 4, **INT4, first_bytes=4 * 20e6 / 24, adopt="overwrite")
    while not world.said("begun"):
        world.run_steps(10)
    begun = next(at for at, note in world.notes if note.kind == "begun")
    assert begun == pytest.approx(2 * 80e6 / (mbit * MBIT), rel=0.05), "up, then down to the others at once"
    steps = [learner.t for learner in world.learners.values()]
    assert max(steps) - min(steps) <= 1, "none trains alone"
    world.run_steps(2 * h)
    steady, fates = world.now, {name: world.count_fates(name) for name in world.learners}
    world.run_steps(2 * h)
    rounds = [note.data for note in world.said("round")]
    assert {len(data["members"]) for data in rounds} == {4}  # type: ignore[arg-type]
    assert world.h == pytest.approx(h, rel=0.02)
    assert world.overlap_p95(0.0) <= world.floor_steps(mbit) + 1
    assert world.overlap_p95(steady) <= world.floor_steps(mbit)
    shares = [world.merged_share(name, fates[name]) for name in world.learners]
    assert sum(shares) / len(shares) >= LEAST["overwrite"]
    if world.h > 24.5:
        assert world.syncer.rounds.interval.narrowest is not None
        assert world.syncer.rounds.interval.narrowest.part.partition(" of learner-")[0] in ("way up", "way down")


# ---- a learner with a narrower link --------------------------------------------------------------------------------


@cache
def narrow_world(adopt: str, narrow: float) -> LinkedWorld:
    return LinkedWorld([60, 60, 60, narrow], **DEFAULTS, adopt=adopt).run_steps(900)


@pytest.mark.parametrize("adopt", ONE_RULE)
def test_a_learner_with_a_quarter_of_the_link_changes_nothing_for_the_others(adopt: str) -> None:
    alike, world, steady = narrow_world(adopt, 60), narrow_world(adopt, 15), 320 * STEP_S
    assert world.share_of("learner-3") == 0.25 and world.h == pytest.approx(alike.h, rel=0.02)
    for name in ("learner-0", "learner-1", "learner-2"):
        assert world.overlap_p95(steady, name) <= alike.overlap_p95(steady, name)
        assert world.merged_share(name) >= alike.merged_share(name) - 0.01
    assert world.merged_share("learner-3") >= (0.97 if adopt == "carry" else 0.75)
    members = world.members_since(steady, "learner-3")
    rounds = len([note for at, note in world.notes if note.kind == "round" and at >= steady])
    assert len(members) / rounds == pytest.approx(0.25, abs=0.04)
    since = sorted(one["since"] / world.h for one in members if one["since"])
    assert since[len(since) // 2] == pytest.approx(4, abs=0.3), "each fragment once in four cycles"


def test_no_round_waits_for_a_learner_without_a_turn_and_participation_does_not_count_it() -> None:
    world = narrow_world("carry", 15)
    notes = [note.data for at, note in world.notes if note.kind == "round" and at > 320 * STEP_S]
    for data in notes:
        names: set[str] = {one["learner"] for one in data["members"]}  # type: ignore[attr-defined]
        assert data["live"] == len(names) == (4 if "learner-3" in names else 3)
        assert float(data["sync_s"]) < 3 * STEP_S  # type: ignore[arg-type]


def test_it_is_asked_just_in_time_and_once() -> None:
    world = narrow_world("carry", 15)
    frozen = {pull.round: at for at, pull in world.sent(Pull, "learner-0")}
    asked = [(pull.round, at) for at, pull in world.sent(Pull, "learner-3") if at > 320 * STEP_S]
    assert len({number for number, _ in asked}) == len(asked)
    ahead = [frozen[number] - at for number, at in asked if number in frozen]
    way_s = DEFAULTS["up_bytes"] / (15 * MBIT)
    assert sorted(ahead)[1] >= way_s and max(ahead) <= way_s + 8 * STEP_S  # one may be of the beginning


def test_it_fetches_only_versions_that_hold_its_own_steps() -> None:
    world = narrow_world("carry", 15)
    adoptions = [t for t, _, _ in world.learners["learner-3"].adoptions if t > 200]
    members = world.members_since(320 * STEP_S, "learner-3")
    assert len(adoptions) <= len(members) + 2


def test_its_quorum_is_lowered_for_rounds_without_it() -> None:
    world = LinkedWorld([60, 60, 60, 15], **DEFAULTS, quorum=4, adopt="carry").run_steps(400)
    rounds = [note.data for at, note in world.notes if note.kind == "round" and at > 320 * STEP_S]
    assert {len(data["members"]) for data in rounds} == {3, 4}  # type: ignore[arg-type]
    assert world.overlap_p95(320 * STEP_S, "learner-0") <= world.floor_steps(60) + 1


@pytest.mark.parametrize("mbit", [7.27, *(pytest.param(mbit, marks=pytest.mark.faults) for mbit in (5.0, 2.0))])
def test_it_takes_part_in_its_share_of_the_rounds(mbit: float) -> None:
    """With one answer under way at a time it was in 0.49 of the rounds at a share of 7/8."""
    world = LinkedWorld([20, 20, 20, mbit], up_bytes=2e5, down_bytes=2e5, adopt="carry").run_steps(240)
    steady = 100 * STEP_S
    rounds = len([note for at, note in world.notes if note.kind == "round" and at >= steady])
    assert world.share_of("learner-3") < 1.0 and world.h == 24
    members = len(world.members_since(steady, "learner-3"))
    assert members / rounds == pytest.approx(world.share_of("learner-3"), abs=0.05)
    assert world.overlap_p95(steady, "learner-0") <= 4


@pytest.mark.parametrize(("fragments", "sync_every"), [(6, 6), (24, 2)])
def test_it_takes_part_also_where_its_answer_takes_longer_than_a_cycle(fragments: int, sync_every: int) -> None:
    """Each round that it would have been in time for had a fragment under way: it was never asked."""
    rates = [20, 20, 20, 5.0] if sync_every == 6 else [60, 60, 60, 15.0]
    kinds: dict[str, Any] = {"fragments": fragments, "sync_every": sync_every, "overlap": 1, "adopt": "carry"}
    world = LinkedWorld(rates, up_bytes=2e5, down_bytes=2e5, **kinds).run_steps(120)
    assert world.share_of("learner-3") <= 0.5
    assert world.merged_share("learner-3") >= 0.9
    assert world.overlap_p95(40 * STEP_S, "learner-0") <= 4


def test_with_one_fragment_it_is_asked_in_its_turn() -> None:
    """Nobody can be asked ahead there: the round before is of the same fragment."""
    world = LinkedWorld([60, 60, 60, 15], up_bytes=2e6, down_bytes=4e6, fragments=1, sync_every=4).run_steps(400)
    assert world.share_of("learner-3") < 1.0
    notes = [note.data for at, note in world.notes if note.kind == "round" and at > 320 * STEP_S]
    names = [{one["learner"] for one in data["members"]} for data in notes]  # type: ignore[attr-defined]
    assert sum("learner-3" in some for some in names) / len(names) == pytest.approx(0.25, abs=0.15)
    assert world.merged_share("learner-3") > 0.9


def test_when_the_wide_learners_are_gone_it_goes_on_alone() -> None:
    """Shares follow from commits, and no round was committed without a learner that had a turn in it."""
    world = LinkedWorld([20, 3], up_bytes=2e5, down_bytes=2e5, fragments=8, sync_every=8).run_steps(60)
    assert world.share_of("learner-1") < 0.5
    committed = world.syncer.committed
    world.kill("learner-0")
    world.run_steps(60)
    assert world.syncer.committed > committed + 16 and world.share_of("learner-1") == 1.0
    assert world.h == pytest.approx(8 * 1.04 * 2e5 / (3 * MBIT) / STEP_S, rel=0.05)


def test_no_round_waits_where_all_learners_have_a_share() -> None:
    """At shares of 75 % nobody had a turn in every fourth round: each of them waited for 10 s."""
    world = LinkedWorld([60, 60], **DEFAULTS, adopt="carry").run_steps(120)
    with patch.object(RoundInterval, "_set_shares", lambda *_: None):
        for name, learner in world.learners.items():
            world.syncer.members.learners[name].share = learner.machine._orders.share = 0.75
        since = world.now
        world.run_steps(120)
    rounds = [note.data for at, note in world.notes if note.kind == "round" and at > since]
    assert len(rounds) > 40 and max(float(data["gather_s"]) for data in rounds) < 2.0  # type: ignore[arg-type]


def test_when_all_learners_have_a_share_the_wide_ones_soon_have_every_round_again() -> None:
    world = LinkedWorld([60, 60], **DEFAULTS, adopt="carry").run_steps(120)
    for name, learner in world.learners.items():
        world.syncer.members.learners[name].share = learner.machine._orders.share = 0.75
    world.run_steps(30)
    assert {world.share_of(name) for name in world.learners} == {1.0}


def test_an_overdue_round_takes_a_learner_that_is_ready_though_it_has_no_turn() -> None:
    world = LinkedWorld([20, 3], up_bytes=2e5, down_bytes=2e5, fragments=8, sync_every=8).run_steps(60)
    learner = world.syncer.members.learners["learner-0"]
    learner.merged = [10**6] * 8  # it has yet to fetch the versions that hold its last steps
    committed = world.syncer.committed
    world.run_steps(40 / STEP_S)
    assert world.syncer.committed >= committed + 2, "one in stalled_after_s"
    for _ in range(3):
        while not (late := [one for one in world.syncer.state.open_rounds.values() if one.overdue]):
            world.step()
        [round_] = late
        assert round_.stage == "pulling", "it freezes at the moment at which it is overdue"
        while round_.number in world.syncer.state.open_rounds:
            world.step()


@pytest.mark.parametrize(
    "what", ["disconnect", "rollback", "end", pytest.param("quarantine", marks=pytest.mark.faults)]
)
def test_a_contribution_asked_ahead_is_dropped(what: str) -> None:
    world = LinkedWorld([60, 60, 60, 15], **DEFAULTS, adopt="carry", steps=2000).run_steps(150)
    state = world.syncer.state

    def find_ahead() -> list[tuple[int, str]]:
        found = [
            (one.number, one.seats["learner-3"].state) for one in state.open_rounds.values() if one.stage == "ahead"
        ]
        return [one for one in found if one[1] == "asked"]

    while not (ahead := find_ahead()):
        world.step()
    [(number, _)] = ahead
    if what == "disconnect":
        world.unlink("learner-3")
        assert state.open_rounds[number].seats["learner-3"].state == "out"
    elif what == "quarantine":
        learner = world.syncer.members.learners["learner-3"]
        world.syncer.strikes.quarantine_learner(world.now, learner, "now", "its numbers are broken")
        assert state.open_rounds[number].seats["learner-3"].state == "out"
    elif what == "rollback":
        while state.is_merging():
            world.step()
        world.syncer.rounds.abandon_rounds("a rollback")
        assert not state.open_rounds and state.next_round > number, "its number is not used again"
    else:
        world.end()
        assert not any(one.stage == "ahead" for one in state.open_rounds.values())
        world.run_to_end()
        assert all(number != pull.round for at, pull in world.sent(Pull, "learner-0")), "it was passed over"
        return
    world.run_steps(60)
    assert all(one["learner"] != "learner-3" for one in _members_of(world, number))


def _members_of(world: LinkedWorld, number: int) -> list[dict[str, Any]]:
    notes = [note.data for note in world.said("round") if note.data["round"] == number]
    return [one for data in notes for one in data["members"]]  # type: ignore[attr-defined]


# ---- links that change, phases, parts ------------------------------------------------------------------------------


@pytest.mark.parametrize("adopt", ONE_RULE)
def test_a_link_that_becomes_wider_and_narrower_is_followed_within_two_cycles(adopt: str) -> None:
    world = LinkedWorld([60] * 4, **DEFAULTS, adopt=adopt).run_steps(240)
    assert world.h == pytest.approx(55, rel=0.02)
    world.set_rates(600)
    world.run_steps(2 * 30)
    assert world.h == pytest.approx(24, rel=0.02)
    settled = world.now
    world.run_steps(50)
    assert world.overlap_p95(settled + 24 * STEP_S) <= world.floor_steps(600) + 1
    world.set_rates(60)
    world.run_steps(2 * 55)
    assert world.h == pytest.approx(55, rel=0.05)
    settled = world.now
    world.run_steps(110)
    assert world.h == pytest.approx(55, rel=0.02)
    assert world.overlap_p95(settled + 55 * STEP_S) <= world.floor_steps(60) + 1


def test_a_learner_whose_own_link_becomes_as_wide_takes_part_in_every_round_after_two_cycles() -> None:
    world = LinkedWorld([20, 20, 20, 2.5], up_bytes=2e5, down_bytes=2e5, adopt="carry").run_steps(100)
    assert world.share_of("learner-3") == 0.25
    world.network.links["learner-3"].set_rates(20 * MBIT, 20 * MBIT)
    widened, told = world.syncer.committed, len(world.told_shares())
    while world.share_of("learner-3") < 1.0:
        world.run_steps(1)
    assert 2 * 24 <= world.syncer.committed - widened <= 3 * 24
    assert world.told_shares()[told:] == [1.0], "told once"


@pytest.mark.parametrize("adopt", RULES)
def test_a_learner_that_has_every_round_again_has_no_queue(adopt: str) -> None:
    """It ordered all versions that it had passed over at once: they kept its overlap at 31 steps instead of 6."""
    world = LinkedWorld([60] * 4, **DEFAULTS, adopt=adopt).run_steps(100)
    link = world.network.links["learner-2"]
    link.set_rates(40 * MBIT, 40 * MBIT)
    world.run_steps(30)
    link.set_rates(60 * MBIT, 60 * MBIT)
    assert world.share_of("learner-2") < 1.0
    while world.share_of("learner-2") < 1.0:
        world.run_steps(1)
    since = world.now + 2 * 55 * STEP_S  # the overlap of a copy is told with the next copy of its fragment
    world.run_steps(3 * 55)
    assert world.overlap_p95(since, "learner-2") <= world.floor_steps(60) + 1


@pytest.mark.parametrize("adopt", RULES)
def test_the_overlap_of_a_learner_with_a_share_is_bounded(adopt: str) -> None:
    """The version needed soonest came first: at a share of 1/4 others waited for 232 steps."""
    world = narrow_world(adopt, 15)
    down_s = DEFAULTS["down_bytes"] / (15 * MBIT)
    assert world.overlap_p95(800 * STEP_S, "learner-3") <= world.floor_steps(15) + 3 * down_s / STEP_S


@pytest.mark.parametrize("adopt", RULES)
def test_with_h_2_a_fragment_comes_round_as_soon_as_its_version_is_adopted(adopt: str) -> None:
    world = LinkedWorld([600] * 4, **DEFAULTS, sync_every=2, overlap=1, adopt=adopt).run_steps(60)
    assert world.overlap_p95(20 * STEP_S) <= world.floor_steps(600)
    assert 4 <= world.h <= 6
    assert adopt == "overwrite" or min(world.merged_share(name) for name in world.learners) >= 0.97


@pytest.mark.parametrize("adopt", ONE_RULE)
def test_the_link_of_a_relay_counts_as_those_of_its_learners(adopt: str) -> None:
    relays = DrawnRelays(1, (0, 0, 0), 0.01)
    world = PartWorld([1000] * 3, **INT4, relays=relays, fragments=12, sync_every=12, adopt=adopt)
    [relay] = world.relays
    relay.body_link = SimulatedLink(16 * MBIT, 16 * MBIT, INT4["up_bytes"], INT4["down_bytes"])
    world.run_steps(100)
    learner = world.syncer.members.learners["learner-1"]
    assert learner.up_rates[1] == pytest.approx(16 * MBIT, rel=0.01)
    assert learner.down_rates[1] == pytest.approx(16 * MBIT, rel=0.01)
    assert learner.share == 1.0
    committed = world.syncer.committed
    world.run_steps(50)
    assert world.syncer.committed > committed + 20
    assert world.invariants.link_checks.checked > 20


@pytest.mark.parametrize("adopt", ONE_RULE)
def test_two_shards_share_the_link_of_a_learner(adopt: str) -> None:
    shards = DrawnShards(2, ((1, 2),) * 12)
    world = PartWorld([16] * 3, **INT4, shards=shards, fragments=12, sync_every=12, adopt=adopt).run_steps(110)
    learner = world.syncer.members.learners["learner-1"]
    assert learner.up_rates[0] == pytest.approx(16 * MBIT, rel=0.01)
    # Each merge takes messages to the other shard and back, so it may be the narrower part.
    assert world.syncer.rounds.interval.steps >= 1.03 * INT4["down_bytes"] / (16 * MBIT) / STEP_S
    assert world.invariants.link_checks.checked > 20


# ---- drawn worlds, and an invariant that can fail ------------------------------------------------------------------


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.faults) for block in range(1, 50))])
def test_whatever_is_drawn_every_promise_holds(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        plan = campaign.plan(seed, kind="links")
        outcome = campaign.run(plan, campaign.make(plan, traced=False))
        again = f"atoll simulate faults --seed {seed} --worlds links"
        assert not outcome.invariant, f"{again}: {outcome.invariant}: {outcome.message}"


def test_steps_of_a_quick_learner_without_a_turn_count_for_h_too() -> None:
    """The narrow link is the quick learner's: the slow one alone, in three of four rounds, makes 1 or 2 steps of H = 3
    between them."""
    outcome = campaign.run(campaign.plan(1500146, 2, "links"))
    assert not outcome.invariant, outcome.message


def test_links_are_drawn_apart() -> None:
    """Hosts, latencies and all faults are those of the seed's plain world; settings are, but for times."""
    for seed in range(20):
        plain, linked = campaign.plan(seed), campaign.plan(seed, kind="links")
        assert linked.links is not None and linked.faults == (() if linked.links.calm else plain.faults)
        assert linked.options.step_s == plain.options.step_s and linked.options.run_seed == plain.options.run_seed
        assert linked.options.settings.phased_values == plain.options.settings.phased_values


@contextmanager
def blind_to_the_way_down() -> Iterator[None]:
    def narrower_way(self: RoundInterval, learner: Any) -> Narrowest:
        return Narrowest("way up", self.up_bytes / learner.up_rates[0] if learner.up_rates[0] else 0.0, self.up_bytes)

    with patch.object(RoundInterval, "_narrower_way", narrower_way):
        yield


def test_an_interval_that_ignores_the_way_down_is_found() -> None:
    with blind_to_the_way_down(), pytest.raises(Violation, match="steps later, not") as found:
        LinkedWorld([60] * 4, **DEFAULTS, quorum=4).run_steps(400)
    assert found.value.invariant == "overlap is at its floor"


FINDING = (47,)
"""Seeds among which the bug below shows."""


def test_drawn_worlds_find_it_too() -> None:
    with blind_to_the_way_down():
        outcomes = (campaign.run(campaign.plan(seed, kind="links")) for seed in FINDING)
        found = next((one for one in outcomes if one.invariant), None)
    assert found is not None and found.invariant == "overlap is at its floor"
