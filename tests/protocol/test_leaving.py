"""A drain: one learner is asked to leave, and the run goes on."""

from __future__ import annotations

from tests.protocol.world import World

from atoll.protocol import effects as fx
from atoll.protocol.learner import Learner
from atoll.protocol.messages import Drain, Welcome
from atoll.protocol.settings import Settings


def test_it_is_told_and_written_down() -> None:
    world = World(2).run_until(round=4)
    effects = world.syncer.handle(world.now, fx.DrainAsked("learner-0", "this rack goes down"))
    told = [effect for effect in effects if isinstance(effect, fx.Send)]
    assert [(one.learner, one.message.reason) for one in told] == [("learner-0", "this rack goes down")]
    notes = [effect for effect in effects if isinstance(effect, fx.Note) and effect.kind == "draining"]
    assert notes[0].data["learner"] == "learner-0" and "this rack goes down" in notes[0].text


def test_who_is_not_there_is_not_asked() -> None:
    world = World(2).run_until(round=4)
    world.kill("learner-0")
    assert not world.syncer.handle(world.now, fx.DrainAsked("learner-0", "x"))
    assert not world.syncer.handle(world.now, fx.DrainAsked("nobody", "x"))


def test_a_learner_hands_it_to_its_training_process() -> None:
    machine = Learner("a", "s", ())
    settings = Settings(fragments=1, sync_every=4)
    welcome = Welcome(run="r", incarnation=1, settings=settings, fingerprint="", versions=(0,), gathering=0)
    machine.handle(0.0, fx.Arrived(welcome))
    effects = machine.handle(0.0, fx.Arrived(Drain(reason="this rack goes down")))
    assert fx.Drain("this rack goes down") in effects


def test_one_that_comes_back_is_told_again_another_process_is_not() -> None:
    world = World(2).run_until(round=4)
    world.syncer.handle(world.now, fx.DrainAsked("learner-0", "x"))
    hello = world.islands["learner-0"].machine.hello()
    world.syncer.handle(world.now, fx.Lost("learner-0", "a bad line"))
    again = world.syncer.handle(world.now, fx.Greeted(hello))
    assert any(isinstance(effect, fx.Send) and isinstance(effect.message, Drain) for effect in again)
    other = Learner("learner-0", "another session", ()).hello()
    effects = world.syncer.handle(world.now, fx.Greeted(other))
    assert not any(isinstance(effect, fx.Send) and isinstance(effect.message, Drain) for effect in effects)
