"""Planted bugs of learners of several ranks: what they agree on, whose part is whose, when all have done something."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msgspec.structs import replace as replace_fields
from tests.simulate.planting import Plain, mutant, nothing

from atoll.courier import rank_events
from atoll.courier.rank_channel import PartFetched, PartUploaded
from atoll.courier.rank_events import RankEvents
from atoll.courier.slots import OutgoingSlots
from atoll.learner.meeting import Meeting
from atoll.simulate import ranked_learner, simulated_syncer


def _take_all(plain: Plain) -> Any:
    def broken(self: Meeting) -> list[Any]:
        frames = list(self.waiting)
        self.waiting.clear()
        return frames

    return broken


mutant("ranks carry out what each has, not what all have", (Meeting, "take_agreed", _take_all), kind="ranks")


def _swap_boxes(plain: Plain) -> Any:
    """Of tensors of which the first two ranks hold equally much."""

    def broken(plan: Any, ranks: Any) -> Any:
        first, second, *others = ranks
        pairs = [
            (replace_fields(b, sends=a.sends), replace_fields(a, sends=b.sends)) if a.sizes == b.sizes else (a, b)
            for a, b in zip(first, second, strict=True)
        ]
        swapped = (tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
        return plain(plan, (*swapped, *others))

    return broken


mutant("the boxes of two ranks are swapped", (simulated_syncer, "make_rank_plans", _swap_boxes), kind="ranks")


def _newest_of_any(plain: Plain) -> Any:
    def broken(answers: Any) -> PartFetched:
        if any(said.reason for said in answers):
            return plain(answers)
        return PartFetched(answers[0].fragment, max(said.version for said in answers if said.version is not None))

    return broken


def _with_fetches(plain: Plain) -> Any:
    return {**plain, "fetch": _newest_of_any(rank_events.combine_fetches)}  # type: ignore[dict-item]


mutant("ranks that got different versions adopt them", (rank_events, "COMBINE", _with_fetches), kind="ranks")


def _first_is_all(plain: Plain) -> Any:
    def broken(self: RankEvents, rank: int, said: Any) -> Any:
        if isinstance(said, PartUploaded):
            return said if rank == 0 else None
        return plain(self, rank, said)

    return broken


mutant(
    "a contribution is told of before every rank has sent its part",
    (RankEvents, "add", _first_is_all),
    kind="ranks",
)
mutant(
    "a slot is used again before every rank has sent its part",
    (OutgoingSlots, "hold_slot", nothing),
    (OutgoingSlots, "let_slot_go", nothing),
    kind="ranks",
)


def _count_twice(plain: Plain) -> Any:
    def broken(told: Any) -> Any:
        agreed = plain(told)
        return replace(agreed, tokens=len(told) * agreed.tokens)

    return broken


mutant("every rank counts the tokens of all", (ranked_learner, "agree_on", _count_twice), kind="ranks")
