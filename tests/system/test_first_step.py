"""A script whose first step takes long because it computes, as torch.compile does: told as such, and no fault.

In every run of the tests: tests/protocol/test_first_step.py and tests/courier/test_processor_use.py.
"""

from __future__ import annotations

import json

import pytest
from tests.system.conftest import Run

from atoll.observe.report.reading import find_faults

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.timeout(600)]

COMPILES = """
import time
import torch
import atoll

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with atoll.Learner(model, optimizer) as learner:
    began = time.process_time()
    while time.process_time() - began < 5:
        pass
    while not learner.done:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        time.sleep(0.02)
        learner.step(tokens=1)
"""


def test_a_first_step_that_computes_is_told_and_is_no_fault(run: Run) -> None:
    (run.folder / "mine.py").write_text(COMPILES)
    words = ("--learners", "1", "--steps", "20", "--set", "evaluate_every=0", "--set", "stalled_after_s=2")
    run.train("mine.py", *words)
    run.until(lambda events: any(event["kind"] == "starting" for event in events))
    status = json.loads(run.ask("status", run.out, "--json").stdout)
    [learner] = status["learners"]
    assert learner["state"] == "starting" and learner["first_step_s"] >= 1.5, learner
    assert status["goodput"] is None, "no one has stepped"
    run.ended()
    [told] = run.events("starting")
    assert "first step: " in told["text"] and "s so far (compiling?)" in told["text"]
    assert [event["text"] for event in run.events("steps")] == ["learner-0 has made its first step"]
    assert "stalled" not in {fault.kind for fault in find_faults(run.events())}
    assert "no one has stepped yet" in run.stdout
