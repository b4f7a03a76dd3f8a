"""The run's versions, as a learner knows them: announced, fetched, adopted.

Rules kept here, each with its test:
- versions may be skipped, but never adopted twice or backwards;
- after a reconnect every missing version is fetched;
- versions on their way fill the link and do not queue in front of it; a queue that formed once drains;
- a version that the run was rolled back with replaces the learner's own values;
- with adopt = "carry" the adoption names the copy that the version already contains, also when the announcement was
  lost with the connection;
- with adopt = "carry" no other version is adopted over a copy that was given to a round and may still be merged: the
  copy belongs to the base, so after that adoption it could no longer be subtracted, and all steps made since would be
  lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.protocol.learner.effects import Fetch, LearnerEffect
from atoll.protocol.learner.ways import Ways
from atoll.protocol.messages import Announce, Member, Welcome

RETRY_S = 0.5
"""After a failed fetch."""
SHORTEST_S = 1e-6
"""Least latency that is counted, because 0 means that none was measured."""
MEASURED_EVERY = 4
"""Number of versions that may be ordered behind others for each latency that is remembered. Then a version is ordered
alone, to measure the latency anew."""


@dataclass(slots=True)
class Versions:
    do: Callable[[LearnerEffect], None]
    held: list[int] = field(default_factory=list)
    """Adopted, per fragment."""
    newest: list[int] = field(default_factory=list)
    """Announced, per fragment."""
    adopting: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Handed to the training process: fragment → (version, round)."""
    _least: dict[int, int] = field(default_factory=dict)
    """Per fragment, the version that the run was last rolled back with."""
    retry_at: dict[int, float] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)
    """Per fragment, the round of its newest version; after a welcome its last round, also a passed one."""
    way_is_free: bool = False
    """Whether most of the version ordered last has arrived, so that the next one may be ordered."""
    _fetching: set[int] = field(default_factory=set)
    _ordered_alone: int = -1
    """Fragment of the version that was ordered last while none was on its way; −1: it has arrived."""
    _not_alone: int = 0
    """Number of versions ordered behind others since then, while a rate was known."""
    _unannounced: set[int] = field(default_factory=set)
    """Fragments of which a version arrived before its announcement."""
    counted: list[int] = field(default_factory=list)
    """Per fragment, the adopted version that the training process's counters know of."""
    given: dict[int, int] = field(default_factory=dict)
    """With carry: round that was given a copy, keyed by fragment, until the round's outcome is known. No version of the
    fragment is fetched before that."""
    _term: int = 0
    """Term of the last welcome."""
    _merged: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Per fragment, the version that holds this learner's last contribution, its step and its tokens."""
    _passed_over: dict[int, int] = field(default_factory=dict)
    """Version of each fragment that this learner passed over while it had a share of the rounds. It is not fetched any
    more: all of them at once would queue in front of those that hold its own steps, and each fragment has a newer one
    within a cycle."""
    ways: Ways = field(default_factory=Ways)

    @property
    def is_complete(self) -> bool:
        return bool(self.held) and min(self.held) >= 0

    @property
    def may_be_complete(self) -> bool:
        """Whether all are held or handed over: the training process may have adopted them by now."""
        return bool(self.held) and self.complete_with(-1)

    def complete_with(self, fragment: int) -> bool:
        """Whether all are held or handed over once this one is."""
        return all(v >= 0 or f == fragment or f in self.adopting for f, v in enumerate(self.held))

    def owed_version(self, fragment: int) -> int | None:
        """The version that holds this learner's last contribution, while it is not adopted."""
        version, _, _ = self._merged.get(fragment, (-1, 0, 0))
        return version if version > self.held[fragment] else None

    def copy_in(self, fragment: int, version: int) -> int | None:
        """The step of the own copy that `version` contains and what is held does not."""
        merged = self._merged.get(fragment)
        return merged[1] if merged is not None and self.held[fragment] < merged[0] <= version else None

    def tokens_in(self, fragment: int, version: int) -> int:
        """The own tokens that `version` contains and that the counters still count as not merged."""
        merged = self._merged.get(fragment)
        return merged[2] if merged is not None and self.counted[fragment] < merged[0] <= version else 0

    def replaces_all(self, fragment: int, version: int) -> bool:
        """Whether the run was rolled back between what is held and this version."""
        return self.held[fragment] < self._least.get(fragment, -1) <= version

    def take_welcome(self, welcome: Welcome) -> None:
        self.newest = list(welcome.versions)
        self._unannounced.clear()
        self._passed_over.clear()
        self._least = dict(enumerate(welcome.least))
        fragments = len(self.newest)
        self._merged = {  # what was announced before may be of rounds that the disk did not keep
            fragment: merged
            for fragment, merged in enumerate(welcome.merged)
            if merged[0] > min(self.held[fragment], self.counted[fragment])
        }
        if welcome.term != self._term:  # rounds that were not committed are void: none of the copies can be merged
            self.given.clear()
        self._term = welcome.term
        self.given = {f: number for f, number in self.given.items() if number >= welcome.committed}
        for number in range(max(0, welcome.committed - fragments), welcome.committed):
            self.rounds[number % fragments] = number

    def take_announcement(self, announce: Announce, own: Member | None) -> None:
        fragment, version = announce.fragment, announce.version
        self._unannounced.discard(fragment)
        self.newest[fragment] = max(self.newest[fragment], version)
        if own is not None:
            self._merged[fragment] = (version, own.t, own.tokens)
        if self.given.get(fragment, announce.round + 1) <= announce.round:
            del self.given[fragment]
        if announce.members:
            self.rounds[fragment] = announce.round
        if announce.restored:
            self._least[fragment] = version

    def lacks_newest(self, fragment: int) -> bool:
        return self.newest[fragment] > self.held[fragment]

    def pass_over_missing(self) -> None:
        """Fetch none of the versions that this learner lacks now, unless they hold its own steps."""
        self._passed_over = dict(enumerate(self.newest))

    def fetch_all(self) -> None:
        """Fetch also what was passed over: the run ends, and nothing newer comes."""
        self._passed_over.clear()

    def fetch_missing(self, gathering: int, *, owed_only: bool = False) -> None:
        """Order the versions that are needed soonest, while the way down is free for them. A version that waits is not
        sent if a newer one of its fragment is announced meanwhile. `owed_only`: order only versions that hold steps of
        this learner; the next one of these contains the versions that were passed over."""
        while self._may_order():
            wanted = [fragment for fragment in range(len(self.newest)) if self._is_wanted(fragment, owed_only)]
            if not wanted:
                return
            if owed_only:  # its next turn with a fragment may be cycles away: the copy that waits longest comes first
                soonest = min(wanted, key=lambda fragment: self._merged.get(fragment, (-1, -1, 0))[1])
            else:
                soonest = min(wanted, key=lambda fragment: (fragment - gathering) % len(self.newest))
            if not self._fetching:
                self._ordered_alone, self._not_alone = soonest, 0
            elif self.ways.down.bytes_per_s:
                self._not_alone += 1
            self._fetching.add(soonest)
            self.way_is_free = False
            self.do(Fetch(soonest, self.newest[soonest]))

    def _may_order(self) -> bool:
        """Return whether the bodies on their way leave room in the pipe, or most of the last one has arrived. From time
        to time wait until none is on its way, to measure the latency."""
        if not self._fetching:
            return True
        if self._not_alone >= MEASURED_EVERY * max(1, self.ways.latencies):
            return False
        on_the_way = len(self._fetching) * self.ways.down.body_bytes
        return self.way_is_free or on_the_way <= self.ways.pipe_bytes

    def measure_way(self, fragment: int, nbytes: int, seconds: float, latency_s: float) -> None:
        """Count an arrived version in the rate, and in the latency if it was ordered alone. The latency of a version
        that waited behind another includes the other's time: a pipe of that size would keep up the queue in which it
        was measured."""
        self.ways.down.add(nbytes, seconds)
        if fragment == self._ordered_alone:
            self._ordered_alone = -1
            if seconds > 0:  # else it came in one piece
                self.ways.add_latency(max(latency_s, SHORTEST_S))

    def _is_wanted(self, fragment: int, owed_only: bool) -> bool:
        if not self.lacks_newest(fragment) or fragment in self.adopting:
            return False
        if fragment in self._fetching or fragment in self.retry_at:
            return False
        if fragment in self._unannounced or fragment in self.given:
            return False
        if self.held[fragment] < 0 or self.held[fragment] < self._least.get(fragment, -1):
            return True
        return not self.passes_over(fragment, owed_only)

    def passes_over(self, fragment: int, owed_only: bool) -> bool:
        """Whether the newest version of this fragment is left out, because it holds no steps of this learner."""
        passed_over = owed_only or self.newest[fragment] <= self._passed_over.get(fragment, -1)
        return passed_over and self.owed_version(fragment) is None

    def take_fetched(self, fragment: int, version: int) -> bool:
        """Whether it is news, to be handed over.

        One that was not announced yet is fetched again when it is: until then nobody knows whether it holds our steps.
        So is one that comes while a given copy may be merged.
        """
        self._fetching.discard(fragment)
        if version > self.newest[fragment]:
            self._unannounced.add(fragment)
        if fragment in self.given:
            return False
        if not self.held[fragment] < version <= self.newest[fragment] or fragment in self.adopting:
            return False
        self.adopting[fragment] = (version, self.rounds.get(fragment, -1))
        return True

    def retry_later(self, now: float, fragment: int) -> None:
        self._fetching.discard(fragment)
        self._ordered_alone = -1 if fragment == self._ordered_alone else self._ordered_alone
        self.retry_at[fragment] = now + RETRY_S

    def take_adoption(self, fragment: int, version: int) -> int | None:
        """The round of the version just taken; None for an adoption from before a recovery."""
        handed, number = self.adopting.get(fragment, (version, -1))
        if handed != version or (fragment not in self.adopting and self.held[fragment] < 0):
            return None
        self.adopting.pop(fragment, None)
        self.held[fragment] = self.counted[fragment] = max(self.held[fragment], version)
        return number

    def forget_all(self, fragments: int) -> None:
        self.held, self.counted = [-1] * fragments, [-1] * fragments
        self.adopting.clear()
        self.rounds.clear()
        self._least.clear()
        self.given.clear()
        self._merged.clear()
        self._passed_over.clear()
