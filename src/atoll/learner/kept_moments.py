"""Which moments an inner optimizer keeps of a parameter: what `share = "moments"` averages.

`kept_moments(optimizer, group)` says it for the parameters of one group. An optimizer of another class is added by one
function, before the learner is entered:

    @atoll.kept_moments.register(Lion)
    def of_lion(optimizer, group):
        return atoll.KeptMoments("mean", ("exp_avg",), (group["betas"][1],))

A subclass has those of its class, if nothing else is registered for it. What is not named, such as `step`, stays local.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from atoll.protocol.errors import ConfigError


class KeptMoments(NamedTuple):
    form: str
    """One of `FORMS` in numerics/moments.py: only moments of equal forms are averaged."""
    keys: tuple[str, ...]
    """Of the optimizer's state, in the order of the form; each is of the parameter's shape."""
    decays: tuple[float, ...]
    """What a step leaves of each: with adopt = "carry" an average counts for less with every step made meanwhile."""


@singledispatch
def kept_moments(optimizer: Optimizer, group: dict[str, Any]) -> KeptMoments | None:
    """None: it keeps none of this group's parameters. ConfigError: they cannot be shared."""
    raise ConfigError(
        f'share = "moments" does not know what {type(optimizer).__name__} keeps: use Adam, AdamW, SGD with momentum or '
        "Muon, register it (help(atoll.kept_moments)), or leave share out"
    )


@kept_moments.register(torch.optim.Adam)
@kept_moments.register(torch.optim.AdamW)
def _of_adam(optimizer: Optimizer, group: dict[str, Any]) -> KeptMoments:
    if group.get("amsgrad"):
        raise ConfigError('share = "moments" cannot average the maxima that amsgrad keeps: leave one of the two out')
    return KeptMoments("adam", ("exp_avg", "exp_avg_sq"), tuple(map(float, group["betas"])))


@kept_moments.register(torch.optim.SGD)
def _of_sgd(optimizer: Optimizer, group: dict[str, Any]) -> KeptMoments | None:
    momentum = float(group["momentum"])
    return KeptMoments("momentum", ("momentum_buffer",), (momentum,)) if momentum else None


def _of_muon(optimizer: Optimizer, group: dict[str, Any]) -> KeptMoments | None:
    momentum = float(group["momentum"])
    return KeptMoments("mean", ("momentum_buffer",), (momentum,)) if momentum else None


if hasattr(torch.optim, "Muon"):  # since torch 2.9
    kept_moments.register(torch.optim.Muon, _of_muon)
