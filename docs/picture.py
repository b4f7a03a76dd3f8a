"""A picture of a live run's screen, for the README: `python docs/picture.py RUN_FOLDER docs/screen.svg COMMAND`."""

from __future__ import annotations

import asyncio
import io
import re
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from atoll.fabric.transfer import get_json
from atoll.observe.screen import EventTail, LiveScreen
from atoll.store.rundir import RunDir
from atoll.telemetry.status import RunStatus


def main(folder: str, picture: str, command: str) -> None:
    run = RunDir(Path(folder).absolute())
    status = msgspec.convert(asyncio.run(get_json(run.address.read_text(), "/v1/status")), RunStatus)
    console = Console(record=True, width=100, height=30, file=io.StringIO(), force_terminal=True)
    events = EventTail(run.events).read_new()
    screen = LiveScreen(console)
    screen.count_work(events)
    screen.update(status, events)
    console.print(screen.render())
    svg = console.export_svg(title=command)
    Path(picture).write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))  # no fonts from elsewhere


if __name__ == "__main__":
    main(*sys.argv[1:])
