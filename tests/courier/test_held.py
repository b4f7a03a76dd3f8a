"""Steps of versions, applied to what a courier holds: the bits of the whole, whatever dtype the tensors have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from tests.courier.conftest import committed_as_held, fetch_and_adopt
from tests.courier.test_body import TENSORS, FakeLink

from atoll.config import Outer
from atoll.courier.body import FragmentTransfers
from atoll.digests import compute_digest
from atoll.fabric.body_meter import PartArrival
from atoll.fabric.transfer import CodedBody, FetchedVersion
from atoll.mailbox.box import Mailbox
from atoll.mailbox.channel import Start
from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import make_plan
from atoll.numerics.shard_plan import PartPlace
from atoll.protocol.errors import PeerError
from atoll.protocol.learner import effects as fx
from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import Settings
from atoll.syncer.parameters import Parameters

LARGE = (TensorSpec("a", (300, 64), "float32"), TensorSpec("b", (300, 64), "bfloat16"))


class SyncerLink(FakeLink):
    """Serves what a syncer's parameters serve."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__()
        self.parameters = parameters
        self.asked: list[tuple[int, int]] = []
        """Fragment and version held, of every request."""
        self.other_base = False

    async def get_fragment(
        self,
        index: int,
        into: memoryview,
        deadline_s: float,
        learner: str = "",
        rank: int = -1,
        least: int = -1,
        part: PartArrival | None = None,
        coded: CodedBody | None = None,
    ) -> tuple[int, int, str]:
        self.asked.append((index, -1))
        served = self.parameters.serve_fragment(index)
        served.release()
        into.cast("B")[:] = served.data.cast("B")
        return served.version, served.round, served.digest

    async def get_version(
        self,
        index: int,
        have: int,
        step_bytes: int,
        into: memoryview,
        deadline_s: float,
        least: int = -1,
        part: PartArrival | None = None,
    ) -> FetchedVersion:
        self.asked.append((index, have))
        served = self.parameters.serve_fragment(index, have)
        served.release()
        if served.steps:
            assert all(len(step) == step_bytes for _, step in served.steps)
            return FetchedVersion(served.version, served.digest, tuple(step for _, step in served.steps))
        into.cast("B")[:] = served.data.cast("B")
        return FetchedVersion(served.version, served.digest)


class HeldVersions:
    def __init__(self, tasks: asyncio.TaskGroup, tensors: tuple[TensorSpec, ...], version_codec: str) -> None:
        fragments = len(tensors)
        self.settings = Settings(fragments=fragments, sync_every=fragments, overlap=1, version_codec=version_codec)
        self.plan = make_plan(tensors, fragments)
        self.parameters = Parameters(self.plan, Outer(merge="mean"), version_codec)
        self.dice = np.random.default_rng(1)
        for part in self.plan.fragments:
            values = self.dice.standard_normal(part.size).astype(np.float32)
            self.parameters.put_initial(part.index, values, compute_digest(values.view(np.uint8).data))
        self.parameters.commit_initial()
        self.link = SyncerLink(self.parameters)
        self.box = Mailbox.create(self.plan, self.settings.resolved(fragments))
        self.events: asyncio.Queue[fx.LearnerEvent] = asyncio.Queue()
        start = Start("learner-0", "session", "", tensors)
        settings = self.settings.resolved(fragments)
        self.bodies = FragmentTransfers(self.box, self.link, settings, start, self._tell, tasks)  # type: ignore[arg-type]
        self.slots: dict[int, int] = {}

    def _tell(self, event: fx.LearnerEvent) -> None:
        if isinstance(event, fx.Arriving):
            return
        if isinstance(event, fx.Fetched):
            self.slots[event.fragment] = self.bodies.incoming.landed.pop(event.fragment)
        self.events.put_nowait(event)

    def round(self, fragment: int) -> None:
        delta = self.dice.standard_normal(self.plan.fragments[fragment].size).astype(np.float32)
        self.parameters.stage_merge(fragment, [delta], [1.0])
        version = self.parameters.committed_buffers()[fragment].version + 1
        self.parameters.commit_version(fragment, version, version)

    async def fetch(self, fragment: int) -> FloatArray:
        return await fetch_and_adopt(self.bodies, self.box, self.slots, fragment, self.events.get())

    def due(self, fragment: int) -> FloatArray:
        return committed_as_held(self.parameters, fragment)


@asynccontextmanager
async def place(tensors: tuple[TensorSpec, ...] = TENSORS, version_codec: str = "int4") -> AsyncIterator[HeldVersions]:
    async with asyncio.TaskGroup() as tasks:
        made = HeldVersions(tasks, tensors, version_codec)
        yield made
        made.bodies.close()
        made.box.close()


def whole(here: HeldVersions, fragment: int = 0) -> PartPlace:
    part = here.plan.fragments[fragment]
    return PartPlace(1, part, slice(0, part.size))


@pytest.mark.parametrize("tensors", [TENSORS, LARGE])
@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "topk"])
async def test_whole_at_first_then_steps_and_the_model_has_the_bits_of_the_whole(
    tensors: tuple[TensorSpec, ...], codec: str
) -> None:
    """float32, bfloat16 and float16: what is adopted is Θ rounded, and never what was rounded before minus a step."""
    async with place(tensors, codec) as here:
        for fragment in range(len(tensors)):
            for behind in (0, 1, 1, 3, 1, 9):
                for _ in range(behind):
                    here.round(fragment)
                assert (await here.fetch(fragment)).tobytes() == here.due(fragment).tobytes()
                assert here.box.base(fragment).tobytes() == here.due(fragment).tobytes(), "Δ is taken against this"
            assert here.link.asked[0] == (fragment, -1)
            assert [have for _, have in here.link.asked] == [-1, 0, 1, 2, 5, 6]
            here.link.asked.clear()


@pytest.mark.parametrize("tensors", [TENSORS, LARGE])
async def test_steps_that_do_not_fit_what_is_held_are_refused_and_the_whole_is_fetched(
    tensors: tuple[TensorSpec, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    async with place(tensors) as here:
        for fragment in range(2):
            await here.fetch(fragment)
            here.round(fragment)
            here.box.base(fragment)[0] += 1.0
            if fragment in here.bodies._held._unrounded:
                here.bodies._held._unrounded[fragment][0] += 1.0
            here.link.asked.clear()
            assert (await here.fetch(fragment)).tobytes() == here.due(fragment).tobytes()
            assert here.link.asked == [(fragment, 0), (fragment, -1)]
    assert "fragment 1 is fetched whole: its steps do not fit version 0" in capfd.readouterr().err


async def test_after_a_forget_everything_comes_whole(capfd: pytest.CaptureFixture[str]) -> None:
    """What was asked for before it is refused too: the base has no version any more."""
    async with place() as here:
        await here.fetch(0)
        here.round(0)
        assert here.bodies._held.apply_steps(whole(here), 1, [], np.zeros(4, np.float32), "") is False
        here.box.base_version[:] = -1
        here.link.asked.clear()
        await here.fetch(0)
        assert here.link.asked == [(0, -1)]


async def test_with_fp32_nothing_is_held_and_nothing_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    async with place(version_codec="fp32") as here:
        for fragment in range(3):
            await here.fetch(fragment)
            here.round(fragment)
            await here.fetch(fragment)
        assert {have for _, have in here.link.asked} == {-1}
        assert here.bodies._held._unrounded == {}


async def test_a_body_that_is_no_step_is_refused_and_the_whole_is_fetched() -> None:
    async with place() as here:
        await here.fetch(0)
        here.round(0)
        bad = memoryview(bytes([0x00, 0x7F, *bytes(here.bodies._held.step_bytes(whole(here).part) - 2)]))
        into = np.zeros(4, np.float32)
        assert here.bodies._held.apply_steps(whole(here), 0, [bad], into, "") is False


async def test_a_failed_fetch_of_steps_is_told_like_any_other() -> None:
    async with place() as here:
        await here.fetch(0)
        here.round(0)

        async def broken(*args: object) -> FetchedVersion:
            raise PeerError("steps of another digest")

        here.link.get_version = broken  # type: ignore[method-assign]
        here.bodies.fetch(0)
        async with asyncio.timeout(10):
            assert await here.events.get() == fx.FetchFailed(0, "steps of another digest")
