"""How fast the codecs are, and a merge of encoded contributions with its outer step.

    python benchmarks/codecs.py        a table, and benchmarks/results/codecs.json

GB/s are 4 bytes for each value, whatever its codec makes of it; of a merge, for each value of each contribution. One
fragment of 64 MiB of parameters in 8 pieces, contributions of 4 learners that were encoded beforehand.

Codecs, on one thread and on all: `encode` (Δ = base − θ), `fed` (the same with feedback, and the rest), `decode` (with
the check of a body that came from a peer).

Merges:
    mean          add_contributions, then the outer step in parts
    rda           the same with RDA per piece. The norms of the contributions are known: they are measured on arrival
    in turn       decode each contribution, merge (mean), outer step, one after the other on one thread
    torch         mean and the same outer step by torch in place, on all threads: of float32 and bf16 tensors as they
                  are, of the other codecs after learner/codecs.py has decoded them

Every figure is the median over repetitions that take turns, so that all see the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numba
import numpy as np
import torch

from atoll.learner import codecs
from atoll.numerics import kernels
from atoll.numerics.arrays import ByteArray, DoubleArray, FloatArray
from atoll.numerics.codec import (
    Codec,
    Delta,
    add_contributions,
    body_nbytes,
    decode_contribution,
    encode_contribution,
    make_codec,
)
from atoll.numerics.codecs.topk import TopK
from atoll.numerics.fragments import make_plan, row_lengths
from atoll.numerics.kernels import PART, in_parts
from atoll.numerics.merge import merge, row_norms
from atoll.numerics.outer import make_outer, take_outer_step
from atoll.protocol.messages import TensorSpec

ROOT = Path(__file__).parents[1]
NAMES = ("fp32", "bf16", "int8", "int4", "topk")
MEMBERS = 4
LIMITS = {"bf16": 1.0, "int4": 2.0}
"""GB/s of a merge with its outer step."""
TIMES_TORCH = 2.0
LR, MU = 0.7, 0.6

PLAN = make_plan([TensorSpec(f"blocks.{n}.weight", (512, 4096), "float32") for n in range(8)], 1)
FRAGMENT = PLAN.fragments[0]
SIZE, ROWS = FRAGMENT.size, row_lengths(FRAGMENT.pieces)
WEIGHTS = [1.0, 2.0, 3.0, 4.0][:MEMBERS]
SHARES = np.repeat(np.array(WEIGHTS)[:, np.newaxis] / sum(WEIGHTS), len(FRAGMENT.pieces), axis=1)


def make(name: str, threads: int) -> Codec:
    return TopK(threads) if name == "topk" else make_codec(name, threads)


class Round:
    """What a syncer holds: encoded contributions, Θ, momentum, and room for the next version."""

    def __init__(self, name: str, deltas: list[FloatArray], threads: int) -> None:
        self.codec, self.threads = make(name, threads), threads
        self.bodies: list[ByteArray] = [np.empty(body_nbytes(self.codec, FRAGMENT), np.uint8) for _ in deltas]
        nothing = np.zeros(SIZE, np.float32)
        for delta, body in zip(deltas, self.bodies, strict=True):
            encode_contribution(self.codec, FRAGMENT, Delta(delta, nothing), body)
        self.theta, self.new, self.momentum, self.gradient = (np.zeros(SIZE, np.float32) for _ in range(4))
        self.decoded = [np.empty(SIZE, np.float32) for _ in deltas]
        for body, out in zip(self.bodies, self.decoded, strict=True):
            decode_contribution(self.codec, FRAGMENT, body, out)
        self.norms: DoubleArray = np.stack([self.norms_of(delta) for delta in self.decoded])
        self.outer = make_outer("nesterov", LR, MU)

    def norms_of(self, values: FloatArray) -> DoubleArray:
        """Of each piece."""
        found = np.empty(len(FRAGMENT.pieces))

        def work(first: int, last: int) -> None:
            for n in range(first, last):
                found[n] = row_norms(values[FRAGMENT.parts[n][1]], 1)[0]

        in_parts(work, len(found), 1, self.threads)
        return found

    def step_in_parts(self) -> None:
        def work(a: int, b: int) -> None:
            state = {"momentum": self.momentum[a:b]}
            self.outer.step(self.theta[a:b], self.new[a:b], state, self.gradient[a:b])

        in_parts(work, SIZE, PART, self.threads)

    def mean(self) -> None:
        add_contributions(self.codec, FRAGMENT, self.bodies, SHARES, self.gradient)
        self.step_in_parts()

    def rda(self) -> None:
        radius = (SHARES * self.norms).sum(axis=0)
        add_contributions(self.codec, FRAGMENT, self.bodies, SHARES * radius / self.norms, self.gradient)
        factors = (radius / self.norms_of(self.gradient)).astype(np.float32)

        def work(first: int, last: int) -> None:
            for n in range(first, last):
                factor = kernels.read_only(factors[n : n + 1])
                kernels.scale_rows(self.gradient[FRAGMENT.parts[n][1]], factor)

        in_parts(work, len(factors), 1, self.threads)
        self.step_in_parts()

    def in_turn(self) -> None:
        for body, out in zip(self.bodies, self.decoded, strict=True):
            decode_contribution(self.codec, FRAGMENT, body, out)
        merge(FRAGMENT, self.decoded, WEIGHTS, self.gradient, "mean")
        state = {"momentum": self.momentum}
        take_outer_step(self.outer, FRAGMENT, self.theta, self.new, state, self.gradient)


class TorchRound:
    """What a user would write."""

    def __init__(self, ours: Round) -> None:
        self.codec, self.bodies = ours.codec, [torch.from_numpy(body) for body in ours.bodies]
        self.theta, self.momentum, self.gradient, self.decoded = (torch.zeros(SIZE) for _ in range(4))

    def delta(self, body: torch.Tensor) -> torch.Tensor:
        if self.codec.name in ("fp32", "bf16"):
            return body.view(torch.float32 if self.codec.name == "fp32" else torch.bfloat16)
        codecs.decode(self.codec, body, ROWS, self.decoded)
        return self.decoded

    def step(self) -> None:
        self.gradient.zero_()
        for body, weight in zip(self.bodies, WEIGHTS, strict=True):
            self.gradient.add_(self.delta(body), alpha=weight / sum(WEIGHTS))
        self.momentum.mul_(MU).add_(self.gradient)
        self.theta.sub_(self.gradient, alpha=LR).sub_(self.momentum, alpha=LR * MU)


def in_turns(works: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Seconds of each, the median."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repetitions + 1):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            if turn:  # everything has been used once
                found[name].append(time.perf_counter() - began)
    return {name: median(times) for name, times in found.items()}


def measure_codec(name: str, threads: int, deltas: list[FloatArray], repetitions: int) -> dict[str, Any]:
    base, theta, rest = deltas[0], deltas[1], np.zeros(SIZE, np.float32)
    works: dict[str, Callable[[], object]] = {}
    for count in sorted({1, threads}):
        codec = make(name, count)
        body, out = np.empty(body_nbytes(codec, FRAGMENT), np.uint8), np.empty(SIZE, np.float32)
        works[f"encode {count}"] = partial(encode_contribution, codec, FRAGMENT, Delta(base, theta), body)
        works[f"fed {count}"] = partial(encode_contribution, codec, FRAGMENT, base, theta, body, rest, rest)
        works[f"decode {count}"] = partial(decode_contribution, codec, FRAGMENT, body, out)
    times = in_turns(works, repetitions)
    codec = make(name, threads)
    encode_contribution(codec, FRAGMENT, Delta(base, theta), body)
    decode_contribution(codec, FRAGMENT, body, out)
    exact = (base - theta).astype(np.float64)
    return {
        "codec": name,
        "bits": 8 * body.size / SIZE,
        "relative_error": float(f"{np.linalg.norm(out - exact) / np.linalg.norm(exact):.3g}"),
        "gb_per_s": {work: round(4e-9 * SIZE / seconds, 2) for work, seconds in times.items()},
    }


def measure_merge(name: str, threads: int, deltas: list[FloatArray], repetitions: int) -> dict[str, Any]:
    ours = Round(name, deltas, threads)
    theirs = TorchRound(ours)
    works = {"mean": ours.mean, "rda": ours.rda, "in turn": ours.in_turn, "torch": theirs.step}
    times = in_turns(works, repetitions)
    return {
        "codec": name,
        "gb_per_s": {work: round(4e-9 * SIZE * MEMBERS / seconds, 2) for work, seconds in times.items()},
        "times_torch": {work: round(times["torch"] / times[work], 2) for work in ("mean", "rda")},
    }


def broken_limits(merges: list[dict[str, Any]]) -> list[str]:
    wrong = []
    for one in merges:
        name, rates = one["codec"], one["gb_per_s"]
        for rule in ("mean", "rda"):
            if name in LIMITS and rates[rule] < LIMITS[name]:
                wrong.append(f"{name}, {rule}: {rates[rule]} GB/s, {LIMITS[name]} are asked for")
        if name in LIMITS and one["times_torch"]["mean"] < TIMES_TORCH:
            wrong.append(f"{name}: {one['times_torch']['mean']} times torch, {TIMES_TORCH} are asked for")
    return wrong


def commit() -> str:
    said = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return said.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "codecs.json")
    options = parser.parse_args()
    kernels.warm()
    torch.set_num_threads(options.threads)
    dice = np.random.default_rng(0)
    deltas = [dice.standard_normal(SIZE, dtype=np.float32) for _ in range(MEMBERS)]
    found = [measure_codec(name, options.threads, deltas, options.repetitions) for name in NAMES]
    merges = [measure_merge(name, options.threads, deltas, options.repetitions) for name in NAMES]
    result = {
        "commit": commit(),
        "machine": {"processor": platform.machine(), "threads": options.threads, "load": os.getloadavg()[0]},
        "versions": {"python": platform.python_version(), "numpy": np.__version__}
        | {"numba": numba.__version__, "torch": torch.__version__},
        "parameters_mib": 4 * SIZE // 2**20,
        "learners": MEMBERS,
        "codecs": found,
        "merges": merges,
        "wrong": broken_limits(merges),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for one in [*found, *merges]:
        print(json.dumps(one))
    print("\n".join(result["wrong"]) or "every limit is kept")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
