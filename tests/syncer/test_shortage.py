"""What is said where rounds fall behind: which link, how much it lacks, and what would fit."""

from tests.protocol.world import World

from atoll.syncer.status import describe_shortage

MB = 10**6
BODIES = {"fp32": 100 * MB, "bf16": 50 * MB, "int8": 27 * MB}


def usual_world(**differs: float) -> World:
    world = World(2, fragments=24, sync_every=24, latency_s=0.01, step_s=0.5, **differs)
    world.syncer.rounds.flights.bodies = BODIES
    return world


def test_nothing_is_said_while_h_is_kept() -> None:
    world = usual_world(body_s=2.0).run_until(seconds=300)
    assert describe_shortage(world.syncer) == ""


def test_a_syncer_that_merges_too_slowly_is_named() -> None:
    world = usual_world(merge_s=0.75).run_until(seconds=600)
    said = describe_shortage(world.syncer)
    assert said.startswith("the syncer merges and writes a round in 0.75 s, and one is due every 0.5 s"), said
    assert said.endswith("sync_every = 36 would fit")


def test_a_slow_link_is_named_with_what_it_lacks_and_what_would_fit() -> None:
    world = usual_world().run_until(seconds=60)
    flights = world.syncer.rounds.flights
    flights.is_short, flights.gap_s = True, 0.8
    world.syncer.members.learners["learner-1"].answer_s.value = 0.7
    said = describe_shortage(world.syncer)
    assert said == (
        "learner-1 answers slowest: 0.5 Gbit/s come from it where H = 24 takes 0.8, so 0.3 Gbit/s are missing: "
        "sync_every = 39 would fit, or codec = int8"
    )


def test_memory_that_is_missing_is_named_with_what_would_do() -> None:
    world = usual_world(body_s=4.5)
    flights = world.syncer.rounds.flights
    flights.contribution_bytes, flights.budget_bytes = 2**20, 8 * 2**20
    world.run_until(seconds=300)
    said = describe_shortage(world.syncer)
    assert said == "round_memory_mib allows 4 rounds under way where 11 keep H: round_memory_mib = 22 would do"
