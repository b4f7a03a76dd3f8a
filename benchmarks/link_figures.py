"""Figures of a run behind narrow links: the floor of the overlap, and what the run's events say it really was.

The floor is that of docs/protocol.md, "The floor of the overlap" (`schedule.least_overlap_s`), computed from the links
as they were set. The rounding up is the wait for the boundary at which the version is adopted: a version that arrives
in the middle of a step is taken at its end. Learners are not in phase, though: a member that read its copy before the
last one reported waits for it, up to one step more (`floor_out_of_phase`).

A rate is what the link carries; TCP and HTTP headers, under 2 %, are not counted.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from shaped_links import Rates

from atoll.numerics.codec import make_codec
from atoll.observe.timeline import select_kinds, select_paced_rounds
from atoll.protocol import schedule
from atoll.protocol.statistics import Spread, spread

Event = dict[str, Any]
ROW_LENGTH = 256
"""Elements of a row of a pretended learner's tensors."""
SETTLED_SHARE = 0.95
ABOVE_FLOOR = 3
"""Steps above the floor that issue 41 allows."""
DISK_TRIES = 7


class BodySizes(NamedTuple):
    """Bytes of one fragment's body in each direction."""

    up: int
    down: int

    @classmethod
    def of_fragment(cls, elements: int, codec: str, version_codec: str, row_length: int = ROW_LENGTH) -> BodySizes:
        rows = ((max(1, elements // row_length), row_length),)
        return cls(make_codec(codec).nbytes(rows), make_codec(version_codec).nbytes(rows))


@dataclass(frozen=True, slots=True)
class Floor:
    """Least overlap that a link allows."""

    latency_s: float
    up_s: float
    down_s: float
    merge_s: float
    disk_s: float
    step_s: float

    @property
    def seconds(self) -> float:
        one_way_s, work_s = self.latency_s / schedule.CROSSINGS, self.merge_s + self.disk_s
        return schedule.least_overlap_s(one_way_s, self.up_s, self.down_s, work_s)

    @property
    def steps(self) -> int:
        # What is whole but for the rounding of floats is whole.
        return ceil(round(self.seconds / self.step_s, 6))

    def to_dict(self) -> dict[str, Any]:
        parts = {name: round(value, 4) for name, value in asdict(self).items()}
        return {"floor": self.steps, "floor_out_of_phase": self.steps + 1, "seconds": round(self.seconds, 4), **parts}


def compute_floor(
    rates: Rates, delay_s: float, bodies: BodySizes, step_s: float, merge_s: float = 0.0, disk_s: float = 0.0
) -> Floor:
    """Return the floor of a link with these rates; one without a limit carries bodies in no time."""
    up_s = bodies.up / rates.up if rates.up else 0.0
    down_s = bodies.down / rates.down if rates.down else 0.0
    return Floor(schedule.CROSSINGS * delay_s, up_s, down_s, merge_s, disk_s, step_s)


def compute_load(
    rates: Rates, bodies: BodySizes, step_s: float, sync_every: int, fragments: int
) -> dict[str, float | None]:
    """Return the share of each direction that a body per H/P steps asks for."""
    round_s = sync_every / fragments * step_s
    return {
        "up": round(bodies.up / round_s / rates.up, 4) if rates.up else None,
        "down": round(bodies.down / round_s / rates.down, 4) if rates.down else None,
    }


def measure_disk_s(folder: Path, nbytes: int) -> float:
    """Return the median time to append so many bytes to a file in this folder and sync it."""
    payload, times = bytes(nbytes), []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(DISK_TRIES):
            began = time.perf_counter()
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - began)
    return median(times)


# ---- what the run's events say ---------------------------------------------------------------------------------------


class Contribution(NamedTuple):
    """A member of a round, with the overlap of its previous contribution to the same fragment."""

    learner: str
    round: int
    at: float
    read_at_step: int
    """The learner's step at which that previous contribution was read."""
    since: int
    overlap: int | None


def list_contributions(rounds: Iterable[Event]) -> list[Contribution]:
    """A member's `overlap` is told with its next contribution to the fragment, `since` steps after the one it is of."""
    return [
        Contribution(
            member["learner"], event["round"], event["at"], member["t"] - member["since"], member["since"],
            member.get("overlap"),
        )
        for event in rounds
        for member in event["members"]
        if member.get("since") is not None
    ]  # fmt: skip


def select_settled(rounds: Sequence[Event], warm_up: int, last: int) -> list[Event]:
    """Leave the first cycles and the last one out, or nothing where that would leave nothing."""
    return list(rounds[warm_up : len(rounds) - last]) or list(rounds)


def describe_spread(values: Spread) -> dict[str, float | None]:
    return {
        "median": values.median,
        "mean": None if values.mean is None else round(values.mean, 2),
        "p95": values.p95,
    }


def describe_pace(contributions: Sequence[Contribution]) -> dict[str, Any]:
    return {
        "overlap": describe_spread(spread([one.overlap for one in contributions if one.overlap is not None])),
        "h": describe_spread(spread([one.since for one in contributions])),
    }


def describe_rounds(rounds: Sequence[Event]) -> dict[str, Any]:
    seconds = rounds[-1]["at"] - rounds[0]["at"] if len(rounds) > 1 else 0.0
    return {
        "rounds": len(rounds),
        "rounds_per_s": round((len(rounds) - 1) / seconds, 3) if seconds else None,
        "members": median(len(event["members"]) for event in rounds),
        "sync_s": round(median(event["sync_s"] for event in rounds), 3),
        "merge_s": round(median(event["merge_s"] for event in rounds), 4),
    }


def describe_joining(events: Sequence[Event]) -> dict[str, dict[str, float | None]]:
    """Return, per learner, the seconds from its start to joining, to training, and to its first round."""
    found: dict[str, dict[str, float | None]] = {}
    starts = {event["process"]: event["at"] for event in reversed(select_kinds(events, "started"))}
    for learner in sorted(name for name in starts if name.startswith("learner-")):
        moments = {
            "joined_s": _first_at(events, "joined", learner),
            "training_s": _first_at(events, "recovered", learner),
            "in_a_round_s": next(
                (
                    event["at"]
                    for event in select_kinds(events, "round")
                    if any(member["learner"] == learner for member in event["members"])
                ),
                None,
            ),
        }
        found[learner] = {name: None if at is None else round(at - starts[learner], 2) for name, at in moments.items()}
    return found


def _first_at(events: Sequence[Event], kind: str, learner: str) -> float | None:
    return next((event["at"] for event in select_kinds(events, kind) if event["learner"] == learner), None)


# ---- a schedule of rates, a cut --------------------------------------------------------------------------------------


class Segment(NamedTuple):
    """Part of a run in which the links keep their rates."""

    mbit: float
    begins_at: float
    """Moment (wall clock) at which they were set."""
    ends_at: float
    begins_at_step: int


def describe_segment(segment: Segment, rounds: Sequence[Event], floor: Floor) -> dict[str, Any]:
    """Tell a segment's overlap and H, cycle by cycle too, and when it settled.

    It counts contributions that were read in the segment and adopted before its end.
    """
    inside = [event for event in rounds if segment.begins_at <= event["at"] < segment.ends_at]
    counted = [one for one in list_contributions(inside) if one.read_at_step >= segment.begins_at_step]
    within = [one for one in counted if one.overlap is not None]
    settled = find_settled(within, floor.steps + ABOVE_FLOOR)
    before = [event for event in inside if settled is not None and event["at"] <= settled.at]
    pace = describe_pace(counted)
    h = pace["h"]["median"]
    found = {
        "mbit": segment.mbit,
        "from_step": segment.begins_at_step,
        "floor": floor.steps,
        **pace,
        "rounds": len(inside),
        "settled_after": None
        if settled is None
        else {
            "steps": settled.read_at_step - segment.begins_at_step,
            "cycles": round((settled.read_at_step - segment.begins_at_step) / h, 2),
            "told_after_rounds": len(before),
        },
        "by_cycle": _describe_cycles(counted, segment.begins_at_step),
    }
    if settled is not None:
        found["once_settled"] = describe_pace([one for one in counted if one.read_at_step >= settled.read_at_step])
    return found


def find_settled(contributions: Sequence[Contribution], most: int) -> Contribution | None:
    """Return the first contribution from which on 95 % of the overlaps are at most `most`; None: it never settles."""
    ordered = sorted(contributions, key=lambda one: one.read_at_step)
    best, above = None, 0
    for count, one in enumerate(reversed(ordered), start=1):
        assert one.overlap is not None
        above += one.overlap > most
        if above <= (1 - SETTLED_SHARE) * count and one.overlap <= most:
            best = one
    return best


def _describe_cycles(counted: Sequence[Contribution], begins: int) -> list[dict[str, Any]]:
    """Per 24 steps: median overlap, and H, of what was read in them."""
    cycles: dict[int, list[Contribution]] = {}
    for one in counted:
        cycles.setdefault((one.read_at_step - begins) // 24, []).append(one)
    return [
        {
            "steps": 24 * cycle,
            "overlap": spread([one.overlap for one in part if one.overlap is not None]).median,
            "h": spread([one.since for one in part]).median,
        }
        for cycle, part in sorted(cycles.items())
    ]


class Outage(NamedTuple):
    """Time in which a learner's link passed nothing."""

    learner: str
    begins_at: float
    ends_at: float


def describe_outage(
    outage: Outage, rounds: Sequence[Event], ends: Sequence[float], fragments: int, sync_every: int
) -> dict[str, Any]:
    """Tell how much of a cut-off learner's steps were merged within two cycles of the reconnect.

    `ends`: moments (wall clock) at which its steps ended. Counted by the ledger: fragment-steps of its contributions
    over P. Weight really applied: that of its contributions over the weight that their tokens and steps would have
    alone, tokens x tokens / steps; a limit of weights makes it smaller.
    """
    first = sum(at <= outage.begins_at for at in ends)
    last = sum(at <= outage.ends_at for at in ends)
    made = last - first
    until = last + 2 * sync_every
    merged = own = applied = 0.0
    returned: float | None = None
    for event in rounds:
        for member in event["members"]:
            if member["learner"] != outage.learner or event["at"] < outage.ends_at:
                continue
            returned = event["at"] if returned is None else returned
            if member["t"] > until:
                continue
            # Of the contribution's steps, those that end by its t and began after its last: some are of the minute.
            of_minute = max(0, min(member["t"], last) - max(member["t"] - member["steps"], first))
            merged += of_minute
            own += member["tokens"] ** 2 / member["steps"]
            applied += member["weight"]
    return {
        "learner": outage.learner,
        "seconds": round(outage.ends_at - outage.begins_at, 1),
        "steps_made": made,
        "steps_merged": round(merged / fragments, 1),
        "merged_share": round(merged / fragments / made, 4) if made else None,
        "weight_applied_share": round(applied / own, 4) if own else None,
        "first_round_after_s": None if returned is None else round(returned - outage.ends_at, 2),
    }


# ---- a row of the table ----------------------------------------------------------------------------------------------

COLUMNS = ("row", "load up, down", "overlap median, p95 (floor)", "merged share", "realised H (p95)", "members")


def format_header() -> str:
    return f"| {' | '.join(COLUMNS)} |\n| {' | '.join('---' for _ in COLUMNS)} |"


def format_row(name: str, row: dict[str, Any]) -> str:
    """Return a row as a line of a markdown table. A run without limits has neither load nor floor."""
    load, floors = row.get("load") or {}, row.get("floors") or {}
    asked = ", ".join("-" if load.get(way) is None else f"{100 * load[way]:.0f} %" for way in ("up", "down"))
    floor = sorted({one["floor"] for one in floors.values()})
    told = "-" if not floor else f"{floor[0]}" if len(floor) == 1 else f"{floor[0]} to {floor[-1]}"
    overlap, h = row["overlap"], row["h"]
    cells = (
        name,
        asked,
        f"{_show(overlap['median'])}, {_show(overlap['p95'])} ({told})",
        _show(row["merged_share"]),
        f"{_show(h['median'])} ({_show(h['p95'])})",
        _show(row["members"]),
    )
    return f"| {' | '.join(cells)} |"


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def steps_per_s(ends: Sequence[Sequence[float]], warm_up: int) -> list[float]:
    """Return each learner's steps per second, its first ones left out."""
    kept = [one[warm_up:] if len(one) > warm_up + 2 else one for one in ends]
    return [round((len(one) - 1) / (one[-1] - one[0]), 3) if len(one) > 1 else 0.0 for one in kept]


def measure_merge_s(events: Sequence[Event]) -> float:
    rounds = select_paced_rounds(events)
    return median(float(event["merge_s"]) for event in rounds) if rounds else 0.0


def measure_disk_of_events(events: Sequence[Event]) -> float | None:
    """Return the time that the rounds waited for the disk, where their events tell it."""
    told = [float(event["disk_s"]) for event in select_kinds(events, "round") if event.get("disk_s") is not None]
    return median(told) if told else None
