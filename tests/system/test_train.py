"""Whole runs that nothing disturbs."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tests.system.conftest import SCRIPTS, Run

from atoll.config import Config
from atoll.store.verify import verify_run

pytestmark = pytest.mark.system

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_script.py"
TINY = ("--set", "workload.depth=1", "--set", "workload.block=32", "--set", "workload.batch=4")
FIELDS = {
    "goodput", "merged_share", "uptime", "liveness", "participation", "effective_h", "tokens", "rounds", "restarts",
    "bytes_per_token", "validation_loss_start", "validation_loss_end", "longest_gap_s", "median_gap_s", "wall_s",
}  # fmt: skip


LEARNER_NICE = Config().learner_nice


def read_nice(pid: int) -> int:
    """Niceness of a process, as the kernel has it."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[16])


@pytest.mark.parametrize("replayed", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_two_learners_train_the_built_in_model(run: Run, replayed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As users start it, kernels compiled. test_chaos.py has the replay that is in every run of the tests."""
    monkeypatch.delenv("ATOLL_TEST_KERNELS", raising=False)
    # Five cycles, at a pace that a busy machine keeps: else it merges some fragments once, and there is no effective H.
    cycles = ("--set", "fragments=8", "--set", "sync_every=8", "--set", "workload.pace_s=0.15")
    run.train("--learners", "2", "--steps", "40", *TINY, *cycles, replayed=replayed)
    run.until(lambda events: any(event["kind"] == "recovered" for event in events))
    own = os.getpriority(os.PRIO_PROCESS, 0)
    nice = LEARNER_NICE if os.geteuid() == 0 or own < LEARNER_NICE else own
    run.until(lambda events: read_nice(run.pid("learner-0")) == nice)
    assert read_nice(run.pid("syncer")) <= own, "learners leave the processor to the syncer"
    run.ended()
    summary = run.summary
    assert summary.keys() >= FIELDS
    assert [field for field in FIELDS if summary[field] is None] == []
    assert all(0 < summary[share] <= 1 for share in ("goodput", "merged_share", "uptime", "liveness", "participation"))
    tokens = summary["tokens"]
    assert tokens["computed"] == tokens["merged"] + tokens["dropped"] + tokens["lost"] > 0
    assert tokens["in_flight"] == 0
    assert summary["reason"] == "40 steps are done"
    # On a busy machine a merge may take longer than a step, and rounds come less often than the settings ask.
    assert summary["rounds"] >= 0.75 * 40 * summary["settings"]["fragments"] / summary["settings"]["sync_every"]
    assert summary["validation_loss_end"] < summary["validation_loss_start"] < 6
    assert 0 < summary["median_gap_s"] <= summary["longest_gap_s"] <= summary["wall_s"] <= summary["total_s"]
    assert all(math.isfinite(tensor.sum()) for tensor in load_file(run.out / "model.safetensors").values())
    assert "what the trained model writes" in run.stdout and run.stderr == ""
    assert verify_run(run.out).ok


@pytest.mark.faults
def test_two_learners_train_the_built_in_model_with_experts(run: Run) -> None:
    short = ("--steps", "12", "--set", "fragments=4", "--set", "sync_every=4", "--set", "evaluate_every=0")
    run.train("--learners", "2", *short, *TINY, "--set", "workload.experts=4", replayed=False).ended()
    model = load_file(run.out / "model.safetensors")
    assert any("experts" in name for name in model) and all(math.isfinite(tensor.sum()) for tensor in model.values())
    assert run.summary["rounds"] > 0 and verify_run(run.out).ok


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            (
                "--set",
                "synchronous=true",
                "--set",
                "merge=mean",
                "--steps",
                "24",
                "--set",
                "fragments=1",
                "--set",
                "sync_every=6",
            ),
            id="sync",
            marks=pytest.mark.faults,
        ),
        pytest.param(
            (
                "--set",
                "adopt=carry",
                "--set",
                "merge=rda-row",
                "--tokens",
                "6000",
                "--set",
                "fragments=2",
                "--set",
                "sync_every=8",
            ),
            id="carry",
            marks=pytest.mark.faults,
        ),
        pytest.param(
            ("--set", "adopt=blend", "--set", "blend=0.3", "--set", "quorum=2", "--steps", "60", "--set", "codec=fp32"),
            id="blend",
            marks=pytest.mark.faults,
        ),
    ],
)
def test_the_rules_a_run_may_choose(run: Run, options: tuple[str, ...]) -> None:
    run.train(
        SCRIPTS / "line.py", "--learners", "2", "--set", "evaluate_every=0", "--json", "--set", "overlap=1", *options
    ).ended()
    summary = json.loads(run.stdout)
    assert summary == run.summary
    assert summary["rounds"] > 0 and all(learner["rounds"] > 0 for learner in summary["per_learner"].values())
    if "--tokens" in options:
        assert summary["reason"] == "the budget of 6,000 tokens is spent"
        assert summary["tokens"]["computed"] >= 6000


@pytest.mark.faults
def test_a_users_script_with_its_own_scorer(run: Run) -> None:
    run.train(EXAMPLE, "--learners", "2", "--steps", "30", "--set", "evaluate_every=20").ended()
    assert run.summary["validation_loss_end"] < run.summary["validation_loss_start"]
    assert run.events("score")[-1]["final"]


@pytest.mark.faults
def test_learners_that_leave_by_themselves_end_the_run(run: Run) -> None:
    run.train(
        SCRIPTS / "line.py", "--learners", "2", "--set", "evaluate_every=0", "--set", "overlap=1", "--", "--steps", "40"
    ).ended()
    assert run.summary["rounds"] > 0
    assert run.summary["reason"].startswith("every learner")
    assert (run.out / "model.safetensors").exists()


@pytest.mark.faults
def test_data_parallel(run: Run) -> None:
    run.train("--algorithm", "data-parallel", "--learners", "2", "--steps", "20", *TINY).ended()
    summary = run.summary
    assert summary.keys() >= FIELDS
    steps = sum(one["steps"] for one in summary["per_learner"].values())
    assert summary["tokens"]["computed"] == summary["tokens"]["merged"] == steps * 2 * 4 * 32
    assert summary["validation_loss_end"] < summary["validation_loss_start"]


GOLDEN = {
    0: ([1, -1, -3, -11, -13, -15, -17, -19, -21, -35], [1, -1, -3, -5, -7, -9, -23, -25, -27, -29]),
    1: ([1, -1, -3, -7, -9, -11, -13, -15, -17, -27], [1, -1, -3, -5, -7, -9, -19, -21, -23, -25]),
}


@pytest.mark.faults
@pytest.mark.parametrize("overlap", [0, 1])
def test_the_golden_histories(run: Run, overlap: int) -> None:
    """Two replicas, two one-weight fragments at 1, each step subtracts 2, outer SGD with η = 2, each every 6 steps.
    tests/protocol/test_golden.py has both number by number in every run of the tests."""
    settings = run.folder / "golden.toml"
    settings.write_text(
        "[protocol]\nlearners = 2\nfragments = 2\nsync_every = 6\nsteps = 12\nsynchronous = true\n"
        f"overlap = {overlap}\n[outer]\nmerge = 'mean'\noptimizer = 'sgd'\nlr = 2.0\nmomentum = 0.0\n"
        "[service]\nevaluate_every = 0\n"
    )
    run.train(SCRIPTS / "golden.py", "--config", settings).ended()
    for learner in ("learner-0", "learner-1"):
        history = json.loads((run.folder / f"{learner}.json").read_text())[:10]
        assert tuple(list(weights) for weights in zip(*history, strict=True)) == GOLDEN[overlap]
