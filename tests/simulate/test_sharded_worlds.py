"""The fault simulator's worlds with a syncer of several shards: every promise holds, and those of shards too."""

from __future__ import annotations

import msgspec
import pytest

from atoll.protocol.learner.versions import Versions
from atoll.protocol.messages import Announce, Member
from atoll.protocol.records import MergedRecord
from atoll.simulate import campaign
from atoll.simulate.drawn_parts import OF_SHARDS
from atoll.simulate.faults import Fault
from atoll.simulate.world import World


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.faults) for block in range(1, 50))])
def test_whatever_is_drawn_every_promise_holds(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        plan = campaign.plan(seed, kind="shards")
        outcome = campaign.run(plan, campaign.make(plan, traced=False))
        again = f"atoll simulate faults --seed {seed} --worlds shards"
        assert not outcome.invariant, f"{again}: {outcome.invariant}: {outcome.message}"


def test_with_carry_a_learner_is_current_with_the_version_that_holds_the_copy_it_gave() -> None:
    """Rounds take longer than a cycle here: it gives to the next round of a fragment before the last version comes, and
    adopts that round's version alone."""
    outcome = campaign.run(campaign.plan(1500471, 2, "shards"))
    assert not outcome.invariant, outcome.message


def test_one_that_does_not_adopt_that_version_either_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take_announcement = Versions.take_announcement

    def keep_given(self: Versions, announce: Announce, own: Member | None) -> None:
        given = dict(self.given)
        take_announcement(self, announce, own)
        self.given.update(given)

    monkeypatch.setattr(Versions, "take_announcement", keep_given)
    assert campaign.run(campaign.plan(1500471, 2, "shards")).invariant == "current within a cycle"


def test_shards_are_drawn_apart() -> None:
    """Settings, hosts, links and all other faults but rollbacks are those of the seed's plain world."""
    for seed in range(20):
        plain, sharded = campaign.plan(seed), campaign.plan(seed, kind="shards")
        assert sharded.shards is not None and 2 <= sharded.shards.shards <= 3 and sharded.options == plain.options
        assert {fault for fault in plain.faults if fault.kind != "rollback"} <= set(sharded.faults)


def calm_world(*faults: Fault) -> World:
    plan = campaign.plan(3, 3, "shards")
    assert plan.shards is not None
    return campaign.make(msgspec.structs.replace(plan, faults=faults), traced=False)


def count_decided(world: World) -> int:
    return sum(isinstance(record, MergedRecord) for record in world.disk.journal)


@pytest.mark.parametrize("kind", sorted(set(OF_SHARDS)))
def test_while_a_shard_is_away_learners_train_and_no_round_is_decided(kind: str) -> None:
    world = calm_world(Fault(40.0, "kill-shard", length=10.0), Fault(70.0, kind, length=1.0, number=8))  # type: ignore[arg-type]
    world.run(42.0)
    decided, steps = count_decided(world), {name: one.t for name, one in world.learners.items()}
    assert decided > 0 and not world.shards[0].alive
    world.run(49.5)
    assert count_decided(world) == decided
    assert all(one.t > steps[name] for name, one in world.learners.items())
    world.run(69.0)
    between = count_decided(world)
    assert between > decided
    world.run(100.0)
    assert count_decided(world) > between and all(shard.alive and shard.machine.serves for shard in world.shards)
