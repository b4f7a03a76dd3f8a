"""What a process runs on: for the first event of a run and for its report. Read from the packages, not by importing."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("atoll", "torch", "numpy", "numba", "aiohttp")


def versions() -> dict[str, str]:
    packages = {name: found for name in PACKAGES if (found := _version(name))}
    return {"python": platform.python_version(), **packages, "platform": platform.platform()}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
