"""Bodies of 64 MiB: how fast they are hashed, encoded and copied, and where the time of one round goes.

    python benchmarks/bodies.py
    python benchmarks/bodies.py --compare    # exit code 1: a peak of memory is over 3 % above the committed one

(a) GB/s of one core, of 4 bytes per parameter: both hashes, encode, decode, copy.
(b) One round of one fragment between two learners over loopback: a syncer and two couriers in processes of their own,
    and this process, which plays both training processes. Rounds follow each other, each from the step of both learners
    to the commit and to the new version in both bases. Of every stage the median; stages of several processes overlap.
    Beside it, of each event loop, the latest turn, which on a busy machine is the scheduler's, and the longest work of
    its thread within one turn (CPU time), which is ours.

    The peak memory of the syncer and of the larger courier is that of resident pages, as the kernel counts them: pages
    of libraries and of a mailbox's shared memory are among them.

The couriers and the syncer are this file too, with clocks around the stages.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from gates import judge
from seeds import count_cores, find_commit

from atoll.config import convert
from atoll.courier import service as courier_service
from atoll.courier.body import FragmentTransfers
from atoll.digests import compute_digest
from atoll.fabric.client import SyncerConnection
from atoll.fabric.intake import Intake
from atoll.learner.boundary import Boundary
from atoll.mailbox.box import Mailbox
from atoll.mailbox.channel import (
    CourierChannel,
    MailboxReady,
    RunProgress,
    Start,
    StepReport,
    StopOrder,
    Welcomed,
    decode_to_training,
)
from atoll.numerics.codec import (
    Delta,
    body_nbytes,
    decode_contribution,
    encode_contribution,
    make_codec,
    round_to_dtype,
)
from atoll.numerics.fragments import make_plan
from atoll.protocol.learner.effects import Stepped
from atoll.protocol.messages import TensorSpec
from atoll.store.rundir import RunDir
from atoll.syncer.contributions import Merging
from atoll.syncer.parameters import Parameters
from atoll.syncer.process import serve
from atoll.syncer.run_store import RunStore
from atoll.syncer.service import SyncerService

MIB = 2**20
ROWS = WIDTH = 4096
ELEMENTS = ROWS * WIDTH
WAIT_S = 120.0
TICK_S = 0.002
PACKAGES = ("numpy", "numba", "aiohttp", "xxhash")
RESULT = Path(__file__).parent / "results" / "bodies.json"

STAGES: dict[str, list[tuple[type, str]]] = {
    "courier": [
        (FragmentTransfers, "_encode"),
        (SyncerConnection, "put_contribution"),
        (SyncerConnection, "get_fragment"),
        (FragmentTransfers, "_copy_into_base"),
    ],
    "syncer": [
        (Intake, "_fill"),
        (Intake, "receive"),
        (Merging, "_open_and_screen"),
        (Merging, "merge_and_step"),
        (RunStore, "append"),
        (Parameters, "commit_version"),
    ],
}
NAMES = {
    "_encode": "encode and digest",
    "put_contribution": "send contribution, until it is acknowledged",
    "get_fragment": "fetch version, with digest",
    "_copy_into_base": "version into base",
    "_fill": "receive contribution",
    "receive": "receive contribution, with digest",
    "_open_and_screen": "check and screen",
    "merge_and_step": "merge, outer step, digest",
    "append": "journal, durable",
    "commit_version": "commit",
}


def describe_tensors(rows: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec("w", (rows, WIDTH), "float32"),)


# ---- (a) alone ------------------------------------------------------------------------------------------------------


def measure_speeds(codec: str, times: int) -> dict[str, float]:
    dice = np.random.default_rng(0)
    base, theta = (dice.standard_normal(ELEMENTS, dtype=np.float32) for _ in range(2))
    out, made, part = np.empty_like(base), make_codec(codec), make_plan(describe_tensors(ROWS), 1).fragments[0]
    body = np.empty(body_nbytes(made, part), dtype=np.uint8)
    data = base.view(np.uint8).data
    return {
        "xxh3_128": _speed(lambda: compute_digest(data), times),
        "blake2b": _speed(lambda: hashlib.blake2b(data, digest_size=16).hexdigest(), times),
        f"encode_{codec}": _speed(lambda: encode_contribution(made, part, Delta(base, theta), body), times),
        f"decode_{codec}": _speed(lambda: decode_contribution(made, part, body, out), times),
        "round_to_bf16": _speed(lambda: round_to_dtype(out, "bfloat16"), times),
        "copy": _speed(lambda: np.copyto(out, base), times),
    }


def _speed(work: Callable[[], object], times: int) -> float:
    work()
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return round(4 * ELEMENTS / 1e9 / median(spent), 2)


# ---- (b) a process with clocks --------------------------------------------------------------------------------------


class Clocks:
    """Of one process: spans of its stages, and for how long its event loop stood still."""

    def __init__(self, role: str) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self.stalls: list[tuple[float, float, float]] = []
        """When a turn of the event loop began, how late it ended, and how long its thread worked."""
        for owner, name in STAGES[role]:
            setattr(owner, name, self._clocked(name, getattr(owner, name)))

    def _clocked(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*given: Any, **more: Any) -> Any:
            began = time.monotonic()
            try:
                return work(*given, **more)
            finally:
                self.spans.append((name, began, time.monotonic()))

        async def clocked_wait(*given: Any, **more: Any) -> Any:
            began = time.monotonic()
            try:
                return await work(*given, **more)
            finally:
                self.spans.append((name, began, time.monotonic()))

        return clocked_wait if asyncio.iscoroutinefunction(work) else clocked

    def watch(self, run: Callable[..., Any]) -> Callable[..., Any]:
        async def watched(*given: Any) -> Any:
            ticking = asyncio.create_task(self._tick())
            try:
                return await run(*given)
            finally:
                ticking.cancel()

        return watched

    async def _tick(self) -> None:
        while True:
            began, worked = time.monotonic(), time.thread_time()
            await asyncio.sleep(TICK_S)
            self.stalls.append((began, time.monotonic() - began - TICK_S, time.thread_time() - worked))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"spans": self.spans, "stalls": self.stalls}))


def run_courier(descriptor: int, out: Path, ticks: bool) -> int:
    clocks = Clocks("courier")
    if ticks:
        courier_service.Courier.run = clocks.watch(courier_service.Courier.run)  # type: ignore[method-assign]
    try:
        return courier_service.main(descriptor)
    finally:
        clocks.write(out)


def run_syncer(folder: Path, learners: int, codec: str, durability: str, out: Path, ticks: bool) -> int:
    clocks = Clocks("syncer")
    if ticks:
        SyncerService.run = clocks.watch(SyncerService.run)  # type: ignore[method-assign]
    rules = {
        "learners": learners,
        "quorum": learners,
        "fragments": 1,
        "sync_every": 1,
        "overlap": 0,
        "quorum_policy": "minimum",
        "codec": codec,
    }
    document = {"protocol": {**rules, "cut_every": 1_000_000}, "service": {"durability": durability}}
    config = convert(document, "the benchmark")
    try:
        return serve(config, RunDir.create(folder), evaluated=False)
    finally:
        clocks.write(out)


# ---- (b) a training process -----------------------------------------------------------------------------------------


class PlayedTraining:
    """What a training process does at a step boundary."""

    def __init__(self, number: int, url: str, clocks: Path, rows: int = ROWS, *, ticks: bool = False) -> None:
        self.parameters = {"w": torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))}
        self.tensors = describe_tensors(rows)
        self.clocks, self.t, self.stopped = clocks, 0, False
        self.box: Mailbox | None = None
        self.boundary: Boundary | None = None
        self.channel, theirs = CourierChannel.pair()
        descriptor = theirs.fileno()
        command = [sys.executable, __file__, "--courier", str(descriptor), "--clocks", str(clocks)]
        command += ["--ticks"] if ticks else []
        self.process = subprocess.Popen(command, pass_fds=[descriptor])
        theirs.close()
        self.send(Start(f"learner-{number}", f"session-{number}", url, self.tensors))

    def send(self, frame: Any, descriptor: int | None = None) -> None:
        self.channel.send(frame, descriptor)

    def listen(self) -> None:
        self.channel.flush()
        for data in self.channel.receive():
            match frame := decode_to_training(data):
                case Welcomed():
                    self._make_box(frame)
                case RunProgress():
                    pass
                case StopOrder():
                    self.stopped = True
                case _:
                    assert self.boundary is not None
                    self.boundary.carry_out(frame)
        if self.boundary is not None:
            self.boundary.serve_orders()

    def _make_box(self, frame: Welcomed) -> None:
        if self.box is None:
            self.box = Mailbox.create(make_plan(self.tensors, frame.settings.fragments), frame.settings)
            self.boundary = Boundary(self.box, frame.settings, self.parameters, self)  # type: ignore[arg-type]
            self.send(MailboxReady(frame.settings, self._stepped()), self.box.fd)

    @property
    def ready(self) -> bool:
        return self.boundary is not None and self.boundary.recovered

    def step(self) -> None:
        assert self.boundary is not None
        self.t += 1
        self.parameters["w"] += 0.001
        self.boundary.count_step(self.t, 10, 10 * self.t)
        self.listen()
        self.boundary.adopt_ready(self.t)
        self.boundary.make_copies(self.t)
        self.send(StepReport(self._stepped(), self.boundary.epoch))

    def _stepped(self) -> Stepped:
        rows = () if self.box is None else (self.box.steps, self.box.tokens, self.box.dropped)
        steps, tokens, dropped = (tuple(row.tolist()) for row in rows) if rows else ((), (), ())
        return Stepped(self.t, steps, tokens, tokens_total=10 * self.t, dropped=dropped)

    def has_base(self, version: int) -> bool:
        return self.box is not None and int(self.box.base_version[0]) >= version


def serve_until(crowd: list[PlayedTraining], true: Callable[[], bool]) -> None:
    poll, deadline = select.poll(), time.monotonic() + WAIT_S
    for one in crowd:
        poll.register(one.channel.sock, select.POLLIN)
    while not true():
        poll.poll(5)
        for one in crowd:
            one.listen()
        if time.monotonic() > deadline or any(one.process.poll() is not None for one in crowd):
            raise SystemExit("a courier ended, or nothing happens any more")


@contextmanager
def open_run(
    scratch: Path,
    learners: int = 2,
    rows: int = ROWS,
    codec: str = "bf16",
    durability: str = "round",
    *,
    ticks: bool = False,
) -> Iterator[list[PlayedTraining]]:
    """A syncer and its learners, all with the first version. Their clocks lie in `scratch` after it, and the syncer's
    peak memory. `ticks`: watch their event loops, which takes some 20 ms of each process in a round."""
    folder, clocks = scratch / "run", scratch / "syncer.json"
    command = [sys.executable, __file__, "--syncer", str(folder), "--clocks", str(clocks), "--codec", codec]
    command += ["--learners", str(learners), "--durability", durability, *(["--ticks"] if ticks else [])]
    syncer = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    address, deadline = folder / "syncer.url", time.monotonic() + WAIT_S
    while not address.exists():
        if syncer.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the syncer did not start")
        time.sleep(0.05)
    url = address.read_text()
    clocks_of = [scratch / f"courier-{number}.json" for number in range(learners)]
    crowd = [PlayedTraining(number, url, path, rows, ticks=ticks) for number, path in enumerate(clocks_of)]
    try:
        serve_until(crowd, lambda: all(one.ready and one.has_base(0) for one in crowd))
        yield crowd
    finally:
        for one in crowd:
            one.channel.close()
            one.process.wait(WAIT_S)
        (scratch / "syncer.memory").write_text(str(read_memory(syncer.pid, "VmHWM")))
        syncer.send_signal(signal.SIGINT)
        try:
            syncer.wait(20)
        except subprocess.TimeoutExpired:
            syncer.kill()


def read_memory(pid: int, field: str) -> int:
    """Bytes, as the kernel counts them for a process; 0 where it is gone or the system does not say."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


def measure_rounds(scratch: Path, rounds: int, codec: str) -> dict[str, Any]:
    steps: list[tuple[float, float]] = []
    with open_run(scratch, codec=codec, ticks=True) as crowd:
        for number in range(1, rounds + 1):
            began = time.monotonic()
            for one in crowd:
                one.step()
            serve_until(crowd, lambda number=number: all(one.has_base(number) for one in crowd))  # type: ignore[misc]
            steps.append((began, time.monotonic()))
        courier_bytes = max(read_memory(one.process.pid, "VmHWM") for one in crowd)
    couriers = [json.loads(one.clocks.read_text()) for one in crowd]
    peaks = {"syncer": int((scratch / "syncer.memory").read_text()), "courier": courier_bytes}
    described = describe(steps, json.loads((scratch / "syncer.json").read_text()), couriers)
    return {"round": described, "peak_mib": {role: round(peak / MIB, 1) for role, peak in peaks.items()}}


def describe(
    steps: list[tuple[float, float]], syncer: dict[str, Any], couriers: list[dict[str, Any]]
) -> dict[str, Any]:
    steps = steps[1:]  # the first round touches every page for the first time
    first, last = steps[0][0], steps[-1][1]
    commits = [end for name, _, end in syncer["spans"] if name == "commit_version"]
    to_commit = [min(end for end in commits if end > began) - began for began, _ in steps]
    stages = {}
    for one in (syncer, *couriers):
        for name, began, end in one["spans"]:
            if first <= began and end <= last and name != "commit_version":
                stages.setdefault(NAMES[name], []).append(1000 * (end - began))
    turns = [[turn for turn in one["stalls"] if first <= turn[0] <= last] for one in (syncer, *couriers)]
    late, worked = ([round(1000 * max(turn[of] for turn in one), 1) for one in turns] for of in (1, 2))
    return {
        "rounds": len(steps),
        "step_to_commit_ms": round(1000 * median(to_commit), 1),
        "step_to_base_ms": round(1000 * median(end - began for began, end in steps), 1),
        "stages_ms": {name: round(median(spent), 1) for name, spent in stages.items()},
        "event_loop_longest_late_ms": {"syncer": late[0], "couriers": late[1:]},
        "event_loop_longest_work_ms": {"syncer": worked[0], "couriers": worked[1:]},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--codec", default="bf16")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--compare", action="store_true", help="compare the peak memory with the committed result")
    parser.add_argument("--learners", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--durability", default="round", help=argparse.SUPPRESS)
    parser.add_argument("--courier", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--syncer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--clocks", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ticks", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.courier is not None:
        return run_courier(options.courier, options.clocks, options.ticks)
    if options.syncer is not None:
        given = (options.learners, options.codec, options.durability, options.clocks, options.ticks)
        return run_syncer(options.syncer, *given)
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "machine": {"cores": count_cores(), "system": platform.system()},
        "arch": platform.machine(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "commit": find_commit(),
        "fragment_mib": 4 * ELEMENTS // MIB,
        "codec": options.codec,
    }
    if not options.compare:
        result["gb_per_s"] = measure_speeds(options.codec, times=9)
    with tempfile.TemporaryDirectory(dir=os.environ.get("ATOLL_SCRATCH")) as scratch:
        result |= measure_rounds(Path(scratch), options.rounds, options.codec)
    if options.compare:
        same = ("arch", "versions", "codec", "fragment_mib")
        return judge(result, RESULT, {"peak_mib": result["peak_mib"]}, *same)
    print(json.dumps(result, indent=1))
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
