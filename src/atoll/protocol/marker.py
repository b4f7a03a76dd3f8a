"""When a learner saves its part of a cut: every message carries the newest cut's number, and the first to name one is
the marker.

Rules kept here, each with its test: at a welcome a cut is old news, the others have saved theirs; only one that trains
saves, or has trained until the run's end; nobody saves twice for one cut, unless a new term takes it anew.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.protocol.effects import LearnerEffect, Save
from atoll.protocol.messages import Announce, FromSyncer, Welcome


class Marker:
    def __init__(self, do: Callable[[LearnerEffect], None]) -> None:
        self._do = do
        self._newest = 0
        """The newest cut it has heard of."""
        self._kept: tuple[int, ...] = ()
        """The complete ones that the run keeps."""

    def look(self, message: FromSyncer, *, training: bool) -> None:
        """`training`: it holds the run's parameters and has made its steps on them."""
        if isinstance(message, Welcome | Announce):
            self._kept = message.cuts
        if message.cut > self._newest and not isinstance(message, Welcome) and training:
            self._do(Save(message.cut, self._kept))
        self._newest = message.cut if isinstance(message, Welcome) else max(self._newest, message.cut)
