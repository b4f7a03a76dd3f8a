"""A real syncer, a real relay and real couriers in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

import pytest
import torch
from tests.courier.conftest import WAIT_S, Run, Stage, Training

from atoll.fabric.address import parse_address
from atoll.fabric.local_secrets import publish_secrets, published_secrets, withdraw_secrets
from atoll.relay.service import RelayService


class Relay:
    """A relay of a run, on a port of its own."""

    def __init__(self, run: Run, name: str, port: int = 0, where: str = "") -> None:
        """`where`: the way to the syncer, unless it is a direct one."""
        self.run, self.said, self.sums = run, [], []  # type: ignore[var-annotated]
        address = parse_address(where or run.url)
        self.service = RelayService(
            address, name=name, host="127.0.0.1", port=port, say=self.said.append, log=self.sums.append
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.ensure_future(self.service.run())
        async with asyncio.timeout(WAIT_S):
            await self.service.connected.wait()
        port = self.service.port.port
        publish_secrets("127.0.0.1", port, published_secrets("127.0.0.1", self.run.service.server.port))

    async def stop(self) -> None:
        """As if it were killed."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError, BaseExceptionGroup):
                await self._task
            self._task = None
            withdraw_secrets("127.0.0.1", self.service.port.port)

    @property
    def url(self) -> str:
        """As its link names them: itself, then the syncer."""
        return f"http://127.0.0.1:{self.service.port.port},{self.run.url}"


class Region(Stage):
    def __init__(self, stack: AsyncExitStack) -> None:
        super().__init__(stack)
        self.stack = stack

    async def relay(self, run: Run, name: str = "eu", port: int = 0, where: str = "") -> Relay:
        relay = Relay(run, name, port, where)
        await relay.start()
        self.stack.push_async_callback(relay.stop)
        return relay

    def learner(self, where: str, name: str, parameters: dict[str, torch.Tensor] | None = None) -> Training:
        own = parameters or {"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([[4.0, 5.0], [6.0, 7.0]])}
        training = Training(where, {key: value.clone() for key, value in own.items()}, name)
        self.close_after(training)
        return training


@pytest.fixture
async def region() -> AsyncIterator[Region]:
    async with AsyncExitStack() as stack:
        yield Region(stack)
