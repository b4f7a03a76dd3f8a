"""Commands that look at a run, check it, or change its settings: status, dashboard, verify, export, set, drain."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from atoll.cli.app import address_of, app, short, where
from atoll.fabric.client import get_json
from atoll.fabric.transfer import make_dashboard_link, post_drain, post_settings
from atoll.fabric.way import without_secrets
from atoll.observe.export import export_run
from atoll.observe.screen import Screen
from atoll.observe.verify import verify_run
from atoll.protocol.errors import RunFailed, Unreachable
from atoll.store.rundir import newest_run
from atoll.telemetry.status import RunStatus


@app.command()
def status(
    run: Annotated[str, typer.Argument(help="A run's folder, or the address of its syncer.")],
    watch: Annotated[bool, typer.Option("--watch", help="Stay and follow it.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """See how a run is doing.

    Example:

      atoll status atoll-runs/first --watch
    """
    url = where(run)
    try:
        now = asyncio.run(_status(url))
    except Unreachable as error:
        hint = "is the run over? Then its figures are in summary.json of its folder"
        raise Unreachable(f"no syncer answers at {without_secrets(url)}: {hint}") from error
    if json_:
        print(msgspec.json.encode(now).decode())
    elif watch:
        asyncio.run(_follow(url))
    else:
        with Screen(Console()) as screen:
            screen.update(now)


async def _status(url: str) -> RunStatus:
    return msgspec.convert(await get_json(url, "/v1/status"), RunStatus)


async def _follow(url: str) -> None:
    with Screen(Console()) as screen:
        while True:
            try:
                screen.update(await _status(url))
            except Unreachable:
                return
            await asyncio.sleep(0.5)


@app.command()
def dashboard(
    run: Annotated[str, typer.Argument(help="A run's folder, the address of its syncer, or a link with a token.")],
) -> None:
    """Print a link to the dashboard. It opens in one browser, once, within a day: ask for another for another one.

    Example:

      atoll dashboard atoll-runs/first
    """
    print(asyncio.run(make_dashboard_link(where(run))))


@app.command()
def drain(
    learner: Annotated[str, typer.Argument(help="Its name in the run.")],
    run: Annotated[
        str | None,
        typer.Option(help="The run's folder, or a link with an operator's token; by default the newest run here."),
    ] = None,
) -> None:
    """Let one learner leave without loss: its last steps are collected, then it goes. Ctrl-C there does the same.

    The run goes on without it; if it was the last, until somebody comes.

    Example:

      atoll drain learner-2 --run atoll-runs/first
    """
    place = where(run) if run is not None else address_of(newest_run())
    print(asyncio.run(post_drain(place, learner)))


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Check a run from its files alone: journal, versions, weights, ledger, leases, cuts, parameters.

    Exit code 0: all is well. 1: something is wrong, and the first such thing is named.

    Example:

      atoll verify atoll-runs/first
    """
    console = Console(stderr=json_)
    with console.status("reading") as status:
        report = verify_run(run, progress=lambda what, number: status.update(f"{what} {number:,}"))
    if json_:
        print(msgspec.json.encode(report.document()).decode())
    else:
        table = Table.grid(padding=(0, 2))
        for name, value in report.rows():
            table.add_row(f"[dim]{name}[/]", value)
        console.print(table)
        for remark in report.remarks:
            console.print(f"note: {remark}", soft_wrap=True, highlight=False)
        if report.ok:
            console.print("[green]all is well[/]")
    if not report.ok:
        raise RunFailed(report.problem)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    out: Annotated[Path, typer.Argument(help="A .safetensors file, or a folder for it and the settings.")],
    cut: Annotated[int | None, typer.Option(help="What this cut holds, instead of the newest version.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what lies there.")] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="With frozen parameters and buffers, as the first learner has them.")
    ] = False,
) -> None:
    """Write the weights of a run as safetensors, also while it runs or after it was killed.

    Example:

      atoll export atoll-runs/first model.safetensors
    """
    done = export_run(run, out, cut, force=force, whole=whole)
    console = Console()
    for remark in done.remarks:
        console.print(f"note: {remark}", soft_wrap=True, highlight=False)
    where = f"cut {done.cut} and {done.replayed} rounds behind it" if done.replayed else f"cut {done.cut}"
    console.print(
        f"run {done.run} after {done.round:,} rounds ({where}) is in {short(done.file)}",
        soft_wrap=True,
        highlight=False,
    )


@app.command(name="set")
def set_(
    run: Annotated[str, typer.Argument(help="A run's folder, or the address of its syncer.")],
    words: Annotated[list[str], typer.Argument(help="What changes, as key=value.", metavar="KEY=VALUE...")],
) -> None:
    """Change settings of a run while it goes on; they are journaled like its rounds.

    Example:

      atoll set atoll-runs/first quorum=2 outer_lr=0.5
    """
    url = where(run)
    try:
        changed = asyncio.run(post_settings(url, words))
    except Unreachable as error:
        raise Unreachable(
            f"no syncer answers at {without_secrets(url)}: settings change while a run goes on, or with --resume"
        ) from error
    Console().print(f"changed: {changed}" if changed else "everything was like that already", highlight=False)
