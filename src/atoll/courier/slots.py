"""The slots of the memory that a learner shares with its courier: which are free, and what lies in the others.

Only numbers are kept here: copies on their way out, versions on their way in. Of several ranks the leader takes slots
for all, under the same numbers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from atoll.mailbox.channel import BASE, AdoptOrder, ReadOrder
from atoll.protocol.learner import effects as fx

COPY_GONE = "its copy gave way to newer ones"
SLOT_S = 0.1
"""How long a fetch waits for a slot before it asks for memory."""


@dataclass(slots=True)
class OutgoingSlots:
    """Slots for copies. A copy that went out is kept until its fragment is adopted: carry subtracts it."""

    free: list[int]
    reserve: Callable[[int], bool] = lambda slot: False
    """Make memory for one more slot, of this number."""
    count: int = 0
    copies: dict[tuple[int, int], int] = field(default_factory=dict)
    """(fragment, t) → slot."""
    counters: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(fragment, t) → (steps, tokens) at the copy."""
    _sent: set[tuple[int, int]] = field(default_factory=set)
    _dropped: set[tuple[int, int]] = field(default_factory=set)
    _named: set[tuple[int, int]] = field(default_factory=set)
    """Named in an order to adopt that is not carried out yet."""
    _held: Counter[int] = field(default_factory=Counter)
    """Slot → how many threads read it."""
    _given_up: set[int] = field(default_factory=set)
    """Slots that were released while a thread read them."""
    _waiting: dict[int, fx.Read] = field(default_factory=dict)
    """By round: copies that are waited for, and that no slot was free for."""

    def __post_init__(self) -> None:
        self.count = len(self.free)

    def order_read(self, read: fx.Read, *, urgent: bool) -> ReadOrder | None:
        """None: there is no slot. A copy that is waited for (`urgent`) gets the next that is free (`order_waiting`);
        one that was ordered ahead is not made."""
        self._waiting.pop(read.round, None)
        if (slot := self.take_slot(urgent=urgent)) is not None:
            return ReadOrder(slot, read.round, read.fragment, read.step)
        if urgent:
            self._waiting[read.round] = read
        return None

    def order_waiting(self) -> list[ReadOrder]:
        """Of those that wait, the first ones, as many as there are slots for by now. Nobody else would order them:
        after the last step no boundary comes at which they are ordered again."""
        orders = []
        for read in list(self._waiting.values()):
            if (slot := self.take_slot(urgent=True)) is None:
                break
            del self._waiting[read.round]
            orders.append(ReadOrder(slot, read.round, read.fragment, read.step))
        return orders

    def cancel_waiting(self, number: int) -> None:
        self._waiting.pop(number, None)

    def take_slot(self, *, urgent: bool) -> int | None:
        """A free slot, or a new one. Where there is none and the copy is waited for (`urgent`), the oldest copy gives
        way, first of those that were only kept for carry. One that a thread reads would free no slot now."""
        if not self.free and self.reserve(self.count):
            self.free.append(self.count)
            self.count += 1
        may_go = {key for key in self.copies.keys() - self._named if not self._held[self.copies[key]]}
        if not self.free and urgent and may_go:
            kept = self._dropped & self._sent & may_go
            self._release(min(kept or may_go, key=lambda key: key[1]))
        return self.free.pop() if self.free else None

    def reserve_until(self, slot: int) -> bool:
        """Have all up to this one, which somebody else counts."""
        while self.count <= slot and self.reserve(self.count):
            self.count += 1
        return self.count > slot

    def add_copy(self, fragment: int, t: int, slot: int, steps: int, tokens: int) -> None:
        key = (fragment, t)
        if key in self._sent or key in self._named:
            # A slow learner may copy a fragment twice at one step, for two of its rounds. The copy that went out stays
            # in its slot: an adoption will subtract it there.
            self._dropped.discard(key)
            self.free.append(slot)
            return
        if key in self.copies:
            self._release(key)
        self.copies[key] = slot
        self.counters[key] = (steps, tokens)

    def send(self, fragment: int) -> tuple[int, int] | None:
        """Slot and step of the fragment's newest copy, which goes out now; None when it had to give way."""
        useful = [key for key in self.copies if key[0] == fragment and key not in self._dropped]
        if not useful:
            return None
        newest = max(useful)
        self._sent.add(newest)
        return self.copies[newest], newest[1]

    def hold_slot(self, slot: int) -> None:
        """A thread will read it: it is not used again before `let_slot_go`, even if its copy is released."""
        self._held[slot] += 1

    def let_slot_go(self, slot: int) -> None:
        self._held[slot] -= 1
        if not self._held[slot] and slot in self._given_up:
            self._given_up.discard(slot)
            self.free.append(slot)

    def name(self, fragment: int, t: int) -> tuple[int, int, int] | None:
        """Slot, steps and tokens of a copy that an adoption will subtract; it stays until then."""
        key = (fragment, t)
        if key not in self.copies:
            return None
        self._named.add(key)
        return (self.copies[key], *self.counters[key])

    def drop(self, fragment: int, t: int) -> None:
        """Of no more use as an answer."""
        key = (fragment, t)
        if key in self._sent:
            self._dropped.add(key)
        elif key in self.copies:
            self._release(key)

    def adopted(self, fragment: int) -> None:
        """Nothing of what was sent of this fragment is needed any more."""
        for key in [key for key in self._sent if key[0] == fragment]:
            self._sent.discard(key)
            self._named.discard(key)
            if key in self._dropped:
                self._release(key)

    def clear(self) -> None:
        """Nothing that was copied, or is to be, counts any more."""
        self._waiting.clear()
        for key in list(self.copies):
            self._release(key)

    def _release(self, key: tuple[int, int]) -> None:
        self._sent.discard(key)
        self._dropped.discard(key)
        self._named.discard(key)
        self.counters.pop(key, None)
        slot = self.copies.pop(key)
        if self._held[slot]:
            self._given_up.add(slot)
        else:
            self.free.append(slot)


class IncomingSlots:
    """Slots for versions on their way into the model; a fetch waits for one.

    As many bodies may be on their way as there are slots at first: more are reserved in place of those whose version
    waits for the training process, in a long step or until all ranks have agreed on it. A learner whose slots wait
    would stay a cycle behind the run. Where they wait for the network none are reserved: a newcomer fetches every
    fragment, and memory for all of them at once would make nothing faster.
    """

    def __init__(self, count: int, reserve: Callable[[int], bool] = lambda slot: False) -> None:
        """`reserve`: make memory for one more slot, of this number."""
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self._count, self._first, self._reserve = count, count, reserve
        self._filling = 0
        """Slots into which a body is on its way."""
        self.landed: dict[int, int] = {}
        """fragment → slot of a version that has arrived."""
        self.with_moments: set[int] = set()
        """Slots that hold the averaged moments of their version too."""
        for slot in range(count):
            self._free.put_nowait(slot)

    async def take_slot(self) -> int:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SLOT_S):
                    return self._fill_slot(await self._free.get())
            self.add_slot_if_held_up()

    def take_free(self) -> int | None:
        """Without a wait; None: all are in use."""
        return None if self._free.empty() else self._fill_slot(self._free.get_nowait())

    def _fill_slot(self, slot: int) -> int:
        self._filling += 1
        return slot

    def add_slot_if_held_up(self) -> None:
        """One more, where somebody has waited for one and fewer are being filled than there were at first."""
        if self._free.empty() and self._filling < self._first and self._reserve(self._count):
            self._free.put_nowait(self._count)
            self._count += 1

    def reserve_until(self, slot: int) -> bool:
        while self._count <= slot and self._reserve(self._count):
            self._count += 1
        return self._count > slot

    def note_landed(self, fragment: int, slot: int, *, moments: bool = False) -> None:
        self._filling -= 1
        self.landed[fragment] = slot
        if moments:
            self.with_moments.add(slot)

    def note_failed(self, slot: int) -> None:
        self._filling -= 1
        self.give_back(slot)

    def give_back(self, slot: int) -> None:
        self.with_moments.discard(slot)
        self._free.put_nowait(slot)

    def release_unwanted(self, fragment: int) -> None:
        """What has arrived of this fragment, if nobody took it, gives its slot back."""
        if (slot := self.landed.pop(fragment, None)) is not None:
            self.give_back(slot)


def make_adopt_order(
    adopt: fx.Adopt, outgoing: OutgoingSlots, incoming: IncomingSlots, *, blend: float, unsure: bool = False
) -> AdoptOrder:
    """To adopt the version that has landed. Carry becomes overwrite where the copy is gone, or where a dead courier may
    have known more (`unsure`)."""
    rule, minus, steps, tokens = adopt.rule, BASE, 0, 0
    if unsure and rule == "carry":
        rule = "overwrite"
    if rule == "carry" and adopt.copy_t is not None:
        if (copy := outgoing.name(adopt.fragment, adopt.copy_t)) is not None:
            minus, steps, tokens = copy
        else:
            rule = "overwrite"
    slot = incoming.landed.pop(adopt.fragment)
    return AdoptOrder(
        slot=slot,
        fragment=adopt.fragment,
        version=adopt.version,
        round=adopt.round,
        rule=rule,
        blend=blend,
        step=adopt.step,
        minus=minus,
        minus_steps=steps,
        minus_tokens=tokens,
        held_tokens=adopt.held_tokens,
        copy_t=adopt.copy_t if rule == "carry" and minus != BASE and adopt.copy_t is not None else -1,
        # Carry needs the own moments as they were read with the copy: who was in no round takes none.
        moments=slot in incoming.with_moments and (rule != "carry" or minus != BASE),
    )
