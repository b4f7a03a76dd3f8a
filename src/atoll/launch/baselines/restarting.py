"""Data-parallel training as it is mostly done: one dies, all are killed and start again from the last checkpoint."""

from __future__ import annotations

import time
from typing import Any

from atoll.launch.baselines.run import BaselineRun


class RestartingRun(BaselineRun):
    method = "data-parallel"

    def __init__(self, *arguments: Any, checkpoint_every: int = 0, **named: Any) -> None:
        """`checkpoint_every`: steps between two checkpoints; 0: one about every 10 s."""
        super().__init__(*arguments, **named)
        self._checkpoint_every = checkpoint_every

    def environment(self, rank: int) -> dict[str, str]:
        path = self.out.path / "checkpoint.safetensors"
        return {"ATOLL_CHECKPOINT": str(path), "ATOLL_CHECKPOINT_EVERY": str(self._checkpoint_every)}

    def after_death(self, rank: int) -> None:
        for other in range(self.world):
            if other not in self._due and other not in self._doomed:
                self.doom(other)

    def starts_due(self) -> list[int]:
        """All together, once all are dead and every host is there."""
        everybody = len(self._due) == self.world and time.monotonic() >= max(self._due.values())
        return list(self._due) if everybody else []

    def group_wanted(self) -> tuple[int, ...]:
        """Everybody or nobody."""
        return tuple(range(self.world)) if len(self.ready) == self.world else ()
