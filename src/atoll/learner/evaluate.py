"""`atoll.evaluate`: a user's own scorer, run by the evaluator process beside the learners.

In the evaluator process it fetches the global model every so many rounds, scores it, reports the figure, and exits with
the run. In a learner process, and alone, it returns at once: one script serves both.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from atoll.learner.address import find_syncer
from atoll.learner.ending import end_script
from atoll.protocol.errors import AtollError


def evaluate(
    model: nn.Module,
    score: Callable[[Any], float],
    *,
    sample: Callable[[Any], str] | None = None,
) -> None:
    """Score the global model until the run ends: `score(model)` is a loss, `sample(model)` a few lines it wrote."""
    if os.environ.get("ATOLL_ROLE") != "evaluator":
        return
    from atoll.learner.scoring import Evaluator  # brings the network along, which a learner should not wait for

    if not (syncer := find_syncer(os.environ)):
        sys.exit("atoll: which run is to be scored? Name it by ATOLL_JOIN, as its syncer printed it")
    try:
        asyncio.run(Evaluator(syncer, model, score, sample).run())
    except AtollError as error:
        end_script(str(error), error.exit_code, error)
    sys.exit(0)
