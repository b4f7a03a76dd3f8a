"""The text: the same bytes and split everywhere, nothing of the held-out part in training, clear errors."""

from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.protocol.errors import ConfigError
from atoll.workloads.text import BLOCK_BYTES, Text, Windows, held_out_mask, standard_library
from atoll.workloads.training import held_out_windows

NUMBERED = b"%07d\n" * 200_000 % tuple(range(200_000))


def lines(part: np.ndarray) -> set[bytes]:
    return set(part.tobytes().split())


def test_the_split_is_disjoint_complete_and_spread() -> None:
    text = Text(NUMBERED)
    assert not lines(text.train) & lines(text.held_out)
    assert len(text.train) + len(text.held_out) == len(NUMBERED)
    assert 0.01 < len(text.held_out) / len(NUMBERED) < 0.08
    assert len(np.flatnonzero(np.diff(held_out_mask(len(NUMBERED)).astype(int)))) > 2


def test_a_short_text_holds_out_its_end() -> None:
    text = Text(b"x" * 3100 + b"y" * 100)
    assert text.held_out.tobytes() == b"y" * 100


@pytest.mark.parametrize("size", [0, 1, 31, BLOCK_BYTES, 40 * BLOCK_BYTES + 1])
def test_the_mask_fits_any_size(size: int) -> None:
    assert held_out_mask(size).shape == (size,)


def test_the_digest_names_the_content_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"some text")
    first = Text.load((str(tmp_path / "a.txt"),))
    assert first.digest == Text(b"some text", "other name").digest
    assert first.digest == "b94f6f125c79e3a5ffaa826f584c10d52ada669e6762051b826b55776d05aed2"
    assert first.digest != Text(b"some text.").digest


def test_the_standard_library_comes_without_tests_in_a_fixed_order() -> None:
    paths = standard_library()
    assert paths == standard_library()
    assert {"argparse.py", "typing.py"} <= {path.name for path in paths}
    assert not [path for path in paths if {"test", "tests", "site-packages"} & set(path.parts[-4:])]
    assert sum(path.stat().st_size for path in paths) > 5_000_000


def test_files_folders_and_globs_are_read_once_each(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.md", ".hidden"):
        (tmp_path / name).write_text(name)
    text = Text.load((str(tmp_path / "*.txt"), str(tmp_path)))
    assert text.digest == Text(b"a.txt\nb.txt\nsub/c.md").digest


def test_windows_overlap_by_one_byte_and_gather_agrees() -> None:
    text = Text(NUMBERED)
    dataset = Windows(text, block=8)
    assert dataset[1].tolist() == text.train[8:17].tolist()
    assert dataset[0].dtype == torch.long
    batch = dataset.gather(np.array([5, 0, len(dataset) - 1]))
    assert torch.equal(batch, torch.stack([dataset[5], dataset[0], dataset[-1]]))


def test_validation_windows_are_fixed_and_spread() -> None:
    text = Text(NUMBERED)
    rows = held_out_windows(text, 16, 10)
    assert torch.equal(rows, held_out_windows(text, 16, 10))
    assert rows.shape == (10, 17)
    assert rows[0].tolist() == text.held_out[:17].tolist()


def test_too_little_text_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"has 31 bytes, too few for one window of 65: name more text"):
        Windows(Text(b"x" * 32), block=64)
    with pytest.raises(ConfigError, match="held-out part"):
        held_out_windows(Text(b"x" * 320), 64, 4)


def test_missing_empty_and_unreadable_data_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.txt names no file"):
        Text.load((str(tmp_path / "nowhere.txt"),))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match="has no text"):
        Text.load((str(tmp_path / "empty.txt"),))

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"cannot read .*empty\.txt \(Permission denied\)"):
        Text.load((str(tmp_path / "empty.txt"),))
