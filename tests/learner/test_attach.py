"""A loop that is left as it is: steps are counted by the optimizers' own hooks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import atoll


@pytest.fixture(autouse=True)
def _no_run_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_SYNCER", "ATOLL_JOIN", "ATOLL_LEARNER", "ATOLL_ROLE"):
        monkeypatch.delenv(name, raising=False)


def make_step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def test_a_step_of_the_optimizer_is_a_step_of_the_learner() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = atoll.attach(model, optimizer, tokens=7)
    for _ in range(3):
        make_step(model, optimizer)
    assert (learner.steps, learner._tally.tokens) == (3, 21)
    learner.leave()
    make_step(model, optimizer)
    assert learner.steps == 3
    learner.leave()  # it has left: nothing happens


def test_tokens_and_loss_may_be_asked_for_behind_every_step() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counted, read = iter([5, 6]), []
    learner = atoll.attach(model, optimizer, tokens=lambda: next(counted), loss=lambda: read.append(1) or 0.5)
    for _ in range(2):
        make_step(model, optimizer)
    learner.leave()
    assert learner._tally.tokens == 11 and len(read) == 2


def test_of_several_optimizers_a_step_is_made_when_each_has_made_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    learner = atoll.attach(model, [first, second], tokens=1)
    make_step(model, first)
    make_step(model, first)
    assert learner.steps == 0
    make_step(model, second)
    assert learner.steps == 1
    learner.leave()


def test_one_kernel_may_join_leave_and_join_again() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        learner = atoll.attach(model, optimizer, tokens=1)
        make_step(model, optimizer)
        learner.leave()
        assert learner.steps == 1


def test_mistakes_are_told() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="counts the steps of optimizers, and none is given"):
        atoll.attach(model, None, tokens=1)
    with pytest.raises(ValueError, match='at_end = \'stop\' is not known: use "exit" or "go on"'):
        atoll.attach(model, optimizer, tokens=1, at_end="stop")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="did you mean 'syncer'"):
        atoll.attach(model, optimizer, tokens=1, sincer="")


@pytest.mark.parametrize(("last", "code"), [("", 0), ("raise ValueError('mine')", 1)])
def test_a_script_that_ends_leaves_before_pools_are_closed(tmp_path: Path, last: str, code: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, atoll\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(1)\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "learner = atoll.attach(model, optimizer, tokens=1)\n"
        "learner.on_leaving(lambda: print('left', pool.submit(int).result()))\n" + last
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "left 0\n"), done.stderr


@pytest.mark.parametrize(("prompt", "said"), [("", "as in a cell"), ("sys.ps1 = '>>> '", "None")])
def test_a_script_that_fails_leaves_with_its_error_and_a_prompt_not_with_an_earlier_one(
    tmp_path: Path, prompt: str, said: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, atoll\n"
        "model = torch.nn.Linear(2, 1)\n"
        "learner = atoll.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), tokens=1)\n"
        "learner.leave = print\n"
        f"{prompt}\n"
        "raise LookupError('as in a cell')"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{said}\n", done.stderr


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_leaves_out_is_none(fused: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    learner = atoll.attach(model, optimizer, tokens=1)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert learner.steps == 2
    learner.leave()
