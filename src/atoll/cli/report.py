"""`atoll report`: a run on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from atoll.cli.app import app, find_run, short
from atoll.observe.report import write_report


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run's folder.", metavar="RUN", callback=find_run)],
    out: Annotated[Path | None, typer.Option(help="The page; default DIR/report.html.", metavar="FILE.html")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Also print the figures as JSON.")] = False,
) -> None:
    """Write one page about a run: figures, timeline, losses, faults, ledger.

    The page needs nothing but itself. It also comes of a run that is going on or was killed, and says so at its top.

    Example:

      atoll report atoll-runs/first
    """
    console = Console(stderr=json_)
    with console.status("drawing"):
        found, path = write_report(run, out)
    if json_:
        told = {"report": str(path), "state": found.state, "missing": found.missing, "summary": found.summary}
        print(msgspec.json.format(msgspec.json.encode(told)).decode())
        return
    state = (
        "" if found.state == "ended" else f" (the run {'is going on' if found.state == 'going on' else 'was cut off'})"
    )
    console.print(f"the report{state} is in {short(path)}", soft_wrap=True, highlight=False, markup=False)
