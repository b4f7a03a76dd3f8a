"""Fitting a profile's free constants to a table of goodput and uptime.

A table is CSV: `method,learners,chips,goodput,uptime`, the last two in percent, either of them empty where nothing is
known. The search turns one constant after another, by factors that grow finer, and keeps what lowers the mean error;
all experiments use the same seeds, so that a step's difference is the constant's and not the dice's.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from statistics import fmean

import msgspec

from atoll.estimate.goodput import METHODS, Cell, Job, Method, gather, run
from atoll.estimate.profile import Profile, with_values
from atoll.protocol.errors import ConfigError

FACTORS = (1.25, 1.1, 1.04, 1.015)
FREE = ("elasticity.down_s+elasticity.up_s", "elasticity.outage_s", "failures.scale_s")
"""What the paper leaves open. Keys joined by + are turned together: the table does not tell them apart."""


class Known(msgspec.Struct, frozen=True):
    """A line of the table; in fractions."""

    method: Method
    learners: int
    chips: int
    goodput: float | None
    uptime: float | None


class Miss(msgspec.Struct, frozen=True):
    """One cell beside what the simulator gives, in points."""

    method: Method
    learners: int
    chips: int
    figure: str
    known: float
    simulated: float

    @property
    def error(self) -> float:
        return 100 * (self.simulated - self.known)


class Fit(msgspec.Struct, frozen=True):
    profile: Profile
    misses: tuple[Miss, ...]

    @property
    def mean(self) -> float:
        return fmean([abs(miss.error) for miss in self.misses])

    @property
    def worst(self) -> float:
        return max(abs(miss.error) for miss in self.misses)


def published() -> list[Known]:
    """The cells of arXiv 2604.21428 that were at hand."""
    file = resources.files("atoll.estimate") / "profiles" / "paper.csv"
    return parse(file.read_text(), "the published table")


def read(path: Path) -> list[Known]:
    try:
        return parse(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the table {path}: {error}") from error


def parse(text: str, name: str) -> list[Known]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    known = [_line(row, f"{name}, line {number}") for number, row in enumerate(csv.DictReader(lines), 2)]
    if not any(one.goodput is not None or one.uptime is not None for one in known):
        raise ConfigError(
            f"{name} has no figure to fit to: write method,learners,chips,goodput,uptime and lines below it"
        )
    return known


def _line(row: dict[str, str | None], where: str) -> Known:
    try:
        method, learners, chips = row["method"], int(row["learners"] or ""), int(row["chips"] or "")
        goodput, uptime = _share(row.get("goodput")), _share(row.get("uptime"))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{where}: {error} is not understood; write method,learners,chips,goodput,uptime") from error
    if method not in METHODS:
        raise ConfigError(f"{where}: there is no method {method!r}; take from {', '.join(METHODS)}")
    if not all(value is None or 0 <= value <= 1 for value in (goodput, uptime)):
        raise ConfigError(f"{where}: goodput and uptime are percent, 0 to 100")
    return Known(method, learners, chips, goodput, uptime)


def _share(text: str | None) -> float | None:
    return float(text) / 100 if text and text.strip() else None


def compare(profile: Profile, known: Sequence[Known], *, hours: float, seeds: int) -> Fit:
    """Every known cell beside the simulator's."""
    misses: list[Miss] = []
    for one in known:
        cell = _simulate(Job(profile, one.method, one.learners, one.chips, 0, hours, 0), seeds)
        for figure, value, simulated in (("goodput", one.goodput, cell.goodput), ("uptime", one.uptime, cell.uptime)):
            if value is not None:
                misses.append(Miss(one.method, one.learners, one.chips, figure, value, simulated))
    return Fit(profile, tuple(misses))


def _simulate(job: Job, seeds: int) -> Cell:
    return gather(job, [run(msgspec.structs.replace(job, seed=seed)) for seed in range(seeds)])


def fit(
    profile: Profile,
    known: Sequence[Known],
    free: Sequence[str] = FREE,
    *,
    hours: float,
    seeds: int,
    progress: Callable[[int, int, float], None] = lambda done, of, mean: None,
) -> Fit:
    """The best of what the search came by, and at least as good as the profile it began with."""
    best, turns, done = compare(profile, known, hours=hours, seeds=seeds), 2 * len(free) * len(FACTORS), 0
    for factor in FACTORS:
        for constant in free:
            for turn in (factor, 1 / factor):
                best = _turn(best, known, constant, turn, hours=hours, seeds=seeds)
                done += 1
                progress(done, turns, best.mean)
    return best


def _turn(best: Fit, known: Sequence[Known], constant: str, factor: float, *, hours: float, seeds: int) -> Fit:
    """As far as it helps."""
    while True:
        tried = compare(turned(best.profile, constant, factor), known, hours=hours, seeds=seeds)
        if tried.mean >= best.mean - 1e-9:
            return best
        best = tried


def turned(profile: Profile, constant: str, factor: float) -> Profile:
    return with_values(profile, {key: value_of(profile, key) * factor for key in constant.split("+")})


def value_of(profile: Profile, key: str) -> float:
    place: object = profile
    for name in key.split("."):
        place = getattr(place, name, None)
    if isinstance(place, bool) or not isinstance(place, int | float):
        raise ConfigError(f"{key!r} is no number of a profile that could be fitted: take as in {', '.join(FREE)}")
    return float(place)
