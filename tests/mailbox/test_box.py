from __future__ import annotations

import os
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.mailbox import box as module
from atoll.mailbox.box import PAGE, SPARE_BYTES, BoxLayout, Mailbox
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.numerics.rank_plan import make_rank_plan
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import Box, TensorSpec
from atoll.protocol.settings import Settings


def planned(sizes: list[int], fragments: int = 0) -> tuple[FragmentPlan, Settings]:
    tensors = [TensorSpec(f"t{index}", (size,), "float32") for index, size in enumerate(sizes)]
    settings = Settings(fragments=fragments, overlap=0).resolved(len(tensors))
    return make_plan(tensors, settings.fragments), settings


@pytest.fixture
def box() -> Mailbox:
    return Mailbox.create(*planned([5, 3, 1000]))


@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_every_region_has_its_own_whole_pages(sizes: list[int]) -> None:
    plan, settings = planned(sizes)
    layout = BoxLayout.of(plan, settings)
    assert all(region % PAGE == 0 for region in (layout.header_bytes, layout.base_bytes, layout.slot_bytes))
    assert layout.slot_bytes >= 4 * plan.largest
    assert layout.base_bytes >= 4 * plan.size
    slots = layout.first_outgoing + layout.first_incoming
    assert layout.first_bytes == layout.header_bytes + layout.base_bytes + slots * layout.slot_bytes


@given(sizes=st.lists(st.integers(1, 2000), min_size=1, max_size=6))
def test_no_two_buffers_overlap(sizes: list[int]) -> None:
    plan, settings = planned(sizes)
    box = Mailbox.create(plan, settings)
    buffers = [box.base(f) for f in range(len(plan.fragments))]
    parts = len(plan.fragments)
    buffers += [box.outgoing(slot, slot % parts) for slot in range(box.layout.first_outgoing)]
    buffers += [box.incoming(slot, slot % parts) for slot in range(box.layout.first_incoming)]
    for number, buffer in enumerate(buffers):
        buffer[:] = number
    box.steps[:] = box.base_version[:] = 7
    box.run = "r" * 64
    for number, buffer in enumerate(buffers):
        assert (buffer == number).all()
    box.close()


def test_slots_for_page_locking_are_whole_pages_of_just_these_slots(box: Mailbox) -> None:
    for slot in range(box.layout.most_outgoing):
        memory = box.slots_memory(slot, 1)
        assert memory.ctypes.data % PAGE == 0 and memory.ctypes.data == box.outgoing(slot, 0).ctypes.data
    for slot in range(box.layout.most_incoming):
        memory = box.slots_memory(box.layout.most_outgoing + slot, 1)
        assert memory.ctypes.data == box.incoming(slot, 0).ctypes.data


def test_more_slots_are_reserved_by_need_and_only_their_memory_is_taken() -> None:
    plan, settings = planned([PAGE] * 24)
    box = Mailbox.create(plan, settings)
    layout = box.layout
    assert os.fstat(box.fd).st_blocks * 512 == layout.first_bytes < layout.total_bytes
    assert box.reserve_outgoing(layout.first_outgoing) and box.reserve_incoming(layout.first_incoming)
    assert os.fstat(box.fd).st_blocks * 512 == layout.first_bytes + 2 * layout.slot_bytes
    assert box.reserve_outgoing(layout.most_outgoing - 1) and box.reserve_incoming(layout.most_incoming - 1)
    assert not box.reserve_outgoing(layout.most_outgoing) and not box.reserve_incoming(layout.most_incoming)
    box.close()


def test_a_slot_without_memory_is_not_reserved(box: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.mailbox.box.available_bytes", lambda: SPARE_BYTES)
    assert not box.reserve_outgoing(box.layout.first_outgoing)
    assert not box.reserve_incoming(box.layout.first_incoming)


def test_slots_suffice_for_what_is_on_its_way() -> None:
    plan, _ = planned([4] * 24)
    settings = Settings(fragments=24, sync_every=24, overlap=2).resolved(24)
    layout = BoxLayout.of(plan, settings)
    assert (layout.first_outgoing, layout.first_incoming) == (2 * 2 + 3, 2 + 1)


def test_whoever_has_the_descriptor_sees_the_same_memory(box: Mailbox) -> None:
    other = Mailbox(os.dup(box.fd), box.layout, box.plan)
    box.steps[:] = [1, 2, 3]
    box.set_count("term", 41)
    box.base(2)[:] = 1.5
    other.run = "a-run"
    other.base_version[1] = 9
    other.incoming(0, 1)[:] = -2.0
    assert other.steps.tolist() == [1, 2, 3]
    assert other.count("term") == 41
    assert (other.base(2) == 1.5).all()
    assert box.run == "a-run"
    assert box.base_version.tolist() == [-1, 9, -1]
    assert (box.incoming(0, 1) == -2.0).all()
    other.close()
    box.close()


def test_a_new_box_holds_no_version_and_no_steps(box: Mailbox) -> None:
    assert box.adopted.tolist() == box.base_version.tolist() == [-1, -1, -1]
    assert box.steps.tolist() == box.tokens.tolist() == [0, 0, 0]
    assert box.run == ""


def test_a_shorter_run_name_leaves_nothing_of_a_longer_one(box: Mailbox) -> None:
    box.run = "a-long-name"
    box.run = "b"
    assert box.run == "b"


def test_the_memory_stays_readable_after_closing_which_may_happen_twice(box: Mailbox) -> None:
    box.base(0)[:] = 3.0
    box.close()
    box.close()
    assert (box.base(0) == 3.0).all()


def test_fragments_lie_one_after_the_other_in_the_base(box: Mailbox) -> None:
    whole = np.arange(box.plan.size, dtype=np.float32)
    for fragment, start in enumerate(box.plan.starts):
        box.base(fragment)[:] = whole[start : start + box.plan.fragments[fragment].size]
    start = box.layout.header_bytes
    assert np.array_equal(box.memory[start : start + 4 * box.plan.size].view(np.float32), whole)


@pytest.mark.parametrize("most", [7, 1000, 10_000])
def test_values_written_to_a_base_are_there_and_nowhere_else(
    box: Mailbox, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the system takes a few bytes at a time."""
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, data[:most], offset))
    for index, part in enumerate(box.plan.fragments):
        box.whole_base()[:] = -1.0
        values = np.arange(part.size, dtype=np.float32)
        box.write_base(index, values[: part.size // 2])
        box.write_base(index, values[part.size // 2 :], at=part.size // 2)
        assert box.base(index).tolist() == values.tolist()
        assert (box.whole_base() == -1.0).sum() == box.plan.size - part.size
    before = box.memory.tobytes()
    with pytest.raises(AssertionError, match="values of this fragment"):
        box.write_base(0, np.zeros(2, np.float32), at=box.plan.fragments[0].size - 1)
    assert box.memory.tobytes() == before


def test_too_little_memory_is_said_in_one_line_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: 5 * 2**20)
    with pytest.raises(ConfigError) as caught:
        Mailbox.create(*planned([2**20]))
    text = str(caught.value)
    assert "need 32 MiB" in text and "5 MiB are free" in text
    assert "smaller model" in text and "\n" not in text


def test_memory_that_cannot_be_reserved_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []

    def no_space(fd: int, start: int, length: int) -> None:
        closed.append(fd)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "available_bytes", lambda: None)
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(ConfigError, match="the shared buffers need"):
        Mailbox.create(*planned([10]))
    with pytest.raises(OSError):  # noqa: PT011 - the descriptor is closed
        os.fstat(closed[0])


def test_free_memory_is_known_here() -> None:
    available = module.available_bytes()
    assert available is None or available > 0


def test_a_rank_may_hold_nothing() -> None:
    """Of a fragment, or of all."""
    whole, settings = planned([5, 3, 1000])
    boxes = (Box("t0", (2,), (3,)), Box("t2", (0,), (0,)))
    for held in (boxes, boxes[1:]):
        plan = make_rank_plan(whole, held).plan
        box = Mailbox.create(plan, settings, ranks=True)
        assert box.whole_base().size == plan.size == sum(prod(one.sizes) for one in held)
        for part in plan.fragments:
            buffers = [box.base(part.index), box.outgoing(0, part.index), box.incoming(0, part.index)]
            assert [buffer.size for buffer in buffers] == 3 * [part.size]
            box.write_base(part.index, np.ones(part.size, dtype=np.float32))
        assert box.reserve_outgoing(box.layout.first_outgoing) and (box.whole_base() == 1).all()
        box.close()


def test_ranks_have_slots_for_orders_that_they_still_agree_on() -> None:
    plan, settings = planned(24 * [10])
    alone, ranks = (BoxLayout.of(plan, settings, ranks=ranks) for ranks in (False, True))
    assert ranks.most_outgoing - alone.most_outgoing == 2 * len(plan.fragments)
    assert ranks.first_bytes == alone.first_bytes, "taken only where they are needed"
