"""Certificates that change while a syncer runs: taken when they are whole, passed over when they are not, and said."""

from __future__ import annotations

import asyncio
import os
import ssl
from datetime import timedelta
from pathlib import Path

import pytest
from tests.fabric.test_tls import aged, heard

from atoll.fabric.certificates import CertificateAndKey, fingerprint, make_authority, make_client, make_server
from atoll.fabric.join_tokens import JoinToken, JoinTokens, new_secret
from atoll.fabric.tls import client_context
from atoll.protocol.errors import ConfigError
from atoll.store.keys import LASTS_S, RELOAD_S, KeyDir
from atoll.syncer.credentials import DAY_S, write_tokens
from atoll.syncer.renewal import LiveTls, ends_soon

NOBODY = 65534
HOSTS = ["localhost", "127.0.0.1"]


class Watched:
    """A folder of keys, the context that is made of it, and what was said; the clock stands until it is told."""

    def __init__(self, path: Path, *, mutual: bool = False, days: float = 365.0) -> None:
        self.now, self.said, self.days = 100.0, [], days
        self.said: list[tuple[str, str]] = []
        self.keys = KeyDir.create(path / "keys")
        self.authority = make_authority(30.0)
        self.keys.write(self.keys.authority, self.authority.certificate)
        self.pair = self.put()
        write_tokens(self.keys, JoinTokens([JoinToken(id="join", secret=new_secret())]))
        self.tls = LiveTls(
            self.keys,
            lambda kind, text: self.said.append((kind, text)),
            mutual=mutual,
            clock=lambda: self.now,
            days=lambda der: self.days,
        )

    def put(self, pair: CertificateAndKey | None = None, *, key: bytes | None = None) -> CertificateAndKey:
        pair = pair or make_server(HOSTS, 30.0, self.authority)
        self.keys.write(self.keys.key, key or pair.key)
        self.keys.write(self.keys.certificate, pair.certificate)
        return pair

    def later(self, seconds: float = RELOAD_S) -> ssl.SSLContext:
        self.now += seconds
        return self.tls()

    async def shows(self, pair: CertificateAndKey) -> bool:
        """Whether the next handshake is made with this certificate."""
        server = await asyncio.start_server(_greet, "127.0.0.1", 0, ssl=self.tls())
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        async with server:
            port = server.sockets[0].getsockname()[1]
            context = client_context(fingerprint(pair.certificate))
            try:
                return await heard(port, context) == b"hello"
            except ssl.SSLError:
                return False


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    writer.close()


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


async def test_a_new_pair_is_taken_at_the_next_look_and_said(watched: Watched) -> None:
    new = watched.put()
    assert watched.later(0.9 * RELOAD_S) is watched.tls() and await watched.shows(watched.pair)
    watched.later()
    assert await watched.shows(new) and not await watched.shows(watched.pair)
    mark = fingerprint(new.certificate)[:16]
    assert watched.said == [
        ("renewed", f"the syncer shows a new certificate, {mark}…, which counts for 365 days"),
    ]


async def test_files_that_are_written_anew_with_the_same_in_them_are_no_news(watched: Watched) -> None:
    watched.put(watched.pair)
    watched.later()
    assert await watched.shows(watched.pair) and watched.said == []


async def test_a_pair_that_is_half_written_is_waited_for_in_silence(watched: Watched) -> None:
    new = make_server(HOSTS, 30.0)
    watched.keys.write(watched.keys.key, new.key)
    watched.later()
    assert await watched.shows(watched.pair)
    watched.keys.write(watched.keys.certificate, new.certificate)
    watched.later()
    assert await watched.shows(new) and [kind for kind, _ in watched.said] == ["renewed"]


@pytest.mark.parametrize(
    "trouble", ["key", "torn", "gone", "empty", "nothing", "expired", "too early", "open", "binary"]
)
async def test_a_pair_that_cannot_be_used_is_passed_over_and_that_is_said_once(
    watched: Watched, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, new = watched.keys, make_server(HOSTS, 30.0)
    match trouble:
        case "key":
            keys.write(keys.key, new.key)
            reason = "holds no usable certificate"
        case "torn":
            keys.write(keys.certificate, watched.pair.certificate[:-60])
            reason = "holds no usable certificate"
        case "gone":
            keys.certificate.unlink()
            reason = "holds no usable certificate"
        case "empty":
            keys.write(keys.certificate, b"")
            reason = "holds no usable certificate"
        case "nothing":
            keys.key.unlink()
            keys.certificate.unlink()
            reason = "holds no usable certificate"
        case "expired":
            watched.put(aged(monkeypatch, timedelta(days=3)))
            reason = "expired on"
        case "early":
            watched.put(aged(monkeypatch, -timedelta(days=3)))
            reason = "counts from"
        case "open":
            watched.put(new)
            keys.key.chmod(0o644)
            reason = "can be read by others on this machine: chmod 600"
        case _:
            keys.write(keys.certificate, b"\xff\x00" * 100)
            reason = "holds no usable certificate"
    for _ in range(3):
        watched.later()
    assert watched.said == [], "whoever writes files writes one after the other"
    watched.later(LASTS_S)
    for _ in range(20):
        watched.later()
    [(kind, text)] = watched.said
    assert kind == "warning" and reason in text and len(text.splitlines()) == 1
    assert text.startswith("the certificate that was put there is not taken, and the one before stays: ")
    assert await watched.shows(watched.pair)
    watched.put(new)
    watched.later()
    assert await watched.shows(new) and watched.said[-1][0] == "renewed"
    watched.put(key=new.key)
    watched.later()
    watched.later(LASTS_S)
    assert [kind for kind, _ in watched.said] == ["warning", "renewed", "warning"], "of the next one it is said again"


async def test_a_pair_that_changes_while_it_is_read_is_read_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atoll.syncer import renewal

    new, read = watched.put(), renewal.read_pair
    newest: list[CertificateAndKey] = []

    def slowly(keys: KeyDir, *, mutual: bool) -> renewal.LoadedPair:
        found = read(keys, mutual=mutual)
        newest.append(watched.put())
        return found

    with monkeypatch.context() as patched:
        patched.setattr(renewal, "read_pair", slowly)
        watched.later()
    assert await watched.shows(watched.pair) and not await watched.shows(new) and watched.said == []
    watched.later()
    assert await watched.shows(newest[0])


async def test_with_mutual_tls_a_new_authority_counts_from_its_next_handshake_on(tmp_path: Path) -> None:
    watched = Watched(tmp_path, mutual=True)
    other = make_authority(30.0)
    files = {}
    for name, authority in (("ours", watched.authority), ("theirs", other)):
        pair = make_client(name, 30.0, authority)
        certificate, key = tmp_path / f"{name}.crt", tmp_path / f"{name}.key"
        certificate.write_bytes(pair.certificate)
        key.write_bytes(pair.key)
        files[name] = client_context(fingerprint(watched.pair.certificate), None, certificate, key)

    async def let_in(name: str) -> bool:
        server = await asyncio.start_server(_greet, "127.0.0.1", 0, ssl=watched.tls())
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        async with server:
            port = server.sockets[0].getsockname()[1]
            try:
                return await heard(port, files[name]) == b"hello"
            except (ssl.SSLError, ConnectionError):
                return False

    assert await let_in("ours") and not await let_in("theirs")
    watched.keys.write(watched.keys.authority, watched.authority.certificate + other.certificate)
    watched.later()
    assert await let_in("ours") and await let_in("theirs") and [kind for kind, _ in watched.said] == ["renewed"]
    assert "checked by the new authority" in watched.said.pop()[1]
    watched.keys.authority.unlink()
    watched.later()
    watched.later(LASTS_S)
    assert await let_in("theirs") and [kind for kind, _ in watched.said] == ["warning"], "never without one"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_folder_put_in_the_place_of_the_keys_is_not_taken(tmp_path: Path) -> None:
    """Who can write to the folder above renames it, links to the key and brings an authority of his own."""
    watched = Watched(tmp_path, mutual=True)
    shown, moved = watched.tls(), tmp_path / "moved"
    watched.keys.path.rename(moved)
    watched.keys.path.mkdir(mode=0o755)
    for name in ("syncer.key", "syncer.crt", "tokens.json"):
        (watched.keys.path / name).symlink_to(moved / name)
    watched.keys.authority.write_bytes(make_authority(30.0).certificate)
    for path in (watched.keys.path, *watched.keys.path.iterdir()):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    watched.later()
    assert watched.later(LASTS_S) is shown
    assert [kind for kind, _ in watched.said] == ["warning"] and "can be changed by others" in watched.said[0][1]


def test_a_syncer_does_not_start_with_a_pair_that_cannot_be_used(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.put(key=make_server(HOSTS, 1.0).key)
    with pytest.raises(ConfigError, match="holds no usable certificate"):
        LiveTls(watched.keys)


def test_that_a_certificate_ends_soon_is_said_once_a_day_until_another_is_there(watched: Watched) -> None:
    watched.later()
    assert watched.said == [] and watched.tls.describe_expiry() == ""
    watched.days = 13.9
    for _ in range(10):
        watched.later()
    text = "the syncer's certificate ends in 14 days: renew it (docs/security.md, atoll cert --renew)"
    assert watched.said == [("warning", text)] and watched.tls.describe_expiry() == text
    watched.days = 12.9
    watched.later(DAY_S)
    assert len(watched.said) == 2 and "13 days" in watched.said[1][1]
    watched.put()
    watched.days = 365.0
    watched.later()
    assert watched.said[-1][0] == "renewed" and watched.tls.describe_expiry() == ""


@pytest.mark.parametrize(
    ("days", "said"),
    [(400.0, ""), (14.0, ""), (13.4, "ends in 13 days"), (1.0, "ends in 24 hours"), (-1.0, "has expired, and nobody")],
)
def test_what_is_said_of_an_end(days: float, said: str) -> None:
    assert said in ends_soon(days) and bool(ends_soon(days)) == bool(said)
