"""Places joined by a network that can be cut: network namespaces where they can be made, loopback elsewhere."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
from collections.abc import Coroutine
from typing import Any, Protocol
from urllib.parse import urlsplit

from atoll.chaos.tcp_relay import TcpRelay


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


class Places(Protocol):
    def address(self, name: str) -> str: ...

    def inside(self, name: str) -> list[str]:
        """Words before a command that is to run there."""
        ...

    def seen_from(self, name: str, link: str) -> str:
        """The join link as it works from there."""
        ...

    def cut(self, name: str, cut: bool) -> None: ...

    def close(self) -> None: ...


class Namespaces:
    """One for each, and a hub between them with a bridge in it. Needs root."""

    def __init__(self, names: list[str]) -> None:
        self._prefix, self._names, self._made = f"atoll-{os.getpid()}", names, []
        self._make("hub")
        ip("-n", self._of("hub"), "link", "add", "bridge", "type", "bridge")
        ip("-n", self._of("hub"), "link", "set", "bridge", "up")
        for number, name in enumerate(names, 1):
            self._make(name)
            ip("-n", self._of("hub"), "link", "add", f"to-{number}", "type", "veth", "peer", "name", "out")
            ip("-n", self._of("hub"), "link", "set", "out", "netns", self._of(name))
            ip("-n", self._of("hub"), "link", "set", f"to-{number}", "master", "bridge", "up")
            ip("-n", self._of(name), "address", "add", f"{self.address(name)}/24", "dev", "out")
            ip("-n", self._of(name), "link", "set", "out", "up")
            ip("-n", self._of(name), "link", "set", "lo", "up")

    def _of(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _make(self, name: str) -> None:
        ip("netns", "add", self._of(name))
        self._made.append(name)

    def address(self, name: str) -> str:
        return f"10.77.0.{1 + self._names.index(name)}"

    def inside(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", self._of(name)]

    def seen_from(self, name: str, link: str) -> str:
        return link

    def cut(self, name: str, cut: bool) -> None:
        number = 1 + self._names.index(name)
        ip("-n", self._of("hub"), "link", "set", f"to-{number}", "down" if cut else "up")

    def close(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", self._of(name)], check=False, capture_output=True)

    @staticmethod
    def possible() -> bool:
        if shutil.which("ip") is None or os.geteuid() != 0:
            return False
        name = f"atoll-{os.getpid()}-try"
        made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode == 0
        return made and subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True).returncode == 0


class Loopback:
    """Everybody on this machine; each but the first dials through a line of its own."""

    def __init__(self, names: list[str]) -> None:
        self._names, self._lines = names, dict[str, TcpRelay]()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def address(self, name: str) -> str:
        return f"127.0.0.{1 + self._names.index(name)}"

    def inside(self, name: str) -> list[str]:
        return []

    def seen_from(self, name: str, link: str) -> str:
        there = link.partition("@")[2].partition("/")[0]
        host, _, port = there.rpartition(":")
        line = self._lines[name] = self._do(_started(host, int(port)))
        return link.replace(there, urlsplit(line.url).netloc)

    def cut(self, name: str, cut: bool) -> None:
        self._loop.call_soon_threadsafe(self._lines[name].silence, cut)

    def close(self) -> None:
        for line in self._lines.values():
            self._do(line.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


async def _started(host: str, port: int) -> TcpRelay:
    line = TcpRelay(host, port)
    await line.start()
    return line
