"""aiohttp's client is called in fabric/calls.py alone, where whatever it raises becomes an error of ours."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
CALLS = "atoll/fabric/calls.py"
ROGUE = "atoll/chaos/rogue.py"
"""A learner that misbehaves on purpose shouts past the protocol, and ends with whatever comes of it."""
MADE_HERE = {"ClientSession", "ws_connect"}
BODIES = {"readchunk", "readany", "readexactly", "iter_any", "iter_chunked", "iter_chunks"}
SHORTCUTS = {"aiohttp.request", "session.request", "session.get", "session.put", "session.post", "session.delete"}
MODULES = sorted(path for path in SRC.rglob("*.py") if "aiohttp" in path.read_text("utf-8"))


def outside(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = ast.unparse(node.func)
        if node.func.attr in MADE_HERE | BODIES or any(name.endswith(one) for one in SHORTCUTS):
            found.append(f"line {node.lineno}: {name}")
        if name in ("response.read", "response.json", "response.text", "response.content.read"):
            found.append(f"line {node.lineno}: {name}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SRC)))
def test_the_client_is_called_in_one_place(path: Path) -> None:
    if str(path.relative_to(SRC)) not in (CALLS, ROGUE):
        assert outside(path.read_text("utf-8")) == []


def test_the_scan_sees_the_calls_there_are() -> None:
    calls = " ".join(outside((SRC / CALLS).read_text("utf-8")))
    assert all(word in calls for word in ("ClientSession", "session.request", "ws_connect", "readchunk"))
    assert outside("async def f(response):\n    return await response.json()")
    assert outside("async def f(self):\n    await self._session.get('http://x')")


def test_sockets_of_the_client_are_read_and_written_there_too() -> None:
    source = (SRC / "atoll/fabric/client.py").read_text("utf-8")
    for word in (".receive(", ".send_bytes", "socket.close(", "session.close("):
        assert word not in source, word
