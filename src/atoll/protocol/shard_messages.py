"""What the lead of a syncer and its other shards say to each other (docs/adr/0031): `GET /v1/shard`, one WebSocket for
each shard, which dials the lead. Small messages: bodies travel between learners and shards.

    shard → lead   ShardHello  TakenUp  BodyHere  InitialHere  NormsHere  Staged  Unstaged  CutHere  CutDone  Values
                   Traffic
    lead → shard   TakeUp  DeclareRanks  Expect  Forget  AskInitial  Stage  NormsOfAll  Unstage  Decide  WriteCut
                   FinishCut  AskValues  EndShard

Both directions keep their order, so a shard stages, decides and writes cuts in the order of the lead's effects.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from atoll.protocol.limits import LINE, MANY, Count, Line, Name, Number, Real, Row, Seconds, Words
from atoll.protocol.messages import MOST_RANKS, ContributionKey, RankBoxes
from atoll.protocol.records import AnyRecord, ChangedRecord, MergedRecord, ResetRecord, TermRecord

SHARD_PROTOCOL = 4
"""The version of these messages; checked at hello."""

Digest = Annotated[str, Meta(max_length=64)]
BoundedOuter = Annotated[dict[Name, str | float | bool], Meta(max_length=64)]
"""Settings of the outer step (config.Outer)."""
Squares = Annotated[bytes, Meta(max_length=1 << 24)]
"""float64, in the byte order of x86: ‖cut‖² for each cut of a part, in order."""


class ShardMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, omit_defaults=True, kw_only=True):
    term: Count = 0
    """Of the lead that sends it, or the highest that the shard has heard of."""


# ---- decisions ------------------------------------------------------------------------------------------------------


class Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, omit_defaults=True):
    """A record of the lead's journal, as far as it concerns the parameters of a shard."""


class RoundDecided(Decision, frozen=True):
    """The part that the record with this head holds is the fragment's version."""

    round: Number
    fragment: Number
    version: Number
    head: Digest


class StateReset(Decision, frozen=True):
    """The outer state of a fragment starts anew."""

    fragment: Number


class OuterChanged(Decision, frozen=True):
    outer: BoundedOuter


class TermBegun(Decision, frozen=True):
    """A term of the lead has begun: bases and feedback are forgotten."""


AnyDecision = RoundDecided | StateReset | OuterChanged | TermBegun
Decisions = Annotated[tuple[AnyDecision, ...], Meta(max_length=1 << 22)]


def decision_of(record: AnyRecord, shard: int) -> AnyDecision | None:
    """As this shard is told it; None: it does not concern it."""
    match record:
        case MergedRecord(round=number, fragment=fragment, version=version, heads=heads):
            head = heads[shard - 1]
            return RoundDecided(number, fragment, version, head) if head else None
        case ResetRecord(fragment=fragment):
            return StateReset(fragment)
        case ChangedRecord(outer=outer):
            return OuterChanged(outer)
        case TermRecord():
            return TermBegun()
        case _:
            return None


# ---- from a shard ---------------------------------------------------------------------------------------------------


class ShardHello(ShardMessage, frozen=True):
    protocol: Number
    shard: Number
    """2 to S."""
    shards: Number
    """S."""
    process: Line
    """Drawn once for each process: another one of the same shard is another process."""
    url: Line
    """Where learners reach it."""
    run: Line = ""
    """The run whose parameters it holds; empty: none yet."""
    cuts: Row = ()
    """The cuts that it could come back from, the newest first."""


class TakenUp(ShardMessage, frozen=True):
    """It holds what was decided; with a reason: it cannot, and serves nobody."""

    reason: Words = ""
    replayed: Count = 0
    """Rounds."""


class BodyHere(ShardMessage, frozen=True):
    """Its part of a contribution has arrived and is decoded; with a reason: it cannot be."""

    learner: Name
    round: Number
    attempt: Number
    digest: Digest
    squares: Squares = b""
    version: Number = -1
    """The committed version that the buffers were compared with, …"""
    buffers: Squares = b""
    """… ‖Θ‖² of the model buffers in its part, …"""
    moved: Squares = b""
    """… and ‖Θ − Δ‖²."""
    broken: Count = 0
    """Values that are not finite."""
    reason: Words = ""

    @property
    def body(self) -> ContributionKey:
        return (self.learner, self.round, self.attempt)


class InitialHere(ShardMessage, frozen=True):
    """Of the first parameters, a body of so many bytes begins to come (`size`), or one more part is whole."""

    learner: Name
    session: Name
    size: Count = 0
    complete: bool = False
    """All its parts are whole."""
    reason: Words = ""
    """They are not finite."""


class NormsHere(ShardMessage, frozen=True):
    """What the other shards need of its part to merge theirs: ‖cut‖² of cuts of pieces that are merged as a whole, or
    how far contributions to its cuts agree (numerics/comparison.py)."""

    order: Count
    turn: Count
    """The how many-th time in this order."""
    squares: Squares


class Staged(ShardMessage, frozen=True):
    """Its part of a round's new version is made and, with its outer gradient, durable in its chain."""

    order: Count
    digest: Digest = ""
    marks: Annotated[bytes, Meta(max_length=4 * MANY)] = b""
    head: Digest = ""
    """Of the chain, behind the record."""
    seconds: Seconds = 0.0


class Unstaged(ShardMessage, frozen=True):
    """Nothing that may be committed came of it."""

    order: Count
    reason: Words
    reset: bool = False
    """It was not finite: the outer state of the fragment starts anew, in every shard."""


class CutHere(ShardMessage, frozen=True):
    """Its part of a cut is durable; with a reason: it could not be written."""

    cut: Number
    digest: Digest = ""
    """Of the part's table."""
    reason: Words = ""


class CutDone(ShardMessage, frozen=True):
    """Its part of a cut counts from now on; with a reason: it does not."""

    cut: Number
    reason: Words = ""


class Traffic(ShardMessage, frozen=True):
    """Bytes that its process has received and sent so far, and how far its part of the bucket is behind."""

    bytes_in: Count
    bytes_out: Count
    store_rounds: Count = 0
    store_s: Seconds = 0.0
    store_trouble: Words = ""
    """What is wrong with the bucket; empty: nothing, or the run has none."""


class Values(ShardMessage, frozen=True):
    """Some bytes of its part of a fragment's committed version."""

    order: Count
    fragment: Number
    start: Count
    data: Annotated[bytes, Meta(max_length=1 << 25)]


# ---- from the lead --------------------------------------------------------------------------------------------------


class TakeUp(ShardMessage, frozen=True):
    """Hold what the run has decided: `cut`, and every decision since. Whatever else was staged is void."""

    begun: Annotated[bytes, Meta(max_length=1 << 26)]
    """The run's BegunRecord, encoded."""
    cut: Number = -1
    """−1: the run has no parameters yet."""
    decisions: Decisions = ()


class DeclareRanks(ShardMessage, frozen=True):
    """A learner of several ranks is connected: what each of them holds. None: it is gone."""

    learner: Name
    ranks: Annotated[tuple[RankBoxes, ...], Meta(max_length=MOST_RANKS)] = ()


class Expect(ShardMessage, frozen=True):
    """A learner is pulled: its part of this contribution may come."""

    learner: Name
    session: Name
    round: Number
    attempt: Number
    fragment: Number
    token: Name = ""
    probe: bool = False

    @property
    def body(self) -> ContributionKey:
        return (self.learner, self.round, self.attempt)


class Forget(ShardMessage, frozen=True):
    """Nobody needs that contribution any more."""

    learner: Name
    round: Number
    attempt: Number

    @property
    def body(self) -> ContributionKey:
        return (self.learner, self.round, self.attempt)


class AskInitial(ShardMessage, frozen=True):
    """The first parameters come from this process; what another sent counts for nothing."""

    learner: Name
    session: Name
    token: Name = ""


class Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One contribution's part in a merge."""

    learner: Name
    attempt: Number
    weight: Real
    base: Number = -1
    steps: Number = 1
    """Steps behind it, where contributions are compared."""


class Stage(ShardMessage, frozen=True):
    """Merge these, take the outer step, make the part durable; answer Staged or Unstaged."""

    order: Count
    """Counted by the lead: answers to another order count for nothing."""
    round: Number
    attempt: Number
    fragment: Number
    given: Annotated[tuple[Given, ...], Meta(max_length=MANY)]
    compare: bool = False
    """First tell the lead how far they agree, and wait for the factors of its filter."""


class NormsOfAll(ShardMessage, frozen=True):
    """What every holder of the fragment gave in this turn, in order of shard; where contributions are compared, what
    the lead gave."""

    order: Count
    turn: Count
    squares: Annotated[tuple[Squares, ...], Meta(max_length=MANY)]
    fragment: Number


class Unstage(ShardMessage, frozen=True):
    """Nothing comes of this order: all is as before it."""

    order: Count
    fragment: Number


class Decide(ShardMessage, frozen=True):
    """It is durable in the lead's journal."""

    decision: AnyDecision


class WriteCut(ShardMessage, frozen=True):
    """Capture everything as it is now, write it in the background, answer CutHere."""

    cut: Number
    round: Number
    hurry: bool = False
    """The lead waits for it."""


class FinishCut(ShardMessage, frozen=True):
    """The cut is to be complete: answer CutDone. What lies before the cuts that are complete at the lead may go."""

    cut: Number
    oldest: Number = -1
    """Of the cuts that the lead keeps: older ones may go, but for `spared`. −1: none may."""
    newest: Number = -1
    """Of them: outer gradients from before it may go."""
    spared: Number = -1


class AskValues(ShardMessage, frozen=True):
    """The finished model is to be written: answer Values."""

    order: Count
    fragment: Number
    start: Count
    size: Count


class EndShard(ShardMessage, frozen=True):
    """The run is over, or (with `refused`) this process may not take part: end."""

    reason: Annotated[str, Meta(max_length=8 * LINE)]
    refused: bool = False


FromShard = (
    ShardHello | TakenUp | BodyHere | InitialHere | NormsHere | Staged | Unstaged | CutHere | CutDone | Values | Traffic
)
FromLead = (
    TakeUp
    | DeclareRanks
    | Expect
    | Forget
    | AskInitial
    | Stage
    | NormsOfAll
    | Unstage
    | Decide
    | WriteCut
    | FinishCut
    | AskValues
    | EndShard
)

_encoder = msgspec.msgpack.Encoder()
_from_shard: msgspec.msgpack.Decoder[FromShard] = msgspec.msgpack.Decoder(FromShard)
_from_lead: msgspec.msgpack.Decoder[FromLead] = msgspec.msgpack.Decoder(FromLead)


def encode(message: FromShard | FromLead) -> bytes:
    return _encoder.encode(message)


def decode_from_shard(data: bytes) -> FromShard:
    """msgspec.MsgspecError when it is none."""
    return _from_shard.decode(data)


def decode_from_lead(data: bytes) -> FromLead:
    return _from_lead.decode(data)
