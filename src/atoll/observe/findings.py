"""What a verification has to say: the one thing that is wrong, remarks on what is not, and how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.protocol.errors import AtollError

Progress = Callable[[str, int], None]
"""Told what is being counted, and how many there are so far."""


class Wrong(AtollError):
    """Something in a run's files that cannot be; the text names it and its place."""


def _to_nobody(what: str, number: int) -> None:
    pass


@dataclass
class Findings:
    progress: Progress = _to_nobody
    remarks: list[str] = field(default_factory=list)
    """What is no mistake and still worth a word."""

    def remark(self, text: str) -> None:
        self.remarks.append(text)
