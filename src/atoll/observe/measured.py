"""What a real run says about its machines, as a profile of the goodput simulator: step times, failures, recoveries.

Taken from the run's events alone: how long a learner's step takes and how much of it is work, how often its process
died while it stepped, how long each death kept it from stepping, and how late each learner began. The run's goodput is
not an input: the simulator predicts it from these, and it is held against what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from atoll.estimate.profile import YEAR_S, Elasticity, Failures, Profile, RoundRules, Speed
from atoll.observe.presence import Span, stays
from atoll.observe.summary import in_its_own_time, summarise, training_part, work_done
from atoll.protocol.errors import ConfigError
from atoll.telemetry.events import Event

NEVER_S = 100 * YEAR_S
"""Between two failures where there was none."""


@dataclass(frozen=True, slots=True)
class Measured:
    learners: int
    wall_s: float
    deaths: int
    goodput: float
    uptime: float
    participation: float | None
    profile: Profile


def measure(events: Iterable[Event], name: str) -> Measured:
    timeline = in_its_own_time(sorted(events, key=lambda event: float(event["at"])))
    summary = summarise(timeline)
    part, settings = training_part(timeline), summary["settings"]
    lives = _lives(timeline, part)
    stepping_s = sum(span.length for spans in lives.values() for span in spans)
    work = work_done(timeline, int(settings.get("fragments") or 1)).values()
    steps, busy_s = sum(one.steps for one in work), sum(one.busy_s for one in work)
    if not steps or not stepping_s or summary["goodput"] is None:
        raise ConfigError(f"{name} holds no steps to learn from: name a run that has trained for a while")
    absences = [after.start - before.end for spans in lives.values() for before, after in pairwise(spans)]
    unfinished = [part.end - spans[-1].end for spans in lives.values() if spans[-1].end < part.end]
    deaths = len(absences) + len(unfinished)
    learners = max(int(settings.get("learners") or 0), len(lives))
    profile = Profile(
        provenance=f"measured in {name}",
        step_s=stepping_s / steps,
        slices=learners,
        failures=Failures(mtbi_s=stepping_s / deaths if deaths else NEVER_S, observed_s=tuple(absences or unfinished)),
        elasticity=Elasticity(
            down_s=0.0, up_s=0.0, recover_s=0.0, start_s=tuple(spans[0].start - part.start for spans in lives.values())
        ),
        speed=Speed(idle=max(0.0, 1.0 - busy_s / stepping_s)),
        rules=RoundRules(
            sync_every=int(settings["sync_every"]),
            fragments=int(settings["fragments"]),
            overlap=int(settings["overlap"]),
            quorum=int(settings["quorum"]),
            grace=bool(settings["grace"]),
            latency_s=0.001,
        ),
    )
    return Measured(
        learners, part.length, deaths, summary["goodput"], summary["uptime"], summary["participation"], profile
    )


def _lives(timeline: list[Event], part: Span) -> dict[str, list[Span]]:
    """Per learner, when it was stepping: in order, within the training part."""
    found: dict[str, list[Span]] = {}
    for learner, span in stays(timeline, ("recovered",), part.end):
        inside = span.within(part)
        if inside.length > 0:
            found.setdefault(learner, []).append(inside)
    return {learner: sorted(spans) for learner, spans in found.items()}
