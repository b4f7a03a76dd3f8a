"""Learners of several ranks, in one run with plain ones: real processes, gloo on the CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.system.conftest import SCRIPTS, WAIT_S, Run, heed_interrupts, members

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

SETTINGS = """[protocol]
learners = {learners}
steps = 12
fragments = 3
sync_every = 4
overlap = 1
synchronous = true
wait_for_learners_s = 240
codec = "fp32"
"""


def start_ranks(
    run: Run, name: str, layout: str, size: int, *words: str, folder: Path | None = None
) -> list[subprocess.Popen[str]]:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(run.free_port()), "WORLD_SIZE": str(size)}
    where |= {"ATOLL_JOIN": run.address(), "ATOLL_LEARNER": name, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPTS / "ranks.py"), layout, *words],
            cwd=folder or run.folder,
            env=run.environment({**where, "RANK": str(rank)}),
            text=True,
            stderr=subprocess.PIPE,
            preexec_fn=heed_interrupts,
        )
        for rank in range(size)
    ]


def train(run: Run, out: Path, layouts: dict[str, tuple[str, int]]) -> dict[str, torch.Tensor]:
    """The model of a synchronous run of these learners."""
    settings = run.folder / "settings.toml"
    settings.write_text(SETTINGS.format(learners=len(layouts)))
    run.out = out
    run.start("syncer", "--config", settings, "--out", out, "--port", "0")
    ranks = [one for name, (layout, size) in layouts.items() for one in start_ranks(run, name, layout, size)]
    said = [one.communicate(timeout=WAIT_S)[1] for one in ranks]
    assert all(one.returncode == 0 for one in ranks), "\n".join(said)
    run.ended()
    return dict(load_file(out / "model.safetensors"))


PLAIN = {f"learner-{number}": ("plain", 1) for number in range(3)}
MIXED = {"learner-0": ("fsdp", 2), "learner-1": ("ddp", 2), "learner-2": ("plain", 1)}


def test_a_run_of_several_layouts_is_that_of_plain_learners_to_the_bit(run: Run) -> None:
    whole = train(run, run.folder / "plain", PLAIN)
    mixed = train(Run(run.folder), run.folder / "mixed", MIXED)
    assert whole.keys() == mixed.keys()
    assert all(whole[name].equal(mixed[name]) for name in whole)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("layout", "size"),
    [("validating", 2), ("unsharded", 2), ("hsdp", 4), ("fsdp", 4), ("ddp", 4), ("tp", 2), ("fsdp-tp", 4)],
)
def test_one_learner_of_each_layout(run: Run, layout: str, size: int) -> None:
    """Tensor parallel adds in another order: equal to rounding. All others: to the bit."""
    whole = train(run, run.folder / "plain", {"learner-0": ("plain", 1)})
    ranks = train(Run(run.folder), run.folder / "ranks", {"learner-0": (layout, size)})
    assert whole.keys() == ranks.keys()
    for name, values in whole.items():
        same = torch.allclose(values, ranks[name], atol=1e-4) if "tp" in layout else values.equal(ranks[name])
        assert same, name


@pytest.mark.faults
def test_a_rank_that_is_killed_ends_its_learner_and_all_come_back(run: Run) -> None:
    script = SCRIPTS / "ranks.py"
    given = ("--learners", "2", "--ranks", "2", "--steps", "300", "--set", "cut_every=12", "--set", "fragments=6")
    run.train(script, *given, "--set", "sync_every=12", "--set", "overlap=2", "--", "fsdp", "0.1")
    run.until(lambda events: any(e["kind"] == "cut" and e.get("learners") for e in events))
    os.kill(find_rank(run, "learner-1", 1), signal.SIGKILL)
    run.until(lambda events: ("learner-1", 2) in members(events))
    run.ended()
    assert run.summary["tokens"]["in_flight"] == 0
    assert run.command("verify", run.out).returncode == 0
    again = run.command("replay", run.out)
    assert again.returncode == 0 and "bit-identical" in again.stdout, again.stdout + again.stderr


@pytest.mark.faults
def test_an_fsdp2_model_on_one_rank_takes_its_optimizer_from_a_peer_after_a_kill(run: Run) -> None:
    """Its parameters are DTensors, and the optimizer's state has to be of them too, as in every run of the tests in
    tests/learner/test_ranks.py."""
    given = ("--set", "evaluate_every=0", "--set", "fragments=4", "--set", "sync_every=4", "--set", "overlap=1")
    run.train(SCRIPTS / "ranks.py", "--learners", "2", *given, "--", "lone", "0.02")
    run.until(lambda events: ("learner-1", 1) in members(events))
    os.kill(run.pid("learner-1"), signal.SIGKILL)
    run.until(lambda events: ("learner-1", 2) in members(events) or sum(e["kind"] == "exited" for e in events) > 1)
    run.interrupt()
    run.ended()
    assert ("learner-1", 2) in members(run.events()) and run.summary["restarts"] == 1, run.logs()


def find_rank(run: Run, name: str, rank: int) -> int:
    """The training process of a rank."""
    for pid in run.processes():
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if (
            f"ATOLL_LEARNER={name}".encode() in words
            and f"RANK={rank}".encode() in words
            and b"atoll.courier" not in command
        ):
            return pid
    raise AssertionError(f"{name} has no rank {rank}")
