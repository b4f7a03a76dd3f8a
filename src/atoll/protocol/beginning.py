"""How a run comes by its first parameters: one learner is asked for version 0.

Rules kept here, each with its test: the first that comes is asked, but one that has adopted a global model goes before
one with weights of its own; version 0 is durable before anyone adopts it; when the one that was asked is gone, whatever
it sent is discarded and the next is asked.
"""

from __future__ import annotations

from atoll.protocol.assembling import Assembling
from atoll.protocol.course import Course
from atoll.protocol.cut import Cuts
from atoll.protocol.membership import Learner, Membership
from atoll.protocol.messages import Hello, Started
from atoll.protocol.outbox import Outbox
from atoll.protocol.records import Started as StartedRecord
from atoll.protocol.rounds import Rounds


class Beginning:
    def __init__(
        self,
        course: Course,
        members: Membership,
        rounds: Rounds,
        cuts: Cuts,
        assembling: Assembling,
        out: Outbox,
    ) -> None:
        self.course, self.members, self.rounds, self.cuts = course, members, rounds, cuts
        self.assembling, self.out = assembling, out
        self._uploader: str | None = None
        self._uploader_holds = False
        """It has adopted a global model."""

    def greeted(self, hello: Hello) -> None:
        """One more that could be asked."""
        if self.course.phase == "empty" and self._is_better(hello):
            self._uploader, self._uploader_holds = hello.learner, _holds_a_model(hello)

    def asks(self, learner: Learner) -> bool:
        """Whether this one is to give the first parameters."""
        return self.course.phase == "empty" and self._uploader == learner.name

    def lost(self, learner: Learner) -> Learner | None:
        """This one is gone; who is asked in its place, and has to be told."""
        if not self.asks(learner):
            return None
        heir = min(self.members.connected(), key=lambda one: one.joined_at, default=None)
        self._uploader = heir.name if heir is not None else None
        if heir is not None:
            self.out.note("warning", f"{heir.name} is asked for the first parameters instead", heir)
        return heir

    def initialised(self, now: float, uploader: str) -> None:
        """They came whole."""
        if self.course.phase != "empty" or uploader != self._uploader:
            return
        self.cuts.first()
        self.out.persist(StartedRecord(uploader))
        self.course.phase = "running"
        self.assembling.started(now)
        self.rounds.versions = [0] * len(self.rounds.versions)
        self.out.note("initial", f"{uploader} gave the first parameters")
        for learner in self.members.connected():
            self.out.send(learner.name, Started(uploader=uploader, gathering=self.rounds.aim))

    def _is_better(self, hello: Hello) -> bool:
        return self._uploader is None or (_holds_a_model(hello) and not self._uploader_holds)


def _holds_a_model(hello: Hello) -> bool:
    return bool(hello.versions) and min(hello.versions) >= 0
