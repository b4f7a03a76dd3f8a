"""Nothing counts twice: what a learner says is numbered, and its numbers only go up.

Rules:
- a number counts for one (learner, session), over all its connections: a message that is said again, by whomever, is
  refused, and so is one that goes back; a hello too, so nobody opens a channel with somebody else's;
- a session that numbered its messages (version 2) cannot claim version 1 later, where nothing is numbered;
- a bounded number of sessions is remembered, those that were heard last. What is forgotten, or was said to another
  syncer, can be said again: this is a second line behind TLS, not instead of it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from msgspec.structs import replace

from atoll.fabric.handlers import Channel
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import FromLearner

NUMBERED = 2
"""The version since which messages are numbered."""

M = TypeVar("M", bound=FromLearner)


class Sequences:
    def __init__(self, most: int) -> None:
        self._most = most
        self._last: OrderedDict[tuple[str, str], int] = OrderedDict()
        """By learner and session; the one that was heard longest ago first."""

    def __len__(self) -> int:
        return len(self._last)

    def check(self, channel: Channel, message: FromLearner) -> None:
        """PeerError if it was said before, or is numbered otherwise than its session has been."""
        last = self._last.get((channel.learner, channel.session))
        if channel.protocol < NUMBERED:
            if last is not None:
                raise PeerError(
                    f"{channel.learner} spoke protocol {NUMBERED} in this session and now {channel.protocol}: "
                    "start its training process anew"
                )
        elif message.seq <= (last or 0):
            raise PeerError(
                f"{type(message).__name__} {message.seq} of {channel.learner} comes after {last or 0}: "
                "it was said before, and counts once"
            )

    def note(self, channel: Channel, message: FromLearner) -> None:
        if channel.protocol >= NUMBERED:
            key = (channel.learner, channel.session)
            self._last[key] = message.seq
            self._last.move_to_end(key)
            if len(self._last) > self._most:
                self._last.popitem(last=False)


def unnumbered(message: M) -> M:
    """As the desk hears it: numbers belong to the wire."""
    return replace(message, seq=0)
