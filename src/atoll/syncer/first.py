"""The first parameters of a run: version 0, whole, from the one learner that was asked for it.

One learner at a time is asked, in one of its sessions. If it dies on the way, or gives numbers that are not finite,
another one is asked, and what came of the first is worth nothing. Once the run has parameters nobody is asked.
"""

from __future__ import annotations

from atoll.protocol.errors import PeerError
from atoll.protocol.syncer import Syncer
from atoll.syncer.parameters import Parameters


class FirstParameters:
    def __init__(self, parameters: Parameters, machine: Syncer) -> None:
        self._parameters, self._machine = parameters, machine
        self._asked = ("", "")
        """The learner and its session."""
        self._here: set[int] = set()
        """Fragments that have arrived."""

    def ask(self, learner: str, session: str) -> None:
        self._asked = (learner, session)
        self._here.clear()  # what another one sent is worth nothing

    def asks(self, learner: str, session: str) -> bool:
        return self._machine.phase == "empty" and (learner, session) == self._asked

    def receive(self, fragment: int) -> memoryview:
        """Where it goes."""
        if fragment >= len(self._parameters.plan.fragments):
            raise PeerError(f"there is no fragment {fragment}")
        return self._parameters.initial(fragment)

    def arrived(self, fragment: int, digest: str) -> str | None:
        """Why it is refused, or None."""
        if (reason := self._parameters.check_initial(fragment, digest)) is not None:
            return reason
        self._here.add(fragment)
        if self.whole:
            self._parameters.begin()
        return None

    @property
    def whole(self) -> bool:
        return len(self._here) == len(self._parameters.plan.fragments)
