"""How many learners a run has, and which: as the operator asks (`atoll scale`) and as plans of hours say.

The number is a setting of the run (`learners`), which the syncer journals; the controller of the run follows it
(docs/adr/0034). Everything here is a function of its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, time

from atoll.config import ScavengePlan
from atoll.protocol.errors import ConfigError

MOST_LEARNERS = 10_000
"""More than that is a slip of the pen."""
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
