"""The baseline: two ranks compute what one process with the joint batch would, and rank 0 reports."""

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.protocol.errors import ConfigError
from atoll.workloads.data_parallel import FlatGradients, batch_indices, train_rank, train_step
from atoll.workloads.settings import WorkloadSettings
from atoll.workloads.text import Text, Windows
from atoll.workloads.training import build_model, build_optimizers, set_learning_rate, validation_loss

STEPS = 6


def settings(data: Path) -> WorkloadSettings:
    return WorkloadSettings(depth=1, block=16, batch=4, data=(str(data),), eval_windows=8, eval_every=3)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.txt"
    path.write_text("".join(f"{n} squared is {n * n}\n" for n in range(2000)))
    return path


def joint_batch_losses(chosen: WorkloadSettings, seed: int) -> float:
    """What the two ranks should arrive at: one process, both ranks' batches in one."""
    text = Text.load(chosen.data)
    dataset = Windows(text, chosen.block)
    model = build_model(chosen, seed)
    optimizers, gradients = build_optimizers(model, chosen), FlatGradients(model)
    streams = [batch_indices(len(dataset), chosen.batch, seed, rank) for rank in range(2)]
    for step in range(STEPS):
        set_learning_rate(optimizers, step / STEPS, chosen)
        batch = dataset.gather(np.concatenate([next(stream) for stream in streams]))
        train_step(model, optimizers, gradients, batch, 1, chosen.clip)
    return validation_loss(model, text, chosen.eval_windows)


def test_two_ranks_equal_one_process_with_the_joint_batch(tmp_path: Path, data: Path) -> None:
    run_toml = tmp_path / "run.toml"
    run_toml.write_text(
        f'seed = 5\n[workload]\ndepth = 1\nblock = 16\nbatch = 4\ndata = ["{data}"]\neval_windows = 8\neval_every = 3\n'
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ATOLL_STEPS": str(STEPS)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "atoll.workloads.data_parallel"],
            env=os.environ | common | {"RANK": str(rank), "ATOLL_RUN_TOML": str(run_toml)},
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    first, second = (rank.communicate(timeout=60)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert second == b""
    reports = [json.loads(line) for line in first.splitlines()]
    losses = [report["validation_loss"] for report in reports if report["kind"] == "validation"]
    assert losses[-1] == pytest.approx(joint_batch_losses(settings(data), seed=5), rel=1e-5)
    assert losses[-1] < losses[0]


def test_the_reports_of_one_rank_tell_its_story_and_repeat(data: Path) -> None:
    stories: list[list[dict[str, object]]] = [[], []]
    for story in stories:
        train_rank(settings(data), 0, 1, STEPS, 5, story.append)
    story, again = stories
    assert [(r["kind"], r.get("step")) for r in story] == [
        ("start", None), ("validation", 0), ("validation", 3), ("progress", 6), ("validation", 6), ("end", 6),
    ]  # fmt: skip
    assert [r.get("validation_loss") for r in story] == [r.get("validation_loss") for r in again]


def test_gradients_are_clipped_as_one_vector() -> None:
    model = torch.nn.Linear(3, 2)
    gradients = FlatGradients(model)
    gradients.buffer.fill_(10.0)
    gradients.clip(1.0)
    assert float(gradients.buffer.norm()) == pytest.approx(1.0, rel=1e-4)
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad.flatten(), gradients.buffer[:6])


def test_ranks_see_different_batches_and_every_window_once_per_epoch() -> None:
    epoch = [np.concatenate(list(itertools.islice(batch_indices(12, 4, 0, rank), 3))) for rank in range(2)]
    assert sorted(epoch[0]) == sorted(epoch[1]) == list(range(12))
    assert list(epoch[0]) != list(epoch[1])
    with pytest.raises(ConfigError, match=r"12 windows, too few for workload\.batch = 13"):
        next(batch_indices(12, 13, 0, 0))
