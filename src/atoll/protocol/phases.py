"""Phases of training: H, τ, adoption and the outer step as a schedule over the run's progress.

A run may begin with a small H and plain averaging, which costs bandwidth and wins loss, and go on with a large H. Each
phase lasts until a share of the run's budget is spent; what it does not name is as in the run's own settings, which
hold after the last one. A change of phase is a change of settings: journaled as a ChangedRecord, followed by whoever
reads the journal, and told to the learners. It is made while no round is between freezing and commit, so a round is
merged under the settings that it was frozen under. Nobody waits for it but rounds.

A run never goes back to an earlier phase, also where its budget is raised later.

The last cycle of a run is like a phase too: its outer steps do not look ahead (docs/adr/0039). Where the run goes on
later, its own optimizer comes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from atoll.protocol.errors import ConfigError
from atoll.protocol.limits import MAX_COUNTER, ChoiceName


class TrainingPhase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    until: float
    """It ends when this share of the run's budget is spent."""
    sync_every: int | None = None
    overlap: int | None = None
    adopt: ChoiceName | None = None
    merge: ChoiceName | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.until <= 1.0:
            raise ConfigError(f"until = {self.until} of a phase is no share of the run: 0.15 ends it after 15 %")
        if self.sync_every is not None and not 1 <= self.sync_every < MAX_COUNTER:
            raise ConfigError(f"sync_every = {self.sync_every} of a phase is too small: the least is 1")
        if self.overlap is not None and not 0 <= self.overlap < MAX_COUNTER:
            raise ConfigError(f"overlap = {self.overlap} of a phase is too small: the least is 0")
        if self.outer_lr is not None and not 0.0 < self.outer_lr < MAX_COUNTER:
            raise ConfigError(f"outer_lr = {self.outer_lr} of a phase must be a number above 0, such as 1")
        if self.outer_momentum is not None and not 0.0 <= self.outer_momentum < 1.0:
            raise ConfigError(f"outer_momentum = {self.outer_momentum} of a phase must be at least 0 and below 1")

    @property
    def outer(self) -> dict[str, str | float]:
        """What it names of the outer settings."""
        named = {"merge": self.merge, "lr": self.outer_lr, "momentum": self.outer_momentum}
        return {key: value for key, value in named.items() if value is not None}

    def describe(self) -> str:
        named = {key: getattr(self, key) for key in self.__struct_fields__ if key != "until"}
        return ", ".join(f"{key} = {value}" for key, value in named.items() if value is not None)


WARM_H = 2
"""Of a warm start. The shorter the better, and bandwidth decides what comes of it (docs/algorithm.md)."""


def warm_start(share: float, overlap: int = 1) -> TrainingPhase:
    """The first part of a run at a small H with plain averaging, nothing dropped."""
    return TrainingPhase(
        until=share, sync_every=WARM_H, overlap=overlap, adopt="carry", merge="mean", outer_lr=1.0, outer_momentum=0.0
    )


def check_order(phases: Sequence[TrainingPhase]) -> None:
    ends = [phase.until for phase in phases]
    if any(later <= earlier for earlier, later in pairwise(ends)):
        raise ConfigError(f"phases must end one after the other; here until is {', '.join(map(str, ends))}")


def due_phase(phases: Sequence[TrainingPhase], progress: float) -> int:
    """Which phase the run is to be in; 1 is the first."""
    return min(len(phases), 1 + sum(progress >= phase.until for phase in phases))


OUTER_PHASED = ("merge", "lr", "momentum")
"""What a phase may change of the outer settings."""
OuterValues = Mapping[str, str | float | bool]


def outer_in(phase: TrainingPhase, own: OuterValues, now: OuterValues) -> dict[str, str | float | bool]:
    """The outer settings of a phase. `own`: as the run began; `now`: with what an operator has set since, which stays
    but for what phases may change."""
    set_since = {key: value for key, value in now.items() if key not in OUTER_PHASED}
    return {**own, **set_since, **phase.outer}


LAST_OPTIMIZERS = {"nesterov": "nesterov-last"}
"""By outer optimizer, the one of the last cycle (numerics/outers/), with the same state; any other stays as it is."""


def outer_at_end(now: OuterValues) -> dict[str, str | float | bool]:
    """The outer settings of the last cycle."""
    name = str(now.get("optimizer", ""))
    return {**now, "optimizer": LAST_OPTIMIZERS[name]} if name in LAST_OPTIMIZERS and now.get("momentum") else {**now}


def outer_again(own: OuterValues, now: OuterValues) -> dict[str, str | float | bool]:
    """The outer settings of a run that goes on behind its last cycle. No run changes its optimizer in any other way."""
    return {**now, "optimizer": own["optimizer"]} if "optimizer" in own else {**now}
