"""Tell whether a process computes: processor time that it and its descendants used lately, or waited for."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path

LEAST_SHARE = 0.1
"""Share of one core. A compiler on a crowded machine gets more, a loop that only waits uses less."""
WINDOW_S = 10.0
"""A compiler reads files and waits for its workers now and then: the mean over this time counts."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessorUse:
    def __init__(self, pid: int, *, but: int) -> None:
        """`but`: a child of it that does not count."""
        self._pid, self._but = pid, but
        self._seen: deque[tuple[float, float]] = deque()

    def look(self) -> bool:
        """Return whether it has computed since the looks of `WINDOW_S` ago. Where no system tells, it is believed."""
        now, used_s = time.monotonic(), _used_s(self._pid, self._but)
        if used_s is None:
            return True
        while len(self._seen) > 1 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()
        self._seen.append((now, used_s))
        (began, before_s), passed_s = self._seen[0], now - self._seen[0][0]
        return began < now and used_s - before_s >= LEAST_SHARE * passed_s


def _used_s(pid: int, but: int) -> float | None:
    """Return the processor time of a process and its descendants without `but`, or None if /proc does not tell."""
    used, children = {}, dict[int, list[int]]()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of the command may hold spaces and brackets; behind it are state, parent and numbers.
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        one = int(entry.parent.name)
        # Own time, that of children that have ended, and, on a crowded machine, what the main thread waited for.
        used[one] = sum(map(int, fields[11:15])) / _TICKS_PER_S + _waited_s(entry.with_name("schedstat"))
        children.setdefault(int(fields[1]), []).append(one)
    if pid not in used:
        return None
    total, open_ = 0.0, [pid]
    while open_:
        one = open_.pop()
        total += used[one]
        open_ += [child for child in children.get(one, ()) if child != but]
    return total


def _waited_s(schedstat: Path) -> float:
    """Return the seconds in which a thread was ready to run and another one ran; 0 where the kernel does not tell."""
    try:
        return int(schedstat.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
