"""`atoll --help` and `import atoll` bring nothing heavy along: half a second of processor time was two."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("aiohttp", "atoll.cli.train", "atoll.syncer", "cryptography", "msgspec", "numba", "numpy", "plotly", "torch")
HELP = "import sys; from atoll.entry import main; sys.argv = ['atoll', '--help']"
PROBE = "print('heavy:', [name for name in {heavy!r} if name in sys.modules])"


@pytest.mark.parametrize(
    "code", [f"{HELP}\ntry:\n    main()\nexcept SystemExit:\n    pass\n", "import sys, atoll; dir(atoll)\n"]
)
def test_it_starts_without_what_only_a_run_needs(code: str) -> None:
    probe = subprocess.run(
        [sys.executable, "-c", code + PROBE.format(heavy=HEAVY)], capture_output=True, text=True, timeout=60
    )
    assert probe.returncode == 0, probe.stderr
    assert probe.stdout.splitlines()[-1] == "heavy: []"


def test_python_dash_m_atoll_is_the_same_command() -> None:
    probe = subprocess.run([sys.executable, "-m", "atoll", "--help"], capture_output=True, text=True, timeout=60)
    assert probe.returncode == 0 and "Usage: python -m atoll" in probe.stdout
