"""Elastic data-parallel training: who is left goes on without the dead, and takes them in again when they are back."""

from __future__ import annotations

from atoll.launch.baselines.run import BaselineRun


class ElasticRun(BaselineRun):
    method = "elastic-data-parallel"

    def after_death(self, rank: int) -> None:
        """The others found their connections closed, and wait to be told who is left."""

    def group_wanted(self) -> tuple[int, ...]:
        """All that are there; the first group waits for everybody."""
        if not self.generation and len(self.ready) < self.world:
            return ()
        return tuple(sorted(self.ready))
