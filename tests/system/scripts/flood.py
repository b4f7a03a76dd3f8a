"""A flood against a TLS port: `flood.py KIND PORT RATE [SECRET]`, so many connections a second until it is killed.

Of those that stay it holds as many as a port has places for strangers and more; then it closes the oldest.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

HELD = 2000
WAIT_S = 10.0


class Flood:
    def __init__(self, port: int, secret: str) -> None:
        self.port, self.secret = port, secret
        self.made = self.failed = 0
        self.held: deque[asyncio.StreamWriter] = deque()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.context.check_hostname, self.context.verify_mode = False, ssl.CERT_NONE

    async def open(self, *, tls: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=self.context if tls else None)

    def hold(self, writer: asyncio.StreamWriter) -> None:
        self.held.append(writer)
        if len(self.held) > HELD:
            self.held.popleft().transport.abort()

    async def connect(self) -> None:
        """And say nothing."""
        self.hold((await self.open(tls=False))[1])

    async def shake(self) -> None:
        """And go."""
        (await self.open(tls=True))[1].transport.abort()

    async def stay(self) -> None:
        self.hold((await self.open(tls=True))[1])

    async def ask(self) -> None:
        """With the secret, and stay."""
        reader, writer = await self.open(tls=True)
        writer.write(f"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.secret}\r\n\r\n".encode())
        await reader.readline()
        self.hold(writer)

    async def one(self, act: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                await act()
            self.made += 1
        except (OSError, EOFError):
            self.failed += 1


async def main(kind: str, port: str, rate: str, secret: str = "nobody-knows-this") -> None:
    flood, loop = Flood(int(port), secret), asyncio.get_running_loop()
    act, began, number, running = getattr(flood, kind), loop.time(), 0, set[asyncio.Task[None]]()
    while True:
        while number < (loop.time() - began) * float(rate):
            number += 1
            task = asyncio.create_task(flood.one(act))
            running.add(task)
            task.add_done_callback(running.discard)
        print(flood.made, flood.failed, flush=True)
        await asyncio.sleep(0.05)


with suppress(KeyboardInterrupt, BrokenPipeError):
    asyncio.run(main(*sys.argv[1:]))
