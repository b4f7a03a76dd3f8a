"""A pytree of JAX arrays, and its optax state, as the model of a learner (learner/trained_model.py).

JAX's arrays do not change and belong to the script, which may donate them to its next step. So between two steps
- `take_arrays` takes what the script's step returned, and checks that it is of the form that it was at the beginning;
- whatever is read of an array is a copy in host memory, made when it is first asked for: fragments that are due, or all
  of it for a snapshot. A version is adopted by writing into that copy;
- `hand_over` makes new arrays of the copies that were written to, on the device and as committed as the old ones, so
  that the script's jitted step is not compiled again, and gives back both trees. No copy of ours is left behind.

What changes while the script has the arrays (it waits for data, say) takes the place of what its next step returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from atoll.learner.capture import (
    OPTAX,
    BegunSnapshot,
    InnerState,
    OtherLibrary,
    Stateful,
    capture,
    extras_by_path,
    restore_captured,
)
from atoll.learner.copy_room import TakenRoom
from atoll.learner.moments import InnerMoments
from atoll.learner.packing import Unpacking
from atoll.learner.snapshot import Snapshot
from atoll.learner.step_stats import InputDigest
from atoll.learner.unmerged import FrozenRule, UnmergedTensors, digest_tensors
from atoll.numerics.fragments import FragmentPlan
from atoll.protocol.errors import ConfigError, PeerError, PlanError
from atoll.protocol.messages import TensorSpec

Chosen: TypeAlias = Collection[str] | Callable[[str], bool]
"""Names of tensors, or a function that says of a name whether it is one of them."""

MERGED = ("float32", "bfloat16", "float16")
CPU = torch.device("cpu")


# ---- trees ----------------------------------------------------------------------------------------------------------


class ArrayTree:
    """The form of a pytree of arrays: structure, names, shapes and types, as they were at the beginning."""

    def __init__(self, what: str, tree: Any, *, widens: bool = False) -> None:
        """`what`: how the script calls it. `widens`: its floats may become of another width, as optax makes moments of
        bfloat16 float32 with its first step in some cases."""
        found, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self._what, self._widens = what, widens
        self.names = [name_path(path) for path, _ in found]
        for name, (_, leaf) in zip(self.names, found, strict=True):
            self._check_leaf(name, leaf)
        self.arrays = [commit(leaf) for _, leaf in found]
        self._check_device()
        self._forms = [(array.shape, array.dtype) for array in self.arrays]

    def flatten(self, tree: Any) -> list[Any]:
        """Its arrays; ConfigError names the first that is not as it was."""
        arrays, structure = jax.tree_util.tree_flatten(tree)
        if structure != self._structure:
            raise ConfigError(f"{self._what} has another structure than when this learner began: {self._differ(tree)}")
        for place, (name, form) in enumerate(zip(self.names, self._forms, strict=True)):
            array = arrays[place]
            if not isinstance(array, jax.Array) or array.is_deleted():
                self._check_leaf(name, array)
                array = arrays[place] = commit(array)
            if (array.shape, array.dtype) != form and not self._is_widened(array, form):
                here, was = f"{array.shape} {array.dtype}", f"{form[0]} {form[1]}"
                raise ConfigError(f"{self._what}: '{name}' is {here} now, and was {was} when this learner began")
        return list(arrays)

    def _is_widened(self, array: Any, form: tuple[Any, Any]) -> bool:
        floats = jnp.issubdtype(array.dtype, jnp.floating) and jnp.issubdtype(form[1], jnp.floating)
        return bool(self._widens and floats and array.shape == form[0])

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        return jax.tree_util.tree_unflatten(self._structure, arrays)

    def _differ(self, tree: Any) -> str:
        found = {name_path(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]}
        if new := sorted(found - set(self.names)):
            return f"'{new[0]}' is new"
        gone = sorted(set(self.names) - found)
        return f"'{gone[0]}' is gone" if gone else "its containers are of other types"

    def _check_leaf(self, name: str, leaf: Any) -> None:
        if isinstance(leaf, jax.Array):
            if leaf.is_deleted():
                raise ConfigError(
                    f"{self._what}: '{name}' was donated to a jitted function already: give learner.step what that "
                    "function returned, and go on with what learner.step returns"
                )
            if len(leaf.sharding.device_set) > 1:
                raise ConfigError(
                    f"{self._what}: '{name}' is sharded over {len(leaf.sharding.device_set)} devices, which is not "
                    "supported: put the tree on one, jax.device_put(tree, jax.devices()[0]), with a learner for each"
                )
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise ConfigError(
                    f"{self._what}: '{name}' is a typed random key: keep jax.random.key_data(key) in the tree"
                )
        elif not isinstance(leaf, np.ndarray | np.generic | int | float):
            raise ConfigError(f"{self._what}: '{name}' is of type {type(leaf).__name__}: only arrays can be kept")

    def _check_device(self) -> None:
        devices = {next(iter(array.sharding.device_set)) for array in self.arrays}
        if len(devices) > 1:
            places = ", ".join(sorted(map(str, devices)))
            raise ConfigError(f"the arrays of {self._what} lie on several devices ({places}): put them on one")


def name_path(path: Sequence[Any]) -> str:
    """`layers.0.kernel`: keys, positions, attributes, with dots between. flax's variables go without their `value`."""
    if len(path) > 1 and getattr(path[-1], "name", "") == "value":
        path = path[:-1]
    return ".".join(_name_entry(entry) for entry in path)


def _name_entry(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if (found := getattr(entry, attribute, None)) is not None:
            return str(found)
    return str(entry)


def commit(leaf: Any) -> Any:
    """On its device for good, and of no weak type: with an array that is not, the script's step would be compiled once
    for it and once more for what is adopted."""
    device = next(iter(leaf.sharding.device_set)) if isinstance(leaf, jax.Array) else jax.devices()[0]
    if isinstance(leaf, jax.Array) and leaf.committed and not leaf.weak_type:
        return leaf
    return jax.device_put(np.array(leaf, dtype=jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)), device)


# ---- between arrays and host memory ---------------------------------------------------------------------------------


def copy_to_host(array: Any, *, transposed: bool = False) -> torch.Tensor:
    """In memory of its own."""
    values = np.array(array.T if transposed else array, order="C")
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.uint16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(values)
    except TypeError:
        raise ConfigError(f"an array of {values.dtype} cannot be kept") from None


def put_like(array: Any, values: torch.Tensor, *, transposed: bool = False) -> Any:
    """The values on the array's device, committed as it is. They must not be written to any more: JAX may use their
    memory as it is."""
    if values.dtype == torch.bfloat16:
        plain = values.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    else:
        plain = values.numpy()
    return jax.device_put(np.ascontiguousarray(plain.T) if transposed else plain, array.sharding)


class HostTensors(Mapping[str, torch.Tensor]):
    """Copies of the arrays, in the run's layout, made when they are first asked for."""

    def __init__(self, names: Mapping[str, int], copy: Callable[[int], torch.Tensor]) -> None:
        self._places, self._copy = names, copy
        self.made: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.made:
            self.made[name] = self._copy(self._places[name])
        return self.made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


# ---- the optimizer's state ------------------------------------------------------------------------------------------


class OptaxState(InnerState):
    def __init__(self, tree: ArrayTree) -> None:
        self.tree = tree
        self._first = [None if not np.any(values := np.asarray(one)) else values.copy() for one in tree.arrays]
        """As it was at the beginning; None: zeros, as moments are."""

    def state_dict(self) -> dict[str, Any]:
        arrays = zip(self.tree.names, self.tree.arrays, strict=True)
        return {"kind": OPTAX, "arrays": {name: copy_to_host(array) for name, array in arrays}}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        saved, arrays = state_dict["arrays"], zip(self.tree.names, self.tree.arrays, strict=True)
        self.tree.arrays = [put_like(array, saved[name].clone()) for name, array in arrays]

    def check_state(self, saved: dict[str, Any], path: str) -> None:
        of_another = f"the snapshot is of another optimizer: {path!r}"
        if saved["kind"] != OPTAX:
            raise ConfigError(f"{of_another} is {OPTAX} here, {saved['kind']!s:.80} in the snapshot")
        held = saved["arrays"]
        for name in [*self.tree.names, *held]:
            if name not in held:
                raise ConfigError(f"{of_another}: {name!r} is here, not in the snapshot")
            if name not in self.tree.names:
                raise ConfigError(f"{of_another}: {name!r:.80} is in the snapshot, not here")
        for name, array in zip(self.tree.names, self.tree.arrays, strict=True):
            here, there = f"{tuple(array.shape)} {array.dtype}", _form(held[name])
            both_floats = jnp.issubdtype(array.dtype, jnp.floating) and held[name].is_floating_point()
            if here != there and not (both_floats and tuple(array.shape) == tuple(held[name].shape)):
                raise ConfigError(f"{of_another}: {name!r} is {here} here, {there} in the snapshot")

    def check_peer(self, came: Snapshot) -> None:
        """PeerError, ConfigError: what a peer gave does not fit, or holds numbers that would break this optimizer."""
        try:
            saved = Unpacking(came.tensors).unpack(came.states["optimizer"])
            if saved["kind"] != OPTAX:
                raise OtherLibrary("torch", "optax")
            self.check_state(saved, "optimizer")
        except (TypeError, KeyError, AttributeError, IndexError, ValueError, RuntimeError):
            raise PeerError("it holds no optimizer's state") from None
        for name, values in saved["arrays"].items():
            if values.is_floating_point() and not bool(torch.isfinite(values).all()):
                raise PeerError(f"{name!r} of its optimizer has values that are not finite")
            if values.dtype in (torch.int32, torch.int64) and bool((values < 0).any()):
                raise PeerError(f"{name!r} of its optimizer counts below zero")

    def reset(self) -> None:
        """In the types that it has by now."""
        first = zip(self.tree.arrays, self._first, strict=True)
        self.tree.arrays = [
            jax.device_put(np.zeros(now.shape, now.dtype) if then is None else then.astype(now.dtype), now.sharding)
            for now, then in first
        ]


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


# ---- the model ------------------------------------------------------------------------------------------------------


class JaxModel:
    """A `TrainedModel`."""

    device = CPU

    def __init__(
        self,
        params: Any,
        opt_state: Any = None,
        names: Callable[[str], str] | None = None,
        transposed: Chosen = (),
        embeddings: Chosen | None = None,
    ) -> None:
        """ConfigError, PlanError: what cannot take part, by name."""
        self._params = ArrayTree("params", params)
        self._inner = OptaxState(ArrayTree("opt_state", opt_state, widens=True))
        self._names = [names(name) if names is not None else name for name in self._params.names]
        self._check_names()
        self._transposed = [_is_chosen(transposed, name) for name in self._names]
        self._embeddings = [
            _is_embedding(name) if embeddings is None else _is_chosen(embeddings, name) for name in self._names
        ]
        self._check_transposed()
        self._places = {name: place for place, name in enumerate(self._names)}
        self._host = HostTensors(self._places, self._copy)
        self._written: set[str] = set()
        """Copies that are newer than their arrays."""
        self._unseen: set[str] = set()
        """Arrays that the script does not have yet."""
        self._state_unseen = False

    def _check_names(self) -> None:
        if not self._names:
            raise PlanError("params holds no arrays: give the pytree that is trained")
        for name, again, array in zip(self._names, self._params.names, self._params.arrays, strict=True):
            if not name:
                raise PlanError(f"names() gave {name!r} for '{again}': give a name")
            if str(array.dtype) not in MERGED:
                raise PlanError(
                    f"params: '{again}' is {array.dtype}, which Atoll cannot merge: use float32, bfloat16 or float16, "
                    "and keep what is not trained in opt_state or out of both"
                )
            if array.size == 0:
                raise PlanError(f"params: '{again}' is empty: leave it out")
        [(name, times)] = Counter(self._names).most_common(1)
        if times > 1:
            raise PlanError(f"two arrays of params are called {name!r}: names() must give each its own name")

    def _check_transposed(self) -> None:
        for name, array, turned in zip(self._names, self._params.arrays, self._transposed, strict=True):
            if turned and array.ndim != 2:
                raise PlanError(f"'{name}' has {array.ndim} dimensions: only matrices can be transposed")

    # ---- to the script and back ---------------------------------------------------------------------------------

    def take_arrays(self, params: Any, opt_state: Any) -> None:
        """What the script's step returned. ConfigError: it is not as it was at the beginning."""
        arrays, state = self._params.flatten(params), self._inner.tree.flatten(opt_state)
        self._settle()
        for name in self._unseen:
            arrays[self._places[name]] = self._params.arrays[self._places[name]]
        self._params.arrays = arrays
        if not self._state_unseen:
            self._inner.tree.arrays = state
        self._host.made.clear()

    def hand_over(self) -> tuple[Any, Any]:
        """Both trees, for the script to go on with."""
        found = self.look()
        self._unseen.clear()
        self._state_unseen = False
        return found

    def look(self) -> tuple[Any, Any]:
        self._settle()
        return self._params.unflatten(self._params.arrays), self._inner.tree.unflatten(self._inner.tree.arrays)

    def _settle(self) -> None:
        for name in self._written:
            place = self._places[name]
            values, turned = self._host.made[name], self._transposed[place]
            self._params.arrays[place] = put_like(self._params.arrays[place], values, transposed=turned)
        self._written.clear()
        self._host.made.clear()

    def _copy(self, place: int) -> torch.Tensor:
        array = self._params.arrays[place]
        if array.is_deleted():
            raise ConfigError(
                f"params: '{self._names[place]}' was donated after learner.step returned it, and no step was counted "
                "since: call learner.step with what the jitted function returned"
            )
        return copy_to_host(array, transposed=self._transposed[place])

    # ---- as the run sees it -------------------------------------------------------------------------------------

    def describe(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                name,
                tuple(reversed(array.shape)) if turned else tuple(array.shape),
                str(array.dtype),
                embedding=embedding,
            )
            for name, array, turned, embedding in zip(
                self._names, self._params.arrays, self._transposed, self._embeddings, strict=True
            )
        )

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._host

    def note_adopted(self, names: Iterable[str]) -> None:
        found = set(names)
        self._written |= found
        self._unseen |= found

    def load_weights(self, path: Path) -> None:
        try:
            held = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read the weights to begin with from {path}: {error}") from error
        for spec in self.describe():
            if spec.name not in held:
                raise ConfigError(f"{path} holds no weights for '{spec.name}': it is of another model")
            if tuple(held[spec.name].shape) != spec.shape:
                there = tuple(held[spec.name].shape)
                raise ConfigError(
                    f"{path} is of another model: '{spec.name}' is {spec.shape} here, {there} in the file"
                )
            self._host[spec.name].copy_(held[spec.name])
        self.note_adopted(self._names)

    def make_moments(self, plan: FragmentPlan) -> InnerMoments:
        raise ConfigError('the run shares moments (share = "moments"), which a JAX learner cannot: leave share out')

    def find_unmerged(self, rule: FrozenRule) -> UnmergedTensors:
        return NothingUnmerged(nn.Module(), None, rule)

    def watch_inputs(self, wanted: Callable[[], bool]) -> InputDigest:
        return InputDigest(nn.Module(), wanted)  # which is never called: JAX has no hooks

    # ---- capture and restore ------------------------------------------------------------------------------------

    def begin_capture(
        self,
        extras: Mapping[str, Stateful],
        *,
        parameters: bool = True,
        rng: bool = True,
        room: TakenRoom | None = None,
        steady: Sequence[torch.Tensor] = (),
    ) -> BegunSnapshot:
        own = self._kept().items() if parameters else ()
        return capture(own, self._things(extras), rng=rng, room=room, steady=steady)

    def restore(
        self, extras: Mapping[str, Stateful], snapshot: Snapshot, *, parameters: bool = True, rng: bool = True
    ) -> None:
        own, prefixes = (self._kept(), ("model/",)) if parameters else ({}, ("buffers/",))
        restore_captured(own, self._things(extras), snapshot, prefixes=prefixes, device=CPU, rng=rng)
        self._state_unseen = True
        if parameters:
            self.note_adopted(self._names)

    def take_peer_state(self, extras: Mapping[str, Stateful], came: Snapshot) -> None:
        things = self._things(extras)
        allowed = Snapshot(came.tensors, {path: came.states[path] for path in things if path in came.states})
        try:
            self._inner.check_peer(came)
            restore_captured({}, things, allowed, prefixes=("buffers/",), device=CPU, rng=False)
        except OtherLibrary:
            raise
        except ConfigError as error:
            raise PeerError(str(error)) from None
        self._state_unseen = True

    def large_tensors(self) -> Iterator[torch.Tensor]:
        for array in [*self._params.arrays, *self._inner.tree.arrays]:
            yield torch.empty(array.nbytes, dtype=torch.uint8, device="meta")

    def reset_optimizer(self) -> bool:
        self._inner.reset()
        self._state_unseen = True
        return bool(self._inner.tree.arrays)

    def _kept(self) -> dict[str, torch.Tensor]:
        return {f"model/{name}": self._host[name] for name in self._names}

    def _things(self, extras: Mapping[str, Stateful]) -> dict[str, Stateful]:
        return {**extras_by_path(extras), "optimizer": self._inner}


class NothingUnmerged(UnmergedTensors):
    """All arrays of the tree are merged."""

    def describe(self) -> None:
        nothing = digest_tensors({})
        self.digest = "" if self._rule == "mine" else f"{nothing}-{nothing}"


def _is_chosen(chosen: Chosen, name: str) -> bool:
    return bool(chosen(name)) if callable(chosen) else name in chosen


def _is_embedding(name: str) -> bool:
    """As flax calls it."""
    return name.rpartition(".")[2] == "embedding"
