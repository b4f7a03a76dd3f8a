"""What the lead of a syncer of several shards knows of the others, and what it tells them (docs/adr/0031).

The state machine of the syncer does not know of shards. This one stands between it and them: an effect of the syncer
becomes orders to all shards, and their answers become one event. The lead is shard 1: its own part is ordered and
answers like the others'. Rules kept here, each with its test:

- a contribution is complete once its message and the bodies of all holders of the fragment have come;
- where a merge needs norms of pieces that several shards hold, each tells its own, and once all are there each hears
  of all. Where contributions are compared (`robust`) each tells the lead, and hears of the lead only;
- a round may be decided once every holder has staged it, durably, by the same order. What one of them cannot stage is
  void in all;
- a record of the lead's journal that concerns parameters is told to every shard, in the order of the journal;
- a shard that comes back is told a cut that both hold, and all that was decided since. It counts as there once it holds
  that; what it had in memory only is lost: rounds that need it fail, and are tried again;
- while a shard is away, no deadline runs (`take_standstill_s`), and failures that are due to it are told when it is
  back: nothing that is asked for meanwhile could be answered;
- one process for each shard, of this run and of this number of shards; others are refused in one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from atoll.protocol.effects import Note
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import Contribution, ContributionKey, Decline
from atoll.protocol.records import AnyRecord, ChangedRecord, MergedRecord, ResetRecord, TermRecord
from atoll.protocol.shard_messages import (
    SHARD_PROTOCOL,
    AskInitial,
    AskValues,
    BodyHere,
    CutDone,
    CutHere,
    Decide,
    DeclareRanks,
    EndShard,
    Expect,
    FinishCut,
    Forget,
    FromLead,
    FromShard,
    Given,
    InitialHere,
    NormsHere,
    NormsOfAll,
    ShardHello,
    Stage,
    Staged,
    TakenUp,
    TakeUp,
    Unstage,
    Unstaged,
    Values,
    WriteCut,
    decision_of,
)
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.shard_effects import (
    LEAD,
    AllThere,
    Combine,
    Complete,
    CutPartsDone,
    CutPartsKept,
    InitialParts,
    LeadEffect,
    Moved,
    Order,
    Tell,
    ValuesHere,
)

CUTS = 4
"""The newest cuts from which a shard may come back."""


@dataclass(slots=True)
class ShardSeat:
    process: str = ""
    """Of the one that is connected; empty: none is."""
    url: str = ""
    cuts: tuple[int, ...] = ()
    told: bool = False
    """It was told what to take up …"""
    ready: bool = False
    """… and holds it."""


@dataclass(slots=True)
class ExpectedBody:
    expect: Expect
    here: dict[int, BodyHere] = field(default_factory=dict)
    """By shard."""
    message: Contribution | None = None
    told: bool = False
    """The state machine has heard of it."""


@dataclass(slots=True)
class PendingMerge:
    order: int
    merge: fx.Merge
    compares: bool
    """The lead is told how far contributions agree, and the others what it makes of that."""
    norms: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """By turn and shard."""
    staged: dict[int, Staged] = field(default_factory=dict)


class LeadShards:
    def __init__(self, shards: int, term: int) -> None:
        self.shards, self.term = shards, term
        self.seats = {n: ShardSeat() for n in range(LEAD + 1, shards + 1)}
        self.run = ""
        self._begun = b""
        self._holders: tuple[tuple[int, ...], ...] = ()
        """Per fragment."""
        self._decisions: list[AnyRecord | int] = []
        """Records since the oldest cut that a shard may come back from; a number is a cut."""
        self._complete: list[int] = []
        """The last cuts that are complete in every other shard."""
        self._ranks: dict[str, DeclareRanks] = {}
        """By learner, of those of several ranks that are connected."""
        self._bodies: dict[ContributionKey, ExpectedBody] = {}
        self._orders = 0
        self._merge: PendingMerge | None = None
        self._failed: fx.Unmergeable | None = None
        """Of a merge that a lost shard made void: told once all shards are there."""
        self._undeliverable: list[tuple[str, Decline]] = []
        """The same, of contributions."""
        self._cuts: dict[int, dict[int, CutHere]] = {}
        self._finishing: dict[int, set[int]] = {}
        self._asked: AskInitial | None = None
        self._away_since: float | None = None
        self._alarms: set[int] = set()
        """Shards that the operator was told of, and that are not back."""
        self._over = False
        self._out: list[LeadEffect] = []

    # ---- what is read -------------------------------------------------------------------------------------------

    @property
    def all_ready(self) -> bool:
        return all(seat.ready for seat in self.seats.values())

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of shards 2 to S."""
        return tuple(self.seats[n].url for n in sorted(self.seats))

    def describe_missing(self) -> str:
        """Which shards are not there; empty: all are."""
        away = [str(n) for n, seat in sorted(self.seats.items()) if not seat.process]
        behind = [str(n) for n, seat in sorted(self.seats.items()) if seat.process and not seat.ready]
        told = [f"shard {', '.join(away)} is not connected"] if away else []
        return "; ".join(told + ([f"shard {', '.join(behind)} reads its folder"] if behind else []))

    def holders(self, fragment: int) -> tuple[int, ...]:
        return self._holders[fragment]

    def stagers(self, fragment: int) -> tuple[int, ...]:
        """Who has a part in its rounds: the holders, and the lead, whose record is the decision."""
        return tuple(sorted({LEAD, *self._holders[fragment]}))

    def take_standstill_s(self, now: float) -> float:
        """Seconds since it was last asked, as far as a shard was away in them."""
        if self._away_since is None:
            return 0.0
        stood_s, self._away_since = now - self._away_since, now
        return max(0.0, stood_s)

    def take_effects(self) -> list[LeadEffect]:
        out, self._out = self._out, []
        return out

    # ---- the run ------------------------------------------------------------------------------------------------

    def begin_run(self, run: str, begun: bytes, holders: Iterable[tuple[int, ...]]) -> None:
        """`begun`: its first record; `holders`: per fragment, the shards that hold any of it."""
        self.run, self._begun, self._holders = run, begun, tuple(holders)
        for shard in self.seats:
            self._let_take_up(shard)

    def restore_decisions(self, found: Sequence[AnyRecord | int]) -> None:
        """What the journal says, from the oldest cut on; a number is a cut. Called before `begin_run`."""
        for one in found:
            if isinstance(one, int):
                self._decisions.append(one)
            else:
                self._keep_record(one)

    def note_record(self, record: AnyRecord) -> None:
        """It is durable in the lead's journal."""
        if not self._keep_record(record):
            return
        for shard, seat in sorted(self.seats.items()):
            if seat.told and (decision := decision_of(record, shard)) is not None:
                self._order(shard, Decide(decision=decision))

    def _keep_record(self, record: AnyRecord) -> bool:
        if not isinstance(record, MergedRecord | ResetRecord | ChangedRecord | TermRecord):
            return False
        self._decisions.append(record)
        return True

    def _note_complete(self, cut: int) -> None:
        """Every shard may come back from this cut: what lies before the last few of them is not needed any more."""
        self._complete = [*self._complete, cut][-CUTS:]
        if len(self._complete) == CUTS and self._complete[0] in self._decisions:
            del self._decisions[: self._decisions.index(self._complete[0])]

    # ---- shards come and go -------------------------------------------------------------------------------------

    def open_shard(self, now: float, hello: ShardHello) -> None:
        """PeerError: this process may not take part."""
        number, seat = hello.shard, self.seats.get(hello.shard)
        if hello.protocol != SHARD_PROTOCOL:
            raise PeerError("the lead and this shard are of different versions: install the same on both")
        if hello.shards != self.shards:
            raise PeerError(f"this run's syncer has {self.shards} shards, not {hello.shards}: start it with --shard "
                            f"{number}/{self.shards}")  # fmt: skip
        if seat is None:
            raise PeerError(f"there is no shard {number}: this process can be 2/{self.shards} to {self.shards}"
                            f"/{self.shards}")  # fmt: skip
        if hello.run and self.run and hello.run != self.run:
            raise PeerError(f"its folder holds shard {number} of run {hello.run}, and this is run {self.run}: "
                            "name another folder with --out")  # fmt: skip
        if hello.term > self.term:
            raise PeerError(f"shard {number} follows term {hello.term} already, this lead is of term {self.term}")
        if seat.process and seat.process != hello.process:
            raise PeerError(f"another process is shard {number} already: end that one first")
        moved = bool(seat.url) and seat.url != hello.url
        if seat.process:
            self.lose_shard(now, number, "it has connected anew")
        self._mark_away(now)
        self.seats[number] = ShardSeat(hello.process, hello.url, hello.cuts)
        if moved:
            self._out.append(Moved(number))
        self._let_take_up(number)

    def _let_take_up(self, shard: int) -> None:
        seat = self.seats[shard]
        if not self._begun or not seat.process or seat.told:
            return
        ours = [one for one in self._decisions if isinstance(one, int)]
        common = [cut for cut in seat.cuts if cut in ours]
        if ours and not common:
            kept = ", ".join(map(str, ours))
            self._order(shard, EndShard(reason=f"shard {shard} holds none of the run's cuts ({kept}): put back a copy "
                                        "of its folder, or name it with --out", refused=True))  # fmt: skip
            return
        seat.told = True
        since = self._decisions[self._decisions.index(max(common)) + 1 :] if common else self._decisions
        found = [decision_of(one, shard) for one in since if not isinstance(one, int)]
        decisions = tuple(one for one in found if one is not None)
        self._order(shard, TakeUp(begun=self._begun, cut=max(common, default=-1), decisions=decisions))

    def lose_shard(self, now: float, shard: int, reason: str) -> None:
        self._mark_away(now)
        url, self.seats[shard] = self.seats[shard].url, ShardSeat()
        self.seats[shard].url = url
        why = f"shard {shard} was lost"
        for cut in [cut for cut, parts in self._cuts.items() if shard not in parts]:
            self._end_cut(cut, why)
        for cut in [cut for cut, left in self._finishing.items() if shard in left]:
            del self._finishing[cut]
            self._out.append(CutPartsDone(cut, why))
        if self._merge is not None and shard in self.stagers(self._merge.merge.fragment):
            self._void_merge(fx.Unmergeable(self._merge.merge.round, why), but=shard)
        for body in self._bodies.values():
            body.here.pop(shard, None)
        if not self._over:
            self._raise_alarm(shard, f"{why} ({reason}): no round is committed until it is back; learners train on")

    def _raise_alarm(self, shard: int, text: str) -> None:
        self._alarms.add(shard)
        self._out.append(Note("alarm", text, {"shard": shard, "about": f"shard {shard}", "over": False}))

    def _mark_away(self, now: float) -> None:
        if self._away_since is None:
            self._away_since = now

    def _note_ready(self, now: float, shard: int, replayed: int) -> None:
        self.seats[shard].ready = True
        since = f": it has made {replayed} rounds again since its cut" if replayed else ""
        data: dict[str, object] = {"shard": shard, "replayed": replayed}
        if shard in self._alarms:
            self._alarms.discard(shard)
            about = {"about": f"shard {shard}", "over": True}
            self._out.append(Note("alarm", f"shard {shard} is back{since}", {**data, **about}))
        else:
            self._out.append(Note("shard", f"shard {shard} is there{since}", data))
        for declared in self._ranks.values():
            self._order(shard, declared)
        for body in self._bodies.values():
            if body.told or shard not in self.holders(body.expect.fragment):
                continue
            if body.message is None:
                self._order(shard, body.expect)
            else:  # its learner was told by the process that died that its body is there: it will not send it again
                body.told = True
                reason = f"shard {shard} was lost with its body"
                given = Decline(round=body.expect.round, attempt=body.expect.attempt, reason=reason)
                self._undeliverable.append((body.expect.learner, given))
        if self._asked is not None:
            self._order(shard, self._asked)
        if not self.all_ready:
            return
        if (stood_s := self.take_standstill_s(now)) > 0:
            self._out.append(Tell(fx.StoodStill(stood_s)))
        self._away_since = None
        failed, self._failed = self._failed, None
        if failed is not None:
            self._out.append(Tell(failed))
        undeliverable, self._undeliverable = self._undeliverable, []
        self._out += [Tell(fx.Received(learner, decline)) for learner, decline in undeliverable]
        self._out.append(AllThere())

    # ---- what shards say ----------------------------------------------------------------------------------------

    def hear(self, now: float, shard: int, message: FromShard) -> None:
        """What a shard says that is connected; shard 1: the lead's own part."""
        match message:
            case TakenUp(reason=reason, replayed=replayed):
                if reason:
                    self._raise_alarm(shard, f"shard {shard} cannot go on: {reason}")
                else:
                    self._note_ready(now, shard, replayed)
            case BodyHere():
                self._note_body(shard, message)
            case InitialHere(learner=learner, session=session):
                asked = self._asked
                if asked is not None and (asked.learner, asked.session) == (learner, session):
                    self._out.append(InitialParts(shard, message))
            case Values():
                self._out.append(ValuesHere(shard, message))
            case NormsHere():
                self._note_norms(shard, message)
            case Staged() | Unstaged():
                self._note_staged(shard, message)
            case CutHere(cut=cut):
                if (parts := self._cuts.get(cut)) is not None:
                    parts[shard] = message
                    self._end_cut_if_known(cut)
            case CutDone(cut=cut, reason=reason):
                self._note_finished(shard, cut, reason)
            case _:
                raise PeerError(f"{type(message).__name__} opens a channel, and this one is open")

    # ---- contributions ------------------------------------------------------------------------------------------

    def declare_ranks(self, declared: DeclareRanks) -> None:
        """Of a learner that has connected, or is gone. Shards hear of it before any pull of it."""
        before = self._ranks.pop(declared.learner, None)
        if declared.ranks:
            self._ranks[declared.learner] = declared
        elif before is None:
            return
        for shard, seat in sorted(self.seats.items()):
            if seat.ready:
                self._order(shard, declared)

    def expect_body(self, expect: Expect) -> None:
        """A pull is sent."""
        self._bodies[expect.body] = ExpectedBody(expect)
        for shard in self.holders(expect.fragment):
            if shard != LEAD and self.seats[shard].ready:
                self._order(shard, expect)

    def hear_contribution(self, learner: str, message: Contribution) -> None:
        body = self._bodies.get((learner, message.round, message.attempt))
        if body is None or message.fragment != body.expect.fragment:
            self._out.append(Complete(learner, message, ()))
        elif body.message is None:  # sent twice: the first one counts
            body.message = message
            self._complete_body(body)

    def _note_body(self, shard: int, part: BodyHere) -> None:
        if (body := self._bodies.get(part.body)) is not None:
            body.here[shard] = part
            self._complete_body(body)

    def _complete_body(self, body: ExpectedBody) -> None:
        holders = self.holders(body.expect.fragment)
        if body.message is not None and not body.told and all(n in body.here for n in holders):
            body.told = True
            self._out.append(Complete(body.expect.learner, body.message, tuple(body.here[n] for n in holders)))

    def discard(self, body: ContributionKey) -> None:
        if (known := self._bodies.pop(body, None)) is None:
            return
        for shard in self.holders(known.expect.fragment):
            if shard != LEAD and self.seats[shard].ready:
                self._order(shard, Forget(learner=body[0], round=body[1], attempt=body[2]))

    def ask_initial(self, asked: AskInitial | None) -> None:
        """Whom the first parameters come from; None: they are here."""
        self._asked = asked
        for shard, seat in sorted(self.seats.items()):
            if asked is not None and seat.ready:
                self._order(shard, asked)

    # ---- rounds -------------------------------------------------------------------------------------------------

    def merge(self, merge: fx.Merge, *, compare: bool = False) -> None:
        """`compare`: the filter's factors are used."""
        assert self._merge is None, "one round is merged at a time"
        self._orders += 1
        holders = self.holders(merge.fragment)
        lost = self._find_lost(merge, holders)
        if lost:
            self._fail(fx.Unmergeable(merge.round, lost))
            return
        self._merge = PendingMerge(self._orders, merge, compare)
        given = tuple(
            Given(one.learner, one.attempt, one.weight, one.base, one.steps if compare else 1) for one in merge.parts
        )
        attempt = max((one.attempt for one in merge.parts), default=0)
        number, fragment = merge.round, merge.fragment
        stage = Stage(
            order=self._orders, round=number, attempt=attempt, fragment=fragment, given=given, compare=compare
        )
        for shard in self.stagers(merge.fragment):
            self._order(shard, stage)

    def _find_lost(self, merge: fx.Merge, holders: tuple[int, ...]) -> str:
        if missing := [n for n in holders if n != LEAD and not self.seats[n].ready]:
            return f"shard {missing[0]} was lost"
        for part in merge.parts:
            body = self._bodies.get((part.learner, merge.round, part.attempt))
            if body is None or any(n not in body.here for n in holders):
                return f"the contribution of {part.learner} was lost with a shard"
        return ""

    def _note_norms(self, shard: int, given: NormsHere) -> None:
        pending = self._merge
        if pending is None or given.order != pending.order:
            return  # of a round that is void by now
        norms, fragment = pending.norms.setdefault(given.turn, {}), pending.merge.fragment
        norms[shard] = given.squares
        tellers = self.stagers(fragment) if pending.compares else self.holders(fragment)
        if all(n in norms for n in tellers):
            told = tuple(norms[n] for n in tellers)
            for n in tellers:
                squares = told[:1] if pending.compares and n != LEAD else told
                self._order(n, NormsOfAll(order=given.order, turn=given.turn, squares=squares, fragment=fragment))

    def _note_staged(self, shard: int, answer: Staged | Unstaged) -> None:
        pending = self._merge
        if pending is None or answer.order != pending.order:
            return  # of a round that is void by now
        if isinstance(answer, Unstaged):
            self._void_merge(fx.Unmergeable(pending.merge.round, answer.reason, answer.reset), but=shard)
            return
        pending.staged[shard] = answer
        stagers = self.stagers(pending.merge.fragment)
        if all(n in pending.staged for n in stagers):
            self._merge = None
            self._out.append(Combine(pending.merge, tuple((n, pending.staged[n]) for n in stagers)))

    def _void_merge(self, why: fx.Unmergeable, but: int) -> None:
        assert self._merge is not None
        pending, self._merge = self._merge, None
        for shard in self.stagers(pending.merge.fragment):
            if shard != but and (shard == LEAD or self.seats[shard].ready):
                self._order(shard, Unstage(order=pending.order, fragment=pending.merge.fragment))
        self._fail(why)

    def _fail(self, why: fx.Unmergeable) -> None:
        if self.all_ready:
            self._out.append(Tell(why))
        else:
            self._failed = why

    # ---- cuts ---------------------------------------------------------------------------------------------------

    def take_cut(self, cut: int, rounds: int, *, hurry: bool) -> None:
        """So many rounds are behind the run. The lead's own part is told as CutHere of shard 1."""
        self._decisions.append(cut)
        self._cuts[cut] = {}
        if not self.all_ready:
            self._end_cut(cut, self.describe_missing())
            return
        for shard in sorted(self.seats):
            self._order(shard, WriteCut(cut=cut, round=rounds, hurry=hurry))

    def _end_cut_if_known(self, cut: int) -> None:
        parts = self._cuts[cut]
        if reason := next((part.reason for part in parts.values() if part.reason), ""):
            self._end_cut(cut, reason)
        elif len(parts) == self.shards:
            self._end_cut(cut, "")

    def _end_cut(self, cut: int, reason: str) -> None:
        parts = self._cuts.pop(cut)
        digests = () if reason else tuple(parts[n].digest for n in sorted(self.seats))
        self._out.append(CutPartsKept(cut, digests, reason))

    def finish_cut(self, cut: int, kept: Sequence[int], spared: int) -> None:
        """`kept`: the cuts that are complete at the lead. Shards keep them beside this one, which the lead completes
        last: it may not come to that."""
        if not self.all_ready:
            self._out.append(CutPartsDone(cut, self.describe_missing()))
            return
        self._finishing[cut] = set(self.seats)
        for shard in sorted(self.seats):
            oldest, newest = min(kept, default=-1), max(kept, default=-1)
            self._order(shard, FinishCut(cut=cut, oldest=oldest, newest=newest, spared=spared))

    def _note_finished(self, shard: int, cut: int, reason: str) -> None:
        if (left := self._finishing.get(cut)) is None:
            return
        left.discard(shard)
        if reason or not left:
            del self._finishing[cut]
            if not reason:
                self._note_complete(cut)
            self._out.append(CutPartsDone(cut, reason))

    # ---- the finished model -------------------------------------------------------------------------------------

    def ask_values(self, shard: int, order: int, fragment: int, start: int, size: int) -> None:
        self._order(shard, AskValues(order=order, fragment=fragment, start=start, size=size))

    # ---- the end ------------------------------------------------------------------------------------------------

    def end_run(self, reason: str) -> None:
        self._over = True
        for shard, seat in sorted(self.seats.items()):
            if seat.process:
                self._order(shard, EndShard(reason=reason))

    def _order(self, shard: int, message: FromLead) -> None:
        self._out.append(Order(shard, msgspec.structs.replace(message, term=self.term)))
