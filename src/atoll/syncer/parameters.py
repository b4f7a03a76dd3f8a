"""The global parameters and the outer optimizer's state: Θ, momentum, versions.

What a cut holds and the outer gradients of the rounds after it give all of it again, bit for bit. A committed version
is never written to: the outer step writes beside it, and a commit exchanges the two. A version that is being read by a
learner or written to a cut stays untouched until the reader lets go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from atoll.config import Outer
from atoll.fabric.handlers import ServedFragment
from atoll.fabric.wire import digest
from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.fragments import FragmentPlan, elements
from atoll.numerics.kernels import read_only, square_norms
from atoll.numerics.merge import merge
from atoll.numerics.outer import take_outer_step
from atoll.protocol.errors import PeerError

OLD = 2
"""Versions of a fragment before the committed one that slow readers may hold."""


class Overflow(ValueError):
    """The outer step was not finite; the fragment's outer state was broken by it and starts anew."""


class Buffer:
    """One fragment's values, and how many readers hold them."""

    __slots__ = ("cuts", "digest", "readers", "round", "values", "version")

    def __init__(self, size: int) -> None:
        self.values: FloatArray = np.zeros(size, dtype=np.float32)
        self.readers = 0
        self.cuts: dict[Reader, Callable[[], None]] = {}
        """How to cut off those readers that can be, while they read."""
        self.version = -1
        self.round = -1
        self.digest = ""


class Reader:
    """One that holds a buffer's values until it lets go."""

    __slots__ = ("_buffer", "_holds")

    def __init__(self, buffer: Buffer) -> None:
        self._buffer, self._holds = buffer, True
        buffer.readers += 1

    def on_cut(self, cut: Callable[[], None]) -> None:
        if self._holds:
            self._buffer.cuts[self] = cut

    def release(self) -> None:
        """Its connection is another's business from now on: nothing of it stays here."""
        if self._holds:
            self._holds = False
            self._buffer.readers -= 1
            self._buffer.cuts.pop(self, None)


class Parameters:
    def __init__(self, plan: FragmentPlan, outer: Outer) -> None:
        self.plan = plan
        self._rule = outer.merge
        self._optimizer = outer.make()
        self._committed = [Buffer(part.size) for part in plan.fragments]
        self._spare: list[list[Buffer]] = [[] for _ in plan.fragments]
        self._staged: dict[int, Buffer] = {}
        self._state = [
            {name: np.zeros(part.size, dtype=np.float32) for name in self._optimizer.slots()} for part in plan.fragments
        ]
        self._delta: FloatArray = np.empty(plan.largest, dtype=np.float32)

    # ---- version 0 ----------------------------------------------------------------------------------------------

    def initial_bytes(self, fragment: int) -> memoryview:
        """Where version 0 of a fragment is received."""
        return self._committed[fragment].values.view(np.uint8).data

    def check_initial(self, fragment: int, mark: str) -> str | None:
        buffer = self._committed[fragment]
        buffer.digest = mark
        return None if _finite(buffer.values) else f"fragment {fragment} of the first parameters is not finite"

    def commit_initial(self) -> None:
        for buffer in self._committed:
            buffer.version = 0

    # ---- rounds -------------------------------------------------------------------------------------------------

    def stage_merge(
        self,
        fragment: int,
        deltas: Sequence[FloatArray],
        weights: Sequence[float],
        factors: Sequence[FloatArray] = (),
        bases: Sequence[int] = (),
    ) -> str:
        """Merge and take the outer step beside the committed version. Returns its digest; ValueError: void.

        `bases`: the version that each was made on. Steps of parameters add up, whatever they were made on; a buffer
        (a variance, say) that two learners saw fall from the same version must not fall twice.
        """
        part = self.plan.fragments[fragment]
        if part.buffers.stop > 0:
            current = self._committed[fragment].version
            paired = zip(deltas, bases, strict=True)
            deltas = [delta if base == current else _without(delta, part.buffers) for delta, base in paired]
        merge(part, deltas, weights, self.outer_gradient(fragment), self._rule, factors)
        return self._stage_step(fragment)

    def momentum(self, fragment: int) -> FloatArray | None:
        """Where the outer step has been going, if it keeps that and has made one."""
        momentum = self._state[fragment].get("momentum")
        return momentum if momentum is not None and momentum.any() else None

    def outer_gradient(self, fragment: int) -> FloatArray:
        """Of the fragment that was staged last: what the journal keeps."""
        return self._delta[: self.plan.fragments[fragment].size]

    def _stage_step(self, fragment: int) -> str:
        old, new = self._committed[fragment], self._take_buffer(fragment)
        part, delta = self.plan.fragments[fragment], self.outer_gradient(fragment)
        take_outer_step(self._optimizer, part, old.values, new.values, self._state[fragment], delta)
        if not _finite(new.values):
            self._spare[fragment].append(new)
            self.reset_outer_state(fragment)
            raise Overflow("the outer step gave values that are not finite")
        new.digest = digest(new.values.view(np.uint8).data)
        self._staged[fragment] = new
        return new.digest

    def stage_gradient(self, fragment: int, gradient: memoryview) -> str:
        """Take the outer step by a gradient that the journal kept. Returns the digest; ValueError: void."""
        np.copyto(self.outer_gradient(fragment), np.frombuffer(gradient, dtype=np.float32))
        return self._stage_step(fragment)

    def tensor_marks(self, fragment: int) -> bytes:
        """Four bytes for each tensor of what was staged last: not to prove anything, but to tell which one differs."""
        words = self._staged[fragment].values.view(np.uint32)
        starts = [start for start in self.plan.fragments[fragment].offsets if start < len(words)]
        return np.bitwise_xor.reduceat(words, starts).tobytes() if starts else b""

    def reset_outer_state(self, fragment: int) -> None:
        """The outer state starts anew: what overflowed may be in it."""
        for slot in self._state[fragment].values():
            slot.fill(0.0)

    def change_outer(self, outer: Outer) -> None:
        """Other outer settings from the next round on; the state stays."""
        self._rule, self._optimizer = outer.merge, outer.make()

    def commit_version(self, fragment: int, version: int, round: int) -> None:
        new = self._staged.pop(fragment)
        new.version, new.round = version, round
        self._spare[fragment].append(self._committed[fragment])
        self._committed[fragment] = new
        self._disconnect_slow_readers(fragment)

    def _disconnect_slow_readers(self, fragment: int) -> None:
        """So many old versions may still be read; of older ones the readers are cut off, and fetch a newer one."""
        still_read = sorted((one for one in self._spare[fragment] if one.readers), key=lambda one: one.version)
        for buffer in still_read[:-OLD]:
            cuts, buffer.cuts = buffer.cuts, {}
            for cut in cuts.values():
                cut()

    def _take_buffer(self, fragment: int) -> Buffer:
        """A buffer that nobody reads."""
        for buffer in self._spare[fragment]:
            if buffer.readers == 0:
                self._spare[fragment].remove(buffer)
                return buffer
        return Buffer(self.plan.fragments[fragment].size)

    # ---- coming back --------------------------------------------------------------------------------------------

    def replay_round(self, fragment: int, version: int, round: int, gradient: memoryview, mark: str) -> None:
        """A round that the journal tells of. ValueError when it does not give what it gave then."""
        found = self.stage_gradient(fragment, gradient)
        if found != mark:
            raise ValueError(f"round {round} gives fragment {fragment} the digest {found}, the journal says {mark}")
        self.commit_version(fragment, version, round)

    def pack_state(self) -> ByteArray:
        """Θ and the outer state of every fragment, one after the other."""
        parts = [array for index in range(len(self._committed)) for array in self._state_arrays(index)]
        return np.concatenate(parts).view(np.uint8)

    def restore_state(self, packed: ByteArray, versions: Sequence[int], round: int) -> tuple[str, ...]:
        """What `pack_state` gave becomes every fragment's next version; their digests. ValueError: of another model."""
        values, start = packed.view(np.float32), 0
        if len(values) != sum(
            len(array) for index in range(len(self._committed)) for array in self._state_arrays(index)
        ):
            raise ValueError(f"{packed.nbytes} bytes are not the values and outer state of this model")
        for fragment, version in enumerate(versions):
            self._staged[fragment] = new = self._take_buffer(fragment)
            for array in (new.values, *self._state_arrays(fragment)[1:]):
                np.copyto(array, values[start : start + len(array)])
                start += len(array)
            new.digest = digest(new.values.view(np.uint8).data)
            self.commit_version(fragment, version, round)
        return self.digests()

    def _state_arrays(self, fragment: int) -> list[FloatArray]:
        state = self._state[fragment]
        return [self._committed[fragment].values, *(state[name] for name in sorted(state))]

    def digests(self) -> tuple[str, ...]:
        """Of the committed versions."""
        return tuple(buffer.digest for buffer in self._committed)

    def hold_arrays(self) -> dict[str, FloatArray]:
        """Everything, as it is now. Θ is not copied: a committed version is never written to, but it may be used again,
        so it counts as read until its readers let go."""
        arrays: dict[str, FloatArray] = {}
        for index, buffer in enumerate(self._committed):
            buffer.readers += 1
            arrays[f"theta-{index:03d}"] = buffer.values
            for name, slot in self._state[index].items():
                arrays[f"{name}-{index:03d}"] = slot.copy()
        return arrays

    def version_rounds(self) -> list[int]:
        """Per fragment, the round that made its version."""
        return [buffer.round for buffer in self._committed]

    def committed_buffers(self) -> list[Buffer]:
        """The committed versions, for whoever must let go of them."""
        return list(self._committed)

    def load_cut(self, arrays: Mapping[str, ByteArray], versions: Sequence[int], rounds: Sequence[int]) -> None:
        """What a cut holds. ValueError when it is of another model."""
        for index, buffer in enumerate(self._committed):
            _fill(buffer.values, arrays, f"theta-{index:03d}")
            buffer.version, buffer.round = versions[index], rounds[index]
            buffer.digest = digest(buffer.values.view(np.uint8).data)
            for name, slot in self._state[index].items():
                _fill(slot, arrays, f"{name}-{index:03d}")

    # ---- reading ------------------------------------------------------------------------------------------------

    def serve_fragment(self, fragment: int) -> ServedFragment:
        if not 0 <= fragment < len(self._committed):
            raise PeerError(f"there is no fragment {fragment}: the run has {len(self._committed)}")
        buffer = self._committed[fragment]
        if buffer.version < 0:
            raise PeerError("the run has no parameters yet")
        reader, data = Reader(buffer), buffer.values.view(np.uint8).data
        return ServedFragment(buffer.version, buffer.round, buffer.digest, data, reader.release, reader.on_cut)

    def tensors_by_name(self) -> dict[str, FloatArray]:
        """The whole committed model by the names it has there."""
        whole: dict[str, FloatArray] = {}
        for part, buffer in zip(self.plan.fragments, self._committed, strict=True):
            for tensor, start in zip(part.tensors, part.offsets, strict=True):
                whole[tensor.name_in_model] = buffer.values[start : start + elements(tensor)].reshape(tensor.shape)
        return whole


def _without(delta: FloatArray, part: slice) -> FloatArray:
    rest = delta.copy()
    rest[part] = 0.0
    return rest


def _fill(values: FloatArray, arrays: Mapping[str, ByteArray], name: str) -> None:
    if name not in arrays or arrays[name].nbytes != values.nbytes:
        raise ValueError(f"{name} is not in it, or of another size than this model's")
    np.copyto(values, arrays[name].view(np.float32))


def _finite(values: FloatArray) -> bool:
    total = np.zeros(1, dtype=np.float64)
    square_norms(read_only(values), total)
    return bool(np.isfinite(total).all())
