"""A peer's copies for newcomers: when one is made, whom it serves, how long it is kept."""

from __future__ import annotations

from typing import Any

from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.peer_state import KEPT_S, Helping
from atoll.protocol.learner.versions import Versions
from atoll.protocol.messages import FromLearner, Help, Ready, Release, Stream, Unable


class Peer:
    """Its helping, with two fragments; what it does and says is remembered."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.said: list[FromLearner] = []
        self.versions = Versions(self.done.append, held=[3, 3], newest=[3, 3])
        self.helping = Helping(self.done.append, lambda now, message: self.said.append(message), self.versions)

    def ask(self, ticket: str, now: float = 0.0, *, frozen: bool = False, **how: Any) -> None:
        self.helping.hear_request(now, Help(ticket=ticket, newcomer="b", after=6, frozen=frozen))
        self.turn(now, **how)

    def turn(self, now: float = 0.0, *, able: bool = True) -> None:
        self.helping.serve_newcomers(now, able=able)

    def captured(self, number: int, now: float = 0.0, **facts: Any) -> None:
        self.helping.take_copy(now, fx.Captured(number, **{"t": 9, "size": 100, "digest": "d", "direct": "x", **facts}))
        self.turn(now)

    def take(self, kind: type[Any]) -> list[Any]:
        return [effect for effect in self.done if isinstance(effect, kind)]


def test_a_copy_is_ordered_and_once_it_lies_ready_that_is_said() -> None:
    peer = Peer()
    peer.ask("a")
    assert peer.done == [fx.Capture(1)] and peer.said == []
    peer.captured(1)
    assert peer.done[1:] == [fx.Give(1, "a")]
    assert peer.said == [Ready(ticket="a", size=100, digest="d", t=9, direct="x")]


def test_no_copy_before_what_was_committed_is_adopted() -> None:
    peer = Peer()
    peer.versions.newest = [4, 3]
    peer.ask("a")
    assert peer.done == []
    peer.versions.newest = [5, 4]  # later versions are no part of what was asked for
    peer.versions.held = [4, 3]
    peer.turn()
    assert peer.done == [fx.Capture(1)]


def test_a_copy_serves_whoever_it_is_new_enough_for() -> None:
    peer = Peer()
    peer.ask("a")
    peer.ask("b")
    peer.captured(1)
    peer.ask("c")
    assert len(peer.take(fx.Capture)) == 1
    assert [give.ticket for give in peer.take(fx.Give)] == ["a", "b", "c"]
    peer.versions.newest = peer.versions.held = [4, 3]
    peer.ask("d")
    assert peer.take(fx.Capture) == [fx.Capture(1), fx.Capture(2)]


def test_frozen_parameters_are_copied_for_those_alone_who_ask_for_them() -> None:
    peer = Peer()
    peer.ask("a")
    peer.captured(1)
    peer.ask("b", frozen=True)
    peer.captured(2)
    peer.ask("c", frozen=True)
    assert peer.take(fx.Capture) == [fx.Capture(1), fx.Capture(2, frozen=True)]
    assert peer.take(fx.Give) == [fx.Give(1, "a"), fx.Give(2, "b"), fx.Give(2, "c")]


def test_a_third_copy_waits_until_one_is_let_go() -> None:
    peer = Peer()
    for number, ticket in ((1, "a"), (2, "b")):
        peer.versions.newest = peer.versions.held = [3 + number, 3]
        peer.ask(ticket)
        peer.captured(number)
    peer.versions.newest = peer.versions.held = [9, 9]
    peer.ask("c")
    assert len(peer.take(fx.Capture)) == 2
    peer.helping.hear_request(1.0, Release(ticket="a", reason="done"))
    assert peer.done[-2:] == [fx.TakeBack("a"), fx.Dispose(1)]
    peer.turn(1.0)
    assert peer.done[-1] == fx.Capture(3)


def test_a_copy_that_is_still_being_made_is_let_go_when_nobody_wants_it_any_more() -> None:
    peer = Peer()
    peer.ask("a")
    peer.helping.hear_request(0.1, Release(ticket="a", reason="the newcomer is gone"))
    peer.captured(1)
    assert peer.done == [fx.Capture(1), fx.Dispose(1)] and peer.said == []


def test_a_copy_that_nobody_let_go_is_let_go_after_a_while() -> None:
    peer = Peer()
    peer.ask("a")
    peer.captured(1, now=5.0)
    assert peer.helping.wake_times == [5.0 + KEPT_S]
    peer.turn(5.0 + KEPT_S)
    assert peer.done[-2:] == [fx.TakeBack("a"), fx.Dispose(1)] and peer.helping.wake_times == []


def test_a_large_copy_is_kept_as_long_as_a_slow_stream_takes() -> None:
    peer = Peer()
    peer.ask("a")
    peer.captured(1, size=8 * 2**30)
    assert peer.helping.wake_times == [1024.0]


def test_it_streams_what_it_has_and_says_so_when_it_has_nothing() -> None:
    peer = Peer()
    peer.ask("a")
    peer.captured(1)
    peer.helping.hear_request(1.0, Stream(ticket="a", offset=7))
    assert peer.done[-1] == fx.PassOn("a", 7)
    peer.helping.hear_request(1.0, Stream(ticket="b", offset=0))
    assert peer.said[-1] == Unable(ticket="b", reason="its copy is gone")


def test_one_that_does_not_train_declines() -> None:
    peer = Peer()
    peer.ask("a", able=False)
    assert peer.done == []
    assert peer.said == [Unable(ticket="a", reason="it does not train, or has not recovered itself")]


def test_a_copy_that_cannot_be_made_is_declined_with_its_reason() -> None:
    peer = Peer()
    peer.ask("a")
    peer.captured(1, reason="'extra/it' holds a lambda")
    assert peer.said == [Unable(ticket="a", reason="'extra/it' holds a lambda")]
    peer.ask("b")
    assert peer.done[-1] == fx.Capture(2), "the next is tried"


def test_one_that_starts_over_gives_nothing_of_its_life_before() -> None:
    peer = Peer()
    peer.ask("a")
    peer.captured(1)
    peer.versions.newest = peer.versions.held = [4, 4]
    peer.ask("b")
    peer.helping.forget_copies(1.0, "it starts over itself")
    assert peer.said[-1] == Unable(ticket="b", reason="it starts over itself")
    assert peer.done[-2:] == [fx.TakeBack("a"), fx.Dispose(1)]
    peer.captured(2)
    assert peer.done[-1] == fx.Dispose(2), "what was under way then is not given either"


def test_no_copy_is_made_for_what_was_asked_over_a_connection_that_broke() -> None:
    peer = Peer()
    peer.versions.newest = [4, 3]
    peer.ask("a")
    peer.helping.forget_requests()
    peer.versions.held = [4, 3]
    peer.turn()
    assert peer.done == [] and not peer.helping.is_helping
