"""What a learner has done in its present life: steps, tokens, seconds, the newest loss.

All of it only grows: where one report is left out, a later one says it all. Seconds are the script's own, from the end
of one call of Atoll to the beginning of the next.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from atoll.learner.losses import Losses
from atoll.protocol.bounds import near


class Tally:
    def __init__(self) -> None:
        self.t = self.tokens = 0
        self.busy_s = 0.0
        self._losses = Losses()
        self._left_at = 0.0

    @property
    def loss(self) -> float | None:
        return near(self._losses.latest())

    def train(self) -> None:
        """The script goes on from here."""
        self._left_at = time.perf_counter()

    def stepped(self, tokens: int) -> None:
        self.busy_s += time.perf_counter() - self._left_at
        self.t += 1
        self.tokens += tokens

    def add_loss(self, loss: torch.Tensor | float | None) -> None:
        self._losses.add(loss)

    def stand(self, place: dict[str, Any]) -> None:
        """Go on after the step at which this place (place.py) was saved."""
        self.t, self.tokens, self.busy_s = place["t"], place["total"], place["busy_s"]
