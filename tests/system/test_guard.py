"""Real learners that do harm: the validation loss rises, and the run goes back to where it was good."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.system.conftest import SCRIPTS, Run

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.timeout(600)]

LINE = (SCRIPTS / "drift.py", "--learners", "2", "--set", "fragments=2", "--set", "sync_every=4", "--set", "overlap=1")


def drift(run: Run, *options: str | Path, script: tuple[str | Path, ...]) -> Run:
    """Norms are not looked at: this harm is meant to come in."""
    settings = run.out.parent / "settings.toml"
    settings.write_text("[outer]\nnorm_limit = 1e9\n")
    shape = ("--config", settings, "--set", "evaluate_every=2", "--set", "cut_every=20")
    return run.train(*LINE, *shape, *options, "--", *script)


def losses(events: list[dict[str, Any]]) -> list[float]:
    return [event["loss"] for event in events if event["kind"] == "score" and event["loss"] is not None]


def test_a_poisoned_run_returns_to_a_good_loss_and_goes_on(run: Run) -> None:
    poison = run.out.parent / "poison"
    drift(run, "--set", "guard=rollback", script=("--while", poison))
    run.until(lambda events: min(losses(events), default=9.0) < 0.2)
    poison.touch()
    run.until(lambda events: any(event["kind"] == "restored" for event in events))
    poison.unlink()
    (back,) = run.events("restored")
    worst = max(losses(run.events()))
    run.until(lambda events: _good_again(events, back["committed"]))
    os.kill(run.pid("syncer"), signal.SIGKILL)
    run.until(lambda events: sum(event["kind"] == "reigned" for event in events) == 1)
    at = len(run.events("round"))
    run.until(lambda events: sum(event["kind"] == "round" for event in events) > at + 20)
    run.interrupt()
    run.ended()
    assert worst > 1.0 and back["fragment_tokens"] > 0
    assert run.summary["tokens"]["rolled_back"] > 0
    verified = run.command("verify", run.out, "--json")
    assert json.loads(verified.stdout)["ok"], verified.stdout


def _good_again(events: list[dict[str, Any]], committed: int) -> bool:
    later = [event for event in events if event["kind"] == "score" and event["round"] > committed + 20]
    return bool(later) and later[-1]["loss"] is not None and later[-1]["loss"] < 0.2


def test_with_an_alarm_the_operator_is_told_and_nothing_else_happens(run: Run) -> None:
    poison = run.out.parent / "poison"
    drift(run, script=("--while", poison))
    run.until(lambda events: min(losses(events), default=9.0) < 0.2)
    poison.touch()
    run.until(lambda events: any(event["kind"] == "alarm" for event in events))
    assert "validation loss" in run.command("status", run.out, "--json").stdout
    poison.unlink()
    run.until(lambda events: any(event["kind"] == "alarm" and event["over"] for event in events))
    run.interrupt()
    run.ended()
    assert not run.events("restored")


def test_a_run_that_was_rolled_back_is_repeated_bit_for_bit(run: Run) -> None:
    drift(run, "--set", "guard=rollback", script=("--from", "150", "--to", "450", "--broken-at", "20"))
    run.until(lambda events: any(event["kind"] == "restored" for event in events))
    at = len(run.events("round"))
    run.until(lambda events: sum(event["kind"] == "round" for event in events) > at + 20)
    run.interrupt()
    run.ended()
    run.check_replay()
    (back,) = run.events("restored")
    cuts = json.loads(run.command("verify", run.out, "--json").stdout)["cuts"]
    # One from before the rollback is kept for as long as the run may go back to it; then there are only later ones.
    before = max((cut for cut in cuts if cut <= back["round"]), default=min(cuts))
    again = run.replay("--from-cut", str(before))
    # A copy that a learner had made before the cut is not in its part, and gradients are kept for two cuts only.
    assert again["identical"] or "the journal does not keep its outer gradient any more" in again["stopped"], again
