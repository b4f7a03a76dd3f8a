from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.store import removal
from atoll.store.removal import GONE, Remover

STEP = 1000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "LARGE_BYTES", 2 * STEP)
    monkeypatch.setattr(removal, "STEP_BYTES", STEP)


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """To which files were shortened."""
    found: list[int] = []
    truncate = os.truncate

    def note(path: Path, length: int) -> None:
        found.append(length)
        truncate(path, length)

    monkeypatch.setattr(os, "truncate", note)
    return found


def test_a_small_file_is_removed_at_once(tmp_path: Path, lengths: list[int]) -> None:
    (tmp_path / "a").write_bytes(bytes(STEP))
    Remover().remove_file(tmp_path / "a")
    assert list(tmp_path.iterdir()) == lengths == []


def test_a_large_file_loses_its_name_at_once_and_its_bytes_step_by_step(tmp_path: Path, lengths: list[int]) -> None:
    (tmp_path / "a").write_bytes(bytes(3 * STEP + 1))
    remover = Remover(readers_s=0.5)
    remover.remove_file(tmp_path / "a")
    (gone,) = tmp_path.iterdir()
    assert gone.name.startswith(GONE) and gone.stat().st_size == 3 * STEP + 1, "who has it open reads on"
    remover.wait_until_done()
    assert list(tmp_path.iterdir()) == []
    assert lengths == [2 * STEP + 1, STEP + 1, 1, 0]


def test_a_large_folder_goes_with_all_that_is_in_it(tmp_path: Path, lengths: list[int]) -> None:
    (tmp_path / "cut" / "more").mkdir(parents=True)
    (tmp_path / "outside").write_bytes(bytes(5 * STEP))
    (tmp_path / "cut" / "link").symlink_to(tmp_path / "outside")
    for name in ("a", "b", "more/c"):
        (tmp_path / "cut" / name).write_bytes(bytes(STEP + 1))
    remover = Remover(readers_s=0.0)
    remover.remove_folder(tmp_path / "cut")
    assert not (tmp_path / "cut").exists()
    remover.wait_until_done()
    assert [one.name for one in tmp_path.iterdir()] == ["outside"] and lengths == [1, 0] * 3
    assert (tmp_path / "outside").stat().st_size == 5 * STEP, "what a link names stays"


def test_what_an_earlier_process_left_goes_with_the_next_removal(tmp_path: Path) -> None:
    (tmp_path / f"{GONE}1234-old").write_bytes(bytes(9 * STEP))
    (tmp_path / "a").write_bytes(b"small")
    remover = Remover(readers_s=0.0)
    remover.remove_file(tmp_path / "a")
    remover.wait_until_done()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_there_or_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Remover().remove_file(tmp_path / "a")
    with pytest.raises(IsADirectoryError):
        Remover().remove_file(tmp_path)


def test_what_cannot_be_shortened_is_tried_again_with_the_next_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError

    (tmp_path / "a").write_bytes(bytes(5 * STEP))
    (tmp_path / "b").write_bytes(b"small")
    remover = Remover(readers_s=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "truncate", fail)
        remover.remove_file(tmp_path / "a")
        remover.wait_until_done()
        assert len(list(tmp_path.iterdir())) == 2
    remover.remove_file(tmp_path / "b")
    remover.wait_until_done()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("links", [True, False])
def test_a_large_file_that_is_replaced_goes_step_by_step(
    tmp_path: Path, lengths: list[int], monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no second names here")

    if not links:
        monkeypatch.setattr(os, "link", fail)
    (tmp_path / "model").write_bytes(bytes(3 * STEP))
    (tmp_path / "draft").write_bytes(b"new")
    remover = Remover(readers_s=0.0)
    remover.replace(tmp_path / "draft", tmp_path / "model")
    remover.wait_until_done()
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("model", b"new")]
    assert lengths == ([2 * STEP, STEP, 0] if links else [])


def test_who_ends_in_good_order_leaves_nothing_behind(tmp_path: Path, lengths: list[int]) -> None:
    """A finished run kept gigabytes that nobody looked for."""
    (tmp_path / "a").write_bytes(bytes(9 * STEP))
    remover = Remover(readers_s=3600.0)
    remover.remove_file(tmp_path / "a")
    remover.finish()
    assert list(tmp_path.iterdir()) == lengths == []
    (tmp_path / "b").write_bytes(bytes(9 * STEP))
    remover._readers_s = 0.0
    remover.remove_file(tmp_path / "b")
    remover.wait_until_done()
    assert len(lengths) == 9, "and after that it is gentle again"
