"""A syncer's port with TLS and a token, as it is for learners on other machines; a desk in memory behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.fabric.conftest import MemoryDesk

from atoll.fabric.address import SyncerAddress
from atoll.fabric.authorizer import TokenAuthorizer
from atoll.fabric.certificates import fingerprint, make_server
from atoll.fabric.join_tokens import JoinToken, JoinTokens, Role
from atoll.fabric.server import Server
from atoll.fabric.tls import server_context

SECRET = "5ec7e7" + 58 * "0"


class SecuredDesk(MemoryDesk):
    def turned_away(self, address: str, reason: str) -> None:
        self.note("turned away", address, reason)


class Secured:
    def __init__(self, server: Server, handlers: SecuredDesk, pin: str) -> None:
        self.server, self.handlers, self.pin = server, handlers, pin

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.server.port}"

    def link(
        self, *, host: str = "127.0.0.1", port: int = 0, more: str = "", secret: str = SECRET, pin: str = ""
    ) -> str:
        """`more`: another address, after the syncer's own."""
        urls = (f"https://{host}:{port or self.server.port}", *([f"https://{more}"] if more else []))
        return SyncerAddress(urls=urls, run="run", token=secret, pin=pin or self.pin).link()


@asynccontextmanager
async def secured_server(
    folder: Path, *, days: float = 30.0, role: Role = "learner", handlers: SecuredDesk | None = None
) -> AsyncIterator[Secured]:
    pair = make_server(["127.0.0.1", "localhost"], days)
    (folder / "cert.pem").write_bytes(pair.certificate)
    (folder / "key.pem").write_bytes(pair.key)
    tokens = JoinTokens([JoinToken(id="join", secret=SECRET, role=role)])
    authorizer, tls = (
        TokenAuthorizer(lambda: tokens, lambda: "run"),
        server_context(folder / "cert.pem", folder / "key.pem"),
    )
    handlers = handlers or SecuredDesk()
    server = Server(handlers, host="127.0.0.1", port=0, authorizer=authorizer, tls=lambda: tls, names=["far.example"])
    await server.start()
    try:
        yield Secured(server, handlers, fingerprint(pair.certificate))
    finally:
        await server.stop()
        await asyncio.sleep(0.01)  # a closed transport lets go of its socket in a later turn of the loop
