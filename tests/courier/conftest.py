"""A real syncer and a real courier in this process; the test plays the training process at the socket's other end."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll.config import convert
from atoll.courier.body import FragmentTransfers, as_held
from atoll.courier.service import Courier
from atoll.learner.boundary import Boundary
from atoll.learner.moments import InnerMoments
from atoll.learner.peer_state_transfer import PeerOrder, PeerStates
from atoll.learner.trained_model import TorchModel
from atoll.mailbox.box import Mailbox
from atoll.mailbox.channel import (
    CourierChannel,
    DialFailed,
    MailboxReady,
    RunProgress,
    Start,
    StepReport,
    StopOrder,
    ToCourier,
    ToTraining,
    Welcomed,
    decode_to_training,
)
from atoll.numerics.arrays import FloatArray
from atoll.numerics.deltas import as_readable, read_whole
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.effects import Saved, Stepped
from atoll.protocol.messages import TensorSpec
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import acquire
from atoll.syncer.parameters import Parameters
from atoll.syncer.run_store import RunStore
from atoll.syncer.service import SyncerService
from atoll.telemetry.events import EventLog

WAIT_S = 60.0
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Run:
    """A syncer on a free port, with plain sums as its outer step: Θ ← Θ − η · mean(Δ)."""

    def __init__(self, lr: float, port: int, **rules: object) -> None:
        outer = {"merge": "mean", "optimizer": "sgd", "lr": lr, "momentum": 0.0}
        base = {"learners": 1, "fragments": 2, "overlap": 0, "codec": "fp32", "quorum_policy": "minimum"}
        document: dict[str, Any] = {"protocol": {**base, **rules}, "outer": outer, "service": {"port": port}}
        self.events: list[dict[str, Any]] = []
        self.deltas: list[tuple[int, np.ndarray]] = []
        self._news = asyncio.Event()
        log = EventLog(self._note)
        # A thread of a syncer that was killed may still write: what it leaves is not looked at.
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        out = RunDir.create(Path(self._folder.name) / "run")
        self._run_store = RunStore(out, acquire(out.journal))
        self.service = SyncerService(
            convert(document, "the test"), run=f"run-{id(self):x}", events=log, run_store=self._run_store
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.ensure_future(self.service.run(lambda parameters: None))
        async with asyncio.timeout(WAIT_S):
            await self.service.started.wait()

    async def stop(self) -> None:
        """As if it were killed."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError, BaseExceptionGroup):
                await self._task
            await self.service.server.stop()
            self._task = None
            self._run_store.close()
            self._folder.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.service.server.port}"

    def theta(self) -> dict[str, np.ndarray]:
        return {name: values.copy() for name, values in self.service.begun.parameters.tensors_by_name().items()}

    def watch_deltas(self) -> None:
        """Remember every contribution that is merged."""
        parameters = self.service.begun.parameters
        stage = parameters.stage_merge

        def staged(fragment: int, deltas: Any, weights: Any, *more: Any) -> str:
            part = parameters.plan.fragments[fragment]
            self.deltas += [(fragment, read_whole(as_readable(part, delta)).copy()) for delta in deltas]
            return stage(fragment, deltas, weights, *more)

        parameters.stage_merge = staged  # type: ignore[method-assign]

    def _note(self, line: bytes) -> None:
        self.events.append(json.loads(line))
        self._news.set()

    async def until_said(self, kind: str) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_S):
            while not self.said(kind):
                self._news.clear()
                await self._news.wait()
        return self.said(kind)[0]

    def said(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


class Training:
    """What the training process does, one step at a time. What it gives to newcomers is a small model's AdamW."""

    def __init__(
        self, url: str, parameters: dict[str, torch.Tensor], name: str = "learner-0", *, direct: bool = True
    ) -> None:
        self.parameters, self.t, self.tokens = parameters, 0, 0
        tensors = tuple(TensorSpec(n, tuple(p.shape), DTYPES[p.dtype]) for n, p in parameters.items())
        self.start = Start(name, f"session-of-{name}", url, tensors)
        self.box: Mailbox | None = None
        self.boundary: Boundary | None = None
        self.welcomes: list[Welcomed] = []
        self.stops: list[StopOrder] = []
        self.drains: list[fx.AskToLeave] = []
        self.progress: list[RunProgress] = []
        self.done = self.leaving = False
        self.direct = direct
        """Whether newcomers may fetch its state from its courier."""
        self.model = nn.Linear(4, 3)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters())
        self.peers = PeerStates(TorchModel(self.model, self.optimizer), {}, self)  # type: ignore[arg-type]
        self._readable = asyncio.Event()

    # ---- its courier --------------------------------------------------------------------------------------------

    def hire(self) -> None:
        """Start a courier; after the first one, hand it the memory."""
        self.channel, theirs = CourierChannel.pair()
        loop = asyncio.get_running_loop()
        loop.add_reader(self.channel.sock, self._readable.set)
        self.courier = Courier(CourierChannel(theirs), direct=self.direct)
        self.task = asyncio.ensure_future(self.courier.run())
        self.send(
            Start(**{f: getattr(self.start, f) for f in Start.__struct_fields__ if f != "boxed"}, boxed=self.boxed)
        )
        if self.box is not None and self.boundary is not None:
            self.boundary.drop_orders()
            self.peers.courier_died()
            self.send(MailboxReady(self.boundary.settings, self.stepped(), waits=self.peers.waits), self.box.fd)

    @property
    def boxed(self) -> bool:
        return self.box is not None

    async def kill_courier(self) -> None:
        """No goodbye: its tasks end, its sockets close."""
        self.task.cancel()
        with suppress(asyncio.CancelledError, BaseExceptionGroup):
            await self.task
        for session in (self.courier._link._control, self.courier._link._bodies):  # type: ignore[union-attr]
            if session is not None:
                await session.close()
        if self.courier._states is not None:
            await self.courier._states.close()
        self.courier._channel.close()
        self.hang_up()

    def hang_up(self) -> None:
        if self.channel.sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.channel.sock)
        self.channel.close()

    # ---- talking ------------------------------------------------------------------------------------------------

    def send(self, frame: ToCourier, descriptor: int | None = None) -> None:
        self.channel.send(frame, descriptor)

    def take_descriptor(self) -> int:
        return self.channel.take_descriptor()

    def listen(self) -> None:
        self._readable.clear()
        for data in self.channel.receive():
            self.take_frame(decode_to_training(data))

    def take_frame(self, frame: ToTraining) -> None:
        match frame:
            case Welcomed():
                self._welcomed(frame)
            case StopOrder():
                self.stops.append(frame)
            case DialFailed():
                pass  # the courier dials again
            case fx.Save(cut):
                self.send(Saved(cut, self.t, reason="it has no folder"))
            case fx.AskToLeave():
                self.drains.append(frame)
            case RunProgress():
                self.progress.append(frame)
            case order if isinstance(order, PeerOrder):
                self.peers.carry_out(order, self.t)
            case _:
                assert self.boundary is not None
                self.boundary.carry_out(frame)

    def _welcomed(self, frame: Welcomed) -> None:
        self.welcomes.append(frame)
        if self.boundary is not None and self.boundary.settings == frame.settings:
            return
        plan = self.make_plan(frame.settings.fragments)
        self.box = Mailbox.create(plan, frame.settings, ranks=bool(self.start.ranks))
        moments = self.make_moments(plan)
        self.boundary = Boundary(self.box, frame.settings, self.parameters, self, moments=moments)  # type: ignore[arg-type]
        self.send(MailboxReady(frame.settings, self.stepped()), self.box.fd)

    def make_plan(self, fragments: int) -> FragmentPlan:
        """Of what this process holds."""
        return make_plan(self.start.tensors, fragments)

    def make_moments(self, plan: FragmentPlan) -> InnerMoments | None:
        """Those that it shares: none."""
        return None

    async def until(self, true: Callable[[], bool], idle: bool = True) -> None:
        """Serve the courier, between steps, until something is true."""
        async with asyncio.timeout(WAIT_S):
            while not true():
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await self._readable.wait()
                self.listen()
                if idle and self.boundary is not None:
                    self.boundary.serve_orders()

    async def join(self) -> None:
        self.hire()
        await self.until(lambda: self.boundary is not None and self.boundary.recovered and not self.peers.waits)

    def stepped(self, stopped: bool = False) -> Stepped:
        steps = () if self.box is None else tuple(self.box.steps.tolist())
        tokens = () if self.box is None else tuple(self.box.tokens.tolist())
        dropped = () if self.box is None else tuple(self.box.dropped.tolist())
        counted = {"tokens_total": self.tokens, "dropped": dropped}
        return Stepped(self.t, steps, tokens, stopped=stopped, leaving=self.leaving, **counted)

    def step(self, change: float, tokens: int = 10) -> None:
        """Every parameter changes by so much; then the boundary, as the learner does it."""
        assert self.boundary is not None
        self.t, self.tokens = self.t + 1, self.tokens + tokens
        for parameter in self.parameters.values():
            parameter += change
        self.boundary.count_step(self.t, tokens, self.tokens)
        self.listen()
        self.pass_boundary()

    def pass_boundary(self) -> None:
        assert self.boundary is not None
        self.boundary.adopt_ready(self.t)
        self.boundary.make_copies(self.t)
        self.send(StepReport(self.stepped(), self.boundary.epoch))

    def learn(self) -> None:
        """A step of the small model."""
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 4)).square().mean().backward()
        self.optimizer.step()

    def stop(self) -> None:
        assert self.boundary is not None
        self.send(StepReport(self.stepped(stopped=True), self.boundary.epoch))

    def versions(self) -> list[int]:
        assert self.box is not None
        return [int(version) for version in self.box.adopted]


class Stage:
    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def run(self, lr: float = 1.0, port: int = 0, **rules: object) -> Run:
        run = Run(lr, port, **rules)
        await run.start()
        self._stack.push_async_callback(run.stop)
        return run

    def training(
        self,
        run: Run,
        parameters: dict[str, torch.Tensor] | None = None,
        name: str = "learner-0",
        *,
        direct: bool = True,
    ) -> Training:
        own = parameters or {"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([[4.0, 5.0]])}
        training = Training(run.url, own, name, direct=direct)
        self.close_after(training)
        return training

    def close_after(self, training: Training) -> None:
        self._stack.push_async_callback(_over, training)


async def _over(training: Training) -> None:
    training.hang_up()
    async with asyncio.timeout(WAIT_S):
        with suppress(BaseException):
            await training.task
    training.courier._channel.close()
    if training.box is not None:
        training.box.close()


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        yield Stage(stack)


async def fetch_and_adopt(
    bodies: FragmentTransfers, box: Mailbox, slots: Mapping[int, int], fragment: int, told: Awaitable[fx.LearnerEvent]
) -> FloatArray:
    """The values that were handed to the training process. `told`: the next event of these transfers."""
    bodies.fetch(fragment)
    async with asyncio.timeout(10):
        event = await told
    assert isinstance(event, fx.Fetched), event
    values = box.incoming(slots[fragment], fragment).copy()
    copying = bodies.into_base(slots[fragment], fragment, event.version)
    if copying is not None:
        await copying
    bodies.finish_adoption(slots[fragment], fragment)
    return values


def committed_as_held(parameters: Parameters, fragment: int) -> FloatArray:
    """The committed version of a fragment, as the tensors can hold it."""
    values = parameters.committed_buffers()[fragment].values.copy()
    as_held(parameters.plan.fragments[fragment], values)
    return values
