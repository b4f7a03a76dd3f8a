"""How a run comes by its first parameters, and begins: one learner is asked for version 0.

Rules kept here, each with its test: the first that comes is asked, but one that has adopted a global model goes before
one with weights of its own, while nothing of these has come; version 0 is durable before anyone adopts it; when the one
that was asked is gone, or sends nothing more (upload.py), whatever it sent is discarded and the next is asked. Once all
of it is there, the run begins when as many learners are there as it is meant for, or `wait_for_learners_s` later: until
then nobody trains, so that the first rounds have everybody in them and the run's step is that of everybody.
"""

from __future__ import annotations

from atoll.protocol.assembling import Assembling
from atoll.protocol.cut import Cuts
from atoll.protocol.membership import Learner, Membership
from atoll.protocol.messages import Hello, Started
from atoll.protocol.outbox import Outbox
from atoll.protocol.phase import RunPhase
from atoll.protocol.records import Started as StartedRecord
from atoll.protocol.rounds import Rounds
from atoll.protocol.upload import Upload


class Beginning:
    def __init__(
        self,
        run_phase: RunPhase,
        members: Membership,
        rounds: Rounds,
        cuts: Cuts,
        assembling: Assembling,
        out: Outbox,
    ) -> None:
        self.run_phase, self.members, self.rounds, self.cuts = run_phase, members, rounds, cuts
        self.assembling, self.out = assembling, out
        self._uploader: str | None = None
        self._uploader_holds = False
        """It has adopted a global model."""
        self._upload = Upload()
        self._whole_at: float | None = None
        """Since when all of the first parameters are there."""

    def greeted(self, hello: Hello) -> None:
        """One more that could be asked."""
        if self.run_phase.phase == "empty" and self._is_better(hello):
            self._uploader, self._uploader_holds = hello.learner, _holds_a_model(hello)
            self._upload.asked()

    def asks(self, learner: Learner) -> bool:
        """Whether this one is to give the first parameters."""
        return self.run_phase.phase == "empty" and self._uploader == learner.name and self._whole_at is None

    def lost(self, learner: Learner) -> Learner | None:
        """This one is gone; who is asked in its place, and has to be told."""
        return self._next() if self.asks(learner) else None

    def uploading(self, now: float, uploader: str, size: int) -> None:
        """A fragment of so many bytes begins to come; 0: one that was not there before is whole."""
        if uploader == self._uploader:
            self._upload.moved(now, size)

    def overdue(self, now: float, wakes: list[float]) -> Learner | None:
        """Who sends nothing more has had its chance, if another is there: that one is asked, and has to be told."""
        there = {one.name for one in self.members.connected()}
        if self.run_phase.phase != "empty" or self._uploader is None or self._whole_at is not None or len(there) < 2:
            return None
        heir, until = None, self._upload.until(now)
        if now >= until:
            text = f"{self._uploader} was asked for the first parameters, and nothing new of them came"
            self.out.note("warning", text, self.members.learners[self._uploader])
            self._upload.gave_up(self._uploader, there)
            heir, until = self._next(), self._upload.until(now)
        wakes.append(until)
        return heir

    def _next(self) -> Learner | None:
        """What the last one sent is discarded. Those that had their chance come last."""
        heirs = sorted(self.members.connected(), key=lambda one: (one.name in self._upload.tried, one.joined_at))
        self._uploader = heirs[0].name if heirs else None
        self._upload.asked()
        if not heirs:
            return None
        self.out.note("warning", f"{heirs[0].name} is asked for the first parameters instead", heirs[0])
        return heirs[0]

    def initialised(self, now: float, uploader: str) -> None:
        """They came whole."""
        if self.run_phase.phase != "empty" or uploader != self._uploader or self._whole_at is not None:
            return
        self._whole_at = now
        settings = self.members.settings
        if settings.wait_for_learners_s and self.missing:
            some, wait_s = f"{self.missing} more of {settings.learners} learners", settings.wait_for_learners_s
            text = f"waiting for {some}, up to {wait_s:g} s; then training begins"
            self.out.note("waiting", text, missing=self.missing, seconds=wait_s)

    @property
    def missing(self) -> int:
        """Learners that the run is meant for and that are not here."""
        return max(0, self.members.settings.learners - len(self.members.connected()))

    @property
    def awaited(self) -> int:
        """So many of them are waited for: all else that training needs is here."""
        return self.missing if self.run_phase.phase == "empty" and self._whole_at is not None else 0

    def turn(self, now: float, wakes: list[float]) -> None:
        """Begin, where everybody is here or was waited for."""
        if self.run_phase.phase != "empty" or self._whole_at is None:
            return
        settings = self.members.settings
        until = self._whole_at + settings.wait_for_learners_s
        if self.missing and now < until:
            wakes.append(until)
            return
        if self.missing and settings.wait_for_learners_s:
            some = f"{self.missing} of {settings.learners} learners"
            self.out.note("warning", f"{some} did not come in time: training begins, and they may come later")
        self._start(now)

    def _start(self, now: float) -> None:
        uploader = self._uploader
        assert uploader is not None, "the first parameters are somebody's"
        self.cuts.first()
        self.out.persist(StartedRecord(uploader))
        self.run_phase.phase = "running"
        self.assembling.started(now)
        self.rounds.versions = [0] * len(self.rounds.versions)
        self.out.note("initial", f"{uploader} gave the first parameters")
        for learner in self.members.connected():
            self.out.send(learner.name, Started(uploader=uploader, gathering=self.rounds.aim))

    def _is_better(self, hello: Hello) -> bool:
        goes_before = _holds_a_model(hello) and not self._uploader_holds and not self._upload.begun
        return self._uploader is None or (goes_before and hello.learner not in self._upload.tried)


def _holds_a_model(hello: Hello) -> bool:
    return bool(hello.versions) and min(hello.versions) >= 0
