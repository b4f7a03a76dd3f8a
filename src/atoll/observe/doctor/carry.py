"""Which H, P and codec a learner's link can carry, by the formulas of `estimate.bandwidth` for one learner of a star.

In H steps every fragment goes up once, in the run's codec, and comes down once, in its version codec. A slower link
stops nobody, but fragments sync less often: the check says at which H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from atoll.estimate import bandwidth
from atoll.estimate.bandwidth import (
    BITS,
    ROOM,
    VERSIONS,
    CodecName,
    SpreadRun,
    effective_h,
    loads_gbit,
    most_away_steps,
)
from atoll.numerics.codec import make_codec
from atoll.observe.doctor.local import Check
from atoll.observe.figures import count, span

CODECS: tuple[CodecName, ...] = tuple(BITS)
"""Those that contributions can travel by."""
SMALLEST: CodecName = "int4"
GIGA = 1e9
DOUBLINGS = 7


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """What is trained."""

    parameters: float
    step_s: float
    sync_every: int = 24
    fragments: int = 24
    overlap: int = 2
    codec: CodecName = "bf16"
    down: CodecName = VERSIONS
    """The version codec."""
    moments: bool = False
    """Those of the inner optimizer travel too, two for each parameter."""

    def spread(self, codec: CodecName, sync_every: int, trip_s: float = 0.0) -> SpreadRun:
        """One learner at one end of a link, the syncer at the other."""
        return SpreadRun(
            step_s=self.step_s,
            datacenters=2,
            learners=2,
            parameters=self.parameters,
            fragments=self.fragments,
            sync_every=sync_every,
            overlap=self.overlap,
            codec=codec,
            down=self.down,
            topology="star",
            latency_s=trip_s / 2,
            beside_bits=2 * BITS["int8"] if self.moments else 0.0,
        )


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    up_bits_per_s: float
    down_bits_per_s: float
    trip_s: float


class LinkNeed(msgspec.Struct, frozen=True):
    codec: CodecName
    sync_every: int
    up_bits_per_s: float
    down_bits_per_s: float
    share: float
    """Of what the link has; above 1 it is not carried."""

    @property
    def carried(self) -> bool:
        return self.share <= 1


def compute_need(load: LinkLoad, link: MeasuredLink, codec: CodecName, sync_every: int) -> LinkNeed:
    up, down = (GIGA * gbit / (sync_every * load.step_s) for gbit in loads_gbit(load.spread(codec, sync_every)))
    return LinkNeed(codec, sync_every, up, down, max(up / link.up_bits_per_s, down / link.down_bits_per_s) / ROOM)


def compute_needs(load: LinkLoad, link: MeasuredLink) -> list[LinkNeed]:
    """For the run's own H, twice, four times …, until every codec is carried."""
    found: list[LinkNeed] = []
    for doubling in range(DOUBLINGS):
        row = [compute_need(load, link, codec, load.sync_every << doubling) for codec in CODECS]
        found += row
        if all(one.carried for one in row):
            break
    return found


def find_sustained_h(load: LinkLoad, link: MeasuredLink) -> float:
    """The H that the link keeps up with when more is asked of it."""
    spread = load.spread(load.codec, load.sync_every)
    return effective_h(spread, ROOM * link.up_bits_per_s / GIGA, ROOM * link.down_bits_per_s / GIGA)


def away_steps(load: LinkLoad, link: MeasuredLink) -> float:
    """Steps from the sending of a fragment to its return: a leg up, a leg down, and the trip."""
    spread = load.spread(load.codec, load.sync_every, link.trip_s)
    return bandwidth.away_steps(spread, link.up_bits_per_s / GIGA, link.down_bits_per_s / GIGA)


def judge_load(load: LinkLoad, link: MeasuredLink) -> Check:
    """One line: what it carries, what the other codec would take, and how long a fragment is away."""
    table = compute_needs(load, link)
    own, other = (
        compute_need(load, link, load.codec, load.sync_every),
        compute_need(load, link, _other(load.codec), load.sync_every),
    )
    away = away_steps(load, link)
    figures = {
        "parameters": load.parameters,
        "step_s": load.step_s,
        "fragments": load.fragments,
        "sync_every": load.sync_every,
        "overlap": load.overlap,
        "codec": load.codec,
        "version_codec": load.down,
        "counted_on": ROOM,
        "needs": [msgspec.to_builtins(one) | {"carried": one.carried} for one in table],
        "effective_h": round(find_sustained_h(load, link), 2),
        "away_steps": round(away, 3),
    }
    asked = f"H = {load.sync_every}, P = {load.fragments} with {load.codec}"
    model = f"{span(load.step_s)} a step and {count(load.parameters)} parameters"
    if own.carried:
        value = f"this link carries {asked} at {model}; {_beside(other)}; a fragment is away for {away:.2g} steps"
        value = f"{value}, τ = {load.overlap}"
        most_away = most_away_steps(load.spread(load.codec, load.sync_every))
        if away > most_away:
            advice = (
                f"With P − 1 rounds under way fragments still return too late for H = {load.sync_every}: "
                f"sync_every = {_whole(away * load.sync_every / most_away)} would suit this link."
            )
            return Check("carries", "warn", value, advice, figures)
        if away > load.overlap:
            value += f": about {_whole(away * load.fragments / load.sync_every)} rounds are under way to keep H"
        return Check("carries", "ok", value, figures=figures)
    value = f"this link does not carry {asked} at {model}: that takes {own.share:.2g}x what it has"
    sustained = find_sustained_h(load, link)
    advice = f"Nobody waits, but fragments are synced every {sustained:.0f} steps. {_way_out(table, load)}"
    too_much = own.down_bits_per_s > ROOM * link.down_bits_per_s
    if too_much and load.down != SMALLEST and any(one.carried for one in table):
        advice += f" Versions alone are too much for it: version_codec = {SMALLEST} is for that."
    return Check("carries", "warn", value, advice, figures)


def _beside(other: LinkNeed) -> str:
    if other.carried:
        return f"{other.codec} too"
    return f"{other.codec} would need {other.share:.2g}x what it has"


def _way_out(table: Sequence[LinkNeed], load: LinkLoad) -> str:
    fits = [one for one in table if one.carried]
    if not fits:
        return f"Not even H = {table[-1].sync_every} fits: this model needs another link."
    best = min(fits, key=lambda one: (one.sync_every, one.codec != load.codec))
    return f"It carries sync_every = {best.sync_every} with {best.codec}."


def sized_like(name: str) -> CodecName:
    """Of the codecs that the formulas know, the one whose bodies are nearest in size to this one's."""
    size = 1 << 16
    bits = 8 * make_codec(name).nbytes(((1, size),)) / size
    return min(BITS, key=lambda one: abs(BITS[one] - bits))


def _other(codec: CodecName) -> CodecName:
    return next(one for one in CODECS if one != codec)


def _whole(steps: float) -> int:
    return max(1, -int(-steps // 1))
