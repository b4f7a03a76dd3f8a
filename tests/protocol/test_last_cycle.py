"""The outer steps of the last cycle do not look ahead; a run that goes on later looks ahead again (docs/adr/0039)."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from tests.protocol.world import World

from atoll.protocol.effects import Note
from atoll.protocol.history import History
from atoll.protocol.phases import outer_again, outer_at_end
from atoll.protocol.records import ChangedRecord, MergedRecord
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.machine import Syncer

OUTER: dict[str, str | float | bool] = {"merge": "rda-row", "optimizer": "nesterov", "lr": 0.6, "momentum": 0.6}
LAST = {**OUTER, "optimizer": "nesterov-last"}


def train(**settings: Any) -> World:
    return World(2, **{"fragments": 2, "sync_every": 4, "latency_s": 0.05, "steps": 25, "outer": OUTER, **settings})


def steps_by(world: World) -> list[tuple[bool, str]]:
    """Of every committed round, whether the run was ending, and its outer optimizer."""
    history, found = History(world.begun), []
    for record in world.journal:
        history.apply(record)
        if isinstance(record, MergedRecord):
            found.append((bool(history.ended), str(history.outer["optimizer"])))
    return found


def changes(world: World) -> list[ChangedRecord]:
    return [record for record in world.journal if isinstance(record, ChangedRecord)]


def test_only_the_rounds_of_the_last_cycle_do_not_look_ahead() -> None:
    world = train().run_to_end()
    optimizers = [name for _, name in steps_by(world)]
    first = optimizers.index("nesterov-last")
    assert 1 <= len(optimizers) - first <= 2 and set(optimizers[:first]) == {"nesterov"}, "at most P rounds"
    assert all(ending for ending, name in steps_by(world) if name == "nesterov-last")
    assert [one.outer for one in changes(world)] == [LAST]
    retuned = [place for place, (_, effect) in enumerate(world.log) if isinstance(effect, fx.Retune)]
    merges = [place for place, (_, effect) in enumerate(world.log) if isinstance(effect, fx.Merge)]
    assert len(retuned) == 1 and sum(place > retuned[0] for place in merges) == len(optimizers) - first


@pytest.mark.parametrize("outer", [{}, {**OUTER, "optimizer": "sgd"}, {**OUTER, "momentum": 0.0}])
def test_without_momentum_nothing_changes(outer: dict[str, str | float | bool]) -> None:
    assert outer_at_end(outer) == outer
    assert not changes(train(outer=outer).run_to_end())


def test_a_syncer_that_dies_in_the_last_cycle_goes_on_with_it() -> None:
    world = train()
    while not changes(world):
        world.step()
    world.crash_syncer()
    world.run_to_end()
    assert len(changes(world)) == 1, "it is in the journal"
    assert steps_by(world)[-1] == (True, "nesterov-last")


def test_a_run_that_goes_on_looks_ahead_again_and_says_nothing_of_it() -> None:
    world = train().run_to_end()
    history = History(world.begun)
    for record in world.journal:
        history.apply(record)
    assert history.outer == LAST
    more = msgspec.structs.replace(history.settings, steps=99)
    for settings, told in ((history.settings, 0), (more, 1)):
        asked = fx.ChangeAsked(settings, dict(history.outer), "more", reopen=True)
        machine = Syncer(History.restore(copy.deepcopy(history.state())))
        effects = machine.handle(0.0, asked)
        assert [effect.outer for effect in effects if isinstance(effect, fx.Retune)] == [OUTER]
        assert machine.history.outer == OUTER
        assert sum(isinstance(effect, Note) and effect.kind == "changed" for effect in effects) == told


def test_what_was_set_on_the_way_stays() -> None:
    now = {**LAST, "lr": 0.3, "robust": True}
    assert outer_again(OUTER, now) == {**OUTER, "lr": 0.3, "robust": True}
    assert outer_again({}, {}) == {}
