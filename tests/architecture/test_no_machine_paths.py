"""No file of the repository names a place on somebody's machine: it would work there and nowhere else."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The leading slash is a class of its own, so that this line does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w.\-])[/](?:(?:work|home|root|Users)[/]|tmp[/]v)\w")


def machine_paths(text: str) -> list[str]:
    return [
        f"line {number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]


def files_of_the_repository() -> list[Path]:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True, text=True, timeout=60).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return [path for path in ROOT.rglob("*.py") if ".venv" not in path.parts]  # unpacked from an archive
    return [path for name in names.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_machine_paths() -> None:
    found = {}
    for path in files_of_the_repository():
        content = path.read_bytes()
        if b"\0" not in content and (lines := machine_paths(content.decode("utf-8", "replace"))):
            found[str(path.relative_to(ROOT))] = lines
    assert found == {}


@pytest.mark.parametrize("folder", ["work", "home", "root", "Users"])
def test_the_scan_sees(folder: str) -> None:
    assert machine_paths(f"cd /{folder}/somebody/atoll")
    assert machine_paths(f'open("/{folder}/somebody")')


@pytest.mark.parametrize("text", ["docs/work/notes.md", "see example.org/home/page", "$HOME/atoll", "~/atoll"])
def test_the_scan_lets_pass(text: str) -> None:
    assert machine_paths(text) == []
