"""Bytes over a region's link: four learners through a relay, against the same four directly.

    python benchmarks/relays.py [--learners 4] [--width 1024] [--steps 96] [--codecs fp32 bf16 int4] [--json FILE]

Each case is a run of real processes: a syncer, four learners of a script (tests/system/scripts/line.py, one square
matrix and its bias), and between region and syncer a proxy that counts bytes both ways. Once without a relay and once
with one, with equal codecs for contributions and versions. Counted are the connections of bodies, with their HTTP
headers and what a relay tells of bodies that it holds, from the second cycle on: contributions, sums and versions. What
control channels carry is counted beside it: a relay passes it on as it is.
"""

from __future__ import annotations

import argparse
import asyncio
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
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from seeds import count_cores, find_commit

from atoll.fabric.local_secrets import publish_secrets, published_secrets, withdraw_secrets
from atoll.store.event_parts import read_lines

SCRIPT = Path(__file__).parents[1] / "tests" / "system" / "scripts" / "line.py"
FRAGMENTS = 4
SYNC_EVERY = 12
WAIT_S = 180.0
RESULT = Path(__file__).parent / "results" / "relays.json"


@dataclass
class CountingProxy:
    """A port that passes everything on to another, and counts it by what its connection is for."""

    port: int
    bodies: list[int] = field(default_factory=lambda: [0, 0])
    """Bytes up, bytes down."""
    control: list[int] = field(default_factory=lambda: [0, 0])
    own: int = 0

    def start(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(ready),), daemon=True)
        self._thread.start()
        ready.wait(WAIT_S)

    async def _run(self, ready: threading.Event) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.own = server.sockets[0].getsockname()[1]
        ready.set()
        await self._stopped.wait()
        server.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(WAIT_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError), closing(writer):
            first = await reader.read(65536)
            above_reader, above = await asyncio.open_connection("127.0.0.1", self.port)
            sockets = (b"GET /v1/control", b"GET /v1/relays")
            count = self.control if first.startswith(sockets) else self.bodies
            count[0] += len(first)
            above.write(first)
            await asyncio.gather(self._pass(reader, above, count, 0), self._pass(above_reader, writer, count, 1))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: list[int], at: int
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 18):
                count[at] += len(data)
                writer.write(data)
                await writer.drain()
        with suppress(OSError):
            writer.close()


@dataclass
class Case:
    """One run, and what crossed the link in it."""

    codec: str
    relayed: bool
    learners: int
    width: int
    steps: int
    pace: float

    def settings(self) -> list[str]:
        words = {
            "codec": self.codec,
            "version_codec": self.codec,
            "fragments": FRAGMENTS,
            "sync_every": SYNC_EVERY,
            "quorum": self.learners,
        }
        return [word for name, value in words.items() for word in ("--set", f"{name}={value}")]

    def measure(self, folder: Path) -> dict[str, Any]:
        out = folder / f"{self.codec}-{'relayed' if self.relayed else 'direct'}"
        processes: list[subprocess.Popen[bytes]] = []
        try:
            return self._measure(out, processes)
        finally:
            for process in reversed(processes):
                process.kill()
                process.wait()

    def _measure(self, out: Path, processes: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
        def start(*words: object) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "atoll", *map(str, words)]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            with open(f"{out}-{len(processes)}.log", "wb") as log:
                process = subprocess.Popen(command, cwd=out.parent, stdout=log, stderr=log, env=env)
            processes.append(process)
            return process

        budget = ("--learners", self.learners, "--steps", self.steps)
        syncer = start("syncer", "--out", out, "--port", "0", *budget, *self.settings())
        wait_for(out / "syncer.url", syncer)
        port = urlsplit((out / "syncer.url").read_text()).port or 0
        with counted_link(port) as proxy:
            where = f"http://127.0.0.1:{proxy.own}"
            if self.relayed:
                relay = start("relay", "--join", where, "--out", f"{out}-relay", "--port", "0", "--name", "region")
                wait_for(Path(f"{out}-relay/link"), relay)
                where = (Path(f"{out}-relay/link")).read_text().strip()
            for number in range(self.learners):
                name = f"learner-{number}"
                given = ("--syncer", where, "--name", name, "--folder", f"{out}-{name}")
                start("learn", SCRIPT, *given, "--", "--width", self.width, "--pace", self.pace)
            wait_for_round(out, FRAGMENTS, syncer)
            before = [list(proxy.bodies), list(proxy.control)]
            syncer.wait(WAIT_S)
            bodies = [after - first for after, first in zip(proxy.bodies, before[0], strict=True)]
            control = [after - first for after, first in zip(proxy.control, before[1], strict=True)]
        rounds = [event for event in events_of(out) if event["kind"] == "round" and event["round"] >= FRAGMENTS]
        return {
            "bodies_up": bodies[0],
            "bodies_down": bodies[1],
            "control": sum(control),
            "rounds": len(rounds),
            "members": sum(len(event["members"]) for event in rounds),
        }


@contextmanager
def counted_link(port: int) -> Iterator[CountingProxy]:
    """What shows a secret at the syncer's port shows it at the proxy's too."""
    proxy = CountingProxy(port)
    proxy.start()
    publish_secrets("127.0.0.1", proxy.own, published_secrets("127.0.0.1", port))
    try:
        yield proxy
    finally:
        withdraw_secrets("127.0.0.1", proxy.own)
        proxy.stop()


def events_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read_lines(out / "events.jsonl") if line.endswith(b"\n")]


def wait_for(file: Path, process: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + WAIT_S
    while not (file.is_file() and file.stat().st_size):
        assert process.poll() is None and time.monotonic() < ends, f"{file} did not come: see the logs beside it"
        time.sleep(0.1)


def wait_for_round(out: Path, number: int, process: subprocess.Popen[bytes]) -> None:
    """Until so many rounds are committed."""
    ends = time.monotonic() + WAIT_S
    while not any(event["kind"] == "round" and event["round"] >= number - 1 for event in events_of(out)):
        assert process.poll() is None and time.monotonic() < ends, f"round {number} did not come: {out}"
        time.sleep(0.02)


def compare(codec: str, folder: Path, *, learners: int, width: int, steps: int, pace: float) -> dict[str, Any]:
    """Bytes for each round, so that a round more or less in one of the two does not count."""
    found: dict[str, Any] = {"codec": codec}
    per_round = {}
    for relayed in (False, True):
        seen = Case(codec, relayed, learners, width, steps, pace).measure(folder)
        found["relayed" if relayed else "direct"] = seen
        per_round[relayed] = (seen["bodies_up"] + seen["bodies_down"]) / seen["rounds"]
    found["share"] = round(per_round[True] / per_round[False], 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--pace", type=float, default=0.1)
    parser.add_argument("--codecs", nargs="*", default=["fp32", "bf16", "int4"])
    parser.add_argument("--json", type=Path, default=RESULT)
    said = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for codec in said.codecs:
            how = {"learners": said.learners, "width": said.width, "steps": said.steps, "pace": said.pace}
            case = compare(codec, Path(folder), **how)
            cases.append(case)
            print(f"{codec}: {case['share']:.3f} of the bytes that cross the link directly", flush=True)
    facts = {"commit": find_commit(), "cores": count_cores(), "python": platform.python_version()}
    given = {"learners": said.learners, "width": said.width, "steps": said.steps, "fragments": FRAGMENTS}
    said.json.write_text(json.dumps({**facts, **given, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
