"""Extra learners that give what they should not, in a synchronous run: its model is the one of the run without them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tests.system.conftest import SCRIPTS, Run

from atoll.chaos.rogue import ATTACKS, HARMLESS

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.timeout(900)]

TWELVE = [name for name in ATTACKS if name not in HARMLESS]
SAMPLE = ["nan", "stale", "garbage"]
WORDS = (
    SCRIPTS / "plain.py",
    "--set",
    "synchronous=true",
    "--learners",
    "2",
    "--steps",
    "160",
    "--set",
    "fragments=2",
    "--set",
    "sync_every=4",
)


def digest_of(run: Run) -> str:
    """Of the numbers: the file's metadata names the run."""
    model = load_file(run.out / "model.safetensors")
    return hashlib.sha256(b"".join(name.encode() + model[name].tobytes() for name in sorted(model))).hexdigest()


@pytest.fixture
def rogues(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for one in started:
        one.kill()
        one.wait()


@pytest.mark.parametrize("attacks", [SAMPLE, TWELVE], ids=["sample", "all"])
def test_attacks_leave_the_model_as_it_is_without_them(
    attacks: list[str], tmp_path_factory: pytest.TempPathFactory, rogues: list[subprocess.Popen[bytes]]
) -> None:
    assert len(TWELVE) >= 12
    calm = Run(tmp_path_factory.mktemp("calm"))
    (calm.folder / "gate").touch()
    calm.train(*WORDS, "--set", "evaluate_every=0").ended()

    run = Run(tmp_path_factory.mktemp("attacked"))
    run.train(*WORDS, "--set", "evaluate_every=0")
    run.until(lambda _: len(run.events("round")) >= 16)  # what is usual must be known
    url = (run.out / "syncer.url").read_text()
    with (run.folder / "rogues.log").open("wb") as log:
        for name in attacks:
            command = [sys.executable, "-m", "atoll.chaos.rogue", str(run.out), url, name, "0.1"]
            rogues.append(subprocess.Popen(command, stdout=log, stderr=log))
    joined = {f"rogue-{name}" for name in attacks}
    run.until(lambda _: _who(run, "joined") >= joined)
    run.until(lambda _: _who(run, "refused", "muted", "lost", "left") >= joined)
    (run.folder / "gate").touch()
    run.ended()

    members = {m["learner"] for event in run.events("round") for m in event["members"]}
    assert members == {"learner-0", "learner-1"}, "nothing of theirs was merged"
    assert not {e["learner"] for e in run.events("quarantined")} & members, "the honest are not suspected"
    assert digest_of(run) == digest_of(calm)
    assert run.command("verify", run.out).returncode == 0


def _who(run: Run, *kinds: str) -> set[str]:
    """Without the process number behind the name."""
    names = [str(event["learner"]) for event in run.events(*kinds)]
    return {name.rpartition("-")[0] for name in names if name.startswith("rogue-")}
