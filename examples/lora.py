"""LoRA with peft: the adapters are trained and merged, the frozen base model is the same on every learner.

Alone it just trains:           python examples/lora.py
Two learners train one model:   atoll train examples/lora.py --learners 2 --steps 100
The whole model, to load:       atoll export RUN whole.safetensors
The adapters alone:             atoll export RUN adapters.safetensors --merged

It needs transformers and peft (the extra `integrations`), and downloads nothing: the base model is drawn from a seed.
"""

import argparse
import inspect

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import atoll

text = torch.tensor(list(inspect.getsource(argparse).encode()))
windows = text.unfold(0, 64, 64)
dataset, held_out = windows[:-100], windows[-96:]

torch.manual_seed(0)  # the base model must be the same on every learner
size = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
base = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
config = LoraConfig(r=8, lora_alpha=32, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
model = get_peft_model(base, config)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@torch.no_grad()
def score(model: torch.nn.Module) -> float:
    model.eval()  # no dropout
    return model(input_ids=held_out, labels=held_out).loss.item()


atoll.evaluate(model, score)

with atoll.Learner(model, optimizer) as learner:
    for batch in learner.batches(dataset, batch_size=16):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=batch.numel(), loss=loss)
