"""A TCP relay between a learner and the syncer that can be made worse: delay, jitter, bandwidth, silence, breaks.

It runs in user space, so that no root is needed: whoever connects to its port is connected to the syncer.
What is read is sent on in order, when its delay is over and the line (or a bottleneck that several lines share) has
carried it; whoever sends faster is held up by TCP itself, since no more than a small buffer is kept. A silent line
takes no more than that buffer, delivers nothing and lets connections stand, as a black hole on the way would.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import deque
from contextlib import suppress
from functools import partial

from atoll.fabric.tasks import ConnectionErrors, start_for_connection

PACKET = 1460
"""Bytes that share a bottleneck take turns by: what one segment of TCP carries."""
CHUNK = 65536
BUFFER = 64 * 1024
"""Of one direction of one connection, where nobody says."""
SLACK_S = 0.01
"""Timers are late by a millisecond or so: what a bottleneck fell behind by that, it may make good."""
STOP_S = 2.0
"""Connections may take this long to notice that the line is gone."""
DELAYS = 4096
"""Delays of control packets that are remembered."""
SEGMENT = 1460
"""MSS of a socket whose kernel buffers are narrow: loopback's own, 64 KiB, lets a sender be megabytes ahead."""
RECEIVE_BYTES = 32 * 1024
"""Receive buffer of such a socket. The kernel doubles it, and counts its own overhead in."""


class Bottleneck:
    """So many bytes a second for all that pass it, first come, first served."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.carried = 0
        self._turn = asyncio.Lock()
        self._free_at = 0.0

    async def carry(self, count: int) -> None:
        async with self._turn:  # asyncio's locks are fair: whoever waits longest is next
            loop = asyncio.get_running_loop()
            self._free_at = max(self._free_at, loop.time() - SLACK_S) + count / self.bytes_per_s
            self.carried += count
            if (wait := self._free_at - loop.time()) > 0.0005:
                await asyncio.sleep(wait)


class TcpRelay:
    def __init__(
        self,
        host: str,
        port: int,
        *,
        seed: int = 0,
        buffer: int = BUFFER,
        packet: int = PACKET,
        narrow_kernel_buffers: bool = False,
    ) -> None:
        """`buffer`: a line with a delay carries no more than this in that time, for each connection.
        `narrow_kernel_buffers`: the sockets that data is read from take little more than that."""
        self.host, self.port = host, 0
        self.buffer_bytes, self._packet = buffer, packet
        self._narrow_kernel_buffers = narrow_kernel_buffers
        self._upstream = (host, port)
        self._dice = random.Random(seed)
        self.delay_s = self.jitter_s = 0.0
        self.up: Bottleneck | None = None
        self.down: Bottleneck | None = None
        self.bytes_up = self.bytes_down = 0
        self.control_delays: deque[float] = deque(maxlen=DELAYS)
        """Seconds that packets of control channels (WebSockets) spent on this line, both ways."""
        self._open = asyncio.Event()
        self._open.set()
        self.mistakes = ConnectionErrors()
        self._server: asyncio.Server | None = None
        self._both: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        listener = self._make_socket()
        listener.bind((self.host, 0))
        self._server = await asyncio.start_server(self._connected, sock=listener, limit=CHUNK)
        self.port = self._server.sockets[0].getsockname()[1]

    def _make_socket(self) -> socket.socket:
        """Both options count from the handshake on, so they are set before a socket listens or connects."""
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self._narrow_kernel_buffers:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        return made

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self._narrow_kernel_buffers:
            return await asyncio.open_connection(*self._upstream, limit=CHUNK)
        made = self._make_socket()
        try:
            await asyncio.get_running_loop().sock_connect(made, self._upstream)
        except BaseException:
            made.close()
            raise
        return await asyncio.open_connection(sock=made, limit=CHUNK)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self.delay_s = self.jitter_s = 0.0
        self.silence(False)
        self.limit(None)
        self.reset()
        if self._both:
            await asyncio.wait(self._both, timeout=STOP_S)

    # ---- what can be done to it -----------------------------------------------------------------------------------

    def silence(self, silent: bool) -> None:
        (self._open.clear if silent else self._open.set)()

    def limit(self, bytes_per_s: float | None) -> None:
        """Per direction; None: as fast as it goes."""
        self.up, self.down = (None, None) if bytes_per_s is None else (Bottleneck(bytes_per_s), Bottleneck(bytes_per_s))

    def set_rates(self, up: float | None, down: float | None) -> None:
        """Give each direction a rate of its own. What waits already passes at the new one."""
        self.up, self.down = _follow_rate(self.up, up), _follow_rate(self.down, down)

    def share(self, up: Bottleneck, down: Bottleneck) -> None:
        """Pass bottlenecks that others pass too."""
        self.up, self.down = up, down

    def reset(self) -> None:
        """Every connection breaks."""
        for writer in list(self._writers):
            writer.transport.abort()

    # ---- connections ----------------------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._both.add(task)
        self._writers.add(writer)
        far: asyncio.StreamWriter | None = None
        try:
            back, far = await self._dial()
            self._writers.add(far)
            control = asyncio.Event()
            pump_up = partial(self._pump, reader, far, control, upwards=True)
            pump_down = partial(self._pump, back, writer, control, upwards=False)
            up = start_for_connection(pump_up, far.transport.abort, self.mistakes)
            down = start_for_connection(pump_down, writer.transport.abort, self.mistakes)
            try:
                await asyncio.wait([up, down], return_when=asyncio.ALL_COMPLETED)
            finally:
                up.cancel()
                down.cancel()
        except OSError:
            pass  # the syncer is not there: whoever dialled finds out by the end of the connection
        finally:
            for one in (writer, far):
                if one is not None:
                    self._writers.discard(one)
                    one.close()
            self._both.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, control: asyncio.Event, *, upwards: bool
    ) -> None:
        queue: deque[tuple[float, float, bytes]] = deque()
        room, work = asyncio.Event(), asyncio.Event()
        send = partial(self._send, queue, writer, room, work, control, upwards=upwards)
        sender = start_for_connection(send, writer.transport.abort, self.mistakes)
        loop, due, held = asyncio.get_running_loop(), 0.0, 0
        try:
            # A quarter of the buffer at most: what frees it has to come while the rest of it still keeps the line busy.
            while data := await reader.read(min(CHUNK, max(self._packet, self.buffer_bytes // 4))):
                if upwards and not control.is_set() and b"Upgrade: websocket" in data[:2048]:
                    control.set()
                due = max(due, loop.time() + self.delay_s + self.jitter_s * self._dice.random())
                queue.append((due, loop.time(), data))
                work.set()
                held = sum(len(one) for _, _, one in queue)
                while held >= self.buffer_bytes and not sender.done():
                    room.clear()
                    await room.wait()
                    held = sum(len(one) for _, _, one in queue)
                if sender.done():
                    return
        except OSError:
            writer.transport.abort()
        finally:
            queue.append((due, 0.0, b""))
            work.set()
            with suppress(OSError, asyncio.CancelledError):
                await sender

    async def _send(
        self,
        queue: deque[tuple[float, float, bytes]],
        writer: asyncio.StreamWriter,
        room: asyncio.Event,
        work: asyncio.Event,
        control: asyncio.Event,
        *,
        upwards: bool,
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                while not queue:
                    work.clear()
                    await work.wait()
                due, came, data = queue[0]
                if not data:
                    if writer.can_write_eof():
                        writer.write_eof()
                    return
                if (wait := due - loop.time()) > 0:
                    await asyncio.sleep(wait)
                await self._open.wait()
                await self._carry(data, writer, upwards=upwards)
                queue.popleft()
                room.set()
                if control.is_set():
                    self.control_delays.append(loop.time() - came)
        except OSError:
            writer.transport.abort()
        finally:
            room.set()

    async def _carry(self, data: bytes, writer: asyncio.StreamWriter, *, upwards: bool) -> None:
        narrow = self.up if upwards else self.down
        if narrow is None:
            writer.write(data)
            await writer.drain()
            self._count(len(data), upwards=upwards)
        else:
            size = max(1, min(self._packet, int(narrow.bytes_per_s)))
            for start in range(0, len(data), size):
                if writer.is_closing():
                    raise ConnectionResetError
                piece = data[start : start + size]
                await narrow.carry(len(piece))
                writer.write(piece)
                await writer.drain()
                self._count(len(piece), upwards=upwards)

    def _count(self, count: int, *, upwards: bool) -> None:
        if upwards:
            self.bytes_up += count
        else:
            self.bytes_down += count


def _follow_rate(narrow: Bottleneck | None, bytes_per_s: float | None) -> Bottleneck | None:
    if narrow is None or bytes_per_s is None:
        return None if bytes_per_s is None else Bottleneck(bytes_per_s)
    narrow.bytes_per_s = bytes_per_s
    return narrow
