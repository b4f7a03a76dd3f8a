"""Each method under one plan of faults, and what came of it in the same figures.

- goodput: learner-seconds spent stepping over those allocated (`LearnerTime`; of ranks, M times the wall time of the
  training part). What a learner had not given when it died counts for nothing, and neither does a step that ranks went
  back behind;
- uptime: the share of that time in which at least one was stepping;
- tokens: merged into the model; of the steps that are in the final model;
- longest standstill: between two rounds; between two steps that were kept.

A host that stands still does not step, whatever its clock says. Every run goes on for the plan's time after everybody's
first step, on the same budget of steps, which only the learning rate follows.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Literal, get_args

import msgspec

from atoll.baselines.faults import KINDS, RankFault
from atoll.baselines.supervisor import BaselineRun, ElasticRun, RestartingRun
from atoll.chaos import verdict
from atoll.chaos.performance import ChaosRun, read_events, run_plan
from atoll.chaos.plan import FaultPlan, PlannedFault
from atoll.config import Config, converted
from atoll.observe.summary import Summary, summarise
from atoll.observe.timeline import find_training_part, select_kinds
from atoll.protocol.errors import ConfigError
from atoll.store.atomic import write_atomic
from atoll.store.rundir import RunDir
from atoll.telemetry.events import Event
from atoll.telemetry.status import RunStatus
from atoll.workloads.settings import WorkloadSettings

MeasuredMethod = Literal["decoupled", "synchronous-diloco", "elastic-data-parallel", "data-parallel"]
METHODS: tuple[MeasuredMethod, ...] = get_args(MeasuredMethod)
WatchProgress = Callable[[float], None]
"""Told how many seconds of the plan are over."""
SPARE = 1.25
"""Budget of steps over what the pace allows in the plan's time: the run is ended by the clock, not by the budget."""


class MethodOutcome(msgspec.Struct, frozen=True):
    method: MeasuredMethod
    goodput: float | None
    uptime: float | None
    tokens: int
    updates: int
    """Of the model: rounds, or steps of all ranks together."""
    counts: Literal["rounds", "steps"]
    restarts: int
    """Processes that were started again."""
    longest_standstill_s: float | None
    validation_loss: float | None
    wall_s: float
    faults: int
    """That happened."""
    left_out: tuple[str, ...] = ()
    """Kinds of faults that have nothing to happen to here."""


def comparable(plan: FaultPlan, origin: str) -> FaultPlan:
    """The plan with a budget that lasts: every method is stopped by the clock, and their learning rates fall alike."""
    config = plan.config
    if config.script:
        raise ConfigError(
            f"{origin}: script = {' '.join(config.script)}: a plan of faults is for the built-in workload. "
            f"Without faults: atoll compare {config.script[0]}"
        )
    work = converted(config.workload, WorkloadSettings, f"{origin}, table [config.workload]")
    lasting = math.ceil(SPARE * plan.seconds / work.pace_s) if work.pace_s else 0
    steps = max(config.protocol.steps, lasting)
    if not steps:
        raise ConfigError(
            f"{origin}: the learning rate has nothing to follow: set pace_s in [config.workload], or steps in "
            "[config.protocol] to more than the fastest method makes in that time"
        )
    protocol = msgspec.structs.replace(config.protocol, steps=steps, tokens=0)
    return msgspec.structs.replace(plan, config=msgspec.structs.replace(config, protocol=protocol))


def run_method(
    method: MeasuredMethod, plan: FaultPlan, out: RunDir, watch: WatchProgress, checkpoint_every: int = 0
) -> MethodOutcome:
    if method in ("decoupled", "synchronous-diloco"):
        return run_product(plan, out, watch, synchronous=method == "synchronous-diloco")
    faults, left_out = rank_faults(plan)
    run: BaselineRun
    if method == "data-parallel":
        run = RestartingRun(plan.config, out, plan.seconds, faults, watch=watch, checkpoint_every=checkpoint_every)
    else:
        run = ElasticRun(plan.config, out, plan.seconds, faults, watch=watch)
    return baseline_outcome(method, asyncio.run(run.run()), left_out)


# ---- Atoll's own runs ---------------------------------------------------------------------------------------------


def run_product(plan: FaultPlan, out: RunDir, watch: WatchProgress, *, synchronous: bool) -> MethodOutcome:
    if synchronous:
        plan = msgspec.structs.replace(plan, config=as_synchronous(plan.config))
    began: list[float] = []

    def look(status: RunStatus | None, events: Sequence[Event]) -> None:
        began.extend(event["at"] for event in events if event["kind"] == "chaos")
        if began and events:
            watch(events[-1]["at"] - began[0])

    run_plan(ChaosRun(plan, out, watch=look, timed=True))
    events = read_events(out)
    check_not_stopped(events)
    summary = summarise(events)
    write_atomic(out.summary, msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
    return product_outcome("synchronous-diloco" if synchronous else "decoupled", summary, events)


def check_not_stopped(events: Sequence[Event]) -> None:
    """KeyboardInterrupt: the operator ended the run, and with it the comparison."""
    if any("operator" in str(event.get("text")) for event in select_kinds(events, "ending")):
        raise KeyboardInterrupt


def as_synchronous(config: Config) -> Config:
    """Plain DiLoCo: the whole model at once, everybody waits for it."""
    protocol = msgspec.structs.replace(config.protocol, synchronous=True, fragments=1, overlap=0)
    return msgspec.structs.replace(config, protocol=protocol)


def product_outcome(method: MeasuredMethod, summary: Summary, events: Sequence[Event]) -> MethodOutcome:
    tokens, goodput = summary["tokens"], summary["goodput"]
    if goodput is not None and tokens["computed"]:
        learners, wall = summary["settings"]["learners"], summary["wall_s"]
        goodput = goodput * (1 - tokens["lost"] / tokens["computed"]) - paused_s(events) / (learners * wall)
    return MethodOutcome(
        method=method,
        goodput=goodput,
        uptime=summary["uptime"],
        tokens=tokens["merged"],
        updates=summary["rounds"],
        counts="rounds",
        restarts=summary["restarts"],
        longest_standstill_s=summary["longest_gap_s"],
        validation_loss=summary["validation_loss_end"],
        wall_s=summary["wall_s"],
        faults=len(select_kinds(events, "fault")),
    )


def paused_s(events: Sequence[Event]) -> float:
    """Learner-seconds of the training part in which a host stood still: its learner takes them for a long step."""
    part = find_training_part(events)
    return sum(one.span.within(part).length for one in verdict.read_faults(events) if one.what == "pause")


# ---- data-parallel ------------------------------------------------------------------------------------------------


def baseline_outcome(method: MeasuredMethod, summary: Summary, left_out: tuple[str, ...]) -> MethodOutcome:
    return MethodOutcome(
        method=method,
        goodput=summary["goodput"],
        uptime=summary["uptime"],
        tokens=summary["tokens"],
        updates=summary["steps"],
        counts="steps",
        restarts=summary["restarts"],
        longest_standstill_s=summary["longest_standstill_s"],
        validation_loss=summary["validation_loss"],
        wall_s=summary["wall_s"],
        faults=summary["faults"],
        left_out=left_out,
    )


def rank_faults(plan: FaultPlan) -> tuple[tuple[RankFault, ...], tuple[str, ...]]:
    """What can happen to ranks, and the kinds of what cannot: there is no syncer, no link to it and no round."""
    fitting = [fault for fault in plan.list_faults() if fault.kind in KINDS and fault.at_s is not None]
    left_out = {fault.kind for fault in plan.list_faults() if fault not in fitting}
    return tuple(chain.from_iterable(map(_on_ranks, fitting))), tuple(sorted(left_out))


def _on_ranks(fault: PlannedFault) -> list[RankFault]:
    assert fault.at_s is not None
    numbers = [int(name.removeprefix("learner-")) for name in fault.targets]
    return [RankFault(fault.at_s, fault.kind, number, fault.for_s, fault.size) for number in numbers]
