"""Doing to a run what its plan says, and writing down what was done.

Every fault is an event `fault` (number, what, target, seconds, size) when it begins and `mended` (number) when it is
over: the ground truth that the verdict, the dashboard and the report hold against what the run itself says. Learners
dial through a TCP relay of their own (tcp_relay.py), so their network can be broken without root; the syncer's
journal lies on a disk that can be told to be full or slow (trouble.py). Works with whatever script the learners run.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from atoll.chaos.plan import KINDS, FaultPlan, PlannedFault
from atoll.chaos.tcp_relay import TcpRelay
from atoll.chaos.trouble import Trouble
from atoll.fabric.local_secrets import publish_secrets, published_secrets, withdraw_secrets
from atoll.launch.children import Child, open_log
from atoll.launch.local import LocalRun
from atoll.telemetry.status import RunStatus

TURN_S = 0.1
"""A slowed process runs for its share of this time, and stands still for the rest."""
ROGUES = ("nan", "huge", "stale", "duplicate")


class Injector:
    """Belongs to one run. Hand `route`, `beside` and `watch` to it."""

    def __init__(self, plan: FaultPlan, trouble: Path) -> None:
        self.plan, self.trouble = plan, trouble
        self.lines: dict[str, TcpRelay] = {}
        self.done = 0
        """Faults that have begun."""
        self.began_at: float | None = None
        """On the loop's clock: when everybody had contributed."""
        self.timed = False
        """The run ends with the plan even where it has a budget of its own."""
        self.run: LocalRun
        self._status: RunStatus | None = None
        self._seen: set[str] = set()
        self._kinds: set[str] = set()
        self._joined = self._told = 0
        self._look = asyncio.Event()

    # ---- what the run calls ----------------------------------------------------------------------------------------

    async def open_relays(self, url: str) -> dict[str, str]:
        for name in self.plan.learners:
            await self._open_relay(name, url)
        return {name: line.url for name, line in self.lines.items()}

    async def _open_relay(self, name: str, url: str) -> TcpRelay:
        address = urlsplit(url)
        assert address.hostname is not None and address.port is not None
        line = self.lines[name] = TcpRelay(address.hostname, address.port, seed=self.plan.seed)
        await line.start()
        publish_secrets(line.host, line.port, published_secrets(address.hostname, address.port))
        return line

    async def close_relays(self) -> None:
        """Once the run is over: its last steps travel on the lines too."""
        for line in self.lines.values():
            await line.stop()
            withdraw_secrets(line.host, line.port)

    def take_status(self, status: RunStatus | None) -> None:
        self._status = status
        self._look.set()
        if status is not None:
            self._seen.update(status.members)

    def take_event_kinds(self, kinds: set[str]) -> None:
        """Events of these kinds have been written."""
        if self.began_at is not None:
            self._kinds |= kinds

    async def run_beside(self) -> None:
        """The faults, each at its moment; then, where the run has no budget of its own, its end."""
        await self._wait_until(lambda: self._seen >= set(self.plan.learners))
        await self.run_faults(self._end_run)

    async def run_faults(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """The faults from now on, each at its moment; `last` goes on beside them."""
        self.began_at, self._kinds = asyncio.get_running_loop().time(), set()
        faults, first = self.plan.list_faults(), self._told + 1
        self._told += len(faults)
        self._log_event(
            "chaos", f"the attack begins: {len(faults)} faults follow", {"first": first, "count": len(faults)}
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, fault in enumerate(faults, first):
                    tasks.create_task(self._run_fault(number, fault))
                if last is not None:
                    tasks.create_task(_awaited(last))
        finally:
            Trouble.clear(self.trouble)
            self._log_event(
                "spared", f"the attack is over: {len(faults)} faults", {"first": first, "count": len(faults)}
            )

    async def _end_run(self) -> None:
        await self._sleep_until(self.plan.seconds)
        budget = self.plan.config.protocol
        if self.timed or (not budget.steps and not budget.tokens):
            self.run.request_end("the plan of faults is over")
        else:
            await asyncio.Event().wait()  # the run ends by its own budget, and this with it

    # ---- when ------------------------------------------------------------------------------------------------------

    async def _sleep_until(self, at_s: float) -> None:
        assert self.began_at is not None
        await asyncio.sleep(max(0.0, self.began_at + at_s - asyncio.get_running_loop().time()))

    async def _wait_until(self, holds: Callable[[], bool]) -> None:
        """Looks as often as the run is watched."""
        while not holds():
            self._look.clear()
            await self._look.wait()

    async def _run_fault(self, number: int, fault: PlannedFault) -> None:
        if fault.at_s is not None:
            await self._sleep_until(fault.at_s)
        if (at_round := fault.at_round) is not None:
            await self._wait_until(lambda: self._status is not None and self._status.round >= at_round)
        if fault.at_event is not None:
            await self._wait_until(lambda: fault.at_event in self._kinds)
        self.done += 1
        data: dict[str, object] = {"number": number, "what": fault.kind, "targets": fault.targets}
        data |= {"target": fault.targets[0] if fault.targets else "", "seconds": fault.for_s, "size": fault.size}
        self._log_event("fault", f"fault {number}: {fault.describe()} ({KINDS[fault.kind].says})", data)
        try:
            await self._ways[fault.kind](self, fault)
        finally:
            self._log_event(
                "mended", f"fault {number} is over: {fault.kind} {' '.join(fault.targets)}", {"number": number}
            )

    # ---- learners --------------------------------------------------------------------------------------------------

    async def _kill(self, fault: PlannedFault) -> None:
        child = self.run.find_learner(fault.targets[0])
        self._kill_child(child)

    def _kill_child(self, child: Child) -> None:
        child.reset_restarts()
        if child.running:
            child.signal(signal.SIGKILL)
            self._log_event("killed", f"{child.name} is sent SIGKILL, as the plan says", {"process": child.name})

    async def _pause(self, fault: PlannedFault) -> None:
        child = self.run.find_learner(fault.targets[0])
        await self._stop_child(child, fault.for_s)

    async def _stop_child(self, child: Child, seconds: float) -> None:
        process = child.process
        child.signal_all(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            if child.process is process:
                child.signal_all(signal.SIGCONT)

    async def _slow(self, fault: PlannedFault) -> None:
        """By turns: it runs for its share of every tenth of a second."""
        child, loop = self.run.find_learner(fault.targets[0]), asyncio.get_running_loop()
        end, share = loop.time() + fault.for_s, min(1.0, fault.size)
        try:
            while loop.time() < end:
                child.signal(signal.SIGSTOP)
                await asyncio.sleep(TURN_S * (1 - share))
                child.signal(signal.SIGCONT)
                await asyncio.sleep(TURN_S * share)
        finally:
            child.signal(signal.SIGCONT)

    async def _restart(self, fault: PlannedFault) -> None:
        await self._stop_learner(fault.targets[0])
        self.run.start_again(fault.targets[0])

    async def _leave(self, fault: PlannedFault) -> None:
        await self._stop_learner(fault.targets[0])
        await asyncio.sleep(fault.for_s)
        self.run.start_again(fault.targets[0])

    async def _stop_learner(self, name: str) -> None:
        child = self.run.find_learner(name)
        child.signal(signal.SIGTERM)
        await self._wait_until(lambda: not child.running)

    async def _join(self, fault: PlannedFault) -> None:
        name = f"learner-{len(self.plan.learners) + self._joined}"
        self._joined += 1
        if self.lines:
            self.run.addresses[name] = (await self._open_relay(name, self.run.url)).url
        self.run.start_again(name)
        await asyncio.sleep(fault.for_s)
        await self._stop_learner(name)

    # ---- lines -----------------------------------------------------------------------------------------------------

    async def _on_lines(
        self, fault: PlannedFault, worse: Callable[[TcpRelay], None], well: Callable[[TcpRelay], None]
    ) -> None:
        lines = [self.lines[name] for name in fault.targets]
        for line in lines:
            worse(line)
        try:
            await asyncio.sleep(fault.for_s)
        finally:
            for line in lines:
                well(line)

    async def _delay(self, fault: PlannedFault) -> None:
        def set_to(seconds: float) -> Callable[[TcpRelay], None]:
            def change(line: TcpRelay) -> None:
                line.delay_s, line.jitter_s = seconds, seconds / 2

            return change

        await self._on_lines(fault, set_to(fault.size), set_to(0.0))

    async def _bandwidth(self, fault: PlannedFault) -> None:
        await self._on_lines(fault, lambda line: line.limit(fault.size / 8), lambda line: line.limit(None))

    async def _trickle(self, fault: PlannedFault) -> None:
        await self._on_lines(fault, lambda line: line.limit(1.0), _free)

    async def _reset(self, fault: PlannedFault) -> None:
        await self._on_lines(fault, TcpRelay.reset, lambda line: None)

    async def _silent(self, fault: PlannedFault) -> None:
        await self._on_lines(fault, lambda line: line.silence(True), lambda line: line.silence(False))

    # ---- the syncer and its disk -----------------------------------------------------------------------------------

    async def _syncer_kill(self, fault: PlannedFault) -> None:
        self._kill_child(self.run.syncer)

    async def _syncer_pause(self, fault: PlannedFault) -> None:
        await self._stop_child(self.run.syncer, fault.for_s)

    async def _disk_full(self, fault: PlannedFault) -> None:
        await self._trouble_disk(Trouble(full=True), fault.for_s)

    async def _disk_slow(self, fault: PlannedFault) -> None:
        await self._trouble_disk(Trouble(sync_s=fault.size), fault.for_s)

    async def _trouble_disk(self, trouble: Trouble, seconds: float) -> None:
        trouble.write(self.trouble)
        try:
            await asyncio.sleep(seconds)
        finally:
            Trouble.clear(self.trouble)

    # ---- bad contributions -----------------------------------------------------------------------------------------

    async def _rogue(self, fault: PlannedFault) -> None:
        """An extra learner that speaks the protocol and gives what it should not."""
        command = [sys.executable, "-m", "atoll.chaos.rogue", str(self.run.out.path), self.run.url, fault.kind]
        with open_log(self.run.out.log("rogue")) as log:
            process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        try:
            await asyncio.sleep(fault.for_s)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    # ---- small things ----------------------------------------------------------------------------------------------

    def _log_event(self, kind: str, text: str, data: dict[str, object]) -> None:
        self.run.events.say(kind, text, data)

    _ways: ClassVar[dict[str, Callable[[Injector, PlannedFault], Awaitable[None]]]] = {
        "kill": _kill,
        "pause": _pause,
        "slow": _slow,
        "restart": _restart,
        "leave": _leave,
        "join": _join,
        "delay": _delay,
        "bandwidth": _bandwidth,
        "reset": _reset,
        "blackhole": _silent,
        "partition": _silent,
        "trickle": _trickle,
        "syncer-kill": _syncer_kill,
        "syncer-pause": _syncer_pause,
        "disk-full": _disk_full,
        "disk-slow": _disk_slow,
        **dict.fromkeys(ROGUES, _rogue),
    }


async def _awaited(last: Callable[[], Awaitable[None]]) -> None:
    await last()


def _free(line: TcpRelay) -> None:
    """What crept along is given up: nobody waits for the rest of it."""
    line.limit(None)
    line.reset()
