"""One of four learners attacks, in real processes: four cells of the table of benchmarks/insiders.py.

Synchronous, so that losses compare however crowded the machine is: every round has all four members.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.system.conftest import SCRIPTS, Run

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.timeout(1200)]

SHAPE = (
    "--set",
    "synchronous=true",
    "--learners",
    "4",
    "--set",
    "fragments=2",
    "--set",
    "sync_every=12",
    "--steps",
    "400",
    "--set",
    "evaluate_every=0",
)


def train(folder: Path, attack: str, *words: str, robust: bool = True, shards: int = 1) -> Run:
    run, given = Run(folder), ("--syncer-shards", str(shards), *(["--robust"] if robust else []))
    run.train(SCRIPTS / "insider.py", *SHAPE, *given, "--", attack, *words)
    try:
        return run.ended()
    finally:
        run.kill()


def loss_of(run: Run) -> float:
    """Of the finished model: what it still lacks of its teacher, and the noise of what learners saw."""
    model = load_file(run.out / "model.safetensors")
    teacher = teacher_of()
    x = np.random.default_rng(0).standard_normal((4096, 32)).astype(np.float32)
    wanted = np.tanh(x @ teacher["0.weight"].T + teacher["0.bias"]) @ teacher["2.weight"].T + teacher["2.bias"]
    found = np.tanh(x @ model["0.weight"].T + model["0.bias"]) @ model["2.weight"].T + model["2.bias"]
    return float(np.mean((found - wanted) ** 2)) + 0.1**2


def teacher_of() -> dict[str, np.ndarray]:
    import torch

    torch.manual_seed(1)
    teacher = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    return {name: value.numpy() for name, value in teacher.state_dict().items()}


def named(run: Run) -> set[str]:
    return {str(event["learner"]) for event in run.events("suspect", "above")}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = train(tmp_path_factory.mktemp("honest"), "none")
    assert named(run) == set()
    return run


@pytest.mark.parametrize("words", [("flip", "claims"), ("loud",), ("noise",), ("constant", "claims")], ids=" ".join)
def test_an_attacker_is_contained_and_named_and_nobody_else_is(
    words: tuple[str, ...], honest: Run, tmp_path: Path
) -> None:
    run = train(tmp_path, *words)
    assert named(run) == {"learner-3"}
    assert loss_of(run) <= 1.05 * loss_of(honest)
    shares = [
        m["influence"] for event in run.events("round")[-20:] for m in event["members"] if m["learner"] == "learner-3"
    ]
    assert max(shares, default=0.0) == 0.0, "nothing of it is merged any more"
    assert run.command("verify", run.out).returncode == 0


def test_shards_leave_out_what_a_syncer_of_one_process_does(tmp_path: Path) -> None:
    models = []
    for shards in (1, 2):
        folder = tmp_path / str(shards)
        folder.mkdir()
        run = train(folder, "flip", shards=shards)
        assert named(run) == {"learner-3"}
        assert run.command("verify", run.out).returncode == 0
        again = run.command("replay", run.out)
        assert again.returncode == 0 and "bit-identical" in again.stdout, again.stdout + again.stderr
        models.append(load_file(run.out / "model.safetensors"))
    assert all(models[0][name].tobytes() == models[1][name].tobytes() for name in models[0])


def test_without_robust_the_attacker_is_named(tmp_path: Path) -> None:
    run = train(tmp_path, "flip", robust=False)
    assert named(run) == {"learner-3"}
