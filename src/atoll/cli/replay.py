"""`atoll replay`: a run once more, bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from atoll.cli.shared import check_workload, compile_kernels, document_of, short
from atoll.config import convert
from atoll.launch.begun_here import check_begun_here
from atoll.launch.environment import read_environment
from atoll.launch.replay.play import RunReplay
from atoll.launch.replay.syncer import ReplayOutcome
from atoll.protocol.errors import ConfigError
from atoll.store.rundir import RunDir


def replay(
    directory: Path,
    script: Path | None,
    arguments: list[str],
    until: int | None,
    cut: int | None,
    jobs: int,
    logs: Path | None,
    json_: bool,
    trust: bool,
) -> None:
    if jobs < 0:
        raise ConfigError(f"--jobs {jobs} is below 0; 0 takes one for each core")
    out = RunDir.open(directory)
    check_begun_here(out, trusted=trust, runs_script=script is None, copies=False, verb="replay")
    config = convert(document_of(out.settings), str(out.settings))
    if script is not None:
        if not script.is_file():
            raise ConfigError(f"there is no script {script}: give the path of a Python file")
        config = msgspec.structs.replace(config, script=(str(script.absolute()), *arguments), by_hand=False)
    elif config.by_hand and not config.script:
        raise ConfigError(
            "the learners of this run were started by hand, so their script is not known here; name it, with its "
            f"arguments: atoll replay {short(out.path)} SCRIPT [-- ARGUMENTS]"
        )
    check_workload(config.script)
    console = Console(stderr=True)
    compile_kernels(console)
    columns = (
        TextColumn("round"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=json_ or not console.is_terminal) as bar:
        task = bar.add_task("replay", total=None, said="starting the learners")

        def watch(outcome: ReplayOutcome, rounds: int) -> None:
            total = rounds if until is None else until + 1
            bar.update(task, total=total, completed=outcome.through + 1, said="bit-identical so far")

        # A script that is named here starts as it would without Atoll: the folder's own words are not used.
        launch = read_environment(out.path) if script is None else None
        outcome = RunReplay(out, config, jobs=jobs, until=until, cut=cut, logs=logs, launch=launch, watch=watch).play()
    if json_:
        print(json.dumps(_as_json(outcome), indent=2))
    else:
        _say(outcome, Console(highlight=False, soft_wrap=True))
    if not outcome.is_identical:
        sys.exit(1)


def _say(outcome: ReplayOutcome, console: Console) -> None:
    for remark in outcome.remarks:
        console.print(f"note: {remark}")
    if rounds := outcome.from_journal:
        console.print(
            f"note: {len(rounds)} rounds were read from the journal and not made again ({_ranges(rounds)}): "
            "a member's steps could not be repeated, or came in a relay's sum"
        )
    if (difference := outcome.difference) is not None:
        console.print(
            f"round {difference.round} differs: fragment {difference.fragment}, version {difference.version}, "
            f"tensor {', '.join(difference.tensors)}"
        )
    if outcome.stopped:
        console.print(f"stopped: {outcome.stopped}")
    if outcome.through >= 0:
        console.print(_verdict(outcome))


def _verdict(outcome: ReplayOutcome) -> str:
    read = len(outcome.from_journal)
    if read and not outcome.made_again:
        return (
            f"no round was made again: {read:,} were read from the journal, through round {outcome.through}, and fit "
            "together; a replay that only reads proves nothing of the training"
        )
    made = f"{outcome.made_again:,} rounds made again, {read:,} read from the journal"
    return f"bit-identical through round {outcome.through}: {made} ({outcome.compared} versions compared)"


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("–".join(map(str, part)) for part in parts)


def _as_json(outcome: ReplayOutcome) -> dict[str, object]:
    difference = outcome.difference
    return {
        "identical": outcome.is_identical,
        "through": outcome.through,
        "compared": outcome.compared,
        "digest": outcome.digest(),
        "made_again": outcome.made_again,
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
