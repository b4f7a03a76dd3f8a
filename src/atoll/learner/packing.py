"""Nested values as JSON, with their tensors beside it: how a state is kept without running anything on reading it.

Exactly these pass, and come back as they were: None, bool, int of any size, every float (NaN, infinities, −0.0), str;
tensors, numpy's arrays and scalars; and lists, tuples, dicts, OrderedDicts and Counters of them, with any plain keys.
Anything else is refused by name: no function, no object of a class of its own.

In the JSON an object is always a tag with one key, so that no dict of the user's can be taken for one:
`{"tuple": […]}`, `{"dict": [[key, value], …]}`, `{"int": hex}`, `{"float": hex}`, `{"tensor": [name, order, place]}`. A
tensor's bytes are kept in the order of its shape; `order` gives back the order its dimensions had in memory, since a
vectorised sum of another layout may round otherwise, and `place` says whether it lay on the host or on the device.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch

from atoll.learner.copy_room import TakenRoom
from atoll.learner.ranks import take_local
from atoll.protocol.errors import ConfigError, PeerError

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None

DEPTH = 100
"""How deep values may be nested: past it they most likely hold themselves."""
MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
DTYPES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""The types a snapshot can hold, by the names of the safetensors format."""


LARGE_BYTES = 2**20
"""What is copied by a thread: a processor copies 3 GB/s from memory to memory, and several of them more."""


@cache
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4, "atoll-copier")


class Packing:
    """Takes values apart: `pack` gives the JSON, `tensors` fills with copies on the host. Then `settle` and `finish`.

    `room`: memory for the copies that is there already. `steady`: tensors on the host that stay as they are until
    their copy in `steady_copies` is made, also while training goes on.
    """

    def __init__(self, room: TakenRoom | None = None, steady: Sequence[torch.Tensor] = ()) -> None:
        self._room = room
        self._steady = {id(tensor) for tensor in steady}
        self.steady_copies: dict[int, Future[None]] = {}
        """By the tensor's id. None of them holds the copy: who waits for one later must not keep the room."""
        self._under_way: list[Future[None]] = []
        self._ends: list[torch.cuda.Event] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, tuple[str, torch.Tensor]] = {}
        """By id, the tensors already here: two references to one tensor stay two references to one tensor."""

    def settle(self) -> None:
        """By the thread that trains, which may go on when this returns. Copies from a device are still under way: they
        are in the training stream, so whatever changes these tensors comes behind them."""
        under_way, self._under_way = self._under_way, []
        for copy in under_way:
            copy.result()
        for device in {tensor.device for _, tensor in self._names.values() if tensor.is_cuda}:
            end = torch.cuda.Event(blocking=True)
            end.record(torch.cuda.current_stream(device))
            self._ends.append(end)

    def finish(self) -> None:
        """Wait for all copies. By any thread."""
        for copy in self.steady_copies.values():
            copy.result()
        for end in self._ends:
            end.synchronize()
        self._names.clear()

    def keep(self, name: str, tensor: torch.Tensor) -> str:
        """Copy a tensor to the host; the name it is kept under."""
        if (known := self._names.get(id(tensor))) is not None:
            return known[0]
        local = take_local(tensor)
        _check(name, local)
        name = self._free(name)
        self.tensors[name] = self._copy(local.detach(), id(tensor))
        self._names[id(tensor)] = (name, tensor)
        return name

    def _copy(self, tensor: torch.Tensor, key: int) -> torch.Tensor:
        """In the order of its shape. From a device, if it is steady or if it is large, it is under way for a while."""
        room = self._room.make_tensor(tensor) if self._room is not None else None
        if room is None:
            room = _allocate(tensor, pinned=tensor.is_cuda)
        if key in self._steady:
            self.steady_copies[key] = _copiers().submit(_fill, [room, tensor])
            return room
        if tensor.is_cpu and tensor.nbytes >= LARGE_BYTES:
            self._under_way.append(_copiers().submit(_fill, [room, tensor]))
            return room
        return room.copy_(tensor, non_blocking=True)

    def pack(self, value: object, name: str, depth: int = 0) -> Json:
        if depth > DEPTH:
            raise ConfigError(f"{name!r} is nested more than {DEPTH} deep: does it hold itself?")
        if value is None or isinstance(value, bool) or type(value) is str:
            return value
        if type(value) is int:
            return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
        if type(value) is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if isinstance(value, torch.Tensor):
            return {"tensor": [self.keep(name, value), _order(value), "device" if value.is_cuda else "host"]}
        if isinstance(value, np.ndarray | np.generic):
            return {"array" if isinstance(value, np.ndarray) else "scalar": self._array(name, value)}
        return self._container(value, name, depth + 1)

    def _container(self, value: object, name: str, depth: int) -> Json:
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            items: list[Json] = [self.pack(item, f"{name}/{place}", depth) for place, item in enumerate(value)]
            return {"tuple": items} if isinstance(value, tuple) else items
        if isinstance(value, dict) and (tag := MAPPINGS.get(type(value))) is not None:
            return {tag: [[self._key(k, name, depth), self.pack(v, f"{name}/{k}", depth)] for k, v in value.items()]}
        raise ConfigError(
            f"{name!r} is a {type(value).__qualname__}, which a snapshot cannot hold: only tensors, numbers, "
            f"text and lists, tuples and dicts of them; leave it out of state_dict()"
        )

    def _key(self, key: object, name: str, depth: int) -> Json:
        if isinstance(key, torch.Tensor):
            raise ConfigError(f"{name!r} has a tensor as a key, which a snapshot cannot hold")
        return self.pack(key, f"{name}/key", depth)

    def _array(self, name: str, value: np.ndarray[Any, Any] | np.generic) -> str:
        try:
            return self.keep(name, torch.from_numpy(np.array(value, order="C")))
        except (TypeError, ValueError):
            raise ConfigError(f"{name!r} is a numpy array of {value.dtype}, which a snapshot cannot hold") from None

    def _free(self, name: str) -> str:
        """Keys may hold slashes, so two ways may lead to one name; JSON knows no half characters."""
        name, number = _printable(name), 2
        wanted = name
        while name in self.tensors:
            name, number = f"{wanted}~{number}", number + 1
        return name


class Unpacking:
    """Puts values together again. With a device, tensors are new ones, free to be trained on; without, the kept ones.

    What was packed comes back. Anything else, from a damaged file or a peer, is a PeerError.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device | None = None) -> None:
        self._tensors, self._device = tensors, device
        self._made: dict[str, torch.Tensor] = {}
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}

    def unpack(self, value: Json, depth: int = 0) -> Any:
        if depth > DEPTH + 1:
            raise PeerError(f"the snapshot's values are nested more than {DEPTH} deep")
        if isinstance(value, list):
            return [self.unpack(item, depth + 1) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            raise PeerError(f"the snapshot's values hold a bare {value}")
        if not isinstance(value, dict):
            return value
        if len(value) != 1:
            raise PeerError(f"the snapshot's values hold a tag with {len(value)} keys instead of one")
        [(tag, body)] = value.items()
        try:
            return self._tagged(tag, body, depth + 1)
        except (TypeError, ValueError, KeyError, struct.error):
            raise PeerError(f"the snapshot's values hold a {tag[:40]!r} tag that cannot be read") from None

    def _tagged(self, tag: str, body: Any, depth: int) -> Any:
        """Errors of Python's own say that the body is not what the tag promises."""
        match tag:
            case "tuple" if isinstance(body, list):
                return tuple([self.unpack(item, depth) for item in body])
            case "int":
                return int(body, 16)
            case "float":
                return struct.unpack(">d", bytes.fromhex(body))[0]
            case "tensor":
                name, order, place = body
                return self._tensor(name, tuple(order), place)
            case "array":
                return self._array(body)
            case "scalar":
                return self._array(body)[()]
        kind = {tag: kind for kind, tag in MAPPINGS.items()}[tag]
        pairs = [(self.unpack(key, depth), self.unpack(item, depth)) for key, item in body]
        return kind(dict(pairs))

    def _tensor(self, name: str, order: tuple[int, ...], place: str) -> torch.Tensor:
        kept = self._tensors[name]
        if (order and sorted(order) != list(range(kept.dim()))) or place not in ("host", "device"):
            raise ValueError
        if self._device is None:
            return kept
        if name not in self._made:
            device = self._device if place == "device" else torch.device("cpu")
            self._made[name] = _laid_out(kept, order, device)
        return self._made[name]

    def _array(self, name: str) -> np.ndarray[Any, Any]:
        if name not in self._arrays:
            kept = self._tensors[name].numpy()
            self._arrays[name] = kept if self._device is None else kept.copy()
        return self._arrays[name]


def _check(name: str, tensor: torch.Tensor) -> None:
    lazy = torch.nn.parameter.is_lazy(tensor)
    if lazy or tensor.is_meta:
        raise ConfigError(f"{name!r} has no memory yet: run one batch through the model first")
    if tensor.layout != torch.strided or type(tensor.data) is not torch.Tensor:
        kind = type(tensor.data).__name__ if tensor.layout == torch.strided else str(tensor.layout)
        raise ConfigError(f"{name!r} is a {kind}: a snapshot holds plain dense tensors only")
    if tensor.dtype not in DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ConfigError(f"{name!r} is {kind}, a type that a snapshot cannot hold")


def _fill(given: list[torch.Tensor]) -> None:
    """Empties what it is given: a copier keeps that a moment longer than the copy takes, and the room with it."""
    room, tensor = given
    given.clear()
    room.copy_(tensor)


def _allocate(tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
    """Page-locked for what comes off a device: many times as fast once torch has the pages, which it keeps."""
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=pinned, memory_format=torch.contiguous_format)
    except RuntimeError:
        if not pinned:
            raise
        return _allocate(tensor, pinned=False)  # no more pages to lock: slower, but it works


def _order(tensor: torch.Tensor) -> list[Json]:
    """The dimensions from the widest stride to the narrowest; empty where that is the order of the shape."""
    if tensor.is_contiguous():
        return []
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return [] if order == sorted(order) else [*order]


def _laid_out(kept: torch.Tensor, order: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A new tensor of the same values, with that order in memory."""
    order = order or tuple(range(kept.dim()))
    made = torch.empty([kept.shape[place] for place in order], dtype=kept.dtype, device=device)
    return made.permute([order.index(place) for place in range(kept.dim())]).copy_(kept)


def _printable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()
