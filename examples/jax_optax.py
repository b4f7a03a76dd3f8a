"""JAX and optax: pip install 'atoll[jax]'.
Alone it just trains:            python examples/jax_optax.py
Two learners train one model:    atoll train examples/jax_optax.py --learners 2 --steps 300
An exported model, loaded back:  python examples/jax_optax.py model.safetensors
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file

from atoll.integrations.jax import Learner, evaluate

inputs = np.random.default_rng(0).standard_normal((4096, 8), np.float32)
samples = np.concatenate([inputs, (inputs[:, :4] * inputs[:, 4:]).sum(1, keepdims=True)], axis=1)
first, second = (jax.nn.initializers.lecun_normal()(jax.random.key(n), s) for n, s in enumerate([(8, 64), (64, 1)]))
params = {"hidden": {"kernel": first, "bias": jnp.zeros(64)}, "head": {"kernel": second, "bias": jnp.zeros(1)}}
if sys.argv[1:]:
    held = load_file(sys.argv[1])
    params = {layer: {name: jnp.array(held[f"{layer}.{name}"]) for name in own} for layer, own in params.items()}


def loss_of(params, batch):
    hidden = jax.nn.gelu(batch[:, :-1] @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return jnp.mean((hidden @ params["head"]["kernel"] + params["head"]["bias"] - batch[:, -1:]) ** 2)


def train_step(params, opt_state, batch):
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


optimizer = optax.adamw(3e-3)
train_step = jax.jit(train_step, donate_argnums=(0, 1))
score = jax.jit(lambda params: loss_of(params, samples[-512:]))
evaluate(params, score)
if not sys.argv[1:]:
    with Learner(params, optimizer.init(params)) as learner:
        params, opt_state = learner.params, learner.opt_state
        for batch in learner.batches(samples[:-512], batch_size=32):
            params, opt_state, loss = train_step(params, opt_state, batch)
            params, opt_state = learner.step(params, opt_state, tokens=len(batch), loss=loss)
    params = learner.params  # in a run: the global model
print("validation loss", score(params).item())
