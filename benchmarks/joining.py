"""How long joining takes: the first learner of a run, a later one, and one over a slow link that breaks.

    python benchmarks/joining.py --repeat 3                   # 170M parameters, some 5 GiB of memory
    python benchmarks/joining.py --depth 12 --repeat 1        # a look at it

Syncer and learners are on this machine; a learner is a training process, whose steps are pretended, and its courier.
The first learner sends version 0; the later one fetches all fragments while the first makes a step a second. Told are
medians of the seconds from `with atoll.Learner(...)` to the end of the first step, which hold the courier's start, and
of those from the syncer's hearing of the learner to the same moment. Over the link (a relay in user space, `--mbit`) a
third learner fetches all while nobody trains, and every connection breaks once, half-way: told are the seconds beside
bytes / rate, and the bytes that came down the link more than once.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import torch
from overhead import start_syncer

import atoll
from atoll.chaos.tcp_relay import TcpRelay
from atoll.fabric.local_secrets import publish_secrets, published_secrets, withdraw_secrets
from atoll.store.event_parts import read_lines
from atoll.telemetry.events import parse, versions
from atoll.workloads.gpt import Gpt, GptConfig

DIE_WITH_PARENT = 1
STEP_S = 1.0
PACKET = 16384
"""Bytes that the link carries at once: smaller ones cost the relay more time than they take."""


# ---- a learner, in a process of its own -----------------------------------------------------------------------------


def learn(depth: int, url: str, name: str, steps: bool) -> None:
    """Joins once a line comes; tells how long it took; goes on until it is killed."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = Gpt(GptConfig(depth=depth, block=64))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters())}), flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    with atoll.Learner(model, optimizer, syncer=url, name=name) as learner:
        learner.step(tokens=64, loss=1.0)
        print(json.dumps({"joined_s": time.perf_counter() - began, "at": time.time()}), flush=True)
        while True:
            time.sleep(STEP_S)
            if steps:
                learner.step(tokens=64, loss=1.0)


class LearnerProcess:
    def __init__(self, options: argparse.Namespace, folder: Path, url: str, name: str, *, steps: bool) -> None:
        words = ["--learner", name, "--url", url, "--depth", str(options.depth), *(["--steps"] if steps else [])]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        self._name, self._events = name, folder / "run" / "events.jsonl"
        self.parameters = int(self._hear("parameters")["parameters"])

    def join(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        told = self._hear("joined_s")
        events = parse(read_lines(self._events))
        heard = [one["at"] for one in events if one["kind"] == "joined" and one.get("learner") == self._name]
        return {"from_start_s": told["joined_s"], "from_connecting_s": told["at"] - heard[0]}

    def _hear(self, key: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{") and key in (told := json.loads(line)):
                return dict(told)
        raise SystemExit(f"{self._name} ended before it joined")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


# ---- a slow link ----------------------------------------------------------------------------------------------------


class Link:
    """A relay on an event loop of its own; every connection breaks once, when half of `size` has come down."""

    def __init__(self, url: str, bytes_per_s: float, size: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._host, self._port = urlsplit(url).hostname or "", urlsplit(url).port or 0
        self.relay = TcpRelay(self._host, self._port, packet=PACKET)
        self._rate, self._half = bytes_per_s, size // 2
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        self._breaking = asyncio.run_coroutine_threadsafe(self._break_once(), self._loop)

    async def _start(self) -> None:
        await self.relay.start()
        self.relay.limit(self._rate)
        publish_secrets(self.relay.host, self.relay.port, published_secrets(self._host, self._port))

    async def _break_once(self) -> None:
        while self.relay.bytes_down < self._half:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)
        self.relay.reset()

    def stop(self) -> None:
        self._breaking.cancel()
        withdraw_secrets(self.relay.host, self.relay.port)
        asyncio.run_coroutine_threadsafe(self.relay.stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)


# ---- what is measured -----------------------------------------------------------------------------------------------


@contextmanager
def run_of(options: argparse.Namespace) -> Iterator[tuple[Path, str, list[LearnerProcess]]]:
    """A syncer, and learners to be killed with it."""
    learners: list[LearnerProcess] = []
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        folder = Path(scratch)
        syncer, url = start_syncer(folder / "run")
        try:
            yield folder, url, learners
        finally:
            for learner in learners:
                learner.kill()
            syncer.kill()
            syncer.wait()


def measure_loopback(options: argparse.Namespace) -> dict[str, Any]:
    with run_of(options) as (folder, url, learners):
        found: dict[str, Any] = {}
        for kind in ("first", "later"):
            learners.append(LearnerProcess(options, folder, url, kind, steps=True))
            found[kind] = learners[-1].join()
        return {"parameters": learners[0].parameters, **found}


def measure_link(options: argparse.Namespace) -> dict[str, Any]:
    rate = options.mbit * 1e6 / 8
    with run_of(options) as (folder, url, learners):
        learners.append(LearnerProcess(options, folder, url, "first", steps=False))
        learners[0].join()
        size = 4 * learners[0].parameters
        link = Link(url, rate, size)
        try:
            learners.append(LearnerProcess(options, folder, link.relay.url, "far", steps=False))
            took = learners[1].join()
        finally:
            link.stop()
        down = link.relay.bytes_down
    return {
        "mbit": options.mbit,
        "bytes": size,
        "bytes_over_rate_s": size / rate,
        **took,
        "bytes_down": down,
        "bytes_again_and_control": down - size,
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    keys = ("from_start_s", "from_connecting_s")
    return {kind: {key: median(row[kind][key] for row in rows) for key in keys} for kind in ("first", "later")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=24, help="of the built-in GPT: 12,288 times its cube parameters")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--mbit", type=float, default=200.0, help="of the link; 0: none is measured")
    parser.add_argument("--scratch", type=Path, default=None, help="a folder on the disk for the run")
    parser.add_argument("--note", default="", help="a word on the machine, for the result")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/joining.json"))
    parser.add_argument("--learner", default="", help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    parser.add_argument("--steps", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.learner:
        learn(options.depth, options.url, options.learner, options.steps)
    rows = [measure_loopback(options) for _ in range(options.repeat)]
    result = {
        "commit": options.commit,
        "machine": {"arch": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "note": options.note,
        "versions": versions(),
        "parameters": rows[0]["parameters"],
        **summarize(rows),
        "rows": rows,
        "link": measure_link(options) if options.mbit else None,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
