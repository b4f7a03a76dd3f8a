"""What it costs those who train to take a newcomer in.

A newcomer needs the weights and the two moments of the inner optimizer: three copies of the model, one after the other
over its link. In elastic data-parallel everybody stands still meanwhile, as the next step needs all of them: 3c steps,
c being the steps that one copy takes.

In Decoupled the others go on training. So what the newcomer was told grows old, and it also needs the fragments that
changed meanwhile: one more copy, counted whole. It may be H rounds behind (the recovery bound), which hides H steps of
all this; what goes beyond is downtime, max(0, 4c − H), counted as steps in which the others stand still for it.
Atoll's learners never do: there a newcomer that is further behind starts over, at last with the syncer's weights only.

`grow` plays this as it happens and never looks at the closed forms; its tests do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from atoll.protocol.errors import ConfigError
from atoll.simulate.bandwidth import above_0

Method = Literal["elastic-data-parallel", "decoupled"]
METHODS: tuple[Method, ...] = get_args(Method)
STATE = ("weights", "first moment", "second moment")
"""What a newcomer needs, each as large as the model."""
CHANGED = "fragments that changed"


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time in which one copy is on the link and the others do one thing."""

    start: float
    """In steps since the newcomer came."""
    steps: float
    """How long it lasts."""
    copy: str
    training: bool
    """The others; otherwise they stand still."""


def steps_per_copy(gbit: float, gbit_s: float, step_s: float) -> float:
    """c: the steps in which a link carries one copy of the model."""
    for name, value in (("the model's size", gbit), ("gbit_s", gbit_s), ("step_s", step_s)):
        above_0(name, value)
    return gbit / (gbit_s * step_s)


def grow(method: Method, copy_steps: float, sync_every: int) -> list[Stretch]:
    """Everything that happens from the moment a newcomer comes until it trains."""
    above_0("copy_steps", copy_steps)
    if sync_every < 1:
        raise ConfigError(f"sync_every = {sync_every} is too small: the least is 1")
    queue = [*STATE, CHANGED] if method == "decoupled" else [*STATE]
    may_lag = float(sync_every) if method == "decoupled" else 0.0
    now = behind = 0.0
    story = []
    for copy in queue:
        left = copy_steps
        while left > 0:
            training = behind < may_lag
            passed = min(left, may_lag - behind) if training else left
            story.append(Stretch(now, passed, copy, training))
            now, left = now + passed, left - passed
            behind = min(may_lag, behind + passed)
    return story


def downtime_steps(story: list[Stretch]) -> float:
    """The steps in which the others stand still."""
    return math.fsum(stretch.steps for stretch in story if not stretch.training)
