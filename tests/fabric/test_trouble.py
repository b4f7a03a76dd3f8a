"""TLS as learners see it: large bodies, and what they are told when it does not work."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.fabric.conftest import ServedFabric
from tests.fabric.secured import SECRET, Secured, secured_server

from atoll.digests import compute_digest
from atoll.fabric.address import SyncerAddress
from atoll.fabric.calls import told
from atoll.fabric.transfer import get_fragment_once, get_json
from atoll.protocol.errors import AtollError, PeerError, Unreachable


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Secured]:
    async with secured_server(tmp_path) as place:
        yield place


async def complaint(link: str) -> str:
    with pytest.raises(AtollError) as caught:
        await get_json(link, "/v1/status", 5.0)
    assert isinstance(caught.value, PeerError | Unreachable) and SECRET not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("size", [1, 4096, 1 << 20, (5 << 20) + 3])
async def test_a_fragment_of_any_size_comes_over_tls(secured: Secured, size: int) -> None:
    secured.handlers.fragments[0] = bytes(index % 251 for index in range(4096)) * (size // 4096) + b"x" * (size % 4096)
    came = bytearray(size)
    assert (await get_fragment_once(secured.link(), 0, memoryview(came), 10.0))[2] == compute_digest(came)
    assert bytes(came) == secured.handlers.fragments[0]


async def test_a_wrong_token_is_told_in_the_syncers_words(secured: Secured) -> None:
    assert await complaint(secured.link(secret="0" * 64)) == (
        "this token is not known here: is the join link of another run?"
    )


async def test_another_certificate_is_told_by_both_fingerprints(secured: Secured) -> None:
    said = await complaint(secured.link(pin="ab" * 32))
    assert f"has fingerprint {secured.pin[:16]}…, the join link names {'ab' * 8}…" in said


async def test_nobody_there_is_told_in_the_systems_words(secured: Secured) -> None:
    await secured.server.stop()
    assert await complaint(secured.link()) == f"GET {secured.url}/v1/status failed: Connection refused"


async def test_tls_to_a_plain_port_is_told(place: ServedFabric, secured: Secured) -> None:
    await place.open()
    link = SyncerAddress(urls=(f"https://127.0.0.1:{place.server.port}",), token=SECRET, pin=secured.pin).link()
    assert "it answers, but not in TLS: is that the port of a plain HTTP server?" in await complaint(link)


async def test_plain_http_to_a_tls_port_is_told(secured: Secured) -> None:
    said = await complaint(f"http://127.0.0.1:{secured.server.port}")
    assert said == "this port speaks TLS: use https://, or the join link"


def test_what_is_not_known_is_told_as_it_is() -> None:
    assert told(asyncio.IncompleteReadError(b"", 4)) == "0 bytes read on a total of 4 expected bytes"
    assert told(ValueError()) == "ValueError"
    assert told(ssl.SSLError(1, "odd")).startswith("the TLS handshake failed: ")
