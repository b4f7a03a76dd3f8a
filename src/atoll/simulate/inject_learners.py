"""How faults of one learner begin and end: its processes, its clock, its links."""

from __future__ import annotations

from collections.abc import Callable

from atoll.protocol import effects as fx
from atoll.simulate.faults import Fault
from atoll.simulate.simulated_learner import SimulatedLearner
from atoll.simulate.world import World


def mend_later(world: World, fault: Fault, mend: Callable[[], object]) -> None:
    """When it is mended."""
    world.queue.call_later(fault.length, mend)


def kill(world: World, learner: SimulatedLearner, fault: Fault) -> object:
    if not learner.alive:
        return False
    world.kill(learner)
    mend_later(world, fault, lambda: come_back(world, learner))
    return None


def come_back(world: World, learner: SimulatedLearner) -> object:
    """Another process takes its place, unless one has, or the run is over for it."""
    if world.learners[learner.name] is not learner or learner.alive or learner.over or world.finished:
        return False
    if learner.leaving.left and not learner.leaving.returns:
        return False
    learner = world.start_process(learner.name, learner.step_s, kept=learner.leaving.saved)
    world.network.dial_later(learner)
    return None


def leave(world: World, learner: SimulatedLearner, fault: Fault) -> object:
    if not learner.alive or learner.frozen:
        return False
    world.network.leave(learner, "it was asked to go")
    world.end_process(learner)
    mend_later(world, fault, lambda: come_back(world, learner))
    return None


def _pause(world: World, learner: SimulatedLearner, fault: Fault) -> object:
    if not learner.alive or learner.paused:
        return False
    learner.paused = True
    mend_later(world, fault, lambda: resume(learner))
    return None


def resume(learner: SimulatedLearner) -> object:
    if not learner.paused or not learner.alive:
        return False
    learner.paused = False
    if not learner.frozen:
        learner.go_on_after_a_pause()
    return None


def _suspend(world: World, learner: SimulatedLearner, fault: Fault) -> object:
    if not learner.alive or learner.frozen:
        return False
    learner.frozen = True
    mend_later(world, fault, lambda: thaw(learner))
    return None


def thaw(learner: SimulatedLearner) -> object:
    if not learner.frozen or not learner.alive:
        return False
    learner.thaw()
    return None


def _slow(world: World, learner: SimulatedLearner, fault: Fault) -> object:
    usual, learner.step_s = learner.step_s, learner.step_s * (3.0 if fault.number % 2 else 0.4)

    def mend() -> None:
        learner.step_s = usual

    mend_later(world, fault, mend)
    return None


def _courier(world: World, learner: SimulatedLearner, fault: Fault) -> object:
    if not learner.alive or not learner.courier or learner.frozen:
        return False
    connection, learner.connection = learner.connection, None
    if connection is not None:
        world.network.closed_by(connection, "courier died")
    learner.lose_courier()
    mend_later(world, fault, lambda: new_courier(world, learner))
    return None


def new_courier(world: World, learner: SimulatedLearner) -> object:
    if learner.courier or not learner.alive or learner.frozen:
        return False
    learner.new_courier()
    world.network.dial_later(learner)
    learner.wake_soon()
    return None


def _usurp(world: World, learner: SimulatedLearner, fault: Fault) -> object:
    """Another process takes the name while the one before it still lives."""
    if not learner.alive:
        return False
    usurper = world.start_process(learner.name, learner.step_s)
    world.network.dial_later(usurper)
    mend_later(world, fault, lambda: world.kill(learner) if learner.alive else False)
    return None


def _broken(world: World, learner: SimulatedLearner, fault: Fault) -> None:
    learner.broken = True


def _mute(world: World, learner: SimulatedLearner, fault: Fault) -> None:
    learner.answers = False
    mend_later(world, fault, lambda: setattr(learner, "answers", True))


def _no_save(world: World, learner: SimulatedLearner, fault: Fault) -> None:
    learner.saves = False
    mend_later(world, fault, lambda: setattr(learner, "saves", True))


def _slow_stream(world: World, learner: SimulatedLearner, fault: Fault) -> None:
    learner.stream_s = 100.0
    mend_later(world, fault, lambda: setattr(learner, "stream_s", 0.0))


def _no_fit(world: World, learner: SimulatedLearner, fault: Fault) -> None:
    """Its optimizer is of another kind: it refuses the others' state, and they refuse its own."""
    learner.fits, learner.lies = False, True
    mend_later(world, fault, lambda: _fit(learner))


def _fit(learner: SimulatedLearner) -> None:
    learner.fits, learner.lies = True, False


def _jump(world: World, learner: SimulatedLearner, fault: Fault) -> None:
    learner.jump(fault.length)


def _reset(world: World, learner: SimulatedLearner, fault: Fault) -> None:
    world.network.reset(learner, "connection reset")


def _partition(up: bool, down: bool) -> Callable[[World, SimulatedLearner, Fault], object]:
    def begin(world: World, learner: SimulatedLearner, fault: Fault) -> object:
        world.network.block(learner, up=up, down=down)
        mend_later(world, fault, lambda: world.network.unblock(learner, up=up, down=down))
        return None

    return begin


def _drain(world: World, learner: SimulatedLearner, fault: Fault) -> object:
    """`atoll drain`, whatever the learner is at: it joins, it is away, it has been asked before."""
    _afterwards(world, learner, fault)
    return (
        world.deliver(world.simulated_syncer, fx.DrainAsked(learner.name, "the operator asked"))
        if world.simulated_syncer.alive
        else False
    )


def _interrupt(world: World, learner: SimulatedLearner, fault: Fault) -> object:
    """SIGTERM or Ctrl-C: a drain that the syncer is not asked for."""
    if not learner.alive:
        return False
    _afterwards(world, learner, fault)
    learner.leave("its machine is taken away", hurried=True)
    return None


def _afterwards(world: World, learner: SimulatedLearner, fault: Fault) -> None:
    """Most come back under their name, half of those with the state that they saved; the others stay away."""
    leaving = learner.leaving
    leaving.returns, leaving.saved = fault.number % 4 > 0, fault.number % 8 > 3
    leaving.then = lambda: mend_later(world, fault, lambda: come_back(world, learner))


LEARNERS: dict[str, Callable[[World, SimulatedLearner, Fault], object]] = {
    "kill": kill,
    "leave": leave,
    "pause": _pause,
    "suspend": _suspend,
    "slow": _slow,
    "courier": _courier,
    "usurp": _usurp,
    "broken": _broken,
    "mute": _mute,
    "no-save": _no_save,
    "slow-stream": _slow_stream,
    "no-fit": _no_fit,
    "jump": _jump,
    "reset": _reset,
    "partition": _partition(True, True),
    "partition-up": _partition(True, False),
    "partition-down": _partition(False, True),
    "drain": _drain,
    "interrupt": _interrupt,
}
