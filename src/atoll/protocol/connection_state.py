"""A learner's line to the syncer: who it is there, whom it listens to, and what it says.

Rules kept here, each with its test: a syncer of an earlier term is not listened to; nothing is heeded before the
welcome, nor a welcome that was meant for an earlier process of this name, nor what follows that one; nothing is said
while there is no connection; every message carries the learner's vector clock and the newest term it has heard of; a
contribution says whose it is, and takes along what the tape holds that no report has said; one with nothing to say
sends heartbeats.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from atoll.protocol.clock import Clock, merged
from atoll.protocol.counters import Counters
from atoll.protocol.effects import HangUp, LearnerEffect, Say
from atoll.protocol.messages import Contribution, FromLearner, FromSyncer, Heartbeat, Refused, Welcome
from atoll.protocol.tape import Spoken


class ConnectionState:
    def __init__(self, do: Callable[[LearnerEffect], None], counters: Counters, name: str, session: str) -> None:
        self._do, self._counters = do, counters
        self.name, self.session = name, session
        self.run = ""
        self.term = 0
        self.incarnation = 0
        self.connected = False
        self.said_at = 0.0
        self.heard: Clock = {}
        """What it was told of everybody's steps."""
        self.tape = Spoken()

    @property
    def clock(self) -> Clock:
        return merged(self.heard, {self.name: self._counters.t})

    def heeds(self, message: FromSyncer) -> bool:
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
        self.heard = merged(self.heard, message.clock)
        return True

    def say(self, now: float, message: FromLearner) -> None:
        if self.connected:
            self.said_at = now
            if isinstance(message, Contribution):
                message = self._signed(message)
            self._do(Say(msgspec.structs.replace(message, clock=self.clock, term=self.term)))

    def _signed(self, given: Contribution) -> Contribution:
        """Whose it is; and a round names what it depends on."""
        given = msgspec.structs.replace(given, run=self.run, learner=self.name, incarnation=self.incarnation)
        if self.tape.waiting:
            taped, tape = self.tape.next()
            given = msgspec.structs.replace(given, taped=taped, tape=tape)
        return given

    def turn(self, now: float, heartbeat_s: float, wakes: list[float]) -> None:
        """A heartbeat, where nothing else was said for so long."""
        if self.connected:
            if now >= self.said_at + heartbeat_s:
                self.say(now, Heartbeat())
            wakes.append(self.said_at + heartbeat_s)
