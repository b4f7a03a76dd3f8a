"""Two processes of one name: the first keeps it while it lives."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
from msgspec.structs import replace

from atoll.fabric.wire import FabricLimits, decode_from_syncer, encode
from atoll.protocol.messages import PROTOCOL, Heartbeat, Hello, Refused, Started
from atoll.protocol.succession import REMEMBERED, SUCCEEDED

if TYPE_CHECKING:
    from .conftest import ServedFabric

PATIENT = FabricLimits(answer_s=60.0)
"""Nobody waits for this in a test: whoever does not have to be asked is let in at once."""


def hello(session: str, proof: str = "", seq: int = 1, life: int = 0) -> bytes:
    said = Hello(protocol=PROTOCOL, learner="learner-0", session=session, host="rack-3", pid=12, proof=proof, seq=seq)
    return encode(replace(said, incarnation=life))


async def dial(place: ServedFabric, said: bytes) -> aiohttp.ClientWebSocketResponse:
    """One that says hello and then reads nothing, so it answers no ping."""
    socket = await place.socket()
    await socket.send_bytes(said)
    return socket


async def first_word(socket: aiohttp.ClientWebSocketResponse) -> object:
    async with asyncio.timeout(10):
        return decode_from_syncer((await socket.receive()).data)


async def test_a_second_process_is_refused_while_the_first_answers(place: ServedFabric) -> None:
    await place.open(PATIENT)
    first = await dial(place, hello("first"))
    assert await first_word(first) == Started(uploader="nobody")
    reading = asyncio.ensure_future(first.receive())  # whoever reads answers pings
    second = await dial(place, hello("second"))
    refused = Refused(
        reason="learner-0 is here already, from rack-3, pid 12: choose another --name (ATOLL_LEARNER)", final=True
    )
    assert await first_word(second) == refused
    assert place.handlers.told("opened") == [("opened", "learner-0", "first")]
    await first.send_bytes(encode(Heartbeat(seq=2)))
    assert await place.handlers.until("received") == ("received", "learner-0", Heartbeat())
    assert place.handlers.told("closed") == [] and not reading.done()
    reading.cancel()


async def test_any_word_of_the_first_is_an_answer(place: ServedFabric) -> None:
    await place.open(PATIENT)
    first = await dial(place, hello("first"))
    await place.handlers.until("opened")
    second = await dial(place, hello("second"))
    answer = asyncio.ensure_future(first_word(second))
    number = 2
    while not answer.done():
        await first.send_bytes(encode(Heartbeat(seq=number)))
        number += 1
        await place.handlers.until("received", number - 2)
    assert isinstance(await answer, Refused)


async def test_proof_of_succession_frees_the_name_at_once(place: ServedFabric) -> None:
    """Also where the process before still has its channel, and whatever it would answer."""
    await place.open(PATIENT)
    first = await dial(place, hello("first", "p" * 32))
    await place.handlers.until("opened")
    second = await dial(place, hello("second", "p" * 32))
    assert await first_word(second) == Started(uploader="nobody")
    assert place.handlers.told("opened")[1] == ("opened", "learner-0", "second")
    async with asyncio.timeout(10):
        assert [decode_from_syncer(frame.data) async for frame in first] == [Started(uploader="nobody")]


async def test_a_closed_connection_frees_the_name_at_once(place: ServedFabric) -> None:
    await place.open(PATIENT)
    first = await dial(place, hello("first", "p" * 32))
    await place.handlers.until("opened")
    await first.close()
    await place.handlers.until("closed")
    assert await first_word(await dial(place, hello("second", "q" * 32))) == Started(uploader="nobody")


async def test_one_whose_connection_closes_while_it_is_asked_gives_the_name_up(place: ServedFabric) -> None:
    await place.open(PATIENT)
    first = await dial(place, hello("first"))
    await place.handlers.until("opened")
    second = await dial(place, hello("second"))
    await place.until(lambda: place.server._control._channels["learner-0"].liveness._asking == 1)
    await first.close()
    assert await first_word(second) == Started(uploader="nobody")


async def test_a_first_that_does_not_answer_loses_its_name(place: ServedFabric) -> None:
    await place.open(FabricLimits(answer_s=0.1))
    await dial(place, hello("first"))
    await place.handlers.until("opened")
    assert await first_word(await dial(place, hello("second"))) == Started(uploader="nobody")


async def test_of_several_that_ask_for_a_dead_ones_name_one_has_it(place: ServedFabric) -> None:
    await place.open(FabricLimits(answer_s=0.1))
    await dial(place, hello("first"))
    await place.handlers.until("opened")
    others = [await dial(place, hello(f"other-{number}")) for number in range(4)]

    async def reads(socket: aiohttp.ClientWebSocketResponse) -> list[object]:
        return [decode_from_syncer(frame.data) async for frame in socket]

    tasks = [asyncio.ensure_future(reads(socket)) for socket in others]
    async with asyncio.timeout(10):
        while sum(task.done() for task in tasks) < 3:
            await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)
    answers = [task.result()[0] for task in tasks if task.done()]
    assert all(isinstance(answer, Refused) for answer in answers)
    assert len(place.handlers.told("opened")) == 2
    for task in tasks:
        task.cancel()


async def test_a_dead_processs_late_hello_does_not_take_the_name_from_its_successor(place: ServedFabric) -> None:
    """Both show the proof of their folder; the courier of the dead one was dialling when its process was killed."""
    await place.open(PATIENT)
    first = await dial(place, hello("first", "p" * 32))
    await place.handlers.until("opened")
    second = await dial(place, hello("second", "p" * 32))
    assert await first_word(second) == Started(uploader="nobody")
    await first.close()
    late = await dial(place, hello("first", "p" * 32, seq=2))
    assert await first_word(late) == Refused(reason=SUCCEEDED, final=True)
    await second.send_bytes(encode(Heartbeat(seq=2)))
    assert await place.handlers.until("received") == ("received", "learner-0", Heartbeat())
    assert [session for _, _, session in place.handlers.told("opened")] == ["first", "second"]
    assert place.handlers.told("closed") == []


async def test_nor_while_the_successor_is_away_which_may_come_back(place: ServedFabric) -> None:
    await place.open(PATIENT)
    for number, session in enumerate(("first", "second"), 1):
        socket = await dial(place, hello(session, "p" * 32))
        assert await first_word(socket) == Started(uploader="nobody")
        await socket.close()
        await place.handlers.until("closed", number)
    assert isinstance(await first_word(await dial(place, hello("first", "p" * 32, seq=2))), Refused)
    assert await first_word(await dial(place, hello("second", "p" * 32, seq=2))) == Started(uploader="nobody")


async def test_nor_after_more_restarts_than_are_remembered(place: ServedFabric) -> None:
    """Otherwise the live one would then be refused, for good."""
    await place.open(PATIENT)
    for number in range(REMEMBERED + 1):
        live = await dial(place, hello(f"{number}", "p" * 32))
        assert await first_word(live) == Started(uploader="nobody")
    late = await dial(place, hello("0", "p" * 32, seq=2, life=1))
    assert await first_word(late) == Refused(reason=SUCCEEDED, final=True)
    await live.close()
    again = await dial(place, hello(f"{REMEMBERED}", "p" * 32, seq=2, life=REMEMBERED + 1))
    assert await first_word(again) == Started(uploader="nobody")
