"""The replay of a run: makes its rounds again out of what its training processes give again, and compares.

Rounds are merged in the order of the journal, of the members and with the weights that stand there. A version is kept
for as long as a part is still to adopt it. Nothing here depends on time: what a training process does next is in its
part, and it waits until what it needs is there; so the result is the same on one core and on many.

A round whose members cannot all be played (an entry of a tape is missing, a copy was read before the cut that the
replay begins with, or needs what such a copy left out) is taken from the journal where its payload is still kept, and
that is said; where it is not, the replay ends there. With a lossy version codec nobody knows what such a round left
out: later rounds of its fragment are taken from the journal too, until a new term, a reset or a rollback starts the
feedback at zero. A rollback goes back to what the replay itself had then, or to what the journal keeps of it.

Averaged moments are in no journal and no cut: they are made again with their round, and a process that adopted those of
a round that is not made again is not played on.
"""

from __future__ import annotations

import hashlib
import os
import select
import selectors
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from atoll.config import Outer
from atoll.launch.children import Child, describe_exit
from atoll.launch.replay.process import (
    GivenContribution,
    LastCounters,
    ReplayedProcess,
    ReplayServices,
    SharedState,
)
from atoll.launch.replay.ranks import ReplayedRanks
from atoll.launch.replay.recording import (
    LOST,
    ProcessRecording,
    RecordedAction,
    RecordedCopy,
    RecordedDecision,
    RunRecording,
)
from atoll.mailbox.channel import CourierChannel, Start, decode_to_courier
from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.codec import make_codec
from atoll.numerics.fragments import difference
from atoll.numerics.shard_plan import ShardPlan
from atoll.protocol import tape
from atoll.protocol.messages import TensorSpec
from atoll.protocol.records import (
    ChangedRecord,
    MergedRecord,
    PassedRecord,
    ResetRecord,
    RestoredRecord,
    StartedRecord,
    TermRecord,
)
from atoll.protocol.syncer.weights import limit_weights
from atoll.protocol.syncer.weights import weight as weigh
from atoll.store.shards import digest_version
from atoll.syncer.parameters import Parameters

LOOK_S = 0.5


@dataclass(frozen=True)
class VersionDifference:
    """The first version that is not what it was."""

    round: int
    fragment: int
    version: int
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MadeRound:
    """A round as it was merged here."""

    record: MergedRecord
    """Holds the digest of its version; under a scenario, the tokens and weights of the scripts' own steps."""
    at: float
    losses: dict[str, float | None]
    """Training loss of each member, as it last told."""


@dataclass
class ReplayOutcome:
    through: int = -1
    """The last round of which every version was the same."""
    compared: int = 0
    """Versions."""
    made_again: int = 0
    """Rounds that were made again by training, each with the same version."""
    from_journal: list[int] = field(default_factory=list)
    """Rounds that were not made again, but read."""
    difference: VersionDifference | None = None
    stopped: str = ""
    """Why it ended before it was to."""
    remarks: list[str] = field(default_factory=list)
    begun_at: float = 0.0
    """When version 0 was there."""
    made: dict[int, MadeRound] = field(default_factory=dict)
    counters: dict[str, LastCounters] = field(default_factory=dict)
    """Last counters of each session's training process, keyed by session."""

    @property
    def is_identical(self) -> bool:
        """Whether all of it is the same, and something was made again. What is read proves nothing."""
        return self.difference is None and not self.stopped and (self.made_again > 0 or not self.from_journal)

    def digest(self) -> str:
        """Of all versions that were made, in their order."""
        digests = "".join(made.record.digest for made in self.made.values())
        return hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()


class ReplaySyncer:
    def __init__(
        self,
        score: RunRecording,
        parts: Sequence[tuple[ProcessRecording, list[RecordedAction]]],
        decisions: Sequence[RecordedDecision],
        *,
        stage: Callable[[tuple[TensorSpec, ...]], Parameters],
        begun: bool,
        launch: Callable[[ProcessRecording, str], Child],
        gradient: Callable[[MergedRecord | RestoredRecord], memoryview | None],
        jobs: int,
        until: int | None = None,
        watch: Callable[[ReplayOutcome], None] = lambda outcome: None,
        shards: ShardPlan | None = None,
        scenario: bool = False,
    ) -> None:
        """`stage` makes the parameters, once the first training process has said what its model is; `begun`: those of a
        cut, and not of the first learner. `shards`: of a syncer of several, whose digests are of parts. `scenario`: no
        run made the tape, so contributions weigh by the tokens of the scripts, which train to the end of the tape."""
        self._shards, self._scenario = shards, scenario
        self.outcome = ReplayOutcome()
        self._score, self._stage, self._begun = score, stage, begun
        self._tensors: tuple[TensorSpec, ...] | None = None
        self._decisions, self._at = list(decisions), 0
        self._launch, self._gradient, self._jobs, self._until, self._watch = launch, gradient, jobs, until, watch
        self._waiting = [(part, acts) for part, acts in parts if acts]
        adoptions = [act for _, acts in parts for act in acts if isinstance(act, tape.AdoptedEntry)]
        self._packed: dict[int, ByteArray | None] = {
            decision.round: None for decision in decisions if isinstance(decision, RestoredRecord)
        }
        """By the rounds behind the run, what it is rolled back to later."""
        self._needed = Counter((act.fragment, act.version) for act in adoptions)
        """How many parts are still to adopt a version."""
        self._versions: dict[tuple[int, int], FloatArray] = {}
        self._moments: dict[tuple[int, int], ByteArray] = {}
        """Averaged ones, by fragment and version, for as long as the version is kept."""
        feedback = make_codec(score.begun.settings.codec).needs_feedback
        self._copied = {
            (act.round, part.learner)
            for part, acts in parts
            for act in acts
            if isinstance(act, RecordedCopy) and not (feedback and act.feedback == LOST)
        }
        self._given: dict[tuple[int, str], GivenContribution] = {}
        self._states: dict[str, SharedState] = {}
        self._actors: list[ReplayedProcess | ReplayedRanks] = []
        self._reasons: dict[str, str] = {}
        if begun:
            self._set_up(score.begun.tensors)

    def _set_up(self, tensors: tuple[TensorSpec, ...]) -> None:
        settings = self._score.begun.settings
        self._tensors, self._parameters = tensors, self._stage(tensors)
        self._replay = ReplayServices(
            plan=self._parameters.plan,
            fingerprint=self._parameters.plan.fingerprint,
            sent=self._parameters.plan.fragments.__getitem__,
            settings=settings,
            codec=make_codec(settings.codec),
            version=lambda fragment, version: self._versions.get((fragment, version)),
            moments=lambda fragment, version: self._moments.get((fragment, version)),
            adopted=self._note_adoption,
            given=self._take_contribution,
            owned=self._take_first_parameters,
            state=self._states.get,
            lent=self._lend_state,
            leases=self._score.leases.__getitem__,
            progress=lambda committed: self._score.progress.get(committed, 0.0),
            global_step=lambda committed: self._score.global_steps.get(committed, 0),
            remark=self._add_remark,
            shards=self._shards,
        )
        if self._begun:
            self._keep_current(range(settings.fragments))
            self._keep_for_rollback(
                next((one.round for one in self._decisions if isinstance(one, MergedRecord | PassedRecord)), 0)
            )

    # ---- the course of it -------------------------------------------------------------------------------------------

    def play(self) -> ReplayOutcome:
        with tempfile.TemporaryDirectory(prefix="atoll-replay-") as folder:
            path = str(Path(folder) / "socket")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door, selectors.DefaultSelector() as look:
                door.bind(path)
                door.listen()
                look.register(door, selectors.EVENT_READ, None)
                try:
                    self._replay_all(path, door, look)
                finally:
                    self._stop_processes()
        return self.outcome

    def _replay_all(self, path: str, door: socket.socket, look: selectors.BaseSelector) -> None:
        while True:
            self._replay_one(path)
            if not self._busy and not self._is_over():
                self.outcome.stopped = self._explain_wait()
            if self._is_over():
                break
            for key, _ in look.select(LOOK_S):
                if key.fileobj is door:
                    self._accept_process(door, look)
                else:
                    self._read_frames(key.data, look)
            self._handle_exit()

    def _is_over(self) -> bool:
        decision = self._decisions[self._at] if self._at < len(self._decisions) else None
        if decision is None and self._scenario and (self._actors or self._waiting) and not self.outcome.stopped:
            return False
        beyond = (
            self._until is not None
            and isinstance(decision, MergedRecord | PassedRecord)
            and decision.round > self._until
        )
        return decision is None or beyond or self.outcome.difference is not None or bool(self.outcome.stopped)

    @property
    def _busy(self) -> bool:
        """Somebody trains, begins, is about to answer or comes to its end: another life of it may begin then."""
        return any(not actor.resting or actor.ending for actor in self._actors)

    def _replay_one(self, path: str) -> None:
        """All that can be done without anybody's answer."""
        moved = True
        while moved and not self._is_over():
            moved = self._apply_decision()
            for actor in self._actors:
                before = actor.next_act
                for reason in actor.act():
                    self._reasons[actor.part.name] = reason
                moved |= actor.next_act is not before
            for actor in [one for one in self._actors if one.played and one.resting]:
                actor.end()
                if not actor.child.running:
                    self._remove_actor(actor)
                    moved = True
        self._let_go(path)

    def _let_go(self, path: str) -> None:
        """Train on, or begin to: not more at a time than there are to be jobs."""
        working = sum(not actor.resting for actor in self._actors)
        for actor in self._actors:
            if actor.wants_to_go and working < self._jobs:
                actor.go()
                working += 1
        for part, acts in list(self._waiting):
            if working < self._jobs and self._is_due(part, acts):
                self._waiting.remove((part, acts))
                self._actors.append(_make_actor(part, acts, self._launch(part, path)))
                working += 1

    def _is_due(self, part: ProcessRecording, acts: list[RecordedAction]) -> bool:
        """Not while an earlier process of this learner plays, nor before there is something for it to take."""
        if any(actor.part.learner == part.learner for actor in self._actors):
            return False
        if next(one for one, _ in self._waiting if one.learner == part.learner) is not part:
            return False
        for act in acts:
            if isinstance(act, tape.AdoptedEntry):
                return (act.fragment, act.version) in self._versions
            if isinstance(act, tape.OwnedEntry | RecordedCopy):
                return True
        return True

    def _accept_process(self, door: socket.socket, look: selectors.BaseSelector) -> None:
        sock, _ = door.accept()
        channel = CourierChannel(sock)
        frames: list[bytes] = []
        poll = select.poll()
        poll.register(channel.sock, select.POLLIN)
        while not frames and not channel.closed:  # it introduces itself at once
            poll.poll(1000 * LOOK_S)
            frames = channel.receive()
        start = decode_to_courier(frames[0])
        assert isinstance(start, Start)
        if self._tensors is None:
            self._set_up(start.tensors)
        if (reason := difference(start.tensors, self._tensors or ())) is not None:
            self.outcome.stopped = f"{start.learner} has another model than the run: {reason}"
        actor = next(one for one in self._actors if one.part.learner == start.learner and not one.connected)
        process = actor.connect(channel, start, self._replay)
        process.hear(frames[1:])
        look.register(channel.sock, selectors.EVENT_READ, process)

    def _read_frames(self, process: ReplayedProcess, look: selectors.BaseSelector) -> None:
        process.receive()
        if process.channel.closed:
            look.unregister(process.channel.sock)
            process.channel.close()

    def _handle_exit(self) -> None:
        for actor in list(self._actors):
            code = actor.child.poll_exit()
            if code is None:
                continue
            self._remove_actor(actor)
            if not actor.played:
                words = actor.child.last_words().removeprefix("atoll: ")
                self.outcome.stopped = f"{actor.part.name} ended ({describe_exit(code)}): {words}"

    def _remove_actor(self, actor: ReplayedProcess | ReplayedRanks) -> None:
        self._actors.remove(actor)
        if isinstance(actor, ReplayedProcess) and (counters := actor.last_counters) is not None:
            self.outcome.counters[actor.part.session] = counters

    def _explain_wait(self) -> str:
        number = next((d.round for d in self._decisions[self._at :] if isinstance(d, MergedRecord | PassedRecord)), -1)
        names = {actor.part.name for actor in self._actors}
        reasons = [f"{name}: {reason}" for name, reason in sorted(self._reasons.items()) if name in names]
        return f"the tape does not lead on to round {number}" + (f" ({'; '.join(reasons)})" if reasons else "")

    @property
    def parameters(self) -> Parameters:
        return self._parameters

    def _stop_processes(self) -> None:
        for actor in self._actors:
            actor.child.kill_all()
        for state in self._states.values():
            os.close(state.fd)

    # ---- what the syncer decided ------------------------------------------------------------------------------------

    def _apply_decision(self) -> bool:
        """The next decision, if all it needs is there."""
        if self._is_over() or self._tensors is None or self._at == len(self._decisions):
            return False
        decision = self._decisions[self._at]
        match decision:
            case StartedRecord():
                if not self._begun:
                    return False
            case MergedRecord():
                if not self._merge_round(decision):
                    return False
            case PassedRecord(number):
                self.outcome.through = number
                self._keep_for_rollback(number + 1)
            case RestoredRecord():
                if not self._restore_state(decision):
                    return False
            case TermRecord():
                self._parameters.begin_term()
            case ResetRecord(fragment):
                self._parameters.reset_outer_state(fragment)
            case ChangedRecord(outer=outer):
                self._parameters.change_outer(msgspec.convert(outer, Outer))
        self._at += 1
        self._watch(self.outcome)
        return True

    def _merge_round(self, record: MergedRecord) -> bool:
        members = [share.learner for share in record.members]
        losses: dict[str, float | None] = {}
        # A relay's sum, in its codec and with its feedback, is only in the outer gradient that the journal keeps.
        known = self._parameters.knows_feedback(record.fragment) and not record.groups
        if known and all((record.round, name) in self._given for name in members):
            given = [self._given.pop((record.round, name)) for name in members]
            deltas, moments = [one.delta for one in given], [one.moments for one in given if one.moments is not None]
            losses = dict(zip(members, [one.loss for one in given], strict=True))
            if self._scenario:
                record = _weigh_anew(record, given)
            try:
                weights, bases = [share.weight for share in record.members], [share.base for share in record.members]
                factors = self._compute_factors(record)
                mark = self._parameters.stage_merge(record.fragment, deltas, weights, factors, bases, moments)
            except ValueError as error:
                self.outcome.stopped = f"round {record.round} cannot be made again: {error}"
                return False
            again = True
        elif self._waits_for_copies(record, known):
            return False
        else:
            for name in members:
                self._given.pop((record.round, name), None)
            if (kept := self._gradient(record)) is None:
                self.outcome.stopped = self._explain_missing(record, known)
                return False
            try:
                mark = self._parameters.stage_payload(record.fragment, kept)
            except ValueError as error:
                self.outcome.stopped = f"round {record.round} cannot be made again: {error}"
                return False
            self.outcome.from_journal.append(record.round)
            again = False
        if self._shards is not None:
            mark = digest_version(self._parameters.staged_values(record.fragment), self._shards, record.fragment)
        if record.digest and mark != record.digest:
            self.outcome.difference = self._find_difference(record)
            return False
        record = msgspec.structs.replace(record, digest=mark, marks=self._parameters.piece_marks(record.fragment))
        self.outcome.made[record.round] = MadeRound(record, time.time(), losses)
        self._parameters.commit_version(record.fragment, record.version, record.round)
        self.outcome.through, self.outcome.compared = record.round, self.outcome.compared + 1
        self.outcome.made_again += again
        self._keep_current([record.fragment])
        self._keep_for_rollback(record.round + 1)
        return True

    def _waits_for_copies(self, record: MergedRecord, known: bool) -> bool:
        """Whether contributions of it are still to be given. A round whose fragment's feedback is not known waits for
        them too, although they are not merged: nothing of it is given behind it."""
        keys = [(record.round, share.learner) for share in record.members]
        if all(key in self._copied for key in keys):
            return known or not all(key in self._given for key in keys)
        return False

    def _explain_missing(self, record: MergedRecord, known: bool) -> str:
        if record.groups:
            return f"round {record.round} was merged from a relay's sum, and the journal does not keep it any more"
        lacks = [share.learner for share in record.members if (record.round, share.learner) not in self._copied]
        reason = (
            f"the steps of {', '.join(lacks)} for round {record.round} cannot be made again"
            if known
            else f"what earlier rounds of fragment {record.fragment} left out is not known: they were taken from the "
            f"journal, so round {record.round} cannot be made again"
        )
        return f"{reason}, and the journal does not keep its outer gradient any more"

    def _keep_for_rollback(self, rounds: int) -> None:
        """So many are behind the run: keep what is here, if the run comes back to it."""
        if rounds in self._packed:
            self._packed[rounds] = self._parameters.pack_state()

    def _restore_state(self, record: RestoredRecord) -> bool:
        packed = self._packed[record.round]
        if packed is None and (kept := self._gradient(record)) is not None:
            packed = np.frombuffer(kept, dtype=np.uint8)
            self._add_remark(f"what the run was rolled back to behind round {record.at - 1} is taken from the journal")
        if packed is None:
            self.outcome.stopped = (
                f"the run was rolled back to round {record.round}, before the cut that the replay begins with, "
                "and the journal does not keep that any more: begin with an older cut"
            )
            return False
        made = self._parameters.restore_state(packed, record.versions, record.at - 1)
        for fragment, (found, due) in enumerate(zip(made, record.digests, strict=True)):
            if found != due:
                names = tuple(piece.label for piece in self._parameters.plan.fragments[fragment].pieces)
                self.outcome.difference = VersionDifference(record.at, fragment, record.versions[fragment], names)
                return False
        self.outcome.compared += len(made)
        self._keep_current(range(len(made)))
        return True

    def _compute_factors(self, record: MergedRecord) -> list[FloatArray]:
        """What the filter left of each contribution then; nothing was filtered where none has any."""
        if not any(share.factors for share in record.members):
            return []
        whole = np.ones(len(self._parameters.plan.fragments[record.fragment].pieces), np.float32)
        return [np.frombuffer(share.factors, np.float32) if share.factors else whole for share in record.members]

    def _find_difference(self, record: MergedRecord) -> VersionDifference:
        part = self._parameters.plan.fragments[record.fragment]
        names = [piece.label for piece in part.pieces]
        mine = self._parameters.piece_marks(record.fragment)
        if len(record.marks) == len(mine):
            differ = [
                name for n, name in enumerate(names) if mine[4 * n : 4 * n + 4] != record.marks[4 * n : 4 * n + 4]
            ]
            names = differ or names
        return VersionDifference(record.round, record.fragment, record.version, tuple(names))

    def _keep_current(self, fragments: Sequence[int]) -> None:
        for fragment in fragments:
            buffer = self._parameters.committed_buffers()[fragment]
            if self._needed[fragment, buffer.version]:
                self._versions[fragment, buffer.version] = buffer.values.copy()
                if buffer.moments is not None:
                    self._moments[fragment, buffer.version] = buffer.moments.data

    # ---- what the actors bring --------------------------------------------------------------------------------------

    def _note_adoption(self, fragment: int, version: int) -> None:
        self._needed[fragment, version] -= 1
        if self._needed[fragment, version] <= 0:
            self._versions.pop((fragment, version), None)
            self._moments.pop((fragment, version), None)

    def _take_contribution(self, copy: RecordedCopy, learner: str, given: GivenContribution) -> None:
        self._given[copy.round, learner] = given

    def _take_first_parameters(self, values: list[FloatArray]) -> None:
        if self._begun:
            return
        for fragment, own in enumerate(values):
            np.frombuffer(self._parameters.initial_bytes(fragment), dtype=np.float32)[:] = own
        self._parameters.commit_initial()
        self._begun, self.outcome.begun_at = True, time.time()
        self._keep_current(range(len(values)))
        self._keep_for_rollback(0)

    def _lend_state(self, part: ProcessRecording, t: int, state: SharedState) -> None:
        tickets = [ticket for ticket, (lender, at) in self._score.lent.items() if lender is part and at == t]
        for ticket in tickets:
            self._states[ticket] = SharedState(os.dup(state.fd), state.size)
        os.close(state.fd)

    def _add_remark(self, text: str) -> None:
        if text not in self.outcome.remarks:
            self.outcome.remarks.append(text)


def _weigh_anew(record: MergedRecord, given: Sequence[GivenContribution]) -> MergedRecord:
    """The round with the tokens that its members' scripts gave, and the weights that follow from them."""
    counters = [one.made for one in given]
    shares = [
        share if made is None else msgspec.structs.replace(share, tokens=made.tokens, total=made.total)
        for share, made in zip(record.members, counters, strict=True)
    ]
    weights = limit_weights([weigh(share) for share in shares], [share.limit for share in shares])
    members = [msgspec.structs.replace(s, weight=weight) for s, weight in zip(shares, weights, strict=True)]
    return msgspec.structs.replace(record, members=tuple(members))


def _make_actor(part: ProcessRecording, acts: list[RecordedAction], child: Child) -> ReplayedProcess | ReplayedRanks:
    return ReplayedRanks(part, acts, child, part.ranks) if part.ranks > 1 else ReplayedProcess(part, acts, child)
