"""A run that can be attacked while it goes on: its supervisor looks for a plan in the run's folder, and carries it out.

    standby.json        the process that looks
    attack.json         a plan for it: read once, then deleted

Only a run that was started with `atoll train --breakable` looks. Its learners dial through TCP relays from the start,
and its journal lies on a disk that can be made to fail; any other run has none of this.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from atoll.chaos.inject import Injector
from atoll.chaos.plan import FaultPlan, check_plan
from atoll.chaos.trouble import NAME as TROUBLE
from atoll.config import Config
from atoll.launch.local import LocalRun
from atoll.observe.tail import EventTail
from atoll.protocol.errors import ConfigError
from atoll.store.atomic import write_atomic
from atoll.store.rundir import RunDir
from atoll.telemetry.events import Event
from atoll.telemetry.status import RunStatus

LOOK_S = 0.25
SIGN, ATTACK = "standby.json", "attack.json"
TAKEN_S = 10.0
"""A plan that lies there for so long is not looked for by anybody."""
TOLD = ("chaos", "fault", "mended", "spared", "warning", "ending", "finished")


class AttackSupervisor(msgspec.Struct, frozen=True):
    """The supervisor that carries out what a plan says."""

    pid: int


class Standby:
    """Belongs to one run. Hand `route`, `beside` and `watch` to it."""

    def __init__(self, config: Config, out: RunDir) -> None:
        self._out, self._config = out, config
        self._injector = Injector(FaultPlan(config=config), out.path / TROUBLE)

    async def run(self, run: LocalRun) -> None:
        """From its beginning to its end."""
        self._injector.run = run
        try:
            await run.run()
        finally:
            await self._injector.close_relays()

    async def open_relays(self, url: str) -> dict[str, str]:
        return await self._injector.open_relays(url)

    def take_status(self, status: RunStatus | None, kinds: set[str]) -> None:
        self._injector.take_event_kinds(kinds)
        self._injector.take_status(status)

    async def watch_for_plans(self) -> None:
        sign = self._out.path / SIGN
        write_atomic(sign, msgspec.json.encode(AttackSupervisor(os.getpid())))
        try:
            while True:
                if (plan := self._take_plan()) is not None:
                    await self._run_plan(plan)
                await asyncio.sleep(LOOK_S)
        finally:
            sign.unlink(missing_ok=True)

    def _take_plan(self) -> FaultPlan | None:
        path = self._out.path / ATTACK
        if not path.exists():
            return None
        events = self._injector.run.events
        try:
            plan = msgspec.json.decode(path.read_bytes(), type=FaultPlan)
            plan = msgspec.structs.replace(plan, config=self._config)
            check_plan(plan, ATTACK)
        except (OSError, msgspec.MsgspecError, ConfigError) as error:
            events.say("warning", f"a plan of faults was not understood, and nothing is done: {error}")
            return None
        finally:
            path.unlink(missing_ok=True)
        return plan

    async def _run_plan(self, plan: FaultPlan) -> None:
        self._injector.plan = plan
        await self._injector.run_faults()


# ---- the other side ------------------------------------------------------------------------------------------------


def find_supervisor(out: RunDir) -> AttackSupervisor:
    """Who does what a plan says to the run in this folder."""
    try:
        found = msgspec.json.decode((out.path / SIGN).read_bytes(), type=AttackSupervisor)
        os.kill(found.pid, 0)
    except (FileNotFoundError, ProcessLookupError, msgspec.MsgspecError) as error:
        raise ConfigError(f"no run that can be attacked goes on in {out.path}: start it with --breakable") from error
    except PermissionError as error:
        raise ConfigError(f"the run in {out.path} belongs to somebody else: {error}") from error
    return found


def hand_over_plan(out: RunDir, plan: FaultPlan) -> AttackSupervisor:
    """Hand a plan to a run that goes on."""
    found = find_supervisor(out)
    path: Path = out.path / ATTACK
    if path.exists():
        raise ConfigError(f"another plan waits in {path} already")
    write_atomic(path, msgspec.json.encode(plan))
    return found


def follow_attack(out: RunDir, tail: EventTail) -> Iterator[Event]:
    """What is done to a run, until that run is over. A plan that nobody takes is taken back."""
    begun, deadline = False, time.monotonic() + TAKEN_S
    while True:
        over = _over(out)
        for event in tail.read_new():
            begun = begun or event["kind"] == "chaos"
            if event["kind"] in TOLD:
                yield event
        if over and begun:
            return
        if not begun and (over or time.monotonic() > deadline):
            (out.path / ATTACK).unlink(missing_ok=True)
            raise ConfigError(f"the run in {out.path} did not take the plan; its last events say why")
        time.sleep(LOOK_S)


def _over(out: RunDir) -> bool:
    try:
        find_supervisor(out)
    except ConfigError:
        return True
    return False
