"""Trace hashes of the fault simulator's worlds: does a change that should change nothing change nothing?

    python tools/traces.py                        # all worlds against tools/traces.json: about eight minutes on a core
    python tools/traces.py --kind shards --seeds 20
    python tools/traces.py --renamed Disconnected=Cut
    python tools/traces.py --write                # record them anew, after a change that is meant to change them

A trace is the hash of all that the machines of a world were told, and of all that they answered
(src/atoll/simulate/trace.py). Names of events and effects are part of it: --renamed says what one was called before.
Exit code 1: a trace differs, or was never recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from atoll.simulate import campaign, trace

RECORDED = Path(__file__).resolve().parent / "traces.json"
WORLDS: dict[campaign.WorldKind, int] = {"plain": 500, "ranks": 150, "shards": 150, "relays": 150}
"""Number of worlds of each kind: seeds 0, 1, 2, …"""


def trace_world(world: tuple[campaign.WorldKind, int]) -> str:
    kind, seed = world
    plan = campaign.plan(seed, kind=kind)
    return campaign.run(plan, campaign.make(plan, traced=True)).trace


def trace_worlds(worlds: list[tuple[campaign.WorldKind, int]], jobs: int, renamed: dict[str, str]) -> Iterator[str]:
    with ProcessPoolExecutor(jobs, initializer=trace.NAMES.update, initargs=(renamed,)) as pool:
        yield from pool.map(trace_world, worlds, chunksize=5)


def show_progress(traces: Iterable[str], total: int) -> Iterator[str]:
    """Show a line of progress, on a terminal only."""
    console = Console(stderr=True)
    return iter(track(traces, "worlds", total, console=console, transient=True, disable=not console.is_terminal))


def compare_kind(kind: str, ours: list[str], recorded: list[str]) -> bool:
    """Print which worlds of a kind differ. Return whether none does."""
    differ = [seed for seed, (new, old) in enumerate(zip(ours, recorded, strict=False)) if new != old]
    missing = max(0, len(ours) - len(recorded))
    print(
        f"{kind}: {len(ours)} worlds, {len(differ)} differ"
        f"{f': {differ[:20]}' if differ else ''}{f', {missing} not recorded' if missing else ''}"
    )
    return not differ and not missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=WORLDS, default=list(WORLDS), help="worlds of these kinds only")
    parser.add_argument("--seeds", type=int, help="at most so many worlds of each kind")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--write", action="store_true", help="record them")
    parser.add_argument("--file", type=Path, default=RECORDED, help="where they are recorded (tools/traces.json)")
    parser.add_argument("--renamed", nargs="*", default=[], metavar="NEW=OLD")
    options = parser.parse_args()
    counts = {kind: min(WORLDS[kind], options.seeds or WORLDS[kind]) for kind in options.kind}
    worlds = [(kind, seed) for kind, count in counts.items() for seed in range(count)]
    renamed = dict(pair.split("=") for pair in options.renamed)
    traces = show_progress(trace_worlds(worlds, options.jobs, renamed), len(worlds))
    ours: dict[str, list[str]] = {kind: [] for kind in counts}
    for (kind, _), hashed in zip(worlds, traces, strict=True):
        ours[kind].append(hashed)
    recorded = json.loads(options.file.read_text()) if options.file.exists() else {}
    if options.write:
        options.file.write_text(json.dumps(recorded | ours, indent=0) + "\n")
        return 0
    are_equal = [compare_kind(kind, hashes, recorded.get(kind, [])) for kind, hashes in ours.items()]
    return 0 if all(are_equal) else 1


if __name__ == "__main__":
    sys.exit(main())
