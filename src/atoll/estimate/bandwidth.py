"""How much of its time a run spread over data centers computes, at a bandwidth between them; and the inverse.

Compute utilization is CU = T / (T + exposed): T is the time of a learner step, exposed the time per step in which the
network is not hidden behind computing. Over a link of B Gbit/s every method here has an exposed time of the form

    exposed(B) = max(0, gᵢ/B + fᵢ  for every bound i)

so that the bandwidth for a utilization is exact: B = max(gᵢ / (exposed − fᵢ)). S is the model in Gbit, l the latency.

Data-parallel: gradients go around a ring of n data centers, 2(n−1)/n of S in all, layer after layer as the backward
pass (2/3 of the step) makes them. The layers follow each other without a gap, so that only the last one's latency
shows. With L layers and C = S·ring/B:

    exposed = max(C − (2/3)·T·(1 − 1/L),  C/L) + 2(n−1)·l

Decoupled: P fragments per H steps, each hidden for τ steps. One is under way for w = legs·f·S/(P·B) + latency:

    exposed = max(0,  (P/H)·(w − τT) / max(1, Pτ/H),  f·S/(H·B) − T)

On a ring f = 2(n−1)/n and legs = 1; without latency this is max(0, S·ring/(H·B·T) − min(1, Pτ/H)) in steps. The
min(1, ·) is ours: a link cannot carry more than a second of traffic per second, so where Pτ > H the overlap cannot
hide more than everything. Then Pτ/H fragments are under way at the same time, and one wait serves them all.

In a star, which is what Atoll does, the link of a data center carries one copy for every learner in it, both ways at
the same time: f = ⌈M/n⌉, and a fragment comes down after it went up. It goes up as the codec says, and may come down as
another does (`down`; this software's `version_codec`, by default fp32): S is then the larger of the two where a link
has to keep up, and w has a leg of each, (f·S_up + f·S_down)/(P·B). The syncer's own link carries M copies; it is taken
to be wide enough.

A step of Atoll never waits for the network: a link that is too slow costs freshness, not time. `effective_h` and
`late_steps` say how much. Utilization is as if exposed time were waited for, so that methods compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple, get_args

import msgspec

from atoll.protocol.errors import ConfigError

CodecName = Literal["fp32", "bf16", "int8", "int4", "topk"]
Topology = Literal["ring", "star"]
BITS: dict[CodecName, float] = {"fp32": 32, "bf16": 16, "int8": 8.375, "int4": 4.25, "topk": 1.46875}
"""Of a value in long rows, scales and offsets included, as numerics/codecs/ has them."""
BARE_BITS: dict[CodecName, float] = {**BITS, "int8": 8, "int4": 4}
"""Without scales, as the paper counts."""
GRADIENT_BITS = BITS["bf16"]
VERSIONS: CodecName = "fp32"
"""As which this software's versions come down by default, whatever its contributions go up as."""
BACKWARD = 2 / 3
"""The backward pass's share of a step."""
LEAST, MOST = 1e-9, 1e18
ROOM = 0.8
"""The share of a link that is counted on: others use it too, and it is not always as fast as it was measured."""


class SpreadRun(msgspec.Struct, frozen=True, kw_only=True):
    """One model trained in several data centers: what the traffic between them depends on."""

    step_s: float = 1.0
    """T: seconds of a learner step."""
    datacenters: int = 2
    """n. One needs no link to another."""
    learners: int = 8
    """M, dealt evenly to the data centers."""
    parameters: float = 5e9
    """Of the model."""
    layers: int = 60
    """L: how finely data-parallel overlaps its gradients with the backward pass."""
    fragments: int = 24
    """P."""
    sync_every: int = 24
    """H: steps between two syncs of a fragment."""
    overlap: int = 2
    """τ: steps a fragment may be under way."""
    codec: CodecName = "bf16"
    """How fragments travel; gradients of data-parallel are bf16."""
    down: CodecName | None = None
    """As which they come back in a star, where that is another."""
    topology: Topology = "ring"
    """How fragments travel; gradients of data-parallel go around a ring."""
    bare: bool = False
    """Whether codes are counted without their scales."""
    latency_s: float = 0.0
    """l: from one data center to the next, one way."""
    beside_bits: float = 0.0
    """Of each parameter, what travels with it both ways: shared moments."""

    def __post_init__(self) -> None:
        for name in ("step_s", "datacenters", "learners", "parameters", "layers", "fragments", "sync_every"):
            above_0(name, getattr(self, name))
        for name in ("overlap", "latency_s"):
            value = getattr(self, name)
            if not 0 <= value <= MOST:
                raise ConfigError(f"{name} = {value:g} must not be below 0, nor above {MOST:g}")
        _one_of("codec", self.codec, get_args(CodecName))
        _one_of("down", self.down or self.codec, get_args(CodecName))
        _one_of("topology", self.topology, get_args(Topology))
        if self.fragments > self.sync_every:
            raise ConfigError(
                f"fragments = {self.fragments} is more than sync_every = {self.sync_every}: one round per step would "
                f"not be enough; set fragments to {self.sync_every} or less, or sync_every to {self.fragments} or more"
            )
        if self.overlap >= self.sync_every and self.overlap > 0:
            raise ConfigError(
                f"overlap = {self.overlap} is not below sync_every = {self.sync_every}: a fragment would be sent again "
                f"before it came back; set overlap to {self.sync_every - 1} or less"
            )

    def gbit(self, bits: float) -> float:
        """S."""
        return self.parameters * bits / 1e9

    @property
    def hops(self) -> int:
        """Of a reduction around the ring."""
        return 2 * (self.datacenters - 1)


def above_0(name: str, value: float) -> None:
    """And such that no figure computed from it leaves what a float can hold."""
    if not value > 0:
        raise ConfigError(f"{name} = {value:g} must be above 0")
    if not LEAST <= value <= MOST:
        raise ConfigError(f"{name} = {value:g} is out of range: take {LEAST:g} to {MOST:g}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"there is no {name} {value!r}: take {', '.join(known)}")


class Bound(NamedTuple):
    """The exposed time of a step is at least gbit / B + fixed_s."""

    gbit: float
    fixed_s: float


def data_parallel(run: SpreadRun) -> list[Bound]:
    gbit = run.gbit(GRADIENT_BITS) * run.hops / run.datacenters
    latency_s = run.hops * run.latency_s
    hidden_s = BACKWARD * run.step_s * (1 - 1 / run.layers)
    return [Bound(gbit, latency_s - hidden_s), Bound(gbit / run.layers, latency_s)]


def decoupled(run: SpreadRun) -> list[Bound]:
    rate = run.fragments / run.sync_every
    at_once = max(1.0, rate * run.overlap)
    way = under_way(run)
    wait = Bound(rate * way.gbit / at_once, rate * (way.fixed_s - run.overlap * run.step_s) / at_once)
    return [wait, Bound(load_gbit(run) / run.sync_every, -run.step_s)]


def under_way(run: SpreadRun) -> Bound:
    """The time from the sending of a fragment to its return."""
    up, down = loads_gbit(run)
    gbit, hops = (up, run.hops) if run.topology == "ring" else (up + down, 2 if run.datacenters > 1 else 0)
    return Bound(gbit / run.fragments, hops * run.latency_s)


def load_gbit(run: SpreadRun) -> float:
    """What the link of a data center carries in H steps, in the direction that has more of it: f·S."""
    return max(loads_gbit(run))


def loads_gbit(run: SpreadRun) -> tuple[float, float]:
    """What the link of a data center carries in H steps: up, and down."""
    if run.datacenters > run.learners:
        raise ConfigError(
            f"{run.learners} learners cannot be in {run.datacenters} data centers: every learner is in one; "
            f"take {run.learners} data centers or fewer, or more learners"
        )
    if run.topology == "ring":
        copies = run.hops / run.datacenters
    else:
        copies = math.ceil(run.learners / run.datacenters) if run.datacenters > 1 else 0
    back = run.down if run.down is not None and run.topology == "star" else run.codec
    bits = BARE_BITS if run.bare else BITS
    up, down = (run.gbit(bits[codec] + run.beside_bits) for codec in (run.codec, back))
    return copies * up, copies * down


def utilization(bounds: Sequence[Bound], step_s: float, gbit_s: float) -> float:
    """CU = T / (T + exposed)."""
    above_0("gbit_s", gbit_s)
    exposed_s = max(0.0, *(bound.gbit / gbit_s + bound.fixed_s for bound in bounds))
    return step_s / (step_s + exposed_s)


def bandwidth(bounds: Sequence[Bound], step_s: float, wanted: float) -> float:
    """The least B, in Gbit/s, at which the utilization is as wanted."""
    if not 0 < wanted < 1:
        raise ConfigError(f"a utilization of {wanted:g} cannot be asked for: take one above 0 and below 1")
    exposed_s = step_s * (1 / wanted - 1)
    least_s = max(0.0, *(bound.fixed_s for bound in bounds))
    if exposed_s <= least_s:
        raise ConfigError(
            f"no bandwidth gives a utilization of {wanted:g}: with this latency it stays below "
            f"{step_s / (step_s + least_s):.3g}; ask for less, lower latency_s, or raise step_s (decoupled: or overlap)"
        )
    return max(bound.gbit / (exposed_s - bound.fixed_s) for bound in bounds)


def effective_h(run: SpreadRun, gbit_s: float, down_gbit_s: float | None = None) -> float:
    """H where the link keeps up with it, otherwise the H that it keeps up with. `down_gbit_s`: of a link that is not as
    wide down as it is up."""
    return max([run.sync_every, *(legs_s / run.step_s for legs_s in _legs_s(run, gbit_s, down_gbit_s))])


def away_steps(run: SpreadRun, gbit_s: float, down_gbit_s: float | None = None) -> float:
    """Steps from the sending of a fragment to its return."""
    legs = 1 if run.topology == "ring" else 2
    legs_s = sum(_legs_s(run, gbit_s, down_gbit_s)[:legs]) / run.fragments
    return (legs_s + under_way(run).fixed_s) / run.step_s


def most_away_steps(run: SpreadRun) -> float:
    """Steps that a fragment may be away with P − 1 rounds under way."""
    return max(1, run.fragments - 1) * run.sync_every / run.fragments


def late_steps(run: SpreadRun, gbit_s: float) -> float:
    """By how many steps a fragment returns later than τ."""
    return max(0.0, away_steps(run, gbit_s) - run.overlap)


def _legs_s(run: SpreadRun, gbit_s: float, down_gbit_s: float | None) -> list[float]:
    """The seconds that all fragments take up, and down."""
    widths = (gbit_s, gbit_s if down_gbit_s is None else down_gbit_s)
    return [load / width if load else 0.0 for load, width in zip(loads_gbit(run), widths, strict=True)]


# ---- questions and answers, one by one or every combination of them ------------------------------------------------

BandwidthMethod = Literal["data-parallel", "decoupled"]
METHODS: tuple[BandwidthMethod, ...] = get_args(BandwidthMethod)


class BandwidthAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    method: BandwidthMethod
    codec: CodecName
    step_s: float
    datacenters: int
    utilization: float
    gbit_s: float
    effective_h: float | None = None
    """Of decoupled only."""
    late_steps: float | None = None
    """Of decoupled only."""
    down: CodecName | None = None
    """Where versions come back as another codec says."""


class BandwidthCase(msgspec.Struct, frozen=True):
    """A method in a place."""

    method: BandwidthMethod
    run: SpreadRun

    @property
    def bounds(self) -> list[Bound]:
        return data_parallel(self.run) if self.method == "data-parallel" else decoupled(self.run)

    @property
    def codec(self) -> CodecName:
        return "bf16" if self.method == "data-parallel" else self.run.codec

    def at(self, gbit_s: float) -> BandwidthAnswer:
        return self._answer(utilization(self.bounds, self.run.step_s, gbit_s), gbit_s)

    def needs(self, wanted: float) -> BandwidthAnswer:
        try:
            return self._answer(wanted, bandwidth(self.bounds, self.run.step_s, wanted))
        except ConfigError as error:
            where = f"step {self.run.step_s:g} s, {self.run.datacenters} data centers"
            raise ConfigError(f"{self.method}, {where}: {error}") from None

    def _answer(self, utilization: float, gbit_s: float) -> BandwidthAnswer:
        run = self.run
        answer = BandwidthAnswer(self.method, self.codec, run.step_s, run.datacenters, utilization, gbit_s)
        if self.method == "data-parallel":
            return answer
        down = run.down if run.topology == "star" else None
        fresh = {"effective_h": effective_h(run, gbit_s), "late_steps": late_steps(run, gbit_s)}
        return msgspec.structs.replace(answer, **fresh, down=down)


def cases(
    run: SpreadRun,
    methods: Iterable[BandwidthMethod],
    codecs: Sequence[CodecName],
    steps_s: Iterable[float],
    places: Iterable[int],
) -> list[BandwidthCase]:
    """Every combination once, in the order of the published tables."""
    return list(
        dict.fromkeys(
            BandwidthCase(method, msgspec.structs.replace(run, step_s=step_s, datacenters=datacenters, codec=codec))
            for step_s, datacenters, method in product(steps_s, places, methods)
            for codec in (codecs if method == "decoupled" else codecs[:1])
        )
    )


# ---- published settings by name, and where each of them is from ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class BandwidthProfile:
    run: SpreadRun
    codecs: tuple[CodecName, ...]
    """Of the fragments, where nobody says."""
    provenance: str


PROFILES = {
    "paper-table": BandwidthProfile(
        SpreadRun(sync_every=100, fragments=18, overlap=2, bare=True),
        ("bf16", "int4"),
        "H = 100, Pτ = 36 and 60 layers fit the published table (arXiv 2604.21428): a fit, not the authors' values.",
    ),
    "paper": BandwidthProfile(
        SpreadRun(sync_every=24, fragments=24, overlap=2, bare=True),
        ("bf16", "int4"),
        "H = P = 24 and τ = 2 as in the paper's text (arXiv 2604.21428); its table comes from other settings, "
        "see paper-table. 60 layers are a fit, not the authors' value.",
    ),
    "atoll": BandwidthProfile(
        SpreadRun(sync_every=24, fragments=24, overlap=2, topology="star", down=VERSIONS),
        ("bf16",),
        "What this software does by default: a star through the syncer, H = P = 24, τ = 2; contributions go up as the "
        "codec says, versions come down in fp32 unless --version-codec names another. 60 layers for data-parallel are "
        "a fit to the published table, not the authors' value.",
    ),
}


def profile(name: str) -> BandwidthProfile:
    if name not in PROFILES:
        raise ConfigError(f"there is no profile {name!r}: take {', '.join(PROFILES)}")
    return PROFILES[name]
