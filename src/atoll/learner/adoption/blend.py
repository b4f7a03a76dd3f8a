"""A share α of the learner's own values stays: θ ← αθ + (1 − α)Θ."""

from __future__ import annotations

import torch

from atoll.learner.model import copy_into


def adopt(own: list[torch.Tensor], new: list[torch.Tensor], *, blend: float, read: list[torch.Tensor] | None) -> None:
    mixed = torch._foreach_mul([tensor.float() for tensor in own], blend)
    torch._foreach_add_(mixed, new, alpha=1.0 - blend)
    copy_into(own, mixed)
