"""Learners of several ranks, in one run with plain ones: real processes, gloo on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.system.conftest import SCRIPTS, WAIT_S, Run, heed_interrupts

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


def start_ranks(run: Run, name: str, layout: str, size: int, *words: str) -> list[subprocess.Popen[str]]:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(run.free_port()), "WORLD_SIZE": str(size)}
    where |= {"ATOLL_JOIN": run.address(), "ATOLL_LEARNER": name, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPTS / "ranks.py"), layout, *words],
            cwd=run.folder,
            env=run.environment({**where, "RANK": str(rank)}),
            text=True,
            stderr=subprocess.PIPE,
            preexec_fn=heed_interrupts,
        )
        for rank in range(size)
    ]


def train(run: Run, out: Path, layouts: dict[str, tuple[str, int]]) -> dict[str, object]:
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
