"""A snapshot: the state of a training process in memory, as a file, and as bytes on their way to a peer.

As bytes it is one safetensors file: 8 bytes of length, a JSON header, the tensors. What is no tensor stands as JSON
text under one key of the header's `__metadata__`. The tensors are never copied for it: what is sent or written is the
snapshot's own memory, and a stream can begin again at any byte. Equal snapshots are equal bytes.

Reading trusts nothing. The tensors must fill the bytes after the header exactly, without hole or overlap, each as
large as its shape and type say; the header is bounded; every name that a value refers to must be there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, cast

import numpy as np
import torch

from atoll.digests import digest_pieces
from atoll.learner.packing import DTYPES, Json, Unpacking
from atoll.protocol.errors import ConfigError, PeerError
from atoll.store.atomic import staged
from atoll.store.disk import PIECE_BYTES, Rests, sync_between

FORMAT = 1
KEY = "atoll"
"""Where in the header's `__metadata__` the rest stands."""
HEADER_LIMIT_BYTES = 32 * 2**20
"""About 25,000 parameters with AdamW. The worst that a peer can write into one takes some 50 times as much to read."""
DIMENSIONS = 64
"""What torch can work on."""
TYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, eq=False, slots=True)
class Snapshot:
    """Never changed once made, so that it can be written or sent in the background."""

    tensors: Mapping[str, torch.Tensor]
    """Contiguous, on the host, each with memory of its own."""
    states: Mapping[str, Json]
    """What is no tensor: of every object with a state, packed (see packing.py)."""
    rng: Json = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))
        object.__setattr__(self, "states", MappingProxyType(dict(self.states)))

    @property
    def meta(self) -> dict[str, Json]:
        return {"format": FORMAT, "states": dict(self.states), "rng": self.rng}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


# ---- out ------------------------------------------------------------------------------------------------------------


def encode(snapshot: Snapshot) -> tuple[bytes, list[memoryview]]:
    """The header, and the tensors' bytes after it, in the snapshot's own memory."""
    entries: dict[str, Any] = {"__metadata__": {KEY: json.dumps(snapshot.meta, allow_nan=False, separators=(",", ":"))}}
    parts, end = [], 0
    for name in _aligned(snapshot.tensors):
        tensor = snapshot.tensors[name]
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        parts.append(_bytes_of(tensor))
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT_BYTES:
        raise ConfigError(
            f"the snapshot's header would be {len(text)} bytes, more than {HEADER_LIMIT_BYTES}: "
            f"too many tensors, or long lists of numbers that should be tensors"
        )
    return len(text).to_bytes(8, "little") + text, parts


def ranged(header: bytes, parts: Sequence[memoryview], start: int = 0, stop: int | None = None) -> Iterator[memoryview]:
    """The encoded bytes from `start` up to `stop`, in pieces of at most `PIECE_BYTES`, nothing copied."""
    total = size(header, parts)
    stop = total if stop is None else stop
    if not 0 <= start <= stop <= total:
        raise PeerError(f"bytes {start} to {stop} of a snapshot of {total} bytes do not exist")
    return _pieces([memoryview(header), *parts], start, stop)


def _pieces(parts: Sequence[memoryview], start: int, stop: int) -> Iterator[memoryview]:
    for part in parts:
        for place in range(max(start, 0), min(stop, part.nbytes), PIECE_BYTES):
            yield part[place : min(place + PIECE_BYTES, stop)]
        start, stop = start - part.nbytes, stop - part.nbytes


def size(header: bytes, parts: Sequence[memoryview]) -> int:
    return len(header) + sum(part.nbytes for part in parts)


def digest(header: bytes, parts: Sequence[memoryview]) -> str:
    return digest_pieces([header, *parts])


def write(path: Path, snapshot: Snapshot, rests: Rests | None = None) -> str:
    """The file is there, whole and durable, once this returns; its digest."""
    header, parts = encode(snapshot)
    with staged(path) as draft, draft.open("wb") as file:
        return write_pieces(file, sync_between(file, ranged(header, parts), rests))


def write_pieces(file: IO[bytes], pieces: Iterable[memoryview]) -> str:
    """The digest of all."""

    def written() -> Iterator[memoryview]:
        for piece in pieces:
            file.write(piece)
            yield piece

    return digest_pieces(written())


def _aligned(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The widest types first, so that every tensor begins at a multiple of its type's size."""
    return sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data.toreadonly()


# ---- in -------------------------------------------------------------------------------------------------------------


def read(path: Path) -> Snapshot:
    try:
        return decode(np.fromfile(path, dtype=np.uint8).data)
    except (OSError, PeerError) as error:
        raise ConfigError(f"cannot read the snapshot {path}: {error}") from error


def decode(buffer: bytes | bytearray | memoryview) -> Snapshot:
    """From the whole of the encoded bytes. A writable buffer is the snapshot's memory from then on: leave it alone."""
    view = memoryview(buffer).cast("B")
    if view.readonly:
        view = memoryview(bytearray(view))
    entries, data = _header(view)
    meta = _meta(entries.pop("__metadata__", None))
    tensors: dict[str, torch.Tensor] = {}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: _offsets(*item)):
        dtype, shape = _spec(name, entry)
        start, stop = _offsets(name, entry)
        if start != end or stop - start != math.prod(shape) * dtype.itemsize or stop > data.nbytes:
            raise PeerError(f"the snapshot is damaged: {name[:200]!r} of {shape!r:.80} lies at bytes {start} to {stop}")
        tensors[name], end = _tensor(name, data[start:stop], dtype, shape), stop
    if end != data.nbytes:
        raise PeerError(f"the snapshot is damaged: {data.nbytes} bytes of tensors instead of {end}")
    for value in [*meta["states"].values(), meta["rng"]]:
        Unpacking(tensors).unpack(value)
    return Snapshot(tensors, meta["states"], meta["rng"])


def _header(view: memoryview) -> tuple[dict[str, Any], memoryview]:
    """The parsed header, and what comes after it."""
    length = int.from_bytes(view[:8], "little")
    if view.nbytes < 8 or length > min(HEADER_LIMIT_BYTES, view.nbytes - 8):
        raise PeerError(f"the snapshot is damaged: a header of {length} bytes in {view.nbytes} bytes")
    return _object(bytes(view[8 : 8 + length]), "header"), view[8 + length :]


def _meta(metadata: Any) -> dict[str, Any]:
    text = metadata.get(KEY) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise PeerError("the file is no snapshot of Atoll's: its header has no state in it")
    meta = _object(text, "state")
    if meta.get("format") != FORMAT:
        shown = repr(meta.get("format"))[:40]
        raise PeerError(f"the snapshot is of format {shown}, this version reads {FORMAT}: install the same version")
    if meta.keys() != {"format", "states", "rng"} or not isinstance(meta["states"], dict):
        raise PeerError("the snapshot is damaged: its state has not the parts it should have")
    return meta


def _object(text: bytes | str, what: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise PeerError(f"the snapshot is damaged: its {what} is no JSON object")
    return parsed


def _spec(name: str, entry: dict[str, Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in TYPES:
        raise PeerError(f"the snapshot's {name[:200]!r} is of no type that is known: {dtype!r:.40}")
    return TYPES[dtype], tuple(_counts(shape, f"the snapshot's {name[:200]!r} has no shape"))


def _offsets(name: str, entry: Any) -> tuple[int, int]:
    place = entry.get("data_offsets") if isinstance(entry, dict) else None
    start, stop = _counts(place, f"the snapshot's {name[:200]!r} has no place", [2])
    return start, stop


def _counts(value: Any, otherwise: str, lengths: Container[int] = range(DIMENSIONS + 1)) -> list[int]:
    counts = isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
    if not counts or len(value) not in lengths:
        raise PeerError(f"{otherwise}: {value!r:.80}")
    return cast(list[int], value)


def _tensor(name: str, data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        if not data:
            return torch.empty(shape, dtype=dtype, device="cpu")
        made = torch.frombuffer(data, dtype=dtype)
        if made.data_ptr() % dtype.itemsize:
            made = torch.frombuffer(bytearray(data), dtype=dtype)
        if dtype == torch.bool and int(made.view(torch.uint8).max()) > 1:
            raise ValueError("bytes that are neither true nor false")
        return made.reshape(shape)
    except (RuntimeError, ValueError, TypeError) as error:
        raise PeerError(
            f"the snapshot's {name[:200]!r} cannot be a tensor of {shape!r:.80}: {str(error).partition(chr(10))[0]:.80}"
        ) from None
