"""Faults of ranks: what a plan does to a learner is done to the rank of the same number.

A rank whose host is paused for longer than `patience_s` is given up and killed, as missed heartbeats would have it; it
cannot be restarted before its host is back. SIGTERM ends a rank like a kill.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

KINDS = ("kill", "pause", "slow", "restart", "leave")
"""Those that can happen to a rank."""
TURN_S = 0.1
"""A slowed rank runs for its share of this time, and stands still for the rest."""


@dataclass(frozen=True, slots=True)
class RankFault:
    at_s: float
    """Since every rank has made its first step."""
    kind: str
    rank: int
    for_s: float = 0.0
    size: float = 0.0

    def describe(self) -> str:
        return f"{self.kind} rank-{self.rank}" + (f" for {self.for_s:.1f} s" if self.for_s else "")


class FaultTarget(Protocol):
    """The run to which faults happen."""

    patience_s: float

    def send_signal(self, rank: int, number: signal.Signals) -> None: ...

    def end_rank(self, rank: int, number: signal.Signals, away_s: float) -> None:
        """It dies by this signal, and comes back no sooner than so many seconds later."""

    def record_pause(self, rank: int, seconds: float) -> None:
        """Until now, for so long."""

    def log_fault(self, fault: RankFault) -> None: ...


async def inject_faults(run: FaultTarget, faults: tuple[RankFault, ...]) -> None:
    """Each at its moment from now on; returns when all are over."""
    async with asyncio.TaskGroup() as tasks:
        for fault in faults:
            tasks.create_task(_strike_one(run, fault))


async def _strike_one(run: FaultTarget, fault: RankFault) -> None:
    await asyncio.sleep(fault.at_s)
    run.log_fault(fault)
    await _WAYS[fault.kind](run, fault)


async def _kill(run: FaultTarget, fault: RankFault) -> None:
    run.end_rank(fault.rank, signal.SIGKILL, 0.0)


async def _restart(run: FaultTarget, fault: RankFault) -> None:
    run.end_rank(fault.rank, signal.SIGTERM, fault.for_s)


async def _pause(run: FaultTarget, fault: RankFault) -> None:
    loop = asyncio.get_running_loop()
    began, waited = loop.time(), min(fault.for_s, run.patience_s)
    run.send_signal(fault.rank, signal.SIGSTOP)
    try:
        await asyncio.sleep(waited)
    finally:
        run.record_pause(fault.rank, loop.time() - began)
    if waited < fault.for_s:
        run.end_rank(fault.rank, signal.SIGKILL, fault.for_s - waited)
    else:
        run.send_signal(fault.rank, signal.SIGCONT)


async def _slow(run: FaultTarget, fault: RankFault) -> None:
    loop = asyncio.get_running_loop()
    end, share = loop.time() + fault.for_s, min(1.0, fault.size)
    try:
        while loop.time() < end:
            run.send_signal(fault.rank, signal.SIGSTOP)
            await asyncio.sleep(TURN_S * (1 - share))
            run.send_signal(fault.rank, signal.SIGCONT)
            await asyncio.sleep(TURN_S * share)
    finally:
        run.send_signal(fault.rank, signal.SIGCONT)


_WAYS: dict[str, Callable[[FaultTarget, RankFault], Awaitable[None]]] = {
    "kill": _kill,
    "pause": _pause,
    "slow": _slow,
    "restart": _restart,
    "leave": _restart,
}
