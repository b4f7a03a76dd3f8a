from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from atoll.digests import compute_digest
from atoll.fabric.server import Server
from atoll.fabric.wire import FabricLimits, ScoreReport
from atoll.protocol.errors import ConfigError

if TYPE_CHECKING:
    from .conftest import ServedFabric

BODY = bytes(range(256)) * 16
HEADERS = {"Atoll-Session": "s0", "Atoll-Digest": compute_digest(BODY)}
PATH = "/v1/contributions/learner-0/5/1"


async def ready(place: ServedFabric, limits: FabricLimits | None = None) -> None:
    """A joined learner that is asked for a body of 4096 bytes."""
    await place.open(limits)
    await place.joined()
    place.handlers.buffers["learner-0", 5, 1] = bytearray(len(BODY))


def error(text: str) -> str:
    found = json.loads(text)["error"]
    assert isinstance(found, str) and "\n" not in found
    return found


async def begin(
    place: ServedFabric, sent: bytes, path: str = PATH
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A PUT whose body stops after `sent`, once the server asked its desk for the buffer."""
    asked = len(place.handlers.told("asked"))
    reader, writer = await place.raw()
    head = [f"PUT {path} HTTP/1.1", "Host: [::1]", f"Content-Length: {len(BODY)}"]
    head += [f"{name}: {value}" for name, value in HEADERS.items()]
    writer.write("\r\n".join([*head, "", ""]).encode() + sent)
    await writer.drain()
    await place.handlers.until("asked", asked + 1)
    return reader, writer


async def test_a_whole_body_arrives(place: ServedFabric) -> None:
    await ready(place)
    before = place.server.bytes_in
    assert await place.request("PUT", PATH, BODY, HEADERS) == (204, "")
    assert place.handlers.buffers["learner-0", 5, 1] == BODY
    assert place.handlers.told("arrived") == [("arrived", "learner-0", 5, 1, compute_digest(BODY))]
    assert place.handlers.told("aborted") == []
    assert place.server.bytes_in - before == len(BODY)


@pytest.mark.parametrize("body", [BODY[:-1], BODY + b"x", b""], ids=["short", "long", "empty"])
async def test_a_body_of_another_size_is_refused_naming_both(place: ServedFabric, body: bytes) -> None:
    await ready(place)
    status, text = await place.request("PUT", PATH, body, HEADERS)
    assert status == 400
    assert f"{len(body)} bytes" in error(text) and "exactly 4096 bytes" in error(text)
    assert place.handlers.told("arrived") == []
    assert len(place.handlers.told("aborted")) == 1


async def test_a_body_without_a_length_is_refused(place: ServedFabric) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield BODY

    await ready(place)
    status, text = await place.request("PUT", PATH, pieces(), HEADERS)
    assert status == 400 and "no length" in error(text)


async def test_a_body_of_another_digest_is_refused(place: ServedFabric) -> None:
    await ready(place)
    status, text = await place.request("PUT", PATH, BODY[::-1], HEADERS)
    assert status == 422 and compute_digest(BODY) in error(text)
    assert place.handlers.told("arrived") == []
    assert len(place.handlers.told("aborted")) == 1


@pytest.mark.parametrize(
    ("path", "headers", "status", "says"),
    [
        ("/v1/contributions/learner-0/6/1", HEADERS, 409, "round 6 did not ask"),
        (PATH, {**HEADERS, "Atoll-Session": "old"}, 403, "say hello first"),
        ("/v1/contributions/stranger/5/1", HEADERS, 403, "say hello first"),
        (PATH, {**HEADERS, "Origin": "http://example.com"}, 403, "web pages may only read"),
        ("/v1/contributions/learner-0/x/1", HEADERS, 404, "Not Found"),
        ("/v1/contributions/learner-0/-1/1", HEADERS, 404, "Not Found"),
    ],
)
async def test_a_body_nobody_asked_for_is_refused(
    place: ServedFabric, path: str, headers: dict[str, str], status: int, says: str
) -> None:
    await ready(place)
    found, text = await place.request("PUT", path, BODY, headers)
    assert (found, says in error(text)) == (status, True)
    assert place.handlers.told("arrived") == []


async def test_a_disconnect_in_the_middle_of_a_body_aborts_it(place: ServedFabric) -> None:
    await ready(place)
    _, writer = await begin(place, BODY[:100])
    writer.close()
    aborted = await place.handlers.until("aborted")
    assert aborted[:4] == ("aborted", "learner-0", 5, 1)
    assert await place.request("PUT", PATH, BODY, HEADERS) == (204, "")


@pytest.mark.parametrize(
    "limits",
    [FabricLimits(body_grace_s=0.05, body_rate=1_000_000), FabricLimits(body_grace_s=60, body_idle_s=0.05)],
    ids=["rate", "idle"],
)
async def test_a_body_that_trickles_is_cut_off(place: ServedFabric, limits: FabricLimits) -> None:
    await ready(place, limits)
    reader, _ = await begin(place, BODY[:100])
    async with asyncio.timeout(10):
        answer = await reader.readuntil(b"}")
    assert b" 408 " in answer and b"too slowly: 100 of 4096 bytes" in answer
    assert len(place.handlers.told("aborted")) == 1


async def test_bodies_beyond_the_budget_of_a_learner_wait(place: ServedFabric) -> None:
    await ready(place, FabricLimits(budget_bytes=len(BODY) + 1))
    place.handlers.buffers["learner-0", 6, 1] = bytearray(len(BODY))
    _, writer = await begin(place, BODY[:100])
    status, text = await place.request("PUT", "/v1/contributions/learner-0/6/1", BODY, HEADERS)
    assert status == 429 and "budget of 4097" in error(text)
    writer.write(BODY[100:])
    await place.handlers.until("arrived")
    assert (await place.request("PUT", "/v1/contributions/learner-0/6/1", BODY, HEADERS))[0] == 204


async def test_the_same_body_twice_at_once_is_refused_and_the_first_goes_on(place: ServedFabric) -> None:
    await ready(place)
    _, writer = await begin(place, BODY[:100])
    status, text = await place.request("PUT", PATH, BODY, HEADERS)
    assert status == 409 and "already" in error(text)
    writer.write(BODY[100:])
    await place.handlers.until("arrived")
    assert place.handlers.told("aborted") == []


async def test_a_body_of_an_older_session_counts_for_nothing(place: ServedFabric) -> None:
    await ready(place)
    _, writer = await begin(place, BODY[:100])
    await place.joined(session="s1")
    writer.write(BODY[100:])
    assert "another session" in str((await place.handlers.until("aborted"))[4])
    assert place.handlers.told("arrived") == []


async def test_initial_parameters_arrive(place: ServedFabric) -> None:
    await ready(place)
    place.handlers.initials[2] = bytearray(len(BODY))
    assert (await place.request("PUT", "/v1/initial/learner-0/2", BODY, HEADERS))[0] == 204
    assert place.handlers.initials[2] == BODY
    assert place.handlers.told("initial") == [("initial", "learner-0", 2, compute_digest(BODY))]


async def test_an_unknown_fragment_is_not_found(place: ServedFabric) -> None:
    await place.open()
    status, text = await place.request("GET", "/v1/fragments/9")
    assert (status, error(text)) == (404, "there is no fragment 9")


async def test_a_fragment_is_released_when_its_reader_goes_away_or_stalls(place: ServedFabric) -> None:
    await place.open(FabricLimits(send_s=0.1))
    place.handlers.fragments[0] = bytes(64 << 20)
    _, leaving = await place.raw()
    leaving.write(b"GET /v1/fragments/0 HTTP/1.1\r\nHost: [::1]\r\n\r\n")
    await leaving.drain()
    leaving.close()
    await place.handlers.until("released", 1)
    _, stalling = await place.raw()
    stalling.transport.pause_reading()  # type: ignore[attr-defined]
    stalling.write(b"GET /v1/fragments/0 HTTP/1.1\r\nHost: [::1]\r\n\r\n")
    await stalling.drain()
    await place.handlers.until("released", 2)
    assert place.handlers.held == 0


async def test_status_manifest_and_scores(place: ServedFabric) -> None:
    await place.open()
    assert await place.request("GET", "/v1/status") == (200, '{"round": 7}')
    assert await place.request("GET", "/v1/manifest") == (200, '{"fragments": 0}')
    body = b'{"round": 4, "loss": 2.5, "cpu_s": 0.1}'
    assert (await place.request("POST", "/v1/scores", body))[0] == 204
    assert place.handlers.told("score") == [("score", ScoreReport(round=4, loss=2.5, cpu_s=0.1))]
    assert (await place.request("GET", "/v1/scores"))[0] == 200
    assert place.handlers.told("evaluator_here") == [("evaluator_here",)]


@pytest.mark.parametrize(
    ("body", "status"), [(b"{}", 400), (b'{"round": 1, "loss": "x", "cpu_s": 0}', 400), (b" " * 2_000_000, 413)]
)
async def test_a_bad_score_is_refused(place: ServedFabric, body: bytes, status: int) -> None:
    await place.open()
    found, text = await place.request("POST", "/v1/scores", io.BytesIO(body))
    assert found == status and error(text)
    assert place.handlers.told("score") == []


async def test_a_connection_that_says_nothing_is_closed(place: ServedFabric) -> None:
    await place.open(FabricLimits(header_s=0.05))
    reader, writer = await place.raw()
    writer.write(b"GET /v1/st")
    async with asyncio.timeout(10):
        assert await reader.read() == b""


async def test_one_connection_too_many_is_closed(place: ServedFabric) -> None:
    await place.open(FabricLimits(connections=2))
    await place.joined()
    first, _ = await place.raw()
    second, _ = await place.raw()
    async with asyncio.timeout(10):
        assert await second.read() == b""
    assert not first.at_eof()


async def test_connections_that_went_without_a_word_count_no_more(place: ServedFabric) -> None:
    await place.open(FabricLimits(connections=4, header_s=60.0))
    for _ in range(12):
        _, writer = await place.raw()
        writer.close()
        await writer.wait_closed()
    assert (await place.request("GET", "/v1/status"))[0] == 200


@pytest.mark.parametrize(
    "header",
    [
        b"Sec-WebSocket-Version: \xb1",
        b"Sec-WebSocket-Protocol: a, b",
        b"Upgrade: \xa0",
        b"Sec-WebSocket-Key: \xda",
        b"\xffX: 1",
    ],
)
async def test_a_handshake_that_is_no_text_is_refused_without_a_word_in_the_log(
    place: ServedFabric, header: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await place.open()
    reader, writer = await place.raw()
    writer.write(b"GET /v1/control HTTP/1.1\r\nHost: [::1]\r\n" + header + b"\r\n\r\n")
    async with asyncio.timeout(10):
        assert b" 400 " in await reader.readline()
    assert caplog.records == []


async def test_what_is_no_http_fills_no_log(place: ServedFabric, caplog: pytest.LogCaptureFixture) -> None:
    await place.open()
    reader, writer = await place.raw()
    writer.write(b"GET /v1/status HTTP/1.1\rHost: [::1]\r\r\n\r\n")
    async with asyncio.timeout(10):
        assert b" 400 " in await reader.readline()
    assert caplog.records == []


async def test_a_port_in_use_is_a_one_line_error_with_the_fix(place: ServedFabric) -> None:
    await place.open()
    with pytest.raises(ConfigError) as caught:
        await place.open(port=place.server.port)
    port = place.server.port
    assert str(caught.value) == f"port {port} is in use on 127.0.0.1: choose another (--set port=7077), or 0 for any"


def test_a_port_that_cannot_be_and_a_bind_beyond_this_machine_are_refused(place: ServedFabric) -> None:
    with pytest.raises(ConfigError, match="port = 70000"):
        Server(place.handlers, host="127.0.0.1", port=70000)
    with pytest.raises(ConfigError, match="binding to 0"):
        Server(place.handlers, host="0.0.0.0", port=0)
