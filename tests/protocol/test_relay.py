"""The rules of relays, in virtual time: rounds that are gathered again, relays and syncers that die, and whether
everybody is counted once."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from atoll.protocol.messages import ContributionKey
from atoll.protocol.relay import (
    MOST_HELD,
    HeldBody,
    RelayHoldings,
    SumAsked,
    SumGathering,
    SumMember,
    SumReady,
    SumSettled,
    wrong_sum,
)

FRAGMENTS = 3


def digest_of(key: ContributionKey) -> str:
    return "-".join(map(str, key))


@dataclass
class SimulatedRelay:
    """A relay as the service runs it, with the names of bodies in place of bodies."""

    holdings: RelayHoldings = field(default_factory=RelayHoldings)
    feedback: dict[int, int] = field(default_factory=dict)
    """By fragment, the round whose sum it is of."""

    def answer(self, asked: SumAsked) -> SumReady | None:
        try:
            keys = self.holdings.find_members(asked)
        except ValueError:
            return None
        self.holdings.note_summed(asked)
        return self.holdings.describe_sum(asked, keys, "body")

    def settle(self, settled: SumSettled) -> None:
        _, fragment = self.holdings.settle_round(settled)
        if fragment is not None:
            self.feedback[fragment] = settled.round


class CountsTwice(RelayHoldings):
    """A planted bug: what came to an earlier attempt is kept, and summed too."""

    def expect_body(self, learner: str, round: int, attempt: int, fragment: int) -> list[ContributionKey]:
        self.expected[learner, round, attempt] = fragment
        return []

    def find_members(self, asked: SumAsked) -> list[ContributionKey]:
        wanted = {member.learner for member in asked.members}
        return [key for key in self.held if key[0] in wanted and key[1] == asked.round]


@dataclass
class World:
    """Rounds one after the other; learners behind one of two relays; anything may die in between."""

    seed: int
    holdings: type[RelayHoldings] = RelayHoldings
    refused: list[str] = field(default_factory=list)
    merged: dict[int, Counter[str]] = field(default_factory=dict)
    """By round, how often each learner's contribution is in it."""
    settled: dict[tuple[str, int], int] = field(default_factory=dict)
    """By relay and fragment, the last round that was committed with a sum of it."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.gathering = SumGathering()
        self.relays: dict[str, SimulatedRelay] = {}
        self.lives = 0
        for name in ("eu", "us"):
            self.start_relay(name)

    def start_relay(self, name: str) -> None:
        self.lives += 1
        for before in self.gathering.add_relay(f"{name}.{self.lives}", name):
            self.gathering.lose_relay(before)
            self.relays.pop(before, None)
        self.relays[f"{name}.{self.lives}"] = SimulatedRelay(self.holdings())
        self.settled = {key: round for key, round in self.settled.items() if key[0] != name}

    def run(self, rounds: int) -> None:
        for round in range(rounds):
            for attempt in (1, 2):
                if self.try_round(round, attempt):
                    break
            if self.chance.random() < 0.1:  # the syncer dies: nothing that was held is known to the next one
                self.gathering = SumGathering(last_ask=self.gathering.last_ask)
                for session, relay in self.relays.items():
                    relay.holdings.lose_syncer()
                    self.gathering.add_relay(session, session.partition(".")[0])
            self.check_feedback()

    def try_round(self, round: int, attempt: int) -> bool:
        """Whether it was committed."""
        fragment, members = round % FRAGMENTS, []
        for number in range(5):
            session = self.chance.choice(sorted(self.relays))
            key = (f"learner-{number}", round, attempt)
            relay = self.relays[session]
            relay.holdings.expect_body(*key, fragment)
            if self.chance.random() < 0.1 or not relay.holdings.hold_body(key, digest_of(key)):
                continue  # it never came
            self.gathering.hold_body(session, key, HeldBody(digest_of(key), 1.0))
            members.append((key, self.chance.choice((0.5, 1.0, 4.0))))
        if self.chance.random() < 0.2:
            self.start_relay(self.chance.choice(("eu", "us")))
        committed = bool(members) and self.collect(round, fragment, members)
        if not committed:
            self.gathering.end_round(round, merged=False)
            for key, _ in members:
                self.drop(key)
        return committed

    def collect(self, round: int, fragment: int, members: list[tuple[ContributionKey, float]]) -> bool:
        try:
            asks = self.gathering.ask_sums(round, fragment, "mean", members)
        except ValueError:
            return False
        counted: Counter[str] = Counter()
        for session, asked in asks:
            ready = self.relays[session].answer(asked)
            if ready is None or self.chance.random() < 0.1:
                return False
            if wrong := self.gathering.take_answer(session, ready):
                self.refused.append(wrong)
                return False
            counted.update(member.learner for member in ready.members)
        if self.chance.random() < 0.1:
            return False  # the merge itself fails
        self.merged[round] = counted
        for session, settled in self.gathering.end_round(round, merged=True):
            self.relays[session].settle(settled)
            self.settled[session.partition(".")[0], fragment] = round
        return True

    def drop(self, key: ContributionKey) -> None:
        if (
            (told := self.gathering.drop_body(key)) is not None
            and told[0] in self.relays
            and self.chance.random() < 0.8
        ):
            self.relays[told[0]].holdings.forget_body(key)

    def check_feedback(self) -> None:
        for session, relay in self.relays.items():
            for fragment, round in relay.feedback.items():
                assert round in self.merged, "feedback is of a sum that is in the model"
                assert self.settled[session.partition(".")[0], fragment] == round


@pytest.mark.parametrize("seed", range(40))
def test_everybody_is_counted_once_whatever_dies(seed: int) -> None:
    world = World(seed)
    world.run(60)
    assert len(world.merged) > 20 and not world.refused
    assert all(set(counted.values()) == {1} for counted in world.merged.values())


def test_a_relay_that_counts_a_learner_twice_is_found() -> None:
    world = World(3, CountsTwice)
    world.run(60)
    assert any("more than once" in reason for reason in world.refused)
    assert all(set(counted.values()) == {1} for counted in world.merged.values()), "and nothing of it is merged"


def test_a_second_attempt_takes_the_place_of_the_first() -> None:
    holdings = RelayHoldings()
    holdings.expect_body("a", 4, 1, 0)
    assert holdings.hold_body(("a", 4, 1), "one")
    assert holdings.expect_body("a", 4, 2, 0) == [("a", 4, 1)]
    assert not holdings.held and holdings.fragment_of(("a", 4, 2)) == 0
    with pytest.raises(ValueError, match="is not here"):
        holdings.find_members(ask(SumMember("a", 1, "one", 1.0)))


def test_an_ask_is_answered_with_the_very_bodies_it_names_or_not_at_all() -> None:
    holdings = RelayHoldings()
    for learner in ("a", "b"):
        holdings.expect_body(learner, 4, 1, 0)
        holdings.hold_body((learner, 4, 1), learner)
    one, other = SumMember("a", 1, "a", 1.0), SumMember("b", 1, "b", 1.0)
    assert holdings.find_members(ask(one, other)) == [("a", 4, 1), ("b", 4, 1)]
    for wrong in (ask(), ask(one, one), ask(SumMember("a", 1, "another", 1.0)), ask(SumMember("c", 1, "c", 1.0))):
        with pytest.raises(ValueError, match=r"names each member once|is not here"):
            holdings.find_members(wrong)


def ask(*members: SumMember, number: int = 1) -> SumAsked:
    return SumAsked(ask=number, round=4, fragment=0, rule="mean", members=members)


def test_answers_that_are_not_what_was_asked_for_are_refused() -> None:
    one, other = SumMember("a", 1, "a", 1.0), SumMember("b", 1, "b", 2.0)
    asked = ask(one, other)

    def answer(*members: SumMember, weight: float = 3.0) -> SumReady:
        return SumReady(ask=1, digest="body", members=members, weight=weight)

    assert wrong_sum(asked, answer(other, one)) == ""
    assert "a more than once" in wrong_sum(asked, answer(one, one, other))
    assert "other contributions" in wrong_sum(asked, answer(one))
    assert "weight 4" in wrong_sum(asked, answer(one, other, weight=4.0))


def test_feedback_changes_with_the_commit_that_names_the_sum_alone() -> None:
    relay = SimulatedRelay()
    relay.holdings.expect_body("a", 4, 1, 0)
    relay.holdings.hold_body(("a", 4, 1), "a")
    assert relay.answer(ask(SumMember("a", 1, "a", 1.0), number=7)) is not None
    relay.settle(SumSettled(round=4, ask=6))
    assert relay.feedback == {}, "another relay's sum"
    relay.holdings.expect_body("a", 5, 1, 1)
    relay.holdings.hold_body(("a", 5, 1), "a")
    asked = SumAsked(ask=8, round=5, fragment=1, rule="mean", members=(SumMember("a", 1, "a", 1.0),))
    assert relay.answer(asked) is not None
    relay.settle(SumSettled(round=5, ask=8))
    assert relay.feedback == {1: 5} and not relay.holdings.held and not relay.holdings.summed


def test_a_lost_relay_takes_what_it_held_with_it() -> None:
    gathering = SumGathering()
    gathering.add_relay("one", "eu")
    gathering.hold_body("one", ("a", 4, 1), HeldBody("a", 1.0))
    ((session, asked),) = gathering.ask_sums(4, 0, "mean", [(("a", 4, 1), 1.0)])
    assert session == "one" and gathering.lose_relay("one") == [4]
    assert gathering.find_ask("one", asked.ask) is None
    with pytest.raises(ValueError, match="is gone"):
        gathering.ask_sums(4, 0, "mean", [(("a", 4, 1), 1.0)])


def test_a_relay_holds_a_bounded_number_of_bodies() -> None:
    holdings = RelayHoldings()
    for round in range(3 * MOST_HELD):
        holdings.expect_body("a", round, 1, 0)
        holdings.hold_body(("a", round, 1), "a")
    assert len(holdings.held) == MOST_HELD and min(holdings.held)[1] == 2 * MOST_HELD
