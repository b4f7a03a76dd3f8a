"""Planted bugs of a syncer of several shards: what is decided, what is void, what a shard that comes back is told."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from tests.simulate.planting import Plain, mutant

from atoll.protocol.shard import Shard
from atoll.protocol.shard_messages import Staged, TakeUp
from atoll.protocol.syncer.shard_effects import LEAD, Combine
from atoll.protocol.syncer.shards import LeadShards


def _lead_alone(plain: Plain) -> Any:
    def broken(self: LeadShards, shard: int, answer: Any) -> None:
        pending = self._merge
        if shard == LEAD and isinstance(answer, Staged) and pending is not None and pending.order == answer.order:
            self._merge = None
            self._out.append(Combine(pending.merge, ((LEAD, answer),)))
        else:
            plain(self, shard, answer)

    return broken


mutant(
    "a round is decided before the other shards have written it",
    (LeadShards, "_note_staged", _lead_alone),
    kind="shards",
)


def _any_order(plain: Plain) -> Any:
    def broken(self: LeadShards, shard: int, answer: Any) -> None:
        """What was staged for a round that is void by now is taken for what was asked."""
        if self._merge is not None and isinstance(answer, Staged):
            answer = replace(answer, order=self._merge.order)
        plain(self, shard, answer)

    return broken


mutant("a void record is taken for decided", (LeadShards, "_note_staged", _any_order), kind="shards")


def _no_decisions(plain: Plain) -> Any:
    def broken(self: LeadShards, shard: int, message: Any) -> None:
        plain(self, shard, replace(message, decisions=()) if isinstance(message, TakeUp) else message)

    return broken


mutant("a shard that comes back is not told what was decided", (LeadShards, "_order", _no_decisions), kind="shards")
mutant(
    "a shard comes back without telling its cuts",
    (Shard, "hello", lambda plain: lambda self, url, cuts: plain(self, url, ())),
    kind="shards",
)
