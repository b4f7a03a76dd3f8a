"""The effects of a real syncer: records go to disk in a thread, and nothing behind them is told before they are there.

The order and its rules are those of protocol/syncer/effect_order.py, which the simulated syncer uses too. Beyond them:

- A full disk is tried again until there is room, with an alarm, and nothing is told meanwhile.
- Any other failure of the disk ends the syncer, and so does a successor that has taken its lease. What was not
  acknowledged may be lost; what was acknowledged never is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.effect_order import EffectOrder, entries_of
from atoll.store.disk import NoRoom
from atoll.store.journal import JournalEntry
from atoll.store.writer_lease import Deposed

ALARM_S = 5.0
"""A syncer that could not commit for this long raises an alarm."""
AGAIN_S = 0.1
"""Between two tries on a full disk: rounds go on this soon after there is room, and a failed try costs one sync."""
ALARM_AGAIN_S = 300.0
"""Seconds between two alarms about a disk that stays full."""

T = TypeVar("T")
Append = Callable[[Sequence[JournalEntry]], object]


class EffectQueue:
    def __init__(
        self,
        append: Append,
        *,
        carry_out: Callable[[fx.SyncerEffect], None],
        payload: Callable[[fx.Persist], memoryview | None],
        first_cut: Callable[[fx.TakeCut], Awaitable[None]],
        fenced: Callable[[], bool] = lambda: False,
        alarm: Callable[[str], None] = lambda text: None,
        slow: Callable[[], str] = lambda: "the disk does not answer",
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        """`alarm` is called with what is wrong, and with an empty text when it is over; `slow` says why an append takes
        long; `settle` is called in a thread once what an append allowed is told."""
        self._slow, self._settle = slow, settle
        self._append, self._carry_out, self._payload = append, carry_out, payload
        self._first_cut, self._fenced, self._alarm = first_cut, fenced, alarm
        self._order = EffectOrder()
        self._wake, self._emptied = asyncio.Event(), asyncio.Event()

    def enqueue(self, effects: Iterable[fx.SyncerEffect]) -> None:
        self._order.enqueue(effects)
        self._carry_out_ready()

    def awaits(self, kind: type[fx.SyncerEffect]) -> bool:
        return self._order.awaits(kind)

    async def wait_until_empty(self) -> None:
        """Until everything is carried out."""
        while self._order.has_waiting:
            self._emptied.clear()
            await self._emptied.wait()

    def _carry_out_ready(self) -> None:
        self._order.carry_out_ready(self._carry_out)
        (self._wake if self._order.has_waiting else self._emptied).set()

    async def run(self) -> None:
        """Write until cancelled; raises what makes going on impossible."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (write := self._order.begin_write()) is not None:
                if isinstance(write, fx.TakeCut):
                    await self._retry_while_full(self._first_cut, write)
                else:
                    entries = entries_of(write, self._payload)
                    await self._retry_while_full(self._append_in_thread, entries)
                if not self._order.end_write(fenced=self._fenced()):
                    raise Deposed
                self._carry_out_ready()
                await asyncio.to_thread(self._settle)

    async def _append_in_thread(self, entries: Sequence[JournalEntry]) -> None:
        await asyncio.to_thread(self._append, entries)

    async def _retry_while_full(self, work: Callable[[T], Awaitable[None]], what: T) -> None:
        """Retry while the disk is full; raise an alarm when it takes long, for whatever reason."""
        loop = asyncio.get_running_loop()
        full, told, again_at = "", "", 0.0
        told_full = False

        def tell() -> None:
            nonlocal told, told_full, again_at
            told_full = bool(full)
            told, again_at = f"nothing can be committed: {full or self._slow()}", loop.time() + ALARM_AGAIN_S
            self._alarm(told)

        timer = loop.call_later(ALARM_S, lambda: None if told else tell())
        try:
            while True:
                try:
                    await work(what)
                    return
                except NoRoom as error:
                    full = str(error)
                    if timer.when() <= loop.time() and (not told_full or again_at <= loop.time()):
                        tell()
                    await asyncio.sleep(AGAIN_S)
        finally:
            timer.cancel()
            if told:
                self._alarm("")
