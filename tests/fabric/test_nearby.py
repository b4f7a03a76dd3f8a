"""Secrets by address: found by the same user's processes, shown to the right port alone, and to nobody who took it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args

import pytest

from atoll.fabric import local_secrets
from atoll.fabric.address import parse_address
from atoll.fabric.join_tokens import Role
from atoll.fabric.local_secrets import is_private, publish_secrets, published_secrets, secret_for, withdraw_secrets
from atoll.protocol.errors import ConfigError

SECRETS: dict[Role, str] = {role: f"{role}-".ljust(32, "x") for role in get_args(Role)}
HOST, PORT = "127.0.0.1", 7077


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A user's runtime folder, and a folder for what is temporary, of this test alone."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    (tmp_path / "temp").mkdir()
    (tmp_path / "temp").chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    monkeypatch.setattr(local_secrets, "USERS", tmp_path / "users")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return {"XDG_RUNTIME_DIR": str(tmp_path / "runtime")}


def file(env: dict[str, str]) -> Path:
    return Path(env["XDG_RUNTIME_DIR"]) / "atoll" / f"{HOST}:{PORT}.json"


def test_a_request_shows_the_secret_of_the_least_role_that_its_path_takes(env: dict[str, str]) -> None:
    publish_secrets(HOST, PORT, SECRETS, env)
    shown = {
        path: secret_for(HOST, PORT, path, env)
        for path in ("/v1/status", "/metrics", "/v1/control", "/v1/fragments/0", "/v1/scores", "/v1/settings")
    }
    roles: list[Role] = ["viewer", "viewer", "learner", "learner", "evaluator", "operator"]
    assert list(shown.values()) == [SECRETS[role] for role in roles]
    address = parse_address(f"http://localhost:{PORT}", env)
    assert address.headers_for(f"http://{HOST}:{PORT}/v1/drain") == {"Authorization": f"Bearer {SECRETS['operator']}"}
    withdraw_secrets(HOST, PORT, env)
    assert published_secrets(HOST, PORT, env) == {} and not file(env).exists()


def test_nobody_else_can_read_them_whatever_the_umask(env: dict[str, str]) -> None:
    before = os.umask(0)
    try:
        publish_secrets(HOST, PORT, SECRETS, env)
    finally:
        os.umask(before)
    assert file(env).stat().st_mode & 0o777 == 0o600 and file(env).parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("url", ["http://[::1]:7077", "http://127.0.0.2:7077", "http://127.0.0.1:7078"])
def test_another_address_is_shown_nothing(env: dict[str, str], url: str) -> None:
    """Of the same port and another address, or the next port, anybody may be the owner."""
    publish_secrets(HOST, PORT, SECRETS, env)
    assert parse_address(url, env).headers_for(f"{url}/v1/status") == {}


def test_whoever_takes_the_port_of_a_dead_syncer_is_shown_nothing(env: dict[str, str]) -> None:
    script = f"from atoll.fabric.local_secrets import publish_secrets; publish_secrets({HOST!r}, {PORT}, {SECRETS!r})"
    subprocess.run([sys.executable, "-c", script], env={**os.environ, **env}, check=True)
    assert file(env).exists() and published_secrets(HOST, PORT, env) == {}
    publish_secrets(HOST, PORT + 1, SECRETS, env)
    assert not file(env).exists(), "whoever publishes next clears it away"


def test_a_process_without_the_variable_finds_what_was_published_without_it(env: dict[str, str]) -> None:
    publish_secrets(HOST, PORT, SECRETS, {})
    assert published_secrets(HOST, PORT, env) == SECRETS


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_a_folder_that_another_user_made_first_is_not_used(env: dict[str, str]) -> None:
    theirs = Path(tempfile.gettempdir()) / f"atoll-{os.geteuid()}"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 65534, 65534)
    (theirs / f"{HOST}:{PORT}.json").write_text('{"pid": 1, "secrets": {"viewer": "made by somebody else"}}')
    assert published_secrets(HOST, PORT, {}) == {}
    with pytest.raises(ConfigError, match="name a folder that is yours alone"):
        publish_secrets(HOST, PORT, SECRETS, {"XDG_RUNTIME_DIR": str(theirs)})


def test_a_link_in_the_place_of_the_folder_is_not_followed(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    link = Path(tempfile.gettempdir()) / f"atoll-{os.geteuid()}"
    link.symlink_to(tmp_path / "elsewhere")
    assert not is_private(link)
    with pytest.raises(ConfigError, match="cannot be made, or others can enter it"):
        publish_secrets(HOST, PORT, SECRETS, {})
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 0, "secrets": {}}', '{"pid": 1e400, "secrets": {}}'])
def test_what_cannot_be_read_is_none(env: dict[str, str], text: str) -> None:
    publish_secrets(HOST, PORT, SECRETS, env)
    file(env).write_text(text)
    assert published_secrets(HOST, PORT, env) == {}
