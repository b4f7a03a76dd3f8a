"""Four learners behind links of 100 Mbit/s and 50 ms: ours against data-parallel, each beside itself without limits.

    python benchmarks/links.py [--parameters 12e6] [--step 0.4] [--steps 168] [--mbit 100] [--delay 0.05]

Links are relays in user space (atoll/chaos/tcp_relay.py): each learner has one of its own to the syncer, so wide in
each direction and with so much delay one way. Steps are pretended (flights.py: a sleep, one row of every tensor
changed), everything else is real, with the default settings: H = P = 24, contributions in bf16, versions in fp32.

Data-parallel is a ring all-reduce of fp32 gradients (peer_learners/ring.py), each rank with such a link to the next; it
runs beside the whole backward pass, the best case. Its sum is held against gloo's. Without limits there is no relay.
Speeds of ours are counted without the first three cycles of H steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from peer_learners.ring import write_whole
from seeds import count_cores, find_commit

from atoll.chaos.performance import read_events
from atoll.chaos.tcp_relay import TcpRelay
from atoll.config import convert
from atoll.fabric.local_secrets import publish_secrets, published_secrets, withdraw_secrets
from atoll.launch.local import LocalRun
from atoll.observe.summary import summarise
from atoll.store.rundir import RunDir
from atoll.telemetry.status import RunStatus

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "links.json"
LEARNERS, H = 4, 24
WARM_UP = 3 * H
PACKET = 16 * 1024
WAIT_S = 600.0


class Links:
    """A relay for each learner, all with the same rate and delay."""

    def __init__(self, options: argparse.Namespace, learners: int = LEARNERS) -> None:
        self.rate, self.delay_s, self.learners = options.mbit * 1e6 / 8, options.delay, learners
        self.lines: list[TcpRelay] = []
        self.counted: list[tuple[int, float, float]] = []
        """The run's round, and the bytes that a line had carried by then on average: up, and down."""

    async def open(self, host: str, port: int) -> TcpRelay:
        held = int(2 * self.rate * self.delay_s) + PACKET  # as TCP's window would: never what limits the rate
        line = TcpRelay(host, port, buffer=held, packet=PACKET)
        line.limit(self.rate)
        line.delay_s = self.delay_s
        await line.start()
        self.lines.append(line)
        return line

    async def open_to_syncer(self, url: str) -> dict[str, str]:
        address = urlsplit(url)
        assert address.hostname is not None and address.port is not None
        secrets = published_secrets(address.hostname, address.port)
        for _ in range(self.learners):
            line = await self.open(address.hostname, address.port)
            publish_secrets(line.host, line.port, secrets)
        return {f"learner-{number}": line.url for number, line in enumerate(self.lines)}

    def count(self, status: RunStatus | None) -> None:
        if status is not None and self.lines:
            up, down = (mean(getattr(line, way) for line in self.lines) for way in ("bytes_up", "bytes_down"))
            self.counted.append((status.round, up, down))

    def bytes_per_round(self) -> tuple[float, float]:
        """On a learner's line, up and down, once everybody has joined."""
        settled = [one for one in self.counted if one[0] >= WARM_UP]
        (first, *before), (last, *after) = settled[0], settled[-1]
        up, down = ((a - b) / (last - first) for a, b in zip(after, before, strict=True))
        return up, down

    async def close(self) -> None:
        for line in self.lines:
            await line.stop()
            withdraw_secrets(line.host, line.port)


# ---- ours -----------------------------------------------------------------------------------------------------------


async def run_ours(options: argparse.Namespace, links: Links | None, scratch: Path) -> dict[str, Any]:
    os.environ |= {"PARAMETERS": str(options.parameters), "STEP_S": str(options.step), "HELD": str(scratch)}
    document = {
        "protocol": {"learners": LEARNERS, "steps": options.steps, "cut_every": 0, "wait_for_learners_s": 60.0},
        "service": {"evaluate_every": 0},
    }
    folder = RunDir.create(scratch / "run")
    route = links.open_to_syncer if links is not None else None
    script = [str(HERE / "flights.py")]
    watch = links.count if links is not None else (lambda status: None)
    config = convert(document, "the benchmark")
    run = LocalRun(config, folder, script=script, evaluator=False, route=route, watch=watch)
    try:
        await run.run()
    finally:
        if links is not None:
            await links.close()
    return describe_ours(folder, [json.loads(path.read_text()) for path in scratch.glob("held-*.json")], links)


def describe_ours(folder: RunDir, learners: list[dict[str, list[float]]], links: Links | None) -> dict[str, Any]:
    events = read_events(folder)
    rounds = [event for event in events if event["kind"] == "round"]
    kept = rounds[WARM_UP:-H]
    since = [member["since"] for event in kept for member in event["members"] if member["since"] is not None]
    ends = [one["ends"][WARM_UP:] for one in learners]
    rates = [(len(one) - 1) / (one[-1] - one[0]) for one in ends]
    held = sorted(spent for one in learners for spent in one["held"][WARM_UP:])
    summary = summarise(events)
    told = {
        "steps_per_s": round(sum(rates), 3),
        "effective_h": {"median": median(since), "mean": round(mean(since), 2)},
        "round_s": round(median(event["sync_s"] for event in kept), 3),
        "held_median_s": round(median(held), 5),
        "held_p99_s": round(held[int(0.99 * len(held))], 5),
        "participation": summary["participation"],
        "merged_share": summary["merged_share"],
        "rounds": len(rounds),
    }
    if links is not None:
        up, down = links.bytes_per_round()
        told["kilobytes_per_round"] = {"up": round(up / 1000, 1), "down": round(down / 1000, 1)}
    return told


# ---- data-parallel --------------------------------------------------------------------------------------------------


def start_ranks(options: argparse.Namespace, scratch: Path, steps: int) -> list[subprocess.Popen[bytes]]:
    ring = [sys.executable, str(HERE / "peer_learners" / "ring.py")]
    words = [str(LEARNERS), str(int(options.parameters)), str(steps), str(options.step), str(scratch)]
    return [subprocess.Popen([*ring, str(rank), *words]) for rank in range(LEARNERS)]


async def run_ring(options: argparse.Namespace, links: Links | None, scratch: Path, steps: int) -> dict[str, Any]:
    ranks = start_ranks(options, scratch, steps)
    try:
        for rank in range(LEARNERS):
            port = int(await wait_for(scratch / f"port-{(rank + 1) % LEARNERS}", ranks))
            line = await links.open("127.0.0.1", port) if links is not None else None
            write_whole(scratch / f"next-{rank}", str(line.port if line is not None else port))
        found = [json.loads(await wait_for(scratch / f"rank-{rank}.json", ranks)) for rank in range(LEARNERS)]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
        if links is not None:
            for line in links.lines:
                await line.stop()
    step_s = median(spent for one in found for spent in one["times"])
    return {"step_s": round(step_s, 3), "steps_per_s": round(LEARNERS / step_s, 3), "sum": found[0]["sum"]}


async def wait_for(path: Path, ranks: list[subprocess.Popen[bytes]]) -> str:
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > deadline or any(one.poll() for one in ranks):
            raise SystemExit("a rank of the ring failed")
        await asyncio.sleep(0.05)
    return path.read_text()


def sum_by_gloo(elements: int) -> list[float]:
    """The same gradients, summed by gloo without any link."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [str(LEARNERS), str(elements), str(port)]
    script = [sys.executable, str(HERE / "peer_learners" / "gloo_sum.py")]
    ranks = [subprocess.Popen([*script, str(rank), *words], stdout=subprocess.PIPE) for rank in range(LEARNERS)]
    said = [one.communicate(timeout=WAIT_S)[0] for one in ranks]
    values: list[float] = json.loads(said[0])
    return values


# ---- both -----------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    def fresh(limited: bool) -> Links | None:
        return Links(options) if limited else None

    found: dict[str, Any] = {}
    for limited, name in ((False, "unlimited"), (True, "limited")):
        with tempfile.TemporaryDirectory(dir=os.environ.get("ATOLL_SCRATCH")) as scratch:
            ours = asyncio.run(run_ours(options, fresh(limited), Path(scratch)))
        with tempfile.TemporaryDirectory() as scratch:
            steps = 4 if limited else 20
            ring = asyncio.run(run_ring(options, fresh(limited), Path(scratch), steps))
        found[name] = {"ours": ours, "data_parallel": ring, "load": round(os.getloadavg()[0], 1)}
        print(name, {**found[name], "data_parallel": {**ring, "sum": "…"}}, file=sys.stderr, flush=True)
    theirs = np.array(sum_by_gloo(int(options.parameters)))
    sums = [np.array(found[name]["data_parallel"].pop("sum")) for name in ("unlimited", "limited")]
    if not all(np.allclose(one, theirs, rtol=1e-5, atol=1e-5) for one in sums):
        raise SystemExit("the ring's sum is not gloo's")
    found["compared"] = {
        method: round(found["limited"][method]["steps_per_s"] / found["unlimited"][method]["steps_per_s"], 4)
        for method in ("ours", "data_parallel")
    }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=12e6)
    parser.add_argument("--step", type=float, default=0.4)
    parser.add_argument("--steps", type=int, default=7 * H)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--delay", type=float, default=0.05)
    parser.add_argument("--note", default="", help="a word on the machine, for the result")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.steps < WARM_UP + 2 * H:
        parser.error(f"--steps is at least {WARM_UP + 2 * H}")
    asked = {name: getattr(options, name) for name in ("parameters", "step", "steps", "mbit", "delay")}
    result = {
        "machine": {"arch": platform.machine(), "cores": count_cores(), "system": platform.system()},
        "versions": {"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy")},
        "commit": find_commit(),
        "note": options.note,
        "asked": {**asked, "learners": LEARNERS, "sync_every": H, "codec": "bf16", "version_codec": "fp32"},
        **measure(options),
    }
    print(json.dumps(result, indent=1))
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
