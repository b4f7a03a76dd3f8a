"""What a folder of keys makes of a port: TLS and tokens, which change while a run goes on; and who is not let in."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from atoll.config import Service
from atoll.fabric.certificates import make_authority, make_server
from atoll.fabric.join_tokens import JoinToken, JoinTokens, new_secret
from atoll.protocol.errors import ConfigError
from atoll.store.keys import LASTS_S, RELOAD_S, KeyDir
from atoll.syncer.credentials import (
    DAY_S,
    LOCAL,
    LiveTokens,
    RefusalLog,
    local_tokens,
    make_port_access,
    read_tokens,
    token_ends_soon,
    write_tokens,
)
from atoll.telemetry.events import EventLog

JOIN = JoinToken(id="join", secret=new_secret())


@pytest.fixture
def keys(tmp_path: Path) -> KeyDir:
    keys = KeyDir.create(tmp_path / "keys")
    pair = make_server(["localhost"], 1.0)
    keys.write(keys.key, pair.key)
    keys.write(keys.certificate, pair.certificate)
    write_tokens(keys, JoinTokens([JOIN]))
    return keys


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ids(tokens: JoinTokens) -> list[str]:
    return [token.id for token in tokens.all]


def test_tokens_are_read_as_they_were_written(keys: KeyDir) -> None:
    write_tokens(keys, JoinTokens([JOIN, JoinToken(id="eu", secret=new_secret(), learner="eu-*", most=4, expires=5.0)]))
    assert ids(read_tokens(keys)) == ["join", "eu"] and read_tokens(keys).named("eu").most == 4
    assert keys.tokens.stat().st_mode & 0o777 == 0o600


def test_a_token_that_ends_within_days_is_named_with_what_to_do() -> None:
    def said(**days: float) -> str:
        ends = [JoinToken(id=name, secret=new_secret(), expires=DAY_S * end) for name, end in days.items()]
        return token_ends_soon(JoinTokens(ends), now=DAY_S)

    assert said(join=15.1, unending=0.0, over=0.5) == ""
    text = said(join=13.0, eu=2.0)
    assert text.startswith("the token 'eu' ends on 1970-01-03 00:00 UTC") and "atoll tokens change eu --hours" in text


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"not json",
        b"{}",
        b'[{"id": "join"}]',
        b'[{"id": "join", "secret": "short"}]',
        b'[{"id": "join", "secret": "s3cret-s3cret-s3cret", "sudo": true}]',
        b'[{"id": "join", "secret": "s3cret-s3cret-s3cret", "role": "god"}]',
        b'[{"id": "join", "secret": "s3cret-s3cret-s3cret", "most": -1}]',
        b'[{"id": "join", "secret": "s3cret-s3cret-s3cret", "expires": null}]',
        b'[{"id": "\xff", "secret": "s3cret-s3cret-s3cret"}]',
        b'[{"id": "a", "secret": "s3cret-s3cret-s3cret"}, {"id": "b", "secret": "s3cret-s3cret-s3cret"}]',
        b"[" * 100_000,
    ],
)
def test_a_file_with_something_else_in_it_is_one_line_and_keeps_the_old_tokens(keys: KeyDir, wrong: bytes) -> None:
    clock = Clock()
    live = LiveTokens(keys, clock)
    keys.write(keys.tokens, wrong)
    with pytest.raises(ConfigError) as caught:
        read_tokens(keys)
    assert len(str(caught.value).splitlines()) == 1 and "s3cret" not in str(caught.value)
    clock.now += RELOAD_S
    assert ids(live()) == ["join"]
    write_tokens(keys, JoinTokens([JoinToken(id="new", secret=new_secret())]))
    clock.now += RELOAD_S
    assert ids(live()) == ["new"], "it is looked at again"


def test_a_change_is_seen_within_half_a_second(keys: KeyDir) -> None:
    clock = Clock()
    live = LiveTokens(keys, clock)
    write_tokens(keys, read_tokens(keys).without("join"))
    clock.now += 0.9 * RELOAD_S
    assert not live().named("join").revoked, "the file is not asked for every request"
    clock.now += 0.2 * RELOAD_S
    assert live().named("join").revoked


def test_a_file_that_is_gone_keeps_the_old_tokens_and_that_is_said_once(keys: KeyDir) -> None:
    clock, said = Clock(), list[str]()
    live, tokens = LiveTokens(keys, clock, said.append), keys.tokens.read_bytes()
    keys.tokens.unlink()
    clock.now += RELOAD_S
    assert ids(live()) == ["join"] and said == [], "it may be about to be written"
    for _ in range(2):
        clock.now += LASTS_S
        assert ids(live()) == ["join"]
        assert len(said) == 1 and said[0].startswith("the tokens that were read last still count, since those of now")
    keys.write(keys.tokens, tokens)
    clock.now += RELOAD_S
    assert ids(live()) == ["join"] and len(said) == 1


def test_a_file_that_others_can_read_is_not_taken(keys: KeyDir) -> None:
    clock = Clock()
    live = LiveTokens(keys, clock)
    write_tokens(keys, read_tokens(keys).without("join"))
    keys.tokens.chmod(0o666)
    clock.now += RELOAD_S
    assert not live().named("join").revoked
    keys.tokens.chmod(0o600)
    clock.now += RELOAD_S
    assert live().named("join").revoked, "looked at again until it is private"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read_any_more_keeps_the_old_tokens(keys: KeyDir) -> None:
    clock = Clock()
    live = LiveTokens(keys, clock)
    keys.tokens.chmod(0)
    clock.now += RELOAD_S
    assert ids(live()) == ["join"]


def test_a_port_without_keys_has_secrets_of_its_own(tmp_path: Path) -> None:
    doors = make_port_access(Service(), lambda: "r1", secrets=tmp_path / "secrets")
    assert doors.authorizer is not None and doors.tls is None
    assert set(doors.secrets) == {"viewer", "learner", "evaluator", "relay", "operator"}
    assert len(set(doors.secrets.values())) == 5
    assert not any(secret in repr(doors) for secret in doors.secrets.values())


def test_a_port_without_keys_answers_to_names_that_are_advertised(tmp_path: Path) -> None:
    service = Service(advertise=("desk.example.org:7077", "desk"))
    assert make_port_access(service, str, secrets=tmp_path / "secrets").names == {"desk.example.org", "desk"}


def test_the_secrets_of_a_run_stay_and_are_for_nobody_else_to_read(tmp_path: Path) -> None:
    """Learners hold them while a syncer is replaced; a file that was torn by a crash is made anew."""
    folder, before = tmp_path / "secrets", os.umask(0)
    try:
        first = local_tokens(folder)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == dict.fromkeys((*LOCAL, ".gitignore"), 0o600)
    assert local_tokens(folder).all == first.all
    (folder / "viewer").write_text("")
    again = local_tokens(folder)
    assert again.named("join") == first.named("join") and again.named("viewer") != first.named("viewer")
    (folder / "operator").chmod(0o640)
    with pytest.raises(ConfigError, match="operator can be read by others on this machine: chmod 600"):
        local_tokens(folder)


def test_keys_bring_both(keys: KeyDir) -> None:
    doors = make_port_access(Service(keys=str(keys.path)), lambda: "r1")
    assert (
        doors.authorizer is not None
        and doors.tls is not None
        and "is not there" not in doors.authorizer.gone("join", "")
    )


def test_behind_a_proxy_that_ends_tls_tokens_are_asked_for_all_the_same(keys: KeyDir) -> None:
    doors = make_port_access(Service(keys=str(keys.path), front="front.crt"), lambda: "r1")
    assert doors.authorizer is not None and doors.tls is None


def test_mutual_tls_needs_an_authority(keys: KeyDir) -> None:
    service = Service(keys=str(keys.path), mutual=True)
    with pytest.raises(ConfigError, match="atoll cert --ca"):
        make_port_access(service, lambda: "r1")
    keys.write(keys.authority, make_authority(1.0).certificate)
    assert make_port_access(service, lambda: "r1").tls is not None


def test_a_key_of_another_certificate_is_named(keys: KeyDir) -> None:
    keys.write(keys.key, make_server(["localhost"], 1.0).key)
    with pytest.raises(ConfigError, match="holds no usable certificate"):
        make_port_access(Service(keys=str(keys.path)), lambda: "r1")


def test_all_are_counted_and_one_a_second_is_told() -> None:
    lines: list[bytes] = []
    now = 0.0
    strangers = RefusalLog(EventLog(lines.append), lambda: now)
    for tenth in range(25):
        now = tenth / 10
        strangers.log_refusal("192.0.2.1", "it has no token")
    assert [json.loads(line)["count"] for line in lines] == [1, 11, 21]
    assert json.loads(lines[0])["text"] == "192.0.2.1 was not let in: it has no token"
