"""The built-in script against a stand-in for the public face: what it hands over, and that its steps train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import atoll
from atoll.learner.state import Optimizers, optimizers_by_path
from atoll.workloads import builtin
from atoll.workloads.text import Windows

STEPS = 30


class Alone:
    """Trains for `STEPS` steps and notes what the script told it."""

    told: list[tuple[int, float, float]]
    paths: list[str]

    def __init__(self, model: torch.nn.Module, optimizers: Optimizers, data: str, tokens_per_step: int) -> None:
        assert len(data) == 64, "the digest of the data goes into the run"
        self.declared = tokens_per_step
        self.optimizers = optimizers_by_path(optimizers)
        self.progress = 0.0
        Alone.told = []

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def batches(self, dataset: Windows, batch_size: int) -> Iterator[torch.Tensor]:
        for step in range(STEPS):
            self.progress = step / STEPS
            yield dataset.gather(np.arange(step * batch_size, (step + 1) * batch_size) % len(dataset))

    def step(self, tokens: int, loss: torch.Tensor) -> None:
        assert tokens <= self.declared
        (rate,) = {group["lr"] for one in self.optimizers.values() for group in one.param_groups}
        Alone.paths = list(self.optimizers)
        Alone.told.append((tokens, float(loss.detach()), rate))


@pytest.mark.parametrize(
    ("optimizer", "paths"), [("adamw", ["optimizer"]), ("muon", ["optimizer/muon", "optimizer/adamw"])]
)
def test_the_builtin_script_trains_on_the_public_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, paths: list[str]
) -> None:
    (tmp_path / "data.txt").write_text("one fish two fish red fish blue fish\n" * 200)
    run_toml = tmp_path / "run.toml"
    work = f'depth = 1\nblock = 32\nbatch = 4\noptimizer = "{optimizer}"\ndata = ["{tmp_path}/data.txt"]\n'
    run_toml.write_text(f"seed = 1\n[workload]\n{work}")
    scored: list[float | str] = []

    def evaluate(
        model: torch.nn.Module,
        score: Callable[[torch.nn.Module], float],
        sample: Callable[[torch.nn.Module], str],
        unit: str,
    ) -> None:
        scored.extend((score(model), sample(model), unit))

    monkeypatch.setitem(vars(atoll), "Learner", Alone)
    monkeypatch.setitem(vars(atoll), "evaluate", evaluate)
    monkeypatch.setenv("ATOLL_RUN_TOML", str(run_toml))
    builtin.main()

    tokens, losses, rates = zip(*Alone.told, strict=True)
    assert Alone.paths == paths, "where their states stand in cuts, also in those of older runs"
    assert tokens == (4 * 32,) * STEPS
    assert losses[-1] < losses[0] - 1
    assert rates[0] < max(rates) > rates[-1]
    assert isinstance(scored[0], float) and isinstance(scored[1], str) and scored[2] == "nats per byte"
