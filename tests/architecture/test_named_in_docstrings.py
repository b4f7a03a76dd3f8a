"""Docstrings of the protocol point to names in backticks: each of them is in the source."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "atoll"
NAME = re.compile(r"`([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)`")


def names_in_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Also of the strings below constants and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for name in NAME.findall(node.value.value):
                yield node.lineno, name


def defined_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name


def test_what_a_docstring_of_the_protocol_names_is_in_the_source() -> None:
    known = {path.stem for path in SOURCE.rglob("*.py")} | {path.name for path in SOURCE.rglob("*") if path.is_dir()}
    for path in SOURCE.rglob("*.py"):
        known.update(defined_names(ast.parse(path.read_text())))
    missing = [
        f"{path.relative_to(SOURCE)}:{line}: `{name}`"
        for path in sorted((SOURCE / "protocol").rglob("*.py"))
        for line, name in names_in_docstrings(ast.parse(path.read_text()))
        if not keyword.iskeyword(name) and not known.issuperset(name.split("."))
    ]
    assert not missing, f"named in docstrings, and nowhere in the source: {missing}"
