"""What the state machines want done, and what they are told.

`handle(now, event) -> effects`: an event is a fact that has happened, an effect is a wish that somebody outside carries
out in the given order. Both are small frozen structs without tensors; bytes are named by (fragment, version) or by
(learner, round, attempt). Effects are the points at which a process can die.
"""

from __future__ import annotations

import msgspec

from atoll.protocol.history import State
from atoll.protocol.messages import (
    Contribution,
    CutSaved,
    FromLearner,
    FromSyncer,
    Hello,
    Range,
)
from atoll.protocol.records import AnyRecord, Undone
from atoll.protocol.settings import Settings
from atoll.protocol.tape import AnyEntry


class Fact(msgspec.Struct, frozen=True):
    """Base of events and effects."""


# ---- both machines ------------------------------------------------------------------------------------------------


class Note(Fact, frozen=True):
    """Effect: a line for the run's events. `text` is for people, `data` for programs."""

    kind: str
    text: str
    data: dict[str, object] = {}


class Tick(Fact, frozen=True):
    """Event: time has passed; sent at or after the machine's `wake_at`."""


# ---- the syncer ---------------------------------------------------------------------------------------------------


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


class Merged(Fact, frozen=True):
    """Event: the new version of a round's fragment lies ready to be committed."""

    round: int
    digest: str
    merge_s: float = 0.0
    marks: bytes = b""
    judged: tuple[Judged, ...] = ()
    """Of each member, in order; empty: nobody was judged."""


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


class RelayWanted(Fact, frozen=True):
    """Event: a newcomer waits at the relay for its peer's state, from this byte on."""

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


class Merge(Fact, frozen=True):
    """Effect: merge these, take the outer step beside the committed version, answer Merged or Unmergeable."""

    round: int
    fragment: int
    parts: tuple[Part, ...]


class Persist(Fact, frozen=True):
    """Effect: make these durable. No effect behind it, of this event or a later one, is carried out before they are."""

    records: tuple[AnyRecord, ...]
    round: int = -1
    """The round whose merged outer gradient belongs to them; −1 for none."""
    restored: bool = False
    """What Restorable named belongs to them."""


class TakeCut(Fact, frozen=True):
    """Effect: record Θ, the outer state and this history as they are now, and answer CutKept.

    The `first` is durable before any effect behind it is carried out.
    """

    cut: int
    history: State
    first: bool = False


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
    | RelayWanted
    | ChangeAsked
    | DrainAsked
    | EndAsked
    | Over
    | PullsSent
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


# ---- the learner --------------------------------------------------------------------------------------------------


class Arrived(Fact, frozen=True):
    """Event: a message from the syncer."""

    message: FromSyncer


class Disconnected(Fact, frozen=True):
    """Event: the control channel is down; it is being dialled again."""

    reason: str


class Stepped(Fact, frozen=True):
    """Event: the training process finished a step (or, `stopped`, its last one; `leaving`: since it was asked to)."""

    t: int
    steps: tuple[int, ...]
    tokens: tuple[int, ...]
    tokens_total: int = 0
    busy_s: float = 0.0
    loss: float | None = None
    stopped: bool = False
    dropped: tuple[int, ...] = ()
    position: int = -1
    leaving: bool = False
    missed: tuple[int, ...] = ()
    """Of `dropped`: overwritten by versions that held none of its steps."""
    inputs: int = -1
    """A hash of what the model was given lately, where the data is the script's own."""


class Told(Fact, frozen=True):
    """Event: what the training process was told, for the tape; `first` is the number of the first entry."""

    first: int
    entries: tuple[AnyEntry, ...]


class Registered(Fact, frozen=True):
    """Event: the training process takes its batches from these datasets (name, samples, weight)."""

    datasets: tuple[tuple[str, int, float], ...]
    epochs: int
    batch: int


class Copied(Fact, frozen=True):
    """Event: a fragment's values after step `t` lie in host memory."""

    round: int
    fragment: int
    t: int
    steps: int
    tokens: int
    base: int
    total: int = 0
    position: int = -1


class Adopted(Fact, frozen=True):
    """Event: the training process has taken a version into its model."""

    fragment: int
    version: int
    t: int
    steps: int = 0
    tokens: int = 0
    dropped: int = 0
    """Tokens of this fragment that it overwrote so far, in all …"""
    missed: int = 0
    """… and of those, the ones overwritten by versions that held none of its steps."""


class Fetched(Fact, frozen=True):
    """Event: a fragment's body has arrived; it may be newer than was asked for."""

    fragment: int
    version: int


class FetchFailed(Fact, frozen=True):
    fragment: int
    reason: str


class Uploaded(Fact, frozen=True):
    """Event: the body of an answer to a pull has arrived at the syncer."""

    round: int
    attempt: int
    digest: str


class UploadFailed(Fact, frozen=True):
    round: int
    attempt: int
    reason: str


class Saved(Fact, frozen=True):
    """Event: the training process's part of a cut is durable; with a reason: it could not be saved."""

    cut: int
    t: int
    file: str = ""
    digest: str = ""
    reason: str = ""


class Captured(Fact, frozen=True):
    """Event: a copy of the training process's state lies ready to be given away; with a reason: there is none."""

    number: int
    t: int = 0
    size: int = 0
    digest: str = ""
    direct: str = ""
    """Where the courier gives it away itself; empty: only through the syncer."""
    reason: str = ""


class StateCame(Fact, frozen=True):
    """Event: a peer's state has arrived whole."""

    ticket: str


class StateFailed(Fact, frozen=True):
    ticket: str
    reason: str


class Taken(Fact, frozen=True):
    """Event: the training process goes on with a peer's state; with a reason: it does not, nothing has changed."""

    ticket: str
    t: int = 0
    reason: str = ""
    refused: bool = False
    """The state is not to be believed; otherwise none could be taken here, from no peer."""


class Say(Fact, frozen=True):
    """Effect: a message to the syncer."""

    message: FromLearner


class Read(Fact, frozen=True):
    """Effect: copy this fragment at the end of the first step at or after `step`."""

    round: int
    fragment: int
    step: int


class CancelRead(Fact, frozen=True):
    """Effect: the copy ordered for this round is not needed any more, unless it is made already."""

    round: int


class Hold(Fact, frozen=True):
    """Effect: at the end of step `step`, wait until `round` is adopted or let go (synchronous runs)."""

    round: int
    step: int


class LetGo(Fact, frozen=True):
    """Effect: nothing will come of that round; go on."""

    round: int


class Fetch(Fact, frozen=True):
    """Effect: get the newest version of a fragment, at least `version`."""

    fragment: int
    version: int


class Adopt(Fact, frozen=True):
    """Effect: take the fetched version at the next boundary, or, in a synchronous run, at the end of step `step`.

    With rule carry, `copy_t` names the copy whose values the version already contains; None: the base instead.
    """

    fragment: int
    version: int
    round: int
    rule: str
    step: int = 0
    copy_t: int | None = None
    held_tokens: int = 0
    """Own tokens that the version contains and the model's last one did not: what is overwritten beyond is dropped."""


class Own(Fact, frozen=True):
    """Effect: the base copies are the run's version 0; nothing to fetch."""


class Forget(Fact, frozen=True):
    """Effect: hold no version any more; `reset`: the inner optimizer starts afresh too."""

    reason: str
    reset: bool = False


class UploadAll(Fact, frozen=True):
    """Effect: send every fragment's base as version 0."""


class Upload(Fact, frozen=True):
    """Effect: encode Δ of the newest copy of a fragment and send it as the answer to a pull."""

    round: int
    attempt: int
    fragment: int


class Drop(Fact, frozen=True):
    """Effect: the copy of this fragment is of no more use."""

    fragment: int
    t: int


class Supply(Fact, frozen=True):
    """Effect: these samples are the training process's, in this order; some of them it may have already."""

    ranges: tuple[Range, ...]
    over: bool = False
    own: str = ""


class Save(Fact, frozen=True):
    """Effect: save the training process's state at the next boundary, as its part of this cut."""

    cut: int
    kept: tuple[int, ...] = ()
    """Complete cuts whose parts may still be asked for."""


class Capture(Fact, frozen=True):
    """Effect: copy the training process's state, without its parameters, at the next boundary, and answer Captured."""

    number: int
    frozen: bool = False
    """With its frozen parameters."""


class Give(Fact, frozen=True):
    """Effect: the copy goes to whoever brings the ticket."""

    number: int
    ticket: str


class PassOn(Fact, frozen=True):
    """Effect: send what was given under the ticket through the syncer, from this byte on."""

    ticket: str
    offset: int


class TakeBack(Fact, frozen=True):
    """Effect: nothing is given under the ticket any more."""

    ticket: str


class Dispose(Fact, frozen=True):
    """Effect: the copy is of no more use."""

    number: int


class Await(Fact, frozen=True):
    """Effect: a peer's state is sought; a training process that has not begun waits for it (not for ever)."""


class Begin(Fact, frozen=True):
    """Effect: no peer's state is waited for any more. `text` says what became of it."""

    text: str


class FetchState(Fact, frozen=True):
    """Effect: get the state that lies ready under the ticket, and answer StateCame or StateFailed."""

    ticket: str
    size: int
    digest: str
    direct: str = ""


class LeaveState(Fact, frozen=True):
    """Effect: that state is not wanted any more."""

    ticket: str


class TakeState(Fact, frozen=True):
    """Effect: the training process takes what has come, between two steps, and answers Taken."""

    ticket: str


class HangUp(Fact, frozen=True):
    """Effect: this syncer was replaced; dial for its successor."""

    reason: str


class Inform(Fact, frozen=True):
    """Effect: how far the run is, for `learner.progress` and `learner.global_step`, after so many rounds."""

    progress: float
    global_step: int
    committed: int = 0


class AskToLeave(Fact, frozen=True):
    """Effect: the training process is to give its last steps, save its state and leave."""

    reason: str


class Stop(Fact, frozen=True):
    """Effect: the training loop should end now. `final`: nothing more will be asked of this learner."""

    reason: str
    final: bool = False
    failed: bool = False


LearnerEvent = (
    Arrived
    | Disconnected
    | Stepped
    | Told
    | Registered
    | Copied
    | Adopted
    | Fetched
    | FetchFailed
    | Uploaded
    | UploadFailed
    | Saved
    | Captured
    | StateCame
    | StateFailed
    | Taken
    | Tick
)
LearnerEffect = (
    Say
    | Read
    | CancelRead
    | Hold
    | LetGo
    | Fetch
    | Adopt
    | Own
    | Forget
    | UploadAll
    | Upload
    | Drop
    | Supply
    | Save
    | Capture
    | Give
    | PassOn
    | TakeBack
    | Dispose
    | Await
    | Begin
    | FetchState
    | LeaveState
    | TakeState
    | HangUp
    | Inform
    | AskToLeave
    | Stop
    | Note
)
