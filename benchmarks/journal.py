"""What it costs that everything is on disk before it is told.

    python benchmarks/journal.py

(a) In a run with rounds at their usual pace: tokens/s of a learner while its syncer keeps its journal against tokens/s
    while the same syncer writes nothing, in blocks that follow each other; the ratio is the median over pairs of
    neighbours, so that both see the same machine.
(b) Rounds back to back, as no run has them: four contributions of 64 MiB are merged, made durable and committed as fast
    as it goes, with the journal and without. Stated, without a limit: it is the disk that is measured.

The syncer of (a) is this file with --serve: its books append nothing while a file `off` lies beside the run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from atoll.config import Config, Outer
from atoll.numerics import kernels
from atoll.numerics.fragments import make_plan
from atoll.protocol.messages import TensorSpec
from atoll.protocol.records import BegunRecord, MergedRecord, Share
from atoll.protocol.settings import Settings
from atoll.store.journal import JournalEntry
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import acquire
from atoll.syncer.parameters import Parameters
from atoll.syncer.process import serve
from atoll.syncer.run_store import RunStore

LIMIT = 0.99
"""Of the tokens/s without a journal, at the usual pace."""
MIB = 2**20


# ---- (a) at the usual pace ------------------------------------------------------------------------------------------


def serve_switched(path: Path) -> int:
    """A syncer whose journal can be switched off."""
    off, append = path.parent / "off", RunStore.append

    def switched(run_store: RunStore, entries: Sequence[JournalEntry]) -> None:
        if not off.exists():
            append(run_store, entries)

    RunStore.append = switched  # type: ignore[method-assign]
    return serve(Config(protocol=Settings(learners=1)), RunDir.create(path), evaluated=False)


def start_syncer(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    process = subprocess.Popen([sys.executable, __file__, "--serve", str(folder)], stdout=subprocess.DEVNULL)
    address = folder / "syncer.url"
    deadline = time.monotonic() + 60
    while not address.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the syncer did not start")
        time.sleep(0.05)
    return process, address.read_text()


def at_pace(scratch: Path, pairs: int, steps: int) -> dict[str, Any]:
    """The small GPT of the demos, on one thread: the syncer and the courier have the rest of the machine."""
    import torch
    from overhead import Loop

    import atoll
    from atoll.workloads.settings import WorkloadSettings

    torch.set_num_threads(1)
    syncer, url = start_syncer(scratch / "run")
    os.environ["ATOLL_SYNCER"] = url
    try:
        loop = Loop(WorkloadSettings())
        with atoll.Learner(loop.model, loop.optimizer) as learner:
            batches = learner.batches(loop.dataset, batch_size=loop.settings.batch)

            def rate() -> float:
                began = time.perf_counter()
                for _ in range(steps):
                    learner.step(tokens=loop.tokens, loss=loop.step(next(batches)))
                loop.finish()
                return steps * loop.tokens / (time.perf_counter() - began)

            found = in_turns(rate, scratch / "off", pairs)
            return {
                "step_ms": round(1e3 * loop.tokens / found["tokens_per_s"], 2),
                **found,
                "run_step": learner.global_step,
            }
    finally:
        syncer.kill()
        syncer.wait()


def in_turns(rate: Callable[[], float], off: Path, pairs: int) -> dict[str, Any]:
    """Blocks with the journal and without it, neither always the first of its pair."""
    rate()  # everything has been used once before the clock starts
    rates: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs):
        for kept in (True, False) if pair % 2 else (False, True):
            if kept:
                off.unlink(missing_ok=True)
            else:
                off.touch()
            rates[kept].append(rate())
    return {
        "tokens_per_s": round(median(rates[True]), 1),
        "tokens_per_s_without": round(median(rates[False]), 1),
        "ratio": round(median(one / other for one, other in zip(rates[True], rates[False], strict=True)), 4),
        "blocks": 2 * pairs,
    }


# ---- (b) back to back -----------------------------------------------------------------------------------------------


def back_to_back(scratch: Path, rounds: int, size: int = 16 * MIB, members: int = 4) -> dict[str, Any]:
    """Stage, persist, commit; two fragments in turn."""
    tensors = tuple(TensorSpec(f"blocks.{n}.weight", (size // 4096, 4096), "float32") for n in range(2))
    settings = Settings(learners=members).resolved(len(tensors))
    plan = make_plan(tensors, settings.fragments, settings.plan)
    parameters = Parameters(plan, Outer())
    run_store = RunStore(RunDir.create(scratch / "run"), acquire(scratch / "run" / "journal"))
    run_store.append(
        [(BegunRecord("benchmark", settings, msgspec.to_builtins(Outer()), tensors, plan.fingerprint), None)]
    )
    dice = np.random.default_rng(0)
    deltas = [dice.standard_normal(size, dtype=np.float32) for _ in range(members)]
    shares = tuple(Share(f"learner-{n}", 1, 24, 24, 12288, 6291456.0, 0, 12288) for n in range(members))

    def turn(number: int, keep: Callable[[Sequence[JournalEntry]], None]) -> float:
        began, fragment = time.perf_counter(), number % 2
        mark = parameters.stage_merge(fragment, deltas, [share.weight for share in shares])
        record = MergedRecord(number, fragment, number // 2 + 1, 1, "all live learners reported", shares, mark)
        keep([(record, parameters.outer_gradient(fragment).view(np.uint8).data)])
        parameters.commit_version(fragment, number // 2 + 1, number)
        return time.perf_counter() - began

    times: dict[str, list[float]] = {"with": [], "without": []}
    turn(0, run_store.append)
    for number in range(1, 2 * rounds + 1):
        name, keep = ("with", run_store.append) if number % 4 in (1, 2) else ("without", lambda entries: None)
        times[name].append(turn(number, keep))
    run_store.close()
    with_s, without_s = median(times["with"]), median(times["without"])
    return {
        "fragment_mib": 4 * size // MIB,
        "members": members,
        "rounds_per_s": round(1 / with_s, 2),
        "rounds_per_s_without": round(1 / without_s, 2),
        "journal_ms": round(1e3 * (with_s - without_s), 1),
        "journal_mb_per_s": round(4e-6 * size / (with_s - without_s), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=120, help="of blocks of (a)")
    parser.add_argument("--steps", type=int, default=10, help="in a block of (a)")
    parser.add_argument("--rounds", type=int, default=12, help="of (b), with the journal and without")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/journal.json"))
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        return serve_switched(options.serve)
    kernels.warm()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        flat_out = back_to_back(Path(one), options.rounds)
        result = {"at_pace": at_pace(Path(other), options.pairs, options.steps), "back_to_back": flat_out}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0 if result["at_pace"]["ratio"] >= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
