"""Copies that are encoded on the device. That their bodies are those of the other placement whatever happens:
tests/courier/test_placements.py."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.learner.small import Remembers, boxed, in_order, reading

from atoll.choices import CODEC
from atoll.learner import device_offload as module
from atoll.learner.boundary import Boundary, adopt
from atoll.learner.device_offload import DeviceOffload
from atoll.learner.offload import READ_STAGES
from atoll.learner.placement import count_rests, device_bytes
from atoll.mailbox.box import Mailbox
from atoll.mailbox.channel import BASE, AdoptOrder, CopyMade, ForgetOrder, ReadOrder, SlotFreed, VersionTaken
from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import Delta, body_nbytes, encode_contribution, make_codec
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.effects import Adopted
from atoll.protocol.tape import AdoptedEntry, shorten_rule

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def expected(box: Mailbox, codec: str, base: FloatArray, theta: FloatArray, fragment: int = 0) -> bytes:
    one, part = make_codec(codec), box.plan.fragments[fragment]
    body = np.empty(body_nbytes(one, part), np.uint8)
    encode_contribution(one, part, Delta(base, theta), body)
    return body.tobytes()


class Tape:
    """In place of a recorder."""

    def __init__(self) -> None:
        self.entries: list[object] = []

    def add(self, entry: object) -> None:
        self.entries.append(entry)


class DeviceBoundary:
    """One fragment of 300 values, all alike."""

    def __init__(self, codec: str = "int8", **settings: object) -> None:
        self.w = torch.full((3, 100), 1.0)
        self.box, rules = boxed({"w": self.w}, 1, on_device=True, codec=codec, **settings)
        self.courier, self.tape = Remembers(), Tape()
        using = (self.courier, self.tape)
        self.boundary = Boundary(self.box, rules, {"w": self.w}, *using)  # type: ignore[arg-type]
        self.boundary.carry_out(fx.Own())
        self.codec, self.t = codec, 0

    def step(self, change: float = 1.0) -> None:
        self.t += 1
        self.w += change
        self.boundary.count_step(self.t, 10)

    def copy(self, slot: int = 0) -> list[object]:
        """What the courier hears of it."""
        self.boundary.carry_out(ReadOrder(slot, self.t, 0, self.t))
        self.boundary.make_copies(self.t)
        self.boundary.settle()
        return list(self.courier.told())

    def adopt(self, value: float, *, version: int = 1, **order: object) -> Adopted:
        """What the courier hears of it."""
        self.box.incoming(0, 0)[:] = value
        asked = {"rule": "carry", "blend": 0.5, "step": 0, **order}
        self.boundary.carry_out(AdoptOrder(0, 0, version, 0, **asked))  # type: ignore[arg-type]
        self.boundary.serve_orders()
        [taken] = self.courier.told()[-1:]
        assert isinstance(taken, VersionTaken)
        return taken.adopted

    def body(self, slot: int = 0) -> bytes:
        return self.box.body(slot, body_nbytes(make_codec(self.codec), self.box.plan.fragments[0])).tobytes()

    def expect(self, base: float, theta: float) -> bytes:
        return expected(self.box, self.codec, np.full(300, base, np.float32), np.full(300, theta, np.float32))


@pytest.fixture
def place() -> Iterator[DeviceBoundary]:
    made = DeviceBoundary()
    yield made
    made.boundary.close()
    made.box.close()


def test_a_copy_lies_encoded_in_its_slot(place: DeviceBoundary) -> None:
    place.step(0.25)
    [copy] = place.copy(slot=2)
    assert copy == CopyMade(2, 1, 0, t=1, steps=1, tokens=10, base=0, epoch=0, feedback=-1)
    assert place.body(2) == place.expect(1.0, 1.25)


def test_training_does_not_encode_itself(place: DeviceBoundary, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    encode = module.encode_contribution
    monkeypatch.setattr(
        module, "encode_contribution", lambda *given: (names.append(threading.current_thread().name), encode(*given))
    )
    place.step()
    place.copy()
    assert names == ["atoll-encoder_0"]


def test_what_was_adopted_is_the_base_of_the_next_copy_and_not_of_the_last(place: DeviceBoundary) -> None:
    place.step(0.5)
    place.boundary.carry_out(ReadOrder(0, 1, 0, 1))
    place.boundary.make_copies(1)
    place.box.incoming(0, 0)[:] = 7.0
    place.boundary.carry_out(AdoptOrder(0, 0, 1, 0, "overwrite", 0.5, 0))
    place.boundary.serve_orders()
    place.box.incoming(0, 0)[:] = -1.0  # the courier uses the slot again
    place.step(0.25)
    place.copy(slot=1)
    assert place.body(0) == place.expect(1.0, 1.5)
    assert place.body(1) == place.expect(7.0, 7.25)


def subtracts(slot: int, t: int, steps: int = 1) -> dict[str, object]:
    """An order to carry that names the copy in this slot."""
    return {"minus": slot, "copy_t": t, "minus_steps": steps, "minus_tokens": 10 * steps, "held_tokens": 10 * steps}


def test_carry_subtracts_the_copy_as_it_was_read(place: DeviceBoundary) -> None:
    place.step(0.25)
    place.copy(slot=2)
    place.step(4.0)
    place.step(8.0)
    adopted = place.adopt(100.0, **subtracts(slot=2, t=1))
    assert (place.w == 112.0).all(), "the version, and the two steps after the copy"
    assert (adopted.steps, adopted.tokens, adopted.dropped) == (2, 20, 0)
    assert place.body(2) == place.expect(1.0, 1.25), "what was sent is the copy too"
    place.copy(slot=1)
    assert place.body(1) == place.expect(100.0, 112.0)


def test_carry_subtracts_the_base_on_the_device_where_the_version_has_no_copy(place: DeviceBoundary) -> None:
    place.step(0.5)
    place.adopt(7.0, rule="overwrite")
    place.step(0.5)
    place.box.base(0)[:] = -1000.0  # not read: it is the same base, in host memory
    place.adopt(20.0, version=2, minus=BASE)
    assert (place.w == 20.5).all()


@pytest.mark.parametrize("gone", ["another copy is in the slot", "it was adopted", "a new courier", "forgotten"])
def test_a_copy_to_subtract_that_is_gone_ends_in_overwrite(
    place: DeviceBoundary, gone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never in the subtraction of what the slot holds by now (docs/bugs.md)."""
    place.step()
    place.copy(slot=2)
    if gone == "another copy is in the slot":
        place.step()
        place.copy(slot=2)
    elif gone == "it was adopted":
        place.adopt(5.0, rule="overwrite")
    elif gone == "a new courier":
        place.boundary.drop_orders()
    else:
        place.boundary.carry_out(ForgetOrder(epoch=1, reset=False))
    place.step()
    adopted = place.adopt(100.0, version=2, **subtracts(slot=2, t=1))
    assert (place.w == 100.0).all()
    assert (adopted.steps, adopted.tokens) == (0, 0)
    assert "the copy to carry on from is gone: fragment 0 is overwritten this once" in capsys.readouterr().err
    assert AdoptedEntry(place.t, 0, 2, shorten_rule("overwrite")) in place.tape.entries, "a replay overwrites too"


@pytest.mark.parametrize("rule", ["overwrite", "blend", "carry"])
def test_copies_are_kept_until_their_fragment_is_adopted_by_whatever_rule(place: DeviceBoundary, rule: str) -> None:
    offload = place.boundary._offload
    assert isinstance(offload, DeviceOffload)
    for slot in range(3):
        place.step()
        place.copy(slot)
    assert sorted(offload._kept) == [0, 1, 2]
    place.adopt(1.0, rule=rule, **(subtracts(slot=1, t=2, steps=2) if rule == "carry" else {}))
    assert not offload._kept
    buffers = place.box.layout.first_outgoing
    assert len(offload._read_stages) == buffers, "no more memory was taken than was counted"


def test_where_the_device_has_no_memory_to_keep_a_copy_it_is_not_made(
    place: DeviceBoundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload, slots = place.boundary._offload, place.box.layout.first_outgoing
    assert isinstance(offload, DeviceOffload)
    for slot in range(slots):
        place.step()
        assert isinstance(place.copy(slot)[0], CopyMade)
    offload._kept[slots] = offload._kept.pop(0)  # as if there were one slot more
    offload._stages_left = 0
    monkeypatch.setattr(module, "is_affordable", lambda need, free: False)
    place.step()
    assert place.copy(slot=0) == [SlotFreed(0, incoming=False)]
    assert isinstance(place.copy(slot=1)[0], CopyMade), "in the place of another copy there is memory"
    monkeypatch.setattr(module, "is_affordable", lambda need, free: True)
    assert isinstance(place.copy(slot=0)[0], CopyMade)
    place.step()
    place.adopt(100.0, **subtracts(slot=0, t=place.t - 1))
    assert (place.w == 101.0).all()


def test_a_run_that_never_carries_keeps_no_copies() -> None:
    place = DeviceBoundary(synchronous=True)
    for slot in range(3):
        place.step()
        place.copy(slot)
    offload = place.boundary._offload
    assert isinstance(offload, DeviceOffload)
    assert not offload._kept and len(offload._read_stages) <= READ_STAGES
    assert place.body(2) == place.expect(1.0, 4.0)
    place.boundary.close()
    place.box.close()


def test_a_base_out_of_a_cut_is_taken_from_shared_memory(place: DeviceBoundary) -> None:
    place.box.base(0)[:] = 3.0
    place.boundary.take_base()
    place.step(0.5)
    place.copy()
    assert place.body() == place.expect(3.0, 1.5)


def test_where_the_device_has_no_memory_for_it_the_order_is_dropped_and_its_slot_free(
    place: DeviceBoundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise torch.OutOfMemoryError("as if")

    place.step()
    with monkeypatch.context() as patch:
        patch.setattr(module, "encode_contribution", refuse)
        assert place.copy(slot=3) == [SlotFreed(3, incoming=False)]
    assert not place.boundary._is_copied(0)
    [copy] = place.copy(slot=3)
    assert isinstance(copy, CopyMade) and place.body(3) == place.expect(1.0, 2.0)


def test_more_rests_than_at_first_are_kept_while_there_is_memory(
    place: DeviceBoundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = count_rests(place.box.layout)
    place.box.rest_tag[:] = -1
    for number in range(first):
        place.step()
        place.box.rest_tag[0] = place.box.tag_rest(0, place.t - 1)  # the last one was sent
        assert isinstance(place.copy(number % place.box.layout.first_outgoing)[0], CopyMade)
    rests = place.boundary._offload._rests  # type: ignore[attr-defined]
    rests._free.clear()
    monkeypatch.setattr(module, "is_affordable", lambda need, free: False)
    place.step()
    rests._in_slot |= {100 + slot: tag for slot, tag in enumerate(rests._held)}
    assert place.copy(slot=1) == [SlotFreed(1, incoming=False)]
    monkeypatch.setattr(module, "is_affordable", lambda need, free: True)
    assert isinstance(place.copy(slot=1)[0], CopyMade)


@pytest.mark.parametrize("what", ["forget", "new courier"])
def test_rests_that_nobody_can_ask_for_are_dropped(place: DeviceBoundary, what: str) -> None:
    for slot in range(3):
        place.step()
        place.copy(slot)
    place.box.rest_tag[0] = place.box.tag_rest(0, 2)  # sent
    rests = place.boundary._offload._rests  # type: ignore[attr-defined]
    assert len(rests._held) == 3
    if what == "forget":
        place.box.rest_tag[:] = -1
        place.boundary.carry_out(ForgetOrder(epoch=1, reset=False))
    else:
        place.boundary.drop_orders()
    place.step()
    place.copy(slot=0)
    kept = [4] if what == "forget" else [2, 4]
    assert sorted(rests._held) == [place.box.tag_rest(0, t) for t in kept]


def test_a_copy_without_steps_leaves_no_rest_and_spoils_none(place: DeviceBoundary) -> None:
    """It can be a copy of the same step as the one that was merged, on the version that holds it."""
    place.step(0.3)
    place.copy()
    place.box.rest_tag[0], place.box.feedback_t[0] = place.box.tag_rest(0, 1), 1
    [(rest, _)] = place.boundary._offload._rests._held.values()  # type: ignore[attr-defined]
    before = rest.clone()
    place.box.steps[:] = 0
    [probe] = place.copy(slot=1)
    assert isinstance(probe, CopyMade) and (probe.steps, probe.feedback) == (0, -1)
    assert torch.equal(rest, before)


# ---- on a GPU -------------------------------------------------------------------------------------------------------

SLOW = 1_000_000_000
"""Device cycles; about half a second."""


def weights(device: str, rows: int = 256) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "w": torch.randn(rows, 1000).to(device),
        "half": torch.randn(70, 33).bfloat16().to(device),
        "buffers/mean/norm.running_var": torch.rand(50).to(device),
    }


class OnDevice:
    def __init__(self, codec: str, rows: int = 256, fragments: int = 2) -> None:
        self.w = weights("cuda", rows)
        self.box, self.settings = boxed(self.w, fragments, on_device=True, codec=codec)
        self.codec = codec
        own = reading(self.box, self.w)
        self.offload = DeviceOffload(self.box, own, torch.device("cuda", 0), make_codec(codec))
        self.fill_base()
        self.box.steps[:] = 1

    def fill_base(self) -> None:
        for fragment in range(len(self.box.plan.fragments)):
            self.box.base(fragment)[:] = self.theta(fragment)
        self.offload.take_base()

    def theta(self, fragment: int) -> FloatArray:
        own = in_order(self.box, self.w)[fragment]
        return np.concatenate([tensor.float().cpu().reshape(-1).numpy() for tensor in own])

    def step(self, change: float = 0.01) -> None:
        for tensor in self.w.values():
            tensor += change * torch.randn_like(tensor)

    def body(self, fragment: int, slot: int) -> bytes:
        return self.box.body(slot, body_nbytes(make_codec(self.codec), self.box.plan.fragments[fragment])).tobytes()


@cuda
@pytest.mark.parametrize("codec", CODEC.names())
def test_bodies_of_a_gpu_are_those_of_the_courier_with_their_feedback(codec: str) -> None:
    here, one = OnDevice(codec), make_codec(codec)
    rests: list[FloatArray | None] = [None, None]
    for t in range(1, 7):
        here.step()
        for fragment, part in enumerate(here.box.plan.fragments):
            copy = here.offload.read(fragment, slot=fragment, t=t)
            copy.wait()
            rest = np.empty(part.size, np.float32) if one.needs_feedback else None
            body = np.empty(body_nbytes(one, part), np.uint8)
            delta = Delta(here.box.base(fragment), here.theta(fragment), rests[fragment], rest)
            encode_contribution(one, part, delta, body)
            assert here.body(fragment, fragment) == body.tobytes(), f"step {t}, fragment {fragment}"
            if one.needs_feedback:  # it is sent and merged
                here.box.rest_tag[fragment] = here.box.tag_rest(fragment, t)
                here.box.feedback_t[fragment] = t
            rests[fragment] = rest
    here.offload.close()


@cuda
def test_neither_training_nor_its_stream_waits_for_the_encoder() -> None:
    here = OnDevice("int8")
    for cycles in (1, SLOW):  # kernels are loaded when they are first used, and that waits
        own = in_order(here.box, here.w)[0]
        here.box.incoming(0, 0)[:] = 5.0
        here.offload.bring(0, 0).wait()
        torch.cuda.synchronize()
        with torch.cuda.stream(here.offload._out):
            torch.cuda._sleep(cycles)
        copy = here.offload.read(0, 1, cycles)
        adopt(own, here.offload.arrived(0, 0), "overwrite")
        here.offload.release(0, 0)
        reached = torch.cuda.Event()
        reached.record()
        reached.synchronize()
        if cycles == SLOW:
            assert not copy.done(), "training was past the adoption when the encoder had not begun"
        copy.wait()
    here.offload.close()


@cuda
def test_a_base_that_is_replaced_waits_for_the_copies_before_it() -> None:
    here = OnDevice("bf16")
    base = here.box.base(0).copy()
    with torch.cuda.stream(here.offload._out):
        torch.cuda._sleep(SLOW)
    here.step()
    first = here.theta(0)
    here.offload.read(0, 0, 1)
    here.box.incoming(0, 0)[:] = 5.0
    here.offload.bring(0, 0).wait()
    adopt(in_order(here.box, here.w)[0], here.offload.arrived(0, 0), "overwrite")
    here.offload.release(0, 0)
    here.step()
    second = here.theta(0)
    here.offload.read(0, 1, 2).wait()
    five = np.full_like(base, 5.0)
    assert here.body(0, 0) == expected(here.box, "bf16", base, first)
    assert here.body(0, 1) == expected(here.box, "bf16", five, second)
    here.offload.close()


@cuda
def test_a_gpu_subtracts_the_copy_while_the_encoder_is_behind() -> None:
    """Neither the copy nor the body waits for the other: Δ has memory of its own."""
    here = OnDevice("int8")
    own = in_order(here.box, here.w)[0]
    base, first = here.box.base(0).copy(), here.theta(0)
    here.box.incoming(0, 0)[:] = 5.0
    here.offload.bring(0, 0).wait()
    torch.cuda.synchronize()
    with torch.cuda.stream(here.offload._out):
        torch.cuda._sleep(SLOW)
    copy = here.offload.read(0, 1, t=1)
    here.step()
    second = here.theta(0)
    adopt(own, here.offload.arrived(0, 0), "carry", read=here.offload.outgoing(0, 1, t=1))
    here.offload.release(0, 0)
    third = here.theta(0)
    assert np.array_equal(third, carried(here, 0, second, first))
    here.step()
    here.offload.read(0, 2, t=2).wait()  # into the same memory, if it were free too early
    copy.wait()
    assert here.body(0, 1) == expected(here.box, "int8", base, first)
    here.offload.close()


@cuda
def test_a_gpu_subtracts_the_base_before_it_is_replaced() -> None:
    here = OnDevice("int8")
    own = in_order(here.box, here.w)[0]
    base = here.box.base(0).copy()
    here.step()
    before = here.theta(0)
    here.box.incoming(0, 0)[:] = 5.0
    here.offload.bring(0, 0).wait()
    read = here.offload.held_base(0)
    torch.cuda._sleep(SLOW)  # the adoption is queued behind this, and what replaces the base is ready before
    adopt(own, here.offload.arrived(0, 0), "carry", read=read)
    here.offload.release(0, 0)
    assert np.array_equal(here.theta(0), carried(here, 0, before, base))
    assert all((view == 5.0).all() for view in here.offload.held_base(0))
    here.offload.close()


def carried(here: OnDevice, fragment: int, own: FloatArray, read: FloatArray) -> FloatArray:
    """Return 5 + (own − read), as each tensor's dtype holds it."""
    values = own - read + np.float32(5.0)
    parts = here.box.plan.fragments[fragment].parts
    tensors = in_order(here.box, here.w)[fragment]
    rounded = [
        torch.from_numpy(values[place]).to(tensor.dtype).float().numpy()
        for (_, place), tensor in zip(parts, tensors, strict=True)
    ]
    return np.concatenate(rounded)


@cuda
@pytest.mark.parametrize("codec", ["bf16", "int4", "topk"])
def test_a_graph_is_captured_while_the_encoder_works(codec: str) -> None:
    here = OnDevice(codec)
    number = torch.zeros(8, device="cuda")
    for t in range(1, 21):
        here.step()
        theta = here.theta(0)
        copy = here.offload.read(0, 0, t)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                number.add_(1.0)
        graph.replay()
        copy.wait()
        assert not copy.failed
        assert here.body(0, 0) == expected(here.box, codec, here.box.base(0), theta)
    torch.cuda.synchronize()
    assert number.tolist() == [20 * 100.0] * 8
    here.offload.close()


@cuda
@pytest.mark.parametrize("codec", CODEC.names())
def test_it_takes_no_more_memory_than_it_says(codec: str) -> None:
    torch.cuda.empty_cache()
    rows = 32_000
    own = sum(4 * tensor.numel() for tensor in weights("cpu", rows).values())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    here = OnDevice(codec, rows, fragments=4)
    for t in range(1, 4):
        copies = []
        for fragment in range(4):
            here.box.incoming(0, fragment)[:] = 1.0
            here.offload.bring(fragment, 0).wait()
            here.offload.arrived(fragment, 0)
            here.offload.release(fragment, 0)
            copies.append(here.offload.read(fragment, fragment, t))
        for copy in copies:
            copy.wait()
            assert not copy.failed
    said = device_bytes(here.box.plan, here.settings)
    assert torch.cuda.max_memory_allocated() - before - own <= 1.02 * said + 2**20
    here.offload.close()
