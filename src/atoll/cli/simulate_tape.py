"""`atoll simulate tape`: a scenario as a file that `atoll train --tape` follows, of faults that are given or drawn."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from atoll.cli.lists import count, number
from atoll.cli.simulate_goodput import profile_of
from atoll.estimate.drawn_tape import draw_tape
from atoll.estimate.profile import Profile
from atoll.protocol.errors import ConfigError
from atoll.protocol.records import AnyRecord, BegunRecord, DrawnRecord, MergedRecord
from atoll.protocol.settings import Settings
from atoll.simulate.scenario import make_tape, parse_fault
from atoll.store.journal import write_tape

RULES = {"fragments": 8, "sync_every": 8, "overlap": 2, "quorum": 1}
"""Where neither the command line nor a profile says anything."""
LATENCY_S = 0.02


def tape(
    *,
    file: Path | None,
    out: Path | None,
    learners: int,
    steps: int,
    seed: int,
    profile: str | None,
    chips: str | None,
    slices: int | None,
    set_: list[str],
    fault: list[str],
    step_s: str | None,
    latency_s: float | None,
    fragments: int | None,
    sync_every: int | None,
    overlap: int | None,
    quorum: int | None,
    warm_start: float | None,
) -> None:
    if file is not None and out is not None:
        raise ConfigError(f"{file} and --out {out}: name one file to write")
    if steps < 1:
        raise ConfigError(f"--steps {steps}: a tape needs an end; give it 1 or more")
    rules = {"fragments": fragments, "sync_every": sync_every, "overlap": overlap, "quorum": quorum}
    if profile is None:
        if chips is not None or slices is not None or set_:
            raise ConfigError("--chips, --slices and --set are of a cluster: add --profile paper, or leave them out")
        given = {key: value for key, value in {**rules, "warm_start": warm_start}.items() if value is not None}
        settings = Settings(learners=learners, steps=steps, cut_every=0, **(RULES | given))  # type: ignore[arg-type]
        name, lines = "scenario", _play_scenario(settings, step_s or "1", latency_s, fault, seed)
    else:
        if fault:
            raise ConfigError(f"--profile {profile} draws the faults: leave --fault out")
        values = {f"rules.{key}": value for key, value in {**rules, "latency_s": latency_s}.items()}
        values |= {"slices": slices, "step_s": number("--step-s", step_s) if step_s else None}
        cluster = profile_of(profile, set_, values)
        name, lines = _draw(profile, cluster, chips, learners, steps, seed, warm_start or 0.0)
    path = file or out or Path(f"{name}.tape")
    write_tape(path, lines)
    _print_tape(path, lines)


def _play_scenario(
    settings: Settings, step_s: str, latency_s: float | None, fault: list[str], seed: int
) -> list[AnyRecord]:
    return make_tape(
        settings.resolved(settings.fragments),
        step_s=_speeds(step_s, settings.learners),
        faults=[parse_fault(text, settings.learners) for text in fault],
        seed=seed,
        latency_s=LATENCY_S if latency_s is None else latency_s,
    )


def _draw(
    profile: str, cluster: Profile, chips: str | None, learners: int, steps: int, seed: int, warm_start: float
) -> tuple[str, list[AnyRecord]]:
    """What to call it, and the records."""
    if chips is None:
        raise ConfigError(f"--profile {profile}: say how many chips there are that may fail, as in --chips 1.2M")
    name, size = Path(profile).stem, count("--chips", chips)
    lines = draw_tape(name, cluster, learners=learners, chips=size, steps=steps, seed=seed, warm_start=warm_start)
    return f"{name}-{size}-chips-{learners}-learners-seed-{seed}", lines


def _print_tape(path: Path, lines: list[AnyRecord]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    begun, drawn = lines[:2]
    assert isinstance(begun, BegunRecord)
    rounds = sum(isinstance(line, MergedRecord) for line in lines)
    console.print(f"{path}: {rounds} rounds of {begun.settings.learners} learners, {path.stat().st_size:,} bytes")
    if isinstance(drawn, DrawnRecord):
        console.print(drawn.describe())
        console.print(f"constants: {drawn.provenance}", style="dim")


def _speeds(text: str, learners: int) -> list[float]:
    try:
        speeds = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--step-s {text}: write seconds, as in 1 or 1,1,2.5") from None
    if len(speeds) not in (1, learners) or not all(0 < seconds < float("inf") for seconds in speeds):
        raise ConfigError(f"--step-s {text}: give one number above 0, or {learners} of them")
    return speeds * learners if len(speeds) == 1 else speeds
