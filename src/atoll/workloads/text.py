"""Text to train on that needs no download, as one array of bytes, with a fixed part held out for validation.

By default it is the source of the running Python's standard library without its tests, files in the order of their
relative paths; or whatever files, folders (all files below them but hidden ones) and globs the user names.

Rules it keeps:
- the same files give the same bytes, the same split and the same `digest`, on every machine;
- the text is cut into blocks of 16 KiB; of every 32 in a row one is held out, which one a hash decides, so that the
  held-out part is spread over the whole text. Where that picks none or all (short text), the last 1/32 is held out;
- a training window never reaches into a held-out byte: both parts are separate arrays.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.numerics.arrays import ByteArray
from atoll.protocol.errors import ConfigError

BLOCK_BYTES = 16 * 1024
HELD_OUT_ONE_IN = 32
NOT_TEXT = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
TESTS = frozenset({"test", "tests", "idle_test"})


class Text:
    """A corpus: `train` and `held_out` bytes, and the sha256 `digest` of all of it."""

    def __init__(self, content: bytes, name: str = "text") -> None:
        self.name = name
        self.digest = hashlib.sha256(content).hexdigest()
        whole = np.frombuffer(content, dtype=np.uint8)
        held_out = held_out_mask(len(whole))
        self.train: ByteArray = whole[~held_out]
        self.held_out: ByteArray = whole[held_out]

    @classmethod
    def load(cls, data: Sequence[str] = ()) -> Text:
        """The text of `data` (files, folders, globs), or of the standard library when nothing is named."""
        if not data:
            return cls(b"\n".join(_read(path) for path in standard_library()), "the Python standard library")
        name = ", ".join(data)
        content = b"\n".join(_read(path) for path in named(data))
        if not content:
            raise ConfigError(f"workload.data: {name} has no text in it; name files that do")
        return cls(content, name)


class Windows(Sequence[torch.Tensor]):
    """The training part as a dataset: item i is the `block` + 1 bytes from i * block on, inputs and targets in one."""

    def __init__(self, text: Text, block: int) -> None:
        self._windows = windows(text.train, block, f"the training part of {text.name}")

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: SupportsIndex | slice) -> torch.Tensor:  # type: ignore[override]
        return torch.from_numpy(self._windows[index].astype(np.int64))

    def gather(self, indices: NDArray[np.integer]) -> torch.Tensor:
        """A whole batch in one pass: [len(indices), block + 1]."""
        return torch.from_numpy(self._windows[indices].astype(np.int64))


def windows(part: ByteArray, block: int, name: str) -> ByteArray:
    """A view of `part` as overlapping rows of block + 1 bytes, `block` apart."""
    if len(part) < block + 1:
        raise ConfigError(
            f"{name} has {len(part)} bytes, too few for one window of {block + 1}: "
            f"name more text (workload.data) or set a smaller workload.block"
        )
    return np.lib.stride_tricks.sliding_window_view(part, block + 1)[::block]


def held_out_mask(size: int) -> NDArray[np.bool_]:
    """Which of `size` bytes are held out for validation."""
    blocks = -(-size // BLOCK_BYTES)
    picked = np.array([index == _held_out_of(index // HELD_OUT_ONE_IN) for index in range(blocks)], dtype=np.bool_)
    if not picked.any() or picked.all():
        return np.arange(size) >= size - size // HELD_OUT_ONE_IN
    return np.repeat(picked, BLOCK_BYTES)[:size]


def _held_out_of(group: int) -> int:
    """The index of the one block held out of a group."""
    value = hashlib.sha256(f"atoll held out {group}".encode()).digest()
    return group * HELD_OUT_ONE_IN + value[0] % HELD_OUT_ONE_IN


def standard_library() -> list[Path]:
    """Python files of the standard library, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [path for path in _below(root, NOT_TEXT | TESTS) if path.suffix == ".py"]
    if not found:
        raise ConfigError(f"no source of the Python standard library under {root}; name your own text (workload.data)")
    return found


def named(data: Iterable[str]) -> Iterator[Path]:
    """Files behind the paths, folders and globs a user named, each once, in the order named."""
    seen: set[Path] = set()
    for entry in data:
        for path in _expand(entry):
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield path


def _expand(entry: str) -> list[Path]:
    path = Path(entry).expanduser()
    if path.is_dir():
        found = _below(path)
    elif path.exists():
        found = [path]
    else:
        matches = (Path(match) for match in sorted(glob.glob(str(path), recursive=True)))
        found = [match for match in matches if match.is_file()]
    if not found:
        raise ConfigError(f"workload.data: {entry} names no file; check the path (relative to {Path.cwd()})")
    return found


def _below(root: Path, skipped: frozenset[str] = NOT_TEXT) -> list[Path]:
    """All files below a folder, without hidden and `skipped` folders, in the order of their relative paths."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"workload.data: cannot read {path} ({error.strerror}); fix it or leave it out") from error
