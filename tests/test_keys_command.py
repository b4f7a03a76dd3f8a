"""`atoll cert`, `atoll tokens`, and what `atoll syncer` and `atoll learn` say of keys and links that are none."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from atoll.cli.keys import LAST, Last
from atoll.cli.serve import check_service, invitation
from atoll.cli.shared import address_of
from atoll.config import Service, convert
from atoll.fabric.address import parse_address
from atoll.fabric.certificates import fingerprint, hosts_of, make_server
from atoll.fabric.join_tokens import NAMES
from atoll.protocol.errors import ConfigError
from atoll.store.keys import KeyDir
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import hold_run
from atoll.syncer.credentials import read_tokens, write_tokens

from .test_cli import atoll


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    (tmp_path / "torn.crt").write_text("-----BEGIN CERTIFICATE-----\n")
    own = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    with mock.patch.dict(os.environ, own, clear=True):  # `atoll learn` says what it was told to its script by these
        yield tmp_path


@pytest.fixture
def keys(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> KeyDir:
    assert atoll(monkeypatch, "cert", "--ca") == 0
    capsys.readouterr()
    return KeyDir.open(folder / "atoll-keys")


def failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str) -> str:
    code = atoll(monkeypatch, *command.split())
    out, error = capsys.readouterr()
    assert code == 2 and out == "" and error.startswith("atoll: ") and len(error.splitlines()) == 1, out + error
    return error


def test_cert_makes_all_that_a_run_needs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, "cert", "--host", "syncer.example.org", "--days", "2") == 0
    keys = KeyDir.open(folder / "atoll-keys")
    assert {path.stat().st_mode & 0o777 for path in keys.path.iterdir()} == {0o600}
    assert {"syncer.example.org", "localhost", "127.0.0.1", "::1"} <= set(hosts_of(keys.certificate.read_bytes()))
    assert [(token.id, token.role) for token in read_tokens(keys).all] == [
        ("join", "learner"),
        ("operator", "operator"),
    ]
    assert all(0 < token.expires - time.time() <= 2 * 86400 for token in read_tokens(keys).all)
    said = capsys.readouterr().out
    assert "the tokens join and operator count until 20" in said and "(of a relay: atoll relay --join LINK" in said
    assert fingerprint(keys.certificate.read_bytes())[:16] in said and "atoll syncer --bind 0.0.0.0 --keys" in said
    assert not any(token.secret in said for token in read_tokens(keys).all)


def test_keys_that_lie_there_are_kept(
    keys: KeyDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = keys.key.read_bytes()
    assert "atoll-keys holds keys already: use them, or replace them with --force" in failed(
        monkeypatch, capsys, "cert"
    )
    assert keys.key.read_bytes() == before
    assert atoll(monkeypatch, "cert", "--force") == 0
    assert keys.key.read_bytes() != before


def test_a_learner_gets_a_certificate_of_the_authority(keys: KeyDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert atoll(monkeypatch, "cert", "--learner", "anna") == 0
    certificate, key = keys.of_learner("anna")
    assert certificate.is_file() and key.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("cert --days 0", "--days 0 is not from 0 to 3650"),
        ("cert --days nan", "--days nan is not from 0 to 3650"),
        ("cert --host https://x.org --out new", "'https://x.org' is no name or address of a machine"),
        ("cert --host a..b --out new", "is no name or address of a machine"),
        ("cert --out script.py", "cannot make script.py"),
        ("cert --learner anna --out empty", "empty has no authority to sign with: make it with `atoll cert --ca`"),
        ("cert --learner syncer", "a learner cannot be called 'syncer' here"),
        ("cert --learner ../anna", "../anna"),
        ("cert --learner next", "a learner cannot be called 'next' here"),
        ("cert --next --out nowhere", "nowhere holds no keys"),
        ("cert --renew --out nowhere", "nowhere holds no keys"),
        ("cert --next --renew", "--ca, --learner, --next and --renew are one thing each"),
        ("tokens --keys nowhere", "nowhere holds no keys: make them with `atoll cert --out nowhere`"),
        ("tokens add join", "two tokens are called 'join'"),
        ("tokens add eu --role god", "--role god is none of viewer, learner, evaluator, relay, operator"),
        ("tokens add eu --most -1", "--most is 0 or more"),
        ("tokens add eu --names 0", "--names 1 or more"),
        ("tokens change join --names 0", "--names 1 or more"),
        ("tokens change join", "nothing to change: name --most, --names or --hours"),
        ("tokens change eu --names 9", "there is no token 'eu'"),
        ("tokens add eu --hours -1", "--hours from 0 to 87600"),
        ("tokens add eu --hours nan", "--hours from 0 to 87600"),
        ("tokens add eu --hours inf", "--hours from 0 to 87600"),
        ("tokens add ../eu", "../eu"),
        ("tokens revoke eu", "there is no token 'eu'; there are: join, operator"),
        ("tokens link eu", "there is no token 'eu'"),
        ("syncer --bind 0.0.0.0", "binding to 0.0.0.0 lets other machines in, and that needs TLS and a token"),
        ("syncer --bind ::", "make both with `atoll cert`"),
        ("syncer --bind 0.0.0.0 --keys nowhere", "nowhere holds no keys"),
        ("syncer --bind 0.0.0.0 --keys atoll-keys --front torn.crt", "binding to 0.0.0.0 lets other machines in"),
        ("syncer --mutual", "--mutual and --front go with --keys"),
        ("syncer --keys atoll-keys --front nowhere.crt", "nowhere.crt: No such file"),
        ("syncer --keys atoll-keys --front torn.crt", "this is no certificate in PEM"),
        ("syncer --keys atoll-keys --advertise a/b", "is no"),
        ("syncer --keys atoll-keys --advertise x:99999", "is no HOST:PORT"),
        ("learn script.py", "which run? Name it by --join LINK (or ATOLL_JOIN)"),
        ("relay", "(or ATOLL_JOIN), the link that atoll tokens add NAME --role relay prints"),
        ("learn script.py --join nolink.txt", "--join (or ATOLL_JOIN) names nolink.txt, which is missing"),
        ("learn script.py --join script.py", "script.py can be read by others"),
        ("learn script.py --join atoll://half", "is no address of a syncer"),
        ("learn script.py --join atoll://SECRET@x.org:7077/r1", "in the clear: use its join link"),
        ("learn script.py --join http://x.org:7077", "in the clear: use its join link"),
        ("learn script.py --join atoll://SECRET@x.org:7077/r1/ca --ca torn.crt", "cannot be used"),
        ("learn script.py --join atoll://SECRET@x.org:7077/r1/ca --cert nowhere.crt", "cannot be used"),
        ("learn script.py --join atoll://SECRET@x.org:7077/r1/ca --proxy socks5://x", "it looks like http://"),
        ("learn script.py --join atoll://SECRET@x.org:7077/r1/ca --name ../x", "../x"),
        ("learn nowhere.py --join atoll://SECRET@x.org:7077/r1/ca", "there is no script nowhere.py"),
        ("status atoll://SECRET@x.org/r1", "is no address of a syncer"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(
    keys: KeyDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, said: str
) -> None:
    secret = "f00d" * 16
    monkeypatch.setattr("os.execv", lambda *words: pytest.fail("nothing is started"))
    told = failed(monkeypatch, capsys, command.replace("SECRET", secret))
    assert said in told and secret not in told
    assert not Path("atoll-runs").exists(), "no run was begun"


def test_keys_that_others_can_read_start_no_syncer(
    keys: KeyDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys.tokens.chmod(0o644)
    told = failed(monkeypatch, capsys, "syncer --bind 0.0.0.0 --keys atoll-keys")
    assert "tokens.json can be read by others on this machine: chmod 600" in told


def test_an_expired_certificate_starts_no_syncer(keys: KeyDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.fabric.certificates.out_of_date", lambda der: "the certificate expired on 2020-01-01")
    with pytest.raises(ConfigError, match="expired on 2020-01-01"):
        check_service(Service(host="0.0.0.0", keys=str(keys.path)))


def test_tokens_come_and_go(keys: KeyDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    keys.write(keys.path / LAST, msgspec.json.encode(Last(("syncer.example.org:7077",), "r1", "ab" * 32)))
    assert atoll(monkeypatch, "tokens", "add", "eu", "--learner", "eu-*", "--most", "4", "--hours", "24") == 0
    token = read_tokens(keys).named("eu")
    address = parse_address(capsys.readouterr().out, {})
    assert (address.token, address.run, address.urls) == (token.secret, "r1", ("https://syncer.example.org:7077",))
    assert token.most == 4 and 23 * 3600 < token.expires - time.time() <= 24 * 3600
    assert atoll(monkeypatch, "tokens", "link", "eu") == 0
    assert parse_address(capsys.readouterr().out, {}) == address
    assert atoll(monkeypatch, "tokens", "revoke", "eu") == 0
    revoked = capsys.readouterr().out
    assert revoked.startswith("eu is revoked in atoll-keys; a syncer that reads this folder sees it within two seconds")
    assert "with a copy of their own need it too: copy atoll-keys/tokens.json there" in revoked
    assert read_tokens(keys).named("eu").revoked and not read_tokens(keys).named("join").revoked
    capsys.readouterr()
    refused = (
        "token 'eu' was revoked, and nobody can join by its link: make another: atoll tokens add NAME --role learner"
    )
    assert refused in failed(monkeypatch, capsys, "tokens link eu")
    assert atoll(monkeypatch, "tokens") == 0
    shown = capsys.readouterr().out
    assert re.search(r"eu .* revoked", shown) and re.search(r"join .* until 2", shown)
    assert re.search(r"operator +operator ", shown), "nothing is cut in a pipe"
    assert not any(token.secret in shown for token in read_tokens(keys).all)
    assert atoll(monkeypatch, "tokens", "list", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["id"]: row["role"] for row in rows} == {"join": "learner", "operator": "operator", "eu": "learner"}
    assert not any("secret" in row for row in rows)


def test_a_token_that_is_made_without_hours_ends_within_a_year_and_says_when(
    keys: KeyDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys.write(keys.path / LAST, msgspec.json.encode(Last(("syncer.example.org:7077",), "r1", "ab" * 32)))
    assert atoll(monkeypatch, "tokens", "add", "eu") == 0
    left_days = (read_tokens(keys).named("eu").expires - time.time()) / 86400
    assert 364 < left_days <= 366
    said = capsys.readouterr().err
    assert re.search(r"eu counts until \d{4}-\d\d-\d\d \d\d:\d\d UTC; --hours names another time", said)


def test_a_link_of_a_token_that_has_expired_is_refused_with_what_to_do(
    keys: KeyDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys.write(keys.path / LAST, msgspec.json.encode(Last(("syncer.example.org:7077",), "r1", "ab" * 32)))
    write_tokens(keys, read_tokens(keys).with_changed("join", expires=1.0))
    told = failed(monkeypatch, capsys, "tokens link join")
    assert "expired on 1970-01-01" in told and "atoll tokens change join --hours HOURS" in told


def test_a_token_may_bring_more_names_and_its_link_stays(
    keys: KeyDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_tokens(keys).named("join")
    assert before.names == NAMES == 4096
    assert atoll(monkeypatch, "tokens", "change", "join", "--names", "20000", "--most", "9", "--hours", "2") == 0
    after = read_tokens(keys).named("join")
    assert (after.names, after.most, after.secret) == (20000, 9, before.secret)
    assert 3600 < after.expires - time.time() <= 7200
    assert atoll(monkeypatch, "tokens", "change", "join", "--hours", "0") == 0
    assert read_tokens(keys).named("join") == msgspec.structs.replace(after, expires=0.0), "what is not named stays"
    assert atoll(monkeypatch, "tokens") == 0
    assert "20,000" in capsys.readouterr().out


def test_a_command_of_tokens_takes_the_folder_behind_its_name_too(
    keys: KeyDir, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remembered(keys)
    keys.path.rename(folder / "elsewhere")
    capsys.readouterr()
    assert atoll(monkeypatch, "tokens", "--keys", "elsewhere", "link") == 0
    link = capsys.readouterr().out
    for words in (["link", "--keys", "elsewhere"], ["link", "join", "--keys=elsewhere"]):
        assert atoll(monkeypatch, "tokens", *words) == 0
        assert capsys.readouterr().out == link
    assert atoll(monkeypatch, "tokens", "revoke", "--keys", "elsewhere", "join") == 0
    assert read_tokens(KeyDir.open(folder / "elsewhere")).named("join").revoked
    capsys.readouterr()
    assert atoll(monkeypatch, "tokens", "link", "--help") == 0
    assert "--keys DIR" in capsys.readouterr().out


def remembered(keys: KeyDir) -> None:
    """As a syncer left it that was started with these keys."""
    pin = fingerprint(keys.certificate.read_bytes())
    keys.write(keys.path / LAST, msgspec.json.encode(Last(("syncer.example.org:7077",), "r1", pin)))


def linked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the link of the first token is known by."""
    capsys.readouterr()
    assert atoll(monkeypatch, "tokens", "link", *words) == 0
    return parse_address(capsys.readouterr().out, {}).pin


def test_a_certificate_is_followed_by_one_that_links_have_named_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, "cert", "--host", "syncer.example.org") == 0
    keys = KeyDir.open(folder / "atoll-keys")
    remembered(keys)
    tokens, old = keys.tokens.read_bytes(), fingerprint(keys.certificate.read_bytes())
    capsys.readouterr()
    assert "announce the next certificate first (atoll cert --next)" in failed(monkeypatch, capsys, "cert --renew")
    assert linked(monkeypatch, capsys) == old
    assert atoll(monkeypatch, "cert", "--next", "--host", "two.example.org") == 0
    new = fingerprint(keys.next_certificate.read_bytes())
    assert linked(monkeypatch, capsys) == f"{old},{new}", "from now on"
    capsys.readouterr()
    assert "next.crt is there already" in failed(monkeypatch, capsys, "cert --next")
    assert atoll(monkeypatch, "cert", "--renew") == 0
    assert fingerprint(keys.certificate.read_bytes()) == new == linked(monkeypatch, capsys)
    assert not keys.next_certificate.exists() and not keys.next_key.exists()
    hosts = hosts_of(keys.certificate.read_bytes())
    assert {"syncer.example.org", "two.example.org", "127.0.0.1"} <= set(hosts)
    assert keys.tokens.read_bytes() == tokens and keys.key.stat().st_mode & 0o777 == 0o600
    check_service(Service(host="0.0.0.0", keys=str(keys.path)))
    assert atoll(monkeypatch, "cert", "--renew", "--force") == 0
    assert fingerprint(keys.certificate.read_bytes()) not in (old, new)
    check_service(Service(host="0.0.0.0", keys=str(keys.path)))


def test_whoever_was_stopped_in_the_middle_of_renewing_does_it_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, "cert") == 0 and atoll(monkeypatch, "cert", "--next") == 0
    keys = KeyDir.open(folder / "atoll-keys")
    keys.next_key.rename(keys.key)
    assert atoll(monkeypatch, "cert", "--renew") == 0
    check_service(Service(host="0.0.0.0", keys=str(keys.path)))


def test_one_of_an_authority_is_renewed_in_one_step_and_its_links_stay(
    keys: KeyDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remembered(keys)
    before, authority = keys.certificate.read_bytes(), keys.authority.read_bytes()
    assert linked(monkeypatch, capsys, "--ca") == "ca"
    assert atoll(monkeypatch, "cert", "--renew", "--days", "90") == 0
    after = keys.certificate.read_bytes()
    assert after != before and keys.authority.read_bytes() == authority and hosts_of(after) == hosts_of(before)
    assert linked(monkeypatch, capsys) == fingerprint(after), "the other links are of the certificate that is there now"
    check_service(Service(host="0.0.0.0", keys=str(keys.path), mutual=True))
    lines = invitation(Service(keys=str(keys.path)), "https://127.0.0.1:7077", "r1", Path("run"), on_terminal=True)
    assert any("atoll tokens link --ca" in line for line in lines)
    capsys.readouterr()
    keys.authority_key.unlink()
    assert "was signed by an authority whose key is not here" in failed(monkeypatch, capsys, "cert --renew")


def test_behind_a_proxy_links_name_the_certificate_that_it_shows_now(
    keys: KeyDir, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    front = folder / "front.crt"
    front.write_bytes(make_server(["localhost"], 1.0).certificate)
    invitation(
        Service(keys=str(keys.path), front=str(front)), "http://127.0.0.1:7077", "r1", Path("run"), on_terminal=True
    )
    assert linked(monkeypatch, capsys) == fingerprint(front.read_bytes())
    front.write_bytes(make_server(["localhost"], 1.0).certificate)
    assert linked(monkeypatch, capsys) == fingerprint(front.read_bytes())


def test_a_syncer_invites_by_one_line(keys: KeyDir) -> None:
    service = Service(host="0.0.0.0", keys=str(keys.path), advertise=("a.example.org", "[2001:db8::1]:7078"))
    lines = invitation(service, "https://127.0.0.1:7077", "r1", Path("run"), on_terminal=True)
    address = parse_address(lines[-1].split()[-1], {})
    assert address.urls == ("https://a.example.org:7077", "https://[2001:db8::1]:7078")
    assert (
        address.pin == fingerprint(keys.certificate.read_bytes())
        and address.token == read_tokens(keys).named("join").secret
    )
    assert read_tokens(keys).named("operator").secret not in "".join(lines)
    assert lines[-2] == f"  ATOLL_JOIN={lines[-1].split()[-1]} python SCRIPT"


def test_a_syncer_says_how_an_evaluator_is_started(keys: KeyDir, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = invitation(Service(), "http://127.0.0.1:7077", "r1", Path("run"), on_terminal=True)
    assert "score the model with: atoll learn SCRIPT --syncer http://127.0.0.1:7077 --evaluator" in plain
    assert "or by plain Python: ATOLL_JOIN=http://127.0.0.1:7077 python SCRIPT" in plain
    service, url = Service(keys=str(keys.path)), "https://127.0.0.1:7077"
    before = "\n".join(invitation(service, url, "r1", Path("run"), on_terminal=True))
    assert "atoll learn SCRIPT --evaluator --join LINK" in before and "add scorer --role evaluator" in before
    atoll(monkeypatch, "tokens", "add", "scorer", "--role", "evaluator")
    secret = read_tokens(keys).named("scorer").secret
    [line] = [one for one in invitation(service, url, "r1", Path("run"), on_terminal=True) if "--evaluator" in one]
    assert parse_address(line.split()[-1], {}).token == secret
    assert secret not in "".join(invitation(service, url, "r1", Path("run"), on_terminal=False))


def test_a_syncer_whose_output_goes_to_a_file_writes_no_secret_there(keys: KeyDir) -> None:
    lines = invitation(Service(keys=str(keys.path)), "https://127.0.0.1:7077", "r1", Path("run"), on_terminal=False)
    assert "atoll tokens --keys" in lines[-1]
    assert not any(token.secret in "".join(lines) for token in read_tokens(keys).all)


def test_a_syncer_without_a_token_that_counts_says_so(keys: KeyDir, monkeypatch: pytest.MonkeyPatch) -> None:
    atoll(monkeypatch, "tokens", "revoke", "join")
    assert (
        "atoll tokens add NAME"
        in invitation(Service(keys=str(keys.path)), "https://127.0.0.1:7077", "r1", Path("run"), on_terminal=True)[0]
    )


def test_commands_on_the_syncers_machine_show_a_certificate_where_one_is_asked_for(keys: KeyDir, folder: Path) -> None:
    out = RunDir.create(folder / "run")
    out.address.write_text("https://127.0.0.1:7077")
    for mutual in (False, True):
        out.settings.write_bytes(convert({"service": {"keys": str(keys.path), "mutual": mutual}}, "a test").toml())
        address = parse_address(address_of(out))
        assert address.token == read_tokens(keys).named("operator").secret
        assert address.certificate == (str(keys.path / "operator.crt") if mutual else "")
        assert address.context() is not None
    os.environ.pop("ATOLL_CERT")
    (keys.path / "operator.crt").unlink()
    with pytest.raises(ConfigError, match="atoll cert --learner operator"):
        address_of(out)


def test_a_link_of_a_run_that_nobody_can_join_yet_is_refused_with_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir.create(folder / "run")
    assert "holds no run" in failed(monkeypatch, capsys, "tokens link --run nowhere")
    with hold_run(run.path):
        assert "is starting, and nothing listens yet: ask again in a few seconds" in failed(
            monkeypatch, capsys, "tokens link --run run"
        )
        run.settings.write_text("[service]\nkeys = 'mine'\n")
        assert "the link is that of atoll tokens --keys mine link join" in failed(
            monkeypatch, capsys, "tokens link --run run"
        )
