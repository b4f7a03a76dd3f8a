"""The disk under a run's folder: room, writing at length, and how long it takes until 4 KiB are safe.

Every round waits for the last of these once, beside the training: it bounds how fast rounds can follow each other.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from atoll.observe.doctor.check import Check, size
from atoll.observe.figures import span

GIB = 1 << 30
LITTLE_ROOM, TOO_LITTLE_ROOM = 5 * GIB, GIB // 4
LENGTH = 64 << 20
SLOW_BYTES_PER_S = 50e6
SYNCS = 20
SLOW_SYNC_S = 0.05
PATIENCE_S = 10.0
"""A disk that takes longer than this for either has said enough."""


def checks(folder: Path) -> Iterator[Check]:
    place = standing(folder)
    try:
        found = os.statvfs(place)
        room = found.f_bavail * found.f_frsize
        yield judge_room(place, room)
        if room < 2 * LENGTH:
            return
        with tempfile.TemporaryDirectory(prefix=".atoll-doctor-", dir=place) as spot:
            file = Path(spot) / "block"
            yield judge_writing(*written(file))
            yield judge_syncing(syncs(file))
    except OSError as error:
        words = f"{place}: {error.strerror or error}"
        yield Check("disk", "fail", words, "Name a folder that can be written to with --out.", {"folder": str(place)})


def standing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there already: nothing is made for the sake of a look."""
    folder = folder.absolute()
    return next(one for one in (folder, *folder.parents) if one.is_dir())


def judge_room(place: Path, room: int) -> Check:
    value, figures = f"{size(room)} free in {place}", {"folder": str(place), "free_bytes": room}
    # Measured with the defaults: cuts, journal and model; AdamW's state in a learner's part of four cuts.
    need = "A run keeps about 110 bytes per parameter, and 65 for each learner"
    if room < TOO_LITTLE_ROOM:
        return Check("disk room", "fail", value, f"{need}: make room, or name another folder with --out.", figures)
    if room < LITTLE_ROOM:
        return Check("disk room", "warn", value, f"{need}: a large model needs another folder.", figures)
    return Check("disk room", "ok", value, figures=figures)


def written(file: Path, length: int = LENGTH) -> tuple[int, float]:
    """So many bytes, made safe; and the seconds it took."""
    block = os.urandom(1 << 20)
    begun, done = time.perf_counter(), 0
    with file.open("wb") as out:
        while done < length and time.perf_counter() - begun < PATIENCE_S:
            done += out.write(block)
        out.flush()
        os.fsync(out.fileno())
    return done, time.perf_counter() - begun


def judge_writing(done: int, took_s: float) -> Check:
    rate = done / max(took_s, 1e-9)
    value = f"{rate / 1e6:,.0f} MB/s ({size(done)} in {span(took_s)})"
    figures = {"bytes_per_s": round(rate), "bytes": done, "seconds": round(took_s, 4)}
    if rate < SLOW_BYTES_PER_S:
        return Check("disk writing", "warn", value, "Cuts of a large model will take long: use another disk.", figures)
    return Check("disk writing", "ok", value, figures=figures)


def syncs(file: Path, times: int = SYNCS) -> list[float]:
    took: list[float] = []
    block = os.urandom(4096)
    with file.open("wb", buffering=0) as out:
        while len(took) < times and sum(took) < PATIENCE_S:
            begun = time.perf_counter()
            out.write(block)
            os.fsync(out.fileno())
            took.append(time.perf_counter() - begun)
    return took


def judge_syncing(took: list[float]) -> Check:
    middle, worst = median(took), max(took)
    value = f"{1000 * middle:.1f} ms until 4 KiB are safe, {1000 * worst:.0f} ms at worst"
    figures = {"median_s": round(middle, 6), "worst_s": round(worst, 6), "tries": len(took)}
    if middle > SLOW_SYNC_S:
        advice = 'Rounds wait for it: use a local SSD, or [service] durability = "cut" to wait at cuts only.'
        return Check("disk syncing", "warn", value, advice, figures)
    return Check("disk syncing", "ok", value, figures=figures)
