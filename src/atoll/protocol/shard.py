"""What a shard of the syncer does (docs/adr/0031): shards 2 to S, each a process that holds a part of every fragment.

It decides nothing. The lead orders, in the order of its own effects; the shard answers once what it did is durable.
Rules kept here, each with its test:

- it follows the highest term it has heard of: what a lead of a lower one says counts for nothing;
- after every connection it takes up what the lead has decided, from its disk; whatever it had staged and was not
  decided is void. Orders that come meanwhile wait;
- while it merges it may need norms of the others' parts: it tells its own and waits for all (Measured, UseNorms). An
  order that is made void meanwhile, or whose lead is lost, waits no longer (Abandon);
- a part is staged, then written to its chain, then told. An order that is made void meanwhile is undone when that is
  over;
- what is decided is committed from memory where it is staged there under the same head, and otherwise read from the
  chain. A head that its chain does not hold means that the disk lost what was confirmed: it says so and serves nobody.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from atoll.protocol.effects import Fact
from atoll.protocol.messages import ContributionKey
from atoll.protocol.shard_messages import (
    SHARD_PROTOCOL,
    AnyDecision,
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
    InitialHere,
    NormsHere,
    NormsOfAll,
    RoundDecided,
    ShardHello,
    Stage,
    Staged,
    TakenUp,
    TakeUp,
    Unstage,
    Unstaged,
    WriteCut,
)

# ---- events ---------------------------------------------------------------------------------------------------------


class LeadSaid(Fact, frozen=True):
    """Event: a message of the lead that is connected."""

    message: FromLead


class LeadLost(Fact, frozen=True):
    """Event: the channel to the lead is closed."""


class TookUp(Fact, frozen=True):
    """Event: RestoreParameters is carried out: the parameters are those of then, after so many rounds of the chain.
    With a reason: they cannot be had."""

    run: str
    replayed: int = 0
    reason: str = ""


class Measured(Fact, frozen=True):
    """Event: a merge under way needs the norms of all, and has its own."""

    order: int
    turn: int
    squares: bytes


class PartStepped(Fact, frozen=True):
    """Event: the new version of a part lies beside the committed one."""

    order: int
    digest: str
    marks: bytes
    seconds: float


class StepFailed(Fact, frozen=True):
    """Event: there is no such version; nothing is staged."""

    order: int
    reason: str
    reset: bool = False


class Written(Fact, frozen=True):
    """Event: what was stepped is durable in the chain, which has this head behind it."""

    order: int
    head: str


class Came(Fact, frozen=True):
    """Event: something that the lead is to hear as it is: a body, a part of the first parameters or of a cut."""

    message: BodyHere | InitialHere | CutHere | CutDone


ShardEvent = LeadSaid | LeadLost | TookUp | Measured | PartStepped | StepFailed | Written | Came

# ---- effects --------------------------------------------------------------------------------------------------------


class TellLead(Fact, frozen=True):
    """Effect: a message to the lead."""

    message: FromShard


class RestoreParameters(Fact, frozen=True):
    """Effect: drop everything in memory, read the cut, apply the decisions; answer TookUp."""

    take_up: TakeUp


class KnowRanks(Fact, frozen=True):
    """Effect: from now on, bodies of this learner come as parts of its ranks; of one that is gone, none do."""

    declared: DeclareRanks


class ExpectBody(Fact, frozen=True):
    expect: Expect


class FreeBody(Fact, frozen=True):
    body: ContributionKey


class AskFor(Fact, frozen=True):
    """Effect: first parameters are taken from this process, and from no other."""

    asked: AskInitial


class Step(Fact, frozen=True):
    """Effect: merge and step beside the committed version; answer PartStepped or StepFailed."""

    stage: Stage


class UseNorms(Fact, frozen=True):
    """Effect: a merge under way goes on with the norms of all."""

    norms: NormsOfAll


class Abandon(Fact, frozen=True):
    """Effect: nothing comes of this order: if its merge waits for norms, it fails."""

    order: int


class Write(Fact, frozen=True):
    """Effect: append to the chain what was stepped, durably; answer Written."""

    stage: Stage
    digest: str


class Undo(Fact, frozen=True):
    """Effect: what is staged of this fragment counts for nothing, and its outer state is as before it."""

    fragment: int


class Apply(Fact, frozen=True):
    """Effect: a decision holds; `staged`: what it names lies beside the committed version, and is not to be read."""

    decision: AnyDecision
    staged: bool = False


class CaptureCut(Fact, frozen=True):
    """Effect: hold everything as it is now, write it in the background; answer CutHere."""

    write: WriteCut


class CompletePart(Fact, frozen=True):
    """Effect: the part of a cut counts; answer CutDone."""

    finish: FinishCut


class ReadValues(Fact, frozen=True):
    """Effect: answer with some of the committed values."""

    asked: AskValues


class LeaveLead(Fact, frozen=True):
    """Effect: leave this lead, and dial again."""

    reason: str


class End(Fact, frozen=True):
    """Effect: end this process."""

    reason: str
    refused: bool = False


ShardEffect = (
    TellLead
    | RestoreParameters
    | KnowRanks
    | ExpectBody
    | FreeBody
    | AskFor
    | Step
    | UseNorms
    | Abandon
    | Write
    | Undo
    | Apply
    | CaptureCut
    | CompletePart
    | ReadValues
    | LeaveLead
    | End
)


@dataclass(slots=True)
class StagedRound:
    stage: Stage
    stepped: PartStepped | None = None
    head: str = ""
    """Set once it is durable."""
    void: bool = False
    """The lead took the order back while it was carried out."""


class Shard:
    def __init__(self, shard: int, shards: int, process: str, *, run: str = "") -> None:
        self.shard, self.shards, self.process = shard, shards, process
        self.run = run
        """Whose parameters its folder holds; empty: none yet."""
        self.term = 0
        """The highest that it has heard of."""
        self._taking_up = False
        self._again: TakeUp | None = None
        """Came while another was carried out, from the lead that is connected now."""
        self._serving = False
        self._waiting: deque[FromLead] = deque()
        """Orders that came while it took up what was decided, or while a thread works on what is void."""
        self._staged: dict[int, StagedRound] = {}
        """By fragment."""

    @property
    def serves(self) -> bool:
        """Whether learners may fetch and send."""
        return self._serving

    def hello(self, url: str, cuts: tuple[int, ...]) -> ShardHello:
        """The first message on every connection. `cuts`: that it could come back from, the newest first."""
        return ShardHello(
            protocol=SHARD_PROTOCOL,
            shard=self.shard,
            shards=self.shards,
            process=self.process,
            url=url,
            run=self.run,
            cuts=cuts,
            term=self.term,
        )

    def handle(self, event: ShardEvent) -> list[ShardEffect]:
        match event:
            case LeadSaid(message):
                return self._hear(message)
            case LeadLost():
                self._waiting.clear()
                self._again = None
                return self._abandon_steps()
            case TookUp():
                return self._took_up(event)
            case Measured(order, turn, squares):
                if self._find_staged(order).void:
                    return [Abandon(order)]
                return [TellLead(NormsHere(order=order, turn=turn, squares=squares))]
            case PartStepped(order):
                return self._note_stepped(order, event)
            case StepFailed(order, reason, reset):
                return self._note_failed(order, reason, reset)
            case Written(order, head):
                return self._note_written(order, head)
            case Came(message):
                return [TellLead(message)] if self._serving else []

    # ---- the lead -----------------------------------------------------------------------------------------------

    def _hear(self, message: FromLead) -> list[ShardEffect]:
        if message.term < self.term:
            return [LeaveLead(f"a lead of term {message.term} speaks, and term {self.term} has begun")]
        self.term = message.term
        if isinstance(message, EndShard):
            return [End(message.reason, message.refused)]
        if isinstance(message, TakeUp):
            return self._take_up(message)
        self._waiting.append(message)
        return self._obey_waiting()

    def _take_up(self, message: TakeUp) -> list[ShardEffect]:
        """Steps and writes under way end first: they would change what is read."""
        self._serving = False
        self._waiting.clear()
        if self._taking_up or self._is_busy():
            self._again = message
            for staged in self._staged.values():
                staged.void = True
            return self._abandon_steps()
        self._taking_up = True
        self._staged.clear()
        return [RestoreParameters(message)]

    def _abandon_steps(self) -> list[ShardEffect]:
        """Of what a thread steps: nobody will tell the norms that it may wait for."""
        return [Abandon(one.stage.order) for one in self._staged.values() if one.stepped is None]

    def _is_busy(self) -> bool:
        return any(not staged.head for staged in self._staged.values())

    def _took_up(self, event: TookUp) -> list[ShardEffect]:
        self._taking_up = False
        if (again := self._again) is not None:
            self._again = None
            return self._take_up(again)
        if event.reason:
            return [TellLead(TakenUp(reason=event.reason)), End(event.reason, refused=True)]
        self.run, self._serving = event.run, True
        return [TellLead(TakenUp(replayed=event.replayed)), *self._obey_waiting()]

    def _obey_waiting(self) -> list[ShardEffect]:
        out: list[ShardEffect] = []
        while self._waiting and not self._taking_up and not any(one.void for one in self._staged.values()):
            message = self._waiting.popleft()
            out += self._obey(message) if self._serving else []
        return out

    def _obey(self, message: FromLead) -> list[ShardEffect]:
        match message:
            case DeclareRanks():
                return [KnowRanks(message)]
            case Expect():
                return [ExpectBody(message)]
            case Forget():
                return [FreeBody(message.body)]
            case AskInitial():
                return [AskFor(message)]
            case Stage():
                self._staged[message.fragment] = StagedRound(message)
                return [Step(message)]
            case NormsOfAll(order=order, fragment=fragment):
                staged = self._staged.get(fragment)
                return [UseNorms(message)] if staged is not None and staged.stage.order == order else []
            case Unstage(order=order, fragment=fragment):
                return self._unstage(order, fragment)
            case Decide(decision=decision):
                return [self._decide(decision)]
            case WriteCut():
                return [CaptureCut(message)]
            case FinishCut():
                return [CompletePart(message)]
            case AskValues():
                return [ReadValues(message)]
            case _:
                return []

    # ---- rounds -------------------------------------------------------------------------------------------------

    def _unstage(self, order: int, fragment: int) -> list[ShardEffect]:
        staged = self._staged.get(fragment)
        if staged is None or staged.stage.order != order:
            return []
        if not staged.head:
            staged.void = True  # a thread works on it
            return [Abandon(order)] if staged.stepped is None else []
        del self._staged[fragment]
        return [Undo(fragment)]

    def _note_stepped(self, order: int, event: PartStepped) -> list[ShardEffect]:
        staged = self._find_staged(order)
        if staged.void:
            return self._drop(staged)
        staged.stepped = event
        return [Write(staged.stage, event.digest)]

    def _note_failed(self, order: int, reason: str, reset: bool) -> list[ShardEffect]:
        staged = self._find_staged(order)
        del self._staged[staged.stage.fragment]
        if staged.void:
            return self._go_on()
        return [TellLead(Unstaged(order=order, reason=reason, reset=reset))]

    def _note_written(self, order: int, head: str) -> list[ShardEffect]:
        staged = self._find_staged(order)
        if staged.void:
            return self._drop(staged)
        staged.head, stepped = head, staged.stepped
        assert stepped is not None, "it is written once it is made"
        return [
            TellLead(
                Staged(order=order, digest=stepped.digest, marks=stepped.marks, head=head, seconds=stepped.seconds)
            )
        ]

    def _find_staged(self, order: int) -> StagedRound:
        return next(one for one in self._staged.values() if one.stage.order == order)

    def _drop(self, staged: StagedRound) -> list[ShardEffect]:
        del self._staged[staged.stage.fragment]
        return [Undo(staged.stage.fragment), *self._go_on()]

    def _go_on(self) -> list[ShardEffect]:
        """A step or a write is over that a new connection waited for, or orders did."""
        if self._again is None:
            return self._obey_waiting()
        if self._is_busy():
            return []
        again, self._again = self._again, None
        return self._take_up(again)

    def _decide(self, decision: AnyDecision) -> Apply:
        if not isinstance(decision, RoundDecided):
            return Apply(decision)
        staged = self._staged.get(decision.fragment)
        if staged is None or staged.head != decision.head:
            return Apply(decision)
        del self._staged[decision.fragment]
        return Apply(decision, staged=True)
