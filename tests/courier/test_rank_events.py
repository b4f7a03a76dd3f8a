from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.courier.rank_channel import BoxReady, PartFetched, PartUploaded
from atoll.courier.rank_events import Behind, RankEvents, Said
from atoll.digests import combine_digests, compute_digest
from atoll.mailbox.channel import CopyMade, SlotFreed, VersionTaken
from atoll.protocol.errors import PeerError
from atoll.protocol.learner import effects as fx

RANKS = 3


def copied(slot: int = 2, *, t: int = 7, tokens: int = 0) -> CopyMade:
    return CopyMade(slot, 4, 1, t, 3, tokens, base=5, epoch=0)


def taken(slot: int = 1, *, version: int = 6, t: int = 9, tokens: int = 0) -> VersionTaken:
    return VersionTaken(slot, fx.Adopted(1, version, t, tokens=tokens), epoch=0)


def say_all(events: RankEvents, said: list[Said], order: tuple[int, ...] | None = None) -> object:
    """What comes out with the last of them; nothing may come before."""
    *first, last = order or tuple(range(len(said)))
    for rank in first:
        assert events.add(rank, said[rank]) is None
    return events.add(last, said[last])


@pytest.mark.parametrize("order", list(permutations(range(RANKS))))
def test_it_comes_out_once_all_have_said_it_with_the_counters_of_rank_0(order: tuple[int, ...]) -> None:
    said: list[Said] = [copied(tokens=30), copied(tokens=1), copied(tokens=2)]
    assert say_all(RankEvents(RANKS), said, order) is said[0]
    said = [taken(tokens=30), taken(tokens=1), taken(tokens=2)]
    assert say_all(RankEvents(RANKS), said, order) is said[0]


def test_a_slot_may_be_used_again_and_slots_are_apart() -> None:
    events = RankEvents(2)
    assert events.add(0, copied(2)) is None and events.add(1, copied(3)) is None
    assert events.add(1, copied(2)) == copied(2)
    assert say_all(events, [copied(2, t=8), copied(2, t=8)]) == copied(2, t=8)
    assert events.add(0, copied(3)) == copied(3)


def test_incoming_and_outgoing_slots_are_apart() -> None:
    events = RankEvents(2)
    assert events.add(0, SlotFreed(1, incoming=False)) is None
    assert events.add(1, SlotFreed(1, incoming=True)) is None
    assert events.add(1, SlotFreed(1, incoming=False)) == SlotFreed(1, incoming=False)


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_copy_that_one_rank_did_not_make_is_none(rank: int) -> None:
    said: list[Said] = [copied() for _ in range(RANKS)]
    said[rank] = SlotFreed(2, incoming=False)
    assert say_all(RankEvents(RANKS), said) == SlotFreed(2, incoming=False)


@pytest.mark.parametrize(
    "said",
    [
        [copied(t=7), copied(t=8)],
        [taken(t=9), taken(t=10)],
        [taken(version=6), taken(version=7)],
        [taken(), SlotFreed(1, incoming=True)],
        [BoxReady((0, 3), (0, 3)), BoxReady((0, 2), (0, 2))],
    ],
    ids=str,
)
def test_ranks_that_did_not_do_the_same_are_an_error(said: list[Said]) -> None:
    with pytest.raises(PeerError, match=r"rank 0 .* and rank 1 .*: they have to do the same"):
        say_all(RankEvents(2), said)


def test_a_rank_that_answers_twice_is_an_error() -> None:
    events = RankEvents(2)
    events.add(1, copied())
    with pytest.raises(PeerError, match="rank 1 answered twice"):
        events.add(1, copied())


PARTS = st.dictionaries(
    st.integers(1, 3), st.sampled_from(["a", "b", "cc"]).map(lambda part: compute_digest(part.encode()))
)
"""What one rank has sent: digests by shard."""


@given(st.lists(PARTS, min_size=2, max_size=5), st.data())
def test_an_answer_is_named_by_the_parts_that_were_sent_in_order_of_rank(
    parts: list[dict[int, str]], data: st.DataObject
) -> None:
    """Of each shard, as the shard itself combines what came from ranks."""
    order = tuple(data.draw(st.permutations(range(len(parts)))))
    whole = say_all(RankEvents(len(parts)), [PartUploaded(5, tuple(sorted(of.items()))) for of in parts], order)
    assert isinstance(whole, PartUploaded)
    of_shards = {shard: [of[shard] for of in parts if shard in of] for shard in (1, 2, 3)}
    assert whole.digests == tuple((shard, combine_digests(of)) for shard, of in of_shards.items() if of)


def test_an_answer_of_which_one_part_failed_did_not_arrive() -> None:
    said: list[Said] = [PartUploaded(5, ((1, "x"),)), PartUploaded(5, reason="refused"), PartUploaded(5, reason="lost")]
    for order in permutations(range(RANKS)):
        assert say_all(RankEvents(RANKS), said, order) == PartUploaded(5, reason="rank 1: refused")


@given(
    st.lists(st.integers(0, 5) | st.none(), min_size=2, max_size=6).filter(lambda all: set(all) != {None}), st.data()
)
def test_ranks_fetch_again_until_all_have_the_same_version(versions: list[int | None], data: st.DataObject) -> None:
    """Whatever the run commits meanwhile: each that fetches again gets some newer one."""
    events, waiting = RankEvents(len(versions)), list(range(len(versions)))
    held = list(versions)
    for _ in range(100):
        whole = None
        for rank in data.draw(st.permutations(waiting)):
            assert whole is None
            whole = events.add(rank, PartFetched(2, held[rank]))
        if isinstance(whole, PartFetched):
            break
        assert isinstance(whole, Behind) and whole.fragment == 2
        newest = max(version for version in held if version is not None)
        assert all(held[rank] is not None and held[rank] < newest for rank in whole.ranks)  # type: ignore[operator]
        waiting = list(whole.ranks)
        for rank in waiting:
            held[rank] = newest + data.draw(st.integers(0, 1)) * (newest < 20)
    assert {version for version in held if version is not None} == {whole.version}


def test_a_fetch_that_failed_in_one_rank_failed_and_the_next_one_begins_anew() -> None:
    events = RankEvents(2)
    assert say_all(events, [PartFetched(0, 4), PartFetched(0, reason="gone")]) == PartFetched(0, reason="rank 1: gone")
    assert say_all(events, [PartFetched(0, 5), PartFetched(0, 5)]) == PartFetched(0, 5)


def test_a_part_of_a_cut_is_saved_once_all_ranks_have_theirs() -> None:
    events = RankEvents(2)
    assert events.add(0, fx.Saved(1, 5, "one")) is None  # rank 1 leaves this one out
    assert say_all(events, [fx.Saved(2, 9, "two", "d"), fx.Saved(2, 9, "other")]) == fx.Saved(2, 9, "two", "d")
    failed = say_all(events, [fx.Saved(3, 12, "three", "d"), fx.Saved(3, 12, reason="full")])
    assert failed == fx.Saved(3, 12, reason="rank 1: full")
    assert not events._open


def test_a_base_that_one_rank_has_not_whole_is_not_held() -> None:
    said: list[Said] = [BoxReady((4, 5), (4, 5)), BoxReady((4, 5), (-1, 5))]
    assert say_all(RankEvents(2), said) == BoxReady((4, 5), (-1, 5))
