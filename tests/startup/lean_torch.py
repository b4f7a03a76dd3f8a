"""Training processes of tests start in half the processor time: they load torch without its compiler.

Every optimizer of torch imports `torch._dynamo` (1.5 s), to call two functions of it that do nothing unless something
is compiled. Here that import gives a stand-in with these two. Whoever asks it for anything else, or imports one of its
submodules, gets the real package, which takes the place of the stand-in.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


class StandIn(ModuleType):
    @staticmethod
    def graph_break(*said: object) -> None:
        """Outside of compiled code there is no graph to break."""

    @staticmethod
    def disable(function: Callable[..., Any], *options: object, **more: object) -> Callable[..., Any]:
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(load_real(), name)


class Finder:
    """Finds the stand-in, and the submodules of the real package once that is loaded."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == NAME:
            return importlib.machinery.ModuleSpec(name, Finder, is_package=True)  # type: ignore[arg-type]
        if name.startswith(f"{NAME}."):
            load_real()
            importlib.import_module(name)
            return importlib.machinery.ModuleSpec(name, Finder)  # type: ignore[arg-type]
        return None

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name) if spec.name == NAME else sys.modules[spec.name]

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Nothing is to be done: it is a stand-in, or loaded already."""


def install() -> None:
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]


def load_real() -> ModuleType:
    if Finder in sys.meta_path:
        sys.meta_path.remove(Finder)  # type: ignore[arg-type]
        sys.modules.pop(NAME, None)
    return importlib.import_module(NAME)
