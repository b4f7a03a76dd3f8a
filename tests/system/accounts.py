"""What a run says of itself, compared with journal and ledger: summary, report, status and screen."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from tests.system.conftest import WAIT_S, Run

from atoll.observe.figures import causes_of, count, percent
from atoll.observe.report import read_run, write_report
from atoll.observe.screen import LiveScreen
from atoll.store.head import read_account, read_head
from atoll.store.rundir import RunDir
from atoll.store.verify import verify_run
from atoll.telemetry.status import RunStatus


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


def check_live_figures(run: Run) -> None:
    """Compare status and screen of a run that goes on with its journal, at a moment at which no round is decided."""
    deadline = time.monotonic() + WAIT_S
    while differences := _find_differences(run):
        assert time.monotonic() < deadline, differences
        time.sleep(0.02)


def _find_differences(run: Run) -> dict[str, tuple[object, object]]:
    """List what status or screen says otherwise than the journal; a round that was decided meanwhile counts as such."""
    account = read_account(RunDir(run.out))
    status = json.loads(run.ask("status", run.out, "--json").stdout)
    later = read_account(RunDir(run.out))
    if not account or later != account:
        return {"a round was decided meanwhile": (account.get("round"), later.get("round"))}
    figures: dict[str, tuple[object, object]] = {
        "round": (status["round"], account["round"]),
        "rounds_merged": (status["rounds_merged"], account["rounds"]),
        "versions": (status["versions"], [version for version, _ in account["fragments"]]),
        "fates": (status["fates"], account["tokens"]),
        "dropped_by_cause": (status["dropped_by_cause"], account["dropped_by_cause"]),
        "merged_share": (status["merged_share"], account["merged_share"]),
        **{
            f"merged_share of {one['learner']}": (one["merged_share"], account["fates"][one["learner"]]["merged_share"])
            for one in status["learners"]
            if one["learner"] in account["fates"]
        },
    }
    screen, computed = _print_screen(status), account["tokens"]["computed"]
    for words in (
        f"round {count(account['round'])} · step",
        f"merged share {percent(account['merged_share'])}",
        " · ".join(causes_of(account["dropped_by_cause"], computed)),
    ):
        figures[f"screen: {words}"] = (words in screen, True)
    return {name: pair for name, pair in figures.items() if pair[0] != pair[1]}


def _print_screen(status: dict[str, Any]) -> str:
    """Return what `atoll status` prints of it, with single blanks."""
    paper = Console(file=io.StringIO(), width=200)
    with LiveScreen(paper) as screen:
        screen.update(msgspec.convert(status, RunStatus))
    assert isinstance(paper.file, io.StringIO)
    return re.sub(r" +", " ", paper.file.getvalue())
