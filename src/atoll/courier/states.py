"""State on its way between learners: copies of our training process's for newcomers, a peer's for ours.

What is made, given and fetched, and when, the rules say (`protocol.helping`, `protocol.seeking`). Here it is done:
- a copy lies in memory that the training process filled and nobody changes; it goes from there straight to the socket;
- the port from which newcomers fetch it is opened with the first copy, on this machine alone; where it cannot be
  opened, or newcomers cannot reach it, the syncer passes the copy on;
- what comes of a peer lands in memory of its own, reserved before the first byte, and only a state whose digest is the
  one that the peer told the syncer is handed to the training process.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from atoll.fabric.client import SyncerConnection
from atoll.fabric.host import StateHost
from atoll.mailbox.box import mapped, reserve
from atoll.mailbox.channel import CourierChannel, Start, StateCopyMade, TakeOrder
from atoll.protocol.errors import AtollError, PeerError, Unreachable
from atoll.protocol.learner import effects as fx

STREAM_S = 3600.0
"""The most a stream may take; the syncer's bound and the fabric's minimum rate end a stuck one long before."""
MOST_TIMES, MOST_MORE = 16, 64 * 2**20
"""A peer's state has at most so many times the bytes of the model in fp32, and so many more."""

StateEffect = (
    fx.Capture
    | fx.Give
    | fx.PassOn
    | fx.TakeBack
    | fx.Dispose
    | fx.Await
    | fx.Begin
    | fx.FetchState
    | fx.LeaveState
    | fx.TakeState
)


@dataclass(frozen=True, slots=True)
class OfferedState:
    """Of our state."""

    memory: memoryview
    digest: str
    streams: dict[str, asyncio.Task[None] | None] = field(default_factory=dict)
    """Tickets it is given under, and the stream through the syncer, if there is one."""


class StateTransfers:
    def __init__(
        self,
        channel: CourierChannel,
        link: SyncerConnection,
        start: Start,
        tell: Callable[[fx.LearnerEvent], None],
        say: Callable[[str], None],
        tasks: asyncio.TaskGroup,
        *,
        direct: bool = True,
    ) -> None:
        """`direct`: newcomers of this machine may fetch our copies without the syncer."""
        self._channel, self._link, self._start, self._tell, self._say = channel, link, start, tell, say
        self._group, self._direct = tasks, direct
        self._host: StateHost | None = None
        self._copies: dict[int, OfferedState] = {}
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._came: dict[str, tuple[int, int]] = {}
        """Ticket → descriptor and size of a peer's state that is whole."""
        self._running: set[asyncio.Task[None]] = set()

    def carry_out(self, effect: StateEffect) -> None:
        match effect:
            case fx.Capture() | fx.Await() | fx.Begin():
                self._channel.send(effect)
            case fx.Give(number, ticket):
                self._give(number, ticket)
            case fx.PassOn(ticket, offset):
                self._pass_on(ticket, offset)
            case fx.TakeBack(ticket):
                self._take_back(ticket)
            case fx.Dispose(number):
                self._copies.pop(number, None)
            case fx.FetchState(ticket):
                self._fetches[ticket] = self._spawn(self._fetch(effect))
            case fx.LeaveState(ticket):
                self._leave(ticket)
            case fx.TakeState(ticket):
                self._hand_over(ticket)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        for ticket in list(self._came):
            self._leave(ticket)
        if self._host is not None:
            await self._host.stop()

    # ---- ours ---------------------------------------------------------------------------------------------------

    def copied(self, frame: StateCopyMade) -> None:
        """The training process has made a copy; or it has not, and says why."""
        if frame.reason:
            self._tell(fx.Captured(frame.number, reason=frame.reason))
            return
        fd = self._channel.take_descriptor()
        try:
            self._copies[frame.number] = OfferedState(mapped(fd, frame.size), frame.digest)
        finally:
            os.close(fd)
        self._spawn(self._announce(frame))

    async def _announce(self, frame: StateCopyMade) -> None:
        direct = await self._address()
        self._tell(fx.Captured(frame.number, frame.t, frame.size, frame.digest, direct))

    async def _address(self) -> str:
        """Where newcomers of this machine may come; empty: nowhere."""
        if self._host is None and self._direct:
            host = StateHost()
            try:
                await host.start()
            except AtollError as error:
                self._direct = False
                self._say(f"newcomers get this learner's state through the syncer only: {error}")
            else:
                self._host = host
                self._spawn(host.vital.watch())
        return "" if self._host is None else self._host.url

    def _give(self, number: int, ticket: str) -> None:
        copy = self._copies[number]
        copy.streams[ticket] = None
        if self._host is not None:
            self._host.offer(ticket, [copy.memory], copy.memory.nbytes, copy.digest)

    def _pass_on(self, ticket: str, offset: int) -> None:
        """A newer request takes the place of the one before."""
        for copy in self._copies.values():
            if ticket in copy.streams:
                if (older := copy.streams[ticket]) is not None:
                    older.cancel()
                copy.streams[ticket] = self._spawn(self._stream(copy, ticket, offset))

    async def _stream(self, copy: OfferedState, ticket: str, offset: int) -> None:
        who = {"learner": self._start.learner, "session": self._start.session}
        try:
            await self._link.put_relay(
                ticket, [copy.memory], offset=offset, digest=copy.digest, deadline_s=STREAM_S, **who
            )
        except (PeerError, Unreachable) as error:  # the newcomer asks again for what it lacks
            self._say(f"the state for a newcomer was not sent whole: {error}")

    def _take_back(self, ticket: str) -> None:
        if self._host is not None:
            self._host.withdraw(ticket)
        for copy in self._copies.values():
            if (stream := copy.streams.pop(ticket, None)) is not None:
                stream.cancel()

    # ---- a peer's -----------------------------------------------------------------------------------------------

    async def _fetch(self, order: fx.FetchState) -> None:
        memory = _Landing()
        outcome: fx.LearnerEvent = fx.StateCame(order.ticket)
        try:
            await self._get(order, memory)
            self._came[order.ticket] = (memory.keep(), order.size)
        except (PeerError, Unreachable) as error:
            outcome = fx.StateFailed(order.ticket, str(error))
        finally:
            memory.close()
        self._fetches.pop(order.ticket, None)
        self._tell(outcome)

    async def _get(self, order: fx.FetchState, memory: _Landing) -> None:
        if order.size > (most := self._most_bytes()):
            raise PeerError(f"a state of {order.size} bytes is more than this model could have ({most})")
        mark = await self._link.get_state(
            order.ticket,
            memory.into,
            learner=self._start.learner,
            session=self._start.session,
            most_bytes=order.size,
            deadline_s=STREAM_S,
            direct=order.direct,
        )
        if mark != order.digest:
            raise PeerError(f"the state that came has digest {mark}, its peer named {order.digest[:32]}")

    def _most_bytes(self) -> int:
        trained = sum(math.prod(tensor.shape) for tensor in self._start.tensors)
        return MOST_MORE + MOST_TIMES * 4 * trained + self._start.frozen_bytes

    def _leave(self, ticket: str) -> None:
        if (task := self._fetches.pop(ticket, None)) is not None:
            task.cancel()
        if (came := self._came.pop(ticket, None)) is not None:
            os.close(came[0])

    def _hand_over(self, ticket: str) -> None:
        fd, size = self._came[ticket]
        self._channel.send(TakeOrder(ticket, size), fd)
        self._leave(ticket)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task


class _Landing:
    """The memory a state comes into, once its size is known."""

    def __init__(self) -> None:
        self._fd = -1

    def into(self, size: int) -> memoryview:
        self.close()
        self._fd = reserve(size, "a peer's state")
        return mapped(self._fd, size, write=True)

    def keep(self) -> int:
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
