"""Every token has one fate: by hand, and against learners whose tokens are followed one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import le
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol.ledger import Fate, Ledger, LedgerState, Totals
from atoll.protocol.records import GoneRecord, JoinedRecord, MergedRecord, Share, Undone
from atoll.protocol.statistics import after_adoption


def round_of(fragment: int, version: int, *shares: Share) -> MergedRecord:
    return MergedRecord(0, fragment, version, 1, "", shares, "")


def share(tokens: int, total: int, base: int = 0, learner: str = "a", incarnation: int = 1) -> Share:
    return Share(learner, incarnation, 1, 1, tokens, 1.0, base, total=total)


def gone(fate: Fate, learner: str = "a", incarnation: int = 1) -> GoneRecord:
    return GoneRecord(learner, incarnation, 0, fate.total, fate.dropped, fate.lost, missed=fate.missed)


def a_ledger(fragments: int = 2, origin: int | None = 0) -> Ledger:
    """One learner, which has adopted version 0 and then trained on 100 tokens."""
    ledger = Ledger(fragments)
    ledger.joined("a", 1, origin)
    none = (0,) * fragments
    assert ledger.reported("a", 1, 0, none, none, none) is None
    assert ledger.reported("a", 1, 100, (100,) * fragments, none, none) is None
    return ledger


def fates(ledger: Ledger) -> dict[str, tuple[int, ...]]:
    """Those that are not zero; they balance."""
    totals = ledger.totals()
    assert not any(totals.balance())
    return {name: counts for name, counts in msgspec.structs.asdict(totals).items() if any(counts)}


# ---- a round, by hand -----------------------------------------------------------------------------------------------


def test_a_token_is_in_flight_then_merged_and_what_came_after_the_copy_is_dropped() -> None:
    ledger = a_ledger()
    assert fates(ledger) == {"computed": (100, 100), "in_flight": (100, 100)}
    ledger.merged(round_of(0, 1, share(80, total=80)))
    assert fates(ledger) == {"computed": (100, 100), "merged": (80, 0), "in_flight": (20, 100)}
    assert ledger.reported("a", 1, 110, (110, 110), (0, 0), (0, 0)) is None
    assert fates(ledger) == {"computed": (110, 110), "merged": (80, 0), "in_flight": (30, 110)}
    assert ledger.reported("a", 1, 120, (0, 120), (40, 0), (1, 0)) is None
    assert fates(ledger) == {"computed": (120, 120), "merged": (80, 0), "dropped": (40, 0), "in_flight": (0, 120)}


def test_carried_tokens_stay_in_flight() -> None:
    ledger = a_ledger()
    ledger.merged(round_of(0, 1, share(80, total=80)))
    assert ledger.reported("a", 1, 120, (40, 120), (0, 0), (1, 0)) is None
    assert fates(ledger) == {"computed": (120, 120), "merged": (80, 0), "in_flight": (40, 120)}


def test_a_report_made_before_the_commit_may_come_after_it() -> None:
    ledger = a_ledger()
    ledger.merged(round_of(0, 1, share(100, total=100)))
    assert ledger.reported("a", 1, 105, (105, 105), (0, 0), (0, 0)) is None
    assert fates(ledger) == {"computed": (105, 105), "merged": (100, 0), "in_flight": (5, 105)}


def test_a_report_that_is_newer_than_the_contribution_stays_true() -> None:
    """Read at 150 tokens; then another version was adopted over all 170. What is merged later was not dropped."""
    ledger = a_ledger(1)
    assert ledger.reported("a", 1, 170, (0,), (170,), (1,)) is None
    ledger.merged(round_of(0, 2, share(150, total=150)))
    assert fates(ledger) == {"computed": (170,), "merged": (150,), "dropped": (20,)}
    assert ledger.closing("a", 1).lost == (0,)


def test_a_contribution_that_is_newer_than_every_report_tells_as_much_as_one() -> None:
    """It was read at 150 tokens, 90 of them since an adoption that no report told of: 60 were dropped there."""
    ledger = a_ledger()
    ledger.merged(round_of(0, 2, share(90, total=150, base=1)))
    assert fates(ledger) == {"computed": (150, 150), "merged": (90, 0), "dropped": (60, 0), "in_flight": (0, 150)}
    ledger.merged(round_of(1, 1, share(140, total=140)))
    assert fates(ledger) == {"computed": (150, 150), "merged": (90, 140), "dropped": (60, 0), "in_flight": (0, 10)}


def test_a_report_that_is_older_than_a_merged_contribution_is_not_judged() -> None:
    ledger = a_ledger()
    ledger.merged(round_of(0, 2, share(90, total=150, base=1)))
    before = ledger.state()
    assert ledger.reported("a", 1, 140, (80, 140), (60, 0), (1, 0)) is None
    assert ledger.reported("a", 1, 150, (150, 150), (0, 0), (0, 0)) is None, "before the adoption, at the same total"
    assert ledger.state() == before
    assert ledger.reported("a", 1, 150, (90, 150), (60, 0), (1, 0)) is None
    assert ledger.reported("a", 1, 151, (91, 151), (61, 0), (1, 0)) is not None


def test_a_second_contribution_needs_a_base_that_contains_the_first() -> None:
    ledger = a_ledger()
    ledger.merged(round_of(0, 5, share(80, total=80)))
    with pytest.raises(AssertionError, match="contributes again only on a base that contains its last"):
        ledger.merged(round_of(0, 6, share(20, total=100, base=4)))
    ledger.merged(round_of(0, 6, share(20, total=100, base=5)))
    assert fates(ledger) == {"computed": (100, 100), "merged": (100, 0), "in_flight": (0, 100)}


def test_one_that_adopted_another_version_while_its_contribution_was_under_way_balances_all_the_same() -> None:
    """It counted its 80 as dropped at version 4; version 5 contains them, and adopting that takes them off again."""
    ledger = a_ledger()
    assert ledger.reported("a", 1, 110, (10, 110), (100, 0), (4, 0)) is None
    ledger.merged(round_of(0, 5, share(80, total=80)))
    assert fates(ledger)["merged"] == (80, 0)
    assert ledger.reported("a", 1, 115, (15, 115), (100, 0), (4, 0)) is None
    assert min(ledger.totals().in_flight) >= 0 and fates(ledger)["merged"] == (80, 0)
    assert ledger.reported("a", 1, 120, (0, 120), (40, 0), (5, 0)) is None
    assert fates(ledger) == {"computed": (120, 120), "merged": (80, 0), "dropped": (40, 0), "in_flight": (0, 120)}


# ---- what does not balance ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "tokens", "dropped", "versions", "text"),
    [
        (110, (110, 109), (0, 0), (0, 0), "fragment 1: 110 tokens computed, but 0 merged + 0 dropped + 109 since"),
        (120, (0, 120), (41, 0), (1, 0), "fragment 0: 120 tokens computed, but 80 merged + 41 dropped + 0 since"),
        (120, (0, 120), (120, 0), (1, 0), "its last adoption make 200"),
        (120, (0, 120), (40, 0), (0, 0), "fragment 0: 120 tokens computed, but 0 merged + 40 dropped + 0 since"),
        (130, (110, 110), (0, 0), (0, 0), "fragment 0: 130 tokens computed"),
    ],
)
def test_a_report_that_does_not_balance_is_told_and_changes_nothing(
    total: int, tokens: tuple[int, ...], dropped: tuple[int, ...], versions: tuple[int, ...], text: str
) -> None:
    ledger = a_ledger()
    ledger.merged(round_of(0, 1, share(80, total=80)))
    before = ledger.state()
    wrong = ledger.reported("a", 1, total, tokens, dropped, versions)
    assert wrong is not None and wrong.startswith("a (incarnation 1), fragment") and text in wrong
    assert "\n" not in wrong and ledger.state() == before
    assert ledger.reported("a", 1, 120, (0, 120), (40, 0), (1, 0)) is None, "the next one may be right again"


@pytest.mark.parametrize(
    ("origin", "tokens"),
    [(None, (100, 90)), (0, (100, 90)), (None, (101, 101)), (20, (90, 90))],
    ids=["fragments differ", "fragments differ, fresh", "more than computed", "more than its own"],
)
def test_a_first_report_that_cannot_be_is_told(origin: int | None, tokens: tuple[int, int]) -> None:
    ledger = Ledger(2)
    ledger.joined("a", 1, origin)
    assert ledger.reported("a", 1, 100, tokens, (0, 0), (0, 0)) is not None
    assert fates(ledger) == {}


def test_a_contribution_with_more_tokens_than_it_can_hold_is_told_at_its_adoption() -> None:
    ledger = a_ledger()
    ledger.merged(round_of(0, 1, share(85, total=80)))
    wrong = ledger.reported("a", 1, 120, (0, 120), (40, 0), (1, 0))
    assert wrong is not None and "85 merged + 40 dropped + 0 since its last adoption make 125" in wrong


# ---- the end of an incarnation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", [0, 100])
def test_what_a_contribution_can_hold_is_known_also_where_no_report_ever_balanced(origin: int) -> None:
    ledger = Ledger(2)
    ledger.joined("a", 1, origin)
    assert ledger.reported("a", 1, origin + 50, (0, 7), (0, 0), (0, 0)) is not None
    assert ledger.beyond("a", 1, 0, 50, origin + 50) is None
    assert ledger.beyond("a", 1, 0, 51, origin + 50) == "it names 51 tokens, 50 were left to give"
    ledger.merged(round_of(0, 1, share(50, origin + 50)))
    assert ledger.beyond("a", 1, 0, 1, origin + 50) == "it names 1 tokens, 0 were left to give"


def test_what_was_in_flight_is_lost_with_its_learner() -> None:
    ledger = a_ledger()
    ledger.merged(round_of(0, 1, share(80, total=80)))
    fate = ledger.closing("a", 1)
    assert fate == Fate(100, dropped=(0, 0), lost=(20, 100), missed=(0, 0))
    assert "lost" not in fates(ledger), "asking changes nothing"
    ledger.closed(gone(fate))
    assert fates(ledger) == {"computed": (100, 100), "merged": (80, 0), "lost": (20, 100)}


def test_a_learner_that_dies_before_it_reports_what_it_gave_is_accounted_for() -> None:
    ledger = a_ledger()
    ledger.merged(round_of(0, 2, share(90, total=150, base=1)))
    fate = ledger.closing("a", 1)
    assert fate == Fate(150, dropped=(60, 0), lost=(0, 150), missed=(0, 0))
    ledger.closed(gone(fate))
    assert fates(ledger) == {"computed": (150, 150), "merged": (90, 0), "dropped": (60, 0), "lost": (0, 150)}


def test_a_contribution_under_way_when_its_learner_goes_is_merged_and_not_lost() -> None:
    ledger = a_ledger()
    ledger.closed(gone(ledger.closing("a", 1, total=130)))
    assert fates(ledger) == {"computed": (130, 130), "lost": (130, 130)}
    ledger.merged(round_of(0, 1, share(125, total=130)))
    assert fates(ledger) == {"computed": (130, 130), "merged": (125, 0), "lost": (5, 130)}


def test_it_is_not_dropped_either_when_its_learner_had_adopted_since() -> None:
    ledger = a_ledger()
    assert ledger.reported("a", 1, 110, (10, 110), (100, 0), (4, 0)) is None
    ledger.closed(gone(ledger.closing("a", 1)))
    ledger.merged(round_of(0, 5, share(80, total=80)))
    assert fates(ledger) == {"computed": (110, 110), "merged": (80, 0), "dropped": (30, 0), "lost": (0, 110)}


def test_what_is_lost_is_never_negative() -> None:
    ledger = a_ledger()
    ledger.merged(round_of(0, 5, share(80, total=80)))
    assert ledger.reported("a", 1, 110, (10, 110), (100, 0), (4, 0)) is None
    fate = ledger.closing("a", 1)
    assert fate == Fate(110, dropped=(30, 0), lost=(0, 110), missed=(0, 0))


def test_reports_after_the_end_are_passed_over() -> None:
    ledger = a_ledger()
    ledger.closed(gone(ledger.closing("a", 1)))
    before = ledger.state()
    assert ledger.reported("a", 1, 500, (7, 8), (9, 0), (0, 0)) is None
    assert ledger.reported("nobody", 1, 500, (7, 8), (9, 0), (0, 0)) is None
    assert ledger.state() == before


# ---- why it is in no version, and whose it was ----------------------------------------------------------------------


def test_what_is_dropped_is_told_by_cause() -> None:
    """Fragment 0: 80 of 120 were in the version. Fragment 1: a version that holds none of its steps."""
    ledger = a_ledger()
    ledger.merged(round_of(0, 1, share(80, total=80)))
    assert ledger.reported("a", 1, 120, (0, 0), (40, 120), (1, 1), (0, 120)) is None
    assert ledger.totals().missed == (0, 120)
    assert ledger.totals().by_cause() == {"overlap": 20, "missed": 60, "crash": 0}
    assert ledger.reported("a", 1, 130, (10, 10), (40, 120), (1, 1), (0, 120)) is None
    ledger.closed(gone(ledger.closing("a", 1)))
    assert ledger.totals().by_cause() == {"overlap": 20, "missed": 60, "crash": 10}


def test_what_was_in_flight_at_the_cut_that_a_run_is_made_of_is_no_crash() -> None:
    ledger = a_ledger()
    ledger.merged(round_of(0, 1, share(80, total=80)))
    assert ledger.reported("a", 1, 120, (40, 120), (0, 0), (1, -1)) is None
    forked = Ledger.restore(ledger.state().begin_run())
    assert forked.totals().in_flight == (40, 120), "its learner may go on with it"
    forked.closed(gone(forked.closing("a", 1)))
    assert forked.totals().at_cut == forked.totals().lost == (40, 120)
    assert forked.totals().by_cause() == {"overlap": 0, "missed": 0, "crash": 0, "cut": 80}
    assert forked.totals().balance() == (0, 0)
    forked.merged(round_of(1, 1, share(120, total=120)))
    assert forked.totals().at_cut == (40, 0), "it was merged after all"

    went_on = Ledger.restore(ledger.state().begin_run())
    assert went_on.reported("a", 1, 130, (50, 130), (0, 0), (1, -1)) is None
    went_on.closed(gone(went_on.closing("a", 1)))
    assert went_on.totals().by_cause() == {"overlap": 0, "missed": 0, "crash": 90}, "a learner that goes on crashed"


def test_what_was_merged_after_all_was_not_missed() -> None:
    ledger = a_ledger()
    assert ledger.reported("a", 1, 110, (10, 110), (100, 0), (4, 0), (100, 0)) is None
    ledger.closed(gone(ledger.closing("a", 1)))
    ledger.merged(round_of(0, 5, share(80, total=80)))
    expected = {"computed": (110, 110), "merged": (80, 0), "dropped": (30, 0), "missed": (30, 0), "lost": (0, 110)}
    assert fates(ledger) == expected | {"lost": (0, 110)}


def test_every_learner_has_its_own_share_over_all_its_lives() -> None:
    ledger = a_ledger()
    ledger.joined("b", 1, 0)
    assert ledger.by_learner()["b"].merged_share() is None, "nothing of it has a fate"
    ledger.merged(round_of(0, 1, share(100, total=100)))
    ledger.merged(round_of(1, 1, share(100, total=100)))
    assert ledger.by_learner()["a"].merged_share() == 1.0
    ledger.closed(gone(ledger.closing("a", 1)))
    ledger.joined("a", 2, 0)
    assert ledger.reported("a", 2, 50, (50, 50), (0, 0), (1, 1)) is None
    assert ledger.by_learner()["a"].merged_share() == 1.0, "what is in flight counts for nothing yet"
    assert ledger.reported("a", 2, 60, (0, 0), (60, 60), (2, 2), (60, 60)) is None
    assert ledger.by_learner()["a"].merged_share() == 200 / 320
    again = Ledger.restore(ledger.state())
    assert again.by_learner() == ledger.by_learner()


def test_a_state_of_before_there_were_causes_can_be_read() -> None:
    old = msgspec.msgpack.encode(((((5, 5),) * 2 + ((0, 0),) * 3), ()))
    ledger = Ledger.restore(msgspec.msgpack.decode(old, type=LedgerState))
    assert ledger.totals().missed == (0, 0) and ledger.by_learner() == {}


# ---- where an account begins ----------------------------------------------------------------------------------------


def test_a_process_that_starts_over_goes_on_counting_and_the_steps_in_between_are_dropped() -> None:
    """It was closed at 100; when it heard of it, it was at 130 and set its counters to zero."""
    ledger = a_ledger()
    ledger.closed(gone(ledger.closing("a", 1)))
    ledger.joined("a", 2, origin=100)
    assert ledger.reported("a", 2, 140, (10, 0), (0, 10), (-1, 7)) is None
    expected = {"computed": (140, 140), "dropped": (30, 40), "lost": (100, 100), "in_flight": (10, 0)}
    assert fates(ledger) == expected | {"missed": (30, 30)}, "of what it had in between, no version held a step"
    assert ledger.closing("a", 2) == Fate(140, dropped=(30, 40), lost=(10, 0), missed=(30, 30))
    ledger.merged(round_of(1, 8, share(15, total=160, base=7, incarnation=2)))
    expected = {"computed": (160, 160), "merged": (0, 15), "dropped": (30, 45), "lost": (100, 100)}
    assert fates(ledger) == expected | {"in_flight": (30, 0), "missed": (30, 30)}


def test_tokens_that_belong_to_another_run_are_not_ours() -> None:
    ledger = Ledger(2)
    ledger.joined("a", 1)
    assert ledger.reported("a", 1, 1000, (0, 10), (10, 0), (3, 0)) is None
    assert fates(ledger) == {"computed": (10, 10), "dropped": (10, 0), "in_flight": (0, 10)}
    assert ledger.reported("a", 1, 1001, (0, 10), (10, 0), (3, 0)) is not None


def test_an_account_of_which_only_contributions_are_known_holds_these() -> None:
    ledger = Ledger(2)
    ledger.joined("a", 1)
    ledger.merged(round_of(0, 3, share(90, total=150, base=1)))
    assert fates(ledger) == {"computed": (90, 0), "merged": (90, 0)}
    ledger.closed(gone(ledger.closing("a", 1)))
    assert fates(ledger) == {"computed": (90, 0), "merged": (90, 0)}


def test_the_state_does_not_depend_on_who_came_first() -> None:
    one, other = Ledger(2), Ledger(2)
    for name in "abc":
        one.joined(name, 1)
    for name in "cab":
        other.joined(name, 1)
    assert one.state() == other.state()


def test_an_incarnation_joins_once() -> None:
    ledger = a_ledger()
    with pytest.raises(AssertionError, match="joins once"):
        ledger.joined("a", 1)


# ---- in tokens ------------------------------------------------------------------------------------------------------


def test_fragment_tokens_are_exact_and_tokens_add_up() -> None:
    totals = Totals((10, 10, 10), (9, 2, 3), (1, 3, 0), (0, 5, 0), (0, 0, 4), (), (0, 0, 2), (0, 0, 1))
    fates = {"computed": 30, "merged": 14, "dropped": 4, "lost": 5, "rolled_back": 2, "filtered": 1, "in_flight": 4}
    assert totals.fragment_tokens() == fates and not any(totals.balance())
    whole = {"computed": 10, "merged": 4, "dropped": 2, "lost": 1, "rolled_back": 1, "filtered": 0, "in_flight": 2}
    assert totals.whole() == whole


@given(st.integers(1, 7), st.data())
def test_tokens_add_up_whatever_the_parts(fragments: int, data: st.DataObject) -> None:
    counts = st.tuples(*[st.integers(0, 10**15)] * fragments)
    parts = [data.draw(counts) for _ in range(6)]
    merged, dropped, lost, undone, filtered, in_flight = parts
    computed = tuple(map(sum, zip(*parts, strict=True)))
    tokens = Totals(computed, merged, dropped, lost, in_flight, (), undone, filtered).whole()
    assert tokens.pop("computed") == sum(tokens.values())
    for told, part in zip(tokens.values(), parts, strict=True):
        assert abs(told - sum(part) / fragments) < 1


# ---- learners whose tokens are followed one by one ------------------------------------------------------------------


@dataclass
class Copy:
    """A contribution under way."""

    who: Trainer
    incarnation: int
    tokens: frozenset[int]
    total: int
    base: int


@dataclass
class Trainer:
    """An honest learner: a token is a number, and every fragment has a set of those not adopted."""

    name: str
    fragments: int
    process: int
    incarnation: int = 1
    total: int = 0
    open: list[set[int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    missed: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    own: list[tuple[int, int, frozenset[int]]] = field(default_factory=list)
    """Per fragment, the version its last contribution went into, the base it was made on, and its tokens."""
    mail: list[tuple[Any, ...]] = field(default_factory=list)
    """Reports on their way."""

    def __post_init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        self.open = [set() for _ in range(self.fragments)]
        self.dropped, self.held = [0] * self.fragments, [-1] * self.fragments
        self.missed = [0] * self.fragments
        self.own = [(-1, -1, frozenset())] * self.fragments
        self.mail.clear()

    def step(self, tokens: int) -> None:
        for fragment in self.open:
            fragment |= set(range(self.total, self.total + tokens))
        self.total += tokens

    def report(self) -> None:
        tokens = tuple(map(len, self.open))
        dropped, held, missed = tuple(self.dropped), tuple(self.held), tuple(self.missed)
        self.mail.append((self.name, self.incarnation, self.total, tokens, dropped, held, missed))

    def adopt(self, fragment: int, version: int, carry: bool) -> None:
        """The version says which of the own tokens it contains; of the others none or all stay."""
        merged, _, mine = self.own[fragment]
        inside = mine if self.held[fragment] < merged <= version else frozenset()
        stays = self.open[fragment] - inside if carry and self.held[fragment] >= 0 else set()
        counters = (self.dropped[fragment], self.missed[fragment])
        dropped, missed = after_adoption(len(self.open[fragment]), len(inside), len(stays), *counters)
        self.dropped[fragment], self.missed[fragment] = dropped, missed
        self.open[fragment], self.held[fragment] = set(stays), version


class Run:
    """Trainers, a syncer that commits rounds, and its ledger."""

    def __init__(self, fragments: int) -> None:
        self.fragments = fragments
        self.versions = [0] * fragments
        self.under_way: list[list[Copy]] = [[] for _ in range(fragments)]
        self.ledger = Ledger(fragments)
        self.records: list[Any] = []
        self.origins: dict[tuple[str, int], int] = {}
        self.merged: list[set[tuple[int, int]]] = [set() for _ in range(fragments)]
        """Per fragment, (process, token)."""
        self.known = 0
        """Tokens of closed accounts."""
        self.processes = 0
        self.trainers: dict[str, Trainer] = {}
        for name in "ab":
            self.join_fresh(name, incarnation=1)

    def join_fresh(self, name: str, incarnation: int) -> None:
        self.processes += 1
        self.join(Trainer(name, self.fragments, self.processes, incarnation), 0)

    def join(self, trainer: Trainer, origin: int) -> None:
        self.trainers[trainer.name] = trainer
        self.origins[trainer.name, trainer.incarnation] = origin
        self.records.append(JoinedRecord(trainer.name, trainer.incarnation, "", 0))
        self.ledger.joined(trainer.name, trainer.incarnation, origin)

    def happen(self, what: str, name: str, fragment: int, number: int) -> None:
        getattr(self, what)(self.trainers[name], fragment % self.fragments, number)
        totals = self.ledger.totals()
        assert not any(totals.balance())
        assert min(totals.lost + totals.dropped + totals.in_flight + totals.missed) >= 0
        assert all(map(le, totals.missed, totals.dropped))
        own = self.ledger.by_learner().values()
        assert not any(rest for one in own for rest in one.balance())
        assert tuple(map(sum, zip(*(one.merged for one in own), strict=True))) == totals.merged
        assert totals.merged == tuple(map(len, self.merged))

    def step(self, who: Trainer, fragment: int, number: int) -> None:
        who.step(number)

    def report(self, who: Trainer, fragment: int, number: int) -> None:
        who.report()

    def hear(self, who: Trainer, fragment: int, number: int) -> None:
        if who.mail:
            assert self.ledger.reported(*who.mail.pop(0)) is None

    def give(self, who: Trainer, fragment: int, number: int) -> None:
        asked = any(copy.who is who for copy in self.under_way[fragment])
        may = who.held[fragment] >= max(0, who.own[fragment][0])
        if not asked and may and who.open[fragment]:
            tokens = frozenset(who.open[fragment])
            copy = Copy(who, who.incarnation, tokens, who.total, who.held[fragment])
            self.under_way[fragment].append(copy)

    def commit(self, who: Trainer, fragment: int, number: int) -> None:
        copies, self.under_way[fragment] = self.under_way[fragment], []
        self.versions[fragment] += 1
        shares = [share(len(c.tokens), c.total, c.base, c.who.name, c.incarnation) for c in copies]
        for copy in copies:
            self.merged[fragment] |= {(copy.who.process, token) for token in copy.tokens}
            if copy.incarnation == copy.who.incarnation:
                copy.who.own[fragment] = (self.versions[fragment], copy.base, copy.tokens)
        self.records.append(round_of(fragment, self.versions[fragment], *shares))
        self.ledger.merged(self.records[-1])

    def adopt(self, who: Trainer, fragment: int, number: int) -> None:
        version = min(self.versions[fragment], who.held[fragment] + number)  # an older one may still be on its way
        if version > who.held[fragment]:
            who.adopt(fragment, version, carry=number > 2)

    def close(self, who: Trainer) -> Fate:
        given = [copy for copies in self.under_way for copy in copies]
        newest = max((c.total for c in given if c.who is who and c.incarnation == who.incarnation), default=0)
        fate = self.ledger.closing(who.name, who.incarnation, newest)
        self.records.append(gone(fate, who.name, who.incarnation))
        self.ledger.closed(self.records[-1])
        self.known += fate.total - self.origins[who.name, who.incarnation]
        return fate

    def kill(self, who: Trainer, fragment: int, number: int) -> None:
        self.close(who)
        self.join_fresh(who.name, who.incarnation + 1)

    def quarantine(self, who: Trainer, fragment: int, number: int) -> None:
        fate = self.close(who)
        who.step(number - 1)  # until it hears of it
        who.start_over()
        who.incarnation += 1
        self.join(who, fate.total)

    def restart(self, who: Trainer, fragment: int, number: int) -> None:
        """The syncer comes back with the records alone; what was under way is void."""
        living, self.ledger = self.ledger, replayed(self.fragments, self.records, self.origins)
        assert self.ledger.state().closed == living.state().closed
        assert [a.merged for a in self.ledger.state().open] == [a.merged for a in living.state().open]
        self.under_way = [[] for _ in range(self.fragments)]
        for trainer in self.trainers.values():
            trainer.mail.clear()
        if number > 2:
            self.everyone_reports()
            for trainer in self.trainers.values():
                trainer.report()
                assert living.reported(*trainer.mail.pop()) is None
            assert self.ledger.state() == living.state()

    def cut(self, who: Trainer, fragment: int, number: int) -> None:
        data = msgspec.msgpack.encode(self.ledger.state())
        self.ledger = Ledger.restore(msgspec.msgpack.decode(data, type=LedgerState))

    def everyone_reports(self) -> None:
        for trainer in self.trainers.values():
            trainer.mail.clear()
            trainer.report()
            assert self.ledger.reported(*trainer.mail.pop()) is None

    def check_every_token(self) -> None:
        self.everyone_reports()
        totals = self.ledger.totals()
        lives = {
            name: trainer.total - self.origins[name, trainer.incarnation] for name, trainer in self.trainers.items()
        }
        assert set(totals.computed) == {self.known + sum(lives.values())}
        for fragment in range(self.fragments):
            if not any(self.is_between(trainer, fragment) for trainer in self.trainers.values()):
                assert totals.in_flight[fragment] == sum(map(len, self.in_flight(fragment)))

    def in_flight(self, fragment: int) -> list[set[int]]:
        merged = self.merged[fragment]
        return [
            {token for token in trainer.open[fragment] if (trainer.process, token) not in merged}
            for trainer in self.trainers.values()
        ]

    def is_between(self, who: Trainer, fragment: int) -> bool:
        """It adopted another version since its copy was made: whether its tokens are in c or d, no report tells."""
        version, base, _ = who.own[fragment]
        return base < who.held[fragment] < version


def replayed(fragments: int, records: list[Any], origins: dict[tuple[str, int], int]) -> Ledger:
    ledger = Ledger(fragments)
    for record in records:
        match record:
            case JoinedRecord(learner, incarnation):
                ledger.joined(learner, incarnation, origins[learner, incarnation])
            case MergedRecord():
                ledger.merged(record)
            case GoneRecord():
                ledger.closed(record)
    return ledger


USUAL = ["step", "step", "report", "hear", "give", "commit", "adopt", "adopt"]
HAPPENINGS = st.lists(
    st.tuples(
        st.sampled_from([*USUAL, *USUAL, "kill", "quarantine", "restart", "cut"]),
        st.sampled_from("ab"),
        st.integers(0, 2),
        st.integers(1, 4),
    ),
    max_size=80,
)


@given(st.integers(1, 3), HAPPENINGS)
@settings(max_examples=500, deadline=None)
def test_every_token_has_one_fate_whatever_happens(fragments: int, happenings: list[tuple[str, str, int, int]]) -> None:
    run = Run(fragments)
    for happening in happenings:
        run.happen(*happening)
    run.check_every_token()


def test_the_state_does_not_grow_with_the_run() -> None:
    run = Run(3)
    sizes = []
    for _ in range(300):
        for what in ("adopt", "step", "give", "commit", "report", "hear"):
            for fragment in range(3):
                run.happen(what, "a", fragment, 4)
        run.happen("kill", "a", 0, 1)
        sizes.append(len(msgspec.msgpack.encode(run.ledger.state())))
    assert max(sizes) <= sizes[0] + 60, "a few larger numbers, not one entry more"


# ---- one account for each life --------------------------------------------------------------------------------------


def test_what_a_dead_life_gave_is_booked_to_no_other_life_of_its_name() -> None:
    """Its contribution was under way when it went; a new life of the same name is there when it is merged."""
    ledger = a_ledger()
    ledger.closed(gone(ledger.closing("a", 1)))
    ledger.joined("a", 2, 100)
    none = (0, 0)
    assert ledger.reported("a", 2, 130, (30, 30), none, none) is None
    live = ledger.open["a", 2]
    ledger.merged(round_of(0, 1, share(80, total=90)))
    assert ledger.open["a", 2] is live
    assert fates(ledger) == {"computed": (130, 130), "merged": (80, 0), "lost": (20, 100), "in_flight": (30, 30)}
    ledger.merged(round_of(1, 1, share(25, total=130, incarnation=2)))
    assert ledger.open["a", 2].merged == (0, 25)


def test_what_is_rolled_back_of_a_dead_life_is_in_no_account_of_the_live_one() -> None:
    ledger = a_ledger()
    ledger.merged(round_of(0, 1, share(80, total=90)))
    ledger.closed(gone(ledger.closing("a", 1)))
    ledger.joined("a", 2, 100)
    live = ledger.open["a", 2]
    ledger.roll_back([Undone("a", 1, (80, 0))])
    assert ledger.open["a", 2] is live
    assert ledger.totals().rolled_back == (80, 0) and not any(ledger.totals().balance())
