"""What the lead of a syncer of several shards does, as shards.py decides: orders to shards, and what is whole now."""

from __future__ import annotations

from atoll.protocol.effects import Fact, Note
from atoll.protocol.messages import Contribution
from atoll.protocol.shard_messages import BodyHere, FromLead, InitialHere, Staged, Values
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
