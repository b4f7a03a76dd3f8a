"""Processors, memory, open files, clock."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from atoll.observe.doctor.check import UNKNOWN, Check, Clocks, size
from atoll.observe.figures import span

GIB = 1 << 30
LITTLE_MEMORY, TOO_LITTLE_MEMORY = 4 * GIB, GIB
LITTLE_SHARED = GIB // 4
FEW_FILES, TOO_FEW_FILES = 1024, 128
DRIFT_S = 0.05
"""A wall clock that moves this much against the steady one within seconds is being set."""


def processors() -> Check:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return judge_processors(allowed, os.getloadavg()[0])


def judge_processors(allowed: int, load: float) -> Check:
    figures = {"cores": allowed, "load": round(load, 2)}
    value = f"{allowed} {'core' if allowed == 1 else 'cores'}, load {load:.1f}"
    if load > allowed:
        return Check("processors", "warn", value, "Others keep them busy: steps and starts will take longer.", figures)
    return Check("processors", "ok", value, figures=figures)


def memory() -> Check:
    return judge_memory(*_memory())


def judge_memory(total: int | None, free: int | None) -> Check:
    if total is None or free is None:
        return Check("memory", "ok", UNKNOWN)
    value, figures = f"{size(free)} of {size(total)} free", {"total_bytes": total, "free_bytes": free}
    need = "A learner takes 0.4 GiB with its courier, and about 20 bytes per parameter (AdamW in fp32)"
    if free < TOO_LITTLE_MEMORY:
        return Check("memory", "fail", value, f"{need}: end something else first.", figures)
    if free < LITTLE_MEMORY:
        return Check("memory", "warn", value, f"{need}: start few learners.", figures)
    return Check("memory", "ok", value, figures=figures)


def _memory() -> tuple[int | None, int | None]:
    """Of the machine, or of the container where that has less."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None, None
    table = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    total, free = table.get("MemTotal"), table.get("MemAvailable")
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if total is not None and free is not None and limit is not None and used is not None and limit < total:
        return limit, min(free, max(0, limit - used))
    return total, free


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def shared_memory(path: Path = Path("/dev/shm")) -> Check:
    try:
        found = os.statvfs(path)
    except OSError:
        return Check("shared memory", "ok", f"no {path}: Atoll's own buffers have no name and do without")
    return judge_shared(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def judge_shared(total: int, free: int) -> Check:
    value, figures = f"{size(free)} of {size(total)} free in /dev/shm", {"total_bytes": total, "free_bytes": free}
    if free < LITTLE_SHARED:
        advice = "Atoll does without, but a DataLoader with workers does not: in a container, --shm-size=1g."
        return Check("shared memory", "warn", value, advice, figures)
    return Check("shared memory", "ok", value, figures=figures)


def open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge_open_files(*(1 << 30 if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard)))


def judge_open_files(soft: int, hard: int) -> Check:
    value, figures = f"{soft:,} at once, may be raised to {hard:,}", {"soft": soft, "hard": hard}
    advice = f"A syncer takes several for every learner: ulimit -n {min(hard, 65536)}"
    if soft < FEW_FILES:
        return Check("open files", "fail" if soft < TOO_FEW_FILES else "warn", value, advice, figures)
    return Check("open files", "ok", value, figures=figures)


def clock(before: Clocks, after: Clocks) -> Check:
    """The longer the look, the better: from the first check to the last."""
    looked = after.steady - before.steady
    drift = (after.wall - before.wall) - looked
    value = f"wall and steady clock differ by {1000 * abs(drift):.1f} ms after {span(looked)}"
    figures = {"drift_s": round(drift, 6), "looked_s": round(looked, 3)}
    if abs(drift) > DRIFT_S:
        advice = "The clock is being set: times in events.jsonl may jump. Look at chrony or systemd-timesyncd."
        return Check("clock", "warn", value, advice, figures)
    return Check("clock", "ok", value, figures=figures)
