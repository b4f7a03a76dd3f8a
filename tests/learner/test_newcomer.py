"""A learner that joins a run of real processes late, is killed, and comes back: it has its peer's AdamW every time."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.learner.test_two_learners import StartedProcesses, assert_is_the_runs, contributions, events, place, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

__all__ = ["place"]

SCRIPT = """
import json, os, sys, time
import torch
import atoll

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


class Diary:
    'Taken between the same two steps as the optimizer, it says what the optimizer was then.'
    given = taken = None

    def now(self):
        state = [optimizer.state.get(parameter, {}) for parameter in model.parameters()]
        return [{key: value.tolist() for key, value in one.items()} for one in state]

    def state_dict(self):
        self.given = (self.given or 0) + 1
        return {"moments": self.now()}

    def load_state_dict(self, state):
        self.taken = state["moments"]


diary = Diary()
learner = atoll.Learner(model, optimizer)
learner.register("diary", diary, from_peers=True)
data = torch.randn(256, 4)
with learner:
    json.dump({"taken": diary.taken, "now": diary.now()}, open(sys.argv[1] + ".joined", "w"))
    for batch in learner.batches(data, batch_size=8):
        loss = (model(batch) - torch.randn(len(batch), 2)).square().mean()  # noise: see tests/system/scripts/line.py
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
        learner.step(tokens=len(batch), loss=loss)
values = {name: parameter.tolist() for name, parameter in model.named_parameters()}
json.dump({"model": values, "given": diary.given}, open(sys.argv[1], "w"))
"""


def joined(place: StartedProcesses, name: str) -> dict[str, Any]:
    """What the script found when it had joined."""
    path = Path(f"{place.result_path(name)}.joined")

    def whole() -> dict[str, Any] | None:
        try:
            return json.loads(path.read_text())  # type: ignore[no-any-return]
        except (OSError, ValueError):
            return None

    found: dict[str, Any] = until(whole, f"{name} has joined")
    path.unlink()
    return found


@pytest.mark.parametrize(
    "direct", [pytest.param("1", id="direct"), pytest.param("0", id="relay", marks=pytest.mark.faults)]
)
def test_a_latecomer_and_one_that_was_killed_have_their_peers_adamw_bit_for_bit(
    place: StartedProcesses, direct: str
) -> None:
    place.script.write_text(SCRIPT)
    out = place.syncer(tokens=100_000_000)
    first = place.learner("learner-0", ATOLL_DIRECT=direct)
    assert joined(place, "learner-0")["taken"] is None, "the first of a run has nobody to ask"
    until(lambda: contributions(out, "learner-0") >= 4, "rounds go on")

    second = place.learner("learner-1")
    found = joined(place, "learner-1")
    assert found["taken"] == found["now"] and found["now"][0]["step"] > 0 and any(found["now"][0]["exp_avg"][0])
    until(lambda: contributions(out, "learner-1") >= 2, "it contributes")

    second.kill()
    second.wait()
    before = contributions(out, "learner-0")
    second = place.learner("learner-1", ATOLL_STATE="")  # as a supervisor starts it: not from its own part of a cut
    again = joined(place, "learner-1")
    assert again["taken"] == again["now"] != found["now"], "as it is by then"
    until(lambda: contributions(out, "learner-0") > before, "its peer was not held up")
    until(lambda: len(events(out, "helped")) == 2, "the syncer has heard that it was taken")
    helped = [(e["learner"], e["incarnation"], e["peer"]) for e in events(out, "helped")]
    assert helped == [("learner-1", 1, "learner-0"), ("learner-1", 2, "learner-0")]
    assert not events(out, "fresh")

    place.processes[0].send_signal(signal.SIGTERM)
    assert_is_the_runs(place.result(first, "learner-0"), out)
    assert_is_the_runs(place.result(second, "learner-1"), out)
