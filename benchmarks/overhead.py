"""What the library costs a learner: tokens/s with it against the bare loop, in turns, in one process.

    python benchmarks/overhead.py                    # CPU, one thread; the syncer is another process
    python benchmarks/overhead.py --depth 16 --block 256 --batch 32     # a GPU, where there is one
    python benchmarks/overhead.py --set sync_every=144      # a round every sixth step instead of every step
    python benchmarks/overhead.py --tls              # what TLS and tokens cost: a learner with them against one without

Blocks of bare steps and blocks of steps with `learner.step()` follow each other, so that both see the same machine; the
ratio is between the medians over the blocks. The time inside `learner.step()` is told as a share of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import torch

import atoll
from atoll.workloads.settings import WorkloadSettings
from atoll.workloads.text import Text, Windows
from atoll.workloads.training import build_model, build_optimizers


def start_syncer(folder: Path, *words: str) -> tuple[subprocess.Popen[bytes], str]:
    command = [sys.executable, "-m", "atoll.cli", "syncer", "--learners", "1", "--port", "0", "--out", str(folder)]
    process = subprocess.Popen([*command, *words], stdout=subprocess.DEVNULL)
    address = folder / "syncer.url"
    deadline = time.monotonic() + 60
    while not address.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the syncer did not start")
        time.sleep(0.05)
    return process, address.read_text()


class Loop:
    """One training step, and the clock around it."""

    def __init__(self, settings: WorkloadSettings) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dataset = Windows(Text.load(settings.data), settings.block)
        self.model = build_model(settings, 0).to(self.device)
        self.optimizers = build_optimizers(self.model, settings)
        self.settings = settings
        self.tokens = settings.batch * settings.block

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch.to(self.device, non_blocking=True))
        loss.backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(loop: Loop, learner: atoll.Learner, blocks: int, steps: int) -> dict[str, Any]:
    batches = learner.batches(loop.dataset, batch_size=loop.settings.batch)
    rates: dict[str, list[float]] = {"bare": [], "atoll": []}
    inside: list[float] = []
    inside_cpu: list[float] = []
    """The thread's own processor time: the same beside other work."""

    def bare() -> None:
        for _ in range(steps):
            loop.step(next(batches))

    def ours() -> None:
        for _ in range(steps):
            loss = loop.step(next(batches))
            began, worked = time.perf_counter(), time.thread_time()
            learner.step(tokens=loop.tokens, loss=loss)
            inside.append(time.perf_counter() - began)
            inside_cpu.append(time.thread_time() - worked)

    ours()  # everything has been used once before the clock starts
    inside.clear()
    inside_cpu.clear()
    for block in range(2 * blocks):
        name, work = ("bare", bare) if (block + block // 2) % 2 else ("atoll", ours)
        loop.finish()
        began = time.perf_counter()
        work()
        loop.finish()
        rates[name].append(steps * loop.tokens / (time.perf_counter() - began))
    step_s = loop.tokens / median(rates["bare"])
    return {
        "device": str(loop.device),
        "parameters": sum(p.numel() for p in loop.model.parameters()),
        "step_ms": 1e3 * step_s,
        "bare_tokens_per_s": median(rates["bare"]),
        "atoll_tokens_per_s": median(rates["atoll"]),
        "ratio": median(rates["atoll"]) / median(rates["bare"]),
        "step_call_median": median(inside) / step_s,
        "step_call_p99": quantiles(inside, n=100)[98] / step_s,
        "step_call_cpu_ms": {"median": 1e3 * median(inside_cpu), "mean": 1e3 * mean(inside_cpu)},
        "run_step": learner.global_step,
    }


def start_secured(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """With TLS and tokens; where it is, by its join link."""
    keys = folder.with_name("keys")
    atoll_ = [sys.executable, "-m", "atoll.cli"]
    subprocess.run([*atoll_, "cert", "--out", str(keys)], check=True, stdout=subprocess.DEVNULL)
    process, _ = start_syncer(folder, "--keys", str(keys))
    while not (keys / "last.json").exists():
        time.sleep(0.05)
    found = subprocess.run([*atoll_, "tokens", "--keys", str(keys), "link"], check=True, stdout=subprocess.PIPE)
    return process, found.stdout.decode().strip()


def measure_tls(settings: WorkloadSettings, scratch: Path, blocks: int, steps: int) -> dict[str, Any]:
    """Two learners in one process, each with a model and a syncer of its own, in turns."""
    places = {"plain": start_syncer(scratch / "plain"), "tls": start_secured(scratch / "tls")}
    rates: dict[str, list[float]] = {name: [] for name in places}
    try:
        with ExitStack() as stack:
            turns: dict[str, Callable[[], None]] = {}
            for name, (_, where) in places.items():
                loop = Loop(settings)
                learner = stack.enter_context(atoll.Learner(loop.model, loop.optimizers, syncer=where))
                turns[name] = _turn(loop, learner, steps)
            for turn in turns.values():
                turn()
            for block in range(2 * blocks):
                name = "tls" if (block + block // 2) % 2 else "plain"
                began = time.perf_counter()
                turns[name]()
                rates[name].append(steps * settings.batch * settings.block / (time.perf_counter() - began))
    finally:
        for process, _ in places.values():
            process.kill()
            process.wait()
    found = {f"{name}_tokens_per_s": median(values) for name, values in rates.items()}
    return {**found, "ratio": median(rates["tls"]) / median(rates["plain"]), "blocks": blocks, "steps": steps}


def _turn(loop: Loop, learner: atoll.Learner, steps: int) -> Callable[[], None]:
    batches = learner.batches(loop.dataset, batch_size=loop.settings.batch)

    def turn() -> None:
        for _ in range(steps):
            learner.step(tokens=loop.tokens, loss=loop.step(next(batches)))
        loop.finish()

    return turn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the run")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.out = options.out or Path(f"benchmarks/results/overhead{'-tls' if options.tls else ''}.json")
    torch.set_num_threads(1)
    settings = WorkloadSettings(depth=options.depth, block=options.block, batch=options.batch)
    if options.tls:
        with tempfile.TemporaryDirectory() as scratch:
            return close(options.out, measure_tls(settings, Path(scratch), options.blocks, options.steps), least=0.98)
    with tempfile.TemporaryDirectory() as scratch:
        words = [word for setting in options.set for word in ("--set", setting)]
        syncer, url = start_syncer(Path(scratch) / "run", *words)
        os.environ["ATOLL_SYNCER"] = url
        try:
            loop = Loop(settings)
            with atoll.Learner(loop.model, loop.optimizers) as learner:
                result = measure(loop, learner, options.blocks, options.steps)
        finally:
            syncer.kill()
            syncer.wait()
    code = close(options.out, result, least=0.97)
    return code if result["step_call_median"] < 0.01 and result["step_call_p99"] < 0.05 else 1


def close(out: Path, result: dict[str, Any], least: float) -> int:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0 if result["ratio"] >= least else 1


if __name__ == "__main__":
    sys.exit(main())
