"""What a round costs one syncer process, from 2 to 512 learners.

    python benchmarks/many_learners.py                     a table, and benchmarks/results/many_learners.json
    python benchmarks/many_learners.py --tls               with TLS and tokens (many_learners-tls.json)
    python benchmarks/many_learners.py --learners 128 --step-s 0.25      one row, printed only
    python benchmarks/many_learners.py --learners 128 --profile /tmp/syncer.prof     where the syncer's time goes

A real syncer process (`python -m atoll.syncer`), pinned to one core, and in this process, on the other cores, learners
of the protocol alone: each has a control channel and a connection for bodies, makes a step every so many seconds and
reports it, answers each pull with a real body of 16 KiB, and fetches every version. H = P = 24, so a round falls due at
each step. The settings are the defaults but for the codec (fp32, so that both ways carry 16 KiB) and the cuts (none).

CPU is process time of the syncer over the measured rounds, divided by rounds and learners. Control bytes are all bytes
of the control channels in both directions, by rounds and learners. `H` is the median of learner steps between two syncs
of a fragment.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import ssl
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
from load import SyncerProcess

from atoll.digests import compute_digest
from atoll.fabric.address import SyncerAddress
from atoll.fabric.transfer import body_headers
from atoll.fabric.wire import decode_from_syncer, encode
from atoll.protocol import messages as msg
from atoll.telemetry.events import parse

RESULT = Path(__file__).parent / "results" / "many_learners.json"
FRAGMENTS, VALUES, TOKENS = 24, 4096, 512
TENSORS = tuple(msg.TensorSpec(f"blocks.{n}.mlp.weight", (64, 64), "float32") for n in range(FRAGMENTS))
ROWS = ((2, 0.1), (8, 0.1), (32, 0.1), (128, 0.25), (512, 1.1), (512, 0.5))
"""Learners, and seconds of a step. In the last row the syncer cannot keep up."""
WARM_UP, LONGEST_S = 2 * FRAGMENTS, 240.0
BODIES = 32
"""Different contributions: of one direction, and each with noise of its own."""


def make_bodies() -> list[tuple[memoryview, str]]:
    dice = np.random.default_rng(0)
    common = dice.standard_normal(VALUES)
    made = [(0.01 * (common + dice.standard_normal(VALUES))).astype(np.float32).view(np.uint8) for _ in range(BODIES)]
    return [(one.data, compute_digest(one.data)) for one in made]


# ---- a learner of the protocol alone ---------------------------------------------------------------------------------


class Stream(asyncio.Protocol):
    """A connection whose bytes are taken apart as they come."""

    def __init__(self, crowd: Crowd) -> None:
        self.transport: asyncio.Transport
        self.crowd, self.received = crowd, 0
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        self._buffer += data
        while (used := self.take(self._buffer)) > 0:
            del self._buffer[:used]

    def connection_lost(self, error: Exception | None) -> None:
        self.crowd.lose(f"a connection is lost: {error}")

    def take(self, buffer: bytearray) -> int:
        """How many bytes were one piece; 0: it has not come whole."""
        raise NotImplementedError


def head_of(buffer: bytearray) -> tuple[int, int, dict[str, str]] | None:
    """Bytes of the head of an answer, its status, and its headers in lower case."""
    if (end := buffer.find(b"\r\n\r\n")) < 0:
        return None
    first, *lines = buffer[:end].decode("latin1").split("\r\n")
    pairs = (line.split(":", 1) for line in lines)
    return end + 4, int(first.split()[1]), {name.lower(): value.strip() for name, value in pairs}


class Bodies(Stream):
    """One request after another."""

    def __init__(self, crowd: Crowd) -> None:
        super().__init__(crowd)
        self._turn = asyncio.Lock()
        self._answer: asyncio.Future[tuple[int, dict[str, str]]]

    async def ask(self, head: str, body: memoryview | bytes = b"") -> tuple[int, dict[str, str]]:
        async with self._turn:
            self._answer = asyncio.get_running_loop().create_future()
            self.transport.write(head.encode())
            if body:
                self.transport.write(body)
            return await self._answer

    def take(self, buffer: bytearray) -> int:
        if (found := head_of(buffer)) is None:
            return 0
        size, status, headers = found
        whole = size + int(headers.get("content-length", 0))
        if len(buffer) < whole:
            return 0
        if not self.crowd.over:  # tasks that are cancelled at the end no longer wait for their answers
            self._answer.set_result((status, headers))
        return whole


class Control(Stream):
    """A WebSocket, by hand: libraries would cost the client more than the syncer."""

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner.crowd)
        self._learner, self.opened = learner, False
        self.sent = 0

    def take(self, buffer: bytearray) -> int:
        if not self.opened:
            if (found := head_of(buffer)) is None:
                return 0
            assert found[1] == 101, bytes(buffer)
            self.opened = True
            self._learner.greet()
            return found[0]
        if len(buffer) < 2:
            return 0
        kind, size, start = buffer[0] & 15, buffer[1] & 127, 2
        if size > 125:
            start = 4 if size == 126 else 10
            if len(buffer) < start:
                return 0
            size = int.from_bytes(buffer[2:start], "big")
        if len(buffer) < start + size:
            return 0
        data = bytes(buffer[start : start + size])
        if kind == 9:
            self.write(10, data)
        elif kind == 2:
            self._learner.hear(decode_from_syncer(data))
        elif kind == 8:
            self._learner.crowd.fail(f"the syncer closed a channel: {data!r}")
        return start + size

    def write(self, kind: int, data: bytes) -> None:
        size = len(data)
        length = bytes([128 | size]) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
        frame = bytes([128 | kind]) + length + bytes(4) + data  # a mask of zeros changes nothing
        self.sent += len(frame)
        self.transport.write(frame)


class Learner:
    def __init__(self, number: int, crowd: Crowd) -> None:
        self.name, self.session = f"learner-{number}", f"session-of-{number}"
        self.number, self.crowd = number, crowd
        self.t = self.seq = 0
        self.steps, self.held = [0] * FRAGMENTS, [-1] * FRAGMENTS
        self.given: dict[tuple[int, int], int] = {}
        """Per round and attempt, the steps that were given."""
        self.welcome: msg.Welcome | None = None
        self.term = self.rounds = 0
        self.ready = asyncio.Event()
        self._awaited, self._reached = 0, asyncio.Event()
        self._fetching: set[int] = set()
        self._newest = [-1] * FRAGMENTS

    async def connect(self) -> None:
        loop, crowd = asyncio.get_running_loop(), self.crowd
        where = {"host": crowd.host, "port": crowd.port, "ssl": crowd.tls}
        _, self.bodies = await loop.create_connection(lambda: Bodies(crowd), **where)
        _, self.control = await loop.create_connection(lambda: Control(self), **where)
        key = base64.b64encode(os.urandom(16)).decode()
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
        head = crowd.head("GET", "/v1/control", {**upgrade, "Sec-WebSocket-Key": key})
        self.control.transport.write(head.encode())
        await self.ready.wait()

    async def hears_of(self, rounds: int) -> None:
        self._awaited, self._reached = rounds, asyncio.Event()
        await self._reached.wait()

    def greet(self) -> None:
        self.say(msg.Hello(protocol=msg.PROTOCOL, learner=self.name, session=self.session, tensors=TENSORS))

    def say(self, message: msg.FromLearner) -> None:
        self.seq += 1
        stamped = msgspec.structs.replace(message, seq=self.seq, term=self.term, clock={"syncer": self.rounds})
        self.control.write(2, encode(stamped))

    def report(self) -> None:
        assert self.welcome is not None
        held, zeros = tuple(self.held), (0,) * FRAGMENTS
        self.say(
            msg.Progress(
                t=self.t,
                steps=tuple(self.steps),
                tokens=tuple(TOKENS * steps for steps in self.steps),
                versions=held,
                counted=held,
                dropped=zeros,
                incarnation=self.welcome.incarnation,
                tokens_total=TOKENS * self.t,
                loss=3.0,
            )
        )

    def step(self) -> None:
        self.t += 1
        self.steps = [steps + 1 for steps in self.steps]
        self.report()

    def hear(self, message: msg.FromSyncer) -> None:
        self.term, self.rounds = message.term, message.clock.get("syncer", 0)
        if self.rounds >= self._awaited:
            self._reached.set()
        match message:
            case msg.Welcome():
                self.welcome = message
                self.crowd.spawn(self.begin(message))
            case msg.Started():
                self.crowd.started.set()
            case msg.Pull():
                self.crowd.spawn(self.give(message))
            case msg.Announce(fragment=fragment, version=version):
                self._newest[fragment] = max(self._newest[fragment], version)
                own = [one for one in message.members if one.learner == self.name]
                if fragment not in self._fetching:
                    self._fetching.add(fragment)
                    self.crowd.spawn(self.fetch(fragment))
                if own:
                    self.given[message.fragment, version] = own[0].tokens // TOKENS
            case msg.Refused():
                self.crowd.fail(f"{self.name} is refused: {message.reason}")
            case _:
                pass

    async def begin(self, welcome: msg.Welcome) -> None:
        if welcome.upload:
            data = np.zeros(VALUES, np.float32).view(np.uint8).data
            for fragment in range(FRAGMENTS):
                await self.put(f"/v1/initial/{self.name}/{fragment}", data, compute_digest(data))
        if min(welcome.versions) < 0:
            await self.crowd.started.wait()
        self._newest = [max(0, version) for version in welcome.versions]
        for fragment in range(FRAGMENTS):
            self._fetching.add(fragment)
            await self.fetch(fragment)
        self.ready.set()

    async def put(self, path: str, data: memoryview, digest: str) -> int:
        headers = {**body_headers(self.session, digest), "Content-Length": str(data.nbytes)}
        status, _ = await self.bodies.ask(self.crowd.head("PUT", path, headers), data)
        return status

    async def give(self, pull: msg.Pull) -> None:
        assert self.welcome is not None
        fragment, steps, t, base = pull.fragment, self.steps[pull.fragment], self.t, self.held[pull.fragment]
        if not steps:
            self.say(msg.Decline(round=pull.round, attempt=pull.attempt, reason="no steps"))
            return
        data, digest = self.crowd.contributions[(self.number + pull.round) % BODIES]
        if await self.put(f"/v1/contributions/{self.name}/{pull.round}/{pull.attempt}", data, digest) >= 300:
            self.crowd.late += 1
            return
        self.say(
            msg.Contribution(
                round=pull.round,
                attempt=pull.attempt,
                fragment=fragment,
                base=base,
                t=t,
                steps=steps,
                tokens=TOKENS * steps,
                total=TOKENS * t,
                digest=digest,
                probe=pull.probe,
                run=self.welcome.run,
                learner=self.name,
                incarnation=self.welcome.incarnation,
            )
        )

    async def fetch(self, fragment: int) -> None:
        """The newest version, and again if another was announced meanwhile: adopted by carry."""
        while self.held[fragment] < self._newest[fragment]:
            status, headers = await self.bodies.ask(self.crowd.head("GET", f"/v1/fragments/{fragment}", {}))
            assert status == 200, status
            self.held[fragment] = version = int(headers["atoll-version"])
            for key in [key for key in self.given if key[0] == fragment and key[1] <= version]:
                self.steps[fragment] -= self.given.pop(key)
        self._fetching.discard(fragment)
        self.report()


class Crowd:
    """What all learners share."""

    def __init__(self, address: SyncerAddress) -> None:
        where = urlsplit(address.urls[0])
        assert where.hostname is not None and where.port is not None
        self.host, self.port, self.tls = where.hostname, where.port, None
        context = address.context()
        self.tls: ssl.SSLContext | None = context if isinstance(context, ssl.SSLContext) else None
        self._shown = "".join(
            f"{name}: {value}\r\n" for name, value in address.headers_for(f"{address.urls[0]}/v1/control").items()
        )
        self.contributions = make_bodies()
        self.started = asyncio.Event()
        self.late = 0
        self.over = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._heads: dict[tuple[str, ...], str] = {}

    def head(self, verb: str, path: str, headers: dict[str, str]) -> str:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"{verb} {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{self._shown}{lines}\r\n"

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def end(self) -> None:
        self.over = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.over:
            self.fail(f"a learner failed: {error!r}")

    def lose(self, why: str) -> None:
        if not self.over:
            self.fail(why)

    def fail(self, why: str) -> None:
        """At once: thousands of tasks would each say so again."""
        print(why, file=sys.stderr, flush=True)
        os._exit(1)


async def beat(learners: list[Learner]) -> None:
    """Learners that wait for the others to join say that they are there."""
    while True:
        await asyncio.sleep(1.0)
        for one in learners:
            if one.welcome is not None:
                one.say(msg.Heartbeat())


async def train(learners: list[Learner], step_s: float, over: asyncio.Event) -> None:
    """Steps of all learners, evenly spread over the time of a step."""
    began, made = time.perf_counter(), 0
    while not over.is_set():
        while began + made * step_s / len(learners) <= time.perf_counter():
            learners[made % len(learners)].step()
            made += 1
            if made % 16 == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(0.002)


# ---- what is measured ------------------------------------------------------------------------------------------------


async def measure(syncer: SyncerProcess, events: Path, count: int, step_s: float, rounds: int) -> dict[str, Any]:
    crowd = Crowd(syncer.address)
    learners = [Learner(number, crowd) for number in range(count)]
    beats = asyncio.get_running_loop().create_task(beat(learners))
    await learners[0].connect()
    alone_kib = syncer.resident_kib
    for one in learners[1:]:
        await one.connect()
    beats.cancel()
    over = asyncio.Event()
    crowd.spawn(train(learners, step_s, over))
    await reach(learners[0], WARM_UP)
    size, control = events.stat().st_size, count_control(learners)
    first, cpu_s, own_s, began = learners[0].rounds, syncer.cpu_s, time.process_time(), time.perf_counter()
    await reach(learners[0], first + rounds)
    wall_s, last = time.perf_counter() - began, learners[0].rounds
    cpu_s, own_s, control = syncer.cpu_s - cpu_s, time.process_time() - own_s, count_control(learners) - control
    grown, peak_kib = events.stat().st_size - size, syncer.resident_kib
    over.set()
    await crowd.end()
    made = last - first
    told = [event for event in parse(events.read_bytes().splitlines(keepends=True)) if event["kind"] == "round"]
    kept = [event for event in told if first <= event["round"] < last]
    return {
        "learners": count,
        "step_s": step_s,
        "rounds": made,
        "cpu_ms": round(1e3 * cpu_s / made / count, 3),
        "cpu_ms_per_round": round(1e3 * cpu_s / made, 1),
        "cores": round(cpu_s / wall_s, 2),
        "client_cores": round(own_s / wall_s, 2),
        "control_bytes": round(control / made / count),
        "event_bytes": round(grown / made),
        "h": median(event["effective_h"] for event in kept),
        "steps_per_round": round(wall_s / step_s / made, 3),
        "members": round(sum(event.get("of") or len(event["members"]) for event in kept) / made / count, 4),
        "freeze_to_commit_ms": round(1e3 * median(event["sync_s"] for event in kept), 1),
        "merge_ms": round(1e3 * median(event["merge_s"] for event in kept), 1),
        "late_bodies": crowd.late,
        "mib_with_one": round(alone_kib / 1024, 1),
        "kib_per_learner": round((peak_kib - alone_kib) / max(1, count - 1), 1),
    }


def count_control(learners: list[Learner]) -> int:
    return sum(one.control.received + one.control.sent for one in learners)


async def reach(learner: Learner, rounds: int) -> None:
    async with asyncio.timeout(LONGEST_S):
        await learner.hears_of(rounds)


def run(count: int, step_s: float, options: argparse.Namespace) -> dict[str, Any]:
    said = {"learners": count, "fragments": FRAGMENTS, "sync_every": FRAGMENTS, "codec": "fp32", "cut_every": 0}
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as scratch:
        keys = Path(scratch) / "keys" if options.tls else None
        with SyncerProcess(Path(scratch) / "run", said, options.profile, keys) as syncer:
            for thread in os.listdir(f"/proc/{syncer.pid}/task"):
                os.sched_setaffinity(int(thread), cores[:1])
            os.sched_setaffinity(0, cores[1:] or cores)
            found = asyncio.run(measure(syncer, Path(scratch) / "run" / "events.jsonl", count, step_s, options.rounds))
    os.sched_setaffinity(0, cores)
    return found


COLUMNS = {
    "learners": "learners",
    "step_s": "step s",
    "cpu_ms": "CPU ms",
    "cores": "cores",
    "client_cores": "client",
    "control_bytes": "control B",
    "event_bytes": "events B",
    "h": "H",
    "members": "members",
    "freeze_to_commit_ms": "commit ms",
    "merge_ms": "merge ms",
    "kib_per_learner": "KiB each",
}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [" ".join(f"{name:>10}" for name in COLUMNS.values())]
    return "\n".join([*lines, *(" ".join(f"{row[key]:>10}" for key in COLUMNS) for row in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, help="one row: so many")
    parser.add_argument("--step-s", type=float, default=0.25)
    parser.add_argument("--rounds", type=int, default=96)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()
    busy, rows = round(os.getloadavg()[0], 2), []
    for count, step_s in ((options.learners, options.step_s),) if options.learners else ROWS:
        rows.append(run(count, step_s, options))
        print(table(rows[-1:]) if len(rows) == 1 else table(rows[-1:]).splitlines()[1], flush=True)
    if not options.learners:
        out = RESULT.with_name("many_learners-tls.json") if options.tls else RESULT
        out.write_text(json.dumps({"cores": len(os.sched_getaffinity(0)), "load_before": busy, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
