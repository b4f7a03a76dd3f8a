"""Which tensors of a model take part in a run, under which names, and which models cannot.

Every trained parameter takes part, once (tied weights are one tensor). Frozen parameters do not (unmerged.py). Buffers
are merged by one of these rules:

    None      running statistics (BatchNorm) by "mean", all other buffers stay each learner's own
    "local"   every learner keeps its own; the run's model has none
    "mean"    all persistent floating point buffers are averaged, weighted like the parameters
    "first"   the same buffers are taken from a round's first member, in order of names

Buffers of other types than parameters may have (counters of batches) are never merged.

Names are those of the bare model. torch.compile puts `_orig_mod.` before the names of what it wraps, DataParallel and
AveragedModel `module.`, activation checkpointing and FSDP prefixes of their own. Plan, snapshots, peers' states and
exports use the names without them, so a compiled and a plain learner share a run, and an export loads into the bare
model. Models have modules called `module` of their own, so that is stripped only where torch's wrappers put it.

A learner is one process, or all ranks of a process group (ranks.py): then a rank has a part of each tensor, or a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from atoll.learner.ranks import is_dtensor, take_local
from atoll.numerics.fragments import Piece
from atoll.protocol.errors import ConfigError, PlanError
from atoll.protocol.messages import TensorSpec, buffer_name

BufferRule: TypeAlias = Literal["local", "mean", "first"] | None
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def check_model(model: object) -> None:
    """TypeError says what was given in place of a model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"'model' is of type {type(model).__name__}: give the torch.nn.Module itself")


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that take part, by name; PlanError names the first one that cannot."""
    parameters = {name: p for name, p in named_parameters(model) if p.requires_grad}
    if not parameters:
        raise PlanError("the model has no trained parameters: every one has requires_grad = False")
    for name, parameter in parameters.items():
        _check(name, parameter)
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        places = ", ".join(sorted(str(device) for device in devices))
        raise PlanError(
            f"the model's parameters lie on several devices ({places}): move it to one with model.to(device)"
        )
    return parameters


def merged_buffers(model: nn.Module, rule: BufferRule = None) -> dict[str, torch.Tensor]:
    """The buffers that take part, by their names in the model."""
    if rule == "local":
        return {}
    return {
        name: buffer
        for module, name, buffer in persistent_buffers(model)
        if (rule is not None or getattr(module, "track_running_stats", False))
        and buffer.dtype in DTYPES
        and buffer.numel() > 0
    }


def persistent_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Every buffer that a state_dict holds, once, with its module and its name."""
    seen = {id(parameter) for parameter in model.parameters()}
    for prefix, module in named_modules(model):
        for name, buffer in module.named_buffers(prefix, recurse=False):
            passing = name.rpartition(".")[2] in module._non_persistent_buffers_set
            if not passing and id(buffer) not in seen:
                seen.add(id(buffer))
                yield module, name, buffer


def merged(model: nn.Module, rule: BufferRule = None) -> dict[str, torch.Tensor]:
    """All tensors that take part, by their names in the plan."""
    buffers = merged_buffers(model, rule)
    return {**trained(model), **{buffer_name(rule or "mean", name): buffer for name, buffer in buffers.items()}}


@torch.no_grad()
def merged_here(model: nn.Module, rule: BufferRule = None) -> dict[str, torch.Tensor]:
    """Of each, the part that this rank holds: all of it where there is one rank."""
    return {name: take_local(tensor) for name, tensor in merged(model, rule).items()}


def describe(model: nn.Module, rule: BufferRule = None) -> tuple[TensorSpec, ...]:
    """What the fragment plan depends on; PlanError names the first tensor that cannot take part."""
    for name, buffer in merged_buffers(model, rule).items():
        if not bool(torch.isfinite(buffer).all()):
            raise PlanError(
                f"buffer '{name}' holds values that are not finite, which cannot be merged: "
                f'register it with persistent=False, or use Learner(buffers="local")'
            )
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    return tuple(
        TensorSpec(name, tuple(p.shape), DTYPES[p.dtype], embedding=id(p) in embeddings)
        for name, p in merged(model, rule).items()
    )


def view_piece(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The rows of the piece, whatever the tensor's strides. Make it anew for every use: a script may give a parameter
    other memory (`parameter.data = …`)."""
    return tensor if piece.is_whole else tensor.detach().narrow(0, piece.first, piece.rows)


def copy_into(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Each in its own type, with a call for each type: given several, older torch writes all of them on CUDA as if they
    were of the first one's (pytorch issue 173383, mended in 2026)."""
    for dtype in {tensor.dtype for tensor in tensors}:
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        torch._foreach_copy_([tensors[place] for place in places], [values[place] for place in places])


def load_weights(model: nn.Module, path: Path) -> None:
    """Pretrained weights from a safetensors file, for every trained parameter, before the run begins."""
    try:
        held = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read the weights to begin with from {path}: {error}") from error
    parameters = trained(model)
    if not parameters.keys() <= held.keys():
        held = strip_wrappers(held)  # it was saved from a compiled or wrapped model
    for name, parameter in parameters.items():
        if name not in held:
            raise ConfigError(f"{path} holds no weights for '{name}': it is of another model")
        if held[name].shape != parameter.shape:
            here, there = tuple(parameter.shape), tuple(held[name].shape)
            raise ConfigError(f"{path} is of another model: '{name}' is {here} here, {there} in the file")
        if is_dtensor(parameter):
            raise ConfigError("weights to begin with are loaded before a model is sharded: leave out --init")
        parameter.data.copy_(held[name])


def _check(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise PlanError(f"parameter '{name}' has no shape yet (a lazy module): run one batch through the model first")
    if parameter.dtype not in DTYPES:
        kind = str(parameter.dtype).removeprefix("torch.")
        raise PlanError(f"parameter '{name}' is {kind}, which Atoll cannot merge: use float32, bfloat16 or float16")
    if parameter.is_meta:
        raise PlanError(f"parameter '{name}' has no memory yet (meta device): materialise the model first")
    if parameter.is_sparse or parameter.layout != torch.strided:
        raise PlanError(f"parameter '{name}' is sparse, which Atoll cannot merge: use a dense tensor")
    if type(parameter.data) is not torch.Tensor and not is_dtensor(parameter):
        kind = type(parameter.data).__name__
        raise PlanError(f"parameter '{name}' is a {kind}: quantised parameters are not supported yet")
    if parameter.numel() == 0:
        raise PlanError(f"parameter '{name}' is empty: leave it out, or set requires_grad = False")


# ---- names without wrappers -----------------------------------------------------------------------------------------

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


def renamed_tensors(model: nn.Module) -> list[str]:
    """Parameters and persistent buffers that `state_dict()` has not under their own names: hooks of the model make
    others of them. torchtitan's fused qkv is split there."""
    wrapped = _wrapped(model)
    try:
        held = {_bare(name, wrapped) for name in model.state_dict()}
    except Exception:  # hooks of the script's own; without their names nothing can be said
        return []
    names = [*(name for name, _ in named_parameters(model)), *(name for _, name, _ in persistent_buffers(model))]
    return [name for name in names if name not in held]


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


# ---- what cannot be a part of a learner -----------------------------------------------------------------------------


def refuse_old_shards(model: nn.Module) -> None:
    """ConfigError: the model is sharded in a way that leaves no tensor of its own shape on any rank."""
    for name, module in model.named_modules():
        if _is_of(type(module), "FullyShardedDataParallel"):
            where = f"'{name}'" if name else "the model"
            raise ConfigError(
                f"{where} is sharded by FullyShardedDataParallel, which flattens its tensors: "
                "use torch.distributed.fsdp.fully_shard (FSDP2)"
            )


def _is_of(kind: type, name: str) -> bool:
    """By name: to import them costs every learner a second, and a model that is one has them imported already."""
    return any(one.__name__ == name and one.__module__.startswith("torch.distributed") for one in kind.__mro__)
