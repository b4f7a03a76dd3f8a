"""The model of examples/jax_optax.py in torch: both train it in one run, as its tensors have the same names and shapes.
A learner of torch's and the run:  atoll train examples/jax_torch_twin.py --learners 1 --steps 600
JAX's, in another terminal:        ATOLL_JOIN=http://127.0.0.1:7077 python examples/jax_optax.py
"""

import sys
from collections import OrderedDict

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

import atoll

inputs = np.random.default_rng(0).standard_normal((4096, 8), np.float32)
samples = torch.from_numpy(np.concatenate([inputs, (inputs[:, :4] * inputs[:, 4:]).sum(1, keepdims=True)], axis=1))
torch.manual_seed(0)
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 64), gelu=nn.GELU("tanh"), head=nn.Linear(64, 1)))


def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch[:, :-1]), batch[:, -1:])


atoll.evaluate(model, lambda model: loss_of(model, samples[-512:]).item())
if sys.argv[1:]:
    model.load_state_dict(load_file(sys.argv[1]))
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with atoll.Learner(model, optimizer) as learner:
        for batch in learner.batches(samples[:-512], batch_size=32):
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=len(batch), loss=loss)
print("validation loss", loss_of(model, samples[-512:]).item())
