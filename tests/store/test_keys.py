from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.protocol.errors import ConfigError
from atoll.store.keys import KeyDir, check_private, stamp


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture
def keys(tmp_path: Path) -> KeyDir:
    keys = KeyDir.create(tmp_path / "keys")
    for file in (keys.certificate, keys.key, keys.tokens):
        keys.write(file, b"x")
    return keys


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_can_read_them_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        keys = KeyDir.create(tmp_path / "deep" / "keys")
        keys.write(keys.key, b"secret")
        keys.write(keys.key, b"another")
        assert os.umask(umask) == umask, "it is put back"
    finally:
        os.umask(before)
    assert mode(keys.path) == 0o700 and mode(keys.key) == 0o600
    assert keys.key.read_bytes() == b"another" and {path.name for path in keys.path.iterdir()} == {
        ".gitignore",
        "syncer.key",
    }


def test_a_draft_is_never_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, seen = KeyDir.create(tmp_path / "keys"), []
    replace = Path.replace

    def look(self: Path, target: Path) -> Path:
        seen.append(mode(self))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", look)
    before = os.umask(0)
    try:
        keys.write(keys.key, b"secret")
    finally:
        os.umask(before)
    assert seen == [0o600]


def test_a_folder_that_was_open_is_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert mode(KeyDir.create(tmp_path).path) == 0o700


def test_git_ignores_a_folder_that_is_made_for_keys_and_no_other(tmp_path: Path) -> None:
    keys = KeyDir.create(tmp_path / "keys")
    assert (keys.path / ".gitignore").read_text() == "*\n" and mode(keys.path / ".gitignore") == 0o600
    (tmp_path / "project").mkdir()
    assert not list(KeyDir.create(tmp_path / "project").path.iterdir()), "its own files are not to be ignored"


def test_keys_are_opened_by_their_folder(keys: KeyDir) -> None:
    assert KeyDir.open(keys.path) == keys


@pytest.mark.parametrize("missing", ["syncer.crt", "tokens.json"])
def test_a_folder_without_keys_names_the_way_to_them(keys: KeyDir, missing: str) -> None:
    (keys.path / missing).unlink()
    with pytest.raises(ConfigError, match="holds no keys: make them with `atoll cert"):
        KeyDir.open(keys.path)


@pytest.mark.parametrize("open_to", [0o640, 0o604, 0o620, 0o666])
@pytest.mark.parametrize("name", ["syncer.key", "next.key", "tokens.json", "ca.key"])
def test_what_others_can_read_is_not_used(keys: KeyDir, name: str, open_to: int) -> None:
    (keys.path / name).touch()
    (keys.path / name).chmod(open_to)
    with pytest.raises(ConfigError, match=rf"{name} can be read by others on this machine: chmod 600"):
        KeyDir.open(keys.path)


def test_a_place_that_cannot_be_made_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot make"):
        KeyDir.create(tmp_path / "file" / "keys")
    keys = KeyDir(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="cannot write"):
        keys.write(keys.key, b"x")


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777, 0o1770])
def test_a_folder_that_others_can_change_is_not_used(keys: KeyDir, mode: int) -> None:
    keys.path.chmod(mode)
    with pytest.raises(ConfigError, match=f"can be changed by others on this machine: chmod 700 {keys.path}"):
        KeyDir.open(keys.path)


@pytest.mark.parametrize("name", ["next.crt", "ca.crt", "syncer.crt", "last.json", "operator.crt"])
def test_a_file_that_another_user_left_in_the_folder_before_it_was_closed_is_not_used(
    keys: KeyDir, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link would pin such a next.crt, and whoever joins by it would trust the other user's server."""
    (keys.path / name).touch()
    lstat = Path.lstat

    def lstat_of_another(self: Path) -> os.stat_result:
        found = list(lstat(self))
        found[4] += self.name == name  # the owner
        return os.stat_result(found)

    KeyDir.open(keys.path)
    monkeypatch.setattr(Path, "lstat", lstat_of_another)
    with pytest.raises(ConfigError, match=f"{name} belongs to another user of this machine: remove it"):
        KeyDir.open(keys.path)


def test_what_belongs_to_another_user_is_not_used(keys: KeyDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.store.keys.trusted", lambda: (12345,))
    with pytest.raises(ConfigError, match="belongs to another user"):
        check_private(keys.tokens)
    with pytest.raises(ConfigError, match="can be changed by others"):
        KeyDir.open(keys.path)


def test_the_pair_that_was_to_follow_takes_its_place_also_when_that_was_begun_before(keys: KeyDir) -> None:
    keys.write(keys.next_key, b"key")
    keys.write(keys.next_certificate, b"certificate")
    before = stamp(keys.certificate)
    keys.renew()
    assert (keys.key.read_bytes(), keys.certificate.read_bytes()) == (b"key", b"certificate")
    assert mode(keys.key) == 0o600 and stamp(keys.certificate) != before
    keys.write(keys.next_certificate, b"whose key is there already")
    keys.renew()
    assert keys.certificate.read_bytes() == b"whose key is there already" and keys.key.read_bytes() == b"key"
    with pytest.raises(ConfigError, match=r"cannot move .*next\.crt into place"):
        keys.renew()


def test_a_file_has_another_stamp_once_it_is_another_file(keys: KeyDir) -> None:
    before = stamp(keys.key)
    assert stamp(keys.key) == before != stamp(keys.path / "nowhere") == (0, 0)
    keys.write(keys.key, keys.key.read_bytes())
    assert stamp(keys.key) != before


def test_files_of_a_learner_take_nobody_elses_place(keys: KeyDir) -> None:
    assert [path.name for path in keys.of_learner("anna")] == ["anna.crt", "anna.key"]
    for name in ("syncer", "next", "ca", "../anna", "a/b", "..", ""):
        with pytest.raises(ConfigError):
            keys.of_learner(name)
