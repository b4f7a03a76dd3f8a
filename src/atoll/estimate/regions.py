"""Sites, the links between them, and the model: what a plan is asked for. One TOML file; a line under each key.

Every site speaks to the syncer's, so every other site needs a link to that one. What is wrong is said in one line that
names the key.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from atoll.protocol.errors import ConfigError

MOST = 1e18
MOST_MACHINES = 4096
"""In a site: each is simulated."""


class RegionPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the tables: no number in them is below 0, or absurdly large."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int | float) and not 0 <= value <= MOST:
                raise ConfigError(f"{name} = {value:g} must be a number of 0 or more")

    def check_above_0(self, *names: str) -> None:
        for name in names:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name):g} must be above 0")


class PlannedModel(RegionPart, frozen=True):
    parameters: float
    """7e9, or "7B"."""
    tokens_per_step: float
    """Tokens of one machine's step."""
    tokens: float = 0.0
    """That it is to see in all: says how many days that takes. 0: not known."""

    def __post_init__(self) -> None:
        RegionPart.__post_init__(self)
        self.check_above_0("parameters", "tokens_per_step")


class Site(RegionPart, frozen=True):
    name: str
    machines: int
    step_s: float = 0.0
    """Seconds of a step of one machine. This, or …"""
    tokens_per_s: float = 0.0
    """… tokens that one machine trains in a second."""
    machines_per_learner: int = 0
    """0: the plan chooses. 1 where machines of the site do not share a fast network."""
    gpus: int = 1
    """Of one machine: several are ranks of one learner, which a relay makes no sums of."""
    price_per_hour: float = 0.0
    """Of one machine."""
    preempted_every_h: float = 0.0
    """How often a machine is taken away, on average. 0: never."""
    away_h: float = 0.5
    """After how long another one is there, on average."""
    mtbf_h: float = 8760.0
    """How often a machine fails by itself."""
    restart_s: float = 120.0
    """From a machine that is there to its first step, without what it fetches over the link."""

    def __post_init__(self) -> None:
        try:
            RegionPart.__post_init__(self)
            self.check_above_0("machines", "gpus", "away_h", "mtbf_h")
            if self.machines > MOST_MACHINES:
                raise ConfigError(f"machines = {self.machines:,} are too many to simulate: {MOST_MACHINES:,} at most")
            if bool(self.step_s) == bool(self.tokens_per_s):
                raise ConfigError("give step_s or tokens_per_s, one of the two")
            if self.machines_per_learner and self.machines % self.machines_per_learner:
                raise ConfigError(
                    f"machines = {self.machines} cannot be dealt evenly to learners of "
                    f"machines_per_learner = {self.machines_per_learner}"
                )
        except ConfigError as error:
            raise ConfigError(f"site {self.name!r}: {error}") from None

    def seconds_of(self, model: PlannedModel) -> float:
        """Of a step."""
        return self.step_s or model.tokens_per_step / self.tokens_per_s


class Link(RegionPart, frozen=True):
    between: tuple[str, str]
    gbit_s: float = 0.0
    """Its width, both ways. Of a measured one: up, from the site to the syncer's."""
    down_gbit_s: float = 0.0
    """Where it is another one down, from the syncer's site."""
    round_trip_ms: float = 0.0
    measured: str = ""
    """Or a file that `atoll doctor --join LINK --json` wrote in the site: it has all three."""
    price_per_gb: float = 0.0
    """Of traffic, whichever way."""

    def __post_init__(self) -> None:
        try:
            RegionPart.__post_init__(self)
            if self.measured and (self.gbit_s or self.down_gbit_s or self.round_trip_ms):
                raise ConfigError("measured says how wide it is: leave out gbit_s, down_gbit_s and round_trip_ms")
            if not self.measured:
                self.check_above_0("gbit_s")
        except ConfigError as error:
            raise ConfigError(f"link between {' and '.join(self.between)}: {error}") from None

    @property
    def width_up(self) -> float:
        return self.gbit_s

    @property
    def width_down(self) -> float:
        return self.down_gbit_s or self.gbit_s

    @property
    def trip_s(self) -> float:
        return self.round_trip_ms / 1000


class SyncerSite(RegionPart, frozen=True):
    site: str = ""
    """The first site, unless another is named."""
    price_per_hour: float = 0.0
    """Of its machine."""


class Regions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: PlannedModel
    sites: tuple[Site, ...]
    links: tuple[Link, ...] = ()
    syncer: SyncerSite = SyncerSite()
    profile: str = "spot"
    """What sites do not say of their machines: a profile of `atoll simulate goodput`."""

    def __post_init__(self) -> None:
        names = [site.name for site in self.sites]
        if not names:
            raise ConfigError("sites: there is none; write at least one [[sites]]")
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"sites: two are called {name!r}")
        for link in self.links:
            for name in link.between:
                if name not in names:
                    raise ConfigError(f"links: between names {name!r}, which is no site: {', '.join(names)}")
        if self.syncer.site and self.syncer.site not in names:
            raise ConfigError(f"syncer: site = {self.syncer.site!r} is no site: {', '.join(names)}")
        for site in self.remote_sites():
            if self.link_of(site) is None:
                raise ConfigError(
                    f"links: there is none between {site.name!r} and {self.home!r}, where the syncer is; "
                    f'write [[links]] with between = ["{site.name}", "{self.home}"]'
                )

    @property
    def home(self) -> str:
        """The syncer's site."""
        return self.syncer.site or self.sites[0].name

    def site(self, name: str) -> Site:
        return next(site for site in self.sites if site.name == name)

    def remote_sites(self) -> list[Site]:
        return [site for site in self.sites if site.name != self.home]

    def link_of(self, site: Site) -> Link | None:
        """To the syncer's site; None: it is that one."""
        pair = {site.name, self.home}
        return next((link for link in self.links if set(link.between) == pair and len(pair) == 2), None)


def convert_regions(document: dict[str, Any]) -> Regions:
    """ConfigError: names the key."""
    try:
        return msgspec.convert(document, Regions)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from None
        text, _, place = str(error).partition(" - at `$")
        key = place.rstrip("`").lstrip(".")
        raise ConfigError(f"{key}: {text}" if key else text) from None


def measured_values(document: dict[str, Any]) -> dict[str, float]:
    """What `atoll doctor --join LINK --json` says of a link, as the keys of one."""
    checks = {check.get("name"): check for check in document.get("checks", []) if isinstance(check, dict)}
    found = {}
    for key, name, figure, scale in (
        ("gbit_s", "bandwidth up", "bits_per_s", 1e-9),
        ("down_gbit_s", "bandwidth down", "bits_per_s", 1e-9),
        ("round_trip_ms", "round trip", "median_s", 1e3),
    ):
        value = checks.get(name, {}).get(figure)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"it has no {name!r}: it is not what atoll doctor --join LINK --json prints")
        found[key] = value * scale
    return found
