"""`atoll simulate goodput`: what a cluster gives under failures, by each way of training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import tomli_w
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from atoll.cli.lists import counts, words
from atoll.cli.rows import one_form, print_csv, print_json
from atoll.cli.simulate import simulate
from atoll.estimate import profile as profiles
from atoll.estimate.goodput import METHODS, Cell, Job, Method, cells, experiments, live
from atoll.estimate.profile import Profile
from atoll.observe import clusters, plots
from atoll.protocol.errors import ConfigError
from atoll.simulate import worker_pool

CLUSTER, RULES, OUTPUT = "The cluster", "The rules", "Output"


@simulate.command()
def goodput(
    profile: Annotated[
        str, typer.Option(help="paper, spot, or FILE.toml of your own.", rich_help_panel=CLUSTER)
    ] = "paper",
    learners: Annotated[
        str, typer.Option(help="M, a list: 1 is the cluster that steps together.", rich_help_panel=CLUSTER)
    ] = "1,2,4,8,16",
    chips: Annotated[
        str, typer.Option(help="Chips of the whole cluster, a list.", rich_help_panel=CLUSTER)
    ] = "150k,300k,600k,1.2M,2.4M",
    slices: Annotated[
        int | None, typer.Option(help="What fails as a whole: machines, pods.", rich_help_panel=CLUSTER)
    ] = None,
    step_s: Annotated[float | None, typer.Option(help="Seconds of a step.", rich_help_panel=CLUSTER)] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Any other key of the profile: preemption.every_s=43200.",
            metavar="KEY=VALUE",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    show_profile: Annotated[
        bool, typer.Option("--show-profile", help="Print the profile as TOML and end.", rich_help_panel=CLUSTER)
    ] = False,
    methods: Annotated[
        str,
        typer.Option(
            help="Of data-parallel, elastic-data-parallel, synchronous-diloco, streaming-diloco, decoupled.",
            rich_help_panel=RULES,
        ),
    ] = "data-parallel,elastic-data-parallel,decoupled",
    quorum: Annotated[int | None, typer.Option(help="K.", rich_help_panel=RULES)] = None,
    grace: Annotated[bool | None, typer.Option("--grace/--no-grace", help="Grace.", rich_help_panel=RULES)] = None,
    hours: Annotated[float, typer.Option(help="Simulated time of each experiment.", rich_help_panel=RULES)] = 48.0,
    seeds: Annotated[int, typer.Option(help="Experiments per cell.", rich_help_panel=RULES)] = 5,
    rounds: Annotated[
        int,
        typer.Option(
            help="Rounds of each experiment that run through the shipped protocol. 0: none.", rich_help_panel=RULES
        ),
    ] = 100,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.", rich_help_panel=OUTPUT)] = False,
    csv_: Annotated[bool, typer.Option("--csv", help="As CSV.", rich_help_panel=OUTPUT)] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="A heat map over learners and chips.", metavar="FILE.html|png", rich_help_panel=OUTPUT),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="The learners of the last cell as lanes in time, with their failures.",
            metavar="FILE.html|png",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """What a cluster gives under failures: goodput, uptime, participation, merged share, tokens, where time is lost.

    Chips fail, slices leave and return, learners scale down and up or stand still; between them the shipped protocol
    runs the rounds. M = 1 is one data-parallel job over all chips, without and with elasticity. Intervals are for the
    mean, 95 %, over the seeds. Merged is the share of the work done that got into the model, of all learners
    and of the slowest one; speed.spread=1 makes the slowest learner take twice as long as the fastest.

    Examples:

      atoll simulate goodput --learners 1,4,16 --chips 150k,2.4M

      atoll simulate goodput --profile spot --learners 1,4,8,16 --chips 512

      atoll simulate goodput --set preemption.every_s=21600 --plot goodput.html

      atoll simulate goodput --learners 4 --chips 150k --rounds 400 --set speed.spread=1
    """
    one_form(json_, csv_)
    for file in (plot, timeline):
        if file is not None:
            plots.check(file)  # before the work, not after it
    chosen = profile_of(
        profile, set_, {"slices": slices, "step_s": step_s, "rules.quorum": quorum, "rules.grace": grace}
    )
    if show_profile:
        print(tomli_w.dumps(msgspec.to_builtins(chosen)), end="")
        return
    if seeds < 1 or rounds < 0:
        raise ConfigError(f"--seeds {seeds} --rounds {rounds}: take at least 1 seed, and 0 rounds or more")
    jobs = experiments(
        chosen, _methods(methods), _sizes("--learners", learners), _sizes("--chips", chips), hours=hours, rounds=rounds
    )
    if not jobs:
        raise ConfigError(
            f"--learners {learners} --methods {methods}: nothing is left; M = 1 is data-parallel, M > 1 the rest"
        )
    found = run_all(jobs, seeds)
    if json_:
        print_json(found)
    elif csv_:
        print_csv(clusters.rows(found))
    else:
        _print(found, chosen)
    if plot is not None:
        plots.write(clusters.heat(found, chosen), plot)
    if timeline is not None:
        plots.write(clusters.lanes(jobs[-1], live(jobs[-1])[1]), timeline)


def profile_of(name: str, set_: list[str] | None, values: dict[str, Any]) -> Profile:
    """The profile of that name with what the command line says instead."""
    given = dict(values)
    for text in set_ or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: write KEY=VALUE, as in preemption.every_s=43200")
        given[key.strip()] = _value(value.strip())
    found = profiles.with_values(profiles.load(name), given)
    told = ", ".join(f"{key} = {value}" for key, value in given.items() if value is not None)
    return profiles.with_values(found, {"provenance": f"{found.provenance}; here with {told}"}) if told else found


def _value(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _methods(text: str) -> list[Method]:
    chosen = words("--methods", text)
    if unknown := [name for name in chosen if name not in METHODS]:
        raise ConfigError(f"--methods: there is no {unknown[0]!r}; take from {', '.join(METHODS)}")
    return [method for method in METHODS if method in chosen]


def _sizes(option: str, text: str) -> list[int]:
    sizes = counts(option, text)
    if least := [size for size in sizes if size < 1]:
        raise ConfigError(f"{option} {text}: {least[0]} is too small, the least is 1")
    return list(dict.fromkeys(sizes))


def run_all(jobs: list[Job], seeds: int) -> list[Cell]:
    columns = (TextColumn("experiments"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("experiments", total=len(jobs) * seeds)
        return cells(
            jobs, seeds, workers=worker_pool.cores(), progress=lambda done, of: progress.update(task, completed=done)
        )


def _print(found: list[Cell], profile: Profile) -> None:
    console = Console()
    for table in clusters.tables(found):
        console.print(table)
    console.print(f"constants: {profile.provenance}", style="dim", highlight=False)
