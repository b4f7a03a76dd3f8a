"""What the journal says, held against what the learners really did: Θ from their contributions, samples and holders.

The rules of the journal itself are those of `atoll verify` (store/audit.py): every record is audited once it is
durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, isfinite

from atoll.protocol import records
from atoll.protocol.history import History
from atoll.protocol.records import GoneRecord, GrantedRecord, Share
from atoll.simulate.disk import SimulatedDisk
from atoll.simulate.training import Payload
from atoll.store.audit import JournalAudit
from atoll.store.audit_members import BadRun

NEAR = 1e-6
ISSUED_AGAIN = "a data range is issued again only if no fragment has merged it"
ONE_HOLDER = "a sample is in one holder's hands at a time"
Pass = tuple[int, int]
"""Dataset and epoch."""
OwnedRange = tuple[int, int, str]
"""From where to where, and whose."""


class Violation(AssertionError):
    """A broken promise, by the name of the invariant that it breaks."""

    def __init__(self, invariant: str, message: str, learner: str = "", fragment: int = -1) -> None:
        """`learner` and `fragment`: whose story tells how it came about."""
        super().__init__(f"{invariant}: {message}")
        self.invariant, self.message, self.learner, self.fragment = invariant, message, learner, fragment


@dataclass(slots=True)
class SampleHolder:
    granted: list[GrantedRecord] = field(default_factory=list)
    merged_to: int = 0
    over: bool = False


class Samples:
    """Who holds which samples, and which are in the model, by the records alone."""

    def __init__(self) -> None:
        self.lives: dict[tuple[str, int], SampleHolder] = {}
        self._held: dict[Pass, dict[int, OwnedRange]] = {}
        self._merged: dict[Pass, dict[int, OwnedRange]] = {}
        """Per pass and lease: what of it is held, and what of it is in the model."""

    def add_lease(self, lease: GrantedRecord) -> None:
        where = (lease.dataset, lease.epoch)
        for ranges, name in ((self._held, ONE_HOLDER), (self._merged, ISSUED_AGAIN)):
            for start, stop, who in ranges.get(where, {}).values():
                if start < lease.stop and lease.start < stop:
                    said = f"samples {lease.start} to {lease.stop} of pass {where} go to {lease.learner}"
                    raise Violation(name, f"{said}; {start} to {stop} are {who}'s", lease.learner)
        self.lives.setdefault((lease.learner, lease.incarnation), SampleHolder()).granted.append(lease)
        self._held.setdefault(where, {})[lease.lease] = (lease.start, lease.stop, lease.learner)

    def add_merged(self, number: int, share: Share) -> None:
        """All it had taken by then is in the model, or was dropped on the way there."""
        life = self.lives.get((share.learner, share.incarnation))
        if life is None or share.position <= life.merged_to:
            return
        for lease, start, stop in _between(life.granted, life.merged_to, share.position):
            merged = self._merged.setdefault((lease.dataset, lease.epoch), {})
            for of, (low, high, who) in merged.items():
                if of != lease.lease and low < stop and start < high:
                    said = f"round {number} merges samples {start} to {stop} of {share.learner}, merged by {who} before"
                    raise Violation(ISSUED_AGAIN, said, share.learner)
            merged[lease.lease] = (lease.start, stop, share.learner)
        life.merged_to = share.position

    def release_life(self, gone: GoneRecord) -> None:
        life = self.lives.get((gone.learner, gone.incarnation))
        if life is None or life.over:
            return
        life.over = True
        for lease in life.granted:
            del self._held[lease.dataset, lease.epoch][lease.lease]


def _between(granted: list[GrantedRecord], low: int, high: int) -> list[tuple[GrantedRecord, int, int]]:
    """The pieces of its leases that it took from position `low` to position `high`."""
    pieces, at = [], 0
    for lease in granted:
        size = lease.stop - lease.start
        start, stop = max(low - at, 0), min(high - at, size)
        if start < stop:
            pieces.append((lease, lease.start + start, lease.start + stop))
        at += size
    return pieces


def weigh(terms: Iterable[tuple[float, float]]) -> float:
    """Σ w Δ / Σ w, of weights and values; the same in any order."""
    found = list(terms)
    return fsum(weight * value for weight, value in found) / fsum(weight for weight, _ in found)


def _merge_groups(given: Mapping[str, tuple[float, float]], groups: Sequence[Sequence[str]]) -> float:
    """The outer gradient of members by name; `groups`: of which of them the mean came."""
    if not groups:
        return sum(weight * delta for weight, delta in given.values()) / sum(weight for weight, _ in given.values())
    means = [(fsum(given[name][0] for name in names), weigh(given[name] for name in names)) for names in groups]
    alone = given.keys() - {name for names in groups for name in names}
    return weigh([*means, *(given[name] for name in alone)])


class Oracle:
    def __init__(
        self,
        disk: SimulatedDisk,
        fragments: int,
        outer_lr: float,
        gradient: Callable[[int], float],
        account_closed: Callable[[GoneRecord], None],
    ) -> None:
        """`account_closed` is told of every account that the journal closes."""
        self._disk, self._fragments, self._outer_lr, self._gradient = disk, fragments, outer_lr, gradient
        self._account_closed = account_closed
        self.payloads: dict[tuple[int, str, int, int], Payload] = {}
        """(term, learner, round, attempt)"""
        self.never_were: set[tuple[int, int, float]] = set()
        """Versions with their values that learners may hold though the disk lost them (durability = "cut")."""
        self._begin()

    def _begin(self) -> None:
        self._losses = self._disk.losses
        self.place = 0
        """Records read."""
        self.audit = JournalAudit(self._disk.begun)
        self.committed = 0
        self.theta: list[float] = []
        self.versions = [-1] * self._fragments
        self.values: dict[tuple[int, int], float] = {}
        """(fragment, version) → the value that was committed."""
        self.least = [-1] * self._fragments
        """Per fragment, the version that the run was last rolled back with."""
        self._versions_at: list[list[int]] = [[0] * self._fragments]
        """By the rounds behind the run."""
        self._until: dict[tuple[str, int], int] = {}
        """(session, fragment) → the last step of it that a version contains."""
        self.samples = Samples()
        self._shares: list[list[tuple[int, Share]]] = [[] for _ in range(self._fragments)]
        """Per fragment, versions in order, and the shares in them."""
        self._alive: list[list[tuple[int, Share]]] = [[] for _ in range(self._fragments)]
        """Shares that no rollback has taken back."""
        self._merged_of: dict[tuple[str, int], list[int]] = {}
        """Tokens per fragment that were merged of each life."""

    @property
    def history(self) -> History:
        """What the whole journal tells."""
        return self.audit.history

    @property
    def term(self) -> int:
        return self.audit.term

    def restart_if_lost(self) -> bool:
        """Whether the disk lost records that were never synced: what they said never was."""
        if self._losses == self._disk.losses:
            return False
        self.never_were |= {(*key, value) for key, value in self.values.items()}
        self._begin()
        self.catch_up()
        return True

    def catch_up(self) -> None:
        journal = self._disk.journal
        while self.place < len(journal):
            self._read_record(journal[self.place])
            self.place += 1

    def _read_record(self, record: records.AnyRecord) -> None:
        try:
            self.audit.take_record(record)
        except BadRun as wrong:
            about = (getattr(record, "learner", ""), getattr(record, "fragment", -1))
            raise Violation("the journal's rules", str(wrong), *about) from wrong
        match record:
            case records.MergedRecord():
                self._merge(record)
            case records.PassedRecord():
                self._pass_round()
            case records.RestoredRecord():
                self._roll_back(record)
            case records.GrantedRecord():
                self.samples.add_lease(record)
            case records.GoneRecord():
                self.samples.release_life(record)
                self._account_closed(record)
            case records.StartedRecord():
                self.theta = list(self._disk.start)
                self.versions = [0] * len(self.versions)
                self.values.update({(f, 0): value for f, value in enumerate(self.theta)})
            case _:
                pass

    def _pass_round(self) -> None:
        self.committed += 1
        self._versions_at.append(list(self.versions))

    def _merge(self, record: records.MergedRecord) -> None:
        f = record.fragment
        for share in record.members:
            self._book(record, share)
        given = {one.learner: (one.weight, self._check_share(record, one).delta) for one in record.members}
        self.theta[f] -= self._outer_lr * _merge_groups(given, record.groups)
        self.versions[f] = record.version
        self._pass_round()
        self.values[f, record.version] = self.theta[f]
        if not isfinite(self.theta[f]):
            raise Violation("no broken numbers are committed", f"fragment {f} is {self.theta[f]}", fragment=f)

    def _book(self, record: records.MergedRecord, share: Share) -> None:
        """Each life has an account of its own: what is merged of one changes no other's."""
        f = record.fragment
        self._shares[f].append((record.version, share))
        self._alive[f].append((record.version, share))
        own = self._merged_of.setdefault((share.learner, share.incarnation), [0] * self._fragments)
        own[f] += share.tokens
        life = self.history.lives[share.learner]
        account = self.history.ledger.open.get((share.learner, life.incarnation))
        due = self._merged_of.get((share.learner, life.incarnation), [0] * self._fragments)
        if account is not None and list(account.merged) != due:
            said = f"life {life.incarnation} of {share.learner} is booked {account.merged} merged tokens, not {due}"
            raise Violation("one account for each life", said, share.learner, f)

    def find_copy(self, learner: str, life: int, fragment: int, held: int, version: int) -> int | None:
        """Return the step of the copy that this version contains of a life, and that the version held does not."""
        for newest, share in reversed(self._shares[fragment]):
            if held < newest <= version and (share.learner, share.incarnation) == (learner, life):
                return share.t
        return None

    def _check_undone(self, record: records.RestoredRecord) -> None:
        """A rollback takes back all that fragments got behind the round that it goes back to, and nothing before. This
        counts versions, where the product counts rounds."""
        lost: dict[tuple[str, int], list[int]] = {}
        for f, then in enumerate(self._versions_at[record.round]):
            for version, share in self._alive[f]:
                if version > then:
                    row = lost.setdefault((share.learner, share.incarnation), [0] * self._fragments)
                    row[f] += share.tokens - share.filtered
            self._alive[f] = [(version, share) for version, share in self._alive[f] if version <= then]
        written = {(undone.learner, undone.incarnation): list(undone.tokens) for undone in record.undone}
        if written != lost:
            said = f"going back to round {record.round} takes {lost} tokens back, {written} is written"
            raise Violation("a rollback takes back what came since", said)

    def _roll_back(self, record: records.RestoredRecord) -> None:
        """Every fragment goes up by one and holds what it held then."""
        self._check_undone(record)
        then = self._versions_at[record.round]
        self.theta = [self.values[f, version] for f, version in enumerate(then)]
        self.versions, self.least = list(record.versions), list(record.versions)
        self._versions_at[-1] = list(self.versions)
        self.values.update({(f, version): self.theta[f] for f, version in enumerate(self.versions)})

    def _check_share(self, record: records.MergedRecord, share: records.Share) -> Payload:
        """What really came from this member, which must be what is written of it, and new."""
        f, who = record.fragment, share.learner
        payload = self.payloads.get((self.term, who, record.round, record.attempt))
        if payload is None:
            said = f"round {record.round} merges a contribution of {who} that never came"
            raise Violation("merged at most once", said, who, f)
        copy = payload.copy
        told = (share.t, share.steps, share.tokens, share.base, share.total, share.position)
        true = (copy.t, copy.steps, copy.tokens, copy.base, copy.total, copy.position)
        if told != true or share.incarnation != payload.incarnation:
            said = f"round {record.round}: {share} is written of {who}, {copy} (life {payload.incarnation}) came"
            raise Violation("merged at most once", said, who, f)
        if not isfinite(payload.delta):
            raise Violation("no broken numbers are committed", f"round {record.round} merges {who}'s NaN", who, f)
        if copy.base < self.least[f]:
            said = f"{who} contributes to fragment {f} on version {copy.base}, rolled back with {self.least[f]}"
            raise Violation("only the recovered contribute", said, who, f)
        self._steps_once(record.round, payload, who, f)
        self.samples.add_merged(record.round, share)
        return payload

    def _steps_once(self, number: int, payload: Payload, who: str, f: int) -> None:
        copy, key = payload.copy, (payload.session, f)
        if copy.t - copy.steps < self._until.get(key, 0):
            said = f"steps {copy.t - copy.steps + 1} to {copy.t} of {who} are merged in round {number}, "
            raise Violation("merged at most once", f"{said}those up to {self._until[key]} are in already", who, f)
        self._until[key] = copy.t
        whole = copy.steps * self._gradient(copy.t)
        if payload.plain and abs(payload.delta - whole) > NEAR * (1 + abs(whole)):
            said = f"{copy.steps} steps of {who} on version {copy.base} make Δ = {payload.delta}, not {whole}"
            raise Violation("Δ is the learner's own steps", said, who, f)
