from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from atoll.courier import rank_channel
from atoll.courier.rank_channel import (
    FROM_FOLLOWER,
    FROM_LEADER,
    Arrivals,
    FetchPart,
    PartUploaded,
    RankChannel,
    dial_leader,
)
from atoll.mailbox.channel import StopOrder, encode_frame
from atoll.protocol.errors import PeerError

WAIT_S = 20.0


class Door:
    """A leader's listening socket, and who came in."""

    def __init__(self, ranks: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.came: dict[int, socket.socket] = {}
        self.arrivals = Arrivals(self.listener, "learner-1", ranks, "secret")

    async def open(self, deadline_s: float = WAIT_S) -> None:
        await self.arrivals.wait_for_all(self.came.__setitem__, deadline_s)

    async def dial(self, rank: int, secret: str = "secret") -> socket.socket:
        return await dial_leader(self.address, secret, rank, WAIT_S)


@pytest.fixture
async def channels() -> AsyncIterator[list[RankChannel]]:
    made: list[RankChannel] = []
    yield made
    for channel in made:
        channel.close()


async def test_all_ranks_come_and_say_who_they_are() -> None:
    door = Door(3)
    opened = asyncio.ensure_future(door.open())
    socks = [await door.dial(2), await door.dial(1)]
    await opened
    assert sorted(door.came) == [1, 2]
    assert door.came[2].getpeername() == socks[0].getsockname()
    for sock in [*socks, *door.came.values()]:
        sock.close()


async def test_who_does_not_know_the_secret_is_not_let_in_and_is_missed() -> None:
    door = Door(2)
    opened = asyncio.ensure_future(door.open(0.2))
    with pytest.raises(PeerError, match=r"rank 1 does not reach rank 0 at .*: it ended the connection"):
        await door.dial(1, "another")
    with pytest.raises(PeerError, match=r"^rank 1 of learner-1 did not come within 0.2 s$"):
        await opened
    assert not door.came


async def test_a_leader_that_does_not_know_the_secret_is_not_followed() -> None:
    """It sends random bytes as any leader would, and cannot answer ours."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    loop = asyncio.get_running_loop()

    async def pretend() -> None:
        sock, _ = await loop.sock_accept(listener)
        with sock:
            await loop.sock_sendall(sock, bytes(32))
            await loop.sock_recv(sock, 100)
            await loop.sock_sendall(sock, bytes(32))

    pretender = asyncio.ensure_future(pretend())
    with pytest.raises(PeerError, match="it does not know this learner's secret"):
        await dial_leader(f"127.0.0.1:{listener.getsockname()[1]}", "secret", 1, WAIT_S)
    await pretender
    listener.close()


async def test_a_rank_that_comes_twice_is_told_so_and_the_first_one_stays(channels: list[RankChannel]) -> None:
    door = Door(3)
    opened = asyncio.ensure_future(door.open())
    first, second = await door.dial(1), await door.dial(1)
    told: asyncio.Queue[Any] = asyncio.Queue()
    channels.append(RankChannel(second, FROM_LEADER, told.put_nowait, lambda reason: None, run))
    assert await next_of(told) == StopOrder("rank 1 of learner-1 has come already", final=True, failed=True)
    with await door.dial(2) as other:
        await opened
        assert door.came[1].getpeername() == first.getsockname()
        assert door.came[2].getpeername() == other.getsockname()
    for sock in (first, *door.came.values()):
        sock.close()


async def test_a_rank_that_is_not_one_of_them_is_told_so(channels: list[RankChannel]) -> None:
    door = Door(2)
    opened = asyncio.ensure_future(door.open())
    told: asyncio.Queue[Any] = asyncio.Queue()
    channels.append(RankChannel(await door.dial(2), FROM_LEADER, told.put_nowait, lambda reason: None, run))
    assert (await next_of(told)).reason == "rank 2 of learner-1 is not among its 2 ranks"
    with await door.dial(1):
        await opened
    door.came[1].close()


async def test_those_that_do_not_come_are_named() -> None:
    door = Door(5)
    opened = asyncio.ensure_future(door.open(0.2))
    with await door.dial(2), pytest.raises(PeerError) as raised:
        await opened
    assert str(raised.value) == "ranks 1, 3 and 4 of learner-1 did not come within 0.2 s"
    door.came[2].close()


async def test_strangers_that_say_nothing_keep_no_rank_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_channel, "MOST_STRANGERS", 2)
    door = Door(2)
    opened = asyncio.ensure_future(door.open())
    strangers = [socket.create_connection(door.listener.getsockname()) for _ in range(8)]
    with await door.dial(1):
        await opened
    for sock in (*strangers, door.came[1]):
        sock.close()


def run(callback: Callable[[], None]) -> None:
    callback()


async def next_of(queue: asyncio.Queue[Any]) -> Any:
    async with asyncio.timeout(WAIT_S):
        return await queue.get()


class Pair:
    """Both ends of a channel between couriers."""

    def __init__(self, channels: list[RankChannel]) -> None:
        ours, theirs = socket.socketpair()
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.leader = RankChannel(ours, FROM_FOLLOWER, self.heard.put_nowait, self.lost.put_nowait, run)
        self.theirs = theirs
        channels.append(self.leader)


@pytest.fixture(autouse=True)
def no_tcp_options(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A pair of local sockets has none."""
    if "pair" in request.node.name:
        monkeypatch.setattr(rank_channel, "_watch_machine", lambda sock: None)


async def test_pair_frames_come_whole_and_in_order(channels: list[RankChannel]) -> None:
    pair = Pair(channels)
    frames = [PartUploaded(ask, ((1, "d"),)) for ask in range(3)]
    data = b"".join(len(one).to_bytes(4, "little") + one for one in map(encode_frame, frames))
    pair.theirs.sendall(data[:7])
    pair.theirs.sendall(data[7:])
    assert [await next_of(pair.heard) for _ in frames] == frames
    pair.theirs.close()
    assert await next_of(pair.lost) == "its courier is gone"


async def test_pair_what_is_no_frame_of_a_follower_loses_it(channels: list[RankChannel]) -> None:
    pair = Pair(channels)
    data = encode_frame(FetchPart(0, 1))
    pair.theirs.sendall(len(data).to_bytes(4, "little") + data)
    assert "it sent what is no frame: no frame is called 'FetchPart' here" in await next_of(pair.lost)
    pair.theirs.close()


async def test_pair_a_follower_that_takes_nothing_is_lost_and_nobody_waits(
    channels: list[RankChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_channel, "MOST_WAITING", 10)
    pair = Pair(channels)
    for ask in range(100_000):
        pair.leader.send(PartUploaded(ask, ((1, "d" * 1000),)))
        if not pair.lost.empty():
            break
    assert pair.lost.get_nowait() == "it does not take what it is told"
    pair.theirs.close()


async def test_pair_what_did_not_fit_goes_out_once_the_other_side_reads(channels: list[RankChannel]) -> None:
    pair, sent = Pair(channels), 0
    while not pair.leader._writing:
        pair.leader.send(PartUploaded(sent, ((1, "d" * 1000),)))
        sent += 1
    heard: asyncio.Queue[Any] = asyncio.Queue()
    channels.append(RankChannel(pair.theirs, FROM_FOLLOWER, heard.put_nowait, pair.lost.put_nowait, run))
    assert [(await next_of(heard)).ask for _ in range(sent)] == list(range(sent))
