"""The version as it is: θ ← Θ."""

from __future__ import annotations

import torch

from atoll.learner.model import copy_into


def adopt(own: list[torch.Tensor], new: list[torch.Tensor], *, blend: float, read: list[torch.Tensor] | None) -> None:
    copy_into(own, new)
