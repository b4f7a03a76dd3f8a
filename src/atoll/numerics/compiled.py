"""How the loops of this package are compiled, and run on several threads.

A kernel is compiled once per kind of array, and a read-only array is another kind than a writable one: callers hand
every input through `read_only`, so that there is one kind of each and `kernels.warm` has met them all.

numba takes more than a second of processor time to load, and most processes only pass by here on their way to
something else (the command line, a supervisor): it is imported by the first call of a kernel, and not before.

A kernel has no threads of its own. `in_parts` runs one over parts that do not share a value: any number of threads, or
other parts, give equal bits.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, cached_property, update_wrapper
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

MOST_THREADS = 8
"""They wait for memory together: more of them are hardly faster."""
PART = 1 << 18
"""Values that one thread works on at a time: 1 MiB of each array, so that what follows finds them in cache."""

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A", bound=np.generic)
_KERNELS: list[Kernel[..., Any]] = []


class Kernel(Generic[P, R]):
    """A loop that is compiled on first use, kept on disk, and run without the interpreter lock."""

    def __init__(self, function: Callable[P, R], *, contracts: bool = False) -> None:
        self._function, self._contracts = function, contracts
        update_wrapper(self, function)
        _KERNELS.append(self)

    @cached_property
    def compiled(self) -> Any:
        import numba

        fused = {"contract"} if self._contracts else False
        return numba.njit(cache=True, nogil=True, fastmath=fused)(self._function)

    @property
    def _numba_type_(self) -> Any:
        """By which numba knows a kernel that another one calls."""
        import numba

        return numba.typeof(self.compiled)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self.compiled(*args, **kwargs)
        return result

    @property
    def source(self) -> Path:
        return Path(self._function.__code__.co_filename)

    @property
    def index_file(self) -> Path:
        """Where numba keeps it: beside the source, or in the user's cache where that cannot be written."""
        line, python = self._function.__code__.co_firstlineno, f"py{sys.version_info[0]}{sys.version_info[1]}"
        name = f"{self.source.stem}.{self._function.__qualname__}-{line}.{python}{sys.abiflags}.nbi"
        folder, beside = self.source.parent, self.source.parent / "__pycache__"
        root = os.environ.get("NUMBA_CACHE_DIR") or ("" if _can_hold_files(beside) else _user_cache())
        if not root:
            return beside / name
        # numba names a folder in it by the path of the source's
        digest = hashlib.sha1(str(folder).encode(), usedforsecurity=False).hexdigest()
        return Path(root) / f"{folder.name}_{digest}" / name


def _can_hold_files(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK) if folder.exists() else os.access(folder.parent, os.W_OK)


def _user_cache() -> str:
    """numba's cache of this user, as its AppDirs names it."""
    if sys.platform == "darwin":
        return str(Path.home() / "Library" / "Caches" / "numba")
    return os.path.join(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")), "numba")


def kernel(function: Callable[P, R]) -> Kernel[P, R]:
    return Kernel(function)


def exact_kernel(function: Callable[P, R]) -> Kernel[P, R]:
    """A loop whose only products are exact, those of two float32 in float64: to round a product and its sum once or
    apart is the same, so it may use instructions that do both."""
    return Kernel(function, contracts=True)


def lie_compiled() -> bool:
    """Whether all that were declared lie on disk, newer than their source and than numba; asked without loading numba.
    Where it cannot be told the answer is no."""
    numba = find_spec("numba")
    if numba is None or numba.origin is None:
        return False
    newest = Path(numba.origin).stat().st_mtime
    return all(
        one.index_file.exists() and one.index_file.stat().st_mtime >= max(newest, one.source.stat().st_mtime)
        for one in _KERNELS
    )


def read_only(array: NDArray[A]) -> NDArray[A]:
    """The same memory as an input: one kind of array for the kernels, whoever made it."""
    assert array.flags.c_contiguous, "kernels work on contiguous arrays"
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def thread_count() -> int:
    """For a syncer's work on one fragment: half of the cores, because learners may train on the others."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_THREADS, cores, max(2, cores // 2))


@cache
def _helpers() -> ThreadPoolExecutor:
    """For all that runs in parts: started when they are first needed, idle in between."""
    return ThreadPoolExecutor(2 * MOST_THREADS, "in-parts")


def in_parts(work: Callable[[int, int], None], count: int, step: int, threads: int) -> None:
    """`work(first, last)` over `count` units of work, `step` at a time, in ascending order as threads come free.

    The caller works too, so it never waits for helpers that are busy elsewhere."""
    starts = iter(range(0, count, step))  # hands each one out once, whichever thread asks
    given = [work]

    def work_on() -> None:
        for first in starts:
            given[0](first, min(first + step, count))

    helpers = [_helpers().submit(work_on) for _ in range(min(threads, -(-count // step)) - 1)]
    try:
        work_on()
    finally:
        running = [one for one in helpers if not one.cancel()]
        wait(running)
        given.clear()  # helpers keep `work_on` for a while, but not the arrays that were worked on
    for one in running:
        one.result()
