"""`atoll simulate tape`: a failure scenario as a file that `atoll train --tape` follows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from atoll.cli.simulate import simulate
from atoll.protocol.errors import ConfigError
from atoll.protocol.records import Merged
from atoll.protocol.settings import Settings
from atoll.simulate.scenario import make_tape, parse_fault
from atoll.store.journal import write_tape


@simulate.command()
def tape(
    out: Annotated[Path, typer.Argument(help="The file to write.", metavar="FILE")],
    learners: Annotated[int, typer.Option(help="M: how many learners.")] = 4,
    steps: Annotated[int, typer.Option(help="The run's length in learner steps.")] = 200,
    fragments: Annotated[int, typer.Option(help="P: at most as many as the model has tensors.")] = 8,
    sync_every: Annotated[int, typer.Option(help="H: steps between two syncs of a fragment.")] = 8,
    overlap: Annotated[int, typer.Option(help="τ: steps a fragment may be away.")] = 2,
    quorum: Annotated[int, typer.Option(help="K: the fewest learners of a round.")] = 1,
    step_s: Annotated[str, typer.Option(help="Seconds of a step: one for all, or one for each learner.")] = "1",
    latency_s: Annotated[float, typer.Option(help="Seconds that a message takes.")] = 0.02,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="kill:learner-1@40+20 (at 40 s, for 20 s); crash@60+5 for the syncer.", metavar="FAULT"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is left to chance.")] = 0,
) -> None:
    """Write down who would be in which round, and when everybody would adopt what.

    Kinds of faults: kill, leave, pause, suspend, slow, partition, and crash for the syncer. A learner that is only
    there for a while (scavenged) leaves and comes back.

    Examples:

      atoll simulate tape mixed.tape --learners 4 --step-s 1,1,2,4 --fault kill:learner-1@40+20

      atoll train --tape mixed.tape --out atoll-runs/mixed
    """
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
    faults = [parse_fault(text, learners) for text in fault or ()]
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
