"""Trainer under DDP: the ranks note which samples they trained on."""

import os
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from atoll.integrations.hf import joined

torch.manual_seed(0)
size = {"vocab_size": 512, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 1}
model = hf.GPT2LMHeadModel(hf.GPT2Config(**size, bos_token_id=0, eos_token_id=0))
rows = [torch.tensor([number % 512, number // 512, *range(6)]) for number in range(20_000)]
samples = [{"input_ids": row, "labels": row} for row in rows]


class Watched(hf.Trainer):
    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        if model.training:
            with Path(f"seen-{os.environ['ATOLL_LEARNER']}-{os.environ['RANK']}").open("a") as seen:
                ids = inputs["input_ids"]
                print(*(ids[:, 0] + 512 * ids[:, 1]).tolist(), file=seen)
        return super().compute_loss(model, inputs, *given, **named)


options = {"max_steps": 1000, "per_device_train_batch_size": 4, "include_num_input_tokens_seen": "all"}
quiet = {"disable_tqdm": True, "dataloader_pin_memory": False, "report_to": "none"}
args = hf.TrainingArguments("out", use_cpu=True, **options, **quiet)
trainer = Watched(model, args, train_dataset=samples, eval_dataset=samples[:64])
with joined(trainer, save_to="saved"):
    trainer.train()
