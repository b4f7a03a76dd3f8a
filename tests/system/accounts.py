"""What a run that has ended says of itself, compared: summary, report and status on one side, journal on the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.observe.report import read_run, write_report
from atoll.store.head import read_head
from atoll.store.rundir import RunDir
from atoll.store.verify import verify_run


def check_figures(out: Path, tokens_a_step: int = 0) -> dict[str, Any]:
    """Return the summary. `tokens_a_step`: 0 where steps have different numbers of tokens."""
    summary = json.loads((out / "summary.json").read_text())
    head, report = read_head(RunDir(out)), verify_run(out)
    assert head is not None and report.ok, report.problem
    # Nothing is rolled back in these runs, so every round that merged something made one version.
    assert (summary["rounds"], summary["rounds_closed"]) == (sum(head.versions), head.committed)
    assert summary["rounds_passed"] == head.committed - sum(head.versions)
    assert {name: summary["tokens"][name] for name in report.facts["tokens"]} == report.facts["tokens"]
    known = summary["tokens"]["computed"] - summary["tokens"]["in_flight"]
    assert summary["merged_share"] == pytest.approx(summary["tokens"]["merged"] / known, abs=0.01)
    for name, one in summary["per_learner"].items():
        assert one["merged_share"] == pytest.approx(report.facts["per_learner"][name]["merged_share"], abs=1e-6)
        assert not tokens_a_step or one["steps"] * tokens_a_step == one["tokens"], name
    assert sum(merged for _, merged in summary["fragments"]) == sum(head.ledger.totals().merged)
    assert 0 < summary["goodput"] < 1 and 0 < summary["bytes_per_token"] < 1000
    told = read_run(out).summary  # what `atoll status` shows of a run that has ended
    assert {name: told[name] for name in told} == {name: summary[name] for name in told}
    page = write_report(out)[1].read_text()
    assert f"of {summary['rounds_closed']:,}, {summary['rounds_passed']} passed over" in page
    return dict(summary)
