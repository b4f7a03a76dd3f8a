"""Trace hashes of the fault simulator's worlds: does a change that should change nothing change nothing?

    python tools/traces.py                        # 500 worlds against tools/traces.json: ten minutes on a core
    python tools/traces.py --renamed Disconnected=Cut
    python tools/traces.py --write                # record them anew, after a change that is meant to change them

A trace is the hash of every event and every effect of a world. Names of events are part of it: --renamed says what an
event was called before. Exit code 1: a trace differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from atoll.simulate import campaign, trace

RECORDED = Path(__file__).resolve().parent / "traces.json"


def trace_seed(seed: int, renamed: dict[str, str]) -> str:
    trace.NAMES.update(renamed)
    plan = campaign.plan(seed)
    return campaign.run(plan, campaign.make(plan, traced=True)).trace


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--write", action="store_true", help="record them")
    parser.add_argument("--renamed", nargs="*", default=[], metavar="NEW=OLD")
    options = parser.parse_args()
    renamed = dict(pair.split("=") for pair in options.renamed)
    with ProcessPoolExecutor(options.jobs) as pool:
        traces = list(pool.map(trace_seed, range(options.seeds), [renamed] * options.seeds, chunksize=5))
    if options.write:
        RECORDED.write_text(json.dumps(traces, indent=0) + "\n")
        return 0
    before = json.loads(RECORDED.read_text())
    differ = [seed for seed, (ours, theirs) in enumerate(zip(traces, before, strict=False)) if ours != theirs]
    print(f"{len(traces)} worlds, {len(differ)} differ{f': {differ[:20]}' if differ else ''}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
