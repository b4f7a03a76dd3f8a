"""Who can be asked to leave in good order: a learner that is connected and speaks a version that knows the question."""

from __future__ import annotations

from atoll.fabric.handlers import Channel
from atoll.fabric.wire import one_line, understood
from atoll.protocol.effects import DrainAsked
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import Drain


def drain(learner: str, channel: Channel | None, *, known: bool) -> DrainAsked:
    """`known`: it is of this run, or was. PeerError: it cannot be asked."""
    if channel is None:
        raise PeerError(
            f"{learner} is away: it can be drained once it is back"
            if known
            else f"no learner of this run is called {one_line(learner)!r}: atoll status says who is there"
        )
    if not understood(Drain(reason=""), channel.protocol):
        raise PeerError(
            f"{learner} speaks protocol {channel.protocol}, which knows no drain: send its process SIGTERM instead"
        )
    return DrainAsked(learner, "the operator asked")
