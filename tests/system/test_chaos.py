"""`atoll chaos` as a user starts it: real processes under a plan of faults, and a verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tests.system.conftest import SCRIPTS, Run, members
from tests.system.crashing import facts
from tests.system.test_kill_storm import LEASED, check_all_accounted

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

PLAN = {
    "seconds": 26.0,
    "config": {"protocol": {"learners": 3}, "service": {"evaluate_every": 0}},
    "fault": [
        {"kind": "kill", "target": "learner-1", "at_s": 2.0},
        {"kind": "pause", "target": "learner-0", "at_s": 4.0, "for_s": 2.0},
        {"kind": "blackhole", "target": "learner-2", "at_event": "restarted", "for_s": 2.0},
        {"kind": "syncer-kill", "at_s": 12.0},
        {"kind": "disk-full", "at_s": 17.0, "for_s": 1.0},
        {"kind": "reset", "target": ["learner-0", "learner-2"], "at_round": 10},
        {"kind": "slow", "target": "learner-0", "at_s": 19.0, "for_s": 2.0, "size": 0.5},
    ],
    "verdict": {"participation": 0.3, "syncer_back_s": 30.0, "recovery_s": 60.0},
}


def goes_on_in_a_new_term(events: list[dict[str, Any]]) -> bool:
    """Whether a round was committed after the syncer was started again."""
    kinds = [event["kind"] for event in events]
    return "reigned" in kinds and "round" in kinds[kinds.index("reigned") :]


@pytest.mark.faults
def test_a_run_of_ones_own_script_under_faults_holds_what_the_plan_asks(run: Run) -> None:
    plan = run.folder / "plan.toml"
    plan.write_text(tomli_w.dumps(PLAN))
    run.start("chaos", plan, SCRIPTS / "plain.py", "--out", run.out, "--json").ended()
    verdict = json.loads(run.stdout)
    assert verdict["ok"] and verdict["faults"] == 7
    names = {finding["name"] for finding in verdict["findings"]}
    assert {"ledger", "verify", "unhandled errors", "syncer back, s"} <= names
    assert json.loads((run.out / "verdict.json").read_text()) == verdict

    faults, mended = run.events("fault"), run.events("mended")
    assert sorted(event["number"] for event in faults) == list(range(1, 8)) == sorted(e["number"] for e in mended)
    assert {event["process"] for event in run.events("killed")} == {"learner-1", "syncer"}
    full = next(event for event in faults if event["what"] == "disk-full")
    again = next(event for event in mended if event["number"] == full["number"])
    assert not [e for e in run.events("round") if full["at"] + 0.3 < e["at"] < again["at"]], "nothing was committed"
    assert not (run.out / "trouble.json").exists()
    lives = {m["incarnation"] for event in run.events("round") for m in event["members"] if m["learner"] == "learner-1"}
    assert len(lives) >= 2, "it was killed, came back and contributed"


@pytest.mark.faults
def test_what_does_not_hold_is_the_exit_code(run: Run) -> None:
    plan = run.folder / "plan.toml"
    asked = {"seconds": 10.0, "settle_s": 1.0, "fault": PLAN["fault"][:1], "verdict": {"goodput": 1.5}}
    plan.write_text(tomli_w.dumps({**PLAN, **asked}))
    run.start("chaos", plan, SCRIPTS / "plain.py", "--out", run.out).ended(code=1)
    assert "NO" in run.stdout and "goodput" in run.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seconds = 10\n[[fault]]\nkind = 'kill'\ntarget = 'learner-9'\nat_s = 1", "there is no 'learner-9'"),
        pytest.param(
            *("seconds = 10\n[[fault]]\nkind = 'kill'\ntarget = 'learner-1'\nat_s = 11", "lies past the end"),
            marks=pytest.mark.faults,
        ),
        pytest.param("seconds = [", "is not TOML", marks=pytest.mark.faults),
    ],
)
def test_a_bad_plan_is_one_line_and_nothing_is_started(run: Run, tmp_path: Path, text: str, said: str) -> None:
    plan = run.folder / "plan.toml"
    plan.write_text(text)
    done = run.command("chaos", plan, "--out", run.out)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
    assert not run.out.exists()


def test_a_run_that_goes_on_is_attacked_and_judged(run: Run) -> None:
    """Also the sample, in every run of the tests, of the kill storms: each sample of the data has one fate; and of the
    replays: a run whose learner and syncer were killed is repeated bit for bit, from a version 0 of bf16."""
    plan = run.folder / "plan.toml"
    faults = [
        {"kind": "kill", "target": "learner-1", "at_s": 0.5},
        {"kind": "blackhole", "target": "learner-0", "at_s": 1.0, "for_s": 1.0},
        {"kind": "syncer-kill", "at_s": 3.0},
    ]
    plan.write_text(tomli_w.dumps({"seconds": 7.0, "fault": faults, "verdict": {"syncer_back_s": 30.0}}))
    rounded = ("--set", "initial_codec=bf16")
    run.train(*LEASED, *rounded, "--learners", "2", "--breakable", "--json", "--", "--pace", "0.05")
    run.until(lambda events: len({name for name, _ in members(events)}) == 2)
    done = run.ask("chaos", plan, "--run", run.folder / "nothing")
    assert done.returncode == 2 and "holds no run" in done.stderr
    attack = run.beside("chaos", plan, "--run", run.out, "--json")
    run.until(lambda events: any(event["kind"] == "spared" for event in events))
    run.until(lambda events: len({life for name, life in members(events) if name == "learner-1"}) >= 2)
    run.until(goes_on_in_a_new_term)
    run.interrupt()
    run.ended()
    assert attack.wait(60) == 0, (run.folder / "beside.log").read_text()
    [initial] = run.events("initial")
    assert 1e-4 < initial["relative_error"] < 2.0**-8
    verdict = json.loads((run.out / "verdict.json").read_text())
    assert verdict["ok"] and verdict["faults"] == 3
    assert {event["process"] for event in run.events("killed")} == {"learner-1", "syncer"}
    assert len(run.events("fault")) == len(run.events("mended")) == 3
    assert not (run.out / "standby.json").exists()
    facts.check_rounds(run, most_untold=1)
    check_all_accounted(run)
    run.check_replay()
