"""What a link carries is measured where bodies arrive, and both ends know it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from tests.fabric.narrow_link import ObservedLink

from atoll.chaos.tcp_relay import TcpRelay
from atoll.digests import compute_digest
from atoll.fabric.bodies import BodyConnection
from atoll.fabric.body_meter import ArrivalMeter, ArrivedBytes, MeasuredArrival
from atoll.fabric.intake import ReceivedBody
from atoll.fabric.transfer import SentBody

if TYPE_CHECKING:
    from .conftest import ServedFabric

RATE = 2e6
"""Bytes per second of the narrow links."""
BODY = bytes(range(256)) * 6400
WAIT_S = 20.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def play(meter: ArrivalMeter, clock: Clock, *happens: tuple[float, Callable[[], None]]) -> None:
    for at, what in happens:
        clock.now = at
        what()


def test_a_body_counts_from_its_first_piece_to_its_last(clock: Clock) -> None:
    meter = ArrivalMeter(clock=clock)
    part = meter.expect_part()
    play(
        meter,
        clock,
        (0.0, part.ask),
        (0.3, lambda: part.begin(100)),
        (0.4, lambda: part.count(20)),
        (0.5, lambda: part.count(30)),
        (0.9, lambda: part.count(50)),
        (5.0, part.stop),
    )
    assert meter.measure() == MeasuredArrival(80, pytest.approx(0.5))
    assert meter.measure_whole() == pytest.approx(0.5 * 100 / 80)
    assert meter.latency_s == pytest.approx(0.4)


def test_what_came_in_one_piece_says_nothing_of_the_rate(clock: Clock) -> None:
    meter = ArrivalMeter(clock=clock)
    part = meter.expect_part()
    play(meter, clock, (0.0, part.ask), (0.4, lambda: part.count(100)), (0.4, part.stop))
    part.work_s = 3.0
    assert meter.measure() == MeasuredArrival() and meter.measure_whole() == 0.0


def test_parts_that_arrive_together_share_the_time_and_a_wait_between_them_does_not_count(clock: Clock) -> None:
    meter = ArrivalMeter(clock=clock)
    one, two = meter.expect_part(), meter.expect_part()
    play(
        meter,
        clock,
        (0.0, one.ask),
        (0.0, two.ask),
        (1.0, lambda: one.count(10)),
        (2.0, lambda: two.count(10)),
        (3.0, lambda: one.count(10)),
        (3.0, one.stop),
        (4.0, lambda: two.count(10)),
        (4.0, two.stop),
        (9.0, one.ask),
        (9.5, lambda: one.count(10)),
        (10.0, lambda: one.count(10)),
        (10.0, one.stop),
    )
    assert meter.measure() == MeasuredArrival(40, pytest.approx(3.5))
    assert meter.latency_s == pytest.approx(0.5), "the shortest of all requests"


def test_what_arrives_of_another_version_meanwhile_was_carried_by_the_link_too(clock: Clock) -> None:
    arrived = ArrivedBytes()
    meters = [ArrivalMeter(clock=clock, arrived=arrived) for _ in range(2)]
    one, two = (meter.expect_part() for meter in meters)
    play(
        meters[0],
        clock,
        (1.0, lambda: one.count(10)),
        (2.0, lambda: one.count(10)),
        (3.0, lambda: two.count(10)),
        (4.0, lambda: one.count(10)),
        (4.0, one.stop),
        (5.0, lambda: two.count(10)),
        (5.0, two.stop),
    )
    assert [meter.measure() for meter in meters] == [MeasuredArrival(30, 3.0), MeasuredArrival(20, 2.0)]
    assert meters[0].measure_whole() == pytest.approx(3.0), "of its own 30 bytes"


def test_work_that_takes_longer_than_the_link_is_what_counts(clock: Clock) -> None:
    meter = ArrivalMeter(clock=clock)
    part = meter.expect_part()
    play(meter, clock, (0.0, part.ask), (0.1, lambda: part.count(50)), (0.2, lambda: part.count(50)), (0.2, part.stop))
    with part.working():
        clock.now += 0.1
    assert meter.measure() == MeasuredArrival(50, pytest.approx(0.1))
    with meter.working():
        clock.now += 0.3
    assert meter.measure() == MeasuredArrival(100, pytest.approx(0.4))


def test_what_is_to_come_is_known_once_every_part_has_named_its_length(clock: Clock) -> None:
    seen: list[float] = []
    meter = ArrivalMeter(lambda: seen.append(meter.to_come), clock)
    one, two = meter.expect_part(), meter.expect_part()
    one.begin(100)
    one.count(40)
    two.begin(10)
    two.count(10)
    one.count(60)
    assert seen == [float("inf"), 60, 0]


def test_a_meter_of_a_link_keeps_nothing_of_bodies_that_are_over(clock: Clock) -> None:
    meter = ArrivalMeter(clock=clock)
    for start in range(100):
        part, clock.now = meter.expect_part(), float(start)
        part.ask()
        for _ in range(2):
            clock.now += 0.25
            part.count(5)
        part.close()
        assert meter.take() == MeasuredArrival(5, pytest.approx(0.25))
        assert meter.latency_s == 0.0
    assert not meter._parts and not meter.arriving


# ---- on a narrow link ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def narrow(
    place: ServedFabric, delay_s: float = 0.0
) -> AsyncIterator[tuple[BodyConnection, ObservedLink, ObservedLink]]:
    """A way to the syncer for bodies, of RATE bytes per second; what it carries up, and down."""
    line = TcpRelay("127.0.0.1", place.server.port, buffer=1 << 20)
    await line.start()
    up, down = ObservedLink(RATE), ObservedLink(RATE)
    line.share(up, down)
    line.delay_s = delay_s
    link = BodyConnection(line.url)
    try:
        yield link, up, down
    finally:
        await link.close()
        await line.stop()


async def test_the_receiver_of_a_version_measures_the_way_down(place: ServedFabric) -> None:
    await place.open()
    place.handlers.fragments[0] = BODY
    async with narrow(place, delay_s=0.02) as (link, _, carried):
        meter = ArrivalMeter()
        await link.get_fragment(0, memoryview(bytearray(len(BODY))), WAIT_S, part=meter.expect_part())
    nbytes, seconds = meter.measure()
    assert nbytes / seconds == pytest.approx(carried.rate, rel=0.15)
    assert 0.8 * len(BODY) < nbytes < len(BODY)
    assert 0.04 <= meter.latency_s < 0.2, "to the first piece, not to the last"


async def test_steps_are_measured_like_a_whole_version(place: ServedFabric) -> None:
    await place.open()
    place.handlers.fragments[0], size = BODY, len(BODY) // 4
    place.handlers.steps = [BODY[:size], BODY[size : 2 * size], BODY[2 * size : 3 * size]]
    async with narrow(place) as (link, _, carried):
        meter = ArrivalMeter()
        part = meter.expect_part()
        found = await link.get_version(0, 1, size, memoryview(bytearray(len(BODY))), WAIT_S, part=part)
    assert len(found.steps) == 2
    nbytes, seconds = meter.measure()
    assert nbytes / seconds == pytest.approx(carried.rate, rel=0.15) and nbytes < 2 * size


async def test_the_receiver_of_a_contribution_says_how_long_it_took(place: ServedFabric) -> None:
    await place.open()
    await place.joined()
    place.handlers.buffers["learner-0", 5, 1] = bytearray(len(BODY))
    async with narrow(place, delay_s=0.05) as (link, carried, _):
        given = ("learner-0", "s0", 5, 1, memoryview(BODY), compute_digest(BODY), WAIT_S)
        sent = await link.put_contribution(*given)
    assert sent.received_s is not None
    assert len(BODY) / sent.seconds(latency_s=9.0) == pytest.approx(carried.rate, rel=0.15)
    assert sent.elapsed_s > sent.received_s + 0.05, "its own clock sees the round trip too"


async def test_bodies_that_come_at_once_say_what_the_link_carries(place: ServedFabric) -> None:
    """Four at once on a link of 60 Mbit/s were told as 16 Mbit/s each, and their learner got a share of the rounds."""
    await place.open()
    await place.joined()
    rounds = range(5, 8)
    for number in rounds:
        place.handlers.buffers["learner-0", number, 1] = bytearray(len(BODY))
    digest = compute_digest(BODY)
    async with narrow(place) as (link, carried, _):
        puts = [
            link.put_contribution("learner-0", "s0", number, 1, memoryview(BODY), digest, WAIT_S) for number in rounds
        ]
        for sent in await asyncio.gather(*puts):
            assert len(BODY) / sent.seconds(latency_s=0.0) == pytest.approx(carried.rate, rel=0.2)


async def test_a_receiver_that_says_nothing_leaves_the_time_to_its_answer(
    place: ServedFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReceivedBody, "headers", {})
    await place.open()
    await place.joined()
    place.handlers.buffers["learner-0", 5, 1] = bytearray(len(BODY))
    async with narrow(place, delay_s=0.05) as (link, carried, _):
        given = ("learner-0", "s0", 5, 1, memoryview(BODY), compute_digest(BODY), WAIT_S)
        sent = await link.put_contribution(*given)
    assert sent.received_s is None
    # What the syncer does before it answers counts too: this is a bound.
    assert 0.4 * carried.rate < len(BODY) / sent.seconds(latency_s=0.1) < 1.15 * carried.rate


@pytest.mark.parametrize("header", ["-1.0", "nan", "inf", "1e9", "soon", "1.0" + "0" * 400])
async def test_a_receiver_that_says_what_is_no_time_is_not_believed(
    place: ServedFabric, monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    monkeypatch.setattr(ReceivedBody, "headers", {"Atoll-Received": header})
    await place.open()
    link = (await place.joined()).link
    place.handlers.buffers["learner-0", 5, 1] = bytearray(4)
    sent = await link.put_contribution("learner-0", "s0", 5, 1, memoryview(b"body"), compute_digest(b"body"), WAIT_S)
    assert sent.received_s is None


def test_no_time_is_below_nothing() -> None:
    assert SentBody(None, 0.1).seconds(latency_s=0.2) == 0.0
    assert SentBody(0.0, 0.1).seconds(latency_s=0.0) == 0.0
