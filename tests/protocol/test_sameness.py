"""Learners that train on the same batches are told of."""

from __future__ import annotations

from atoll.protocol.effects import Note
from atoll.protocol.history import History
from atoll.protocol.messages import Hello
from atoll.protocol.records import BegunRecord
from atoll.protocol.settings import Settings
from atoll.protocol.syncer.learner_warnings import COMMON, SameBatches
from atoll.protocol.syncer.state import SyncerState


class Watched:
    def __init__(self, *names: str) -> None:
        settings = Settings(fragments=1)
        state = SyncerState(History(BegunRecord("run", settings, {}, (), "plan")))
        self.out, self.members, self.watch = state.out, state.members, SameBatches(state)
        for name in names:
            self.members.find_or_begin_life(0.0, Hello(protocol=2, learner=name, session=name), "run")

    def say(self, name: str, *numbers: int) -> list[str]:
        """What is told of it."""
        for number in numbers:
            self.watch.note_batch(self.members.learners[name], number)
        return [effect.text for effect in self.out.take_effects() if isinstance(effect, Note)]


def test_two_that_have_three_numbers_in_common_are_told_of_once() -> None:
    run = Watched("a", "b", "c")
    assert run.say("b", 1, 2, 3, 4, 5) == []
    assert run.say("a", 1, 2) == []
    [text] = run.say("a", 3)
    assert text.startswith("shuffle by learner.seed, or take batches from "), "a line that is cut shows the remedy"
    assert text.endswith("a and b train on the same batches, so one of them works for nothing")
    assert run.say("a", 4, 5, 6) == run.say("b", 6, 7) == [], "once"
    assert len(run.say("c", 4, 5, 6)) == 2, "with a and with b"


def test_a_number_that_is_said_again_is_one_number() -> None:
    run = Watched("a", "b")
    assert run.say("a", *[7] * 20) == run.say("b", *[7] * 20) == []


def test_who_says_nothing_has_nothing_in_common() -> None:
    run = Watched("a", "b")
    assert run.say("a", *[-1] * 20) == run.say("b", *[-1] * 20) == []


def test_other_batches_are_nobodys_business() -> None:
    run = Watched("a", "b")
    assert run.say("a", *range(0, 200, 2)) == run.say("b", *range(1, 200, 2)) == []


def test_who_is_gone_is_compared_with_nobody() -> None:
    run = Watched("a", "b")
    run.say("a", *range(COMMON))
    run.members.learners["a"].state = "gone"
    assert run.say("b", *range(COMMON)) == []


def test_one_may_be_a_few_hundred_steps_behind() -> None:
    run = Watched("a", "b")
    run.say("a", *range(50))
    assert len(run.say("b", *range(3))) == 1
