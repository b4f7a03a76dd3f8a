"""The global parameters and the outer optimizer's state: Θ, momentum, versions.

- A cut and the payloads of the rounds after it give all of it again, bit for bit. A payload is the outer gradient; with
  a lossy version codec it is the bytes that changed the version (numerics/updates.py).
- A round is staged first: its outer step writes into a buffer beside the committed version (versions.py) and changes
  the fragment's outer state (outer_state.py). `commit_version` makes that buffer the committed version.
- In a syncer of several shards (docs/adr/0031) a staged round may be taken back (`drop_staged`): another shard could
  not stage its part. A part may be empty.
- Versions before the committed one, and feedback, are forgotten in every new term: a replay has the same ones.
- What is called on the event loop copies and hashes nothing large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from atoll.config import Outer
from atoll.digests import compute_digest
from atoll.fabric.handlers import ServedFragment
from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.compiled import in_parts, thread_count
from atoll.numerics.deltas import ChangedDelta, GivenDelta, ReadableDelta, as_readable
from atoll.numerics.fragments import Fragment, FragmentPlan, Piece, assemble_tensors
from atoll.numerics.merge import Cut, NormExchange, cut_fragment, merge, subtracts_from_newest
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
from atoll.syncer.outer_state import FEEDBACK, OuterState, Overflow
from atoll.syncer.versions import (
    AveragedMoments,
    CodedVersion,
    EncodedStep,
    FragmentVersions,
    VersionBuffer,
    VersionCheck,
)


class StagedUpdate(NamedTuple):
    """With a lossy version codec, what the round that was staged last changes its fragment by."""

    data: ByteArray
    rest: FloatArray | None
    """The next feedback; None: there is none, or it is not known, since the bytes are the journal's."""
    digest: str
    """Of the bytes."""


class Parameters:
    def __init__(self, plan: FragmentPlan, outer: Outer, version_codec: str = WHOLE, *, may_drop: bool = False) -> None:
        """`may_drop`: what is staged may be taken back, at the price of a copy of its outer state."""
        self._may_drop = may_drop
        self._before: dict[int, dict[str, FloatArray]] = {}
        """By fragment, the outer state before what is staged."""
        check_version_codec(version_codec, outer.optimizer)
        self.plan, self.threads = plan, thread_count()
        self._rule = outer.merge
        self._optimizer = outer.make()
        self._codec = make_version_codec(version_codec, self.threads)
        self._versions = [FragmentVersions(part.size) for part in plan.fragments]
        slots, feedback = self._optimizer.slots(), self.has_feedback
        self._state = [OuterState(part.size, slots, has_feedback=feedback) for part in plan.fragments]
        self._staged: dict[int, VersionBuffer] = {}
        self._gradients: dict[int, FloatArray] = {}
        """By fragment, the merged gradients of what is staged: one is written to the journal while the next is made."""
        self._spare_gradients: list[FloatArray] = []
        self._updates: dict[int, StagedUpdate] = {}

    @property
    def rule(self) -> str:
        """By which the next round is merged."""
        return self._rule

    @property
    def has_feedback(self) -> bool:
        return self._codec is not None and self._codec.needs_feedback

    # ---- version 0 ----------------------------------------------------------------------------------------------

    def initial_bytes(self, fragment: int) -> memoryview:
        """Version 0 of a fragment, to be filled in place."""
        return self._versions[fragment].committed.values.view(np.uint8).data

    def put_initial(self, fragment: int, values: FloatArray, mark: str, coded: CodedVersion | None = None) -> None:
        """These are version 0 of a fragment. They are taken over, not copied. `coded`: the same in 2 bytes a value."""
        assert values.size == self.plan.fragments[fragment].size
        buffer = self._versions[fragment].committed
        buffer.values, buffer.digest, buffer.coded = values, mark, coded

    def commit_initial(self) -> None:
        for buffer in self.committed_buffers():
            buffer.version = 0

    # ---- rounds -------------------------------------------------------------------------------------------------

    def stage_merge(
        self,
        fragment: int,
        deltas: Sequence[GivenDelta],
        weights: Sequence[float],
        factors: Sequence[FloatArray] = (),
        bases: Sequence[int] = (),
        moments: Sequence[ByteArray] = (),
        exchange: NormExchange | None = None,
    ) -> str:
        """Merge and take the outer step into a spare buffer. Returns the digest; ValueError: the round is void.

        `bases`: the version that each contribution was made on. Steps of parameters add up, whatever their base. Model
        buffers do not: a variance that two learners saw fall from the same version must not fall twice.
        `moments`: where they are shared, what came with each contribution. Their mean goes with the new version.
        `exchange`: how to learn the norms of pieces that go on in other shards.
        """
        part = self.plan.fragments[fragment]
        if part.size == 0:
            return self._stage_nothing(fragment)
        if self._may_drop:
            self._before[fragment] = dict(self._state[fragment].share_arrays())
        if subtracts_from_newest(self._rule):
            deltas = self._subtract_from_newest(fragment, deltas, bases)
        if part.buffers.stop > 0:
            current = self._versions[fragment].committed.version
            paired = zip(deltas, bases, strict=True)
            deltas = [delta if base == current else _without_buffers(part, delta) for delta, base in paired]
        mark = self._stage_step(fragment, deltas, weights, factors, exchange)
        if moments:
            averaged = average_moments(part, moments, weights, factors, self.threads)
            self._staged[fragment].moments = AveragedMoments(averaged, compute_digest(averaged.data))
        return mark

    def _stage_nothing(self, fragment: int) -> str:
        new = self._versions[fragment].take_buffer()
        new.digest, new.marks = compute_digest(b""), b""
        if self._codec is not None:
            self._updates[fragment] = StagedUpdate(np.empty(0, np.uint8), np.empty(0, np.float32), new.digest)
        self._staged[fragment] = new
        return new.digest

    def drop_staged(self, fragment: int) -> None:
        """All is as before it was staged."""
        self._versions[fragment].return_buffer(self._staged.pop(fragment))
        self._updates.pop(fragment, None)
        self._free_gradient(fragment)
        if (before := self._before.pop(fragment, None)) is not None:
            self._state[fragment].replace_arrays(before)
            self._state[fragment].share_arrays()  # a cut may still be written from them

    def _subtract_from_newest(
        self, fragment: int, deltas: Sequence[GivenDelta], bases: Sequence[int]
    ) -> list[GivenDelta]:
        """Δ + (Θ − base) = Θ − θ. What was made on a base that is not kept stays as it is."""
        part, newest = self.plan.fragments[fragment], self._versions[fragment].committed.values
        kept = self._versions[fragment].values_by_base()
        return [
            _with_difference(part, delta, newest, kept[base]) if base in kept else delta
            for delta, base in zip(deltas, bases, strict=True)
        ]

    def momentum(self, fragment: int) -> FloatArray | None:
        """The outer momentum, or the last gradient where momentum is off; None: there is neither."""
        return self._state[fragment].momentum()

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
        deltas: Sequence[GivenDelta],
        weights: Sequence[float],
        factors: Sequence[FloatArray] = (),
        exchange: NormExchange | None = None,
    ) -> str:
        """Each part of the fragment is merged, stepped, checked and hashed while it is in cache."""
        part, gradient = self.plan.fragments[fragment], self.outer_gradient(fragment)
        if self._codec is not None:
            merge(part, deltas, weights, gradient, self._rule, factors, self.threads, exchange=exchange)
            return self._stage_update(fragment)
        versions, state = self._versions[fragment], self._state[fragment].own_arrays()
        old, new = versions.committed.values, versions.take_buffer()
        check = VersionCheck(new.values)

        def step(cut: Cut) -> None:
            at = cut.values
            held = cut_state(state, at)
            take_piece_step(self._optimizer, cut.piece, old[at], new.values[at], held, gradient[at])
            check.add_part(cut)

        try:
            merge(part, deltas, weights, gradient, self._rule, factors, self.threads, step, exchange)
        except ValueError:
            versions.return_buffer(new)
            raise
        return self._finish_step(fragment, new, check)

    def _stage_update(self, fragment: int) -> str:
        assert self._codec is not None and self.knows_feedback(fragment), (
            "rounds go on from the journal until the feedback is known"
        )
        part, delta = self.plan.fragments[fragment], self.outer_gradient(fragment)
        state = self._state[fragment].own_arrays()
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
        part, versions = self.plan.fragments[fragment], self._versions[fragment]
        old, new, state = versions.committed.values, versions.take_buffer(), self._state[fragment].own_arrays()
        apply_update(self._optimizer, part, old, new.values, state, update, self.threads)
        check, cuts = VersionCheck(new.values), cut_fragment(part)
        in_parts(lambda first, _: check.add_part(cuts[first]), len(cuts), 1, self.threads)
        return self._finish_step(fragment, new, check)

    def _finish_step(self, fragment: int, new: VersionBuffer, check: VersionCheck) -> str:
        if not check.finite:
            self._versions[fragment].return_buffer(new)
            self.reset_outer_state(fragment)
            raise Overflow("the outer step gave values that are not finite")
        new.digest, new.marks = check.digest.finish(), check.piece_marks()
        self._staged[fragment] = new
        return new.digest

    def stage_payload(self, fragment: int, payload: memoryview) -> str:
        """Take the outer step as the journal keeps it. Returns the digest; ValueError: it gives no such step."""
        part = self.plan.fragments[fragment]
        if part.size == 0:
            return self._stage_nothing(fragment)
        if self._codec is None:
            if payload.nbytes != 4 * part.size:
                raise ValueError(f"{payload.nbytes} bytes are no outer gradient of fragment {fragment}")
            return self._stage_step(fragment, [np.frombuffer(payload, dtype=np.float32)], [1.0])
        data = np.frombuffer(payload, dtype=np.uint8)
        mark = self._apply_update(fragment, decode_update(self._codec, part, data))
        self._updates[fragment] = StagedUpdate(data, None, compute_digest(payload))
        return mark

    def staged_values(self, fragment: int) -> FloatArray:
        """Of the version that was staged last."""
        return self._staged[fragment].values

    def piece_marks(self, fragment: int) -> bytes:
        """A 4-byte checksum of each piece that was staged last: tells which tensor differs in a replay."""
        return self._staged[fragment].marks

    def reset_outer_state(self, fragment: int) -> None:
        """Set the outer state and the feedback to zero: they may contain what overflowed."""
        self._state[fragment].reset_all()

    def begin_term(self) -> None:
        """A new term begins: nothing was left out before it, and no base of before it is kept."""
        for versions, state in zip(self._versions, self._state, strict=True):
            versions.forget_bases()
            state.set_feedback(None)

    def knows_feedback(self, fragment: int) -> bool:
        """Whether a round of it can be made of its contributions."""
        return self._state[fragment].knows_feedback

    def change_outer(self, outer: Outer) -> None:
        """Use other outer settings from the next round on; the state stays, but momentum begins at zero."""
        self._rule, before, self._optimizer = outer.merge, self._optimizer, outer.make()
        if not subtracts_from_newest(self._rule):
            for versions in self._versions:
                versions.forget_bases()
        if starts_momentum(before, self._optimizer):
            for state in self._state:
                state.reset_slots(before.slots())

    def commit_version(self, fragment: int, version: int, round: int) -> None:
        new, update = self._staged.pop(fragment), self._updates.pop(fragment, None)
        self._before.pop(fragment, None)
        self._free_gradient(fragment)
        new.version, new.round = version, round
        self._keep_feedback(fragment, update)
        step = None if update is None else EncodedStep(version, update.data, update.digest)
        self._versions[fragment].commit_buffer(new, step, keep_base=subtracts_from_newest(self._rule))

    def _free_gradient(self, fragment: int) -> None:
        if (gradient := self._gradients.pop(fragment, None)) is not None:
            self._spare_gradients.append(gradient)

    def _keep_feedback(self, fragment: int, update: StagedUpdate | None) -> None:
        """What the round left out is the feedback of the next; behind a rollback there is none."""
        if update is not None and update.rest is None:
            self._state[fragment].forget_feedback()
        else:
            self._state[fragment].set_feedback(None if update is None else update.rest)

    # ---- recovery and cuts --------------------------------------------------------------------------------------

    def keep_no_steps(self) -> None:
        """Nobody is served from this model: the encoded steps of a replay are not kept."""
        for versions in self._versions:
            versions.keep_no_steps()

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
        for index in range(len(self._versions)):
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
            len(array) for index in range(len(self._versions)) for array in self._state_arrays(index)
        ):
            raise ValueError(f"{packed.nbytes} bytes are not the values and outer state of this model")
        for fragment, version in enumerate(versions):
            size = self.plan.fragments[fragment].size
            names = ("", *self._state[fragment].packed_arrays())
            parts = {name: values[start + at * size :][:size] for at, name in enumerate(names)}
            start += size * len(names)
            self._staged[fragment] = new = VersionBuffer(parts.pop(""))
            new.digest = digests[fragment] if digests else compute_digest(new.values.view(np.uint8).data)
            self._state[fragment].replace_arrays(parts)
            self.commit_version(fragment, version, round)
        return self.digests()

    def _state_arrays(self, fragment: int) -> list[FloatArray]:
        return [self._versions[fragment].committed.values, *self._state[fragment].packed_arrays().values()]

    def digests(self) -> tuple[str, ...]:
        """Of the committed versions."""
        return tuple(buffer.digest for buffer in self.committed_buffers())

    def hold_arrays(self) -> dict[str, FloatArray]:
        """Θ and the outer state as they are now, while no round is merged. Nothing is copied. The buffers of Θ count as
        read: whoever asked for them takes 1 from the `readers` of each when all is written. Outer state is copied
        before it is changed."""
        arrays: dict[str, FloatArray] = {}
        for index, buffer in enumerate(self.committed_buffers()):
            buffer.readers += 1
            arrays[f"theta-{index:03d}"] = buffer.values
            for name, array in self._state[index].share_arrays().items():
                arrays[f"{name}-{index:03d}"] = array
        return arrays

    def known_digests(self) -> dict[str, str]:
        """Of the arrays that `hold_arrays` gives, those whose digest is known: Θ's."""
        return {f"theta-{index:03d}": buffer.digest for index, buffer in enumerate(self.committed_buffers())}

    def version_rounds(self) -> list[int]:
        """Per fragment, the round that made its version."""
        return [buffer.round for buffer in self.committed_buffers()]

    def committed_buffers(self) -> list[VersionBuffer]:
        """The buffers of the committed versions."""
        return [versions.committed for versions in self._versions]

    def values_of_version(self, fragment: int, version: int) -> FloatArray | None:
        """The committed values of the fragment; None: they are of another version, or there is no such fragment."""
        buffer = self._versions[fragment].committed if self._has_fragment(fragment) else None
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
            theta = f"theta-{index:03d}"
            values = _array_of(arrays, theta, part.size)
            self._versions[index].replace_committed(values, versions[index], rounds[index], digests[theta])
            state = self._state[index]
            state.replace_arrays({name: _array_of(arrays, f"{name}-{index:03d}", part.size) for name in state.names()})

    # ---- reading ------------------------------------------------------------------------------------------------

    def serve_fragment(self, fragment: int, have: int = -1, codec: str = "") -> ServedFragment:
        """`have`: the version that the reader holds. It gets the steps from there, where they are kept, and the whole
        otherwise. `codec`: a form of version 0 that it can read."""
        if not self._has_fragment(fragment):
            raise PeerError(f"there is no fragment {fragment}: the run has {len(self._versions)}")
        return self._versions[fragment].serve_values(have, codec)

    def serve_moments(self, fragment: int, version: int) -> ServedFragment:
        """The averaged moments of the committed version; PeerError: it is another one by now, or has none."""
        served = self._versions[fragment].serve_moments(version) if self._has_fragment(fragment) else None
        if served is None:
            raise PeerError(f"there are no averaged moments of version {version} of fragment {fragment}")
        return served

    def _has_fragment(self, fragment: int) -> bool:
        return 0 <= fragment < len(self._versions)

    def tensors_by_name(self) -> dict[str, FloatArray]:
        """The whole committed model, by the names of its tensors."""
        return assemble_tensors(self.plan, [buffer.values for buffer in self.committed_buffers()])


def _with_difference(part: Fragment, delta: GivenDelta, newest: FloatArray, base: FloatArray) -> ReadableDelta:
    """Δ + (Θ − base)."""

    def change(piece: Piece, at: slice, values: FloatArray) -> None:
        values += newest[at] - base[at]

    return ChangedDelta(as_readable(part, delta), change)


def _without_buffers(part: Fragment, delta: GivenDelta) -> ReadableDelta:
    def change(piece: Piece, at: slice, values: FloatArray) -> None:
        if piece.tensor.buffer_rule:
            values[:] = 0.0

    return ChangedDelta(as_readable(part, delta), change)


def _array_of(arrays: Mapping[str, ByteArray], name: str, size: int) -> FloatArray:
    if name not in arrays or arrays[name].nbytes != 4 * size:
        raise ValueError(f"{name} is not in it, or of another size than this model's")
    return arrays[name].view(np.float32)
