"""The inner optimizers, and their state by the names of their parameters, so that another process can take it.

torch keys it by position; where some parameter of the optimizer has no name in the model, so do we. What is loaded is
what was saved, bit for bit: torch's own loading casts a state to the type of its parameter, which would round what an
optimizer keeps in fp32 for a bf16 parameter.

A script has one optimizer, several in a list, or several by name. Every one of them trains parameters of the model:
what only an optimizer knows would be merged by nobody and be in no export.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from atoll.learner.names import named_parameters
from atoll.protocol.errors import ConfigError

OURS = ("params", "param_names")
"""What a group says of its parameters; each process has its own."""

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None


def by_path(optimizers: Optimizers) -> dict[str, Optimizer]:
    """The optimizers by where they stand in a snapshot; TypeError: it is something else."""
    if optimizers is None:
        return {}
    if isinstance(optimizers, Mapping):
        found = {f"optimizer/{name}": one for name, one in optimizers.items()}
    elif isinstance(optimizers, Sequence):
        found = {f"optimizer/{number}": one for number, one in enumerate(optimizers)}
    else:
        found = {"optimizer": optimizers}
    for path, one in found.items():
        if not isinstance(one, Optimizer):
            raise TypeError(
                f"{path!r} is a {type(one).__name__}: give torch optimizers, one, a list of them, or a dict by name; "
                f"a schedule or whatever else has a state is registered, learner.register(name, it)"
            )
    return found


def check_trained(optimizers: Optimizers, model: nn.Module) -> None:
    """ConfigError names the first optimizer that trains what is no parameter of the model."""
    known = {id(parameter) for parameter in model.parameters()}
    for path, optimizer in by_path(optimizers).items():
        held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        strange = [p for p in held if id(p) not in known]
        if strange and len(strange) == len(held):
            raise ConfigError(
                f"{path!r} ({type(optimizer).__name__}) trains none of the model's parameters: make it after the model "
                f"has its final form, from model.parameters()"
            )
        if strange:
            raise ConfigError(
                f"{path!r} ({type(optimizer).__name__}) trains {len(strange)} tensors that are no parameters of the "
                f"model, the first of shape {tuple(strange[0].shape)}: they would be merged by nobody; make them "
                f"parameters of the model that Learner gets"
            )


def take(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Its state, sharing the optimizer's tensors."""
    given = optimizer.state_dict()
    keys = _keys(optimizer, model)
    by_position = dict(enumerate(key for group in keys for key in group))
    return {
        "kind": type(optimizer).__name__,
        "parameters": keys,
        "options": [{k: v for k, v in group.items() if k not in OURS} for group in given["param_groups"]],
        "state": {by_position[k]: v for k, v in given["state"].items() if k in by_position},
        "unowned": {k: v for k, v in given["state"].items() if k not in by_position},
        "further": {k: v for k, v in given.items() if k not in ("state", "param_groups")},
    }


def check(optimizer: Optimizer, model: nn.Module, saved: dict[str, Any], path: str) -> None:
    """ConfigError with the first thing in which the saved optimizer differs from this one."""
    of_another = f"the snapshot is of another optimizer: {path!r}"
    kind = type(optimizer).__name__
    if saved["kind"] != kind:
        raise ConfigError(f"{of_another} is {kind} here, {saved['kind']!s:.80} in the snapshot")
    here, there = _keys(optimizer, model), saved["parameters"]
    if len(here) != len(there):
        raise ConfigError(f"{of_another} has {len(here)} groups of parameters here, {len(there)} in the snapshot")
    for number, (mine, its) in enumerate(zip(here, there, strict=True)):
        if (difference := _difference(mine, its)) is not None:
            raise ConfigError(f"{of_another}, group {number}: {difference}")


def put(optimizer: Optimizer, model: nn.Module, saved: dict[str, Any]) -> None:
    """Load what `take` gave, here or elsewhere; the optimizer's state is then made of the saved tensors themselves."""
    keys = [key for group in _keys(optimizer, model) for key in group]
    position = {key: number for number, key in enumerate(keys)}
    state = {position[key]: value for key, value in saved["state"].items()}
    groups = [
        {**options, **{key: group[key] for key in OURS if key in group}}
        for options, group in zip(saved["options"], optimizer.state_dict()["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({**saved["further"], "state": state | saved["unowned"], "param_groups": groups})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, value in state.items():
        optimizer.state[parameters[number]] = _uncast(optimizer.state[parameters[number]], value)


def by_key(optimizer: Optimizer, model: nn.Module) -> dict[str | int, torch.Tensor]:
    """Its parameters, by what their state is kept under."""
    keys = [key for group in _keys(optimizer, model) for key in group]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return dict(zip(keys, parameters, strict=True))


def _keys(optimizer: Optimizer, model: nn.Module) -> list[dict[str | int, tuple[tuple[int, ...], str]]]:
    """Per group, the shape and type of every parameter, by its name or, if any is without one, by its position."""
    names: dict[int, str | int] = {id(parameter): name for name, parameter in named_parameters(model)}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names for parameter in parameters):
        names = {id(parameter): position for position, parameter in enumerate(parameters)}
    return [{names[id(p)]: (tuple(p.shape), str(p.dtype)) for p in group["params"]} for group in optimizer.param_groups]


def _difference(here: dict[Any, Any], there: dict[Any, Any]) -> str | None:
    for key in [*here, *there]:
        if key not in there:
            return f"parameter {key!r} is here, not in the snapshot"
        if key not in here:
            return f"parameter {key!r} is in the snapshot, not here"
        if here[key] != there[key]:
            return f"parameter {key!r} is {_said(here[key])} here, {_said(there[key])} in the snapshot"
    return None


def _said(spec: tuple[tuple[int, ...], str]) -> str:
    return f"{spec[0]} {spec[1].removeprefix('torch.')}"


def _uncast(loaded: Any, saved: Any) -> Any:
    """What was loaded, where it was loaded to, as it was saved."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        return saved.to(loaded.device) if loaded.shape == saved.shape else loaded
    if isinstance(saved, str):
        return saved  # torch takes text for a list of values to cast
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: _uncast(value, saved[key]) if key in saved else value for key, value in loaded.items()}
    if isinstance(loaded, list | tuple) and isinstance(saved, list | tuple) and len(loaded) == len(saved):
        return type(loaded)(_uncast(value, own) for value, own in zip(loaded, saved, strict=True))
    return loaded
