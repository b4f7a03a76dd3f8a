"""Which tensors of a model take part, and which models cannot.

Taking part: every trained parameter, once (tied weights are one tensor), and buffers by choice. Frozen parameters stay
out (unmerged.py). Buffers are merged by one of these rules:

    None      running statistics (BatchNorm) by "mean", all other buffers stay each learner's own
    "local"   every learner keeps its own; the run's model has none
    "mean"    all persistent buffers of floating point are averaged, weighted like the parameters
    "first"   the same ones are those of a round's first member, in order of names

Buffers of other types than parameters may have (counters of batches) are never merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from atoll.learner.names import named_modules, named_parameters, strip_wrappers
from atoll.protocol.errors import ConfigError, PlanError
from atoll.protocol.messages import TensorSpec, buffer_name

BufferRule: TypeAlias = Literal["local", "mean", "first"] | None
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


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
    if type(parameter.data) is not torch.Tensor:
        kind = type(parameter.data).__name__
        raise PlanError(f"parameter '{name}' is a {kind}: sharded and quantised parameters are not supported yet")
    if parameter.numel() == 0:
        raise PlanError(f"parameter '{name}' is empty: leave it out, or set requires_grad = False")
