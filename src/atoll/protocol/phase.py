"""Where a run stands.

Its way: *empty* (the first joiner is asked for version 0, beginning.py) → *running* (rounds.py, one round after
another) → *ending* (budget spent or the operator asked: learners stop, then one unpaced cycle of P rounds brings their
last steps in, ending.py) → *finished*. A new term takes up a run that had begun to end as *running*, until its learners
are back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from atoll.protocol.history import History

Phase = Literal["empty", "running", "ending", "finished"]


@dataclass(slots=True)
class RunPhase:
    phase: Phase
    reason: str = ""
    """Why it ends, once it does."""

    @classmethod
    def of(cls, history: History) -> RunPhase:
        """As far as an earlier term came."""
        return cls("finished" if history.finished else "running" if history.started else "empty", history.ended)
