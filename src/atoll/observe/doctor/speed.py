"""How fast a link is: round trips, the clock at its other end, bytes both ways. Measured on the way that learners take.

Bodies grow until one takes about two seconds, 64 MiB at most: a slow link is not kept busy, a fast one is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median

import aiohttp

from atoll.fabric.calls import next_chunk
from atoll.fabric.probe import LONGEST, TIME_HEADER
from atoll.fabric.transfer import asked, pieces, sent
from atoll.observe.doctor.check import Check, brief, size
from atoll.observe.figures import span

TRIES = 10
DEADLINE_S = 5.0
SLOW_TRIP_S = 0.2
FIRST = 64 << 10
GROWTH = 16
WANTED_S, ENOUGH_S = 2.0, 1.0
BODY_DEADLINE_S = 20.0
SLOW_BITS_PER_S = 10e6
CLOCK_S = 2.0


@dataclass(frozen=True, slots=True)
class Trip:
    seconds: float
    clock_s: float | None
    """The syncer's clock less ours, at the middle of the trip."""


@dataclass(frozen=True, slots=True)
class Moved:
    bytes: int
    seconds: float
    cpu_s: float = 0.0
    """Of this process, at this end."""

    @property
    def bits_per_s(self) -> float:
        return 8 * self.bytes / max(self.seconds, 1e-9)


async def trips(session: aiohttp.ClientSession, url: str, tries: int = TRIES) -> list[Trip]:
    """The first opens the connection, and is not counted."""
    return [await _trip(session, url) for _ in range(tries + 1)][1:]


async def _trip(session: aiohttp.ClientSession, url: str) -> Trip:
    begun, wall = time.perf_counter(), time.time()
    async with asked(session, "GET", f"{url}/v1/probe/0", DEADLINE_S) as response:
        told = response.headers.get(TIME_HEADER, "")
        while await next_chunk(response.content):
            pass
    took = time.perf_counter() - begun
    try:
        return Trip(took, float(told) - (wall + took / 2))
    except ValueError:
        return Trip(took, None)


async def down(session: aiohttp.ClientSession, url: str) -> Moved:
    async def get(count: int) -> None:
        async with asked(session, "GET", f"{url}/v1/probe/{count}", BODY_DEADLINE_S) as response:
            while await next_chunk(response.content):
                pass

    return await _measured(get)


async def up(session: aiohttp.ClientSession, url: str) -> Moved:
    block = memoryview(os.urandom(1 << 20))

    async def put(count: int) -> None:
        parts = [block] * (count // len(block)) + [block[: count % len(block)]]
        headers = {"Content-Length": str(count)}
        body = sent(pieces(parts, 0, len(block)))
        async with asked(session, "PUT", f"{url}/v1/probe/{count}", BODY_DEADLINE_S, headers=headers, data=body):
            pass

    return await _measured(put)


async def _measured(move: Callable[[int], Awaitable[None]]) -> Moved:
    count = FIRST
    while True:
        begun, cpu = time.perf_counter(), time.process_time()
        await move(count)
        took = time.perf_counter() - begun
        if took >= ENOUGH_S or count >= LONGEST:
            return Moved(count, took, time.process_time() - cpu)
        count = next_size(count, took, LONGEST)


def next_size(count: int, took_s: float, longest: int = LONGEST) -> int:
    """For about two seconds, if it goes on like this; it may become faster, so not too much more at once."""
    return min(longest, max(2 * count, min(GROWTH * count, round(count * WANTED_S / max(took_s, 1e-9)))))


def judge_trips(url: str, found: Sequence[Trip]) -> Check:
    took = [trip.seconds for trip in found]
    middle, worst = median(took), max(took)
    value = f"{1000 * middle:.1f} ms to {url}, {1000 * worst:.0f} ms at worst"
    figures = {"url": url, "median_s": round(middle, 6), "worst_s": round(worst, 6)}
    if middle > SLOW_TRIP_S:
        advice = "A fragment is away for several trips: overlap (τ) times the step time should be well above this."
        return Check("round trip", "warn", value, advice, figures)
    return Check("round trip", "ok", value, figures=figures)


def judge_clock(found: Sequence[Trip]) -> Check:
    """By the quickest trip: its answer was made within half of it."""
    told = [(trip.seconds, trip.clock_s) for trip in found if trip.clock_s is not None]
    if not told:
        return Check("syncer's clock", "ok", "it does not tell its time")
    took, apart = min(told)
    figures = {"difference_s": round(apart, 6), "uncertain_s": round(took / 2, 6)}
    about = f"(± {brief(took / 2)})"
    if abs(apart) <= took / 2:
        return Check("syncer's clock", "ok", f"the same as here {about}", figures=figures)
    value = f"{brief(abs(apart))} {'ahead of' if apart > 0 else 'behind'} ours {about}"
    if abs(apart) > CLOCK_S:
        advice = "Events of both machines stand in one file: keep both clocks with NTP."
        return Check("syncer's clock", "warn", value, advice, figures)
    return Check("syncer's clock", "ok", value, figures=figures)


def judge_bandwidth(name: str, moved: Moved) -> Check:
    rate = moved.bits_per_s
    told = f"{rate / 1e6:,.0f}" if rate >= SLOW_BITS_PER_S else f"{rate / 1e6:.2g}"
    value = f"{told} Mbit/s ({size(moved.bytes)} in {span(moved.seconds)})"
    figures = {"bits_per_s": round(rate), "bytes": moved.bytes, "seconds": round(moved.seconds, 4)}
    if rate < SLOW_BITS_PER_S:
        return Check(name, "warn", value, "What it carries is said below, where the model is known.", figures)
    return Check(name, "ok", value, figures=figures)
