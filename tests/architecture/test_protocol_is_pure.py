"""The rules run unchanged in production, in the simulators and in replay because they touch nothing outside themselves.

So `protocol` imports msgspec, itself and the few modules of the standard library that neither read a clock, draw a
random number, nor do I/O. A new name on the list below needs that same property.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PROTOCOL = Path(__file__).parents[2] / "src" / "atoll" / "protocol"
SOURCES = sorted(PROTOCOL.rglob("*.py"))

ALLOWED = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "copy",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "hmac",
    "importlib",  # as an import statement: a choice of the protocol is found by its name
    "itertools",
    "math",
    "msgspec",
    "operator",
    "re",
    "statistics",
    "struct",
    "textwrap",
    "types",
    "typing",
}
FORBIDDEN_BUILTINS = {"__import__", "breakpoint", "compile", "eval", "exec", "id", "input", "open", "print"}


def allowed(name: str) -> bool:
    return name.split(".")[0] in ALLOWED or name == "atoll.protocol" or name.startswith("atoll.protocol.")


def imported(node: ast.AST) -> list[str]:
    """Full names of what an import statement names; one dot stands for `protocol` itself."""
    if isinstance(node, ast.Import):
        return [item.name for item in node.names]
    if isinstance(node, ast.ImportFrom) and node.module == "atoll" and node.level == 0:
        return [f"atoll.{item.name}" for item in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"atoll.protocol.{node.module}" if node.level == 1 else "." * node.level + (node.module or "")]
    return []


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        found += [f"line {node.lineno}: imports {name}" for name in imported(node) if not allowed(name)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_BUILTINS:
            found.append(f"line {node.lineno}: calls {node.func.id}()")
    return found


def test_there_is_a_protocol() -> None:
    assert SOURCES


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PROTOCOL)))
def test_protocol_is_pure(path: Path) -> None:
    assert offences(path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import os.path",
        "from asyncio import Queue",
        "def inside():\n    import random",
        "import numpy as np",
        "from atoll import numerics",
        "from atoll.fabric import wire",
        "from ..numerics import merge",
        "open('x')",
        "print('x')",
    ],
)
def test_the_scan_sees(source: str) -> None:
    assert offences(source)


@pytest.mark.parametrize(
    "source",
    [
        "import msgspec",
        "from collections.abc import Mapping",
        "from atoll.protocol import messages",
        "from atoll.protocol.errors import PeerError",
        "from .messages import Hello",
        "from . import messages",
    ],
)
def test_the_scan_lets_pass(source: str) -> None:
    assert offences(source) == []
