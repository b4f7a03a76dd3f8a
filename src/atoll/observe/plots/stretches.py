"""A day of 64 learners that a browser can still draw.

Neighbours that are the same become one. If there are still too many, those shorter than a grain are drawn together with
their short neighbours, and the picture says so; a short one between long ones stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from atoll.observe.figures import span
from atoll.observe.plots.pictures import Lane, Lanes, Mark, Stretch

MOST = 6_000
"""Stretches in a page, and marks in a page: a browser draws them in two or three seconds."""

MOST_IN_IMAGE = 40_000

FINEST = 4000
"""The first grain that is tried, as a part of the whole time: about a quarter of a pixel."""


def fitted(picture: Lanes, most: int = MOST) -> tuple[Lanes, float]:
    """The picture with `most` stretches and marks at the most, and its grain in seconds: 0 if it shows everything."""
    lanes = tuple(replace(lane, stretches=merged(lane.stretches)) for lane in picture.lanes)
    grain_s, shown = 0.0, lanes
    # A grain as long as the picture leaves one stretch and one mark to a lane: it cannot get fewer.
    while _crowded(shown, most) and grain_s < picture.end_s:
        grain_s = 1.5 * grain_s or picture.end_s / FINEST
        shown = tuple(
            Lane(lane.name, merged(pooled(lane.stretches, grain_s)), gathered(lane.marks, grain_s)) for lane in lanes
        )
    return replace(picture, lanes=shown), grain_s


def noted(note: str, grain_s: float) -> str:
    """The note of a picture, with what it does not show."""
    told = f"{note.rstrip('.')}. " if note else ""
    return f"{told}Stretches under {span(grain_s)} are drawn together." if grain_s else note


def merged(stretches: Iterable[Stretch]) -> tuple[Stretch, ...]:
    """Without empty ones, and without borders between two that are the same."""
    kept: list[Stretch] = []
    for stretch in stretches:
        if stretch.end_s <= stretch.start_s:
            continue
        if kept and _same(kept[-1], stretch):
            stretch = replace(stretch, start_s=kept.pop().start_s)
        kept.append(stretch)
    return tuple(kept)


def pooled(stretches: Iterable[Stretch], grain_s: float) -> list[Stretch]:
    """Short ones side by side become one of about a grain."""
    kept: list[Stretch] = []
    pool: list[Stretch] = []
    for stretch in stretches:
        long = stretch.end_s - stretch.start_s >= grain_s
        if pool and (long or stretch.start_s > pool[-1].end_s or stretch.end_s - pool[0].start_s > grain_s):
            kept.append(_sum(pool))
            pool = []
        (kept if long else pool).append(stretch)
    return [*kept, _sum(pool)] if pool else kept


def gathered(marks: Sequence[Mark], grain_s: float) -> tuple[Mark, ...]:
    """One mark for all of a grain."""
    groups: list[list[Mark]] = []
    for mark in sorted(marks, key=lambda mark: mark.at_s):
        if groups and mark.at_s - groups[-1][0].at_s < grain_s:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return tuple(_first_of(group) for group in groups)


def _crowded(lanes: Sequence[Lane], most: int) -> bool:
    return max(sum(len(lane.stretches) for lane in lanes), sum(len(lane.marks) for lane in lanes)) > most


def _same(one: Stretch, next_one: Stretch) -> bool:
    return one.end_s == next_one.start_s and (one.kind, one.share) == (next_one.kind, next_one.share)


def _sum(pool: Sequence[Stretch]) -> Stretch:
    """The kind that took most of the time; if that is stepping, the share that was stepping over the whole of it."""
    if len(pool) == 1:
        return pool[0]
    took = {stretch.kind: 0.0 for stretch in pool}
    for stretch in pool:
        took[stretch.kind] += stretch.end_s - stretch.start_s
    kind = max(took, key=lambda kind: took[kind])
    start_s, end_s = pool[0].start_s, pool[-1].end_s
    stepped_s = sum((s.end_s - s.start_s) * s.share for s in pool if s.kind == "stepping")
    return Stretch(start_s, end_s, kind, stepped_s / (end_s - start_s) if kind == "stepping" else 1.0)


def _first_of(group: Sequence[Mark]) -> Mark:
    if len(group) == 1:
        return group[0]
    within = span(group[-1].at_s - group[0].at_s)
    return replace(group[0], text=f"{group[0].text}, and {len(group) - 1} more within {within}")
