"""A filter before the merge: who agrees with the others, how much each may move a tensor, and who is suspect.

For each contribution to a round it gives a factor per tensor: 1 keeps it, below 1 shortens it, 0 leaves it out. Of a
tensor that is split, what is said of a tensor here holds for each piece. The caller decides whether the factors are
used (`--robust`) or only logged.

Rules kept here, each with its test:
- norms are compared for as many steps as each holds (docs/adr/0042): n steps may be n times as long as one, and may be
  no longer at all. So a contribution is held against norms that are scaled up where the others have fewer steps, and
  left as they are where they have more. Steps are the learner's own claim: more than H count only as far as another
  contribution of the round has as many;
- a tensor longer than `CLIP` times the median norm of the others in its round is shortened to that;
- a tensor that points against the others is left out: its median cosine with them is negative, and larger in size than
  half of the others' own agreement and than chance;
- a learner is *suspect* after `ROUNDS` rounds of evidence, not before: its agreement, averaged, is under `DISAGREES`
  of the others' own; or its norm is over `LOUD` times theirs; or it gave the same direction `REPEATS` times in a row
  while the others' turned far more. It is no longer suspect once its agreement is above `AGREES`. All contributions of
  a suspect are left out;
- where the others do not agree with each other beyond chance, nobody is judged by agreement;
- in a round of one or two there is no majority: a tensor is shortened to the usual norm of its fragment, and further
  where the contribution points against the outer momentum. A suspect stays suspect;
- where nobody uses the factors, a large fragment is judged by a sample (sample.py): drawn anew each round for norms and
  cosines, always the same one for what is compared with the last contribution. Nobody outside this process can tell
  which values are in it. How much is chance follows from the size of the sample;
- equal inputs in equal order give equal factors; in a large round each is compared with a sample (references.py).

It does not stop: an attacker who agrees with the others often enough and pushes a little in between; half or more of
a round; an attacker in rounds of one member, where only the momentum is there to compare with. By samples it does not
see who does wrong in a few places only, but in the rounds whose sample holds them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from atoll.numerics import agreement as agree
from atoll.numerics.arrays import DoubleArray, FloatArray, IndexArray
from atoll.numerics.comparison import compare_cuts, measure_cuts
from atoll.numerics.deltas import GivenDelta, ReadableDelta, as_readable
from atoll.numerics.fragments import Fragment, FragmentPlan
from atoll.numerics.references import draw_references, find_others, median_of_counted
from atoll.numerics.sample import draw_sample

MAJORITY = 3
"""Members that a round needs to be judged by itself."""
CLIP = 2.0
"""Times the median norm of the others. An honest learner with other data had 1.8 times (benchmarks/insiders.py)."""
LOUD = 3.0
AGAINST = 0.5
CHANCE = 3.0
"""Standard deviations of the cosine of two unrelated tensors, 1/√elements."""
AGAINST_MOMENTUM = -0.1
MOMENTUM_SHARE = 0.25
"""The factor of a contribution against the outer momentum, in a round too small to judge it. Never 0: after a step that
was too long every honest contribution points back, and without them the momentum would never turn."""
DISAGREES, AGREES = 0.15, 0.3
"""Times the others' agreement. Noise has 0, a flipped sign −1; honest with other data, or 4 times slower, had 0.7."""
SAME, REPEATS = 0.98, 3
"""The cosine of two contributions in a row to one fragment. A slow honest learner had 0.83."""
STILLER = 10.0
"""One that repeats itself turns (1 − cosine) less than the others by this factor. Honest learners of a tiny model had
cosines around 0.98, some above and some below."""
ROUNDS = 8
MEMORY = 32
"""Rounds over which a learner's averages run."""
USUAL_ROUNDS = 16
"""Rounds of a fragment, judged in full, whose median norms make its usual norm."""
NAMES = 1024
"""Learners that are remembered, as many as may be connected; the least recent are forgotten first."""


@dataclass(frozen=True, slots=True)
class FilterVerdict:
    """The verdict on one contribution in its round."""

    factors: FloatArray
    """Per piece of the fragment."""
    agreement: float
    """Its median cosine with the others, over the whole fragment; with the outer momentum where they are too few."""
    suspect: str
    """Why its learner is suspect; empty: it is not."""


@dataclass(slots=True)
class LearnerRecord:
    """What is known of one learner."""

    rounds: int = 0
    """Rounds in which the others agreed with each other, so that it could be judged by agreement."""
    own: float = 0.0
    others: float = 0.0
    """Agreement of this learner, and of the others among themselves, averaged over the same rounds."""
    loudness: float = 0.0
    """Log of its norm over the others' median, averaged over all rounds of three or more …"""
    measured: int = 0
    """… of which there were so many."""
    repeats: int = 0
    sketches: dict[int, tuple[DoubleArray, float]] = field(default_factory=dict)
    """Per fragment, the sketch of its last contribution, and the steps behind it."""
    suspect: str = ""

    def note_agreement(self, own: float, others: float) -> None:
        self.rounds += 1
        rate = 1.0 / min(self.rounds, MEMORY)
        self.own += rate * (own - self.own)
        self.others += rate * (others - self.others)

    def note_loudness(self, loudness: float) -> None:
        self.measured += 1
        self.loudness += (loudness - self.loudness) / min(self.measured, MEMORY)

    def compare_with_last(self, fragment: int, sketch: DoubleArray, steps: float) -> tuple[float, float]:
        """Return the cosine of this contribution with the one before it to the same fragment, and the steps of the
        shorter; of the first one zeros."""
        before, known = self.sketches.get(fragment, (None, 0.0))
        self.sketches[fragment] = sketch, steps
        return (0.0, 0.0) if before is None else (float(np.sum(before * sketch)), min(known, steps))

    def note_repeat(self, own: float, others: float) -> None:
        """`others`: the same cosine of the other learners. In a tiny model everybody nearly repeats one direction: so
        theirs must turn far more than its own."""
        repeats = own > SAME and STILLER * (1.0 - own) < 1.0 - others
        self.repeats = self.repeats + 1 if repeats else 0

    def judge_suspicion(self) -> str:
        if self.repeats >= REPEATS:
            return f"it gave the same direction again {self.repeats} times in a row"
        if self.measured >= ROUNDS and math.exp(self.loudness) > LOUD:
            return f"its numbers are {math.exp(self.loudness):.1f} times as large as the others'"
        if self.rounds >= ROUNDS and self.own < (AGREES if self.suspect else DISAGREES) * self.others:
            return f"its agreement with the others is {self.own:.3f}, theirs with each other {self.others:.3f}"
        return ""


class FilterFigures(NamedTuple):
    """What a round's contributions to a fragment are judged by."""

    sketches: list[DoubleArray]
    """Of each."""
    norms: DoubleArray
    """[M, tensors]."""
    cosines: DoubleArray | None
    """Of a majority [M, references, tensors]; of fewer [M, tensors], with the outer momentum. None: there is none."""
    references: IndexArray
    """Whom each is compared with."""
    sizes: list[int]
    """Values of each tensor that were looked at."""
    sampled: bool
    """They were not all."""


def is_majority(members: int) -> bool:
    """Whether a round of so many is judged by itself, and not by the outer momentum."""
    return members >= MAJORITY


class Filter:
    def __init__(self, plan: FragmentPlan, threads: int = 1, secret: int = 0, sync_every: int = 1) -> None:
        """`secret`: seed of the samples. `sync_every`: H."""
        self._plan, self._threads, self._secret, self.sync_every = plan, threads, secret, sync_every
        self._records: dict[str, LearnerRecord] = {}
        self._usual: list[deque[DoubleArray]] = [deque(maxlen=USUAL_ROUNDS) for _ in plan.fragments]

    def judge(
        self,
        index: int,
        names: Sequence[str],
        deltas: Sequence[GivenDelta],
        momentum: FloatArray | None = None,
        round: int = 0,
        steps: Sequence[int] = (),
        *,
        sample: bool = False,
    ) -> list[FilterVerdict]:
        """Judge one round's contributions to fragment `index`.

        `momentum`: the fragment's, where the outer step keeps one. `sample`: a sample of the values will do; the
        factors are meant for use where it is not. `steps`: steps behind each contribution; empty: equally many.
        """
        fragment = self._plan.fragments[index]
        given = [as_readable(fragment, delta) for delta in deltas]
        if not sample:
            figures = measure_round(fragment, given, momentum, self._threads, round=round)
            return self.judge_cuts(index, names, figures, round, steps)
        return self._judge_figures(fragment, names, self._sample(fragment, given, momentum, round), steps)

    def judge_cuts(
        self, index: int, names: Sequence[str], figures: DoubleArray, round: int = 0, steps: Sequence[int] = ()
    ) -> list[FilterVerdict]:
        """The same by figures of all cuts of the fragment (`measure_round`)."""
        fragment, members = self._plan.fragments[index], len(names)
        among_many = is_majority(members)
        norms, cosines, sketches = compare_cuts(fragment, members, figures, round, with_momentum=not among_many)
        among = cosines if among_many else cosines[:members, members]
        found = FilterFigures(
            sketches,
            norms[:members],
            among,
            draw_references(members, round),
            [piece.size for piece in fragment.pieces],
            sampled=False,
        )
        return self._judge_figures(fragment, names, found, steps)

    def _sample(
        self, fragment: Fragment, given: Sequence[ReadableDelta], momentum: FloatArray | None, round: int
    ) -> FilterFigures:
        """Two samples: for the sketches, and for all else."""
        seed = [self._secret, fragment.index]
        kept, fresh = draw_sample(fragment, seed), draw_sample(fragment, [*seed, round + 1])
        sketches = agree.sketches([kept.read(delta, self._threads) for delta in given], self._threads)
        taken = [fresh.read(delta, self._threads) for delta in given]
        norms = agree.tensor_norms(fresh.parts, taken, self._threads)
        references = draw_references(len(given), round)
        if is_majority(len(given)):
            cosines = agree.pair_cosines(fresh.parts, taken, norms, references, self._threads)
        elif momentum is not None:
            cosines = agree.cosines_with(fresh.parts, taken, norms, fresh.take(momentum), self._threads)
        else:
            cosines = None
        sizes = [part.stop - part.start for part in fresh.parts]
        return FilterFigures(sketches, norms, cosines, references, sizes, sampled=bool(fresh.blocks))

    def _judge_figures(
        self, fragment: Fragment, names: Sequence[str], figures: FilterFigures, steps: Sequence[int]
    ) -> list[FilterVerdict]:
        records = [self._record_of(name) for name in names]
        pairs = zip(records, figures.sketches, strict=True)
        counted = self._count_steps(steps or [1] * len(names))
        compared = [
            record.compare_with_last(fragment.index, sketch, count)
            for (record, sketch), count in zip(pairs, counted.tolist(), strict=True)
        ]
        if is_majority(len(names)):
            _note_repeats(records, compared, figures.references)
            factors, agreements = self._among_many(fragment, figures, records, counted)
        else:
            factors, agreements = self._among_few(fragment, figures)
        return [_judged(*one) for one in zip(records, factors, agreements, strict=True)]

    def _record_of(self, name: str) -> LearnerRecord:
        record = self._records.pop(name, None) or LearnerRecord()
        self._records[name] = record
        if len(self._records) > NAMES:
            del self._records[next(iter(self._records))]
        return record

    def _count_steps(self, steps: Sequence[int]) -> DoubleArray:
        """Return the steps that count of each claim, capped by the second highest: one false claim gains nothing."""
        second = sorted(steps)[-2] if len(steps) > 1 else 1
        return np.clip(np.array(steps, np.float64), 1, max(1, self.sync_every, second))

    def _among_many(
        self, fragment: Fragment, figures: FilterFigures, records: list[LearnerRecord], steps: DoubleArray
    ) -> tuple[DoubleArray, DoubleArray]:
        norms, cosines, references = figures.norms, figures.cosines, figures.references
        assert cosines is not None, "each pair was compared"
        others = find_others(len(norms), references)
        usual = _median_of_others_norms(norms, steps, references)
        if not figures.sampled:
            # Of a round with many newcomers, whose contributions are short, the usual norm is not theirs.
            longest = np.maximum(1.0, np.sort(steps)[-2] / steps)
            self._usual[fragment.index].append(np.median(norms * longest[:, np.newaxis], axis=0))
        by_tensor = median_of_counted(cosines, others)
        chance = CHANCE / np.sqrt(figures.sizes)
        against = by_tensor < -np.maximum(AGAINST * _median_without_each(by_tensor, references), chance)
        whole = median_of_counted(agree.by_size(fragment, cosines), others)
        usual_agreement = _median_without_each(whole, references)
        loudness = agree.by_size(fragment, _log_ratio(norms, usual))
        for record, own, theirs, loud in zip(records, whole, usual_agreement, loudness, strict=True):
            record.note_loudness(float(loud))
            if theirs > CHANCE / math.sqrt(sum(figures.sizes)):
                record.note_agreement(float(own), float(theirs))
        return np.where(against, 0.0, _shortened(norms, CLIP * usual)), whole

    def _among_few(self, fragment: Fragment, figures: FilterFigures) -> tuple[DoubleArray, DoubleArray]:
        norms, past = figures.norms, () if figures.sampled else self._usual[fragment.index]
        factors = _shortened(norms, np.median(np.stack(past), axis=0)) if past else np.ones_like(norms)
        if figures.cosines is None:
            return factors, np.zeros(len(norms))
        agreements = agree.by_size(fragment, figures.cosines)
        against = (agreements < AGAINST_MOMENTUM)[:, np.newaxis]
        return np.where(against, MOMENTUM_SHARE * factors, factors), agreements


def measure_round(
    fragment: Fragment,
    deltas: Sequence[ReadableDelta],
    momentum: FloatArray | None,
    threads: int = 1,
    first: int = 0,
    round: int = 0,
) -> DoubleArray:
    """Of each cut of the fragment, or of a shard's part that begins at its value `first`: what a round's contributions
    are judged by. Too few are compared with the outer momentum; one that is not there yet agrees with nothing."""
    if is_majority(len(deltas)):
        return measure_cuts(fragment, deltas, None, threads, first, round)
    if momentum is None:
        momentum = np.zeros(fragment.size, np.float32)
    return measure_cuts(fragment, deltas, momentum, threads, first, round)


def check_kept(factors: Sequence[FloatArray], weights: Sequence[float]) -> None:
    """ValueError: there is nothing to merge."""
    if not any(factor.any() and weight > 0 for factor, weight in zip(factors, weights, strict=True)):
        raise ValueError("the filter leaves out every contribution of the round")


def _judged(record: LearnerRecord, factors: DoubleArray, agreement: float) -> FilterVerdict:
    record.suspect = record.judge_suspicion()
    if record.suspect:
        factors = np.zeros_like(factors)
    return FilterVerdict(factors.astype(np.float32), float(agreement), record.suspect)


def _median_without_each(figures: DoubleArray, references: IndexArray) -> DoubleArray:
    """For each member, the median of the others."""
    members = len(figures)
    table = np.broadcast_to(figures[references], (members, *figures[references].shape))
    return median_of_counted(table, find_others(members, references))


def _note_repeats(
    records: list[LearnerRecord], compared: Sequence[tuple[float, float]], references: IndexArray
) -> None:
    """Hold each cosine against those of others that lie between contributions of at least half as many steps: a short
    contribution has more noise, so it turns more, and a newcomer's first has nothing to be compared with."""
    cosines, steps = np.array(compared, np.float64).T
    theirs = steps[references]
    counted = find_others(len(records), references) & (theirs > 0) & (2 * theirs >= steps[:, np.newaxis])
    usual = median_of_counted(np.broadcast_to(cosines[references], counted.shape), counted)
    for record, own, had, others, known in zip(records, cosines, steps, usual, counted.any(axis=1), strict=True):
        if had and known:
            record.note_repeat(float(own), float(others))


def _median_of_others_norms(norms: DoubleArray, steps: DoubleArray, references: IndexArray) -> DoubleArray:
    """Return for each member the median norm of the others, for as many steps as the member has."""
    longer = np.maximum(1.0, steps[:, np.newaxis] / steps[references])
    return median_of_counted(norms[references] * longer[:, :, np.newaxis], find_others(len(norms), references))


def _shortened(norms: DoubleArray, most: DoubleArray) -> DoubleArray:
    """The factors that bring each norm down to `most`; a usual norm of 0 shortens nothing."""
    longer = (norms > most) & (most > 0)
    return np.divide(most, norms, out=np.ones_like(norms), where=longer)


def _log_ratio(norms: DoubleArray, usual: DoubleArray) -> DoubleArray:
    known = (norms > 0) & (usual > 0)
    ratio = np.divide(norms, usual, out=np.ones_like(norms), where=known)
    return np.asarray(np.log(ratio))
