"""A minute of each flood, from the very address of the learners: they keep their rounds, and the syncer its memory.

Learners make steps by the clock and wait for nobody. What is compared is in how many rounds they were for every step
that they made, so that a machine on which other things run as well, the flood itself among them, does not decide.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.system.conftest import SCRIPTS, Run
from tests.system.joining import link_of, make_keys

from atoll.store.verify import verify_run

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.timeout(600)]

LEARNERS = 2
FLOOD_S = 60.0
KEPT = 0.95
FLOODS = {
    "bare connects": ("connect", 300, ""),
    "handshakes that go": ("shake", 114, ""),
    "handshakes that stay": ("stay", 114, ""),
    "wrong tokens": ("ask", 114, "nobody-knows-this-secret"),
    "a viewer's token": ("ask", 114, "look"),
}
"""What is done, how often a second, and the token that is shown."""


@dataclass(frozen=True)
class Stretch:
    rounds: int
    share: float
    """Rounds that a learner was in, for every step that it made."""
    cpu_s: float
    """That the syncer took: where this is small and rounds are few, the machine was busy with something else."""


def watch(run: Run, seconds: float) -> Stretch:
    """From now on."""
    before, began = len(run.events("round")), cpu_s(run.pid_of_command())
    time.sleep(seconds)
    rounds = run.events("round")[before:]
    steps: dict[str, list[int]] = {}
    for member in (member for event in rounds for member in event["members"]):
        steps.setdefault(member["learner"], []).append(member["t"])
    assert len(steps) == LEARNERS
    made = sum(max(times) - min(times) for times in steps.values())
    took_s = cpu_s(run.pid_of_command()) - began
    return Stretch(len(rounds), round(sum(map(len, steps.values())) / made, 4), round(took_s, 1))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def most_memory(pid: int) -> int:
    """The most bytes that a process ever had."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


def ceiling_of(run: Run) -> int:
    named = run.events("plan")[0]["memory_ceiling"]
    return int(named["fixed_bytes"] + LEARNERS * named["bytes_per_learner"])


@pytest.mark.parametrize("flood", FLOODS)
def test_learners_keep_their_rounds_in_a_flood(run: Run, flood: str, capsys: pytest.CaptureFixture[str]) -> None:
    keys, port = make_keys(run), run.free_port()
    run.start("syncer", "--learners", str(LEARNERS), "--out", run.out, "--keys", keys, "--port", str(port))
    link, (kind, rate, secret) = link_of(run, keys), FLOODS[flood]
    if secret == "look":
        shown = run.command("tokens", "--keys", keys, "add", "look", "--role", "viewer")
        assert shown.returncode == 0, shown.stderr
        tokens = json.loads((keys / "tokens.json").read_text())
        secret = next(token["secret"] for token in tokens if token["id"] == "look")
    learners = [
        run.beside("learn", SCRIPTS / "paced.py", "--join", link, "--name", f"paced-{n}") for n in range(LEARNERS)
    ]
    run.until(lambda events: sum(event["kind"] == "round" for event in events) > 20)
    calm = watch(run, FLOOD_S)

    command = [sys.executable, str(SCRIPTS / "flood.py"), kind, str(port), str(rate), secret]
    with (run.folder / "flood.log").open("w") as log:
        flooding = subprocess.Popen(command, stdout=log, env=run.environment())
    try:
        flooded = watch(run, FLOOD_S)
    finally:
        flooding.kill()
        flooding.wait()
    made, failed = map(int, (run.folder / "flood.log").read_text().splitlines()[-1].split())
    memory, ceiling = most_memory(run.pid_of_command()), ceiling_of(run)
    with capsys.disabled():
        print(f"\n{flood}: {made} made, {failed} refused; {calm} -> {flooded}; {memory >> 20} MiB", flush=True)

    assert made + failed > 0.8 * rate * FLOOD_S, "this was no flood"
    assert flooded.share >= KEPT * calm.share
    assert memory < ceiling
    assert not run.events("lost", "refused", "alarm")
    assert all(learner.poll() is None for learner in learners)
    run.interrupt()
    run.ended()
    assert "Traceback" not in run.stderr and "mistake" not in run.stderr, run.stderr[-2000:]
    assert all(learner.wait(60) == 0 for learner in learners)
    report = verify_run(run.out)
    assert report.ok, report.problem
