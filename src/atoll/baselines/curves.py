"""Scores of several runs over the tokens that each had merged, in one table.

Runs are compared by the validation loss. Where a scorer gives none, they are compared by its first metric that has a
direction, which is also what the best model is kept by (learner/evaluator.py).
"""

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
from atoll.telemetry.events import Event
from atoll.telemetry.round_members import count_merged_tokens

ROWS = 8
LOSS = "loss"
NEEDED = 'atoll.evaluate with a figure "loss", or with directions={"accuracy": "max"} for a metric'


@dataclass(frozen=True, slots=True)
class ScoreCurve:
    run: Path
    algorithm: str
    scores: tuple[tuple[int, float], ...]
    """Tokens merged and the figure then, with rising tokens."""
    wall_s: float | None
    figure: str = LOSS
    direction: str = "min"
    merged: int = 0
    """Tokens merged in all."""
    stale: bool = False
    """Whether the run closed without a score of its last model."""

    def score_at(self, tokens: float) -> float:
        """Return the figure on the line between the two scores around it."""
        place = bisect_left(self.scores, (tokens,))
        (after, high), (before, low) = self.scores[place], self.scores[max(0, place - 1)]
        return high if after == before else low + (high - low) * (tokens - before) / (after - before)

    def describe(self) -> dict[str, Any]:
        """Return the document of the run. The loss keeps the key that it had before metrics could be compared."""
        document = {"run": str(self.run), "algorithm": self.algorithm, "wall_s": self.wall_s, "figure": self.figure}
        document |= {"merged": self.merged, "last_model_scored": not self.stale}
        key = "losses" if self.figure == LOSS else "scores"
        return {**document, "direction": self.direction, key: self.scores}


def find_figures(scores: Sequence[Event]) -> dict[str, str]:
    """Return the figures that runs can be compared by, with their directions; the loss first."""
    found = {LOSS: "min"} if any(event.get("loss") is not None for event in scores) else {}
    for event in scores:
        metrics, directions = event.get("metrics") or {}, event.get("directions") or {}
        found |= {name: str(better) for name, better in directions.items() if metrics.get(name) is not None}
    return found


def find_reason_not_to_compare(events: Sequence[Event]) -> str:
    """Return why the scores of a run that goes on will never be comparable; empty: they are, or there is none yet."""
    for event in events:
        if event["kind"] == "warning" and event.get("unscored"):
            return str(event["text"]).removesuffix("; the run goes on")
        if event["kind"] == "score":
            # A score that is not finite may be followed by one that is.
            if LOSS in find_figures([event]) or event.get("not_finite") or event.get("directions"):
                return ""
            names = ", ".join(event.get("metrics") or {})
            return f"its scorer gives {names or 'no figure'}, and says of none whether more or less of it is better"
    return ""


def read_curves(folders: Sequence[Path]) -> list[ScoreCurve]:
    """Return the curves of one figure that all runs have. ConfigError: there is none, or one is no run."""
    runs = [read_run(folder) for folder in folders]
    found = [find_figures(select_kinds(run.timeline, "score")) for run in runs]
    for folder, figures in zip(folders, found, strict=True):
        if not figures:
            raise ConfigError(f"{folder} has no score to compare by: its script has to call {NEEDED}")
    shared = [name for name in found[0] if all(figures.get(name) == found[0][name] for figures in found)]
    if not shared:
        each = "; ".join(f"{run}: {', '.join(names)}" for run, names in zip(folders, found, strict=True))
        raise ConfigError(f"the runs have no figure in common ({each}): compare runs of the same scorer")
    return [read_curve(folder, shared[0], found[0][shared[0]]) for folder in folders]


def read_curve(folder: Path, figure: str = LOSS, direction: str = "min") -> ScoreCurve:
    """ConfigError: there is no run, or none of its scores has the figure."""
    run = read_run(folder)
    fragments = int(run.summary["settings"].get("fragments") or 0) or 1
    rounds, merged = [-1], [0.0]
    for event in sorted(select_kinds(run.timeline, "round"), key=lambda event: int(event["round"])):
        tokens = count_merged_tokens(event) / fragments
        rounds.append(int(event["round"]))
        merged.append(merged[-1] + tokens)
    # A score is of the rounds before the one that it names, whenever it was told. Of equal tokens the last one counts.
    scores = [(event, _value_of(event, figure)) for event in select_kinds(run.timeline, "score")]
    scored = {
        round(merged[bisect_left(rounds, int(e["round"])) - 1]): value for e, value in scores if value is not None
    }
    if not scored:
        raise ConfigError(f"{folder} was never scored by {figure}: its script has to call {NEEDED}")
    algorithm = str(tomllib.loads(run.settings).get("algorithm", "decoupled"))
    found, stale = tuple(sorted(scored.items())), run.summary["validation_stale_round"] is not None
    wall_s, in_all = run.summary.get("wall_s"), round(merged[-1])
    return ScoreCurve(folder, algorithm, found, wall_s, figure, direction, in_all, stale)


def _value_of(score: Event, figure: str) -> float | None:
    value = score.get(LOSS) if figure == LOSS else (score.get("metrics") or {}).get(figure)
    return None if value is None else float(value)


def choose_tokens(curves: Sequence[ScoreCurve]) -> list[float]:
    """Return evenly spaced counts of tokens at which every run has a score. ConfigError: there is none."""
    first, last = max(one.scores[0][0] for one in curves), min(one.scores[-1][0] for one in curves)
    if first > last:
        names = ", ".join(str(one.run) for one in curves)
        raise ConfigError(f"{names} were scored at no common count of tokens: train them for the same --tokens")
    spread = [first + (last - first) * row / (ROWS - 1) for row in range(ROWS)]
    return sorted({*spread[:-1], last})
