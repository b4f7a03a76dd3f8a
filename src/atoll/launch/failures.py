"""Why a script failed, as its log tells: the last traceback in it.

A mistake in a script is the same on every learner, and a restart would only repeat it. So a run in which nobody has
made a step ends at once when every learner fails with the same exception at the same line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+)')
_EXCEPTION = re.compile(r"(?P<kind>[A-Za-z_][\w.]*)(?::\s(?P<text>.*))?")
_LIBRARIES = ("site-packages", "dist-packages", "/lib/python3")
WORDS = 300
"""Characters of an exception's message that are shown; the log has the whole of it."""


@dataclass(frozen=True, slots=True)
class ScriptError:
    kind: str
    """The exception's class."""
    text: str
    """The first line of its message: it may differ from learner to learner."""
    file: str
    line: int
    """Where the script was: the innermost frame that is not in a library."""

    @property
    def summary(self) -> str:
        """The last line of the traceback, and where that was."""
        words = f"{self.kind}: {self.text}" if self.text else self.kind
        return f"{words[:WORDS]} ({Path(self.file).name}, line {self.line})"

    def is_same_mistake(self, other: ScriptError) -> bool:
        return (self.kind, self.file, self.line) == (other.kind, other.file, other.line)


def read_script_error(log: str) -> ScriptError | None:
    """The exception that the last traceback of a log ends with; None: there is no traceback."""
    lines = log.splitlines()
    frames = [(number, found) for number, line in enumerate(lines) if (found := _FRAME.match(line))]
    if not frames:
        return None
    last = frames[-1][0]
    ending = next((line for line in lines[last + 1 :] if line and not line[0].isspace()), "")
    if (exception := _EXCEPTION.fullmatch(ending)) is None:
        return None
    own = [found for number, found in frames if number >= _start(lines, last) and not _in_library(found["file"])]
    place = own[-1] if own else frames[-1][1]
    return ScriptError(exception["kind"], exception["text"] or "", place["file"], int(place["line"]))


def find_shared_error(errors: Iterable[ScriptError | None]) -> ScriptError | None:
    """The mistake that all of them made; None: one made another, or none yet."""
    first, *others = errors
    if first is None or not all(one is not None and first.is_same_mistake(one) for one in others):
        return None
    return first


def _start(lines: list[str], last: int) -> int:
    """Where the traceback begins that the line `last` is a part of."""
    return next((n for n in range(last, -1, -1) if lines[n].startswith("Traceback (most recent call last)")), last)


def _in_library(file: str) -> bool:
    return file.startswith("<") or any(part in file for part in _LIBRARIES)
