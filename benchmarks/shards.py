"""How much a syncer of several shards merges against one of one: real couriers, pretended steps, cores apart.

    python benchmarks/shards.py [--shards 1 2] [--learners 4] [--parameters 160e6] [--step 0.01] [--steps 4000]

Each shard has two cores of its own (--cores), the learners have the rest; with fewer cores than that nothing is pinned,
and the ratio says little. Steps are those of flights.py: a short sleep, one row of every tensor changed, so the syncer
is what rounds wait for. The run's folders are in --scratch: in memory, where it is not the disk that is to be measured.
Told are bytes merged per second (4 bytes x parameters of contributions, summed over learners, per second of wall time)
over the rounds after the first two cycles, the cores that the lead kept busy, the median time of a merge and of a
round, and for several shards the ratio to the first row.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from atoll.store.event_parts import read_lines
from atoll.telemetry.events import versions
from atoll.telemetry.round_members import count_members

HERE = Path(__file__).resolve()
ATOLL = [sys.executable, "-m", "atoll.cli"]
FRAGMENTS = 24
WARM_UP = 2
"""Cycles."""
START_S = 120.0


def on_cores(cores: list[int]) -> list[str]:
    return ["taskset", "-c", ",".join(map(str, cores))] if cores else []


def deal_cores(shards: int, each: int) -> tuple[list[list[int]], list[int]]:
    """Of each shard, and of the learners; none where there are too few to go round."""
    have = sorted(os.sched_getaffinity(0))
    if len(have) < 3 * shards * each:
        return [[] for _ in range(shards)], []
    return [have[n * each : (n + 1) * each] for n in range(shards)], have[shards * each :]


def start(words: list[str], log: Path, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(words, stdout=out, stderr=out, env={**os.environ, **(env or {})}, cwd=log.parent)


def wait_for(path: Path, process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while not path.exists() or not path.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the syncer did not start: {log.read_text()[-1000:]}")
        time.sleep(0.05)
    return path.read_text()


def measure(folder: Path, shards: int, options: argparse.Namespace) -> dict[str, Any]:
    own, rest = deal_cores(shards, options.cores)
    out, log = folder / "run", folder / "syncer.log"
    asked = ["--learners", str(options.learners), "--steps", str(options.steps), "--port", "0", "--out", str(out)]
    for word in ("cut_every=0", f"fragments={FRAGMENTS}", f"sync_every={FRAGMENTS}", *options.set):
        asked += ["--set", word]
    lead = [*on_cores(own[0]), *ATOLL, "syncer", *(["--shard", f"1/{shards}"] if shards > 1 else []), *asked]
    busy = resource.getrusage(resource.RUSAGE_CHILDREN)
    before_s = busy.ru_utime + busy.ru_stime
    processes = [start(lead, log)]
    try:
        url = wait_for(out / "syncer.url", processes[0], log)
        for n in range(2, shards + 1):
            words = ["--shard", f"{n}/{shards}", "--join", url, "--out", str(folder / f"shard-{n}"), "--port", "0"]
            processes.append(start([*on_cores(own[n - 1]), *ATOLL, "syncer", *words], folder / f"shard-{n}.log"))
        env = {"STEP_S": str(options.step), "PARAMETERS": str(options.parameters), "ATOLL_JOIN": url}
        for n in range(options.learners):
            words = ["learn", str(HERE.with_name("flights.py")), "--name", f"learner-{n}"]
            processes.append(start([*on_cores(rest), *ATOLL, *words], folder / f"learner-{n}.log", env))
        began = time.monotonic()
        if processes[0].wait():
            raise SystemExit(log.read_text()[-2000:])
        busy = resource.getrusage(resource.RUSAGE_CHILDREN)
        lead_cores = (busy.ru_utime + busy.ru_stime - before_s) / (time.monotonic() - began)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    lines = [json.loads(line) for line in read_lines(out / "events.jsonl")]
    rounds = [one for one in lines if one["kind"] == "round"][WARM_UP * FRAGMENTS :]
    if len(rounds) < FRAGMENTS:
        raise SystemExit(f"only {len(rounds)} rounds are left to measure: ask for more --steps")
    took = rounds[-1]["at"] - rounds[0]["at"]
    merged = sum(map(count_members, rounds[1:])) * 4 * options.parameters / FRAGMENTS
    return {
        "shards": shards,
        "cores": own,
        "rounds": len(rounds),
        "members": round(sum(len(one["members"]) for one in rounds) / len(rounds), 2),
        "lead_cores": round(lead_cores, 2),
        "gb_per_s": round(merged / took / 1e9, 3),
        "merge_s": round(median(one["merge_s"] for one in rounds), 4),
        "round_s": round(median(one["sync_s"] for one in rounds), 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--parameters", type=float, default=160e6)
    parser.add_argument("--step", type=float, default=0.01, help="seconds that a pretended step takes at least")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--cores", type=int, default=2, help="of each shard")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the runs")
    parser.add_argument("--scratch", type=Path, help="where the runs' folders go; they are deleted")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "shards.json")
    options = parser.parse_args()
    rows = []
    for shards in options.shards:
        folder = Path(tempfile.mkdtemp(dir=options.scratch))
        try:
            rows.append(measure(folder, shards, options))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        rows[-1]["ratio"] = round(rows[-1]["gb_per_s"] / rows[0]["gb_per_s"], 3)
        print(json.dumps(rows[-1]), flush=True)
    asked = {key: value for key, value in vars(options).items() if key not in ("out", "scratch", "commit")}
    machine = {"cores": os.cpu_count(), "machine": platform.machine()}
    result = {"rows": rows, "asked": asked, "on": machine, "commit": options.commit, "versions": versions()}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
