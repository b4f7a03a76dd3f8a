"""The pages and files of the project, for the tests that hold them against the code."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def read_files() -> dict[str, str]:
    """Every text file of the repository, by its name; of an unpacked sdist, what pyproject.toml puts into one."""
    found = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in _find_files() if path.is_file()}
    return {name: content.decode("utf-8", "replace") for name, content in found.items() if b"\0" not in content}


def _find_files() -> list[Path]:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True, text=True, timeout=60).stdout
        return [ROOT / name for name in names.split("\0") if name]
    except (FileNotFoundError, subprocess.CalledProcessError):
        sdist = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
        tops = [path for pattern in sdist["include"] for path in ROOT.glob(pattern.removeprefix("/"))]
        return [path for top in tops for path in (top.rglob("*") if top.is_dir() else [top])]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(text: str) -> str:
    """Without fenced blocks."""
    return FENCE.sub("", text)


def table_after(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table behind a text, row by row, without its head."""
    _, found, rest = text.partition(heading)
    assert found, f"{heading!r} is not on the page"
    table = re.search(r"^\| --- .*\n((?:\|.*\n)*)", rest, re.MULTILINE)
    assert table is not None, f"no table behind {heading!r}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]
