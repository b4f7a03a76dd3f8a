"""What the leader of a learner's ranks has ordered of bodies, and what became of it. No I/O: the fault simulator runs
it as it is (rank_leader.py carries it out).

Rules kept here:
- a copy's slot stays until every rank has answered for its part;
- an order is answered for the learner once every rank has answered it (rank_events.py);
- a version counts as fetched once all ranks hold the same one: those that got an older one fetch it again, into the
  same slot;
- the way down is free for the next version once every rank has said so of its part; the learner says it once.
"""

from __future__ import annotations

from typing import NamedTuple

from atoll.courier.rank_channel import FetchPart, PartArriving, PartFetched, PartUploaded, UploadPart
from atoll.courier.rank_events import Behind, RankEvents, Said, SaidByAll
from atoll.courier.slots import COPY_GONE, IncomingSlots, OutgoingSlots
from atoll.digests import combine_digests
from atoll.protocol.learner import effects as fx


class FetchAgain(NamedTuple):
    """These ranks carry out the order once more."""

    order: FetchPart
    ranks: tuple[int, ...]


class RankOrders:
    def __init__(self, ranks: int) -> None:
        self._ranks, self._events = ranks, RankEvents(ranks)
        self._slots: tuple[OutgoingSlots, IncomingSlots] | None = None
        self._asks = 0
        self._uploads: dict[int, UploadPart] = {}
        """By ask: parts that are on their way in some rank."""
        self._fetches: dict[int, FetchPart] = {}
        """By fragment."""
        self._arriving: dict[int, set[int]] = {}
        """Ranks of whose parts little is still to come, by fragment."""

    def use_slots(self, outgoing: OutgoingSlots, incoming: IncomingSlots) -> None:
        """The shared memory is there, in all ranks."""
        self._slots = outgoing, incoming

    @property
    def _outgoing(self) -> OutgoingSlots:
        assert self._slots is not None
        return self._slots[0]

    @property
    def _incoming(self) -> IncomingSlots:
        assert self._slots is not None
        return self._slots[1]

    def order_upload(self, number: int, attempt: int, fragment: int, base: int) -> UploadPart | fx.UploadFailed:
        """For all ranks; or why there is none."""
        if (copy := self._outgoing.send(fragment)) is None:
            return fx.UploadFailed(number, attempt, COPY_GONE, no_copy=True)
        self._asks += 1
        slot, t = copy
        order = UploadPart(self._asks, number, attempt, fragment, slot, t, base)
        self._uploads[order.ask] = order
        self._outgoing.hold_slot(slot)
        return order

    def order_fetch(self, fragment: int, slot: int) -> FetchPart:
        """For all ranks."""
        order = self._fetches[fragment] = FetchPart(fragment, slot)
        self._arriving[fragment] = set()
        return order

    def take_answer(self, rank: int, said: Said | PartArriving) -> SaidByAll | fx.LearnerEvent | FetchAgain | None:
        """What all ranks have done now; None: some have not. PeerError: they do not agree."""
        if isinstance(said, PartArriving):
            return self._note_arriving(rank, said.fragment)
        match whole := self._events.add(rank, said):
            case PartUploaded():
                return self._finish_upload(whole)
            case PartFetched():
                return self._finish_fetch(whole)
            case Behind(fragment, ranks):
                return FetchAgain(self._fetches[fragment], ranks)
            case _:
                return whole

    def _finish_upload(self, whole: PartUploaded) -> fx.LearnerEvent:
        order = self._uploads.pop(whole.ask)
        self._outgoing.let_slot_go(order.slot)
        if whole.reason:
            return fx.UploadFailed(order.round, order.attempt, whole.reason)
        digest = combine_digests([digest for _, digest in whole.digests])
        return fx.Uploaded(order.round, order.attempt, digest, whole.nbytes, whole.seconds)

    def _note_arriving(self, rank: int, fragment: int) -> fx.Arriving | None:
        ranks = self._arriving.get(fragment)
        if ranks is None or rank in ranks:  # a rank that fetches again says it again
            return None
        ranks.add(rank)
        return fx.Arriving() if len(ranks) == self._ranks else None

    def _finish_fetch(self, whole: PartFetched) -> fx.LearnerEvent:
        slot = self._fetches.pop(whole.fragment).slot
        del self._arriving[whole.fragment]
        if whole.version is None:
            self._incoming.note_failed(slot)
            return fx.FetchFailed(whole.fragment, whole.reason)
        self._incoming.note_landed(whole.fragment, slot)
        return fx.Fetched(whole.fragment, whole.version, whole.nbytes, whole.seconds, whole.latency_s)
