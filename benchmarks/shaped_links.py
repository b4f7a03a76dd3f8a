"""Links of given rate and delay in user space, one per learner, and a check that they are what they claim to be.

Each learner has one `TcpRelay` (atoll/chaos/tcp_relay.py). All its connections, bodies and WebSocket alike, pass one
bottleneck in each direction, in turns of a packet: fair queueing, as fq_codel does on a router. So a control message
waits for one packet of every other connection at most, never behind a whole body. A drop-tail link with a deep queue
would make it wait longer; a relay that kept one queue for all would too.

A relay holds at most 2 x rate x delay and a packet per connection. Its sockets have Ethernet's MSS and a small receive
buffer (`narrow_kernel_buffers` in TcpRelay), so that the kernel does not hold megabytes more, as it does with
loopback's. What remains is the sender's own send buffer, which a real link fills too: about 1.3 MB under BBR. The check
tells how far a sender was ahead of its receiver.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from atoll.chaos.tcp_relay import TcpRelay
from atoll.fabric.local_secrets import publish_secrets, published_secrets, withdraw_secrets

PACKET = 16 * 1024
"""Bytes that a connection passes per turn: fewer would cost more processor than four fast links leave."""
PACKET_S = 0.001
"""Time that a packet takes at least, where the link is fast."""
FREE_BUFFER = 16 * 1024 * 1024
"""Bytes per connection while a link has no limit but a delay."""
CHECK_S = 3.0
CHECK_CONNECTIONS = 3
TOLERANCE = 0.05


class Rates(NamedTuple):
    """Bytes per second of both directions; None: no limit."""

    up: float | None
    down: float | None

    @classmethod
    def from_mbit(cls, up: float, down: float) -> Rates:
        return cls(up * 1e6 / 8, down * 1e6 / 8)


class Sample(NamedTuple):
    """Bytes that every line had carried by a moment (wall clock)."""

    at: float
    up: tuple[int, ...]
    down: tuple[int, ...]

    def of_way(self, way: str) -> tuple[int, ...]:
        return self.up if way == "up" else self.down


def hold_bytes(rates: Rates, delay_s: float) -> int:
    """Return the bytes a connection may have on its way: twice what the faster direction carries in the delay."""
    if rates.up is None or rates.down is None:
        return FREE_BUFFER
    return int(2 * max(rates.up, rates.down) * delay_s) + PACKET


@dataclass
class Link:
    """One learner's link."""

    line: TcpRelay

    def set_rates(self, rates: Rates) -> None:
        """Make the link this wide from the next packet on."""
        self.line.set_rates(rates.up, rates.down)
        self.line.buffer_bytes = hold_bytes(rates, self.line.delay_s)


class Links:
    """One link per learner, to one address or (in a ring) to several."""

    def __init__(self, rates: Sequence[Rates], delay_s: float, *, limited: bool = True) -> None:
        self.rates, self.delay_s = list(rates), delay_s
        self._limited = limited
        self.limited_at = 0.0
        """Moment (wall clock) since which the links have their rates; 0: from their start."""
        self.links: list[Link] = []
        self.samples: list[Sample] = []

    async def open(self, host: str, port: int) -> TcpRelay:
        rates = self.rates[len(self.links)]
        fastest = max(rates.up or 0.0, rates.down or 0.0)
        packet = max(PACKET, int(PACKET_S * fastest))
        line = TcpRelay(host, port, packet=packet, narrow_kernel_buffers=True)
        line.delay_s = self.delay_s
        self.links.append(link := Link(line))
        link.set_rates(rates if self._limited else Rates(None, None))
        await line.start()
        return line

    async def open_to_syncer(self, url: str) -> dict[str, str]:
        address = urlsplit(url)
        assert address.hostname is not None and address.port is not None
        secrets = published_secrets(address.hostname, address.port)
        for _ in self.rates:
            line = await self.open(address.hostname, address.port)
            publish_secrets(line.host, line.port, secrets)
        return {f"learner-{number}": link.line.url for number, link in enumerate(self.links)}

    @property
    def limited(self) -> bool:
        return self._limited

    def limit(self, rates: Sequence[Rates] | None = None) -> None:
        """Limit every link, to other rates than before where they are given."""
        self.rates = list(rates or self.rates)
        self.limited_at = self.limited_at if self._limited else time.time()
        self._limited = True
        for link, wide in zip(self.links, self.rates, strict=True):
            link.set_rates(wide)

    def silence(self, learner: int, silent: bool) -> None:
        """Cut a learner's link: connections stand, nothing passes. Or let it pass again."""
        self.links[learner].line.silence(silent)

    def take_sample(self) -> None:
        lines = [link.line for link in self.links]
        up, down = tuple(line.bytes_up for line in lines), tuple(line.bytes_down for line in lines)
        self.samples.append(Sample(time.time(), up, down))

    async def close(self) -> None:
        for link in self.links:
            await link.line.stop()
            withdraw_secrets(link.line.host, link.line.port)


# ---- is a link what it claims to be? --------------------------------------------------------------------------------


@dataclass
class LinkCheck:
    """Bulk transfers over a few connections of one learner in one direction, with small messages beside them."""

    set_mbit: float
    carried_mbit: float
    """Rate at the receiver, over all connections."""
    shares: list[float]
    """Each connection's part of it."""
    held_bytes: int
    """Most bytes per connection that the sender had got rid of and the receiver had not seen."""
    message_ms: tuple[float, float]
    """Median and longest time of a small message one way, beside the full connections."""

    @property
    def holds(self) -> bool:
        return abs(self.carried_mbit / self.set_mbit - 1) <= TOLERANCE

    def describe(self) -> str:
        shares = "/".join(f"{share:.2f}" for share in self.shares)
        return (
            f"link of {self.set_mbit:g} Mbit/s: carries {self.carried_mbit:.2f} "
            f"({100 * (self.carried_mbit / self.set_mbit - 1):+.1f} %), "
            f"connections share it {shares}, at most {self.held_bytes / 1000:.0f} kB of each on the way, "
            f"a message beside them takes {self.message_ms[0]:.0f} ms (longest {self.message_ms[1]:.0f})"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "set_mbit": self.set_mbit,
            "carried_mbit": round(self.carried_mbit, 3),
            "shares": [round(share, 3) for share in self.shares],
            "held_kilobytes": round(self.held_bytes / 1000, 1),
            "message_ms": [round(one, 1) for one in self.message_ms],
        }


class _Bulk:
    """Far end of a check: counts what arrives, connection by connection, and times small messages."""

    def __init__(self) -> None:
        self.arrived: list[int] = []
        self.delays: list[float] = []
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                await self._count(reader)
        finally:
            writer.transport.abort()

    async def _count(self, reader: asyncio.StreamReader) -> None:
        if await reader.readexactly(1) == b"m":
            while True:
                sent = float((await reader.readexactly(24)).decode())
                self.delays.append(time.perf_counter() - sent)
        number = int((await reader.readexactly(1)).decode())
        while data := await reader.read(65536):
            self.arrived[number] += len(data)


async def check_link(rate: float, delay_s: float, seconds: float = CHECK_S) -> LinkCheck:
    """Fill a link of this rate with CHECK_CONNECTIONS bodies upwards, and send a small message every 50 ms beside."""
    bulk = _Bulk()
    bulk.arrived = [0] * CHECK_CONNECTIONS
    server = await asyncio.start_server(bulk.serve, "127.0.0.1", 0)
    links = Links([Rates(rate, rate)], delay_s)
    line = await links.open("127.0.0.1", server.sockets[0].getsockname()[1])
    sent = [0] * CHECK_CONNECTIONS
    held = [0]
    loop = asyncio.get_running_loop()

    async def fill(number: int) -> None:
        with socket.create_connection((line.host, line.port)) as sender:
            sender.setblocking(False)
            await loop.sock_sendall(sender, b"b" + str(number).encode())
            while True:
                sent[number] += await _send_some(loop, sender)
                held[0] = max(held[0], sent[number] - bulk.arrived[number])

    async def say() -> None:
        _, writer = await asyncio.open_connection(line.host, line.port)
        try:
            writer.write(b"m")
            while True:
                writer.write(f"{time.perf_counter():024.9f}".encode())
                await asyncio.sleep(0.05)
        finally:
            writer.transport.abort()

    work = [asyncio.ensure_future(fill(number)) for number in range(CHECK_CONNECTIONS)]
    work.append(asyncio.ensure_future(say()))
    await asyncio.sleep(1.0 + 2 * delay_s)  # until all are filled
    bulk.delays.clear()
    before, began = list(bulk.arrived), time.perf_counter()
    await asyncio.sleep(seconds)
    took = time.perf_counter() - began
    carried = [after - earlier for after, earlier in zip(bulk.arrived, before, strict=True)]
    for task in work:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    await links.close()
    server.close()
    for serving in bulk.tasks:
        serving.cancel()
    await asyncio.gather(*bulk.tasks, return_exceptions=True)
    total = sum(carried)
    return LinkCheck(
        rate * 8e-6,
        total / took * 8e-6,
        [one / total for one in carried] if total else [],
        held[0],
        (1e3 * median(bulk.delays), 1e3 * max(bulk.delays)) if bulk.delays else (0.0, 0.0),
    )


async def _send_some(loop: asyncio.AbstractEventLoop, sender: socket.socket) -> int:
    """Send a piece as soon as the kernel takes any of it."""
    piece = bytes(65536)
    try:
        return sender.send(piece)
    except BlockingIOError:
        ready = asyncio.Event()
        loop.add_writer(sender, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(sender)
        return 0


async def check_several(rate: float, delay_s: float, learners: int, seconds: float = CHECK_S) -> list[float]:
    """Return the part of the set rate that each of several links carries while all are full, in Mbit/s."""
    found = await asyncio.gather(*(check_link(rate, delay_s, seconds) for _ in range(learners)))
    return [one.carried_mbit for one in found]


def peak_rate(samples: Sequence[Sample], way: str, learner: int, window_s: float = 2.0) -> float:
    """Return the most bytes per second that a line carried over any `window_s`, 0 where it was not watched as long."""
    best, start = 0.0, 0
    for end, last in enumerate(samples):
        while start + 1 < end and last.at - samples[start + 1].at >= window_s:
            start += 1
        first = samples[start]
        if last.at - first.at >= window_s:
            best = max(best, (last.of_way(way)[learner] - first.of_way(way)[learner]) / (last.at - first.at))
    return best


def mean_bytes(samples: Sequence[Sample], way: str, begin: float, end: float) -> float:
    """Return the bytes that a line carried on average between two moments."""
    inside = [sample for sample in samples if begin <= sample.at <= end]
    if len(inside) < 2:
        return 0.0
    earlier, later = inside[0].of_way(way), inside[-1].of_way(way)
    return mean(b - a for a, b in zip(earlier, later, strict=True))
