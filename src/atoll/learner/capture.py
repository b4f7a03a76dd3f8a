"""A training process's state, captured between two steps and restored into a fresh process, whatever library trains.

What is captured is given as tensors by name and as things with a state: inner optimizers, whatever the script
registered (schedules, a GradScaler: anything with state_dict() and load_state_dict()), and the global random states.
`capture` only copies, into host memory, and does not wait for the copies that training cannot disturb; writing and
sending happen in the background.

`restore` first checks that names, shapes and types are the same here and there; whatever is refused, also by an
object's own load_state_dict, leaves everything as it was. state.py says what there is of torch's models and optimizers.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from atoll.learner.copy_room import TakenRoom
from atoll.learner.packing import Json, Packing, Unpacking
from atoll.learner.snapshot import Snapshot
from atoll.protocol.errors import ConfigError


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class InnerState(ABC):
    """The state of an inner optimizer: a `Stateful` that knows what fits it. Loading replaces its tensors and writes
    into none of them, so going back needs no copy."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Sharing the optimizer's tensors."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...

    @abstractmethod
    def check_state(self, saved: dict[str, Any], path: str) -> None:
        """ConfigError with the first thing in which the saved optimizer differs from this one."""


OPTAX = "optax"
"""The kind of every optimizer's state that is not torch's; torch's kinds are the names of its classes."""


class OtherLibrary(ConfigError):
    """A peer's optimizer is of the other library: nobody's mistake, so the peer gets no strike for it."""

    def __init__(self, peer: str, own: str) -> None:
        super().__init__(f"the peer's is {peer}'s, and this one is {own}'s")


@dataclass(frozen=True, slots=True)
class BegunSnapshot:
    """A snapshot whose copies are under way."""

    packing: Packing
    states: Mapping[str, Json]
    rng: Json

    def finish(self) -> Snapshot:
        """Wait for the copies. By any thread."""
        self.packing.finish()
        return Snapshot(self.packing.tensors, self.states, self.rng)


def extras_by_path(extras: Mapping[str, Stateful] | None) -> dict[str, Stateful]:
    """What the script registered, by where it stands in a snapshot."""
    things: dict[str, Stateful] = {f"extra/{name}": thing for name, thing in (extras or {}).items()}
    for path, thing in things.items():
        if not callable(getattr(thing, "state_dict", None)) or not callable(getattr(thing, "load_state_dict", None)):
            raise ConfigError(f"{path!r} is a {type(thing).__qualname__}, without state_dict() and load_state_dict()")
    return things


@torch.no_grad()
def capture(
    tensors: Iterable[tuple[str, torch.Tensor]],
    things: Mapping[str, Stateful],
    *,
    rng: bool = True,
    room: TakenRoom | None = None,
    steady: Sequence[torch.Tensor] = (),
) -> BegunSnapshot:
    """Returns as soon as training may go on. `steady`: see `Packing`. ConfigError names the first thing that cannot be
    kept."""
    packing = Packing(room, steady)
    try:
        for name, tensor in tensors:
            packing.keep(name, tensor)
        # Optimizers first: their tensors travel from the device while those in host memory are copied.
        optimizers_first = sorted(things, key=lambda path: not isinstance(things[path], InnerState))
        states = {path: packing.pack(things[path].state_dict(), path) for path in optimizers_first}
        drawn = packing.pack(random_state(), "rng") if rng else None
    finally:
        packing.settle()
    return BegunSnapshot(packing, states, drawn)


@torch.no_grad()
def restore_captured(
    own: Mapping[str, torch.Tensor],
    things: Mapping[str, Stateful],
    snapshot: Snapshot,
    *,
    prefixes: tuple[str, ...],
    passed_over: Collection[str] = (),
    device: torch.device,
    rng: bool = True,
) -> None:
    """Into the tensors `own`, in place, and the things; ConfigError names the first difference, and nothing has
    changed. Compared are the snapshot's tensors whose names begin with `prefixes`, but for those passed over; `device`
    is where the things keep their tensors."""
    _check_tensors(own, snapshot, prefixes, passed_over)
    _check_states(things, snapshot)
    drawn = _check_rng(snapshot) if rng else None
    with ExitStack() as undo:
        for path, thing in things.items():
            undo.callback(_go_back, thing, _copy_of_state(thing, path, device))
            _load_or_refuse(path, thing, snapshot, device)
        if drawn is not None:
            undo.callback(set_random_state, random_state())
            _put_rng(drawn)
        undo.pop_all()
    for name, tensor in own.items():
        tensor.copy_(snapshot.tensors[name])


# ---- checking before anything is changed ----------------------------------------------------------------------------


def _check_tensors(
    own: Mapping[str, torch.Tensor], snapshot: Snapshot, prefixes: tuple[str, ...], passed_over: Collection[str]
) -> None:
    held = {
        name: tensor
        for name, tensor in snapshot.tensors.items()
        if name.startswith(prefixes) and name not in passed_over
    }
    _check_names("model", own, held)
    for name, tensor in own.items():
        if (here := _said(tensor)) != (there := _said(held[name])):
            raise ConfigError(f"the snapshot is of another model: {name!r} is {here} here, {there} in the snapshot")


def _check_states(things: Mapping[str, Stateful], snapshot: Snapshot) -> None:
    _check_names("script", things, snapshot.states)
    for path, thing in things.items():
        if isinstance(thing, InnerState):
            try:
                thing.check_state(Unpacking(snapshot.tensors).unpack(snapshot.states[path]), path)
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
        check_random_state(state)
    except (TypeError, KeyError):
        raise ConfigError("the snapshot's random states cannot be read") from None
    return state


def _said(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


# ---- loading, and going back ----------------------------------------------------------------------------------------


def _load_or_refuse(path: str, thing: Stateful, snapshot: Snapshot, device: torch.device) -> None:
    state = Unpacking(snapshot.tensors, device).unpack(snapshot.states[path])
    try:
        thing.load_state_dict(state)
    except Exception as error:  # of whatever kind: it is the script's own object
        raise ConfigError(f"{path!r} does not take its state from the snapshot: {_one_line(error)}") from error


def _put_rng(state: dict[str, Any]) -> None:
    try:
        set_random_state(state)
    except Exception as error:  # of whatever kind three libraries have
        raise ConfigError(f"the snapshot's random states cannot be set here: {_one_line(error)}") from error


def _copy_of_state(thing: Stateful, path: str, device: torch.device) -> dict[str, Any]:
    """To go back to."""
    state = thing.state_dict()
    if isinstance(thing, InnerState):
        return state
    packing = Packing()
    packed = packing.pack(state, path)
    packing.settle()
    packing.finish()
    copied: dict[str, Any] = Unpacking(packing.tensors, device).unpack(packed)
    return copied


def _go_back(thing: Stateful, state: dict[str, Any]) -> None:
    with suppress(Exception):  # it refuses everything, so it has not changed; the others' turn must come
        thing.load_state_dict(state)


def _one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# ---- random states: torch's on the CPU and every CUDA device, numpy's, Python's -------------------------------------


def random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        # A process that never used CUDA draws nothing from it, and asking would start it.
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": np.random.get_state(legacy=False),
        "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss},
    }


def check_random_state(state: dict[str, Any]) -> None:
    """ConfigError where this process has other devices than that of the state, or numpy would read out of bounds."""
    if state["numpy"]["bit_generator"] == "MT19937" and not 0 <= state["numpy"]["state"]["pos"] <= 624:
        raise ConfigError("the snapshot's random state of numpy is damaged: its position lies outside of it")
    there, here = len(state["cuda"]), torch.cuda.device_count()
    if there not in (0, here):
        raise ConfigError(
            f"the snapshot holds the random states of {there} CUDA devices, {here} are here: show the process as many "
            f"(CUDA_VISIBLE_DEVICES)"
        )


def set_random_state(state: dict[str, Any]) -> None:
    python = state["python"]
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
