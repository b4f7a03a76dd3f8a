"""How faults of one learner begin and end: its processes, its clock, its links."""

from __future__ import annotations

from collections.abc import Callable

from atoll.protocol import effects as fx
from atoll.simulate.faults import Fault
from atoll.simulate.island import Island
from atoll.simulate.world import World


def later(world: World, fault: Fault, mend: Callable[[], object]) -> None:
    """When it is mended."""
    world.agenda.later(fault.length, mend)


def kill(world: World, island: Island, fault: Fault) -> object:
    if not island.alive:
        return False
    world.kill(island)
    later(world, fault, lambda: come_back(world, island))
    return None


def come_back(world: World, island: Island) -> object:
    """Another process takes its place, unless one has, or the run is over for it."""
    if world.islands[island.name] is not island or island.alive or island.over or world.finished:
        return False
    if island.leaving.left and not island.leaving.returns:
        return False
    island = world.start_process(island.name, island.step_s, kept=island.leaving.saved)
    world.network.dial_later(island)
    return None


def leave(world: World, island: Island, fault: Fault) -> object:
    if not island.alive or island.frozen:
        return False
    world.network.leave(island, "it was asked to go")
    world.end_process(island)
    later(world, fault, lambda: come_back(world, island))
    return None


def _pause(world: World, island: Island, fault: Fault) -> object:
    if not island.alive or island.paused:
        return False
    island.paused = True
    later(world, fault, lambda: resume(island))
    return None


def resume(island: Island) -> object:
    if not island.paused or not island.alive:
        return False
    island.paused = False
    if not island.frozen:
        island.go_on_after_a_pause()
    return None


def _suspend(world: World, island: Island, fault: Fault) -> object:
    if not island.alive or island.frozen:
        return False
    island.frozen = True
    later(world, fault, lambda: thaw(island))
    return None


def thaw(island: Island) -> object:
    if not island.frozen or not island.alive:
        return False
    island.thaw()
    return None


def _slow(world: World, island: Island, fault: Fault) -> object:
    usual, island.step_s = island.step_s, island.step_s * (3.0 if fault.number % 2 else 0.4)

    def mend() -> None:
        island.step_s = usual

    later(world, fault, mend)
    return None


def _courier(world: World, island: Island, fault: Fault) -> object:
    if not island.alive or not island.courier or island.frozen:
        return False
    connection, island.connection = island.connection, None
    if connection is not None:
        world.network.closed_by(connection, "courier died")
    island.lose_courier()
    later(world, fault, lambda: new_courier(world, island))
    return None


def new_courier(world: World, island: Island) -> object:
    if island.courier or not island.alive or island.frozen:
        return False
    island.new_courier()
    world.network.dial_later(island)
    island.soon()
    return None


def _usurp(world: World, island: Island, fault: Fault) -> object:
    """Another process takes the name while the one before it still lives."""
    if not island.alive:
        return False
    usurper = world.start_process(island.name, island.step_s)
    world.network.dial_later(usurper)
    later(world, fault, lambda: world.kill(island) if island.alive else False)
    return None


def _broken(world: World, island: Island, fault: Fault) -> None:
    island.broken = True


def _mute(world: World, island: Island, fault: Fault) -> None:
    island.answers = False
    later(world, fault, lambda: setattr(island, "answers", True))


def _no_save(world: World, island: Island, fault: Fault) -> None:
    island.saves = False
    later(world, fault, lambda: setattr(island, "saves", True))


def _slow_stream(world: World, island: Island, fault: Fault) -> None:
    island.stream_s = 100.0
    later(world, fault, lambda: setattr(island, "stream_s", 0.0))


def _no_fit(world: World, island: Island, fault: Fault) -> None:
    """Its optimizer is of another kind: it refuses the others' state, and they refuse its own."""
    island.fits, island.lies = False, True
    later(world, fault, lambda: _fit(island))


def _fit(island: Island) -> None:
    island.fits, island.lies = True, False


def _jump(world: World, island: Island, fault: Fault) -> None:
    island.jump(fault.length)


def _reset(world: World, island: Island, fault: Fault) -> None:
    world.network.reset(island, "connection reset")


def _partition(up: bool, down: bool) -> Callable[[World, Island, Fault], object]:
    def begin(world: World, island: Island, fault: Fault) -> object:
        world.network.block(island, up=up, down=down)
        later(world, fault, lambda: world.network.unblock(island, up=up, down=down))
        return None

    return begin


def _drain(world: World, island: Island, fault: Fault) -> object:
    """`atoll drain`, whatever the learner is at: it joins, it is away, it has been asked before."""
    _afterwards(world, island, fault)
    return world.tell(world.reign, fx.DrainAsked(island.name, "the operator asked")) if world.reign.alive else False


def _interrupt(world: World, island: Island, fault: Fault) -> object:
    """SIGTERM or Ctrl-C: a drain that the syncer is not asked for."""
    if not island.alive:
        return False
    _afterwards(world, island, fault)
    island.leave("its machine is taken away", hurried=True)
    return None


def _afterwards(world: World, island: Island, fault: Fault) -> None:
    """Most come back under their name, half of those with the state that they saved; the others stay away."""
    leaving = island.leaving
    leaving.returns, leaving.saved = fault.number % 4 > 0, fault.number % 8 > 3
    leaving.then = lambda: later(world, fault, lambda: come_back(world, island))


LEARNERS: dict[str, Callable[[World, Island, Fault], object]] = {
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
