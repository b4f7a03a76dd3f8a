"""A syncer whose own loop was busy: nobody is lost for the time in which it heard nothing."""

from __future__ import annotations

import asyncio
import time

from tests.syncer.conftest import FakeLearner, Stage

from atoll.protocol.messages import Heartbeat
from atoll.syncer.liveness import LEAST_S, LOOK_S, Standstill

HEARTBEAT_S, LOST_AFTER_S = 0.3, 3.0


async def talking(learner: FakeLearner) -> None:
    while True:
        learner.link.send(Heartbeat())
        await asyncio.sleep(HEARTBEAT_S)


async def test_nobody_is_lost_because_the_syncer_was_busy_and_the_silent_are_still_found(stage: Stage) -> None:
    await stage.open(learners=2, heartbeat_s=HEARTBEAT_S, lost_after_s=LOST_AFTER_S)
    there, silent = stage.join("there"), stage.join("silent")
    await there.begin()
    await silent.begin()
    talks = asyncio.ensure_future(talking(there))
    await asyncio.sleep(LOST_AFTER_S / 6)
    time.sleep(1.3 * LOST_AFTER_S)  # noqa: ASYNC251 - the loop is what stands still
    await asyncio.sleep(LOST_AFTER_S / 6)
    assert stage.events("lost") == [], "neither the one that talks nor the one that has been silent for a while"
    stood = [event["seconds"] for event in stage.events("standstill")]
    assert max(stood) > LOST_AFTER_S
    await stage.until("lost")
    assert [(event["learner"], event["text"]) for event in stage.events("lost")] == [
        ("silent", f"silent is away: nothing heard for {LOST_AFTER_S:g} s")
    ]
    talks.cancel()


class Clock(asyncio.AbstractEventLoop):
    """A loop that is nothing but a clock and a timer."""

    def __init__(self) -> None:
        self.now, self.timers = 100.0, 0

    def time(self) -> float:
        return self.now

    def call_later(self, *rest: object, **more: object) -> asyncio.TimerHandle:  # type: ignore[override]
        self.timers += 1
        return asyncio.TimerHandle(self.now, lambda: None, (), self)

    def get_debug(self) -> bool:
        return False


def test_a_loop_that_is_seen_often_never_stood_still() -> None:
    clock = Clock()
    still = Standstill(clock, lambda: None)
    still.start()
    for _ in range(100):
        clock.now += LOOK_S
        assert still.take_standstill_s(clock.now) == 0.0


def test_a_standstill_is_told_once_with_its_length() -> None:
    clock = Clock()
    still = Standstill(clock, lambda: None)
    still.start()
    clock.now += LEAST_S + 7.0
    assert still.take_standstill_s(clock.now) == LEAST_S + 7.0
    assert still.take_standstill_s(clock.now) == 0.0


def test_it_looks_again_and_again_and_says_so() -> None:
    clock, told = Clock(), []
    still = Standstill(clock, lambda: told.append(still.take_standstill_s(clock.now)))
    still.start()
    clock.now += 9.0
    still._check_loop()
    assert told == [9.0] and clock.timers == 2


def test_before_it_starts_nothing_is_a_standstill() -> None:
    """A syncer that reads its journal for long may not say so before it opens the run again."""
    clock = Clock()
    still = Standstill(clock, lambda: None)
    clock.now += 9.0
    assert still.take_standstill_s(clock.now) == 0.0
