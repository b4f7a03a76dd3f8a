"""The order of bodies on the way up, on a loop whose time passes as soon as nothing is left to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from atoll.courier.turns import UploadTurns
from atoll.protocol.learner.ways import WayRate


class VirtualLoop(asyncio.SelectorEventLoop):
    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def in_virtual_time(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work())


def measured(bytes_per_s: int) -> WayRate:
    rate = WayRate()
    rate.add(bytes_per_s, 1.0)
    return rate


class Sending:
    def __init__(self, rate: WayRate) -> None:
        self.turns = UploadTurns(rate)
        self.started: dict[str, float] = {}

    async def send(self, name: str, nbytes: int, takes_s: float, *, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        async with self.turns.take_turn(nbytes):
            self.started[name] = asyncio.get_running_loop().time()
            await asyncio.sleep(takes_s)


def test_a_body_starts_when_the_one_before_has_left_not_when_its_answer_is_back() -> None:
    async def work() -> None:
        here = Sending(measured(100))
        await asyncio.gather(*(here.send(name, 200, 2.5) for name in "abc"))
        assert here.started == {"a": 0.0, "b": 2.0, "c": 4.0}

    in_virtual_time(work)


def test_a_body_that_arrives_sooner_than_expected_lets_the_next_one_start() -> None:
    async def work() -> None:
        here = Sending(measured(100))
        await asyncio.gather(here.send("a", 200, 0.5), here.send("b", 200, 0.5), here.send("c", 50, 9.0, after_s=0.75))
        assert here.started == {"a": 0.0, "b": 0.5, "c": 1.0}
        await here.send("late", 1, 0.0)
        assert here.started["late"] == 10.0, "nothing is before it any more"

    in_virtual_time(work)


def test_without_a_measured_rate_nothing_waits() -> None:
    async def work() -> None:
        here = Sending(WayRate())
        await asyncio.gather(*(here.send(name, 200, 2.5) for name in "abc"))
        assert here.started == {"a": 0.0, "b": 0.0, "c": 0.0}

    in_virtual_time(work)


def test_one_that_fails_or_is_given_up_holds_nobody_up() -> None:
    async def work() -> None:
        here = Sending(measured(1))
        lost = asyncio.ensure_future(here.send("lost", 1000, 5.0))
        waiting = asyncio.ensure_future(here.send("waiting", 1000, 5.0))
        last = asyncio.ensure_future(here.send("last", 1000, 5.0))
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.sleep(1.0)
        lost.cancel()
        await last
        assert here.started == {"lost": 0.0, "last": 2.0}

    in_virtual_time(work)
