from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.fabric.control_channel import ControlChannel, SendQueue, SequenceNumbers
from atoll.fabric.wire import FabricLimits, decode_from_syncer, encode
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import PROTOCOL, Heartbeat, Hello, Leave, Refused

if TYPE_CHECKING:
    from .conftest import ServedFabric


def channel(learner: str = "a", session: str = "s") -> ControlChannel:
    return ControlChannel(learner, session, outbox=SendQueue(4), abort=lambda: None, flush_s=1.0)


def hello(seq: int, session: str = "s0") -> bytes:
    return encode(Hello(protocol=PROTOCOL, learner="learner-0", session=session, seq=seq))


@given(st.lists(st.integers(0, 20), max_size=40))
def test_what_is_accepted_only_goes_up(numbers: list[int]) -> None:
    sequences, accepted = SequenceNumbers(4), [0]
    for number in numbers:
        try:
            sequences.check(channel(), Heartbeat(seq=number))
        except PeerError:
            assert number <= accepted[-1]
        else:
            assert number > accepted[-1]
            sequences.note(channel(), Heartbeat(seq=number))
            accepted.append(number)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("xyz")), max_size=60))
def test_what_is_remembered_is_bounded_and_the_last_heard_stay(heard: list[tuple[str, str]]) -> None:
    sequences = SequenceNumbers(3)
    for number, (learner, session) in enumerate(heard, start=1):
        sequences.note(channel(learner, session), Heartbeat(seq=number))
        assert len(sequences) <= 3
        with pytest.raises(PeerError):
            sequences.check(channel(learner, session), Heartbeat(seq=number))


async def refused(socket: aiohttp.ClientWebSocketResponse) -> Refused:
    async with asyncio.timeout(10):
        last = [decode_from_syncer(frame.data) async for frame in socket][-1]
    assert isinstance(last, Refused) and not last.final, "an honest learner may dial again"
    return last


async def spoke(place: ServedFabric, *frames: bytes) -> aiohttp.ClientWebSocketResponse:
    socket = await place.socket()
    for frame in frames:
        await socket.send_bytes(frame)
    return socket


async def test_a_link_numbers_what_it_says_also_over_reconnects(place: ServedFabric) -> None:
    await place.open()
    learner = await place.joined()
    assert learner.link.send(Heartbeat())
    await place.handlers.until("received")
    before = learner.link._seq
    place.handlers.channels["learner-0"].drop("a bad line")
    await learner.lost_it()
    await place.handlers.until("opened", 2)
    assert learner.link._seq > before
    assert await place.handlers.until("received") == ("received", "learner-0", Heartbeat()), (
        "numbers belong to the wire"
    )


async def test_a_successor_of_a_dead_courier_begins_above_it(place: ServedFabric) -> None:
    await place.open()
    first = await place.joined()
    for _ in range(100):
        first.link.send(Heartbeat())
    await place.handlers.until("received", 100)
    await place.joined()  # the same learner and session, from a link of its own
    assert place.server.bad_frames == 0


@pytest.mark.parametrize(
    ("again", "says"),
    [
        pytest.param(encode(Heartbeat(seq=8)), "Heartbeat 8 of learner-0 comes after 9", id="goes-back"),
        pytest.param(encode(Leave(reason="x", seq=9)), "Leave 9 of learner-0 comes after 9", id="said-before"),
        pytest.param(encode(Heartbeat()), "Heartbeat of learner-0 has no number", id="not-numbered"),
    ],
)
async def test_a_message_that_was_said_before_costs_the_channel(place: ServedFabric, again: bytes, says: str) -> None:
    await place.open()
    socket = await spoke(place, hello(7), encode(Heartbeat(seq=9)), again)
    assert says in (await refused(socket)).reason
    assert place.server.bad_frames == 1
    assert place.handlers.told("received") == [("received", "learner-0", Heartbeat())]


@pytest.mark.parametrize(
    ("again", "says"),
    [
        pytest.param(hello(7), "Hello 7 of learner-0 comes after 9", id="said-before"),
        pytest.param(hello(9), "it was said before, and counts once", id="with-a-number-that-is-taken"),
        pytest.param(hello(0), "Hello of learner-0 has no number", id="not-numbered"),
    ],
)
async def test_a_hello_that_was_said_before_opens_nothing_and_the_owner_stays(
    place: ServedFabric, again: bytes, says: str
) -> None:
    await place.open()
    owner = await spoke(place, hello(7), encode(Heartbeat(seq=9)))
    await place.handlers.until("received")
    assert says in (await refused(await spoke(place, again))).reason
    assert place.server.bad_frames == 1 and len(place.handlers.told("opened")) == 1
    await owner.send_bytes(encode(Heartbeat(seq=10)))
    await place.handlers.until("received", 2)


async def test_a_hello_without_a_number_opens_nothing(place: ServedFabric) -> None:
    await place.open()
    assert "Hello of learner-0 has no number" in (await refused(await spoke(place, hello(0)))).reason
    assert place.server.bad_frames == 1 and place.handlers.log == []


async def test_another_session_counts_for_itself(place: ServedFabric) -> None:
    await place.open()
    await spoke(place, hello(7))
    await place.handlers.until("opened")
    await spoke(place, hello(1, session="s1"), encode(Heartbeat(seq=2)))
    await place.handlers.until("received")
    assert place.server.bad_frames == 0


async def test_what_the_older_channel_still_says_is_passed_over(place: ServedFabric) -> None:
    await place.open()
    older = await spoke(place, hello(7))
    await place.handlers.until("opened")
    await spoke(place, hello(20))
    await place.handlers.until("opened", 2)
    await older.send_bytes(encode(Heartbeat(seq=8)))
    async with asyncio.timeout(10):
        async for _ in older:
            pass
    assert place.server.bad_frames == 0 and place.handlers.told("received") == []


async def test_a_hello_that_the_desk_refuses_takes_no_number(place: ServedFabric) -> None:
    await place.open(FabricLimits(sessions=2))
    owner = await spoke(place, hello(7))
    await place.handlers.until("opened")
    place.handlers.refuse = "not now"
    assert (await refused(await spoke(place, hello(30)))).reason == "not now"
    await owner.send_bytes(encode(Heartbeat(seq=8)))
    await place.handlers.until("received")
