"""How faults of everybody's links, of the syncer and of its disk begin and end; and what the operator does."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from atoll.protocol import effects as fx
from atoll.simulate.faults import Fault
from atoll.simulate.inject_learners import kill, later, leave
from atoll.simulate.world import World

CLOG = 50.0
LOSSY = 0.3
DOUBLED = 0.2
GIVER_S = 20.0
LOOK_S = 0.1
BOUNCES, BOUNCE_S = 12, 0.08
STALE_S = 4.0
"""A standby takes over from a syncer that has not moved for so long."""


def _clog(world: World, fault: Fault) -> None:
    world.network.slow = CLOG
    later(world, fault, lambda: setattr(world.network, "slow", 1.0))


def _lossy(world: World, fault: Fault) -> None:
    world.network.body_loss = LOSSY
    later(world, fault, lambda: setattr(world.network, "body_loss", 0.0))


def _doubled(world: World, fault: Fault) -> None:
    world.network.doubles = DOUBLED
    later(world, fault, lambda: setattr(world.network, "doubles", 0.0))


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
    reign.stop()
    world.network.silent(reign)
    later(world, fault, lambda: reign.wake_up() if reign.paused and reign.alive else False)
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
    later(world, fault, lambda: setattr(world, "overflow", False))


def _giver(world: World, fault: Fault) -> object:
    """The first that gives its state away from now on goes in the middle of it."""
    givers = [
        island for island in world.processes if island.alive and any(one.tickets for one in island.given.values())
    ]
    if givers:
        return (leave if fault.number % 2 else kill)(world, givers[0], fault)
    if world.now < fault.at + fault.length + GIVER_S:
        world.agenda.later(LOOK_S, _giver, world, fault)
    return False


def _disk(what: str) -> Callable[[World, Fault], None]:
    def begin(world: World, fault: Fault) -> None:
        setattr(world.disk, what, True)
        later(world, fault, lambda: setattr(world.disk, what, False))

    return begin


def _disk_slow(world: World, fault: Fault) -> None:
    world.disk.slow = CLOG
    later(world, fault, lambda: setattr(world.disk, "slow", 1.0))


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


def _rollback(world: World, fault: Fault) -> None:
    """The operator lets the run be rolled back; it has a good score, and after a while one that is not finite."""
    settings = msgspec.structs.replace(world.syncer.settings, guard="rollback")
    world.tell(world.reign, fx.ChangeAsked(settings, {}, "guard=rollback"))
    world.tell(world.reign, fx.Scored(world.syncer.committed, 1.0))
    later(world, fault, lambda: world.tell(world.reign, fx.Scored(world.syncer.committed, None)))


def _end(world: World, fault: Fault) -> None:
    world.tell(world.reign, fx.EndAsked("the operator asked for it"))


REST: dict[str, Callable[[World, Fault], object]] = {
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
    "rollback": _rollback,
    "end": _end,
}
