"""Figures about the structure of a Python package: is it easy to live in?

    python tools/structure.py                 # src/atoll
    python tools/structure.py PATH --json     # any other package, for comparison

Counted from the source alone. Words of a method's name are what underscores part; names with leading underscores count
without them, special methods and properties not at all. A circle is a set of modules that import each other, imports
for type checkers left out.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections import Counter, defaultdict
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHORT = 100
"""Lines below which a file counts as short."""


def read_modules(package: Path) -> dict[str, tuple[str, ast.Module]]:
    """Dotted name → source and tree; empty `__init__` files left out."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        source = path.read_text()
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if source.strip():
            found[name] = (source, ast.parse(source))
    return found


def find_imports(name: str, tree: ast.Module, modules: set[str]) -> set[str]:
    """Modules of the same package that this one imports when it runs."""
    found: set[str] = set()
    for node in walk_at_runtime(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".")[: -node.level]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in node.names}
    return (found & modules) - {name}


def walk_at_runtime(node: ast.AST) -> list[ast.AST]:
    """All nodes but those below `if TYPE_CHECKING`."""
    found = [node]
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        found += walk_at_runtime(child)
    return found


def find_circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules of which each reaches each other (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(imports[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            circle = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(circle) > 1:
                circles.append(sorted(circle))

    for name in sorted(imports):
        if name not in index:
            visit(name)
    return circles


def count_words(name: str) -> int:
    return len([word for word in name.strip("_").split("_") if word])


def read_method_names(tree: ast.Module) -> list[str]:
    methods = [
        node
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [
        node.name
        for node in methods
        if not node.name.startswith("__")
        and not any("property" in ast.unparse(one) or "setter" in ast.unparse(one) for one in node.decorator_list)
    ]


def count_comments(source: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


def measure(package: Path) -> dict[str, Any]:
    modules = read_modules(package)
    lines = {name: source.count("\n") for name, (source, _) in modules.items()}
    imports = {name: find_imports(name, tree, set(modules)) for name, (_, tree) in modules.items()}
    importers = Counter(other for found in imports.values() for other in found)
    classes: dict[str, list[str]] = defaultdict(list)
    for name, (_, tree) in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(name)
    methods = [name for _, tree in modules.values() for name in read_method_names(tree)]
    return {
        "files": len(modules),
        "lines": sum(lines.values()),
        "median lines of a file": median(lines.values()),
        "files under 100 lines, %": round(100 * mean(count < SHORT for count in lines.values()), 1),
        "modules with one importer": sum(importers[name] == 1 for name in modules),
        "class names defined twice": sorted(name for name, where in classes.items() if len(where) > 1),
        "words in a method's name, mean": round(mean(map(count_words, methods)), 2),
        "methods of one word, most frequent": Counter(name for name in methods if count_words(name) == 1).most_common(
            12
        ),
        "comment lines, %": round(100 * sum(count_comments(s) for s, _ in modules.values()) / sum(lines.values()), 2),
        "circles": find_circles(imports),
        "packages": dict(sorted(Counter(".".join(name.split(".")[:2]) for name in modules).items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, nargs="?", default=ROOT / "src" / "atoll")
    parser.add_argument("--json", action="store_true", help="as JSON, with every name")
    options = parser.parse_args()
    found = measure(options.package)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        shown = len(value) if name == "class names defined twice" else value
        print(f"{name:38} {shown}")


if __name__ == "__main__":
    main()
