"""What leased data costs where fetching a sample is slow: a step's time with it over that with a plain DataLoader.

    python benchmarks/loading.py

In one run, with a syncer on the same machine, blocks of steps on batches of a plain DataLoader and of learner.batches
(or of a DataLoader with learner.sampler) follow each other, so that both see the same machine. A sample takes
`--sample-ms` to fetch; without workers they add up, with workers they are fetched side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from overhead import start_syncer
from torch.utils.data import DataLoader

import atoll

BATCH = 8
WIDTH = 64


class Slow:
    """Samples that take their time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.full((WIDTH,), index / 1e5)


def leased(learner: atoll.Learner, data: Slow, way: str, workers: int) -> Iterator[torch.Tensor]:
    if way == "batches":
        return learner.batches(data, BATCH, num_workers=workers)
    return iter(DataLoader(data, batch_sampler=learner.sampler(data, BATCH), num_workers=workers))


def measure(learner: atoll.Learner, data: Slow, way: str, workers: int, blocks: int, steps: int) -> dict[str, Any]:
    plain = iter(DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers))
    ways, times = {"plain": plain, "leased": leased(learner, data, way, workers)}, {"plain": [], "leased": []}
    for block in range(2 * blocks + 2):
        name = "leased" if (block + block // 2) % 2 else "plain"
        began = time.perf_counter()
        for _ in range(steps):
            batch = next(ways[name])
            loss = (learner.model(batch) - torch.randn(BATCH, 1)).square().mean()
            loss.backward()
            learner.optimizer.step()
            learner.optimizer.zero_grad()
            learner.step(tokens=BATCH, loss=loss)
        if block >= 2:  # everything has been used once before
            times[name].append((time.perf_counter() - began) / steps)
    step_ms = {f"{name}_step_ms": 1e3 * median(of) for name, of in times.items()}
    pairs = zip(times["leased"], times["plain"], strict=True)
    return {"way": way, "workers": workers, **step_ms, "ratio": median(mine / its for mine, its in pairs)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sample-ms", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/loading.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, found = Slow(options.sample_ms / 1e3), []
    with tempfile.TemporaryDirectory() as scratch:
        syncer, url = start_syncer(Path(scratch) / "run")
        os.environ["ATOLL_SYNCER"] = url
        try:
            model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
            with atoll.Learner(model, torch.optim.AdamW(model.parameters())) as learner:
                for way in ("batches", "sampler"):
                    for workers in (0, 2):
                        found.append(measure(learner, data, way, workers, options.blocks, options.steps))
                        print(json.dumps(found[-1]), flush=True)
        finally:
            syncer.kill()
            syncer.wait()
    result = {"sample_ms": options.sample_ms, "batch": BATCH, "measured": found}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if max(one["ratio"] for one in found) <= 1.05 else 1


if __name__ == "__main__":
    sys.exit(main())
