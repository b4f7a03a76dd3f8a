"""What the tape costs: tokens/s of a learner with it and without, in turns, in one run; and its bytes for every round.

    python benchmarks/tape.py

Blocks of steps with the tape and blocks without follow each other, so that both see the same machine. The syncer and
the courier share that machine: what the tape costs them is in it too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from overhead import Loop, start_syncer

import atoll
from atoll.learner.courier_process import TapeRecorder
from atoll.protocol import records
from atoll.store.disk import LocalDisk
from atoll.store.journal import read
from atoll.workloads.settings import WorkloadSettings

FRAME_BYTES = 21
"""What a segment adds to a record."""


def measure(loop: Loop, learner: atoll.Learner, blocks: int, steps: int) -> dict[str, Any]:
    batches = learner.batches(loop.dataset, batch_size=loop.settings.batch)
    rates: dict[str, list[float]] = {"with": [], "without": []}
    add = TapeRecorder.add
    for block in range(2 * blocks + 2):
        name = "without" if (block + block // 2) % 2 else "with"
        TapeRecorder.add = add if name == "with" else lambda self, entry: None  # type: ignore[method-assign]
        began = time.perf_counter()
        for _ in range(steps):
            loss = loop.step(next(batches))
            learner.step(tokens=loop.tokens, loss=loss)
        if block >= 2:  # everything has been used once before
            rates[name].append(steps * loop.tokens / (time.perf_counter() - began))
    TapeRecorder.add = add  # type: ignore[method-assign]
    return {
        "parameters": sum(p.numel() for p in loop.model.parameters()),
        "step_ms": 1e3 * loop.tokens / median(rates["without"]),
        "tokens_per_s_with": median(rates["with"]),
        "tokens_per_s_without": median(rates["without"]),
        "ratio": median(rates["with"]) / median(rates["without"]),
    }


def sizes(folder: Path) -> dict[str, float]:
    """Bytes for every round, of the tape alone and of all records."""
    rounds = tape = whole = 0
    for _, record in read(folder / "journal", disk=LocalDisk()):
        size = len(records.encode(record)) + FRAME_BYTES
        whole += size
        tape += size if isinstance(record, records.PlayedRecord | records.LentRecord) else 0
        rounds += isinstance(record, records.MergedRecord)
    return {"rounds": rounds, "tape_bytes_per_round": tape / rounds, "record_bytes_per_round": whole / rounds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tape.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        syncer, url = start_syncer(folder)
        os.environ["ATOLL_SYNCER"] = url
        try:
            loop = Loop(WorkloadSettings(depth=4, block=64, batch=8))
            with atoll.Learner(loop.model, loop.optimizer) as learner:
                result = measure(loop, learner, options.blocks, options.steps)
        finally:
            syncer.kill()
            syncer.wait()
        result |= sizes(folder)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0 if result["ratio"] >= 0.99 else 1


if __name__ == "__main__":
    sys.exit(main())
