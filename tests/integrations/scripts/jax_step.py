"""A module of flax's nnx and an optimizer of optax, whose jitted step donates both trees: `jax_step.py [MODEL]`, with
an exported model it only scores."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from atoll.integrations.jax import Learner, evaluate, load

inputs = np.random.default_rng(0).standard_normal((4096, 8), np.float32)
samples = np.concatenate([inputs, (inputs[:, :4] * inputs[:, 4:]).sum(1, keepdims=True)], axis=1)


class Net(nnx.Module):
    def __init__(self) -> None:
        chance = nnx.Rngs(0)
        self.hidden, self.head = nnx.Linear(8, 64, rngs=chance), nnx.Linear(64, 1, rngs=chance)

    def __call__(self, inputs):
        return self.head(nnx.gelu(self.hidden(inputs)))


graph, params = nnx.split(Net(), nnx.Param)
optimizer = optax.adamw(3e-3)


def loss_of(params, batch):
    return jnp.mean((nnx.merge(graph, params)(batch[:, :-1]) - batch[:, -1:]) ** 2)


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, opt_state, batch):
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


evaluate(params, lambda params: loss_of(params, samples[-512:]))
if sys.argv[1:]:
    params = load(params, sys.argv[1])
else:
    with Learner(params, optimizer.init(params)) as learner:
        params, opt_state = learner.params, learner.opt_state
        for batch in learner.batches(samples[:-512], batch_size=32):
            params, opt_state, loss = train_step(params, opt_state, batch)
            params, opt_state = learner.step(params, opt_state, tokens=len(batch), loss=loss)
    params = learner.params
    print("compiled its step", train_step._cache_size(), "times")
print("validation loss", loss_of(params, samples[-512:]).item())
