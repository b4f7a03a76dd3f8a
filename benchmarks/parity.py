"""Quality at equal tokens: Decoupled against its own synchronous mode and against data-parallel, on the small GPT.

    python benchmarks/parity.py                # three seeds, M = 4, 2,100 steps per learner: half an hour on 2 cores
    python benchmarks/parity.py --seeds 0 --steps 300

Decoupled runs end on a budget of tokens, the others take that many tokens by construction. Synchronous means K = M and
no overlap. Prints a table and writes a JSON file with every figure.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from runs import steps_of, train

TOKENS_PER_STEP = 8 * 64
LIMITS = {"synchronous": 1.5, "data-parallel": 8.0}
"""How far above each the decoupled loss may lie, in percent."""


def methods(learners: int, steps: int, seed: int) -> dict[str, list[str]]:
    common = ["--learners", str(learners), "--seed", str(seed)]
    tokens = ["--tokens", str(learners * steps * TOKENS_PER_STEP)]
    few_scores = ["--set", "evaluate_every=1000"]
    return {
        "decoupled": [*common, *tokens, *few_scores],
        "synchronous": [*common, "--set", "synchronous=true", "--steps", str(steps), *few_scores],
        "data-parallel": [*common, "--algorithm", "data-parallel", "--steps", str(steps)],
    }


def figures(summary: dict[str, Any]) -> dict[str, Any]:
    keys = ("goodput", "participation", "effective_h", "merged_share", "wall_s")
    return {
        "loss": summary["validation_loss_end"],
        "tokens": summary["tokens"]["computed"],
        "steps": steps_of(summary),
        **{key: summary.get(key) for key in keys},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2100)
    parser.add_argument("--methods", nargs="+", default=["decoupled", "synchronous", "data-parallel"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/parity.json"))
    parser.add_argument("extra", nargs="*", help="more options for the decoupled and synchronous runs, after --")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for seed in options.seeds:
        for method, arguments in methods(options.learners, options.steps, seed).items():
            if method not in options.methods:
                continue
            began = time.time()
            extra = options.extra if method != "data-parallel" else []
            result = figures(train([*arguments, *extra]))
            results.setdefault(method, {})[str(seed)] = result
            print(f"seed {seed} {method:14} loss {result['loss']:.4f}  {time.time() - began:4.0f} s", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"options": vars(options) | {"out": ""}, "results": results}, indent=1) + "\n")
    return report(results)


def report(results: dict[str, dict[str, Any]]) -> int:
    losses = {method: mean(one["loss"] for one in by_seed.values()) for method, by_seed in results.items()}
    for method, loss in losses.items():
        print(f"{method:14} mean loss {loss:.4f}")
    ours, worst = losses.get("decoupled"), 0
    for method, limit in LIMITS.items():
        if ours is not None and method in losses:
            above = 100 * (ours / losses[method] - 1)
            print(f"decoupled is {above:+.2f} % against {method} (limit +{limit} %)")
            worst = max(worst, int(above > limit))
    return worst


if __name__ == "__main__":
    sys.exit(main())
