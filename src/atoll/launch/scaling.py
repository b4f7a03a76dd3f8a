"""A controller follows the number of learners that its run is meant for, and the plans of hours in its settings.

Only changes are followed: learners that joined by other ways stay. What `atoll scale` asked for is in the syncer's
journal and in its status; what a plan adds is asked for in the same way, so that there is one number. How many of them
are a plan's is noted in the events (`planned`): whoever goes on with the run does not add them again.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from atoll.config import Config
from atoll.fabric.transfer import post_drain, post_settings
from atoll.launch.children import Child
from atoll.launch.scale import choose_leavers, choose_newcomers, count_planned
from atoll.launch.supervision import Supervision
from atoll.protocol.errors import PeerError, Unreachable
from atoll.store.rundir import RunDir
from atoll.telemetry.events import EventLog, parse
from atoll.telemetry.status import RunStatus

ASK_S = 3.0
"""How long the syncer may take to answer; who asks looks after processes too."""
PLANNED = "planned"


class ScaledRun(Protocol):
    """What is scaled."""

    config: Config
    out: RunDir

    @property
    def url(self) -> str: ...
    @property
    def events(self) -> EventLog: ...
    @property
    def processes(self) -> Supervision: ...
    def find_learner(self, name: str) -> Child: ...
    def start_again(self, name: str) -> None: ...


class Scaling:
    """Belongs to one event loop."""

    def __init__(self, run: ScaledRun, clock: Callable[[], datetime] = datetime.now) -> None:
        self._run, self._clock = run, clock
        self._followed = run.config.protocol.learners
        """The number that was followed last."""
        self._planned = read_planned(run.out) if run.config.scavenge else 0
        """How many of them are a plan's."""

    def count_from(self, learners: int) -> None:
        """So many are there already."""
        self._followed = learners

    async def follow(self, status: RunStatus | None) -> None:
        """Start learners, or ask some to leave, as the run asks for now."""
        if status is None or status.phase not in ("waiting", "training") or self._run.processes.is_ending:
            return
        await self._follow_plans(status)
        change, self._followed = status.expected - self._followed, status.expected
        if change > 0:
            self._add(change)
        elif change < 0:
            await self._remove(-change)

    async def _follow_plans(self, status: RunStatus) -> None:
        planned = count_planned(self._clock(), self._run.config.scavenge)
        if planned == self._planned or status.phase != "training":
            return
        wanted = max(1, status.expected + planned - self._planned)
        try:
            await post_settings(self._run.url, [f"learners={wanted}"], ASK_S)
        except (PeerError, Unreachable) as error:
            self._run.events.say("warning", f"the plan of hours asks for {wanted} learners: {error}")
            return
        text = f"the plan of hours has {planned} learners more now, {self._planned} before: {wanted} in all"
        self._planned = planned
        self._run.events.say(PLANNED, text, {"planned": planned, "learners": wanted})

    def _add(self, count: int) -> None:
        names = choose_newcomers(self._run.processes.learners.keys(), count)
        self._run.events.say("scaled", f"{_list(names)} added, as asked", {"added": names})
        for name in names:
            self._run.start_again(name)

    async def _remove(self, count: int) -> None:
        processes = self._run.processes
        names = choose_leavers(processes.list_staying(), min(count, len(processes.list_staying()) - 1))
        if not names:
            return
        self._run.events.say("scaled", f"{_list(names)} asked to leave, as asked", {"removed": names})
        await asyncio.gather(*(self._tell_to_leave(name) for name in names if processes.ask_to_leave(name)))

    async def _tell_to_leave(self, name: str) -> None:
        """By the syncer, which gives it the time it needs; one that the syncer cannot tell is told by a signal."""
        try:
            await post_drain(self._run.url, name, ASK_S)
        except (PeerError, Unreachable):
            if name in self._run.processes.learners:
                self._run.processes.learners[name].signal(signal.SIGTERM)


def read_planned(out: RunDir) -> int:
    """How many learners a plan had added when this run was last looked after."""
    if not out.events.exists():
        return 0
    with out.events.open("rb") as lines:
        return next((int(event["planned"]) for event in reversed(list(parse(lines))) if event["kind"] == PLANNED), 0)


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
