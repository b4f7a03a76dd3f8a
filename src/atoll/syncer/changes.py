"""Settings that may change while a run goes on, as an operator writes them: `quorum=2 outer_lr=0.5`.

`weight_limit.NAME=8` allows one learner more than the others' `weight_limit`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import msgspec

from atoll.config import Outer
from atoll.protocol.effects import ChangeAsked
from atoll.protocol.errors import ConfigError
from atoll.protocol.history import History

RULES = (
    "learners",
    "quorum",
    "grace",
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
OUTER = {
    "outer_lr": "lr",
    "outer_momentum": "momentum",
    "merge": "merge",
    "norm_limit": "norm_limit",
    "robust": "robust",
}

ONE_WEIGHT = "weight_limit."


def change(history: History, words: Sequence[str], *, reopen: bool = False) -> ChangeAsked | None:
    """What the words come to; None when everything is like that already. ConfigError names the word and the fix."""
    rules: dict[str, Any] = msgspec.to_builtins(history.settings)
    outer: dict[str, Any] = dict(history.outer)
    for word in words:
        key, value = _parted(word)
        if key.startswith(ONE_WEIGHT):
            rules["weight_limits"] = {**rules["weight_limits"], key.removeprefix(ONE_WEIGHT): value}
        elif key in RULES:
            rules[key] = value
        else:
            outer[OUTER[key]] = value
    try:
        settings = msgspec.convert(rules, type(history.settings), strict=False).resolved(len(history.tensors))
        wanted = msgspec.convert(outer, Outer, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{' '.join(words)}: {error}") from error
    if settings == history.settings and msgspec.to_builtins(wanted) == history.outer and not reopen:
        return None
    return ChangeAsked(settings, msgspec.to_builtins(wanted), " ".join(words) or "the run goes on", reopen)


def _parted(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    known = [*RULES, *OUTER]
    if not equals or not value:
        raise ConfigError(f"{word!r} is not understood: write it as quorum=2")
    if key not in known and not (key.startswith(ONE_WEIGHT) and key != ONE_WEIGHT):
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"these may: {', '.join(known)}"
        raise ConfigError(f"{key!r} cannot change while a run goes on: {hint}")
    return key, value
