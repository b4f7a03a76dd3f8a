"""The global parameters and the outer optimizer's state: Θ, momentum, versions.

- A cut and the payloads of the rounds after it give all of it again, bit for bit. A payload is the outer gradient; with
  a lossy version codec it is the bytes that changed the version (numerics/updates.py).
- With such a codec each fragment has feedback: what its bytes left out. It is in cuts, and cannot be had from payloads,
  so it starts at zero in every term, and behind a rollback or a reset.
- A committed version is never written to: the outer step writes into another buffer, and a commit exchanges the two.
- A buffer that a learner reads or a cut is written from is not reused before its readers let go. Outer state that a cut
  is written from is copied before the next step changes it.
- For a merge rule that takes Δ = Θ − θ, OLD versions before the committed one are held like those that are read. They
  are forgotten in every new term: a replay has the same ones.
- A version is hashed once, when it is made or has arrived: whoever serves it or writes it to a cut uses that digest.
- Averaged moments lie with the version they belong to, in memory alone: they are in no cut and no payload, and a
  version that is made of those has none.
- What is called on the event loop copies and hashes nothing large.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from atoll.config import Outer
from atoll.digests import DigestInParts, compute_digest
from atoll.fabric.handlers import ServedFragment
from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.compiled import PART, in_parts, read_only, thread_count
from atoll.numerics.fragments import FragmentPlan, assemble_tensors
from atoll.numerics.kernels import check_bits
from atoll.numerics.merge import Cut, cut_fragment, merge, subtracts_from_newest
from atoll.numerics.moments import average_moments
from atoll.numerics.outer import cut_state, lacks_momentum, starts_momentum, take_piece_step
from atoll.numerics.updates import (
    WHOLE,
    apply_update,
    check_version_codec,
    compute_rest,
    decode_update,
    encode_update,
    make_version_codec,
)
from atoll.protocol.errors import PeerError

OLD = 2
"""Versions of a fragment before the committed one that slow readers may hold."""
MOST_STEPS = 32
"""Encoded steps of a fragment that are kept for learners a few versions behind: their digests go into one header."""
FEEDBACK = "feedback"
"""Beside the slots of the outer optimizer."""


FIRST = 65_536
"""Elements that are looked at together for one that is not zero: mostly the first ones have one."""


class Overflow(ValueError):
    """The outer step was not finite. It has spoiled the fragment's outer state, which is reset."""


class Buffer:
    """One fragment's values, and how many readers hold them."""

    __slots__ = ("digest", "disconnects", "marks", "moments", "readers", "round", "values", "version")

    def __init__(self, values: FloatArray) -> None:
        self.values = values
        self.readers = 0
        self.disconnects: dict[Reader, Callable[[], None]] = {}
        """By reader, what closes its connection."""
        self.version = -1
        self.round = -1
        self.digest = ""
        self.marks = b""
        """See `Parameters.piece_marks`."""
        self.moments: AveragedMoments | None = None


class AveragedMoments(NamedTuple):
    """Of the members of the round that made a version."""

    data: ByteArray
    digest: str


class Reader:
    """Holds a buffer's values until it is released."""

    __slots__ = ("_buffer", "_holds")

    def __init__(self, buffer: Buffer) -> None:
        self._buffer, self._holds = buffer, True
        buffer.readers += 1

    def on_disconnect(self, disconnect: Callable[[], None]) -> None:
        if self._holds:
            self._buffer.disconnects[self] = disconnect

    def release(self) -> None:
        """From now on its connection may serve another request: it must not be closed because of this buffer."""
        if self._holds:
            self._holds = False
            self._buffer.readers -= 1
            self._buffer.disconnects.pop(self, None)


class StagedUpdate(NamedTuple):
    """With a lossy version codec, what the round that was staged last changes its fragment by."""

    data: ByteArray
    rest: FloatArray | None
    """The next feedback; None: there is none, or it is not known, since the bytes are the journal's."""
    digest: str
    """Of the bytes."""


class EncodedStep(NamedTuple):
    """What made a version of the one before it."""

    version: int
    data: ByteArray
    digest: str


class VersionCheck:
    """Of a new version, part by part, in any order and by several threads: whether it is finite, its digest, and a
    checksum of each piece."""

    def __init__(self, values: FloatArray) -> None:
        self._values = values
        self.finite = True
        self.digest = DigestInParts(values.view(np.uint8).data)
        self._marks: list[tuple[int, np.uint32]] = []
        """By piece, of its parts."""

    def add_part(self, cut: Cut) -> None:
        finite, mark = check_bits(read_only(self._values[cut.values].view(np.uint32)))
        self.finite = self.finite and finite
        self._marks.append((cut.number, mark))
        self.digest.add_part(4 * cut.values.start, 4 * cut.values.stop)

    def piece_marks(self) -> bytes:
        marks = np.zeros(1 + max(number for number, _ in self._marks), np.uint32)
        for number, mark in self._marks:
            marks[number] ^= mark
        return marks.tobytes()


class Parameters:
    def __init__(self, plan: FragmentPlan, outer: Outer, version_codec: str = WHOLE) -> None:
        check_version_codec(version_codec, outer.optimizer)
        self.plan, self.threads = plan, thread_count()
        self._rule = outer.merge
        self._optimizer = outer.make()
        self._codec = make_version_codec(version_codec, self.threads)
        self._committed = [Buffer(np.zeros(part.size, dtype=np.float32)) for part in plan.fragments]
        self._spare: list[list[Buffer]] = [[] for _ in plan.fragments]
        self._staged: dict[int, Buffer] = {}
        slots = [*self._optimizer.slots(), *([FEEDBACK] if self.has_feedback else [])]
        self._state = [{name: np.zeros(part.size, dtype=np.float32) for name in slots} for part in plan.fragments]
        self._shared: set[int] = set()
        """Fragments whose outer state a cut may still be written from."""
        self._gradients: dict[int, FloatArray] = {}
        """By fragment, the merged gradients of what is staged: one is written to the journal while the next is made."""
        self._spare_gradients: list[FloatArray] = []
        self._updates: dict[int, StagedUpdate] = {}
        self._steps: list[deque[EncodedStep]] = [deque(maxlen=MOST_STEPS) for _ in plan.fragments]
        """Per fragment the newest ones: together fewer bytes than the whole of it."""
        self._bases: list[deque[tuple[Buffer, Reader]]] = [deque() for _ in plan.fragments]
        """Per fragment the versions before the committed one, for a merge rule that needs them."""
        self._without_feedback: set[int] = set()
        """Fragments whose feedback is not known: bytes of the journal were applied to them."""

    @property
    def has_feedback(self) -> bool:
        return self._codec is not None and self._codec.needs_feedback

    # ---- version 0 ----------------------------------------------------------------------------------------------

    def initial_bytes(self, fragment: int) -> memoryview:
        """Version 0 of a fragment, to be filled in place."""
        return self._committed[fragment].values.view(np.uint8).data

    def put_initial(self, fragment: int, values: FloatArray, mark: str) -> None:
        """These are version 0 of a fragment. They are taken over, not copied."""
        assert values.size == self.plan.fragments[fragment].size
        buffer = self._committed[fragment]
        buffer.values, buffer.digest = values, mark

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
        moments: Sequence[ByteArray] = (),
    ) -> str:
        """Merge and take the outer step into a spare buffer. Returns the digest; ValueError: the round is void.

        `bases`: the version that each contribution was made on. Steps of parameters add up, whatever their base. Model
        buffers do not: a variance that two learners saw fall from the same version must not fall twice. A rule that
        takes Δ = Θ − θ changes the deltas in place.
        `moments`: where they are shared, what came with each contribution. Their mean goes with the new version.
        """
        part = self.plan.fragments[fragment]
        if subtracts_from_newest(self._rule):
            self._subtract_from_newest(fragment, deltas, bases)
        if part.buffers.stop > 0:
            current = self._committed[fragment].version
            paired = zip(deltas, bases, strict=True)
            deltas = [delta if base == current else _without(delta, part.buffers) for delta, base in paired]
        mark = self._stage_step(fragment, deltas, weights, factors)
        if moments:
            averaged = average_moments(part, moments, weights, factors, self.threads)
            self._staged[fragment].moments = AveragedMoments(averaged, compute_digest(averaged.data))
        return mark

    def _subtract_from_newest(self, fragment: int, deltas: Sequence[FloatArray], bases: Sequence[int]) -> None:
        """Δ ← Δ + (Θ − base) = Θ − θ. What was made on a base that is not kept stays as it is."""
        newest = self._committed[fragment].values
        kept = {buffer.version: buffer.values for buffer, _ in self._bases[fragment]}
        for delta, base in zip(deltas, bases, strict=True):
            if base in kept:
                _add_difference(delta, newest, kept[base], self.threads)

    def momentum(self, fragment: int) -> FloatArray | None:
        """The outer momentum, where it is off the last gradient; None: this optimizer keeps neither, or no step was
        made."""
        momentum = self._state[fragment].get("momentum")
        if momentum is None:
            return None
        parts = (momentum[start : start + FIRST] for start in range(0, momentum.size, FIRST))
        return momentum if any(part.any() for part in parts) else None

    def outer_gradient(self, fragment: int) -> FloatArray:
        """The merged gradient of what is staged of this fragment."""
        if fragment not in self._gradients:
            spare = self._spare_gradients
            self._gradients[fragment] = spare.pop() if spare else np.empty(self.plan.largest, dtype=np.float32)
        return self._gradients[fragment][: self.plan.fragments[fragment].size]

    def effective_step(self, rho: float) -> float:
        """How far Θ moves for each gradient, where each has the cosine ρ with the one before it."""
        return self._optimizer.effective_step(rho)

    def round_payload(self, fragment: int) -> memoryview:
        """What the journal keeps of what is staged of this fragment."""
        if self._codec is None:
            return self.outer_gradient(fragment).view(np.uint8).data
        return self._updates[fragment].data.data

    def _stage_step(
        self,
        fragment: int,
        deltas: Sequence[FloatArray],
        weights: Sequence[float],
        factors: Sequence[FloatArray] = (),
    ) -> str:
        """Each part of the fragment is merged, stepped, checked and hashed while it is in cache."""
        part, gradient = self.plan.fragments[fragment], self.outer_gradient(fragment)
        if self._codec is not None:
            merge(part, deltas, weights, gradient, self._rule, factors, self.threads)
            return self._stage_update(fragment)
        old, state = self._committed[fragment].values, self._own_state(fragment)
        new = self._take_buffer(fragment)
        check = VersionCheck(new.values)

        def step(cut: Cut) -> None:
            at = cut.values
            held = cut_state(state, at)
            take_piece_step(self._optimizer, cut.piece, old[at], new.values[at], held, gradient[at])
            check.add_part(cut)

        try:
            merge(part, deltas, weights, gradient, self._rule, factors, self.threads, step)
        except ValueError:
            self._spare[fragment].append(new)
            raise
        return self._finish_step(fragment, new, check)

    def _stage_update(self, fragment: int) -> str:
        assert self._codec is not None and fragment not in self._without_feedback, (
            "rounds go on from the journal until the feedback is known"
        )
        part, state, delta = self.plan.fragments[fragment], self._own_state(fragment), self.outer_gradient(fragment)
        data, total = encode_update(self._codec, part, self._optimizer, state, delta, state.get(FEEDBACK), self.threads)
        try:
            update = decode_update(self._codec, part, data)
        except ValueError:
            update = np.full(part.size, np.nan, np.float32)  # what is not finite has no bytes
        mark = self._apply_update(fragment, update)
        rest = compute_rest(part, total, update) if self.has_feedback else None
        self._updates[fragment] = StagedUpdate(data, rest, compute_digest(data.data))
        return mark

    def _apply_update(self, fragment: int, update: FloatArray) -> str:
        part, new = self.plan.fragments[fragment], self._take_buffer(fragment)
        old, state = self._committed[fragment].values, self._own_state(fragment)
        apply_update(self._optimizer, part, old, new.values, state, update, self.threads)
        check, cuts = VersionCheck(new.values), cut_fragment(part)
        in_parts(lambda first, _: check.add_part(cuts[first]), len(cuts), 1, self.threads)
        return self._finish_step(fragment, new, check)

    def _finish_step(self, fragment: int, new: Buffer, check: VersionCheck) -> str:
        if not check.finite:
            self._spare[fragment].append(new)
            self.reset_outer_state(fragment)
            raise Overflow("the outer step gave values that are not finite")
        new.digest, new.marks = check.digest.finish(), check.piece_marks()
        self._staged[fragment] = new
        return new.digest

    def stage_payload(self, fragment: int, payload: memoryview) -> str:
        """Take the outer step as the journal keeps it. Returns the digest; ValueError: it gives no such step."""
        part = self.plan.fragments[fragment]
        if self._codec is None:
            if payload.nbytes != 4 * part.size:
                raise ValueError(f"{payload.nbytes} bytes are no outer gradient of fragment {fragment}")
            return self._stage_step(fragment, [np.frombuffer(payload, dtype=np.float32)], [1.0])
        data = np.frombuffer(payload, dtype=np.uint8)
        mark = self._apply_update(fragment, decode_update(self._codec, part, data))
        self._updates[fragment] = StagedUpdate(data, None, compute_digest(payload))
        return mark

    def piece_marks(self, fragment: int) -> bytes:
        """A 4-byte checksum of each piece that was staged last: tells which tensor differs in a replay."""
        return self._staged[fragment].marks

    def reset_outer_state(self, fragment: int) -> None:
        """Set the outer state and the feedback to zero: they may contain what overflowed."""
        for slot in self._own_state(fragment).values():
            slot.fill(0.0)
        self._without_feedback.discard(fragment)

    def begin_term(self) -> None:
        """A new term begins: nothing was left out before it, and no base of before it is kept."""
        for fragment in range(len(self._committed)):
            self._set_feedback(fragment, None)
            self._keep_bases(fragment, 0)
        self._without_feedback.clear()

    def knows_feedback(self, fragment: int) -> bool:
        """Whether a round of it can be made of its contributions."""
        return fragment not in self._without_feedback

    def _set_feedback(self, fragment: int, rest: FloatArray | None) -> None:
        """In an array of its own: a cut may be written from the one before. None: zero."""
        if self.has_feedback:
            size = self.plan.fragments[fragment].size
            self._state[fragment][FEEDBACK] = np.zeros(size, dtype=np.float32) if rest is None else rest

    def _own_state(self, fragment: int) -> dict[str, FloatArray]:
        """The outer state, to be changed: a cut that is written from it keeps the arrays that it has."""
        if fragment in self._shared:
            self._state[fragment] = {name: slot.copy() for name, slot in self._state[fragment].items()}
            self._shared.discard(fragment)
        return self._state[fragment]

    def change_outer(self, outer: Outer) -> None:
        """Use other outer settings from the next round on; the state stays, but momentum begins at zero."""
        self._rule, before, self._optimizer = outer.merge, self._optimizer, outer.make()
        if not subtracts_from_newest(self._rule):
            for fragment in range(len(self._committed)):
                self._keep_bases(fragment, 0)
        if starts_momentum(before, self._optimizer):
            for fragment in range(len(self._committed)):
                for slot in before.slots():
                    self._own_state(fragment)[slot].fill(0.0)

    def commit_version(self, fragment: int, version: int, round: int) -> None:
        new, update = self._staged.pop(fragment), self._updates.pop(fragment, None)
        if (gradient := self._gradients.pop(fragment, None)) is not None:
            self._spare_gradients.append(gradient)
        new.version, new.round = version, round
        self._keep_feedback(fragment, update)
        self._keep_step(fragment, version, update)
        self._spare[fragment].append(before := self._committed[fragment])
        self._committed[fragment] = new
        if subtracts_from_newest(self._rule):
            self._bases[fragment].append((before, Reader(before)))
            self._keep_bases(fragment, OLD)
        self._disconnect_slow_readers(fragment)

    def _keep_bases(self, fragment: int, count: int) -> None:
        """The newest ones; the others are let go."""
        while len(self._bases[fragment]) > count:
            self._bases[fragment].popleft()[1].release()

    def _keep_step(self, fragment: int, version: int, update: StagedUpdate | None) -> None:
        """A rollback is no step: whoever holds an older version takes the new one whole."""
        steps = self._steps[fragment]
        if update is None:
            steps.clear()
            return
        steps.append(EncodedStep(version, update.data, update.digest))
        while steps and len(steps) * update.data.nbytes >= 4 * self.plan.fragments[fragment].size:
            steps.popleft()

    def _keep_feedback(self, fragment: int, update: StagedUpdate | None) -> None:
        """What the round left out is the feedback of the next; behind a rollback there is none."""
        if update is None or update.rest is not None or not self.has_feedback:
            self._set_feedback(fragment, None if update is None else update.rest)
            self._without_feedback.discard(fragment)
        else:
            self._without_feedback.add(fragment)

    def _disconnect_slow_readers(self, fragment: int) -> None:
        """OLD versions may still be read. Readers of older ones are disconnected, and fetch a newer version."""
        still_read = sorted((one for one in self._spare[fragment] if one.readers), key=lambda one: one.version)
        for buffer in still_read[:-OLD]:
            disconnects, buffer.disconnects = buffer.disconnects, {}
            for disconnect in disconnects.values():
                disconnect()

    def _take_buffer(self, fragment: int) -> Buffer:
        """A spare buffer that nobody reads, or a new one."""
        for buffer in self._spare[fragment]:
            if buffer.readers == 0:
                self._spare[fragment].remove(buffer)
                buffer.moments = None
                return buffer
        return Buffer(np.empty(self.plan.fragments[fragment].size, dtype=np.float32))

    # ---- recovery and cuts --------------------------------------------------------------------------------------

    def keep_no_steps(self) -> None:
        """Nobody is served from this model: the encoded steps of a replay are not kept."""
        self._steps = [deque(maxlen=0) for _ in self.plan.fragments]

    def replay_round(self, fragment: int, version: int, round: int, payload: memoryview, mark: str) -> None:
        """Apply a round of the journal. ValueError: its digest is not the one of then."""
        found = self.stage_payload(fragment, payload)
        if found != mark:
            raise ValueError(f"round {round} gives fragment {fragment} the digest {found}, the journal says {mark}")
        self.commit_version(fragment, version, round)

    def pack_state(self) -> ByteArray:
        """Θ and the outer state of every fragment, one after the other. Where momentum is off, as zero: it may be on
        when the run comes back to this."""
        parts: list[FloatArray] = []
        for index in range(len(self._committed)):
            theta, *slots = self._state_arrays(index)
            if lacks_momentum(self._optimizer):
                slots = [np.broadcast_to(np.float32(0.0), slot.shape) for slot in slots]
            parts += [theta, *slots]
        return np.concatenate(parts).view(np.uint8)

    def restore_state(self, packed: ByteArray, versions: Sequence[int], round: int) -> tuple[str, ...]:
        """What `pack_state` gave becomes every fragment's next version; their digests. ValueError: of another model."""
        return self.take_state(packed.copy(), versions, round)

    def take_state(
        self, packed: ByteArray, versions: Sequence[int], round: int, digests: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """The same, without a copy: the memory is this model's from now on. `digests`: of the values, where known."""
        values, start = packed.view(np.float32), 0
        if len(values) != sum(
            len(array) for index in range(len(self._committed)) for array in self._state_arrays(index)
        ):
            raise ValueError(f"{packed.nbytes} bytes are not the values and outer state of this model")
        for fragment, version in enumerate(versions):
            size = self.plan.fragments[fragment].size
            names = ("", *self._packed_slots(fragment))
            parts = {name: values[start + at * size :][:size] for at, name in enumerate(names)}
            start += size * len(names)
            self._staged[fragment] = new = Buffer(parts.pop(""))
            new.digest = digests[fragment] if digests else compute_digest(new.values.view(np.uint8).data)
            self._state[fragment] = parts
            self._set_feedback(fragment, None)
            self._shared.discard(fragment)
            self.commit_version(fragment, version, round)
        return self.digests()

    def _state_arrays(self, fragment: int) -> list[FloatArray]:
        state = self._state[fragment]
        return [self._committed[fragment].values, *(state[name] for name in self._packed_slots(fragment))]

    def _packed_slots(self, fragment: int) -> list[str]:
        """All but the feedback: behind a rollback it starts at zero."""
        return sorted(self._state[fragment].keys() - {FEEDBACK})

    def digests(self) -> tuple[str, ...]:
        """Of the committed versions."""
        return tuple(buffer.digest for buffer in self._committed)

    def hold_arrays(self) -> dict[str, FloatArray]:
        """Θ and the outer state as they are now, while no round is merged. Nothing is copied. The buffers of Θ count as
        read: whoever asked for them takes 1 from the `readers` of each when all is written. Outer state is copied
        before it is changed."""
        arrays: dict[str, FloatArray] = {}
        for index, buffer in enumerate(self._committed):
            buffer.readers += 1
            arrays[f"theta-{index:03d}"] = buffer.values
            for name, slot in self._state[index].items():
                arrays[f"{name}-{index:03d}"] = slot
            self._shared.add(index)
        return arrays

    def known_digests(self) -> dict[str, str]:
        """Of the arrays that `hold_arrays` gives, those whose digest is known: Θ's."""
        return {f"theta-{index:03d}": buffer.digest for index, buffer in enumerate(self._committed)}

    def version_rounds(self) -> list[int]:
        """Per fragment, the round that made its version."""
        return [buffer.round for buffer in self._committed]

    def committed_buffers(self) -> list[Buffer]:
        """The buffers of the committed versions."""
        return list(self._committed)

    def values_of_version(self, fragment: int, version: int) -> FloatArray | None:
        """The committed values of the fragment; None: they are of another version, or there is no such fragment."""
        buffer = self._committed[fragment] if 0 <= fragment < len(self._committed) else None
        return buffer.values if buffer is not None and buffer.version == version else None

    def load_cut(
        self,
        arrays: Mapping[str, ByteArray],
        digests: Mapping[str, str],
        versions: Sequence[int],
        rounds: Sequence[int],
    ) -> None:
        """Take over what a cut holds, with the digests that it was checked against. ValueError: it is of another
        model."""
        if not self.has_feedback and any(name.startswith(f"{FEEDBACK}-") for name in arrays):
            raise ValueError("it holds the feedback of another version_codec")
        for index, part in enumerate(self.plan.fragments):
            self._keep_bases(index, 0)
            theta = f"theta-{index:03d}"
            self._committed[index] = buffer = Buffer(_array_of(arrays, theta, part.size))
            buffer.version, buffer.round, buffer.digest = versions[index], rounds[index], digests[theta]
            self._state[index] = {
                name: _array_of(arrays, f"{name}-{index:03d}", part.size) for name in self._state[index]
            }
        self._without_feedback.clear()

    # ---- reading ------------------------------------------------------------------------------------------------

    def serve_fragment(self, fragment: int, have: int = -1) -> ServedFragment:
        """`have`: the version that the reader holds. It gets the steps from there, where they are kept, and the whole
        otherwise."""
        if not 0 <= fragment < len(self._committed):
            raise PeerError(f"there is no fragment {fragment}: the run has {len(self._committed)}")
        buffer = self._committed[fragment]
        if buffer.version < 0:
            raise PeerError("the run has no parameters yet")
        reader, data = Reader(buffer), buffer.values.view(np.uint8).data
        steps = tuple((one.digest, one.data.data) for one in self._steps_since(fragment, have))
        held = (reader.release, reader.on_disconnect)
        return ServedFragment(buffer.version, buffer.round, buffer.digest, data, *held, steps)

    def serve_moments(self, fragment: int, version: int) -> ServedFragment:
        """The averaged moments of the committed version; PeerError: it is another one by now, or has none."""
        buffer = self._committed[fragment] if 0 <= fragment < len(self._committed) else None
        if buffer is None or buffer.version != version or buffer.moments is None:
            raise PeerError(f"there are no averaged moments of version {version} of fragment {fragment}")
        reader, (data, digest) = Reader(buffer), buffer.moments
        return ServedFragment(buffer.version, buffer.round, digest, data.data, reader.release, reader.on_disconnect)

    def _steps_since(self, fragment: int, have: int) -> list[EncodedStep]:
        """From that version to the committed one; none where some are not kept."""
        steps = [one for one in self._steps[fragment] if one.version > have]
        return steps if steps and steps[0].version == have + 1 else []

    def tensors_by_name(self) -> dict[str, FloatArray]:
        """The whole committed model, by the names of its tensors."""
        return assemble_tensors(self.plan, [buffer.values for buffer in self._committed])


def _add_difference(delta: FloatArray, newest: FloatArray, base: FloatArray, threads: int) -> None:
    """Δ ← Δ + (Θ − base), in place and without an array of its size."""

    def work(first: int, last: int) -> None:
        delta[first:last] += newest[first:last] - base[first:last]

    in_parts(work, delta.size, PART, threads)


def _without(delta: FloatArray, part: slice) -> FloatArray:
    rest = delta.copy()
    rest[part] = 0.0
    return rest


def _array_of(arrays: Mapping[str, ByteArray], name: str, size: int) -> FloatArray:
    if name not in arrays or arrays[name].nbytes != 4 * size:
        raise ValueError(f"{name} is not in it, or of another size than this model's")
    return arrays[name].view(np.float32)


def is_finite(values: FloatArray) -> bool:
    return check_bits(read_only(values.view(np.uint32)))[0]
