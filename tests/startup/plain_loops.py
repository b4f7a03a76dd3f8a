"""Processes of tests run the kernels of small arrays as the plain Python that they are written in, without numba.

numba takes half a second of processor time to load, in every syncer and every courier, and most tests have models of a
few dozen values. The bits are the same (tests/numerics/test_kernels.py). The first call with a larger array loads numba
as everywhere else, and from then on everything is compiled. Only with ATOLL_TEST_KERNELS=plain: tests/conftest.py.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

COMPILED = "atoll.numerics.compiled"
MOST = 256
"""Values of an array that plain Python is quick enough for."""


class Finder:
    """Finds the module of the kernels as Python does, and changes it once it is loaded."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != COMPILED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: ModuleType) -> None:
                load(module)
                change(module)

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


def change(module: ModuleType) -> None:
    call = module.Kernel.__call__

    def call_plain_if_small(kernel: Any, *arguments: Any) -> Any:
        if "numba" in sys.modules or not all(map(is_small, arguments)):
            return call(kernel, *arguments)
        return run_plain(kernel, *arguments)

    module.Kernel.__call__ = call_plain_if_small  # type: ignore[attr-defined]


def is_small(argument: Any) -> bool:
    if isinstance(argument, tuple):
        return all(map(is_small, argument))
    return getattr(argument, "size", 0) <= MOST


def run_plain(kernel: Any, *arguments: Any) -> Any:
    import numpy as np

    with np.errstate(all="ignore"):
        result = kernel._function(*arguments)
    return tuple(np.asarray(one).item() for one in result) if isinstance(result, tuple) else result


def install() -> None:
    if os.environ.get("ATOLL_TEST_KERNELS") == "plain":
        sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
