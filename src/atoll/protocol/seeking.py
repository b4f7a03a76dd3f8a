"""A newcomer's part in a recovery: it seeks a peer's state, fetches it, and has the training process take it.

Parameters are not in it: those are the run's committed versions, taken from the syncer all the while. Until the state
is taken, or it is told that there is none, it is not recovered. The syncer decides which peer it is and how long that
may take; a newcomer that comes back to the syncer asks anew. A state that is refused is said, and another one awaited.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from atoll.protocol.effects import (
    Await,
    Begin,
    FetchState,
    LearnerEffect,
    LeaveState,
    StateCame,
    StateFailed,
    Taken,
    TakeState,
)
from atoll.protocol.messages import Fresh, FromLearner, Helped, Seek, Settled


class Seeking:
    def __init__(self, do: Callable[[LearnerEffect], None], say: Callable[[float, FromLearner], None]) -> None:
        self._do, self._say = do, say
        self.open = False
        self.frozen = False
        """Frozen parameters are sought too."""
        self._helped: Helped | None = None
        """What it fetches, or has fetched and not taken yet."""
        self._outcome = ""
        """What it came to, until that is told."""

    def begin(self, now: float, after: int, *, frozen: bool = False) -> None:
        """Ask for a peer; once more after a reconnect: the syncer may be another one."""
        self.open, self._outcome, self.frozen = True, "", frozen
        self._do(Await())
        self._say(now, Seek(after=after, frozen=frozen))

    def hear(self, message: Helped | Fresh) -> None:
        match message:
            case Fresh(reason=reason):
                self.stop(f"goes on with its own inner optimizer, which warms up where it is fresh: {reason}")
            case Helped() if self.open:
                self._leave()
                self._helped = message
                self._do(FetchState(message.ticket, message.size, message.digest, message.direct))

    def told(self, now: float, event: StateCame | StateFailed | Taken) -> None:
        """What became of what it was told to fetch; of anything older nobody wants to know."""
        if (helped := self._helped) is None or helped.ticket != event.ticket:
            return
        match event:
            case StateCame(ticket):
                self._do(TakeState(ticket))
            case StateFailed(ticket, reason):
                self._helped = None
                self._say(now, Settled(ticket=ticket, peer=helped.peer, reason=reason, again=True))
            case Taken():
                self._helped = None
                self._settle(now, helped, event)

    def _settle(self, now: float, helped: Helped, taken: Taken) -> None:
        """It is in; it is not to be believed, and another peer's may be; or none could be taken here."""
        size = helped.size if taken.refused or not taken.reason else 0
        said = Settled(ticket=taken.ticket, peer=helped.peer, size=size, t=taken.t, reason=taken.reason)
        self._say(now, msgspec.structs.replace(said, again=taken.refused))
        if not taken.reason:
            self.stop(f"goes on with the inner optimizer of {helped.peer}")
        elif not taken.refused:
            self.stop(f"goes on with its own inner optimizer, which warms up: {taken.reason}")

    def stop(self, text: str) -> None:
        """Settled, one way or the other."""
        if self.open:
            self._leave()
            self.open, self._outcome = False, text

    def conclude(self) -> None:
        """Tell the training process, once whatever it goes on with is on order."""
        if self._outcome:
            self._do(Begin(self._outcome))
            self._outcome = ""

    def _leave(self) -> None:
        if self._helped is not None:
            self._do(LeaveState(self._helped.ticket))
            self._helped = None
