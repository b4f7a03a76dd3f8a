"""An event loop that was busy takes nobody for dead whose answer lies in the socket.

The other end lives in a thread: it answers a ping while our loop stands still, for longer than the answer may take.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha1
from typing import TYPE_CHECKING

import pytest

from atoll.fabric.client import SyncerConnection
from atoll.fabric.wire import PROTOCOL_HEADER, FabricLimits
from atoll.protocol.messages import PROTOCOL, Hello

if TYPE_CHECKING:
    from .conftest import ServedFabric

PING_S = 0.2
LIMITS = FabricLimits(ping_s=PING_S, flush_s=0.1)
BUSY_S = 2 * PING_S
"""A ping's answer may take half of PING_S."""
WAIT_S = 30.0
PING, PONG = 0x89, 0x8A


class OtherEnd(threading.Thread):
    """Answers the first ping while our loop stands still, or not at all; then keeps quiet."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, answers: bool) -> None:
        super().__init__(daemon=True)
        self.loop, self.answers = loop, answers
        self.pinged = asyncio.Event()
        """And our loop has stood still."""
        self.sock: socket.socket

    def talk(self, pong: bytes) -> None:
        data = b""
        while bytes([PING]) not in data:
            if not (more := self.sock.recv(4096)):
                return
            data += more
        self.loop.call_soon_threadsafe(self._stand_still)
        time.sleep(BUSY_S / 2)
        if self.answers:
            with suppress(OSError):
                self.sock.sendall(pong)

    def _stand_still(self) -> None:
        time.sleep(BUSY_S)
        self.pinged.set()

    async def has_pinged(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.pinged.wait()
        await asyncio.sleep(0)
        await asyncio.sleep(PING_S / 4)


class Syncer(OtherEnd):
    def __init__(self, loop: asyncio.AbstractEventLoop, *, answers: bool) -> None:
        super().__init__(loop, answers=answers)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def run(self) -> None:
        self.sock, _ = self.listener.accept()
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self.sock.recv(4096)
        lines = head.decode().split("\r\n")
        key = next(line.split(": ")[1] for line in lines if line.lower().startswith("sec-websocket-key"))
        accept = b64encode(sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()).decode()
        answer = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        version = f"{PROTOCOL_HEADER}: {PROTOCOL}\r\n"
        self.sock.sendall(f"{answer}{version}Sec-WebSocket-Accept: {accept}\r\n\r\n".encode())
        self.talk(bytes([PONG, 0]))


class Learner(OtherEnd):
    def __init__(self, loop: asyncio.AbstractEventLoop, port: int, *, answers: bool) -> None:
        super().__init__(loop, answers=answers)
        self.port = port

    def run(self) -> None:
        self.sock = socket.create_connection(("127.0.0.1", self.port))
        ask = "GET /v1/control HTTP/1.1\r\nHost: [::1]\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        key = b64encode(bytes(16)).decode()
        self.sock.sendall(f"{ask}Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode())
        self.talk(bytes([PONG, 0x80, 0, 0, 0, 0]))

    def is_closed(self) -> bool:
        self.sock.setblocking(False)
        try:
            return self.sock.recv(4096) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


async def comes(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not what():  # noqa: ASYNC110 - nobody tells when it becomes true
            await asyncio.sleep(PING_S / 4)


@pytest.mark.parametrize("answers", [True, False])
async def test_a_busy_courier_does_not_take_its_syncer_for_dead(answers: bool) -> None:
    lost: list[str] = []
    syncer = Syncer(asyncio.get_running_loop(), answers=answers)
    link = SyncerConnection(
        syncer.url,
        hello=lambda: Hello(protocol=PROTOCOL, learner="a", session="s"),
        on_open=lambda: None,
        on_message=lambda message: None,
        on_lost=lost.append,
        limits=LIMITS,
    )
    syncer.start()
    running = asyncio.ensure_future(link.run())
    try:
        await syncer.has_pinged()
        if answers:
            assert not lost
        else:
            await comes(lambda: bool(lost))
    finally:
        await link.close()
        await asyncio.wait([running])
        syncer.listener.close()
        syncer.sock.close()


@pytest.mark.parametrize("answers", [True, False])
async def test_a_busy_syncer_does_not_take_a_learner_for_dead(place: ServedFabric, answers: bool) -> None:
    await place.open(LIMITS)
    learner = Learner(asyncio.get_running_loop(), place.server.port, answers=answers)
    learner.start()
    await learner.has_pinged()
    if answers:
        assert not learner.is_closed()
    else:
        await comes(learner.is_closed)
    learner.sock.close()
