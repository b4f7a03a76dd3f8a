"""`atoll simulate tape`: a failure scenario as a file that `atoll train --tape` follows."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from atoll.protocol.errors import ConfigError
from atoll.protocol.records import Merged
from atoll.protocol.settings import Settings
from atoll.simulate.scenario import make_tape, parse_fault
from atoll.store.journal import write_tape


def tape(
    *,
    out: Path,
    learners: int,
    steps: int,
    fragments: int,
    sync_every: int,
    overlap: int,
    quorum: int,
    step_s: str,
    latency_s: float,
    fault: list[str],
    seed: int,
) -> None:
    settings = Settings(
        learners=learners,
        steps=steps,
        fragments=fragments,
        sync_every=sync_every,
        overlap=overlap,
        quorum=quorum,
        cut_every=0,
    ).resolved(fragments)
    if steps < 1:
        raise ConfigError(f"--steps {steps}: a tape needs an end; give it 1 or more")
    speeds = _speeds(step_s, learners)
    faults = [parse_fault(text, learners) for text in fault]
    lines = make_tape(settings, step_s=speeds, faults=faults, seed=seed, latency_s=latency_s)
    write_tape(out, lines)
    rounds = sum(isinstance(line, Merged) for line in lines)
    Console(highlight=False).print(f"{out}: {rounds} rounds of {learners} learners, {out.stat().st_size:,} bytes")


def _speeds(text: str, learners: int) -> list[float]:
    try:
        speeds = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--step-s {text}: write seconds, as in 1 or 1,1,2.5") from None
    if len(speeds) not in (1, learners) or not all(0 < seconds < float("inf") for seconds in speeds):
        raise ConfigError(f"--step-s {text}: give one number above 0, or {learners} of them")
    return speeds * learners if len(speeds) == 1 else speeds
