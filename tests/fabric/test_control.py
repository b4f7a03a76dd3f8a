from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import pytest

from atoll.fabric.wire import FabricLimits, decode_from_syncer, encode
from atoll.protocol.messages import OLDEST, PROTOCOL, Ending, Heartbeat, Hello, Leave, Refused, Started

if TYPE_CHECKING:
    from .conftest import ServedFabric

Make = Callable[..., Hello]


async def refusal(socket: aiohttp.ClientWebSocketResponse) -> Refused:
    """The refusal that the channel ends with."""
    async with asyncio.timeout(10):
        messages = [decode_from_syncer(frame.data) async for frame in socket]
    assert isinstance(messages[-1], Refused)
    return messages[-1]


async def test_hello_opens_a_channel_both_ways(place: ServedFabric) -> None:
    await place.open()
    learner = await place.joined()
    assert place.handlers.log[0] == ("opened", "learner-0", "s0")
    assert learner.link.send(Heartbeat(clock={"learner-0": 4}))
    assert await place.handlers.until("received") == ("received", "learner-0", Heartbeat(clock={"learner-0": 4}))
    place.handlers.channels["learner-0"].send(Ending(reason="enough"))
    assert await learner.heard() == Ending(reason="enough")
    assert place.server.bytes_in > 0 and place.server.bytes_out > 0


@pytest.mark.parametrize("version", [OLDEST - 1, PROTOCOL + 1])
async def test_another_protocol_is_refused(place: ServedFabric, hello: Make, version: int) -> None:
    await place.open()
    socket = await place.socket()
    await socket.send_bytes(encode(hello(protocol=version)))
    answer = await refusal(socket)
    assert answer.final and f"the learner speaks {version}" in answer.reason
    assert place.handlers.log == []


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"\xc1garbage", "could not be read"),
        (b"", "could not be read"),
        (msgspec.msgpack.encode({"type": "Heartbeat", "clock": {}, "extra": 1}), "unknown field `extra`"),
        (msgspec.msgpack.encode({"type": "Explode"}), "Explode"),
        (encode(Started(uploader="me")), "Started"),
        (encode(Hello(protocol=PROTOCOL, learner="learner-0", session="s0")), "second hello"),
        ("text", "text frame"),
    ],
)
async def test_a_bad_frame_costs_its_sender_the_channel_and_nobody_else(
    place: ServedFabric, hello: Make, frame: bytes | str, says: str
) -> None:
    await place.open()
    other = await place.joined("learner-1")
    socket = await place.socket()
    await socket.send_bytes(encode(hello()))
    await (socket.send_str(frame) if isinstance(frame, str) else socket.send_bytes(frame))
    assert says in (await refusal(socket)).reason
    closed = await place.handlers.until("closed")
    assert closed[1] == "learner-0" and says in str(closed[3])
    assert place.server.bad_frames == 1
    other.link.send(Heartbeat())
    assert await place.handlers.until("received") == ("received", "learner-1", Heartbeat())


async def test_the_first_message_must_be_a_hello(place: ServedFabric) -> None:
    await place.open()
    socket = await place.socket()
    await socket.send_bytes(encode(Leave(reason="x")))
    assert "opens with Hello" in (await refusal(socket)).reason
    assert place.handlers.log == []


async def test_a_hello_that_never_comes_ends_the_channel(place: ServedFabric) -> None:
    await place.open(FabricLimits(hello_s=0.05))
    assert "no hello within 0.05 s" in (await refusal(await place.socket())).reason


async def test_a_frame_over_the_limit_closes_the_channel_unread(place: ServedFabric, hello: Make) -> None:
    await place.open(FabricLimits(control_bytes=1000))
    socket = await place.socket()
    await socket.send_bytes(encode(hello()))
    await place.handlers.until("opened")
    await socket.send_bytes(encode(Leave(reason="x" * 2000)))
    assert "failed" in str((await place.handlers.until("closed"))[3])
    async for _ in socket:
        pass
    assert socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
    assert place.handlers.told("received") == []


async def test_a_newer_channel_of_the_same_session_replaces_the_older_silently(
    place: ServedFabric, hello: Make
) -> None:
    await place.open()
    older = await place.socket()
    await older.send_bytes(encode(hello()))
    await place.handlers.until("opened")
    newer = await place.socket()
    await newer.send_bytes(encode(hello(seq=2)))
    await place.handlers.until("opened", 2)
    async with asyncio.timeout(10):
        assert [decode_from_syncer(frame.data) async for frame in older] == [Started(uploader="nobody")]
    await newer.send_bytes(encode(Heartbeat(seq=3)))
    await place.handlers.until("received")
    assert place.handlers.told("closed") == []
    await newer.close()
    await place.handlers.until("closed")
    assert len(place.handlers.told("closed")) == 1


async def test_a_newer_session_that_the_desk_refuses_leaves_the_older_channel(place: ServedFabric, hello: Make) -> None:
    await place.open()
    older = await place.socket()
    await older.send_bytes(encode(hello()))
    await place.handlers.until("opened")
    place.handlers.refuse = "one is enough"
    newer = await place.socket()
    await newer.send_bytes(encode(hello(session="s1")))
    assert (await refusal(newer)).reason == "one is enough"
    await older.send_bytes(encode(Heartbeat(seq=2)))
    await place.handlers.until("received")
    assert place.handlers.told("closed") == []


async def test_what_was_sent_before_a_close_still_arrives(place: ServedFabric) -> None:
    await place.open()
    learner = await place.joined()
    channel = place.handlers.channels["learner-0"]
    channel.send(Refused(reason="go away"))
    channel.close("expelled")
    channel.send(Ending(reason="too late"))
    assert await learner.heard() == Refused(reason="go away")
    assert "expelled" in await learner.lost_it()
    assert await place.handlers.until("closed") == ("closed", "learner-0", "s0", "expelled")


async def test_a_learner_that_reads_too_slowly_loses_its_channel(place: ServedFabric, hello: Make) -> None:
    await place.open(FabricLimits(send_queue=8))
    await place.joined("learner-1")
    socket = await place.socket()
    await socket.send_bytes(encode(hello()))
    await place.handlers.until("opened", 2)
    for _ in range(9):
        place.handlers.channels["learner-0"].send(Ending(reason="x"))
    assert "reads too slowly" in str((await place.handlers.until("closed"))[3])
    assert not place.handlers.channels["learner-1"].closing


async def test_a_dead_learner_is_noticed_by_pings(place: ServedFabric, hello: Make) -> None:
    await place.open(FabricLimits(ping_s=0.1))
    http = aiohttp.ClientSession()
    async with http, http.ws_connect(f"{place.url}/v1/control", autoping=False) as socket:
        await socket.send_bytes(encode(hello()))
        await place.handlers.until("closed")


async def test_pings_do_not_take_the_place_of_a_hello(place: ServedFabric) -> None:
    await place.open(FabricLimits(hello_s=0.3))
    socket = await place.socket()

    async def ping_on() -> None:
        while not socket.closed:
            await socket.ping()
            await asyncio.sleep(0.05)

    pinging = asyncio.create_task(ping_on())
    assert (await refusal(socket)).reason == "no hello within 0.3 s"
    pinging.cancel()
    assert place.handlers.log == []


async def test_a_flood_of_pings_costs_the_channel_like_any_other(place: ServedFabric, hello: Make) -> None:
    await place.open(FabricLimits(messages_rate=10))
    await place.joined("learner-1")
    socket = await place.socket()
    await socket.send_bytes(encode(hello()))
    await place.handlers.until("opened", 2)
    for _ in range(60):
        await socket.ping(b"x")
    await place.handlers.until("closed")
    assert "more than 10 messages a second: this is a flood" in str(place.handlers.told("closed")[0][3])
    assert not place.handlers.channels["learner-1"].closing


async def test_pings_are_answered(place: ServedFabric, hello: Make) -> None:
    await place.open()
    http = aiohttp.ClientSession()
    async with http, http.ws_connect(f"{place.url}/v1/control", autoping=False) as socket:
        await socket.send_bytes(encode(hello()))
        await place.handlers.until("opened")
        await socket.ping(b"are you there")
        async with asyncio.timeout(10):
            while (frame := await socket.receive()).type is not aiohttp.WSMsgType.PONG:
                pass
        assert frame.data == b"are you there"


async def test_a_learner_that_goes_while_its_ping_is_answered_is_only_gone(
    place: ServedFabric, hello: Make, caplog: pytest.LogCaptureFixture
) -> None:
    await place.open()
    for number in range(20):
        socket = await place.socket()
        await socket.send_bytes(encode(hello(f"learner-{number}")))
        await place.handlers.until("opened", number + 1)
        for _ in range(200):
            await socket.ping(b"x" * 100)
        assert socket._response is not None and socket._response.connection is not None
        transport = socket._response.connection.transport
        assert transport is not None
        transport.abort()
    await place.handlers.until("closed", 20)
    assert caplog.records == []
