"""How a script ends that Atoll cannot go on with: one line for a person, and an exit code."""

from __future__ import annotations

import sys
from typing import NoReturn

INTERRUPTED = 130


def say(text: str) -> None:
    print(f"atoll: {text}", file=sys.stderr, flush=True)


def end_script(text: str, code: int, cause: BaseException) -> NoReturn:
    """Nobody wants a traceback of what the operator did."""
    say(text)
    raise SystemExit(code) from cause
