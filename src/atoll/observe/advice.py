"""What would make more of the next run, as a pure function of a run's summary.

Advice is given where much of the work was dropped, and only what helps against the cause: steps between reading a
fragment and adopting its new version are dropped once per sync, so that a larger H drops fewer of them; steps that were
overwritten in rounds that a learner missed are kept by adopt = "carry" (measured by `benchmarks/slow.py`).
"""

from __future__ import annotations

from atoll.observe.figures import percent
from atoll.observe.summary import Summary
from atoll.protocol.settings import USUAL

MUCH = 0.15
"""Of the tokens, by one cause: from here on there is something to say. The usual settings drop τ/H = 8 %."""
ENOUGH = 12
"""A fragment is away for one step of so many: the usual settings have τ/H = 2/24."""


def advise(summary: Summary) -> list[str]:
    causes, computed = summary["tokens"].get("dropped_by_cause") or {}, summary["tokens"]["computed"]
    if not causes or not computed or summary["settings"].get("adopt", "overwrite") == "carry":
        return []
    overlap, missed = causes.get("overlap", 0) / computed, causes.get("missed", 0) / computed
    found = [_sync_less_often(summary, overlap)] if overlap > MUCH else []
    found += [_carry(summary, missed)] if missed > MUCH else []
    return [one for one in found if one]


def _sync_less_often(summary: Summary, overlap: float) -> str:
    every = summary["effective_h_mean"] or summary["settings"].get("sync_every")
    if not every:
        return ""
    away = max(1, round(overlap * every))
    larger = max(USUAL, ENOUGH * away)
    return (
        f"a fragment comes back after {away} of {every:.0f} steps, and what was trained meanwhile is dropped "
        f"({percent(overlap)} of the tokens): --sync-every {larger} drops less of it, --adopt carry keeps it."
    )


def _carry(summary: Summary, missed: float) -> str:
    shares = {name: one["merged_share"] for name, one in summary["per_learner"].items()}
    known = {name: share for name, share in shares.items() if share is not None}
    least = f"; least was merged of {min(known, key=known.__getitem__)}" if len(known) > 1 else ""
    return (
        f"{percent(missed)} of the tokens were overwritten in rounds that their learner was not in{least}: "
        "--adopt carry keeps such steps."
    )
