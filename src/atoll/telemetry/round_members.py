"""Which members a round's event names: of a few learners all, of many all in every Nth round.

What is told of a member takes some 200 bytes, so the events of 512 learners would grow by 100 KB a round. A round that
does not name all its members says how many they were (`of`), and names those that are in a round for the first time in
this life and term: in which round a learner contributes again is known exactly. `tokens` and `filtered` are then sums
over all members.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from atoll.telemetry.events import Event

FEW = 8
"""Members that are always named."""
A_ROUND = 6
"""Members that a round names on average, where there are more."""


class MemberSampler:
    def __init__(self) -> None:
        self._lives: dict[str, int] = {}
        """Per learner, the newest incarnation that was named."""

    def thin_out(self, data: dict[str, Any], fragments: int) -> dict[str, Any]:
        """`data`: of a round's event, with all its members."""
        members: list[dict[str, Any]] = list(data["members"])
        new = [one for one in members if self._lives.get(one["learner"]) != one["incarnation"]]
        self._lives |= {one["learner"]: one["incarnation"] for one in new}
        every = -(-len(members) // A_ROUND)
        while gcd(every, fragments) > 1:  # or some fragments would never be those whose members are named
            every += 1
        if len(members) <= FEW or data["round"] % every == 0 or len(new) == len(members):
            return data
        sums = {name: sum(one[name] for one in members) for name in ("tokens", "filtered")}
        return {**data, "members": new, "of": len(members), **sums}


def names_all(event: Event) -> bool:
    """Whether a round's event names all its members."""
    return "of" not in event


def count_members(event: Event) -> int:
    return int(event.get("of", len(event["members"])))


def count_merged_tokens(event: Event) -> int:
    """Of the round's fragment."""
    return _sum(event, "tokens") - _sum(event, "filtered")


def count_filtered_tokens(event: Event) -> int:
    return _sum(event, "filtered")


def _sum(event: Event, name: str) -> int:
    return sum(one.get(name, 0) for one in event["members"]) if names_all(event) else int(event[name])
