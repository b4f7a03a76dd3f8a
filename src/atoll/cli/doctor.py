"""`atoll doctor`: what would go wrong here."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from atoll.cli.app import app, where
from atoll.observe.doctor import Check, examine
from atoll.observe.figures import plain
from atoll.store.rundir import RUNS

LOOKS = {"ok": ("✓", "green"), "warn": ("!", "bold yellow"), "fail": ("✗", "bold red")}
NAME = 14
"""The longest name of a check."""


@app.command()
def doctor(
    syncer: Annotated[
        str | None,
        typer.Option(help="Also the way to this syncer: its address, or a run's folder.", metavar="URL|DIR"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where runs would be written.", metavar="DIR")] = RUNS,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say what would go wrong here: Python, torch, kernels, memory, disk, network, clock.

    Takes some seconds; writes 64 MiB to the disk and removes them. Exit code 0: nothing fails. 1: something does.

    Examples:

      atoll doctor

      atoll doctor --syncer http://127.0.0.1:7077 --out /data/runs
    """
    url = where(syncer) if syncer else None
    console = Console(stderr=json_)
    found: list[Check] = []
    with console.status("looking") as status:
        for check in examine(out, url, announce=lambda what: status.update(f"looking at {what}")):
            found.append(check)
            if not json_:
                console.print(_row(check))
    counts: Counter[str] = Counter(check.verdict for check in found)
    if json_:
        told = {"ok": not counts["fail"], "checks": [check.document() for check in found]}
        print(msgspec.json.format(msgspec.json.encode(told)).decode())
    else:
        console.print(_closing(counts))
    if counts["fail"]:
        raise typer.Exit(1)


def _row(check: Check) -> Table:
    """A line for the finding, and one for the next step where there is one."""
    sign, colour = LOOKS[check.verdict]
    row = Table.grid(padding=(0, 1))
    row.add_column(width=1)
    row.add_column(width=NAME, no_wrap=True)
    row.add_column()
    row.add_row(Text(sign, colour), Text(check.name, "dim"), Text(plain(check.value)))
    if check.next:
        row.add_row("", "", Text(f"→ {plain(check.next)}", colour if check.verdict == "fail" else "yellow"))
    return row


def _closing(counts: Counter[str]) -> Text:
    if counts["fail"]:
        return Text(f"{counts['fail']} of {counts.total()} checks fail: a run would not go well here.", "bold red")
    if counts["warn"]:
        return Text(f"Nothing fails; {counts['warn']} of {counts.total()} are worth a look.", "yellow")
    return Text("All is well.", "green")
