"""What somebody tries who has a learner's token, and floods of those who have none. docs/security.md lists it.

As in test_abuse.py: a reason for each, the state's digest as before, the honest learner undisturbed. A learner that
joins is written down, so the digest is taken once it is there.
"""

from __future__ import annotations

import asyncio
import re
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.syncer.conftest import TENSORS, WAIT_S, FakeLearner

from atoll.fabric.wire import Limits, decode_from_syncer, digest, encode
from atoll.protocol.messages import PROTOCOL, Contribution, Heartbeat, Hello, Lease, Pull, Refused, Register, Welcome

from .fort import HONEST, SHORT, TOKENS, Fort

Case = Callable[[Fort], Awaitable[str]]
Given = Callable[[Fort, FakeLearner, Pull], Awaitable[str]]

ENDS = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)


def hello(learner: str = "eu-1", session: str = "s1", **more: Any) -> Hello:
    said: dict[str, Any] = {"protocol": PROTOCOL, "learner": learner, "session": session, "tensors": TENSORS, "seq": 1}
    return Hello(**{**said, **more})


async def last_words(socket: aiohttp.ClientWebSocketResponse) -> str:
    """Why a channel was closed: its refusal, or the code it was closed with."""
    said = ""
    async with asyncio.timeout(WAIT_S):
        while (frame := await socket.receive()).type not in ENDS:
            if frame.type is aiohttp.WSMsgType.BINARY:
                message = decode_from_syncer(frame.data)
                said = message.reason if isinstance(message, Refused) else said
    return f"{said} ({socket.close_code})"


def opens_with(data: bytes, who: str = "eu") -> Case:
    async def case(fort: Fort) -> str:
        socket = await fort.socket(who)
        await socket.send_bytes(data)
        return await last_words(socket)

    return case


def joins_as(name: str, who: str = "eu") -> Case:
    async def case(fort: Fort) -> str:
        return await fort.refusal_of(fort.join(name, who))

    return case


async def no_hello(fort: Fort) -> str:
    return await last_words(await fort.socket())


async def text(fort: Fort) -> str:
    socket = await fort.socket()
    await socket.send_str("hello")
    return await last_words(socket)


async def frame_without_end(fort: Fort) -> str:
    """A frame that says it has 2**62 bytes: it is not waited for."""
    socket = await fort.socket()
    assert socket._writer is not None
    socket._writer.transport.write(b"\x82\xff" + struct.pack("!Q", 2**62) + b"\0\0\0\0" + bytes(1000))
    return await last_words(socket)


async def compressed_frame(fort: Fort) -> str:
    """Compression is offered and not agreed on; a frame that is compressed all the same is none."""
    socket = await fort.socket(compress=15)
    assert socket.compress == 0, "the syncer agrees to no compression"
    assert socket._writer is not None
    socket._writer.transport.write(b"\xc2\x80" + b"\0\0\0\0")
    return await last_words(socket)


OUTSIDE: dict[str, tuple[Case, str]] = {
    "another learner's id": (joins_as(HONEST, "boss"), "the name honest belongs to whoever holds the token 'join'"),
    "a name that its token is not for": (joins_as("us-1"), r"the token 'eu' is for eu-\*, not for us-1"),
    "no hello": (no_hello, "no hello within 0.5 s"),
    "text": (text, "a text frame: control messages are binary"),
    "garbage": (opens_with(b"\xff\x00{not a message"), "a learner's message could not be read"),
    "an unknown type": (opens_with(msgspec.msgpack.encode({"type": "Overthrow"})), "could not be read: Invalid value"),
    "an unknown field": (
        opens_with(msgspec.msgpack.encode({**msgspec.to_builtins(hello()), "sudo": True})),
        "unknown field `sudo`",
    ),
    "a field of another type": (
        opens_with(msgspec.msgpack.encode({**msgspec.to_builtins(hello()), "t": "many"})),
        "could not be read: Expected `int`",
    ),
    "something else than a hello": (opens_with(encode(Heartbeat(seq=1))), "a channel opens with Hello"),
    "a path for a name": (opens_with(encode(hello("../../etc/passwd"))), "is no name"),
    "a name that is a header": (opens_with(encode(hello("eu-1\r\nSet-Cookie: a=b"))), "is no name"),
    "a path for a session": (opens_with(encode(hello(session="../s"))), "is no name"),
    "a version of tomorrow": (opens_with(encode(hello(protocol=PROTOCOL + 1))), "install the same version of atoll"),
    "versions of a part of the model": (
        opens_with(encode(hello(run="r1", versions=(0,) * 9))),
        "a hello with versions of 9 fragments in a run of",
    ),
    "another model": (opens_with(encode(hello(tensors=TENSORS[:1]))), "'two'"),
    "a message over 4 MiB": (opens_with(bytes(5 << 20)), r"^ \(1009\)|^ \(1006\)"),
    "a frame without end": (frame_without_end, r"\(1009\)|\(1006\)|\(1002\)"),
    "a compression bomb": (compressed_frame, r"\(1002\)|\(1006\)"),
}


@pytest.mark.parametrize("name", OUTSIDE)
async def test_nobody_gets_in_like_this(fort: Fort, name: str) -> None:
    case, expected = OUTSIDE[name]
    await fort.open()
    before = await fort.digest()
    reason = await case(fort)
    assert re.search(expected, reason), reason
    await fort.unharmed(before)


# ---- a learner that is in, and is asked for a contribution --------------------------------------------------------


def puts(make: Callable[[bytes], bytes], **headers: str) -> Given:
    async def case(fort: Fort, rogue: FakeLearner, pull: Pull) -> str:
        named = {key: value.format(other=fort.honest.session) for key, value in headers.items()}
        return await fort.put(rogue, pull, make(fort.values(pull, 1e-3)), **named)

    return case


def gives(value: float = 1e-3, **changes: Any) -> Given:
    """A body that is whole, and a message that says of it what it should not."""

    async def case(fort: Fort, rogue: FakeLearner, pull: Pull) -> str:
        fort.stage.service._screen.restore([[1e-3] * 16] * 2)
        before = await fort.digest()
        await rogue.contribute(pull, value, **changes)
        event = await fort.stage.until("refused")
        assert await fort.digest() == before
        return str(event["text"])

    return case


async def too_slow(fort: Fort, rogue: FakeLearner, pull: Pull) -> str:
    async def drip() -> Any:
        for byte in fort.values(pull, 1.0):
            yield bytes([byte])
            await asyncio.sleep(0.1)

    path = f"/v1/contributions/{rogue.name}/{pull.round}/{pull.attempt}"
    headers = {"Atoll-Session": rogue.session, "Content-Length": str(len(fort.values(pull, 1.0)))}
    return str(await fort.request("PUT", path, "eu", headers, drip()))


async def hangs_up(fort: Fort, rogue: FakeLearner, pull: Pull) -> str:
    path = f"/v1/contributions/{rogue.name}/{pull.round}/{pull.attempt}"
    _, writer = await fort.raw()
    head = f"PUT {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKENS['eu'].secret}\r\n"
    writer.write(
        f"{head}Atoll-Session: {rogue.session}\r\nContent-Length: {len(fort.values(pull, 1.0))}\r\n\r\nabc".encode()
    )
    await writer.drain()
    parcel = fort.stage.service._inbox._parcels[rogue.name, pull.round, pull.attempt]
    await fort.until(lambda: parcel.receiving)
    writer.transport.abort()
    await fort.until(lambda: not parcel.receiving)
    return "its buffer is free again"


async def chunked(fort: Fort, rogue: FakeLearner, pull: Pull) -> str:
    async def some() -> Any:
        yield fort.values(pull, 1.0)

    path = f"/v1/contributions/{rogue.name}/{pull.round}/{pull.attempt}"
    return str(await fort.request("PUT", path, "eu", {"Atoll-Session": rogue.session}, some()))


async def twice(fort: Fort, rogue: FakeLearner, pull: Pull) -> str:
    data = fort.values(pull, 1e-3)
    assert (await fort.put(rogue, pull, data)).startswith("204")
    return await fort.put(rogue, pull, data)


async def not_asked_for(fort: Fort, rogue: FakeLearner, pull: Pull) -> str:
    path = f"/v1/contributions/{rogue.name}/{pull.round + 1000}/0"
    return await fort.put(rogue, pull, fort.values(pull, 1.0), path=path)


async def first_parameters(fort: Fort, rogue: FakeLearner, pull: Pull) -> str:
    return await fort.put(rogue, pull, fort.values(pull, 1.0), path=f"/v1/initial/{rogue.name}/0")


async def anothers_body(fort: Fort, rogue: FakeLearner, pull: Pull) -> str:
    path = f"/v1/contributions/{HONEST}/{pull.round}/{pull.attempt}"
    return await fort.put(rogue, pull, fort.values(pull, 1.0), path=path, Atoll_Session=fort.honest.session)


async def guessed_ticket(fort: Fort, rogue: FakeLearner, pull: Pull) -> str:
    headers = {"Atoll-Learner": rogue.name, "Atoll-Session": rogue.session}
    told = [await fort.request("GET", "/v1/relay/0000-0000", "eu", headers)]
    headers |= {"Atoll-Offset": "0", "Atoll-Size": "4", "Atoll-Digest": digest(b"evil")}
    told.append(await fort.request("PUT", "/v1/relay/0000-0000", "eu", headers, b"evil"))
    return str(told)


SAID_OF: dict[str, tuple[Given, str]] = {
    "too long": (puts(lambda data: data + b"\0\0"), "^400 the body has .* bytes, this fragment needs exactly"),
    "too short": (puts(lambda data: data[:-4]), "^400 the body has .* bytes, this fragment needs exactly"),
    "empty": (puts(lambda data: b""), "^400 the body has 0 bytes"),
    "of no length": (chunked, "400, 'the body has no length"),
    "too slow": (too_slow, "408, 'the body came too slowly"),
    "hung up in the middle": (hangs_up, "its buffer is free again"),
    "tampered digest": (puts(lambda data: data, Atoll_Digest="0" * 32), "^422 the body's digest is"),
    "another learner's session": (puts(lambda data: data, Atoll_Session="{other}"), "^403 eu-1 has no open control"),
    "another learner's body": (anothers_body, "^403 honest came by another token than this request shows"),
    "twice": (twice, "^409 the contribution to round .* is here already"),
    "not asked for": (not_asked_for, "^409 no contribution to round .* is waited for"),
    "first parameters of a run that has some": (first_parameters, "^409 .* was not asked for the first parameters"),
    "a guessed ticket": (guessed_ticket, r"\(40[39], .*\(40[39], "),
}


@pytest.mark.parametrize("name", SAID_OF)
async def test_a_body_is_refused(fort: Fort, name: str) -> None:
    case, expected = SAID_OF[name]
    await fort.open()
    rogue, pull = await fort.asked()
    before = await fort.digest()
    reason = await case(fort, rogue, pull)
    assert re.search(expected, reason), reason
    await fort.unharmed(before)


async def test_too_many_learners_on_one_token(fort: Fort) -> None:
    await fort.open()
    await fort.join("eu-1", "eu").until(Welcome)
    await fort.join("eu-2", "eu").until(Welcome)
    await fort.until(lambda: {"eu-1", "eu-2"} <= set(fort.machine.members.learners))
    before = await fort.digest()
    reason = await fort.refusal_of(fort.join("eu-3", "eu"))
    assert "is for 2 learners at once, and they are there already" in reason
    await fort.unharmed(before)


async def anothers_lease(fort: Fort, rogue: FakeLearner, pull: Pull) -> str:
    """It says that it trained on what was leased to it and, behind that, on what was leased to the honest one."""
    data = Register(datasets=(("text", 20_000, 1.0),), epochs=0, batch=2)
    for learner in (rogue, fort.honest):
        assert learner.link.send(data)
        await learner.until(Lease)
    granted = [one for message in rogue.heard if isinstance(message, Lease) for one in message.ranges]
    return await gives(position=sum(one.stop - one.start for one in granted) + 64)(fort, rogue, pull)


GIVEN: dict[str, tuple[Given, str]] = {
    "NaN": (gives(float("nan")), "not finite"),
    "Inf": (gives(float("inf")), "not finite"),
    "norm x1000": (gives(1.0), "times the running median"),
    "another digest than its body's": (gives(digest="0" * 32), "its body is not the one its message names"),
    "an unknown fragment": (gives(fragment=10**4), "fragment 10000"),
    "a base that never was": (gives(base=10**6), "which this run never committed"),
    "a base below zero": (gives(base=-1), "which this run never committed"),
    "counters below zero": (gives(steps=-5), "its counters are below zero"),
    "a total below zero": (gives(total=-5), "its counters are below zero"),
    "more tokens than its process had": (gives(total=0), "its process has had 0 in all"),
    "token overclaim": (gives(tokens=10**9), "1000000000 tokens"),
    "someone else's lease": (anothers_lease, "it says it took [0-9]+ samples, [0-9]+ were leased to it"),
    "the wrong term": (gives(term=77), "it is of term 77, the run is in term 1"),
    "another run": (gives(run="r2"), "in run r2, this channel of"),
    "another learner": (gives(learner=HONEST), "it is of honest .*, this channel of eu-1"),
    "another life": (gives(incarnation=7), "incarnation 7.* this channel of eu-1 .incarnation 1"),
}


@pytest.mark.parametrize("name", GIVEN)
async def test_a_contribution_is_refused(fort: Fort, name: str) -> None:
    case, expected = GIVEN[name]
    await fort.open()
    rogue, pull = await fort.asked()
    reason = await case(fort, rogue, pull)
    assert re.search(expected, reason), reason
    await fort.unharmed(await fort.digest())


# ---- what is said on a channel that is open -----------------------------------------------------------------------


async def opened(fort: Fort) -> aiohttp.ClientWebSocketResponse:
    """A channel by hand, welcome."""
    socket = await fort.socket()
    await socket.send_bytes(encode(hello(seq=5)))
    async with asyncio.timeout(WAIT_S):
        assert isinstance(decode_from_syncer((await socket.receive()).data), Welcome)
    return socket


def sends(*messages: bytes) -> Case:
    async def case(fort: Fort) -> str:
        socket = await opened(fort)
        before = await fort.digest()
        for message in messages:
            await socket.send_bytes(message)
        reason = await last_words(socket)
        assert await fort.digest() == before
        return reason

    return case


async def replayed_hello(fort: Fort) -> str:
    """Recorded, and said again on a connection of its own."""
    await opened(fort)
    before = await fort.digest()
    again = await fort.socket()
    await again.send_bytes(encode(hello(seq=5)))
    reason = await last_words(again)
    assert await fort.digest() == before
    return reason


async def flood(fort: Fort) -> str:
    socket = await opened(fort)
    before = await fort.digest()
    for number in range(1000):
        if socket.closed:
            break
        await socket.send_bytes(encode(Heartbeat(seq=6 + number)))
    reason = await last_words(socket)
    assert await fort.digest() == before
    return reason


async def ping_flood(fort: Fort) -> str:
    socket = await opened(fort)
    before = await fort.digest()
    for _ in range(1000):
        if socket.closed:
            break
        await socket.ping()
    reason = await last_words(socket)
    assert await fort.digest() == before
    return reason


given = Contribution(round=0, attempt=0, fragment=0, base=0, t=1, steps=1, tokens=8, digest="0" * 32, seq=7)
TALK: dict[str, tuple[Case, str]] = {
    "a second hello": (sends(encode(hello(seq=6))), "a second hello on the same channel"),
    "a replayed hello": (replayed_hello, "Hello 5 of eu-1 comes after 5: it was said before"),
    "a replayed contribution": (sends(encode(given), encode(given)), "Contribution 7 of eu-1 comes after 7"),
    "a sequence that goes back": (
        sends(encode(Heartbeat(seq=9)), encode(Heartbeat(seq=8))),
        "Heartbeat 8 of eu-1 comes after 9",
    ),
    "a message without a number": (sends(encode(Heartbeat())), "Heartbeat 0 of eu-1 comes after 5"),
    "an unknown type": (sends(msgspec.msgpack.encode({"type": "Overthrow", "seq": 6})), "could not be read"),
    "a counter that nothing holds": (
        sends(encode(msgspec.structs.replace(given, total=-(2**63)))),
        "could not be read: Expected `int`",
    ),
    "a WebSocket flood": (flood, "more than 50 messages a second: this is a flood"),
    "a flood of pings": (ping_flood, "more than 50 messages a second: this is a flood"),
}


@pytest.mark.parametrize("name", TALK)
async def test_a_message_costs_its_sender_the_channel(fort: Fort, name: str) -> None:
    case, expected = TALK[name]
    await fort.open()
    reason = await case(fort)
    assert re.search(expected, reason), reason
    await fort.unharmed(await fort.digest())


# ---- floods -------------------------------------------------------------------------------------------------------

FLOOD = """
import resource, select, socket, sys
address, most = ("127.0.0.1", int(sys.argv[1])), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
held, made = [], 0
while True:
    one = socket.socket()
    one.settimeout(5)
    try:
        one.connect(address)
        held.append(one)
        made += 1
    except OSError:
        pass
    if len(held) > most:
        held.pop(0).close()
    if made == most:
        print(made, flush=True)
"""


def half_open() -> int:
    """10,000, or as many as the descriptors of one process allow here."""
    return min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 500)


@pytest.mark.timeout(120)
async def test_ten_thousand_half_open_connections(fort: Fort) -> None:
    """They keep coming, from the very address of an honest newcomer, which gets in within seconds all the same."""
    await fort.open(msgspec.structs.replace(SHORT, header_s=5.0, strangers=Limits().strangers))
    before, most = await fort.digest(), half_open()
    flooding = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FLOOD, str(fort.port), str(most), stdout=subprocess.PIPE
    )
    try:
        assert flooding.stdout is not None
        async with asyncio.timeout(60):
            assert int(await flooding.stdout.readline()) == most
        began = time.monotonic()
        status, _ = await fort.request("GET", "/v1/status", "join")
        took = time.monotonic() - began
        assert status == 200
        assert len(fort.stage.service.server._doorway._strangers) <= Limits().strangers
        await fort.unharmed(before)
        newcomer = fort.join("newcomer")
        await newcomer.until(Welcome)
        print(f"{most} half-open connections; an honest request took {took:.3f} s")
    finally:
        flooding.kill()
        await flooding.wait()
    assert took < 5
    assert fort.stage.service.server.turned_away >= most - Limits().strangers


async def test_a_flood_of_wrong_tokens_fills_no_disk(fort: Fort) -> None:
    await fort.open()
    before = await fort.digest()
    for _ in range(200):
        assert (await fort.request("GET", "/v1/status", None, {"Authorization": "Bearer nobody-knows-this"}))[0] == 401
    assert len(fort.stage.events("turned_away")) <= 10, "once a second is enough"
    await fort.unharmed(before)
