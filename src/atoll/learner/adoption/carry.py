"""The version, and the steps it does not contain yet: θ ← Θ + (θ − θ_read)."""

from __future__ import annotations

import torch

from atoll.learner.model import copy_into


def adopt(own: list[torch.Tensor], new: list[torch.Tensor], *, blend: float, read: list[torch.Tensor] | None) -> None:
    assert read is not None, "carry is given the copy that the version contains, or the base"
    carried = torch._foreach_sub([tensor.float() for tensor in own], read)
    torch._foreach_add_(carried, new)
    copy_into(own, carried)
