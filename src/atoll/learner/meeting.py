"""What the ranks of a learner agree on between two steps: how many frames all of them have. Neither torch nor a process
group is known here (ranks.py has both): the fault simulator runs it as it is.

Rules kept here:
- frames are carried out in the order in which they came, each once, and only those that all ranks have;
- what rank 0 says of the run counts for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from atoll.mailbox.channel import RunProgress, ToTraining


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a rank says after a step."""

    frames: int = 0
    """Received from its courier so far, of those that all ranks carry out at the same step."""
    tokens: int = 0
    """Of its own step, where no other rank trained on the same data."""
    leaving: bool = False
    vote: bool = False
    committed: int = 0
    progress: float = 0.0
    global_step: int = 0
    """Of these, rank 0's count."""


@dataclass(frozen=True, slots=True)
class AgreedFacts:
    frames: int
    """That all ranks have."""
    tokens: int
    """Of all."""
    leaving: bool
    """Some rank was asked to leave."""
    first: RankFacts
    """What rank 0 said."""


def agree_on(told: Sequence[RankFacts]) -> AgreedFacts:
    """In order of rank."""
    return AgreedFacts(
        frames=min(one.frames for one in told),
        tokens=sum(one.tokens for one in told),
        leaving=any(one.leaving for one in told),
        first=told[0],
    )


@dataclass(slots=True)
class Meeting:
    """What a rank has received, and how much of it all ranks have."""

    received: int = 0
    agreed: int = 0
    carried_out: int = 0
    waiting: deque[ToTraining] = field(default_factory=deque)
    heard: RunProgress | None = None
    """The newest that the courier said of the run."""
    leaving: bool = False
    """All ranks know that some rank was asked to leave."""

    def add(self, frame: ToTraining) -> None:
        self.waiting.append(frame)
        self.received += 1

    def take_agreed(self) -> list[ToTraining]:
        count = self.agreed - self.carried_out
        self.carried_out = self.agreed
        return [self.waiting.popleft() for _ in range(count)]
