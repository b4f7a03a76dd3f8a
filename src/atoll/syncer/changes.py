"""Settings that may change during a run, as an operator writes them: `quorum=2 outer_lr=0.5`.

`weight_limit.NAME=8` allows one learner more than the others' `weight_limit`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from atoll.choices import QUORUM_POLICY
from atoll.config import ONE_WEIGHT, Outer, merged, parse_settings
from atoll.protocol.errors import ConfigError
from atoll.protocol.history import History
from atoll.protocol.syncer.effects import ChangeAsked

RULES = (
    "learners",
    "quorum",
    "quorum_policy",
    "grace_share",
    "grace_cap_steps",
    "steps",
    "tokens",
    "patience_s",
    "lost_after_s",
    "abandon_s",
    "stalled_after_s",
    "pull_floor_s",
    "strikes",
    "weight_limit",
    "guard",
    "cut_every",
    "cut_wait_s",
)
OUTER = ("outer_lr", "outer_momentum", "merge", "norm_limit", "robust")


def parse_changes(history: History, words: Sequence[str], *, reopen: bool = False) -> ChangeAsked | None:
    """What the words come to; None when everything is like that already. ConfigError names the word and the fix."""
    check_changeable(words)
    said = merged({"protocol": msgspec.to_builtins(history.settings), "outer": history.outer}, parse_settings(words))
    settings = msgspec.convert(said["protocol"], type(history.settings)).resolved(history.settings.fragments)
    QUORUM_POLICY.check(settings.quorum_policy)
    outer = msgspec.to_builtins(msgspec.convert(said["outer"], Outer))
    if settings == history.settings and outer == history.outer and not reopen:
        return None
    return ChangeAsked(settings, outer, " ".join(words) or "the run goes on", reopen)


def check_changeable(words: Sequence[str]) -> None:
    """ConfigError: there is no such setting, or a run keeps it as it began."""
    parse_settings(words)
    for word in words:
        key = word.partition("=")[0]
        if key not in (*RULES, *OUTER) and not key.startswith(ONE_WEIGHT):
            raise ConfigError(
                f"{key!r} cannot change while a run goes on: start a new run for it, or change "
                f"{', '.join((*RULES, *OUTER))}"
            )
