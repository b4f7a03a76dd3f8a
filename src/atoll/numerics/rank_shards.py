"""What one rank of a learner exchanges with each shard of the syncer (docs/adr/0030, 0031).

A rank holds boxes of tensors, a shard a range of every fragment's array. What both have of a fragment is the rank's
plan of the shard's part, `make_rank_plan(shards.plan_of(n), boxes)`: by that the shard knows the length of a body,
decodes it and serves one. Here is the rank's side of the same: where these parts lie in its own array. Rules kept here:

- the parts of all shards tile the rank's array of a fragment. Of one shard's part, what the rank sends lies in one
  place and what it does not send in another: in the order of the shard's array, as the shard has it;
- a range begins at a row of a tensor, and rows of a box lie next to each other: so a part is cut out, never gathered;
- blocks of codecs begin anew where a part does. Most codecs begin them anew at every row: their bits do not depend on
  the number of shards. Blocks of topk run over rows, so there they do.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import msgspec

from atoll.numerics.fragments import Fragment
from atoll.numerics.rank_plan import RankPlan, make_rank_plan
from atoll.numerics.shard_plan import PartPlace, ShardPlan


class RankPart(NamedTuple):
    """What a rank holds of a shard's part of a fragment, and where it lies in the rank's array of the fragment."""

    shard: int
    """Counted from 1, the lead."""
    held: Fragment
    """As the shard serves it: what the rank sends, then the rest."""
    sent: Fragment
    front: slice
    """Where that lies which the rank sends …"""
    behind: slice
    """… and that which it does not."""


class RankShards(msgspec.Struct, frozen=True):
    fragments_sent: tuple[Fragment, ...]
    """What the rank sends of each fragment, with pieces that begin anew where a shard's part does."""
    parts: tuple[tuple[RankPart, ...], ...]
    """Per fragment, in order of shard: those that are not empty."""

    def sent(self, fragment: int) -> Fragment:
        return self.fragments_sent[fragment]

    def places_sent(self, fragment: int) -> tuple[PartPlace, ...]:
        """Of the bodies that the rank sends of a fragment, in order of shard."""
        return tuple(PartPlace(one.shard, one.sent, one.front) for one in self.parts[fragment] if one.sent.size)


def cut_rank_plan(plan: RankPlan, shards: ShardPlan) -> RankShards:
    """`plan`: of the whole model."""
    assert plan.whole.fingerprint == shards.whole.fingerprint, "both are of one model"
    held = [make_rank_plan(one, plan.boxes) for one in shards.plans]
    sent, parts = [], []
    for fragment in range(len(plan.plan.fragments)):
        of_shards = [(one.plan.fragments[fragment], one.sent(fragment)) for one in held]
        parts.append(tuple(_place_parts(of_shards, plan.sent(fragment).size)))
        pieces = [piece for _, front in of_shards for piece in front.pieces]
        starts = list(accumulate((piece.size for piece in pieces), initial=0))
        assert starts[-1] == plan.sent(fragment).size, "the shards hold the whole fragment"
        sent.append(Fragment(fragment, tuple(pieces), tuple(starts[:-1]), starts[-1]))
    return RankShards(tuple(sent), tuple(parts))


def _place_parts(of_shards: list[tuple[Fragment, Fragment]], sent: int) -> list[RankPart]:
    """`sent`: values of all that is sent, which lies in front of the rest."""
    found, front, behind = [], 0, sent
    for shard, (held, of_it) in enumerate(of_shards, start=1):
        kept = held.size - of_it.size
        if held.size:
            places = slice(front, front + of_it.size), slice(behind, behind + kept)
            found.append(RankPart(shard, held, of_it, *places))
        front, behind = front + of_it.size, behind + kept
    return found
