"""Python, torch and the kernels. The last two are tried in a process of their own: neither a crash nor the memory of an
import stays here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

from atoll.observe.doctor.check import Check
from atoll.observe.figures import plain, span

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 6)
PATIENCE_S = 120.0

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


def python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Check:
    shown = ".".join(map(str, version))
    if version[:2] < OLDEST_PYTHON:
        return Check("python", "fail", shown, "Atoll needs Python 3.11 or newer.", {"version": shown})
    return Check("python", "ok", shown, figures={"version": shown})


def torch() -> Check:
    return judge_torch(*told_by(_TORCH))


def judge_torch(found: dict[str, Any] | None, words: str = "") -> Check:
    if found is None:
        return Check("torch", "fail", words or "does not start", "pip install 'torch>=2.6'; learners need it.")
    version, gpus = str(found["version"]), found["gpus"]
    device = f"{len(gpus)} × {gpus[0]['name']}" if gpus else "Apple GPU" if found["mps"] else "CPU only"
    value = f"{version}, {device}, imported in {span(found['import_s'])}"
    if _numbers(version) < OLDEST_TORCH:
        return Check("torch", "fail", value, "Atoll needs torch 2.6 or newer: pip install -U torch.", found)
    if found["cuda"] and not gpus:
        advice = "This torch is built for CUDA but sees no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES."
        return Check("torch", "warn", value, advice, found)
    return Check("torch", "ok", value, figures=found)


def kernels() -> Check:
    return judge_kernels(*told_by(_KERNELS))


def judge_kernels(found: dict[str, Any] | None, words: str = "") -> Check:
    if found is None:
        advice = "Merging needs them. If no cache can be written, set NUMBA_CACHE_DIR to a folder that can."
        return Check("kernels", "fail", words or "do not compile", advice)
    value = f"{'compiled' if found['compiled'] else 'loaded from their cache'} in {span(found['warm_s'])}"
    if not found["writable"]:
        advice = f"{found['cache']} cannot be written to, so every process may compile anew: set NUMBA_CACHE_DIR."
        return Check("kernels", "warn", value, advice, found)
    return Check("kernels", "ok", value, figures=found)


def told_by(code: str) -> tuple[dict[str, Any] | None, str]:
    """What a small program prints as JSON; or None, and the last line of its complaint."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        return None, f"not there after {span(PATIENCE_S)}"
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
