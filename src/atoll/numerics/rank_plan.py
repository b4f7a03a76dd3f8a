"""What one rank of a learner holds of each fragment, and where that lies in the whole fragment's array.

A rank holds boxes of tensors (`protocol.messages.Box`). Its plan is a `FragmentPlan` of the boxes: fragment f has the
parts of the whole plan's fragment f that lie in them, as pieces of tensors of the boxes' shapes. Rules kept here:

- the boxes that all ranks of a learner send tile every tensor exactly once (`check_tiling`);
- in a fragment's array, pieces that the rank sends come first, so that what it sends is the front of the array; then in
  order of name and row. A fragment of which the rank holds nothing is empty;
- values are only moved: ranks' bodies in fp32 and bf16, which encode each value for itself, give the bits that the body
  of the whole fragment gives. In codecs with blocks (int8, int4, topk) a box's rows are rows of its own: where it cuts
  columns, and with topk also where it cuts rows, blocks begin elsewhere, so numbers are rounded differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from types import EllipsisType
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import (
    Fragment,
    FragmentPlan,
    Piece,
    elements,
    lay_out_plan,
)
from atoll.protocol.errors import PlanError
from atoll.protocol.messages import Box, RankBoxes, TensorSpec


class PlaceInWhole(NamedTuple):
    """Where a rank's piece lies in the array of the whole fragment."""

    values: slice
    """Of the whole plan's piece that it is a part of …"""
    shape: tuple[int, ...]
    """… which has this shape, …"""
    part: tuple[slice, ...]
    """… and the part of it."""

    def find_in(self, whole: FloatArray) -> FloatArray:
        """A view; strided where the box cuts columns."""
        part: tuple[slice | EllipsisType, ...] = (*self.part, ...)  # so that a scalar is a view too
        return whole[self.values].reshape(self.shape)[part]


class RankPlan(msgspec.Struct, frozen=True):
    whole: FragmentPlan
    """What it is a part of: the model, or what a shard of the syncer holds of it …"""
    boxes: RankBoxes
    """… and by which boxes."""
    plan: FragmentPlan
    """Of what the rank holds. Fragments may be empty, all of them too."""
    fragments_sent: tuple[Fragment, ...]
    places: tuple[tuple[PlaceInWhole, ...], ...]
    """Per fragment, of each piece."""

    def sent(self, fragment: int) -> Fragment:
        """What the rank sends of this fragment: the leading pieces, a prefix of the fragment's array."""
        return self.fragments_sent[fragment]

    def scatter(self, fragment: int, sent_values: FloatArray, whole: FloatArray) -> None:
        """Write what the rank sent (an array of `sent(fragment)`) to its place in the whole fragment's array."""
        for (piece, part), place in zip(self.sent(fragment).parts, self.places[fragment], strict=False):
            place.find_in(whole)[...] = sent_values[part].reshape(piece.shape)

    def take(self, fragment: int, whole: FloatArray, local: FloatArray) -> None:
        """Fill the rank's array of this fragment, also what it does not send, from the whole fragment's array."""
        for (piece, part), place in zip(self.plan.fragments[fragment].parts, self.places[fragment], strict=True):
            local[part].reshape(piece.shape)[...] = place.find_in(whole)


def make_rank_plan(plan: FragmentPlan, boxes: RankBoxes) -> RankPlan:
    """Of boxes that `check_tiling` has let through."""
    return make_rank_plans(plan, [boxes])[0]


def make_rank_plans(plan: FragmentPlan, ranks: Sequence[RankBoxes]) -> tuple[RankPlan, ...]:
    """The same for all ranks of a learner."""
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    wholes = [[WholePiece(piece, piece.shape, values) for piece, values in part.parts] for part in plan.fragments]
    return tuple(_plan_rank(plan, wholes, tensors, boxes) for boxes in ranks)


class WholePiece(NamedTuple):
    """Of the whole plan, and where it lies in its fragment's array."""

    piece: Piece
    shape: tuple[int, ...]
    values: slice


def _plan_rank(
    of: FragmentPlan, wholes: list[list[WholePiece]], tensors: dict[str, TensorSpec], boxes: RankBoxes
) -> RankPlan:
    # A shard's part of a model lacks some tensors of the boxes.
    held = {box.tensor: box for box in boxes if 0 not in box.sizes and box.tensor in tensors}
    specs = {name: msgspec.structs.replace(tensors[name], shape=box.sizes) for name, box in held.items()}
    pieces, counts, places = [], [], []
    for fragment in wholes:
        mine = [(whole, held[name]) for whole in fragment if (name := whole.piece.tensor.name) in held]
        found = [part for whole, box in mine if (part := _cut_out(whole, box, specs[box.tensor])) is not None]
        found.sort(key=lambda part: not part[0])  # stable: in order of name and row otherwise
        pieces.append([piece for _, piece, _ in found])
        places.append(tuple(place for _, _, place in found))
        counts.append(sum(sends for sends, _, _ in found))
    plan = lay_out_plan(of.strategy, pieces)
    sent = tuple(_leading(part, count) for part, count in zip(plan.fragments, counts, strict=True))
    return RankPlan(of, boxes, plan, sent, tuple(places))


def _leading(fragment: Fragment, count: int) -> Fragment:
    """Its first pieces."""
    size = fragment.offsets[count] if count < len(fragment.pieces) else fragment.size
    return Fragment(fragment.index, fragment.pieces[:count], fragment.offsets[:count], size)


def _cut_out(whole: WholePiece, box: Box, spec: TensorSpec) -> tuple[bool, Piece, PlaceInWhole] | None:
    """What of a piece lies in the box, and whether it is sent; None: nothing."""
    piece, shape, values = whole
    if not shape:
        return box.sends, Piece(spec, 0, 1), PlaceInWhole(values, (), ())
    offset, size = box.offsets[0], box.sizes[0]
    first, last = max(piece.first, offset), min(piece.first + piece.rows, offset + size)
    if first >= last:
        return None
    columns = [slice(start, start + count) for start, count in zip(box.offsets[1:], box.sizes[1:], strict=True)]
    part = (slice(first - piece.first, last - piece.first), *columns)
    return box.sends, Piece(spec, first - offset, last - first), PlaceInWhole(values, shape, part)


def choose_senders(ranks: Sequence[RankBoxes]) -> tuple[RankBoxes, ...]:
    """Of equal boxes, which replicas hold, the first rank's is sent. Replicas need not be told by a tensor's own mesh:
    FSDP2 beside tensor parallel leaves tensors that only one of the two has cut, equal on ranks of the other."""
    seen: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = set()
    found = []
    for boxes in ranks:
        places = [(box.tensor, box.offsets, box.sizes) for box in boxes]
        pairs = zip(boxes, places, strict=True)
        found.append(tuple(msgspec.structs.replace(box, sends=place not in seen) for box, place in pairs))
        seen.update(place for place in places if 0 not in place[2])
    return tuple(found)


# ---- whether boxes are of a model -----------------------------------------------------------------------------------


class SentBox(NamedTuple):
    rank: int
    box: Box


def check_tiling(tensors: Sequence[TensorSpec], ranks: Sequence[RankBoxes]) -> None:
    """PlanError in one line unless every box is of one of these tensors and inside of it, and those that are sent hold
    every value exactly once."""
    known = {tensor.name: tensor for tensor in tensors}
    sent: dict[str, list[SentBox]] = {tensor.name: [] for tensor in tensors}
    for rank, boxes in enumerate(ranks):
        seen: set[str] = set()
        for box in boxes:
            _check_box(rank, box, known.get(box.tensor), seen)
            seen.add(box.tensor)
            if box.sends and 0 not in box.sizes:
                sent[box.tensor].append(SentBox(rank, box))
    for tensor in tensors:
        _check_disjoint(sent[tensor.name])
        _check_whole(tensor, sent[tensor.name])


def _check_box(rank: int, box: Box, tensor: TensorSpec | None, seen: set[str]) -> None:
    if tensor is None:
        raise PlanError(f"rank {rank} has a box of {box.tensor!r}, which is no tensor of the model")
    if box.tensor in seen:
        raise PlanError(f"rank {rank} has two boxes of {box.tensor!r}: it may have one")
    if not len(box.offsets) == len(box.sizes) == len(tensor.shape):
        raise PlanError(
            f"rank {rank}'s box of {box.tensor!r} has {len(box.offsets)} offsets and {len(box.sizes)} sizes: "
            f"the tensor has {len(tensor.shape)} dimensions"
        )
    sides = zip(box.offsets, box.sizes, tensor.shape, strict=True)
    if any(start + size > length for start, size, length in sides) and 0 not in box.sizes:
        raise PlanError(f"rank {rank}'s {_describe(box)} is outside of the tensor, which has shape {tensor.shape}")


def _check_disjoint(sent: list[SentBox]) -> None:
    """In order of one dimension, each box is compared with those that begin before it ends. The dimension is the one
    with the most beginnings, so these are few, or none."""
    if len(sent) < 2:
        return
    if not sent[0].box.sizes:
        _refuse_overlap(*sent[:2])
    starts = np.array([one.box.offsets for one in sent], dtype=np.int64)
    ends = starts + np.array([one.box.sizes for one in sent], dtype=np.int64)
    along = int(np.argmax([len(set(column)) for column in starts.T.tolist()]))
    order = np.argsort(starts[:, along], kind="stable")
    starts, ends = starts[order], ends[order]
    until = np.searchsorted(starts[:, along], ends[:, along])
    for at in np.flatnonzero(until > np.arange(len(sent)) + 1):
        others = slice(at + 1, until[at])
        meet = (starts[at] < ends[others]) & (starts[others] < ends[at])
        if (both := _first_of(meet.all(axis=1))) is not None:
            _refuse_overlap(sent[order[at]], sent[order[at + 1 + both]])


def _first_of(found: NDArray[np.bool_]) -> int | None:
    return int(found.argmax()) if found.any() else None


def _refuse_overlap(one: SentBox, other: SentBox) -> None:
    one, other = sorted((one, other), key=lambda sent: sent.rank)
    raise PlanError(
        f"rank {one.rank} and rank {other.rank} both send a part of {one.box.tensor!r}: "
        f"{_extent(one.box)} and {_extent(other.box)} overlap"
    )


def _check_whole(tensor: TensorSpec, sent: Iterable[SentBox]) -> None:
    found = sum(prod(box.sizes) for _, box in sent)
    if not found:
        raise PlanError(f"no rank sends {tensor.name!r}")
    if found < elements(tensor):
        ranks = sorted(rank for rank, _ in sent)
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        raise PlanError(
            f"of the {elements(tensor)} values of {tensor.name!r} {found} are sent, by {who}: the others by nobody"
        )


def _describe(box: Box) -> str:
    return f"box of {box.tensor!r}, {_extent(box)},"


def _extent(box: Box) -> str:
    sides = ", ".join(f"{start}:{start + size}" for start, size in zip(box.offsets, box.sizes, strict=True))
    return f"[{sides}]"
