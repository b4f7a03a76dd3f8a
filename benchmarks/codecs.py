"""How fast the codecs are, and all that a syncer does with encoded contributions until their version is staged.

    python benchmarks/codecs.py        a table, and benchmarks/results/codecs.json

GB/s are 4 bytes for each value, whatever its codec makes of it; of a merge, for each value of each contribution.

Codecs, on one thread and on all, a fragment of 64 MiB of parameters: `encode` (Δ = base − θ), `fed` (the same with
feedback, and the rest), `decode` (with the check of a body that came from a peer).

Rounds, of bodies that were encoded beforehand: 4 learners and 64 MiB in 8 pieces; 1 learner and 27 MiB in 6 pieces (a
block of a GPT of 170M parameters). By what the syncer itself calls:
    mean, rda-row   check each body and `Parameters.stage_merge`: decode, merge by that rule, outer step, check, digest
    all             the same by rda-row, and before it screen and filter: all that a round costs but its journal
    in turn         what `all` does, decoded first and then one pass after the other over the whole fragment, on one
                    thread
    torch           mean and the same outer step by torch in place, on all threads: of float32 and bf16 tensors as they
                    are, of the other codecs after learner/codecs.py has decoded them. No check, no digest
    torch rda-row   the same by that rule, with norms in float32

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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numba
import numpy as np
import torch

from atoll.choices import MERGE
from atoll.config import Outer
from atoll.digests import compute_digest
from atoll.learner import codecs
from atoll.numerics import kernels
from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.codec import (
    Delta,
    body_nbytes,
    check_contribution,
    decode_contribution,
    encode_contribution,
    make_codec,
)
from atoll.numerics.compiled import thread_count
from atoll.numerics.deltas import EncodedDelta, GivenDelta
from atoll.numerics.filter import Filter
from atoll.numerics.fragments import FragmentPlan, make_plan, row_lengths
from atoll.numerics.outer import take_outer_step
from atoll.numerics.screen import NormScreen
from atoll.protocol.messages import TensorSpec
from atoll.syncer.parameters import Parameters
from atoll.syncer.versions import is_finite

ROOT = Path(__file__).parents[1]
NAMES = ("fp32", "bf16", "int8", "int4", "topk")
LIMITS = {"bf16": 1.0, "int4": 2.0}
"""GB/s of a merge with its outer step."""
TIMES_TORCH = 2.0

PLAN = make_plan([TensorSpec(f"blocks.{n}.weight", (512, 4096), "float32") for n in range(8)], 1)
FRAGMENT, SIZE = PLAN.fragments[0], PLAN.size
BLOCK = {"q": (2304, 768), "o": (768, 768), "up": (3072, 768), "down": (768, 3072), "n1": (768,), "n2": (768,)}
SMALL = make_plan([TensorSpec(f"blocks.0.{name}", shape, "float32") for name, shape in BLOCK.items()], 1)


class Round:
    """What a syncer holds: encoded contributions, Θ, momentum, and room for the next version."""

    def __init__(self, plan: FragmentPlan, name: str, deltas: list[FloatArray], threads: int, rule: str) -> None:
        self.part, self.codec = plan.fragments[0], make_codec(name, threads)
        self.bodies: list[ByteArray] = [np.empty(body_nbytes(self.codec, self.part), np.uint8) for _ in deltas]
        nothing = np.zeros(plan.size, np.float32)
        for delta, body in zip(deltas, self.bodies, strict=True):
            encode_contribution(self.codec, self.part, Delta(delta, nothing), body)
        self.given: list[GivenDelta] = [EncodedDelta(self.codec, self.part, body) for body in self.bodies]
        self.names, self.weights = [str(n) for n in range(len(deltas))], [1.0 + n for n in range(len(deltas))]
        self.parameters = Parameters(plan, Outer(merge=rule))
        self.parameters.threads = threads
        self.parameters.commit_initial()
        self.screen, self.filter = NormScreen(plan, threads=threads), Filter(plan, threads)
        self.version = 0

    def open(self) -> None:
        for body in self.bodies:
            check_contribution(self.codec, self.part, body)

    def judge(self) -> None:
        for delta in self.given:
            assert self.screen.judge(0, delta) is None
        self.filter.judge(0, self.names, self.given, self.parameters.momentum(0))

    def merge(self) -> None:
        self.open()
        self.stage()

    def work(self) -> None:
        self.open()
        self.judge()
        self.stage()

    def stage(self) -> None:
        self.parameters.stage_merge(0, self.given, self.weights)
        self.parameters.piece_marks(0)
        self.version += 1
        self.parameters.commit_version(0, self.version, self.version)


class RoundInTurn(Round):
    """One pass after the other, each over the whole fragment, on one thread."""

    def __init__(self, plan: FragmentPlan, name: str, deltas: list[FloatArray], rule: str) -> None:
        super().__init__(plan, name, deltas, 1, rule)
        self.decoded = [np.empty(plan.size, np.float32) for _ in deltas]
        self.given = list(self.decoded)
        self.rule, self.outer = MERGE.load(rule), Outer().make()
        self.theta, self.new, self.gradient, momentum = (np.zeros(plan.size, np.float32) for _ in range(4))
        self.state = {"momentum": momentum}

    def open(self) -> None:
        for body, out in zip(self.bodies, self.decoded, strict=True):
            decode_contribution(self.codec, self.part, body, out)

    def stage(self) -> None:
        shares = np.array(self.weights) / sum(self.weights)
        for piece, at in self.part.parts:
            if len(self.decoded) == 1:
                self.gradient[at] = self.decoded[0][at]
            else:
                given = np.stack([delta[at] for delta in self.decoded])
                self.rule.merge_piece(piece, given, shares, self.gradient[at])
        take_outer_step(self.outer, self.part, self.theta, self.new, self.state, self.gradient)
        assert is_finite(self.new)
        compute_digest(self.new.view(np.uint8).data)
        np.bitwise_xor.reduceat(self.new.view(np.uint32), self.part.offsets)
        self.theta, self.new = self.new, self.theta


class TorchRound:
    """What a user would write."""

    def __init__(self, ours: Round) -> None:
        self.codec, self.bodies = ours.codec, [torch.from_numpy(body) for body in ours.bodies]
        self.part, self.rows, size = ours.part, row_lengths(ours.part.pieces), ours.part.size
        self.shares = [weight / sum(ours.weights) for weight in ours.weights]
        self.theta, self.momentum, self.gradient = (torch.zeros(size) for _ in range(3))
        self.decoded = [torch.zeros(size) for _ in self.bodies]

    def deltas(self) -> Iterator[torch.Tensor]:
        for body, decoded in zip(self.bodies, self.decoded, strict=True):
            if self.codec.name in ("fp32", "bf16"):
                yield body.view(torch.float32 if self.codec.name == "fp32" else torch.bfloat16)
            else:
                codecs.decode(self.codec, body, self.rows, decoded)
                yield decoded

    def step_by_mean(self) -> None:
        self.gradient.zero_()
        for delta, share in zip(self.deltas(), self.shares, strict=True):
            self.gradient.add_(delta, alpha=share)
        self.take_outer_step()

    def step_by_rda_row(self) -> None:
        deltas = list(self.deltas())
        for piece, at in self.part.parts:
            given, out = [delta[at].view(piece.rows, -1) for delta in deltas], self.gradient[at].view(piece.rows, -1)
            norms = [torch.linalg.vector_norm(delta, dim=1, keepdim=True, dtype=torch.float32) for delta in given]
            radius = sum((share * norm for share, norm in zip(self.shares, norms, strict=True)), torch.zeros(1))
            out.zero_()
            for delta, share, norm in zip(given, self.shares, norms, strict=True):
                out.addcmul_(delta, share * radius / norm)
            out.mul_(radius / torch.linalg.vector_norm(out, dim=1, keepdim=True))
        self.take_outer_step()

    def take_outer_step(self) -> None:
        lr, mu = Outer().lr, Outer().momentum
        self.momentum.mul_(mu).add_(self.gradient)
        self.theta.sub_(self.gradient, alpha=lr).sub_(self.momentum, alpha=lr * mu)


def in_turns(works: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
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
    base, theta, feedback, rest = deltas[0], deltas[1], deltas[2], np.zeros(SIZE, np.float32)
    works: dict[str, Callable[[], object]] = {}
    for count in sorted({1, threads}):
        codec = make_codec(name, count)
        body, out = np.empty(body_nbytes(codec, FRAGMENT), np.uint8), np.empty(SIZE, np.float32)
        works[f"encode {count}"] = partial(encode_contribution, codec, FRAGMENT, Delta(base, theta), body)
        works[f"fed {count}"] = partial(encode_contribution, codec, FRAGMENT, Delta(base, theta, feedback, rest), body)
        works[f"decode {count}"] = partial(decode_contribution, codec, FRAGMENT, body, out)
    times = in_turns(works, repetitions)
    codec = make_codec(name, threads)
    encode_contribution(codec, FRAGMENT, Delta(base, theta), body)
    decode_contribution(codec, FRAGMENT, body, out)
    exact = (base - theta).astype(np.float64)
    return {
        "codec": name,
        "bits": 8 * body.size / SIZE,
        "relative_error": float(f"{np.linalg.norm(out - exact) / np.linalg.norm(exact):.3g}"),
        "gb_per_s": {work: round(4e-9 * SIZE / seconds, 2) for work, seconds in times.items()},
    }


def measure_round(
    plan: FragmentPlan, name: str, threads: int, deltas: list[FloatArray], repetitions: int
) -> dict[str, Any]:
    mean, ours = (Round(plan, name, deltas, threads, rule) for rule in ("mean", "rda-row"))
    torch_round = TorchRound(ours)
    works = {
        "mean": mean.merge,
        "rda-row": ours.merge,
        "all": ours.work,
        "in turn": RoundInTurn(plan, name, deltas, "rda-row").work,
        "torch": torch_round.step_by_mean,
        "torch rda-row": torch_round.step_by_rda_row,
    }
    times = in_turns(works, repetitions)
    return {
        "codec": name,
        "learners": len(deltas),
        "parameters_mib": 4 * plan.size // 2**20,
        "ms": {work: round(1e3 * seconds, 1) for work, seconds in times.items()},
        "gb_per_s": {work: round(4e-9 * plan.size * len(deltas) / seconds, 2) for work, seconds in times.items()},
        "times_torch": {work: round(times["torch"] / times[work], 2) for work in ("mean", "rda-row")}
        | {"rda-row, same rule": round(times["torch rda-row"] / times["rda-row"], 2)},
        "times_in_turn": round(times["in turn"] / times["all"], 2),
    }


def broken_limits(rounds: list[dict[str, Any]]) -> list[str]:
    wrong = []
    for one in rounds:
        if one["learners"] == 1:
            continue
        name, rates = one["codec"], one["gb_per_s"]
        for rule in ("mean", "rda-row"):
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
    parser.add_argument("--threads", type=int, default=thread_count())
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "codecs.json")
    options = parser.parse_args()
    kernels.warm()
    torch.set_num_threads(options.threads)
    dice = np.random.default_rng(0)
    deltas = [dice.standard_normal(SIZE, dtype=np.float32) for _ in range(4)]
    found = [measure_codec(name, options.threads, deltas, options.repetitions) for name in NAMES]
    rounds = [measure_round(PLAN, name, options.threads, deltas, options.repetitions) for name in NAMES]
    alone = [delta[: SMALL.size] for delta in deltas[:1]]
    rounds += [measure_round(SMALL, name, options.threads, alone, options.repetitions) for name in NAMES]
    result = {
        "commit": commit(),
        "machine": {"processor": platform.machine(), "threads": options.threads, "load": os.getloadavg()[0]},
        "versions": {"python": platform.python_version(), "numpy": np.__version__}
        | {"numba": numba.__version__, "torch": torch.__version__},
        "codecs": found,
        "rounds": rounds,
        "four": {one["codec"]: one for one in rounds if one["learners"] == len(deltas)},
        "wrong": broken_limits(rounds),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for one in [*found, *rounds]:
        print(json.dumps(one))
    print("\n".join(result["wrong"]) or "every limit is kept")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
