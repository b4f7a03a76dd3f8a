"""Lives, leased data and tokens: what the journal must hold so that every token and sample has one known fate.

Rules kept here, each with its test:
- an incarnation is recorded before its welcome, so no number is given twice; so is the credential that owns its name;
- a life is closed when another process takes its name, when it leaves, starts over, or was away for too long; what it
  had not contributed is then lost, once;
- samples past the last that a version or a given contribution contains are issued again; those of a given one that is
  never merged are not;
- a report that does not balance raises an alarm, which is recorded and never silently corrected.
"""

from __future__ import annotations

from atoll.protocol.leases import wrong_sources
from atoll.protocol.limits import MAX_COUNTER, clipped
from atoll.protocol.messages import Contribution, Lease, Progress, Range, Register
from atoll.protocol.records import AlarmedRecord, GoneRecord, GrantedRecord, JoinedRecord, OwnedRecord, SourcesRecord
from atoll.protocol.syncer.claims import beyond_lease
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.state import SyncerState

AHEAD = 3
"""Leases a learner holds at a time, so that it never waits for the next."""
MOST_AHEAD = 2 * AHEAD
"""Leases that no learner is granted beyond, also where (synchronous) all are granted some because one lacks them: one
that joins again and again would otherwise fill the others' accounts with leases that nobody takes."""
LEASE_BATCHES = 64


class Accounts:
    def __init__(self, state: SyncerState) -> None:
        self.state = state
        self._batch: dict[str, int] = {}
        """Samples per batch of those that take leases, by name."""
        self._alarmed: set[tuple[str, int]] = set()

    def open_life(self, learner: KnownLearner) -> None:
        before = self.state.history.lives.get(learner.name)
        origin = before.total if before is not None and before.session == learner.session else learner.origin
        joined = (learner.name, learner.incarnation, learner.session, learner.t, origin, learner.declared)
        self.state.out.persist(JoinedRecord(*joined))

    def record_owner(self, learner: KnownLearner, token: str) -> None:
        """Record which credential (`token`: its name) owns the learner's name, for later terms."""
        if token and self.state.history.owners.get(learner.name) != token:
            self.state.out.persist(OwnedRecord(learner.name, token))

    def close_life(self, learner: KnownLearner, reason: str, under_way: Contribution | None = None) -> None:
        """This incarnation is over; `under_way`: its newest contribution to a round that may be committed yet."""
        if learner.closed:
            return
        learner.closed, learner.closed_for, learner.may_return = True, reason, False
        self._batch.pop(learner.name, None)  # leases for the next process would come before it says what its data is
        again = -1
        if self.state.history.leases is not None and self.state.history.leases.holds(learner.name, learner.incarnation):
            merged_to = self.state.history.leases.merged_to(learner.name, learner.incarnation)
            again = max(merged_to, under_way.position if under_way else 0)
        fate = self.state.history.ledger.closing(learner.name, learner.incarnation, under_way.total if under_way else 0)
        record = GoneRecord(
            learner=learner.name,
            incarnation=learner.incarnation,
            t=learner.t,
            total=fate.total,
            dropped=fate.dropped,
            lost=fate.lost,
            position=learner.position,
            again_from=again,
            reason=reason,
            missed=fate.missed,
        )
        self.state.out.persist(record)

    def book_report(self, learner: KnownLearner, report: Progress) -> None:
        wrong = self.state.history.ledger.reported(
            learner.name,
            learner.incarnation,
            report.tokens_total,
            report.tokens,
            report.dropped,
            report.counted,
            report.missed,
        )
        if wrong is not None:
            self._raise_alarm(learner, wrong)
        if learner.name in self._batch and report.position >= 0:
            self._book_position(learner)
            self._grant_leases(learner)

    def beyond_lease(self, learner: KnownLearner, position: int, before: int = -1) -> str | None:
        """What is wrong with its place in its leases; nothing where it takes none."""
        leases = self.state.history.leases
        if position < 0 or leases is None or learner.name not in self._batch:
            return None
        return beyond_lease(position, before, leases.leased(learner.name, learner.incarnation))

    def beyond_ledger(self, learner: KnownLearner, given: Contribution) -> str | None:
        return self.state.history.ledger.beyond(
            learner.name, learner.incarnation, given.fragment, given.tokens, given.total
        )

    def _raise_alarm(self, learner: KnownLearner, wrong: str) -> None:
        if (learner.name, learner.incarnation) not in self._alarmed:
            self._alarmed.add((learner.name, learner.incarnation))
            self.state.out.persist(AlarmedRecord(learner.name, learner.incarnation, clipped(wrong)))
            self.state.out.note("unbalanced", f"the ledger does not balance: {wrong}", learner)

    # ---- leases -------------------------------------------------------------------------------------------------

    def register_data(self, learner: KnownLearner, message: Register) -> None:
        """The first to come says what the run's data is; one with other data keeps it to itself."""
        reason = wrong_sources(message.datasets, message.epochs) or _wrong_sizes(message)
        if reason is None and self.state.history.leases is None:
            self.state.out.persist(SourcesRecord(message.datasets, message.epochs))
        if reason is None:
            assert self.state.history.leases is not None
            reason = self.state.history.leases.differs(message.datasets, message.epochs)
        if reason is not None:
            reason = clipped(reason)  # names of a peer's data are in it
            self.state.out.note("warning", f"{learner.name}: {reason}; its data is counted, not leased", learner)
            self.state.out.send(learner.name, Lease(ranges=(), own=reason, incarnation=learner.incarnation))
            return
        self._batch[learner.name] = message.batch
        self._grant_leases(learner)

    def leases_held(self, learner: KnownLearner) -> tuple[Range, ...]:
        """What it was leased, in order, for one that comes back."""
        if self.state.history.leases is None:
            return ()
        return tuple(_range(lease) for lease in self.state.history.leases.held(learner.name, learner.incarnation))

    def _book_position(self, learner: KnownLearner) -> None:
        assert self.state.history.leases is not None
        wrong = self.state.history.leases.taken(learner.name, learner.incarnation, max(0, learner.position))
        if wrong is not None:
            self._raise_alarm(learner, wrong)

    def _grant_leases(self, learner: KnownLearner) -> None:
        """A few leases ahead of what it has taken; in a synchronous run to all at once, so that who reports first does
        not decide who trains on what."""
        if not self.state.settings.synchronous:
            self._grant_lease([learner])
            return
        there = [one for one in self.state.members.connected_learners() if one.name in self._batch]
        if len(there) >= self.state.settings.learners or self.state.history.committed > 0:
            self._grant_lease(there)

    def _grant_lease(self, learners: list[KnownLearner]) -> None:
        leases = self.state.history.leases
        assert leases is not None
        if not any(self._lacks_lease(one) for one in learners):
            return
        granted: dict[str, list[Range]] = {one.name: [] for one in learners}
        while any(self._lacks_lease(one) for one in learners) and not leases.used_up:
            for one in learners:
                if self._has_room(one) >= MOST_AHEAD:
                    continue
                lease = leases.next(one.name, one.incarnation, LEASE_BATCHES * self._batch[one.name])
                if lease is not None:
                    self.state.out.persist(lease)
                    granted[one.name].append(_range(lease))
        for one in learners:
            over = leases.used_up and leases.room(one.name, one.incarnation) == 0
            if granted[one.name] or over:
                ranges = tuple(granted[one.name])
                self.state.out.send(one.name, Lease(ranges=ranges, over=leases.used_up, incarnation=one.incarnation))

    def _lacks_lease(self, learner: KnownLearner) -> bool:
        return self._has_room(learner) < AHEAD - 1

    def _has_room(self, learner: KnownLearner) -> float:
        """Whole leases that it has not taken yet."""
        assert self.state.history.leases is not None
        size = LEASE_BATCHES * self._batch[learner.name]
        return self.state.history.leases.room(learner.name, learner.incarnation) / size


def _wrong_sizes(message: Register) -> str | None:
    """A batch must fit in one dataset."""
    sizes = [samples for _, samples, _ in message.datasets]
    if not 1 <= message.batch <= min(sizes):
        return f"a batch of {message.batch} samples does not fit a dataset of {min(sizes)}"
    if max(sizes) >= MAX_COUNTER:
        return f"a dataset of {max(sizes)} samples is none that a run gets through"
    return None


def _range(lease: GrantedRecord) -> Range:
    return Range(lease.lease, lease.dataset, lease.epoch, lease.start, lease.stop)
