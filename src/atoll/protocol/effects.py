"""What the state machines want done, and what they are told.

`handle(now, event) -> effects`: an event is a fact that has happened, an effect is a wish that somebody outside carries
out in the given order. Both are small frozen structs without tensors; bytes are named by (fragment, version) or by
(learner, round, attempt). Effects are the points at which a process can die.
"""

from __future__ import annotations

import msgspec

from atoll.protocol.messages import (
    AdoptRule,
    Contribution,
    FromLearner,
    FromSyncer,
    Hello,
)


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
    """Event: version 0 of every fragment has arrived from the learner that was asked."""

    learner: str


class Merged(Fact, frozen=True):
    """Event: the new version of a round's fragment lies ready to be committed."""

    round: int
    digest: str
    merge_s: float = 0.0


class Unmergeable(Fact, frozen=True):
    """Event: a merge came to nothing that may be committed."""

    round: int
    reason: str


class EndAsked(Fact, frozen=True):
    """Event: the operator wants the run to end in good order."""

    reason: str


class Send(Fact, frozen=True):
    """Effect: a message to one learner."""

    learner: str
    message: FromSyncer


class Part(Fact, frozen=True):
    """One contribution's part in a merge."""

    learner: str
    attempt: int
    weight: float


class Merge(Fact, frozen=True):
    """Effect: merge these, take the outer step beside the committed version, answer Merged or Unmergeable."""

    round: int
    fragment: int
    parts: tuple[Part, ...]


class Commit(Fact, frozen=True):
    """Effect: what Merged named is now the fragment's version."""

    round: int
    fragment: int
    version: int


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


SyncerEvent = Greeted | Received | Delivered | Lost | Initialised | Merged | Unmergeable | EndAsked | Tick
SyncerEffect = Send | Merge | Commit | Discard | Expel | Finished | Note


# ---- the learner --------------------------------------------------------------------------------------------------


class Arrived(Fact, frozen=True):
    """Event: a message from the syncer."""

    message: FromSyncer


class Cut(Fact, frozen=True):
    """Event: the control channel is down; it is being dialled again."""

    reason: str


class Stepped(Fact, frozen=True):
    """Event: the training process finished a step (or, `stopped`, its last one)."""

    t: int
    steps: tuple[int, ...]
    tokens: tuple[int, ...]
    tokens_total: int = 0
    busy_s: float = 0.0
    loss: float | None = None
    stopped: bool = False


class Copied(Fact, frozen=True):
    """Event: a fragment's values after step `t` lie in host memory."""

    round: int
    fragment: int
    t: int
    steps: int
    tokens: int
    base: int


class Adopted(Fact, frozen=True):
    """Event: the training process has taken a version into its model."""

    fragment: int
    version: int
    t: int
    steps: int = 0
    tokens: int = 0


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


class Say(Fact, frozen=True):
    """Effect: a message to the syncer."""

    message: FromLearner


class Read(Fact, frozen=True):
    """Effect: copy this fragment at the end of the first step at or after `step`."""

    round: int
    fragment: int
    step: int


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
    rule: AdoptRule
    step: int = 0
    copy_t: int | None = None


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


class Inform(Fact, frozen=True):
    """Effect: how far the run is, for `learner.progress` and `learner.global_step`."""

    progress: float
    global_step: int


class Stop(Fact, frozen=True):
    """Effect: the training loop should end now. `final`: nothing more will be asked of this learner."""

    reason: str
    final: bool = False
    failed: bool = False


LearnerEvent = Arrived | Cut | Stepped | Copied | Adopted | Fetched | FetchFailed | Uploaded | UploadFailed | Tick
LearnerEffect = (
    Say | Read | Hold | LetGo | Fetch | Adopt | Own | Forget | UploadAll | Upload | Drop | Inform | Stop | Note
)
