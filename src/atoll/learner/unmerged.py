"""What of a model is not merged: frozen parameters, and buffers that stay each learner's own.

If they differ between learners, the run trains something else than its user thinks, and no figure shows it. So every
learner that joins compares their digest with the run's, which is that of its first learner. If it differs, the learner
takes a peer's (peer_state_transfer.py, with the inner optimizer), or is refused. Every few steps it checks that no
frozen parameter has begun to train and that no tensor that takes part was replaced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import nn

from atoll.learner.model import (
    BufferRule,
    merged,
    merged_buffers,
    named_parameters,
    persistent_buffers,
    renamed_tensors,
)
from atoll.learner.packing import Json, Packing
from atoll.learner.ranks import take_local
from atoll.learner.script import say
from atoll.learner.snapshot import Snapshot, read
from atoll.protocol.errors import AtollError, ConfigError, PeerError
from atoll.protocol.messages import MOST_NAMED, buffer_name

FrozenRule: TypeAlias = Literal["run", "refuse", "mine"]
FROZEN = "frozen/"
"""Under this prefix a copy for a newcomer holds frozen parameters."""
LOOK_EVERY = 20
"""Steps between two looks at the model: one takes about as long as a few kernels."""


def frozen_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in named_parameters(model) if not parameter.requires_grad}


def local_buffers(model: nn.Module, buffers: BufferRule) -> Iterator[tuple[str, torch.Tensor]]:
    taking_part = merged_buffers(model, buffers)
    for _, name, buffer in persistent_buffers(model):
        if name not in taking_part:
            yield name, buffer


def digest_unmerged(model: nn.Module, buffers: BufferRule = None) -> str:
    """Two of them, of frozen parameters and of local buffers: these change while a learner trains."""
    return f"{digest_tensors(frozen_parameters(model))}-{digest_tensors(dict(local_buffers(model, buffers)))}"


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of names, shapes, types and values; in hex."""
    found = sorted(tensors.items())
    with ThreadPoolExecutor() as threads:  # a large frozen model takes seconds; hashing leaves the interpreter free
        marks = list(threads.map(_mark, (tensor for _, tensor in found)))
    lines = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype} {mark}" for (name, tensor), mark in zip(found, marks, strict=True)
    ]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _mark(tensor: torch.Tensor) -> str:
    """Of its bytes; of a kind that has none to be read (sharded, quantised by a class of its own), nothing.

    BLAKE2b: a newcomer takes frozen parameters from a peer by this digest alone, so a peer would gain by a collision.
    """
    values = tensor.data
    if type(values) is not torch.Tensor or values.layout != torch.strided or values.is_meta:
        return ""
    plain = values.cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(plain.numpy().data, digest_size=16).hexdigest()


class UnmergedTensors:
    def __init__(self, model: nn.Module, buffers: BufferRule, rule: FrozenRule) -> None:
        self._model, self._buffers, self._rule = model, buffers, rule
        self.digest = ""
        """Empty: it is not to be compared."""
        self.names: tuple[str, ...] = ()
        """Tensors that are not merged."""
        self.renamed: tuple[str, ...] = ()
        """Tensors that `state_dict()` of the model has under other names."""
        self._run = ""
        """The run's, once it is known."""
        self._merged: dict[str, torch.Tensor] = {}

    @property
    def takes(self) -> bool:
        """Where they differ, a peer's are taken."""
        return self._rule == "run"

    @property
    def lacking(self) -> bool:
        return bool(self.digest and self._run) and self.digest != self._run

    @property
    def frozen_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in frozen_parameters(self._model).values())

    @torch.no_grad()
    def restore_saved(self, path: Path) -> None:
        """What this learner kept when it began the run, if it was the first and takes the run's."""
        if self.takes and path.exists():
            held = read(path).tensors
            own = {**frozen_parameters(self._model), **dict(local_buffers(self._model, self._buffers))}
            for name, tensor in own.items():
                if name in held and _alike(tensor, held[name]):
                    tensor.copy_(held[name])

    def describe(self) -> None:
        """As the script made it, with what `restore_saved` put back, before anything of the run is in it."""
        self._merged = merged(self._model, self._buffers)
        self.digest = "" if self._rule == "mine" else digest_unmerged(self._model, self._buffers)
        names = [*frozen_parameters(self._model), *(name for name, _ in local_buffers(self._model, self._buffers))]
        self.names, self.renamed = tuple(names[:MOST_NAMED]), tuple(renamed_tensors(self._model)[:MOST_NAMED])

    def capture(self) -> Snapshot:
        """A copy by names in the model, to be exported; empty where all of the model is merged.

        Beside it: which tensors it lacks, and which merged ones `state_dict()` has under other names."""
        packing = Packing()
        left_out: list[Json] = []
        for name, tensor in [*frozen_parameters(self._model).items(), *local_buffers(self._model, self._buffers)]:
            if take_local(tensor).shape == tensor.shape:
                packing.keep(name, take_local(tensor))
            else:
                left_out.append(name)
        packing.settle()
        packing.finish()
        renamed: list[Json] = list(renamed_tensors(self._model))
        return Snapshot(packing.tensors, {"left_out": left_out, "renamed": renamed})

    def copy_frozen(self) -> Mapping[str, torch.Tensor]:
        """For a newcomer, beside the rest of its copy. AtollError: they are not the run's."""
        if self._rule == "mine" or self.lacking:
            raise AtollError("its frozen parameters are not the run's")
        packing = Packing()
        for name, parameter in frozen_parameters(self._model).items():
            packing.keep(FROZEN + name, parameter)
        packing.settle()
        packing.finish()
        return packing.tensors

    def check_frozen(self, came: Snapshot) -> None:
        """PeerError: what a peer gave are not the run's frozen parameters."""
        if not self.lacking:
            return
        held = {name.removeprefix(FROZEN): value for name, value in came.tensors.items() if name.startswith(FROZEN)}
        if digest_tensors(held) != self._run.partition("-")[0]:
            raise PeerError("its frozen parameters are not those of the run's first learner")
        own = frozen_parameters(self._model)
        if own.keys() != held.keys() or any(not _alike(own[name], held[name]) for name in own):
            raise ConfigError("the run's frozen parameters have other names, shapes or types than this script's")

    @torch.no_grad()
    def take_frozen(self, came: Snapshot) -> None:
        if self.lacking:
            for name, parameter in frozen_parameters(self._model).items():
                parameter.copy_(came.tensors[FROZEN + name])
            self.digest = self._run
            say("frozen parameters and buffers were not those of the run's first learner: a peer's are taken")

    def compare(self, run: str) -> None:
        """With the run's first learner; ConfigError where they differ and are not to be taken."""
        self._run = run
        if self.lacking and not self.takes:
            self.refuse()

    def refuse(self) -> None:
        """ConfigError where they still differ."""
        if self.lacking:
            raise ConfigError(
                "frozen parameters or buffers are not those of the run's first learner: load them from the same file "
                'or draw them after the same torch.manual_seed, or let them differ with Learner(frozen="mine")'
            )

    def look(self, t: int) -> None:
        """Between two steps; ConfigError names what is trained and not merged."""
        if t != 1 and (t % LOOK_EVERY != 0 or self._has_the_same_tensors()):
            return
        for name, parameter in named_parameters(self._model):
            if parameter.requires_grad:
                self._check(name, name, parameter)
        for name, buffer in merged_buffers(self._model, self._buffers).items():
            self._check(buffer_name(self._buffers or "mean", name), name, buffer)

    def _has_the_same_tensors(self) -> bool:
        """A look without names takes a tenth of the time: what is trained is merged, what was merged is there."""
        known, found = {id(tensor) for tensor in self._merged.values()}, set()
        for module in self._model.modules():
            for parameter in module._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    found.add(id(parameter))
            found |= {id(buffer) for buffer in module._buffers.values() if id(buffer) in known}
        return found == known

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
