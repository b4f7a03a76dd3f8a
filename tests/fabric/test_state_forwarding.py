from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.digests import compute_digest
from atoll.fabric.authorizer import Rejected
from atoll.fabric.host import BodyPace
from atoll.fabric.state_forwarding import ForwardedStream, ForwardingLimits
from atoll.fabric.transfer import pieces
from atoll.fabric.wire import KIB, MIB, FabricLimits
from atoll.protocol.errors import ConfigError, PeerError, Unreachable

if TYPE_CHECKING:
    from .conftest import Learner, ServedFabric

STATE = bytes(range(251)) * (5 * MIB // 251)
"""Of no round length, so that a shift of its bytes shows."""
OTHER = STATE[::-1]
QUICK = FabricLimits(backoff_s=0.001)
WAIT_S = 10.0

NEWCOMER = {"Atoll-Session": "n0", "Atoll-Learner": "newcomer"}
PEER = {"Atoll-Session": "p0", "Atoll-Learner": "peer"}


class Buffers:
    """What a newcomer allocates, and how often it was asked to."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.data = bytearray()

    def __call__(self, size: int) -> memoryview:
        self.sizes.append(size)
        self.data = bytearray(size)
        return memoryview(self.data)


async def recovery(
    place: ServedFabric, limits: FabricLimits | None = None, forwarding: ForwardingLimits | None = None
) -> tuple[Learner, Learner]:
    """A newcomer and its peer, under ticket t-1."""
    await place.open(limits or QUICK, forwarding=forwarding)
    place.handlers.tickets["t-1"] = ("newcomer", "peer")
    return await place.joined("newcomer", "n0"), await place.joined("peer", "p0")


async def fetch(newcomer: Learner, into: Buffers, most_bytes: int = 64 * MIB, direct: str = "") -> str:
    return await newcomer.link.get_state(
        "t-1", into, learner="newcomer", session="n0", most_bytes=most_bytes, deadline_s=WAIT_S, direct=direct
    )


async def send(peer: Learner, state: bytes, offset: int, name: str | None = None) -> None:
    """In three parts, one of them empty."""
    parts = [memoryview(part) for part in (state[:1000], b"", state[1000:])]
    await peer.link.put_relay(
        "t-1",
        parts,
        offset=offset,
        digest=name or compute_digest(state),
        learner="peer",
        session="p0",
        deadline_s=WAIT_S,
    )


@asynccontextmanager
async def fetching(newcomer: Learner, into: Buffers) -> AsyncIterator[asyncio.Task[str]]:
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        yield tasks.create_task(fetch(newcomer, into))


def start(wanted: tuple[object, ...]) -> int:
    assert isinstance(wanted[3], int)
    return wanted[3]


def put_head(offset: int, size: int = len(STATE), name: str = compute_digest(STATE)) -> bytes:
    lines = ["PUT /v1/relay/t-1 HTTP/1.1", "Host: [::1]", f"Content-Length: {size - offset}"]
    lines += [f"{header}: {value}" for header, value in PEER.items()]
    lines += [f"Atoll-Offset: {offset}", f"Atoll-Size: {size}", f"Atoll-Digest: {name}", "", ""]
    return "\r\n".join(lines).encode()


async def begun_put(
    place: ServedFabric, sent: bytes, offset: int = 0
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A peer that stops after these bytes, once the syncer has them."""
    before = place.states.bytes_in
    reader, writer = await place.raw()
    writer.write(put_head(offset) + sent)
    await place.until(lambda: place.states.bytes_in == before + len(sent))
    return reader, writer


async def begun_get(place: ServedFabric) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A newcomer that has asked, and reads when the test reads."""
    before = len(place.handlers.told("wanted"))
    reader, writer = await place.raw()
    lines = ["GET /v1/relay/t-1 HTTP/1.1", "Host: [::1]", *(f"{header}: {value}" for header, value in NEWCOMER.items())]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    await place.handlers.until("wanted", before + 1)
    return reader, writer


def error(text: str) -> str:
    found = json.loads(text)["error"]
    assert isinstance(found, str) and "\n" not in found
    return found


# ---- whole transfers ----------------------------------------------------------------------------------------------


async def test_a_state_passes_through_the_syncer_bit_for_bit(place: ServedFabric) -> None:
    newcomer, peer = await recovery(place)
    into, server = Buffers(), place.server
    bytes_in, bytes_out = server.bytes_in, server.bytes_out
    async with fetching(newcomer, into) as got:
        assert await place.handlers.until("wanted") == ("wanted", "t-1", "newcomer", 0)
        await send(peer, STATE, 0)
    assert got.result() == compute_digest(STATE) and into.data == STATE and into.sizes == [len(STATE)]
    assert (server.bytes_in - bytes_in, server.bytes_out - bytes_out) == (len(STATE), len(STATE))
    assert place.states._streams == {}


async def test_one_ticket_after_another_goes_over_the_same_connections(place: ServedFabric) -> None:
    newcomer, peer = await recovery(place)
    for number, state in enumerate((STATE, OTHER, STATE[:1]), 1):
        into = Buffers()
        async with fetching(newcomer, into):
            await place.handlers.until("wanted", number)
            await send(peer, state, 0)
        assert into.data == state


async def test_a_peer_that_breaks_off_is_resumed_and_no_byte_passes_twice(place: ServedFabric) -> None:
    newcomer, peer = await recovery(place)
    into, received = Buffers(), newcomer.link.bytes_in
    async with fetching(newcomer, into):
        await place.handlers.until("wanted")
        for number, stop in enumerate((2 * MIB + 7, 3 * MIB), 2):
            at = start(place.handlers.told("wanted")[-1])
            _, writer = await begun_put(place, STATE[at:stop], at)
            writer.close()
            assert start(await place.handlers.until("wanted", number)) == stop
        await send(peer, STATE, 3 * MIB)
    assert into.data == STATE and into.sizes == [len(STATE)]
    assert newcomer.link.bytes_in - received == place.states.bytes_in == place.states.bytes_out == len(STATE)


async def lose_peer(place: ServedFabric) -> int:
    """One that dies after 2 MiB of STATE. Returns from where on the next one is asked."""
    await place.handlers.until("wanted")
    _, writer = await begun_put(place, STATE[: 2 * MIB])
    writer.close()
    return start(await place.handlers.until("wanted", 2))


async def test_a_peer_with_another_state_makes_the_newcomer_start_over(place: ServedFabric) -> None:
    newcomer, peer = await recovery(place)
    into = Buffers()
    async with fetching(newcomer, into):
        assert await lose_peer(place) == 2 * MIB
        with pytest.raises(PeerError, match="the newcomer is gone"):
            await send(peer, OTHER, 2 * MIB)
        assert start(await place.handlers.until("wanted", 3)) == 0
        await send(peer, OTHER, 0)
    assert into.data == OTHER and into.sizes == [len(STATE)]


async def test_a_peer_whose_state_is_shorter_than_what_came_sends_it_whole(place: ServedFabric) -> None:
    newcomer, peer = await recovery(place)
    into = Buffers()
    async with fetching(newcomer, into):
        at = await lose_peer(place)
        await send(peer, OTHER[:MIB], at)
    assert into.data == OTHER[:MIB] and into.sizes == [len(STATE), MIB]


# ---- what a newcomer does not take --------------------------------------------------------------------------------


async def test_a_state_of_another_digest_than_named_is_a_peer_error(place: ServedFabric) -> None:
    newcomer, peer = await recovery(place)
    async with asyncio.timeout(WAIT_S):
        got = asyncio.create_task(fetch(newcomer, Buffers()))
        await place.handlers.until("wanted")
        await send(peer, STATE, 0, name=compute_digest(OTHER))
        with pytest.raises(
            PeerError, match=f"digest {compute_digest(STATE)}, its source named {compute_digest(OTHER)}"
        ):
            await got


async def test_a_state_above_the_limit_is_a_peer_error_before_anything_is_allocated(place: ServedFabric) -> None:
    newcomer, peer = await recovery(place)
    into = Buffers()
    async with asyncio.timeout(WAIT_S):
        got = asyncio.create_task(fetch(newcomer, into, most_bytes=len(STATE) - 1))
        await place.handlers.until("wanted")
        with pytest.raises(PeerError, match="the newcomer is gone"):
            await send(peer, STATE * 4, 0)
        with pytest.raises(PeerError, match=f"at most {len(STATE) - 1} are taken"):
            await got
    assert into.sizes == [] and len(place.handlers.told("wanted")) == 1


async def test_a_newcomer_whose_peer_never_comes_gives_up_after_five_tries(place: ServedFabric) -> None:
    newcomer, _ = await recovery(place, forwarding=ForwardingLimits(peer_s=0.01))
    with pytest.raises(Unreachable, match=r"no peer sent its state within 0\.01 s"):
        await fetch(newcomer, Buffers())
    assert len(place.handlers.told("wanted")) == 5 and place.states._streams == {}


async def test_a_deadline_covers_every_try_and_says_how_far_it_came(place: ServedFabric) -> None:
    newcomer, _ = await recovery(place)
    got = newcomer.link.get_state("t-1", Buffers(), learner="newcomer", session="n0", most_bytes=1, deadline_s=0.05)
    with pytest.raises(Unreachable, match=r"not done within 0\.05 s: 0 of \? bytes came"):
        await got


# ---- endings ------------------------------------------------------------------------------------------------------


async def test_a_newcomer_that_goes_frees_its_peer(place: ServedFabric) -> None:
    _, peer = await recovery(place)
    _, writer = await begun_get(place)
    sending = asyncio.create_task(send(peer, bytes(64 * MIB), 0))
    await place.until(lambda: place.states.bytes_out > 0)
    writer.close()
    with pytest.raises(PeerError, match="the newcomer is gone"):
        async with asyncio.timeout(WAIT_S):
            await sending
    assert place.states._streams == {} and place.states.bytes_in < 64 * MIB


async def test_a_newcomer_that_went_before_its_peer_came_is_not_waited_for(place: ServedFabric) -> None:
    _, peer = await recovery(place)
    _, writer = await begun_get(place)
    writer.close()
    await place.until(lambda: not place.states._streams["t-1"].listening())
    with pytest.raises(PeerError, match="nobody waits for this state"):
        await send(peer, STATE, 0)


async def test_a_newcomer_that_stops_reading_is_cut_off_and_frees_its_peer(place: ServedFabric) -> None:
    _, peer = await recovery(place, FabricLimits(send_s=0.1))
    _, writer = await begun_get(place)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    with pytest.raises(PeerError, match="the newcomer reads too slowly"):
        await send(peer, bytes(64 * MIB), 0)


async def test_a_slow_newcomer_costs_the_syncer_no_more_than_its_window(place: ServedFabric) -> None:
    window = MIB
    _, peer = await recovery(place, forwarding=ForwardingLimits(window_bytes=window))
    reader, writer = await begun_get(place)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    state = bytes(64 * MIB)
    sending = asyncio.create_task(send(peer, state, 0))
    await place.until(lambda: any(one.most_bytes > window - 256 * KIB for one in place.states._streams.values()))
    for _ in range(50):  # turns of the syncer's loop in which it could take in more
        await place.request("GET", "/v1/status")
    stuck = place.states.bytes_in - place.states.bytes_out
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    async with asyncio.timeout(WAIT_S):
        head = await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len(state)) == state
        await sending
    assert b" 200 " in head and window - 256 * KIB < place.states.most_bytes <= window
    assert stuck <= window + 512 * KIB  # and a chunk in either hand


async def test_a_peer_that_trickles_is_cut_off_and_what_it_sent_is_passed_on(place: ServedFabric) -> None:
    await recovery(place, FabricLimits(body_idle_s=0.05))
    newcomer, _ = await begun_get(place)
    peer, _ = await begun_put(place, STATE[:100])
    async with asyncio.timeout(WAIT_S):
        answer = await peer.readuntil(b"}")
        assert b" 408 " in answer and f"too slowly: 100 of {len(STATE)} bytes".encode() in answer
        got = await newcomer.read()
    assert got.endswith(b"\r\n\r\n" + STATE[:100])


async def test_a_second_request_replaces_the_first_before_the_peer_came(place: ServedFabric) -> None:
    newcomer, peer = await recovery(place)
    older, _ = await begun_get(place)
    into = Buffers()
    async with fetching(newcomer, into):
        answer = await older.readuntil(b"}")
        assert b" 409 " in answer and b"replaced by a newer request" in answer
        await place.handlers.until("wanted", 2)
        await send(peer, STATE, 0)
    assert into.data == STATE


async def test_a_second_request_replaces_the_first_in_the_middle_and_the_peer_is_asked_again(
    place: ServedFabric,
) -> None:
    newcomer, peer = await recovery(place)
    older, _ = await begun_get(place)
    sender, writer = await begun_put(place, STATE[:MIB])
    into = Buffers()
    async with fetching(newcomer, into):
        assert len(await older.read()) < len(STATE)
        await place.handlers.until("wanted", 2)
        writer.write(STATE[MIB : MIB + 1])
        assert b"replaced by a newer request" in await sender.readuntil(b"}")
        await send(peer, STATE, 0)
    assert into.data == STATE


async def test_a_syncer_that_stops_ends_every_wait_at_once(place: ServedFabric) -> None:
    await recovery(place)
    newcomer, _ = await begun_get(place)
    await place.server.stop()
    async with asyncio.timeout(WAIT_S):
        answer = await newcomer.read()
    assert b" 503 " in answer and b"the syncer is stopping" in answer


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "headers", "status", "says"),
    [
        ("/v1/relay/t-2", NEWCOMER, 409, "t-2 is no ticket of newcomer"),
        ("/v1/relay/t-1", PEER, 409, "t-1 is no ticket of peer"),
        ("/v1/relay/t-1", {**NEWCOMER, "Atoll-Session": "old"}, 403, "say hello first"),
        ("/v1/relay/t-1", {"Atoll-Session": "n0"}, 403, "say hello first"),
        ("/v1/relay/t-1", {**NEWCOMER, "Origin": "http://example.com"}, 403, "web pages may only read"),
        ("/v1/relay/t-1", {**NEWCOMER, "Range": "bytes=1-2"}, 400, "bytes=1-2 is not understood"),
        ("/v1/relay/T_1", NEWCOMER, 404, "Not Found"),
        (f"/v1/relay/{'t' * 65}", NEWCOMER, 404, "Not Found"),
    ],
)
async def test_a_newcomer_without_the_right_to_a_state_is_refused(
    place: ServedFabric, path: str, headers: dict[str, str], status: int, says: str
) -> None:
    await recovery(place)
    found, text = await place.request("GET", path, headers=headers)
    assert (found, says in error(text)) == (status, True)
    assert place.handlers.told("wanted") == [] and place.states._streams == {}


SMALL = STATE[:100]
GOOD = {**PEER, "Atoll-Offset": "0", "Atoll-Size": "100", "Atoll-Digest": compute_digest(SMALL)}


@pytest.mark.parametrize(
    ("headers", "status", "says"),
    [
        ({**GOOD, "Atoll-Session": "old"}, 403, "say hello first"),
        ({**GOOD, **NEWCOMER}, 409, "newcomer is not the peer of t-1"),
        ({**GOOD, "Origin": "http://example.com"}, 403, "web pages may only read"),
        ({**GOOD, "Atoll-Size": "101"}, 400, "the body has 100 bytes, 101 are left of 101"),
        ({**GOOD, "Atoll-Offset": "100"}, 400, "the body has 100 bytes, 0 are left of 100"),
        ({**GOOD, "Atoll-Offset": "-1"}, 400, "comes with Atoll-Offset, Atoll-Size and Atoll-Digest"),
        ({**GOOD, "Atoll-Digest": "x"}, 400, "comes with Atoll-Offset, Atoll-Size and Atoll-Digest"),
        ({**GOOD, "Atoll-Offset": "7", "Atoll-Size": "107"}, 409, "byte 0 is waited for, this begins with byte 7"),
    ],
)
async def test_a_peer_that_may_not_send_this_is_refused_and_the_newcomer_waits_on(
    place: ServedFabric, headers: dict[str, str], status: int, says: str
) -> None:
    newcomer, peer = await recovery(place)
    into = Buffers()
    async with fetching(newcomer, into):
        await place.handlers.until("wanted")
        found, text = await place.request("PUT", "/v1/relay/t-1", SMALL, headers)
        assert (found, says in error(text)) == (status, True)
        await send(peer, STATE, 0)
    assert into.data == STATE and len(place.handlers.told("wanted")) == 1


async def test_a_state_nobody_waits_for_is_refused(place: ServedFabric) -> None:
    _, peer = await recovery(place)
    with pytest.raises(PeerError, match="nobody waits for this state now"):
        await send(peer, STATE, 0)
    assert place.states.bytes_in == 0


async def test_a_second_peer_at_the_same_time_is_refused(place: ServedFabric) -> None:
    _, peer = await recovery(place)
    await begun_get(place)
    await begun_put(place, STATE[:MIB])
    with pytest.raises(PeerError, match="this state is being sent already"):
        await send(peer, STATE, 0)


async def test_streams_are_bounded_and_those_whose_newcomer_is_gone_do_not_count(place: ServedFabric) -> None:
    await recovery(place, forwarding=ForwardingLimits(streams=1))
    place.handlers.tickets["t-2"] = ("newcomer", "peer")
    _, writer = await begun_get(place)
    status, text = await place.request("GET", "/v1/relay/t-2", headers=NEWCOMER)
    assert status == 429 and "1 states are being passed on already" in error(text)
    assert len(place.handlers.told("wanted")) == 1
    writer.close()
    await place.until(lambda: not place.states._streams["t-1"].listening())
    waiting = asyncio.create_task(place.request("GET", "/v1/relay/t-2", headers=NEWCOMER))
    await place.handlers.until("wanted", 2)
    await place.until(lambda: list(place.states._streams) == ["t-2"])
    place.states.close("over")
    assert (await waiting)[0] == 503


def test_limits_that_allow_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="streams = 0 must be above 0"):
        ForwardingLimits(streams=0)


# ---- the pieces ---------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=20), max_size=6), st.integers(0, 130), st.integers(1, 7))
def test_parts_are_one_run_of_bytes_from_any_byte_on(parts: list[bytes], start: int, size: int) -> None:
    found = list(pieces([memoryview(part) for part in parts], start, size))
    assert b"".join(found) == b"".join(parts)[start:]
    assert all(0 < piece.nbytes <= size for piece in found)


async def test_a_full_stream_makes_the_giver_wait_and_one_large_chunk_always_fits() -> None:
    stream = ForwardedStream(0, 10, lambda: True)
    await stream.give(b"x" * 8)
    second = asyncio.create_task(stream.give(b"y" * 12))
    await asyncio.sleep(0)
    assert not second.done() and stream.most_bytes == 8
    assert await stream.take_chunk() == b"x" * 8
    await second
    assert await stream.take_chunk() == b"y" * 12 and stream.most_bytes == 12


async def test_what_lies_in_a_stream_goes_on_after_the_peer_and_not_after_the_newcomer() -> None:
    stream = ForwardedStream(0, 10, lambda: True)
    await stream.give(b"x")
    stream.close(whole=False)
    assert (await stream.take_chunk(), await stream.take_chunk(), stream.whole) == (b"x", b"", False)
    stream.end(409, "gone")
    for wait in (stream.take_chunk(), stream.give(b"y"), stream.taken()):
        with pytest.raises(Rejected, match="gone"):
            await wait


async def test_patience_with_one_side_does_not_pay_for_the_other() -> None:
    pace = BodyPace(FabricLimits(body_grace_s=0.1, body_rate=1))
    await asyncio.sleep(0.2)  # the other side's time, longer than the grace
    await pace.wait(asyncio.sleep(0), 60)


async def test_patience_is_a_grace_then_a_rate_and_no_long_pause() -> None:
    pace, never = BodyPace(FabricLimits(body_grace_s=0.05, body_rate=1)), asyncio.Event()
    with pytest.raises(TimeoutError):
        await pace.wait(never.wait(), 60)
    with pytest.raises(TimeoutError):
        await pace.wait(asyncio.sleep(0), 60)  # the grace is used up
    pace.bytes += 60
    await pace.wait(asyncio.sleep(0), 60)
    with pytest.raises(TimeoutError):
        await pace.wait(never.wait(), 0.01)
