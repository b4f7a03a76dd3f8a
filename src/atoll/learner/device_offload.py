"""Placement device: base and feedback are on the training process's device, which encodes; only bodies leave it.

A copy is packed on the training stream, as in placement host. One thread, which alone touches base, rests and the
stream out, then encodes t = (base − θ) + feedback there by the codecs of codecs.py, and the body travels into the
outgoing slot. The courier digests and sends it. That thread also makes what was adopted the base, behind the copies
that were read before: so the training thread and its stream wait for neither.

The base in shared memory stays what it is: versions that come as steps are applied to it, cuts hold it. A learner that
carries has no use for this placement, because its copies are subtracted from what it adopts.

Bodies are those of placement host, bit for bit, although that one encodes at the pull and this one at the copy:
- θ and base are those of the copy in both. A copy of another base than the model's is not sent, and what is adopted
  becomes the base here before the next copy is read;
- the feedback is the same. A merged answer settles (courier/feedback.py) before the version that holds it is handed
  over, so a copy on that version finds it settled; until then pulls are declined. Where feedback changes otherwise (a
  rollback, a welcome), the courier sees that the copy was encoded with another, and does not send it;
- so is the rest: the same arithmetic on the same numbers.

Every copy with steps in it leaves a rest, though most copies are never sent. A rest is kept while its copy lies in a
slot, and while the courier has it tagged: from the moment it is sent until it is known that nothing comes of it, or
that a later one is the feedback. The courier sends an order for a slot behind all that, so nothing is dropped early.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from atoll.learner.codecs import encode_contribution
from atoll.learner.offload import DeviceCopy, EncodedMoments, OwnPieces, StreamOffload
from atoll.learner.placement import count_rests, free_bytes, is_affordable
from atoll.mailbox.box import Mailbox
from atoll.numerics.codec import Codec, body_nbytes, largest_body


class Encoded(NamedTuple):
    """What the encoding thread has queued: when it is done, and whether there was memory for it."""

    event: torch.cuda.Event
    made: bool = True


class ThreadCopy:
    """Work of the encoding thread: first queued, then done."""

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
    """There was no memory for what it would leave out."""

    failed = True
    feedback = -1

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class CopyRests(NamedTuple):
    """With which rest a copy is encoded, and where its own goes."""

    feedback_t: int = -1
    feedback: torch.Tensor | None = None
    rest: torch.Tensor | None = None


class DeviceRests:
    """Who has which buffer. Decided by the training thread; read and written by the encoding thread, in that order."""

    def __init__(self, box: Mailbox, device: torch.device) -> None:
        self._box, self._device = box, device
        count = count_rests(box.layout)
        self._free: list[torch.Tensor] = list(
            torch.empty((count, box.layout.largest), dtype=torch.float32, device=device)
        )
        self._held: dict[int, tuple[torch.Tensor, int]] = {}
        """By tag (`Mailbox.tag_rest`): a rest, and the step of the copy whose rest went with it."""
        self._in_slot: dict[int, int] = {}
        """Slot → the tag of the copy in it."""

    def plan_copy(self, fragment: int, slot: int, t: int) -> CopyRests | None:
        """For the copy after step `t`, which takes the place of what was in the slot. None: there is no memory, or the
        same copy was made with another feedback, and may be merged."""
        if not self._box.layout.feedback:
            return CopyRests()
        self._in_slot.pop(slot, None)
        self._drop_unused()
        at, tag = self._box.feedback_for(fragment, t), self._box.tag_rest(fragment, t)
        feedback = self._held[self._box.tag_rest(fragment, at)][0] if at >= 0 else None
        if int(self._box.steps[fragment]) == 0:
            return CopyRests(at, feedback)  # for a probe at most, which is never merged
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
        """More than there were at first are for a learner that copies ahead many fragments at each boundary."""
        if self._free:
            return self._free.pop()
        if not is_affordable(4 * self._box.layout.largest, free_bytes(self._device)):
            return None
        try:
            return torch.empty(self._box.layout.largest, dtype=torch.float32, device=self._device)
        except torch.OutOfMemoryError:
            return None


class DeviceOffload(StreamOffload):
    def __init__(self, box: Mailbox, own: OwnPieces, device: torch.device, codec: Codec) -> None:
        super().__init__(box, own, device)
        self._codec = codec
        with self._torch.stream(self._out):  # memory that no work of the training stream may still use
            self._base = torch.empty(box.layout.size, dtype=torch.float32, device=device)
            self._body = torch.empty(largest_body(codec, box.plan), dtype=torch.uint8, device=device)
            self._rests = DeviceRests(box, device)
        self._thread = ThreadPoolExecutor(1, "atoll-encoder", self.enter_thread)
        self._thread.submit(self._load_kernels).result()

    def read(self, fragment: int, slot: int, t: int, moments: EncodedMoments | None = None) -> DeviceCopy:
        assert moments is None, "a run that shares moments has placement host"
        with self._torch.stream(self._out):
            rests = self._rests.plan_copy(fragment, slot, t)
        if rests is None:
            return NoCopy()
        stage, packed = self._pack(fragment)
        copy = ThreadCopy(self._thread.submit(self._encode, fragment, slot, stage, packed, rests), rests.feedback_t)
        self._read_stages.append((stage, copy))
        return copy

    def release(self, fragment: int, slot: int) -> None:
        stage, arrived = self._stages.pop(slot)
        based = ThreadCopy(self._thread.submit(self._replace_base, fragment, stage, arrived))
        self._spare.append((stage, [self._queued_training(), based]))

    def take_base(self) -> None:
        self._thread.submit(self._copy_base).result()

    def drop_copies(self) -> None:
        self._rests.empty_slots()

    def outgoing(self, fragment: int, slot: int) -> list[torch.Tensor]:
        raise AssertionError("a run that carries has placement host")

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
        encode_contribution(self._codec, part, *values, feedback, rest, body)
        return body

    def _replace_base(self, fragment: int, stage: torch.Tensor, arrived: torch.cuda.Event) -> Encoded:
        self._out.wait_event(arrived)
        base = self._base_of(fragment)
        with self._torch.stream(self._out):
            base.copy_(stage[: base.numel()])
        return Encoded(self._mark(self._out))

    def _copy_base(self) -> None:
        with self._torch.stream(self._out):
            self._base.copy_(torch.from_numpy(self._box.whole_base()))

    def _load_kernels(self) -> None:
        """They are loaded at their first use, and what they need besides is allocated then: now, not while a graph is
        captured."""
        largest = max(self._box.plan.fragments, key=lambda part: part.size)
        with self._torch.stream(self._out):
            self._base.zero_()
            rest = torch.zeros(largest.size, device=self._device) if self._box.layout.feedback else None
            self._encode_stage(largest.index, self._base_of(largest.index).clone(), CopyRests(-1, rest, rest))

    def _base_of(self, fragment: int) -> torch.Tensor:
        start = self._box.plan.starts[fragment]
        return self._base[start : start + self._box.plan.fragments[fragment].size]
