"""Write down what a process of a run sends: messages, frames between couriers, and answers to requests.

All that the shells of Atoll do is seen at four places, which belong to aiohttp or to the socket of the couriers and not
to the shells: `send_bytes` of both ends of a WebSocket, the end of an HTTP request, and `send` and `receive` of a
courier's channel. So a shell may be written anew, and what is written down stays comparable.

One line of JSON each, in $ATOLL_TAP/<process>.<pid>.jsonl, written at once: a process may be killed at any moment.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

Patch = Callable[[ModuleType], None]
TIMED = {"atoll-received"}
"""Headers that say how long something took."""


def name_process(words: Sequence[str]) -> str:
    """Return the name of the process with this command line; empty: nothing of it is written down."""
    if "atoll.courier" in words:
        rank = os.environ.get("RANK", "0")
        return f"{os.environ['ATOLL_LEARNER']}.{rank}"
    if "atoll.cli" not in words:
        return ""
    verb = words[words.index("atoll.cli") + 1]
    if verb == "syncer" and "--shard" in words:
        shard = words[words.index("--shard") + 1].partition("/")[0]
        return "syncer" if shard == "1" else f"shard-{shard}"
    return verb if verb in ("syncer", "relay") else ""


def install(words: Sequence[str]) -> None:
    if name := name_process(words):
        path = f"{os.environ['ATOLL_TAP']}/{name}.{os.getpid()}.jsonl"
        Tap(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)).install()


class Tap:
    def __init__(self, file: int) -> None:
        self._file = file

    def install(self) -> None:
        """Wait for the modules whose classes are watched: not every process imports all of them."""
        patches = {
            "aiohttp.client_ws": self._watch_client_sockets,
            "aiohttp.web_ws": self._watch_server_sockets,
            "aiohttp.web_protocol": self._watch_answers,
            "atoll.mailbox.channel": self._watch_frames,
            "atoll.fabric.wire": have_patience,
            "atoll.syncer.lead": fetch_in_pieces,
        }
        if "ATOLL_HOLD" in os.environ:
            patches["aiohttp.client"] = hold_request
        sys.meta_path.insert(0, Finder(patches))  # type: ignore[arg-type]

    def write(self, line: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(line, default=_show).encode() + b"\n")

    def _watch_client_sockets(self, module: ModuleType) -> None:
        self._watch_sends(module.ClientWebSocketResponse, lambda socket: socket._response.url.path)

    def _watch_server_sockets(self, module: ModuleType) -> None:
        self._watch_sends(module.WebSocketResponse, lambda socket: socket._req.path)

    def _watch_sends(self, owner: Any, path: Callable[[Any], str]) -> None:
        send = owner.send_bytes

        async def send_bytes(socket: Any, message: bytes, *more: Any) -> None:
            import msgspec

            self.write({"sent": msgspec.msgpack.decode(message), "on": path(socket)})
            await send(socket, message, *more)

        owner.send_bytes = send_bytes

    def _watch_answers(self, module: ModuleType) -> None:
        finish = module.RequestHandler.finish_response

        async def finish_response(handler: Any, request: Any, response: Any, start: Any) -> Any:
            line = {"asked": f"{request.method} {request.path_qs}", "with": _headers(request)}
            line |= {"status": response.status, "answered": _headers(response)}
            if response.status >= 400:
                line["said"] = str(getattr(response, "text", ""))
            self.write(line)
            return await finish(handler, request, response, start)

        module.RequestHandler.finish_response = finish_response

    def _watch_frames(self, module: ModuleType) -> None:
        import msgspec

        owner = module.CourierChannel
        send, receive = owner.send, owner.receive

        def send_frame(channel: Any, frame: Any, descriptor: int | None = None) -> None:
            self.write({"frame": [type(frame).__name__, msgspec.to_builtins(frame)], "on": _kind(channel)})
            send(channel, frame, descriptor)

        def receive_frames(channel: Any) -> list[bytes]:
            frames: list[bytes] = receive(channel)
            if _kind(channel) == "training":  # what other couriers send, they write down themselves
                for frame in frames:
                    self.write({"heard": msgspec.msgpack.decode(frame)})
            return frames

        owner.send, owner.receive = send_frame, receive_frames


def have_patience(module: ModuleType) -> None:
    """Let no connection be lost because a busy machine answers late."""
    names = ("hello_s", "header_s", "dial_s", "ping_s", "send_s", "body_grace_s", "body_idle_s")
    module.FabricLimits = partial(module.FabricLimits, **dict.fromkeys(names, 120.0))  # type: ignore[attr-defined]


def fetch_in_pieces(module: ModuleType) -> None:
    """Let the finished model come in pieces also where it is small."""
    module.CHUNK = 1 << 17  # type: ignore[attr-defined]


def hold_request(module: ModuleType) -> None:
    """Keep back the request that ATOLL_HOLD names (METHOD /path), until the file `go-on` is in the current folder. The
    file `held-…` says that it would be sent now, and that what is to be refused at that moment was (`send_wrong`)."""
    send, held = module.ClientSession._request, os.environ["ATOLL_HOLD"]

    async def send_later(session: Any, method: str, url: Any, **how: Any) -> Any:
        parts = urlsplit(str(url))
        if f"{method} {parts.path}" == held and not Path("go-on").exists():
            await send_wrong(partial(send, session), str(url), how["headers"])
            Path(f"held-{os.environ.get('RANK', '0')}-{parts.port}").touch()
            while not Path("go-on").exists():  # noqa: ASYNC110 (another process makes it)
                await asyncio.sleep(0.02)
        return await send(session, method, url, **how)

    module.ClientSession._request = send_later


async def send_wrong(send: Callable[..., Any], url: str, headers: dict[str, str]) -> None:
    """Send what a port has to refuse while it waits for this body. Its answers are in what it writes down."""
    size, (root, _, path) = int(headers["Content-Length"]), url.partition("/v1/")
    learner, number, attempt = path.partition("?")[0].split("/")[1:]
    rank = f"?{path.partition('?')[2]}" if "?" in path else ""
    right = {name: value for name, value in headers.items() if name != "Content-Length"}
    for way, data, more in (
        (url, size, {"Atoll-Session": "0123456789abcdef"}),
        (f"{root}/v1/contributions/{learner}/{int(number) + 9}/{attempt}{rank}", size, {}),
        (f"{root}/v1/contributions/{learner}/0/{attempt}{rank}", size, {}),
        (f"{root}/v1/contributions/nobody/{number}/{attempt}{rank}", size, {}),
        (url, size + 1, {}),
        (url, size, {"Atoll-Digest": "0" * 32}),
        (url, size, {}),
        (f"{root}/v1/initial/{learner}/0{rank}", size, {}),
    ):
        await _ask(send, "PUT", way, data=bytes(data), headers={**right, **more})
    for place in ("99", f"0?learner={learner}&rank=9", "0?learner=nobody&rank=0", "0?codec=zip", "0?have=x"):
        await _ask(send, "GET", f"{root}/v1/fragments/{place}", headers=right)


async def _ask(send: Callable[..., Any], method: str, url: str, **how: Any) -> None:
    response = await send(method, url, allow_redirects=False, **how)
    await response.read()
    response.close()


def _kind(channel: Any) -> str:
    return "training" if channel.sock.family.name == "AF_UNIX" else "rank"


def _headers(message: Any) -> dict[str, str]:
    """Return the headers of ours that a request or an answer has."""
    names = {name.lower() for name in message.headers if name.lower().startswith("atoll-")} - TIMED
    return {name: message.headers[name] for name in sorted(names)}


def _show(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)


class Finder:
    """Finds these modules as Python does, and changes each once it is loaded."""

    def __init__(self, patches: dict[str, Patch]) -> None:
        self._patches = patches

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name not in self._patches:
            return None
        spec, patch = PathFinder.find_spec(name, path, target), self._patches[name]
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: ModuleType) -> None:
                load(module)
                patch(module)

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec
