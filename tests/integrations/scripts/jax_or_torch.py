"""learner-1 trains in JAX, all others, and the evaluator, in torch: the same tensors, and one run."""

import os
import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"
if os.environ.get("ATOLL_LEARNER") == "learner-1":
    left = runpy.run_path(str(EXAMPLES / "jax_optax.py"))
    jitted = (left["loss_and_gradients"], left["learner"]._apply)
    print("compiled its step", max(one._cache_size() for one in jitted), "times")
else:
    runpy.run_path(str(EXAMPLES / "jax_torch_twin.py"))
