"""`atoll`, as it is installed. A join link on the command line is a secret, and the list of processes is for everybody:
before anything else it is moved to the environment, and the process starts anew without it. There is one place for it
there: two different links on one line are refused. Until then everybody sees it, so nothing is imported that is not
needed; a link in a file (--join FILE) or in ATOLL_JOIN is never on the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

OPTION, JOIN = "--join", "ATOLL_JOIN"
SCHEME, LINK = "atoll://", "ATOLL_LINK"
"""A link elsewhere among the words; `atoll://` alone stands for it there (fabric/address.py)."""


def main() -> None:
    try:
        words, secrets = without_links(sys.argv)
    except TwoLinks as error:
        print(f"atoll: {error}", file=sys.stderr)
        sys.exit(2)
    if secrets:
        os.environ.update(secrets)
        own = ["-m", "atoll"] if words[0].endswith("__main__.py") else [words[0]]  # python -m atoll
        os.execv(sys.executable, [sys.executable, *own, *words[1:]])
    from atoll.cli import main as run

    run()


class TwoLinks(Exception):
    """Neither of them is named: they are secrets."""


def without_links(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words without links, and the environment that has them instead. What follows `--` is the script's own."""
    own = list(words[: words.index("--")] if "--" in words else words)
    kept: list[str] = []
    secrets: dict[str, str] = {}
    coming = iter(own)
    for word in coming:
        option, equals, value = word.partition("=")
        if word == OPTION and (link := next(coming, None)) is not None:
            secrets[JOIN] = link
        elif option == OPTION and equals:
            secrets[JOIN] = value
        elif word.startswith(SCHEME) and "@" in word:
            kept.append(_moved(word, secrets))
        elif option.startswith("--") and value.startswith(SCHEME) and "@" in value:
            kept.append(f"{option}={_moved(value, secrets)}")
        else:
            kept.append(word)
    return [*kept, *words[len(own) :]], secrets


def _moved(link: str, secrets: dict[str, str]) -> str:
    if secrets.setdefault(LINK, link) != link:
        raise TwoLinks(
            "two different join links on one command line: give one of them, and the other to a second command"
        )
    return SCHEME
