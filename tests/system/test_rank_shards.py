"""Learners of several ranks in a run whose syncer has several shards: real processes, gloo on the CPU."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file
from tests.system.conftest import WAIT_S, Run
from tests.system.test_ranks import start_ranks
from tests.system.test_shards import check_clean

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

SETTINGS = """[protocol]
learners = {learners}
steps = {steps}
fragments = 2
sync_every = 2
overlap = 1
synchronous = true
wait_for_learners_s = 240
codec = "{codec}"
"""
MIXED = {"learner-0": ("fsdp", 2), "learner-1": ("plain", 1)}


def train(
    run: Run, name: str, shards: int, layouts: dict[str, tuple[str, int]], codec: str = "fp32", steps: int = 4
) -> dict[str, torch.Tensor]:
    """The model of a synchronous run of these learners, whose syncer has so many shards."""
    out = run.out = run.folder / name
    settings = run.folder / f"{name}.toml"
    settings.write_text(SETTINGS.format(learners=len(layouts), codec=codec, steps=steps))
    which = ("--shard", f"1/{shards}") if shards > 1 else ()
    run.start("syncer", *which, "--config", settings, "--out", out, "--port", str(run.free_port()))
    url = run.address()
    others = [
        run.beside(
            "syncer", "--shard", f"{n}/{shards}", "--join", url, "--out", out / "shards" / str(n),
            "--port", str(run.free_port()),
        )
        for n in range(2, shards + 1)
    ]  # fmt: skip
    os.environ["WIDE"] = "1"
    try:
        ranks = [one for who, (layout, size) in layouts.items() for one in start_ranks(run, who, layout, size)]
    finally:
        del os.environ["WIDE"]
    said = [one.communicate(timeout=WAIT_S)[1] for one in ranks]
    assert all(one.returncode == 0 for one in ranks), "\n".join(said)
    run.ended()
    assert all(other.wait(30) == 0 for other in others)
    check_clean(run)
    return dict(load_file(out / "model.safetensors"))


def check_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)


def test_ranks_and_a_plain_learner_over_two_shards_have_the_bits_of_one(run: Run) -> None:
    """Two ranks with uneven parts; the shards cut a tensor of theirs between two of its rows."""
    both = train(run, "both", 2, MIXED)
    assert sum(path.stat().st_size for path in (run.out / "shards" / "2" / "journal").rglob("*.bin")) > 0
    check_equal(both, train(Run(run.folder), "alone", 1, MIXED))
