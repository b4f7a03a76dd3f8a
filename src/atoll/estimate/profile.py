"""A cluster and what happens to it: small frozen structs, one TOML table each, checked when they are made.

A profile is a file: `--profile paper` is one that comes with Atoll, `--profile FILE.toml` one of the user's own, with
the same keys; what a file leaves out stays as it is here. Times are in seconds, and 0 where something never happens.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from atoll.protocol.errors import ConfigError

YEAR_S = 365 * 86_400.0


class ProfilePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of a profile's tables: every number in them is a size, so none is below 0 or without end."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int | float) and not (0 <= value < math.inf):
                raise ConfigError(f"{name} = {value} must be a number of 0 or more")


class Failures(ProfilePart, frozen=True):
    """A chip fails by itself and takes its whole slice away, until that comes back."""

    mtbi_s: float = YEAR_S
    """A chip's mean time between interruptions. Failures strike while steps are made, so many by Poisson in a step."""
    shape_a: float = 2.0
    """Of the exponentiated Weibull that a slice's return is drawn from: F(x) = (1 − exp(−(x/scale)^c))^a."""
    shape_c: float = 0.8
    scale_s: float = 200.0
    observed_s: tuple[float, ...] = ()
    """Times that were measured; where there are any, returns are drawn from these instead."""


class Elasticity(ProfilePart, frozen=True):
    """What it costs to go on without a slice, and with it again."""

    down_s: float = 13.0
    """Everybody of the learner stands still: once per step with a failure."""
    up_s: float = 13.0
    """Once per batch of slices that return."""
    outage_s: float = 85.0
    """Without elasticity: a failing step stops everything for so long, until a spare has taken its place."""
    recover_s: float = 60.0
    """A learner that had lost every slice: from its first slice back to its first step."""
    start_s: tuple[float, ...] = ()
    """How long learners were measured to take to their first step; where there are any, a run begins with one each."""


class Speed(ProfilePart, frozen=True):
    """How much steps differ."""

    spread: float = 0.0
    """The slowest learner's steps take so much longer than the fastest's; the others lie evenly between."""
    jitter: float = 0.0
    """Standard deviation of a learner's steps, as a share of a step."""
    chip_jitter: float = 0.0
    """The same of one chip's: a step ends with its slowest chip."""
    idle: float = 0.0
    """The share of a step in which no chip works: waiting for data, saving, evaluating."""


class Racks(ProfilePart, frozen=True):
    """Slices that fail together."""

    slices: int = 0
    """In one rack. 0: no racks."""
    mtbi_s: float = 0.0
    repair_s: float = 3600.0
    """On average, exponential."""


class RegionFailures(ProfilePart, frozen=True):
    """Learners that fail together: learner m lies in region m mod count."""

    count: int = 1
    mtbi_s: float = 0.0
    repair_s: float = 3600.0


class Preemption(ProfilePart, frozen=True):
    """A slice is taken away by its owner, also between steps."""

    every_s: float = 0.0
    """On average, per slice."""
    for_s: float = 1200.0
    """On average, exponential."""


class ScavengedCompute(ProfilePart, frozen=True):
    """Learners on top of the others, which are there for some hours of every day."""

    learners: int = 0
    from_h: float = 20.0
    to_h: float = 8.0


class SyncerOutages(ProfilePart, frozen=True):
    mtbf_s: float = 0.0
    down_s: float = 5.0


class RoundRules(ProfilePart, frozen=True):
    """Of the protocol."""

    sync_every: int = 24
    """H"""
    fragments: int = 24
    """P"""
    overlap: int = 2
    """τ"""
    quorum: int = 1
    """K"""
    grace: bool = True
    latency_s: float = 0.05
    """One way between a learner and the syncer."""


class Profile(ProfilePart, frozen=True):
    provenance: str = "Atoll's defaults: an assumption, not a measurement"
    """Where the numbers come from. Printed with every result."""
    step_s: float = 10.0
    slices: int = 1024
    """Of the whole cluster, dealt evenly to the learners."""
    tokens_per_chip_s: float = 500.0
    failures: Failures = Failures()
    elasticity: Elasticity = Elasticity()
    speed: Speed = Speed()
    racks: Racks = Racks()
    regions: RegionFailures = RegionFailures()
    preemption: Preemption = Preemption()
    scavenged: ScavengedCompute = ScavengedCompute()
    syncer: SyncerOutages = SyncerOutages()
    rules: RoundRules = RoundRules()

    def __post_init__(self) -> None:
        ProfilePart.__post_init__(self)
        for name, value in (("step_s", self.step_s), ("slices", self.slices), ("regions.count", self.regions.count)):
            if value <= 0:
                raise ConfigError(f"{name} = {value} is too small: it must be above 0")
        for name in ("shape_a", "shape_c", "scale_s", "mtbi_s"):
            if getattr(self.failures, name) <= 0:
                raise ConfigError(f"failures.{name} = {getattr(self.failures, name)} must be above 0")
        hours = (self.scavenged.from_h, self.scavenged.to_h)
        if self.scavenged.learners and (max(hours) > 24 or hours[0] == hours[1]):
            raise ConfigError(
                f"scavenged hours {hours[0]:g} to {hours[1]:g}: give two different hours of a day, 0 to 24"
            )
        if self.racks.slices > self.slices:
            raise ConfigError(f"racks.slices = {self.racks.slices} is more than all {self.slices} slices")

    @property
    def settled_s(self) -> float:
        """After so long nothing tells any more that everything was there at the start."""
        times = [2 * self.failures.scale_s, self.elasticity.recover_s, *self.failures.observed_s]
        times += [self.preemption.for_s] if self.preemption.every_s else []
        times += [self.racks.repair_s] if self.racks.slices and self.racks.mtbi_s else []
        times += [self.regions.repair_s] if self.regions.mtbi_s else []
        return 5 * max(times)


def named() -> list[str]:
    """The profiles that come with Atoll."""
    files = (resources.files("atoll.estimate") / "profiles").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load(name: str) -> Profile:
    """A profile by its name, or out of a file."""
    if name in named():
        text = (resources.files("atoll.estimate") / "profiles" / f"{name}.toml").read_text()
    elif name.endswith(".toml"):
        try:
            text = Path(name).read_text()
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read profile {name}: {error}") from error
    else:
        raise ConfigError(
            f"there is no profile {name!r}: take {' or '.join(named())}, or a file of your own ending in .toml"
        )
    return parse(text, name)


def parse(text: str, name: str) -> Profile:
    try:
        return _convert(tomllib.loads(text))
    except (ConfigError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"profile {name}: {error}") from error


def with_values(profile: Profile, values: Mapping[str, object]) -> Profile:
    """With other values under names such as `step_s` or `preemption.every_s`; None leaves what is there."""
    document = msgspec.to_builtins(profile)
    for key, value in values.items():
        if value is None:
            continue
        table, _, name = key.rpartition(".")
        place = document.get(table) if table else document
        if not isinstance(place, dict) or name not in place or isinstance(place[name], dict):
            raise ConfigError(f"a profile has no {key!r}: it has {', '.join(keys(profile))}")
        place[name] = value
    return _convert(document)


def keys(profile: Profile) -> list[str]:
    """All that can be set, as `table.name`."""
    document = msgspec.to_builtins(profile)
    tables = {name: value for name, value in document.items() if isinstance(value, dict)}
    return [name for name in document if name not in tables] + [f"{t}.{name}" for t in tables for name in tables[t]]


def _convert(document: dict[str, Any]) -> Profile:
    try:
        return msgspec.convert(document, Profile)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        raise ConfigError(str(cause if isinstance(cause, ConfigError) else error)) from error
