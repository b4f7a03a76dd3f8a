"""What all ranks of a learner have said: the leader's state machine hears of it once every rank has.

Rules kept here, each with its test:
- every rank answers an order once; that all have comes out exactly once, whatever the order they come in;
- rank 0's counters count; the others only say that theirs is done, and must have done the same after the same step;
- an answer to a pull arrived if every part of it did, and is named by the digests of the parts: of each shard of the
  syncer in order of rank, and of these in order of shard;
- a version is fetched once all ranks hold the same one: those that got an older one fetch again;
- a body of the learner has the bytes of all ranks, and takes the seconds of the slowest;
- what one rank could not do, the learner could not do. It is told once all have answered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from atoll.courier.rank_channel import BoxReady, PartFetched, PartUploaded
from atoll.digests import combine_digests
from atoll.mailbox.channel import CopyMade, SlotFreed, VersionTaken
from atoll.protocol.errors import PeerError
from atoll.protocol.learner import effects as fx


class Behind(NamedTuple):
    """These ranks got an older version of the fragment than others did: they fetch again."""

    fragment: int
    ranks: tuple[int, ...]


Said = CopyMade | SlotFreed | VersionTaken | PartUploaded | PartFetched | fx.Saved | BoxReady
SaidByAll = Said | Behind
EventKey = tuple[str, int]
Answers = list[Any]
"""Of one kind, in order of rank."""


@dataclass(slots=True)
class RankEvents:
    ranks: int
    _open: dict[EventKey, dict[int, Said]] = field(default_factory=dict)

    def add(self, rank: int, said: Said) -> SaidByAll | None:
        """What all ranks have said, once this is the last of them. PeerError: they do not agree."""
        key = _key_of(said)
        answers = self._open.setdefault(key, {})
        if rank in answers:
            raise PeerError(f"rank {rank} answered twice: {said}")
        answers[rank] = said
        if len(answers) < self.ranks:
            return None
        del self._open[key]
        whole = COMBINE[key[0]]([answers[each] for each in range(self.ranks)])
        if isinstance(whole, Behind):
            self._open[key] = {each: said for each, said in answers.items() if each not in whole.ranks}
        elif isinstance(whole, fx.Saved):
            self._drop_cuts_before(whole.cut)
        return whole

    def _drop_cuts_before(self, cut: int) -> None:
        """A rank that is asked for a later cut may leave an earlier one out."""
        for key in [key for key in self._open if key[0] == "saved" and key[1] < cut]:
            del self._open[key]


def _key_of(said: Said) -> EventKey:
    match said:
        case CopyMade(slot=slot) | SlotFreed(slot=slot, incoming=False):
            return "outgoing", slot
        case VersionTaken(slot=slot) | SlotFreed(slot=slot):
            return "incoming", slot
        case PartUploaded(ask=ask):
            return "upload", ask
        case PartFetched(fragment=fragment):
            return "fetch", fragment
        case fx.Saved(cut=cut):
            return "saved", cut
        case BoxReady():
            return "box", 0


def combine_copies(answers: Answers) -> CopyMade | SlotFreed:
    """Where one rank made no copy there is none."""
    dropped = [said for said in answers if isinstance(said, SlotFreed)]
    if dropped:
        return dropped[0]
    _check_equal(answers, lambda made: (made.round, made.fragment, made.t, made.base, made.epoch), "copied")
    made: CopyMade = answers[0]
    return made


def combine_adoptions(answers: Answers) -> VersionTaken | SlotFreed:
    _check_equal(answers, lambda said: type(said).__name__, "adopted")
    first: VersionTaken | SlotFreed = answers[0]
    if isinstance(first, VersionTaken):
        _check_equal(answers, _describe_adoption, "adopted")
    return first


def combine_uploads(answers: Answers) -> PartUploaded:
    if reason := _first_reason(answers):
        return PartUploaded(answers[0].ask, reason=reason)
    nbytes, seconds = _combine_times(answers)
    digests = tuple(sorted(_combine_by_shard(answers).items()))
    return PartUploaded(answers[0].ask, digests, nbytes=nbytes, seconds=seconds)


def _combine_by_shard(answers: Answers) -> dict[int, str]:
    """As each shard names what came from all ranks."""
    found: dict[int, list[str]] = {}
    for said in answers:
        for shard, digest in said.digests:
            found.setdefault(shard, []).append(digest)
    return {shard: combine_digests(digests) for shard, digests in found.items()}


def _combine_times(answers: Answers) -> tuple[int, float]:
    """Return the bytes of all ranks and the seconds of the slowest: they send and fetch at the same time."""
    return sum(said.nbytes for said in answers), max(said.seconds for said in answers)


def combine_fetches(answers: Answers) -> PartFetched | Behind:
    fragment = answers[0].fragment
    if reason := _first_reason(answers):
        return PartFetched(fragment, reason=reason)
    newest = max(said.version for said in answers if said.version is not None)
    behind = [rank for rank, said in enumerate(answers) if said.version is not None and said.version < newest]
    if behind:
        return Behind(fragment, tuple(behind))
    nbytes, seconds = _combine_times(answers)
    latency_s = max(said.latency_s for said in answers)
    return PartFetched(fragment, newest, nbytes=nbytes, seconds=seconds, latency_s=latency_s)


def combine_saved(answers: Answers) -> fx.Saved:
    """Rank 0's part stands for all."""
    first: fx.Saved = answers[0]
    reason = _first_reason(answers)
    return msgspec.structs.replace(first, file="", digest="", reason=reason) if reason else first


def combine_boxes(answers: Answers) -> BoxReady:
    """A base counts as held only where every rank has all of it."""
    _check_equal(answers, lambda said: said.adopted, "came back with")
    first: BoxReady = answers[0]
    whole = [base[0] if len(set(base)) == 1 else -1 for base in zip(*(said.base for said in answers), strict=True)]
    return BoxReady(first.adopted, tuple(whole))


COMBINE: dict[str, Callable[[Answers], SaidByAll]] = {
    "outgoing": combine_copies,
    "incoming": combine_adoptions,
    "upload": combine_uploads,
    "fetch": combine_fetches,
    "saved": combine_saved,
    "box": combine_boxes,
}


def _describe_adoption(said: VersionTaken) -> tuple[int, ...]:
    return said.adopted.fragment, said.adopted.version, said.adopted.t, said.epoch


def _first_reason(answers: Answers) -> str:
    """Of the first rank that failed, with its number; empty: none did."""
    return next((f"rank {rank}: {said.reason}" for rank, said in enumerate(answers) if said.reason), "")


def _check_equal(answers: Answers, of: Callable[[Any], object], verb: str) -> None:
    for rank, said in enumerate(answers):
        if of(said) != of(answers[0]):
            raise PeerError(f"rank 0 {verb} {of(answers[0])} and rank {rank} {of(said)}: they have to do the same")
