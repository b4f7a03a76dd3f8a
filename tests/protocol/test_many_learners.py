"""What a round costs the syncer does not grow faster than the number of its learners."""

from __future__ import annotations

import msgspec
import pytest
from tests.protocol.world import World

from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.machine import Syncer

SLACK_BYTES = 8
"""Of numbers that take more bytes where there are more learners."""


def late_world(learners: int, latency_s: float = 0.3) -> World:
    """Behind the knee: a version is hardly adopted when its fragment is due again, and each learner has a step time of
    its own, so that rounds wait for one learner after the other."""
    step_s = [1 + 0.5 * number / learners for number in range(learners)]
    world = World(learners, fragments=4, sync_every=4, step_s=step_s, latency_s=latency_s, jitter=0.9)
    return world.run_until(round=8)


def longest_messages(world: World) -> dict[str, int]:
    """By kind, in ten rounds."""
    heard = len(world.log)
    world.run_until(round=18)
    longest: dict[str, int] = {}
    for effect in [effect for _, effect in world.log[heard:] if isinstance(effect, fx.Send)]:
        kind = type(effect.message).__name__
        longest[kind] = max(longest.get(kind, 0), len(msgspec.msgpack.encode(effect.message)))
    return longest


def test_no_message_grows_with_the_number_of_learners() -> None:
    few, many = (longest_messages(late_world(learners)) for learners in (12, 96))
    assert few.keys() >= {"Pull", "Announce"}
    assert all(many[kind] <= few[kind] + SLACK_BYTES for kind in few), (few, many)


def count_looks(learners: int, latency_s: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """How often the syncer looks at all its learners, per round."""
    world, looks = late_world(learners, latency_s), 0
    before, advance = world.syncer.committed, Syncer._advance_all

    def count(machine: Syncer, now: float) -> None:
        nonlocal looks
        looks += 1
        advance(machine, now)

    with monkeypatch.context() as patched:
        patched.setattr(Syncer, "_advance_all", count)
        world.run_until(round=before + 20)
    return looks / 20


@pytest.mark.parametrize("latency_s", [0.3, 1.2])
def test_the_syncer_looks_at_all_learners_a_few_times_a_round_however_many_they_are(
    latency_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (count_looks(learners, latency_s, monkeypatch) for learners in (8, 64))
    assert many <= few + 10, (few, many)
