"""Rules of the lead of several shards that its service (syncer/lead.py) and the fault simulator share.

What is decided about shards is in shards.py. Here is what the lead makes of an effect of the syncer's state machine
before it carries it out: which wait for a shard that is away, what a pull lets the shards expect, what an order to
stage means for its own part, and when parts of a body are no body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.protocol.messages import Contribution, Pull
from atoll.protocol.shard_messages import BodyHere, Expect, Stage
from atoll.protocol.syncer import effects as fx


class HeldEffects:
    """Effects that wait until every shard is there: nobody could answer a pull while one is away."""

    def __init__(self) -> None:
        self._held: list[fx.SyncerEffect] = []

    def hold(self, effect: fx.SyncerEffect, *, all_ready: bool) -> bool:
        """Whether it waits. While some do, so do all later ones: they are carried out in order."""
        waits = isinstance(effect, fx.ConfirmSent | fx.Discard) or (
            isinstance(effect, fx.Send) and isinstance(effect.message, Pull)
        )
        if not waits or (all_ready and not self._held):
            return False
        self._held.append(effect)
        return True

    def take_all(self) -> list[fx.SyncerEffect]:
        held, self._held = self._held, []
        return held


def expect_answer(learner: str, session: str, pull: Pull, token: str = "") -> Expect:
    """What shards are told of a pull before it is sent."""
    return Expect(
        learner=learner,
        session=session,
        token=token,
        round=pull.round,
        attempt=pull.attempt,
        fragment=pull.fragment,
        probe=pull.probe,
    )


def merge_of(stage: Stage) -> fx.Merge:
    """What an order to stage means for one part."""
    parts = tuple(fx.Part(one.learner, one.attempt, one.weight, one.base) for one in stage.given)
    return fx.Merge(stage.round, stage.fragment, parts)


def find_wrong_parts(
    message: Contribution, parts: Sequence[BodyHere], combine: Callable[[Sequence[str]], str]
) -> str | None:
    """Why these are not the body that a contribution names; None: they are. `combine`: the digest of the whole, of
    those of its parts."""
    if not parts:
        return "its body did not arrive"
    if reason := next((part.reason for part in parts if part.reason), ""):
        return reason
    if combine([part.digest for part in parts]) != message.digest:
        return "its body is not the one its message names"
    return None
