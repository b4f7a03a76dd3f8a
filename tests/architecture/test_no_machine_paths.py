"""No file of the repository names a place on somebody's machine: it would work there and nowhere else."""

from __future__ import annotations

import re

import pytest
from tests.architecture.pages import read_files

# The leading slash is a class of its own, so that this line does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w.\-])[/](?:(?:work|home|root|Users)[/]|tmp[/]v)\w")


def machine_paths(text: str) -> list[str]:
    return [
        f"line {number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]


def test_no_machine_paths() -> None:
    assert {name: lines for name, text in read_files().items() if (lines := machine_paths(text))} == {}


@pytest.mark.parametrize("folder", ["work", "home", "root", "Users"])
def test_the_scan_sees(folder: str) -> None:
    assert machine_paths(f"cd /{folder}/somebody/atoll")
    assert machine_paths(f'open("/{folder}/somebody")')


@pytest.mark.parametrize("text", ["docs/work/notes.md", "see example.org/home/page", "$HOME/atoll", "~/atoll"])
def test_the_scan_lets_pass(text: str) -> None:
    assert machine_paths(text) == []
