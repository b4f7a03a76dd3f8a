"""Planted bugs of what is written down, and when: durability, terms, the ledger, leases, cuts."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from tests.simulate.planting import Plain, always, mutant, nothing

from atoll.protocol import history, ledger, records
from atoll.protocol.learner import connection
from atoll.protocol.learner import effects as learner_fx
from atoll.protocol.learner.connection import ConnectionState
from atoll.protocol.learner.versions import Versions
from atoll.protocol.leases import Leases, LeasesState
from atoll.protocol.syncer import effects as syncer_fx
from atoll.protocol.syncer.accounts import Accounts
from atoll.protocol.syncer.cuts import Cuts
from atoll.protocol.syncer.effect_order import EffectOrder
from atoll.protocol.syncer.ending import RunEnd
from atoll.protocol.syncer.joining import Joining
from atoll.protocol.syncer.membership import Membership
from atoll.protocol.syncer.rounds import Rounds
from atoll.simulate.disk import SimulatedDisk

# ---- durability ---------------------------------------------------------------------------------------------------


def _written_last(plain: Plain) -> Any:
    """What it wants durable stands behind what it tells."""

    def broken(self: Any, *args: Any) -> None:
        before = len(self.state.out._effects)
        plain(self, *args)
        mine = self.state.out._effects[before:]
        mine.sort(key=lambda effect: isinstance(effect, syncer_fx.Persist))
        self.state.out._effects[before:] = mine

    return broken


mutant("a round is announced before it is durable", (Rounds, "commit_round", _written_last))
mutant("a learner is welcomed before its incarnation is durable", (Joining, "greet_learner", _written_last))
mutant("a lease is sent before it is durable", (Accounts, "_grant_lease", _written_last))
mutant("the end is told before it is durable", (RunEnd, "_finish_run", _written_last))
mutant("nothing waits for the disk", (EffectOrder, "_must_wait", always(False)))


def _all_are_written(plain: Plain) -> Any:
    """One write counts for everything that was decided while it was under way."""

    def broken(self: EffectOrder, *, fenced: bool) -> bool:
        answer = bool(plain(self, fenced=fenced))
        self._durable = sum(isinstance(effect, syncer_fx.Persist) for effect in self._waiting)
        return answer

    return broken


mutant("a write counts for what was decided meanwhile", (EffectOrder, "end_write", _all_are_written))


def _merged_without_lives(plain: Plain) -> Any:
    def broken(self: history.History, record: records.MergedRecord) -> None:
        lives, self.lives = self.lives, {}
        plain(self, record)
        self.lives = lives

    return broken


mutant("a new term forgets whose steps are merged", (history.History, "_merged", _merged_without_lives))


def _leases_lost(plain: Plain) -> Any:
    def broken(cls: Any, state: history.HistoryState) -> history.History:
        restored: history.History = plain(replace_leases(state))
        return restored

    def replace_leases(state: history.HistoryState) -> history.HistoryState:
        waiting = state.leases and replace(state.leases, waiting=())
        return history.HistoryState(**{**{f: getattr(state, f) for f in state.__struct_fields__}, "leases": waiting})

    return classmethod(broken)


mutant("a cut forgets the samples that came back", (history.History, "restore", _leases_lost))


def _from_the_first(plain: Plain) -> Any:
    def broken(state: LeasesState) -> Leases:
        return plain(replace(state, holdings=tuple(replace(held, first=0) for held in state.holdings)))

    return broken


mutant("leases are restored as if none of them had been used up", (Leases, "restore", _from_the_first))


def _booked_by_name(plain: Plain) -> Any:
    def broken(self: ledger.Ledger, record: records.MergedRecord) -> None:
        live = dict(self.open.keys())  # incarnations by name: at most one life of each is open
        members = (replace(share, incarnation=live.get(share.learner, share.incarnation)) for share in record.members)
        plain(self, replace(record, members=tuple(members)))

    return broken


mutant("what a dead life gave is booked to the live one of its name", (ledger.Ledger, "merged", _booked_by_name))

# ---- terms --------------------------------------------------------------------------------------------------------


def _any_term(plain: Plain) -> Any:
    def broken(self: ConnectionState, message: Any) -> bool:
        self.term = min(self.term, message.term)
        return bool(plain(self, message))

    return broken


def _unfenced(plain: Plain) -> Any:
    def broken(self: SimulatedDisk, term: int) -> bool:
        claim, self.claim = self.claim, term
        try:
            return bool(plain(self, term))
        finally:
            self.claim = claim

    return broken


mutant("a learner heeds a term that is over", (ConnectionState, "accepts_message", _any_term))
mutant("the store takes what a deposed syncer writes", (SimulatedDisk, "end_append", _unfenced))


def _never_fenced(plain: Plain) -> Any:
    return lambda self, *, fenced: plain(self, fenced=False)


mutant("a deposed syncer goes on with what it could not write", (EffectOrder, "end_write", _never_fenced))


def _same_term(plain: Plain) -> Any:
    def broken(self: history.History, record: records.AnyRecord) -> None:
        if not isinstance(record, records.TermRecord):
            plain(self, record)

    return broken


mutant("a new syncer speaks for the old term", (history.History, "apply", _same_term))

# ---- the ledger ---------------------------------------------------------------------------------------------------


def _uncounted(name: str) -> Any:
    def make(plain: Plain) -> Any:
        def broken(stepped: learner_fx.Stepped, adopted: learner_fx.Adopted) -> learner_fx.Stepped:
            return replace(plain(stepped, adopted), **{name: getattr(stepped, name)})

        return broken

    return make


mutant("the counters are not reset at an adoption", (connection, "count_adoption", _uncounted("tokens")))
mutant("what an adoption drops is not counted", (connection, "count_adoption", _uncounted("dropped")))
mutant("what a version holds is counted as dropped too", (Versions, "tokens_in", always(0)))


def _lost_twice(plain: Plain) -> Any:
    def broken(self: ledger.Ledger, record: records.GoneRecord) -> None:
        account = self._open[record.learner, record.incarnation]
        plain(self, record)
        self._open[record.learner, record.incarnation] = account

    return broken


mutant("what is lost is counted twice", (ledger.Ledger, "closed", _lost_twice))


def _found_nothing(plain: Plain) -> Any:
    def broken(closed: ledger.Totals, fragment: int, tokens: int) -> ledger.Totals:
        return replace(closed, merged=ledger._plus(closed.merged, fragment, tokens))

    return broken


mutant("a contribution merged after its learner is gone stays lost", (ledger, "_found", _found_nothing))
mutant("who has been away too long keeps its account", (Joining, "close_abandoned_lives", nothing))

# ---- leases -------------------------------------------------------------------------------------------------------


def _all_again(plain: Plain) -> Any:
    def broken(self: Leases, name: str, incarnation: int, again_from: int = -1) -> None:
        key = (name, incarnation)
        if key in self._holdings:
            self._holdings[key] = replace(self._holdings[key], merged_to=0)
        plain(self, name, incarnation, 0)

    return broken


def _under_way_forgotten(plain: Plain) -> Any:
    return lambda self, one, reason, under_way=None: plain(self, one, reason, None)


mutant("samples that a version holds are leased again", (Leases, "gone", _all_again))
mutant("a round under way is forgotten when its member is gone", (Accounts, "close_life", _under_way_forgotten))
mutant("a welcome forgets the leases", (Accounts, "leases_held", always(())))


def _lease_twice(plain: Plain) -> Any:
    """What came back is issued, and stays among what came back until its last sample is."""

    def broken(self: Leases, lease: records.GrantedRecord) -> None:
        waiting = list(self._waiting)
        plain(self, lease)
        if waiting and lease.stop < waiting[0].stop:
            self._waiting[0] = waiting[0]

    return broken


mutant("a lease is issued twice", (Leases, "granted", _lease_twice))

# ---- cuts ---------------------------------------------------------------------------------------------------------


def _waits_for_the_dead(plain: Plain) -> Any:
    def broken(self: Cuts, now: float, wakes: list[float]) -> None:
        if self.open is None or now >= self.open.deadline or not self.open.awaited:
            plain(self, now, wakes)
        else:
            wakes.append(self.open.deadline)

    return broken


def _waits_for_nobody(plain: Plain) -> Any:
    def broken(self: Cuts, now: float, wakes: list[float]) -> None:
        if self.open is not None and self.open.kept:
            self.open.awaited.clear()
        plain(self, now, wakes)

    return broken


def _deadline_ignored(plain: Plain) -> Any:
    def broken(self: Cuts, now: float, wakes: list[float]) -> None:
        if self.open is not None:
            self.open.deadline = now + self.state.settings.cut_wait_s
        plain(self, now, wakes)

    return broken


mutant("a cut waits for the dead", (Cuts, "complete_if_ready", _waits_for_the_dead), (Cuts, "lose_learner", nothing))
mutant("a cut is complete without a live learner's part", (Cuts, "complete_if_ready", _waits_for_nobody))
mutant("a cut waits for who never saves", (Cuts, "complete_if_ready", _deadline_ignored))


def _same_life(plain: Plain) -> Any:
    def broken(self: Membership, now: float, hello: Any, run: str) -> Any:
        known = self.learners.get(hello.learner)
        one, new = plain(self, now, hello, run)
        if known is not None and new and known.session != hello.session:
            one.incarnation = known.incarnation
        return one, new

    return broken


mutant("another process takes over the incarnation of its name", (Membership, "find_or_begin_life", _same_life))
