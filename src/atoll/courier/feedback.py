"""What answers leave out, kept until it is known whether they were merged.

An answer is encoded with its fragment's feedback: t = (base − θ) + feedback. What the body leaves out of t, its rest,
belongs to that answer until a commit names it; then it is the fragment's feedback. Where no commit does, because the
answer was late, refused or discarded, or its round was passed over, the rest is dropped and the feedback stays.

A fragment has at most one answer that may still be merged: a pull comes behind the announcement of its fragment's last
round and behind the end of the attempt before it, and while the version that holds the last answer is not adopted, a
pull is declined (protocol/learner/copies.py). So the feedback of an answer follows from the journal: it is the rest of
the last one that was merged in this life, none after an order to forget, none across a rollback. Replay goes by that.

All of it is in the shared memory (mailbox/box.py) and survives the courier; with placement device the rests themselves
are on the device (learner/device_offload.py), and only their tags are here. One store tells that a rest is whole, and
one store makes it the feedback, so a courier that dies leaves the one or the other; to hear of a commit twice changes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.mailbox.box import Mailbox
from atoll.numerics.arrays import FloatArray


@dataclass(frozen=True, slots=True)
class RestBuffer:
    """For one answer."""

    slot: int
    tag: int
    life: int
    feedback: FloatArray | None
    rest: FloatArray


class Feedback:
    def __init__(self, box: Mailbox) -> None:
        self._box = box
        self._life = 0
        """How many times everything was forgotten."""
        self._filling: set[int] = set()
        """Slots that a thread writes, or will."""
        self._version = [-1] * box.layout.fragments
        """That the last merged answer went into, as far as this courier has heard."""
        tagged = [slot for slot, tag in enumerate(box.rest_tag) if tag >= 0]
        first = box.layout.rest_tags if box.layout.on_device else box.layout.first_rests
        self._count = max([first, *(slot + 1 for slot in tagged)])

    def has_settled(self, fragment: int, t: int) -> bool:
        """An answer of this copy was merged: there is nothing new in it, and it can only be for a probe."""
        return int(self._box.feedback_t[fragment]) == t

    def take_buffer(self, fragment: int, t: int) -> RestBuffer | None:
        """For the answer of this copy, with the feedback it is encoded with. None: there is no memory."""
        if (slot := self._make_room(fragment)) is None:
            return None
        self._filling.add(slot)
        at = self._box.feedback_for(fragment, t)
        held = self._box.find_rest(fragment, at) if at >= 0 else None
        feedback = None if held is None else self._box.rest(held, fragment)
        return RestBuffer(slot, self._box.tag_rest(fragment, t), self._life, feedback, self._box.rest(slot, fragment))

    def note_answer(self, fragment: int, t: int) -> None:
        """Placement device: this copy, which is encoded, is the answer. The training process keeps its rest for as long
        as it is tagged."""
        slot = self._make_room(fragment)
        assert slot is not None, "there are three tags for a fragment, and two in use"
        self._box.rest_tag[slot] = self._box.tag_rest(fragment, t)

    def _make_room(self, fragment: int) -> int | None:
        base = int(self._box.base_version[fragment])
        assert base >= self._version[fragment], "no answer is given on a version before the last that holds one"
        self.drop_rests(fragment)
        return self._find_free()

    def keep_rest(self, buffer: RestBuffer) -> None:
        """It is whole."""
        self._filling.discard(buffer.slot)
        if buffer.life == self._life:
            self._box.rest_tag[buffer.slot] = buffer.tag

    def settle(self, fragment: int, version: int, t: int) -> None:
        """`version` holds the answer of the copy after step `t`; −1: there is no such answer, or no more, and the
        feedback starts anew. Another answer may still be merged: its rest stays."""
        self._version[fragment] = version if t >= 0 else -1
        self._box.feedback_t[fragment] = t

    def drop_rests(self, fragment: int) -> None:
        """Nothing that was answered so far will be merged any more."""
        tags, fragments = self._box.rest_tag, self._box.layout.fragments
        settled = self._box.tag_rest(fragment, int(self._box.feedback_t[fragment]))
        tags[(tags >= 0) & (tags % fragments == fragment) & (tags != settled)] = -1

    def forget_all(self) -> None:
        self._life += 1
        self._version = [-1] * len(self._version)
        self._box.feedback_t[:] = -1
        self._box.rest_tag[:] = -1

    def _find_free(self) -> int | None:
        for slot in range(self._count):
            if self._box.rest_tag[slot] < 0 and slot not in self._filling:
                return slot
        if not self._box.reserve_rest(self._count):
            return None
        self._count += 1
        return self._count - 1
