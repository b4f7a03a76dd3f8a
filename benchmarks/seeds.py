"""Many worlds of the fault simulator, in blocks, on all cores: do the promises hold?

    python benchmarks/seeds.py --first 12000 --seeds 50000

Every seed is a world of virtual time in which faults happen to the shipped protocol (`atoll simulate faults`). After
every block the result is written, so that a run that is cut short leaves what it has done; with --add, blocks that an
earlier run on the same commit left are kept. The result names the commit, the versions, and for every broken promise
the command that repeats it.

It needs Python and msgspec, and no installed package: src is found beside this folder. Exit code 1: a promise is
broken.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

from atoll import __version__  # noqa: E402
from atoll.simulate.reports import FailureReport, all_of  # noqa: E402
from atoll.telemetry.events import versions  # noqa: E402


def run_block(jobs: int, seeds: range) -> dict[str, Any]:
    """What became of these worlds."""
    began, events, broken = time.perf_counter(), 0, []
    for done, one in enumerate(all_of(seeds, None, jobs), 1):
        events += one.outcome.events
        if one.told is not None:
            broken.append(describe(one.told))
            print_line(f"seed {one.told.seed}: {one.told.invariant}: {one.told.message}\n  {one.told.command}")
        elif done % 500 == 0:
            print_line(f"  {done:,} of {len(seeds):,} worlds of this block")
    return {
        "first": seeds.start,
        "seeds": len(seeds),
        "events": events,
        "wall_s": round(time.perf_counter() - began, 1),
        "violations": sorted(broken, key=lambda one: one["seed"]),
    }


def describe(told: FailureReport) -> dict[str, Any]:
    return {
        "seed": told.seed,
        "promise": told.invariant,
        "message": told.message,
        "command": told.command,
        "faults": [fault.line() for fault in told.faults],
    }


def make_blocks(first: int, seeds: int, size: int) -> Iterator[range]:
    for start in range(first, first + seeds, size):
        yield range(start, min(start + size, first + seeds))


def make_result(blocks: Iterable[dict[str, Any]], commit: str, jobs: int) -> dict[str, Any]:
    done = sorted(blocks, key=lambda block: int(block["first"]))
    return {
        "first": done[0]["first"],
        "seeds": sum(block["seeds"] for block in done),
        "events": sum(block["events"] for block in done),
        "wall_s": round(sum(block["wall_s"] for block in done), 1),
        "violations": [one for block in done for one in block["violations"]],
        "jobs": jobs,
        "commit": commit,
        "versions": {**versions(), "atoll": __version__, "msgspec": version("msgspec")},
        "blocks": done,
    }


def read_blocks(path: Path, commit: str) -> dict[int, dict[str, Any]]:
    """By their first seed, those that an earlier run on this commit left."""
    if not path.exists():
        return {}
    before = json.loads(path.read_text())
    if before["commit"] != commit:
        raise SystemExit(f"{path} is of commit {before['commit']}, this is {commit}: leave --add out to begin anew")
    return {block["first"]: block for block in before["blocks"]}


def find_commit() -> str:
    """Of the tree beside this file; with a mark where src is not what was committed."""
    try:
        head, changed = ask_git("rev-parse", "HEAD"), ask_git("status", "--porcelain", "--", "src")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def ask_git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def print_line(text: str) -> None:
    print(text, flush=True)


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first world")
    parser.add_argument("--seeds", type=int, default=2000, help="so many worlds from there on")
    parser.add_argument("--jobs", type=int, default=count_cores(), help="processes; as many as there are cores")
    parser.add_argument("--block", type=int, default=2000, help="seeds after which the result is written")
    parser.add_argument("--commit", default="", help="where there is no git to ask")
    parser.add_argument("--add", action="store_true", help="keep the blocks that the result holds already")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "seeds.json")
    options = parser.parse_args()
    if min(options.seeds, options.jobs, options.block) < 1 or options.first < 0:
        parser.error("--seeds, --jobs and --block are at least 1, --first at least 0")
    return options


def main() -> int:
    options = read_options()
    commit = options.commit or find_commit()
    blocks = read_blocks(options.out, commit) if options.add else {}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {}
    for seeds in make_blocks(options.first, options.seeds, options.block):
        blocks[seeds.start] = block = run_block(options.jobs, seeds)
        result = make_result(blocks.values(), commit, options.jobs)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print_line(
            f"seeds {seeds.start:,} to {seeds.stop - 1:,}: {block['events']:,} events in {block['wall_s']} s, "
            f"{len(block['violations'])} broken promises ({len(result['violations'])} in all)"
        )
    print_line(
        f"{result['seeds']:,} worlds, {result['events']:,} events, {len(result['violations'])} of them break a promise"
    )
    return 1 if result["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
