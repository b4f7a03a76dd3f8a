"""Checks of this machine: software, processors, memory, disk, ports and network card.

Each `check_…` probes, each `judge_…` is a pure function of the figures found. torch and the kernels are tried in a
child process, so that neither a crash nor the memory of an import stays here. Every round waits once for an fsync of
the disk under the run's folder: that bounds how fast rounds can follow each other.
"""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from atoll.extras import install_command, is_installed
from atoll.observe.figures import plain, span

CheckVerdict: TypeAlias = Literal["ok", "warn", "fail"]
UNKNOWN = "this system does not say"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    verdict: CheckVerdict
    value: str
    next: str = ""
    """The next step, where there is one to take."""
    figures: dict[str, Any] = field(default_factory=dict)
    """The same for programs; units are in the names."""

    def document(self) -> dict[str, Any]:
        return {"name": self.name, "verdict": self.verdict, "value": self.value, "next": self.next, **self.figures}


@dataclass(frozen=True, slots=True)
class Clocks:
    wall: float
    steady: float

    @classmethod
    def now(cls) -> Clocks:
        return cls(time.time(), time.monotonic())


def size(value: float) -> str:
    """23 GiB, 512 MiB, 20 KiB."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if value >= unit:
            return f"{value / unit:.1f} {name}" if value < 10 * unit else f"{value / unit:.0f} {name}"
    return f"{value / 1024:.0f} KiB"


def brief(seconds: float) -> str:
    """0.4 ms, 12.0 ms; from a tenth of a second on as everywhere."""
    return f"{1000 * seconds:.1f} ms" if seconds < 0.0995 else span(seconds)


# ---- software -------------------------------------------------------------------------------------------------------

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 6)
PROBE_TIMEOUT_S = 120.0

_TORCH = """
import json, time
begun = time.perf_counter()
import torch
found = torch.cuda.device_count() if torch.cuda.is_available() else 0
gpus = [torch.cuda.get_device_properties(i) for i in range(found)]
print(json.dumps({
    "version": torch.__version__, "import_s": round(time.perf_counter() - begun, 2), "cuda": torch.version.cuda,
    "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
    "mps": bool(getattr(torch.backends, "mps", None)) and torch.backends.mps.is_available(),
    "threads": torch.get_num_threads(),
}))
"""
_KERNELS = """
import json, os, time
begun = time.perf_counter()
from atoll.numerics import kernels
kernels.warm()
place = kernels.nesterov.compiled._cache.cache_path
print(json.dumps({
    "warm_s": round(time.perf_counter() - begun, 2), "cache": place, "writable": os.access(place, os.W_OK),
    "compiled": sum(kernels.nesterov.compiled.stats.cache_misses.values()),
}))
"""


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Check:
    shown = ".".join(map(str, version))
    if version[:2] < OLDEST_PYTHON:
        return Check("python", "fail", shown, "Atoll needs Python 3.11 or newer.", {"version": shown})
    return Check("python", "ok", shown, figures={"version": shown})


def check_torch() -> Check:
    if not is_installed("torch"):
        return Check("torch", "warn", "not installed", f"Only what trains needs it: {install_command('torch')}")
    return judge_torch(*run_probe(_TORCH))


def judge_torch(found: dict[str, Any] | None, words: str = "") -> Check:
    if found is None:
        return Check("torch", "fail", words or "does not start", f"Learners need it: {install_command('torch')}")
    version, gpus = str(found["version"]), found["gpus"]
    device = f"{len(gpus)} × {gpus[0]['name']}" if gpus else "Apple GPU" if found["mps"] else "CPU only"
    value = f"{version}, {device}, imported in {span(found['import_s'])}"
    if _numbers(version) < OLDEST_TORCH:
        return Check("torch", "fail", value, "Atoll needs torch 2.6 or newer: pip install -U torch", found)
    if found["cuda"] and not gpus:
        advice = "This torch is built for CUDA but sees no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES."
        return Check("torch", "warn", value, advice, found)
    return Check("torch", "ok", value, figures=found)


def check_kernels() -> Check:
    return judge_kernels(*run_probe(_KERNELS))


def judge_kernels(found: dict[str, Any] | None, words: str = "") -> Check:
    if found is None:
        advice = "Merging needs them. If no cache can be written, set NUMBA_CACHE_DIR to a folder that can."
        return Check("kernels", "fail", words or "do not compile", advice)
    value = f"{'compiled' if found['compiled'] else 'loaded from their cache'} in {span(found['warm_s'])}"
    if not found["writable"]:
        advice = f"{found['cache']} cannot be written to, so every process may compile anew: set NUMBA_CACHE_DIR."
        return Check("kernels", "warn", value, advice, found)
    return Check("kernels", "ok", value, figures=found)


def run_probe(code: str) -> tuple[dict[str, Any] | None, str]:
    """What a small program prints as JSON; or None, and the last line of its complaint."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None, f"not there after {span(PROBE_TIMEOUT_S)}"
    except OSError as error:
        return None, f"{sys.executable} cannot be started: {error.strerror}"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return None, plain(lines[-1])[:200]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, ""


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else (0,)


# ---- machine --------------------------------------------------------------------------------------------------------

GIB = 1 << 30
LITTLE_MEMORY, TOO_LITTLE_MEMORY = 4 * GIB, GIB
LITTLE_SHARED = GIB // 4
FEW_FILES, TOO_FEW_FILES = 1024, 128
DRIFT_S = 0.05
"""A wall clock that moves this much against the steady one within seconds is being set."""


def check_processors() -> Check:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return judge_processors(allowed, os.getloadavg()[0])


def judge_processors(allowed: int, load: float) -> Check:
    figures = {"cores": allowed, "load": round(load, 2)}
    value = f"{allowed} {'core' if allowed == 1 else 'cores'}, load {load:.1f}"
    if load > allowed:
        return Check("processors", "warn", value, "Others keep them busy: steps and starts will take longer.", figures)
    return Check("processors", "ok", value, figures=figures)


def check_memory() -> Check:
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


def check_shared_memory(path: Path = Path("/dev/shm")) -> Check:
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


def check_open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge_open_files(*(1 << 30 if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard)))


def judge_open_files(soft: int, hard: int) -> Check:
    value, figures = f"{soft:,} at once, may be raised to {hard:,}", {"soft": soft, "hard": hard}
    advice = f"A syncer takes several for every learner: ulimit -n {min(hard, 65536)}"
    if soft < FEW_FILES:
        return Check("open files", "fail" if soft < TOO_FEW_FILES else "warn", value, advice, figures)
    return Check("open files", "ok", value, figures=figures)


def check_clock(before: Clocks, after: Clocks) -> Check:
    """The longer the look, the better: from the first check to the last."""
    looked = after.steady - before.steady
    drift = (after.wall - before.wall) - looked
    value = f"wall and steady clock differ by {1000 * abs(drift):.1f} ms after {span(looked)}"
    figures = {"drift_s": round(drift, 6), "looked_s": round(looked, 3)}
    if abs(drift) > DRIFT_S:
        advice = "The clock is being set: times in events.jsonl may jump. Look at chrony or systemd-timesyncd."
        return Check("clock", "warn", value, advice, figures)
    return Check("clock", "ok", value, figures=figures)


# ---- disk -----------------------------------------------------------------------------------------------------------

LITTLE_ROOM, TOO_LITTLE_ROOM = 5 * GIB, GIB // 4
WRITE_BYTES = 64 << 20
SLOW_BYTES_PER_S = 50e6
SYNCS = 20
SLOW_SYNC_S = 0.05
DISK_TIMEOUT_S = 10.0
"""A disk that takes longer than this for either has said enough."""


def check_disk(folder: Path) -> Iterator[Check]:
    place = find_existing_folder(folder)
    try:
        found = os.statvfs(place)
        room = found.f_bavail * found.f_frsize
        yield judge_room(place, room)
        if room < 2 * WRITE_BYTES:
            return
        with tempfile.TemporaryDirectory(prefix=".atoll-doctor-", dir=place) as spot:
            file = Path(spot) / "block"
            yield judge_writing(*time_writing(file))
            yield judge_syncing(time_syncs(file))
    except OSError as error:
        words = f"{place}: {error.strerror or error}"
        yield Check("disk", "fail", words, "Name a folder that can be written to with --out.", {"folder": str(place)})


def find_existing_folder(folder: Path) -> Path:
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


def time_writing(file: Path, length: int = WRITE_BYTES) -> tuple[int, float]:
    """So many bytes, made safe; and the seconds it took."""
    block = os.urandom(1 << 20)
    begun, done = time.perf_counter(), 0
    with file.open("wb") as out:
        while done < length and time.perf_counter() - begun < DISK_TIMEOUT_S:
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


def time_syncs(file: Path, times: int = SYNCS) -> list[float]:
    took: list[float] = []
    block = os.urandom(4096)
    with file.open("wb", buffering=0) as out:
        while len(took) < times and sum(took) < DISK_TIMEOUT_S:
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


# ---- network --------------------------------------------------------------------------------------------------------

SLOW_MBIT = 100
CARDS = Path("/sys/class/net")
ROUTES = Path("/proc/net/route")


def check_ports() -> Check:
    """A run on this machine listens on loopback."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=2.0):
                pass
    except OSError as error:
        advice = "A syncer must be able to listen on 127.0.0.1: look at the firewall or the sandbox."
        return Check("ports", "fail", f"127.0.0.1 cannot be used: {error.strerror or error}", advice)
    return Check("ports", "ok", "127.0.0.1 can be listened on and reached")


def check_card(url: str | None, cards: Path = CARDS, routes: Path = ROUTES) -> Check:
    """The one that reaches the syncer; without one, that of the default route."""
    if url is None:
        return judge_card(find_default_card(routes), None, cards)
    try:
        own = find_own_address(url)
    except OSError as error:
        where = urlsplit(url).hostname
        return Check("network card", "fail", f"no way to {where}: {error.strerror or error}", "Check the address.")
    return judge_card(_card_of(own), own, cards)


def judge_card(name: str | None, own: str | None, cards: Path = CARDS) -> Check:
    if name is None:
        return Check("network card", "ok", f"{own}; which card that is, {UNKNOWN}" if own else "no default route")
    mbit = read_card_speed(cards / name / "speed")
    figures = {"card": name, "mbit_per_s": mbit, "address": own}
    told = f"{mbit:,} Mbit/s" if mbit else "loopback" if name == "lo" else "which does not tell its speed"
    value = f"{name}{f' ({own})' if own else ''}, {told}"
    if mbit is not None and mbit < SLOW_MBIT:
        advice = "atoll simulate bandwidth says what a link like this gives."
        return Check("network card", "warn", value, advice, figures)
    return Check("network card", "ok", value, figures=figures)


def read_card_speed(path: Path) -> int | None:
    """Mbit/s; virtual cards say -1 or nothing."""
    try:
        found = int(path.read_text())
    except (OSError, ValueError):
        return None
    return found if found > 0 else None


def find_default_card(routes: Path = ROUTES) -> str | None:
    try:
        rows = [line.split() for line in routes.read_text().splitlines()[1:]]
    except OSError:
        return None
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), None)


def find_own_address(url: str) -> str:
    """From which of our addresses the syncer is reached: a UDP socket knows without sending anything."""
    parts = urlsplit(url)
    family, kind, _, _, address = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _card_of(own: str) -> str | None:
    if own.startswith("127.") or own == "::1":
        return "lo"
    try:
        import fcntl
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == own:
                return name
    return None
