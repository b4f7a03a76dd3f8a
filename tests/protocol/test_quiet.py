"""An event that the syncer only counts leaves nothing undone, and puts nothing off: a look would find the same."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy

import pytest
from tests.protocol.world import World

from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.machine import Syncer


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Behind every quiet event a copy of the syncer looks at all that time may bring. Returns how many there were."""
    seen: Counter[str] = Counter()
    is_quiet = Syncer._is_quiet

    def is_quiet_and_right(machine: Syncer, now: float, event: fx.SyncerEvent) -> bool:
        if not is_quiet(machine, now, event):
            return False
        seen[type(event.message if isinstance(event, fx.Received) else event).__name__] += 1
        twin = deepcopy(machine)
        decided = len(twin.state.out._effects)
        twin._advance_all(now)
        assert twin.state.out._effects[decided:] == [], f"{event} at {now}"
        assert machine.wake_at is not None
        if not machine.rounds.watches_all():
            return True  # members that fall silent are watched from the next look on, not from the first answer
        assert twin.wake_at is None or machine.wake_at <= twin.wake_at, f"{event} at {now} puts a look off"
        return True

    monkeypatch.setattr(Syncer, "_is_quiet", is_quiet_and_right)
    return seen


@pytest.mark.parametrize("latency_s", [0.02, 0.2])
def test_what_is_only_counted_brings_nothing_about_and_puts_no_look_off(latency_s: float, quiet: Counter[str]) -> None:
    """Step times differ and change, so every report moves the median that windows follow; answers come one by one, and
    one learner stays away for a while, so that members fall silent behind the first answer."""
    world = World(4, fragments=2, sync_every=4, step_s=[1.0, 0.6, 1.4, 1.7], latency_s=latency_s, jitter=1.0)
    for round_ in range(4, 20, 4):
        world.run_until(round=round_)
        for learner in world.learners.values():
            learner.step_s *= 0.6 if learner.step_s > 1.0 else 2.0
    world.network.block(world.learners["learner-3"], up=True, down=False)
    world.run_until(round=22)
    assert quiet["Heartbeat"] > 20 and quiet["Progress"] > 20 and quiet["Delivered"] > 5, quiet
