"""Lightning's Trainer: alone it counts and trains as ever; in a run it trains the global model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from tests.integrations.conftest import ENDLESS, EXAMPLES, Run, end_at, kill_and_see_back, told_loss
from tests.system.conftest import members
from tests.system.test_ranks import find_rank
from torch import nn
from torch.utils.data import DataLoader

from atoll.extras import install_command
from atoll.integrations.lightning import AtollCallback, check_in_run

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.system,
    # What Lightning says of its own calls, of a small machine and of the options below.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _no_run_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_SYNCER", "ATOLL_JOIN", "ATOLL_LEARNER", "ATOLL_ROLE"):
        monkeypatch.delenv(name, raising=False)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TwoOptimizers(Module):
    """By hand, as a GAN has them."""

    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.net(batch).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([p], lr=0.1) for p in self.net.parameters()]


class Failing(Module):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            raise ZeroDivisionError("as in a user's loss")
        return super().training_step(batch, batch_idx)


def fit(module: Module, *callbacks: AtollCallback, **options: Any) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=1, callbacks=list(callbacks), enable_model_summary=False, **quiet, **options)
    trainer.fit(module, DataLoader(torch.arange(32.0).view(16, 2) / 32, batch_size=2))


@pytest.mark.parametrize(
    ("module", "options", "steps"),
    [(Module, {}, 8), (Module, {"accumulate_grad_batches": 4}, 2), (TwoOptimizers, {}, 8)],
    ids=["plain", "accumulated", "two optimizers"],
)
def test_a_step_is_counted_when_the_batch_moved_the_global_step(
    module: type[Module], options: dict[str, Any], steps: int
) -> None:
    callback = AtollCallback(tokens=len)
    fit(module(), callback, **options)
    assert callback.learner is not None and callback.learner.steps == steps
    assert callback.learner._tally.tokens == 16 and "has left" in repr(callback.learner)


def test_a_step_that_the_scaler_leaves_out_is_none() -> None:
    class Overflowing(Module):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 3 else loss

    callback = AtollCallback(tokens=len)
    half = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    fit(Overflowing(), callback, plugins=[half])
    assert callback.learner is not None and callback.learner.steps == 7
    assert callback.learner._tally.tokens == 14


def test_alone_it_trains_as_it_does_without() -> None:
    plain, watched = Module(), Module()
    fit(plain)
    fit(watched, AtollCallback(tokens=len))
    assert torch.equal(plain.net.weight, watched.net.weight)


def test_an_error_of_the_training_passes_and_the_learner_has_left() -> None:
    callback = AtollCallback(tokens=len)
    with pytest.raises(ZeroDivisionError):
        fit(Failing(), callback)
    assert callback.learner is not None and "has left" in repr(callback.learner)


def test_two_learners_one_killed_train_a_model_that_loads_back_to_the_runs_score(run: Run) -> None:
    script = EXAMPLES / "lightning_fit.py"
    assert len(script.read_text().splitlines()) <= 40
    run.train(script, "--learners", "2", *ENDLESS, "--set", "sync_every=8")
    kill_and_see_back(run)
    assert run.summary["validation_loss_end"] < run.summary["validation_loss_start"]
    assert not run.events("same_batches") and "not leased" not in run.logs()
    saved = run.folder / "atoll-lightning.ckpt"
    assert told_loss(run, script, saved) == pytest.approx(run.summary["validation_loss_end"], rel=1e-4)


@pytest.mark.faults
def test_a_learner_that_is_taken_away_leaves_in_good_order(run: Run) -> None:
    run.train(EXAMPLES / "lightning_fit.py", "--learners", "2", "--steps", "1500", "--set", "sync_every=24")
    run.until(lambda events: ("learner-1", 1) in members(events))
    os.kill(run.pid("learner-1"), signal.SIGTERM)
    run.ended()
    [left] = [event for event in run.events("left") if event["learner"] == "learner-1"]
    assert "SIGTERM" in left["reason"] and "its state is saved" in left["reason"]


def test_a_stream_under_several_optimizers_ends_with_the_run_and_so_do_their_learning_rates(run: Run) -> None:
    script = Path(__file__).parent / "scripts" / "lightning_stream.py"
    run.train(script, "--learners", "2", *ENDLESS, "--set", "sync_every=8")
    run.until(lambda events: ("learner-1", 2) in members(events))
    end_at(run, max(one["t"] for one in run.events("round")[-1]["members"]) + 200)
    assert run.summary["validation_loss_end"] < run.summary["validation_loss_start"]
    assert not run.events("same_batches") and "not leased" not in run.logs()
    rates = re.findall(r"^last rates (\S+) (\S+)$", run.logs(), re.MULTILINE)
    assert len(rates) == 2 and max(float(rate) for both in rates for rate in both) < 0.0005, "of 0.01 at the beginning"
    [left] = [event for event in run.events("left") if event["learner"] == "learner-1"][:1]
    assert re.search(r"ZeroDivisionError: as in a user's loss \(lightning_stream\.py, line \d+\)", left["reason"])


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_ranks_under_ddp_are_one_learner_that_comes_back_when_one_is_killed(run: Run) -> None:
    script = Path(__file__).parent / "scripts" / "lightning_ranks.py"
    given = ("--learners", "1", "--ranks", "2", "--steps", "120", "--set", "fragments=3", "--set", "sync_every=6")
    run.train(script, *given)
    run.until(lambda events: sum(event["kind"] == "round" for event in events) >= 6)
    os.kill(find_rank(run, "learner-0", 1), signal.SIGKILL)
    run.ended()
    assert run.summary["restarts"] == 1 and "as learner-0, 2 ranks" in run.logs() and "not leased" not in run.logs()
    assert run.summary["validation_loss_end"] < run.summary["validation_loss_start"]
    assert run.summary["tokens"]["computed"] % 16 == 0, "8 samples of each rank in every step"
    ends = [line.split()[-1] for line in run.logs().splitlines() if line.startswith("rank ")]
    assert len(ends) == 2 and ends[0] == ends[1] and (run.folder / "saved.ckpt").exists()


def test_other_strategies_of_several_processes_are_refused() -> None:
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=ModelParallelStrategy(), logger=False)
    with pytest.raises(ValueError, match=r'ModelParallelStrategy here.*strategy="ddp"'):
        check_in_run(trainer)


def test_without_the_library_one_line_says_what_to_install() -> None:
    for name, extra in {"lightning": "lightning", "hf": "hf"}.items():
        library = {"lightning": "lightning", "hf": "transformers"}[name]
        code = f"import sys; sys.modules[{library!r}] = None; import atoll.integrations.{name}"
        told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert told.stderr.splitlines()[-1].endswith(f": {install_command(extra)}")
