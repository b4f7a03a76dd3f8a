"""Which part of every fragment each shard of the syncer holds (docs/adr/0031).

The array of a fragment is cut into one range for each shard, in order of shard. A shard's plan is a `FragmentPlan` of
the pieces in its ranges, so what works on a plan works on a shard's. Rules kept here:

- ranges tile the array. They begin where `merge.cut_fragment` cuts, so a shard's cuts are cuts of the whole fragment,
  and where codecs' blocks begin anew. So merge, outer step, codecs and squares per cut give the bits of the whole;
- a tensor without rows (one dimension) is not cut: row-wise rules merge it as a whole. A rule that needs the norms of
  whole tensors (merge "rda") adds up those of the cuts (`exchange_of`);
- parts are equally large within one such cut, and so are the shares of the whole model: what a shard lacks of one
  fragment it gets of the next. Of a small fragment a shard may have nothing;
- the answer follows from the plan, the number of shards and the codecs alone, so both sides come to the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from atoll.choices import CODEC
from atoll.numerics.codec import Codec, body_parts
from atoll.numerics.fragments import Fragment, FragmentPlan, Piece, lay_out_plan, row_lengths
from atoll.numerics.merge import Cut, Gather, NormExchange, cut_fragment, merges_by_norms


class PartPlace(NamedTuple):
    """A shard's part of a fragment, and where it lies in the array of the whole."""

    shard: int
    """Counted from 1, the lead."""
    part: Fragment
    values: slice


class ShardPlan(msgspec.Struct, frozen=True):
    whole: FragmentPlan
    plans: tuple[FragmentPlan, ...]
    """In order of shard: of what it holds. Fragments may be empty."""
    ranges: tuple[tuple[slice, ...], ...]
    """Per fragment, in order of shard: where its part lies in the array of the whole fragment."""

    @property
    def count(self) -> int:
        return len(self.plans)

    def plan_of(self, shard: int) -> FragmentPlan:
        """Shards are counted from 1, the lead."""
        return self.plans[shard - 1]

    def part(self, shard: int, fragment: int) -> Fragment:
        return self.plans[shard - 1].fragments[fragment]

    def values(self, shard: int, fragment: int) -> slice:
        return self.ranges[fragment][shard - 1]

    def holders(self, fragment: int) -> tuple[int, ...]:
        """The shards that hold any of it, in order."""
        return tuple(n for n, part in enumerate(self.ranges[fragment], start=1) if part.stop > part.start)

    def places(self, fragment: int) -> tuple[PartPlace, ...]:
        """Of the parts that are not empty, in order."""
        return tuple(PartPlace(n, self.part(n, fragment), self.values(n, fragment)) for n in self.holders(fragment))


def make_shard_plan(plan: FragmentPlan, count: int, codecs: Sequence[str] = ()) -> ShardPlan:
    """`codecs`: by which contributions and versions of this run travel."""
    assert count >= 1, "a syncer has at least one shard"
    block = max((getattr(CODEC.load(name), "BLOCK_OVER_ROWS", 1) for name in codecs), default=1)
    before = [0] * (count - 1)
    """Per border between two shards: the values below it, in the fragments so far."""
    total, ranges, pieces = 0, [], []
    for fragment in plan.fragments:
        cuts = cut_fragment(fragment)
        allowed = _find_borders(fragment, cuts, block)
        total += fragment.size
        borders = [0]
        for number, below in enumerate(before, start=1):
            ideal = min(max(total * number // count - below, borders[-1]), fragment.size)
            borders.append(_nearest(allowed, ideal))
        borders.append(fragment.size)
        before = [below + border for below, border in zip(before, borders[1:-1], strict=True)]
        parts = tuple(slice(*pair) for pair in pairwise(borders))
        ranges.append(parts)
        pieces.append([_join_cuts(cuts, part) for part in parts])
    plans = (lay_out_plan(plan.strategy, [of[shard] for of in pieces]) for shard in range(count))
    return ShardPlan(plan, tuple(plans), tuple(ranges))


def _find_borders(fragment: Fragment, cuts: list[Cut], block: int) -> list[int]:
    """Where a range may begin or end, ascending: at pieces, and inside of those that have rows."""
    starts = []
    for cut in cuts:
        inside = cut.values.start - fragment.offsets[cut.number]
        if inside == 0 or (len(cut.piece.shape) >= 2 and inside % block == 0):
            starts.append(cut.values.start)
    return [*starts, fragment.size]


def _nearest(borders: list[int], ideal: int) -> int:
    """Of two as near, the lower one."""
    above = bisect_right(borders, ideal)
    return min(borders[max(0, above - 1) : above + 1], key=lambda border: abs(border - ideal))


def _join_cuts(cuts: list[Cut], part: slice) -> list[Piece]:
    """The pieces of a range: cuts of one piece are rows next to each other."""
    found: dict[int, Piece] = {}
    for cut in cuts:
        if part.start <= cut.values.start < part.stop:
            held = found.get(cut.number)
            joined = cut.piece if held is None else Piece(held.tensor, held.first, held.rows + cut.piece.rows)
            found[cut.number] = joined
    return list(found.values())


def exchange_of(plan: ShardPlan, shard: int, fragment: int, rule: str, gather: Gather) -> NormExchange | None:
    """What a shard needs to merge its part by norms of whole pieces; None: others do not matter for its bits."""
    whole, holders = plan.whole.fragments[fragment], plan.holders(fragment)
    if len(holders) < 2 or shard not in holders or not merges_by_norms(rule, whole):
        return None
    return NormExchange(whole, [plan.part(n, fragment) for n in holders], gather)


# ---- bodies ---------------------------------------------------------------------------------------------------------


def locate_bodies(codec: Codec, whole: Fragment, places: Sequence[PartPlace]) -> list[tuple[int, list[slice]]]:
    """For each shard, the bytes of the whole fragment's body that are its own body, in order: one slice, or up to three
    where merged buffers, which come first in a body, lie in the middle of the fragment."""
    found: dict[int, list[slice]] = {place.shard: [] for place in places}
    for section in body_parts(codec, whole):
        at = section.data.start
        for place in places:
            first = place.values.start
            inside = [
                piece
                for piece, own in place.part.parts
                if section.values.start <= first + own.start < section.values.stop
            ]
            if inside:
                size = section.codec.nbytes(row_lengths(inside))
                found[place.shard].append(slice(at, at + size))
                at += size
        assert at == section.data.stop, "a body is the bodies of its parts"
    return list(found.items())
