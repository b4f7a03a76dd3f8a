"""One seed: a world is drawn, faults happen to it, they stop, and the run comes to its end.

Invariants hold all the while. Afterwards: every live learner is current within a cycle, the run can end, and an end in
peace loses nothing.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Sequence
from math import inf
from operator import gt
from typing import Any, Literal, get_args

import msgspec

from atoll.protocol import records
from atoll.protocol.learner.effects import Registered
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as fx
from atoll.simulate import inject
from atoll.simulate.cells import CellModel, begin_cells, constant_gradient
from atoll.simulate.drawn_parts import (
    DrawnLinks,
    DrawnRanks,
    DrawnRelays,
    DrawnShards,
    draw_links,
    draw_rank_faults,
    draw_ranks,
    draw_relay_faults,
    draw_relays,
    draw_shard_faults,
    draw_shards,
)
from atoll.simulate.faults import Fault, draw_faults
from atoll.simulate.oracle import Violation
from atoll.simulate.trace import Trace
from atoll.simulate.world import World

WorldKind = Literal["plain", "ranks", "shards", "relays", "links"]
"""What a world has beside plain learners and one syncer."""
KINDS: tuple[WorldKind, ...] = get_args(WorldKind)
LEARNERS = (1, 2, 2, 3, 3, 4, 5)
"""One of these, where nobody says how many."""
CALM_S = 40.0
"""After the last fault: time to notice the dead, to dial again, to recover (two tries of 10 s and H rounds)."""
RECOVERY_S = 10.0
"""What is allowed where H rounds pass sooner."""
LOOK_S = 0.5
END_S = 2000.0
"""The most virtual seconds a run may take to end."""
MOST_EVENTS = 400_000


# ---- what a seed decides ---------------------------------------------------------------------------------------------


class Options(msgspec.Struct, frozen=True):
    """The settings of the run, and how its hosts and links are."""

    settings: Settings
    run_seed: int
    """Of all that is drawn while the world runs."""
    step_s: tuple[float, ...]
    late_s: tuple[float, ...]
    """Per learner, when it first joins."""
    rates: tuple[float, ...]
    """Per learner, how fast its clock runs."""
    latency_s: float
    jitter: float
    sync_s: float
    every_round: bool
    """durability = "round"; otherwise "cut"."""
    direct: bool
    courier_s: float
    down_s: float
    """How long a syncer that died is away."""
    outer_lr: float
    data: tuple[tuple[str, int, float], ...]
    epochs: int
    batch: int
    merge_s: float
    body_s: float
    """What a fragment takes beside the latency: rounds of several steps, several of them under way."""
    faults_s: float
    """Faults begin before this moment, and are over by then."""

    @property
    def registered(self) -> Registered | None:
        return Registered(self.data, self.epochs, self.batch) if self.data else None


def draw_options(dice: random.Random, learners: int | None) -> Options:
    """The same draws whether the number of learners is given or drawn: the same number gives the same world."""
    drawn = dice.choice(LEARNERS)
    names = learners if learners is not None else drawn
    per_learner = random.Random(dice.getrandbits(64))
    latency_s, jitter = dice.choice([0.0, 0.002, 0.02, 0.2, 0.5]), dice.choice([0.0, 0.5, 2.0])
    body_s = _body_s(per_learner)
    return Options(
        settings=_settings(dice, names, latency_s * (1 + jitter) + body_s),
        run_seed=dice.getrandbits(64),
        step_s=tuple(per_learner.choice([1.0, per_learner.uniform(0.3, 2.0)]) for _ in range(names)),
        late_s=tuple(per_learner.choice([0.0, 0.0, 0.0, per_learner.uniform(0, 30)]) for _ in range(names)),
        rates=tuple(per_learner.choice([1.0, 1.0, per_learner.uniform(0.98, 1.02)]) for _ in range(names)),
        latency_s=latency_s,
        jitter=jitter,
        sync_s=dice.choice([0.0, 0.001, 0.01, 0.15]),
        every_round=dice.random() < 0.85,
        direct=dice.random() < 0.5,
        courier_s=dice.choice([0.0, 0.0, 0.05]),
        down_s=dice.choice([0.2, 1.0, 4.0]),
        outer_lr=dice.choice([1.0, 0.7]),
        **_data(dice),
        merge_s=dice.choice([0.0, 0.0, 0.05]),
        body_s=body_s,
        faults_s=dice.choice([80.0, 140.0, 205.0]),
    )


def _body_s(dice: random.Random) -> float:
    """Drawn apart, so that the rest of a seed's world is what it was before fragments had a size."""
    apart = random.Random()
    apart.setstate(dice.getstate())
    apart.getrandbits(8192)
    return apart.choice([0.0, 0.0, 0.0, apart.uniform(0.5, 3.0)])


def _settings(dice: random.Random, learners: int, delay_s: float) -> Settings:
    """Such that a link of that delay, in peace, makes nobody look dead."""
    fragments = dice.randint(1, 6)
    every = fragments * dice.choice([1, 1, 1, 2]) + dice.choice([0, 0, 1])
    quorum = dice.random()
    return Settings(
        learners=learners,
        fragments=fragments,
        sync_every=every,
        overlap=min(dice.randint(0, 3), every - 1),
        quorum=1 + int(quorum * learners) if dice.random() < 0.6 else 1,
        synchronous=dice.random() < 0.3,
        quorum_policy="grace" if dice.random() < 0.8 else "minimum",
        adopt=dice.choice(["overwrite", "overwrite", "blend", "carry", "carry"]),
        steps=dice.choice([0, 0, 200, 600]),
        tokens=dice.choice([0, 0, 0, 3000 * learners]),
        cut_every=dice.choice([-1, 0, 3, 3 * fragments]),
        cut_wait_s=dice.choice([3.0, 20.0]),
        assemble_s=dice.choice([5.0, 15.0]),
        patience_s=dice.choice([2.0, 5.0]) + 4 * delay_s,
        lost_after_s=dice.choice([3.0, 6.0]) + 2 * delay_s,
        abandon_s=dice.choice([8.0, 30.0, 300.0]),
        stalled_after_s=dice.choice([5.0, 10.0]),
        pull_floor_s=dice.choice([0.5, 1.0]) + 4 * delay_s,
        strikes=dice.choice([1, 3]),
        startup_s=dice.choice([0.5, 3.0]),
    ).resolved(1000)


def _data(dice: random.Random) -> dict[str, Any]:
    kind, samples = dice.random(), dice.choice([700, 3000, 20_000])
    one = (("text", samples, 1.0),)
    two = (*one, ("code", samples // 3, 0.5))
    data = () if kind < 0.3 else one if kind < 0.7 else two
    return {"data": data, "epochs": dice.choice([0, 0, 0, 2]), "batch": dice.choice([1, 2, 4])}


class SeedPlan(msgspec.Struct, frozen=True):
    """All that a seed decides."""

    seed: int
    options: Options
    faults: tuple[Fault, ...]
    ranks: DrawnRanks | None = None
    """In worlds with learners of several ranks."""
    shards: DrawnShards | None = None
    """In worlds with a syncer of several shards."""
    relays: DrawnRelays | None = None
    """In worlds with relays between learners and the syncer."""
    links: DrawnLinks | None = None
    """Settings of worlds whose links have a width."""

    @property
    def kind(self) -> WorldKind:
        if self.shards is not None:
            return "shards"
        if self.relays is not None:
            return "relays"
        if self.links is not None:
            return "links"
        return "plain" if self.ranks is None else "ranks"


class Outcome(msgspec.Struct, frozen=True):
    seed: int
    learners: int
    events: int
    rounds: int
    trace: str
    invariant: str = ""
    """The one that does not hold; empty: all do."""
    message: str = ""
    learner: str = ""
    fragment: int = -1


def plan(seed: int, learners: int | None = None, kind: WorldKind = "plain") -> SeedPlan:
    """What other kinds of worlds have beside a plain one is drawn apart: the rest of a seed is the same in all."""
    dice = random.Random(seed)
    drawn = draw_options(dice, learners)
    count, until = drawn.settings.learners, drawn.faults_s
    plain = SeedPlan(seed, drawn, tuple(draw_faults(dice, count, until)))
    if kind == "plain":
        return plain
    if kind == "shards":
        kept = [fault for fault in plain.faults if fault.kind != "rollback"]  # refused with several shards
        faults = sorted([*kept, *draw_shard_faults(seed, until)], key=lambda fault: fault.at)
        shards = draw_shards(seed, drawn.settings.fragments)
        return msgspec.structs.replace(plain, faults=tuple(faults), shards=shards)
    if kind == "relays":
        faults = sorted([*plain.faults, *draw_relay_faults(seed, until)], key=lambda fault: fault.at)
        return msgspec.structs.replace(plain, faults=tuple(faults), relays=draw_relays(seed, count))
    if kind == "links":
        return _with_links(plain, draw_links(seed, count, until))
    ranks = draw_ranks(seed, count, drawn.settings.fragments)
    faults = sorted([*plain.faults, *draw_rank_faults(seed, count, until)], key=lambda fault: fault.at)
    return msgspec.structs.replace(plain, faults=tuple(faults), ranks=ranks)


def _with_links(plain: SeedPlan, links: DrawnLinks) -> SeedPlan:
    """Add links to a plan, and lengthen its time limits: no learner may look dead while bodies wait for each other."""
    drawn = plain.options.settings
    settings = msgspec.structs.replace(
        drawn,
        patience_s=drawn.patience_s + 4 * links.slowest_s,
        lost_after_s=drawn.lost_after_s + 2 * links.slowest_s,
        pull_floor_s=drawn.pull_floor_s + 4 * links.slowest_s,
        assemble_s=drawn.assemble_s + 4 * links.slowest_s,
    )
    options = msgspec.structs.replace(plain.options, settings=settings)
    return msgspec.structs.replace(plain, options=options, links=links, faults=() if links.calm else plain.faults)


# ---- the run of a seed -----------------------------------------------------------------------------------------------


def make(plan: SeedPlan, world: type[World] = World, *, traced: bool = True) -> World:
    """The world of a plan, before anything has happened in it; `traced`: with a hash of all that will."""
    drawn, more = plan.options, dict[str, Any]()
    if plan.kind in ("ranks", "shards"):
        more = {"theta": begin_cells(), "gradient": constant_gradient}
    if plan.ranks is not None:
        model = CellModel(drawn.settings.fragments)
        more |= {"model": model, "ranks": plan.ranks.make_layouts(model)}
    if plan.shards is not None:
        more |= {"shards": plan.shards}
    if plan.relays is not None:
        more |= {"relays": plan.relays}
    if plan.links is not None:
        more |= {"links": plan.links}
    made = world(
        drawn.settings,
        seed=drawn.run_seed,
        latency_s=drawn.latency_s,
        jitter=drawn.jitter,
        sync_s=drawn.sync_s,
        every_round=drawn.every_round,
        outer_lr=drawn.outer_lr,
        direct=drawn.direct,
        courier_s=drawn.courier_s,
        down_s=drawn.down_s,
        merge_s=drawn.merge_s,
        body_s=drawn.body_s,
        data=drawn.registered,
        trace=Trace() if traced else None,
        **more,
    )
    made.network.redials = made.network.apart = True
    made.simulated_syncer.check_lease()
    for number, late_s in enumerate(drawn.late_s):
        made.queue.call_later(late_s, _first_join, made, number, drawn)
    inject.schedule(made, list(plan.faults))
    return made


def _first_join(world: World, number: int, drawn: Options) -> None:
    learner = world.join(f"learner-{number}", drawn.step_s[number])
    learner.clock.rate = drawn.rates[number]
    world.network.dial_later(learner)


def run(plan: SeedPlan, world: World | None = None) -> Outcome:
    world = world or make(plan)
    try:
        _run(world, plan.options)
    except Violation as broken:
        about = (broken.invariant, broken.message, broken.learner, broken.fragment)
        return _outcome(plan, world, *about)
    except (AssertionError, LookupError, ValueError, TypeError, AttributeError) as error:
        return _outcome(plan, world, "the rules hold together", _where(error))
    return _outcome(plan, world)


def _outcome(plan: SeedPlan, world: World, *broken: Any) -> Outcome:
    trace = world.trace.hexdigest() if world.trace is not None else ""
    counted = (plan.options.settings.learners, world.events, world.syncer.committed, trace)
    return Outcome(plan.seed, *counted, *broken)


def _where(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {last.name} ({last.filename.rpartition('/')[2]}:{last.lineno}): {error}"


def _run(world: World, drawn: Options) -> None:
    _until(world, drawn.faults_s)
    end_faults(world)
    _until(world, world.now + CALM_S)  # only now the term is settled: an end that was not durable may be forgotten
    if _is_running(world):
        _becomes_current(world)
    lost = _lost(world) if _is_running(world) else None
    if _is_running(world):
        world.deliver(world.simulated_syncer, fx.EndAsked("the campaign is over"))
    _until(world, world.now + END_S)
    if not world.finished:
        raise Violation("the run can end", f"it is {world.syncer.phase} in round {world.syncer.committed}")
    _has_ended(world, lost)


def _lost(world: World) -> tuple[int, ...]:
    """Per fragment, also what those had that have left for good and could not say so: their accounts are open."""
    ledger = world.syncer.history.ledger
    away = [account.fates().in_flight for (name, _), account in ledger.open.items() if not world.learners[name].alive]
    return tuple(map(sum, zip(ledger.totals().lost, *away, strict=True)))


def _is_running(world: World) -> bool:
    return not world.finished and world.syncer.phase in ("empty", "running")


def _until(world: World, moment: float) -> None:
    world.run(moment, MOST_EVENTS)
    if world.events >= MOST_EVENTS:
        raise Violation("the run can end", f"{world.events} events are not enough")
    world.queue.now = max(world.queue.now, moment) if not world.finished else world.queue.now


def end_faults(world: World) -> None:
    """Faults stop: whatever is down comes up, whoever stands still goes on."""
    world.crash = None
    world.unmergeable.clear()
    network, disk = world.network, world.disk
    network.slow, network.payload_loss, network.doubles = 1.0, 0.0, 0.0
    disk.full = disk.broken = disk.cuts_fail = False
    disk.slow = 1.0
    for shard in world.shards:
        shard.dies_at = 0
        shard.unblock()
        shard.start()
    for relay in world.relays:
        relay.hidden = False
        relay.mend()
        relay.wake_up()
        relay.start()
    for learner in list(world.processes):
        learner.leaving.returns, learner.leaving.until = False, inf
        learner.answers, learner.saves, learner.fits, learner.stream_s = True, True, True, 0.0
        learner.lies = False
        if world.learners[learner.name] is not learner:
            world.kill(learner)
    for learner in list(world.learners.values()):
        network.unblock(learner, up=bool(learner.blocked_up), down=bool(learner.blocked_down))
        inject.resume_host(learner)
        inject.resume(learner)
        inject.end_lags(learner)
        inject.new_courier(world, learner)
        inject.come_back(world, learner)


def _becomes_current(world: World) -> None:
    """Once everybody is back, within a cycle (or RECOVERY_S) all hold what was committed then; and rounds go on.

    With carry, a learner that gave a copy to a later round of a fragment adopts no version of it before that round's
    (learner/versions.py). The round is one of the cycle, so its version is on the way by then."""
    settings = world.syncer.settings
    versions, first, since = list(world.syncer.versions), world.syncer.committed, world.now
    # Broken numbers are a fault that no clock ends: only a quarantine does, after as many rounds as there are strikes.
    # It may come in this cycle; that such a learner is current again, the end of the run shows.
    sound = [name for name, learner in world.learners.items() if not learner.broken]
    slowest = max(learner.step_s for learner in world.learners.values())
    steps = settings.sync_every * settings.sync_every / settings.fragments
    least_s, most_s = RECOVERY_S + 2 * slowest, 2 * slowest * (steps + settings.sync_every) + CALM_S
    most_s += 8 * settings.sync_every * world.network.longest_s
    least_s += 2 * settings.fragments * world.network.link_s
    way_s = world.crossings / 2 * world.network.longest_s + 2 * slowest  # announcement, request and version
    rounds, checked_at = max(settings.sync_every, settings.fragments), inf
    while _is_running(world) and world.now < since + most_s + way_s:
        behind, in_time = world.syncer.committed - first, world.now >= since + least_s
        if behind >= settings.fragments and in_time and checked_at == inf:
            _check_all_hold(world, versions, sound, asked_in=range(first, world.syncer.committed))
            checked_at = world.now
        if behind >= rounds and world.now >= checked_at + way_s:
            break
        _until(world, world.now + LOOK_S)
    if not _is_running(world):
        return
    world.invariants.drains.check_all_left()
    if world.syncer.committed < first + rounds and not _all_stopped(world):
        said = f"{world.syncer.committed - first} rounds since the faults stopped, not {rounds}"
        raise Violation("current within a cycle", said)
    _check_all_hold(world, versions, sound)


def _check_all_hold(world: World, versions: list[int], names: Sequence[str], asked_in: Sequence[int] = ()) -> None:
    """`asked_in`: with carry, who was asked for a copy of a fragment in one of these rounds may lack its version."""
    timing, carries = world.invariants.timing, world.syncer.settings.adopt == "carry"
    given = [(number, number % len(versions)) for number in asked_in if carries]
    # A learner with a share of the rounds takes only the versions that hold its own steps; at the end it takes all.
    shares = {name: one.share for name, one in world.syncer.members.learners.items()}
    for name, learner in ((name, world.learners[name]) for name in names if shares.get(name, 1.0) == 1.0):
        for fragment, version in enumerate(versions):
            if learner.alive and learner.adopted[fragment] < version:
                if any(of == fragment and timing.was_asked(name, number) for number, of in given):
                    continue
                said = f"{name} holds version {learner.adopted[fragment]} of fragment {fragment}, not {version}"
                raise Violation("current within a cycle", said, name, fragment)


def _all_stopped(world: World) -> bool:
    return all(learner.stopped for learner in world.learners.values())


def _refused_at_the_end(world: World) -> tuple[int, ...]:
    """Broken numbers of a learner so slow that no round asked it before: refused is not lost by the end."""
    lost = [0] * world.settings.fragments
    ending = False
    for record in world.disk.journal:
        if isinstance(record, records.ChangedRecord) and record.reopen:
            ending, lost = False, [0] * world.settings.fragments
        ending = ending or isinstance(record, records.EndedRecord)
        if ending and isinstance(record, records.GoneRecord) and record.reason.startswith("its numbers are broken"):
            lost = [so_far + more for so_far, more in zip(lost, record.lost, strict=True)]
    return tuple(lost)


def _has_ended(world: World, lost: tuple[int, ...] | None) -> None:
    """Every account is closed; where it came in peace (`lost` until then is known), nothing more was lost, and
    everybody has the finished model."""
    totals = world.syncer.history.ledger.totals()
    if lost is not None:
        lost = tuple(map(sum, zip(lost, _refused_at_the_end(world), strict=True)))
    more_lost = lost is not None and any(map(gt, totals.lost, lost))  # less, where what was given is merged after all
    if more_lost or any(totals.in_flight) or any(totals.balance()):
        raise Violation("a calm end loses nothing", f"lost {lost} before the end, then {totals}")
    if list(totals.merged) != world.invariants.oracle.audit.members.merged:
        said = f"{totals.merged} by the ledger, {world.invariants.oracle.audit.members.merged} by the contributions"
        raise Violation("ledger balances", said)
    world.shard_checks.check_end(world.disk.journal)
    for name, learner in world.learners.items():
        if lost is not None and learner.alive and (not learner.over or learner.base != world.simulated_syncer.theta):
            said = (
                f"{name} ends with {learner.base} (over: {learner.over}), the run with {world.simulated_syncer.theta}"
            )
            raise Violation("a calm end loses nothing", said, name)
