"""`atoll report`: a run on one page."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console

from atoll.cli.shared import short
from atoll.observe.report import write_report


def report(run: Path, out: Path | None, json_: bool) -> None:
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
