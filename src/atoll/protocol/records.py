"""Records of the journal: the decisions of a run, small enough to keep for ever.

With `durability = "round"` they are durable before anybody hears of them (protocol/syncer/effect_order.py).

A run's state is a fold over its records (history.py). What changed each version is stored beside them; a record names
its place. Structs are written as arrays without names: a round of four members takes under 300 bytes.

    BegunRecord     the run: its settings, model and data               first of all
    TermRecord      a new term, and what it found of the one before      first of every later segment. The feedback of a
                    lossy version codec starts at zero with it
    JoinedRecord    a learner's incarnation has begun
    OwnedRecord     which join token owns a learner's name: only in a run that asks for tokens
    StartedRecord   version 0 is in cut 0
    MergedRecord    a round: its members, weights and reason, and where its outer gradient is stored; with a lossy
                    version codec, the bytes that changed the version
    PassedRecord    a round that was passed over, and why
    ResetRecord     a fragment's outer state starts anew, its feedback too: its last step was not finite
    ScoredRecord    a score of the run's evaluator
    RestoredRecord  a rollback: values and outer state of all fragments are stored beside it; feedback starts at zero
    SourcesRecord   the data that leases are taken from
    GrantedRecord   a lease: a range of the data for one learner
    GoneRecord      an incarnation is over: what it had reported, what was dropped, what is lost
    AlarmedRecord   what an incarnation reported does not fit the ledger
    ChangedRecord   other settings from here on: the operator's, or those of the next phase of training
    CutDoneRecord   a complete cut
    PlayedRecord    parts of learners' tapes (tape.py)
    LentRecord      a copy of a learner's state that a newcomer may take
    DrawnRecord     of a tape that no run made: what its failures were drawn from, and who makes no steps when
    EndedRecord     the run ends; and once more, final: its last round is behind it
    TailRecord      the mean of the last versions of every fragment, which is about to be written (store/tail.py)
    LossRecord      the operator goes on without a part of the journal that was durable (store/durable_end.py)
"""

from __future__ import annotations

import msgspec

from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import Settings
from atoll.protocol.tape import AnyEntry


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    pass


class BegunRecord(Record, frozen=True, tag="begun"):
    run: str
    settings: Settings
    """With P and H filled in."""
    outer: dict[str, str | float | bool]
    """merge, optimizer, lr, momentum, norm_limit, robust."""
    tensors: tuple[TensorSpec, ...]
    fingerprint: str
    data: str = ""
    seed: int = 0
    parent: str = ""
    """The run and cut it was started from, for `--from-cut`."""
    frozen: str = ""
    """A digest of what the first learner does not merge; empty: it is not compared."""
    shards: int = 1
    """Processes that are the syncer together (docs/adr/0031)."""
    succeeds: tuple[str, ...] = ()
    """Runs whose disk was lost and that this one goes on for: their learners join it (docs/adr/0033)."""
    unmerged: tuple[str, ...] = ()
    """Tensors of the first learner's model that are not merged; empty: it has none, or did not tell."""
    renamed: tuple[str, ...] = ()
    """Tensors of the first learner's model that its `state_dict()` has under other names."""


class TermRecord(Record, frozen=True, tag="reigned"):
    term: int
    before_bytes: int
    """How much of the segment before counts."""
    before_hash: str
    round: int


class JoinedRecord(Record, frozen=True, tag="joined"):
    learner: str
    incarnation: int
    session: str
    t: int
    origin: int = 0
    """Tokens of its process that earlier incarnations have accounted for."""
    declared: int = 0
    """The most tokens that one of its steps has, as it said when it joined; 0: it said nothing."""


class OwnedRecord(Record, frozen=True, tag="owned"):
    """From here on the name belongs to whoever holds the join token of that name; the name is no secret."""

    learner: str
    token: str


class StartedRecord(Record, frozen=True, tag="started"):
    uploader: str


class Share(Record, frozen=True):
    """One member's part in a round."""

    learner: str
    incarnation: int
    t: int
    steps: int
    tokens: int
    weight: float
    base: int
    total: int = 0
    """Its tokens of all time when the copy was made."""
    position: int = -1
    """How many leased samples it had taken then; −1: it brings its own data."""
    limit: float = 0.0
    """How many times the median of all but the largest weight it could be (protocol/syncer/weights.py)."""
    factors: bytes = b""
    """Per tensor of the fragment, as float32, what the filter left of it (0: nothing); empty: all of it."""
    filtered: int = 0
    """Tokens of `tokens` that the filter left out: the share of the values that its factors took away."""


class PayloadPlace(Record, frozen=True):
    """Where a payload lies: `payload-<term>-<file>`, and its digest."""

    file: int
    offset: int
    length: int
    digest: str


class MergedRecord(Record, frozen=True, tag="m"):
    round: int
    fragment: int
    version: int
    attempt: int
    reason: str
    members: tuple[Share, ...]
    digest: str
    """Of the new version's values."""
    payload: PayloadPlace | None = None
    """Set when the record is written."""
    progress: float = 0.0
    """How much of the run's budget is spent with it."""
    marks: bytes = b""
    """Four bytes for each of the fragment's tensors, in order: enough to tell which one a replay made another."""
    step: float = 0.0
    """The run's step (`Pace`, protocol/syncer/closing.py) at its commit. Over all records of a run it never falls."""
    heads: tuple[str, ...] = ()
    """Of a syncer of several shards (docs/adr/0031): of shard 1 the digest of its part of the version, of each other
    the head of its chain behind its part; empty where it holds nothing of the fragment."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Members whose contributions came as one sum, of a relay: a replay has no such sums."""


class PassedRecord(Record, frozen=True, tag="p"):
    round: int
    fragment: int
    reason: str
    progress: float = 0.0
    step: float = 0.0


class ResetRecord(Record, frozen=True, tag="reset"):
    fragment: int
    reason: str


class ScoredRecord(Record, frozen=True, tag="scored"):
    round: int
    loss: float | None
    """None: it is not finite."""


class Undone(Record, frozen=True):
    """Of one incarnation, the tokens in rounds that are rolled back, per fragment."""

    learner: str
    incarnation: int
    tokens: tuple[int, ...]


class RestoredRecord(Record, frozen=True, tag="restored"):
    """Its payload is Θ and the outer state of every fragment, one after the other."""

    round: int
    """All is as it was when so many rounds were behind the run …"""
    at: int
    """… which by now has so many behind it."""
    versions: tuple[int, ...]
    """Per fragment, the new one: one more than before."""
    digests: tuple[str, ...]
    """Per fragment, of the new version's values."""
    undone: tuple[Undone, ...]
    reason: str
    payload: PayloadPlace | None = None


class SourcesRecord(Record, frozen=True, tag="sources"):
    datasets: tuple[tuple[str, int, float], ...]
    """Name, samples and weight of each."""
    epochs: int
    """Passes over the data; 0: no end."""


class GrantedRecord(Record, frozen=True, tag="g"):
    """Positions [start, stop) of one pass over one dataset's seeded permutation."""

    lease: int
    dataset: int
    epoch: int
    start: int
    stop: int
    learner: str
    incarnation: int


class GoneRecord(Record, frozen=True, tag="gone"):
    learner: str
    incarnation: int
    t: int
    total: int
    """Tokens it had reported."""
    dropped: tuple[int, ...]
    """Per fragment, as it had reported."""
    lost: tuple[int, ...]
    """Per fragment: computed and reported, in no version and not dropped."""
    position: int = -1
    """Leased samples it had reported as taken."""
    again_from: int = -1
    """Samples from this position on are issued again; none of them is in any version."""
    reason: str = ""
    missed: tuple[int, ...] = ()
    """Per fragment, of `dropped`: overwritten by versions that held none of its steps."""


class AlarmedRecord(Record, frozen=True, tag="alarmed"):
    """Reports are in no record: without this one, only who was there would know. One for each incarnation."""

    learner: str
    incarnation: int
    wrong: str


class ChangedRecord(Record, frozen=True, tag="changed"):
    settings: Settings
    outer: dict[str, str | float | bool]
    what: str
    reopen: bool = False
    """A run that had ended goes on."""
    training_phase: int = 0
    """The phase of training (phases.py) that begins here, 1 being the first; 0: the operator changed something."""
    progress: float = -1.0
    """Share of the budget in these settings that is spent here; below 0: as the last round said."""


class CutDoneRecord(Record, frozen=True, tag="cut"):
    cut: int
    round: int
    learners: tuple[str, ...]
    manifest: str
    """Digest of its manifest."""


class Stretch(Record, frozen=True):
    """Some entries of one learner's tape."""

    learner: str
    incarnation: int
    """An incarnation of the process that recorded these entries; it may have had several."""
    first: int
    """The number of the first entry."""
    entries: tuple[AnyEntry, ...]


class PlayedRecord(Record, frozen=True, tag="t"):
    tapes: tuple[Stretch, ...]


class LentRecord(Record, frozen=True, tag="l"):
    ticket: str
    learner: str
    incarnation: int
    t: int
    """The step after which the copy was made."""


class Absence(Record, frozen=True):
    """A learner makes no step for a while. A tick is as long as a usual step; in every other tick it makes one."""

    learner: str
    tick: int
    """The first without a step, from 0 …"""
    ticks: int
    """… and how many there are."""
    reason: str


class DrawnRecord(Record, frozen=True, tag="drawn"):
    """The failures of this tape were drawn from the goodput model (estimate/drawn_tape.py)."""

    profile: str
    provenance: str
    """Where the profile's constants come from."""
    learners: int
    chips: int
    seed: int
    step_s: float
    """Seconds of a usual step."""
    ticks: int
    """So many usual steps the run lasts."""
    goodput: float
    """As `atoll simulate goodput` counts it."""
    absences: tuple[Absence, ...]

    @property
    def possible_steps(self) -> int:
        return self.learners * self.ticks

    @property
    def steps(self) -> int:
        """Of all learners together."""
        return self.possible_steps - sum(one.ticks for one in self.absences)

    def describe(self) -> str:
        lost: dict[str, int] = {}
        for one in self.absences:
            lost[one.reason] = lost.get(one.reason, 0) + one.ticks
        reasons = "".join(f", {ticks:,} lost to {reason}" for reason, ticks in sorted(lost.items()))
        return (
            f"goodput {100 * self.goodput:.1f} %: {self.steps:,} of {self.possible_steps:,} learner steps{reasons} "
            f"(profile {self.profile}, {self.chips:,} chips, {self.learners} learners, seed {self.seed})"
        )


class EndedRecord(Record, frozen=True, tag="ended"):
    reason: str
    final: bool = False
    step: float = 0.0
    """The run's step. Without it a term that finds the run ending would take its budget to be less than spent."""
    progress: float = -1.0
    """How much of the budget was spent at the very end; below 0: as the last round said."""


class TailRecord(Record, frozen=True, tag="tail"):
    cycles: int
    """As many were asked for."""
    first: tuple[int, ...]
    last: tuple[int, ...]
    """Of each fragment, the versions that are averaged, both included."""
    digests: tuple[str, ...]
    """Of each fragment's mean."""


class LossRecord(Record, frozen=True, tag="lost"):
    """Written right behind the TermRecord of the term that goes on."""

    what: str
    """Text that named the loss when the operator accepted it."""


AnyRecord = (
    BegunRecord
    | TermRecord
    | JoinedRecord
    | OwnedRecord
    | StartedRecord
    | MergedRecord
    | PassedRecord
    | ResetRecord
    | ScoredRecord
    | RestoredRecord
    | SourcesRecord
    | GrantedRecord
    | GoneRecord
    | AlarmedRecord
    | ChangedRecord
    | CutDoneRecord
    | PlayedRecord
    | LentRecord
    | DrawnRecord
    | EndedRecord
    | TailRecord
    | LossRecord
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


def encode(record: AnyRecord) -> bytes:
    return _encoder.encode(record)


def decode(data: bytes) -> AnyRecord:
    """msgspec.MsgspecError when it is none."""
    return _decoder.decode(data)
