"""Bodies to and from the shards of a syncer (docs/adr/0031); most syncers are one process, and have one.

A contribution is encoded whole. A body is its rows' bytes one behind the other, and ranges of shards begin where rows
and blocks do, so each shard's body is cut out of it: no bit depends on the number of shards, and feedback and copies
that a GPU has encoded are as with one. Versions and first parameters are ranges of the fragment's array.

Beside a rank of a learner of several all this is of what the rank holds and sends (numerics/rank_shards.py).

The lead is asked once: a learner that has lost it begins anew with it. A shard that does not answer is asked again for
as long as the lead is there: no round is committed without it, and training goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from atoll.courier.rank_channel import UploadPart
from atoll.digests import compute_digest
from atoll.fabric.bodies import BodyConnection, keep_asking, run_together
from atoll.fabric.transfer import SentBody
from atoll.mailbox.channel import Start
from atoll.numerics.arrays import ByteArray
from atoll.numerics.codec import Codec
from atoll.numerics.fragments import Fragment, FragmentPlan
from atoll.numerics.rank_plan import RankPlan
from atoll.numerics.rank_shards import RankPart, RankShards, cut_rank_plan
from atoll.numerics.shard_plan import PartPlace, ShardPlan, locate_bodies, make_shard_plan
from atoll.protocol.errors import Unreachable

T = TypeVar("T")
BODY_S = 600.0
"""The most a body may take; the fabric's minimum rate ends a stuck one long before."""
LEAD = 1


class ShardBody(NamedTuple):
    shard: int
    data: ByteArray
    digest: str


class ShardConnections:
    def __init__(
        self,
        lead: BodyConnection,
        start: Start,
        plan: FragmentPlan,
        codec: Codec,
        version_codec: str,
        say: Callable[[str], None],
        tasks: asyncio.TaskGroup,
        rank_plan: RankPlan | None = None,
    ) -> None:
        """`plan`: of what the learner holds, or, with a `rank_plan`, this rank of it."""
        self._start, self._plan, self._codec, self._say, self._tasks = start, plan, codec, say, tasks
        self._rank_plan = rank_plan
        self._rank_shards: RankShards | None = None
        """Of a rank, where the syncer has several shards."""
        self._codecs = (codec.name, version_codec)
        self._connections = [lead]
        self._addresses: tuple[str, ...] = ()
        self._left: list[BodyConnection] = []
        """Of addresses where no shard is any more: a request may still be on its way there."""
        self._shards: ShardPlan | None = None
        """None: the syncer is one process."""
        self._away: set[int] = set()

    @property
    def lead(self) -> BodyConnection:
        return self._connections[0]

    def use_addresses(self, addresses: Sequence[str]) -> None:
        """Of shards 2, 3 …; those of a new term may be others."""
        if tuple(addresses) == self._addresses:
            return
        known = dict(zip(self._addresses, self._connections[1:], strict=True))
        found = [known.get(one) or self.lead.connect_shard(one) for one in addresses]
        self._left += [one for one in self._connections[1:] if one not in found]
        self._addresses, self._connections = tuple(addresses), [self.lead, *found]
        if (1 if self._shards is None else self._shards.count) != 1 + len(addresses):
            self._cut_plan(1 + len(addresses))

    def _cut_plan(self, count: int) -> None:
        """Threads that encode read these: each is set once it is whole."""
        whole = self._plan if self._rank_plan is None else self._rank_plan.whole
        shards = make_shard_plan(whole, count, self._codecs) if count > 1 else None
        of_rank = None if shards is None or self._rank_plan is None else cut_rank_plan(self._rank_plan, shards)
        self._shards, self._rank_shards = shards, of_rank

    def close(self) -> None:
        """Cuts whatever is on its way to shards other than the lead, whose connection is its owner's."""
        for one in (*self._connections[1:], *self._left):
            self._tasks.create_task(one.close())
        del self._connections[1:]
        self._left.clear()

    # ---- out ----------------------------------------------------------------------------------------------------

    def part_sent(self, fragment: int) -> Fragment:
        """What is sent of a fragment, as it is encoded: the front of its array, or all of it."""
        if self._rank_shards is not None:
            return self._rank_shards.sent(fragment)
        return self._plan.fragments[fragment] if self._rank_plan is None else self._rank_plan.sent(fragment)

    def places_sent(self, fragment: int) -> tuple[PartPlace, ...]:
        """Where that lies which each shard gets."""
        if self._rank_shards is not None:
            return self._rank_shards.places_sent(fragment)
        if self._rank_plan is None:
            return self.places_of(self._plan.fragments[fragment])
        sent = self._rank_plan.sent(fragment)
        return (PartPlace(LEAD, sent, slice(0, sent.size)),) if sent.size else ()

    def cut_body(self, fragment: int, data: ByteArray) -> list[ShardBody]:
        """What each shard gets of the body of a fragment; views of it, but where merged buffers lie in between."""
        if self._shards is None:
            return [ShardBody(LEAD, data, compute_digest(data.data))]
        found = []
        for shard, slices in locate_bodies(self._codec, self.part_sent(fragment), self.places_sent(fragment)):
            cut = data[slices[0]] if len(slices) == 1 else np.concatenate([data[one] for one in slices])
            found.append(ShardBody(shard, cut, compute_digest(cut.data)))
        return found

    async def put_contribution(self, order: UploadPart, bodies: Sequence[ShardBody]) -> list[SentBody]:
        """Send each shard its body; return how each was received, once all shards have theirs."""
        name, session, rank = self._start.learner, self._start.session, self._start.rank

        async def put(body: ShardBody) -> SentBody:
            def ask(to: BodyConnection) -> Awaitable[SentBody]:
                data = (body.data.data, body.digest, BODY_S)
                return to.put_contribution(name, session, order.round, order.attempt, *data, rank=rank)

            return await self.reach(body.shard, ask)

        return await run_together([put(body) for body in bodies])

    async def put_initial(
        self, fragment: int, place: PartPlace, data: ByteArray, digest: str, codec: str = "", loss_ppb: int = 0
    ) -> None:
        """Send a part of version 0 to its shard. `codec`: the form of `data`."""
        name, session, rank = self._start.learner, self._start.session, self._start.rank
        form = (rank, codec, loss_ppb)
        await self.reach(
            place.shard, lambda to: to.put_initial(name, session, fragment, data.data, digest, BODY_S, *form)
        )

    # ---- in -----------------------------------------------------------------------------------------------------

    def places_of(self, part: Fragment) -> tuple[PartPlace, ...]:
        """Where the parts of a fragment are."""
        if self._shards is None:
            return (PartPlace(LEAD, part, slice(0, part.size)),)
        return self._shards.places(part.index)

    def parts_held(self, fragment: int) -> tuple[RankPart, ...]:
        """The same for a rank, which may hold what it does not send."""
        assert self._rank_plan is not None
        if self._rank_shards is not None:
            return self._rank_shards.parts[fragment]
        held, sent = self._plan.fragments[fragment], self._rank_plan.sent(fragment)
        return (RankPart(LEAD, held, sent, slice(0, sent.size), slice(sent.size, held.size)),)

    def arrived_bytes(self, fragment: int) -> int:
        """Bytes that have arrived of the newest version that was asked for, from all shards: 4 for each value."""
        return sum(to.arrivals[fragment].values_at for to in self._connections if fragment in to.arrivals)

    def forget_arrivals(self) -> None:
        """Everything is fetched anew."""
        for to in self._connections:
            to.arrivals.clear()

    async def reach(self, shard: int, ask: Callable[[BodyConnection], Awaitable[T]]) -> T:
        if shard == LEAD:
            return await ask(self.lead)
        answer = await keep_asking(
            lambda: ask(self._connection_to(shard)), lambda: self.lead.up, lambda why: self._tell_away(shard, why)
        )
        if shard in self._away:
            self._away.discard(shard)
            self._say(f"shard {shard} of the syncer answers again")
        return answer

    def _connection_to(self, shard: int) -> BodyConnection:
        if shard > len(self._connections):
            raise Unreachable(f"the syncer has no shard {shard} any more")
        return self._connections[shard - 1]

    def _tell_away(self, shard: int, why: str) -> None:
        if shard not in self._away and shard <= len(self._connections):
            self._away.add(shard)
            where = self._connections[shard - 1].url
            self._say(f"shard {shard} of the syncer at {where} does not answer: {why}; training goes on without it")
