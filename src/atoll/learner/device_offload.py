"""Placement device: base and feedback are on the training process's device, which encodes; only bodies leave it.

A copy is packed on the training stream, as in placement host. One thread, which alone touches base, rests and the
stream out, then encodes t = (base − θ) + feedback there by the codecs of codecs.py, and the body travels into the
outgoing slot. The courier digests and sends it. That thread also makes an adopted version the base, after the copies
that were read before: so the training thread and its stream wait for neither.

The base in shared memory stays what it is: versions that come as steps are applied to it, cuts hold it.

A run that may carry keeps every copy as it was read, in the stage that it was packed into, so that its adoption can
subtract it: θ ← Θ + (θ − θ_read). The stage is free again once the fragment is adopted, by whatever rule, or once
another copy is ordered into the slot. An adoption names slot, fragment and step of its copy. If the slot does not hold
exactly that copy any more, the adoption overwrites (boundary.py). For a version without a copy of this learner, carry
subtracts the base on the device.

Bodies are those of placement host, bit for bit, although that one encodes at the pull and this one at the copy:
- θ and base are those of the copy in both. A copy of another base than the model's is not sent, and an adopted version
  becomes the base here before the next copy is read;
- the feedback is the same. A merged answer settles (courier/feedback.py) before the version that holds it is handed
  over, so a copy on that version finds it settled; until then pulls are declined. Where feedback changes otherwise (a
  rollback, a welcome), the courier sees that the copy was encoded with another, and does not send it;
- so is the rest: the same arithmetic on the same numbers.

Every copy with steps in it leaves a rest, though most copies are never sent. A rest is kept while its copy lies in a
slot, and while the courier has it tagged: from the moment it is sent until it is known that nothing comes of it, or
that a later one is the feedback. The courier sends an order for a slot behind all that, so nothing is dropped early.

A copy for whose rest or values there is no memory is not made: its slot is free again, and the pull is missed.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from atoll.learner.codecs import encode_contribution
from atoll.learner.offload import (
    READ_STAGES,
    DeviceCopy,
    EncodedMoments,
    OwnPieces,
    QueuedCopy,
    StreamCopy,
    StreamOffload,
)
from atoll.learner.placement import count_copy_buffers, count_rests, free_bytes, is_affordable
from atoll.mailbox.box import Mailbox
from atoll.numerics.codec import Codec, body_nbytes, largest_body


class Encoded(NamedTuple):
    """Work that the encoding thread has queued: the event at its end, and whether there was memory for it."""

    event: torch.cuda.Event
    made: bool = True


class ThreadCopy:
    """Copy, or other work, of the encoding thread: first queued, then done."""

    def __init__(self, queued: Future[Encoded], feedback: int = -1) -> None:
        self._queued, self.feedback = queued, feedback

    @property
    def failed(self) -> bool:
        return not self._queued.result().made

    def done(self) -> bool:
        return self._queued.done() and bool(self._queued.result().event.query())

    def wait(self) -> None:
        self._queued.result().event.synchronize()

    def hold_stream(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._queued.result().event)


class NoCopy:
    """Copy that was not made, because there was no memory for its values or for its rest."""

    failed = True
    feedback = -1

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class KeptCopy(NamedTuple):
    """Copy in a slot, as it was read."""

    fragment: int
    t: int
    stage: torch.Tensor
    encoded: QueuedCopy
    """Work that reads the stage."""


class CopyRests(NamedTuple):
    """Rest that a copy is encoded with, and the buffer for its own."""

    feedback_t: int = -1
    feedback: torch.Tensor | None = None
    rest: torch.Tensor | None = None


class DeviceRests:
    """Buffers of rests, and the copies that they belong to. The training thread assigns them; the encoding thread reads
    and writes them, in that order."""

    def __init__(self, box: Mailbox, device: torch.device) -> None:
        self._box, self._device = box, device
        count = count_rests(box.layout)
        self._free: list[torch.Tensor] = list(
            torch.empty((count, box.layout.largest), dtype=torch.float32, device=device)
        )
        self._held: dict[int, tuple[torch.Tensor, int]] = {}
        """Rest, and the step of the copy whose rest went with it, keyed by tag (`Mailbox.tag_rest`)."""
        self._in_slot: dict[int, int] = {}
        """Tag of the copy in each slot."""

    def plan_copy(self, fragment: int, slot: int, t: int) -> CopyRests | None:
        """Return the buffers for the copy after step `t`, which replaces the one in the slot. None: there is no memory,
        or the same copy was made with another feedback, and may be merged."""
        if not self._box.layout.feedback:
            return CopyRests()
        self._in_slot.pop(slot, None)
        self._drop_unused()
        at, tag = self._box.feedback_for(fragment, t), self._box.tag_rest(fragment, t)
        feedback = self._held[self._box.tag_rest(fragment, at)][0] if at >= 0 else None
        if int(self._box.steps[fragment]) == 0:
            return CopyRests(at, feedback)  # only a probe may ask for it, and no probe is merged
        if tag not in self._held:
            if (buffer := self._take_buffer()) is None:
                return None
            self._held[tag] = (buffer, at)
        elif self._held[tag][1] != at:
            return None
        self._in_slot[slot] = tag
        return CopyRests(at, feedback, self._held[tag][0])

    def empty_slots(self) -> None:
        self._in_slot.clear()

    def _drop_unused(self) -> None:
        used = {*self._in_slot.values(), *self._box.rest_tag.tolist()}
        for tag in self._held.keys() - used:
            self._free.append(self._held.pop(tag)[0])

    def _take_buffer(self) -> torch.Tensor | None:
        """Return a free buffer, or a new one: a learner that copies many fragments ahead needs more than there were at
        first."""
        return self._free.pop() if self._free else make_buffer(self._box, self._device)


def make_buffer(box: Mailbox, device: torch.device, *, counted: bool = False) -> torch.Tensor | None:
    """Return memory for the largest fragment, or None if there is none. Memory that was not counted when the placement
    was chosen (`device_bytes`) is taken only while it is at most a quarter of what is free."""
    if not counted and not is_affordable(4 * box.layout.largest, free_bytes(device)):
        return None
    try:
        return torch.empty(box.layout.largest, dtype=torch.float32, device=device)
    except torch.OutOfMemoryError:
        return None


class DeviceOffload(StreamOffload):
    def __init__(
        self, box: Mailbox, own: OwnPieces, device: torch.device, codec: Codec, *, keeps_copies: bool = True
    ) -> None:
        """`keeps_copies`: the run may carry, so copies are kept as they were read."""
        super().__init__(box, own, device)
        self._codec, self._keeps_copies = codec, keeps_copies
        self._kept: dict[int, KeptCopy] = {}
        """Copy in each slot. Used by the training thread alone, like the stages."""
        self._stages_left = READ_STAGES
        """Number of stages that may still be made without asking what is free."""
        self._delta: torch.Tensor | None = None
        """Memory for Δ if θ is kept. Used by the encoding thread alone."""
        first = box.layout.first_outgoing if keeps_copies else 0
        for stage in torch.empty((first, box.layout.largest), dtype=torch.float32, device=device):
            self._read_stages.append((stage, self._queued_training()))
        assert count_copy_buffers(box.layout, keeps_copies=keeps_copies) == first + keeps_copies
        with self._torch.stream(self._out):  # memory that no work of the training stream may still use
            self._base = torch.empty(box.layout.size, dtype=torch.float32, device=device)
            self._body = torch.empty(largest_body(codec, box.plan), dtype=torch.uint8, device=device)
            if keeps_copies:
                self._delta = torch.empty(box.layout.largest, dtype=torch.float32, device=device)
            self._rests = DeviceRests(box, device)
        self._thread = ThreadPoolExecutor(1, "atoll-encoder", self.enter_thread)
        self._thread.submit(self._load_kernels).result()
        self._based: dict[int, QueuedCopy] = {}
        """Work that wrote the base of a fragment last, keyed by fragment."""

    def read(self, fragment: int, slot: int, t: int, moments: EncodedMoments | None = None) -> DeviceCopy:
        assert moments is None, "a run that shares moments has placement host"
        self._drop_kept(slot)  # the courier has given the slot to another copy
        if not self._make_stage_ready():
            return NoCopy()
        with self._torch.stream(self._out):
            rests = self._rests.plan_copy(fragment, slot, t)
        if rests is None:
            return NoCopy()
        stage, packed = self._pack(fragment)
        copy = ThreadCopy(self._thread.submit(self._encode, fragment, slot, stage, packed, rests), rests.feedback_t)
        if self._keeps_copies:
            self._kept[slot] = KeptCopy(fragment, t, stage, copy)
        else:
            self._read_stages.append((stage, copy))
        return copy

    def _make_stage_ready(self) -> bool:
        """Have a stage for the next copy in front of the others. False: all are kept, and there is no memory for one
        more."""
        if not self._has_read_stage():
            stage = make_buffer(self._box, self._device, counted=self._stages_left > 0)
            if stage is not None:
                self._stages_left = max(0, self._stages_left - 1)
                self._read_stages.appendleft((stage, self._queued_training()))
        return bool(self._read_stages)

    def _take_read_stage(self, training: torch.cuda.Stream) -> torch.Tensor:
        stage, reader = self._read_stages.popleft()
        reader.hold_stream(training)
        return stage

    def _drop_kept(self, slot: int) -> None:
        if (kept := self._kept.pop(slot, None)) is not None:
            self._read_stages.append((kept.stage, kept.encoded))

    def release(self, fragment: int, slot: int) -> None:
        stage, _ = self._stages.pop(slot)
        adopted = self._queued_training()
        self._based[fragment] = ThreadCopy(self._thread.submit(self._replace_base, fragment, stage, adopted))
        self._spare.append((stage, [adopted, self._based[fragment]]))
        # A copy is of no use once its fragment is adopted: no version that comes later is made of it.
        for number in [number for number, kept in self._kept.items() if kept.fragment == fragment]:
            self._drop_kept(number)

    def take_base(self) -> None:
        copied = ThreadCopy(self._thread.submit(self._copy_base))
        copied.wait()
        self._based = dict.fromkeys(range(self._box.layout.fragments), copied)

    def drop_copies(self) -> None:
        self._rests.empty_slots()
        for slot in list(self._kept):
            self._drop_kept(slot)

    def outgoing(self, fragment: int, slot: int, t: int) -> list[torch.Tensor] | None:
        kept = self._kept.get(slot)
        if kept is None or (kept.fragment, kept.t) != (fragment, t):
            return None
        return self._shaped(kept.stage, fragment)

    def held_base(self, fragment: int) -> list[torch.Tensor]:
        """Return the base on the device. What replaces it waits until the adoption is done (`release`)."""
        if (written := self._based.get(fragment)) is not None:
            written.hold_stream(self._torch.current_stream(self._index))
        return self._shaped(self._base_of(fragment), fragment)

    def close(self) -> None:
        self._thread.shutdown()
        super().close()

    # ---- by the encoding thread ---------------------------------------------------------------------------------

    def _encode(
        self, fragment: int, slot: int, stage: torch.Tensor, packed: torch.cuda.Event, rests: CopyRests
    ) -> Encoded:
        self._out.wait_event(packed)
        self._lock_if_new(slot, slot >= self._box.layout.first_outgoing)
        made = True
        with self._torch.stream(self._out):
            try:
                body = self._encode_stage(fragment, stage, rests)
                torch.from_numpy(self._box.body(slot, body.numel())).copy_(body, non_blocking=True)
            except torch.OutOfMemoryError:
                made = False
        return Encoded(self._mark(self._out), made)

    def _encode_stage(self, fragment: int, stage: torch.Tensor, rests: CopyRests) -> torch.Tensor:
        part = self._box.plan.fragments[fragment]
        body = self._body[: body_nbytes(self._codec, part)]
        feedback, rest = (None if one is None else one[: part.size] for one in (rests.feedback, rests.rest))
        values = (self._base_of(fragment), stage[: part.size])
        delta = None if self._delta is None else self._delta[: part.size]
        encode_contribution(self._codec, part, *values, feedback, rest, body, delta)
        return body

    def _replace_base(self, fragment: int, stage: torch.Tensor, adopted: StreamCopy) -> Encoded:
        adopted.hold_stream(self._out)  # it waited for the version to arrive, and may have subtracted the old base
        base = self._base_of(fragment)
        with self._torch.stream(self._out):
            base.copy_(stage[: base.numel()])
        return Encoded(self._mark(self._out))

    def _copy_base(self) -> Encoded:
        with self._torch.stream(self._out):
            self._base.copy_(torch.from_numpy(self._box.whole_base()))
        return Encoded(self._mark(self._out))

    def _load_kernels(self) -> None:
        """Load kernels now. At their first use they and their memory would be loaded too, but a graph may be captured
        then."""
        largest = max(self._box.plan.fragments, key=lambda part: part.size)
        with self._torch.stream(self._out):
            self._base.zero_()
            rest = torch.zeros(largest.size, device=self._device) if self._box.layout.feedback else None
            self._encode_stage(largest.index, self._base_of(largest.index).clone(), CopyRests(-1, rest, rest))

    def _base_of(self, fragment: int) -> torch.Tensor:
        start = self._box.plan.starts[fragment]
        return self._base[start : start + self._box.plan.fragments[fragment].size]
