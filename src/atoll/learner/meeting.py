"""What the ranks of a learner agree on between two steps: how many frames all of them have. Neither torch nor a process
group is known here (ranks.py has both): the fault simulator runs the rules as they are.

Rules kept here:
- frames are carried out in the order in which they came, each once, and only those that all ranks have. What is rank
  0's alone, and what ends the learner, is not waited with: the other ranks may be gone;
- what rank 0 says of the run counts for all;
- a step's tokens are known after it: where all was forgotten meanwhile, they are of a life that is over;
- once some rank was asked to leave, all leave, at the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from atoll.mailbox.channel import DialFailed, ForgetOrder, JoinProgress, RunProgress, StopOrder, ToTraining

RANKS_PAUSE_S = 0.05
"""Between two exchanges of ranks that do not train."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a rank says after a step."""

    frames: int = 0
    """Received from its courier so far, of those that all ranks carry out at the same step."""
    tokens: int = 0
    """Of its own step, where no other rank trained on the same data."""
    leaving: bool = False
    vote: bool = False
    committed: int = 0
    progress: float = 0.0
    global_step: int = 0
    """Of these, rank 0's count."""


@dataclass(frozen=True, slots=True)
class AgreedFacts:
    frames: int
    """That all ranks have."""
    tokens: int
    """Of all."""
    leaving: bool
    """Some rank was asked to leave."""
    first: RankFacts
    """What rank 0 said."""

    @property
    def progress(self) -> RunProgress | None:
        """How far the run is; None: rank 0 has not heard of it."""
        first = self.first
        return RunProgress(first.committed, first.progress, first.global_step) if first.committed >= 0 else None


def agree_on(told: Sequence[RankFacts]) -> AgreedFacts:
    """In order of rank."""
    return AgreedFacts(
        frames=min(one.frames for one in told),
        tokens=sum(one.tokens for one in told),
        leaving=any(one.leaving for one in told),
        first=told[0],
    )


@dataclass(slots=True)
class Meeting:
    """What a rank has received, and how much of it all ranks have."""

    received: int = 0
    agreed: int = 0
    carried_out: int = 0
    waiting: deque[ToTraining] = field(default_factory=deque)
    heard: RunProgress | None = None
    """The newest that the courier said of the run."""
    leaving: bool = False
    """All ranks know that some rank was asked to leave."""
    _forgot: bool = False
    """It was told to forget since the last exchange was begun."""

    def add(self, frame: ToTraining) -> None:
        self.waiting.append(frame)
        self.received += 1

    def take_agreed(self) -> list[ToTraining]:
        count = self.agreed - self.carried_out
        self.carried_out = self.agreed
        frames = [self.waiting.popleft() for _ in range(count)]
        self._forgot |= any(isinstance(frame, ForgetOrder) for frame in frames)
        return frames

    def take_facts(self, agreed: AgreedFacts) -> bool:
        """What an exchange said. Whether its tokens are of the life that goes on."""
        self.agreed = agreed.frames
        self.leaving |= agreed.leaving
        return not self._forgot

    def make_facts(self, tokens: int, *, leaving: bool = False, vote: bool = False) -> RankFacts:
        """An exchange begins."""
        self._forgot = False
        heard = self.heard or RunProgress(committed=-1)
        return RankFacts(self.received, tokens, leaving, vote, heard.committed, heard.progress, heard.global_step)


class ExchangingGroup(Protocol):
    """What ranks.RankGroup does: one exchange at a time."""

    def begin_exchange(self, facts: RankFacts) -> None: ...

    def finish_exchange(self) -> AgreedFacts | None: ...


class RankExchange:
    """Between two steps: what the courier sent, once all ranks have it. Without a group this process is the whole
    learner: it carries out what comes, and its own vote decides."""

    def __init__(
        self,
        group: ExchangingGroup | None,
        receive: Callable[[], list[ToTraining]],
        is_asked_to_leave: Callable[[], bool],
        carry_out_now: Callable[[ToTraining], None],
        on_agreed: Callable[[AgreedFacts, bool], None],
    ) -> None:
        """`receive`: what the courier has sent since; `carry_out_now`: takes the frames that do not wait for the other
        ranks; `on_agreed`: hears what every exchange said, and whether its tokens are of the life that goes on."""
        self._group, self._receive, self._is_asked_to_leave = group, receive, is_asked_to_leave
        self._carry_out_now, self._on_agreed = carry_out_now, on_agreed
        self._meeting = Meeting()

    @property
    def leaving(self) -> bool:
        """This learner was asked to leave, and every rank of it knows."""
        return self._is_asked_to_leave() if self._group is None else self._meeting.leaving

    def exchange_facts(self, tokens: int, *, wait: bool) -> None:
        """After a step. What the last exchange said holds from now on; with `wait`, what this one says."""
        if self._group is not None:
            self._begin(self._group, tokens)
            if wait:
                self.finish()

    def agree(self, vote: bool) -> bool:
        """What rank 0 says, on all ranks; and they all have the same frames to carry out. Not while training."""
        if self._group is None:
            return vote
        self._begin(self._group, vote=vote)
        agreed = self.finish()
        return agreed is not None and agreed.first.vote

    def finish(self) -> AgreedFacts | None:
        """What the exchange that was begun last says; None: none was."""
        agreed = self._group.finish_exchange() if self._group is not None else None
        if agreed is not None:
            self._on_agreed(agreed, self._meeting.take_facts(agreed))
        return agreed

    def take_frames(self) -> list[ToTraining]:
        """Those to be carried out now."""
        if self._group is None:
            return self._receive()
        self._collect_frames()
        return self._meeting.take_agreed()

    def pause_s(self, seconds: float) -> float:
        """Ranks wait for one another at every turn, so the turns are short."""
        return seconds if self._group is None else min(seconds, RANKS_PAUSE_S)

    def _begin(self, group: ExchangingGroup, tokens: int = 0, *, vote: bool = False) -> None:
        self._collect_frames()
        self.finish()
        group.begin_exchange(self._meeting.make_facts(tokens, leaving=self._is_asked_to_leave(), vote=vote))

    def _collect_frames(self) -> None:
        for frame in self._receive():
            if isinstance(frame, RunProgress):
                self._meeting.heard = frame
            elif isinstance(frame, DialFailed | JoinProgress) or (isinstance(frame, StopOrder) and frame.failed):
                self._carry_out_now(frame)
            else:
                self._meeting.add(frame)
