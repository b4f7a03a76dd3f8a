"""What is known of losses and metrics, as a part of the summary: a fold over the events `score` and `round`.

The training loss is what learners hand to `learner.step(loss=...)`. One value says little, so that the mean over a
whole cycle of rounds stands at the start and at the end: every fragment once, every member of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from atoll.telemetry.events import Event

Score = tuple[int, float]
"""A round, and the value then."""


def read_scores(scores: Sequence[Event]) -> dict[str, Any]:
    """The summary's fields of what the evaluator found; null where it found nothing."""
    losses = [(int(e["round"]), float(e["loss"])) for e in scores if e.get("loss") is not None]
    best = best_score(losses, "min")
    return {
        "validation_loss_start": losses[0][1] if losses else None,
        "validation_loss_end": losses[-1][1] if losses else None,
        "validation_loss_best": best[1] if best else None,
        "validation_loss_best_round": best[0] if best else None,
        "loss_unit": next((str(e["unit"]) for e in reversed(scores) if e.get("unit")), ""),
        "metrics": _read_metrics(scores),
    }


def _read_metrics(scores: Sequence[Event]) -> dict[str, dict[str, Any]]:
    values: dict[str, list[Score]] = {}
    directions: dict[str, str] = {}
    for event in scores:
        directions |= event.get("directions") or {}
        for name, value in (event.get("metrics") or {}).items():
            if value is not None:
                values.setdefault(name, []).append((int(event["round"]), float(value)))
    return {name: _read_metric(found, directions.get(name)) for name, found in values.items()}


def _read_metric(found: Sequence[Score], direction: str | None) -> dict[str, Any]:
    best = best_score(found, direction)
    return {
        "direction": direction,
        "start": found[0][1],
        "end": found[-1][1],
        "best": best[1] if best else None,
        "best_round": best[0] if best else None,
    }


def best_score(found: Sequence[Score], direction: str | None) -> Score | None:
    """The first of the best ones; None where nobody said what is better."""
    if not found or direction not in ("min", "max"):
        return None
    return (min if direction == "min" else max)(found, key=lambda score: score[1])


def training_losses(rounds: Sequence[Event], fragments: int) -> dict[str, float | None]:
    """The mean of the members' training losses over the first and the last cycle of rounds; of a run of fewer than two
    cycles, over its two halves."""
    many = max(1, min(fragments, len(rounds) // 2))
    return {
        "training_loss_start": _mean_loss(rounds[:many]),
        "training_loss_end": _mean_loss(rounds[-many:]),
    }


def _mean_loss(rounds: Iterable[Event]) -> float | None:
    found = [float(m["loss"]) for event in rounds for m in event["members"] if m.get("loss") is not None]
    return round(fmean(found), 6) if found else None
