"""What a learner asks of the library that trains its model: the one place where torch and JAX differ.

    tensors    names, shapes and types of what takes part (`describe`), and the values themselves (`tensors`)
    read       `tensors()[name]` is the tensor as it is now; fragments are copied from it
    adopt      a version is written into `tensors()[name]` in place, and `note_adopted` says so afterwards
    capture    `begin_capture` copies everything that determines the process's future
    restore    `restore` puts that back; `take_peer_state` what a peer gave

Everything here is called by the training thread, between two steps. What travels is a torch tensor on both sides: torch
gives its own parameters, JAX copies of its arrays in host memory (integrations/jax.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from atoll.learner.capture import BegunSnapshot, Stateful
from atoll.learner.copy_room import TakenRoom
from atoll.learner.model import BufferRule, describe, load_weights, merged, merged_here
from atoll.learner.moments import InnerMoments
from atoll.learner.peer_state_checks import take_peer_state
from atoll.learner.ranks import DataShare, RankGroup, find_boxes, find_data_share, reshard
from atoll.learner.snapshot import Snapshot
from atoll.learner.state import Optimizers, begin_capture, large_tensors, optimizers_by_path, restore
from atoll.learner.step_stats import InputDigest
from atoll.learner.unmerged import FrozenRule, UnmergedTensors
from atoll.numerics.fragments import FragmentPlan
from atoll.protocol.messages import RankBoxes, TensorSpec


class TrainedModel(Protocol):
    @property
    def device(self) -> torch.device:
        """Of the values that `tensors` gives."""
        ...

    def describe(self) -> tuple[TensorSpec, ...]:
        """What the fragment plan depends on; PlanError names the first tensor that cannot take part."""
        ...

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """All that take part, by their names in the plan; to be looked up anew for every use."""
        ...

    def note_adopted(self, names: Iterable[str]) -> None:
        """These were written to."""
        ...

    def load_weights(self, path: Path) -> None:
        """Pretrained weights from a safetensors file, before the run begins."""
        ...

    def make_moments(self, plan: FragmentPlan) -> InnerMoments:
        """For a run that shares them; ConfigError: there are none that can be shared."""
        ...

    def begin_capture(
        self,
        extras: Mapping[str, Stateful],
        *,
        parameters: bool = True,
        rng: bool = True,
        room: TakenRoom | None = None,
        steady: Sequence[torch.Tensor] = (),
    ) -> BegunSnapshot:
        """`extras`: what the script registered. Without `parameters`: what a peer or the run does not know."""
        ...

    def restore(
        self, extras: Mapping[str, Stateful], snapshot: Snapshot, *, parameters: bool = True, rng: bool = True
    ) -> None:
        """ConfigError names the first difference, and nothing has changed."""
        ...

    def take_peer_state(self, extras: Mapping[str, Stateful], came: Snapshot) -> None:
        """PeerError says what is wrong with it, and nothing has changed."""
        ...

    def large_tensors(self) -> Iterator[torch.Tensor]:
        """About what `begin_capture` copies, in its order."""
        ...

    def reset_optimizer(self) -> bool:
        """It starts afresh; False: there is none."""
        ...

    def find_unmerged(self, rule: FrozenRule) -> UnmergedTensors: ...
    def watch_inputs(self, wanted: Callable[[], bool]) -> InputDigest: ...


class TorchModel:
    """A `torch.nn.Module` and its inner optimizers."""

    def __init__(self, module: nn.Module, optimizers: Optimizers = None, buffers: BufferRule = None) -> None:
        self.module, self._optimizers, self._buffers = module, optimizers, buffers

    @property
    def device(self) -> torch.device:
        trained_first = sorted(self.module.parameters(), key=lambda parameter: not parameter.requires_grad)
        return next((parameter.device for parameter in trained_first), torch.device("cpu"))

    def describe(self) -> tuple[TensorSpec, ...]:
        return describe(self.module, self._buffers)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Of each, the part that this rank holds."""
        return merged_here(self.module, self._buffers)

    def note_adopted(self, names: Iterable[str]) -> None:
        pass

    def load_weights(self, path: Path) -> None:
        load_weights(self.module, path)

    def make_moments(self, plan: FragmentPlan) -> InnerMoments:
        return InnerMoments(plan, self.tensors(), self._optimizers)

    def begin_capture(
        self,
        extras: Mapping[str, Stateful],
        *,
        parameters: bool = True,
        rng: bool = True,
        room: TakenRoom | None = None,
        steady: Sequence[torch.Tensor] = (),
    ) -> BegunSnapshot:
        capture = partial(begin_capture, self.module, self._optimizers, extras, buffers=self._buffers)
        return capture(parameters=parameters, rng=rng, room=room, steady=steady)

    def restore(
        self, extras: Mapping[str, Stateful], snapshot: Snapshot, *, parameters: bool = True, rng: bool = True
    ) -> None:
        what = (self.module, self._optimizers, extras, snapshot)
        restore(*what, parameters=parameters, rng=rng, buffers=self._buffers)

    def take_peer_state(self, extras: Mapping[str, Stateful], came: Snapshot) -> None:
        take_peer_state(self.module, self._optimizers, extras, came, self._buffers)

    def large_tensors(self) -> Iterator[torch.Tensor]:
        return large_tensors(self.module, self._optimizers, self._buffers)

    def reset_optimizer(self) -> bool:
        found = optimizers_by_path(self._optimizers)
        for optimizer in found.values():
            optimizer.state.clear()
        return bool(found)

    def find_unmerged(self, rule: FrozenRule) -> UnmergedTensors:
        return UnmergedTensors(self.module, self._buffers, rule)

    def watch_inputs(self, wanted: Callable[[], bool]) -> InputDigest:
        return InputDigest(self.module, wanted)

    # ---- a learner of several ranks -----------------------------------------------------------------------------

    def find_boxes(self, rank: int) -> RankBoxes:
        return find_boxes(merged(self.module, self._buffers), rank)

    def find_data_share(self, ranks: RankGroup) -> DataShare:
        return find_data_share(ranks, self.module)

    def reshard(self) -> None:
        reshard(self.module)


def as_torch(trained: TrainedModel) -> TorchModel:
    """That of a learner of several ranks, which only torch has."""
    assert isinstance(trained, TorchModel)
    return trained
