"""Who has a place at a port, and whose it costs."""

from __future__ import annotations

import pytest

from atoll.fabric.listener import KNOWN_S, ConnectionPlace, ConnectionPlaces, ConnectionStage
from atoll.fabric.wire import FabricLimits

HERE, THERE = "192.0.2.1", "192.0.2.2"


def places(**limits: int) -> ConnectionPlaces:
    return ConnectionPlaces(FabricLimits(**{"strangers": 16, **limits}))  # type: ignore[arg-type]


def admitted(all: ConnectionPlaces, address: str = HERE, token: str = "join") -> ConnectionPlace:
    place = all.take_place(address)
    assert all.admit(place, token, viewer=False)
    return place


def test_a_place_is_given_back_once() -> None:
    all = places(address_connections=1)
    place = all.take_place(HERE)
    assert not all.has_room(HERE) and all.has_room(THERE)
    for _ in range(2):
        all.give_back(place, 0.0)
        assert all.has_room(HERE) and len(all) == 0 and not all.strangers


def test_a_token_has_so_many_and_a_viewers_fewer() -> None:
    all = places(token_connections=2, viewer_connections=1)
    first, second, third = (all.take_place(HERE) for _ in range(3))
    assert all.admit(first, "wall", viewer=True) and not all.admit(second, "wall", viewer=True)
    assert all.admit(second, "join", viewer=False) and all.admit(third, "join", viewer=False)
    assert not all.admit(all.take_place(HERE), "join", viewer=False)
    all.give_back(third, 0.0)
    assert all.admit(all.take_place(HERE), "join", viewer=False)


def test_a_token_leaves_room_for_its_neighbours() -> None:
    """Behind a proxy, or on one machine, all learners have one address."""
    limits = FabricLimits()
    all = ConnectionPlaces(limits)
    while all.has_room(HERE) and all.admit(all.take_place(HERE), "rogue", viewer=False):
        pass
    for _ in range(limits.strangers):  # and as many that show nothing
        all.take_place(HERE)
    neighbours = 0
    while all.has_room(HERE):
        admitted(all, HERE, "honest")
        neighbours += 1
    assert neighbours >= 256


def test_the_address_with_the_most_gives_one() -> None:
    all = places()
    few, many = [all.take_place(HERE) for _ in range(4)], [all.take_place(THERE) for _ in range(12)]
    assert all.one_to_drop(0.0) is many[0]
    all.dismiss(few[0])
    assert all.one_to_drop(0.0) is None, "there is room"


@pytest.mark.parametrize("flood", list(ConnectionStage))
def test_of_one_address_those_that_are_many_at_one_stage_give_one(flood: ConnectionStage) -> None:
    """However far a flood goes, one that is anywhere else keeps its place, and so does one that is as far and newer."""
    all = places()
    others = [all.take_place(HERE) for _ in ConnectionStage]
    for place, stage in zip(others, ConnectionStage, strict=True):
        all.advance(place, stage)
    crowd = [all.take_place(HERE) for _ in range(16 - len(others))]
    for place in crowd:
        all.advance(place, flood)
    dropped = all.one_to_drop(0.0)
    assert dropped is others[flood], "the oldest of them"


def test_an_address_of_a_learner_keeps_places_that_others_cannot_take() -> None:
    """A flood from ever new addresses has one stranger at each, as the learner's address has."""
    all = places()
    learner = admitted(all, HERE)
    newcomers = [all.take_place(HERE) for _ in range(2)]
    crowd = [all.take_place(f"198.51.100.{number}") for number in range(14)]
    assert all.one_to_drop(0.0) is crowd[0]
    all.give_back(learner, 100.0)
    assert all.one_to_drop(100.0 + KNOWN_S - 1) is crowd[0], "it was there lately"
    assert all.one_to_drop(100.0 + KNOWN_S) is newcomers[0]


def test_a_flood_from_a_learners_address_takes_places_from_itself() -> None:
    all = places()
    admitted(all, HERE)
    stranger = all.take_place(THERE)
    crowd = [all.take_place(HERE) for _ in range(15)]
    assert all.one_to_drop(0.0) is crowd[0] and stranger in all.strangers


def test_viewers_make_no_address_known() -> None:
    all = places()
    assert all.admit(all.take_place(HERE), "wall", viewer=True)
    assert not all.knows(HERE, 0.0)


def test_addresses_that_are_remembered_are_bounded() -> None:
    all = places(connections=8)
    for number in range(20):
        all.give_back(admitted(all, f"198.51.100.{number}"), float(number))
    assert len(all._known_until) == 8 and all.knows("198.51.100.19", 20.0)
