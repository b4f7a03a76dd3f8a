"""How much talk one syncer takes: 64 learners' control channels at full tilt, and a thousand idle connections beside.

    python benchmarks/load.py            a table, and benchmarks/results/load.json
    python benchmarks/load.py --json     the same as JSON
    python benchmarks/load.py --tls      with TLS and tokens, as a run that has left its machine (load-tls.json)
    python benchmarks/load.py --profile /tmp/syncer.prof     where the syncer's time goes (cProfile; slower by half)

A real syncer process (`python -m atoll.syncer`) and, in this process, one real WebSocket for each learner. They say
what couriers say: a hello with the model's tensors, the first parameters, then a report after every step with the clock
of everybody in it, and a heartbeat now and then. No round falls due, so that what is measured is talk alone.

An acknowledgement here is the pong to a ping that was sent right behind a message. The syncer reads a channel in order
and hands each message to the rules before it reads the next frame, so the pong says: all that came before is done.
It is timed from the moment the message was due, so a late client counts against the figure, never for it.
`asked`: that many messages a second, evenly over learners. `flat out`: each learner says eight, waits for its pong, and
again. The last rows are the same with the idle connections held open (HTTP keep-alive, one request behind them).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np

from atoll.config import convert
from atoll.digests import compute_digest
from atoll.fabric.address import SyncerAddress, parse_address
from atoll.fabric.certificates import fingerprint
from atoll.fabric.transfer import body_headers, body_session, put_body
from atoll.fabric.wire import FabricLimits, decode_from_syncer, encode
from atoll.numerics.fragments import make_plan
from atoll.protocol.messages import PROTOCOL, FromLearner, Heartbeat, Hello, Progress, Started, TensorSpec, Welcome
from atoll.store.keys import KeyDir
from atoll.store.rundir import RunDir
from atoll.syncer.credentials import read_tokens

RESULT = Path(__file__).parent / "results" / "load.json"
FRAGMENTS = 24
TENSORS = tuple(TensorSpec(f"blocks.{n}.mlp.weight", (8, 8), "float32") for n in range(FRAGMENTS))
PACE = 10_000_000
"""H: no round falls due."""
PING_EVERY = 8
BEAT_EVERY = 50
TARGET_PER_S, TARGET_MS = 5000, 50.0
WAIT_S = 60.0
TICK_S = 0.002
PAGE, TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


def dialled(address: SyncerAddress) -> dict[str, Any]:
    """How a syncer is dialled."""
    settings = {"autoping": False, "max_msg_size": FabricLimits().control_bytes, "compress": 0}
    url = f"{address.urls[0]}/v1/control"
    return {"url": url, "headers": address.headers_for(url), "ssl": address.context() or True, **settings}


# ---- the syncer -----------------------------------------------------------------------------------------------------


class SyncerProcess:
    def __init__(self, folder: Path, protocol: dict[str, Any], profile: Path | None, keys: Path | None) -> None:
        out = RunDir.create(folder)
        self._keys = _made(keys) if keys is not None else None
        document = {"protocol": protocol, "service": {"keys": str(keys or "")}}
        out.settings.write_bytes(convert(document, "the benchmark").toml())
        profiled = ["-m", "cProfile", "-o", str(profile)] if profile is not None else []
        command = [sys.executable, *profiled, "-m", "atoll.syncer", str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self._address = out.address

    def __enter__(self) -> SyncerProcess:
        deadline = time.monotonic() + WAIT_S
        while not self._address.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the syncer did not start")
            time.sleep(0.02)
        return self

    def __exit__(self, *why: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # its supervisor is gone: the run ends
        self._process.wait(WAIT_S)

    @property
    def address(self) -> SyncerAddress:
        url = self._address.read_text()
        if self._keys is None:
            return parse_address(url)
        token = read_tokens(self._keys).named("join").secret
        return SyncerAddress(urls=(url,), token=token, pin=fingerprint(self._keys.certificate.read_bytes()))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def resident_kib(self) -> float:
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * PAGE / 1024

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


def _made(folder: Path) -> KeyDir:
    command = [sys.executable, "-m", "atoll.cli", "cert", "--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return KeyDir.open(folder)


# ---- learners that only talk -----------------------------------------------------------------------------------------


class Talker:
    """One learner's control channel."""

    def __init__(self, number: int, learners: int) -> None:
        self.name, self.session = f"learner-{number}", f"session-of-{number}"
        self.latencies: list[float] = []
        self.said = 0
        self.over = False
        self._pings: dict[bytes, tuple[float, asyncio.Future[None]]] = {}
        self._heard: dict[type, asyncio.Event] = {kind: asyncio.Event() for kind in (Welcome, Started)}
        self.welcome: Welcome | None = None
        zeros = (0,) * FRAGMENTS
        clock = {f"learner-{one}": 1 for one in range(learners)}
        self._report = Progress(
            clock=clock, t=0, steps=zeros, tokens=zeros, versions=zeros, incarnation=1, dropped=zeros, counted=zeros
        )
        self._beat = Heartbeat(clock=clock)
        self._seq = itertools.count(1)

    async def join(self, http: aiohttp.ClientSession, address: SyncerAddress, tasks: asyncio.TaskGroup) -> None:
        self._socket = await http.ws_connect(**dialled(address))
        tasks.create_task(self._listen())
        await self._send(Hello(protocol=PROTOCOL, learner=self.name, session=self.session, tensors=TENSORS))
        await self._until(Welcome)

    async def _send(self, message: FromLearner, **told: Any) -> None:
        await self._socket.send_bytes(encode(msgspec.structs.replace(message, seq=next(self._seq), **told)))

    async def begin(self, address: SyncerAddress) -> None:
        """Have the run's first parameters: the first that came gives them."""
        assert self.welcome is not None
        if self.welcome.upload:
            async with body_session(address, FabricLimits()) as bodies:
                for part in make_plan(TENSORS, FRAGMENTS).fragments:
                    data = np.ones(part.size, dtype=np.float32).view(np.uint8).data
                    path, headers = (
                        f"{address.urls[0]}/v1/initial/{self.name}/{part.index}",
                        body_headers(self.session, compute_digest(data)),
                    )
                    await put_body(bodies, path, data, headers, WAIT_S, FabricLimits())
        if min(self.welcome.versions) < 0:
            await self._until(Started)

    async def say(self, due: float, *, ping: bool) -> None:
        """A report of one more step, or a heartbeat; with a ping behind it when asked."""
        self.said += 1
        if self.said % BEAT_EVERY == 0:
            await self._send(self._beat)
        else:
            t = self.said
            told = {"t": t, "steps": (t,) * FRAGMENTS, "tokens": (512 * t,) * FRAGMENTS, "tokens_total": 512 * t}
            await self._send(self._report, **told)
        if ping:
            await self.ping(due)

    async def ping(self, due: float) -> asyncio.Future[None]:
        mark = self.said.to_bytes(8, "big")
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pings[mark] = (due, answered)
        await self._socket.ping(mark)
        return answered

    async def quiet(self) -> None:
        """Until all that was said is dealt with."""
        await self.ping(time.perf_counter())
        await asyncio.gather(*(answered for _, answered in self._pings.values()))

    async def leave(self) -> None:
        self.over = True
        await self._socket.close()

    async def _until(self, kind: type) -> None:
        async with asyncio.timeout(WAIT_S):
            await self._heard[kind].wait()

    async def _listen(self) -> None:
        while True:
            frame = await self._socket.receive()
            now = time.perf_counter()
            if frame.type is aiohttp.WSMsgType.PONG and bytes(frame.data) in self._pings:
                due, answered = self._pings.pop(bytes(frame.data))
                self.latencies.append(now - due)
                answered.set_result(None)
            elif frame.type is aiohttp.WSMsgType.PING:
                await self._socket.pong(frame.data)
            elif frame.type is aiohttp.WSMsgType.BINARY:
                message = decode_from_syncer(frame.data)
                self.welcome = message if isinstance(message, Welcome) else self.welcome
                if type(message) in self._heard:
                    self._heard[type(message)].set()
            elif frame.type is not aiohttp.WSMsgType.PONG:
                assert self.over, f"{self.name} lost its channel: {frame}"
                return


# ---- what is measured ------------------------------------------------------------------------------------------------


async def at_rate(talkers: list[Talker], per_s: float, seconds: float) -> None:
    """So many messages a second, evenly over learners and time."""
    began, sent = time.perf_counter(), 0
    order = itertools.cycle(talkers)
    while (now := time.perf_counter()) < began + seconds:
        while (due := began + sent / per_s) <= now:
            await next(order).say(due, ping=(sent // len(talkers)) % PING_EVERY == 0)
            sent += 1
        await asyncio.sleep(TICK_S)


async def flat_out(talkers: list[Talker], seconds: float) -> None:
    ends = time.perf_counter() + seconds

    async def talk(one: Talker) -> None:
        while time.perf_counter() < ends:
            for _ in range(PING_EVERY):
                await one.say(0.0, ping=False)
            await (await one.ping(time.perf_counter()))

    await asyncio.gather(*map(talk, talkers))


async def measured(name: str, syncer: SyncerProcess, talkers: list[Talker], talk: Awaitable[None]) -> dict[str, Any]:
    for one in talkers:
        one.latencies.clear()
    said, cpu, own, began = sum(one.said for one in talkers), syncer.cpu_s, time.process_time(), time.perf_counter()
    await talk
    await asyncio.gather(*(one.quiet() for one in talkers))
    wall = time.perf_counter() - began
    said, cpu = sum(one.said for one in talkers) - said, syncer.cpu_s - cpu
    cuts = quantiles([latency for one in talkers for latency in one.latencies], n=100)
    return {
        "what": name,
        "messages": said,
        "seconds": round(wall, 2),
        "messages_per_s": round(said / wall),
        "ack_p50_ms": round(1e3 * cuts[49], 2),
        "ack_p99_ms": round(1e3 * cuts[98], 2),
        "syncer_cores": round(cpu / wall, 2),
        "client_cores": round((time.process_time() - own) / wall, 2),
        "syncer_us_per_message": round(1e6 * cpu / said, 1),
    }


@asynccontextmanager
async def idle(address: SyncerAddress, count: int) -> AsyncIterator[None]:
    """Connections that asked once and were answered, as a browser or curl leaves them."""
    where, headers = urlsplit(address.urls[0]), address.headers_for(f"{address.urls[0]}/v1/nothing")
    shown = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    context = address.context()
    held = []
    try:
        for _ in range(count):
            reader, writer = await asyncio.open_connection(where.hostname, where.port, ssl=context)
            held.append(writer)
            writer.write(f"GET /v1/nothing HTTP/1.1\r\nHost: {where.netloc}\r\n{shown}\r\n".encode())
            await writer.drain()
            answer = await reader.readuntil(b"}")
            assert b" 404 " in answer, answer
        yield
        assert not any(writer.transport.is_closing() for writer in held), "the syncer closed an idle connection"
    finally:
        for writer in held:
            writer.transport.abort()


async def load(options: argparse.Namespace, syncer: SyncerProcess) -> dict[str, Any]:
    address, seconds = syncer.address, options.seconds
    talkers = [Talker(number, options.learners) for number in range(options.learners)]
    rows = []
    async with asyncio.TaskGroup() as tasks, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await talkers[0].join(http, address, tasks)
        await talkers[0].begin(address)
        alone_kib = syncer.resident_kib
        for one in talkers[1:]:
            await one.join(http, address, tasks)
            await one.begin(address)
        joined_kib = syncer.resident_kib
        for per_s in options.rates:
            rows.append(await measured(f"asked {per_s:,}/s", syncer, talkers, at_rate(talkers, per_s, seconds)))
        rows.append(await measured("flat out", syncer, talkers, flat_out(talkers, seconds)))
        loaded_kib = syncer.resident_kib
        async with idle(address, options.idle):
            idle_kib = syncer.resident_kib
            beside = f" beside {options.idle:,} idle"
            for per_s in options.rates:
                talk = at_rate(talkers, per_s, seconds)
                rows.append(await measured(f"asked {per_s:,}/s{beside}", syncer, talkers, talk))
        for one in talkers:
            await one.leave()
    return {
        "tls": options.tls,
        "learners": options.learners,
        "idle": options.idle,
        "cores": len(os.sched_getaffinity(0)),
        "load_average_before": options.busy,
        "message_bytes": len(encode(talkers[0]._report)),
        "rows": rows,
        "syncer_mib_with_one_learner": round(alone_kib / 1024, 1),
        "kib_per_learner": round((joined_kib - alone_kib) / (options.learners - 1), 1),
        "mib_after_the_load": round(loaded_kib / 1024, 1),
        "kib_per_idle_connection": round((idle_kib - loaded_kib) / options.idle, 1),
    }


def table(found: dict[str, Any]) -> str:
    lines = [f"{'':<30}{'messages/s':>11}{'p50 ms':>9}{'p99 ms':>9}{'cores':>7}{'µs each':>9}"]
    for row in found["rows"]:
        lines.append(
            f"{row['what']:<30}{row['messages_per_s']:>11,}{row['ack_p50_ms']:>9.2f}{row['ack_p99_ms']:>9.2f}"
            f"{row['syncer_cores']:>7.2f}{row['syncer_us_per_message']:>9.1f}"
        )
    lines.append(
        f"memory: {found['syncer_mib_with_one_learner']} MiB with one learner, {found['kib_per_learner']} KiB for each "
        f"more, {found['kib_per_idle_connection']} KiB for an idle connection"
    )
    return "\n".join(lines)


def is_on_target(found: dict[str, Any]) -> bool:
    """One row at least that is as fast and as prompt as asked, and one of those beside the idle connections."""
    good = [r for r in found["rows"] if r["messages_per_s"] >= 0.99 * TARGET_PER_S and r["ack_p99_ms"] <= TARGET_MS]
    return any("idle" in row["what"] for row in good) and any("idle" not in row["what"] for row in good)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=64)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--rates", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.out = options.out or RESULT.with_name("load-tls.json" if options.tls else "load.json")
    options.busy = round(os.getloadavg()[0], 2)
    said = {"learners": options.learners, "fragments": FRAGMENTS, "sync_every": PACE, "codec": "fp32", "cut_every": 0}
    with (
        tempfile.TemporaryDirectory() as scratch,
        SyncerProcess(
            Path(scratch) / "run", said, options.profile, Path(scratch) / "keys" if options.tls else None
        ) as syncer,
    ):
        found = asyncio.run(load(options, syncer))
    if options.profile is None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1) if options.json else table(found))
    return 0 if is_on_target(found) else 1


if __name__ == "__main__":
    sys.exit(main())
