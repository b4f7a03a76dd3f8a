"""What the syncer is told (events) and what it wants done (effects); protocol/effects.py says what these are."""

from __future__ import annotations

from atoll.protocol.effects import Fact, Note, Tick
from atoll.protocol.history import HistoryState
from atoll.protocol.messages import (
    Contribution,
    CutSaved,
    FromLearner,
    FromSyncer,
    Hello,
)
from atoll.protocol.records import AnyRecord, Undone
from atoll.protocol.settings import Settings


class Greeted(Fact, frozen=True):
    """Event: a learner opened a control channel and said hello."""

    hello: Hello
    token: str = ""
    """The name of the join token it authenticated with; empty without authentication."""


class Received(Fact, frozen=True):
    """Event: a message from a learner whose channel is open."""

    learner: str
    message: FromLearner


class Delivered(Fact, frozen=True):
    """Event: a contribution with its body whole. `refusal` is what screening found wrong with it."""

    learner: str
    contribution: Contribution
    refusal: str | None = None


class Lost(Fact, frozen=True):
    """Event: a learner's control channel has closed."""

    learner: str
    reason: str


class Initialised(Fact, frozen=True):
    """Event: version 0 of every fragment has arrived from the process that was asked."""

    learner: str
    session: str
    loss: float = 0.0
    """Relative error of the rounding, as the learner measured it. 0: nothing was lost, or nothing was measured."""


class Uploading(Fact, frozen=True):
    """Event: a fragment of the first parameters, of so many bytes, begins to come; 0: one more is whole."""

    learner: str
    size: int


class Judged(Fact, frozen=True):
    """What the filter found of one member's contribution (numerics/filter.py)."""

    learner: str
    agreement: float
    """Its median cosine with the others'."""
    influence: float
    """Its share of the merge, of all members' together."""
    factors: bytes = b""
    """Per tensor, as float32, what was left of it; empty: all of it."""
    suspect: str = ""
    """Why its learner is suspect; empty: it is not."""
    kept: float = 1.0
    """Share of its values that the factors left, each as far as it was left."""


class Merged(Fact, frozen=True):
    """Event: the new version of a round's fragment lies ready to be committed."""

    round: int
    digest: str
    merge_s: float = 0.0
    marks: bytes = b""
    judged: tuple[Judged, ...] = ()
    """Of each member, in order; empty: nobody was judged."""
    heads: tuple[str, ...] = ()
    """Of a syncer of several shards, for the record."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Members whose contributions came as one sum, of a relay."""


class Unmergeable(Fact, frozen=True):
    """Event: a merge came to nothing that may be committed."""

    round: int
    reason: str
    reset: bool = False
    """The outer state of the round's fragment was broken by it and starts anew."""


class Scored(Fact, frozen=True):
    """Event: the run's evaluator has scored the model as of a round; None: the loss is not finite."""

    round: int
    loss: float | None


class Restorable(Fact, frozen=True):
    """Event: values and outer state of an earlier moment lie ready to be committed."""

    round: int
    """Rounds that were behind the run then: as many as were asked for, or fewer."""
    digests: tuple[str, ...]
    undone: tuple[Undone, ...]


class Unrestorable(Fact, frozen=True):
    """Event: nothing that was asked for can be had any more."""

    reason: str


class CutKept(Fact, frozen=True):
    """Event: the syncer's part of a cut is durable; with a reason: it could not be written."""

    cut: int
    reason: str = ""


class CutWritten(Fact, frozen=True):
    """Event: the manifest of a cut is durable."""

    cut: int
    manifest: str


class ChangeAsked(Fact, frozen=True):
    """Event: the operator changes settings while the run goes on; `reopen`: a run that was ended goes on too."""

    settings: Settings
    outer: dict[str, str | float | bool]
    what: str
    reopen: bool = False

    def behind(self, earlier: ChangeAsked | None) -> ChangeAsked:
        """One record for both, where an earlier one still waits; this one was made with it in view."""
        if earlier is None:
            return self
        what, reopen = f"{earlier.what} {self.what}", earlier.reopen or self.reopen
        return ChangeAsked(self.settings, self.outer, what, reopen)


class DrainAsked(Fact, frozen=True):
    """Event: the operator wants one learner to leave in good order; the run goes on."""

    learner: str
    reason: str


class Over(Fact, frozen=True):
    """Event: nobody is waited for any more; whatever account is open is closed."""


class StoodStill(Fact, frozen=True):
    """Event: the syncer's own process did nothing for so many seconds (its loop was busy, it was stopped, its machine
    slept). What learners said meanwhile is still to be read: no silence of theirs counts that it could not hear."""

    seconds: float


class ForwardingWanted(Fact, frozen=True):
    """Event: a newcomer waits at the syncer for its peer's state, from this byte on."""

    ticket: str
    offset: int


class EndAsked(Fact, frozen=True):
    """Event: the operator wants the run to end in good order."""

    reason: str


class Send(Fact, frozen=True):
    """Effect: a message to one learner."""

    learner: str
    message: FromSyncer


class ConfirmSent(Fact, frozen=True):
    """Effect: answer PullsSent. It stands behind the pulls of a round, or behind a learner's probe: they may have
    waited for the disk, and nobody can answer before they have left."""

    round: int
    attempt: int
    probed: str = ""
    """The learner, where it was a probe."""


class PullsSent(Fact, frozen=True):
    """Event: what ConfirmSent stood behind has left."""

    round: int
    attempt: int
    probed: str = ""


class Part(Fact, frozen=True):
    """One contribution's part in a merge."""

    learner: str
    attempt: int
    weight: float
    base: int = -1
    """The version it was made on."""
    steps: int = 1
    """Steps behind it, as its learner says."""


class Merge(Fact, frozen=True):
    """Effect: merge these, take the outer step beside the committed version, answer Merged or Unmergeable."""

    round: int
    fragment: int
    parts: tuple[Part, ...]


class Persist(Fact, frozen=True):
    """Effect: make these durable. Of the effects behind it, of this event or a later one, only a merge may be carried
    out before they are."""

    records: tuple[AnyRecord, ...]
    round: int = -1
    """The round whose merged outer gradient belongs to them; −1 for none."""
    restored: bool = False
    """What Restorable named belongs to them."""


class TakeCut(Fact, frozen=True):
    """Effect: record Θ, the outer state and this history as they are now, and answer CutKept.

    The `first` is durable before any effect behind it is carried out. For the `last` the end of the run waits.
    """

    cut: int
    history: HistoryState
    first: bool = False
    last: bool = False


class CompleteCut(Fact, frozen=True):
    """Effect: write the manifest of a cut with these learners' parts, and answer CutWritten."""

    cut: int
    saved: tuple[tuple[str, CutSaved], ...]
    left_out: tuple[tuple[str, str], ...]
    spared: int = -1
    """An old cut that is not removed now; −1: none."""


class Retune(Fact, frozen=True):
    """Effect: the outer step follows these settings from the next merge on."""

    outer: dict[str, str | float | bool]


class Commit(Fact, frozen=True):
    """Effect: what Merged named is now the fragment's version."""

    round: int
    fragment: int
    version: int


class Restore(Fact, frozen=True):
    """Effect: make ready what was there after so many rounds, or at the newest cut before; answer Restorable or
    Unrestorable. No cut counts that was taken in one of the spans `without`, from the first number's end to the other.
    """

    round: int
    without: tuple[tuple[int, int], ...] = ()


class CommitRestored(Fact, frozen=True):
    """Effect: what Restorable named is now every fragment's version; so many rounds are behind the run."""

    versions: tuple[int, ...]
    at: int


class Discard(Fact, frozen=True):
    """Effect: forget a contribution's body."""

    learner: str
    round: int
    attempt: int


class Expel(Fact, frozen=True):
    """Effect: close a learner's control channel."""

    learner: str
    reason: str


class Finished(Fact, frozen=True):
    """Effect: the run is over; the committed versions are its result."""

    reason: str


class RelayMeasured(Fact, frozen=True):
    """Event: rates of the link that these learners share because they come through one relay."""

    learners: tuple[str, ...]
    """Learners that are connected through the relay."""
    up_rate: float
    """Bytes per second from the relay to the syncer; 0: not measured yet."""
    down_rate: float
    """Bytes per second from the syncer to the relay; 0: not measured yet."""


SyncerEvent = (
    Greeted
    | Received
    | Delivered
    | Lost
    | Initialised
    | Uploading
    | Merged
    | Unmergeable
    | Scored
    | Restorable
    | Unrestorable
    | CutKept
    | CutWritten
    | ForwardingWanted
    | ChangeAsked
    | DrainAsked
    | EndAsked
    | Over
    | PullsSent
    | RelayMeasured
    | StoodStill
    | Tick
)
SyncerEffect = (
    Send
    | ConfirmSent
    | Merge
    | Persist
    | TakeCut
    | CompleteCut
    | Retune
    | Commit
    | Restore
    | CommitRestored
    | Discard
    | Expel
    | Finished
    | Note
)
