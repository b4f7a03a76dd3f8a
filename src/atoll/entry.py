"""`atoll`, as it is installed. A join link on the command line is a secret, and the list of processes is for everybody:
before anything else it is moved to the environment, and the process starts anew without it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

OPTION, VARIABLE = "--join", "ATOLL_JOIN"


def main() -> None:
    words, link = without_link(sys.argv)
    if link is not None:
        os.environ[VARIABLE] = link
        os.execv(sys.executable, [sys.executable, *words])
    from atoll.cli import main as run

    run()


def without_link(words: Sequence[str]) -> tuple[list[str], str | None]:
    """The words without `--join LINK`, and the link. What follows `--` is the script's own."""
    own = list(words[: words.index("--")] if "--" in words else words)
    rest = list(words[len(own) :])
    for place, word in enumerate(own):
        if word == OPTION and place + 1 < len(own):
            return [*own[:place], *own[place + 2 :], *rest], own[place + 1]
        if word.startswith(f"{OPTION}="):
            return [*own[:place], *own[place + 1 :], *rest], word.removeprefix(f"{OPTION}=")
    return [*own, *rest], None
