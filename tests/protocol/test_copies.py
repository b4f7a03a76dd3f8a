"""A learner's copies, and what becomes of an answer that does not get there."""

from __future__ import annotations

from tests.protocol.world import World

from atoll.protocol.learner.copies import Copies, Orders, Pulls, Standing
from atoll.protocol.learner.effects import Copied, Drop, LearnerEffect, Upload, UploadFailed
from atoll.protocol.learner.versions import Versions
from atoll.protocol.messages import Decline, FromLearner, Pull


def copy(t: int, steps: int = 3) -> Copied:
    return Copied(round=7, fragment=1, t=t, steps=steps, tokens=30, base=2)


def pull(attempt: int = 1, probe: bool = False) -> Pull:
    return Pull(round=7, attempt=attempt, fragment=1, gathering=8, deadline_s=1.0, probe=probe)


def test_a_newer_copy_takes_the_place_of_the_older() -> None:
    effects: list[LearnerEffect] = []
    copies = Copies(effects.append)
    assert copies.keep_copy(copy(4)) is None and copies.keep_copy(copy(5)) is None
    assert effects == [Drop(1, 4)] and 1 in copies


def test_a_contribution_says_what_its_copy_said() -> None:
    effects: list[LearnerEffect] = []
    copies = Copies(effects.append)
    copies.waiting[1] = pull()
    waited = copies.keep_copy(copy(5))
    assert waited == pull() and copies.send_copy(waited)
    assert effects == [Upload(7, 1, 1)]
    copies.keep_copy(copy(6))  # a fresher one does not change what was sent
    given = copies.take_sent(7, 1, "digest")
    assert given is not None and (given.t, given.steps, given.tokens, given.base) == (5, 3, 30, 2)
    assert copies.take_sent(7, 1, "digest") is None, "it is told once"


def test_nothing_is_sent_of_a_copy_without_steps_unless_it_is_only_a_probe() -> None:
    copies = Copies(lambda effect: None)
    copies.keep_copy(copy(5, steps=0))
    assert not copies.send_copy(pull()) and copies.send_copy(pull(probe=True))


def test_a_copy_that_did_not_get_there_is_not_sent_again() -> None:
    effects: list[LearnerEffect] = []
    copies = Copies(effects.append)
    copies.keep_copy(copy(5))
    copies.send_copy(pull())
    assert copies.note_failure(7, 1, keep=False) and 1 not in copies
    assert effects[-1] == Drop(1, 5)
    assert not copies.note_failure(7, 1, keep=False), "nobody waits for it any more"


def test_a_learner_that_waits_for_a_round_sends_its_copy_again() -> None:
    effects: list[LearnerEffect] = []
    copies = Copies(effects.append)
    copies.keep_copy(copy(5))
    copies.send_copy(pull())
    assert copies.note_failure(7, 1, keep=True) and 1 in copies and copies.send_copy(pull(attempt=2))
    assert effects == [Upload(7, 1, 1), Upload(7, 2, 1)]


def test_what_is_on_its_way_is_known_until_it_arrives() -> None:
    effects: list[LearnerEffect] = []
    copies, probe = Copies(effects.append), pull(0, probe=True)
    copies.keep_copy(copy(5))
    assert not copies.is_on_its_way(probe) and copies.send_copy(probe) and copies.is_on_its_way(probe)
    assert copies.take_sent(7, 0, "digest") is not None and not copies.is_on_its_way(probe)


def test_an_answer_of_a_lost_connection_is_not_taken_for_one_of_the_next() -> None:
    """Seed 2031 of the ranks' worlds: a rival syncer pulled round 7 as its first attempt too. The body had gone to the
    one before it, and the learner said that this one has it."""
    copies = Copies(lambda effect: None)
    copies.keep_copy(copy(5))
    copies.send_copy(pull())
    copies.forget_pulls()
    assert copies.is_abandoned(pull()) and not copies.is_abandoned(pull(attempt=2))
    assert copies.take_sent(7, 1, "digest") is None
    assert not copies.is_abandoned(pull()) and copies.send_copy(pull())
    assert copies.take_sent(7, 1, "digest") is not None


def test_a_pull_is_declined_while_an_answer_of_its_name_is_on_its_way_from_before() -> None:
    said: list[FromLearner] = []
    effects: list[LearnerEffect] = []
    copies, versions = Copies(effects.append), Versions(effects.append, held=[0, 0], newest=[0, 0], counted=[0, 0])
    orders = Orders(effects.append)
    standing = Standing(5, (1, 1), stepping=True, recovered=True)
    pulls = Pulls(effects.append, lambda now, word: said.append(word), lambda: standing, orders, copies, versions)
    copies.keep_copy(copy(5))
    pulls.answer_pull(0.0, pull())
    copies.forget_pulls()
    pulls.answer_pull(1.0, pull())
    assert effects == [Upload(7, 1, 1)] and [type(word) for word in said] == [Decline]
    pulls.note_undelivered(2.0, UploadFailed(7, 1, "unreachable"))
    assert len(said) == 1, "of the answer that was declined nothing more is said"


def test_a_copy_that_is_on_order_no_more_answers_no_later_round() -> None:
    """Ranks agree on what they copy, so a copy may still be made of a round that has its answer. Kept, it would answer
    the next round of its fragment: by then it lacks most of the steps since."""
    world = World(1, fragments=4, sync_every=8, overlap=1).run_until(round=9)
    learner = world.learners["learner-0"]
    left_over = Copied(round=5, fragment=1, t=learner.t, steps=2, tokens=20, base=learner.adopted[1])
    assert 5 not in learner.machine._orders.pending and left_over.base == learner.machine.versions[1]
    assert Drop(1, learner.t) in learner.machine.handle(world.now, left_over)
    assert 1 not in learner.machine._copies
