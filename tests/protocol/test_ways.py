"""What a learner measures of its link, and in which order versions come down it."""

from __future__ import annotations

from math import inf

import pytest

from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.versions import MEASURED_EVERY, Versions
from atoll.protocol.learner.ways import RECENT, WayRate, Ways
from atoll.protocol.messages import Announce, Member

# ---- rates ---------------------------------------------------------------------------------------------------------


def test_a_rate_is_that_of_the_last_bodies_together() -> None:
    way = WayRate()
    assert way.bytes_per_s == 0.0
    way.add(100, 1.0)
    way.add(300, 1.0)
    assert way.bytes_per_s == 200.0
    for _ in range(RECENT):
        way.add(100, 10.0)
    assert way.bytes_per_s == 10.0, "a link that becomes narrower is known after a few bodies"


@pytest.mark.parametrize("body", [(0, 1.0), (100, 0.0), (-5, 1.0), (100, -1.0)])
def test_a_body_that_took_no_time_says_nothing(body: tuple[int, float]) -> None:
    way = WayRate()
    way.add(100, 1.0)
    way.add(*body)
    assert way.bytes_per_s == 100.0


def test_the_latency_is_the_shortest_of_late() -> None:
    ways = Ways()
    assert ways.latency_s == 0.0
    for seconds in (0.3, 0.08, 0.0, 2.0):
        ways.add_latency(seconds)
    assert ways.latency_s == 0.08, "a syncer that was busy answered later"
    for _ in range(RECENT):
        ways.add_latency(0.5)
    assert ways.latency_s == 0.5


def test_what_a_full_link_holds_is_its_rate_times_the_round_trip() -> None:
    ways = Ways()
    assert ways.pipe_bytes == inf, "before the first version there is no limit"
    ways.down.add(1000, 1.0)
    ways.add_latency(0.08)
    assert ways.pipe_bytes == pytest.approx(80)


# ---- the order of versions -----------------------------------------------------------------------------------------


class Orders(list[tuple[int, int]]):
    """Versions that were ordered: (fragment, version)."""

    def __call__(self, effect: fx.LearnerEffect) -> None:
        if isinstance(effect, fx.Fetch):
            self.append((effect.fragment, effect.version))


def make_versions(fragments: int = 6, *, measured: bool = True) -> tuple[Versions, Orders]:
    orders = Orders()
    versions = Versions(orders, held=[1] * fragments, newest=[1] * fragments, counted=[1] * fragments)
    if measured:
        versions.ways.down.add(1000, 1.0)
        versions.ways.add_latency(0.08)
    return versions, orders


def announce(versions: Versions, fragment: int, version: int, own: Member | None = None) -> None:
    announced = Announce(round=version, fragment=fragment, version=version, members=(own,) if own else (), gathering=0)
    versions.take_announcement(announced, own)


def arrive(versions: Versions, fragment: int, version: int) -> None:
    assert versions.take_fetched(fragment, version)
    assert versions.take_adoption(fragment, version) is not None


def test_before_a_rate_is_known_all_versions_are_ordered_at_once() -> None:
    versions, orders = make_versions(measured=False)
    for fragment in (3, 1, 5):
        announce(versions, fragment, 2)
    versions.fetch_missing(gathering=2)
    assert sorted(orders) == [(1, 2), (3, 2), (5, 2)]


def test_then_one_comes_after_another_and_the_one_needed_soonest_is_first() -> None:
    versions, orders = make_versions()
    for fragment in (3, 1, 5):
        announce(versions, fragment, 2)
    versions.fetch_missing(gathering=2)
    assert orders == [(3, 2)]
    versions.fetch_missing(gathering=2)
    assert orders == [(3, 2)], "as much is on its way as the link holds"
    arrive(versions, 3, 2)
    versions.fetch_missing(gathering=4)
    assert orders == [(3, 2), (5, 2)], "by the round that gathers then"
    versions.way_is_free = True  # the last bytes of it are coming
    versions.fetch_missing(gathering=4)
    assert orders == [(3, 2), (5, 2), (1, 2)]


def test_the_latency_of_a_version_that_waited_behind_another_does_not_count() -> None:
    versions, orders = make_versions(measured=False)
    for fragment in range(3):
        announce(versions, fragment, 2)
    versions.fetch_missing(gathering=0)
    assert len(orders) == 3, "all at once: they queue in front of the link"
    for fragment, latency_s in ((0, 0.08), (1, 1.08), (2, 2.08)):
        versions.measure_way(fragment, 1000, 1.0, latency_s)
        arrive(versions, fragment, 2)
    assert versions.ways.latency_s == 0.08
    announce(versions, 3, 2)
    announce(versions, 4, 2)
    versions.fetch_missing(gathering=3)
    assert orders[3:] == [(3, 2)], "the queue of the beginning does not last"


def test_a_way_without_latency_holds_one_version_at_a_time() -> None:
    versions, orders = make_versions(measured=False)
    for number in (0, 1, 2):
        announce(versions, number, 2)
        if number < 2:
            versions.fetch_missing(gathering=number)
    versions.measure_way(0, 1000, 1.0, 0.0)
    arrive(versions, 0, 2)
    versions.fetch_missing(gathering=1)
    assert orders == [(0, 2), (1, 2)]


def test_a_way_that_is_always_full_empties_at_times_and_its_latency_is_measured_anew() -> None:
    """The first latency was measured behind the versions of a process before this one."""
    versions, orders = make_versions(fragments=3)
    versions.ways = Ways()
    versions.ways.down.add(1000, 1.0)
    versions.ways.add_latency(20.0)
    alone = -1
    for arrived in range(8 * MEASURED_EVERY):
        for fragment in range(3):  # there is always a newer one
            announce(versions, fragment, versions.newest[fragment] + 1)
        alone = arrived if arrived and len(orders) == arrived else alone  # the next one waits behind none
        versions.fetch_missing(gathering=0)
        fragment, version = orders[arrived]
        versions.measure_way(fragment, 1000, 1.0, 0.08 if arrived == alone else 20.0)
        arrive(versions, fragment, version)
    assert versions.ways.latency_s == 0.08
    assert versions.ways.pipe_bytes == pytest.approx(80), "and the queue is gone"


def test_a_version_that_waits_is_not_sent_once_there_is_a_newer_one() -> None:
    versions, orders = make_versions()
    for fragment, version in ((0, 2), (1, 2), (1, 3), (1, 4)):
        announce(versions, fragment, version)
        versions.fetch_missing(gathering=0)
    arrive(versions, 0, 2)
    versions.fetch_missing(gathering=1)
    assert orders == [(0, 2), (1, 4)]


def test_a_fetch_that_failed_leaves_the_way_to_the_next() -> None:
    versions, orders = make_versions()
    announce(versions, 0, 2)
    announce(versions, 1, 2)
    versions.fetch_missing(gathering=0)
    versions.retry_later(1.0, 0)
    versions.fetch_missing(gathering=0)
    assert orders == [(0, 2), (1, 2)]


def test_with_a_share_only_what_holds_its_own_steps_is_fetched() -> None:
    versions, orders = make_versions()
    announce(versions, 0, 2)
    announce(versions, 1, 2, Member("me", 1, 7, 70))
    announce(versions, 2, 2)
    versions.held[2] = -1
    versions.fetch_missing(gathering=0, owed_only=True)
    assert orders == [(2, 2)], "a fragment that was never adopted is needed in any case"
    arrive(versions, 2, 2)
    versions.fetch_missing(gathering=0, owed_only=True)
    assert orders == [(2, 2), (1, 2)]
    versions.fetch_missing(gathering=0)
    assert orders == [(2, 2), (1, 2)], "the way is not free"
    assert versions.lacks_newest(0)


def test_with_a_share_the_copy_that_waits_longest_comes_first() -> None:
    versions, orders = make_versions()
    announce(versions, 1, 2, Member("me", 1, 9, 90))
    announce(versions, 3, 2, Member("me", 1, 7, 70))
    versions.fetch_missing(gathering=0, owed_only=True)
    assert orders == [(3, 2)]


def test_what_was_passed_over_is_fetched_only_at_the_end() -> None:
    versions, orders = make_versions()
    announce(versions, 0, 2)
    versions.pass_over_missing()
    versions.fetch_missing(gathering=0)
    assert orders == []
    announce(versions, 0, 3)
    versions.fetch_missing(gathering=0)
    assert orders == [(0, 3)], "a newer one is fetched as ever"
    arrive(versions, 0, 3)
    announce(versions, 1, 2)
    versions.pass_over_missing()
    versions.fetch_all()
    versions.fetch_missing(gathering=0)
    assert orders[1:] == [(1, 2)]


def test_a_rollback_is_fetched_with_any_share() -> None:
    versions, orders = make_versions()
    versions.take_announcement(Announce(round=9, fragment=4, version=3, members=(), gathering=0, restored=True), None)
    versions.fetch_missing(gathering=0, owed_only=True)
    assert orders == [(4, 3)]
