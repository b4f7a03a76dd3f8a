"""The records and events of a run under a scenario (`atoll train --tape`).

Members, bases and steps of adoption are the scenario's, which counts equal tokens for each step. Tokens, weights and
the fates of tokens are those of the scripts that trained under it.
"""

from __future__ import annotations

import time
from collections import defaultdict

import msgspec

from atoll.launch.replay.recording import RunRecording
from atoll.launch.replay.syncer import MadeRound, ReplayOutcome
from atoll.protocol.account import make_account
from atoll.protocol.history import History
from atoll.protocol.records import (
    AnyRecord,
    BegunRecord,
    ChangedRecord,
    EndedRecord,
    GoneRecord,
    JoinedRecord,
    MergedRecord,
    PassedRecord,
)
from atoll.protocol.tape import StoppedEntry
from atoll.telemetry.events import EventLog, Sink, versions
from atoll.telemetry.round_members import MemberSampler


class OwnRecords:
    def __init__(self, begun: BegunRecord, score: RunRecording, outcome: ReplayOutcome, sink: Sink) -> None:
        self.history = History(begun)
        self._score, self._outcome = score, outcome
        self._at = outcome.begun_at or time.time()
        self._events = EventLog(sink, clock=lambda: self._at)
        self._members = MemberSampler()
        self._totals: dict[str, int] = {}
        """Tokens of a training process that its earlier incarnations have accounted for, by session."""
        self._newest: dict[str, int] = {}
        """The last incarnation of each session: the counters at its end are those of this one."""
        for (_, incarnation), part in score.of.items():
            self._newest[part.session] = max(incarnation, self._newest.get(part.session, 0))
        self._given: defaultdict[tuple[str, int], int] = defaultdict(int)
        """Most tokens that a contribution of the incarnation tells of."""
        for made in outcome.made.values():
            for share in made.record.members:
                key = share.learner, share.incarnation
                self._given[key] = max(self._given[key], share.total)
        settings = msgspec.to_builtins(begun.settings)
        header = {"run": begun.run, "learners": begun.settings.learners, "settings": settings, "versions": versions()}
        self._events.say("run", f"run {begun.run} follows a tape", header)

    def take(self, line: AnyRecord) -> AnyRecord:
        """Return the record of this run in place of the scenario's, and write its event."""
        match line:
            case JoinedRecord(session=session):
                line = msgspec.structs.replace(line, origin=self._totals.get(session, 0))
                self._tell_joined(line)
            case MergedRecord():
                made = self._outcome.made[line.round]
                line, self._at = made.record, made.at
                self._tell_round(made)
            case PassedRecord():
                self._events.say("passed", line.reason, {"round": line.round, "fragment": line.fragment})
            case ChangedRecord(training_phase=phase) if phase:
                values = line.settings.phased_values
                self._events.say("phase", line.what, {"training_phase": phase, **values})
            case GoneRecord():
                line = self._close_account(line)
                self._tell_gone(line)
            case EndedRecord(final=False):
                self._events.say("ending", line.reason)
            case _:
                pass
        self.history.apply(line)
        if isinstance(line, EndedRecord) and line.final:
            self._tell_finished(line)
        return line

    def _close_account(self, line: GoneRecord) -> GoneRecord:
        """The fates of its tokens, by the counters at the end of its training process."""
        key, ledger = (line.learner, line.incarnation), self.history.ledger
        session = self._score.of[key].session
        last = self._outcome.counters.get(session) if self._newest[session] == line.incarnation else None
        if last is not None:
            ledger.reported(*key, last.total, last.tokens, last.dropped, last.versions, last.missed)
        fate = ledger.closing(*key, self._given[key])
        self._totals[session] = fate.total
        fates = {"total": fate.total, "dropped": fate.dropped, "lost": fate.lost, "missed": fate.missed}
        return msgspec.structs.replace(line, t=line.t if last is None else last.t, **fates)

    # ---- events -----------------------------------------------------------------------------------------------------

    def _tell_joined(self, line: JoinedRecord) -> None:
        before = self.history.lives.get(line.learner)
        known_as = before.incarnation if before is not None and before.session == line.session else 0
        who = {"learner": line.learner, "incarnation": line.incarnation}
        self._events.say("joined", f"{line.learner} joined", {**who, "known_as": known_as})
        self._events.say("recovered", f"{line.learner} may contribute", {**who, "seconds": 0.0})

    def _tell_round(self, made: MadeRound) -> None:
        line, fragment = made.record, made.record.fragment
        whole = sum(share.weight for share in line.members)
        members = []
        for share in line.members:
            life = self.history.lives[share.learner]
            version, t, _ = life.merged[fragment]
            same = life.incarnation == share.incarnation and version >= 0
            told = msgspec.structs.asdict(share)
            members.append(
                {name: told[name] for name in ("learner", "incarnation", "t", "steps", "tokens", "weight", "base")}
                | {"since": share.t - t if same else None, "loss": made.losses.get(share.learner)}
                | {"agreement": None, "influence": round(share.weight / whole, 4), "filtered": share.filtered}
            )
        data: dict[str, object] = {
            "round": line.round,
            "fragment": fragment,
            "version": line.version,
            "attempt": line.attempt,
        }
        data |= {"live": sum(life.open for life in self.history.lives.values()), "members": members, "step": line.step}
        data = self._members.thin_out(data, self.history.settings.fragments)
        self._events.say("round", f"round {line.round}: fragment {fragment} is version {line.version}", data)

    def _tell_gone(self, line: GoneRecord) -> None:
        entries = self._score.of[line.learner, line.incarnation].entries
        kind = "left" if any(isinstance(entry, StoppedEntry) for entry in entries) else "lost"
        data: dict[str, object] = {"learner": line.learner, "incarnation": line.incarnation, "t": line.t}
        data |= {"tokens": line.total, "reason": line.reason, "unmerged_tokens": sum(line.lost) // len(line.lost)}
        self._events.say(kind, f"{line.learner} {'has left' if kind == 'left' else 'is away'}: {line.reason}", data)

    def _tell_finished(self, line: EndedRecord) -> None:
        learners = [
            {"learner": name, "incarnation": life.incarnation, "t": life.t, "tokens": life.total}
            for name, life in self.history.lives.items()
        ]
        data = {"reason": line.reason, **make_account(self.history), "learners": learners}
        self._events.say("finished", f"the run is over: {line.reason}", data)
