"""What a shard measures of its part of a contribution, as it tells the lead (`BodyHere`), and as the lead reads it."""

from __future__ import annotations

import numpy as np

from atoll.numerics.screen import MeasuredPart
from atoll.protocol.shard_messages import Body, BodyHere


def body_here(
    body: Body, digest: str, measured: MeasuredPart | None, *, version: int = -1, reason: str = ""
) -> BodyHere:
    """What the lead is told of a body."""
    learner, round, attempt = body
    if measured is None:
        return BodyHere(learner=learner, round=round, attempt=attempt, digest=digest, reason=reason)
    known = measured.committed is not None and measured.moved is not None
    return BodyHere(
        learner=learner,
        round=round,
        attempt=attempt,
        digest=digest,
        squares=measured.squares.tobytes(),
        version=version,
        buffers=measured.committed.tobytes() if known and measured.committed is not None else b"",
        moved=measured.moved.tobytes() if known and measured.moved is not None else b"",
        broken=measured.broken,
    )


def measured_of(here: BodyHere, size: int, base: int) -> MeasuredPart:
    """The same at the lead: `base`: the version that the contribution was made on."""
    known = here.version == base
    return MeasuredPart(
        size,
        np.frombuffer(here.squares, np.float64),
        here.broken,
        np.frombuffer(here.buffers, np.float64) if known else None,
        np.frombuffer(here.moved, np.float64) if known else None,
    )
