"""A loop with Hugging Face's Accelerate, with the extra `hf`.

Alone it just trains:           python examples/accelerate_loop.py
Two learners train one model:   atoll train examples/accelerate_loop.py --learners 2 --steps 200
The global model is in the folder atoll-accelerate then, and loads back:   from_pretrained("atoll-accelerate")
"""

import argparse
import inspect

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

import atoll
from atoll.integrations.loaders import lease_samples

windows = torch.tensor(list(inspect.getsource(argparse).encode())).unfold(0, 64, 32)
train, held_out = windows[:-100], windows[-100:]
set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2))
atoll.evaluate(model, lambda model: model.eval()(input_ids=held_out, labels=held_out).loss.item())

accelerator = Accelerator()
optimizer, loader = torch.optim.AdamW(model.parameters(), lr=1e-3), DataLoader(train, 8, shuffle=True, drop_last=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
bare = accelerator.unwrap_model(model)
learner = atoll.attach(bare, optimizer.optimizer, tokens=8 * 64, at_end="go on")
lease_samples(loader, learner)
for batch in loader:
    accelerator.backward(model(input_ids=batch, labels=batch).loss)
    optimizer.step()
    optimizer.zero_grad()
    if learner.done:
        break
learner.leave()  # from here on the model is the global one
if learner.index == 0:
    bare.save_pretrained("atoll-accelerate")
