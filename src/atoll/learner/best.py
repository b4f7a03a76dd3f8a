"""model-best.safetensors: the global model with the best score so far, kept by the evaluator that scored it.

It is kept at once: by the end of a run nothing else holds those values, since outer gradients are trimmed at cuts. What
is written are the fragments as they were fetched, not the model's own parameters, which may be of another type; the
file says which version of each fragment it holds. The journal has the digest of every version, for ever, so that
`atoll verify` can tell whether the file holds what the run had committed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import Plan, elements
from atoll.protocol.bounds import Direction
from atoll.protocol.errors import AtollError
from atoll.store.rundir import facts_of_model, read_model_facts, save_model

LOSS = "loss"


@dataclass(frozen=True, slots=True)
class Figure:
    """What a model is judged by."""

    name: str
    value: float
    direction: Direction

    def is_better(self, than: float) -> bool:
        return self.value < than if self.direction == "min" else self.value > than


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """The fragments that were scored, and of which versions they are."""

    run: str
    round: int
    plan: Plan
    values: Sequence[FloatArray]
    versions: Sequence[int]

    def tensors(self) -> dict[str, FloatArray]:
        return {
            tensor.name_in_model: self.values[part.index][start : start + elements(tensor)].reshape(tensor.shape)
            for part in self.plan.fragments
            for tensor, start in zip(part.tensors, part.offsets, strict=True)
        }


def deciding_figure(
    loss: float | None, metrics: Mapping[str, float | None], directions: Mapping[str, Direction]
) -> Figure | None:
    """The loss; where the scorer gives none, the first metric of which it says what is better."""
    if loss is not None:
        return Figure(LOSS, loss, "min")
    declared = ((name, metrics.get(name), direction) for name, direction in directions.items())
    return next((Figure(name, value, address) for name, value, address in declared if value is not None), None)


class BestModel:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._complained = False

    def keep(self, figure: Figure, model: FetchedModel) -> bool:
        """Write it down if it is better than what lies there; a disk that fails costs the file, not the scores."""
        if not self._is_better(figure, model.run):
            return False
        facts = facts_of_model(model.run, model.round, model.versions)
        facts |= {"figure": figure.name, "score": repr(figure.value)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_model(self.path, model.tensors(), facts)
        except (OSError, AtollError) as error:
            if not self._complained:
                print(f"atoll: the best model is not kept: {error}", file=sys.stderr, flush=True)
            self._complained = True
            return False
        return True

    def _is_better(self, figure: Figure, run: str) -> bool:
        """What another evaluator of the same run has left counts; of another run, or by another figure, it does not."""
        known = read_model_facts(self.path)
        if known.get("run") != run or known.get("figure") != figure.name:
            return True
        try:
            return figure.is_better(float(known["score"]))
        except (KeyError, ValueError):
            return True
