"""Hugging Face's Trainer: alone it counts and trains as ever; in a run it trains the global model and saves it."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import DistributedType, PartialState
from safetensors import safe_open
from tests.integrations.conftest import ENDLESS, EXAMPLES, Run, kill_and_see_back, told_loss
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from atoll.integrations.hf import check_in_run, joined
from atoll.learner.model import describe

pytestmark = [pytest.mark.integrations, pytest.mark.system]

SAMPLES = [{"input_ids": torch.arange(i, i + 8) % 16, "labels": torch.arange(i, i + 8) % 16} for i in range(40)]


@pytest.fixture(autouse=True)
def _no_run_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_SYNCER", "ATOLL_JOIN", "ATOLL_LEARNER", "ATOLL_ROLE"):
        monkeypatch.delenv(name, raising=False)


def make_model() -> GPT2LMHeadModel:
    set_seed(0)
    size = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))


def make_trainer(folder: Path, model: Any = None, kind: type[Trainer] = Trainer, **arguments: Any) -> Trainer:
    usual = {"max_steps": 3, "per_device_train_batch_size": 4, "include_num_input_tokens_seen": "all"}
    quiet = {"disable_tqdm": True, "dataloader_pin_memory": False, "save_strategy": "no", "use_cpu": True}
    args = TrainingArguments(str(folder), **{**usual, **quiet, **arguments})
    return kind(model if model is not None else make_model(), args, train_dataset=SAMPLES)


def test_tokens_must_be_counted(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, include_num_input_tokens_seen="no")
    with pytest.raises(ValueError, match=r'include_num_input_tokens_seen="all"'), joined(trainer):
        trainer.train()


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=2)
    with joined(trainer) as joined_by:
        trainer.train()
    learner = joined_by.learner
    assert learner is not None and learner.steps == 3
    assert learner._tally.tokens == 3 * 2 * 4 * 8
    assert joined_by not in trainer.callback_handler.callbacks and "training_step" not in vars(trainer)


def test_alone_it_trains_as_it_does_without(tmp_path: Path) -> None:
    plain, watched = make_trainer(tmp_path / "a"), make_trainer(tmp_path / "b")
    for trainer in (plain, watched):
        set_seed(1)
        if trainer is plain:
            trainer.train()
        else:
            with joined(trainer):
                trainer.train()
    for one, other in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_step_that_the_scaler_leaves_out_is_none(tmp_path: Path) -> None:
    class Overflowing(Trainer):
        def compute_loss(self, *given: Any, **named: Any) -> torch.Tensor:
            loss = super().compute_loss(*given, **named)
            return loss * float("inf") if self.state.global_step == 1 else loss

    trainer = make_trainer(tmp_path, kind=Overflowing, max_grad_norm=0.0)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with joined(trainer) as joined_by:
        trainer.train()
    assert trainer.state.global_step == 3
    learner = joined_by.learner
    assert learner is not None and learner.steps == 2 and learner._tally.tokens == 2 * 4 * 8


def test_an_error_of_the_training_passes_and_the_learner_has_left(tmp_path: Path) -> None:
    class Failing(Trainer):
        def compute_loss(self, *given: Any, **named: Any) -> torch.Tensor:
            raise ZeroDivisionError("as in a user's loss")

    trainer = make_trainer(tmp_path, kind=Failing)
    with pytest.raises(ZeroDivisionError), joined(trainer) as joined_by:
        trainer.train()
    assert joined_by.learner is not None and "has left" in repr(joined_by.learner)


def test_of_a_peft_model_the_adapters_travel_and_are_saved(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model(), peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    trainer = make_trainer(tmp_path / "out", model)
    with joined(trainer, save_to=tmp_path / "saved"):
        trainer.train()
    assert all("lora_" in tensor.name for tensor in describe(model))
    with safe_open(tmp_path / "saved" / "adapter_model.safetensors", framework="numpy") as saved:
        assert all("lora_" in name for name in saved.keys())  # noqa: SIM118
    loaded = peft.PeftModel.from_pretrained(make_model(), tmp_path / "saved")
    ids = SAMPLES[0]["input_ids"][None]
    assert torch.equal(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_two_learners_one_killed_train_a_model_that_loads_back_to_the_runs_score(run: Run) -> None:
    script = EXAMPLES / "hf_trainer.py"
    assert len(script.read_text().splitlines()) <= 40
    run.train(script, "--learners", "2", *ENDLESS, "--set", "sync_every=8")
    kill_and_see_back(run)
    summary = run.summary
    assert summary["validation_loss_end"] < summary["validation_loss_start"]
    assert not run.events("same_batches") and "not leased" not in run.logs()
    assert "atoll: the learner with index 0 saves to atoll-hf; if it was gone by then: atoll export" in run.logs()
    saved = run.folder / "atoll-hf"
    assert json.loads((saved / "config.json").read_text())["model_type"] == "gpt2"
    assert (saved / "tokenizer.json").exists() and not list(saved.glob("checkpoint-*"))
    assert told_loss(run, script, saved) == pytest.approx(summary["validation_loss_end"], rel=1e-4)


@pytest.mark.timeout(900)
def test_two_ranks_of_trainer_are_one_learner(run: Run) -> None:
    script = Path(__file__).parent / "scripts" / "hf_ranks.py"
    given = ("--learners", "1", "--ranks", "2", "--steps", "24", "--set", "fragments=3", "--set", "sync_every=6")
    run.train(script, *given).ended()
    assert "joined run" in run.logs() and "as learner-0, 2 ranks" in run.logs() and "not leased" not in run.logs()
    seen = [(run.folder / f"seen-learner-0-{rank}").read_text().splitlines() for rank in (0, 1)]
    steps = len(seen[0])
    assert len(seen[1]) == steps and run.summary["tokens"]["computed"] == steps * 2 * 4 * 8
    samples = [number for lines in seen for line in lines for number in line.split()]
    assert len(set(samples)) == len(samples) == steps * 2 * 4, "no sample came to both ranks, or twice"
    assert run.logs().count("saved the global model to saved") == 1
    assert GPT2LMHeadModel.from_pretrained(run.folder / "saved").config.n_embd == 16


def test_ranks_that_trainer_does_not_know_of_are_refused(tmp_path: Path) -> None:
    """As without a GPU and without use_cpu: each would train a copy of its own."""
    trainer = make_trainer(tmp_path)
    check_in_run(trainer.args, trainer.state)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(ValueError, match=r"2 processes were started as one learner.*use_cpu=True"):
            check_in_run(trainer.args, trainer.state)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM])
def test_what_shares_the_model_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: DistributedType
) -> None:
    """The state is Accelerate's own, as it is on GPUs: on a CPU it leaves FSDP out, whatever Trainer is told."""
    trainer = make_trainer(tmp_path)
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", kind)
    with pytest.raises(ValueError, match=rf"shares the model by {kind.value} here.*one process or several under DDP"):
        check_in_run(trainer.args, trainer.state)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"load_best_model_at_end": True, "eval_strategy": "no", "save_strategy": "no"}, "keeps its best model"),
        ({"auto_find_batch_size": True}, "name the batch size"),
    ],
)
def test_what_a_run_cannot_have_is_refused(tmp_path: Path, arguments: dict[str, Any], told: str) -> None:
    trainer = make_trainer(tmp_path, **arguments)
    with pytest.raises(ValueError, match=told):
        check_in_run(trainer.args, trainer.state)


def check_rates(run: Run, highest: float) -> None:
    for number in (0, 1):
        log = (run.out / "logs" / f"learner-{number}.log").read_text()
        rates = [float(rate) for rate in re.findall(r"'learning_rate': '([^']+)'", log)]
        assert max(rates) > 0.9 * highest and rates[-1] < 0.1 * highest, "of 1,000 steps that Trainer would make"


def check_accuracy(run: Run) -> None:
    told = run.summary["metrics"]["accuracy"]
    assert told["direction"] == "max" and told["best"] >= told["end"] > told["start"]


def test_lora_on_a_stream_ends_with_the_run_and_so_does_its_learning_rate(run: Run) -> None:
    script = Path(__file__).parent / "scripts" / "lora_stream.py"
    run.train(script, "--learners", "2", "--steps", "40", "--set", "sync_every=8").ended()
    summary = run.summary
    assert summary["validation_loss_end"] < summary["validation_loss_start"] and not run.events("same_batches")
    check_accuracy(run)
    check_rates(run, 1e-2)
    with safe_open(run.out / "model.safetensors", framework="numpy") as merged:
        assert all("lora_" in name for name in merged.keys())  # noqa: SIM118
    assert (run.folder / "adapters" / "adapter_model.safetensors").exists()


def test_a_callback_alone_trains_rows_of_datasets_that_a_worker_loads(run: Run) -> None:
    script = Path(__file__).parent / "scripts" / "hf_callback.py"
    run.train(script, "--learners", "2", "--steps", "60", "--set", "sync_every=8").ended()
    assert run.summary["validation_loss_end"] < run.summary["validation_loss_start"]
    assert not run.events("same_batches") and "not leased" not in run.logs()
    check_accuracy(run)
    check_rates(run, 1e-3)


def test_a_loop_with_accelerate_alone_saves_a_model_that_loads_back(tmp_path: Path) -> None:
    script = EXAMPLES / "accelerate_loop.py"
    words = [sys.executable, str(script)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and "alone: no run is named" in done.stderr, done.stderr
    assert score_held_out(tmp_path / "atoll-accelerate") < 4, "log 256 = 5.5 when it is made"


def score_held_out(folder: Path) -> float:
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    windows = torch.tensor(list(inspect.getsource(argparse).encode())).unfold(0, 64, 32)[-100:]
    with torch.no_grad():
        return float(model(input_ids=windows, labels=windows).loss)


def test_a_loop_with_accelerate_trains_in_a_run_with_a_kill(run: Run) -> None:
    script = EXAMPLES / "accelerate_loop.py"
    assert len(script.read_text().splitlines()) <= 40
    run.train(script, "--learners", "2", *ENDLESS, "--set", "sync_every=8")
    kill_and_see_back(run)
    assert not run.events("same_batches") and "not leased" not in run.logs()
    assert run.summary["validation_loss_end"] < run.summary["validation_loss_start"]
    loss = score_held_out(run.folder / "atoll-accelerate")
    assert loss == pytest.approx(run.summary["validation_loss_end"], rel=1e-4)
