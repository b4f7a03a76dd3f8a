"""What a shard tells the others about its part of a contribution, so that they can screen and merge theirs
(docs/adr/0031).

- Of a body that has come, the lead is told its norms (`BodyHere`): it screens by those of all parts.
- While a round is merged in a thread, the norms of pieces that go on in other shards are needed. The thread gives its
  own and waits; the event loop tells the lead, and hands over what all gave, or that nothing comes of the order. Every
  shard of a round asks as often as the others, so the turns of an order say what belongs together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

import numpy as np

from atoll.numerics.arrays import DoubleArray
from atoll.numerics.screen import MeasuredPart
from atoll.protocol.messages import ContributionKey
from atoll.protocol.shard_messages import BodyHere

WAIT_S = 60.0
"""For the slowest of the others. Those that are gone are noticed sooner: their channel is closed."""


def body_here(
    body: ContributionKey, digest: str, measured: MeasuredPart | None, *, version: int = -1, reason: str = ""
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


class NormGathering:
    """Of one order. Made on the event loop, before its thread starts."""

    def __init__(self, say: Callable[[int, bytes], None]) -> None:
        """`say` is called on the event loop: with the turn, and what this shard gives."""
        self._say, self._loop = say, asyncio.get_running_loop()
        self._turns: list[Future[Sequence[bytes]]] = [Future()]
        """The last one is what the thread will wait for next, or does."""
        self._over = False

    def gather(self, squares: DoubleArray) -> list[DoubleArray]:
        """In the thread. ValueError: nothing comes of the order."""
        turn, came = len(self._turns) - 1, self._turns[-1]
        with suppress(RuntimeError):  # the loop is closed: this process ends
            self._loop.call_soon_threadsafe(self._say, turn, squares.tobytes())
        try:
            found = came.result(WAIT_S)
        except TimeoutError:
            raise ValueError(f"a shard did not tell its norms within {WAIT_S:g} s") from None
        self._turns.append(Future())
        if self._over:
            self.abandon()
        return [np.frombuffer(one, np.float64) for one in found]

    def give(self, turn: int, squares: Sequence[bytes]) -> None:
        if turn == len(self._turns) - 1:
            with suppress(InvalidStateError):
                self._turns[turn].set_result(squares)

    def abandon(self) -> None:
        self._over = True
        with suppress(InvalidStateError):
            self._turns[-1].set_exception(ValueError("the order was taken back while norms were waited for"))
