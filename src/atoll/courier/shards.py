"""Bodies to and from the shards of a syncer (docs/adr/0031); most syncers are one process, and have one.

A contribution is encoded whole. A body is its rows' bytes one behind the other, and ranges of shards begin where rows
and blocks do, so each shard's body is cut out of it: no bit depends on the number of shards, and feedback and copies
that a GPU has encoded are as with one. Versions and first parameters are ranges of the fragment's array.

The lead is asked once: a learner that has lost it begins anew with it. A shard that does not answer is asked again for
as long as the lead is there: no round is committed without it, and training goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from atoll.courier.rank_channel import UploadPart
from atoll.digests import combine_digests, compute_digest
from atoll.fabric.bodies import BodyConnection, keep_asking, run_together
from atoll.mailbox.channel import Start
from atoll.numerics.arrays import ByteArray
from atoll.numerics.codec import Codec
from atoll.numerics.fragments import Fragment, FragmentPlan
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
    ) -> None:
        self._start, self._plan, self._codec, self._say, self._tasks = start, plan, codec, say, tasks
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
        self._shards = make_shard_plan(self._plan, 1 + len(addresses), self._codecs) if addresses else None

    def close(self) -> None:
        """Cuts whatever is on its way to shards other than the lead, whose connection is its owner's."""
        for one in (*self._connections[1:], *self._left):
            self._tasks.create_task(one.close())
        del self._connections[1:]
        self._left.clear()

    # ---- out ----------------------------------------------------------------------------------------------------

    def cut_body(self, part: Fragment, data: ByteArray) -> list[ShardBody]:
        """What each shard gets of the body of a fragment; views of it, but where merged buffers lie in between."""
        if self._shards is None:
            return [ShardBody(LEAD, data, compute_digest(data.data))]
        found = []
        for shard, slices in locate_bodies(self._codec, part, self._shards.places(part.index)):
            cut = data[slices[0]] if len(slices) == 1 else np.concatenate([data[one] for one in slices])
            found.append(ShardBody(shard, cut, compute_digest(cut.data)))
        return found

    async def put_contribution(self, order: UploadPart, bodies: Sequence[ShardBody]) -> str:
        """The digest of the contribution, once all shards have their bodies."""
        name, session, rank = self._start.learner, self._start.session, self._start.rank

        async def put(body: ShardBody) -> None:
            def ask(to: BodyConnection) -> Awaitable[None]:
                data = (body.data.data, body.digest, BODY_S)
                return to.put_contribution(name, session, order.round, order.attempt, *data, rank=rank)

            await self.reach(body.shard, ask)

        await run_together([put(body) for body in bodies])
        return combine_digests([body.digest for body in bodies])

    async def put_initial(self, fragment: int, place: PartPlace, data: ByteArray, digest: str) -> None:
        name, session, rank = self._start.learner, self._start.session, self._start.rank
        await self.reach(
            place.shard,
            lambda to: to.put_initial(name, session, fragment, data.data, digest, BODY_S, rank=rank),
        )

    # ---- in -----------------------------------------------------------------------------------------------------

    def places_of(self, part: Fragment) -> tuple[PartPlace, ...]:
        """Where the parts of a fragment are."""
        if self._shards is None:
            return (PartPlace(LEAD, part, slice(0, part.size)),)
        return self._shards.places(part.index)

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
