"""Every sample of a pass is issued once, and again only when it came back; the records alone rebuild the books."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol.errors import ConfigError
from atoll.protocol.leases import DatasetSpec, Leases, LeasesState, wrong_sources
from atoll.protocol.records import GoneRecord, GrantedRecord, MergedRecord, Share

TEN = [DatasetSpec("ten", 10)]


def grant(leases: Leases, learner: str = "a", count: int = 4, incarnation: int = 1) -> GrantedRecord | None:
    if (lease := leases.next(learner, incarnation, count)) is not None:
        leases.granted(lease)
    return lease


def span(lease: GrantedRecord | None) -> tuple[int, int, int, int] | None:
    return None if lease is None else (lease.dataset, lease.epoch, lease.start, lease.stop)


def spans(leases: Leases, count: int, most: int = 1000, learner: str = "a") -> list[tuple[int, int, int, int]]:
    found = (span(grant(leases, learner, count)) for _ in range(most))
    return [one for one in found if one is not None]


def round_of(learner: str, position: int, incarnation: int = 1, fragment: int = 0) -> MergedRecord:
    share = Share(learner, incarnation, 1, 1, 1, 1.0, 0, position=position)
    return MergedRecord(0, fragment, 1, 1, "", (share,), "")


def replayed(leases: Leases, records: list[Any]) -> Leases:
    for record in records:
        match record:
            case GrantedRecord():
                leases.granted(record)
            case MergedRecord():
                leases.merged(record)
            case GoneRecord():
                leases.gone(record.learner, record.incarnation, record.again_from)
    return leases


# ---- issuing --------------------------------------------------------------------------------------------------------


def test_a_lease_ends_where_its_pass_ends() -> None:
    leases = Leases(TEN, epochs=2)
    assert spans(leases, 4) == [(0, e, start, stop) for e in (0, 1) for start, stop in [(0, 4), (4, 8), (8, 10)]]
    assert leases.used_up and leases.next("a", 1, 4) is None
    leases.gone("a", 1, again_from=17)
    assert not leases.used_up and spans(leases, 4, learner="b") == [(0, 1, 7, 10)]


def test_without_a_number_of_epochs_there_is_no_end() -> None:
    leases = Leases(TEN)
    assert spans(leases, 10, most=100)[-1] == (0, 99, 0, 10) and not leases.used_up


def test_asking_changes_nothing() -> None:
    leases = Leases(TEN)
    assert leases.next("a", 1, 4) == leases.next("a", 1, 4) and leases.state() == Leases(TEN).state()


def test_leases_are_numbered() -> None:
    leases = Leases(TEN)
    assert [lease.lease for _ in range(5) if (lease := grant(leases)) is not None] == [0, 1, 2, 3, 4]


def test_issued_samples_follow_the_weights() -> None:
    leases = Leases([DatasetSpec("web", 1000, 3.0), DatasetSpec("books", 50, 1.0)])
    for _ in range(400):
        grant(leases, count=5)
        assert abs(leases.issued(0) - 3 * leases.issued(1)) <= 15
    assert leases.issued(0) + leases.issued(1) == 2000
    assert leases.state().cursors[1].epoch == 10, "the small one has its own count of passes"


def test_a_dataset_that_is_used_up_leaves_the_field_to_the_others() -> None:
    leases = Leases([DatasetSpec("large", 20), DatasetSpec("small", 3, 5.0)], epochs=1)
    issued = spans(leases, 2)
    assert sum(stop - start for dataset, _, start, stop in issued if dataset == 1) == 3
    assert sum(stop - start for dataset, _, start, stop in issued if dataset == 0) == 20
    assert leases.used_up


def test_only_the_next_lease_can_be_granted() -> None:
    for wrong in ({"lease": 1}, {"start": 1}, {"epoch": 1}, {"stop": 11}, {"stop": 0}):
        leases = Leases(TEN)
        lease = leases.next("a", 1, 4)
        assert lease is not None
        with pytest.raises(AssertionError):
            leases.granted(msgspec.structs.replace(lease, **wrong))


# ---- what comes back ------------------------------------------------------------------------------------------------


def test_what_nobody_merged_comes_back_and_is_issued_first() -> None:
    leases = Leases(TEN, epochs=1)
    grant(leases, "a", 4), grant(leases, "a", 4)
    leases.merged(round_of("a", 3))
    leases.gone("a", 1, leases.merged_to("a", 1))
    assert spans(leases, 3, learner="b") == [(0, 0, 3, 6), (0, 0, 6, 8), (0, 0, 8, 10)]


def test_the_oldest_that_came_back_is_issued_first() -> None:
    leases = Leases([DatasetSpec("ten", 10), DatasetSpec("two", 2)], epochs=1)
    for learner in "abc":
        grant(leases, learner, 2)
    for learner in "cab":
        leases.gone(learner, 1)
    assert spans(leases, 9, learner="d")[:3] == [(0, 0, 2, 4), (0, 0, 0, 2), (1, 0, 0, 2)]


def test_the_highest_position_of_any_fragment_counts() -> None:
    leases = Leases(TEN)
    grant(leases, count=8)
    for fragment, position in enumerate((2, 5, 3)):
        leases.merged(round_of("a", position, fragment=fragment))
    assert leases.merged_to("a", 1) == 5
    leases.gone("a", 1, 5)
    assert spans(leases, 9, most=1, learner="b") == [(0, 0, 5, 8)]


def test_a_contribution_under_way_counts_as_merged_when_its_learner_goes() -> None:
    leases = Leases(TEN)
    grant(leases, count=8)
    leases.gone("a", 1, again_from=6)
    leases.merged(round_of("a", 6))
    assert spans(leases, 9, most=1, learner="b") == [(0, 0, 6, 8)]


def test_what_is_merged_never_comes_back_whatever_is_asked_for() -> None:
    leases = Leases(TEN)
    grant(leases, count=8)
    leases.merged(round_of("a", 5))
    leases.gone("a", 1, again_from=2)
    assert spans(leases, 9, most=1, learner="b") == [(0, 0, 5, 8)]


def test_incarnations_hold_their_leases_apart() -> None:
    leases = Leases(TEN)
    grant(leases, "a", 4, incarnation=1), grant(leases, "a", 4, incarnation=2)
    leases.merged(round_of("a", 2, incarnation=2))
    leases.gone("a", 1)
    assert not leases.holds("a", 1) and leases.holds("a", 2)
    assert spans(leases, 9, most=1, learner="b") == [(0, 0, 0, 4)]


def test_one_without_leases_comes_and_goes_unnoticed() -> None:
    leases = Leases(TEN)
    leases.merged(round_of("own data", -1))
    leases.gone("own data", 1)
    assert leases.state() == Leases(TEN).state() and leases.room("own data", 1) == 0


# ---- what a learner holds -------------------------------------------------------------------------------------------


def test_room_is_what_is_leased_and_not_taken() -> None:
    leases = Leases(TEN)
    grant(leases, count=4), grant(leases, count=4)
    assert leases.room("a", 1) == 8
    assert leases.taken("a", 1, 5) is None and leases.room("a", 1) == 3
    assert leases.taken("a", 1, 2) is None and leases.room("a", 1) == 3, "a late word changes nothing"


def test_nobody_can_take_more_than_was_leased() -> None:
    leases = Leases(TEN)
    grant(leases, count=4)
    assert leases.taken("a", 1, 5) == "a (incarnation 1) says it took 5 samples, 4 were leased to it"
    assert leases.room("a", 1) == 4
    assert leases.taken("b", 1, 1) is not None
    leases.merged(round_of("a", 400))
    assert leases.merged_to("a", 1) == 4


def test_a_learner_that_comes_back_is_told_its_unread_leases_again() -> None:
    leases = Leases(TEN)
    granted = [grant(leases, count=2) for _ in range(4)]
    leases.taken("a", 1, 3)
    assert list(leases.held("a", 1)) == granted[1:]
    again = Leases.restore(leases.state())
    assert list(again.held("a", 1)) == granted, "how far it read is not written down"
    leases.taken("a", 1, 4)
    assert list(leases.held("a", 1)) == granted[2:]
    assert leases.held("b", 1) == ()


# ---- the books ------------------------------------------------------------------------------------------------------

HAPPENINGS = st.lists(
    st.tuples(
        st.sampled_from(["grant", "grant", "take", "take", "merge", "gone", "restart"]),
        st.sampled_from("abc"),
        st.integers(1, 7),
    ),
    max_size=60,
)
SPECS = st.lists(
    st.builds(DatasetSpec, st.just("d"), st.integers(1, 12), st.sampled_from([0.5, 1.0, 3.0])), min_size=1, max_size=3
)

Place = tuple[int, int, int]


class Books:
    """The same by single positions, in plain lists."""

    def __init__(self, specs: list[DatasetSpec], epochs: int) -> None:
        self.specs, self.epochs = specs, epochs
        self.leases = Leases(specs, epochs)
        self.records: list[Any] = []
        self.lives = dict.fromkeys("abc", 1)
        self.held: dict[str, list[Place]] = {name: [] for name in "abc"}
        self.taken = dict.fromkeys("abc", 0)
        self.merged = dict.fromkeys("abc", 0)
        self.waiting: list[Place] = []
        self.finished: set[Place] = set()
        self.issued: set[Place] = set()

    def happen(self, what: str, who: str, number: int) -> None:
        getattr(self, what)(who, number)
        self.check()

    def grant(self, who: str, count: int) -> None:
        lease = grant(self.leases, who, count, self.lives[who])
        if lease is None:
            assert self.leases.used_up and not self.waiting
            return
        places = [(lease.dataset, lease.epoch, p) for p in range(lease.start, lease.stop)]
        assert 1 <= len(places) <= count and lease.stop <= self.specs[lease.dataset].samples
        again = self.waiting[: len(places)]
        assert places == again or (not self.waiting and not self.issued & set(places)), "what came back goes first"
        self.waiting = self.waiting[len(places) :]
        self.issued |= set(places)
        self.held[who] += places
        self.records.append(lease)

    def take(self, who: str, number: int) -> None:
        self.taken[who] = min(len(self.held[who]), self.taken[who] + number)
        assert self.leases.taken(who, self.lives[who], self.taken[who]) is None

    def merge(self, who: str, number: int) -> None:
        position = max(0, self.taken[who] - number + 1)
        self.merged[who] = max(self.merged[who], position)
        self.records.append(round_of(who, position, self.lives[who]))
        self.leases.merged(self.records[-1])

    def gone(self, who: str, number: int) -> None:
        """Sometimes with a contribution under way, which goes further than the merged ones."""
        assert self.leases.merged_to(who, self.lives[who]) == self.merged[who] or not self.held[who]
        again = min(self.taken[who], self.merged[who] + (number if number > 4 else 0))
        self.records.append(GoneRecord(who, self.lives[who], 0, 0, (), (), again_from=again))
        self.leases.gone(who, self.lives[who], again)
        self.finished |= set(self.held[who][:again])
        self.waiting += self.held[who][again:]
        self.lives[who] += 1
        self.held[who], self.taken[who], self.merged[who] = [], 0, 0

    def restart(self, who: str, number: int) -> None:
        """From all records, and from a cut as bytes: both are what the living one has."""
        assert replayed(Leases(self.specs, self.epochs), self.records).state() == self.leases.state()
        data = msgspec.msgpack.encode(self.leases.state())
        self.leases = Leases.restore(msgspec.msgpack.decode(data, type=LeasesState))
        for name, life in self.lives.items():
            assert self.leases.taken(name, life, self.taken[name]) is None

    def check(self) -> None:
        state = self.leases.state()
        assert [(p.dataset, p.epoch, at) for p in state.waiting for at in range(p.start, p.stop)] == self.waiting
        kept = {one.learner: one for one in state.holdings}
        for who, held in self.held.items():
            assert self.leases.room(who, self.lives[who]) == len(held) - self.taken[who]
            pieces = kept[who].since(self.merged[who]) if who in kept else []
            places = [(p.dataset, p.epoch, at) for p in pieces for at in range(p.start, p.stop)]
            assert places == held[self.merged[who] :]
        self.partition(state)

    def partition(self, state: LeasesState) -> None:
        """Every position of every pass begun is in exactly one place."""
        held = [place for places in self.held.values() for place in places]
        everywhere = [*self.waiting, *held, *self.finished]
        assert len(everywhere) == len(set(everywhere)) and set(everywhere) == self.issued
        for dataset, cursor in enumerate(state.cursors):
            whole, samples = cursor.epoch, self.specs[dataset].samples
            begun = {(dataset, epoch, at) for epoch in range(whole) for at in range(samples)}
            begun |= {(dataset, whole, at) for at in range(cursor.start)}
            assert begun == {place for place in self.issued if place[0] == dataset}
            assert not self.epochs or whole <= self.epochs


@given(SPECS, st.integers(0, 3), HAPPENINGS)
@settings(max_examples=300, deadline=None)
def test_every_position_is_in_exactly_one_place_and_the_records_tell_which(
    specs: list[DatasetSpec], epochs: int, happenings: list[tuple[str, str, int]]
) -> None:
    books = Books(specs, epochs)
    for happening in happenings:
        books.happen(*happening)
    books.restart("a", 1)


def test_the_state_does_not_grow_with_the_run() -> None:
    leases = Leases([DatasetSpec("ten", 1000)])
    sizes = []
    for life in range(1, 200):
        position = 0
        for _ in range(20):
            grant(leases, "a", 7, incarnation=life)
            position += 3
            leases.taken("a", life, position)
            leases.merged(round_of("a", position, incarnation=life))
        leases.gone("a", life, leases.merged_to("a", life))
        sizes.append(len(msgspec.msgpack.encode(leases.state())))
    assert max(sizes) < 2 * sizes[0]


def test_a_long_life_keeps_only_what_is_not_merged() -> None:
    leases = Leases([DatasetSpec("ten", 1000)])
    for number in range(1, 500):
        grant(leases, "a", 4)
        leases.merged(round_of("a", 4 * number - 2))
    (holding,) = leases.state().holdings
    assert len(holding.leases) == 1 and holding.merged_to == 4 * 499 - 2


# ---- the data itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("datasets", "epochs", "text"),
    [
        ([("a", 0, 1.0)], 0, "dataset 'a' has 0 samples: leave it out, or give it some"),
        ([("a", 1, 0.0)], 0, "dataset 'a' has weight 0.0: give it one above 0, or leave it out"),
        ([("a", 1, float("nan"))], 0, "dataset 'a' has weight nan"),
        ([("a", 1, float("inf"))], 0, "dataset 'a' has weight inf"),
        ([], 0, "0 datasets, 0 epochs: leases need a dataset"),
        ([("a", 1, 1.0)], -1, "1 datasets, -1 epochs: leases need a dataset, and epochs of 0 or more"),
    ],
)
def test_data_that_nothing_can_be_leased_from_is_refused(
    datasets: list[tuple[str, int, float]], epochs: int, text: str
) -> None:
    wrong = wrong_sources(datasets, epochs)
    assert wrong is not None and text in wrong and "\n" not in wrong
    with pytest.raises(ConfigError):
        Leases([DatasetSpec(*one) for one in datasets], epochs)


def test_data_that_can_be_leased_is_not_refused() -> None:
    assert wrong_sources([("a", 1, 0.1), ("b", 5, 2.0)], 3) is None


@pytest.mark.parametrize(
    ("datasets", "epochs", "text"),
    [
        ([("a", 5, 1.0), ("b", 7, 2.0)], 1, None),
        ([("a", 6, 1.0), ("b", 7, 2.0)], 1, "dataset 'a' is 6 samples of weight 1 here, 'a' is 5 samples of weight 1"),
        ([("a", 5, 1.0), ("c", 7, 2.0)], 1, "dataset 'c' is 7 samples of weight 2 here, 'b' is 7 samples of weight 2"),
        ([("a", 5, 1.0)], 1, "1 datasets here, 2 in the run"),
        ([("a", 5, 1.0), ("b", 7, 2.0)], 4, "4 epochs here, 1 in the run"),
    ],
)
def test_another_learners_data_is_held_against_the_runs(
    datasets: list[tuple[str, int, float]], epochs: int, text: str | None
) -> None:
    differs = Leases([DatasetSpec("a", 5), DatasetSpec("b", 7, 2.0)], 1).differs(datasets, epochs)
    assert differs == text if text is None else text in str(differs)
