"""What the ranks of a data-parallel run report, and the figures computed from it.

Ranks write lines of JSON to their logs. The figures are pure functions of their steps, defined as for a run of Atoll
(observe/summary.py):

- The training part runs from the start of the first step to the run's end.
- A rank is stepping while it computes, while gradients travel and while it updates its model. It is not stepping while
  it waits for a slower rank: of the time in the collective only what the last to arrive spent there counts. Nor is it
  while its host is paused.
- A step is kept unless the run went back behind it: a group that was formed after step s discards every earlier attempt
  at s + 1 and later. goodput, tokens and standstills count kept steps; uptime counts all that were made.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

Interval = tuple[float, float]


class RankStep(msgspec.Struct, frozen=True):
    """One rank's part in one step, as it said it."""

    rank: int
    step: int
    generation: int
    began: float
    compute_s: float
    collective_s: float
    update_s: float
    tokens: int = 0

    @property
    def ended(self) -> float:
        return self.began + self.compute_s + self.collective_s + self.update_s


class RankPause(msgspec.Struct, frozen=True):
    rank: int
    span: Interval


class BaselineFigures(msgspec.Struct, frozen=True):
    goodput: float
    uptime: float
    steps: int
    """That are in the final model."""
    steps_lost: int
    """Made, and lost by going back."""
    tokens: int
    tokens_lost: int
    longest_standstill_s: float
    """Between two steps that were kept; from the begin and to the end of the training part too."""
    wall_s: float


def compute_figures(
    steps: Sequence[RankStep],
    starts: dict[int, int],
    last: int,
    ranks: int,
    end: float,
    pauses: Sequence[RankPause] = (),
) -> BaselineFigures:
    """`starts`: after which step each generation began; `last`: the step of the final model."""
    assert steps, "a run without a step has no figures"
    part = (min(step.began for step in steps), end)
    wall = part[1] - part[0]
    inside = [step for step in steps if step.began < end]
    useful = select_kept(inside, starts, last)
    lost_numbers = {(s.generation, s.step) for s in inside} - {(s.generation, s.step) for s in useful}
    tokens = sum(step.tokens for step in useful)
    stepping = [clipped for span in stepping_spans(useful, pauses) if (clipped := _within(span, part))]
    up = [clipped for span in stepping_spans(inside, pauses) if (clipped := _within(span, part))]
    return BaselineFigures(
        goodput=sum(b - a for a, b in stepping) / (ranks * wall),
        uptime=covered_s(up) / wall,
        steps=len({step.step for step in useful}),
        steps_lost=len(lost_numbers),
        tokens=tokens,
        tokens_lost=sum(step.tokens for step in inside) - tokens,
        longest_standstill_s=longest_standstill_s(useful, part),
        wall_s=wall,
    )


def select_kept(steps: Iterable[RankStep], starts: dict[int, int], last: int) -> list[RankStep]:
    """Those that no later generation, and not the final model, went back behind."""
    return [
        step
        for step in steps
        if step.step <= last
        and all(step.step <= start for generation, start in starts.items() if generation > step.generation)
    ]


def stepping_spans(steps: Sequence[RankStep], pauses: Sequence[RankPause]) -> list[Interval]:
    """When each rank was stepping: computing, and from the moment the last had come to the collective."""
    travel: dict[tuple[int, int], float] = defaultdict(lambda: float("inf"))
    for step in steps:
        key = (step.generation, step.step)
        travel[key] = min(travel[key], step.collective_s)
    found: list[Interval] = []
    for step in steps:
        joint = step.ended - step.update_s - travel[step.generation, step.step]
        stood = [pause.span for pause in pauses if pause.rank == step.rank]
        for span in ((step.began, step.began + step.compute_s), (joint, step.ended)):
            found += _without(span, stood)
    return found


def covered_s(spans: Iterable[Interval]) -> float:
    """Seconds in at least one of them."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def longest_standstill_s(steps: Iterable[RankStep], part: Interval) -> float:
    ended: dict[int, float] = {}
    for step in steps:
        ended[step.step] = min(step.ended, ended.get(step.step, float("inf")))
    moments = sorted([*part, *(moment for moment in ended.values() if moment < part[1])])
    return max(b - a for a, b in pairwise(moments))


def _within(span: Interval, part: Interval) -> Interval | None:
    start, end = max(span[0], part[0]), min(span[1], part[1])
    return (start, end) if start < end else None


def _without(span: Interval, holes: Iterable[Interval]) -> list[Interval]:
    left = [span]
    for start, end in holes:
        left = [piece for a, b in left for piece in ((a, min(b, start)), (max(a, end), b)) if piece[0] < piece[1]]
    return left


RankMessage = dict[str, Any]


class RankLog:
    """Reads a rank's messages from its log, each once; a restarted rank appends to the same log."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read = 0
        self._rest = b""

    def read_new(self) -> list[RankMessage]:
        if not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._read)
            fresh = file.read()
        self._read += len(fresh)
        *lines, self._rest = (self._rest + fresh).split(b"\n")
        return [message for line in lines if (message := _parse_message(line)) is not None]


def _parse_message(line: bytes) -> RankMessage | None:
    """None for other lines: a library's warning, or a line that a kill cut off before the next message began."""
    start = line.rfind(b'{"kind"')
    if start < 0:
        return None
    try:
        return dict(json.loads(line[start:]))
    except ValueError:
        return None
