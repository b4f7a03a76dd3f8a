"""What ranks carry out, and what they agree on: two of them in one process, and one that is alone."""

from __future__ import annotations

import pytest

from atoll.learner.meeting import AgreedFacts, Meeting, RankExchange, RankFacts, agree_on
from atoll.mailbox.channel import DialFailed, ForgetOrder, RunProgress, StopOrder, ToTraining


def orders(*names: str) -> list[ToTraining]:
    return [StopOrder(name, final=False) for name in names]


def test_frames_are_carried_out_once_all_ranks_have_them() -> None:
    meeting, frames = Meeting(), orders("0", "1", "2")
    for frame in frames:
        meeting.add(frame)
    assert meeting.received == 3 and meeting.take_agreed() == []
    meeting.agreed = 2
    assert meeting.take_agreed() == frames[:2] and meeting.take_agreed() == []
    meeting.agreed = 3
    assert meeting.take_agreed() == frames[2:]


class Pair:
    """Two ranks that say what they have before either reads what was said."""

    def __init__(self) -> None:
        self.told: dict[int, RankFacts] = {}

    def agree(self) -> AgreedFacts:
        return agree_on([self.told[0], self.told[1]])


class Rank:
    def __init__(self, number: int, pair: Pair | None) -> None:
        self.number, self.pair = number, pair
        self.inbox: list[ToTraining] = []
        self.at_once: list[ToTraining] = []
        self.agreed: list[AgreedFacts] = []
        self.of_this_life: list[bool] = []
        self.asked = self._begun = False
        group = self if pair is not None else None
        self.exchange = RankExchange(group, self._receive, lambda: self.asked, self.at_once.append, self._hear)

    def _hear(self, agreed: AgreedFacts, of_this_life: bool) -> None:
        self.agreed.append(agreed)
        self.of_this_life.append(of_this_life)

    def _receive(self) -> list[ToTraining]:
        inbox, self.inbox = self.inbox, []
        return inbox

    def begin_exchange(self, facts: RankFacts) -> None:
        assert self.pair is not None
        self.pair.told[self.number], self._begun = facts, True

    def finish_exchange(self) -> AgreedFacts | None:
        begun, self._begun = self._begun, False
        return self.pair.agree() if begun and self.pair is not None else None


@pytest.fixture
def ranks() -> list[Rank]:
    pair = Pair()
    return [Rank(number, pair) for number in range(2)]


def step(ranks: list[Rank], tokens: tuple[int, int] = (0, 0)) -> None:
    """All begin, as real ranks do after a step; what it says holds once it is finished."""
    for rank, count in zip(ranks, tokens, strict=True):
        rank.exchange.exchange_facts(count, wait=False)
    for rank in ranks:
        rank.exchange.finish()


def test_a_frame_that_one_rank_lacks_waits_in_all(ranks: list[Rank]) -> None:
    first, second = orders("a", "b"), orders("a", "b")
    ranks[0].inbox, ranks[1].inbox = list(first), list(second[:1])
    step(ranks, tokens=(3, 4))
    assert [rank.exchange.take_frames() for rank in ranks] == [first[:1], second[:1]]
    assert [rank.agreed[-1].tokens for rank in ranks] == [7, 7]
    ranks[1].inbox = list(second[1:])
    assert ranks[1].exchange.take_frames() == [], "the other one does not know yet that it is here"
    step(ranks)
    assert [rank.exchange.take_frames() for rank in ranks] == [first[1:], second[1:]]


def test_tokens_of_a_step_before_all_was_forgotten_are_of_a_life_that_is_over(ranks: list[Rank]) -> None:
    """Seed 1258 of the ranks' worlds: they were counted in the next life, and a drained learner lost them."""
    for rank in ranks:
        rank.inbox = [ForgetOrder(1, reset=False)]
    step(ranks)
    for rank in ranks:
        rank.exchange.exchange_facts(5, wait=False)
    assert [len(rank.exchange.take_frames()) for rank in ranks] == [1, 1], "it forgets after the step of these tokens"
    for rank in ranks:
        rank.exchange.finish()
    step(ranks, tokens=(5, 5))
    assert [rank.of_this_life for rank in ranks] == [[True, False, True]] * 2


def test_what_ends_the_learner_waits_for_no_other_rank(ranks: list[Rank]) -> None:
    now: list[ToTraining] = [DialFailed("nobody answers"), StopOrder("it broke", final=True, failed=True)]
    ranks[1].inbox = [*orders("later"), *now]
    assert ranks[1].exchange.take_frames() == [] and ranks[1].at_once == now


def test_what_rank_0_has_heard_of_the_run_counts_for_all(ranks: list[Rank]) -> None:
    step(ranks)
    assert [rank.agreed[-1].progress for rank in ranks] == [None, None]
    ranks[0].inbox, ranks[1].inbox = [RunProgress(3, 0.5, 30)], [RunProgress(9, 0.9, 90)]
    step(ranks)
    assert [rank.agreed[-1].progress for rank in ranks] == [RunProgress(3, 0.5, 30)] * 2


def test_all_leave_at_the_same_step_once_one_was_asked(ranks: list[Rank]) -> None:
    ranks[1].asked = True
    assert not ranks[1].exchange.leaving, "rank 0 does not know yet"
    step(ranks)
    assert [rank.exchange.leaving for rank in ranks] == [True, True]


def test_a_learner_of_one_process_agrees_with_itself() -> None:
    alone, frames = Rank(0, None), [*orders("a"), RunProgress(1, 0.1, 2)]
    alone.inbox = list(frames)
    assert alone.exchange.take_frames() == frames
    assert alone.exchange.agree(True) and not alone.exchange.agree(False)
    assert alone.exchange.pause_s(0.5) == 0.5
    alone.exchange.exchange_facts(5, wait=True)
    assert alone.agreed == [] and not alone.exchange.leaving
    alone.asked = True
    assert alone.exchange.leaving
