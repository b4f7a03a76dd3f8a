"""Cuts: consistent snapshots of the whole run (Chandy and Lamport), taken while it goes on.

Every `cut_every` rounds (of another H as many as make the same learner steps) the syncer records its state right behind
a commit. From then on every message it sends names the open cut; the first such message is the marker for a learner,
which then saves its own state in the background and says so. Nothing has to be recorded on the wire: a sender keeps
what was in flight (a copy is kept until its fragment is adopted).

Rules kept here, each with its test:
- a cut never waits for dead learners, nor for anybody past its deadline; the manifest names those left out, and why;
- a part that another life of a learner saved is not taken;
- a cut is completed only after the syncer's own part is durable;
- one cut is open at a time, and after one that took longer than `BRIEF_S` none is taken for `REST` times the rest of
  it: while one of a large model is written, rounds and steps on the same machine take up to a fifth longer. But one
  is left out at most: the journal since the last cut is what a restart has to read, and what the disk has to hold;
- a run that ends in good order takes a last cut behind its last round, so that a resume has the inner optimizers of the
  last steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from atoll.protocol.messages import CutSaved, Ending
from atoll.protocol.records import CutDoneRecord
from atoll.protocol.syncer.effects import CompleteCut, TakeCut
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.state import SyncerState

BRIEF_S, REST = 2.0, 20.0
LATE = "it did not save in time"


@dataclass(slots=True)
class OpenCut:
    cut: int
    opened_at: float
    deadline: float
    awaited: dict[str, int]
    """Learners that have not said yet that they saved, with their incarnations."""
    saved: dict[str, CutSaved] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    kept: bool = False
    """The syncer's part is durable."""
    completing: bool = False
    last: bool = False
    """Of a run that ends: worth nothing without a learner's part."""


class Cuts:
    def __init__(self, state: SyncerState) -> None:
        self.state = state
        self.open: OpenCut | None = None
        self._rests_until = -inf

    def take_first(self) -> None:
        """Version 0, whole and durable before anybody adopts it. There is nobody else to wait for."""
        self.state.out.add_effect(TakeCut(0, self.state.history.state(), first=True))

    def take_if_due(self, now: float, rounds: int) -> None:
        """So many rounds are behind the run: take a cut if one is due. Called before the last of them is announced."""
        every = self.state.settings.cut_every
        if self.open is not None or not every or (rounds - self.state.history.cuts_from) % every:
            return
        if now < self._rests_until:
            self._rests_until = -inf  # the next one is taken
        else:
            self._take_cut(now, rounds, self.state.members.live_learners())

    def end_with_one(self, now: float, rounds: int, reason: str, wakes: list[float]) -> bool:
        """The last steps are collected: take a cut unless one was taken here. True when there is none to wait for."""
        if self.open is not None:
            return False
        there = [one for one in self.state.members.reachable_learners() if one.stopped]
        if not self.state.settings.cut_every or self.state.out.cut >= rounds or not there:
            return True
        self._take_cut(now, rounds, there, last=True)
        wakes.append(now + self.state.settings.cut_wait_s)  # this look at the time may be the last until then
        for learner in there:  # nothing else would tell them of it
            self.state.out.send(learner.name, Ending(reason=reason))
        return False

    def _take_cut(self, now: float, rounds: int, learners: list[KnownLearner], *, last: bool = False) -> None:
        awaited = {one.name: one.incarnation for one in learners}
        self.open = OpenCut(rounds, now, now + self.state.settings.cut_wait_s, awaited, last=last)
        self.state.out.cut = rounds
        self.state.out.add_effect(TakeCut(rounds, self.state.history.state(), last=last))

    def note_saved(self, learner: KnownLearner, said: CutSaved) -> None:
        """Take a learner's word that it saved. A part counts only if the life that the cut waits for saved it, and is
        still the learner's present one."""
        open_ = self.open
        if open_ is None or said.of != open_.cut:
            return
        if not said.incarnation == learner.incarnation == open_.awaited.get(learner.name):
            return
        del open_.awaited[learner.name]
        if said.reason:
            open_.left_out[learner.name] = said.reason
        else:
            open_.saved[learner.name] = said

    def lose_learner(self, learner: KnownLearner) -> None:
        """Its connection is gone. If it is back at once, the cut is old news to it."""
        if self.open is not None and self.open.awaited.pop(learner.name, None) is not None:
            self.open.left_out[learner.name] = "it was gone"

    def note_syncer_part(self, cut: int, reason: str) -> None:
        """The syncer's part is durable, or (with a reason) will never be."""
        if self.open is None or self.open.cut != cut:
            return
        if reason:
            self.state.out.note("warning", f"cut {cut} came to nothing: {reason}", cut=cut)
            self.open = None
        else:
            self.open.kept = True

    def complete_if_ready(self, now: float, wakes: list[float]) -> None:
        """Leave out who is gone or late; complete what can be."""
        if (open_ := self.open) is None or open_.completing:
            return
        there = {one.name: one.incarnation for one in self.state.members.connected_learners()}
        for name, incarnation in list(open_.awaited.items()):
            late = now >= open_.deadline
            if late or there.get(name) != incarnation:
                del open_.awaited[name]
                open_.left_out[name] = LATE if late else "it was gone"
        if open_.awaited:
            wakes.append(open_.deadline)
        elif open_.last and not open_.saved:  # the one before it has inner optimizers in it
            reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(open_.left_out.items()))
            self.state.out.note("warning", f"the last cut, {open_.cut}, came to nothing: {reasons}", cut=open_.cut)
            self.open = None
        elif open_.kept:
            open_.completing = True
            saved, left_out = tuple(open_.saved.items()), tuple(open_.left_out.items())
            self.state.out.add_effect(CompleteCut(open_.cut, saved, left_out, self.state.history.spared_cut))

    def note_written(self, now: float, cut: int, manifest: str) -> None:
        """The manifest is durable."""
        if (open_ := self.open) is None or open_.cut != cut:
            return
        self.open = None
        if LATE not in open_.left_out.values():  # else it took as long as its deadline, whatever the disk does
            self._rests_until = now + REST * max(0.0, now - open_.opened_at - BRIEF_S)
        self.state.out.persist(CutDoneRecord(cut, cut, tuple(sorted(open_.saved)), manifest))
        without = f", without {', '.join(sorted(open_.left_out))}" if open_.left_out else ""
        self.state.out.note(
            "cut",
            f"cut {cut} is complete: {len(open_.saved)} learners{without}",
            cut=cut,
            learners=sorted(open_.saved),
            left_out=dict(open_.left_out),
        )
