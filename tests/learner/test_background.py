"""Copies that take time: the courier hears of one at once, and a version is on its way before the next boundary."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from tests.learner.small import boxed

from atoll.learner import boundary as module
from atoll.learner.boundary import Boundary
from atoll.learner.courier_process import CourierProcess
from atoll.learner.offload import CpuOffload
from atoll.mailbox.channel import AdoptOrder, CopyMade, CourierChannel, ReadOrder, RunProgress, decode_to_courier
from atoll.protocol.learner import effects as fx

PATIENCE_S = 20.0


class Copy:
    """Done when the test says so."""

    failed, feedback = False, -1

    def __init__(self) -> None:
        self.over = threading.Event()

    def done(self) -> bool:
        return self.over.is_set()

    def wait(self) -> None:
        assert self.over.wait(PATIENCE_S)


class SlowOffload(CpuOffload):
    takes_time = True

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.reads: list[Copy] = []
        self.brought: dict[int, Copy] = {}
        self.threads: list[str] = []
        self.begun = threading.Event()
        self.released: list[int] = []

    def enter_thread(self) -> None:
        self.threads.append(threading.current_thread().name)

    def read(self, fragment: int, slot: int, t: int, moments: None = None) -> Copy:
        super().read(fragment, slot, t)
        self.reads.append(Copy())
        return self.reads[-1]

    def bring(self, fragment: int, slot: int, *, moments: bool = False) -> Copy:
        assert slot not in self.brought, "one copy per version"
        self.brought[slot] = Copy()
        self.begun.set()
        return self.brought[slot]

    def release(self, fragment: int, slot: int) -> None:
        self.released.append(slot)


class BackgroundBoundary:
    """A training process of two fragments, and the courier's end of its socket in the test's hands."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.process = CourierProcess()
        ours, theirs = CourierChannel.pair()
        self.process._channel, self.courier = ours, CourierChannel(theirs)
        self.w = {"w0": torch.tensor([1.0]), "w1": torch.tensor([2.0])}
        self.box, settings = boxed(self.w, 2)
        monkeypatch.setattr(module, "make_offload", SlowOffload)
        self.boundary = Boundary(self.box, settings, self.w, self.process)
        offload = self.boundary._offload
        assert isinstance(offload, SlowOffload)
        self.offload = offload
        self.boundary.carry_out(fx.Own())
        self.t = 0

    def step(self) -> None:
        self.t += 1
        self.boundary.count_step(self.t, 10)
        for frame in self.process.receive():
            self.boundary.carry_out(frame)
        self.boundary.adopt_ready(self.t)
        self.boundary.make_copies(self.t)

    def hear(self) -> list[object]:
        """What the courier is told, once something is."""
        self.courier.sock.setblocking(True)
        self.courier.sock.settimeout(PATIENCE_S)
        return [decode_to_courier(data) for data in self.courier.receive()]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[BackgroundBoundary]:
    made = BackgroundBoundary(monkeypatch)
    yield made
    for copy in [*made.offload.reads, *made.offload.brought.values()]:
        copy.over.set()
    made.process.close()
    made.courier.close()
    made.boundary.close()
    assert not [one for one in threading.enumerate() if one.name == "atoll-frames"]


def test_a_copy_is_told_between_two_boundaries(place: BackgroundBoundary) -> None:
    place.boundary.carry_out(ReadOrder(slot=3, round=0, fragment=0, step=1))
    place.step()
    assert not place.offload.reads[0].done()
    place.offload.reads[0].over.set()  # the training thread does nothing meanwhile
    [told] = place.hear()
    assert isinstance(told, CopyMade) and (told.slot, told.t, told.steps) == (3, 1, 1)


def test_copies_are_told_in_order(place: BackgroundBoundary) -> None:
    place.boundary.carry_out(ReadOrder(slot=0, round=0, fragment=0, step=1))
    place.boundary.carry_out(ReadOrder(slot=1, round=1, fragment=1, step=1))
    place.step()
    for copy in reversed(place.offload.reads):
        copy.over.set()
    told: list[object] = []
    while len(told) < 2:
        told += place.hear()
    assert [one.round for one in told if isinstance(one, CopyMade)] == [0, 1]


def test_a_version_is_on_its_way_before_the_next_boundary_and_adopted_there(place: BackgroundBoundary) -> None:
    place.step()
    place.box.incoming(0, 0)[:] = 7.0
    place.courier.send(AdoptOrder(0, 0, 1, 0, "overwrite", 0.5, 0))
    assert place.offload.begun.wait(PATIENCE_S), "the training thread is in the middle of its step"
    place.offload.brought[0].over.set()
    place.process.wait(PATIENCE_S)
    assert place.w["w0"].tolist() == [1.0], "nothing changes inside a step"
    place.step()
    assert place.w["w0"].tolist() == [7.0]
    assert place.box.adopted.tolist() == [1, 0] and place.offload.released == [0]


def test_a_version_that_is_still_on_its_way_is_taken_at_a_later_boundary(place: BackgroundBoundary) -> None:
    place.box.incoming(0, 0)[:] = 7.0
    place.courier.send(AdoptOrder(0, 0, 1, 0, "overwrite", 0.5, 0))
    place.process.wait(PATIENCE_S)
    place.step()
    assert place.w["w0"].tolist() == [1.0]
    place.offload.brought[0].over.set()
    place.step()
    assert place.w["w0"].tolist() == [7.0]


def test_frames_keep_their_order_and_wake_who_waits(place: BackgroundBoundary) -> None:
    for committed in range(50):
        place.courier.send(RunProgress(committed))
    found: list[object] = []
    while len(found) < 50:
        place.process.wait(PATIENCE_S)
        found += place.process.receive()
    assert found == [RunProgress(committed) for committed in range(50)]


def test_a_courier_that_dies_leaves_no_thread_and_no_version_behind(place: BackgroundBoundary) -> None:
    place.box.incoming(0, 0)[:] = 7.0
    place.courier.send(AdoptOrder(0, 0, 1, 0, "overwrite", 0.5, 0))
    assert place.offload.begun.wait(PATIENCE_S)
    place.courier.close()
    reader = place.process._reader
    assert reader is not None
    reader.join(PATIENCE_S)
    assert not place.process.alive
    place.offload.brought[0].over.set()
    place.boundary.drop_orders()
    place.step()
    assert place.w["w0"].tolist() == [1.0]


def test_an_error_of_the_thread_is_the_training_threads(
    place: BackgroundBoundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(order: AdoptOrder) -> None:
        raise RuntimeError("the device is gone")

    place.process.read_in_background(breaks)
    place.courier.send(AdoptOrder(0, 0, 1, 0, "overwrite", 0.5, 0))
    place.process.wait(PATIENCE_S)
    with pytest.raises(RuntimeError, match="the device is gone"):
        place.process.receive()


def test_both_threads_enter_the_device_by_themselves(place: BackgroundBoundary) -> None:
    place.boundary.carry_out(ReadOrder(slot=3, round=0, fragment=0, step=1))
    place.step()
    place.offload.reads[0].over.set()
    place.hear()
    assert set(place.offload.threads) == {"atoll-copies", "atoll-frames"}
