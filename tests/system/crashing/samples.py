"""Where every leased sample went, followed through the records of a run by the plainest means: one entry per sample.

Rules held here, none of them with the help of protocol/leases.py: a position of a pass is issued once, and again only
after it came back; the positions of a pass are issued from its beginning, without a hole; what comes back lies behind
everything that was merged of its holder; a contribution reaches no further than its learner was leased.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from atoll.protocol.records import AnyRecord, GoneRecord, GrantedRecord, MergedRecord, Share, SourcesRecord

Sample = tuple[int, int, int]
"""Dataset, pass and position in it."""
Holder = tuple[str, int]
"""Learner and incarnation."""


@dataclass
class Samples:
    held: dict[Holder, list[Sample]] = field(default_factory=dict)
    """All that an incarnation was ever leased, in order."""
    owner: dict[Sample, tuple[Holder, int]] = field(default_factory=dict)
    """Who was leased it last, and as its how many-th."""
    merged_to: Counter[Holder] = field(default_factory=Counter)
    again_from: dict[Holder, int] = field(default_factory=dict)
    """Of those that are gone."""
    back: set[Sample] = field(default_factory=set)
    """Came back and were not issued again."""
    merged: dict[int, Counter[Sample]] = field(default_factory=dict)
    """Per fragment, how often each sample is in its versions."""
    lengths: tuple[int, ...] = ()
    _reached: dict[tuple[Holder, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[AnyRecord]) -> Samples:
        samples = cls()
        for record in records:
            match record:
                case SourcesRecord(datasets):
                    samples.lengths = tuple(length for _, length, _ in datasets)
                case GrantedRecord():
                    samples._granted(record)
                case MergedRecord():
                    for share in record.members:
                        samples._merged(record.fragment, share)
                case GoneRecord():
                    samples._gone(record)
                case _:
                    pass
        return samples

    def _granted(self, lease: GrantedRecord) -> None:
        holder = (lease.learner, lease.incarnation)
        assert holder not in self.again_from, f"{holder} is gone, and is leased {lease}"
        for position in range(lease.start, lease.stop):
            sample = (lease.dataset, lease.epoch, position)
            assert sample not in self.owner or sample in self.back, f"{sample} is issued twice: {self.owner[sample]}"
            self.back.discard(sample)
            held = self.held.setdefault(holder, [])
            self.owner[sample] = (holder, len(held))
            held.append(sample)

    def _merged(self, fragment: int, share: Share) -> None:
        holder = (share.learner, share.incarnation)
        before, held = self._reached.get((holder, fragment), 0), self.held.get(holder, [])
        assert before <= share.position <= len(held), f"{share} of {len(held)} leased, {before} of them merged before"
        assert share.position <= self.again_from.get(holder, share.position), f"{share} was issued again"
        self._reached[holder, fragment] = share.position
        self.merged_to[holder] = max(self.merged_to[holder], share.position)
        self.merged.setdefault(fragment, Counter()).update(held[before : share.position])

    def _gone(self, record: GoneRecord) -> None:
        holder = (record.learner, record.incarnation)
        if record.again_from < 0:
            assert holder not in self.held, f"{holder} is gone with its leases"
            return
        assert self.merged_to[holder] <= record.again_from, f"{record} issues again what is merged"
        self.again_from[holder] = record.again_from
        self.back.update(self.held.get(holder, [])[record.again_from :])

    # ---- at the end ----------------------------------------------------------------------------------------------

    def check_passes(self) -> None:
        """Every pass was issued from its beginning on; all but the last of a dataset to its end."""
        for dataset, length in enumerate(self.lengths):
            passes: dict[int, list[int]] = {}
            for _, number, position in sorted(sample for sample in self.owner if sample[0] == dataset):
                passes.setdefault(number, []).append(position)
            assert sorted(passes) == list(range(len(passes)))
            for number, positions in passes.items():
                whole = length if number < len(passes) - 1 else len(positions)
                assert positions == list(range(whole)), f"pass {number} over dataset {dataset} has a hole"

    def fates(self) -> Counter[str]:
        """Every sample that was ever issued has one."""
        return Counter(self._fate(sample) for sample in self.owner)

    def _fate(self, sample: Sample) -> str:
        holder, index = self.owner[sample]
        if sample in self.back:
            return "came back"
        if index < self.merged_to[holder]:
            return "merged or dropped"
        return "held" if holder not in self.again_from else "under way when its holder went"

    def waiting(self) -> Iterator[Sample]:
        yield from sorted(self.back)
