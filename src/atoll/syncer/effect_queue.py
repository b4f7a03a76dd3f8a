"""Effects in their order, with what must be durable written down before anything behind it is told.

The rules decide at once and go on; what they want told waits here until the records before it are on disk. While one
write is under way the next gathers: all that was decided meanwhile goes out together. A full disk is waited for, with
an alarm, and nothing is told meanwhile; any other failure of the disk ends the syncer, and so does the claim of a
successor: what is not acknowledged may be lost, what is acknowledged never is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from atoll.protocol import effects as fx
from atoll.protocol.records import AnyRecord
from atoll.protocol.syncer.outbox import next_batch
from atoll.store.disk import NoRoom
from atoll.store.writer_lease import Deposed

ALARM_S = 5.0
"""A syncer that could not commit for this long raises an alarm."""
AGAIN_S = 0.1
"""Between two tries on a full disk: rounds go on so soon after there is room, and a try that fails costs one sync."""
ALARM_AGAIN_S = 0.5
"""Between two lines about a disk that stays full."""

T = TypeVar("T")
Entry = tuple[AnyRecord, memoryview | None]
Append = Callable[[Sequence[Entry]], object]


class EffectQueue:
    def __init__(
        self,
        append: Append,
        *,
        carry_out: Callable[[fx.SyncerEffect], None],
        payload: Callable[[int], memoryview | None],
        restored: Callable[[], memoryview | None] = lambda: None,
        first_cut: Callable[[fx.TakeCut], Awaitable[None]],
        fenced: Callable[[], bool] = lambda: False,
        alarm: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`payload`: of a round; `restored`: of a rollback. `alarm` is told what is wrong, and an empty text when it is
        over."""
        self._append, self._carry_out, self._payload, self._restored = append, carry_out, payload, restored
        self._first_cut, self._fenced, self._alarm = first_cut, fenced, alarm
        self._waiting: deque[fx.SyncerEffect] = deque()
        self._written = 0
        """How many of the waiting records' effects, from the front, are durable."""
        self._wake = asyncio.Event()
        self._emptied = asyncio.Event()
        self._turning = False

    def enqueue(self, effects: Iterable[fx.SyncerEffect]) -> None:
        self._waiting.extend(effects)
        self._turn()

    async def emptied(self) -> None:
        """Until everything is carried out."""
        while self._waiting:
            self._emptied.clear()
            await self._emptied.wait()

    def _turn(self) -> None:
        """Carry out everything up to the first that must be durable and is not. What that leads to comes behind."""
        if self._turning:
            return
        self._turning = True
        try:
            while self._waiting and not self._must_wait(self._waiting[0]):
                self._carry_out(self._waiting.popleft())
        finally:
            self._turning = False
        (self._wake if self._waiting else self._emptied).set()

    def _must_wait(self, effect: fx.SyncerEffect) -> bool:
        if isinstance(effect, fx.Persist):
            self._written -= 1
            if self._written < 0:
                self._written = 0
                return True
        return isinstance(effect, fx.TakeCut) and effect.first

    async def run(self) -> None:
        """Write until cancelled; raises what makes going on impossible."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                if isinstance(self._waiting[0], fx.TakeCut):
                    await self._insist(self._first_cut, self._waiting[0])
                    self._waiting.popleft()
                else:
                    await self._write(next_batch(self._waiting))
                self._turn()

    async def _write(self, batch: list[fx.Persist]) -> None:
        entries: list[Entry] = []
        for persist in batch:
            entries.extend((record, None) for record in persist.records[:-1])
            entries.append((persist.records[-1], self._payload_of(persist)))

        async def append(entries: Sequence[Entry]) -> None:
            await asyncio.to_thread(self._append, entries)

        await self._insist(append, entries)
        if self._fenced():
            raise Deposed
        self._written = len(batch)

    def _payload_of(self, persist: fx.Persist) -> memoryview | None:
        if persist.restored:
            return self._restored()
        return self._payload(persist.round) if persist.round >= 0 else None

    async def _insist(self, work: Callable[[T], Awaitable[None]], what: T) -> None:
        """Again and again while there is no room; an alarm when it takes long, for whatever reason."""
        loop, slow = asyncio.get_running_loop(), "nothing can be committed: the disk does not answer"
        alarm = loop.call_later(ALARM_S, self._alarm, slow)
        say_at = alarm.when()
        try:
            while True:
                try:
                    await work(what)
                    return
                except NoRoom as error:
                    if say_at <= loop.time():
                        say_at = loop.time() + ALARM_AGAIN_S
                        self._alarm(f"nothing can be committed: {error}")
                    await asyncio.sleep(AGAIN_S)
        finally:
            if alarm.when() <= loop.time():
                self._alarm("")
            alarm.cancel()
