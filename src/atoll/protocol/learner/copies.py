"""A learner's copies: which fragment it copies at which step boundary (`Orders`), which copies exist (`Copies`), and
what it answers to a pull (`Pulls`).

At most one copy of a fragment is kept, the newest. A pull that finds none waits for the next boundary. A contribution
carries the step, counters and base of its copy, as they were when the copy was made.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.protocol import schedule
from atoll.protocol.learner.effects import (
    CancelRead,
    Copied,
    Drop,
    Hold,
    LearnerEffect,
    LetGo,
    Read,
    Upload,
    Uploaded,
    UploadFailed,
)
from atoll.protocol.learner.versions import Versions
from atoll.protocol.messages import Contribution, Decline, FromLearner, Pull
from atoll.protocol.settings import Settings


@dataclass(slots=True)
class Copies:
    do: Callable[[LearnerEffect], None]
    offer: int = -1
    """The newest round that a copy was made for."""
    waiting: dict[int, Pull] = field(default_factory=dict)
    """Pulls that wait for a copy, by fragment; the oldest first."""
    _at_hand: dict[int, Copied] = field(default_factory=dict)
    _sent: dict[tuple[int, int], tuple[Copied, Pull]] = field(default_factory=dict)
    """(round, attempt) → what is on its way."""
    _unanswered: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(round, attempt) → orders to send of which nobody has said yet what became of them."""
    _abandoned: set[tuple[int, int]] = field(default_factory=set)
    """Of these, those of a connection that is gone."""

    def __contains__(self, fragment: int) -> bool:
        return fragment in self._at_hand

    def read_at(self, fragment: int) -> int:
        """The step of the copy at hand; -1 when there is none."""
        return self._at_hand[fragment].t if fragment in self._at_hand else -1

    def keep_copy(self, copy: Copied) -> Pull | None:
        """It takes the place of an older one; the pull that waited for it, if one did."""
        old = self._at_hand.get(copy.fragment)
        if old is not None and old.t != copy.t:
            self.do(Drop(copy.fragment, old.t))
        self._at_hand[copy.fragment] = copy
        self.offer = max(self.offer, copy.round)
        return self.waiting.pop(copy.fragment, None)

    def drop_copy(self, fragment: int, until: int | None = None) -> int | None:
        """Of no more use; with `until`, only a copy made for that round or one before it. The round it was made for."""
        copy = self._at_hand.get(fragment)
        if copy is None or (until is not None and copy.round > until):
            return None
        del self._at_hand[fragment]
        self.do(Drop(fragment, copy.t))
        return copy.round

    def is_on_its_way(self, pull: Pull) -> bool:
        return (pull.round, pull.attempt) in self._sent

    def is_abandoned(self, pull: Pull) -> bool:
        """Whether an answer of the same name is on its way since before the connection was lost. A new term counts
        attempts anew: what became of that answer would be taken for what became of this one."""
        return (pull.round, pull.attempt) in self._abandoned

    def send_copy(self, pull: Pull) -> bool:
        """Send the copy at hand as the answer; False when there is nothing in it."""
        copy = self._at_hand[pull.fragment]
        if copy.steps == 0 and not pull.probe:
            return False
        self._sent[pull.round, pull.attempt] = (copy, pull)
        self._unanswered[pull.round, pull.attempt] += 1
        self.do(Upload(pull.round, pull.attempt, pull.fragment))
        return True

    def take_sent(self, number: int, attempt: int, digest: str) -> Contribution | None:
        """What to say of a body that has arrived; None when nobody wants it any more."""
        self._count_answer((number, attempt))
        if (sent := self._sent.pop((number, attempt), None)) is None:
            return None
        copy, pull = sent
        return Contribution(
            round=number,
            attempt=attempt,
            fragment=copy.fragment,
            base=copy.base,
            t=copy.t,
            steps=copy.steps,
            tokens=copy.tokens,
            digest=digest,
            probe=pull.probe,
            total=copy.total,
            position=copy.position,
        )

    def note_failure(self, number: int, attempt: int, *, keep: bool) -> Pull | None:
        """It did not get there; the pull, where anybody may still wait for it. The next pull gets a new copy, or
        (`keep`) the same: a learner that waits for a round makes no other."""
        self._count_answer((number, attempt))
        if (sent := self._sent.pop((number, attempt), None)) is None:
            return None
        copy, pull = sent
        if not keep and self._at_hand.get(copy.fragment) is copy:
            self.drop_copy(copy.fragment)
        return pull

    def _count_answer(self, key: tuple[int, int]) -> None:
        self._unanswered[key] -= 1
        if self._unanswered[key] <= 0:
            del self._unanswered[key]
            self._abandoned.discard(key)

    def forget_round(self, fragment: int, number: int) -> None:
        """The round is behind the run: nobody waits for an answer to it."""
        waits = self.waiting.get(fragment)
        if waits is not None and waits.round <= number:
            del self.waiting[fragment]

    def forget_pulls(self) -> None:
        """The connection is gone, and with it every pull."""
        self.waiting.clear()
        self._sent.clear()
        self._abandoned.update(self._unanswered)

    def forget_all(self) -> None:
        for fragment in list(self._at_hand):
            self.drop_copy(fragment)
        self.forget_pulls()
        self.offer = -1


RECENT = 16
"""Own steps, and rounds, by which a learner judges what comes due before its next boundary."""


class RoundsPerStep:
    """How the run's rounds lie to this learner's own steps, of late.

    Counted, not timed: how many rounds went by between two boundaries says all, whatever made them fast or slow. The
    most of the last few is what the next boundary prepares for, because a missing copy costs a round and a needless one
    only a copy.
    """

    def __init__(self) -> None:
        self._passed: deque[int] = deque(maxlen=RECENT)
        """Rounds that began to gather between two boundaries."""
        self._gaps: deque[int] = deque(maxlen=RECENT)
        """Own steps from one round's gathering to the next one's."""
        self._boundary: tuple[int, int] | None = None
        self._moved: tuple[int, int] | None = None

    def pass_boundary(self, t: int, gathering: int) -> None:
        if self._boundary is not None and t > self._boundary[0]:
            steps, rounds = t - self._boundary[0], gathering - self._boundary[1]
            self._passed.append(-(-rounds // steps))
        self._boundary = (t, gathering)

    def move_on(self, t: int, gathering: int) -> None:
        if self._moved is not None and gathering > self._moved[1]:
            self._gaps.append((t - self._moved[0]) // (gathering - self._moved[1]))
        self._moved = (t, gathering)

    def count_ahead(self, settings: Settings) -> int:
        """Rounds that may freeze before the next boundary."""
        most = max(self._passed, default=-(-settings.fragments // settings.sync_every))
        return max(1, min(most, settings.fragments))

    def steps_to_next(self, settings: Settings) -> int:
        """Own steps after which a round that has just begun to gather wants its first copy."""
        return max(1, min([*self._gaps, int(schedule.interval(settings))]) - 1)


class Orders:
    """Which copy the training process makes next, and (synchronous) at which step it waits for which round.

    Asynchronous: at every boundary the learner copies each fragment that comes due before its next boundary: one if it
    keeps the run's pace, several if it is slower. A round that has not frozen by then gets a fresher copy at the next
    boundary. A pull that finds no copy is answered at the next boundary.

    Synchronous: the schedule says at which nominal step a round's fragment is read, and at which its new version is
    adopted; `_shift` is the learner's own step minus the nominal one. Every copy that may come due before the training
    process goes on must be ordered before. A learner that the run has passed is aligned again.
    """

    def __init__(self, do: Callable[[LearnerEffect], None]) -> None:
        self.settings = Settings()
        self.gathering = 0
        """The round that the syncer gathers."""
        self.pending: dict[int, int] = {}
        """Copies ordered and not made yet: round → step."""
        self.share = 1.0
        """Share of the rounds that this learner takes part in."""
        self._do = do
        self._rounds_per_step = RoundsPerStep()
        self._first_step = 0
        """Asynchronous: no boundary before this step copies for the round that gathers."""
        self._shift: int | None = None
        """Synchronous: own step minus the run's nominal step."""
        self._last = -1
        """Synchronous: no round up to this one is still to be ordered."""
        self._holds: set[int] = set()

    @property
    def next_round(self) -> int:
        return min(self.pending, default=-1)

    def order_copy(self, number: int, step: int) -> None:
        self.pending[number] = step
        self._do(Read(number, schedule.fragment_of(number, self.settings), step))

    # ---- asynchronous -------------------------------------------------------------------------------------------

    def pass_boundary(self, t: int) -> None:
        self._rounds_per_step.pass_boundary(t, self.gathering)

    def move_on(self, t: int, gathering: int) -> None:
        """The syncer gathers a later round."""
        self.gathering = gathering
        self._rounds_per_step.move_on(t, gathering)
        self._first_step = t + self._rounds_per_step.steps_to_next(self.settings)

    def order_ahead(self, t: int, waited_for: Iterable[int]) -> None:
        """Order the copies that rounds may want before the boundary after the coming one, and those for waiting pulls.
        A learner with a share of the rounds orders only the latter: its pulls leave time for a fresh copy."""
        step = max(t + 1, self._first_step)
        count = self._rounds_per_step.count_ahead(self.settings) if self.share == 1.0 else 0
        wanted = dict.fromkeys(range(self.gathering, self.gathering + count), step)
        wanted |= dict.fromkeys(waited_for, t)
        # Copies of this boundary may be on their way off the device; older ones had no slot and were never made. While
        # no boundary comes, probes keep ordering copies: only the newest order of each fragment stays.
        newest = {schedule.fragment_of(n, self.settings): n for n in sorted({*self.pending, *wanted})}
        for number in [
            n for n, at in self.pending.items() if n not in wanted and (at != t or n not in newest.values())
        ]:
            del self.pending[number]
            self._do(CancelRead(number))
        for number, at in wanted.items():
            if self.pending.get(number) != at:
                self.order_copy(number, at)

    # ---- synchronous --------------------------------------------------------------------------------------------

    def align_steps(self, t: int) -> None:
        """Take a place in the run: it stands where the round before the one that gathers is adopted."""
        if self._shift is None:
            nominal = schedule.adopt_step(self.gathering - 1, self.settings) if self.gathering else 0
            self._shift, self._last = t - nominal, self.gathering - 1
            while schedule.read_step(self._last + 1, self.settings) <= nominal:
                self._last += 1
        self.plan_copies(min(self._holds, default=self._last + 1))  # one that comes back has its orders already

    def plan_copies(self, oldest: int) -> None:
        """Order every copy that may be due before round `oldest` is adopted."""
        if self._shift is None:
            return
        until = schedule.adopt_step(oldest, self.settings)
        while schedule.read_step(self._last + 1, self.settings) <= until:
            self._last += 1
            self.order_copy(self._last, schedule.read_step(self._last, self.settings) + self._shift)
            self._holds.add(self._last)
            self._do(Hold(self._last, schedule.adopt_step(self._last, self.settings) + self._shift))

    def is_behind(self, number: int) -> bool:
        """Whether round `number`, now behind the run, is one this learner has yet to copy."""
        return self._shift is not None and (number in self.pending or number > self._last)

    def adopt_step(self, number: int) -> int:
        """The own step at which the version of this round is taken; 0: at once, for it waits for no such round."""
        if self._shift is None or number not in self._holds:
            return 0
        return schedule.adopt_step(number, self.settings) + self._shift

    def let_round_go(self, number: int) -> None:
        """Nothing comes of that round. What is due after it must be on order before the training process goes on."""
        if number in self._holds:
            self.plan_copies(number + 1)
        self._holds.discard(number)
        self._do(LetGo(number))

    def void_copy(self, number: int | None) -> None:
        """The copy for that round is gone before its version came, as when the run is rolled back: a learner that
        still waited for the round could make no other copy, and nobody would ever get an answer from it."""
        if number in self._holds:
            self.let_round_go(number)

    def note_adoption(self, fragment: int, number: int) -> None:
        """The training process has taken the version of round `number`, and waits for none before it any more."""
        self._holds -= {n for n in self._holds if n <= number and n % self.settings.fragments == fragment}

    def forget_all(self) -> None:
        """No place in the run, nothing on order, nothing to wait for."""
        for number in sorted(self._holds):
            self._do(LetGo(number))
        self._holds.clear()
        self.pending.clear()
        self._shift, self._last = None, -1


class Standing(NamedTuple):
    """Where the learner stands now."""

    t: int
    steps: tuple[int, ...]
    stepping: bool
    """More boundaries will come."""
    recovered: bool


class Pulls:
    """What a learner answers to a pull: a copy that is ready, one that the next boundary brings, or why there is none.

    Rules kept here, each with its test: a learner contributes nothing before it has recovered; it declines a pull while
    the version that holds its last contribution is not adopted; a copy on another base than the model's is useless;
    after the last step only a copy of all steps is given; of answers of one name one is on its way at a time.
    """

    def __init__(
        self,
        do: Callable[[LearnerEffect], None],
        say: Callable[[float, FromLearner], None],
        standing: Callable[[], Standing],
        orders: Orders,
        copies: Copies,
        versions: Versions,
    ) -> None:
        self._do, self._say, self._standing = do, say, standing
        self._orders, self._copies, self._versions = orders, copies, versions

    @property
    def _synchronous(self) -> bool:
        return self._orders.settings.synchronous

    def answer_pull(self, now: float, pull: Pull) -> None:
        fragment = pull.fragment
        if not self._standing().recovered:
            self._decline_pull(now, pull, "it has not recovered yet")
        elif (owed := self._versions.owed_version(fragment)) is not None:
            self._decline_pull(now, pull, f"version {owed}, which holds its last steps, is not adopted yet")
        elif self._is_at_hand(fragment):
            self._send_answer(now, pull)
        elif not pull.probe and self._nothing_comes(fragment):
            self._decline_pull(now, pull, "no steps since its last adoption")
        else:
            self._copies.waiting[fragment] = pull
            t = self._standing().t
            if self._orders.pending.get(pull.round) != t:  # else it is on its way off the device
                self._orders.order_copy(pull.round, t)

    def take_copy(self, now: float, copy: Copied) -> bool:
        """A copy was made. True: it is to be reported, since (synchronous) it is what the round waits for."""
        ordered = self._orders.pending.pop(copy.round, None) is not None
        if not self._is_useful(copy, ordered):
            if self._copies.read_at(copy.fragment) != copy.t:  # else it is the one at hand, ordered for two rounds
                self._do(Drop(copy.fragment, copy.t))
            return False
        if (pull := self._copies.keep_copy(copy)) is None:
            return self._synchronous
        self._send_answer(now, pull)
        return False

    def note_delivered(self, now: float, event: Uploaded) -> None:
        if (contribution := self._copies.take_sent(event.round, event.attempt, event.digest)) is not None:
            self._say(now, contribution)

    def note_undelivered(self, now: float, event: UploadFailed) -> None:
        waits = self._synchronous and self._standing().stepping
        pull = self._copies.note_failure(event.round, event.attempt, keep=waits)
        if pull is not None and self._versions.given.get(pull.fragment) == pull.round:
            del self._versions.given[pull.fragment]
        if pull is not None and event.no_copy and not waits:
            self.answer_pull(now, pull)  # by a new copy: after the last step nobody asks again
        elif pull is not None:
            self._decline_pull(now, pull, f"its answer did not arrive: {event.reason}")

    def order_waited_for(self, step: int) -> None:
        """A copy that did not do, for a pull that waits, is made again."""
        for pull in self._copies.waiting.values():
            if pull.round not in self._orders.pending:
                self._orders.order_copy(pull.round, step)

    def pass_boundary(self) -> None:
        """A step was reported: what the next boundary copies is ordered now."""
        self._orders.pass_boundary(self._standing().t)
        self._order_ahead()

    def plan_copies(self) -> None:
        """Orders for a learner that has just recovered or come back."""
        standing = self._standing()
        if standing.stepping and self._synchronous:
            self._orders.align_steps(standing.t)
        else:
            self._order_ahead()

    def move_on(self, gathering: int) -> None:
        """The syncer gathers a later round: aim at its fragment and the ones that follow."""
        if gathering > self._orders.gathering:
            self._orders.move_on(self._standing().t, gathering)
            self._order_ahead()

    def _order_ahead(self) -> None:
        """Asynchronous, and only while it steps: the next boundary's copies."""
        standing = self._standing()
        if standing.stepping and standing.recovered and not self._synchronous:
            self._orders.order_ahead(standing.t, [pull.round for pull in self._copies.waiting.values()])

    def pass_over_round(self, number: int) -> None:
        """Nothing comes of that round: nobody waits for it, and the copy made for it would only take up room."""
        self._orders.let_round_go(number)
        self._copies.drop_copy(number % len(self._versions.held), until=number)

    def _is_useful(self, copy: Copied, ordered: bool) -> bool:
        if copy.base < 0 or copy.base != self._versions.held[copy.fragment] or self._is_overtaken(copy.fragment):
            return False
        if not self._standing().stepping or copy.fragment in self._copies.waiting:
            return True
        return ordered and (self._synchronous or copy.steps > 0)

    def _is_at_hand(self, fragment: int) -> bool:
        """A copy that will do. After the last step it is the last chance: only a copy of all steps will."""
        standing = self._standing()
        if fragment not in self._copies or self._is_overtaken(fragment):
            return False
        return standing.stepping or self._copies.read_at(fragment) >= standing.t

    def _is_overtaken(self, fragment: int) -> bool:
        """Return whether a copy is of no use because another version is on its way into the model.

        After the last step a copy on the version before could no longer be sent, and no round asks again. With carry it
        could no longer be subtracted. The next copy, on the new version, holds the same steps.
        """
        return fragment in self._versions.adopting and (self._carries or not self._standing().stepping)

    @property
    def _carries(self) -> bool:
        return self._orders.settings.adopt == "carry" and not self._synchronous

    def _nothing_comes(self, fragment: int) -> bool:
        """Whether the next boundary would bring no copy with steps in it."""
        standing = self._standing()
        if standing.stepping:
            return self._synchronous
        return not standing.steps or standing.steps[fragment] == 0

    def _send_answer(self, now: float, pull: Pull) -> None:
        if self._synchronous and self._copies.is_on_its_way(pull):
            return  # the same copy twice: the second would be turned away, and the first be taken for it
        if self._copies.is_abandoned(pull):
            self._decline_pull(now, pull, "an answer of before the connection was lost is still on its way")
        elif not self._copies.send_copy(pull):
            self._decline_pull(now, pull, "no steps since its last adoption")
        elif self._carries and not pull.probe:
            self._versions.given[pull.fragment] = pull.round

    def _decline_pull(self, now: float, pull: Pull, reason: str) -> None:
        self._say(now, Decline(round=pull.round, attempt=pull.attempt, reason=reason))
