"""Muon for the lockstep loop: torch.optim.Muon, but all matrices of one shape are orthogonalised at once.

torch's works matrix by matrix and reads its learning rate on the host: at depth 10 a thousand kernels a step, each of
them launched from Python. This one has the same few calls however many matrices there are, and takes nothing from the
host, so that it can be in a CUDA graph. Its state is that of torch's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch.optim import Optimizer


class BatchedMuon(Optimizer):
    def __init__(self, muon: Optimizer, lr: torch.Tensor) -> None:
        """`muon`: torch's, whose matrices and settings it takes. `lr`: read at every step, on the device of the
        matrices; of float64, for torch's computes with a float of Python."""
        super().__init__(muon.param_groups, muon.defaults)
        self._lr = lr
        for group in self.param_groups:
            assert group["nesterov"] and group["adjust_lr_fn"] == "match_rms_adamw", "as the workload builds it"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None, "the gradients are there"
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p.grad is not None]
            gradients = [p.grad for p in matrices]
            momenta = [self._find_momentum(p) for p in matrices]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            updates = torch._foreach_lerp(gradients, momenta, group["momentum"])
            torch._foreach_mul_(matrices, (1 - self._lr * group["weight_decay"]).float())
            self._add_updates(matrices, updates, group)

    def _find_momentum(self, matrix: torch.Tensor) -> torch.Tensor:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        found: torch.Tensor = state["momentum_buffer"]
        return found

    def _add_updates(self, matrices: list[torch.Tensor], updates: list[torch.Tensor], group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[int]] = defaultdict(list)
        for place, matrix in enumerate(matrices):
            by_shape[matrix.shape].append(place)
        for shape, places in by_shape.items():
            stacked = torch.stack([updates[place] for place in places]).bfloat16()
            length = self._lr * (-0.2 * math.sqrt(max(shape)))
            added = orthogonalise(stacked, group).float() * length.float()
            torch._foreach_add_([matrices[place] for place in places], list(added.unbind()))


def orthogonalise(stacked: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """[matrices, rows, columns] in bf16: the Newton-Schulz iteration of torch.optim.Muon."""
    a, b, c = group["ns_coefficients"]
    high = stacked.shape[1] > stacked.shape[2]
    x = stacked.mT if high else stacked
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT.contiguous() if high else x
