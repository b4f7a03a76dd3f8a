"""Handshakes between our two sides, and between either of them and somebody who does it otherwise."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from atoll.fabric import certificates
from atoll.fabric.certificates import (
    CertificateAndKey,
    fingerprint,
    make_authority,
    make_client,
    make_server,
    out_of_date,
)
from atoll.fabric.tls import client_context, server_context
from atoll.protocol.errors import ConfigError

HOSTS = ["localhost", "127.0.0.1"]
WAIT_S = 10.0


@pytest.fixture
def files(tmp_path: Path) -> Callable[[str, CertificateAndKey], tuple[Path, Path]]:
    def write(name: str, pair: CertificateAndKey) -> tuple[Path, Path]:
        certificate, key = tmp_path / f"{name}.crt", tmp_path / f"{name}.key"
        certificate.write_bytes(pair.certificate)
        key.write_bytes(pair.key)
        return certificate, key

    return write


Files = Callable[[str, CertificateAndKey], tuple[Path, Path]]


@asynccontextmanager
async def listening(context: ssl.SSLContext) -> AsyncIterator[int]:
    """Says one word to whoever gets through."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=context)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # handshakes that fail are the point
    async with server:
        yield server.sockets[0].getsockname()[1]


async def heard(port: int, context: ssl.SSLContext, host: str = "localhost") -> bytes:
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=host)
        try:
            said = await reader.read()
        finally:
            writer.close()
    if not said:  # TLS 1.3: who is refused for its own certificate hears of it with the first bytes that it reads
        raise ConnectionError("closed without a word")
    return said


async def refused(port: int, context: ssl.SSLContext, host: str = "localhost") -> str:
    with pytest.raises((ssl.SSLError, ConnectionError)) as caught:
        await heard(port, context, host)
    return str(caught.value)


def aged(monkeypatch: pytest.MonkeyPatch, by: timedelta) -> CertificateAndKey:
    """As if it had been made so long ago, or were to be made then."""

    class Then(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return datetime.now(UTC) - by

    with monkeypatch.context() as patched:
        patched.setattr(certificates, "datetime", Then)
        return make_server(HOSTS, 1.0)


async def test_the_pinned_certificate_is_enough_under_any_name(files: Files) -> None:
    pair = make_server(HOSTS, 1.0)
    async with listening(server_context(*files("syncer", pair))) as port:
        assert await heard(port, client_context(fingerprint(pair.certificate)), "another.example.org") == b"hello"


async def test_one_of_several_fingerprints_is_enough(files: Files) -> None:
    """Of the certificate that is shown and of the one that is to follow it, in any order; and nobody else's."""
    pairs = [make_server(HOSTS, 1.0) for _ in range(3)]
    now, follows, other = (fingerprint(pair.certificate) for pair in pairs)
    async with listening(server_context(*files("syncer", pairs[0]))) as port:
        for pin in (f"{now},{follows}", f"{follows},{now}"):
            assert await heard(port, client_context(pin)) == b"hello"
        reason = await refused(port, client_context(f"{follows},{other}"))
    assert f"the join link names {follows[:16]}… or {other[:16]}…" in reason


async def test_another_certificate_is_somebody_else(files: Files) -> None:
    pair, other = make_server(HOSTS, 1.0), make_server(HOSTS, 1.0)
    async with listening(server_context(*files("syncer", pair))) as port:
        reason = await refused(port, client_context(fingerprint(other.certificate)))
    assert "somebody else answers there, or the link is old" in reason
    assert fingerprint(pair.certificate)[:16] in reason and fingerprint(other.certificate)[:16] in reason


async def test_not_a_byte_of_ours_goes_to_somebody_else(files: Files) -> None:
    """The certificate is looked at before the connection is ours to write to."""
    pair, got = make_server(HOSTS, 1.0), []
    done = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await reader.read())
        writer.close()
        done.set()

    server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=server_context(*files("syncer", pair)))
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.open_connection("127.0.0.1", port, ssl=client_context("0" * 64), server_hostname="localhost")
        try:
            async with asyncio.timeout(0.5):
                await done.wait()
        except TimeoutError:
            pass  # the other side never got through its handshake either
    assert got in ([], [b""])


async def test_a_certificate_that_expired_counts_no_more(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = aged(monkeypatch, timedelta(days=2))
    certificate, key = files("syncer", pair)
    with pytest.raises(ConfigError, match=r"syncer.crt: the certificate expired on .*: make another with atoll cert"):
        server_context(certificate, key)
    async with listening(bare_server(certificate, key)) as port:
        assert "the certificate expired on" in await refused(port, client_context(fingerprint(pair.certificate)))


async def test_a_certificate_from_the_future_counts_not_yet(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = aged(monkeypatch, timedelta(days=-2))
    certificate, key = files("syncer", pair)
    with pytest.raises(ConfigError, match="look at this machine's clock"):
        server_context(certificate, key)
    async with listening(bare_server(certificate, key)) as port:
        assert "look at this machine's clock" in await refused(port, client_context(fingerprint(pair.certificate)))


def test_a_clock_that_is_an_hour_behind_is_no_reason() -> None:
    der = ssl.PEM_cert_to_DER_cert(make_server(HOSTS, 1.0).certificate.decode())
    assert out_of_date(der, datetime.now(UTC) - timedelta(minutes=59)) == ""
    assert out_of_date(der, datetime.now(UTC) - timedelta(minutes=61)) != ""


async def test_nothing_older_than_tls_1_3_gets_in(files: Files) -> None:
    pair = make_server(HOSTS, 1.0)
    old = client_context(fingerprint(pair.certificate))
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    certificate, key = files("syncer", pair)
    async with listening(bare_server(certificate, key)) as port:
        assert await heard(port, old) == b"hello", "nothing else is wrong with it"
    async with listening(server_context(certificate, key)) as port:
        await refused(port, old)


async def test_a_server_of_tls_1_2_is_not_spoken_to(files: Files) -> None:
    pair = make_server(HOSTS, 1.0)
    old = bare_server(*files("syncer", pair))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with listening(old) as port:
        await refused(port, client_context(fingerprint(pair.certificate)))


async def test_by_an_authority_the_name_must_be_right_too(files: Files) -> None:
    authority = make_authority(1.0)
    ca, _ = files("ca", authority)
    async with listening(server_context(*files("syncer", make_server(HOSTS, 1.0, authority)))) as port:
        assert await heard(port, client_context("", ca)) == b"hello"
        assert await heard(port, client_context("", ca), "127.0.0.1") == b"hello"
        assert "mismatch" in await refused(port, client_context("", ca), "another.example.org")


async def test_a_certificate_of_another_authority_is_nobodys(files: Files) -> None:
    ours, _ = files("ca", make_authority(1.0))
    theirs = make_server(HOSTS, 1.0, make_authority(1.0))
    async with listening(server_context(*files("syncer", theirs))) as port:
        assert "CERTIFICATE_VERIFY_FAILED" in await refused(port, client_context("", ours))
        assert "CERTIFICATE_VERIFY_FAILED" in await refused(port, client_context("")), "nor of this machine's own"


async def test_mutual_tls(files: Files, tmp_path: Path) -> None:
    authority, other = make_authority(1.0), make_authority(1.0)
    ca, _ = files("ca", authority)
    pair = make_server(HOSTS, 1.0, authority)
    pin = fingerprint(pair.certificate)
    ours = files("anna", make_client("anna", 1.0, authority))
    theirs = files("eve", make_client("eve", 1.0, other))
    itself = files("fake", make_server(HOSTS, 1.0, authority))
    async with listening(server_context(*files("syncer", pair), client_authority=ca)) as port:
        assert await heard(port, client_context(pin, None, *ours)) == b"hello"
        await refused(port, client_context(pin))
        await refused(port, client_context(pin, None, *theirs))
        await refused(port, client_context(pin, None, *itself))  # a syncer's certificate is none of a learner


def test_files_that_are_none_are_named(files: Files, tmp_path: Path) -> None:
    certificate, key = files("syncer", make_server(HOSTS, 1.0))
    empty = tmp_path / "empty"
    empty.touch()
    for pair in ((empty, key), (certificate, empty), (tmp_path / "none", key)):
        with pytest.raises(ConfigError, match="atoll cert"):
            server_context(*pair)
        with pytest.raises(ConfigError, match="cannot be used"):
            client_context("0" * 64, None, *pair)
    with pytest.raises(ConfigError, match="cannot be used"):
        client_context("", empty)


def test_a_key_with_a_password_asks_nobody_for_it(files: Files, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    pair = make_server(HOSTS, 1.0)
    locked = serialization.load_pem_private_key(pair.key, None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
    )
    with pytest.raises(ConfigError, match="the key has a password"):
        server_context(*files("syncer", CertificateAndKey(pair.certificate, locked)))


def test_text_may_stand_before_a_certificate(files: Files) -> None:
    pair = make_server(HOSTS, 1.0)
    server_context(*files("syncer", CertificateAndKey(b"Certificate:\n    Data: ...\n" + pair.certificate, pair.key)))


def bare_server(certificate: Path, key: Path) -> ssl.SSLContext:
    """One that does not look at what it shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
