"""What answers leave out: whatever becomes of them, the feedback is the rest of the last one that was merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.courier.feedback import Feedback, RestBuffer
from atoll.mailbox import box as memory
from atoll.mailbox.box import BoxLayout, Mailbox
from atoll.numerics.fragments import make_plan
from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import Settings

PLAN = make_plan([TensorSpec(name, (4,), "float32") for name in "abc"], 3)
SETTINGS = Settings(fragments=3, sync_every=3, overlap=1, codec="topk").resolved(3)


@pytest.fixture
def box() -> Iterator[Mailbox]:
    made = Mailbox.create(PLAN, SETTINGS)
    yield made
    made.close()


def answer(feedback: Feedback, fragment: int, t: int, rest: float) -> float | None:
    """The feedback it is encoded with."""
    buffer = feedback.take_buffer(fragment, t)
    assert buffer is not None
    used = None if buffer.feedback is None else float(buffer.feedback[0])
    fill(feedback, buffer, rest)
    return used


def fill(feedback: Feedback, buffer: RestBuffer, rest: float) -> None:
    buffer.rest[:] = rest
    feedback.keep_rest(buffer)


def test_a_rest_is_the_feedback_once_a_commit_names_its_answer(box: Mailbox) -> None:
    one = Feedback(box)
    assert answer(one, 0, 5, 0.5) is None
    assert answer(one, 0, 6, 0.6) is None, "it was not merged, as far as anybody knows"
    one.settle(0, 1, 6)
    box.base_version[0] = 1
    assert answer(one, 0, 8, 0.8) == pytest.approx(0.6)
    one.drop_rests(0)
    assert answer(one, 0, 9, 0.9) == pytest.approx(0.6), "a round that was passed over changes nothing"
    assert answer(one, 1, 9, 0.1) is None, "fragments do not know each other"


def test_a_commit_that_is_told_twice_and_by_two_couriers_counts_once(box: Mailbox) -> None:
    one = Feedback(box)
    answer(one, 0, 5, 0.5)
    one.settle(0, 1, 5)
    answer(one, 1, 6, 0.6)
    other = Feedback(box)
    other.settle(0, 1, 5)
    other.settle(1, 1, 6)
    box.base_version[:] = 1
    assert answer(other, 0, 8, 0.8) == 0.5
    assert answer(other, 1, 8, 0.8) == pytest.approx(0.6), "what a dead courier left is there"


def test_a_welcome_leaves_the_rest_of_a_round_that_is_being_merged(box: Mailbox) -> None:
    one = Feedback(box)
    answer(one, 0, 5, 0.5)
    one.settle(0, 1, 5)
    box.base_version[0] = 1
    answer(one, 0, 8, 0.8)
    one.settle(0, 1, 5)  # a welcome: no more is known yet
    one.settle(0, 2, 8)
    box.base_version[0] = 2
    assert answer(one, 0, 9, 0.9) == pytest.approx(0.8)


def test_nothing_of_a_life_before_is_kept(box: Mailbox) -> None:
    one = Feedback(box)
    answer(one, 0, 5, 0.5)
    one.settle(0, 1, 5)
    late = one.take_buffer(1, 6)
    assert late is not None
    one.forget_all()
    fill(one, late, 0.6)  # its thread was not done
    one.settle(1, 1, 6)
    assert answer(one, 0, 8, 0.8) is None
    box.base_version[1] = 1
    assert answer(one, 1, 8, 0.8) is None


def test_a_rest_that_a_dead_courier_did_not_finish_is_none(box: Mailbox) -> None:
    buffer = Feedback(box).take_buffer(0, 5)
    assert buffer is not None
    buffer.rest[:2] = 0.5
    other = Feedback(box)
    other.settle(0, 1, 5)
    box.base_version[0] = 1
    assert answer(other, 0, 6, 0.6) is None


def test_an_answer_on_a_version_before_the_one_that_holds_the_last_is_a_mistake(box: Mailbox) -> None:
    one = Feedback(box)
    answer(one, 0, 5, 0.5)
    one.settle(0, 3, 5)
    box.base_version[0] = 2
    with pytest.raises(AssertionError, match="no answer is given"):
        one.take_buffer(0, 6)


def test_memory_for_rests_is_there_where_the_codec_needs_it_and_grows_while_there_is_more(
    box: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = BoxLayout.of(PLAN, Settings(fragments=3, sync_every=3, overlap=1, codec="bf16").resolved(3))
    assert (plain.first_rests, plain.most_rests) == (0, 0)
    assert box.layout.first_bytes == plain.first_bytes + box.layout.first_rests * box.layout.slot_bytes
    monkeypatch.setattr(memory, "can_spare", lambda size: False)
    one = Feedback(box)
    held = [one.take_buffer(0, t) for t in range(box.layout.first_rests)]
    assert None not in held and one.take_buffer(1, 9) is None, "all are being filled, and no more can be had"
    monkeypatch.setattr(memory, "can_spare", lambda size: True)
    more = [one.take_buffer(1, t) for t in range(box.layout.most_rests - box.layout.first_rests)]
    assert None not in more and one.take_buffer(2, 9) is None
    assert len({buffer.rest.ctypes.data for buffer in [*held, *more] if buffer is not None}) == box.layout.most_rests


# ---- a run of one learner, as its journal would tell it --------------------------------------------------------------


@dataclass
class Learner:
    """Answers, and what becomes of them. Its rule is that of replay: the journal's commits alone."""

    box: Mailbox
    feedback: Feedback
    t: int = 0
    versions: list[int] = field(default_factory=lambda: [0] * 3)
    merged: list[tuple[int, int, float] | None] = field(default_factory=lambda: [None] * 3)
    """Per fragment, the version, the step and the rest of the last answer in the journal, in this life and era."""
    asked: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Answers that the syncer may still merge."""

    def do(self, what: str, fragment: int) -> None:
        getattr(self, what)(fragment)

    def answer(self, fragment: int) -> None:
        """To a first or a second attempt."""
        self.t += 1
        rest, last = np.float32(self.t) / 7, self.merged[fragment]
        used = answer(self.feedback, fragment, self.t, float(rest))
        assert used == (None if last is None else last[2]), f"fragment {fragment} after step {self.t}"
        self.asked[fragment] = (self.t, float(rest))

    def commit(self, fragment: int) -> None:
        self.commit_unheard(fragment)
        self.announce(fragment)
        self.feedback.drop_rests(fragment)

    def commit_unheard(self, fragment: int) -> None:
        """The connection is gone; it comes back before the next answer to this fragment."""
        if fragment in self.asked:
            self.versions[fragment] += 1
            self.merged[fragment] = (self.versions[fragment], *self.asked.pop(fragment))
        self.welcome(fragment)

    def announce(self, fragment: int) -> None:
        if (last := self.merged[fragment]) is not None:
            self.feedback.settle(fragment, last[0], last[1])
        self.box.base_version[fragment] = self.versions[fragment]

    def welcome(self, _: int) -> None:
        for fragment, last in enumerate(self.merged):
            self.feedback.settle(fragment, *((-1, -1) if last is None else last[:2]))
        self.box.base_version[:] = self.versions

    def leave_out(self, fragment: int) -> None:
        """Late, refused, or its round passed over: the round is announced without it."""
        self.asked.pop(fragment, None)
        self.feedback.drop_rests(fragment)

    def new_courier(self, _: int) -> None:
        self.feedback = Feedback(self.box)
        self.welcome(0)

    def new_term(self, _: int) -> None:
        self.asked.clear()
        self.welcome(0)

    def forget(self, _: int) -> None:
        """Quarantine: a new life."""
        self.asked.clear()
        self.merged = [None] * 3
        self.feedback.forget_all()
        self.welcome(0)

    def roll_back(self, _: int) -> None:
        self.asked.clear()
        self.versions = [version + 1 for version in self.versions]
        self.merged = [None] * 3
        for fragment, version in enumerate(self.versions):
            self.feedback.settle(fragment, version, -1)
            self.feedback.drop_rests(fragment)
        self.box.base_version[:] = self.versions


USUAL = ["answer", "answer", "answer", "commit", "commit", "leave_out"]
RARE = ["commit_unheard", "welcome", "new_courier", "new_term", "forget", "roll_back"]


@given(st.lists(st.tuples(st.sampled_from(USUAL + RARE), st.integers(0, 2)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_the_feedback_follows_from_who_was_merged(course: list[tuple[str, int]]) -> None:
    box = Mailbox.create(PLAN, SETTINGS)
    box.base_version[:] = 0
    learner = Learner(box, Feedback(box))
    for what, fragment in course:
        learner.do(what, fragment)
    for fragment in range(3):
        learner.answer(fragment)
    assert int((box.rest_tag >= 0).sum()) <= 6, "of each fragment the feedback and one answer's rest"
    box.close()
