"""What somebody tries who has a learner's token, and floods of those who have none. docs/security.md lists it.

As in test_abuse.py: a reason for each, the state's digest as before, the honest learner undisturbed. A learner that
joins is written down, so the digest is taken once it is there.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.syncer.conftest import TENSORS, WAIT_S, FakeLearner, plan

from atoll.digests import compute_digest
from atoll.fabric.join_tokens import JoinTokens
from atoll.fabric.wire import KIB, FabricLimits, decode_from_syncer, encode
from atoll.numerics.screen import UsualNorms
from atoll.protocol.limits import Budgets
from atoll.protocol.messages import (
    OLDEST,
    PROTOCOL,
    Contribution,
    Heartbeat,
    Hello,
    Lease,
    Progress,
    Pull,
    Refused,
    Register,
    Seek,
    TensorSpec,
    Welcome,
)
from atoll.protocol.records import BegunRecord, JoinedRecord, OwnedRecord, ResetRecord
from atoll.protocol.settings import Settings
from atoll.protocol.syncer.outbox import TAPE_BYTES
from atoll.protocol.tape import BeganEntry, InformedEntry
from atoll.store.writer_lease import acquire
from atoll.syncer.credentials import write_tokens
from atoll.syncer.run_store import RunStore
from atoll.telemetry.events import LEARNER_BYTES

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
    "no hello": (no_hello, "no hello within 3 s"),
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
    "a version of yesterday": (opens_with(encode(hello(protocol=OLDEST - 1))), "install the same version of atoll"),
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
        fort.stage.service.begun.screen.restore_norms(UsualNorms([[1e-3] * 16] * 2, [1e-3] * 2))
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
    head = f"PUT {path} HTTP/1.1\r\nHost: [::1]\r\nAuthorization: Bearer {TOKENS['eu'].secret}\r\n"
    writer.write(
        f"{head}Atoll-Session: {rogue.session}\r\nContent-Length: {len(fort.values(pull, 1.0))}\r\n\r\nabc".encode()
    )
    await writer.drain()
    parcel = fort.stage.service.begun.inbox._pending[rogue.name, pull.round, pull.attempt]
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
    headers |= {"Atoll-Offset": "0", "Atoll-Size": "4", "Atoll-Digest": compute_digest(b"evil")}
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


async def test_ever_new_names_on_one_token(fort: Fort) -> None:
    """Each is a record in the journal and an entry in memory for good: they count also when they have left."""
    await fort.open()
    for name in ("few-1", "few-2"):
        learner = fort.join(name, "few")
        await learner.until(Welcome)
        await learner.link.close()
        await fort.until(lambda name=name: name not in fort.stage.service._channels)
    before = await fort.digest()
    third = fort.join("few-3", "few")
    reason = await fort.refusal_of(third)
    await third.link.close()
    assert "the token 'few' has brought 2 different names, and no more" in reason
    assert "atoll tokens change few --names 4" in reason
    assert fort.stage.events("turned_away")[-1]["reason"] == reason, "whoever looks after the run sees it too"
    assert [event["text"] for event in fort.stage.events("warning") if "2 of at most 2 names" in event["text"]]
    await fort.unharmed(before)
    await fort.join("few-2", "few").until(Welcome)
    write_tokens(fort.keys, JoinTokens(TOKENS.values()).with_changed("few", names=3))
    await fort.until(lambda: fort.stage.service.server._authorizer._tokens().named("few").names == 3)
    await fort.join("few-4", "few").until(Welcome)


async def test_another_tokens_name_after_the_syncer_was_replaced(fort: Fort) -> None:
    """Nobody has used it since; its owner is known from the journal."""
    settings = Settings(learners=2, fragments=2, sync_every=4, overlap=1, codec="fp32", quorum=2)
    begun = BegunRecord("r1", settings, {}, TENSORS, plan().fingerprint)
    names = (("desk", "boss"), ("left", "gone"), ("older", ""))
    records = [JoinedRecord(name, 1, f"session-of-{name}", 0) for name, _ in names]
    earlier = RunStore(fort.stage.out, acquire(fort.stage.out.journal))
    owned = [OwnedRecord(name, token) for name, token in names if token]
    earlier.append([(record, None) for record in (begun, *records, *owned)])
    earlier.close()
    await fort.open()
    before = await fort.digest()
    reason = await fort.refusal_of(fort.join("desk", "join"))
    assert "the name desk belongs to whoever holds the token 'boss': choose another" in reason
    await fort.unharmed(before)
    await fort.join("desk", "boss").until(Welcome)
    await fort.join("left", "join").until(Welcome)  # whose token was revoked owns nothing any more
    await fort.join("older", "boss").until(Welcome)  # an earlier version did not write down whose it was
    await fort.until(lambda: {"left", "older"} <= set(fort.machine.history.owners))
    assert fort.machine.history.owners == {"desk": "boss", "left": "join", "older": "boss", HONEST: "join"}


async def test_a_name_that_is_kept_for_another_token(fort: Fort) -> None:
    """Nobody has come by it yet."""
    await fort.open()
    before = await fort.digest()
    assert "the name eu-1 is kept for the token 'eu'" in await fort.refusal_of(fort.join("eu-1", "join"))
    await fort.unharmed(before)
    await fort.join("eu-1", "eu").until(Welcome)


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
    "an unknown fragment": (gives(fragment=10**4), "fragment 10000 is not one of the plan's 2"),
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


async def large_flood(fort: Fort) -> str:
    socket = await opened(fort)
    before, clock = await fort.digest(), {f"{number:050}": number for number in range(16_000)}
    with suppress(ConnectionError):  # it may be cut off before it has said it all, and hear nothing
        for number in range(50):
            await socket.send_bytes(encode(Heartbeat(seq=6 + number, clock=clock)))
    await fort.until(lambda: bool(fort.stage.events("lost")))
    assert await fort.digest() == before
    return str(fort.stage.events("lost")[-1]["text"])


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


def taped(*entries: BeganEntry | InformedEntry, incarnation: int = 1, taped: int = 0, seq: int = 6) -> Progress:
    """A report that says more of a tape than of anything else."""
    said: dict[str, Any] = {"t": 0, "steps": (), "tokens": (), "versions": (), "incarnation": incarnation}
    return Progress(**said, taped=taped, tape=entries, seq=seq)


given = Contribution(round=0, attempt=0, fragment=0, base=0, t=1, steps=1, tokens=8, digest="0" * 32, seq=7)
TALK: dict[str, tuple[Case, str]] = {
    "a second hello": (sends(encode(hello(seq=6))), "a second hello on the same channel"),
    "a replayed hello": (replayed_hello, "Hello 5 of eu-1 comes after 5: it was said before"),
    "a replayed contribution": (sends(encode(given), encode(given)), "Contribution 7 of eu-1 comes after 7"),
    "a sequence that goes back": (
        sends(encode(Heartbeat(seq=9)), encode(Heartbeat(seq=8))),
        "Heartbeat 8 of eu-1 comes after 9",
    ),
    "a message without a number": (sends(encode(Heartbeat())), "Heartbeat of eu-1 has no number"),
    "an unknown type": (sends(msgspec.msgpack.encode({"type": "Overthrow", "seq": 6})), "could not be read"),
    "data with an endless name": (
        sends(encode(Register(datasets=(("\x01" * 900_000, 0, 1.0),), epochs=1, batch=1, seq=6))),
        "could not be read: Expected `str` of length <= 1000",
    ),
    "a tape with endless words": (
        sends(encode(taped(BeganEntry(0, 1, "x" * 900_000, "", "", False)))),
        "could not be read: Expected `str` of length <= 1000",
    ),
    "a counter that nothing holds": (
        sends(encode(msgspec.structs.replace(given, total=-(2**63)))),
        "could not be read: Expected `int`",
    ),
    "a WebSocket flood": (flood, "more than 50 messages a second: this is a flood"),
    "a flood of large messages": (large_flood, "more than 2097152 bytes of messages a second: this is a flood"),
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


@pytest.mark.parametrize("asked", [2_000, pytest.param(10_000, marks=pytest.mark.faults)])
async def test_thousands_of_half_open_connections(fort: Fort, asked: int) -> None:
    """They keep coming, from the very address of an honest newcomer, which gets in long before they are given up."""
    await fort.open(msgspec.structs.replace(SHORT, header_s=60.0, strangers=FabricLimits().strangers))
    # Or as many as the descriptors of one process allow here.
    before, most = await fort.digest(), min(asked, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 500)
    flooding = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FLOOD, str(fort.port), str(most), stdout=subprocess.PIPE
    )
    try:
        assert flooding.stdout is not None
        async with asyncio.timeout(200):
            assert int(await flooding.stdout.readline()) == most
        began = time.monotonic()
        status, _ = await fort.request("GET", "/v1/status", "join")
        took = time.monotonic() - began
        assert status == 200
        assert len(fort.stage.service.server._listener.places.strangers) <= FabricLimits().strangers
        await fort.unharmed(before)
        newcomer = fort.join("newcomer")
        await newcomer.until(Welcome)
        print(f"{most} half-open connections; an honest request took {took:.3f} s")
    finally:
        flooding.kill()
        await flooding.wait()
    assert took < 30
    assert fort.stage.service.server.turned_away >= most - FabricLimits().strangers


async def test_a_flood_of_large_hellos(fort: Fort) -> None:
    """Of one token at one address a dozen are read; then it is asked to come again later. Each is as much work as a
    quarter of the largest that may be, and a quarter of the usual bytes may be said in them."""
    most_bytes = FabricLimits().hello_bytes // 4
    await fort.open(msgspec.structs.replace(SHORT, hello_s=5.0, hello_bytes=most_bytes, hello_rate=KIB))
    large = encode(hello(tensors=model_of(10_000)))
    before, read, status = await fort.digest(), 0, 0
    while not status:
        try:
            socket = await fort.socket()
        except aiohttp.WSServerHandshakeError as error:
            status = error.status
        else:
            await socket.send_bytes(large)
            assert "in the run" in await last_words(socket)
            read += 1
    assert status == 429 and 8 <= read <= 8 + most_bytes // len(large)
    await fort.unharmed(before)
    newcomer = fort.join("newcomer")  # by another token
    await newcomer.until(Welcome)


def model_of(tensors: int) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"blocks.{n}.mlp.weight", (1024, 4096), "float32") for n in range(tensors))


def head_of(size: int) -> bytes:
    """Of a frame of so many bytes, masked with zeros: they are sent as they are."""
    return b"\x82\xff" + struct.pack("!Q", size) + b"\0\0\0\0"


@pytest.mark.parametrize("first", [b"", b"no hello"], ids=["the hello", "what comes after it"])
async def test_messages_that_never_end_fill_no_memory(fort: Fort, first: bytes) -> None:
    """Each channel sends 200 KiB of 4 MiB. Those that pass the token's 1 MiB are cut off, and no other token waits."""
    await fort.open(msgspec.structs.replace(SHORT, hello_bytes=1024 * KIB, hello_s=30.0, flush_s=30.0, ping_s=30.0))
    before, server = await fort.digest(), fort.stage.service.server
    assert server._listener is not None
    places, part = server._listener.places, head_of(4096 * KIB - 1) + bytes(200 * KIB)
    there, transports = len(places), []
    for _ in range(20):
        socket = await fort.socket("few", autoclose=False)
        assert socket._writer is not None
        if first:
            await socket.send_bytes(first)
        socket._writer.transport.write(part)
        transports.append(socket._writer.transport)
    async with asyncio.timeout(10):
        await fort.until(lambda: len(places) - there <= 6)
    large, slow = encode(hello(tensors=model_of(4000))), await fort.socket("eu")
    assert slow._writer is not None and len(large) > 200 * KIB
    slow._writer.transport.write(head_of(len(large)))
    for at in range(0, len(large), 20_000):  # over a slow link
        slow._writer.transport.write(large[at : at + 20_000])
        await asyncio.sleep(0.05)
    assert "in the run" in await last_words(slow)
    await fort.unharmed(before)
    await fort.join("newcomer").until(Welcome)
    for transport in transports:
        transport.abort()


async def test_a_site_with_a_large_model_comes_at_once(fort: Fort) -> None:
    """64 learners of one token at one address, 4,000 tensors each: all hellos are read, nobody has to come again."""
    await fort.open(msgspec.structs.replace(SHORT, hello_s=30.0, strangers=128))
    large = [encode(hello(f"honest-{n}", f"s{n}", tensors=model_of(4000))) for n in range(64)]
    sockets = await asyncio.gather(*(fort.socket("join") for _ in large))
    await asyncio.gather(*(socket.send_bytes(said) for socket, said in zip(sockets, large, strict=True)))
    assert all("in the run" in words for words in await asyncio.gather(*map(last_words, sockets)))
    control = fort.stage.service.server._control
    await fort.until(lambda: not control._unopened._by_token)


async def test_who_said_too_much_in_hellos_is_let_in_later(fort: Fort) -> None:
    """Nobody is sent away for good: a site whose learners all come at once waits for its turn."""
    await fort.open(msgspec.structs.replace(SHORT, hello_bytes=300, hello_rate=300))
    crowd = [fort.join(f"honest-{number}") for number in range(5)]
    for one in crowd:
        await one.until(Welcome)
    assert not [message for one in crowd for message in one.heard if isinstance(message, Refused) and message.final]


async def test_a_flood_of_wrong_tokens_fills_no_disk(fort: Fort) -> None:
    await fort.open()
    before, began = await fort.digest(), time.monotonic()
    for _ in range(60):
        assert (await fort.request("GET", "/v1/status", None, {"Authorization": "Bearer nobody-knows-this"}))[0] == 401
    took = time.monotonic() - began
    assert len(fort.stage.events("turned_away")) <= 1 + took, "once a second is enough"
    await fort.unharmed(before)


def written(fort: Fort) -> int:
    """Bytes of events and of the journal."""
    events = sum(len(json.dumps(line)) for line in fort.stage.lines)
    return events + sum(path.stat().st_size for path in fort.stage.out.journal.iterdir())


async def test_a_flood_of_scores_fills_no_disk(fort: Fort) -> None:
    await fort.open()
    before, bytes_before = await fort.digest(), written(fort)
    score = json.dumps({"round": 1, "loss": 1.0, "cpu_s": 0.0, "sample": "\x01" * 10_000}).encode()
    answers = [await fort.request("POST", "/v1/scores", "score", data=score) for _ in range(100)]
    assert {status for status, _ in answers} == {204, 429}
    assert "more than 1024 bytes of scores a second" in answers[-1][1]
    assert written(fort) - bytes_before < 128 * KIB
    short = json.dumps({"round": 1, "loss": 1.0, "cpu_s": 0.0}).encode()
    assert (await fort.request("POST", "/v1/scores", "other", data=short))[0] == 204, "whose token is another's"
    await fort.unharmed(before)


async def test_a_tape_of_a_life_that_has_not_begun_is_not_kept(fort: Fort) -> None:
    await fort.open()
    rogue = fort.join("eu-1", "eu")
    await rogue.begin()
    await fort.until(lambda: fort.machine.members.learners["eu-1"].recovered)
    before = await fort.digest()
    assert rogue.link.send(taped(InformedEntry(0, 0), incarnation=99, seq=0))
    lost = await fort.stage.until("lost")
    assert lost["text"] == "eu-1 is away: a report of incarnation 99, which has not begun"
    assert not fort.machine.state.out.taping.take_records()
    await fort.unharmed(before)


async def test_a_tape_without_end_fills_no_disk_and_no_memory(fort: Fort) -> None:
    """As long as may be in each report, and a record after each that has all of it written down."""
    await fort.open(msgspec.structs.replace(SHORT, messages_rate=1000))
    rogue = fort.join("eu-1", "eu")
    await rogue.begin()
    await fort.until(lambda: fort.machine.members.learners["eu-1"].recovered)
    bytes_before, entry = written(fort), BeganEntry(0, 1, "x" * 1000, "x" * 1000, "x" * 1000, False)
    for number in range(40):
        rogue.link.send(taped(*[entry] * 100, incarnation=0, taped=100 * number, seq=0))
        await asyncio.sleep(0.01)
        fort.machine.state.out.persist(ResetRecord(0, "a test"))
    lost = await fort.stage.until("lost")
    assert lost["text"] == "eu-1 is away: it said more of its tape than a learner keeps"
    assert written(fort) - bytes_before < 2 * TAPE_BYTES
    await fort.unharmed(await fort.digest())


OF_HELLOS: dict[str, dict[str, Any]] = {
    "another model": {"tensors": model_of(1)},
    "no tokens": {"tokens_per_step": -1},
    "other data and no tokens": {"data": "0" * 32, "tokens_per_step": -1},
}


@pytest.mark.parametrize(
    "what", ["another model", *(pytest.param(what, marks=pytest.mark.faults) for what in list(OF_HELLOS)[1:])]
)
async def test_refused_hellos_under_ever_new_names_fill_no_disk(fort: Fort, what: str) -> None:
    await fort.open()
    before, bytes_before = await fort.digest(), written(fort)
    fort.stage.service._events._room = Budgets(4 * KIB, 1)
    for number in range(100):
        socket = await fort.socket("few")
        await socket.send_bytes(encode(hello(f"n{number}", f"s{number}", **OF_HELLOS[what])))
        assert "(1000)" in await last_words(socket)
    assert written(fort) - bytes_before < 10 * KIB
    assert "makes more events than are written down" in json.dumps(fort.stage.lines)
    await fort.unharmed(before)
    assert "in the run" in await opens_with(encode(hello(tensors=model_of(1))), "eu")(fort)
    assert fort.stage.events("refused")[-1]["learner"] == "eu-1", "another token's are written"


@pytest.mark.parametrize("what", ["data that cannot be leased", "a search without end"])
async def test_events_that_a_learner_causes_fill_no_disk(fort: Fort, what: str) -> None:
    await fort.open(msgspec.structs.replace(SHORT, messages_rate=10_000))
    rogue = fort.join("eu-1", "eu")
    await rogue.begin()
    await fort.until(lambda: fort.machine.members.learners["eu-1"].recovered)
    no_data = Register(datasets=(("\x01" * 900, 0, 1.0),), epochs=1, batch=1)
    said = {"data that cannot be leased": no_data, "a search without end": Seek(after=0)}[what]
    # However long a busy machine takes for them, they are more than there is room for.
    fort.stage.service._events._room = Budgets(LEARNER_BYTES, 1)
    bytes_before = written(fort)
    for _ in range(2000):
        rogue.link.send(said)
        await asyncio.sleep(0)
    await fort.until(lambda: "eu-1 makes more events than are written down" in json.dumps(fort.stage.lines))
    assert written(fort) - bytes_before < 2 * LEARNER_BYTES
    await fort.unharmed(await fort.digest())
