"""Data-parallel ranks as real processes: the elastic ones outlive a kill, the others go back to their checkpoint."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.system.conftest import Run

from atoll.baselines.supervisor import BaselineRun, ElasticRun, RestartingRun
from atoll.config import Config, convert
from atoll.store.rundir import RunDir
from atoll.telemetry.events import Event, parse

pytestmark = pytest.mark.system
LIMIT_S = 90.0
WORK = {"depth": 1, "block": 16, "batch": 4, "pace_s": 0.02, "eval_windows": 16}


def config(tmp_path: Path, learners: int) -> Config:
    data = tmp_path / "data.txt"
    data.write_text("".join(f"{n} squared is {n * n}\n" for n in range(2000)))
    return convert({"protocol": {"learners": learners, "steps": 2000}, "workload": {**WORK, "data": [str(data)]}}, "")


def perform(run: BaselineRun, watch: Callable[[list[Event]], None]) -> tuple[dict[str, Any], list[Event]]:
    """To its end, with a look at the events whenever the supervisor looks."""

    def events() -> list[Event]:
        return list(parse(run.out.events.read_bytes().splitlines(keepends=True)))

    run.watch = lambda seconds: watch(events())
    summary = asyncio.run(run.run())
    return summary, events()


def formed(events: list[Event], generation: int) -> list[Event]:
    return [e for e in events if e["kind"] == "formed" and e["generation"] == generation]


@pytest.mark.faults
def test_elastic_ranks_go_on_without_the_dead_and_take_it_in_again(tmp_path: Path) -> None:
    run = ElasticRun(config(tmp_path, 3), RunDir.create(tmp_path / "run"), LIMIT_S)
    killed: list[int] = []

    def watch(events: list[Event]) -> None:
        if not killed and run.steps_made() >= 10:
            killed.append(run.steps_made())
            run.end_rank(0, signal.SIGKILL, 0.0)
        if (back := formed(events, 3)) and run.steps_made() >= back[0]["step"] + 10:
            run.seconds = 0.0

    summary, events = perform(run, watch)
    alone, together = formed(events, 2), formed(events, 3)
    assert {e["rank"] for e in alone} == {1, 2} and {e["rank"] for e in together} == {0, 1, 2}
    assert all(len({e["digest"] for e in group}) == 1 for group in (alone, together))
    assert killed[0] <= alone[0]["step"] < together[0]["step"] < summary["steps"], "no step is lost or made twice"
    ends = [e for e in events if e["kind"] == "end"]
    last = max(e["step"] for e in ends)
    assert len({e["digest"] for e in ends if e["step"] == last}) == 1
    assert (summary["steps_lost"], summary["restarts"], summary["generations"]) == (0, 1, 3)
    assert summary["tokens"] < 3 * 64 * summary["steps"], "two ranks make smaller steps than three"
    assert 0.3 < summary["goodput"] < 1 and summary["validation_loss"] < 5.4


@pytest.mark.faults
def test_restarted_ranks_go_back_to_their_checkpoint_and_lose_what_came_after(tmp_path: Path) -> None:
    run = RestartingRun(config(tmp_path, 2), RunDir.create(tmp_path / "run"), LIMIT_S, checkpoint_every=40)
    killed: list[int] = []

    def watch(events: list[Event]) -> None:
        if not killed and run.steps_made() >= 50:
            killed.append(run.steps_made())
            run.end_rank(1, signal.SIGKILL, 0.0)
        if (back := formed(events, 2)) and run.steps_made() >= back[0]["step"] + 45:
            run.seconds = 0.0

    summary, events = perform(run, watch)
    again = formed(events, 2)
    assert {e["rank"] for e in again} == {0, 1} and len({e["digest"] for e in again}) == 1
    assert again[0]["step"] == 40
    assert killed[0] - 40 <= summary["steps_lost"] < 40, "what came after the checkpoint"
    assert summary["steps"] >= 85 and summary["restarts"] == 2
    assert summary["goodput"] < summary["uptime"] < 1 and summary["validation_loss"] < 5.4


@pytest.mark.faults
def test_the_command_runs_methods_under_one_plan_and_writes_their_figures(run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    made = config(tmp_path, 2)
    plan.write_text(
        f"seconds = 3\nsettle_s = 0\n[config.workload]\npace_s = 0.05\ndepth = 1\nblock = 16\nbatch = 4\n"
        f"data = {json.dumps(made.workload['data'])}\n"
        '[config.protocol]\nlearners = 2\n[[fault]]\nkind = "reset"\ntarget = "learner-1"\nat_s = 1\n'
        '[[fault]]\nkind = "pause"\ntarget = "learner-0"\nat_s = 1.5\nfor_s = 0.5\n'
    )
    run.start("compare", plan, "--out", run.out, "--methods", "elastic-data-parallel,decoupled").ended()
    assert "Decoupled DiLoCo" in run.stdout and "elastic data-parallel" in run.stdout
    assert "reset: have nothing to happen to in data-parallel training" in run.stdout
    document = json.loads((run.out / "compare.json").read_text())
    elastic, decoupled = document["methods"]
    assert (elastic["method"], elastic["faults"], elastic["left_out"]) == ("elastic-data-parallel", 1, ["reset"])
    assert (decoupled["method"], decoupled["faults"]) == ("decoupled", 2)
    for one in (elastic, decoupled):
        assert 0.1 < one["goodput"] <= 1 and one["tokens"] > 0 and one["wall_s"] >= 3
    assert elastic["longest_standstill_s"] >= 0.4, "everybody waits for the one that stands still"
