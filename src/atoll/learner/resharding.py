"""A learner that comes back with another number of ranks, or as one process: its saved state, cut along other boxes.

Every rank saves its own part of a cut, with the boxes of all ranks. Whoever holds other boxes than were saved takes
the structure of rank 0's part, and of each tensor that is cut like a parameter (the inner optimizer's moments) the
slices that lie in its own box, from the parts of all ranks. They have to lie where it can read them: one machine, or
a file system that all see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from atoll.learner.packing import Unpacking
from atoll.learner.snapshot import Snapshot
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import Box, RankBoxes, TensorSpec

PLACE = "extra/atoll"
"""Where in a snapshot a learner's place in its run is."""


def part_of_rank(root: Path, rank: int, file: str) -> Path:
    """Where a rank's part lies; `root` is the folder of rank 0."""
    return root / file if rank == 0 else root / f"rank-{rank}" / file


def saved_boxes(part: Snapshot) -> tuple[RankBoxes, ...]:
    """Of all ranks when it was saved; empty: it was one process."""
    place = part.states.get(PLACE)
    state: dict[str, Any] = {} if place is None else Unpacking(part.tensors).unpack(place)
    return msgspec.convert(state.get("boxes", ()), tuple[RankBoxes, ...])


def make_whole_boxes(tensors: Sequence[TensorSpec]) -> RankBoxes:
    """Of one process."""
    return tuple(Box(one.name, (0,) * len(one.shape), one.shape) for one in tensors)


def refit(first: Snapshot, root: Path, file: str, own: RankBoxes, tensors: Sequence[TensorSpec]) -> Snapshot:
    """What a rank with these boxes goes on with. `first`: rank 0's part. ConfigError: a part is not there."""
    before = saved_boxes(first) or (make_whole_boxes(tensors),)
    now = {box.tensor: box for box in own}
    with ExitStack() as open_files:
        parts = [_Part(first.tensors, {box.tensor: box for box in before[0]})]
        for rank, boxes in enumerate(before[1:], start=1):
            path = part_of_rank(root, rank, file)
            try:
                held = open_files.enter_context(safe_open(path, "pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"the part of rank {rank} cannot be read: {path}: {error}") from error
            names = held.keys()
            slices = {name: held.get_slice(name) for name in names}
            parts.append(_Part(slices, {box.tensor: box for box in boxes}))
        made = {
            name: tensor if (of := _find_parameter(name, now)) is None else _assemble(name, tensor, now[of], of, parts)
            for name, tensor in first.tensors.items()
        }
    return Snapshot(made, first.states, first.rng)


class _Part:
    """What a rank saved: tensors, or slices that are read when they are asked for."""

    def __init__(self, tensors: Mapping[str, Any], boxes: Mapping[str, Box]) -> None:
        self.tensors, self.boxes = tensors, boxes


def _find_parameter(name: str, boxes: Mapping[str, Box]) -> str | None:
    """The parameter that a tensor of an optimizer's state belongs to."""
    if not name.startswith("optimizer"):
        return None
    words = name.split("/")
    return next((word for word in words if word in boxes), None)


def _assemble(name: str, tensor: torch.Tensor, own: Box, parameter: str, parts: Sequence[_Part]) -> torch.Tensor:
    """A tensor that is not cut like its parameter (a count of steps) stays as it is."""
    if tuple(tensor.shape) != parts[0].boxes[parameter].sizes:
        return tensor
    made = torch.zeros(own.sizes, dtype=tensor.dtype)
    for part in parts:
        held = part.boxes[parameter]
        starts = [max(a, b) for a, b in zip(own.offsets, held.offsets, strict=True)]
        stops = [min(a + n, b + m) for a, n, b, m in zip(own.offsets, own.sizes, held.offsets, held.sizes, strict=True)]
        if name in part.tensors and all(a < b for a, b in zip(starts, stops, strict=True)):
            there = tuple(slice(a - at, b - at) for a, b, at in zip(starts, stops, held.offsets, strict=True))
            here = tuple(slice(a - at, b - at) for a, b, at in zip(starts, stops, own.offsets, strict=True))
            made[here] = part.tensors[name][there]
    return made
