"""Nothing that unpickles, and nothing that pickles behind one's back: bytes of a peer must never become code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_NAMES = {
    "torch.load",
    "torch.save",
    "torch.distributed.checkpoint",
    "torch.multiprocessing",
    "concurrent.futures.ProcessPoolExecutor",
    "multiprocessing.JoinableQueue",
    "multiprocessing.Manager",
    "multiprocessing.Pool",
    "multiprocessing.Queue",
    "multiprocessing.SimpleQueue",
}
# torch.distributed's collectives on objects pickle them.
FORBIDDEN_ATTRIBUTES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}


def forbidden(name: str) -> bool:
    under = any(name == bad or name.startswith(bad + ".") for bad in FORBIDDEN_NAMES)
    return under or name.split(".")[0] in FORBIDDEN_MODULES or name.split(".")[-1] in FORBIDDEN_ATTRIBUTES


def dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """`t.load` as `torch.load` where `import torch as t` stands above; empty where the root is no plain name."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (root := dotted(node.value, aliases)):
        return f"{root}.{node.attr}"
    return ""


def imports(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, name here, full name) of everything imported, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                yield node.lineno, item.asname or item.name.split(".")[0], item.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for item in node.names:
                yield node.lineno, item.asname or item.name, f"{node.module}.{item.name}"


def offences(source: str) -> list[str]:
    tree = ast.parse(source)
    imported = list(imports(tree))
    found = [f"line {line}: imports {full}" for line, _, full in imported if forbidden(full)]
    aliases = {here: full for _, here, full in imported if "." not in here and full.split(".")[0] != here}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and forbidden(name := dotted(node, aliases)):
            found.append(f"line {node.lineno}: uses {name}")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append(f"line {node.value.lineno}: allow_pickle")
    return found


@pytest.mark.parametrize("folder", ["src", "benchmarks", "examples"])
def test_no_pickle(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    found = {str(path.relative_to(ROOT)): offences(path.read_text("utf-8")) for path in paths}
    assert found and {path: told for path, told in found.items() if told} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as harmless",
        "from cloudpickle import loads",
        "def inside():\n    import marshal",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.save({}, 'x')",
        "from torch import load",
        "import torch.distributed.checkpoint as dcp",
        "import torch.distributed as dist\ndist.broadcast_object_list([])",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.load('x', allow_pickle=flag)",
        "import multiprocessing as mp\nmp.Queue()",
    ],
)
def test_the_scan_sees(source: str) -> None:
    assert offences(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nmodel.load_state_dict({})",
        "from safetensors.numpy import load",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "from multiprocessing import shared_memory",
        "import asyncio\nasyncio.Queue()",
    ],
)
def test_the_scan_lets_pass(source: str) -> None:
    assert offences(source) == []
