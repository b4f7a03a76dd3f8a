"""ATOLL_TEST_WITHOUT=torch,plotly: a process as if these packages were not installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

VARIABLE = "ATOLL_TEST_WITHOUT"


def install() -> None:
    packages = os.environ.get(VARIABLE)
    if not packages:
        return

    class Finder(PathFinder):
        @classmethod
        def find_spec(
            cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
        ) -> ModuleSpec | None:
            return None if name in packages.split(",") else super().find_spec(name, path, target)

    sys.meta_path[sys.meta_path.index(PathFinder)] = Finder  # type: ignore[arg-type]
