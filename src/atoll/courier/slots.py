"""Who uses which slot of the shared memory: copies that were ordered, made, sent; versions that wait to be adopted.

Where all are in use, one more is reserved. Where there is no memory for it, a copy ordered ahead is not made: an older
one gives way only to a copy that a pull waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outgoing:
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

    def __post_init__(self) -> None:
        self.count = len(self.free)

    def take(self, *, urgent: bool) -> int | None:
        """A free slot, or a new one. Where there is none and a pull waits for the copy (`urgent`), the oldest copy
        gives way, first of those that were only kept for carry."""
        if not self.free and self.reserve(self.count):
            self.free.append(self.count)
            self.count += 1
        may_go = self.copies.keys() - self._named
        if not self.free and urgent and may_go:
            kept = self._dropped & self._sent & may_go
            self._release(min(kept or may_go, key=lambda key: key[1]))
        return self.free.pop() if self.free else None

    def made(self, fragment: int, t: int, slot: int, steps: int, tokens: int) -> None:
        if (fragment, t) in self.copies:
            self._release((fragment, t))
        self.copies[fragment, t] = slot
        self.counters[fragment, t] = (steps, tokens)

    def send(self, fragment: int) -> int | None:
        """The slot of the fragment's newest copy, which goes out now; None when it had to give way."""
        useful = [key for key in self.copies if key[0] == fragment and key not in self._dropped]
        if not useful:
            return None
        newest = max(useful)
        self._sent.add(newest)
        return self.copies[newest]

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
        """Nothing that was copied counts any more."""
        for key in list(self.copies):
            self._release(key)

    def _release(self, key: tuple[int, int]) -> None:
        self._sent.discard(key)
        self._dropped.discard(key)
        self._named.discard(key)
        self.counters.pop(key, None)
        self.free.append(self.copies.pop(key))


class Incoming:
    """Slots for versions on their way into the model; a fetch waits for one."""

    def __init__(self, count: int, reserve: Callable[[int], bool] = lambda slot: False) -> None:
        """`reserve`: make memory for one more slot, of this number."""
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self._count, self._reserve = count, reserve
        self.landed: dict[int, int] = {}
        """fragment → slot of a version that has arrived."""
        for slot in range(count):
            self._free.put_nowait(slot)

    async def take(self) -> int:
        if self._free.empty() and self._reserve(self._count):
            self._count += 1
            return self._count - 1
        return await self._free.get()

    def give_back(self, slot: int) -> None:
        self._free.put_nowait(slot)

    def unwanted(self, fragment: int) -> None:
        """What has arrived of this fragment, if nobody took it, gives its slot back."""
        if (slot := self.landed.pop(fragment, None)) is not None:
            self.give_back(slot)
