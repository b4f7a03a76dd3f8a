"""The names of a model's tensors as the bare model has them, whatever it is wrapped in.

torch.compile puts `_orig_mod.` before the names of what it wraps, DataParallel and AveragedModel `module.`, activation
checkpointing and FSDP prefixes of their own. Plan, cuts, peers' states and exports go by the names without them: so a
compiled and a plain learner share a run, and what is exported loads into the bare model. `module` is a name that models
have of their own, so it is stripped only where torch's wrappers put it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from torch import nn

PREFIXES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"})
"""Attributes of wrappers, which no model uses for anything else."""
WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "AveragedModel"})
"""Classes of torch that keep what they wrap as `module`."""

T = TypeVar("T")


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """As `model.named_parameters()` gives them, by their bare names."""
    wrapped = _wrapped(model)
    for name, parameter in model.named_parameters():
        yield _bare(name, wrapped), parameter


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    wrapped = _wrapped(model)
    for name, module in model.named_modules():
        yield _bare(name, wrapped), module


def strip_wrappers(held: Mapping[str, T]) -> dict[str, T]:
    """What a checkpoint holds, by bare names. `module.` goes where all names begin with it: then the model was wrapped
    as a whole."""
    found = {".".join(part for part in name.split(".") if part not in PREFIXES): value for name, value in held.items()}
    while found and all(name.startswith("module.") for name in found):
        found = {name.removeprefix("module."): value for name, value in found.items()}
    return found


def _wrapped(model: nn.Module) -> set[str]:
    """The paths, of modules inside, at which a wrapper keeps what it wraps."""
    return {
        f"{path}.{attribute}".removeprefix(".")
        for path, module in model.named_modules(remove_duplicate=False)
        for attribute in module._modules
        if attribute in PREFIXES or (attribute == "module" and _is_wrapper(type(module)))
    }


def _is_wrapper(kind: type) -> bool:
    return any(one.__name__ in WRAPPERS and one.__module__.startswith("torch.") for one in kind.__mro__)


def _bare(name: str, wrapped: set[str]) -> str:
    if not wrapped:
        return name
    parts = name.split(".")
    return ".".join(part for place, part in enumerate(parts) if ".".join(parts[: place + 1]) not in wrapped)
