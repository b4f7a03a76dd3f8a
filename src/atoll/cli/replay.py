"""`atoll replay`: a run once more, bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from atoll.cli.app import app, document_of, find_run
from atoll.config import convert
from atoll.launch.replay.conductor import Outcome
from atoll.launch.replay.play import Replay
from atoll.numerics import kernels
from atoll.protocol.errors import ConfigError
from atoll.store.rundir import RunDir


@app.command()
def replay(
    directory: Annotated[Path, typer.Argument(help="The run's folder.", metavar="RUN", callback=find_run)],
    until: Annotated[int | None, typer.Option(help="Stop after this round.")] = None,
    cut: Annotated[int | None, typer.Option("--from-cut", help="Begin with this cut of the run.")] = None,
    jobs: Annotated[int, typer.Option(help="Learners that train at a time; 0: one per core.")] = 0,
    logs: Annotated[Path | None, typer.Option(help="Keep what the scripts print in this folder.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run it again from its tape on this machine, and compare every version.

    The same scripts are told the same things after the same steps, as fast as this machine goes. The exit code is 0
    when everything is bit-identical.

    Examples:

      atoll replay atoll-runs/first

      atoll replay atoll-runs/first --until 200 --jobs 1
    """
    if jobs < 0:
        raise ConfigError(f"--jobs {jobs} is below 0; 0 takes one for each core")
    out = RunDir.open(directory)
    config = convert(document_of(out.settings), str(out.settings))
    kernels.warm()
    console = Console(stderr=True)
    columns = (
        TextColumn("round"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=json_ or not console.is_terminal) as bar:
        task = bar.add_task("replay", total=None, said="starting the learners")

        def watch(outcome: Outcome, rounds: int) -> None:
            total = rounds if until is None else until + 1
            bar.update(task, total=total, completed=outcome.through + 1, said="bit-identical so far")

        outcome = Replay(out, config, jobs=jobs, until=until, cut=cut, logs=logs, watch=watch).play()
    if json_:
        print(json.dumps(_as_json(outcome), indent=2))
    else:
        _say(outcome, Console(highlight=False, soft_wrap=True))
    if outcome.difference is not None or outcome.stopped:
        sys.exit(1)


def _say(outcome: Outcome, console: Console) -> None:
    for remark in outcome.remarks:
        console.print(f"note: {remark}")
    if rounds := outcome.from_journal:
        console.print(
            f"note: {len(rounds)} rounds were taken from the journal and not made again ({_ranges(rounds)}): "
            "a member's steps could not be repeated"
        )
    if (difference := outcome.difference) is not None:
        console.print(
            f"round {difference.round} differs: fragment {difference.fragment}, version {difference.version}, "
            f"tensor {', '.join(difference.tensors)}"
        )
    if outcome.stopped:
        console.print(f"stopped: {outcome.stopped}")
    if outcome.through >= 0:
        console.print(f"bit-identical through round {outcome.through} ({outcome.compared} versions compared)")


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("–".join(map(str, part)) for part in parts)


def _as_json(outcome: Outcome) -> dict[str, object]:
    difference = outcome.difference
    return {
        "identical": difference is None and not outcome.stopped,
        "through": outcome.through,
        "compared": outcome.compared,
        "digest": outcome.digest(),
        "from_journal": outcome.from_journal,
        "difference": None
        if difference is None
        else {
            "round": difference.round,
            "fragment": difference.fragment,
            "version": difference.version,
            "tensors": list(difference.tensors),
        },
        "stopped": outcome.stopped,
        "remarks": outcome.remarks,
    }
