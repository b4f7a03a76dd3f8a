"""What a script of one's own does wrong, as `atoll train` tells it; and where it starts when a run is gone on with.
The scripts import no torch, so they are quick."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from tests.system.conftest import WAIT_S, Run

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def write_script(run: Run, code: str) -> str:
    (run.folder / "mine.py").write_text(code)
    return "mine.py"


def test_a_typo_is_on_the_screen_at_the_first_death_and_ends_the_run(run: Run) -> None:
    run.train(write_script(run, "imprt torch\n"), "--learners", "2").ended(code=1)
    with pytest.raises(SyntaxError) as typo:
        compile("imprt torch\n", "mine.py", "exec")  # each Python has words of its own
    cause = f"SyntaxError: {typo.value}"
    assert f"failed: {cause}" in run.stdout and f"the whole traceback is in {run.out / 'logs'}" in run.stdout
    assert run.stderr.startswith(f"atoll: the script failed on every learner before its first step: {cause}. ")
    assert run.stderr.count("\n") == 1 and f"atoll train --resume {run.out}" in run.stderr


@pytest.mark.faults
def test_a_script_that_never_joins_is_exit_code_1_and_no_model_is_named(run: Run) -> None:
    run.train(write_script(run, "print('hello')\n"), "--learners", "2", "--set", "evaluate_every=0").ended(code=1)
    assert run.stderr.startswith(
        "atoll: no learner joined the run: the script has to train inside 'with atoll.Learner("
    )
    assert "model.safetensors" not in run.stdout and "summary.json, events.jsonl, logs/" in run.stdout


@pytest.mark.faults
def test_a_run_goes_on_where_and_with_what_its_script_was_started(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start fails for a reason that can be mended, with a file that is named from where it was started."""
    code = "import os, sys\nsys.exit(f\"{os.environ['DATA_DIR']}: {open('answer').read()}\")\n"
    monkeypatch.setenv("DATA_DIR", "c4")
    monkeypatch.setenv("HF_TOKEN", "nobody-may-know")
    run.train(write_script(run, code), "--learners", "1", "--set", "evaluate_every=0").ended(code=1)
    assert "nobody-may-know" not in (run.out / "environment.json").read_text()
    (run.folder / "answer").write_text("it is here")
    monkeypatch.delenv("DATA_DIR")
    elsewhere = run.folder / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "atoll.cli", "train", "--resume", str(run.out)],
        cwd=elsewhere, env=run.environment(), text=True, capture_output=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "atoll: c4: it is here\n"), done
    assert f"the script starts in {run.folder}, as it did before" in done.stdout
    assert "not set now, and as the run was begun with: DATA_DIR" in done.stdout


FORGOTTEN = """
import time
import torch
import atoll

model = torch.nn.Linear(2, 2)
with atoll.Learner(model, torch.optim.SGD(model.parameters(), lr=0.1)) as learner:
    while not learner.done:
        time.sleep(0.05)
"""


@pytest.mark.faults
def test_a_script_that_never_calls_step_is_asked_about_it_and_does_not_hold_up_the_end(run: Run) -> None:
    words = ("--learners", "1", "--steps", "20", "--set", "evaluate_every=0", "--set", "stalled_after_s=1")
    run.train(write_script(run, FORGOTTEN), *words)
    run.until(lambda events: any(event["kind"] == "stalled" for event in events))
    run.interrupt()
    run.ended(code=1)
    asked = "does the script call learner.step() after every optimizer step?"
    assert f"atoll: no learner made a step: {asked}" in run.stderr and asked in run.stdout
    assert "learner-0 was killed at the end: it had made no step" in run.stdout


DRAWS_ON = """
import time
import torch
import atoll

model = torch.nn.Linear(2, 2)
with atoll.Learner(model, torch.optim.SGD(model.parameters(), lr=0.1)) as learner:
    for batch in learner.batches(torch.randn(1024, 2), batch_size=4):
        model(batch).sum().backward()
        ends_at = time.monotonic() + 0.01
        while time.monotonic() < ends_at:
            pass
"""


def test_a_script_that_draws_batches_and_never_steps_is_asked_about_it_at_once(run: Run) -> None:
    words = ("--learners", "1", "--steps", "20", "--set", "evaluate_every=0", "--set", "stalled_after_s=1")
    run.train(write_script(run, DRAWS_ON), *words)
    log = run.out / "logs" / "learner-0.log"
    line = "300 batches were handed out and no step was made: does the script call learner.step() after every"
    run.until(lambda events: log.exists() and line in log.read_text())
    run.until(
        lambda events: [one["kind"] for one in events if one["kind"] in ("starting", "stalled")][-1:] == ["stalled"]
    )
    asked = "does its script call learner.step() after every optimizer step?"
    assert run.events("stalled")[-1]["text"] == f"learner-0 has made no step yet; {asked}"
    run.interrupt()
    run.ended(code=1)
    assert log.read_text().count(line) == 1


UNENDING = """
import time
import torch
import atoll

inputs = torch.randn(256, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with atoll.Learner(model, optimizer) as learner:
    ends_at = None
    while ends_at is None or time.monotonic() < ends_at:
        time.sleep(0.01)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        learner.step(tokens=10)
        ends_at = ends_at or (time.monotonic() + 8.0 if learner.done else None)
print("calls of step:", learner.steps)
"""


def test_a_loop_that_forgets_the_end_loses_nothing_and_is_named(run: Run) -> None:
    run.train(write_script(run, UNENDING), "--learners", "2", "--steps", "60", "--set", "evaluate_every=0").ended()
    summary = run.summary
    # Collected are the last steps of a whole cycle; on a busy machine an answer may miss its round.
    assert summary["merged_share"] > 0.9 and summary["tokens"]["lost"] == 0, summary["tokens"]
    logs = [(run.out / "logs" / f"learner-{index}.log").read_text() for index in range(2)]
    calls = sum(int(re.findall(r"calls of step: (\d+)", log)[0]) for log in logs)
    late = sum(int(re.findall(r"atoll: (\d+) steps were made after the run's end", log)[0]) for log in logs)
    assert late > 0 and summary["tokens"]["computed"] == 10 * (calls - late), "what came after the end is in no figure"
    line = "the script trains on after the run's end: break its loop at learner.done"
    assert run.stdout.count(f"learner-0, learner-1: {line}") == 2, "on the screen and in the summary"
    assert all(f"atoll: {line}" in log for log in logs)


ATTACHED = """
import time
import torch
import atoll

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
atoll.evaluate(model, lambda model: {}["accuracy"])
learner = atoll.attach(model, optimizer, tokens=1)
for step in range(1000):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
    if step == 30:
        {}["missing"]
"""


def test_an_exception_of_an_attached_script_is_told_as_that_and_one_of_the_evaluator_ends_nothing(run: Run) -> None:
    words = ("--learners", "1", "--steps", "1000", "--max-restarts", "0")
    run.train(write_script(run, ATTACHED), *words).ended(code=1)
    line = ATTACHED.splitlines().index('        {}["missing"]') + 1
    cause = f"KeyError: 'missing' (mine.py, line {line})"
    gone = [event["reason"] for event in run.events("left", "lost")]
    assert gone == [f"its training script ended with {cause}"], "the syncer is told by the script itself"
    assert f"learner-0 failed: {cause}" in run.stdout and cause in run.stderr
    told = [event["text"] for event in run.events("warning") if event.get("process") == "evaluator"]
    assert [text for text in told if text.startswith("the model is not scored: KeyError: 'accuracy'")]
    assert max(event["t"] for event in run.events("left", "lost")) >= 30, "the run went on without scores"
