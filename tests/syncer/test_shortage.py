"""What is said where rounds cannot follow each other as asked: which part is the narrowest, and what would hold H."""

from __future__ import annotations

from tests.protocol.world import World

from atoll.simulate.links import SimulatedLink
from atoll.syncer.status import describe_narrowest, describe_shortage

MB = 10**6
MBIT = MB / 8
BODIES = {"fp32": 4 * MB, "bf16": 2 * MB, "int8": 1.1 * MB, "int4": 0.55 * MB}


def usual_world(learners: int = 2, **differs: float | bool | int) -> World:
    world = World(learners, fragments=24, sync_every=24, latency_s=0.01, step_s=0.5, **differs)
    interval = world.syncer.rounds.interval
    interval.bodies = {name: int(size) for name, size in BODIES.items()}
    interval.up_bytes, interval.down_bytes = BODIES["bf16"], BODIES["fp32"]
    return world


def give_links(world: World, up_mbit: float, down_mbit: float, *names: str) -> None:
    for name in names or world.learners:
        link = SimulatedLink(up_mbit * MBIT, down_mbit * MBIT, BODIES["bf16"], BODIES["fp32"])
        world.network.links[name] = link


def test_nothing_is_said_while_h_is_kept() -> None:
    world = usual_world(body_s=2.0)
    give_links(world, 100, 100)
    world.run_until(seconds=150)
    assert describe_shortage(world.syncer) == describe_narrowest(world.syncer) == ""


def test_a_way_down_that_carries_less_is_named_with_what_it_carries_and_what_would_hold_h() -> None:
    world = usual_world()  # 4 MB every 0.5 s are 64 Mbit/s
    give_links(world, 100, 40)
    world.run_until(seconds=150)
    assert describe_narrowest(world.syncer) == "way down of learner-1: 38.5 of 40 Mbit/s"
    assert describe_shortage(world.syncer) == (
        "way down of learner-1: 38.5 of 40 Mbit/s: H is 39.9 instead of 24; version_codec = bf16 would hold H = 24"
    )


def test_bodies_that_are_small_blame_no_link() -> None:
    """67.6 kB that came in 0.39 s between busy processes were told as a link of 1.4 Mbit/s, where one of 375 was."""
    world = usual_world()
    interval, small = world.syncer.rounds.interval, 67_600
    interval.bodies = {"fp32": small, "bf16": small // 2, "int8": small // 4, "int4": small // 8}
    interval.up_bytes, interval.down_bytes = small / 2, small
    for name in world.learners:
        world.network.links[name] = SimulatedLink(100 * MBIT, 0.8 * MBIT, small / 2, small)
    world.run_until(seconds=150)
    used = "way down of learner-1: a body of 67.6 kB takes 0.676 s of every 0.703 s"
    assert describe_narrowest(world.syncer) == used
    assert describe_shortage(world.syncer) == (
        f"{used}: H is 33.7 instead of 24; a narrow link or a busy processor, which atoll doctor tells apart; "
        "for a narrow link version_codec = bf16 would hold H = 24"
    )


def test_a_way_up_is_named_with_the_codec_of_contributions() -> None:
    world = usual_world()
    give_links(world, 20, 100)  # 2 MB every 0.5 s are 32 Mbit/s
    world.run_until(seconds=150)
    assert describe_narrowest(world.syncer) == "way up of learner-1: 19.2 of 20 Mbit/s"
    assert describe_shortage(world.syncer).endswith("H is 39.9 instead of 24; codec = int8 would hold H = 24")


def test_where_both_ways_carry_less_both_codecs_are_named() -> None:
    """The defaults ask twice as much of the way down: a smaller codec of versions alone left H where it was."""
    world = usual_world()
    give_links(world, 20, 40)
    world.run_until(seconds=150)
    said = describe_shortage(world.syncer)
    assert said.startswith("way down of learner-1: 38.5 of 40 Mbit/s: H is 39.9 instead of 24; ")
    assert said.endswith("; codec = int8 and version_codec = bf16 would hold H = 24")


def test_no_codec_is_named_where_one_of_two_narrow_ways_carries_none() -> None:
    world = usual_world()
    give_links(world, 5, 40)
    world.run_until(seconds=300)
    assert describe_shortage(world.syncer).endswith("H is 160 instead of 24; sync_every = 160 says as much")


def test_where_no_codec_is_small_enough_the_h_that_is_carried_is_named() -> None:
    world = usual_world()
    give_links(world, 100, 5)
    world.run_until(seconds=300)
    assert describe_shortage(world.syncer).endswith("H is 319 instead of 24; sync_every = 320 says as much")


def test_a_syncer_that_merges_too_slowly_is_named() -> None:
    world = usual_world(merge_s=0.75).run_until(seconds=300)
    assert describe_narrowest(world.syncer) == "merge and disk: 0.75 of every 0.78 s"
    assert describe_shortage(world.syncer).endswith("H is 37.4 instead of 24; sync_every = 38 says as much")


def test_a_synchronous_run_keeps_its_schedule_and_says_what_it_waits_for() -> None:
    world = usual_world(synchronous=True, quorum=2)
    give_links(world, 100, 40)
    world.run_until(seconds=150)
    assert describe_shortage(world.syncer).endswith("of 40 Mbit/s: its learners wait for it")


def test_one_narrow_learner_of_four_gets_a_share_and_h_is_as_asked() -> None:
    world = usual_world(learners=4)
    give_links(world, 400, 400)
    give_links(world, 400, 20, "learner-2")
    world.run_until(seconds=150)
    interval, narrow = world.syncer.rounds.interval, world.syncer.members.learners["learner-2"]
    assert describe_narrowest(world.syncer) == "" and narrow.share == 0.25
    assert interval.describe_way(narrow) == "way down 20 Mbit/s"
    texts = [note.text for _, note in world.notes if note.kind == "share" and note.data.get("share") == 0.25]
    assert texts[-1] == (
        "learner-2: way down of learner-2 carries 20 Mbit/s, every round takes 63.5: "
        "it takes part in 25 % of the rounds"
    )


def test_memory_that_is_missing_is_named_with_what_would_do() -> None:
    world = usual_world(body_s=1.2)
    interval = world.syncer.rounds.interval
    interval.contribution_bytes, interval.budget_bytes = 2**20, 4 * 2**20
    world.run_until(seconds=150)
    said = describe_shortage(world.syncer)
    assert said == "round_memory_mib allows 2 rounds under way where 4 keep H: round_memory_mib = 8 would do"
