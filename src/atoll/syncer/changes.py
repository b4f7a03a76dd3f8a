"""Settings that may change during a run, as an operator writes them: `quorum=2 outer_lr=0.5`.

`weight_limit.NAME=8` allows one learner more than the others' `weight_limit`.

In a run with phases of training (protocol/phases.py) a value that phases govern holds until the next phase begins.
`phases=[…]` replaces all of them: the one that the run's progress is in begins at once, with what it says.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from atoll.choices import ADOPT, QUORUM_POLICY
from atoll.config import ONE_WEIGHT, Outer, check_phases, check_sharded, merged, parse_settings
from atoll.protocol.errors import ConfigError
from atoll.protocol.history import History
from atoll.protocol.phases import TrainingPhase
from atoll.protocol.settings import PHASED, Settings
from atoll.protocol.syncer.effects import ChangeAsked

RULES = (
    "learners",
    "quorum",
    "quorum_policy",
    "grace_share",
    "grace_cap_steps",
    "steps",
    "tokens",
    "progress",
    "patience_s",
    "lost_after_s",
    "abandon_s",
    "stalled_after_s",
    "first_step_s",
    "pull_floor_s",
    "strikes",
    "weight_limit",
    "guard",
    "cut_every",
    "cut_wait_s",
    *PHASED,
    "phases",
)
OUTER = ("outer_lr", "outer_momentum", "merge", "norm_limit", "robust")
KEPT = ("fragments", "plan", "shards", "seed", "synchronous", "init", "initial_codec", "warm_start")
"""Settings that a new run has as the run of its cut: the cut is in these parts, the data in this order, and the
beginning is over."""
KEPT_BY_SHARDS = ("codec", "version_codec", "outer_optimizer")
"""Further ones where the syncer has several shards: the parts of fragments depend on them."""

GOVERNED = (*PHASED, "outer_lr", "outer_momentum", "merge", "cut_every")
"""What a phase of training has of its own."""


def parse_changes(
    history: History, words: Sequence[str], *, reopen: bool = False, before: History | ChangeAsked | None = None
) -> ChangeAsked | None:
    """What the words come to; None when everything is like that already. ConfigError names the word and the fix.
    `before`: what they change, where that is not the history: a change that still waits."""
    check_changeable(words)
    now = before or history
    said = merged({"protocol": msgspec.to_builtins(now.settings), "outer": now.outer}, parse_settings(words))
    phases = said["protocol"].pop("phases")
    settings = msgspec.convert(said["protocol"], Settings).resolved(now.settings.fragments)
    keys = [word.partition("=")[0] for word in words]
    if "cut_every" not in keys:
        settings = msgspec.structs.replace(settings, cut_every=now.settings.cuts_at(settings.sync_every))
    settings = _with_phases(settings, msgspec.convert(phases, tuple[TrainingPhase, ...]), now.settings, history)
    QUORUM_POLICY.check(settings.quorum_policy)
    chosen = msgspec.convert(said["outer"], Outer)
    check_sharded(history.begun.shards, chosen, settings)
    outer = msgspec.to_builtins(chosen)
    if settings == now.settings and outer == now.outer and not reopen:
        return None
    _check_rounds(now.settings, settings, keys)
    what = " ".join(words) or "the run goes on"
    return ChangeAsked(settings, outer, f"{what}{_until_when(history, settings, keys)}", reopen)


def _with_phases(settings: Settings, phases: tuple[TrainingPhase, ...], before: Settings, history: History) -> Settings:
    if phases == before.phases:
        return msgspec.structs.replace(settings, phases=phases)
    return settings.with_phases(phases, history.begun.settings)


def _check_rounds(before: Settings, settings: Settings, keys: Sequence[str]) -> None:
    """ConfigError: H, τ, adoption or phases cannot change like that."""
    ADOPT.check(settings.adopt)
    check_phases(settings.phases)
    differ = [key for key in (*PHASED, "phases") if getattr(before, key) != getattr(settings, key)]
    if settings.synchronous and differ:
        raise ConfigError(f"{differ[0]} of a synchronous run cannot change: its learners' steps follow one schedule")
    if settings.synchronous and settings.phases and settings.steps != before.steps:
        raise ConfigError("steps of a synchronous run with phases cannot change: its learners' schedule follows them")
    if "phases" in keys and (own := [key for key in keys if key in GOVERNED]):
        raise ConfigError(f"{own[0]} and phases at once: a phase begins with its own {own[0]}, so name it in the phase")


def _until_when(history: History, settings: Settings, keys: Sequence[str]) -> str:
    """How long what phases govern holds; empty: to the end of the run, or none of that is changed."""
    phase = history.training_phase
    if not set(keys) & set(GOVERNED) or not 0 < phase < len(settings.phases):
        return ""
    ends = settings.phases[phase - 1].until
    return f" (until phase {phase + 1} of {len(settings.phases)} begins, at {ends:.3g} of the run)"


def check_changeable(words: Sequence[str]) -> None:
    """ConfigError: there is no such setting, or a run keeps it as it began."""
    parse_settings(words)
    for word in words:
        key = word.partition("=")[0]
        if not is_changeable(word):
            raise ConfigError(
                f"{key!r} cannot change while a run goes on: start a new run for it, or change "
                f"{', '.join((*RULES, *OUTER))}"
            )


def is_changeable(word: str) -> bool:
    key = word.partition("=")[0]
    return key in (*RULES, *OUTER) or key.startswith(ONE_WEIGHT)


def check_new_run(words: Sequence[str], shards: int) -> None:
    """ConfigError: there is no such setting, or a new run from a cut has it as the old one."""
    parse_settings(words)
    for word in words:
        key = word.partition("=")[0]
        if key in KEPT or (shards > 1 and key in KEPT_BY_SHARDS):
            of = " of several shards" if key not in KEPT else ""
            raise ConfigError(f"{key!r} cannot differ in a new run from a cut{of}: begin a run without a cut for it")
