from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.courier import slots as slots_module
from atoll.courier.slots import IncomingSlots, OutgoingSlots
from atoll.mailbox.channel import ReadOrder
from atoll.protocol.learner import effects as fx


def made(slots: OutgoingSlots, fragment: int, t: int) -> int:
    slot = slots.take_slot(urgent=True)
    assert slot is not None
    slots.add_copy(fragment, t, slot, steps=t, tokens=10 * t)
    return slot


def test_a_slot_is_given_to_one_at_a_time() -> None:
    slots = OutgoingSlots([0, 1, 2])
    assert {slots.take_slot(urgent=False) for _ in range(3)} == {0, 1, 2}
    assert slots.take_slot(urgent=True) is None


def test_a_copy_ordered_ahead_takes_no_slot_from_one_at_hand() -> None:
    slots = OutgoingSlots([0, 1])
    made(slots, 0, 1)
    made(slots, 1, 1)
    assert slots.take_slot(urgent=False) is None
    assert slots.send(0) is not None and slots.send(1) is not None


def test_slots_are_reserved_by_need_as_long_as_there_is_memory() -> None:
    slots = OutgoingSlots([0], reserve=lambda slot: slot < 3)
    assert [slots.take_slot(urgent=False) for _ in range(4)] == [0, 1, 2, None]


def test_the_newest_copy_goes_out() -> None:
    slots = OutgoingSlots([0, 1, 2])
    made(slots, 0, 1)
    newest = made(slots, 0, 2)
    made(slots, 1, 3)
    assert slots.send(0) == (newest, 2)
    slots.drop(0, 2)
    assert slots.send(2) is None


def test_a_copy_that_was_not_sent_is_free_once_dropped() -> None:
    slots = OutgoingSlots([0])
    made(slots, 0, 1)
    slots.drop(0, 1)
    assert slots.free == [0] and not slots.copies and not slots.counters


@pytest.mark.parametrize("named", [False, True])
def test_a_copy_that_went_out_is_kept_also_where_its_step_is_copied_again(named: bool) -> None:
    """A slow learner may do so for two rounds of one fragment. The second copy had taken the place of the first, whose
    version then overwrote the model, or was adopted from a slot that was free again."""
    slots = OutgoingSlots([0, 1, 2])
    first = made(slots, 0, 1)
    slots.send(0)
    if named:
        assert slots.name(0, 1) == (first, 1, 10)
    second = made(slots, 0, 1)
    assert second in slots.free and first not in slots.free
    made(slots, 0, 2)
    slots.drop(0, 1)
    assert slots.name(0, 1) == (first, 1, 10)
    slots.adopted(0)
    slots.drop(0, 2)
    assert sorted(slots.free) == [0, 1, 2] and not slots.copies


def test_a_copy_that_was_of_no_more_use_is_sent_again_once_its_step_is_copied_again() -> None:
    slots = OutgoingSlots([0, 1])
    first = made(slots, 0, 1)
    slots.send(0)
    slots.drop(0, 1)
    assert slots.send(0) is None
    made(slots, 0, 1)
    assert slots.send(0) == (first, 1)


def test_a_copy_that_went_out_is_kept_for_carry_until_its_fragment_is_adopted() -> None:
    slots = OutgoingSlots([0, 1])
    slot = made(slots, 0, 1)
    slots.send(0)
    slots.drop(0, 1)
    assert slots.copies[0, 1] == slot and slots.counters[0, 1] == (1, 10)
    assert slots.send(0) is None, "of no more use as an answer"
    slots.adopted(1)
    assert (0, 1) in slots.copies
    slots.adopted(0)
    assert not slots.copies and sorted(slots.free) == [0, 1]


def test_a_copy_that_is_adopted_before_it_is_dropped_is_free_after_both() -> None:
    slots = OutgoingSlots([0])
    made(slots, 0, 1)
    slots.send(0)
    slots.adopted(0)
    slots.drop(0, 1)
    assert slots.free == [0]


def test_where_no_slot_is_free_those_kept_for_carry_give_way_first_then_the_oldest() -> None:
    slots = OutgoingSlots([0, 1, 2])
    oldest = made(slots, 0, 1)
    kept = made(slots, 1, 2)
    slots.send(1)
    slots.drop(1, 2)
    made(slots, 2, 3)
    assert slots.take_slot(urgent=True) == kept
    assert slots.take_slot(urgent=True) == oldest
    assert slots.send(0) is None


def test_a_copy_that_is_waited_for_gets_the_next_slot_that_is_free() -> None:
    """After the last step nobody orders it again: without a slot then, the last steps were lost."""
    slots = OutgoingSlots([0])
    made(slots, 0, 1)
    slots.send(0)
    slots.name(0, 1)
    assert slots.order_read(fx.Read(5, 1, 9), urgent=True) is None, "an adoption will subtract the only copy"
    assert slots.order_read(fx.Read(6, 2, 9), urgent=False) is None
    assert slots.order_waiting() == []
    slots.drop(0, 1)
    slots.adopted(0)
    assert slots.order_waiting() == [ReadOrder(0, 5, 1, 9)]
    slots.free.append(0)
    assert slots.order_waiting() == [], "one that was ordered ahead is not made"


def test_a_copy_that_waits_for_a_slot_may_be_cancelled() -> None:
    slots = OutgoingSlots([])
    for number in (5, 6, 7):
        slots.order_read(fx.Read(number, 0, 9), urgent=True)
    slots.cancel_waiting(5)
    slots.free.append(0)
    assert [order.round for order in slots.order_waiting()] == [6]
    slots.clear()
    slots.free.append(0)
    assert slots.order_waiting() == []


def test_a_copy_that_a_thread_reads_does_not_give_way() -> None:
    slots = OutgoingSlots([0, 1])
    read = made(slots, 0, 1)
    other = made(slots, 1, 2)
    slots.hold_slot(read)
    assert slots.take_slot(urgent=True) == other
    assert slots.take_slot(urgent=True) is None and (0, 1) in slots.copies


def test_a_second_copy_of_the_same_step_frees_the_first() -> None:
    slots = OutgoingSlots([0, 1])
    first = made(slots, 0, 1)
    second = made(slots, 0, 1)
    assert slots.free == [first] and slots.send(0) == (second, 1)


def test_after_forgetting_every_copy_is_free() -> None:
    slots = OutgoingSlots([0, 1, 2])
    for t in range(3):
        made(slots, t, t)
    slots.send(1)
    slots.drop(1, 1)
    slots.clear()
    assert sorted(slots.free) == [0, 1, 2]
    assert slots.send(0) is None


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "send", "drop", "adopted", "clear"]), st.integers(0, 2), st.integers(0, 9))
    )
)
def test_no_slot_is_ever_lost_or_given_twice(acts: list[tuple[str, int, int]]) -> None:
    slots = OutgoingSlots(list(range(4)))
    for t, (act, fragment, back) in enumerate(acts):
        if act == "take":
            made(slots, fragment, t)
        elif act == "send":
            slots.send(fragment)
        elif act == "drop":
            slots.drop(fragment, t - back)
        elif act == "adopted":
            slots.adopted(fragment)
        else:
            slots.clear()
        assert sorted([*slots.free, *slots.copies.values()]) == [0, 1, 2, 3]
        assert slots.copies.keys() == slots.counters.keys()


async def test_a_fetch_waits_for_a_slot() -> None:
    slots = IncomingSlots(1)
    first = await slots.take_slot()
    waiting = asyncio.ensure_future(slots.take_slot())
    await asyncio.sleep(0)
    assert not waiting.done()
    slots.give_back(first)
    assert await waiting == first


async def test_what_nobody_took_gives_its_slot_back() -> None:
    slots = IncomingSlots(1)
    slots.note_landed(3, await slots.take_slot())
    slots.release_unwanted(3)
    slots.release_unwanted(3)
    assert await slots.take_slot() == 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await slots.take_slot()


async def test_versions_that_wait_for_the_training_process_get_more_slots() -> None:
    slots = IncomingSlots(1, reserve=lambda slot: slot < 4)
    for fragment in range(4):
        async with asyncio.timeout(60):
            slots.note_landed(fragment, await slots.take_slot())
    assert sorted(slots.landed.values()) == [0, 1, 2, 3]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await slots.take_slot()


async def test_a_newcomer_that_fetches_every_fragment_takes_memory_for_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "SLOT_S", 60.0)  # a busy machine may hold up this process for longer than 0.1 s
    reserved: list[int] = []

    def reserve(slot: int) -> bool:
        reserved.append(slot)
        return True

    slots = IncomingSlots(3, reserve)

    async def fetch(fragment: int) -> None:
        slot = await slots.take_slot()
        await asyncio.sleep(0.001)  # the body
        slots.note_landed(fragment, slot)
        await asyncio.sleep(0)  # the adoption
        slots.release_unwanted(fragment)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for fragment in range(24):
            tasks.create_task(fetch(fragment))
    assert not reserved


async def test_fetches_that_waited_for_the_network_get_slots_once_it_waits_for_nothing() -> None:
    """Nobody adopts: all that was fetched waits for a long step, and the rest still arrives."""
    slots = IncomingSlots(3, reserve=lambda slot: True)

    async def fetch(fragment: int) -> None:
        slot = await slots.take_slot()
        await asyncio.sleep(0.001)
        slots.note_landed(fragment, slot)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for fragment in range(24):
            tasks.create_task(fetch(fragment))
    assert sorted(slots.landed.values()) == list(range(24))


async def test_as_many_bodies_stay_on_their_way_while_versions_wait_to_be_adopted() -> None:
    """Seed 1901 of the ranks' worlds: a learner whose slots waited for its ranks stayed a cycle behind the run."""
    slots = IncomingSlots(2, reserve=lambda slot: True)
    slots.note_landed(0, await slots.take_slot())
    filling = [await slots.take_slot()]
    async with asyncio.timeout(60):
        filling.append(await slots.take_slot())
    assert sorted(filling) == [1, 2]
    slots.add_slot_if_held_up()
    assert slots.take_free() is None, "two are on their way, as at first"


async def test_a_failed_fetch_gives_its_slot_to_the_next() -> None:
    slots = IncomingSlots(1)
    slots.note_failed(await slots.take_slot())
    assert await slots.take_slot() == 0
