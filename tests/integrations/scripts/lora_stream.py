"""Trainer with LoRA, accumulated gradients, a warm-up, and a stream that each learner shuffles itself."""

import argparse
import inspect
import random
from collections.abc import Iterator
from typing import Any

import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch.utils.data import IterableDataset

from atoll.integrations.hf import joined

windows = torch.tensor(list(inspect.getsource(argparse).encode())).unfold(0, 64, 64)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        assert run.learner is not None
        order = random.Random(run.learner.seed)
        while True:
            window = windows[order.randrange(len(windows) - 100)]
            yield {"input_ids": window, "labels": window}


def count_right(given: Any) -> dict[str, float]:
    return {"accuracy": float((given.predictions.argmax(-1)[:, :-1] == given.label_ids[:, 1:]).mean())}


torch.manual_seed(0)
size = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
base = hf.GPT2LMHeadModel(hf.GPT2Config(**size, bos_token_id=0, eos_token_id=0))
lora = LoraConfig(r=8, lora_alpha=32, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
args = hf.TrainingArguments(
    "out",
    max_steps=1000,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    warmup_steps=0.1,
    logging_steps=1,
    include_num_input_tokens_seen="all",
    per_device_eval_batch_size=32,
    disable_tqdm=True,
)
held_out = [{"input_ids": window, "labels": window} for window in windows[-96:]]
model, data = get_peft_model(base, lora), {"train_dataset": Stream(), "eval_dataset": held_out}
trainer = hf.Trainer(model, args, compute_metrics=count_right, **data)
with joined(trainer, save_to="adapters", directions={"accuracy": "max"}) as run:
    trainer.train()
