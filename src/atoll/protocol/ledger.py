"""The ledger: what became of every token.

A token counts once for each of the P fragments, as a fragment-token, and each of those has exactly one fate:

    merged      in a committed version
    dropped     overwritten by an adoption, or trained on before its learner had the run's parameters. Of these,
                `missed` were overwritten by a version that holds none of its learner's steps, the others by one that
                does: they were made between reading the copy and adopting the version (overlap)
    lost        gone with its incarnation. Of these, `at_cut` were in flight at the cut that the run was made of, where
                the learner did not go on with them
    filtered    given to a committed version, and left out of it by the outlier filter (numerics/filter.py)
    rolled back was merged in a version that the guard took back (guard.py)
    in flight   in a learner's model and in no version yet

Every incarnation has an account. Its learner reports `total` (tokens of its process's life), c (tokens since its last
adoption) and d (tokens that adoptions dropped); committed rounds say what was merged, m. A contribution that is merged
but not adopted yet, u, is in m and still in c. Hence, for every fragment, at every report

    total − begin = (m − u) + d + c          in flight = c − u

with one and the same `begin` for all fragments and all reports of an incarnation. What is filtered or rolled back
stays in m, since its learner has counted it as merged; it is counted apart beside it. Rules kept here, each with its
test:
- a report that does not balance is told, and changes nothing; one that is older than what a merged contribution has
  told since cannot be judged and is passed over;
- a contribution that is newer than the last report tells what a report of its moment would have told;
- merged, filtered, dropped, lost, rolled back and in flight add up to computed at every moment, for every fragment.
  Steps that nobody was told of before a crash are in no account;
- what is lost is never negative, and a contribution that is merged after its learner is gone is merged, not lost;
- closed accounts are added up, over all and by learner: the state is one entry for every open account and for every
  learner's name, however long the run.

Replaying the records Joined, Merged, Restored and Gone gives the same accounts, except that reports are in no record:
the next report of every learner makes up for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import add, sub
from typing import TypeVar

from msgspec import field
from msgspec.structs import force_setattr, replace

from atoll.protocol.records import GoneRecord, MergedRecord, Record, Share, Undone
from atoll.protocol.statistics import merged_share

T = TypeVar("T")

Counts = tuple[int, ...]
"""Fragment-tokens, one number per fragment."""

FATES = ("computed", "merged", "dropped", "lost", "rolled_back", "filtered", "in_flight")
"""All that were computed, then what became of them."""


class Totals(Record, frozen=True):
    """The fates of all fragment-tokens, per fragment."""

    computed: Counts
    merged: Counts
    dropped: Counts
    lost: Counts
    in_flight: Counts
    missed: Counts = ()
    """Of `dropped`: the learner had missed the round that it adopted the version of. The rest is overlap."""
    rolled_back: Counts = ()
    filtered: Counts = ()
    at_cut: Counts = ()
    """Of `lost`: in no version at the cut that the run was made of."""

    def __post_init__(self) -> None:
        for name in ("missed", "rolled_back", "filtered", "at_cut"):
            if not getattr(self, name):  # written by a version that did not tell
                force_setattr(self, name, (0,) * len(self.computed))

    def balance(self) -> Counts:
        """Computed, less all that is known to have become of it: zero."""
        fates = zip(*(getattr(self, name) for name in FATES), strict=True)
        return tuple(computed - sum(others) for computed, *others in fates)

    def fragment_tokens(self) -> dict[str, int]:
        """Over all fragments."""
        return {name: sum(getattr(self, name)) for name in FATES}

    def merged_share(self) -> float | None:
        return merged_share(sum(self.merged), sum(self.computed), sum(self.in_flight))

    def whole(self) -> dict[str, int]:
        """In tokens. Parts of a token are rounded so that the fates still add up to what was computed."""
        fragments, so_far = len(self.computed), 0
        fates = self.fragment_tokens()
        tokens = {"computed": fates.pop("computed") // fragments}
        for name, count in fates.items():
            tokens[name] = (so_far + count) // fragments - so_far // fragments
            so_far += count
        return tokens

    def by_cause(self) -> dict[str, int]:
        """Why tokens are in no version: overlap and missed make up what is dropped, crash and cut what is lost.

        `cut` is there only in a run that was made of a cut, `filtered` only where the filter left something out.
        """
        whole = self.whole()
        cut = min(whole["lost"], sum(self.at_cut) // len(self.computed))
        missed = min(whole["dropped"], sum(self.missed) // len(self.computed))
        causes = {"overlap": whole["dropped"] - missed, "missed": missed, "crash": whole["lost"] - cut}
        causes |= {"cut": cut} if cut else {}
        return causes | ({"filtered": whole["filtered"]} if whole["filtered"] else {})


class Fate(Record, frozen=True):
    """What the record Gone says of an account that is closed."""

    total: int
    dropped: Counts
    lost: Counts
    missed: Counts


class Pending(Record, frozen=True):
    """A merged contribution that no report has shown as adopted."""

    version: int
    base: int
    tokens: int


class Account(Record, frozen=True):
    """One incarnation, as of the newest that was told of it."""

    learner: str
    incarnation: int
    origin: int | None
    """Tokens of its process that belong to others: to its earlier incarnations, to another run. None: not known yet."""
    begin: int | None
    """Tokens of its process when its counters began, known from its first report; those since `origin` are dropped."""
    total: int
    merged: Counts
    dropped: Counts
    tokens: Counts
    pending: tuple[Pending | None, ...]
    missed: Counts = ()
    """Part of `dropped`, as the learner last reported it."""
    rolled_back: Counts = ()
    """Part of `merged`."""
    filtered: Counts = ()
    """Part of `merged` that is not in `rolled_back`."""
    cut_total: int = -1
    """Its total at the cut that the run was made of, until its learner goes on with it there."""

    def __post_init__(self) -> None:
        for name in ("missed", "rolled_back", "filtered"):
            if not getattr(self, name):
                force_setattr(self, name, (0,) * len(self.merged))

    # ---- reports ------------------------------------------------------------------------------------------------

    def is_older(self, total: int, versions: Sequence[int]) -> bool:
        """Whether such a report was made before what is known already."""
        if total < self.total:
            return True
        for pending, held in zip(self.pending, versions, strict=True):
            if pending is not None and held < pending.base:
                return True
        return False

    def adopted(self, versions: Sequence[int]) -> Account:
        """What these versions contain is on its way no more."""
        if not any(self.pending):
            return self
        still = [p if p and held < p.version else None for p, held in zip(self.pending, versions, strict=True)]
        return replace(self, pending=tuple(still))

    def counted(
        self, total: int, tokens: Sequence[int], dropped: Sequence[int], missed: Sequence[int]
    ) -> tuple[Account, str | None]:
        """With the counters of a report; and what does not balance in it, if anything does not."""
        adopted = [m - u for m, u in zip(self.merged, self._unadopted(), strict=True)]
        sums = [a + d + c for a, d, c in zip(adopted, dropped, tokens, strict=True)]
        begin = max(total - sums[0], self.origin or 0) if self.begin is None else self.begin
        for fragment, told in enumerate(sums):
            if total - begin != told:
                return self, (
                    f"{self.learner} (incarnation {self.incarnation}), fragment {fragment}: {total - begin} tokens "
                    f"computed, but {adopted[fragment]} merged + {dropped[fragment]} dropped "
                    f"+ {tokens[fragment]} since its last adoption make {told}"
                )
        origin = begin if self.origin is None else self.origin
        counters = {"tokens": tuple(tokens), "dropped": tuple(dropped), "missed": tuple(missed)}
        return replace(self, origin=origin, begin=begin, total=total, **counters), None

    # ---- contributions ------------------------------------------------------------------------------------------

    def given(self, fragment: int, version: int, share: Share) -> Account:
        """A contribution is merged. Its copy held all that was in flight, so it also tells what was dropped before;
        unless a report has told since that another version was adopted over it: then that report is the newer one."""
        last = self.pending[fragment]
        assert last is None or last.version <= share.base, "contributes again only on a base that contains its last"
        now = replace(self.at_least(share.total), filtered=_plus(self.filtered, fragment, share.filtered))
        merged = self.merged[fragment] + share.tokens
        pending = _with(self.pending, fragment, Pending(version, share.base, share.tokens))
        in_flight = share.tokens + now.total - share.total
        if self.total >= share.total and self.tokens[fragment] < in_flight:
            return replace(now, merged=_with(self.merged, fragment, merged), pending=pending)
        begin = self.begin if self.begin is not None else self.origin or 0
        return replace(
            now,
            merged=_with(self.merged, fragment, merged),
            dropped=_with(self.dropped, fragment, share.total - begin - merged),
            tokens=_with(now.tokens, fragment, in_flight),
            pending=pending,
        )

    def at_least(self, total: int) -> Account:
        """It is known to have trained on this many: those not told of before are in flight."""
        more = max(0, total - self.total)
        return replace(self, total=self.total + more, tokens=tuple(c + more for c in self.tokens))

    # ---- the fates ----------------------------------------------------------------------------------------------

    def fates(self) -> Totals:
        """Where the pending tokens are in d and not in c (it adopted another version in between), they leave d here."""
        none = (0,) * len(self.merged)
        if self.origin is None:  # nothing but its contributions is known
            return Totals(self.merged, self._still_merged(), none, none, none, none, self.rolled_back, self.filtered)
        skipped = self.begin - self.origin if self.begin is not None else 0
        left = [c - u for c, u in zip(self.tokens, self._unadopted(), strict=True)]
        dropped = tuple(d + skipped + min(0, rest) for d, rest in zip(self.dropped, left, strict=True))
        missed = [known + skipped + min(0, rest) for known, rest in zip(self.missed, left, strict=True)]
        return Totals(
            computed=(self.total - self.origin,) * len(self.merged),
            merged=self._still_merged(),
            dropped=dropped,
            lost=none,
            in_flight=tuple(max(0, rest) for rest in left),
            missed=tuple(max(0, min(known, d)) for known, d in zip(missed, dropped, strict=True)),
            rolled_back=self.rolled_back,
            filtered=self.filtered,
        )

    def _still_merged(self) -> Counts:
        return tuple(map(sub, map(sub, self.merged, self.rolled_back), self.filtered))

    def _unadopted(self) -> list[int]:
        return [p.tokens if p is not None else 0 for p in self.pending]


class LedgerState(Record, frozen=True):
    """All of it, as a cut carries it."""

    closed: Totals
    open: tuple[Account, ...]
    by_learner: dict[str, Totals] = field(default_factory=dict)
    """Those that are closed, by learner. Empty in cuts of earlier versions."""

    def begin_run(self) -> LedgerState:
        """The same in a run that is made of this one: what is in flight stays behind, unless its learner goes on."""
        return replace(self, open=tuple(replace(account, cut_total=account.total) for account in self.open))


class Ledger:
    def __init__(self, fragments: int) -> None:
        self._none = (0,) * fragments
        self._closed = Totals(*[self._none] * 5)
        self._closed_of: dict[str, Totals] = {}
        self._open: dict[tuple[str, int], Account] = {}

    def joined(self, learner: str, incarnation: int, origin: int | None = None) -> None:
        """`origin`: 0 for a fresh process, its total when closed for one that starts over; None: a report will tell."""
        assert (learner, incarnation) not in self._open, f"incarnation {incarnation} of {learner} joins once"
        none, pending = self._none, (None,) * len(self._none)
        account = Account(learner, incarnation, origin, None, origin or 0, none, none, none, pending)
        self._open[learner, incarnation] = account

    def reported(
        self,
        learner: str,
        incarnation: int,
        total: int,
        tokens: Sequence[int],
        dropped: Sequence[int],
        versions: Sequence[int],
        missed: Sequence[int] = (),
    ) -> str | None:
        """What does not balance, if anything does not. `versions`: the adoptions that these counters know of."""
        account = self._open.get((learner, incarnation))
        if account is None or account.is_older(total, versions):
            return None
        account, wrong = account.adopted(versions).counted(total, tokens, dropped, missed or self._none)
        if wrong is None:
            self._open[learner, incarnation] = account
        return wrong

    def beyond(self, learner: str, incarnation: int, fragment: int, tokens: int, total: int) -> str | None:
        """Whether a contribution names more tokens than its copy can hold: c ≤ total − begin − m.

        Its base holds what was merged before, so u is 0; what d was then, nobody else knows.
        """
        account = self._open.get((learner, incarnation))
        if account is None:
            return None
        begin = account.begin if account.begin is not None else account.origin or 0  # it began there, or later
        left = total - begin - account.merged[fragment]
        return f"it names {tokens} tokens, {left} were left to give" if tokens > left else None

    def merged(self, record: MergedRecord) -> None:
        for share in record.members:
            if (account := self._open.get((share.learner, share.incarnation))) is not None:
                given = account.given(record.fragment, record.version, share)
                self._open[share.learner, share.incarnation] = given
            else:
                self._closed = _found(self._closed, record.fragment, share)
                if (own := self._closed_of.get(share.learner)) is not None:
                    self._closed_of[share.learner] = _found(own, record.fragment, share)

    def roll_back(self, undone: Iterable[Undone]) -> None:
        """What these had merged is in no version any more."""
        for one in undone:
            if (account := self._open.get((one.learner, one.incarnation))) is not None:
                more = tuple(map(add, account.rolled_back, one.tokens))
                self._open[one.learner, one.incarnation] = replace(account, rolled_back=more)
            else:
                self._closed = _undone(self._closed, one.tokens)
                if (own := self._closed_of.get(one.learner)) is not None:
                    self._closed_of[one.learner] = _undone(own, one.tokens)

    def closing(self, learner: str, incarnation: int, total: int = 0) -> Fate:
        """What the record Gone is to say. `total`: of its newest contribution under way, which may be merged yet."""
        account = self._open[learner, incarnation].at_least(total)
        fates = account.fates()
        return Fate(account.total, fates.dropped, fates.in_flight, fates.missed)

    def closed(self, record: GoneRecord) -> None:
        """Its numbers are final; reports that still come are passed over."""
        account = self._open.pop((record.learner, record.incarnation))
        at_cut = record.lost if account.cut_total == record.total else self._none
        merged, undone = account.fates().merged, account.rolled_back
        computed = tuple(map(sum, zip(account.merged, record.dropped, record.lost, strict=True)))
        fates = Totals(
            computed, merged, record.dropped, record.lost, self._none, record.missed, undone, account.filtered, at_cut
        )
        self._closed = _sum(self._closed, fates)
        before = self._closed_of.get(record.learner)
        self._closed_of[record.learner] = fates if before is None else _sum(before, fates)

    @property
    def open(self) -> Mapping[tuple[str, int], Account]:
        """The open accounts, by learner and incarnation."""
        return self._open

    def totals(self) -> Totals:
        return _sum(self._closed, *(account.fates() for account in self._open.values()))

    def by_learner(self) -> dict[str, Totals]:
        """The same for every learner, over all its incarnations."""
        return self.fates()[1]

    def fates(self) -> tuple[Totals, dict[str, Totals]]:
        """Return both, with one look at each account."""
        by_learner, of_open = dict(self._closed_of), list[Totals]()
        for account in self._open.values():
            of_open.append(fates := account.fates())
            before = by_learner.get(account.learner)
            by_learner[account.learner] = fates if before is None else _sum(before, fates)
        return _sum(self._closed, *of_open), by_learner

    # ---- as a cut carries it ------------------------------------------------------------------------------------

    def state(self) -> LedgerState:
        return LedgerState(self._closed, tuple(self._open[key] for key in sorted(self._open)), dict(self._closed_of))

    @classmethod
    def restore(cls, state: LedgerState) -> Ledger:
        ledger = cls(len(state.closed.computed))
        ledger._closed, ledger._closed_of = state.closed, dict(state.by_learner)
        ledger._open = {(account.learner, account.incarnation): account for account in state.open}
        return ledger


def _found(closed: Totals, fragment: int, share: Share) -> Totals:
    """It was under way when its account was closed: counted as lost, or as dropped where it had adopted since."""
    tokens = share.tokens
    lost = min(tokens, closed.lost[fragment])
    missed = min(tokens - lost, closed.missed[fragment])  # adopted without it, as it seemed then
    return replace(
        closed,
        merged=_plus(closed.merged, fragment, tokens - share.filtered),
        filtered=_plus(closed.filtered, fragment, share.filtered),
        lost=_plus(closed.lost, fragment, -lost),
        at_cut=_with(closed.at_cut, fragment, min(closed.at_cut[fragment], closed.lost[fragment] - lost)),
        dropped=_plus(closed.dropped, fragment, lost - tokens),
        missed=_plus(closed.missed, fragment, -missed),
    )


def _undone(closed: Totals, tokens: Counts) -> Totals:
    merged, undone = tuple(map(sub, closed.merged, tokens)), tuple(map(add, closed.rolled_back, tokens))
    return replace(closed, merged=merged, rolled_back=undone)


def _sum(*parts: Totals) -> Totals:
    columns = [zip(*(getattr(part, name) for part in parts), strict=True) for name in Totals.__struct_fields__]
    return Totals(*(tuple(map(sum, column)) for column in columns))


def _with(row: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*row[:place], value, *row[place + 1 :])


def _plus(row: Counts, place: int, more: int) -> Counts:
    return _with(row, place, row[place] + more)
