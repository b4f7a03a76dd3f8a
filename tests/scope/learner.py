"""A learner in the small-scope search: the shipped machine and a training process that only counts.

Boundaries follow the order of the real training process: serve peers, adopt what has arrived, make the copies that are
due, tell. A process that is not stepping (before its first step, at a hold, after its last) serves at once. What takes
time elsewhere (bodies, fetches, saves, streams) is a wish in one of its lists until the search lets it happen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.protocol.effects import Note
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.messages import FromLearner, Range
from atoll.protocol.statistics import after_adoption

DATA = fx.Registered((("text", 1_000_000, 1.0),), 0, 1)
"""What every learner takes its batches from: one sample a step."""


@dataclass(slots=True)
class PretendLearner:
    machine: LearnerMachine
    fragments: int
    t: int = 0
    total: int = 0
    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    missed: list[int] = field(default_factory=list)
    adopted: list[int] = field(default_factory=list)
    leases: list[Range] = field(default_factory=list)
    taken: int = 0
    """Samples of its leases, in order, that it has trained on."""
    reads: dict[int, fx.Read] = field(default_factory=dict)
    holds: dict[int, int] = field(default_factory=dict)
    inbox: list[fx.Adopt] = field(default_factory=list)
    copies: dict[int, fx.Copied] = field(default_factory=dict)
    begun: bool = False
    """It makes steps."""
    waits: bool = False
    """For a peer's state."""
    held_back: bool = False
    """Others fetch version 0: it makes no first step yet."""
    done: bool = False
    stopped: bool = False
    over: bool = False
    capture: int = 0
    given: dict[int, list[str]] = field(default_factory=dict)
    """Copies of its state, and the tickets they are given for."""
    arrived: str = ""
    """The ticket of a peer's state that is to be taken."""
    said: list[FromLearner] = field(default_factory=list)
    """For the up channel."""
    fetches: list[int] = field(default_factory=list)
    uploads: list[tuple[int, int]] = field(default_factory=list)
    whole: bool = False
    """Its parameters are on their way as version 0."""
    saves: list[int] = field(default_factory=list)
    streams: list[str] = field(default_factory=list)
    """Tickets under which it fetches a peer's state."""
    hung_up: bool = False

    def __post_init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        zeros = [0] * self.fragments
        self.steps, self.tokens = list(zeros), list(zeros)
        self.dropped, self.missed = list(zeros), list(zeros)
        self.adopted = [-1] * self.fragments
        self.reads, self.holds, self.inbox = {}, {}, []
        self.leases, self.taken = [], 0

    # ---- the machine --------------------------------------------------------------------------------------------

    def hear(self, now: float, event: fx.LearnerEvent) -> None:
        for effect in self.machine.handle(now, event):
            self._do(effect)

    def tell(self, now: float, event: fx.LearnerEvent) -> None:
        """An event from outside; then whatever an idle process does about it."""
        self.hear(now, event)
        self.settle(now)

    def _do(self, effect: fx.LearnerEffect) -> None:
        match effect:
            case fx.Say(message):
                self.said.append(message)
            case fx.Read(round=number):
                self.reads[number] = effect
            case fx.CancelRead(number):
                self.reads.pop(number, None)
            case fx.Hold(number, step):
                self.holds[number] = step
            case fx.LetGo(number):
                self.holds.pop(number, None)
            case fx.Fetch(fragment, _):
                self.fetches.append(fragment)
            case fx.Adopt():
                self.inbox.append(effect)
            case fx.Own():
                self.adopted = [0] * self.fragments
            case fx.ForgetVersions():
                self._forget()
            case fx.UploadAll():
                self.whole = True
            case fx.Upload(number, attempt, fragment):
                assert fragment in self.copies, "an answer is made of a copy"
                self.uploads.append((number, attempt))
            case fx.Drop(fragment, t):
                if fragment in self.copies and self.copies[fragment].t == t:
                    del self.copies[fragment]
            case fx.Supply(ranges):
                newest = self.leases[-1].lease if self.leases else -1
                self.leases += [one for one in ranges if one.lease > newest]
            case fx.Save(cut):
                self.saves.append(cut)
            case fx.Stop(final=final):
                self.done, self.over = True, self.over or final
                self.holds.clear()
            case fx.HoldBack():
                self.held_back = True
            case fx.BeginTraining():
                self.held_back = False
            case fx.HangUp():
                self.hung_up = True
            case fx.Inform() | Note() | fx.PassOn():
                pass
            case _:
                self._help(effect)

    def _help(self, effect: fx.LearnerEffect) -> None:
        """A peer's state: given, or taken."""
        match effect:
            case fx.Capture(number):
                self.capture = number
            case fx.Give(number, ticket):
                self.given[number].append(ticket)
            case fx.TakeBack(ticket):
                self.given = {n: [one for one in given if one != ticket] for n, given in self.given.items()}
            case fx.Dispose(number):
                self.given.pop(number, None)
            case fx.Await():
                self.waits = True
            case fx.Begin():
                self.waits = False
            case fx.FetchState(ticket):
                self.streams = [ticket]
            case fx.LeaveState():
                self.streams, self.arrived = [], ""
            case fx.TakeState(ticket):
                self.arrived = ticket

    def cut(self, now: float, reason: str) -> None:
        """The connection is gone, and every body with it."""
        failed, self.fetches, self.uploads, self.whole = self.fetches, [], [], False
        self.said, self.hung_up = [], False
        self.hear(now, fx.Disconnected(reason))
        for fragment in failed:
            self.hear(now, fx.FetchFailed(fragment, reason))
        self.said = []
        self.settle(now)

    # ---- training -----------------------------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """A synchronous learner waits for a round."""
        return any(step <= self.t for step in self.holds.values())

    @property
    def can_step(self) -> bool:
        return self.begun and not self.stopped and not self.held

    def step(self, now: float) -> None:
        self.t, self.total = self.t + 1, self.total + 1
        self.taken = min(self.taken + 1, sum(one.stop - one.start for one in self.leases))
        self.steps, self.tokens = [n + 1 for n in self.steps], [n + 1 for n in self.tokens]
        self._serve(now)
        self._adopt_arrived(now)
        self._make_copies(now)
        self.hear(now, self._stepped())
        self._adopt_arrived(now)
        self.settle(now)

    def settle(self, now: float) -> None:
        """Whatever a process does that is not in the middle of a step."""
        before = None
        while before != (before := self._standing()):
            if not self.begun or self.stopped or self.held:
                self._serve(now)
                self._adopt_arrived(now)
            if not self.begun or self.stopped:
                self._make_copies(now)
            if not self.begun and min(self.adopted) >= 0 and not self.waits and not self.held_back:
                self.begun = True
            if self.done and not self.stopped:
                self.stopped = True
                self.hear(now, self._stepped())

    def _standing(self) -> tuple[object, ...]:
        return (
            self.begun,
            self.held_back,
            self.stopped,
            len(self.inbox),
            len(self.reads),
            len(self.holds),
            self.capture,
            self.arrived,
        )

    def _stepped(self) -> fx.Stepped:
        return fx.Stepped(
            t=self.t,
            steps=tuple(self.steps),
            tokens=tuple(self.tokens),
            tokens_total=self.total,
            stopped=self.stopped,
            dropped=tuple(self.dropped),
            missed=tuple(self.missed),
            position=self.taken,
        )

    def _serve(self, now: float) -> None:
        if (number := self.capture) > 0:
            self.capture, self.given[number] = 0, []
            self.hear(now, fx.Captured(number, self.t, 100, "digest", self.machine.name))
        if (ticket := self.arrived) != "":
            self.arrived, self.streams = "", []
            self.hear(now, fx.Taken(ticket, self.t))

    def _make_copies(self, now: float) -> None:
        for number, read in sorted(self.reads.items()):
            if (self.t >= read.step or self.stopped) and self.reads.get(number) is read:
                del self.reads[number]
                f = read.fragment
                fact = fx.Copied(
                    number, f, self.t, self.steps[f], self.tokens[f], self.adopted[f], self.total, self.taken
                )
                self.copies[f] = fact
                self.hear(now, fact)

    def _adopt_arrived(self, now: float) -> None:
        for adopt in list(self.inbox):
            due = adopt.step <= self.t or self.stopped or self.held
            if due and adopt in self.inbox:
                self.inbox.remove(adopt)
                self._adopt(now, adopt)

    def _adopt(self, now: float, adopt: fx.Adopt) -> None:
        """By overwriting: the steps that the version does not contain are dropped."""
        f = adopt.fragment
        counters = (self.dropped[f], self.missed[f])
        self.dropped[f], self.missed[f] = after_adoption(self.tokens[f], adopt.held_tokens, 0, *counters)
        assert self.dropped[f] >= 0, "more was said to be merged than was there"
        self.adopted[f], self.steps[f], self.tokens[f] = adopt.version, 0, 0
        self.holds = {n: step for n, step in self.holds.items() if n % self.fragments != f or n > adopt.round}
        self.hear(now, fx.Adopted(f, adopt.version, self.t, 0, 0, self.dropped[f], self.missed[f]))
