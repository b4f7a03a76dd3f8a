"""What the lead of a syncer of several shards does, as shards.py decides: orders to shards, and what is whole now.

Below are the rules that its service (syncer/lead.py) and the fault simulator share: what the lead makes of an effect of
the syncer's state machine before it carries it out. Which ones wait for a shard that is away, what a pull lets the
shards expect, what an order to stage means for its own part, and when parts of a body are no body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.protocol.effects import Fact, Note
from atoll.protocol.messages import Contribution, Pull
from atoll.protocol.shard_messages import BodyHere, Expect, FromLead, InitialHere, Stage, Staged, Values
from atoll.protocol.syncer import effects as fx

LEAD = 1
"""Its own number among the shards."""


class Order(Fact, frozen=True):
    """Effect: a message to a shard. To shard 1, the lead itself: Stage, NormsOfAll and Unstage only."""

    shard: int
    message: FromLead


class Complete(Fact, frozen=True):
    """Effect: a contribution is whole: judge it, then tell the syncer's state machine."""

    learner: str
    message: Contribution
    parts: tuple[BodyHere, ...]
    """Of the holders of the fragment, in order."""


class Combine(Fact, frozen=True):
    """Effect: every holder has staged its part of the round: tell the state machine (Merged)."""

    merge: fx.Merge
    parts: tuple[tuple[int, Staged], ...]
    """By shard, in order."""

    def heads(self, shards: int) -> tuple[str, ...]:
        """As the record names them: of shard 1 the digest of its part, of the others the heads of their chains; empty
        for one that holds nothing of the fragment."""
        staged = dict(self.parts)
        others = (staged[n].head if n in staged else "" for n in range(LEAD + 1, shards + 1))
        return (staged[LEAD].digest, *others)


class CutPartsKept(Fact, frozen=True):
    """Effect: the parts of a cut of all shards are durable; with a reason: they are not."""

    cut: int
    digests: tuple[str, ...]
    """Of shards 2 to S, in order."""
    reason: str


class CutPartsDone(Fact, frozen=True):
    """Effect: in all other shards the cut is complete; with a reason: it is not."""

    cut: int
    reason: str


class InitialParts(Fact, frozen=True):
    """Effect: a shard has heard of the first parameters."""

    shard: int
    message: InitialHere


class ValuesHere(Fact, frozen=True):
    """Effect: a shard has sent some of its values."""

    shard: int
    message: Values


class Moved(Fact, frozen=True):
    """Effect: a shard has another address than the learners know."""

    shard: int


class AllThere(Fact, frozen=True):
    """Effect: every shard holds what was decided: what was held back may go out."""


class Tell(Fact, frozen=True):
    """Effect: an event for the syncer's state machine."""

    event: fx.SyncerEvent


LeadEffect = (
    Order
    | Complete
    | Combine
    | CutPartsKept
    | CutPartsDone
    | InitialParts
    | ValuesHere
    | Moved
    | AllThere
    | Tell
    | Note
)


# ---- what becomes of the syncer's effects ---------------------------------------------------------------------------


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
    parts = tuple(fx.Part(one.learner, one.attempt, one.weight, one.base, one.steps) for one in stage.given)
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
