"""What learners and the syncer say to each other on the control channel.

Small, frozen and tagged; unknown fields are forbidden, so a message of another version is refused, never guessed at.
Tensors are not in here: a fragment's bytes travel as a body on a connection of its own, and the message that names them
is sent once the body is whole. Every message carries its sender's clock (clock.py). None holds a list that grows with
the number of learners (docs/adr/0044). Whatever may be long or large has a bound in its type (limits.py), checked
before the bytes behind it are read; all but a hello are short as a whole (fabric/wire.py).

Versions: a hello names the learner's version, and the answer that opens a channel names those that the syncer
understands, from `OLDEST` to `PROTOCOL`. Peers without a common version refuse each other, in one line. A released
version is understood by the next one, both ways, so that a run can be upgraded while it goes on; a recorded exchange
(tests/fabric/exchanges) says what a version is (docs/adr/0022).

    learner → syncer    Hello  Progress  Heartbeat  Register  Contribution  Decline  CutSaved  Leave
    syncer → learner    Welcome  Refused  Started  TrainingBegins  Lease  Pull  Recover  Announce
                        RoundShare  SettingsChanged  Drain  Ending  Finish

and, for a newcomer that takes a peer's inner optimizer,

    newcomer → syncer   Seek  Settled            syncer → newcomer   Helped  Fresh
    peer → syncer       Ready  Unable            syncer → peer       Help  Stream  Release
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from atoll.protocol.clock import Clock
from atoll.protocol.limits import MANY, Count, Line, Name, Number, Real, Row, Seconds, Words
from atoll.protocol.settings import Settings
from atoll.protocol.tape import KEPT, AnyEntry

PROTOCOL = 2
"""The version of these messages; checked at hello."""
OLDEST = 2
"""The oldest version that is still understood."""

MOST_RANKS = 4096
"""Of one learner."""
MOST_SHARDS = 64
"""Of one syncer."""

BUFFER_RULES = ("mean", "first")
"""How buffers of the model are merged, where they are (numerics/merge.py)."""

ContributionKey = tuple[str, int, int]
"""Learner, round, attempt: names a contribution, and its body."""
Tape = Annotated[tuple[AnyEntry, ...], Meta(max_length=KEPT)]


MOST_NAMED = 4096
"""Names of tensors that a newcomer tells beside the merged ones."""
TensorNames = Annotated[tuple[Annotated[str, Meta(max_length=1024)], ...], Meta(max_length=MOST_NAMED)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True, omit_defaults=True):
    clock: Clock = {}
    term: Count = 0
    """The term of the syncer that sends it, or the newest that the sender has heard of."""
    cut: Count = 0
    """The newest cut that was opened: the first message that names it is a learner's marker."""
    seq: Count = 0
    """Of a learner's message: above that of every message before it in the same session, whatever the connection."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One merged tensor of the model, a trained parameter or a buffer: all that a fragment plan depends on."""

    name: Annotated[str, Meta(max_length=1024)]
    """Of a buffer: `buffers/RULE/NAME`, so that journals and peers without merged buffers read the same plan."""
    shape: Annotated[tuple[Count, ...], Meta(max_length=64)]
    dtype: Annotated[str, Meta(max_length=64)]
    embedding: bool = False

    @property
    def buffer_rule(self) -> str:
        """How this buffer is merged; empty: it is a parameter."""
        return next((rule for rule in BUFFER_RULES if self.name.startswith(buffer_name(rule, ""))), "")

    @property
    def name_in_model(self) -> str:
        return self.name.removeprefix(buffer_name(self.buffer_rule, "")) if self.buffer_rule else self.name


class Box(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A rectangle of a tensor: what a rank holds of it. A learner of several ranks declares the boxes of all of them
    when it joins (`Hello.ranks`); of a plain learner, the one rank holds everything."""

    tensor: Annotated[str, Meta(max_length=1024)]
    offsets: Annotated[tuple[Count, ...], Meta(max_length=64)]
    sizes: Annotated[tuple[Count, ...], Meta(max_length=64)]
    """Zero: the rank holds nothing of this tensor."""
    sends: bool = True
    """Of equal boxes of several ranks, one is sent."""


RankBoxes = Annotated[tuple[Box, ...], Meta(max_length=1 << 16)]
"""Of one rank, by names of tensors."""


def buffer_name(rule: str, name: str) -> str:
    """The name of a merged buffer in the plan."""
    return f"buffers/{rule}/{name}"


class Hello(Message, frozen=True):
    """The first message on every connection."""

    protocol: Number
    learner: Line
    session: Line
    """Drawn once per training process: the same session is the same incarnation, however often it reconnects."""
    run: Line = ""
    """The run whose versions it holds; empty for a newcomer."""
    versions: Row = ()
    """The committed version it last adopted, per fragment; −1 for none."""
    incarnation: Number = 0
    """Which of its lives it knows itself to be in; 0 for a newcomer."""
    t: Number = 0
    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=MANY)] = ()
    data: Line = ""
    """A digest of what it trains on, where the script names one."""
    tokens_per_step: Number = 0
    """The most tokens that one of its steps has, as it declares; 0: it declares nothing."""
    tokens_total: Number = 0
    """Tokens of its process so far."""
    host: Name = ""
    """The machine and the training process that it comes from …"""
    pid: Count = 0
    proof: Name = ""
    """… and what only that process and its restarts can show (succession.py); empty: nothing. It is kept nowhere."""
    frozen: Line = ""
    """A digest of what it does not merge: frozen parameters, buffers of its own. Empty: not to be compared."""
    ranks: Annotated[tuple[RankBoxes, ...], Meta(max_length=MOST_RANKS)] = ()
    """What each of its ranks holds, in order of rank; empty: it has one, which holds everything (docs/adr/0030)."""
    unmerged: TensorNames = ()
    """A newcomer's tensors that are not merged: an export names them."""
    renamed: TensorNames = ()
    """A newcomer's tensors that `state_dict()` of its model has under other names."""


class Progress(Message, frozen=True):
    """After every step, or whenever what it says has changed."""

    t: Number
    steps: Row
    tokens: Row
    versions: Row
    offer: Number = -1
    """The newest round for which a copy of the fragment lies ready."""
    aims: Number = -1
    """The round it will make its next copy for."""
    tokens_total: Number = 0
    busy_s: Seconds = 0.0
    """Seconds spent stepping so far, as the training process counts them."""
    loss: Real | None = None
    stopped: bool = False
    """The training loop has ended: no more steps will come."""
    incarnation: Number = 0
    """Which of its lives this speaks of: a report from before a recovery says nothing about the time after it."""
    dropped: Row = ()
    """Per fragment, tokens that were overwritten at adoptions and are in no version."""
    counted: Row = ()
    """Per fragment, the adopted version that `tokens` and `dropped` know of; a new courier may hold less than that."""
    position: Number = -1
    """Leased samples it has taken; −1: it brings its own data."""
    seeking: bool = False
    """It waits for a peer's state, and gives nothing before that is settled."""
    taped: Number = 0
    """The number of the first of `tape`."""
    tape: Tape = ()
    """What its training process was told since the last report (tape.py)."""
    leaving: bool = False
    """It was asked to leave: that its loop ends says nothing of the run."""
    missed: Row = ()
    """Per fragment, of `dropped`: overwritten by versions that held none of its steps. Empty: not told."""
    inputs: Number = -1
    """A hash of what its model was given lately, where its data is its own; −1: not told."""
    up_rate: Real = 0.0
    """Bytes per second that its way up carries, as it measured them; 0: not measured yet."""
    down_rate: Real = 0.0
    """Bytes per second that its way down carries; 0: not measured yet."""
    lacking_bytes: Count = 0
    """Bytes of the run's parameters that have not arrived yet, while it joins; 0: all have, or it cannot tell."""
    starting: bool = False
    """Its training process is in its first step and uses the processor: it may be compiling."""


class Heartbeat(Message, frozen=True):
    pass


class Register(Message, frozen=True):
    """The data this learner takes its batches from: please lease it parts of it."""

    datasets: Annotated[tuple[tuple[Line, Number, Real], ...], Meta(max_length=1024)]
    """Name, samples and weight of each."""
    epochs: Number
    """Passes over the data; 0: no end."""
    batch: Number
    """Samples it takes at a time."""


class Contribution(Message, frozen=True):
    """A body has arrived whole under (round, attempt): this is what it is."""

    round: Number
    attempt: Number
    fragment: Number
    base: Number
    t: Number
    steps: Number
    tokens: Number
    digest: Line
    probe: bool = False
    total: Number = 0
    """Its tokens of all time when the copy was made."""
    position: Number = -1
    """Leased samples it had taken then."""
    taped: Number = 0
    tape: Tape = ()
    """What no report has said yet of its tape."""
    run: Line = ""
    """Whose it is, as its sender sees it: what was meant for another run, learner or life is merged into nothing."""
    learner: Line = ""
    incarnation: Number = 0


class Decline(Message, frozen=True):
    """Nothing to give to this round; no strike."""

    round: Number
    attempt: Number
    reason: Line


class CutSaved(Message, frozen=True):
    """Its part of a cut is durable, or (with a reason) will not be."""

    of: Number
    incarnation: Number
    t: Number
    file: Line = ""
    """In the learner's own folder."""
    digest: Line = ""
    reason: Line = ""


class Leave(Message, frozen=True):
    reason: Line


class Seek(Message, frozen=True):
    """A newcomer asks for a peer whose inner optimizer it may take."""

    after: Number
    """Rounds that were committed when it asked; for the event's text only."""
    frozen: bool = False
    """And its frozen parameters: the newcomer's are not the run's."""


class Settled(Message, frozen=True):
    """What became of a peer's state: it is in the newcomer, or, with a reason, it is not."""

    ticket: Line
    peer: Line
    size: Number = 0
    """Bytes that came whole; with a reason: and were refused, for no honest peer has such a state."""
    t: Number = 0
    """The newcomer's step when it was put in."""
    reason: Line = ""
    again: bool = False
    """Another peer, please; otherwise it goes on without."""


class Ready(Message, frozen=True):
    """A copy of the peer's state, made after its step `t`, lies ready for whoever brings the ticket."""

    ticket: Line
    size: Number
    digest: Line
    t: Number
    direct: Line = ""
    """Where it can be had without the syncer; empty: nowhere."""


class Unable(Message, frozen=True):
    """The peer cannot help, or cannot any more."""

    ticket: Line
    reason: Line


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Positions [start, stop) of one pass over one dataset's seeded permutation."""

    lease: Number
    dataset: Number
    epoch: Number
    start: Number
    stop: Number


class Lease(Message, frozen=True):
    """These samples are yours. An empty one: there are no more, the data is used up."""

    ranges: Annotated[tuple[Range, ...], Meta(max_length=MANY)]
    over: bool = False
    own: Words = ""
    """The reason why this learner's data is not leased; its tokens are counted all the same."""
    incarnation: Number = 0
    """Whose they are: what waits for the disk is sent by name, and another process may have the name by then."""


class Welcome(Message, frozen=True):
    run: Line
    incarnation: Number
    settings: Settings
    fingerprint: Line
    """Of the run's fragment plan."""
    versions: Row
    """Newest committed version per fragment; −1 while the run has no parameters."""
    gathering: Number
    reset: bool = False
    """Its numbers were broken: the inner optimizer starts afresh."""
    upload: bool = False
    """The run is empty: send your parameters as version 0."""
    progress: Real = 0.0
    global_step: Number = 0
    committed: Number = 0
    """Rounds behind the run."""
    merged: Annotated[tuple[tuple[Number, Number, Number], ...], Meta(max_length=MANY)] = ()
    """Per fragment, the version that holds this incarnation's last contribution, its step and its tokens."""
    leases: Annotated[tuple[Range, ...], Meta(max_length=MANY)] = ()
    """What this incarnation was leased and has not taken, in order; some of it may have been lost on the way."""
    taped: Number = 0
    """Entries of its tape that are written down."""
    cuts: Row = ()
    """The complete cuts that the run keeps."""
    session: Line = ""
    """Of the process it is meant for: it goes to whoever has the name by the time it is durable. Empty: anybody."""
    protocol: Number = 0
    """The version that both sides speak on this channel."""
    least: Row = ()
    """Per fragment, the version that the run was last rolled back with: whoever holds less takes it in place of its own
    values. Empty: it never was."""
    index: Number = -1
    """The learner's number in the run: names are counted from 0 as they first join. −1: not told."""
    frozen: Line = ""
    """The digest that the run's first learner brought of what it does not merge."""
    shards: Annotated[tuple[Line, ...], Meta(max_length=MOST_SHARDS - 1)] = ()
    """Where shards 2, 3 … of the syncer are: join links without a token, since each learner shows its own. Empty: the
    syncer is one process (docs/adr/0031)."""
    waits: bool = False
    """Training has not begun: make no step before `TrainingBegins`."""
    succeeds: Annotated[tuple[Line, ...], Meta(max_length=MANY)] = ()
    """Lost runs that this one goes on for: a learner of theirs keeps its inner optimizer and joins as a newcomer."""
    away_s: Real = 0.0
    """Seconds for which it was not heard before this hello; 0: a moment, or not known."""
    away_t: Number = 0
    """Its step when it was last heard before."""
    closed: Line = ""
    """Why the life that it had until this hello is closed."""


class Refused(Message, frozen=True):
    reason: Words
    final: bool = True
    """Trying again with the same model and settings cannot help."""
    over: bool = False
    """Nobody made a mistake: the run has ended."""


class Started(Message, frozen=True):
    """The run has its first parameters."""

    uploader: Name
    """Its own parameters are version 0, all others fetch them. Empty: the process that gave them is gone."""
    gathering: Number = 0


class TrainingBegins(Message, frozen=True):
    """Training begins: the learners of the first roster hold version 0, or are not waited for any more."""

    reason: Words


class Pull(Message, frozen=True):
    round: Number
    attempt: Number
    fragment: Number
    gathering: Number
    deadline_s: Seconds
    probe: bool = False
    """Only to see whether this learner answers at all; merged into nothing."""


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member of a committed round, with the step its contribution was read at and the tokens in it."""

    learner: Name
    incarnation: Number
    t: Number
    tokens: Number = 0


class Recover(Message, frozen=True):
    """Your numbers are broken: take every fragment anew from the run, and a peer's inner optimizer instead of yours."""

    incarnation: Number
    reason: Words


class Help(Message, frozen=True):
    """Have a copy of your state ready once you have adopted all that is committed: a newcomer asks for it."""

    ticket: Line
    newcomer: Name
    after: Number
    """Rounds that were committed when the newcomer asked; for the event's text only."""
    frozen: bool = False
    """With your frozen parameters."""


class Stream(Message, frozen=True):
    """Send that copy through the syncer, from this byte on."""

    ticket: Line
    offset: Number


class Release(Message, frozen=True):
    """Nobody wants that copy any more."""

    ticket: Line
    reason: Words


class Helped(Message, frozen=True):
    """A peer's state lies ready for you. It takes the place of what was named before."""

    ticket: Line
    peer: Name
    size: Number
    digest: Line
    direct: Line = ""


class Fresh(Message, frozen=True):
    """No peer helps: go on with the inner optimizer you have, which warms up."""

    reason: Words


class Announce(Message, frozen=True):
    """Round `round` is committed; an empty one (version unchanged, no members) was passed over."""

    round: Number
    fragment: Number
    version: Number
    members: Annotated[tuple[Member, ...], Meta(max_length=MANY)]
    """The receiver's own entry; where it was no member, that of one who was. Earlier versions send all of them."""
    gathering: Number
    digest: Line = ""
    progress: Real = 0.0
    global_step: Number = 0
    cuts: Row = ()
    """The complete cuts that the run keeps."""
    restored: bool = False
    """No round made this version: the run is rolled back. Whoever holds less takes it in place of its own values."""


class RoundShare(Message, frozen=True):
    """Share of the rounds that this learner takes part in from now on, since its link carries no more."""

    share: Real
    """Number above 0 and at most 1 (`schedule.has_turn`)."""
    reason: Words


class SettingsChanged(Message, frozen=True):
    """Another phase of training begins."""

    settings: Settings
    since: Number
    """The first round under them."""


class Drain(Message, frozen=True):
    """Leave the run in good order: give your last steps, save your state, go. The run goes on without you."""

    reason: Words


class Ending(Message, frozen=True):
    """The budget is spent (or the operator asked): take no more steps; the last ones are collected now."""

    reason: Words


class Finish(Message, frozen=True):
    """The last round is committed. `versions` is the finished model."""

    reason: Words
    versions: Row


FromLearner = (
    Hello
    | Progress
    | Heartbeat
    | Register
    | Contribution
    | Decline
    | CutSaved
    | Leave
    | Seek
    | Settled
    | Ready
    | Unable
)
FromSyncer = (
    Welcome
    | Refused
    | Started
    | TrainingBegins
    | Lease
    | Pull
    | Recover
    | Announce
    | RoundShare
    | SettingsChanged
    | Drain
    | Ending
    | Finish
    | Help
    | Stream
    | Release
    | Helped
    | Fresh
)
