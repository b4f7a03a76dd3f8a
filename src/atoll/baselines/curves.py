"""Validation losses of several runs over the tokens that each had merged, in one table."""

from __future__ import annotations

import tomllib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.observe.report.reading import read_run
from atoll.observe.timeline import select_kinds
from atoll.protocol.errors import ConfigError
from atoll.telemetry.round_members import count_merged_tokens

ROWS = 8


@dataclass(frozen=True, slots=True)
class LossCurve:
    run: Path
    algorithm: str
    losses: tuple[tuple[int, float], ...]
    """Tokens merged and the loss then, with rising tokens."""
    wall_s: float | None

    def loss_at(self, tokens: float) -> float:
        """Return the loss on the line between the two scores around it."""
        place = bisect_left(self.losses, (tokens,))
        (after, high), (before, low) = self.losses[place], self.losses[max(0, place - 1)]
        return high if after == before else low + (high - low) * (tokens - before) / (after - before)

    def describe(self) -> dict[str, Any]:
        return {"run": str(self.run), "algorithm": self.algorithm, "wall_s": self.wall_s, "losses": self.losses}


def read_curve(folder: Path) -> LossCurve:
    """ConfigError: there is no run, or nothing scored it with a loss."""
    run = read_run(folder)
    fragments = int(run.summary["settings"].get("fragments") or 0) or 1
    rounds, merged = [-1], [0.0]
    for event in sorted(select_kinds(run.timeline, "round"), key=lambda event: int(event["round"])):
        tokens = count_merged_tokens(event) / fragments
        rounds.append(int(event["round"]))
        merged.append(merged[-1] + tokens)
    # A score is of the rounds before the one that it names, whenever it was told. Of equal tokens the last one counts.
    scores = [event for event in select_kinds(run.timeline, "score") if event.get("loss") is not None]
    scored = {round(merged[bisect_left(rounds, int(e["round"])) - 1]): float(e["loss"]) for e in scores}
    if not scored:
        raise ConfigError(f"{folder} has no validation loss: its script has to call atoll.evaluate with a loss")
    algorithm = str(tomllib.loads(run.settings).get("algorithm", "decoupled"))
    return LossCurve(folder, algorithm, tuple(sorted(scored.items())), run.summary.get("wall_s"))


def choose_tokens(curves: Sequence[LossCurve]) -> list[float]:
    """Return evenly spaced counts of tokens at which every run has a loss. ConfigError: there is none."""
    first, last = max(one.losses[0][0] for one in curves), min(one.losses[-1][0] for one in curves)
    if first > last:
        names = ", ".join(str(one.run) for one in curves)
        raise ConfigError(f"{names} were scored at no common count of tokens: train them for the same --tokens")
    spread = [first + (last - first) * row / (ROWS - 1) for row in range(ROWS)]
    return sorted({*spread[:-1], last})
