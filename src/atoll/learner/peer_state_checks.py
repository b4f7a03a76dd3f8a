"""A peer's state, checked as a whole before anything of this learner's model and optimizers is changed.

A peer may be broken or hostile:
- of an inner optimizer only the state of parameters is taken, and only if every tensor has the name, shape and type
  that this learner's own optimizer gives it, and is finite; learning rate, betas and other options stay as they are;
- buffers must have the same shapes and types as here, and be finite;
- of what the script registered only that is taken which it allows (`register(…, from_peers=True)`); a schedule among
  it sets the learning rate.
A state that does not fit is refused, and this learner goes on as it is.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from atoll.learner.capture import OPTAX, OtherLibrary, Stateful
from atoll.learner.model import BufferRule
from atoll.learner.packing import Unpacking
from atoll.learner.ranks import make_like
from atoll.learner.snapshot import Snapshot
from atoll.learner.state import (
    OWN_KEYS,
    Optimizers,
    check_optimizer_state,
    optimizers_by_path,
    own_buffers,
    parameters_by_key,
    restore,
)
from atoll.protocol.errors import ConfigError, PeerError
from atoll.protocol.limits import MAX_COUNTER

PLAIN = (int, float, bool, type(None))
"""What may stand beside tensors in an optimizer's state."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A tensor as this learner's optimizer makes it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StateSpec:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"

    def filled(self, values: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).copy_(values)


StateKey: TypeAlias = str | int
StateLayout: TypeAlias = dict[StateKey, dict[str, StateSpec | type]]
"""By parameter and name: what the optimizer keeps of it."""
States: TypeAlias = dict[StateKey, dict[str, Any]]


@torch.no_grad()
def take_peer_state(
    model: nn.Module,
    optimizers: Optimizers,
    extras: Mapping[str, Stateful],
    came: Snapshot,
    buffers: BufferRule = None,
) -> None:
    """Go on with a peer's state; PeerError says what is wrong with it, and nothing has changed.

    ConfigError: this learner's own optimizer is of a kind that can be taken from nobody.
    """
    own = optimizers_by_path(optimizers)
    layouts = {path: expected_layout(optimizer, model) for path, optimizer in own.items()}
    states = {path: _fitting(path, own[path], model, layout, came) for path, layout in layouts.items()}
    if reasons := wrong_buffers(own_buffers(model, buffers), came.tensors):
        raise PeerError(_said(reasons))
    allowed = {path: came.states[path] for name in extras if (path := f"extra/{name}") in came.states}
    try:
        restore(model, None, extras, Snapshot(came.tensors, allowed), parameters=False, rng=False, buffers=buffers)
    except ConfigError as error:
        raise PeerError(str(error)) from None
    for name, thing in extras.items():
        if isinstance(thing, LRScheduler) and f"extra/{name}" in allowed:
            _follow(thing)
    for path, optimizer in own.items():
        parameters = parameters_by_key(optimizer, model)
        for key, state in states[path].items():
            parameter = parameters[key]  # of an FSDP2 model a DTensor, whose optimizer wants a state of DTensors
            optimizer.state[parameter] = {
                name: make_like(parameter, value) if isinstance(value, torch.Tensor) else value
                for name, value in state.items()
            }


def _follow(schedule: LRScheduler) -> None:
    """Most schedules compute a learning rate from the one before: it is the peer's too, where the schedule is."""
    for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=False):
        if 0 <= (value := float(rate)) < MAX_COUNTER:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value


# ---- what fits ------------------------------------------------------------------------------------------------------


def fit_states(layout: StateLayout, states: Mapping[Any, Any]) -> tuple[States, list[str]]:
    """The peer's values, in memory of their own; or why they are not taken, a line each."""
    reasons = [reason for key, state in states.items() for reason in _wrong_state(layout, key, state)]
    if reasons:
        return {}, reasons
    return {
        key: {name: _own(layout[key][name], value) for name, value in state.items()} for key, state in states.items()
    }, []


def wrong_buffers(own: Mapping[str, torch.Tensor], came: Mapping[str, torch.Tensor]) -> list[str]:
    """A buffer may hold what is not finite only where this learner's does: masks are made of infinities."""
    reasons = []
    for name, buffer in own.items():
        if (value := came.get(name)) is None:
            reasons.append(f"{name!r} is missing")
        elif (there := StateSpec.of(value)).shape != tuple(buffer.shape) or there.dtype != buffer.dtype:
            reasons.append(f"{name!r} is {there}, here it is {StateSpec.of(buffer)}")
        elif not _is_finite(value, but=buffer.cpu()):
            reasons.append(f"{name!r} has values that are not finite")
    return reasons


def _wrong_state(layout: StateLayout, key: Any, state: Any) -> list[str]:
    if key not in layout:
        return [f"{_shown(key)} is no parameter of this optimizer"]
    expected = layout[key]
    if not isinstance(state, dict) or state.keys() != expected.keys():
        held = ", ".join(map(_shown, state)) if isinstance(state, dict) else f"a {type(state).__name__}"
        kept = ", ".join(map(_shown, expected))
        return [f"of {key!r} it holds {held or 'nothing':.200}, this optimizer keeps {kept or 'nothing'}"]
    wrong = ((name, _wrong_value(name, spec, state[name])) for name, spec in expected.items())
    return [f"{name!r} of {key!r} {reason}" for name, reason in wrong if reason]


def _wrong_value(name: str, spec: StateSpec | type, value: Any) -> str:
    if isinstance(spec, type):
        if type(value) is not spec:
            return f"is a {type(value).__name__}, here it is a {spec.__name__}"
        return _wrong_number(name, value)
    if not isinstance(value, torch.Tensor):
        return f"is a {type(value).__name__}, here it is a tensor of {spec}"
    if (there := StateSpec.of(value)).shape != spec.shape or there.dtype != spec.dtype:
        return f"is {there}, here it is {spec}"
    if not _is_finite(value):
        return "has values that are not finite"
    return _wrong_number(name, value.item()) if name == "step" and value.numel() == 1 else ""


def _wrong_number(name: str, value: Any) -> str:
    """Counters of steps are what optimizers divide by: below zero they divide by zero."""
    if value is None or isinstance(value, bool):
        return ""
    if not -MAX_COUNTER < value < MAX_COUNTER:  # nor is NaN
        return "is a number that no optimizer reaches"
    return f"is {value}: below zero" if name == "step" and value < 0 else ""


def _shown(name: Any) -> str:
    """Of a peer's: a number of many digits cannot even be written down."""
    return f"{name!r:.80}" if isinstance(name, str) else f"a {type(name).__name__}"


def _is_finite(values: torch.Tensor, but: torch.Tensor | None = None) -> bool:
    """`but`: where these are not, the values need not be."""
    if not values.is_floating_point() and not values.is_complex():
        return True
    finite = torch.isfinite(_wide(values))
    return bool((finite if but is None else finite | ~torch.isfinite(_wide(but))).all())


def _wide(values: torch.Tensor) -> torch.Tensor:
    """torch knows little of floats of one byte."""
    return values.float() if values.itemsize == 1 else values


def _own(spec: StateSpec | type, value: Any) -> Any:
    return spec.filled(value) if isinstance(spec, StateSpec) else value


def _fitting(path: str, optimizer: Optimizer, model: nn.Module, layout: StateLayout, came: Snapshot) -> States:
    try:
        saved = Unpacking(came.tensors).unpack(came.states[path])
        if saved["kind"] == OPTAX:
            raise OtherLibrary("optax", "torch")
        check_optimizer_state(optimizer, model, saved, path)
        given = dict(saved["state"])
    except OtherLibrary:
        raise
    except ConfigError as error:
        raise PeerError(str(error)) from None
    except (TypeError, KeyError, AttributeError, IndexError, ValueError, RuntimeError):
        raise PeerError("it holds no optimizer's state") from None
    states, reasons = fit_states(layout, given)
    if reasons:
        raise PeerError(_said(reasons))
    return states


def _said(reasons: list[str]) -> str:
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return f"its state is not as this script's: {reasons[0]}{more}"


# ---- what this optimizer keeps --------------------------------------------------------------------------------------


@torch.no_grad()
def expected_layout(optimizer: Optimizer, model: nn.Module) -> StateLayout:
    """What is kept of each parameter: as it is kept now, or as one step on a stand-in makes it. A stand-in takes the
    time of a step, so those of one shape and group share one."""
    layout: StateLayout = {}
    parameters = parameters_by_key(optimizer, model)
    keys = {id(parameter): key for key, parameter in parameters.items()}
    for group in optimizer.param_groups:
        made: dict[StateSpec, dict[str, StateSpec | type]] = {}
        for parameter in group["params"]:
            kept, spec = optimizer.state.get(parameter), StateSpec.of(parameter)
            if not kept and spec not in made:
                made[spec] = _specs(optimizer, _state_of_stand_in(optimizer, group, parameter))
            layout[keys[id(parameter)]] = _specs(optimizer, kept) if kept else made[spec]
    return layout


def _specs(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, StateSpec | type]:
    return {name: _spec(optimizer, name, value) for name, value in state.items()}


def _spec(optimizer: Optimizer, name: str, value: Any) -> StateSpec | type:
    if isinstance(value, torch.Tensor):
        return StateSpec.of(value)
    if type(value) in PLAIN:
        return type(value)
    raise _untakeable(optimizer, f"it keeps {name!r} as a {type(value).__name__}")


def _state_of_stand_in(optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """A step of a second optimizer of the same options, on zeros: one parameter at a time takes the least memory."""
    stand_in = nn.Parameter(torch.zeros_like(parameter))
    stand_in.grad = torch.zeros_like(parameter)
    options = {key: copy.deepcopy(value) for key, value in group.items() if key not in OWN_KEYS}
    try:
        twin = type(optimizer).__new__(type(optimizer))
        twin.__dict__.update({name: value for name, value in vars(optimizer).items() if type(value) in (*PLAIN, str)})
        twin.__setstate__(
            {
                "defaults": optimizer.defaults,
                "state": defaultdict(dict),
                "param_groups": [{**options, "params": [stand_in]}],
            }
        )
        type(optimizer).step(twin)
    except Exception as error:  # of whatever kind: it may be the script's own class
        raise _untakeable(optimizer, f"a step on a stand-in failed: {type(error).__name__}: {error!s:.200}") from error
    return dict(twin.state.get(stand_in, {}))


def _untakeable(optimizer: Optimizer, why: str) -> ConfigError:
    return ConfigError(f"the state of {type(optimizer).__name__} is taken from no peer: {why}")
