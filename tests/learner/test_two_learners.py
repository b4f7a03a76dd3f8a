"""Two small learners in processes of their own, with their couriers, against a syncer in another."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tomli_w

from atoll.store.rundir import RunDir
from atoll.store.verify import verify_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

WAIT_S = 180.0
SCRIPT = """
import json, os, sys, time
import torch
import atoll

torch.manual_seed(hash(os.environ["ATOLL_LEARNER"]) % 1000)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data, most = torch.randn(256, 4), int(os.environ.get("MOST_STEPS", "1000000"))
bare, how = model, os.environ.get("HOW", "")
if "compiled" in how:
    model = torch.compile(model, backend="eager")

def batches(learner):
    if "own" in how:  # every learner shuffles by the same seed
        same = torch.Generator().manual_seed(0)
        rows = [torch.arange(8.0 * n, 8.0 * n + 8).view(2, 4) for n in torch.randperm(1000, generator=same)]
        return iter(rows)
    if "loader" in how:
        sampler = learner.sampler(data, batch_size=8)
        return iter(torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=2))
    return learner.batches(data, batch_size=8)

with atoll.Learner(model, optimizer) as learner:
    for batch in batches(learner):
        loss = (model(batch) - torch.randn(len(batch), 2)).square().mean()  # noise: see tests/system/scripts/line.py
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.002)
        learner.step(tokens=len(batch), loss=loss)
        if learner.steps >= most:
            break
values = {name: parameter.tolist() for name, parameter in bare.named_parameters()}
said = {"done": learner.done, "steps": learner.steps, "model": values}
json.dump({**said, "compiler": "torch._dynamo.eval_frame" in sys.modules}, open(sys.argv[1], "w"))
"""


def until(true: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (result := true()):
        assert time.monotonic() < deadline, f"{what}: not within {WAIT_S:g} s"
        time.sleep(0.02)
    return result


class StartedProcesses:
    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path
        self.script = tmp_path / "script.py"
        self.script.write_text(SCRIPT)
        self.processes: list[subprocess.Popen[bytes]] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def syncer(self, name: str = "run", **rules: object) -> RunDir:
        out = RunDir.create(self.path / name)
        document = {
            "protocol": {"learners": 2, "fragments": 2, "sync_every": 4, "codec": "fp32", **rules},
            "service": {"port": self.port},
        }
        out.settings.write_bytes(tomli_w.dumps(document).encode())
        self._start([sys.executable, "-m", "atoll.syncer", str(out.path)], out.path / "syncer.log", {})
        until(out.address.exists, "the syncer listens")
        return out

    def learner(self, name: str, **env: str) -> subprocess.Popen[bytes]:
        common = {"ATOLL_SYNCER": f"http://127.0.0.1:{self.port}", "ATOLL_LEARNER": name, "ATOLL_ROLE": "learner"}
        command = [sys.executable, str(self.script), str(self.result_path(name))]
        return self._start(command, self.path / f"{name}.log", {**common, **env})

    def _start(self, command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env={**os.environ, **env},
                preexec_fn=_heed_interrupts,
            )
        self.processes.append(process)
        return process

    def result_path(self, name: str) -> Path:
        return self.path / f"{name}.json"

    def result(self, process: subprocess.Popen[bytes], name: str) -> dict[str, Any]:
        """What the script wrote, once it ended well."""
        code = process.wait(WAIT_S)
        assert code == 0, (self.path / f"{name}.log").read_text()
        return json.loads(self.result_path(name).read_text())  # type: ignore[no-any-return]

    def log(self, name: str) -> str:
        return (self.path / f"{name}.log").read_text()


def _heed_interrupts() -> None:
    """A shell in the background starts everything with Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[StartedProcesses]:
    place = StartedProcesses(tmp_path)
    yield place
    for process in place.processes:
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def events(out: RunDir, kind: str) -> list[dict[str, Any]]:
    lines = out.events.read_bytes().splitlines(keepends=True)
    return [e for e in (json.loads(line) for line in lines if line.endswith(b"\n")) if e["kind"] == kind]


def contributions(out: RunDir, learner: str) -> int:
    return sum(any(m["learner"] == learner for m in event["members"]) for event in events(out, "round"))


def courier_of(process: subprocess.Popen[bytes]) -> int:
    def child() -> int:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(children[0]) if children else 0

    return int(until(child, "a courier is there"))


def assert_is_the_runs(result: dict[str, Any], out: RunDir) -> None:
    until(out.model.exists, "the syncer has written the model, which it does once its learners have left")
    saved = safetensors.numpy.load_file(out.model)
    assert result["model"].keys() == saved.keys()
    for name, values in saved.items():
        assert np.array_equal(np.array(result["model"][name], dtype=np.float32), values), name


@pytest.mark.faults
@pytest.mark.parametrize(
    "rules",
    [
        pytest.param({"adopt": "blend", "codec": "bf16"}, id="blend"),
        pytest.param({"adopt": "carry"}, id="carry"),
        pytest.param({"adopt": "overwrite", "synchronous": True, "overlap": 0}, id="sync"),
    ],
)
def test_both_end_with_the_runs_model(place: StartedProcesses, rules: dict[str, object]) -> None:
    out = place.syncer(steps=100_000, **rules)
    learners = {name: place.learner(name) for name in ("learner-0", "learner-1")}
    until(lambda: all(contributions(out, name) >= 2 for name in learners), "both contribute")
    place.processes[0].send_signal(signal.SIGTERM)
    for name, process in learners.items():
        result = place.result(process, name)
        assert result["done"]
        assert_is_the_runs(result, out)
    assert place.processes[0].wait(WAIT_S) == 0
    assert not events(out, "refused")


@pytest.mark.faults
@pytest.mark.parametrize(
    "rules",
    [pytest.param({}, id="asynchronous"), pytest.param({"synchronous": True, "overlap": 0}, id="synchronous")],
)
def test_a_killed_courier_is_replaced_and_its_learner_contributes_again(
    place: StartedProcesses, rules: dict[str, object]
) -> None:
    out = place.syncer(tokens=100_000_000, **rules)
    first, second = place.learner("learner-0"), place.learner("learner-1")
    until(lambda: contributions(out, "learner-0") >= 2 and contributions(out, "learner-1") >= 2, "both contribute")
    os.kill(courier_of(first), signal.SIGKILL)
    until(lambda: "the courier died" in place.log("learner-0"), "the learner notices")
    before = contributions(out, "learner-0")
    until(lambda: contributions(out, "learner-0") >= before + 5, "it contributes again")
    assert {event["incarnation"] for event in events(out, "joined")} == {1}
    place.processes[0].send_signal(signal.SIGTERM)
    for name, process in (("learner-0", first), ("learner-1", second)):
        assert_is_the_runs(place.result(process, name), out)


@pytest.mark.faults
def test_a_compiled_learner_and_a_plain_one_with_a_loader_share_a_run(place: StartedProcesses) -> None:
    out = place.syncer(tokens=100_000_000)
    learners = {
        "learner-0": place.learner("learner-0", HOW="compiled"),
        "learner-1": place.learner("learner-1", HOW="loader"),
    }
    until(lambda: all(contributions(out, name) >= 3 for name in learners), "both contribute")
    place.processes[0].send_signal(signal.SIGTERM)
    for name, process in learners.items():
        result = place.result(process, name)
        assert_is_the_runs(result, out)
        assert result["compiler"] == (name == "learner-0"), "processes of tests load it where it is used: tests/startup"
    assert not events(out, "refused") and not events(out, "unbalanced") and not events(out, "same_batches")
    report = verify_run(out.path)
    assert report.ok, report.problem


@pytest.mark.faults
def test_learners_that_shuffle_alike_are_told_of(place: StartedProcesses) -> None:
    out = place.syncer(tokens=100_000_000)
    learners = {name: place.learner(name, HOW="own") for name in ("learner-0", "learner-1")}
    [told] = until(lambda: events(out, "same_batches"), "it is told")
    assert "learner-0 and learner-1 train on the same batches" in told["text"]
    place.processes[0].send_signal(signal.SIGTERM)
    for name, process in learners.items():
        place.result(process, name)
    assert len(events(out, "same_batches")) == 1


@pytest.mark.faults
def test_learners_outlive_a_syncer_and_join_the_next_on_its_port(place: StartedProcesses) -> None:
    out = place.syncer(tokens=100_000_000)
    learners = {name: place.learner(name) for name in ("learner-0", "learner-1")}
    until(lambda: contributions(out, "learner-0") >= 2 and contributions(out, "learner-1") >= 2, "both contribute")
    place.processes[0].kill()
    place.processes[0].wait()
    until(lambda: all("training goes on" in place.log(name) for name in learners), "both notice")
    assert all(process.poll() is None for process in learners.values())
    again = place.syncer("again", tokens=200_000_000)
    until(lambda: all(contributions(again, name) >= 2 for name in learners), "both contribute to the new run")
    place.processes[-1].send_signal(signal.SIGTERM)
    for name, process in learners.items():
        assert_is_the_runs(place.result(process, name), again)


@pytest.mark.faults
def test_one_stays_while_others_leave_early_are_interrupted_and_are_killed(place: StartedProcesses) -> None:
    out = place.syncer(learners=4, tokens=100_000_000)
    stays, early = place.learner("learner-0"), place.learner("learner-1", MOST_STEPS="30")
    interrupted, killed = place.learner("learner-2"), place.learner("learner-3")
    result = place.result(early, "learner-1")
    assert not result["done"] and result["steps"] == 30
    assert "it left before the run ended" in goodbye_reason(out, "learner-1")

    until(lambda: contributions(out, "learner-2") >= 2, "learner-2 contributes")
    interrupted.send_signal(signal.SIGINT)
    assert place.result(interrupted, "learner-2")["done"], "its training loop was told"
    assert "Ctrl-C again ends it at once" in place.log("learner-2") and "Traceback" not in place.log("learner-2")
    assert "it was interrupted (Ctrl-C); its state is saved" in goodbye_reason(out, "learner-2")
    assert [e["unmerged_tokens"] for e in events(out, "left") if e["learner"] == "learner-2"] == [0], "nothing is lost"

    until(lambda: contributions(out, "learner-3") >= 2, "learner-3 contributes")
    courier = courier_of(killed)
    killed.kill()
    killed.wait()
    assert "its training process died" in goodbye_reason(out, "learner-3")
    until(lambda: not Path(f"/proc/{courier}").exists() or _is_zombie(courier), "the courier ends")

    place.processes[0].send_signal(signal.SIGTERM)
    assert_is_the_runs(place.result(stays, "learner-0"), out)


def test_the_second_interrupt_ends_a_learner_at_once(place: StartedProcesses) -> None:
    out = place.syncer(learners=1, tokens=100_000_000)
    learner = place.learner("learner-0")
    until(lambda: contributions(out, "learner-0") >= 2, "it contributes")
    place.processes[0].send_signal(signal.SIGSTOP)  # nobody takes its last steps
    learner.send_signal(signal.SIGINT)
    until(lambda: "Ctrl-C again" in place.log("learner-0"), "it leaves in good order")
    learner.send_signal(signal.SIGINT)
    assert learner.wait(WAIT_S) == 130
    assert place.log("learner-0").splitlines()[-1] == "atoll: interrupted; the same command lets it join again"
    assert "Traceback" not in place.log("learner-0")


def goodbye_reason(out: RunDir, learner: str) -> str:
    """What the syncer says of a learner that left."""
    left = until(lambda: [e for e in events(out, "left") if e["learner"] == learner], f"{learner} says goodbye")
    return str(left[0]["text"])


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
