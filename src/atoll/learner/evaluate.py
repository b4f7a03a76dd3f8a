"""`atoll.evaluate`: a user's own scorer, run by the evaluator process beside the learners.

In the evaluator process it fetches the global model every so many rounds, scores it, reports the figures, and exits
with the run. In a learner process, and alone, it returns at once: one script serves both.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, get_args

import torch
from torch import nn

from atoll.learner.model import BufferRule, check_model, describe, merged
from atoll.learner.script import end_script, explain_keywords, find_syncer
from atoll.learner.unmerged import digest_unmerged
from atoll.numerics.fragments import difference
from atoll.protocol.errors import AtollError, PlanError
from atoll.protocol.limits import LONGEST, Direction
from atoll.protocol.messages import TensorSpec


class ScoredModel(Protocol):
    """The model that an evaluator scores, of whatever library the scorer is written for."""

    def fit_run(self, tensors: Sequence[TensorSpec], frozen: str) -> Mapping[str, torch.Tensor]:
        """Where the run's tensors are written to, by name; PlanError: they are not those of this model. `frozen` is the
        digest of what the run does not merge."""
        ...

    def hand_over(self) -> Any:
        """What the scorer is given, once all of them are written."""
        ...


class ScoredModule:
    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def fit_run(self, tensors: Sequence[TensorSpec], frozen: str) -> Mapping[str, torch.Tensor]:
        rules: tuple[BufferRule, ...] = (None, "local", "mean", "first")  # which one, the learners' script says
        rule = next((one for one in rules if difference(describe(self._model, one), tensors) is None), None)
        if (reason := difference(describe(self._model, rule), tensors)) is not None:
            raise PlanError(reason)
        if frozen and digest_unmerged(self._model, rule) != frozen:
            raise PlanError(
                "the evaluator's frozen parameters or buffers are not those of the run's first learner: "
                "load them from the same file, or draw them after the same torch.manual_seed"
            )
        return merged(self._model, rule)

    def hand_over(self) -> nn.Module:
        return self._model


@explain_keywords
def evaluate(
    model: nn.Module,
    score: Callable[[Any], float | Mapping[str, float]],
    *,
    sample: Callable[[Any], str] | None = None,
    directions: Mapping[str, Direction] | None = None,
    unit: str = "",
    ema: float = 0.0,
) -> None:
    """Score the global model until the run ends.

    `score(model)` is a loss, or several figures by name: {"loss": 0.31, "accuracy": 0.91}. The loss is what the run is
    guarded by. The model is in the mode in which the script left it: `score` may call `model.eval()`. `directions` says
    which values of the others are better, {"accuracy": "max"}: then the best one is told. `sample(model)` is a few
    lines that the model wrote. `unit` is that of the loss, as it is to be shown. `ema=0.9` keeps an exponential moving
    average of the scored models by this decay and scores it too, as "ema_loss" and so on; `atoll export --ema` writes
    it.
    """
    check_model(model)
    score_run(ScoredModule(model), score, sample=sample, directions=directions, unit=unit, ema=ema)


def score_run(
    scored: ScoredModel,
    score: Callable[[Any], float | Mapping[str, float]],
    *,
    sample: Callable[[Any], str] | None,
    directions: Mapping[str, Direction] | None,
    unit: str,
    ema: float,
) -> None:
    """In the evaluator process, until the run ends, and the script with it."""
    if not callable(score):
        raise TypeError(
            f"'score' is of type {type(score).__name__}: give the function that scores a model, without calling it"
        )
    directions = dict(directions or {})
    _check_words(directions, unit)
    if not 0.0 <= ema < 1.0:
        raise ValueError(f"ema = {ema} is no decay: 0.9 keeps nine tenths of the average at each score, 0 keeps none")
    if os.environ.get("ATOLL_ROLE") != "evaluator":
        return
    # These bring the network along, which a learner should not wait for.
    from atoll.learner.averaged_model import AveragedModel
    from atoll.learner.evaluator import BestModel, Evaluator
    from atoll.store.rundir import EVALUATOR, LEARNERS, RunDir, checked_name

    average = AveragedModel(ema) if ema else None
    if not (syncer := find_syncer(os.environ)):
        sys.exit("atoll: which run is to be scored? Name it by ATOLL_JOIN, as its syncer printed it")
    root = LEARNERS.absolute()  # the script may change the current folder

    def find_folder(run: str) -> RunDir:
        """The run's own folder or --folder, where one of them is named."""
        if named := os.environ.get("ATOLL_MODELS"):
            return RunDir(Path(named))
        with suppress(OSError):
            root.mkdir(mode=0o700, exist_ok=True)
        return RunDir(root / checked_name(run) / checked_name(os.environ.get("ATOLL_LEARNER") or EVALUATOR))

    try:
        asyncio.run(
            Evaluator(
                syncer,
                scored,
                score,
                sample,
                directions,
                unit,
                average=average,
                best=BestModel(),
                find_folder=find_folder,
            ).run()
        )
    except AtollError as error:
        end_script(str(error), error.exit_code, error)
    sys.exit(0)


def _check_words(directions: Mapping[str, Direction], unit: str) -> None:
    """In every process, so that a mistake is told when the script starts and not with the first score."""
    for name, direction in directions.items():
        if direction not in get_args(Direction):
            raise ValueError(f"directions: {name!r} is {direction!r}, and must be 'min' or 'max'")
    if len(unit) > LONGEST:
        raise ValueError(f"unit is {len(unit)} characters long, and may have {LONGEST}")
