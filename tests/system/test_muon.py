"""Real runs of the built-in workload with Muon and AdamW side by side: what holds with AdamW alone holds with both."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.system.conftest import Event, Run, members

from atoll.learner.snapshot import read
from atoll.store.cuts import read_syncer_part
from atoll.store.verify import verify_run

pytestmark = [pytest.mark.system, pytest.mark.faults]

MUON = (
    *("--learners", "2", "--set", "workload.optimizer=muon", "--set", "evaluate_every=0"),
    *("--set", "workload.depth=1", "--set", "workload.block=16", "--set", "workload.batch=4"),
)
# The learning rate follows the run's progress, of which learners hear when they do: here it stays as it is.
EXACT = (
    *(*MUON, "--steps", "100000", "--set", "workload.warmup=0", "--set", "workload.floor=1"),
    *("--set", "synchronous=true", "--set", "sync_every=6", "--set", "fragments=3"),
    *("--set", "cut_every=6", "--set", "keep_cuts=1000"),
)


def has_cut(events: list[Event]) -> bool:
    return any(event["kind"] == "cut" and event["cut"] >= 12 for event in events)


def test_a_run_that_begins_at_a_cut_makes_the_next_one_bit_for_bit(run: Run, tmp_path: Path) -> None:
    run.train(*EXACT, replayed=False)
    run.until(has_cut)
    run.kill_everything()
    straight, again = run.out, tmp_path / "again"
    run.out = again
    run.start("train", "--resume", straight, "--from-cut", "6", "--out", again)
    run.until(has_cut)
    run.kill_everything()
    expected, found = (read_syncer_part(folder / "cuts", 12)[2] for folder in (straight, again))
    assert expected.keys() == found.keys()
    assert all(np.array_equal(expected[name], found[name]) for name in expected), "Θ and momentum"
    for number in range(2):
        part = f"learners/learner-{number}/cut-000012.safetensors"
        was, now = read(straight / part), read(again / part)
        assert all(was.states[path] == now.states[path] for path in ("optimizer/muon", "optimizer/adamw"))
        assert was.rng == now.rng and was.tensors.keys() == now.tensors.keys()
        assert all(torch.equal(was.tensors[name], now.tensors[name]) for name in was.tensors), part
    assert verify_run(straight).ok and verify_run(again).ok


def test_a_killed_learner_takes_its_peers_state_and_the_run_is_repeated_bit_for_bit(run: Run) -> None:
    run.train(*MUON, "--steps", "100000", "--set", "fragments=4", "--set", "sync_every=8")
    run.until(lambda events: len(members(events)) == 2)
    os.kill(run.pid("learner-1"), signal.SIGKILL)
    run.until(lambda events: ("learner-1", 2) in members(events))
    at = len(run.events("round"))
    run.until(lambda events: sum(event["kind"] == "round" for event in events) > at + 20)
    run.interrupt()
    run.ended()
    helped = [(event["learner"], event["incarnation"], event["peer"]) for event in run.events("helped")]
    assert ("learner-1", 2, "learner-0") in helped
    run.check_replay()
