"""The fault simulator's worlds with relays: every promise holds, and those of relays too."""

from __future__ import annotations

import msgspec
import pytest

from atoll.protocol.records import MergedRecord
from atoll.simulate import campaign
from atoll.simulate.faults import Fault
from atoll.simulate.world import World


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.faults) for block in range(1, 50))])
def test_whatever_is_drawn_every_promise_holds(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        plan = campaign.plan(seed, kind="relays")
        outcome = campaign.run(plan, campaign.make(plan, traced=False))
        again = f"atoll simulate faults --seed {seed} --worlds relays"
        assert not outcome.invariant, f"{again}: {outcome.invariant}: {outcome.message}"


def test_relays_are_drawn_apart() -> None:
    """Settings, hosts, links and all other faults are those of the seed's plain world."""
    for seed in range(20):
        plain, relayed = campaign.plan(seed), campaign.plan(seed, kind="relays")
        assert relayed.relays is not None and relayed.options == plain.options
        assert max(relayed.relays.regions) >= 0 and set(plain.faults) <= set(relayed.faults)


def calm_world(*faults: Fault) -> World:
    """All learners are in one region."""
    plan = campaign.plan(3, 3, "relays")
    assert plan.relays is not None
    relays = msgspec.structs.replace(plan.relays, relays=1, regions=(0, 0, 0))
    return campaign.make(msgspec.structs.replace(plan, faults=faults, relays=relays), traced=False)


def find_merged(world: World, since: int) -> list[MergedRecord]:
    return [record for record in world.disk.journal[since:] if isinstance(record, MergedRecord)]


@pytest.mark.parametrize("kind", ["kill-relay", "hide-relay"])
def test_learners_that_found_no_relay_when_they_came_go_to_it_once_it_is_there(kind: str) -> None:
    """They stayed with the syncer for ever: only who had used its relay looked for it."""
    world = calm_world(Fault(0.0, kind, length=40.0))  # type: ignore[arg-type]
    world.run(39.0)
    direct = find_merged(world, 0)
    assert direct and not any(record.groups for record in direct)
    world.run(70.0)
    place = len(world.disk.journal)
    world.run(100.0)
    assert any(record.groups for record in find_merged(world, place))
    assert {life.incarnation for life in world.syncer.history.lives.values()} == {1}


@pytest.mark.parametrize("kind", ["kill-relay", "cut-relay", "stop-relay", "hide-relay"])
def test_without_their_relay_learners_go_on_directly_and_with_it_they_come_back(kind: str) -> None:
    world = calm_world(Fault(60.0, kind, length=40.0))  # type: ignore[arg-type]
    world.run(60.0)
    assert any(record.groups for record in find_merged(world, 0))
    world.run(75.0)  # a relay that says nothing is noticed by pings
    place, steps = len(world.disk.journal), {name: one.t for name, one in world.learners.items()}
    world.run(99.0)
    direct = find_merged(world, place)
    assert direct and not any(record.groups for record in direct)
    assert {share.learner for record in direct for share in record.members} == set(steps)
    assert all(one.t > steps[name] for name, one in world.learners.items())
    world.run(130.0)
    place = len(world.disk.journal)
    world.run(160.0)
    assert any(record.groups for record in find_merged(world, place))
    assert {life.incarnation for life in world.syncer.history.lives.values()} == {1}
