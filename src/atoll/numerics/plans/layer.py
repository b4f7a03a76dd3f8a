"""Whole blocks dealt in strides over the fragments after the first; what is outside of blocks is the first.

Blocks are never split, whatever their size: who asks for this plan wants the layers of a fragment to move together.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.numerics.fragments import Bins, whole
from atoll.protocol.errors import PlanError
from atoll.protocol.messages import TensorSpec

Units = list[list[TensorSpec]]


def most_fragments(tensors: Sequence[TensorSpec]) -> int:
    return 1 + len(_blocks(tensors)) if _outside(tensors) else 1


def deal(tensors: Sequence[TensorSpec], count: int) -> Bins:
    return deal_strides("layer", "blocks", tensors, _blocks(tensors), count)


def _blocks(tensors: Sequence[TensorSpec]) -> Units:
    blocks: dict[tuple[str, int], list[TensorSpec]] = {}
    for tensor in tensors:
        if block := find_block(tensor.name):
            blocks.setdefault(block, []).append(tensor)
    return [blocks[block] for block in sorted(blocks)]


def _outside(tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [tensor for tensor in tensors if find_block(tensor.name) is None]


def deal_strides(plan: str, unit: str, tensors: Sequence[TensorSpec], units: Units, count: int) -> Bins:
    if count == 1:
        return [list(map(whole, tensors))]
    outside = _outside(tensors)
    if not outside or not units:
        which = "tensors outside of blocks" if not outside else "blocks (names such as 'blocks.3.mlp.weight')"
        raise PlanError(f'plan "{plan}" leaves a fragment empty, the model has no {which}: use plan "balanced"')
    if count > len(units) + 1:
        most = len(units) + 1
        raise PlanError(
            f'plan "{plan}" leaves a fragment empty, {count} were asked for and the model has {len(units)} {unit}: '
            f'ask for {most} or fewer (--set fragments={most}), or use plan "balanced"'
        )
    dealt = [units[first :: count - 1] for first in range(count - 1)]
    return [list(map(whole, outside)), *([whole(tensor) for unit in share for tensor in unit] for share in dealt)]


def find_block(name: str) -> tuple[str, int] | None:
    """What comes before the first number in a dotted name, and that number: ("blocks", 3) of blocks.3.mlp.weight."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isascii() and part.isdigit():
            return ".".join(parts[:place]), int(part)
    return None
