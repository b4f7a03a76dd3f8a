"""What of a model is not merged: frozen parameters, and buffers that stay each learner's own.

Where they differ between learners the run trains something else than its user thinks, and no figure shows it. So their
digest is compared with the run's, which is that of its first learner, when a learner joins. Now and then it is looked
whether a frozen parameter has begun to train, or a tensor that takes part was replaced by another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeAlias

import torch
from torch import nn

from atoll.learner.model import BufferRule, merged, merged_buffers, persistent_buffers
from atoll.learner.names import named_parameters
from atoll.learner.plain import Packing
from atoll.learner.snapshot import Snapshot
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import buffer_name

FrozenRule: TypeAlias = Literal["refuse", "mine"]
LOOK_EVERY = 20
"""Steps between two looks at the model: one takes about as long as a few kernels."""


def unmerged_tensors(model: nn.Module, buffers: BufferRule) -> Iterator[tuple[str, torch.Tensor]]:
    """By their names in the model, frozen parameters first."""
    for name, parameter in named_parameters(model):
        if not parameter.requires_grad:
            yield name, parameter
    taking_part = merged_buffers(model, buffers)
    for _, name, buffer in persistent_buffers(model):
        if name not in taking_part:
            yield name, buffer


def digest_unmerged(model: nn.Module, buffers: BufferRule = None) -> str:
    """Of names, shapes, types and values; in hex."""
    found = sorted(unmerged_tensors(model, buffers), key=lambda one: one[0])
    with ThreadPoolExecutor() as threads:  # a large frozen model takes seconds; hashing leaves the interpreter free
        marks = list(threads.map(_mark, (tensor for _, tensor in found)))
    lines = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype} {mark}" for (name, tensor), mark in zip(found, marks, strict=True)
    ]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _mark(tensor: torch.Tensor) -> str:
    """Of its bytes; of a kind that has none to be read (sharded, quantised by a class of its own), nothing."""
    values = tensor.data
    if type(values) is not torch.Tensor or values.layout != torch.strided or values.is_meta:
        return ""
    plain = values.cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(plain.numpy().data, digest_size=16).hexdigest()


class Unmerged:
    def __init__(self, model: nn.Module, buffers: BufferRule, rule: FrozenRule) -> None:
        self._model, self._buffers, self._rule = model, buffers, rule
        self.digest = ""
        """Empty: it is not to be compared."""
        self._merged: dict[str, torch.Tensor] = {}

    def describe(self) -> None:
        """As the script made it, before anything of an earlier life or of the run is in it."""
        self._merged = merged(self._model, self._buffers)
        self.digest = "" if self._rule == "mine" else digest_unmerged(self._model, self._buffers)

    def capture(self) -> Snapshot:
        """A copy by names in the model, to be exported; empty where all of the model is merged."""
        packing = Packing()
        for name, tensor in unmerged_tensors(self._model, self._buffers):
            packing.keep(name, tensor)
        packing.settle()
        return Snapshot(packing.tensors, {})

    def compare(self, run: str) -> None:
        """With the run's first learner; ConfigError where they differ."""
        if self.digest and run and self.digest != run:
            raise ConfigError(
                "frozen parameters or buffers are not those of the run's first learner: load them from the same file "
                'or draw them after the same torch.manual_seed, or let them differ with Learner(frozen="mine")'
            )

    def look(self, t: int) -> None:
        """Between two steps; ConfigError names what is trained and not merged."""
        if t != 1 and t % LOOK_EVERY != 0:
            return
        for name, parameter in named_parameters(self._model):
            if parameter.requires_grad:
                self._check(name, name, parameter)
        for name, buffer in merged_buffers(self._model, self._buffers).items():
            self._check(buffer_name(self._buffers or "mean", name), name, buffer)

    def _check(self, key: str, name: str, tensor: torch.Tensor) -> None:
        if (known := self._merged.get(key)) is tensor:
            return
        if known is None:
            raise ConfigError(
                f"parameter '{name}' has begun to train, but was frozen when this learner joined, so it is not merged: "
                "set requires_grad before the Learner is entered, with a learning rate of 0 until its time comes, "
                "or keep it frozen"
            )
        raise ConfigError(
            f"'{name}' is another tensor than when this learner joined, so it is not merged: write into the old one "
            "(load_state_dict, copy_), or replace it before the Learner is entered"
        )
