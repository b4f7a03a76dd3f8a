from __future__ import annotations

import numpy as np
import pytest
from tests.syncer.conftest import plan

from atoll.numerics.codec import make_codec
from atoll.protocol.errors import PeerError
from atoll.syncer.inbox import Inbox

KEY = ("a", 3, 1)


@pytest.fixture
def inbox() -> Inbox:
    return Inbox(plan(), make_codec("fp32"))


def fill(inbox: Inbox, key: tuple[str, int, int], value: float) -> None:
    into = inbox.receive(key)
    np.frombuffer(into, dtype=np.float32)[:] = value
    inbox.arrived(key, "mark")


def test_what_was_not_asked_for_is_refused(inbox: Inbox) -> None:
    with pytest.raises(PeerError, match=r"no contribution to round 3 \(attempt 1\) is waited for"):
        inbox.receive(KEY)


def test_the_same_body_twice_is_refused(inbox: Inbox) -> None:
    inbox.ask(KEY, 0)
    inbox.receive(KEY)
    with pytest.raises(PeerError, match="is here already"):
        inbox.receive(KEY)
    inbox.arrived(KEY, "mark")
    with pytest.raises(PeerError, match="is here already"):
        inbox.receive(KEY)


def test_a_body_that_broke_off_may_come_again(inbox: Inbox) -> None:
    inbox.ask(KEY, 0)
    inbox.receive(KEY)
    inbox.aborted(KEY)
    with pytest.raises(PeerError, match="did not arrive"):
        inbox.open(KEY, "mark")
    fill(inbox, KEY, 2.0)
    assert (inbox.open(KEY, "mark") == 2.0).all()
    assert (inbox.delta(KEY) == 2.0).all()


def test_a_body_is_as_long_as_its_fragment(inbox: Inbox) -> None:
    sizes = [part.size for part in plan().fragments]
    for fragment, size in enumerate(sizes):
        inbox.ask(("a", fragment, 1), fragment)
        assert inbox.receive(("a", fragment, 1)).nbytes == 4 * size


def test_another_digest_than_the_messages_is_refused(inbox: Inbox) -> None:
    inbox.ask(KEY, 0)
    fill(inbox, KEY, 1.0)
    with pytest.raises(PeerError, match="not the one its message names"):
        inbox.open(KEY, "another")


def test_a_discarded_body_keeps_its_buffer_until_it_is_whole(inbox: Inbox) -> None:
    inbox.ask(KEY, 0)
    into = inbox.receive(KEY)
    inbox.discard(KEY)
    other = ("b", 4, 1)
    inbox.ask(other, 0)
    elsewhere = inbox.receive(other)
    into[0] = 1
    assert np.frombuffer(into, dtype=np.uint8).ctypes.data != np.frombuffer(elsewhere, dtype=np.uint8).ctypes.data
    inbox.arrived(KEY, "mark")
    with pytest.raises(PeerError, match="did not arrive"):
        inbox.open(KEY, "mark")


def test_a_body_that_is_read_aside_keeps_its_buffers(inbox: Inbox) -> None:
    inbox.ask(KEY, 0)
    fill(inbox, KEY, 1.0)
    with inbox.hold(KEY):
        values = inbox.open(KEY, "mark")
        inbox.discard(KEY)
        assert inbox.opened(KEY)
        inbox.ask(("b", 4, 1), 0)
        fill(inbox, ("b", 4, 1), 9.0)
        assert (values == 1.0).all()
    assert not inbox.opened(KEY)


def test_asked_again_it_starts_anew(inbox: Inbox) -> None:
    """A probe of the same round: what came of the last one is forgotten."""
    inbox.ask(KEY, 0)
    fill(inbox, KEY, 1.0)
    inbox.ask(KEY, 0)
    fill(inbox, KEY, 2.0)
    assert (inbox.open(KEY, "mark") == 2.0).all()


def test_buffers_are_used_again(inbox: Inbox) -> None:
    """However many rounds there are, memory is what the most contributions at once needed."""
    seen: set[int] = set()
    kept = []
    for number in range(100):
        for learner in ("a", "b"):
            inbox.ask((learner, number, 1), number % 2)
            fill(inbox, (learner, number, 1), 1.0)
            values = inbox.open((learner, number, 1), "mark")
            seen.add(values.ctypes.data)
            kept.append(values)
        for learner in ("a", "b"):
            inbox.discard((learner, number, 1))
    assert len(seen) == 2
