"""A small HTTP proxy that knows CONNECT alone, and remembers every byte that it relayed."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

CHUNK = 65536
FAR = "far.example"
"""A name that only the proxy knows."""


class ConnectProxy:
    def __init__(self, password: str = "") -> None:
        """`password`: NAME:SECRET that it asks for; empty: nobody is asked."""
        self._wanted = f"Basic {base64.b64encode(password.encode()).decode()}" if password else ""
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.heads: list[str] = []
        """What it was asked, with all headers."""
        self.seen = bytearray()
        """What went through, both ways."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def asked_for(self) -> list[str]:
        """HOST:PORT of every tunnel."""
        return [head.split()[1] for head in self.heads]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            method, where, _ = head.split("\r\n")[0].split()
            if method != "CONNECT":
                writer.write(b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\n\r\n")
            elif self._wanted and f"proxy-authorization: {self._wanted}".lower() not in head.lower():
                writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            else:
                await self._tunnel(where, reader, writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # either side went
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _tunnel(self, where: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = where.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(self._resolved(host.strip("[]")), int(port))
        except OSError:
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
            return
        self._writers.add(far_writer)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass_on(reader, far_writer))
                tasks.create_task(self._pass_on(far_reader, writer))
        finally:
            self._writers.discard(far_writer)
            far_writer.close()

    def _resolved(self, host: str) -> str:
        """It knows names that its clients do not: far.example is this machine."""
        return "127.0.0.1" if host == FAR else host

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK):
                self.seen += data
                writer.write(data)
                await writer.drain()
        writer.close()  # one side has ended: the tunnel has

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ConnectProxy]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            await asyncio.sleep(0.01)  # a closed transport lets go of its socket in a later turn of the loop

    @contextmanager
    def beside(self) -> Iterator[ConnectProxy]:
        """The same on a thread of its own, for whoever starts processes."""
        ready, ended = threading.Event(), asyncio.Event()
        loops: list[asyncio.AbstractEventLoop] = []

        async def stay() -> None:
            async with self.open():
                loops.append(asyncio.get_running_loop())
                ready.set()
                await ended.wait()

        thread = threading.Thread(target=asyncio.run, args=(stay(),))
        thread.start()
        assert ready.wait(10)
        try:
            yield self
        finally:
            loops[0].call_soon_threadsafe(ended.set)
            thread.join(10)
