"""JAX and optax, with the extra `jax`. Alone it just trains: python examples/jax_optax.py
Two learners train one model:    atoll train examples/jax_optax.py --learners 2 --steps 300
One of torch's beside this one:  examples/jax_torch_twin.py
An exported model, loaded back:  python examples/jax_optax.py model.safetensors
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from atoll.integrations.jax import AS_TORCH, Learner, evaluate, load

inputs = np.random.default_rng(0).standard_normal((4096, 8), np.float32)
samples = np.concatenate([inputs, (inputs[:, :4] * inputs[:, 4:]).sum(1, keepdims=True)], axis=1)
kernel = jax.nn.initializers.lecun_normal()
params = {"hidden": {"kernel": kernel(jax.random.key(0), (8, 64)), "bias": jnp.zeros(64)}}
params |= {"head": {"kernel": kernel(jax.random.key(1), (64, 1)), "bias": jnp.zeros(1)}}


def loss_of(params, batch):
    hidden = jax.nn.gelu(batch[:, :-1] @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return jnp.mean((hidden @ params["head"]["kernel"] + params["head"]["bias"] - batch[:, -1:]) ** 2)


evaluate(params, lambda params: loss_of(params, samples[-512:]), **AS_TORCH)
if sys.argv[1:]:
    params = load(params, sys.argv[1], **AS_TORCH)
else:
    loss_and_gradients = jax.jit(jax.value_and_grad(loss_of))
    with Learner(params, optax.adamw(3e-3), **AS_TORCH) as learner:
        for batch in learner.batches(samples[:-512], batch_size=32):
            loss, gradients = loss_and_gradients(learner.params, batch)
            learner.update(gradients, tokens=len(batch), loss=loss)
    params = learner.params  # the global model
print("validation loss", loss_of(params, samples[-512:]).item())
