"""How each kind of fault begins and ends in a world."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from atoll.protocol import effects as fx
from atoll.simulate.faults import Fault
from atoll.simulate.island import Island
from atoll.simulate.world import World

CLOG = 50.0
LOSSY = 0.3
DOUBLED = 0.2
GIVER_S = 20.0
LOOK_S = 0.1
BOUNCES, BOUNCE_S = 12, 0.08
STALE_S = 4.0
"""A standby takes over from a syncer that has not moved for so long."""


def schedule(world: World, faults: list[Fault]) -> None:
    for fault in faults:
        world.agenda.later(fault.at, _begin, world, fault)


def _begin(world: World, fault: Fault) -> object:
    if world.finished:
        return False
    world.happened(fault)
    if fault.target >= 0:
        island = world.islands.get(f"learner-{fault.target}")
        return _LEARNERS[fault.kind](world, island, fault) if island is not None else False
    return _REST[fault.kind](world, fault)


def _later(world: World, fault: Fault, mend: Callable[[], object]) -> None:
    world.agenda.later(fault.length, mend)


# ---- learners -------------------------------------------------------------------------------------------------------


def _kill(world: World, island: Island, fault: Fault) -> object:
    if not island.alive:
        return False
    world.kill(island)
    _later(world, fault, lambda: come_back(world, island))
    return None


def come_back(world: World, island: Island) -> object:
    """Another process takes its place, unless one has, or the run is over for it."""
    if world.islands[island.name] is not island or island.alive or island.over or world.finished:
        return False
    island = world.start_process(island.name, island.step_s)
    world.network.dial_later(island)
    return None


def _leave(world: World, island: Island, fault: Fault) -> object:
    if not island.alive or island.frozen:
        return False
    world.network.leave(island, "it was asked to go")
    world.end_process(island)
    _later(world, fault, lambda: come_back(world, island))
    return None


def _pause(world: World, island: Island, fault: Fault) -> object:
    if not island.alive or island.paused:
        return False
    island.paused = True
    _later(world, fault, lambda: resume(island))
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
    _later(world, fault, lambda: thaw(island))
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

    _later(world, fault, mend)
    return None


def _courier(world: World, island: Island, fault: Fault) -> object:
    if not island.alive or not island.courier or island.frozen:
        return False
    connection, island.connection = island.connection, None
    if connection is not None:
        world.network.closed_by(connection, "courier died")
    island.lose_courier()
    _later(world, fault, lambda: new_courier(world, island))
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
    _later(world, fault, lambda: world.kill(island) if island.alive else False)
    return None


def _broken(world: World, island: Island, fault: Fault) -> None:
    island.broken = True


def _mute(world: World, island: Island, fault: Fault) -> None:
    island.answers = False
    _later(world, fault, lambda: setattr(island, "answers", True))


def _no_save(world: World, island: Island, fault: Fault) -> None:
    island.saves = False
    _later(world, fault, lambda: setattr(island, "saves", True))


def _slow_stream(world: World, island: Island, fault: Fault) -> None:
    island.stream_s = 100.0
    _later(world, fault, lambda: setattr(island, "stream_s", 0.0))


def _no_fit(world: World, island: Island, fault: Fault) -> None:
    island.fits = False
    _later(world, fault, lambda: setattr(island, "fits", True))


def _jump(world: World, island: Island, fault: Fault) -> None:
    island.jump(fault.length)


def _reset(world: World, island: Island, fault: Fault) -> None:
    world.network.reset(island, "connection reset")


def _partition(up: bool, down: bool) -> Callable[[World, Island, Fault], object]:
    def begin(world: World, island: Island, fault: Fault) -> object:
        world.network.block(island, up=up, down=down)
        _later(world, fault, lambda: world.network.unblock(island, up=up, down=down))
        return None

    return begin


_LEARNERS: dict[str, Callable[[World, Island, Fault], object]] = {
    "kill": _kill,
    "leave": _leave,
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
}


# ---- everybody, the syncer, its disk, the operator ------------------------------------------------------------------


def _clog(world: World, fault: Fault) -> None:
    world.network.slow = CLOG
    _later(world, fault, lambda: setattr(world.network, "slow", 1.0))


def _lossy(world: World, fault: Fault) -> None:
    world.network.body_loss = LOSSY
    _later(world, fault, lambda: setattr(world.network, "body_loss", 0.0))


def _doubled(world: World, fault: Fault) -> None:
    world.network.doubles = DOUBLED
    _later(world, fault, lambda: setattr(world.network, "doubles", 0.0))


def _crash(world: World, fault: Fault) -> object:
    if not world.reign.alive:
        return False
    world.crash_syncer(fault.length / 4)
    return None


def _power(world: World, fault: Fault) -> object:
    if not world.reign.alive:
        return False
    world.crash_syncer(fault.length / 4, power=True)
    return None


def _crash_at(when: str) -> Callable[[World, Fault], None]:
    def begin(world: World, fault: Fault) -> None:
        left = fault.number

        def dies(effect: fx.SyncerEffect, moment: str) -> bool:
            nonlocal left
            left -= moment == when
            if left == 0:
                world.crash = None
            return left == 0

        world.crash = dies

    return begin


def _failover(world: World, fault: Fault) -> object:
    """It stands still; a standby takes over, and then it wakes up."""
    if not _stop(world, fault):
        return False
    world.agenda.later(STALE_S, world.new_reign, world.disk.claim)
    return None


def _rival(world: World, fault: Fault) -> object:
    """A standby takes over from one that lives: until that notices, whoever has to dial again reaches either."""
    if not world.reign.alive or world.reign.paused:
        return False
    world.new_reign(world.disk.claim)
    for number in range(BOUNCES):
        name = f"learner-{(fault.number + number) % world.settings.learners}"
        world.agenda.later(BOUNCE_S * number, _bounce, world, name)
    return None


def _bounce(world: World, name: str) -> object:
    island = world.islands.get(name)
    if island is None or not island.alive or island.frozen:
        return False
    world.network.reset(island, "connection reset")
    return None


def _stop_syncer(world: World, fault: Fault) -> object:
    return None if _stop(world, fault) else False


def _stop(world: World, fault: Fault) -> bool:
    reign = world.reign
    if not reign.alive or reign.paused:
        return False
    reign.paused = True
    world.network.silent(reign)
    _later(world, fault, lambda: reign.wake_up() if reign.paused and reign.alive else False)
    return True


def _jump_syncer(world: World, fault: Fault) -> None:
    world.reign.jump(fault.length)


def _unmergeable(world: World, fault: Fault) -> None:
    committed = world.syncer.committed
    world.unmergeable.update((committed + more, attempt) for more in (0, 1, 2) for attempt in (1, fault.number % 3))


def _overflow(world: World, fault: Fault) -> None:
    """The outer state of the next rounds' fragments breaks in the merge, and starts anew."""
    _unmergeable(world, fault)
    world.overflow = True
    _later(world, fault, lambda: setattr(world, "overflow", False))


def _giver(world: World, fault: Fault) -> object:
    """The first that gives its state away from now on goes in the middle of it."""
    givers = [
        island for island in world.processes if island.alive and any(one.tickets for one in island.given.values())
    ]
    if givers:
        return (_leave if fault.number % 2 else _kill)(world, givers[0], fault)
    if world.now < fault.at + fault.length + GIVER_S:
        world.agenda.later(LOOK_S, _giver, world, fault)
    return False


def _disk(what: str) -> Callable[[World, Fault], None]:
    def begin(world: World, fault: Fault) -> None:
        setattr(world.disk, what, True)
        _later(world, fault, lambda: setattr(world.disk, what, False))

    return begin


def _disk_slow(world: World, fault: Fault) -> None:
    world.disk.slow = CLOG
    _later(world, fault, lambda: setattr(world.disk, "slow", 1.0))


def _set(world: World, fault: Fault) -> None:
    """`atoll set`, while it runs."""
    settings, pick = world.syncer.settings, fault.number % 6
    changes = (
        {"quorum": 1},
        {"quorum": settings.learners},
        {"grace": not settings.grace},
        {"cut_every": 2 * settings.fragments},
        {"lost_after_s": 4.0, "patience_s": 3.0},
        {"strikes": 2},
    )[pick]
    changed = msgspec.structs.replace(settings, **changes)
    world.tell(world.reign, fx.ChangeAsked(changed, {}, str(changes)))


def _end(world: World, fault: Fault) -> None:
    world.tell(world.reign, fx.EndAsked("the operator asked for it"))


_REST: dict[str, Callable[[World, Fault], object]] = {
    "clog": _clog,
    "lossy": _lossy,
    "doubled": _doubled,
    "crash": _crash,
    "crash-before": _crash_at("before"),
    "crash-after": _crash_at("after"),
    "power": _power,
    "failover": _failover,
    "rival": _rival,
    "stop-syncer": _stop_syncer,
    "jump-syncer": _jump_syncer,
    "unmergeable": _unmergeable,
    "overflow": _overflow,
    "giver": _giver,
    "disk-full": _disk("full"),
    "disk-fails": _disk("broken"),
    "disk-slow": _disk_slow,
    "cuts-fail": _disk("cuts_fail"),
    "set": _set,
    "end": _end,
}
