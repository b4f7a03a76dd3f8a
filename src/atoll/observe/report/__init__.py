"""`report.html`: a whole run on one page, for people who were not there.

Read from the run's files alone and written beside them; nothing else of the run is touched. It comes whatever state the
run is in: what a run that was cut off could not say any more is named at the top.
"""

from __future__ import annotations

from pathlib import Path

from atoll.observe.report.page import render
from atoll.observe.report.reading import ReportedRun, read_run
from atoll.protocol.errors import ConfigError
from atoll.store.atomic import write_atomic

__all__ = ["NAME", "ReportedRun", "read_run", "render", "write_report"]

NAME = "report.html"


def write_report(folder: Path, out: Path | None = None) -> tuple[ReportedRun, Path]:
    """What was read, and where the page is."""
    run = read_run(folder)
    path = out or folder / NAME
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: name a file in it, as in {path / NAME}")
    data = render(run)
    try:
        write_atomic(path, data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): name another file with --out") from error
    return run, path
