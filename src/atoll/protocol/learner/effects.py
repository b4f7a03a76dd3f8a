"""What the learner is told (events) and what it wants done (effects); protocol/effects.py says what these are."""

from __future__ import annotations

from typing import Literal

from atoll.protocol.effects import Fact, Note, Tick
from atoll.protocol.messages import (
    FromLearner,
    FromSyncer,
    Range,
)
from atoll.protocol.tape import AnyEntry


class Arrived(Fact, frozen=True):
    """Event: a message from the syncer."""

    message: FromSyncer


class Disconnected(Fact, frozen=True):
    """Event: the control channel is down; it is being dialled again."""

    reason: str
    of: Literal["syncer", "relay", ""] = "syncer"
    """Peer that was lost; empty: none, the channel was left for another."""


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
    nbytes: int = 0
    """Bytes that arrived after the first piece."""
    seconds: float = 0.0
    """Seconds from the first piece to the last."""
    latency_s: float = 0.0
    """Seconds from the request to the first piece."""


class Arriving(Fact, frozen=True):
    """Event: at most rate times round trip of the requested bodies is still to come, so the way down is free for the
    next one."""


class Lacking(Fact, frozen=True):
    """Event: number of bytes of the run's parameters that have not arrived yet."""

    nbytes: int


class FirstStep(Fact, frozen=True):
    """Event: the training process has not reported a step yet; whether it uses the processor."""

    uses_cpu: bool


class FetchFailed(Fact, frozen=True):
    fragment: int
    reason: str


class Uploaded(Fact, frozen=True):
    """Event: the body of an answer to a pull has arrived at the syncer."""

    round: int
    attempt: int
    digest: str
    nbytes: int = 0
    """Size of the body."""
    seconds: float = 0.0
    """Seconds that the body took from its first piece to its last, where it arrived."""


class UploadFailed(Fact, frozen=True):
    round: int
    attempt: int
    reason: str
    no_copy: bool = False
    """Nothing of it was sent, since its copy had given way to others."""


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


class ForgetVersions(Fact, frozen=True):
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


class Settle(Fact, frozen=True):
    """Effect: `version` holds the answer that was made of the copy after step `t`: what it left out is the fragment's
    feedback from now on. −1: there is no such answer, or no more, and the feedback starts anew."""

    fragment: int
    version: int
    t: int


class DropRests(Fact, frozen=True):
    """Effect: the fragment's round is behind the run: what other answers to it left out is of no more use."""

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


class HoldBack(Fact, frozen=True):
    """Effect: a training process that has made no step waits with its first for BeginTraining, but not for ever."""


class BeginTraining(Fact, frozen=True):
    """Effect: the training process may make its first step. `reason` says why, if this learner was held back."""

    reason: str = ""


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
    | Arriving
    | Lacking
    | FirstStep
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
    | ForgetVersions
    | UploadAll
    | Upload
    | Settle
    | DropRests
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
    | HoldBack
    | BeginTraining
    | FetchState
    | LeaveState
    | TakeState
    | HangUp
    | Inform
    | AskToLeave
    | Stop
    | Note
)
