"""A shard acts on no order of another term, number or process: by hand, and whatever comes in whatever order.

The rules that its effects are held against are those of the fault simulator (simulate/part_checks.py).
"""

from __future__ import annotations

from collections import deque
from random import Random

import pytest

from atoll.protocol import shard as sh
from atoll.protocol.shard_messages import Decide, FromLead, NormsOfAll, RoundDecided, Stage, Staged, TakeUp, Unstage
from atoll.simulate.part_checks import ShardOrders

TERM = 7


def stage(order: int, fragment: int = 0, term: int = TERM) -> Stage:
    return Stage(order=order, round=order, attempt=1, fragment=fragment, given=(), term=term)


def unstage(order: int, fragment: int = 0, term: int = TERM) -> Unstage:
    return Unstage(order=order, fragment=fragment, term=term)


def decide(head: str, fragment: int = 0, term: int = TERM) -> Decide:
    return Decide(decision=RoundDecided(round=0, fragment=fragment, version=1, head=head), term=term)


def serving() -> sh.Shard:
    """A shard that follows a lead of this term."""
    shard = sh.Shard(2, 3, "process-1", run="run")
    shard.handle(sh.LeadSaid(TakeUp(begun=b"", term=TERM)))
    shard.handle(sh.TookUp("run"))
    return shard


def hear(shard: sh.Shard, message: FromLead) -> list[sh.ShardEffect]:
    return shard.handle(sh.LeadSaid(message))


def write(shard: sh.Shard, order: int, head: str) -> None:
    hear(shard, stage(order))
    shard.handle(sh.PartStepped(order, "digest", b"", 0.1))
    shard.handle(sh.Written(order, head))


@pytest.mark.parametrize("late", [1, 2, TERM])
def test_a_lead_of_any_earlier_term_is_left(late: int) -> None:
    shard = serving()
    write(shard, 1, "head")
    for message in (stage(2, 1, TERM - late), unstage(1, 0, TERM - late), decide("head", 0, TERM - late)):
        effects = hear(shard, message)
        assert [type(one) for one in effects] == [sh.LeaveLead], message
    assert shard.term == TERM
    assert hear(shard, decide("head")) == [sh.Apply(decide("head").decision, staged=True)], "it still lies there"


@pytest.mark.parametrize("other", [0, 2])
def test_only_the_order_that_is_staged_is_taken_back(other: int) -> None:
    shard = serving()
    write(shard, 1, "head")
    assert hear(shard, unstage(other)) == []
    assert hear(shard, unstage(1, 1)) == [], "another fragment"
    assert hear(shard, unstage(1)) == [sh.Undo(0)]
    assert hear(shard, unstage(1)) == [], "once"


@pytest.mark.parametrize("other", [0, 2])
def test_an_order_that_is_carried_out_is_not_abandoned_for_another(other: int) -> None:
    shard = serving()
    hear(shard, stage(1))
    assert hear(shard, unstage(other)) == []
    assert hear(shard, NormsOfAll(order=other, turn=0, fragment=0, squares=(), term=TERM)) == []
    assert hear(shard, unstage(1)) == [sh.Abandon(1)]


def test_what_is_decided_under_another_head_is_read_from_the_chain() -> None:
    shard = serving()
    write(shard, 1, "head")
    assert hear(shard, decide("another")) == [sh.Apply(decide("another").decision, staged=False)]


def test_what_one_lead_staged_is_not_taken_for_the_same_number_of_the_next() -> None:
    """Every lead counts its orders from one."""
    shard = serving()
    write(shard, 1, "head")
    shard.handle(sh.LeadLost())
    hear(shard, TakeUp(begun=b"", term=TERM + 1))
    shard.handle(sh.TookUp("run"))
    assert hear(shard, unstage(1, term=TERM + 1)) == []
    assert hear(shard, decide("head", term=TERM + 1)) == [sh.Apply(decide("head").decision, staged=False)]


HAPPENINGS = ("stage", "unstage", "stale", "decide", "norms", "work", "work", "work", "lost", "take up")
Happening = tuple[str, int, int]


def test_whatever_a_shard_hears_it_acts_on_its_own_orders() -> None:
    """Some of these sequences show each of the mistakes that the tests above name."""
    for seed in range(1000):
        dice = Random(seed)
        count = dice.randint(1, 30)
        Shard().play([(dice.choice(HAPPENINGS), dice.randint(0, 3), dice.randint(0, 1)) for _ in range(count)])


class Shard:
    """A shard between leads that count orders anew, and threads that answer late."""

    def __init__(self) -> None:
        self.machine, self.rules = sh.Shard(2, 3, "process-1", run="run"), ShardOrders()
        self.term, self.order = TERM, 0
        self.open: dict[int, int] = {}
        """By fragment, the order that this lead has neither taken back nor decided: until then it stages no other."""
        self.heads: list[str] = ["of another process"]
        self.head_of: dict[int, str] = {}
        """By order of this lead, as the shard told it."""
        self.writes = 0
        self.is_linked = True
        self.work: deque[sh.ShardEvent] = deque()
        self.tell(sh.LeadSaid(TakeUp(begun=b"", term=TERM)))

    def tell(self, event: sh.ShardEvent) -> None:
        effects = self.machine.handle(event)
        assert (wrong := self.rules.find_wrong(event, effects)) is None, wrong
        for effect in effects:
            match effect:
                case sh.RestoreParameters():
                    self.work.append(sh.TookUp("run"))
                case sh.Step(one):
                    self.work.append(sh.PartStepped(one.order, "digest", b"", 0.1))
                case sh.Write(one):
                    self.writes += 1
                    self.work.append(sh.Written(one.order, f"head {self.writes}"))
                case sh.TellLead(Staged(order=order, head=head)):
                    self.heads.append(head)
                    self.head_of[order] = head
                case _:
                    pass

    def play(self, happenings: list[Happening]) -> None:
        """What happens, how long ago the order that it names was given, and of which fragment."""
        for what, number, fragment in happenings:
            order = max(0, self.order - number)
            if not self.is_linked and what not in ("work", "take up"):
                continue
            match what:
                case "stage" if fragment not in self.open:
                    self.order += 1
                    self.open[fragment] = self.order
                    self.tell(sh.LeadSaid(stage(self.order, fragment, self.term)))
                case "unstage":
                    if self.open.get(fragment) == order:
                        del self.open[fragment]
                    self.tell(sh.LeadSaid(unstage(order, fragment, self.term)))
                case "stale":
                    self.tell(sh.LeadSaid(unstage(order, fragment, self.term - 1 - number)))
                case "decide":
                    head = self.heads[-1 - number % len(self.heads)]
                    if self.head_of.get(self.open.get(fragment, 0)) == head:
                        del self.open[fragment]
                    self.tell(sh.LeadSaid(decide(head, fragment, self.term)))
                case "norms":
                    norms = NormsOfAll(order=order, turn=0, fragment=fragment, squares=(), term=self.term)
                    self.tell(sh.LeadSaid(norms))
                case "work" if self.work:
                    self.tell(self.work.popleft())
                case "lost":
                    self.is_linked = False
                    self.tell(sh.LeadLost())
                case "take up":
                    self.term, self.order = self.term + number % 2, 0
                    self.open.clear()
                    self.head_of.clear()
                    self.is_linked = True
                    self.tell(sh.LeadSaid(TakeUp(begun=b"", term=self.term)))
                case _:
                    pass
