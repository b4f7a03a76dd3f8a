"""A Trainer that is made elsewhere, with the callback alone: leased rows of `datasets`, a worker that loads them, and
figures of compute_metrics."""

import argparse
import inspect
from typing import Any

import torch
import transformers as hf
from datasets import Dataset

import atoll
from atoll.integrations.hf import AtollCallback, read_figures

windows = torch.tensor(list(inspect.getsource(argparse).encode())).unfold(0, 64, 16)
rows = Dataset.from_dict({"input_ids": windows.tolist(), "labels": windows.tolist()})


def count_right(given: Any) -> dict[str, float]:
    return {"accuracy": float((given.predictions.argmax(-1)[:, :-1] == given.label_ids[:, 1:]).mean())}


torch.manual_seed(0)
size = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
model = hf.GPT2LMHeadModel(hf.GPT2Config(**size, bos_token_id=0, eos_token_id=0))
options = {"max_steps": 1000, "learning_rate": 1e-3, "logging_steps": 1, "include_num_input_tokens_seen": "all"}
quiet = {"disable_tqdm": True, "dataloader_pin_memory": False, "report_to": "none"}
args = hf.TrainingArguments("out", use_cpu=True, dataloader_num_workers=1, **options, **quiet)
held_out = rows.select(range(len(rows) - 96, len(rows)))
trainer = hf.Trainer(
    model,
    args,
    train_dataset=rows.select(range(len(rows) - 100)),
    eval_dataset=held_out,
    compute_metrics=count_right,
    callbacks=[AtollCallback()],
)
atoll.evaluate(model, lambda _: read_figures(trainer), directions={"accuracy": "max"})
trainer.train()
