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
        self._arriving: dict[tuple[str, int], bytearray] = {}
        """Those on their way: one that is asked no more writes into nothing that counts."""

    def ask(self, learner: str, session: str) -> None:
        self._asked = (learner, session)
        self._here.clear()  # what another one sent is worth nothing

    def asks(self, learner: str, session: str) -> bool:
        return self._machine.phase == "empty" and (learner, session) == self._asked

    def receive(self, learner: str, fragment: int) -> memoryview:
        """Where it goes, until it is whole and wanted."""
        if fragment >= len(self._parameters.plan.fragments):
            raise PeerError(f"there is no fragment {fragment}")
        size = self._parameters.initial(fragment).nbytes
        if (learner, fragment) not in self._arriving:
            self._arriving[learner, fragment] = bytearray(size)
        return memoryview(self._arriving[learner, fragment])

    def arrived(self, learner: str, fragment: int, digest: str) -> str | None:
        """Why it is refused, or None."""
        self._parameters.initial(fragment)[:] = self._arriving.pop((learner, fragment))
        if (reason := self._parameters.check_initial(fragment, digest)) is not None:
            return reason
        self._here.add(fragment)
        if self.whole:
            self._parameters.begin()
            self._arriving.clear()
        return None

    def has(self, fragment: int) -> bool:
        return fragment in self._here

    @property
    def whole(self) -> bool:
        return len(self._here) == len(self._parameters.plan.fragments)
