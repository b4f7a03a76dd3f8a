"""A run that had ended goes on in a later term, once the operator opens it again."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from tests.protocol.world import World

from atoll.protocol.effects import Note, Tick
from atoll.protocol.history import History
from atoll.protocol.messages import PROTOCOL, Announce, Hello, Welcome
from atoll.protocol.records import EndedRecord
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.machine import Syncer


def read_again(world: World) -> History:
    """As a reader of its journal arrives at it."""
    history = History(world.begun)
    for record in world.journal:
        history.apply(record)
    return history


def ended(**settings: Any) -> World:
    return World(2, fragments=2, sync_every=4, latency_s=0.05, **settings).run_to_end()


def more(history: History, **changes: Any) -> fx.ChangeAsked:
    return fx.ChangeAsked(msgspec.structs.replace(history.settings, **changes), {}, "more", reopen=True)


def kinds(effects: list[fx.SyncerEffect]) -> set[type]:
    return {type(effect) for effect in effects}


def test_a_later_term_that_finds_a_run_finished_says_so_once_more() -> None:
    machine = Syncer(read_again(ended(steps=24)))
    assert machine.phase == "finished"
    assert fx.Finished("24 steps are done") in machine.handle(0.0, Tick())
    assert fx.Finished not in kinds(machine.handle(1.0, Tick())), "once"


def test_more_steps_open_it_again_and_it_does_not_say_that_it_is_finished() -> None:
    history = read_again(ended(steps=24))
    machine = Syncer(history)
    effects = machine.handle(0.0, more(history, steps=96))
    assert fx.Finished not in kinds(effects) and machine.phase == "running"
    assert (machine.history.ended, machine.history.finished, machine.state.end_reason) == ("", False, "")
    assert 0.2 < machine.progress < 0.5, "it goes on where it was"
    assert fx.Finished not in kinds(machine.handle(1.0, Tick()))


@pytest.mark.parametrize(("rule", "begins"), [("budget", 0.25), ("added", 0.0)])
def test_more_steps_set_learning_rates_back_as_the_rule_says(rule: str, begins: float) -> None:
    history = read_again(ended(steps=24))
    assert history.schedule_progress == 1.0
    machine = Syncer(history)
    machine.handle(0.0, more(history, steps=96, progress=rule))
    assert history.schedule_progress == pytest.approx(begins, abs=0.06), "before the next round"
    assert 0.2 < machine.progress < 0.5, "of the whole budget"
    kept = History.restore(copy.deepcopy(history.state()))
    assert kept.schedule_progress == history.schedule_progress
    Syncer(kept).handle(0.0, more(kept, steps=96, progress="budget"))
    assert kept.schedule_progress == kept.progress, "the rule alone may change too"


def test_learning_rates_begin_anew_in_the_middle_of_a_run_and_come_to_their_end() -> None:
    world = World(2, fragments=2, sync_every=4, latency_s=0.05, steps=48, progress="added").run_until(round=8)
    told = [announce.progress for _, announce in world.sent(Announce, "learner-0")]
    assert told == sorted(told) and told[-1] > 0.2
    world.inject(fx.ChangeAsked(msgspec.structs.replace(world.syncer.settings, steps=96), {}, "steps=96"))
    world.run_until(round=20).crash_syncer()
    world.run_to_end()
    after = [announce.progress for _, announce in world.sent(Announce, "learner-0")][len(told) :]
    assert after == sorted(after) and after[0] < 0.1 and after[-1] > 0.95, "as its journal has it, in every term"


def test_only_a_run_that_is_opened_again_with_other_settings_says_that_they_changed() -> None:
    history = read_again(ended(steps=24))
    for asked, told in ((more(history), []), (more(history, steps=96), ["settings changed: more"])):
        effects = Syncer(copy.deepcopy(history)).handle(0.0, asked)
        assert [effect.text for effect in effects if isinstance(effect, Note) and effect.kind == "changed"] == told


def test_a_run_that_the_operator_ended_goes_on_with_the_budget_it_has() -> None:
    world = World(2, fragments=2, sync_every=4, latency_s=0.05, steps=96).run_until(round=8)
    world.end("the operator asked for it")
    history = read_again(world.run_to_end())
    machine = Syncer(history)
    assert fx.Finished not in kinds(machine.handle(0.0, more(history))) and machine.phase == "running"
    assert machine.progress < 1.0


def test_an_end_that_was_only_begun_is_opened_again_too() -> None:
    world = World(2, fragments=2, sync_every=4, latency_s=0.05).run_until(round=8)
    history = read_again(world)
    history.apply(EndedRecord("the operator asked for it"))
    machine = Syncer(history)
    machine.handle(0.0, more(history))
    for now in (1.0, 20.0, 100.0):
        assert fx.Finished not in kinds(machine.handle(now, Tick()))
    assert machine.phase == "running" and machine.state.end_reason == ""


def test_one_whose_life_the_end_closed_hears_why() -> None:
    history = read_again(ended(steps=24))
    machine = Syncer(history)
    machine.handle(0.0, more(history, steps=96))
    life = history.lives["learner-0"]
    hello = Hello(
        protocol=PROTOCOL, learner="learner-0", session=life.session, run=history.run, incarnation=life.incarnation,
        versions=tuple(history.versions), t=life.t, tensors=history.begun.tensors,
    )  # fmt: skip
    [welcome] = [
        effect.message
        for effect in machine.handle(1.0, fx.Greeted(hello))
        if isinstance(effect, fx.Send) and isinstance(effect.message, Welcome)
    ]
    assert (welcome.incarnation, welcome.closed) == (life.incarnation + 1, "the run had ended")


def test_one_without_parameters_is_as_empty_as_before() -> None:
    history = History(World(2, present=0).begun)
    history.apply(EndedRecord("the operator asked for it", final=True))
    machine = Syncer(history)
    assert fx.Finished not in kinds(machine.handle(0.0, more(history))) and machine.phase == "empty"


def test_without_more_budget_an_opened_run_comes_to_its_end_again() -> None:
    history = read_again(ended(steps=24))
    machine = Syncer(history)
    assert machine.handle(0.0, more(history))
    machine.handle(30.0, Tick())
    assert machine.phase in ("ending", "finished") and machine.progress >= 1.0


def test_the_end_says_how_much_of_the_budget_is_spent() -> None:
    world = ended(tokens=2000)
    last = [record for record in world.journal if isinstance(record, EndedRecord)][-1]
    assert last.final and last.progress == 1.0
    machine = Syncer(read_again(world))
    assert machine.progress >= 1.0, "also what came after the last round"


def test_what_ended_before_its_budget_is_not_spent() -> None:
    world = World(2, fragments=2, sync_every=4, latency_s=0.05, tokens=100_000).run_until(round=8)
    world.end("the operator asked for it")
    history = read_again(world.run_to_end())
    assert 0.0 < history.progress < 0.2
    assert 0.0 < Syncer(history).progress < 0.2


def test_a_synchronous_run_that_is_opened_again_waits_for_all_its_learners() -> None:
    history = read_again(ended(steps=24, synchronous=True, overlap=0))
    for life in history.lives.values():
        life.open = False  # as when everybody has left
    machine = Syncer(history)
    machine.handle(0.0, more(history, steps=96))
    assert not machine.state.open_rounds, "nobody is there"


def test_an_old_journal_that_does_not_say_how_much_was_spent_is_read_as_before() -> None:
    history = read_again(World(2, fragments=2, sync_every=4, steps=48).run_until(round=4))
    before = history.progress
    history.apply(EndedRecord("done", final=True))
    assert history.progress == before > 0.0
