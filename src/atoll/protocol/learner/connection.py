"""What a learner tells the syncer: its counters, its connection, and when it saves for a snapshot."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from atoll.protocol.clock import SYNCER, Clock
from atoll.protocol.learner.effects import Adopted, HangUp, LearnerEffect, Save, Saved, Say, Stepped
from atoll.protocol.learner.versions import Versions
from atoll.protocol.learner.ways import Ways
from atoll.protocol.messages import (
    Announce,
    Contribution,
    CutSaved,
    FromLearner,
    FromSyncer,
    Heartbeat,
    Progress,
    Refused,
    Welcome,
)
from atoll.protocol.tape import Spoken

REASONS = 8
"""Why the syncer is out of reach: so many are remembered, so that each is told once."""


class Counters:
    """The counters of the training process, as it last reported them, and whether they belong together.

    Rules kept here, each with its test: an adoption at a boundary whose step is not reported yet waits for that step's
    report, which has both; after an order to forget, nothing is reported until the training process has answered,
    since the counters may be of two lives; a new life has taken none of its samples.
    """

    def __init__(self) -> None:
        self.last = Stepped(0, (), ())
        self._half_told = False
        """It adopted at a boundary whose step is not told yet."""
        self._forgetting = False
        """It was told to forget, and is in the middle of a step for all we know."""

    @property
    def t(self) -> int:
        return self.last.t

    @property
    def are_consistent(self) -> bool:
        """Whether they are all of one moment and of one life."""
        return not self._half_told and not self._forgetting

    def take_step(self, told: Stepped) -> None:
        self.last, self._half_told, self._forgetting = told, False, False

    def take_adoption(self, told: Adopted) -> None:
        self._forgetting = False
        if told.t > self.t:
            self._half_told = True  # the report of that step is on its way, with all counters as they are then
        else:
            self.last = count_adoption(self.last, told)

    def forget_life(self, fragments: int, *, in_a_step: bool) -> None:
        self.last = reset_counters(self.last, fragments)
        self._forgetting |= in_a_step


def count_adoption(stepped: Stepped, adopted: Adopted) -> Stepped:
    """The counters after an adoption."""
    if not stepped.steps:
        return stepped
    rows = {}
    for name in ("steps", "tokens", "dropped", "missed"):
        row = list(getattr(stepped, name)) or [0] * len(stepped.steps)
        row[adopted.fragment] = getattr(adopted, name)
        rows[name] = tuple(row)
    return msgspec.structs.replace(stepped, **rows)


def reset_counters(stepped: Stepped, fragments: int) -> Stepped:
    """The counters of another life, which has taken none of its samples yet."""
    zeros = (0,) * fragments
    rows = {"steps": zeros, "tokens": zeros, "dropped": zeros, "missed": zeros}
    return msgspec.structs.replace(stepped, **rows, position=min(0, stepped.position))


def progress_of(
    last: Stepped,
    versions: Versions,
    ways: Ways,
    offer: int,
    aims: int,
    incarnation: int,
    seeking: bool,
    tape: Spoken,
    lacking_bytes: int = 0,
) -> Progress:
    zeros = (0,) * len(versions.held)
    taped, entries = tape.next()
    return Progress(
        t=last.t,
        steps=last.steps or zeros,
        tokens=last.tokens or zeros,
        versions=tuple(versions.held),
        offer=offer,
        aims=aims,
        tokens_total=last.tokens_total,
        busy_s=last.busy_s,
        loss=last.loss,
        stopped=last.stopped,
        incarnation=incarnation,
        dropped=last.dropped or zeros,
        missed=last.missed if any(last.missed) else (),
        counted=tuple(versions.counted),
        position=last.position,
        seeking=seeking,
        taped=taped,
        tape=entries,
        leaving=last.leaving,
        inputs=last.inputs,
        up_rate=float(round(ways.up.bytes_per_s)),
        down_rate=float(round(ways.down.bytes_per_s)),
        lacking_bytes=0 if versions.is_complete else lacking_bytes,
    )


class ConnectionState:
    """A learner's line to the syncer: who it is there, whom it listens to, and what it says.

    Rules kept here, each with its test: a syncer of an earlier term is not listened to; nothing is heeded before the
    welcome, nor a welcome that was meant for an earlier process of this name, nor what follows that one; nothing is
    said while there is no connection; every message carries the rounds and the newest term that the learner has heard
    of; a contribution says whose it is, and takes along what the tape holds that no report has said; one with
    nothing to say sends heartbeats.
    """

    def __init__(self, do: Callable[[LearnerEffect], None], counters: Counters, name: str, session: str) -> None:
        self._do, self._counters = do, counters
        self.name, self.session = name, session
        self.run = ""
        self.term = 0
        self.incarnation = 0
        self.connected = False
        self._lost_for: set[str] = set()
        """Why it is not connected, as far as somebody was told."""
        self.lost: tuple[float, int] | None = None
        """When it was lost, and after which step; None: it is there, or never was."""
        self.hello_t = 0
        """Its step at the last hello."""
        self.said_at = 0.0
        self.rounds_heard = 0
        """Rounds of the run that it has heard of."""
        self.tape = Spoken()

    def note_lost(self, now: float, reason: str) -> bool:
        """Whether that is news: every dial that fails ends here, ten times in a minute. Of several addresses, which are
        dialled in turn, each may have a reason of its own."""
        if self.connected:
            self._lost_for.clear()
            self.lost = (now, self._counters.t)
        is_news = reason not in self._lost_for
        self.connected = False
        if len(self._lost_for) < REASONS:
            self._lost_for.add(reason)
        return is_news

    @property
    def clock(self) -> Clock:
        return {SYNCER: self.rounds_heard}

    def accepts_message(self, message: FromSyncer) -> bool:
        """Whether a message counts; if it does, its clock and term are taken in."""
        if message.term < self.term and not isinstance(message, Refused):
            self._do(HangUp(f"it speaks for term {message.term}, the run is in term {self.term}"))
            return False
        if not self.connected and not isinstance(message, Welcome | Refused):
            return False  # it was meant for an earlier connection; the welcome will tell
        if isinstance(message, Welcome) and message.session not in ("", self.session):
            # It was meant for an earlier process of this name, and so is all that follows until the own welcome:
            # what waited for the disk goes to whoever has the name by then, in the order in which it was decided.
            self.connected = False
            return False
        self.term = max(self.term, message.term)
        self.rounds_heard = max(self.rounds_heard, message.clock.get(SYNCER, 0))
        return True

    def send_message(self, now: float, message: FromLearner) -> None:
        if self.connected:
            self.said_at = now
            if isinstance(message, Contribution):
                message = self._sign_contribution(message)
            self._do(Say(msgspec.structs.replace(message, clock=self.clock, term=self.term)))

    def _sign_contribution(self, given: Contribution) -> Contribution:
        """Whose it is; and a round names what it depends on."""
        given = msgspec.structs.replace(given, run=self.run, learner=self.name, incarnation=self.incarnation)
        if self.tape.waiting:
            taped, tape = self.tape.next()
            given = msgspec.structs.replace(given, taped=taped, tape=tape)
        return given

    def send_heartbeat(self, now: float, heartbeat_s: float, wakes: list[float]) -> None:
        """A heartbeat, where nothing else was said for so long."""
        if self.connected:
            if now >= self.said_at + heartbeat_s:
                self.send_message(now, Heartbeat())
            wakes.append(self.said_at + heartbeat_s)


class Marker:
    """When a learner saves its part of a cut: every message carries the newest cut's number, and the first to name one
    is the marker.

    Rules kept here, each with its test: at a welcome a cut is old news, the others have saved theirs; only one that
    trains saves, or has trained until the run's end; nobody saves twice for one cut, unless a new term takes it anew.
    """

    def __init__(self, do: Callable[[LearnerEffect], None]) -> None:
        self._do = do
        self._newest = 0
        """The newest cut it has heard of."""
        self._kept: tuple[int, ...] = ()
        """The complete ones that the run keeps."""
        self._saving = (0, 0)
        """Cut that was last saved for, and the incarnation that was told to."""

    def look_for_cut(self, message: FromSyncer, *, training: bool, incarnation: int) -> None:
        """`training`: it holds the run's parameters and has made its steps on them. `incarnation`: the life that these
        steps belong to, which this message may end."""
        if isinstance(message, Welcome | Announce):
            self._kept = message.cuts
        if message.cut > self._newest and not isinstance(message, Welcome) and training:
            self._do(Save(message.cut, self._kept))
            self._saving = (message.cut, incarnation)
        self._newest = message.cut if isinstance(message, Welcome) else max(self._newest, message.cut)

    def answer(self, saved: Saved, incarnation: int) -> CutSaved:
        """Say that a part is saved. `incarnation`: the present one; the part may be of the life before it."""
        cut, life = self._saving
        return CutSaved(
            of=saved.cut,
            incarnation=life if saved.cut == cut else incarnation,
            t=saved.t,
            file=saved.file,
            digest=saved.digest,
            reason=saved.reason,
        )
