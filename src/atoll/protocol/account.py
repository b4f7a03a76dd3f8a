"""The account of a whole run, by its history and its ledger: the one source of what screens, status, summary and report
say of rounds, tokens and steps.

A run that goes on, or was made of another one by a cut or from its bucket, has a history that begins where the other
was; the events in its folder do not. So nothing of this is counted from events.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.protocol.history import History
from atoll.protocol.ledger import Totals


def make_account(history: History, steps: Mapping[str, int] = {}) -> dict[str, Any]:
    """Return the account as the last event of a run tells it. `steps`: of each learner's present process, where more is
    known of it than its last contribution told."""
    ledger, fates = history.ledger.totals(), history.ledger.by_learner()
    learners = {
        name: {**_describe_fates(fates.get(name) or Totals(*[(0,) * len(history.versions)] * 5)), **work}
        for name, work in sorted(_count_work(history, steps).items())
    }
    return {
        "round": history.committed,
        "rounds": history.merged_rounds,
        "tokens": ledger.whole(),
        "dropped_by_cause": ledger.by_cause(),
        "merged_share": ledger.merged_share(),
        "fates": learners,
        "parent": history.begun.parent,
        "fragments": [list(row) for row in zip(history.versions, ledger.merged, strict=True)],
    }


def _count_work(history: History, steps: Mapping[str, int]) -> dict[str, dict[str, int]]:
    return {
        name: {"steps": life.steps_before + max(life.t, steps.get(name, 0)), "rounds": life.rounds}
        for name, life in history.lives.items()
    }


def _describe_fates(totals: Totals) -> dict[str, Any]:
    """Return the fates of one learner's tokens over all its lives."""
    return {**totals.whole(), "dropped_by_cause": totals.by_cause(), "merged_share": totals.merged_share()}
