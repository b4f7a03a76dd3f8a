"""A syncer's service on a free port of this machine, and learners that are nothing but a link and a memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from atoll.config import Config, convert
from atoll.digests import compute_digest
from atoll.fabric.client import SyncerConnection
from atoll.fabric.handlers import ServedPages
from atoll.fabric.wire import FabricLimits
from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import Delta, body_nbytes, encode_contribution, make_codec
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.protocol.messages import (
    PROTOCOL,
    Announce,
    Contribution,
    FromSyncer,
    Hello,
    Progress,
    Pull,
    RankBoxes,
    Started,
    TensorSpec,
    Welcome,
)
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import acquire
from atoll.syncer.run_store import RunStore
from atoll.syncer.service import SyncerService
from atoll.telemetry.events import EventLog

WAIT_S = 60.0
TENSORS = (TensorSpec("one", (3,), "float32"), TensorSpec("two", (2, 2), "float32"))
M = TypeVar("M", bound=FromSyncer)


def plan(tensors: tuple[TensorSpec, ...] = TENSORS, fragments: int = 2) -> FragmentPlan:
    return make_plan(tensors, fragments, "balanced")


class FakeLearner:
    """Steps, reports and answers pulls when a test says so."""

    def __init__(
        self,
        url: str,
        name: str,
        tensors: tuple[TensorSpec, ...],
        protocol: int = PROTOCOL,
        process: int = 1,
        ranks: tuple[RankBoxes, ...] = (),
    ) -> None:
        self.name, self.session = name, f"session-{process}-of-{name}"
        self.plan, self.codec = plan(tensors), make_codec("fp32")
        self.heard: list[FromSyncer] = []
        self.incarnation = 1
        self.t = 0
        self.versions = [-1] * len(self.plan.fragments)
        self.since = [0] * len(self.plan.fragments)
        """Per fragment, its step when it last adopted it; a step is 8 tokens."""
        self.dropped = [0] * len(self.plan.fragments)
        self._news = asyncio.Event()
        hello = Hello(protocol=protocol, learner=name, session=self.session, tensors=tensors, ranks=ranks)
        self.link = SyncerConnection(
            url,
            hello=lambda: hello,
            on_open=lambda: None,
            on_message=self._hear,
            on_lost=lambda reason: None,
            jitter=lambda: 1.0,
        )

    def _hear(self, message: FromSyncer) -> None:
        self.heard.append(message)
        if isinstance(message, Announce) and message.version > self.versions[message.fragment]:
            self._adopt(message)
        self._news.set()

    def _adopt(self, announce: Announce) -> None:
        fragment = announce.fragment
        held = sum(member.tokens for member in announce.members if member.learner == self.name)
        self.dropped[fragment] += 8 * (self.t - self.since[fragment]) - held
        self.versions[fragment], self.since[fragment] = announce.version, self.t

    async def until(self, kind: type[M], which: Callable[[M], bool] = lambda message: True) -> M:
        async with asyncio.timeout(WAIT_S):
            while True:
                for message in self.heard:
                    if isinstance(message, kind) and which(message):
                        return message
                self._news.clear()
                await self._news.wait()

    async def upload(self, value: float = 1.0, fragments: int | None = None) -> None:
        await self.until(Welcome, lambda welcome: welcome.upload)
        for part in self.plan.fragments[:fragments]:
            data = np.full(part.size, value, dtype=np.float32).view(np.uint8).data
            await self.link.put_initial(self.name, self.session, part.index, data, compute_digest(data), WAIT_S)

    async def begin(self, value: float = 1.0) -> None:
        """Give the first parameters, or take them."""
        if (await self.until(Welcome)).upload:
            await self.upload(value)
            await self.until(Started)
        self.versions = [0] * len(self.versions)
        self.report()

    def step(self) -> None:
        self.t += 1
        self.report()

    def report(self, *, leaving: bool = False, stopped: bool = False) -> None:
        t, steps = self.t, [self.t - since for since in self.since]
        progress = Progress(
            incarnation=self.incarnation,
            t=t,
            steps=tuple(steps),
            tokens=tuple(8 * count for count in steps),
            versions=tuple(self.versions),
            offer=t,
            tokens_total=8 * t,
            busy_s=0.1 * t,
            loss=1.5,
            dropped=tuple(self.dropped),
            counted=tuple(self.versions),
            leaving=leaving,
            stopped=stopped,
        )
        assert self.link.send(progress)

    async def body(self, pull: Pull, delta: float) -> str:
        part = self.plan.fragments[pull.fragment]
        values, body = np.full(part.size, delta, np.float32), np.empty(body_nbytes(self.codec, part), np.uint8)
        encode_contribution(self.codec, part, Delta(values, np.zeros_like(values)), body)
        mark = compute_digest(body.data)
        await self.link.put_contribution(self.name, self.session, pull.round, pull.attempt, body.data, mark, WAIT_S)
        return mark

    async def contribute(self, pull: Pull, delta: float, **changes: Any) -> None:
        t, steps = self.t, self.t - self.since[pull.fragment]
        mark = await self.body(pull, delta)
        welcome = await self.until(Welcome)
        said: dict[str, Any] = {"run": welcome.run, "learner": self.name, "term": welcome.term}
        said |= {"fragment": pull.fragment, "base": self.versions[pull.fragment], "t": t}
        said |= {"steps": steps, "tokens": 8 * steps, "total": 8 * t}
        given = {**said, "digest": mark, "incarnation": self.incarnation, **changes}
        assert self.link.send(Contribution(round=pull.round, attempt=pull.attempt, **given))


class Stage:
    """A service, what it said and saved, and whoever joined it."""

    def __init__(self, path: Path) -> None:
        self.out = RunDir.create(path / "run")
        self.lines: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        self.saved: dict[str, Any] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._learners: list[FakeLearner] = []

    async def open(
        self,
        service: dict[str, Any] | None = None,
        limits: FabricLimits | None = None,
        pages: ServedPages | None = None,
        merge: str = "mean",
        outer: dict[str, Any] | None = None,
        **protocol: Any,
    ) -> SyncerService:
        settings = {"learners": 2, "fragments": 2, "sync_every": 4, "overlap": 1, "codec": "fp32", **protocol}
        step = {"merge": merge, "optimizer": "sgd", "lr": 1.0, "momentum": 0.0, **(outer or {})}
        config: Config = convert({"protocol": settings, "outer": step, "service": service or {}}, "a test")
        self.run_store = RunStore(self.out, acquire(self.out.journal))
        events = EventLog(self._hear)
        self.service = SyncerService(
            config, run="r1", events=events, run_store=self.run_store, pages=pages, limits=limits
        )
        assert self._tasks is not None
        self.running = self._tasks.create_task(self.service.run(self._save))
        async with asyncio.timeout(WAIT_S):
            await self.service.started.wait()
        return self.service

    def _hear(self, line: bytes) -> None:
        self.lines.append(json.loads(line))
        self._news.set()

    def _save(self, tensors: Mapping[str, FloatArray]) -> None:
        self.saved = {name: np.array(values) for name, values in tensors.items()}

    def join(
        self,
        name: str,
        tensors: tuple[TensorSpec, ...] = TENSORS,
        protocol: int = PROTOCOL,
        where: str = "",
        process: int = 1,
    ) -> FakeLearner:
        learner = FakeLearner(where or self.url, name, tensors, protocol, process)
        self.connect(learner)
        return learner

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.service.server.port}"

    def connect(self, learner: FakeLearner) -> None:
        assert self._tasks is not None
        self._tasks.create_task(learner.link.run())
        self._learners.append(learner)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.lines if event["kind"] in kinds]

    async def until(self, kind: str, count: int = 1) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_S):
            while len(self.events(kind)) < count:
                self._news.clear()
                await self._news.wait()
        return self.events(kind)[count - 1]

    async def end(self) -> None:
        """As the operator would; learners leave once they are told."""
        self.service.end("the test is over")
        self.service.unscored()
        for learner in self._learners:
            await learner.link.close()
        async with asyncio.timeout(WAIT_S):
            await self.running


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    async with asyncio.TaskGroup() as tasks:
        stage._tasks = tasks
        yield stage
        if not stage.running.done():
            await stage.end()
    stage.run_store.close()
