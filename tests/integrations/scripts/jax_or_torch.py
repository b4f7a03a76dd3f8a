"""learner-1 trains in JAX, all others, and the evaluator, in torch: the same tensors, and one run."""

import os
import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"
runpy.run_path(
    str(EXAMPLES / ("jax_optax.py" if os.environ.get("ATOLL_LEARNER") == "learner-1" else "jax_torch_twin.py"))
)
