"""The lead's side of a simulated syncer of several shards: what syncer/lead.py carries out for the service, in virtual
time. What is decided is protocol/syncer/shards.py's.

Its own part is staged by the simulated syncer itself, which holds whole fragments: what the other shards
hold is compared with them (part_checks.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from atoll.digests import combine_digests
from atoll.protocol import records
from atoll.protocol.effects import Note
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import Contribution, ContributionKey, Pull, Welcome
from atoll.protocol.shard_messages import (
    AskInitial,
    BodyHere,
    CutHere,
    FromLead,
    FromShard,
    InitialHere,
    NormsHere,
    NormsOfAll,
    ShardHello,
    Stage,
    Staged,
    Unstage,
    Unstaged,
)
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer import shard_effects as to_shards
from atoll.protocol.syncer import shards as pure
from atoll.protocol.syncer.shard_effects import HeldEffects, expect_answer, find_wrong_parts, merge_of
from atoll.simulate.simulated_shard import ShardLink

NOT_FINITE = "values that are not finite"


class LeadSyncer(Protocol):
    """What the lead needs of the syncer around it."""

    alive: bool
    paused: bool
    term: int

    @property
    def complete_cuts(self) -> list[int]: ...

    def on_handled(self, machine: type, event: object, effects: Sequence[object]) -> None: ...

    def read_clock(self) -> float: ...

    def handle_event(self, event: fx.SyncerEvent, least: float = 0.0) -> list[fx.SyncerEffect]: ...

    def carry_out_held(self, effect: fx.SyncerEffect) -> None: ...

    def stage_own(self, merge: fx.Merge) -> fx.Unmergeable | None: ...

    def drop_own(self, fragment: int) -> None: ...

    def finish_first_cut(self, cut: fx.TakeCut, reason: str) -> None: ...

    def keep_cut(self, cut: fx.TakeCut, theta: list[float], place: int, reason: str) -> None: ...

    def finish_cut(self, cut: int, reason: str) -> None: ...

    def close_all_learners(self, reason: str) -> None: ...

    def note_initial_part(self, message: InitialHere) -> None: ...

    def session_of(self, learner: str) -> str: ...

    def tell_lead_later(self, seconds: float, event: FromShard) -> None: ...

    def watch_decision(self, record: records.MergedRecord) -> None: ...


class SimulatedLead:
    def __init__(
        self,
        syncer: LeadSyncer,
        shards: int,
        begun: records.BegunRecord,
        holders: list[tuple[int, ...]],
        decisions: list[records.AnyRecord | int],
        merge_s: float,
    ) -> None:
        self._syncer, self._merge_s = syncer, merge_s
        self.state = pure.LeadShards(shards, syncer.term)
        self._links: dict[int, ShardLink] = {}
        self._waiting: deque[to_shards.LeadEffect] = deque()
        self._busy = False
        self.was_whole = False
        """All shards have been ready in this term."""
        self._held = HeldEffects()
        self._own: dict[int, fx.Merge] = {}
        """By order: of the lead's own part, until all have staged theirs."""
        self._measured: dict[int, Stage] = {}
        """By order, what waits for the norms of all holders."""
        self._cuts: dict[int, tuple[fx.TakeCut, list[float], int]] = {}
        self._first: fx.TakeCut | None = None
        self.unheard: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        """What came while its process stood still."""
        self.initial: set[int] = set()
        """Shards that have the first parameters."""
        self.state.restore_decisions(decisions)
        self.state.begin_run(begun.run, records.encode(begun), holders)
        self._carry_out(("begin", begun, holders, decisions))

    def _waits(self, action: Callable[..., object], *arguments: object) -> bool:
        """Whether its process stands still."""
        if self._syncer.paused:
            self.unheard.append((action, arguments))
        return self._syncer.paused

    def hear_unheard(self) -> None:
        heard, self.unheard = self.unheard, []
        for action, arguments in heard:
            action(*arguments)

    def close(self) -> None:
        """The process is gone."""
        for link in self._links.values():
            link.shard.close_down(link)
        self._links.clear()

    # ---- channels -----------------------------------------------------------------------------------------------

    def open_shard(self, link: ShardLink, hello: ShardHello) -> str:
        """Why it is refused; empty: it is not."""
        try:
            self.state.open_shard(self._syncer.read_clock(), hello)
        except PeerError as error:
            self._syncer.on_handled(pure.LeadShards, hello, (str(error),))
            return str(error)
        self._links[hello.shard] = link
        self._carry_out(hello)
        return ""

    def hear_shard(self, link: ShardLink, message: FromShard) -> object:
        if self._links.get(link.shard.number) is not link or not self._syncer.alive:
            return False
        if self._waits(self.hear_shard, link, message):
            return None
        self.state.hear(self._syncer.read_clock(), link.shard.number, message)
        self._carry_out((link.shard.number, message))
        return None

    def lose_shard(self, link: ShardLink, reason: str) -> object:
        if self._links.get(link.shard.number) is not link or not self._syncer.alive:
            return False
        if self._waits(self.lose_shard, link, reason):
            return None
        del self._links[link.shard.number]
        self.state.lose_shard(self._syncer.read_clock(), link.shard.number, reason)
        self.initial.discard(link.shard.number)
        self._syncer.close_all_learners("a shard of the syncer was lost: the first parameters are sent anew")
        self._carry_out(("lost", link.shard.number, reason))
        return None

    def hear_own(self, message: FromShard) -> None:
        if self._syncer.alive and not self._waits(self.hear_own, message):
            self.state.hear(self._syncer.read_clock(), to_shards.LEAD, message)
            self._carry_out((to_shards.LEAD, message))

    def _carry_out(self, event: object) -> None:
        """Carry out what the machine wants done after an event: in order, also where one effect leads to others."""
        effects = self.state.take_effects()
        self._syncer.on_handled(pure.LeadShards, event, effects)
        self._waiting += effects
        if self._busy:
            return
        self._busy = True
        while self._waiting and self._syncer.alive:
            self._carry_out_one(self._waiting.popleft())
        self._busy = False

    def _carry_out_one(self, effect: to_shards.LeadEffect) -> None:
        match effect:
            case to_shards.Order(1, message):
                self._order_own(message)
            case to_shards.Order(shard, message):
                if (link := self._links.get(shard)) is not None:
                    link.shard.send_down(link, message)
            case to_shards.Complete(learner, message, parts):
                self._syncer.handle_event(fx.Delivered(learner, message, _screen(message, parts)))
            case to_shards.Combine(merge, staged):
                del self._own[dict(staged)[to_shards.LEAD].order]
                self._syncer.handle_event(fx.Merged(merge.round, "digest", heads=effect.heads(self.state.shards)))
            case to_shards.Tell(event):
                self._syncer.handle_event(event)
            case to_shards.CutPartsKept(cut, reason=reason):
                self._end_cut(cut, reason)
            case to_shards.CutPartsDone(cut, reason):
                if self._first is not None and self._first.cut == cut:
                    first, self._first = self._first, None
                    self._syncer.finish_first_cut(first, reason)
                else:
                    self._syncer.finish_cut(cut, reason)
            case to_shards.InitialParts(shard, message):
                if message.complete:
                    self.initial.add(shard)
                self._syncer.note_initial_part(message)
            case to_shards.AllThere():
                self.was_whole = True
                for one in self._held.take_all():
                    self._syncer.carry_out_held(one)
            case _:
                assert isinstance(effect, Note | to_shards.Moved | to_shards.ValuesHere)

    # ---- effects of the syncer's state machine ------------------------------------------------------------------

    def hold(self, effect: fx.SyncerEffect) -> bool:
        """Whether it waits for a shard that is away."""
        return self._held.hold(effect, all_ready=self.state.all_ready)

    def carry_out(self, effect: fx.SyncerEffect) -> bool:
        """Whether that is all that there is to do."""
        match effect:
            case fx.Persist(found):
                for record in found:
                    if isinstance(record, records.MergedRecord):
                        self._syncer.watch_decision(record)
                    self.state.note_record(record)
                self._carry_out(effect)
                return False
            case fx.Merge():
                self.state.merge(effect)
                self._carry_out(effect)
                return True
            case fx.CompleteCut(cut, spared=spared):
                self.state.finish_cut(cut, self._syncer.complete_cuts, spared)
                self._carry_out(effect)
                return False
            case fx.Discard(learner, number, attempt):
                self.state.discard((learner, number, attempt))
                self._carry_out(effect)
                return False
            case fx.Send(learner, Pull() as pull):
                self.state.expect_body(expect_answer(learner, self._syncer.session_of(learner), pull))
                self._carry_out(effect)
                return False
            case fx.Send(learner, Welcome(upload=True)):
                self.initial.clear()
                self.state.ask_initial(AskInitial(learner=learner, session=self._syncer.session_of(learner)))
                self._carry_out(effect)
                return False
            case _:
                return False

    def end_initial(self) -> None:
        self.state.ask_initial(None)

    # ---- contributions ------------------------------------------------------------------------------------------

    def take_own_body(self, body: ContributionKey, digest: str, *, broken: bool) -> None:
        learner, number, attempt = body
        here = BodyHere(learner=learner, round=number, attempt=attempt, digest=digest, broken=int(broken))
        self.hear_own(here)

    def hear_contribution(self, learner: str, message: Contribution) -> None:
        self.state.hear_contribution(learner, message)
        self._carry_out((learner, message))

    # ---- rounds -------------------------------------------------------------------------------------------------

    def _order_own(self, message: FromLead) -> None:
        match message:
            case Stage(order=order) if to_shards.LEAD in self.state.holders(message.fragment):
                self._measured[order] = message
                self._syncer.tell_lead_later(self._merge_s / 2, NormsHere(order=order, turn=0, squares=b"own"))
            case Stage():
                self._stage_own(message)
            case NormsOfAll(order=order):
                if (stage := self._measured.pop(order, None)) is not None:
                    self._stage_own(stage)
            case Unstage(order=order, fragment=fragment):
                self._measured.pop(order, None)
                if self._own.pop(order, None) is not None:
                    self._syncer.drop_own(fragment)
            case _:
                raise AssertionError(f"the lead carries out no {message}")

    def _stage_own(self, stage: Stage) -> None:
        merge = merge_of(stage)
        if (failed := self._syncer.stage_own(merge)) is not None:
            unstaged = Unstaged(order=stage.order, reason=failed.reason, reset=failed.reset)
            self._syncer.tell_lead_later(self._merge_s, unstaged)
        else:
            self._own[stage.order] = merge
            self._syncer.tell_lead_later(self._merge_s, Staged(order=stage.order, digest="digest"))

    # ---- cuts ---------------------------------------------------------------------------------------------------

    def take_cut(self, cut: fx.TakeCut, theta: list[float], place: int, takes_s: float) -> None:
        self._cuts[cut.cut] = (cut, theta, place)
        self.state.take_cut(cut.cut, cut.cut, hurry=cut.first or cut.last)
        self._carry_out(("take cut", cut.cut))
        self._syncer.tell_lead_later(takes_s, CutHere(cut=cut.cut))

    def _end_cut(self, cut: int, reason: str) -> None:
        taken, theta, place = self._cuts.pop(cut)
        if not taken.first:
            self._syncer.keep_cut(taken, theta, place, reason)
        elif reason:
            self._syncer.finish_first_cut(taken, reason)
        else:
            self._first = taken
            self.state.finish_cut(cut, self._syncer.complete_cuts, -1)
            self._carry_out(("finish cut", cut))


def _screen(message: Contribution, parts: tuple[BodyHere, ...]) -> str | None:
    wrong = find_wrong_parts(message, parts, combine_digests)
    return wrong or (NOT_FINITE if any(part.broken for part in parts) else None)
