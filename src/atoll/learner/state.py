"""Everything that makes a training process's future, taken between two steps and put back into a fresh process.

That is: trained parameters, persistent buffers, the inner optimizers' state, the state of whatever else the script
registered (schedules, a GradScaler: anything with state_dict() and load_state_dict()), and the random states. Frozen
parameters are not: each learner loads its own. `capture` only copies, into host memory; writing and sending are for the
background.

`restore` loads in place, so that whoever holds a parameter still holds it. It first checks that names, shapes and types
are the same here and there; what is refused, also by an object's own load_state_dict, leaves everything as it was.
What a newcomer takes from a peer goes through `taking.py`, which believes less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from atoll.learner import inner
from atoll.learner import rng as randomness
from atoll.learner.inner import Optimizers
from atoll.learner.model import BufferRule, merged_buffers, persistent_buffers
from atoll.learner.names import named_parameters
from atoll.learner.plain import Packing, Unpacking
from atoll.learner.snapshot import Snapshot
from atoll.protocol.errors import ConfigError


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


@torch.no_grad()
def capture(
    model: nn.Module,
    optimizers: Optimizers = None,
    extras: Mapping[str, Stateful] | None = None,
    *,
    parameters: bool = True,
    rng: bool = True,
    buffers: BufferRule = None,
) -> Snapshot:
    """Returns once the copies are made; ConfigError names the first thing that cannot be kept."""
    packing = Packing()
    for name, tensor in _tensors(model, parameters, buffers):
        packing.keep(name, tensor)
    things = _things(optimizers, extras)
    states = {path: packing.pack(_state(thing, model), path) for path, thing in things.items()}
    drawn = packing.pack(randomness.current(), "rng") if rng else None
    packing.settle()
    return Snapshot(packing.tensors, states, drawn)


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
    things, own = _things(optimizers, extras), dict(_tensors(model, parameters, buffers))
    _check_tensors(own, snapshot, parameters, merged_buffers(model, buffers))
    _check_states(things, model, snapshot)
    drawn = _check_rng(snapshot) if rng else None
    with ExitStack() as undo:
        for path, thing in things.items():
            undo.callback(_go_back, thing, model, _copy_of_state(thing, model, path))
            _load_or_refuse(path, thing, model, snapshot)
        if drawn is not None:
            undo.callback(randomness.put, randomness.current())
            _put_rng(drawn)
        undo.pop_all()
    for name, tensor in own.items():
        tensor.copy_(snapshot.tensors[name])


# ---- what there is --------------------------------------------------------------------------------------------------


def own_buffers(model: nn.Module, rule: BufferRule = None) -> dict[str, torch.Tensor]:
    """The model's persistent ones that are not merged, by where they stand in a snapshot."""
    return dict(_tensors(model, False, rule))


def _tensors(model: nn.Module, parameters: bool, rule: BufferRule) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the model that is kept, once: tied ones are one. Merged buffers count as parameters."""
    if parameters:
        for name, parameter in named_parameters(model):
            if parameter.requires_grad:
                yield f"model/{name}", parameter
    merged = merged_buffers(model, rule)
    for _, name, buffer in persistent_buffers(model):
        if parameters or name not in merged:
            yield f"buffers/{name}", buffer


def _things(optimizers: Optimizers, extras: Mapping[str, Stateful] | None) -> dict[str, Stateful]:
    """Whatever has a state, by where it stands in a snapshot; optimizers last, since a schedule's loading may write
    into them."""
    things: dict[str, Stateful] = {f"extra/{name}": thing for name, thing in (extras or {}).items()}
    for path, thing in things.items():
        if not callable(getattr(thing, "state_dict", None)) or not callable(getattr(thing, "load_state_dict", None)):
            raise ConfigError(f"{path!r} is a {type(thing).__qualname__}, without state_dict() and load_state_dict()")
    return {**things, **inner.by_path(optimizers)}


def _state(thing: Stateful, model: nn.Module) -> dict[str, Any]:
    return inner.take(thing, model) if isinstance(thing, Optimizer) else thing.state_dict()


def _load(thing: Stateful, model: nn.Module, state: dict[str, Any]) -> None:
    if isinstance(thing, Optimizer):
        inner.put(thing, model, state)
    else:
        thing.load_state_dict(state)


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def check_kept(optimizers: Optimizers, extras: Mapping[str, Stateful] | None = None) -> None:
    """TypeError names what no cut could keep: told when it is handed in, not at the first cut."""
    try:
        for path, thing in _things(optimizers, extras).items():
            if isinstance(thing, Optimizer):
                options = [{k: v for k, v in group.items() if k not in inner.OURS} for group in thing.param_groups]
                Packing().pack(options, path)
            else:
                Packing().pack(thing.state_dict(), path)
    except ConfigError as error:
        raise TypeError(str(error)) from None


# ---- checking before anything is changed ----------------------------------------------------------------------------


def _check_tensors(
    own: Mapping[str, torch.Tensor], snapshot: Snapshot, parameters: bool, merged: Mapping[str, torch.Tensor]
) -> None:
    prefixes = ("model/", "buffers/") if parameters else ("buffers/",)
    passed_over = set() if parameters else {f"buffers/{name}" for name in merged}
    held = {
        name: tensor
        for name, tensor in snapshot.tensors.items()
        if name.startswith(prefixes) and name not in passed_over
    }
    _check_names("model", own, held)
    for name, tensor in own.items():
        if (here := _said(tensor)) != (there := _said(held[name])):
            raise ConfigError(f"the snapshot is of another model: {name!r} is {here} here, {there} in the snapshot")


def _check_states(things: Mapping[str, Stateful], model: nn.Module, snapshot: Snapshot) -> None:
    _check_names("script", things, snapshot.states)
    for path, thing in things.items():
        if isinstance(thing, Optimizer):
            try:
                inner.check(thing, model, Unpacking(snapshot.tensors).unpack(snapshot.states[path]), path)
            except (TypeError, KeyError, AttributeError, IndexError):
                raise ConfigError(f"the snapshot holds no optimizer's state under {path!r}") from None


def _check_names(what: str, here: Mapping[str, object], there: Mapping[str, object]) -> None:
    for name in [*here, *there]:
        if name not in there:
            raise ConfigError(f"the snapshot is of another {what}: {name!r} is here, not in the snapshot")
        if name not in here:
            raise ConfigError(f"the snapshot is of another {what}: {name!r} is in the snapshot, not here")


def _check_rng(snapshot: Snapshot) -> dict[str, Any]:
    if snapshot.rng is None:
        raise ConfigError("the snapshot holds no random states: it was taken for a peer")
    state: dict[str, Any] = Unpacking(snapshot.tensors, torch.device("cpu")).unpack(snapshot.rng)
    try:
        randomness.check(state)
    except (TypeError, KeyError):
        raise ConfigError("the snapshot's random states cannot be read") from None
    return state


def _said(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


# ---- loading, and going back ----------------------------------------------------------------------------------------


def _load_or_refuse(path: str, thing: Stateful, model: nn.Module, snapshot: Snapshot) -> None:
    state = Unpacking(snapshot.tensors, _device(model)).unpack(snapshot.states[path])
    try:
        _load(thing, model, state)
    except Exception as error:  # of whatever kind: it is the script's own object
        raise ConfigError(f"{path!r} does not take its state from the snapshot: {_one_line(error)}") from error


def _put_rng(state: dict[str, Any]) -> None:
    try:
        randomness.put(state)
    except Exception as error:  # of whatever kind three libraries have
        raise ConfigError(f"the snapshot's random states cannot be set here: {_one_line(error)}") from error


def _copy_of_state(thing: Stateful, model: nn.Module, path: str) -> dict[str, Any]:
    """To go back to. An optimizer's tensors are replaced by loading, not written to, so they need no copy."""
    state = _state(thing, model)
    if isinstance(thing, Optimizer):
        return state
    packing = Packing()
    packed = packing.pack(state, path)
    packing.settle()
    copied: dict[str, Any] = Unpacking(packing.tensors, _device(model)).unpack(packed)
    return copied


def _go_back(thing: Stateful, model: nn.Module, state: dict[str, Any]) -> None:
    with suppress(Exception):  # it refuses everything, so it has not changed; the others' turn must come
        _load(thing, model, state)


def _one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
