"""Bodies without a control channel of one's own: what the couriers of a learner's other ranks send and fetch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from atoll.digests import compute_digest
from atoll.fabric.address import parse_address
from atoll.fabric.bodies import BodyConnection
from atoll.fabric.transfer import CodedBody, FragmentArrival, body_session, get_body
from atoll.fabric.wire import FabricLimits
from atoll.protocol.errors import PeerError, Unreachable

if TYPE_CHECKING:
    from .conftest import ServedFabric

WAIT_S = 60.0
BODY = bytes(range(256)) * 16
MARK = compute_digest(BODY)


@asynccontextmanager
async def following(where: str) -> AsyncIterator[BodyConnection]:
    link = BodyConnection(where)
    try:
        yield link
    finally:
        await link.close()


async def ready(place: ServedFabric) -> None:
    await place.open()
    await place.joined()
    place.handlers.buffers["learner-0", 5, 1] = bytearray(len(BODY))
    place.handlers.fragments[0] = BODY


@pytest.mark.parametrize("rank", [0, 3])
async def test_a_follower_sends_its_rank_under_the_learners_session(place: ServedFabric, rank: int) -> None:
    await ready(place)
    async with following(place.url) as link:
        await link.put_contribution("learner-0", "s0", 5, 1, memoryview(BODY), MARK, WAIT_S, rank=rank)
        assert place.handlers.buffers["learner-0", 5, 1] == BODY
        assert place.handlers.told("asked") == [("asked", "learner-0", 5, 1, *([rank] if rank else []))]
        assert link.bytes_out == len(BODY)
        for name, session in (("learner-0", "another"), ("nobody", "s0")):
            with pytest.raises(PeerError, match="no open control channel under this session"):
                await link.put_contribution(name, session, 5, 1, memoryview(BODY), MARK, WAIT_S, rank=rank)


async def test_a_follower_fetches_its_part(place: ServedFabric) -> None:
    await ready(place)
    into = memoryview(bytearray(len(BODY) - 8))
    async with following(place.url) as link:
        found = await link.get_fragment(0, into, WAIT_S, "learner-0", 2)
        assert found == (3, 7, compute_digest(BODY[8:])) and into == BODY[8:]
        assert place.handlers.told("part") == [("part", 0, "learner-0", 2)] and place.handlers.held == 0
        with pytest.raises(Unreachable, match="nobody has no open control channel: try again later"):
            await link.get_fragment(0, into, WAIT_S, "nobody", 2)
        with pytest.raises(PeerError, match="there is no fragment 4"):
            await link.get_fragment(4, into, WAIT_S, "learner-0", 2)


async def test_a_part_that_breaks_off_goes_on_where_it_stopped(place: ServedFabric) -> None:
    await ready(place)
    part = BODY[8:]
    arrival = FragmentArrival(
        memoryview(bytearray(part[:100] + bytes(len(part) - 100))), 100, 3, 7, compute_digest(part)
    )
    url = f"{place.url}/v1/fragments/0?learner=learner-0&rank=2"
    async with body_session(parse_address(place.url), FabricLimits()) as session:
        await get_body(session, lambda: url, arrival, WAIT_S, FabricLimits())
    assert arrival.into == part and arrival.received == len(part) - 100


# ---- version 0 in another form --------------------------------------------------------------------------------------

HALF = BODY[::2]


async def test_a_reader_gets_the_form_that_it_asks_for_and_the_values_otherwise(place: ServedFabric) -> None:
    await ready(place)
    place.handlers.coded[0] = HALF
    into, coded = memoryview(bytearray(len(BODY))), CodedBody("bf16", len(HALF))
    async with following(place.url) as link:
        assert await link.get_fragment(0, into, WAIT_S) == (3, 7, MARK) and into == BODY
        assert await link.get_fragment(0, into, WAIT_S, coded=coded) == (3, 7, compute_digest(HALF))
        assert coded.data == HALF and link.bytes_in == len(BODY) + len(HALF)
        assert link.arrivals[0].values_at == len(BODY), "all values are there"


async def test_a_body_in_that_form_goes_on_where_it_broke_off(place: ServedFabric) -> None:
    await ready(place)
    place.handlers.coded[0] = HALF
    coded = CodedBody("bf16", len(HALF), memoryview(bytearray(HALF[:100] + bytes(len(HALF) - 100))))
    into = memoryview(bytearray(len(BODY)))
    arrival = FragmentArrival(into, 100, 3, 7, compute_digest(HALF), coded=coded)
    url = f"{place.url}/v1/fragments/0?codec=bf16"
    async with body_session(parse_address(place.url), FabricLimits()) as session:
        await get_body(session, lambda: url, arrival, WAIT_S, FabricLimits())
        assert coded.data == HALF and arrival.received == len(HALF) - 100
        # The version that follows comes as its values, from their first byte.
        coded.data, url = memoryview(bytearray(len(HALF))), f"{place.url}/v1/fragments/0"
        arrival = FragmentArrival(into, 100, 2, 6, compute_digest(HALF), coded=coded)
        await get_body(session, lambda: url, arrival, WAIT_S, FabricLimits())
    assert coded.data is None and into == BODY


async def test_a_form_that_was_not_asked_for_is_refused(place: ServedFabric) -> None:
    await ready(place)
    place.handlers.coded[0], place.handlers.forces = HALF, "bf16"
    into = memoryview(bytearray(len(BODY)))
    async with following(place.url) as link:
        with pytest.raises(PeerError, match="in a form that was not asked for: bf16"):
            await link.get_fragment(0, into, WAIT_S)
        with pytest.raises(PeerError, match=f"has {len(HALF)} bytes, 7 were expected"):
            await link.get_fragment(0, into, WAIT_S, coded=CodedBody("bf16", 7))


async def test_another_form_than_bf16_is_refused_in_one_line(place: ServedFabric) -> None:
    await ready(place)
    headers = {"Atoll-Session": "s0", "Atoll-Digest": MARK}
    for method, path in (("PUT", "initial/learner-0/0"), ("GET", "fragments/0")):
        status, text = await place.request(method, f"/v1/{path}?codec=int4", BODY if method == "PUT" else None, headers)
        assert status == 400 and json.loads(text)["error"].startswith("codec is no form of version 0")


@pytest.mark.parametrize("rank", ["-1", "x", "1234567890123", "", "٣"])
async def test_what_is_no_rank_is_refused(place: ServedFabric, rank: str) -> None:
    await ready(place)
    headers = {"Atoll-Session": "s0", "Atoll-Digest": MARK}
    asked = [("PUT", "contributions/learner-0/5/1?", BODY), ("GET", "fragments/0?learner=learner-0&", None)]
    for method, path, body in asked:
        status, text = await place.request(method, f"/v1/{path}rank={rank}", body, headers)
        assert status == 400 and json.loads(text)["error"].startswith("rank is no rank")
    assert place.handlers.told("asked") == place.handlers.told("part") == []


async def test_two_ranks_of_one_contribution_come_at_once(place: ServedFabric) -> None:
    """Each body is one of its own, also for whoever sees that no body is received twice."""
    await ready(place)
    async with following(place.url) as link, asyncio.TaskGroup() as tasks:
        for rank in range(4):
            given = ("learner-0", "s0", 5, 1, memoryview(BODY), MARK, WAIT_S)
            tasks.create_task(link.put_contribution(*given, rank=rank))
    assert len(place.handlers.told("arrived")) == 4


async def test_a_request_that_finds_no_syncer_moves_on_to_the_next_address(place: ServedFabric) -> None:
    await ready(place)
    nobody = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    dead = f"http://127.0.0.1:{nobody.sockets[0].getsockname()[1]}"
    nobody.close()
    await nobody.wait_closed()
    into = memoryview(bytearray(len(BODY)))
    async with following(f"{dead},{place.url}") as link:
        with pytest.raises(Unreachable):
            await link.get_fragment(0, into, WAIT_S, "learner-0", 0)
        assert (await link.get_fragment(0, into, WAIT_S, "learner-0", 0))[0] == 3
        assert link.url == place.url
