"""How a model's tensors become fragments, the units of communication.

A fragment holds pieces: whole tensors, or some rows of one. Rules kept here:
- the pieces of a tensor tile it exactly once, and no fragment is empty (a rank's part of one may be);
- a piece is whole rows (first dimension) of a tensor with two dimensions or more, elements of a tensor with one; a
  scalar is never cut. So what works row by row (codecs' blocks, row-wise merging) never sees half a row;
- a plan follows from the tensors' names, shapes and dtypes, the count and the strategy alone: never from the order in
  which the model lists them;
- two sides that hold the same fingerprint agree on every byte's place; `difference` says where they do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from math import prod

import msgspec
import numpy as np

from atoll.choices import PLAN
from atoll.numerics.arrays import FloatArray
from atoll.protocol.errors import PlanError
from atoll.protocol.limits import MANY
from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import USUAL

DTYPES = ("float32", "bfloat16", "float16")
MOST_ELEMENTS = 1 << 48
"""In one tensor: a petabyte is no model."""

Rows = tuple[tuple[int, int], ...]
"""Per piece of an array, in order: how many rows it has, and how many values are in each."""


class Piece(msgspec.Struct, frozen=True, dict=True):
    """Rows of one tensor, next to each other."""

    tensor: TensorSpec
    first: int
    rows: int

    @property
    def is_whole(self) -> bool:
        return self.rows == row_count(self.tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.tensor.shape[1:]) if self.tensor.shape else ()

    @cached_property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def label(self) -> str:
        """For people: the tensor's name, and the rows where they are not all of it."""
        if self.is_whole:
            return self.tensor.name
        return f"{self.tensor.name}[{self.first}:{self.first + self.rows}]"


class Fragment(msgspec.Struct, frozen=True, dict=True):
    index: int
    pieces: tuple[Piece, ...]
    """As they lie one after the other in the fragment's array: in order of name and row. Of a rank's plan
    (rank_plan.py) those that it sends come first."""
    offsets: tuple[int, ...]
    """The element at which each piece starts."""
    size: int
    """Elements of all its pieces."""

    # Every contribution asks for these two, a few times each.
    @cached_property
    def parts(self) -> tuple[tuple[Piece, slice], ...]:
        """Each piece, and where it lies in the fragment's array."""
        both = zip(self.pieces, self.offsets, strict=True)
        return tuple((piece, slice(start, start + piece.size)) for piece, start in both)

    def find_piece(self, rows: Piece) -> int:
        """The number of the piece that these rows are of."""
        for number, piece in enumerate(self.pieces):
            if piece.tensor.name == rows.tensor.name and piece.first <= rows.first < piece.first + piece.rows:
                return number
        raise AssertionError(f"fragment {self.index} holds no such rows of {rows.tensor.name}")

    @cached_property
    def buffers(self) -> slice:
        """The elements that are buffers: by their names they lie side by side. Empty for most fragments."""
        held = [part for piece, part in self.parts if piece.tensor.buffer_rule]
        return slice(held[0].start, held[-1].stop) if held else slice(0, 0)


class FragmentPlan(msgspec.Struct, frozen=True):
    strategy: str
    fragments: tuple[Fragment, ...]
    fingerprint: str

    @property
    def largest(self) -> int:
        """Elements of the largest fragment: what every buffer must hold."""
        return max(fragment.size for fragment in self.fragments)

    @property
    def size(self) -> int:
        return sum(fragment.size for fragment in self.fragments)

    @property
    def starts(self) -> tuple[int, ...]:
        """The element at which each fragment starts in one flat array of the whole model."""
        return _starts([fragment.size for fragment in self.fragments])

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Of the whole model, in order of name."""
        found = {piece.tensor.name: piece.tensor for fragment in self.fragments for piece in fragment.pieces}
        return tuple(found[name] for name in sorted(found))


Bins = list[list[Piece]]


def elements(tensor: TensorSpec) -> int:
    return prod(tensor.shape)


def row_lengths(pieces: Sequence[Piece]) -> Rows:
    """Rows are what the first dimension counts; a piece of fewer than two dimensions is one row."""
    counts = [piece.rows if len(piece.shape) >= 2 else 1 for piece in pieces]
    return tuple((count, piece.size // count) for piece, count in zip(pieces, counts, strict=True))


def row_count(tensor: TensorSpec) -> int:
    """Into how many pieces it can be cut."""
    return tensor.shape[0] if tensor.shape else 1


def whole(tensor: TensorSpec) -> Piece:
    return Piece(tensor, 0, row_count(tensor))


def most_fragments(tensors: Sequence[TensorSpec], strategy: str = "balanced") -> int:
    """The most fragments that this strategy can make of a model."""
    most: int = PLAN.load(strategy).most_fragments(tensors)
    return max(1, min(MANY, most))


def make_plan(tensors: Sequence[TensorSpec], count: int, strategy: str = "balanced") -> FragmentPlan:
    """Deal the tensors into `count` fragments. PlanError says what is wrong, and the fix."""
    by = PLAN.load(strategy)
    _check(tensors, count)
    bins = by.deal(sorted(tensors, key=lambda tensor: tensor.name), count)
    in_order = [sorted(held, key=lambda piece: (piece.tensor.name, piece.first)) for held in bins]
    return lay_out_plan(strategy, in_order)


def lay_out_plan(strategy: str, fragments: Sequence[Sequence[Piece]]) -> FragmentPlan:
    """A plan of these fragments, with the pieces of each in this order."""
    made = tuple(_fragment(index, pieces) for index, pieces in enumerate(fragments))
    return FragmentPlan(strategy, made, _fingerprint(strategy, made))


def assemble_tensors(plan: FragmentPlan, values: Sequence[FloatArray]) -> dict[str, FloatArray]:
    """From every fragment's values, by names in the model: views of them, and copies of what is split."""
    tensors: dict[str, FloatArray] = {}
    for fragment, flat in zip(plan.fragments, values, strict=True):
        for piece, part in fragment.parts:
            name, shape = piece.tensor.name_in_model, piece.tensor.shape
            if piece.is_whole:
                tensors[name] = flat[part].reshape(shape)
                continue
            if name not in tensors:
                tensors[name] = np.empty(shape, dtype=np.float32)
            tensors[name][piece.first : piece.first + piece.rows] = flat[part].reshape(piece.shape)
    return tensors


def difference(ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> str | None:
    """The first difference, by name, between the tensors here and those of the run, as one line; None when equal."""
    here = {tensor.name: tensor for tensor in ours}
    run = {tensor.name: tensor for tensor in theirs}
    for name in sorted(here.keys() | run.keys()):
        if here.get(name) != run.get(name):
            mine, its = _contrast(here.get(name), run.get(name))
            return f"fragment plan differs from the run's: {name!r} is {mine} here, {its} in the run"
    return None


def _contrast(here: TensorSpec | None, run: TensorSpec | None) -> tuple[str, str]:
    if here is None or run is None:
        return _whole(here), _whole(run)
    if here.shape != run.shape:
        return str(here.shape), str(run.shape)
    if here.dtype != run.dtype:
        return here.dtype, run.dtype
    return _role(here), _role(run)


def _whole(tensor: TensorSpec | None) -> str:
    return f"{tensor.shape} {tensor.dtype}" if tensor else "missing"


def _role(tensor: TensorSpec) -> str:
    return "an embedding" if tensor.embedding else "no embedding"


def _check(tensors: Sequence[TensorSpec], count: int) -> None:
    if not tensors:
        raise PlanError("the model has no tensors to train: give the learner a model with trainable parameters")
    seen: set[str] = set()
    for tensor in tensors:
        _check_tensor(tensor, seen)
        seen.add(tensor.name)
    most = min(MANY, sum(map(row_count, tensors)))
    if count < 1:
        raise PlanError(f"{count} fragments asked for: ask for 1 to {most} (--set fragments={min(USUAL, most)})")
    if count > most:
        raise PlanError(
            f"{count} fragments asked for, but the model can be cut into {most} at most, its rows: "
            f"ask for {most} or fewer (--set fragments={most})"
        )


def _check_tensor(tensor: TensorSpec, seen: set[str]) -> None:
    if tensor.name in seen:
        raise PlanError(f"two tensors are named {tensor.name!r}: names must be unique, rename one of them")
    if any(length < 1 for length in tensor.shape):
        raise PlanError(f"{tensor.name!r} has shape {tensor.shape} and so no values: remove it from the model")
    if elements(tensor) > MOST_ELEMENTS:
        raise PlanError(f"{tensor.name!r} has shape {tensor.shape}: no machine holds that many values")
    if tensor.dtype not in DTYPES:
        raise PlanError(
            f"{tensor.name!r} is {tensor.dtype}, which cannot be synced: use {', '.join(DTYPES)}, or freeze it"
        )


def _fragment(index: int, pieces: Sequence[Piece]) -> Fragment:
    sizes = [piece.size for piece in pieces]
    return Fragment(index, tuple(pieces), _starts(sizes), sum(sizes))


def _starts(sizes: list[int]) -> tuple[int, ...]:
    return tuple(accumulate([0, *sizes][:-1]))


def _fingerprint(strategy: str, fragments: tuple[Fragment, ...]) -> str:
    layout = msgspec.json.encode(("atoll plan 2", strategy, [fragment.pieces for fragment in fragments]))
    return hashlib.sha256(layout).hexdigest()
