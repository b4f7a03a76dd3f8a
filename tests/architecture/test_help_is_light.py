"""Help and `import atoll` bring nothing heavy along: what only a run needs costs up to two seconds of processor time.

Modules are counted and not seconds, so that the test says the same on every machine.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from atoll.cli.declared import ATOLL

HEAVY = ("aiohttp", "asyncio", "atoll.cli.train", "atoll.syncer", "cryptography", "msgspec", "numba", "numpy", "plotly")
HEAVY += ("pydantic", "rich", "rich.markdown", "torch", "typer")
HELP = """
import sys
from atoll.entry import main
found = {}
for words in WORDS:
    sys.argv = ["atoll", *words, "--help"]
    main()
"""
PROBE = "\nprint('heavy:', [name for name in {heavy!r} if name in sys.modules])"
WORDS = [
    [],
    *([one.name] for one in ATOLL.commands),
    *([group.name, one.name] for group in ATOLL.commands for one in group.commands),
]


@pytest.mark.parametrize(
    "code", [HELP.replace("WORDS", repr(WORDS)), "import sys, atoll; dir(atoll)\n"], ids=["help", "import"]
)
def test_it_starts_without_what_only_a_run_needs(code: str) -> None:
    probe = subprocess.run(
        [sys.executable, "-c", code + PROBE.format(heavy=HEAVY)], capture_output=True, text=True, timeout=60
    )
    assert probe.returncode == 0, probe.stderr
    assert probe.stdout.splitlines()[-1] == "heavy: []"
    assert probe.stdout.count("Usage: atoll") == (len(WORDS) if "main" in code else 0)


def test_python_dash_m_atoll_is_the_same_command() -> None:
    probe = subprocess.run([sys.executable, "-m", "atoll", "--help"], capture_output=True, text=True, timeout=60)
    assert probe.returncode == 0 and "Usage: python -m atoll" in probe.stdout
