"""The tape: what a training process was told, and after which of its steps.

A learner's training is its script, its data and the orders it carried out between two steps. Those orders are the
entries here; with the decisions of the syncer (records.py), who was in each round and by which weight, they repeat a
run bit for bit. `t` is the step after which an order was carried out; 0: before the first.

    BeganEntry      a training process: what it runs on, and the state it went on from
    OwnedEntry      its own parameters are the run's version 0
    AdoptedEntry    a version is in its model
    MomentsEntry    the averaged moments of the version that is adopted next are in its inner optimizer
    InformedEntry   what `learner.progress` and `learner.global_step` say from now on
    SuppliedEntry   leases that it may take samples from
    GaveEntry       its state was copied for newcomers
    TookEntry       a peer's state is in place
    ForgotEntry     it holds no version any more; `reset`: its inner optimizer starts afresh
    MarkedEntry     its part of a cut was saved here
    StoppedEntry    the training loop was told to end

Entries are numbered from 0 in each training process, so that what is said twice is written down once, and what is
missing is known to be missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

import msgspec

from atoll.protocol.limits import ChoiceName, Line, Number, Real, Row

KEPT = 8192
"""Entries that a training process keeps for a courier or a syncer that has to hear them again."""
AT_ONCE = 512
"""The most that one report carries."""

SHORT_RULES = {"overwrite": "o", "blend": "b", "carry": "c"}
"""Adoption rules that a tape names by a letter; the others by their whole name."""


def shorten_rule(rule: str) -> str:
    return SHORT_RULES.get(rule, rule)


def whole_rule(short: str) -> str:
    return {letter: rule for rule, letter in SHORT_RULES.items()}.get(short, short)


class TapeEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    t: Number


class BeganEntry(TapeEntry, frozen=True, tag="b"):
    threads: Number
    torch: Line
    cpu: Line
    """The instruction set that torch takes."""
    device: Line
    deterministic: bool
    """Whether torch was told to use deterministic kernels only; on the CPU they are."""
    state: Line = ""
    """The file it went on from, in the learner's folder."""
    exact: bool = False
    """All of that state was put back, and not the inner optimizer alone."""
    ranks: Number = 1
    """Processes that are this learner together."""


class OwnedEntry(TapeEntry, frozen=True, tag="o"):
    pass


class AdoptedEntry(TapeEntry, frozen=True, tag="a"):
    fragment: Number
    version: Number
    rule: ChoiceName = "o"
    copy_t: Number = -1
    """With carry, the step of the copy that the version contains; −1: none, the base was subtracted."""


class MomentsEntry(TapeEntry, frozen=True, tag="n"):
    """Stands before the adoption. Where it is missing the version was adopted without."""

    fragment: Number
    version: Number


class InformedEntry(TapeEntry, frozen=True, tag="i"):
    committed: Number
    """Rounds that were behind the run."""
    progress: Real | None = None
    """How much of its budget was spent, bit for bit as the script saw it. None: a tape of before these were written
    down; the record of the last of those rounds says it."""
    global_step: Number = 0


class SuppliedEntry(TapeEntry, frozen=True, tag="s"):
    leases: Row
    over: bool = False
    own: bool = False
    """Nothing is leased to it: it trains on its data in an order of its own."""


class GaveEntry(TapeEntry, frozen=True, tag="g"):
    pass


class TookEntry(TapeEntry, frozen=True, tag="k"):
    ticket: Line


class ForgotEntry(TapeEntry, frozen=True, tag="f"):
    reset: bool


class MarkedEntry(TapeEntry, frozen=True, tag="m"):
    cut: Number


class StoppedEntry(TapeEntry, frozen=True, tag="x"):
    pass


AnyEntry = (
    BeganEntry
    | OwnedEntry
    | AdoptedEntry
    | MomentsEntry
    | InformedEntry
    | SuppliedEntry
    | GaveEntry
    | TookEntry
    | ForgotEntry
    | MarkedEntry
    | StoppedEntry
)


class Numbered:
    """The newest entries of one training process, by their numbers."""

    def __init__(self) -> None:
        self._kept: deque[AnyEntry] = deque(maxlen=KEPT)
        self.end = 0
        """The number that the next entry gets."""

    @property
    def begin(self) -> int:
        return self.end - len(self._kept)

    def add(self, entries: Sequence[AnyEntry], first: int | None = None) -> None:
        """With `first`, the number of the first of them: what is here already is passed over; a gap stays one."""
        at = self.end if first is None else first
        if at > self.end:
            self._kept.clear()
            self.end = at
        new = entries[self.end - at :]
        self._kept.extend(new)
        self.end += len(new)

    def since(self, number: int, most: int = KEPT) -> tuple[int, tuple[AnyEntry, ...]]:
        """Entries from this number on, or from the oldest that is kept; and the number of the first."""
        start = min(max(number, self.begin), self.end)
        newest = list(islice(reversed(self._kept), self.end - start))  # a few: this is asked after every step
        return start, tuple(newest[::-1][:most])


class Spoken:
    """A learner's entries on their way to its syncer, each said once on a connection."""

    def __init__(self) -> None:
        self._entries = Numbered()
        self._said = 0

    def add(self, first: int, entries: Sequence[AnyEntry]) -> None:
        self._entries.add(entries, first)

    def welcomed(self, known: int) -> None:
        """The syncer has written this many down; what it heard beyond them may be lost."""
        self._said = known

    def next(self) -> tuple[int, tuple[AnyEntry, ...]]:
        first, entries = self._entries.since(self._said, AT_ONCE)
        self._said = first + len(entries)
        return first, entries

    @property
    def waiting(self) -> bool:
        return self._said < self._entries.end
