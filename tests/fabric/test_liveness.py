from __future__ import annotations

import asyncio
import time

from atoll.fabric.control_channel import PeerPing


class Peer:
    """Counts pings, and answers where it is told to."""

    def __init__(self, *, answers: bool = True) -> None:
        self.pings, self.answers = 0, answers
        self.liveness = PeerPing(self.ping)

    async def ping(self) -> None:
        self.pings += 1
        if self.answers:
            asyncio.get_running_loop().call_soon(self.liveness.note)


async def test_one_that_answers_is_there_and_one_that_does_not_is_gone() -> None:
    assert await Peer().liveness.answers(60.0)
    assert not await Peer(answers=False).liveness.answers(0.02)


async def test_what_came_before_it_was_asked_is_no_answer() -> None:
    peer = Peer(answers=False)
    peer.liveness.note()
    assert not await peer.liveness.answers(0.02)


async def test_several_that_ask_share_one_ping() -> None:
    peer = Peer()
    assert await asyncio.gather(*(peer.liveness.answers(60.0) for _ in range(5))) == [True] * 5
    assert peer.pings == 1
    assert await peer.liveness.answers(60.0) and peer.pings == 2


async def test_one_that_takes_no_ping_is_gone() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    async def broken() -> None:
        raise ConnectionResetError

    assert not await PeerPing(stuck).answers(0.02)
    assert not await PeerPing(broken).answers(0.02)


async def test_nobody_is_gone_because_this_loop_stood_still() -> None:
    """Longer than the whole wait; what came meanwhile is read after it, and after the timers that are due."""
    loop = asyncio.get_running_loop()

    async def ping() -> None:
        loop.call_soon(time.sleep, 0.3)
        loop.call_later(0.25, liveness.note)

    liveness = PeerPing(ping)
    assert await liveness.answers(0.2)
