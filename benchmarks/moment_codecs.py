"""What few bits leave of AdamW's moments: how far the step that they give is from the exact one.

    python benchmarks/moment_codecs.py [--steps 300] [--depth 2]     and benchmarks/results/moment_codecs.json

Two learners train the built-in GPT; the moments are those of the first learner in the last cut. Errors are relative,
over all parameters: of exp_avg, of the root of exp_avg_sq, and of the step exp_avg / (√exp_avg_sq + ε). The floor of a
root is half a code of its block in each codec, as in `numerics/moments.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from runs import train

from atoll.learner.snapshot import read
from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.codec import make_codec
from atoll.numerics.codec_kernels import ABSMAX_BLOCK

RESULTS = Path(__file__).parent / "results" / "moment_codecs.json"
EPSILON = 1e-8
CODES = {"int8": 127, "int4": 7}


def find_moments(folder: Path) -> Iterator[tuple[FloatArray, FloatArray]]:
    """exp_avg and exp_avg_sq of every parameter, as rows."""
    tensors = read(sorted(folder.glob("cut-*.safetensors"))[-1]).tensors
    for name in sorted(tensors):
        if "exp_avg_sq" in name:
            pair = (tensors[name.replace("exp_avg_sq", "exp_avg")], tensors[name])
            mean, square = (one.reshape(one.shape[0] if one.dim() > 1 else 1, -1).numpy() for one in pair)
            yield mean, square


def round_trip(values: FloatArray, name: str) -> FloatArray:
    codec, rows = make_codec(name), (values.shape,)
    body, arrived = np.empty(codec.nbytes(rows), np.uint8), np.empty(values.size, np.float32)
    codec.encode(np.ascontiguousarray(values).reshape(-1), rows, body)
    codec.decode(body, rows, arrived)
    return arrived.reshape(values.shape)


def round_trip_root(roots: FloatArray, name: str) -> FloatArray:
    arrived = round_trip(roots, name)
    largest = np.maximum.reduceat(arrived, range(0, arrived.shape[1], ABSMAX_BLOCK), axis=1)
    floor = np.repeat(largest / (2 * CODES[name]), ABSMAX_BLOCK, axis=1)[:, : arrived.shape[1]]
    return np.maximum(arrived, floor)


def compare(folder: Path, name: str) -> dict[str, float]:
    exact: list[list[DoubleArray]] = [[], [], []]
    coded: list[list[DoubleArray]] = [[], [], []]
    for mean, square in find_moments(folder):
        root = np.sqrt(square)
        for held, (m, r) in ((exact, (mean, root)), (coded, (round_trip(mean, name), round_trip_root(root, name)))):
            for place, values in enumerate((m, r, m / (r + EPSILON))):
                held[place].append(values.astype(np.float64).reshape(-1))
    found = {}
    for what, one, other in zip(("mean", "root", "step"), exact, coded, strict=True):
        a, b = np.concatenate(one), np.concatenate(other)
        found[f"{what}_error"] = float(np.linalg.norm(b - a) / np.linalg.norm(a))
        found[f"{what}_cosine"] = float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--depth", type=int, default=2)
    options = parser.parse_args()
    words = ["--learners", "2", "--steps", str(options.steps), "--set", f"workload.depth={options.depth}"]
    words += ["--set", "workload.block=64", "--set", "workload.batch=4", "--set", "evaluate_every=0"]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        train(words, out)
        codecs = {name: compare(out / "learners" / "learner-0", name) for name in CODES}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result = {"commit": commit.stdout.strip(), "steps": options.steps, "depth": options.depth, "codecs": codecs}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
