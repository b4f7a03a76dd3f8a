"""Check the members of every round against all that earlier records say of them.

Rules:
- an incarnation joins once, before its first contribution and after the previous one ended; numbers increase;
- a contribution is merged at most once: its step is later than that of the same incarnation's last one to the same
  fragment, and its base contains that one;
- it has steps and tokens, weighs tokens · (tokens / steps) to the bit, or what its limit leaves of that, which is 1 or
  the one that the run allows it; members are sorted by learner id;
- no more of an incarnation is merged than it trained on; when it ends, merged + dropped + lost of every fragment equals
  what it trained on;
- an incarnation that ended is in rounds that were open at that moment, and in no later one.

Memory does not grow with the run: one entry per incarnation that may still be merged.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from operator import gt

from atoll.protocol.errors import AtollError
from atoll.protocol.history import HistoryState
from atoll.protocol.ledger import Ledger
from atoll.protocol.records import GoneRecord, JoinedRecord, MergedRecord, Share
from atoll.protocol.settings import Settings
from atoll.protocol.syncer.weights import limit_weights
from atoll.protocol.syncer.weights import weight as weigh_plainly


class BadRun(AtollError):
    """Something in a run's files breaks a rule; the text names it and its place."""


LastMerged = tuple[int, int]
"""Of a contribution that was merged: the version it went into, and its step."""


@dataclass(slots=True)
class IncarnationTally:
    """One incarnation."""

    origin: int
    last: list[LastMerged | None]
    merged: list[int]
    total: int = 0
    """Tokens its process trained on, as far as known."""
    over_by: int | None = None
    """It ended; no round from this one on may have it as a member."""
    again_from: int = -1
    """Leased samples from this position on were issued again."""


class MemberAudit:
    def __init__(self, fragments: int) -> None:
        self.fragments = fragments
        self.incarnations = 0
        self.contributions = 0
        self.merged = [0] * fragments
        """Tokens in committed versions, per fragment."""
        self._newest: dict[str, int] = {}
        self._known: dict[tuple[str, int], IncarnationTally] = {}
        self._over: deque[tuple[int, tuple[str, int]]] = deque()
        """Those that are over, with the round by which they can be forgotten, in that order."""
        self._unknown_before = 0
        """In rounds below this one there may be some that were over before anything is known."""

    @property
    def learners(self) -> int:
        return len(self._newest)

    def is_open(self, learner: str, incarnation: int) -> bool:
        tally = self._known.get((learner, incarnation))
        return tally is not None and tally.over_by is None

    @classmethod
    def restore_from_state(cls, state: HistoryState, *, under_way: bool) -> MemberAudit:
        """As a cut holds it. `under_way`: rounds may come that hold contributions of those who are over already."""
        tallies = cls(len(state.versions))
        tallies.merged = list(Ledger.restore(state.ledger).totals().merged)
        tallies._unknown_before = state.committed + tallies.fragments if under_way else 0
        tallies._newest = {name: life.incarnation for name, life in state.lives.items()}
        for account in state.ledger.open:
            given = state.lives[account.learner].merged
            last = [(version, t) if version >= 0 else None for version, t, _ in given]
            tally = IncarnationTally(account.origin or 0, last, list(account.merged), account.total)
            tallies._known[account.learner, account.incarnation] = tally
        return tallies

    # ---- coming and going ---------------------------------------------------------------------------------------

    def check_join(self, record: JoinedRecord) -> None:
        newest = self._newest.get(record.learner, 0)
        who = _who(record.learner, record.incarnation)
        if record.incarnation <= newest:
            raise BadRun(f"{who} joins after incarnation {newest}")
        if self.is_open(record.learner, newest):
            raise BadRun(f"{who} joins while incarnation {newest} is not over")
        self._newest[record.learner] = record.incarnation
        self.incarnations += 1
        tally = IncarnationTally(record.origin, [None] * self.fragments, [0] * self.fragments, record.origin)
        self._known[record.learner, record.incarnation] = tally

    def check_departure(self, record: GoneRecord, committed: int) -> None:
        who = _who(record.learner, record.incarnation)
        if not self.is_open(record.learner, record.incarnation):
            raise BadRun(f"{who} is gone, but {self._why_not_open(record.learner, record.incarnation)}")
        tally = self._known[record.learner, record.incarnation]
        self._check_fates(who, tally, record)
        tally.total, tally.again_from = record.total, record.again_from
        # A round takes each fragment once while it is under way: all that may hold a contribution of it lie below.
        tally.over_by = committed + self.fragments
        self._over.append((tally.over_by, (record.learner, record.incarnation)))

    def _check_fates(self, who: str, tally: IncarnationTally, record: GoneRecord) -> None:
        if len(record.dropped) != self.fragments or len(record.lost) != self.fragments:
            raise BadRun(f"{who} is gone with the fates of {len(record.lost)} fragments, the run has {self.fragments}")
        if record.missed and (len(record.missed) != self.fragments or any(map(gt, record.missed, record.dropped))):
            raise BadRun(f"{who} is gone with {record.missed} missed of {record.dropped} dropped")
        if record.total < tally.total:
            raise BadRun(f"{who} is gone with {record.total} tokens, but a contribution told of {tally.total}")
        computed = record.total - tally.origin
        for fragment, fates in enumerate(zip(tally.merged, record.dropped, record.lost, strict=True)):
            if min(fates) < 0 or sum(fates) != computed:
                merged, dropped, lost = fates
                raise BadRun(
                    f"the ledger does not balance: {who}, fragment {fragment}: {computed} tokens computed, "
                    f"but {merged} merged + {dropped} dropped + {lost} lost make {sum(fates)}"
                )

    def forget_before(self, committed: int) -> None:
        """Drop incarnations that no later round can have as a member."""
        while self._over and self._over[0][0] <= committed:
            del self._known[self._over.popleft()[1]]

    # ---- contributions ------------------------------------------------------------------------------------------

    def check_members(self, record: MergedRecord, settings: Settings) -> None:
        names = [share.learner for share in record.members]
        if not names:
            raise BadRun(f"round {record.round} is merged from nothing")
        if names != sorted(set(names)):
            raise BadRun(f"the members of round {record.round} are not in the order of learner ids: {', '.join(names)}")
        for share in record.members:
            self._take_share(record, share)
        _check_weights(record, settings)

    def _take_share(self, record: MergedRecord, share: Share) -> None:
        who = f"round {record.round}: {_who(share.learner, share.incarnation)}"
        tally = self._known.get((share.learner, share.incarnation))
        _check_share(who, record.version, share)
        self.merged[record.fragment] += share.tokens - share.filtered
        self.contributions += 1
        if (
            tally is None
            and record.round < self._unknown_before
            and share.incarnation <= self._newest.get(share.learner, 0)
        ):
            return
        if tally is None or (tally.over_by is not None and record.round >= tally.over_by):
            raise BadRun(f"{who} is a member, but {self._why_not_open(share.learner, share.incarnation)}")
        _check_once(who, tally.last[record.fragment], share)
        _check_tokens(who, record.fragment, tally, share)
        if 0 <= tally.again_from < share.position:
            raise BadRun(
                f"{who} is merged up to sample {share.position} of its leases, "
                f"but those from {tally.again_from} on were issued again"
            )
        tally.last[record.fragment] = (record.version, share.t)
        tally.merged[record.fragment] += share.tokens
        tally.total = max(tally.total, share.total)

    def _why_not_open(self, learner: str, incarnation: int) -> str:
        never = incarnation > self._newest.get(learner, 0)
        return "it never joined" if never else "it was over before"


def _check_share(who: str, version: int, share: Share) -> None:
    if share.steps <= 0 or share.tokens <= 0:
        raise BadRun(f"{who} gave {share.steps} steps and {share.tokens} tokens")
    if not 0 <= share.base < version:
        raise BadRun(f"{who} is merged into version {version} on a base of version {share.base}")
    if not 0 <= share.filtered <= share.tokens or (share.filtered and not share.factors):
        raise BadRun(f"{who}: the filter left out {share.filtered} of {share.tokens} tokens")


def _check_weights(record: MergedRecord, settings: Settings) -> None:
    """All as the rules make them, within limits that the run allows."""
    _check_limits(record, settings)
    plain = [weigh_plainly(share) for share in record.members]
    within = limit_weights(plain, [share.limit for share in record.members])
    if within == [share.weight for share in record.members]:
        return
    all_of = zip(record.members, plain, within, strict=True)
    share, weight, least = next((share, weight, least) for share, weight, least in all_of if share.weight != least)
    or_less = f", or {least!r} within the limit" if least < weight else ""
    raise BadRun(
        f"round {record.round}: {_who(share.learner, share.incarnation)} weighs {share.weight!r}, "
        f"but {share.tokens} tokens in {share.steps} steps weigh {weight!r}{or_less}"
    )


def _check_limits(record: MergedRecord, settings: Settings) -> None:
    for share in record.members:
        allowed = settings.weight_limits.get(share.learner, settings.weight_limit)
        if not (share.limit == allowed or 1.0 == share.limit <= allowed):
            who = _who(share.learner, share.incarnation)
            raise BadRun(
                f"round {record.round}: {who} may weigh {share.limit:g} times the others, allowed are {allowed:g}"
            )


def _check_once(who: str, last: LastMerged | None, share: Share) -> None:
    version, t = last or (-1, -1)
    if share.t == t:
        raise BadRun(f"{who} is merged twice: its contribution of step {t} is in version {version} already")
    if share.t < t:
        raise BadRun(f"{who} gave step {share.t}, but its step {t} is in version {version} already")
    if share.base < version:
        raise BadRun(f"{who} has a stale base: version {share.base}, but version {version} already contains its steps")


def _check_tokens(who: str, fragment: int, tally: IncarnationTally, share: Share) -> None:
    merged = tally.merged[fragment] + share.tokens
    if merged > share.total - tally.origin:
        raise BadRun(
            f"the ledger does not balance: {who} had trained on {share.total - tally.origin} tokens, "
            f"but {merged} of them are merged in fragment {fragment}"
        )
    if tally.over_by is not None and share.total > tally.total:
        raise BadRun(
            f"the ledger does not balance: {who} was closed at {tally.total} tokens, but gave at {share.total}"
        )


def _who(learner: str, incarnation: int) -> str:
    return f"{learner} (incarnation {incarnation})"
