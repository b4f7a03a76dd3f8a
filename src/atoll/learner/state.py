"""What there is to capture of a torch model and its inner optimizers (capture.py does it).

That is: trained parameters, persistent buffers, the optimizers' state, what the script registered, random states.
Frozen parameters are not included: each learner loads its own. `restore` loads in place, so that whoever holds a
parameter still holds it. State from a peer goes through peer_state_transfer.py, which trusts less.

Inner optimizers: their state is keyed by the names of their parameters, so that another process can load it; torch keys
it by position, and so do we if some parameter of the optimizer has no name in the model. What is loaded is bit for bit
what was saved: torch's own loading casts a state to the type of its parameter, which would round what an optimizer
keeps in fp32 for a bf16 parameter. A script has one optimizer, several in a list, or several by name. Each must train
parameters of the model: tensors that only an optimizer knows would be merged by nobody and be missing in exports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from atoll.learner.capture import BegunSnapshot, InnerState, Stateful, capture, extras_by_path, restore_captured
from atoll.learner.copy_room import TakenRoom
from atoll.learner.model import BufferRule, merged_buffers, named_parameters, persistent_buffers
from atoll.learner.packing import Packing
from atoll.learner.ranks import make_like, take_local
from atoll.learner.snapshot import Snapshot
from atoll.protocol.errors import ConfigError


@torch.no_grad()
def begin_capture(
    model: nn.Module,
    optimizers: Optimizers = None,
    extras: Mapping[str, Stateful] | None = None,
    *,
    parameters: bool = True,
    rng: bool = True,
    buffers: BufferRule = None,
    room: TakenRoom | None = None,
    steady: Sequence[torch.Tensor] = (),
) -> BegunSnapshot:
    """Returns as soon as training may go on. `steady`: see `Packing`. ConfigError names the first thing that cannot be
    kept."""
    kept = (_tensors(model, parameters, buffers), _things(optimizers, extras, model))
    return capture(*kept, rng=rng, room=room, steady=steady)


@torch.no_grad()
def restore(
    model: nn.Module,
    optimizers: Optimizers,
    extras: Mapping[str, Stateful] | None,
    snapshot: Snapshot,
    *,
    parameters: bool = True,
    rng: bool = True,
    buffers: BufferRule = None,
) -> None:
    """The future is then the captured process's; ConfigError names the first difference, and nothing has changed."""
    things, own = _things(optimizers, extras, model), dict(_tensors(model, parameters, buffers))
    restore_captured(
        own,
        things,
        snapshot,
        prefixes=("model/", "buffers/") if parameters else ("buffers/",),
        passed_over=() if parameters else {f"buffers/{name}" for name in merged_buffers(model, buffers)},
        device=_device(model),
        rng=rng,
    )


def large_tensors(model: nn.Module, optimizers: Optimizers, buffers: BufferRule = None) -> Iterator[torch.Tensor]:
    """About what `begin_capture` copies, in its order: the model's tensors and those of the optimizers' states."""
    yield from (tensor for _, tensor in _tensors(model, True, buffers))
    for one in optimizers_by_path(optimizers).values():
        for state in one.state.values():
            yield from (take_local(value) for value in state.values() if isinstance(value, torch.Tensor))


# ---- what there is --------------------------------------------------------------------------------------------------


def own_buffers(model: nn.Module, rule: BufferRule = None) -> dict[str, torch.Tensor]:
    """The model's persistent ones that are not merged, by where they stand in a snapshot."""
    return dict(_tensors(model, False, rule))


def _tensors(model: nn.Module, parameters: bool, rule: BufferRule) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the model that is kept, once: tied ones are one. Merged buffers count as parameters."""
    if parameters:
        for name, parameter in named_parameters(model):
            if parameter.requires_grad:
                yield f"model/{name}", take_local(parameter)
    merged = merged_buffers(model, rule)
    for _, name, buffer in persistent_buffers(model):
        if parameters or name not in merged:
            yield f"buffers/{name}", buffer


def _things(optimizers: Optimizers, extras: Mapping[str, Stateful] | None, model: nn.Module) -> dict[str, Stateful]:
    """Whatever has a state, by where it stands in a snapshot; optimizers last, since a schedule's loading may write
    into them."""
    found: dict[str, Stateful] = {**extras_by_path(extras), **optimizers_by_path(optimizers)}
    return {path: NamedOptimizer(one, model) if isinstance(one, Optimizer) else one for path, one in found.items()}


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def check_kept(optimizers: Optimizers, extras: Mapping[str, Stateful] | None = None) -> None:
    """TypeError names what no cut could keep: told when it is handed in, not at the first cut."""
    try:
        for path, thing in {**extras_by_path(extras), **optimizers_by_path(optimizers)}.items():
            if isinstance(thing, Optimizer):
                options = [{k: v for k, v in group.items() if k not in OWN_KEYS} for group in thing.param_groups]
                Packing().pack(options, path)
            else:
                Packing().pack(thing.state_dict(), path)
    except ConfigError as error:
        raise TypeError(str(error)) from None


# ---- inner optimizers -----------------------------------------------------------------------------------------------

OWN_KEYS = ("params", "param_names")
"""What a group says of its parameters; each process has its own."""

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None


def optimizers_by_path(optimizers: Optimizers) -> dict[str, Optimizer]:
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
                f"{path!r} is of type {type(one).__name__}: give torch optimizers, one, a list of them, or a dict by "
                f"name; a schedule or whatever else has a state is registered, learner.register(name, it)"
            )
    return found


def check_trained(optimizers: Optimizers, model: nn.Module) -> None:
    """ConfigError names the first optimizer that trains what is no parameter of the model."""
    known = {id(parameter) for parameter in model.parameters()}
    for path, optimizer in optimizers_by_path(optimizers).items():
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


class NamedOptimizer(InnerState):
    """An optimizer whose state is keyed by the names that its parameters have in the model."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self._optimizer, self._model = optimizer, model

    def state_dict(self) -> dict[str, Any]:
        return optimizer_state(self._optimizer, self._model)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        load_optimizer_state(self._optimizer, self._model, state_dict)

    def check_state(self, saved: dict[str, Any], path: str) -> None:
        check_optimizer_state(self._optimizer, self._model, saved, path)


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Its state, sharing the optimizer's tensors."""
    given = optimizer.state_dict()
    keys = _keys(optimizer, model)
    by_position = dict(enumerate(key for group in keys for key in group))
    return {
        "kind": type(optimizer).__name__,
        "parameters": keys,
        "options": [{k: v for k, v in group.items() if k not in OWN_KEYS} for group in given["param_groups"]],
        "state": {by_position[k]: v for k, v in given["state"].items() if k in by_position},
        "unowned": {k: v for k, v in given["state"].items() if k not in by_position},
        "further": {k: v for k, v in given.items() if k not in ("state", "param_groups")},
    }


def check_optimizer_state(optimizer: Optimizer, model: nn.Module, saved: dict[str, Any], path: str) -> None:
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


def load_optimizer_state(optimizer: Optimizer, model: nn.Module, saved: dict[str, Any]) -> None:
    """Load what `optimizer_state` gave, here or elsewhere. The saved tensors become the optimizer's state."""
    keys = [key for group in _keys(optimizer, model) for key in group]
    position = {key: number for number, key in enumerate(keys)}
    state = {position[key]: value for key, value in saved["state"].items()}
    groups = [
        {**options, **{key: group[key] for key in OWN_KEYS if key in group}}
        for options, group in zip(saved["options"], optimizer.state_dict()["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({**saved["further"], "state": state | saved["unowned"], "param_groups": groups})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, value in state.items():
        optimizer.state[parameters[number]] = _uncast(optimizer.state[parameters[number]], value, parameters[number])


def parameters_by_key(optimizer: Optimizer, model: nn.Module) -> dict[str | int, torch.Tensor]:
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
            return f"parameter {key!r} is {_spec_text(here[key])} here, {_spec_text(there[key])} in the snapshot"
    return None


def _spec_text(spec: tuple[tuple[int, ...], str]) -> str:
    return f"{spec[0]} {spec[1].removeprefix('torch.')}"


def _uncast(loaded: Any, saved: Any, of: torch.Tensor) -> Any:
    """What was loaded, where it was loaded to, as it was saved; where its parameter is a shard, as one."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        if loaded.shape != saved.shape:
            return loaded
        return make_like(of, saved.to(loaded.device))
    if isinstance(saved, str):
        return saved  # torch takes text for a list of values to cast
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: _uncast(value, saved[key], of) if key in saved else value for key, value in loaded.items()}
    if isinstance(loaded, list | tuple) and isinstance(saved, list | tuple) and len(loaded) == len(saved):
        return type(loaded)(_uncast(value, own, of) for value, own in zip(loaded, saved, strict=True))
    return loaded
