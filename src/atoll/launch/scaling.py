"""How many learners a run has, and which: as the operator asks (`atoll scale`) and as plans of hours say.

The number is a setting of the run (`learners`), which the syncer journals and tells in its status (docs/adr/0034). What
a plan adds is asked for in the same way, so that there is one number. How many of them are a plan's is noted in the
events (`planned`): whoever goes on with the run does not add them again.

First the rules, functions of their arguments; then `Scaling`, by which a controller follows the number. Only changes
are followed: learners that joined by other ways stay.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime, time
from typing import Protocol

from atoll.config import Config, ScavengePlan
from atoll.fabric.transfer import post_drain, post_settings
from atoll.launch.children import Child
from atoll.launch.supervision import Supervision
from atoll.protocol.errors import ConfigError, PeerError, Unreachable
from atoll.store.event_parts import read_lines
from atoll.store.rundir import RunDir
from atoll.telemetry.events import EventLog, parse
from atoll.telemetry.status import RunStatus

ASK_S = 3.0
"""How long the syncer may take to answer; who asks looks after processes too."""
PLANNED = "planned"
MOST_LEARNERS = 10_000
"""A larger number is taken for a typing error."""
_WORD = re.compile(r"([+-]?)(\d{1,5})")
_NUMBERED = re.compile(r"learner-(\d+)")


def parse_count(word: str, now: int) -> int:
    """What `6`, `+2` or `-3` makes of a run that has `now` learners."""
    if (found := _WORD.fullmatch(word.strip())) is None:
        raise ConfigError(f"{word!r} is no number of learners: write 6, or +2 for two more, or -3 for three fewer")
    sign, number = found[1], int(found[2])
    count = now + number if sign == "+" else now - number if sign == "-" else number
    if count < 1:
        raise ConfigError(
            f"{word} would leave {count} of {now} learners: the least is 1; to end the run, press Ctrl-C where it "
            "was started, or send its syncer SIGTERM"
        )
    if count > MOST_LEARNERS:
        raise ConfigError(f"{word} would make {count} learners, and a run has at most {MOST_LEARNERS}")
    return count


def choose_newcomers(taken: Collection[str], count: int) -> list[str]:
    """The names of so many learners more: the lowest numbers that are free."""
    found: list[str] = []
    number = 0
    while len(found) < count:
        if (name := f"learner-{number}") not in taken:
            found.append(name)
        number += 1
    return found


def choose_leavers(names: Iterable[str], count: int) -> list[str]:
    """Who leaves, if so many are to: the highest numbers."""
    return sorted(names, key=number_of, reverse=True)[:count]


def number_of(name: str) -> int:
    """Its number; of a name without one, a number that is higher than any: who joined so leaves first."""
    found = _NUMBERED.fullmatch(name)
    return int(found[1]) if found else MOST_LEARNERS


def count_planned(now: datetime, plans: Sequence[ScavengePlan]) -> int:
    """How many learners more the plans allow at this time of day. An hour that ends before it begins goes over
    midnight."""
    return sum(plan.learners for plan in plans if _is_within(now.time(), plan.begins, plan.ends))


def _is_within(now: time, begins: time, ends: time) -> bool:
    return begins <= now < ends if begins <= ends else now >= begins or now < ends


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
    events = reversed(list(parse(read_lines(out.events))))
    return next((int(event["planned"]) for event in events if event["kind"] == PLANNED), 0)


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
