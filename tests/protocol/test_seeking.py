"""A newcomer's seeking: asking, fetching, taking, and every way in which it comes to nothing."""

from __future__ import annotations

from typing import Any

from atoll.protocol.clock import SYNCER
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.learner.peer_state import Seeking
from atoll.protocol.messages import (
    Box,
    Fresh,
    FromLearner,
    Help,
    Helped,
    Recover,
    Seek,
    Settled,
    TensorSpec,
    Unable,
    Welcome,
)
from atoll.protocol.settings import Settings


class Newcomer:
    def __init__(self) -> None:
        self.done: list[Any] = []
        self.said: list[FromLearner] = []
        self.seeking = Seeking(self.done.append, lambda now, message: self.said.append(message))

    def helped(self, ticket: str, peer: str = "a") -> None:
        self.seeking.hear_answer(Helped(ticket=ticket, peer=peer, size=100, digest="d", direct="x"))

    def fetching(self) -> None:
        self.seeking.begin_seeking(0.0, 7)
        self.helped("one")
        self.done.clear()
        self.said.clear()


def test_it_asks_fetches_takes_and_says_so() -> None:
    newcomer = Newcomer()
    newcomer.seeking.begin_seeking(0.0, 7)
    assert newcomer.done == [fx.Await()] and newcomer.said == [Seek(after=7)]
    newcomer.helped("one")
    newcomer.seeking.note_outcome(1.0, fx.StateCame("one"))
    assert newcomer.done[1:] == [fx.FetchState("one", 100, "d", "x"), fx.TakeState("one")]
    assert newcomer.seeking.open, "not before it is in"
    newcomer.seeking.note_outcome(2.0, fx.Taken("one", t=4))
    assert newcomer.said[1:] == [Settled(ticket="one", peer="a", size=100, t=4)]
    assert not newcomer.seeking.open
    newcomer.seeking.tell_outcome()
    assert newcomer.done[-1] == fx.Begin("goes on with the inner optimizer of a")
    newcomer.seeking.tell_outcome()
    assert len([effect for effect in newcomer.done if isinstance(effect, fx.Begin)]) == 1


def test_what_does_not_arrive_is_asked_of_another() -> None:
    newcomer = Newcomer()
    newcomer.fetching()
    newcomer.seeking.note_outcome(1.0, fx.StateFailed("one", "the connection broke"))
    assert newcomer.said == [Settled(ticket="one", peer="a", reason="the connection broke", again=True)]
    newcomer.helped("two", peer="b")
    assert newcomer.done == [fx.FetchState("two", 100, "d", "x")] and newcomer.seeking.open


def test_another_peer_takes_the_place_of_the_one_before() -> None:
    newcomer = Newcomer()
    newcomer.fetching()
    newcomer.helped("two", peer="b")
    assert newcomer.done == [fx.LeaveState("one"), fx.FetchState("two", 100, "d", "x")]
    for event in (fx.StateCame("one"), fx.StateFailed("one", "it was left"), fx.Taken("one")):
        newcomer.seeking.note_outcome(1.0, event)
    assert newcomer.said == [] and newcomer.seeking.open


def test_what_is_refused_is_said_and_another_is_awaited() -> None:
    newcomer = Newcomer()
    newcomer.fetching()
    newcomer.seeking.note_outcome(1.0, fx.StateCame("one"))
    newcomer.seeking.note_outcome(1.0, fx.Taken("one", t=2, reason="'step' is -1.0", refused=True))
    assert newcomer.said == [Settled(ticket="one", peer="a", size=100, t=2, reason="'step' is -1.0", again=True)]
    newcomer.seeking.tell_outcome()
    assert newcomer.seeking.open and newcomer.done == [fx.TakeState("one")]
    newcomer.helped("two", peer="b")
    assert newcomer.done[-1] == fx.FetchState("two", 100, "d", "x")


def test_where_no_peers_state_can_be_taken_the_search_ends() -> None:
    newcomer = Newcomer()
    newcomer.fetching()
    newcomer.seeking.note_outcome(1.0, fx.StateCame("one"))
    newcomer.seeking.note_outcome(1.0, fx.Taken("one", reason="the state of LBFGS is taken from no peer"))
    assert newcomer.said == [Settled(ticket="one", peer="a", reason="the state of LBFGS is taken from no peer")]
    newcomer.seeking.tell_outcome()
    [begin] = [effect for effect in newcomer.done if isinstance(effect, fx.Begin)]
    assert "which warms up: the state of LBFGS is taken from no peer" in begin.text and not newcomer.seeking.open


def test_without_a_peer_it_goes_on_as_it_is() -> None:
    newcomer = Newcomer()
    newcomer.fetching()
    newcomer.seeking.hear_answer(Fresh(reason="no healthy peer is there"))
    newcomer.seeking.tell_outcome()
    leave, begin = newcomer.done
    assert leave == fx.LeaveState("one") and "warms up where it is fresh: no healthy peer is there" in begin.text
    newcomer.helped("two")
    assert newcomer.done == [leave, begin], "too late"


def test_to_stop_what_is_over_changes_nothing() -> None:
    newcomer = Newcomer()
    newcomer.seeking.stop_seeking("the run ends")
    newcomer.seeking.tell_outcome()
    assert newcomer.done == []


def test_a_learner_of_a_lost_run_keeps_its_optimizer_in_the_run_that_goes_on_for_it() -> None:
    settings = Settings(fragments=1).resolved(1)
    known = {"fingerprint": "f", "versions": (5,), "gathering": 6, "committed": 6, "settings": settings}
    for succeeds in ((), ("lost",)):
        machine = LearnerMachine("a", "s", (TensorSpec("w", (4,), "float32"),), restored=True)
        machine.handle(0.0, fx.Arrived(Welcome(run="lost", incarnation=1, session="s", **known)))
        machine.handle(1.0, fx.Disconnected("its machine is gone"))
        welcome = Welcome(run="new", incarnation=2, session="s", succeeds=succeeds, **known)
        done = machine.handle(2.0, fx.Arrived(welcome))
        assert [one.reset for one in done if isinstance(one, fx.ForgetVersions)] == [False]
        assert (fx.Await() in done) == (not succeeds), "in another run it takes a peer's"


def test_a_learner_of_several_ranks_takes_nobodys_state_and_gives_none() -> None:
    tensors, settings = (TensorSpec("w", (4,), "float32"),), Settings(fragments=1).resolved(1)
    halves = tuple((Box("w", (start,), (2,)),) for start in (0, 2))
    for ranks in ((), halves):
        machine = LearnerMachine("a", "s", tensors, ranks=ranks)
        known = {"run": "r", "fingerprint": "f", "incarnation": 1, "versions": (5,), "gathering": 6, "committed": 6}
        welcome = Welcome(settings=settings, session="s", **known)
        done = machine.handle(0.0, fx.Arrived(welcome))
        done += machine.handle(1.0, fx.Arrived(Recover(incarnation=2, reason="a test", clock={SYNCER: 6})))
        done += machine.handle(2.0, fx.Arrived(Help(ticket="t", newcomer="b", after=6)))
        said = [type(effect.message) for effect in done if isinstance(effect, fx.Say)]
        assert said.count(Seek) == (0 if ranks else 2) and said.count(Unable) == 1
        assert (fx.Await() in done) == (not ranks)
        reason = next(one.message for one in done if isinstance(one, fx.Say) and isinstance(one.message, Unable)).reason
        assert (reason == "a learner of several ranks gives no state to others") == bool(ranks)
