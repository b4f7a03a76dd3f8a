"""Taking a new version of a fragment into the model, between two steps.

    overwrite   θ ← Θ
    blend       θ ← αθ + (1 − α)Θ
    carry       θ ← Θ + (θ − θ_read), where θ_read is the copy that the version already contains, or the base

The inner optimizer's moments are never touched.
"""

from __future__ import annotations

import torch

from atoll.protocol.tape import AdoptRule


@torch.no_grad()
def adopt(
    own: list[torch.Tensor],
    new: list[torch.Tensor],
    rule: AdoptRule,
    *,
    blend: float = 0.0,
    read: list[torch.Tensor] | None = None,
) -> None:
    """In place, computed in fp32 whatever the parameters' type."""
    if rule == "overwrite":
        torch._foreach_copy_(own, new)
    elif rule == "blend":
        mixed = torch._foreach_mul(_floats(own), blend)
        torch._foreach_add_(mixed, new, alpha=1.0 - blend)
        torch._foreach_copy_(own, mixed)
    else:
        assert read is not None
        carried = torch._foreach_sub(_floats(own), read)
        torch._foreach_add_(carried, new)
        torch._foreach_copy_(own, carried)


def _floats(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.float() for tensor in tensors]
