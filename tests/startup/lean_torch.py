"""Processes of tests load torch in half the processor time: without its compiler.

Every optimizer of torch imports `torch._dynamo` (1.5 s), to call two functions of it that do nothing unless something
is compiled; `import torch` loads `torch.export` (0.3 s) and, for tensors without values, `torch._meta_registrations`
(0.5 s); DistributedDataParallel asks the compiler how to work with it (2 s), and every process group clears what it
keeps. Here these imports give stand-ins. Whoever asks one of them for anything else, or imports one of its submodules,
gets the real package, and so does every later import.

While torch is imported nothing is garbage, and to look for some takes 0.3 s: so nobody looks, then or later.
"""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar

DYNAMO, EXPORT, METAS = "torch._dynamo", "torch.export", "torch._meta_registrations"
PACKAGES = (DYNAMO, EXPORT)
CONFIG = f"{DYNAMO}.config"
"""All that tensors without values ask of the compiler."""


class CompilerFacts:
    """In place of `torch._dynamo.utils`."""

    @staticmethod
    def get_optimize_ddp_mode() -> str:
        return "ddp_optimizer"  # what torch has where nobody chose

    def __getattr__(self, name: str) -> Any:
        remove_stand_ins()
        return getattr(importlib.import_module(f"{DYNAMO}.utils"), name)


class CompilerRules:
    """In place of `torch._dynamo.trace_rules`: every process group clears what it keeps, which is nothing here."""

    @staticmethod
    def clear_lru_cache() -> None:
        """Nothing was kept."""

    def __getattr__(self, name: str) -> Any:
        remove_stand_ins()
        return getattr(importlib.import_module(f"{DYNAMO}.trace_rules"), name)


class StandIn(ModuleType):
    utils = CompilerFacts()
    trace_rules = CompilerRules()

    @staticmethod
    def graph_break(*said: object) -> None:
        """Outside of compiled code there is no graph to break."""

    @staticmethod
    def disable(function: Callable[..., Any], *options: object, **more: object) -> Callable[..., Any]:
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        remove_stand_ins()
        return getattr(importlib.import_module(self.__name__), name)


class Finder:
    """Finds the stand-ins, and the submodules of the real packages once these are loaded."""

    collects = False
    """Whether somebody looked for garbage before torch came."""
    stands_in: ClassVar = {METAS, *PACKAGES}

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torch" and gc.isenabled():
            gc.disable()
            Finder.collects = True
        if name in Finder.stands_in:
            return importlib.machinery.ModuleSpec(name, Finder, is_package=name != METAS)  # type: ignore[arg-type]
        if name == CONFIG and DYNAMO in Finder.stands_in:
            remove_stand_ins((METAS,))
            return importlib.machinery.PathFinder.find_spec(name, [f"{sys.modules['torch'].__path__[0]}/_dynamo"])
        if name.startswith(tuple(f"{package}." for package in Finder.stands_in)):
            # DTensors ask for a part of torch.export, and for no compiler.
            remove_stand_ins((METAS, EXPORT) if name.startswith(EXPORT) else (METAS, *PACKAGES))
            importlib.import_module(name)
            return importlib.machinery.ModuleSpec(name, Finder)  # type: ignore[arg-type]
        return None

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name) if spec.name in (*PACKAGES, METAS) else sys.modules[spec.name]

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        if module.__name__ == METAS and isinstance(module, StandIn):
            prepare_generators()
            if Finder.collects:
                gc.freeze()
                gc.enable()


def install() -> None:
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]


def prepare_generators() -> None:
    """The one thing that is needed without a compiler: newer versions of torch make no Generator before."""
    if sys.modules["torch._C"].__dict__.get("_set_generator_metaclass") is not None:
        from torch._opaque_base import OpaqueBaseMeta

        sys.modules["torch._C"]._set_generator_metaclass(OpaqueBaseMeta)


def remove_stand_ins(names: Sequence[str] = (METAS, *PACKAGES)) -> None:
    """From now on imports give the real ones, one by one: whoever asks may be in the middle of an import itself."""
    if removed := [name for name in names if name in Finder.stands_in]:
        Finder.stands_in.difference_update(removed)
        for name in removed:
            sys.modules.pop(name, None)
        importlib.import_module(METAS)
