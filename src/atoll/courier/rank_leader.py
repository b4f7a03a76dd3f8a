"""Rank 0's courier and the couriers of the other ranks: what it tells them, and what all of them have done.

Rank 0's courier alone runs the learner's state machine. What it sends its training process, and what is to be done with
bodies, it passes on to the others, in order (rank_channel.py). It takes slots for all of them under the same numbers:
so an order is the same in every rank, and a slot is free once every rank has done with it. A rank that is gone, or
cannot do what it was told, ends the learner.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial

import msgspec

from atoll.courier.body import FragmentTransfers
from atoll.courier.rank_channel import (
    FROM_FOLLOWER,
    Arrivals,
    FetchPart,
    FromFollower,
    PartArriving,
    PartLacking,
    RankChannel,
    RankFailed,
    RunCallback,
)
from atoll.courier.rank_events import Said, SaidByAll
from atoll.courier.rank_orders import FetchAgain, RankOrders
from atoll.mailbox.channel import Goodbye, Start, StopOrder
from atoll.protocol.errors import PeerError
from atoll.protocol.learner import effects as fx


class RankLeader:
    def __init__(
        self,
        start: Start,
        listener: socket.socket | None,
        on_event: Callable[[SaidByAll | fx.LearnerEvent], None],
        on_failure: Callable[[str], None],
        run_callback: RunCallback,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """`listener`: where the others come; None: there is only one rank. `on_event`: what all ranks have done."""
        self._learner, self._on_event, self._on_failure, self._group = start.learner, on_event, on_failure, tasks
        self._arrivals = Arrivals(listener, start.learner, len(start.ranks), start.secret) if listener else None
        self._channels: dict[int, RankChannel] = {}
        self._orders = RankOrders(len(start.ranks))
        self._ending = False
        """Ranks that go now do so because all do."""
        self._bodies: FragmentTransfers | None = None
        self._run_callback = run_callback
        self._running: set[asyncio.Task[None]] = set()
        self._lacking: dict[int, int] = {}

    @property
    def most_lacking(self) -> int:
        """Largest number of bytes that another rank lacks. Ranks may hold the same values: a sum would count these more
        than once."""
        return max(self._lacking.values(), default=0)

    async def wait_for_all(self) -> bool:
        """Whether all ranks have come; if not, the learner ends."""
        try:
            if self._arrivals is not None:
                await self._arrivals.wait_for_all(self._take_rank)
        except PeerError as error:
            self._on_failure(str(error))
            return False
        return True

    def use_bodies(self, bodies: FragmentTransfers) -> None:
        """The shared memory is there, in all ranks."""
        self._bodies = bodies
        self._orders.use_slots(bodies.outgoing, bodies.incoming)

    def send(self, frame: msgspec.Struct) -> None:
        """To all others."""
        self._ending |= isinstance(frame, Goodbye) or (isinstance(frame, StopOrder) and (frame.final or frame.failed))
        for channel in list(self._channels.values()):
            channel.send(frame)

    def hear(self, rank: int, said: Said | PartArriving) -> None:
        try:
            whole = self._orders.take_answer(rank, said)
        except PeerError as error:
            self._fail(f"{self._learner}: {error}")
            return
        match whole:
            case None:
                pass
            case FetchAgain(order, ranks):
                self._fetch_again(order, ranks)
            case fx.Fetched(fragment):
                assert self._bodies is not None
                self._on_event(whole)
                self._bodies.incoming.release_unwanted(fragment)
            case _:
                self._on_event(whole)

    def close(self) -> None:
        for task in self._running:
            task.cancel()
        for channel in self._channels.values():
            channel.close()

    # ---- bodies -------------------------------------------------------------------------------------------------

    def upload(self, number: int, attempt: int, fragment: int, base: int) -> None:
        """Its slot stays until every rank has sent its part."""
        assert self._bodies is not None
        order = self._orders.order_upload(number, attempt, fragment, base)
        if isinstance(order, fx.UploadFailed):
            self._on_event(order)
        else:
            self.send(order)
            self._bodies.upload_part(order)

    def fetch(self, fragment: int) -> None:
        assert self._bodies is not None
        task = self._group.create_task(self._fetch(fragment, self._bodies))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _fetch(self, fragment: int, bodies: FragmentTransfers) -> None:
        order = self._orders.order_fetch(fragment, await bodies.incoming.take_slot())
        self.send(order)
        bodies.fetch_part(order)

    def _fetch_again(self, order: FetchPart, ranks: tuple[int, ...]) -> None:
        assert self._bodies is not None
        for rank in ranks:
            if rank == 0:
                self._bodies.fetch_part(order)
            elif rank in self._channels:
                self._channels[rank].send(order)

    # ---- the other ranks ----------------------------------------------------------------------------------------

    def _take_rank(self, rank: int, sock: socket.socket) -> None:
        hear, lose = partial(self._hear, rank), partial(self._lose, rank)
        self._channels[rank] = RankChannel(sock, FROM_FOLLOWER, hear, lose, self._run_callback)

    def _hear(self, rank: int, frame: FromFollower) -> None:
        match frame:
            case Goodbye():
                self._ending = True
            case PartLacking(nbytes):
                self._lacking[rank] = nbytes
            case RankFailed(reason):
                self._fail(f"rank {rank} of {self._learner} failed: {reason}")
            case _:
                self.hear(rank, frame)

    def _lose(self, rank: int, reason: str) -> None:
        del self._channels[rank]
        self._fail(f"rank {rank} of {self._learner} is lost: {reason}")

    def _fail(self, reason: str) -> None:
        if not self._ending:
            self._on_failure(reason)
