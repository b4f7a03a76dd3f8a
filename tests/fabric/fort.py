"""A syncer as it stands in the open: TLS, tokens, a dashboard, one honest learner; and what an attacker has against it.

`digest` is of everything that must not change: parameters and outer state, versions, the records' own state (ledger,
leases, lives, settings), what is usual, and the bytes of the journal. `unharmed` compares it, and asks the honest
learner and its syncer whether they still speak.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import msgspec
import numpy as np
from tests.syncer.conftest import WAIT_S, FakeLearner, Stage

from atoll.digests import compute_digest
from atoll.fabric.address import SyncerAddress
from atoll.fabric.certificates import CertificateAndKey, fingerprint, make_authority, make_client, make_server
from atoll.fabric.join_tokens import JoinToken, JoinTokens, new_secret
from atoll.fabric.tls import client_context
from atoll.fabric.wire import FabricLimits
from atoll.observe.dashboard import Dashboard
from atoll.protocol.messages import Heartbeat, Pull, Refused
from atoll.store.keys import KeyDir
from atoll.syncer.credentials import write_tokens

HONEST = "honest"
SHORT = FabricLimits(
    header_s=1.0, hello_s=3.0, body_grace_s=0.4, body_idle_s=0.4, flush_s=0.3, messages_rate=50, strangers=64
)
"""Deadlines that a test can wait for."""


def token(id: str, **more: Any) -> JoinToken:
    return JoinToken(id=id, secret=new_secret(), **more)


TOKENS = {
    one.id: one
    for one in (
        token("join"),
        token("eu", learner="eu-*", most=2),
        token("look", role="viewer"),
        token("boss", role="operator"),
        token("score", role="evaluator"),
        token("other", role="evaluator"),
        token("few", names=2),
        token("gone", revoked=True),
        token("over", expires=1.0),
    )
}
STRANGE = token("strange")
"""Of another run: nobody knows it here."""


class Fort:
    def __init__(self, stage: Stage, folder: Path, stack: AsyncExitStack) -> None:
        self.stage, self.folder, self._stack = stage, folder, stack
        self.keys = KeyDir.create(folder / "keys")
        self.authority = make_authority(1.0)
        pair = make_server(["localhost", "127.0.0.1"], 1.0, self.authority)
        self.write("syncer", pair)
        self.write("ca", self.authority)
        write_tokens(self.keys, JoinTokens(TOKENS.values()))
        self.pin = fingerprint(pair.certificate)

    def write(self, name: str, pair: CertificateAndKey) -> tuple[Path, Path]:
        certificate, key = self.keys.path / f"{name}.crt", self.keys.path / f"{name}.key"
        self.keys.write(certificate, pair.certificate)
        self.keys.write(key, pair.key)
        return certificate, key

    def of_learner(self, name: str, authority: CertificateAndKey | None = None) -> tuple[Path, Path]:
        return self.write(name, make_client(name, 1.0, authority or self.authority))

    async def open(self, limits: FabricLimits = SHORT, *, mutual: bool = False) -> None:
        """Its honest learner has given the first parameters, and makes no step unless it is told to."""
        service = {"keys": str(self.keys.path), "mutual": mutual, "advertise": ["syncer.example.org:7077"]}
        pages = Dashboard(self.stage.out.events)
        await self.stage.open(service, limits, pages, quorum=2, pull_floor_s=WAIT_S)  # no round fails meanwhile
        looking = asyncio.create_task(pages.run(self.stage.service.figures))
        self._stack.callback(looking.cancel)
        self.own = self.of_learner(HONEST) if mutual else ()
        self.honest = self.join(HONEST)
        await self.honest.begin()
        await self.until(lambda: self.machine.members.learners[HONEST].recovered)

    @property
    def machine(self) -> Any:
        machine = self.stage.service._machine
        assert machine is not None
        return machine

    @property
    def port(self) -> int:
        return self.stage.service.server.port

    def link(self, who: str = "join", *, run: str = "r1", host: str = "127.0.0.1", pin: str = "") -> str:
        secret = TOKENS[who].secret if who in TOKENS else STRANGE.secret
        return SyncerAddress(urls=(f"https://{host}:{self.port}",), run=run, token=secret, pin=pin or self.pin).link()

    def join(self, name: str, who: str = "join", where: str = "") -> FakeLearner:
        with _environment(self.own):
            return self.stage.join(name, where=where or self.link(who))

    async def asked(self, name: str = "eu-1") -> tuple[FakeLearner, Pull]:
        """A second learner, by another token, that the syncer asks for a contribution; the honest one lets it wait."""
        rogue = self.join(name, "eu")
        await rogue.begin()
        async with asyncio.timeout(WAIT_S):
            while not (pulls := [one for one in rogue.heard if isinstance(one, Pull)]):
                self.honest.step()
                rogue.step()
                await asyncio.sleep(0.01)
        return rogue, pulls[-1]

    # ---- what an attacker has -------------------------------------------------------------------------------------

    async def request(
        self,
        method: str,
        path: str,
        who: str | None = None,
        headers: dict[str, str] | None = None,
        data: Any = None,
        ssl: ssl.SSLContext | None = None,
    ) -> tuple[int, str]:
        """Its status and reason."""
        shown = {"Authorization": f"Bearer {TOKENS[who].secret}"} if who in TOKENS else {}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(WAIT_S), skip_auto_headers=["Accept-Encoding"]) as http,
            http.request(
                method,
                f"https://127.0.0.1:{self.port}{path}",
                headers={**shown, **(headers or {})},
                data=io.BytesIO(data) if isinstance(data, bytes) else data,
                ssl=ssl or self.context(),
                allow_redirects=False,
            ) as answer,
        ):
            return answer.status, _reason(await answer.read())

    def context(self) -> ssl.SSLContext:
        return client_context(self.pin, None, *self.own)

    async def socket(
        self, who: str | None = "eu", path: str = "/v1/control", **more: Any
    ) -> aiohttp.ClientWebSocketResponse:
        http = await self._stack.enter_async_context(aiohttp.ClientSession())
        shown = {"Authorization": f"Bearer {TOKENS[who].secret}"} if who in TOKENS else {}
        headers = {**shown, **more.pop("headers", {})}
        url = f"https://127.0.0.1:{self.port}{path}"
        return await self._stack.enter_async_context(http.ws_connect(url, ssl=self.context(), headers=headers, **more))

    async def raw(self, *, tls: bool = True) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        more: dict[str, Any] = {"ssl": self.context(), "server_hostname": "localhost"} if tls else {}
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, **more)
        self._stack.push_async_callback(_hung_up, writer)
        return reader, writer

    async def says(self, data: bytes, *, tls: bool = True) -> str:
        """What is answered to these very bytes until the connection is closed."""
        reader, writer = await self.raw(tls=tls)
        writer.write(data)
        async with asyncio.timeout(WAIT_S):
            return (await _all_of(reader)).decode(errors="replace")

    async def put(self, rogue: FakeLearner, pull: Pull, data: bytes, **headers: str) -> str:
        """A body as the rogue's own; why it was not taken."""
        path = headers.pop("path", f"/v1/contributions/{rogue.name}/{pull.round}/{pull.attempt}")
        shown = {"Atoll-Session": rogue.session, "Atoll-Digest": compute_digest(data)}
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        status, reason = await self.request("PUT", path, "eu", {**shown, **named}, data)
        return f"{status} {reason}"

    def values(self, pull: Pull, value: float) -> bytes:
        return np.full(self.honest.plan.fragments[pull.fragment].size, value, np.float32).tobytes()

    # ---- what must not change -------------------------------------------------------------------------------------

    async def digest(self) -> str:
        service = self.stage.service
        await service._effect_queue.wait_until_empty()
        mark = hashlib.sha256()
        for name, array in sorted(service.begun.parameters.hold_arrays().items()):
            mark.update(name.encode() + array.tobytes())
        kept = [
            self.machine.history.state(),
            self.machine.versions,
            self.machine.committed,
            service.begun.screen.usual_norms(),
        ]
        mark.update(msgspec.msgpack.encode([*kept, service._config]))
        for segment in sorted(self.stage.out.journal.glob("segment-*.log")):
            mark.update(segment.read_bytes())
        return mark.hexdigest()

    async def unharmed(self, before: str) -> None:
        """Everything is as it was, and whoever is honest notices nothing."""
        assert await self.digest() == before, "the syncer's state has changed"
        assert self.honest.link.up, "the honest learner was cut off"
        learner = self.machine.members.learners[HONEST]
        heard = learner.last_heard
        assert self.honest.link.send(Heartbeat())
        await self.until(lambda: learner.last_heard > heard)
        status, _ = await self.request("GET", "/v1/status", "join")
        assert status == 200
        assert not any(thing.secret in json.dumps(self.stage.lines) for thing in [*TOKENS.values(), STRANGE])

    async def refusal_of(self, learner: FakeLearner) -> str:
        """What it was told as it was sent away."""
        return (await learner.until(Refused)).reason

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - nobody tells when it becomes true
                await asyncio.sleep(0.002)


@asynccontextmanager
async def fort_in(folder: Path) -> AsyncIterator[Fort]:
    stage = Stage(folder)
    async with asyncio.TaskGroup() as tasks:
        stage._tasks = tasks
        async with AsyncExitStack() as stack:
            yield Fort(stage, folder, stack)
        await stage.end()
    stage.run_store.close()
    for _ in range(3):
        await asyncio.sleep(0)


def _environment(own: Any) -> Any:
    named = dict(zip(("ATOLL_CERT", "ATOLL_KEY"), map(str, own), strict=False))
    return mock.patch.dict(os.environ, named)


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")


async def _all_of(reader: asyncio.StreamReader) -> bytes:
    data = b""
    with suppress(ConnectionError, ssl.SSLError):
        while chunk := await reader.read(65536):
            data += chunk
    return data


async def _hung_up(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()
