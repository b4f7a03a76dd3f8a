"""The syncer's state machine in real time: at which time it hears of an event, and when it is woken.

No deadline may count the time in which this event loop stood still, or that of another shard did: the machine hears of
a standstill before any other event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from atoll.protocol.effects import Tick
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.machine import Syncer
from atoll.syncer.lead import ShardLead
from atoll.syncer.liveness import Standstill
from atoll.telemetry.events import EventLog


class MachineClock:
    """Belongs to one event loop."""

    def __init__(
        self,
        machine: Callable[[], Syncer | None],
        enqueue: Callable[[Iterable[fx.SyncerEffect]], None],
        events: EventLog,
        lead: ShardLead | None,
        fail: Callable[[BaseException], None],
    ) -> None:
        """`machine`: None while the run has not begun; `enqueue` takes its effects; `fail` ends the syncer."""
        self._machine, self._enqueue, self._events, self._lead, self._fail = machine, enqueue, events, lead, fail
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.TimerHandle | None = None
        self._standstill = Standstill(self._loop, self._tell_standstill)

    def start(self) -> None:
        self._standstill.start()
        self.handle(Tick())

    def stop(self) -> None:
        self._standstill.stop()
        if self._wake is not None:
            self._wake.cancel()

    def handle(self, event: fx.SyncerEvent) -> None:
        if (machine := self._machine()) is None:
            return
        try:
            self._tell_standstill()
            self._enqueue(machine.handle(self._loop.time(), event))
            self._wake_at(machine.wake_at)
        except Exception as error:  # half an event may be handled: the next term goes on from the journal
            self._fail(error)
            raise

    def _tell_standstill(self) -> None:
        now = self._loop.time()
        stood_s = self._standstill.take_standstill_s(now)
        if (machine := self._machine()) is None:
            return
        if self._lead is not None and (away_s := self._lead.state.take_standstill_s(now)) > 0:
            self._enqueue(machine.handle(now, fx.StoodStill(away_s)))
            stood_s = 0.0
        if not stood_s:
            return
        text = f"the syncer stood still for {stood_s:.1f} s: nobody's silence counts for that time"
        self._events.say("standstill", text, {"seconds": round(stood_s, 3)})
        self._enqueue(machine.handle(now, fx.StoodStill(stood_s)))
        self._wake_at(machine.wake_at)

    def _wake_at(self, moment: float | None) -> None:
        if self._wake is not None and self._wake.when() != moment:
            self._wake.cancel()
            self._wake = None
        if self._wake is None and moment is not None:
            self._wake = self._loop.call_at(moment, self._tick)

    def _tick(self) -> None:
        self._wake = None
        self.handle(Tick())
