from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import aiohttp
import pytest

from atoll.digests import compute_digest
from atoll.fabric.host import NEWCOMERS, STRANGERS, StateHost
from atoll.fabric.wire import MIB, FabricLimits
from atoll.protocol.errors import ConfigError, PeerError

if TYPE_CHECKING:
    from .conftest import Learner, ServedFabric

STATE = bytes(range(251)) * (5 * MIB // 251)
"""Of no round length, so that a shift of its bytes shows."""
QUICK = FabricLimits(backoff_s=0.001)
WAIT_S = 10.0


def offer(host: StateHost, state: bytes = STATE, ticket: str = "t-1") -> None:
    """In three parts, one of them empty."""
    host.offer(
        ticket, [memoryview(part) for part in (state[:1000], b"", state[1000:])], len(state), compute_digest(state)
    )


async def ask(
    host: StateHost, path: str = "/v1/state/t-1", method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, host.url + path, headers=headers) as answer,
    ):
        return answer.status, dict(answer.headers), await answer.read()


class Newcomer:
    """One whose syncer can relay from `peer`, and who counts what it allocates."""

    def __init__(self, place: ServedFabric, learner: Learner, peer: Learner) -> None:
        self.place, self.peer = place, peer
        self.data = bytearray()
        self.sizes: list[int] = []
        self._link = learner.link

    def _into(self, size: int) -> memoryview:
        self.sizes.append(size)
        self.data = bytearray(size)
        return memoryview(self.data)

    async def fetch(self, direct: str, most_bytes: int = 128 * MIB) -> str:
        return await self._link.get_state(
            "t-1",
            self._into,
            learner="newcomer",
            session="n0",
            most_bytes=most_bytes,
            deadline_s=WAIT_S,
            direct=direct,
        )

    async def relayed(self, state: bytes) -> int:
        """The byte from which on the peer was asked to send through the syncer, and did."""
        start = (await self.place.handlers.until("wanted"))[3]
        assert isinstance(start, int)
        await self.peer.link.put_relay(
            "t-1",
            [memoryview(state)],
            offset=start,
            digest=compute_digest(state),
            learner="peer",
            session="p0",
            deadline_s=WAIT_S,
        )
        return start


async def newcomer_of(place: ServedFabric, limits: FabricLimits = QUICK) -> Newcomer:
    await place.open(limits)
    place.handlers.tickets["t-1"] = ("newcomer", "peer")
    return Newcomer(place, await place.joined("newcomer", "n0"), await place.joined("peer", "p0"))


# ---- what it answers ----------------------------------------------------------------------------------------------


async def test_a_state_on_offer_is_given_whole_or_from_a_byte_on(place: ServedFabric) -> None:
    host = await place.host()
    offer(host)
    status, headers, body = await ask(host)
    assert (status, headers["Atoll-Size"], headers["Atoll-Digest"]) == (200, str(len(STATE)), compute_digest(STATE))
    assert body == STATE and host.bytes_out == len(STATE)
    status, headers, body = await ask(host, headers={"Range": "bytes=1234567-"})
    assert (status, headers["Content-Range"]) == (206, f"bytes 1234567-{len(STATE) - 1}/{len(STATE)}")
    assert body == STATE[1234567:] and host.bytes_out == 2 * len(STATE) - 1234567


async def test_a_range_beyond_the_state_gives_it_whole(place: ServedFabric) -> None:
    host = await place.host()
    offer(host)
    status, headers, body = await ask(host, headers={"Range": f"bytes={len(STATE)}-"})
    assert status == 200 and "Content-Range" not in headers and body == STATE


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "says"),
    [
        ("GET", "/v1/state/t-2", {}, 401, "no state is on offer under this ticket"),
        ("GET", "/v1/state/T_1", {}, 401, "no state is on offer"),
        ("GET", "/v1/state/t-1", {"Range": "bytes=-5"}, 400, "bytes=-5 is not understood"),
        ("GET", "/v1/state/t-1", {"Origin": "http://example.com"}, 403, "web pages"),
        ("PUT", "/v1/state/t-1", {}, 401, "no state is on offer"),
        ("DELETE", "/v1/state/t-1", {}, 401, "no state is on offer"),
    ],
)
async def test_anything_else_is_refused_in_one_line(
    place: ServedFabric, method: str, path: str, headers: dict[str, str], status: int, says: str
) -> None:
    host = await place.host()
    offer(host)
    found, _, body = await ask(host, path, method, headers)
    assert found == status and says in json.loads(body)["error"]
    assert host.bytes_out == 0


async def test_a_withdrawn_state_is_unknown_and_its_bytes_are_not_read_again(place: ServedFabric) -> None:
    host, state = await place.host(), bytearray(64 * MIB)
    host.offer("t-1", [memoryview(state)], len(state), compute_digest(state))
    reader, writer = await place.raw(host.port)
    writer.write(b"GET /v1/state/t-1 HTTP/1.1\r\nHost: [::1]\r\n\r\n")
    async with asyncio.timeout(WAIT_S):
        await reader.readuntil(b"\r\n\r\n")
        host.withdraw("t-1")
        state[:] = b"x" * len(state)
        came = await reader.read()
    assert len(came) < len(state) and b"x" not in came
    assert (await ask(host))[0] == 401
    host.withdraw("t-1")


async def test_a_newcomer_that_stops_reading_is_cut_off(place: ServedFabric) -> None:
    host = await place.host(FabricLimits(send_s=0.1))
    offer(host, bytes(64 * MIB))
    _, writer = await place.raw(host.port)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(b"GET /v1/state/t-1 HTTP/1.1\r\nHost: [::1]\r\n\r\n")
    await place.until(lambda: len(host._offers["t-1"].readers) == 1)
    await place.until(lambda: not host._offers["t-1"].readers)
    assert host.bytes_out < 64 * MIB


async def test_connections_and_silence_are_bounded(place: ServedFabric) -> None:
    host = await place.host(FabricLimits(header_s=0.2))
    offer(host)
    quiet = [(await place.raw(host.port))[0] for _ in range(NEWCOMERS)]
    async with asyncio.timeout(WAIT_S):
        assert [await reader.read() for reader in quiet] == [b""] * NEWCOMERS
    offer(host, bytes(64 * MIB))
    for _ in range(NEWCOMERS):
        reader, writer = await place.raw(host.port)
        writer.write(b"GET /v1/state/t-1 HTTP/1.1\r\nHost: [::1]\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
    assert (await ask(host))[0] == 429


@pytest.mark.parametrize(
    "says", [b"", b"GET /v1/state/guess HTTP/1.1\r\nHost: [::1]\r\n\r\n"], ids=["nothing", "a guess"]
)
async def test_whoever_has_no_ticket_keeps_no_newcomer_away(place: ServedFabric, says: bytes) -> None:
    host = await place.host(FabricLimits(header_s=60.0))
    offer(host)
    for _ in range(3 * STRANGERS):
        reader, writer = await place.raw(host.port)
        writer.write(says)
        if says:
            assert b" 401 " in await reader.readline()
        assert (await ask(host))[0] == 200


async def test_it_opens_on_this_machine_alone_and_says_where(place: ServedFabric) -> None:
    with pytest.raises(ConfigError, match="binding to 0"):
        StateHost(host="0.0.0.0")
    host = await place.host()
    assert host.port and host.url == f"http://127.0.0.1:{host.port}"
    with pytest.raises(ConfigError, match=f"port {host.port} is in use"):
        await StateHost(port=host.port).start()
    other = StateHost(port=host.port)
    other.or_any_port = True
    await other.start()
    assert other.port not in (0, host.port)
    await other.stop()


async def test_stopping_ends_what_is_under_way(place: ServedFabric) -> None:
    host = await place.host()
    offer(host, bytes(64 * MIB))
    reader, writer = await place.raw(host.port)
    writer.write(b"GET /v1/state/t-1 HTTP/1.1\r\nHost: [::1]\r\n\r\n")
    async with asyncio.timeout(WAIT_S):
        await reader.readuntil(b"\r\n\r\n")
        await host.stop()
        assert len(await reader.read()) < 64 * MIB


# ---- how a newcomer uses it ---------------------------------------------------------------------------------------


async def test_a_peer_that_can_be_reached_gives_its_state_past_the_syncer(place: ServedFabric) -> None:
    newcomer, host = await newcomer_of(place), await place.host()
    offer(host)
    assert await newcomer.fetch(host.url) == compute_digest(STATE)
    assert newcomer.data == STATE and newcomer.sizes == [len(STATE)]
    assert place.handlers.told("wanted") == [] and place.states.bytes_in == 0


@pytest.mark.parametrize(
    "direct", ["http://127.0.0.1:1", "http://192.0.2.1:7077", "http://127.0.0.1:1/x?y", "nonsense"]
)
async def test_a_peer_that_cannot_be_reached_is_asked_through_the_syncer(place: ServedFabric, direct: str) -> None:
    newcomer = await newcomer_of(place)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        got = tasks.create_task(newcomer.fetch(direct))
        assert await newcomer.relayed(STATE) == 0
    assert got.result() == compute_digest(STATE) and newcomer.data == STATE


async def test_a_peer_that_knows_no_such_ticket_is_asked_through_the_syncer(place: ServedFabric) -> None:
    newcomer, host = await newcomer_of(place), await place.host()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(newcomer.fetch(host.url))
        assert await newcomer.relayed(STATE) == 0
    assert newcomer.data == STATE


async def test_what_is_withdrawn_in_the_middle_comes_through_the_syncer_from_there_on(place: ServedFabric) -> None:
    newcomer, host = await newcomer_of(place), await place.host()
    state = STATE * 12
    offer(host, state)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(newcomer.fetch(host.url))
        await place.until(lambda: host.bytes_out >= 4 * MIB)
        host.withdraw("t-1")
        start = await newcomer.relayed(state)
    assert 0 < start < len(state) and place.states.bytes_in == len(state) - start
    assert newcomer.data == state and newcomer.sizes == [len(state)]


async def test_a_broken_connection_to_the_peer_is_resumed_there_and_no_byte_is_sent_twice(place: ServedFabric) -> None:
    """The peer's own server behind a wire that breaks after 2 MiB."""
    newcomer, host = await newcomer_of(place), await place.host()
    offer(host)
    asked: list[bytes] = []

    async def wire(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, before = await place.raw(host.port)
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        before.write(asked[-1])
        writer.write(await behind.readuntil(b"\r\n\r\n"))
        left = 2 * MIB
        while left and (data := await behind.read(left)):
            writer.write(data)
            left -= len(data)
        writer.close()

    server = await asyncio.start_server(wire, "127.0.0.1", 0)
    async with server, asyncio.timeout(WAIT_S):
        assert await newcomer.fetch(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") == compute_digest(STATE)
    assert newcomer.data == STATE and newcomer.sizes == [len(STATE)]
    assert [b"Range: bytes=%d-" % (number * 2 * MIB) in head for number, head in enumerate(asked)] == [
        False,
        True,
        True,
    ]
    assert place.handlers.told("wanted") == []


async def test_a_peer_that_falls_silent_is_left_and_the_rest_comes_through_the_syncer(place: ServedFabric) -> None:
    newcomer = await newcomer_of(place, FabricLimits(backoff_s=0.001, body_idle_s=0.2))
    asked: list[bytes] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        if len(asked) == 1:
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(STATE)}\r\nAtoll-Size: {len(STATE)}\r\n"
            writer.write(f"{head}Atoll-Digest: {compute_digest(STATE)}\r\n\r\n".encode() + STATE[:MIB])
            await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server, asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(newcomer.fetch(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        assert await newcomer.relayed(STATE) == MIB
    assert newcomer.data == STATE and f"Range: bytes={MIB}-".encode() in asked[1]


@pytest.mark.parametrize(
    ("state", "name", "says"),
    [
        (STATE, compute_digest(STATE[1:]), "its source named"),
        (STATE, compute_digest(STATE), f"at most {MIB} are taken"),
    ],
    ids=["digest", "size"],
)
async def test_what_the_peer_itself_gives_is_checked_as_well(
    place: ServedFabric, state: bytes, name: str, says: str
) -> None:
    newcomer, host = await newcomer_of(place), await place.host()
    host.offer("t-1", [memoryview(state)], len(state), name)
    most_bytes = MIB if "at most" in says else len(state)
    async with asyncio.timeout(WAIT_S):
        got = asyncio.create_task(newcomer.fetch(host.url, most_bytes))
        if "at most" in says:
            with pytest.raises(PeerError, match="the newcomer is gone"):
                await newcomer.relayed(state)
        with pytest.raises(PeerError, match=says):
            await got
    assert newcomer.sizes == ([] if "at most" in says else [len(state)])
