"""The model that an evaluator scores, of whatever library the scorer is written for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from atoll.learner.model import BufferRule, describe, merged
from atoll.learner.unmerged import digest_unmerged
from atoll.numerics.fragments import difference
from atoll.protocol.errors import PlanError
from atoll.protocol.messages import TensorSpec


class ScoredModel(Protocol):
    def fit_run(self, tensors: Sequence[TensorSpec], frozen: str) -> Mapping[str, torch.Tensor]:
        """Where the run's tensors are written to, by name; PlanError: they are not those of this model. `frozen` is the
        digest of what the run does not merge."""
        ...

    def hand_over(self) -> Any:
        """What the scorer is given, once all of them are written."""
        ...


class ScoredModule:
    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def fit_run(self, tensors: Sequence[TensorSpec], frozen: str) -> Mapping[str, torch.Tensor]:
        rules: tuple[BufferRule, ...] = (None, "local", "mean", "first")  # which one, the learners' script says
        rule = next((one for one in rules if difference(describe(self._model, one), tensors) is None), None)
        if (reason := difference(describe(self._model, rule), tensors)) is not None:
            raise PlanError(reason)
        if frozen and digest_unmerged(self._model, rule) != frozen:
            raise PlanError(
                "the evaluator's frozen parameters or buffers are not those of the run's first learner: "
                "load them from the same file, or draw them after the same torch.manual_seed"
            )
        return merged(self._model, rule)

    def hand_over(self) -> nn.Module:
        return self._model
