"""`atoll syncer` and `atoll learn`: the parts of a run, started by hand."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from atoll.cli.app import app, close, document_of, short
from atoll.config import convert, merged
from atoll.fabric.client import checked_url
from atoll.launch.local import RUNNER, script_arguments
from atoll.observe import dashboard
from atoll.store.atomic import write_atomic
from atoll.store.rundir import RunDir, checked_name
from atoll.syncer.process import serve


@app.command()
def syncer(
    out: Annotated[Path | None, typer.Option(help="The run's folder.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings from a TOML file.")] = None,
    learners: Annotated[int | None, typer.Option(help="M: how many learners the run is meant for.")] = None,
    steps: Annotated[int | None, typer.Option(help="End after this many learner steps.")] = None,
    tokens: Annotated[int | None, typer.Option(help="End after this many tokens in all.")] = None,
    quorum: Annotated[int | None, typer.Option(help="K: the fewest learners of a round.")] = None,
    port: Annotated[int, typer.Option(help="Where to listen; 0 for any.")] = 7077,
    force: Annotated[bool, typer.Option("--force", help="Replace a run that lies there.")] = False,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.", metavar="DIR")] = None,
    standby: Annotated[
        Path | None, typer.Option(help="Wait for the turn to serve the run in this folder.", metavar="DIR")
    ] = None,
) -> None:
    """Start a syncer by hand; learners join with `atoll learn`. Ctrl-C ends the run in good order.

    Examples:

      atoll syncer --learners 2 --steps 500 --port 7077

      atoll syncer --standby atoll-runs/20260101-120000 --port 7078
    """
    if resume is not None or standby is not None:
        _serve_again(resume or standby, port, waits=standby is not None)
        return
    changes: dict[str, dict[str, Any]] = {
        "protocol": {"learners": learners, "steps": steps, "tokens": tokens, "quorum": quorum},
        "service": {"port": port},
    }
    settings = convert(merged(document_of(config), changes), str(config or "the command line"))
    run_dir = RunDir.create(out, force=force)
    write_atomic(run_dir.settings, settings.toml())
    console = Console()

    def ready(url: str) -> None:
        console.print(f"syncer at [bold]{url}[/], run in {short(run_dir.path)}", soft_wrap=True)
        console.print(f"dashboard: {url}/", soft_wrap=True)
        console.print(f"join with: atoll learn SCRIPT --syncer {url}", soft_wrap=True)

    code = serve(settings, run_dir, evaluated=False, ready=ready, pages=dashboard.pages)
    if code:
        raise typer.Exit(code)
    close(run_dir, console)


def _serve_again(folder: Path | None, port: int, *, waits: bool) -> None:
    """A run that lies there already: at once, or when the syncer that serves it is gone or stands still."""
    assert folder is not None
    run_dir, console = RunDir.open(folder), Console()
    settings = convert(merged(document_of(run_dir.settings), {"service": {"port": port}}), str(run_dir.settings))

    def ready(url: str) -> None:
        console.print(f"syncer at [bold]{url}[/], run in {short(run_dir.path)}", soft_wrap=True)
        console.print(f"dashboard: {url}/", soft_wrap=True)

    def waiting() -> None:
        console.print(f"standing by for the run in {short(run_dir.path)}", soft_wrap=True)

    code = serve(
        settings,
        run_dir,
        evaluated=False,
        standby=waiting if waits else None,
        ready=ready,
        pages=dashboard.pages,
    )
    if code:
        raise typer.Exit(code)
    close(run_dir, console)


@app.command(context_settings={"allow_extra_args": True})
def learn(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Your training script, which uses atoll.Learner.")],
    syncer: Annotated[str, typer.Option(help="Where the syncer listens; several with commas.", envvar="ATOLL_SYNCER")],
    name: Annotated[
        str | None,
        typer.Option(help="Its own in the run; by default this machine and process.", envvar="ATOLL_LEARNER"),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where it saves its part of cuts: learners/NAME of the run's folder.", envvar="ATOLL_FOLDER"),
    ] = None,
    evaluator: Annotated[
        bool, typer.Option("--evaluator", help="Score the global model instead (atoll.evaluate).")
    ] = False,
) -> None:
    """Run a training script as one learner of a run that somebody else started.

    Example:

      atoll learn my_script.py --syncer http://127.0.0.1:7077 --name learner-0
    """
    arguments = script_arguments(script, context.args)
    os.environ["ATOLL_SYNCER"] = ",".join(checked_url(one) for one in syncer.split(","))
    os.environ["ATOLL_LEARNER"] = checked_name(name or _own_name())
    os.environ["ATOLL_ROLE"] = "evaluator" if evaluator else "learner"
    if folder is not None:
        os.environ["ATOLL_FOLDER"] = str(folder.absolute())
    os.execv(sys.executable, [sys.executable, *RUNNER, *arguments])


def _own_name() -> str:
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")
    return f"{host[:40] or 'learner'}-{os.getpid()}"
