"""Bodies to and from a syncer, without a control channel: all that the courier of a follower needs (docs/adr/0030).

A learner of several ranks has one control channel, its leader's (`client`). The couriers of its other ranks only send
and fetch bodies, under the learner's name and session and by the same join link:

    bodies = BodyConnection(where)
    await bodies.put_contribution(learner, session, round, attempt, data, digest, deadline_s, rank=1)
    await bodies.get_fragment(fragment, into, deadline_s, learner, rank=1)
    await bodies.close()

Rules:
- the syncer takes bodies while the leader's channel is open under that session, and serves a rank's part while it is
  open at all. Otherwise a PUT is a PeerError, and a GET Unreachable: it is worth another try;
- at most 16 connections;
- where several addresses are named (a,b,c), each request that finds no syncer moves on to the next.

Of a syncer of several shards (docs/adr/0031) each has such a connection. The functions at the end do something with all
of them at once, and put together versions that come in parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import aiohttp

from atoll.fabric.address import SyncerAddress, checked_url, parse_address
from atoll.fabric.body_meter import ArrivalMeter, PartArrival
from atoll.fabric.calls import close_session
from atoll.fabric.state import Into, Parts, StateArrival, StateSource, get_state, put_relay
from atoll.fabric.transfer import (
    CodedBody,
    FetchedVersion,
    FragmentArrival,
    SentBody,
    body_headers,
    body_session,
    fragment_url,
    get_body,
    get_moments,
    get_version,
    moments_url,
    put_body,
)
from atoll.fabric.wire import LOSS_HEADER, FabricLimits
from atoll.protocol.errors import ConfigError, Unreachable

T = TypeVar("T")
ANY = -1
AGAIN_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Waits before an older part is fetched again: a shard commits a moment after the lead."""


class BodyConnection:
    """Belongs to one event loop."""

    def __init__(self, where: str | SyncerAddress, *, limits: FabricLimits | None = None) -> None:
        self._address = parse_address(where) if isinstance(where, str) else where
        self._urls = list(self._address.urls)
        self._limits = limits or FabricLimits()
        self._bodies: aiohttp.ClientSession | None = None
        self.bytes_in = 0
        self.bytes_out = 0
        self.arrivals: dict[int, FragmentArrival] = {}
        """Newest arrival of each fragment, whole or not."""

    @property
    def url(self) -> str:
        """Where the syncer is, or is looked for now."""
        return self._urls[0]

    @property
    def private(self) -> bool:
        """Its syncer authenticates learners; then they do not talk to each other directly."""
        return self._address.private

    def connect_shard(self, link: str) -> BodyConnection:
        """To another shard of this syncer, which sees the same token (docs/adr/0031)."""
        return BodyConnection(self._address.address_of_shard(link), limits=self._limits)

    @property
    def up(self) -> bool:
        """Whether it is of use to try: there is no channel here that could be down."""
        return True

    async def put_contribution(
        self,
        learner: str,
        session: str,
        round: int,
        attempt: int,
        data: memoryview,
        digest: str,
        deadline_s: float,
        rank: int = 0,
    ) -> SentBody:
        """Returns once the syncer has it whole. Unreachable: try again; PeerError: it does not want it. `rank`: which
        rank's part it is, of a learner that declared several."""
        path = f"contributions/{learner}/{round}/{attempt}"
        return await self._put(path, rank, data, body_headers(session, digest), deadline_s)

    async def put_initial(
        self,
        learner: str,
        session: str,
        fragment: int,
        data: memoryview,
        digest: str,
        deadline_s: float,
        rank: int = 0,
        codec: str = "",
        loss_ppb: int = 0,
    ) -> None:
        """The same for version 0. `codec`: the form of `data`, "bf16"; empty: the values. `loss_ppb`: relative error of
        the rounded parameters, in parts per billion."""
        headers = body_headers(session, digest)
        if loss_ppb:
            headers[LOSS_HEADER] = str(loss_ppb)
        await self._put(f"initial/{learner}/{fragment}", rank, data, headers, deadline_s, codec)

    async def get_fragment(
        self,
        index: int,
        into: memoryview,
        deadline_s: float,
        learner: str = "",
        rank: int = -1,
        least: int = -1,
        part: PartArrival | None = None,
        coded: CodedBody | None = None,
    ) -> tuple[int, int, str]:
        """Version, round and digest of what is now in `into`; after an error its content is undefined. With `learner`
        and `rank`: what this rank holds of the fragment, and its digest; −1: all of the fragment. `least`: a shard
        waits a moment for this version, which others have. `part` meters what arrives. `coded`: a form that version 0
        may come in; if it has data in the end, the version and its digest are of that, and `into` is undefined."""
        arrival = FragmentArrival(into.cast("B"), part=part or ArrivalMeter().expect_part(), coded=coded)
        try:
            self.arrivals[index] = arrival
            where = partial(self._fragment_url, index, learner, rank, least, coded.codec if coded is not None else "")
            return await get_body(self._for_bodies(), where, arrival, deadline_s, self._limits)
        except Unreachable:
            self._miss_syncer()
            raise
        finally:
            self.bytes_in += arrival.received

    def _fragment_url(self, index: int, learner: str, rank: int, least: int, codec: str) -> str:
        """At the syncer of now."""
        asked = [f"learner={learner}&rank={rank}"] if rank >= 0 else []
        asked += [f"least={least}"] if least >= 0 else []
        asked += [f"codec={codec}"] if codec else []
        return fragment_url(self.url, index) + ("?" + "&".join(asked) if asked else "")

    async def get_version(
        self,
        index: int,
        have: int,
        step_bytes: int,
        into: memoryview,
        deadline_s: float,
        least: int = -1,
        part: PartArrival | None = None,
    ) -> FetchedVersion:
        """The same for whoever holds version `have`: perhaps as steps from there, of `step_bytes` each."""
        url = fragment_url(self.url, index)
        fetched = await get_version(self._for_bodies(), url, have, step_bytes, into, deadline_s, least, part)
        self.bytes_in += fetched.nbytes or into.nbytes
        return fetched

    async def get_moments(
        self, index: int, version: int, into: memoryview, deadline_s: float, part: PartArrival | None = None
    ) -> int:
        """The bytes of the averaged moments of that version, now in `into`; PeerError: the syncer has none."""
        size = await get_moments(self._for_bodies(), moments_url(self.url, index, version), into, deadline_s, part)
        self.bytes_in += size
        return size

    async def get_state(
        self,
        ticket: str,
        into: Into,
        *,
        learner: str,
        session: str,
        most_bytes: int,
        deadline_s: float,
        direct: str = "",
    ) -> str:
        """The digest of a peer's state, which came into the buffer that `into` gave for its size."""
        near = _direct(direct, ticket) if not self.private else []
        sources = [*near, StateSource.relayed(self.url, ticket, learner, session)]
        arrival = StateArrival(into, most_bytes)
        try:
            return await get_state(self._for_bodies(), sources, arrival, deadline_s, self._limits)
        finally:
            self.bytes_in += arrival.received

    async def put_relay(
        self, ticket: str, parts: Parts, *, offset: int, digest: str, learner: str, session: str, deadline_s: float
    ) -> None:
        """Our state from `offset` on, which must not change meanwhile. The newcomer asks again for what it lacks."""
        source = StateSource.relayed(self.url, ticket, learner, session)
        sent = await put_relay(self._for_bodies(), source, parts, offset, digest, deadline_s, self._limits)
        self.bytes_out += sent

    async def close(self) -> None:
        """Cuts whatever is still on its way."""
        if self._bodies is not None:
            await close_session(self._bodies, self._limits.flush_s)

    async def _put(
        self, path: str, rank: int, data: memoryview, headers: dict[str, str], deadline_s: float, codec: str = ""
    ) -> SentBody:
        asked = [f"rank={rank}"] if rank else []
        asked += [f"codec={codec}"] if codec else []
        url = f"{self.url}/v1/{path}" + ("?" + "&".join(asked) if asked else "")
        try:
            sent = await put_body(self._for_bodies(), url, data, headers, deadline_s, self._limits)
        except Unreachable:
            self._miss_syncer()
            raise
        self.bytes_out += data.nbytes
        return sent

    def _for_bodies(self) -> aiohttp.ClientSession:
        if self._bodies is None:
            self._bodies = body_session(self._address, self._limits)
        return self._bodies

    def _miss_syncer(self) -> None:
        """A request did not reach it."""
        self._take_next_address()

    def _take_next_address(self) -> None:
        self._urls.append(self._urls.pop(0))


def _direct(url: str, ticket: str) -> list[StateSource]:
    """Where a peer on this machine says that it can be reached. Of any other the syncer passes the state on."""
    try:
        return [StateSource.direct(checked_url(url), ticket)]
    except ConfigError:
        return []


# ---- all shards at once ----------------------------------------------------------------------------------------------


async def run_together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What each returns. The first error is raised once all have ended: nothing goes on writing into a buffer then."""
    if len(work) == 1:  # without a task of its own
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [one.result() for one in running]


async def fetch_one_version(parts: Sequence[Callable[[int], Coroutine[Any, Any, int]]], tries: int = 60) -> int:
    """Fetch every part, and those that are older than the others again, until all are of one version; which it is.
    Each is given the version that the others have, and returns its own. Unreachable: some stayed behind."""
    versions = await run_together([fetch(ANY) for fetch in parts])
    for number in range(tries):
        newest = max(versions)
        behind = [n for n, version in enumerate(versions) if version < newest]
        if not behind:
            return newest
        await asyncio.sleep(AGAIN_S[min(number, len(AGAIN_S) - 1)])
        for n, version in zip(behind, await run_together([parts[n](newest) for n in behind]), strict=True):
            versions[n] = version
    raise Unreachable(f"its parts are of versions {min(versions)} to {max(versions)}")


async def keep_asking(
    ask: Callable[[], Awaitable[T]], goes_on: Callable[[], bool], tell_away: Callable[[str], None]
) -> T:
    """What a shard answers, once it does. It is asked again for as long as `goes_on`; each failure is told."""
    number = 0
    while True:
        try:
            return await ask()
        except Unreachable as error:
            if not goes_on():
                raise
            tell_away(str(error))
        await asyncio.sleep(AGAIN_S[min(number, len(AGAIN_S) - 1)])
        number += 1
