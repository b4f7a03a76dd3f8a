"""A learner of a real size beside its syncer on one machine: is H honest, and what does it cost?

    python benchmarks/real_size.py                                    # 170M parameters on a GPU, two minutes
    python benchmarks/real_size.py --batch 8 --compile                # 170M at 30 ms a step; --batch 13: 46 ms
    python benchmarks/real_size.py --depth 43 --batch 16 --seconds 300       # 1.0B
    python benchmarks/real_size.py --placement device                 # base and feedback on the GPU, which encodes
    python benchmarks/real_size.py --depth 4 --batch 2 --block 64 --seconds 5      # a look at it on a CPU

Bare steps, steps with a learner that takes part in a run, bare steps again; the same batches, bf16 autocast on a GPU.
Told are tokens/s and step times of both, device memory, the time from connecting to the first step, and effective H:
learner steps between two versions of a fragment, beside the H asked for. A ratio of 1.000 with a large effective H
means that nothing happened.

As in a usual loop nothing waits for the device at every step: the processor is up to AHEAD steps ahead of it. A step's
time is the time between the ends of two steps on the device, by the device's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import deque
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from overhead import start_syncer

import atoll
from atoll.fabric.transfer import get_json
from atoll.learner.placement import WISHES, PlacementWish
from atoll.store.event_parts import read_lines
from atoll.telemetry.events import versions
from atoll.workloads.gpt import Gpt, GptConfig

BATCHES = 8
WARMUP = 20
"""Steps before any is timed: the first ones compile, and allocate memory."""
AHEAD = 2


class DeviceClock:
    """Between two moments of the training stream, by the device's own clock."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True, enable_timing=True)
        event.record()
        return event

    def measure_s(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        """Waits until both have passed."""
        later.synchronize()
        return float(earlier.elapsed_time(later)) / 1e3


class HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def measure_s(self, earlier: float, later: float) -> float:
        return later - earlier


class Loop:
    """Training steps on batches that lie on the device, each with its time."""

    def __init__(self, depth: int, batch: int, block: int, compile: bool = False) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(0)
        self.model = Gpt(GptConfig(depth=depth, block=block)).to(self.device)
        self._forward = torch.compile(self.model) if compile else self.model
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)
        self.batches = cycle(torch.randint(0, 256, (batch, block + 1), device=self.device) for _ in range(BATCHES))
        self.tokens = batch * block
        self.steps: list[dict[str, float]] = []
        """Of the last part that was run."""

    def make_step(self) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss: torch.Tensor = self._forward(next(self.batches))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def run_for(self, seconds: float, learner: atoll.Learner | None = None) -> dict[str, float]:
        self._synchronize()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ends: deque[Any] = deque()
        clock = DeviceClock() if self.device.type == "cuda" else HostClock()
        took: list[float] = []
        self.steps = []
        began = time.perf_counter()
        ends.append(clock.mark())
        while time.perf_counter() - began < seconds:
            loss = self.make_step()
            launched = time.perf_counter()
            if learner is not None:
                learner.step(tokens=self.tokens, loss=loss)
            self.steps.append({"at": time.time(), "held_s": time.perf_counter() - launched})
            ends.append(clock.mark())
            if len(ends) > AHEAD + 1:
                took.append(clock.measure_s(ends.popleft(), ends[0]))
        took += [clock.measure_s(earlier, later) for earlier, later in pairwise(ends)]
        self.steps = [{**step, "took_s": took_s} for step, took_s in zip(self.steps, took, strict=True)]
        memory = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        return {
            "steps": len(took),
            "tokens_per_s": len(took) * self.tokens / (time.perf_counter() - began),
            "step_median_s": median(took),
            "step_p95_s": quantiles(took, n=100)[94] if len(took) > 1 else took[0],
            "step_p99_s": quantiles(took, n=100)[98] if len(took) > 1 else took[0],
            "device_bytes": memory,
        }

    def _synchronize(self) -> None:
        """The training stream alone: copies on other streams go on."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def write_trace(path: Path | None, steps: list[dict[str, float]], folder: Path) -> None:
    """Every step with its time, and what the run did beside it, by the same clock."""
    if path is not None:
        events = [json.loads(line) for line in read_lines(folder / "events.jsonl")]
        path.write_text(json.dumps({"steps": steps, "events": events}) + "\n")


def measure(
    loop: Loop, seconds: float, folder: Path, words: list[str], placement: PlacementWish, trace: Path | None = None
) -> dict[str, Any]:
    settle_s, bare_s = min(seconds / 10, 10.0), min(seconds / 4, 30.0)
    for _ in range(WARMUP):
        loop.make_step()
    loop.run_for(settle_s)
    before = loop.run_for(bare_s)
    syncer, url = start_syncer(folder, *words)
    try:
        began = time.perf_counter()
        with atoll.Learner(loop.model, loop.optimizer, syncer=url, placement=placement) as learner:
            learner.step(tokens=loop.tokens, loss=loop.make_step())
            joined_s = time.perf_counter() - began
            loop.run_for(settle_s, learner)  # pace and estimates settle
            inside = loop.run_for(seconds, learner)
            write_trace(trace, loop.steps, folder)
            status: dict[str, Any] = asyncio.run(get_json(url, "/v1/status"))
    finally:
        syncer.kill()
        syncer.wait()
    after = loop.run_for(bare_s)
    bare = {key: (before[key] + after[key]) / 2 for key in before}
    return {
        "device": torch.cuda.get_device_name() if loop.device.type == "cuda" else "cpu",
        "placement": placement,
        "parameters": sum(p.numel() for p in loop.model.parameters()),
        "bare": bare,
        "atoll": inside,
        "ratio": inside["tokens_per_s"] / bare["tokens_per_s"],
        "step_p99_ratio": inside["step_p99_s"] / bare["step_p99_s"],
        "device_memory_ratio": inside["device_bytes"] / bare["device_bytes"] if bare["device_bytes"] else None,
        "joined_s": joined_s,
        "status": {key: value for key, value in status.items() if isinstance(value, int | float | str)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=24, help="of the built-in GPT: 12,288 times its cube parameters")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--block", type=int, default=1024)
    parser.add_argument("--compile", action="store_true", help="the forward and backward pass by torch.compile")
    parser.add_argument("--placement", choices=WISHES, default="host", help="of base and feedback")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the part with a learner")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the run")
    parser.add_argument("--trace", type=Path, help="write every step's time, and the run's events, to this file")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/real_size.json"))
    options = parser.parse_args()
    words = [word for setting in options.set for word in ("--set", setting)]
    with tempfile.TemporaryDirectory() as scratch:
        loop = Loop(options.depth, options.batch, options.block, options.compile)
        result = measure(loop, options.seconds, Path(scratch) / "run", words, options.placement, options.trace)
    result |= {"commit": options.commit, "versions": versions()}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
