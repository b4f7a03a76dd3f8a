"""How faults begin and end in a world: each begins at its time, and is mended after its length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from atoll.protocol.syncer import effects as fx
from atoll.simulate.faults import Fault
from atoll.simulate.network import NOTICE_S
from atoll.simulate.ranked_learner import RankedLearner
from atoll.simulate.relay_network import RelayedNetwork
from atoll.simulate.simulated_learner import SimulatedLearner
from atoll.simulate.simulated_relay import SimulatedRelay
from atoll.simulate.simulated_shard import SimulatedShard
from atoll.simulate.world import World

SimulatedPart = TypeVar("SimulatedPart", SimulatedShard, SimulatedRelay)
CLOG = 50.0
LOSSY = 0.3
DOUBLED = 0.2
HELPER_S = 20.0
LOOK_S = 0.1
BOUNCES, BOUNCE_S = 12, 0.08
STALE_S = 4.0
"""A standby takes over from a syncer that has not moved for so long."""


def schedule(world: World, faults: list[Fault]) -> None:
    for fault in faults:
        world.queue.call_later(fault.at, _begin, world, fault)


def _begin(world: World, fault: Fault) -> object:
    if world.finished:
        return False
    world.on_fault(fault)
    world.invariants.drains.watch_fault(fault)
    world.invariants.link_checks.watch_fault()
    if fault.target >= 0:
        learner = world.learners.get(f"learner-{fault.target}")
        return LEARNER_FAULTS[fault.kind](world, learner, fault) if learner is not None else False
    return OTHER_FAULTS[fault.kind](world, fault)


# ---- one learner: its processes, its clock, its links ----------------------------------------------------------------


def mend_later(world: World, fault: Fault, mend: Callable[[], object]) -> None:
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
    learner = world.start_process(learner.name, learner.step_s, restored=learner.leaving.saved)
    world.network.dial_later(learner)
    return None


def leave(world: World, learner: SimulatedLearner, fault: Fault) -> object:
    if not learner.alive or learner.frozen:
        return False
    world.network.say_goodbye(learner, "it was asked to go")
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
    mend_later(world, fault, lambda: resume_host(learner))
    return None


def resume_host(learner: SimulatedLearner) -> object:
    if not learner.frozen or not learner.alive:
        return False
    learner.resume_host()
    return None


def _slow(world: World, learner: SimulatedLearner, fault: Fault) -> object:
    usual, learner.step_s = learner.step_s, learner.step_s * (3.0 if fault.number % 2 else 0.4)

    def mend() -> None:
        learner.step_s = usual

    mend_later(world, fault, mend)
    return None


def end_lags(learner: SimulatedLearner) -> None:
    if isinstance(learner, RankedLearner):
        for rank in learner.ranks:
            rank.lag_s = 0.0


def _courier(world: World, learner: SimulatedLearner, fault: Fault) -> object:
    if isinstance(learner, RankedLearner):
        return _lose_rank(world, learner, fault)  # no other takes its place
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


def _start_second_process(world: World, learner: SimulatedLearner, fault: Fault) -> object:
    """Another process takes the name while the one before it still lives."""
    if not learner.alive:
        return False
    second = world.start_process(learner.name, learner.step_s)
    world.network.dial_later(second)
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
    world.network.reset_connection(learner, "connection reset")


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


def _lose_rank(world: World, learner: SimulatedLearner, fault: Fault) -> object:
    """The process of one rank dies, and the learner with it."""
    if not isinstance(learner, RankedLearner):
        return False
    rank = fault.number % len(learner.ranks)
    if rank == 0:
        return kill(world, learner, fault)
    return learner.lose_rank(rank, lambda: mend_later(world, fault, lambda: come_back(world, learner)))


def _late_rank(world: World, learner: SimulatedLearner, fault: Fault) -> object:
    """The courier of one rank is late with all that it hears and says."""
    if not isinstance(learner, RankedLearner):
        return False
    rank = learner.ranks[fault.number % len(learner.ranks)]
    rank.lag_s = fault.length
    mend_later(world, fault, lambda: setattr(rank, "lag_s", 0.0))
    return None


LEARNER_FAULTS: dict[str, Callable[[World, SimulatedLearner, Fault], object]] = {
    "kill": kill,
    "leave": leave,
    "pause": _pause,
    "suspend": _suspend,
    "slow": _slow,
    "courier": _courier,
    "second-process": _start_second_process,
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
    "lose-rank": _lose_rank,
    "late-rank": _late_rank,
}


# ---- everybody's links, the syncer, its disk, the operator -----------------------------------------------------------


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
    world.network.reset_connection(learner, "connection reset")
    return None


def _stop_syncer(world: World, fault: Fault) -> object:
    return None if _stop(world, fault) else False


def _stop(world: World, fault: Fault) -> bool:
    syncer = world.simulated_syncer
    if not syncer.alive or syncer.paused:
        return False
    syncer.stop()
    world.network.stop_pings(syncer)
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


def _end_helper(world: World, fault: Fault) -> object:
    """The first that gives its state away from now on goes in the middle of it."""
    helpers = [
        learner for learner in world.processes if learner.alive and any(one.tickets for one in learner.given.values())
    ]
    if helpers:
        return (leave if fault.number % 2 else kill)(world, helpers[0], fault)
    if world.now < fault.at + fault.length + HELPER_S:
        world.queue.call_later(LOOK_S, _end_helper, world, fault)
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
    settings, pick = world.syncer.next_settings.settings, fault.number % 6
    changes = (
        {"quorum": 1},
        {"quorum": settings.learners},
        {"quorum_policy": "minimum" if settings.quorum_policy == "grace" else "grace"},
        {"cut_every": 2 * settings.fragments},
        {"lost_after_s": 4.0, "patience_s": 3.0},
        {"strikes": 2},
    )[pick]
    changed = msgspec.structs.replace(settings, **changes)
    world.deliver(world.simulated_syncer, fx.ChangeAsked(changed, {}, str(changes)))


def _rollback(world: World, fault: Fault) -> None:
    """The operator lets the run be rolled back; it has a good score, and after a while one that is not finite."""
    settings = msgspec.structs.replace(world.syncer.next_settings.settings, guard="rollback")
    world.deliver(world.simulated_syncer, fx.ChangeAsked(settings, {}, "guard=rollback"))
    world.deliver(world.simulated_syncer, fx.Scored(world.syncer.committed, 1.0))
    mend_later(world, fault, lambda: world.deliver(world.simulated_syncer, fx.Scored(world.syncer.committed, None)))


def _end(world: World, fault: Fault) -> None:
    world.deliver(world.simulated_syncer, fx.EndAsked("the operator asked for it"))


def _pick(parts: Sequence[SimulatedPart], fault: Fault) -> SimulatedPart | None:
    return parts[fault.number % len(parts)] if parts else None


def _kill_part(world: World, fault: Fault, part: SimulatedShard | SimulatedRelay | None) -> object:
    if part is None or not part.alive:
        return False
    part.kill()
    mend_later(world, fault, part.start)
    return None


def _notice_later(world: World, part: SimulatedShard | SimulatedRelay) -> None:
    """It hears nothing more from above."""
    world.queue.call_later(NOTICE_S * world.random.uniform(0.5, 1.0), part.give_up_link)


def _kill_shard(world: World, fault: Fault) -> object:
    return _kill_part(world, fault, _pick(world.shards, fault))


def _crash_shard(world: World, fault: Fault) -> object:
    """In the middle of what it does."""
    if (shard := _pick(world.shards, fault)) is None or not shard.alive:
        return False
    shard.dies_at = 1 + fault.number // 4
    return None


def _partition_shard(world: World, fault: Fault) -> object:
    """Between it and the lead."""
    if (shard := _pick(world.shards, fault)) is None or shard.blocked:
        return False
    shard.blocked = True
    _notice_later(world, shard)
    mend_later(world, fault, shard.unblock)
    return None


def _stop_pings(world: World, relay: SimulatedRelay) -> None:
    assert isinstance(world.network, RelayedNetwork)
    world.network.stop_pings_of_relay(relay)


def _kill_relay(world: World, fault: Fault) -> object:
    return _kill_part(world, fault, _pick(world.relays, fault))


def _cut_relay(world: World, fault: Fault) -> object:
    """Between it and the syncer."""
    if (relay := _pick(world.relays, fault)) is None or relay.cut:
        return False
    relay.cut = True
    _notice_later(world, relay)
    mend_later(world, fault, relay.mend)
    return None


def _stop_relay(world: World, fault: Fault) -> object:
    """Its process stands still."""
    if (relay := _pick(world.relays, fault)) is None or relay.paused or not relay.alive:
        return False
    relay.stop()
    _stop_pings(world, relay)
    _notice_later(world, relay)
    mend_later(world, fault, relay.wake_up)
    return None


def _hide_relay(world: World, fault: Fault) -> object:
    """No learner reaches it."""
    if (relay := _pick(world.relays, fault)) is None or relay.hidden:
        return False
    relay.hidden = True
    _stop_pings(world, relay)
    mend_later(world, fault, lambda: setattr(relay, "hidden", False))
    return None


OTHER_FAULTS: dict[str, Callable[[World, Fault], object]] = {
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
    "helper": _end_helper,
    "kill-shard": _kill_shard,
    "crash-shard": _crash_shard,
    "partition-shard": _partition_shard,
    "kill-relay": _kill_relay,
    "cut-relay": _cut_relay,
    "stop-relay": _stop_relay,
    "hide-relay": _hide_relay,
    "disk-full": _disk("full"),
    "disk-fails": _disk("broken"),
    "disk-slow": _disk_slow,
    "cuts-fail": _disk("cuts_fail"),
    "set": _set,
    "rollback": _rollback,
    "end": _end,
}
