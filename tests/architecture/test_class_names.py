"""A class is found by its name: no other class, and no alias in another module, is called the same."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests.architecture.pages import ROOT

VARIANTS = {"Learner", "AtollCallback"}
"""The same thing for another library: users import it by the library's module (integrations/)."""


def classes(tree: ast.Module) -> Iterator[str]:
    return (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def aliases(tree: ast.Module) -> Iterator[str]:
    """Types that are given a name at the top of a module: `Key = tuple[str, int]`."""
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and target.id[0].isupper() and not target.id.isupper():
                yield target.id


def test_a_class_has_its_name_alone() -> None:
    defined: dict[str, list[str]] = defaultdict(list)
    named: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "src" / "atoll").rglob("*.py")):
        tree, module = ast.parse(path.read_text()), str(path.relative_to(ROOT))
        for name in classes(tree):
            defined[name].append(module)
        for name in aliases(tree):
            named[name].append(module)
    twice = {name: [*where, *named[name]] for name, where in defined.items() if len(where) + len(named[name]) > 1}
    assert set(twice) == VARIANTS, {name: where for name, where in twice.items() if name not in VARIANTS}
