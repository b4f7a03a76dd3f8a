"""The whole model of a run: what is merged, and frozen parameters and buffers as its first learner has them.

Those lie in that learner's folder: as they were when it began (UNMERGED), and its buffers in its part of every cut.
They are copied byte by byte, so any type of theirs comes out as it is, and nothing is held in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from atoll.numerics.arrays import FloatArray
from atoll.observe.rebuild import Head
from atoll.protocol.errors import ConfigError
from atoll.store.atomic import staged
from atoll.store.cuts import complete_cuts, read_manifest
from atoll.store.rundir import UNMERGED, RunDir

BUFFERS = "buffers/"
"""Under this prefix a learner's part of a cut holds buffers."""
HEADER_LIMIT_BYTES = 32 * 2**20
PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a safetensors file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int


def find_unmerged(run: RunDir, cut: int) -> tuple[dict[str, Stored], str]:
    """By their names in the model, what is not merged (nothing, where all is), and a remark on it.

    ConfigError: no learner's folder here holds it.
    """
    found = sorted(run.learners.glob(f"*/{UNMERGED}"))
    if not found:
        raise ConfigError(
            f"no {UNMERGED} is in {run.learners}: the run's first learner writes it where it saves its part of cuts; "
            f"copy it to {run.learners / 'NAME' / UNMERGED}, or export without --whole"
        )
    learner, tensors = found[0].parent.name, read_table(found[0])
    if not tensors:
        return {}, ""
    held = read_manifest(run.cuts, cut).learners.get(learner) if cut in complete_cuts(run.cuts) else None
    if held is not None and (part := found[0].parent / held.file).exists():
        saved = read_table(part)
        tensors |= {name: saved[key] for name in tensors if (key := BUFFERS + name) in saved}
        return tensors, f"frozen parameters and local buffers are those of {learner}"
    return tensors, f"frozen parameters and local buffers are those that {learner} began with: cut {cut} has no others"


def read_table(path: Path) -> dict[str, Stored]:
    """What a safetensors file holds; ConfigError: it cannot be read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries: dict[str, Any] = json.loads(file.read(length)) if length <= HEADER_LIMIT_BYTES else {}
        entries.pop("__metadata__")
        found = {
            name: Stored(path, entry["dtype"], tuple(entry["shape"]), 8 + length + start, stop - start)
            for name, entry in entries.items()
            for start, stop in [entry["data_offsets"]]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return found


def save_whole(path: Path, head: Head, unmerged: Mapping[str, Stored], metadata: Mapping[str, str]) -> None:
    """One safetensors file of both; of a name that is in both, the merged tensor."""
    whole: dict[str, Stored | FloatArray] = {**unmerged, **head.model.tensors()}
    names = sorted(whole, key=lambda name: (-_item_bytes(whole[name]), name))  # so that each lies at a multiple of it
    text = _header({name: whole[name] for name in names}, metadata)
    with staged(path) as draft, draft.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            _write(whole[name], out)


def _header(whole: Mapping[str, Stored | FloatArray], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, one in whole.items():
        start, end = end, end + _length(one)
        dtype = one.dtype if isinstance(one, Stored) else "F32"
        entries[name] = {"dtype": dtype, "shape": list(one.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _length(one: Stored | FloatArray) -> int:
    return one.length if isinstance(one, Stored) else one.nbytes


def _item_bytes(one: Stored | FloatArray) -> int:
    return _length(one) // max(1, math.prod(one.shape))


def _write(one: Stored | FloatArray, out: BinaryIO) -> None:
    if not isinstance(one, Stored):
        out.write(np.ascontiguousarray(one).data)
        return
    with one.file.open("rb") as file:
        file.seek(one.start)
        for start in range(0, one.length, PIECE_BYTES):
            wanted = min(PIECE_BYTES, one.length - start)
            if len(piece := file.read(wanted)) < wanted:
                raise ConfigError(f"{one.file} ends too early: copy it again from the learner that wrote it")
            out.write(piece)
