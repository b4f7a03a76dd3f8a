"""What learners and the syncer say to each other on the control channel.

Small, frozen and tagged; unknown fields are forbidden, so a message of another version is refused, never guessed at.
Tensors are not in here: a fragment's bytes travel as a body on a connection of its own, and the message that names them
is sent once the body is whole. Every message carries its sender's vector clock.

    learner → syncer    Hello  Progress  Heartbeat  Contribution  Decline  Leave
    syncer → learner    Welcome  Refused  Started  Pull  Recover  Announce  Ending  Finish
"""

from __future__ import annotations

from typing import Literal

import msgspec

from atoll.protocol.clock import Clock
from atoll.protocol.settings import Settings

PROTOCOL = 1
"""The version of these messages; checked at hello."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    clock: Clock = {}


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One trained tensor of the model: all that a fragment plan depends on."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    embedding: bool = False


class Hello(Message, frozen=True):
    """The first message on every connection."""

    protocol: int
    learner: str
    session: str
    """Drawn once per training process: the same session is the same incarnation, however often it reconnects."""
    run: str = ""
    """The run whose versions it holds; empty for a newcomer."""
    versions: tuple[int, ...] = ()
    """The committed version it last adopted, per fragment; −1 for none."""
    t: int = 0
    tensors: tuple[TensorSpec, ...] = ()
    data: str = ""
    """A digest of what it trains on, where the script names one."""


class Progress(Message, frozen=True):
    """After every step, or whenever what it says has changed."""

    t: int
    steps: tuple[int, ...]
    tokens: tuple[int, ...]
    versions: tuple[int, ...]
    offer: int = -1
    """The newest round for which a copy of the fragment lies ready."""
    aims: int = -1
    """The round it will make its next copy for."""
    tokens_total: int = 0
    busy_s: float = 0.0
    """Seconds spent stepping so far, as the training process counts them."""
    loss: float | None = None
    stopped: bool = False
    """The training loop has ended: no more steps will come."""
    incarnation: int = 0
    """Which of its lives this speaks of: a report from before a recovery says nothing about the time after it."""


class Heartbeat(Message, frozen=True):
    pass


class Contribution(Message, frozen=True):
    """A body has arrived whole under (round, attempt): this is what it is."""

    round: int
    attempt: int
    fragment: int
    base: int
    t: int
    steps: int
    tokens: int
    digest: str
    probe: bool = False


class Decline(Message, frozen=True):
    """Nothing to give to this round; no strike."""

    round: int
    attempt: int
    reason: str


class Leave(Message, frozen=True):
    reason: str


class Welcome(Message, frozen=True):
    run: str
    term: int
    incarnation: int
    settings: Settings
    fingerprint: str
    """Of the run's fragment plan."""
    versions: tuple[int, ...]
    """Newest committed version per fragment; −1 while the run has no parameters."""
    gathering: int
    upload: bool = False
    """The run is empty: send your parameters as version 0."""
    progress: float = 0.0
    global_step: int = 0
    committed: int = 0
    """Rounds behind the run."""
    merged: tuple[tuple[int, int], ...] = ()
    """Per fragment, the version that holds this incarnation's last contribution, and the step it was read at."""


class Refused(Message, frozen=True):
    reason: str
    final: bool = True
    """Trying again with the same model and settings cannot help."""
    over: bool = False
    """Nobody made a mistake: the run has ended."""


class Started(Message, frozen=True):
    """The run has its first parameters."""

    uploader: str
    gathering: int = 0


class Pull(Message, frozen=True):
    round: int
    attempt: int
    fragment: int
    gathering: int
    deadline_s: float
    probe: bool = False
    """Only to see whether this learner answers at all; merged into nothing."""


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member of a committed round, with the step its contribution was read at."""

    learner: str
    incarnation: int
    t: int


class Recover(Message, frozen=True):
    """Your numbers are broken: take every fragment anew from the run, with a fresh inner optimizer."""

    incarnation: int
    reason: str


class Announce(Message, frozen=True):
    """Round `round` is committed; an empty one (version unchanged, no members) was passed over."""

    round: int
    fragment: int
    version: int
    members: tuple[Member, ...]
    gathering: int
    digest: str = ""
    progress: float = 0.0
    global_step: int = 0


class Ending(Message, frozen=True):
    """The budget is spent (or the operator asked): take no more steps; the last ones are collected now."""

    reason: str


class Finish(Message, frozen=True):
    """The last round is committed. `versions` is the finished model."""

    reason: str
    versions: tuple[int, ...]


FromLearner = Hello | Progress | Heartbeat | Contribution | Decline | Leave
FromSyncer = Welcome | Refused | Started | Pull | Recover | Announce | Ending | Finish

AdoptRule = Literal["overwrite", "blend", "carry"]
