"""One body of 64 MiB between two processes: by the fabric, and by blocking sockets that do the same work.

    python benchmarks/sockets.py            in the clear; benchmarks/results/sockets.json
    python benchmarks/sockets.py --tls      over TLS 1.3, both of them

One process serves, this one asks, over loopback; their turns alternate. `up` is a contribution (PUT, acknowledged once
the receiver has its digest), `down` is a version (GET, its digest included). The blocking sockets send the same bytes
with one `sendall`, receive them with `recv_into` and compute the same digest. Of every kind the median, in GB/s, and
the processor time of both processes. A timer of 10 ms runs on both event loops of the fabric: how late it was at most
(on a busy machine that is the scheduler's doing), and the most processor time of its thread until it came (ours).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from seeds import count_cores, find_commit

from atoll.digests import compute_digest
from atoll.fabric.address import SyncerAddress
from atoll.fabric.authorizer import TokenAuthorizer
from atoll.fabric.certificates import fingerprint, make_server
from atoll.fabric.client import SyncerConnection
from atoll.fabric.control_channel import ControlChannel
from atoll.fabric.handlers import ServedFragment
from atoll.fabric.join_tokens import JoinToken, JoinTokens
from atoll.fabric.server import Server
from atoll.fabric.tls import client_context, server_context
from atoll.protocol.messages import PROTOCOL, Hello, Started

MIB = 2**20
SECRET = "5ec7e7" + 58 * "0"
HOST = "127.0.0.1"
TICK_S = 0.01
UP, DOWN = b"u", b"d"
RESULTS = Path(__file__).parent / "results"


# ---- the process that serves ----------------------------------------------------------------------------------------


class Desk:
    """What a server asks of the service behind it, as far as it is asked here."""

    def __init__(self, size: int) -> None:
        self.body, self.into = memoryview(os.urandom(size)), memoryview(bytearray(size))
        self.digest = compute_digest(self.body)

    def opened(self, channel: ControlChannel, hello: Hello) -> None:
        channel.send(Started(uploader="nobody"))

    def closed(self, channel: ControlChannel, reason: str) -> None: ...

    def turned_away(self, address: str, reason: str) -> None: ...

    def expect_contribution(
        self, learner: str, session: str, round: int, attempt: int, named: int, rank: int
    ) -> memoryview:
        return self.into

    def contribution_arrived(self, learner: str, round: int, attempt: int, digest: str, rank: int) -> None: ...

    def contribution_aborted(self, learner: str, round: int, attempt: int, reason: str, rank: int) -> None:
        print(f"aborted: {reason}", file=sys.stderr)

    def fragment(self, index: int, have: int, codec: str) -> ServedFragment:
        return ServedFragment(3, 7, self.digest, self.body, lambda: None)


class Ticks:
    """How late a timer on an event loop was, and how long its thread worked until it came, in ms."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self.worked: list[float] = []

    async def count(self) -> None:
        while True:
            began, worked = time.monotonic(), time.thread_time()
            await asyncio.sleep(TICK_S)
            self.late.append(1000 * (time.monotonic() - began - TICK_S))
            self.worked.append(1000 * (time.thread_time() - worked))

    def describe(self) -> dict[str, float]:
        late = sorted(self.late)
        p99 = late[len(late) * 99 // 100]
        return {"late_ms": round(late[-1], 1), "late_p99_ms": round(p99, 1), "work_ms": round(max(self.worked), 1)}


def serve(size: int, keys: Path | None) -> None:
    """Ports on the first line of stdout; at the end of stdin how late its event loop was, and what it cost."""
    asyncio.run(_serve_fabric(Desk(size), keys))


async def _serve_fabric(desk: Desk, keys: Path | None) -> None:
    tokens = JoinTokens([JoinToken(id="join", secret=SECRET, role="learner")])
    secured: dict[str, Any] = {}
    if keys is not None:
        tls = server_context(keys / "cert.pem", keys / "key.pem")
        secured = {"authorizer": TokenAuthorizer(lambda: tokens, lambda: "run"), "tls": lambda: tls}
    server, ticks = Server(desk, host=HOST, port=0, **secured), Ticks()  # type: ignore[arg-type]
    await server.start()
    ticking = asyncio.create_task(ticks.count())
    print(server.port, flush=True)
    while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if word == "begin":
            ticks.late.clear()
            ticks.worked.clear()
        print(json.dumps(ticks.describe() if word == "end" else {"cpu_s": time.process_time()}), flush=True)
    ticking.cancel()
    await server.stop()


def serve_blocking(size: int, keys: Path | None) -> None:
    desk, listener = Desk(size), socket.create_server((HOST, 0))
    print(listener.getsockname()[1], flush=True)
    sock: socket.socket = listener.accept()[0]
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if keys is not None:
        sock = server_context(keys / "cert.pem", keys / "key.pem").wrap_socket(sock, server_side=True)
    while word := sock.recv(1):
        if word == UP:
            receive_whole(sock, desk.into)
            sock.sendall(compute_digest(desk.into).encode())
        elif word == DOWN:
            sock.sendall(desk.digest.encode())
            sock.sendall(desk.body)
        else:
            sock.sendall(f"{time.process_time():32.6f}".encode())


def receive_whole(sock: socket.socket, into: memoryview) -> None:
    at = 0
    while at < into.nbytes:
        count = sock.recv_into(into[at:])
        assert count, "it hung up"
        at += count


@contextmanager
def served(*words: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    command = [sys.executable, __file__, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        yield int(process.stdout.readline()), process
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.wait(20)


# ---- the process that asks ------------------------------------------------------------------------------------------


def read_process(process: subprocess.Popen[str], word: str) -> dict[str, float]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
    answer: dict[str, float] = json.loads(process.stdout.readline())
    return answer


class Figures:
    """Seconds of every kind of transfer, and processor time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.spent: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    async def time(self, kind: str, work: Callable[[], Awaitable[None]], their_cpu: Callable[[], float]) -> None:
        cpu, began = time.process_time() + their_cpu(), time.perf_counter()
        await work()
        spent = time.perf_counter() - began
        self.spent.setdefault(kind, []).append(spent)
        self.cpu.setdefault(kind, []).append(time.process_time() + their_cpu() - cpu)

    def describe(self) -> dict[str, dict[str, float]]:
        return {
            kind: {
                "gb_per_s": round(self.size / 1e9 / median(spent[1:]), 3),
                "cpu_ms": round(1000 * median(self.cpu[kind][1:]), 1),
            }
            for kind, spent in self.spent.items()
        }


async def measure(size: int, times: int, keys: Path | None) -> dict[str, Any]:
    tls = [] if keys is None else ["--keys", str(keys)]
    desk, figures, ticks = Desk(size), Figures(size), Ticks()
    with ExitStack() as stack:
        port, server = stack.enter_context(served("--serve", "fabric", "--bytes", str(size), *tls))
        plain, _ = stack.enter_context(served("--serve", "blocking", "--bytes", str(size), *tls))
        sock: socket.socket = stack.enter_context(socket.create_connection((HOST, plain)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pin = "" if keys is None else fingerprint((keys / "cert.pem").read_bytes())
        if pin:
            context: ssl.SSLContext = client_context(pin)
            context.sslobject_class = ssl.SSLObject
            sock = stack.enter_context(context.wrap_socket(sock))
        scheme = "https" if pin else "http"
        address = SyncerAddress(urls=(f"{scheme}://{HOST}:{port}",), run="run", token=SECRET if pin else "", pin=pin)
        started = asyncio.Event()
        link = SyncerConnection(
            address.link() if pin else address.urls[0],
            hello=lambda: Hello(protocol=PROTOCOL, learner="learner", session="s"),
            on_open=lambda: None,
            on_message=lambda message: started.set(),
            on_lost=lambda reason: print(f"lost: {reason}", file=sys.stderr),
        )
        running = asyncio.create_task(link.run())
        await started.wait()
        await _take_turns(figures, times, desk, link, sock, server, ticks)
        theirs = read_process(server, "end")
        await link.close()
        await running
    return {**figures.describe(), "event_loops": {"server": theirs, "client": ticks.describe()}}


async def _take_turns(
    figures: Figures,
    times: int,
    desk: Desk,
    link: SyncerConnection,
    sock: socket.socket,
    server: subprocess.Popen[str],
    ticks: Ticks,
) -> None:
    def blocking_cpu() -> float:
        sock.sendall(b"?")
        return float(sock.recv(32))

    def fabric_cpu() -> float:
        return read_process(server, "cpu")["cpu_s"]

    def up() -> None:
        sock.sendall(UP)
        sock.sendall(desk.body)
        assert sock.recv(32).decode() == desk.digest

    def down() -> None:
        sock.sendall(DOWN)
        named = sock.recv(32).decode()
        receive_whole(sock, desk.into)
        assert compute_digest(desk.into) == named

    async def put(number: int) -> None:
        await link.put_contribution("learner", "s", number, 0, desk.body, desk.digest, 60.0)

    async def get() -> None:
        await link.get_fragment(0, desk.into, 60.0)

    read_process(server, "begin")
    for number in range(times):
        await figures.time("blocking_up", _now(up), blocking_cpu)
        await figures.time("blocking_down", _now(down), blocking_cpu)
        ticking = asyncio.create_task(ticks.count())
        await figures.time("fabric_up", lambda number=number: put(number), fabric_cpu)  # type: ignore[misc]
        await figures.time("fabric_down", get, fabric_cpu)
        ticking.cancel()


def _now(work: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        work()

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=40)
    parser.add_argument("--bytes", type=int, default=64 * MIB)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", choices=("fabric", "blocking"), help=argparse.SUPPRESS)
    parser.add_argument("--keys", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        {"fabric": serve, "blocking": serve_blocking}[options.serve](options.bytes, options.keys)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        keys = None
        if options.tls:
            keys, pair = Path(folder), make_server([HOST], 30.0)
            (keys / "cert.pem").write_bytes(pair.certificate)
            (keys / "key.pem").write_bytes(pair.key)
        found = asyncio.run(measure(options.bytes, options.times, keys))
    for way in ("up", "down"):
        found[f"share_{way}"] = round(found[f"fabric_{way}"]["gb_per_s"] / found[f"blocking_{way}"]["gb_per_s"], 2)
    result = {
        "machine": {"arch": platform.machine(), "cores": count_cores(), "system": platform.system()},
        "python": platform.python_version(),
        "commit": find_commit(),
        "body_mib": options.bytes / MIB,
        "tls": options.tls,
        **found,
    }
    print(json.dumps(result, indent=1))
    out = options.out or RESULTS / ("sockets-tls.json" if options.tls else "sockets.json")
    out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
