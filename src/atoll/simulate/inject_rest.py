"""How faults of everybody's links, of the syncer and of its disk begin and end; and what the operator does."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from atoll.protocol import effects as fx
from atoll.simulate.faults import Fault
from atoll.simulate.inject_learners import kill, leave, mend_later
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
    mend_later(world, fault, lambda: setattr(world.network, "slow", 1.0))


def _lossy(world: World, fault: Fault) -> None:
    world.network.payload_loss = LOSSY
    mend_later(world, fault, lambda: setattr(world.network, "payload_loss", 0.0))


def _doubled(world: World, fault: Fault) -> None:
    world.network.doubles = DOUBLED
    mend_later(world, fault, lambda: setattr(world.network, "doubles", 0.0))


def _crash(world: World, fault: Fault) -> object:
    if not world.simulated_syncer.alive:
        return False
    world.crash_syncer(fault.length / 4)
    return None


def _power(world: World, fault: Fault) -> object:
    if not world.simulated_syncer.alive:
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
    world.queue.call_later(STALE_S, world.start_syncer, world.disk.claim)
    return None


def _rival(world: World, fault: Fault) -> object:
    """A standby takes over from one that lives: until that notices, whoever has to dial again reaches either."""
    if not world.simulated_syncer.alive or world.simulated_syncer.paused:
        return False
    world.start_syncer(world.disk.claim)
    for number in range(BOUNCES):
        name = f"learner-{(fault.number + number) % world.settings.learners}"
        world.queue.call_later(BOUNCE_S * number, _bounce, world, name)
    return None


def _bounce(world: World, name: str) -> object:
    learner = world.learners.get(name)
    if learner is None or not learner.alive or learner.frozen:
        return False
    world.network.reset(learner, "connection reset")
    return None


def _stop_syncer(world: World, fault: Fault) -> object:
    return None if _stop(world, fault) else False


def _stop(world: World, fault: Fault) -> bool:
    syncer = world.simulated_syncer
    if not syncer.alive or syncer.paused:
        return False
    syncer.stop()
    world.network.silent(syncer)
    mend_later(world, fault, lambda: syncer.wake_up() if syncer.paused and syncer.alive else False)
    return True


def _jump_syncer(world: World, fault: Fault) -> None:
    world.simulated_syncer.jump(fault.length)


def _unmergeable(world: World, fault: Fault) -> None:
    committed = world.syncer.committed
    world.unmergeable.update((committed + more, attempt) for more in (0, 1, 2) for attempt in (1, fault.number % 3))


def _overflow(world: World, fault: Fault) -> None:
    """The outer state of the next rounds' fragments breaks in the merge, and starts anew."""
    _unmergeable(world, fault)
    world.overflow = True
    mend_later(world, fault, lambda: setattr(world, "overflow", False))


def _giver(world: World, fault: Fault) -> object:
    """The first that gives its state away from now on goes in the middle of it."""
    givers = [
        learner for learner in world.processes if learner.alive and any(one.tickets for one in learner.given.values())
    ]
    if givers:
        return (leave if fault.number % 2 else kill)(world, givers[0], fault)
    if world.now < fault.at + fault.length + GIVER_S:
        world.queue.call_later(LOOK_S, _giver, world, fault)
    return False


def _disk(what: str) -> Callable[[World, Fault], None]:
    def begin(world: World, fault: Fault) -> None:
        setattr(world.disk, what, True)
        mend_later(world, fault, lambda: setattr(world.disk, what, False))

    return begin


def _disk_slow(world: World, fault: Fault) -> None:
    world.disk.slow = CLOG
    mend_later(world, fault, lambda: setattr(world.disk, "slow", 1.0))


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
    world.deliver(world.simulated_syncer, fx.ChangeAsked(changed, {}, str(changes)))


def _rollback(world: World, fault: Fault) -> None:
    """The operator lets the run be rolled back; it has a good score, and after a while one that is not finite."""
    settings = msgspec.structs.replace(world.syncer.settings, guard="rollback")
    world.deliver(world.simulated_syncer, fx.ChangeAsked(settings, {}, "guard=rollback"))
    world.deliver(world.simulated_syncer, fx.Scored(world.syncer.committed, 1.0))
    mend_later(world, fault, lambda: world.deliver(world.simulated_syncer, fx.Scored(world.syncer.committed, None)))


def _end(world: World, fault: Fault) -> None:
    world.deliver(world.simulated_syncer, fx.EndAsked("the operator asked for it"))


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
