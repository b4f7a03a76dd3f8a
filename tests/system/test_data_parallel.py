"""`atoll train SCRIPT --algorithm data-parallel` trains what one process with the batches of all ranks would."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.system.conftest import SCRIPTS, Run, members
from tests.system.scripts import averaged

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
UNSCORED = ("--set", "evaluate_every=0")
"""No evaluator is started."""


def train_alone(steps: list[list[torch.Tensor]], begun: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The parameters after these steps of one process, each of several batches."""
    model, optimizer = averaged.make()
    model.load_state_dict({name: torch.tensor(values) for name, values in begun.items()})
    for passes in steps:
        optimizer.zero_grad()
        for batch in passes:
            (averaged.loss_of(model, batch) / len(passes)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), averaged.CLIP)
        assert norm > averaged.CLIP, "a step that is not clipped shows nothing of clipping"
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("words", [pytest.param((), marks=pytest.mark.faults), ("--no-sync",)])
def test_two_ranks_train_as_one_process_with_the_batches_of_both(run: Run, words: tuple[str, ...]) -> None:
    script = SCRIPTS / "averaged.py"
    run.train(script, "--algorithm", "data-parallel", "--learners", "2", "--steps", "40", "--", *words).ended()
    ranks = [json.loads((run.folder / f"steps-{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["begun"] == ranks[1]["begun"] and ranks[0]["seed"] != ranks[1]["seed"]
    both = zip(ranks[0]["steps"], ranks[1]["steps"], strict=True)
    steps = [[torch.tensor(batch) for batch in (*first, *second)] for first, second in both]
    expected = train_alone(steps, ranks[0]["begun"])
    trained = load_file(run.out / "model.safetensors")
    assert trained.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(trained[name], values, rtol=1e-4, atol=1e-5)
    leased = torch.cat([batch for passes in steps[:40] for batch in passes])
    assert len(leased) == len(leased.unique()), "no sample is leased to two ranks"
    tokens = sum(len(batch) for passes in steps for batch in passes)
    assert run.summary["tokens"]["computed"] == run.summary["tokens"]["merged"] == tokens
    assert run.summary["algorithm"] == "data-parallel"
    assert run.summary["validation_loss_end"] < run.summary["validation_loss_start"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "--uneven",
            "one rank is in step 2 and another in step 1: under --algorithm data-parallel every process has to ",
        ),
        pytest.param(
            *("--deferred", "the last backward pass before a step has to be outside of learner.no_sync()"),
            marks=pytest.mark.faults,
        ),
    ],
)
def test_what_would_part_the_ranks_ends_the_run_with_its_reason(run: Run, word: str, said: str) -> None:
    given = ("--algorithm", "data-parallel", "--learners", "2", "--steps", "40", "--max-restarts", "0", *UNSCORED)
    run.train(SCRIPTS / "averaged.py", *given, "--", word).ended(1)
    assert said in run.stderr


@pytest.mark.parametrize("cut_every", [pytest.param(0, marks=pytest.mark.faults), 2])
def test_after_a_death_the_ranks_go_on_from_their_newest_snapshot(run: Run, cut_every: int) -> None:
    """Without one they say what begins anew."""
    words = ("--algorithm", "data-parallel", "--learners", "2", "--steps", "100000", *UNSCORED, "--set", "sync_every=4")
    run.train(SCRIPTS / "averaged.py", *words, "--set", f"cut_every={cut_every}", "--", "--paced")
    run.until(lambda events: sum(event["kind"] == "round" for event in events) > 8)
    if cut_every:
        run.until(lambda events: any((run.out / "learners/learner-0").glob("cut-*.safetensors")))
    [started] = [event for event in run.events("started") if "ranks" in event]
    os.kill(started["ranks"]["learner-0.rank1"], signal.SIGKILL)
    run.until(lambda events: ("learner-0", 2) in members(events))
    run.interrupt()
    run.ended()
    [again] = run.events("restarted")
    log = (run.out / "logs/learner-0.log").read_text()
    first, second = map(int, re.findall(r"schedule at (\d+)", log))
    assert first == 0 and again["fresh"] is (second == 0) is (cut_every == 0)
    assert ("the inner optimizer and what the script registered begin anew" in log) is again["fresh"]
    assert ("learner-0 came back once before its first snapshot" in run.stdout) is again["fresh"]
    run.check_replay()


def test_a_script_is_compared_over_tokens(run: Run) -> None:
    run.start("compare", SCRIPTS / "averaged.py", "--learners", "2", "--steps", "40", "--out", run.out).ended()
    assert "data-parallel" in run.stdout and "tokens merged" in run.stdout
    names = ("decoupled", "data-parallel")
    again = run.ask("compare", *(run.out / name for name in names), "--json")
    runs = json.loads(again.stdout)["runs"]
    assert runs == json.loads((run.out / "compare.json").read_text())["runs"]
    for name, one in zip(names, runs, strict=True):
        (first, before), (last, after) = one["losses"][0], one["losses"][-1]
        assert one["algorithm"] == name and first < last and after < before
        summary = json.loads((run.out / name / "summary.json").read_text())
        assert last == pytest.approx(summary["tokens"]["merged"], abs=1)
