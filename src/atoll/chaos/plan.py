"""A plan of faults: TOML, written by hand or drawn from a seed and rates; the same plan and seed are the same faults.

    seed = 7
    seconds = 300                   # how long the run is meant to last; faults begin and end inside it
    [config]                        # the run's own settings, as in run.toml
    protocol = { learners = 8, steps = 600 }
    workload = { pace_s = 0.4 }
    [[fault]]
    kind = "kill"                   # what
    target = "learner-1"            # whom; a list for a partition
    at_s = 20                       # when: a time, at_round = 40, or at_event = "cut"
    for_s = 5
    [rates]                         # or drawn: faults per hour of each kind
    kill = 120
    [verdict]                       # what must hold (verdict.py)
    goodput = 0.8

Kinds, and what `for_s` and `size` mean for each, are in KINDS. Times are seconds since every learner has contributed.
"""

from __future__ import annotations

import random
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from atoll.chaos.verdict import VerdictLimits
from atoll.config import Changes, Config, convert, merged
from atoll.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FaultKind:
    says: str
    on: str = "learner"
    """learner, syncer, link or run: what it happens to."""
    lasts: tuple[float, float] = (0.0, 0.0)
    """Seconds, from and to, that a drawn one lasts; (0, 0): it has no length."""
    sizes: tuple[float, ...] = ()
    """What `size` of a drawn one is taken from; empty: it has none."""


KINDS: dict[str, FaultKind] = {
    "kill": FaultKind("SIGKILL; the supervisor starts it again"),
    "pause": FaultKind("the whole host stands still (SIGSTOP, then SIGCONT)", lasts=(1.0, 8.0)),
    "slow": FaultKind("it gets this share of its processor", lasts=(5.0, 20.0), sizes=(0.5, 0.25)),
    "restart": FaultKind("SIGTERM, as a preemption; it is started again"),
    "leave": FaultKind("SIGTERM; it stays away for so long, then joins anew", lasts=(10.0, 30.0)),
    "join": FaultKind("a learner more than the run is meant for comes, and leaves after so long", lasts=(15.0, 40.0)),
    "delay": FaultKind("its link takes so many seconds longer each way", "link", (5.0, 20.0), (0.05, 0.2, 0.5)),
    "bandwidth": FaultKind("its link carries so many bit/s", "link", (5.0, 20.0), (1e6, 1e7)),
    "reset": FaultKind("its connections break", "link"),
    "blackhole": FaultKind("its link takes everything and delivers nothing", "link", (2.0, 10.0)),
    "partition": FaultKind("these learners and the syncer do not reach each other", "link", (2.0, 10.0)),
    "trickle": FaultKind("its link carries one byte a second", "link", (2.0, 8.0)),
    "syncer-kill": FaultKind("SIGKILL of the syncer; the supervisor starts it again", "syncer"),
    "syncer-pause": FaultKind("the syncer stands still", "syncer", (0.5, 3.0)),
    "disk-full": FaultKind("the journal finds no room", "syncer", (1.0, 4.0)),
    "disk-slow": FaultKind(
        "every sync of the journal takes so many seconds longer", "syncer", (3.0, 10.0), (0.05, 0.2)
    ),
    "nan": FaultKind("an extra learner gives NaN", "run", (5.0, 15.0)),
    "huge": FaultKind("an extra learner gives values a million times too large", "run", (5.0, 15.0)),
    "stale": FaultKind("an extra learner gives on a base that is long past", "run", (5.0, 15.0)),
    "duplicate": FaultKind("an extra learner gives everything twice", "run", (5.0, 15.0)),
}


class PlannedFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    kind: str
    target: str | tuple[str, ...] = ()
    """A learner, or several; none for what does not happen to one."""
    at_s: float | None = None
    at_round: int | None = None
    at_event: str | None = None
    """The first event of this kind (telemetry/events.py) after the faults have begun."""
    for_s: float = 0.0
    size: float = 0.0

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.target,) if isinstance(self.target, str) else self.target

    @property
    def when(self) -> str:
        if self.at_s is not None:
            return f"{self.at_s:.1f} s"
        return f"round {self.at_round}" if self.at_round is not None else f"event {self.at_event}"

    def describe(self) -> str:
        parts = [self.when, self.kind, *self.targets]
        parts += [f"for {self.for_s:.1f} s"] if self.for_s else []
        return " ".join(parts + ([f"({self.size:g})"] if self.size else []))


class FaultPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    seed: int = 0
    seconds: float = 60.0
    """Faults begin and are over within this time."""
    settle_s: float = 5.0
    """Before the first drawn fault, and after the last is over."""
    config: Config = Config()
    fault: tuple[PlannedFault, ...] = ()
    rates: dict[str, float] = {}
    """Faults per hour, by kind."""
    verdict: VerdictLimits = VerdictLimits()

    @property
    def learners(self) -> list[str]:
        return [f"learner-{number}" for number in range(self.config.protocol.learners)]

    def list_faults(self) -> tuple[PlannedFault, ...]:
        """Written and drawn, in order of time; those that wait for a round or an event at the end."""
        found = [*self.fault, *draw_faults(self)]
        return tuple(sorted(found, key=lambda one: float("inf") if one.at_s is None else one.at_s))


def load_plan(path: Path, config: Config | None = None, changes: Changes | None = None) -> FaultPlan:
    """`config`: of a run that goes on already, instead of the plan's own; `changes`: settings on top of those."""
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the plan {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return parse_plan(document, str(path), config, changes)


def parse_plan(
    document: dict[str, Any], origin: str, config: Config | None = None, changes: Changes | None = None
) -> FaultPlan:
    if not isinstance(own := document.get("config", {}), dict):
        raise ConfigError(f"{origin}: config must be a table, with what run.toml holds")
    rest = {key: value for key, value in document.items() if key != "config"}
    try:
        plan = msgspec.convert(rest, FaultPlan)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{origin}: {error}") from error
    settings = config or convert(merged(own, changes or {}), f"{origin}, table [config]")
    plan = msgspec.structs.replace(plan, config=settings)
    check_plan(plan, origin)
    return plan


# ---- drawing ------------------------------------------------------------------------------------------------------


def draw_faults(plan: FaultPlan) -> list[PlannedFault]:
    """By the rates, from the seed. Nobody is hit again before an earlier fault of his is over, and at least half of the
    learners are left alone at any moment."""
    dice = random.Random(f"{plan.seed}/{plan.seconds}/{sorted(plan.rates.items())}")
    begin, end = plan.settle_s, plan.seconds - plan.settle_s
    moments = sorted(
        (begin + (end - begin) * dice.random(), kind)
        for kind in sorted(plan.rates)
        for _ in range(_times(plan.rates[kind] * plan.seconds / 3600, dice))
    )
    busy: dict[str, float] = {}
    found: list[PlannedFault] = []
    for at, kind in moments:
        if (fault := _draw_one(plan, dice, at, end, kind, busy)) is not None:
            found.append(fault)
    return found


def _times(mean: float, dice: random.Random) -> int:
    """So many in all, the rest by chance: a plan keeps what its rates promise."""
    return int(mean) + (dice.random() < mean - int(mean))


RECOVERY_S = 12.0
"""A learner that was killed is left alone for so long: a fault of one that is not there is none."""


def _draw_one(
    plan: FaultPlan, dice: random.Random, at: float, end: float, kind: str, busy: dict[str, float]
) -> PlannedFault | None:
    rule = KINDS[kind]
    length = min(dice.uniform(*rule.lasts), max(rule.lasts[0], end - at)) if rule.lasts[1] else 0.0
    size = dice.choice(rule.sizes) if rule.sizes else 0.0
    free = [name for name in plan.learners if busy.get(name, 0.0) <= at]
    count = min(2, len(plan.learners) // 2) if kind == "partition" else 1
    dice.shuffle(free)
    target: str | tuple[str, ...] = ()
    if rule.on in ("learner", "link") and kind != "join":
        if len(free) - count < len(plan.learners) / 2:
            return None
        target = free[0] if count == 1 else tuple(sorted(free[:count]))
    elif rule.on == "syncer":
        if busy.get("syncer", 0.0) > at:
            return None
        target = "syncer"
    gone_s = RECOVERY_S if kind in ("kill", "restart", "leave", "syncer-kill") else 1.0
    for name in (target,) if isinstance(target, str) else target:
        busy[name] = at + length + gone_s
    return PlannedFault(kind=kind, target=target, at_s=round(at, 3), for_s=round(length, 3), size=size)


# ---- what a plan must not be --------------------------------------------------------------------------------------


def check_plan(plan: FaultPlan, origin: str) -> None:
    if not 1 <= plan.seconds <= 86_400:
        raise ConfigError(f"{origin}: seconds = {plan.seconds:g} must be from 1 to 86400")
    if plan.rates and (plan.settle_s < 0 or 2 * plan.settle_s >= plan.seconds):
        raise ConfigError(f"{origin}: settle_s = {plan.settle_s:g} leaves no time for faults in {plan.seconds:g} s")
    for kind, rate in plan.rates.items():
        _known(kind, f"{origin}, [rates]")
        if not 0 <= rate <= 36_000:
            raise ConfigError(f"{origin}, [rates]: {kind} = {rate:g} must be from 0 to 36000 faults per hour")
    for number, fault in enumerate(plan.fault, 1):
        _check_fault(plan, fault, f"{origin}, fault {number}")
    _check_survivors(plan, origin)


def _known(kind: str, where: str) -> None:
    if kind not in KINDS:
        raise ConfigError(f"{where}: there is no fault {kind!r}; take from {', '.join(KINDS)}")


def _check_fault(plan: FaultPlan, fault: PlannedFault, where: str) -> None:
    _known(fault.kind, where)
    rule, given = KINDS[fault.kind], [fault.at_s, fault.at_round, fault.at_event]
    if sum(one is not None for one in given) != 1:
        raise ConfigError(f"{where}: say when it happens by one of at_s, at_round and at_event")
    if fault.at_s is not None and not 0 <= fault.at_s < plan.seconds:
        raise ConfigError(f"{where}: at_s = {fault.at_s:g} lies past the end, the plan is over at {plan.seconds:g} s")
    if fault.at_round is not None and fault.at_round < 0:
        raise ConfigError(f"{where}: at_round = {fault.at_round} is below 0")
    if not 0 <= fault.for_s <= plan.seconds or (rule.lasts[1] and fault.for_s == 0):
        raise ConfigError(f"{where}: for_s = {fault.for_s:g} must be above 0 and at most {plan.seconds:g}")
    if rule.sizes and not fault.size > 0:
        raise ConfigError(f"{where}: {fault.kind} needs a size above 0 ({rule.says})")
    _check_targets(plan, fault, rule, where)


def _check_targets(plan: FaultPlan, fault: PlannedFault, rule: FaultKind, where: str) -> None:
    if rule.on in ("learner", "link") and fault.kind != "join":
        if not fault.targets:
            raise ConfigError(f"{where}: {fault.kind} needs a target, one of {', '.join(plan.learners)}")
        if unknown := [name for name in fault.targets if name not in plan.learners]:
            last = plan.learners[-1]
            raise ConfigError(f"{where}: there is no {unknown[0]!r}; learners are learner-0 to {last}")
    elif set(fault.targets) - {"syncer"}:
        raise ConfigError(f"{where}: {fault.kind} happens to the {rule.on}: leave target out")


def _check_survivors(plan: FaultPlan, origin: str) -> None:
    """Somebody must be left: a run without learners proves nothing."""
    gone = [
        fault for fault in plan.fault if fault.kind in ("kill", "pause", "leave", "restart") and fault.at_s is not None
    ]
    for fault in gone:
        at = fault.at_s or 0.0
        down = {
            name
            for one in gone
            if one.at_s is not None and one.at_s <= at <= one.at_s + max(1.0, one.for_s)
            for name in one.targets
        }
        if down >= set(plan.learners):
            raise ConfigError(f"{origin}: at {at:g} s every learner is gone at once: leave at least one alone")
