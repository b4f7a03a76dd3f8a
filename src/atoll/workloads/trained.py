"""Everything a data-parallel rank has learned, as named tensors: what is sent to a newcomer and kept in a checkpoint.

Parameters, both moments of AdamW and its count of steps. The optimizer's part is made before its first step, so that
every rank has the same tensors in the same order whether it has trained or not.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from atoll.protocol.errors import ConfigError
from atoll.store.atomic import write_atomic

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"
"""Of the run, in a checkpoint."""


class Trained:
    def __init__(self, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
        self._tensors: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            moments = {moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS}
            optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
            self._tensors[f"parameter.{name}"] = parameter.detach()
            for part, tensor in optimizer.state[parameter].items():
                self._tensors[f"{part}.{name}"] = tensor

    def flat(self) -> Tensor:
        """A copy of all of it in one row."""
        return torch.cat([tensor.flatten() for tensor in self._tensors.values()])

    def take(self, flat: Tensor) -> None:
        sizes = [tensor.numel() for tensor in self._tensors.values()]
        for tensor, part in zip(self._tensors.values(), torch.split(flat, sizes), strict=True):
            tensor.copy_(part.view_as(tensor))

    def digest(self) -> str:
        return hashlib.sha256(self.flat().numpy().tobytes()).hexdigest()

    def save(self, path: Path, step: int) -> None:
        """Whole and durable, or as it was before."""
        write_atomic(path, safetensors.torch.save({**self._tensors, STEP: torch.tensor(step)}))

    def load(self, path: Path) -> int:
        """The step it was saved after; 0, and nothing changed, where nothing was saved."""
        if not path.exists():
            return 0
        saved = safetensors.torch.load_file(path)
        if saved.keys() - {STEP} != self._tensors.keys():
            raise ConfigError(f"{path} is the checkpoint of another model: remove it, or name another folder")
        for name, tensor in self._tensors.items():
            tensor.copy_(saved[name])
        return int(saved[STEP])
