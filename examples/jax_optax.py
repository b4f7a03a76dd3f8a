"""JAX and optax: pip install 'atoll[jax]'. Alone it just trains: python examples/jax_optax.py
Two learners train one model:    atoll train examples/jax_optax.py --learners 2 --steps 300
One of torch's beside this one:  examples/jax_torch_twin.py
An exported model, loaded back:  python examples/jax_optax.py model.safetensors
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from atoll.integrations.jax import Learner, evaluate, load

inputs = np.random.default_rng(0).standard_normal((4096, 8), np.float32)
samples = np.concatenate([inputs, (inputs[:, :4] * inputs[:, 4:]).sum(1, keepdims=True)], axis=1)
kernel = jax.nn.initializers.lecun_normal()
params = {"hidden": {"kernel": kernel(jax.random.key(0), (8, 64)), "bias": jnp.zeros(64)}}
params |= {"head": {"kernel": kernel(jax.random.key(1), (64, 1)), "bias": jnp.zeros(1)}}
optimizer = optax.adamw(3e-3)
# The run has each tensor as torch's Linear calls and keeps it: `weight`, a row for each output.
as_torch = {"names": lambda path: path.replace("kernel", "weight"), "transposed": lambda name: name.endswith("weight")}


def loss_of(params, batch):
    hidden = jax.nn.gelu(batch[:, :-1] @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return jnp.mean((hidden @ params["head"]["kernel"] + params["head"]["bias"] - batch[:, -1:]) ** 2)


def train_step(params, opt_state, batch):
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


evaluate(params, lambda params: loss_of(params, samples[-512:]), **as_torch)
if sys.argv[1:]:
    params = load(params, sys.argv[1], **as_torch)
else:
    train_step = jax.jit(train_step, donate_argnums=(0, 1))
    with Learner(params, optimizer.init(params), **as_torch) as learner:
        params, opt_state = learner.params, learner.opt_state  # the run's
        for batch in learner.batches(samples[:-512], batch_size=32):
            params, opt_state, loss = train_step(params, opt_state, batch)
            params, opt_state = learner.step(params, opt_state, tokens=len(batch), loss=loss)
    params = learner.params  # the global model
print("validation loss", loss_of(params, samples[-512:]).item())
