"""Bodies between shared memory and a link that the test plays."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from atoll.courier import body as module
from atoll.courier.body import FragmentTransfers
from atoll.digests import compute_digest
from atoll.fabric.bodies import BodyConnection
from atoll.fabric.body_meter import PartArrival
from atoll.fabric.transfer import CodedBody, SentBody
from atoll.mailbox.box import Mailbox
from atoll.mailbox.channel import Start
from atoll.numerics.codec import Delta, body_nbytes, encode_contribution, make_codec
from atoll.numerics.fragments import make_plan
from atoll.protocol.errors import AtollError, PeerError, Unreachable
from atoll.protocol.learner import effects as fx
from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import Settings

TENSORS = (TensorSpec("a", (1, 4), "float32"), TensorSpec("b", (2,), "bfloat16"), TensorSpec("c", (2,), "float16"))


class FakeLink(BodyConnection):
    """Answers with `errors` first, then with success."""

    up = True  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9")
        self.errors: list[AtollError] = []
        self.contributions: dict[tuple[int, int], bytes] = {}
        self.initial: list[int] = []
        self.fragment = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)
        self.received_s: float | None = 0.0
        """What it says of every body; 0: it came in one piece."""
        self.open = asyncio.Event()
        self.open.set()

    async def _through(self) -> None:
        await self.open.wait()
        if self.errors:
            raise self.errors.pop(0)

    async def _put(
        self, path: str, rank: int, data: memoryview, headers: dict[str, str], deadline_s: float, codec: str = ""
    ) -> SentBody:
        await self._through()
        match path.split("/"):
            case ["contributions", _, round, attempt]:
                self.contributions[int(round), int(attempt)] = bytes(data)
            case ["initial", _, fragment]:
                self.initial.append(int(fragment))
        return SentBody(self.received_s, 0.0)

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
        await self._through()
        into[:] = self.fragment.view(np.uint8).data[: into.nbytes]
        return 7, 21, "digest"


class PlainTransfers:
    def __init__(self, tasks: asyncio.TaskGroup, codec: str) -> None:
        settings = Settings(fragments=3, sync_every=3, overlap=1, codec=codec).resolved(3)  # type: ignore[arg-type]
        self.box = Mailbox.create(make_plan(TENSORS, 3), settings)
        self.link = FakeLink()
        self.events: asyncio.Queue[fx.LearnerEvent] = asyncio.Queue()
        self.takes = True
        self.arriving = 0
        start = Start("learner-0", "session", "", TENSORS)
        self.bodies = FragmentTransfers(self.box, self.link, settings, start, self._tell, tasks)

    def _tell(self, event: fx.LearnerEvent) -> None:
        if isinstance(event, fx.Arriving):
            self.arriving += 1
            return
        self.events.put_nowait(event)
        if isinstance(event, fx.Fetched) and self.takes:
            self.bodies.incoming.landed.pop(event.fragment)

    def copy(self, fragment: int, t: int, value: float) -> None:
        slot = self.bodies.outgoing.take_slot(urgent=True)
        assert slot is not None
        self.box.outgoing(slot, fragment)[:] = value
        self.bodies.outgoing.add_copy(fragment, t, slot, 1, 1)

    async def told(self) -> fx.LearnerEvent:
        async with asyncio.timeout(10):
            return await self.events.get()

    def free_incoming(self) -> int:
        return self.bodies.incoming._free.qsize()


@asynccontextmanager
async def place(codec: str = "fp32") -> AsyncIterator[PlainTransfers]:
    async with asyncio.TaskGroup() as tasks:
        made = PlainTransfers(tasks, codec)
        yield made
        made.bodies.close()
        made.box.close()


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
async def test_an_answer_is_base_minus_copy(codec: str) -> None:
    async with place(codec) as here:
        here.box.base(0)[:] = [1.0, 2.0, 3.0, 4.0]
        here.copy(0, 5, 0.5)
        here.bodies.upload(9, 1, 0)
        here.box.base(0)[:] = 0.0  # a base that changes afterwards changes nothing
        sent = await here.told()
        data = here.link.contributions[9, 1]
        assert sent == fx.Uploaded(9, 1, compute_digest(data), len(data))
        if codec == "fp32":
            assert np.frombuffer(data, np.float32).tolist() == [0.5, 1.5, 2.5, 3.5]
        else:
            halves = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
            assert halves.view(np.float32).tolist() == [0.5, 1.5, 2.5, 3.5]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", ["int4", "topk"])
async def test_what_an_answer_leaves_out_goes_with_the_next_once_it_is_merged(
    monkeypatch: pytest.MonkeyPatch, name: str, large: bool
) -> None:
    if large:
        monkeypatch.setattr(module, "SMALL_BYTES", 0)
    async with place(name) as here:
        codec, part = make_codec(name), here.box.plan.fragments[0]
        base = np.array([1.0, 2.0, 3.0, 5.5], dtype=np.float32)
        bodies, rests = [], []
        for feedback in (None, None, 0):
            rest, body = np.empty(4, np.float32), np.empty(body_nbytes(codec, part), np.uint8)
            given = None if feedback is None else rests[feedback]
            encode_contribution(codec, part, Delta(base, np.full(4, 0.3, np.float32), given, rest), body)
            bodies.append(body.tobytes())
            rests.append(rest)
        assert bodies[2] != bodies[0]
        here.box.base(0)[:] = base
        for attempt, settled in enumerate([False, True, False]):
            here.copy(0, 5 + attempt, 0.3)
            here.bodies.upload(9, attempt, 0)
            assert isinstance(await here.told(), fx.Uploaded)
            assert here.link.contributions[9, attempt] == bodies[attempt]
            if settled:
                here.bodies.feedback.settle(0, 1, 5 + attempt)
                here.box.base_version[0] = 1


async def test_without_memory_for_what_it_leaves_out_an_answer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async with place("topk") as here:
        monkeypatch.setattr(here.bodies.feedback, "take_buffer", lambda fragment, t: None)
        here.copy(0, 5, 0.5)
        here.bodies.upload(9, 1, 0)
        assert await here.told() == fx.UploadFailed(9, 1, "there is no memory for what it leaves out")
        monkeypatch.undo()
        here.bodies.upload(9, 2, 0)
        assert isinstance(await here.told(), fx.Uploaded), "its body's buffer came back"


async def test_a_copy_whose_answer_is_in_the_model_is_given_to_a_probe_and_changes_nothing() -> None:
    async with place("topk") as here:
        here.copy(0, 5, 0.5)
        here.bodies.upload(9, 1, 0)
        assert isinstance(await here.told(), fx.Uploaded)
        here.bodies.feedback.settle(0, 1, 5)
        before = here.box.rest_tag.tolist()
        here.bodies.upload(10, 0, 0)
        assert isinstance(await here.told(), fx.Uploaded)
        assert here.box.rest_tag.tolist() == before


@pytest.mark.parametrize("error", [PeerError("not asked for"), Unreachable("gone")])
async def test_an_answer_that_does_not_arrive_is_told(error: AtollError) -> None:
    async with place() as here:
        here.link.errors = [error]
        here.copy(0, 5, 0.5)
        here.bodies.upload(9, 1, 0)
        assert await here.told() == fx.UploadFailed(9, 1, str(error))


async def test_without_a_copy_or_a_buffer_the_answer_fails_and_nothing_else() -> None:
    async with place() as here:
        here.bodies.upload(9, 1, 0)
        assert await here.told() == fx.UploadFailed(9, 1, "its copy gave way to newer ones", no_copy=True)
        here.link.open.clear()
        here.copy(0, 5, 0.5)
        most = 2 * here.box.layout.fragments
        for attempt in range(most + 1):
            here.bodies.upload(9, attempt, 0)
        assert await here.told() == fx.UploadFailed(9, most, "earlier answers are still on their way")
        here.link.open.set()
        assert {type(await here.told()) for _ in range(most)} == {fx.Uploaded}
        here.bodies.upload(9, most + 1, 0)
        assert isinstance(await here.told(), fx.Uploaded), "buffers come back"


async def test_version_0_is_every_base_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    async with place() as here:
        here.link.errors = [Unreachable("once"), Unreachable("twice")]
        here.bodies.upload_all()
        await done(here)
        assert sorted(here.link.initial) == [0, 1, 2]


async def test_version_0_that_is_not_taken_now_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.courier.body.RETRY_S", 0.0)
    async with place() as here:
        here.link.errors = [PeerError("an older one is still on its way")]
        here.bodies.upload_all()
        await done(here)
        assert sorted(here.link.initial) == [0, 1, 2]


async def test_version_0_is_given_up_once_there_is_something_to_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.courier.body.RETRY_S", 0.0)
    async with place() as here:
        here.link.errors = [PeerError("another was asked")] * 1000
        here.bodies.upload_all()
        await asyncio.sleep(0)
        here.link.errors = []
        here.link.open.clear()
        here.bodies.fetch(0)
        here.link.open.set()
        await done(here)
        assert here.link.initial == []


async def test_version_0_is_sent_by_one_at_a_time() -> None:
    async with place() as here:
        here.link.open.clear()
        here.bodies.upload_all()
        await asyncio.sleep(0)
        here.bodies.upload_all()
        here.link.open.set()
        await done(here)
        assert here.link.initial == [0, 1, 2]


async def done(here: PlainTransfers) -> None:
    async with asyncio.timeout(10):
        await asyncio.gather(*here.bodies._running, return_exceptions=True)


async def test_a_fetched_version_waits_in_its_slot_and_becomes_the_base_when_taken() -> None:
    async with place() as here:
        free, here.takes = here.free_incoming(), True
        slots: list[int] = []
        tell = here._tell

        def note(event: fx.LearnerEvent) -> None:
            if isinstance(event, fx.Fetched):
                slots.append(here.bodies.incoming.landed[0])
            tell(event)

        here.bodies._tell = note
        here.bodies.fetch(0)
        assert await here.told() == fx.Fetched(0, 7)
        assert here.arriving == 1
        [slot] = slots
        assert here.box.incoming(slot, 0).tolist() == [1.0, 2.0, 3.0, 4.0]
        assert here.free_incoming() == free - 1
        here.bodies.into_base(slot, 0, 7)
        assert here.box.base(0).tolist() == [1.0, 2.0, 3.0, 4.0]
        assert here.box.base_version[0] == 7
        here.bodies.finish_adoption(slot, 0)
        assert here.free_incoming() == free


# ---- large fragments: every one is, here ---------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every fragment counts as large, and nothing is encoded before this is set."""
    monkeypatch.setattr(module, "SMALL_BYTES", 0)
    gate, encode = threading.Event(), module.encode_contribution

    def late(*given: object) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert gate.wait(10)
        encode(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "encode_contribution", late)
    yield gate
    gate.set()


async def test_a_base_is_replaced_only_behind_the_answers_that_were_begun_on_it(gate: threading.Event) -> None:
    async with place() as here:
        here.box.base(0)[:] = [1.0, 2.0, 3.0, 4.0]
        here.box.base_version[0] = 6
        here.copy(0, 5, 0.5)
        here.bodies.upload(9, 1, 0)
        slot = await here.bodies.incoming.take_slot()
        here.box.incoming(slot, 0)[:] = 0.0
        copying = here.bodies.into_base(slot, 0, 7)
        assert copying is not None
        for _ in range(10):
            await asyncio.sleep(0)
        assert here.box.base(0).tolist() == [1.0, 2.0, 3.0, 4.0] and here.box.base_version[0] == 6
        here.bodies.upload(21, 1, 0)
        assert await here.told() == fx.UploadFailed(21, 1, "the version it was made on is being replaced")
        gate.set()
        assert isinstance(await here.told(), fx.Uploaded)
        assert np.frombuffer(here.link.contributions[9, 1], np.float32).tolist() == [0.5, 1.5, 2.5, 3.5]
        await copying
        assert here.box.base(0).tolist() == [0.0] * 4 and here.box.base_version[0] == 7
        here.copy(0, 6, 0.5)
        here.bodies.upload(22, 1, 0)
        assert isinstance(await here.told(), fx.Uploaded), "it may be answered on the new one"
        assert np.frombuffer(here.link.contributions[22, 1], np.float32).tolist() == [-0.5] * 4


async def test_a_slot_is_not_used_again_while_a_thread_encodes_from_it(gate: threading.Event) -> None:
    async with place() as here:
        here.copy(0, 5, 0.5)
        slot, free = here.bodies.outgoing.copies[0, 5], len(here.bodies.outgoing.free)
        here.bodies.upload(9, 1, 0)
        here.bodies.upload(9, 2, 0)
        here.bodies.outgoing.clear()
        assert slot not in here.bodies.outgoing.free and len(here.bodies.outgoing.free) == free
        gate.set()
        assert {type(await here.told()) for _ in range(2)} == {fx.Uploaded}
        assert here.bodies.outgoing.free.count(slot) == 1, "free again, once"


async def test_a_version_is_not_offered_before_the_base_under_it_is_whole(gate: threading.Event) -> None:
    async with place() as here:
        here.copy(0, 5, 0.5)
        here.bodies.upload(9, 1, 0)
        slot = await here.bodies.incoming.take_slot()
        assert here.bodies.into_base(slot, 0, 6) is not None
        here.bodies.fetch(0)
        await asyncio.wait(here.bodies._running, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
        assert here.events.empty()
        gate.set()
        assert isinstance(await here.told(), fx.Uploaded)
        assert await here.told() == fx.Fetched(0, 7) and here.box.base_version[0] == 6


async def test_a_version_that_nobody_wants_gives_its_slot_back() -> None:
    async with place() as here:
        here.takes = False
        free = here.free_incoming()
        for _ in range(free + 3):
            here.bodies.fetch(0)
            assert await here.told() == fx.Fetched(0, 7)
        await done(here)
        assert here.free_incoming() == free


async def test_a_fetch_that_fails_gives_its_slot_back() -> None:
    async with place() as here:
        free = here.free_incoming()
        here.link.errors = [Unreachable("gone")]
        here.bodies.fetch(1)
        assert await here.told() == fx.FetchFailed(1, "gone")
        assert here.free_incoming() == free


@pytest.mark.parametrize("fragment", [1, 2])
async def test_a_version_is_rounded_to_what_the_tensors_can_hold(fragment: int) -> None:
    async with place() as here:
        here.takes = False
        here.link.fragment = np.array([1.0 + 2**-12, 0.1], dtype=np.float32)
        [piece] = here.box.plan.fragments[fragment].pieces
        seen: list[list[float]] = []

        def note(event: fx.LearnerEvent) -> None:
            if isinstance(event, fx.Fetched):
                seen.append(here.box.incoming(here.bodies.incoming.landed[fragment], fragment).tolist())

        here.bodies._tell = note
        here.bodies.fetch(fragment)
        await done(here)
        [values] = seen
        assert values[0] == 1.0
        assert values[1] == (0.10009765625 if piece.tensor.dtype == "bfloat16" else 0.0999755859375)


async def test_memory_made_anew_lets_what_was_on_its_way_be_fetched_again() -> None:
    async with place() as here:
        here.link.open.clear()
        here.bodies.fetch(2)
        here.bodies.fetch(0)
        await asyncio.sleep(0)
        here.bodies.retire()
        assert [await here.told(), await here.told()] == [
            fx.FetchFailed(0, "the shared memory was made anew"),
            fx.FetchFailed(2, "the shared memory was made anew"),
        ]
