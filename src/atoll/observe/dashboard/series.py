"""A row of figures in time that never grows past a bound and still reaches back to the start.

When it is full every second point goes, and from then on points are taken half as often.
"""

from __future__ import annotations

from typing import TypeAlias

Point: TypeAlias = list[float | int | None]
"""Its moment, then its figures."""


class Series:
    def __init__(self, most: int) -> None:
        assert most >= 2
        self.points: list[Point] = []
        self._most = most
        self._spacing_s = 0.0

    def add(self, point: Point) -> bool:
        """Whether it was taken: points that come too soon after the last are not."""
        at = point[0]
        assert at is not None
        if self.points and at - _moment(self.points[-1]) < self._spacing_s:
            return False
        if len(self.points) >= self._most:
            self.points = self.points[::2]
            span_s = _moment(self.points[-1]) - _moment(self.points[0])
            self._spacing_s = 0.9 * span_s / max(1, len(self.points) - 1)
        self.points.append(point)
        return True


def _moment(point: Point) -> float:
    assert point[0] is not None
    return point[0]
