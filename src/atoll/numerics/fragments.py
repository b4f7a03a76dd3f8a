"""How a model's tensors become fragments, the units of communication.

Rules kept here:
- every tensor is in exactly one fragment, and no fragment is empty;
- a plan follows from the tensors' names, shapes and dtypes, the count and the strategy alone: never from the order in
  which the model lists them;
- two sides that hold the same fingerprint agree on every byte's place; `difference` says where they do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate
from math import prod

import msgspec

from atoll.choices import PLAN
from atoll.protocol.errors import PlanError
from atoll.protocol.messages import TensorSpec

MOST = 24
"""The paper's number of fragments; smaller models have as many as they have tensors."""
DTYPES = ("float32", "bfloat16", "float16")
MOST_ELEMENTS = 1 << 48
"""In one tensor: a petabyte is no model."""

Bins = list[list[TensorSpec]]
Rows = tuple[tuple[int, int], ...]
"""Per tensor of an array, in order: how many rows it has, and how many values are in each."""


class Fragment(msgspec.Struct, frozen=True):
    index: int
    tensors: tuple[TensorSpec, ...]
    """In order of name, as they lie one after the other in the fragment's array."""
    offsets: tuple[int, ...]
    """The element at which each tensor starts."""
    size: int
    """Elements of all its tensors."""

    @property
    def buffers(self) -> slice:
        """The elements that are buffers: by their names they lie side by side. Empty for most fragments."""
        both = zip(self.tensors, self.offsets, strict=True)
        held = [(start, start + elements(tensor)) for tensor, start in both if tensor.buffer_rule]
        return slice(held[0][0], held[-1][1]) if held else slice(0, 0)


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


def elements(tensor: TensorSpec) -> int:
    return prod(tensor.shape)


def row_lengths(tensors: Sequence[TensorSpec]) -> Rows:
    """Rows are what the first dimension counts; a tensor of fewer than two dimensions is one row."""
    counts = [tensor.shape[0] if len(tensor.shape) >= 2 else 1 for tensor in tensors]
    return tuple((count, elements(tensor) // count) for tensor, count in zip(tensors, counts, strict=True))


def default_fragments(tensors: int) -> int:
    return min(MOST, tensors)


def make_plan(tensors: Sequence[TensorSpec], count: int, strategy: str = "balanced") -> FragmentPlan:
    """Deal the tensors into `count` fragments. PlanError says what is wrong, and the fix."""
    by = PLAN.load(strategy)
    _check(tensors, count)
    bins = by.deal(sorted(tensors, key=lambda tensor: tensor.name), count)
    fragments = tuple(_fragment(index, held) for index, held in enumerate(bins))
    return FragmentPlan(strategy, fragments, _fingerprint(strategy, fragments))


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
    have = len(tensors)
    if not have:
        raise PlanError("the model has no tensors to train: give the learner a model with trainable parameters")
    if count < 1:
        raise PlanError(f"{count} fragments asked for: ask for 1 to {have} (--set fragments={default_fragments(have)})")
    if count > have:
        raise PlanError(
            f"{count} fragments asked for, but the model has {have} tensors: "
            f"ask for {have} or fewer (--set fragments={have})"
        )
    seen: set[str] = set()
    for tensor in tensors:
        _check_tensor(tensor, seen)
        seen.add(tensor.name)


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


def _fragment(index: int, held: list[TensorSpec]) -> Fragment:
    tensors = tuple(sorted(held, key=lambda tensor: tensor.name))
    sizes = [elements(tensor) for tensor in tensors]
    return Fragment(index, tensors, _starts(sizes), sum(sizes))


def _starts(sizes: list[int]) -> tuple[int, ...]:
    return tuple(accumulate(sizes[:-1], initial=0))


def _fingerprint(strategy: str, fragments: tuple[Fragment, ...]) -> str:
    layout = msgspec.json.encode(("atoll plan 1", strategy, [fragment.tensors for fragment in fragments]))
    return hashlib.sha256(layout).hexdigest()
